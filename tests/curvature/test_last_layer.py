"""The short cut for last layers equals the general way, and ignored targets count for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.likelihoods import Categorical

CLASSES = [
    lp.Full,
    lp.Diagonal,
    lp.KFAC,
    lambda *a, **k: lp.KFAC(*a, weight_sharing="reduce", **k),
    lambda *a, **k: lp.KFAC(*a, output_factor="diagonal", **k),
]


def networks():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    pixels = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, padding=1)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randn(6, 2, 3, generator=generator, dtype=torch.float64)
    images = torch.randn(3, 1, 4, 4, generator=generator, dtype=torch.float64)
    yield "examples", dense, Categorical(), x, torch.randint(0, 4, (6,), generator=generator)
    yield "tokens", dense, Categorical(), tokens, torch.randint(0, 4, (6, 2), generator=generator)
    yield "pixels", pixels, Categorical(output_axis=1), images, torch.randint(0, 4, (3, 4, 4), generator=generator)


@pytest.mark.parametrize("make", CLASSES, ids=["full", "diagonal", "expand", "reduce", "diagonal outputs"])
@pytest.mark.parametrize("case", list(networks()), ids=lambda case: case[0])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_short_cut_equals_the_general_way(make, case, ignored, monkeypatch):
    _, model, likelihood, x, y = case
    if ignored:
        y = y.clone().flatten().index_fill(0, torch.tensor([1, 2]), -100).view(y.shape)
    short = make(model, likelihood, parameters="last_layer").fit([(x, y)])
    functional = short.functional_posterior(x)
    monkeypatch.setattr(Categorical, "output_curvature", lambda self, outputs, weight: None)
    general = make(model, likelihood, parameters="last_layer").fit([(x, y)])
    torch.testing.assert_close(short.precision_matrix(), general.precision_matrix(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(short.log_marginal_likelihood(), general.log_marginal_likelihood())
    torch.testing.assert_close(functional.covariance, general.functional_posterior(x).covariance)
    variances = short.functional_posterior(x, outputs="diagonal").covariance
    torch.testing.assert_close(variances, functional.covariance.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("parameters", ["all", "last_layer"])
@pytest.mark.parametrize("corrected", [False, True])
def test_ignored_examples_are_as_if_absent(parameters, corrected):
    _, model, _, x, y = next(networks())
    partly = torch.cat([y[:4], torch.full((2,), -100)])
    options = {"parameters": parameters, "eigenvalue_corrected": corrected}
    some = lp.KFAC(model, "classification", **options).fit([(x, partly)])
    absent = lp.KFAC(model, "classification", **options).fit([(x[:4], y[:4])])
    torch.testing.assert_close(some.precision_matrix(), absent.precision_matrix(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(some.log_marginal_likelihood(), absent.log_marginal_likelihood())


def test_ignored_tokens_of_a_last_layer_are_as_if_absent():
    _, model, _, tokens, y = list(networks())[1]
    y = y.clone()
    y[2:, 1] = -100
    some = lp.KFAC(model, "classification", parameters="last_layer").fit([(tokens, y)])
    kept = y.flatten() != -100
    data = [(tokens.flatten(0, 1)[kept], y.flatten()[kept])]
    flat = lp.KFAC(model, "classification", parameters="last_layer").fit(data)
    torch.testing.assert_close(some.precision_matrix(), flat.precision_matrix(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weight_sharing", ["expand", "reduce"])
def test_only_the_last_layer_gets_a_diagonal_output_factor(weight_sharing):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 4, (6,))
    options = {"weight_sharing": weight_sharing, "prior_precision": 0.5}
    dense = lp.KFAC(net, "classification", **options).fit([(x, y)])
    diagonal = lp.KFAC(net, "classification", output_factor="diagonal", **options).fit([(x[:2], y[:2]), (x[2:], y[2:])])
    treatments = [row[3] for row in diagonal.summary().rows]
    assert ["diagonal output" in treatment for treatment in treatments] == [False, False, True, True]
    first, want = slice(0, 20), dense.precision_matrix()
    got = diagonal.precision_matrix()
    torch.testing.assert_close(got[first, first], want[first, first], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got.diagonal(), want.diagonal(), rtol=1e-12, atol=1e-13)
    weight = slice(20, 36)  # rows of different outputs do not meet
    same = torch.block_diag(*[torch.ones(4, 4)] * 4).bool()
    torch.testing.assert_close(got[weight, weight], want[weight, weight] * same, rtol=1e-12, atol=1e-13)
