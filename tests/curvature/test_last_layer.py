"""The short cut for last layers equals the general way, and ignored targets count for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.likelihoods import Categorical
from laplace_plus.network.capture import Capture
from laplace_plus.network.linearization import jvp

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


@pytest.mark.diagonal
@pytest.mark.parametrize("make", CLASSES, ids=["full", "diagonal", "expand", "reduce", "diagonal outputs"])
@pytest.mark.parametrize("case", list(networks()), ids=lambda case: case[0])
@pytest.mark.parametrize("ignored", [False, True])
def test_the_short_cut_equals_the_general_way(make, case, ignored, monkeypatch):
    _, model, likelihood, x, y = case
    if ignored:
        y = y.clone().flatten().index_fill(0, torch.tensor([1, 2]), -100).view(y.shape)
    short = make(model, likelihood, parameters="last_layer").fit([(x, y)])
    functional = short.functional_posterior(x)
    monkeypatch.setattr(Categorical, "output_curvature", lambda self, *_: None)
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


# -- heads in other forms ----------------------------------------------------------------------------------------------


class Pixels(nn.Module):
    """Four classes for each of 4 × 5 pixels, by a head in one of several forms that all have the same weights."""

    def __init__(self, is_convolution, rearranged):
        super().__init__()
        torch.manual_seed(0)
        self.body, head = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3, 4)
        self.head, self.rearranged = nn.Conv2d(3, 4, 1) if is_convolution else head, rearranged
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(head.parameters()), self.head.parameters())

    def forward(self, x):
        features = torch.tanh(self.body(x))
        is_convolution = isinstance(self.head, nn.Conv2d)
        return self.rearranged(self.head(features if is_convolution else features.permute(0, 2, 3, 1)))


def same(y):
    return y


def pixels():
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(4, (3, 4, 5), generator=generator)
    y[0, 0, :2] = -100
    return torch.randn(3, 2, 4, 5, generator=generator, dtype=torch.float64), y


# Of each form: whether the head is a convolution, what follows it, the axis of classes, and the order of positions.
FORMS = {
    "convolution": (True, same, 1, same),
    "permuted": (True, lambda t: t.permute(0, 2, 3, 1), -1, same),
    "rows": (True, lambda t: t.permute(0, 2, 3, 1).contiguous().view(len(t), -1, 4), -1, lambda y: y.flatten(1, 2)),
    "flat": (True, lambda t: t.flatten(2), 1, lambda y: y.flatten(1, 2)),
    "movedim": (False, lambda t: t.movedim(-1, 1), 1, same),
    "squeezed": (False, lambda t: torch.squeeze(t[:, None], 1), -1, same),
    "transposed": (True, lambda t: t.transpose(2, 3), 1, lambda y: y.transpose(1, 2)),
    "transposed rows": (
        *(True, lambda t: torch.reshape(t.mT, (len(t), 4, 20)), 1),
        lambda y: y.transpose(1, 2).flatten(1, 2),
    ),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("make", CLASSES[:3], ids=["full", "diagonal", "KFAC"])
@pytest.mark.parametrize("form", FORMS)
def test_heads_of_every_form_are_those_of_a_plain_linear_head(make, form):
    is_convolution, rearranged, axis, moved = FORMS[form]
    x, y = pixels()
    plain = make(Pixels(False, same).double(), "classification", parameters="last_layer").fit([(x, y)])
    model, likelihood = Pixels(is_convolution, rearranged).double(), Categorical(output_axis=axis)
    posterior = make(model, likelihood, parameters="last_layer").fit([(x[:1], moved(y)[:1]), (x[1:], moved(y)[1:])])
    assert Capture(posterior.network, x).pointwise
    torch.testing.assert_close(posterior.log_marginal_likelihood(), plain.log_marginal_likelihood())
    wanted, found = plain.functional_posterior(x), posterior.functional_posterior(x)
    torch.testing.assert_close(found.mean, moved(wanted.mean))
    torch.testing.assert_close(found.covariance, moved(wanted.covariance))
    torch.testing.assert_close(posterior.predictive(x).mean, moved(plain.predictive(x).mean))
    best = found.mean.topk(2).indices
    variances = posterior.functional_posterior(x, outputs=best).covariance.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variances, found.covariance.diagonal(dim1=-2, dim2=-1).gather(-1, best))
    sampled = make(model, likelihood, parameters="last_layer", backend=lp.Native("ggn_mc"))
    assert torch.isfinite(sampled.fit([(x, moved(y))]).log_marginal_likelihood())


def times_two_in_place(t):
    rows = t.view(3, -1, 4)
    t.mul_(2)
    return rows


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        (lambda t: t.mul_(2), lambda t: t * 2),
        (times_two_in_place, lambda t: t.view(3, -1, 4) * 2),
        (lambda t: t[..., [1, 0, 2, 3]], lambda t: torch.stack([t[..., k] for k in (1, 0, 2, 3)], -1)),
        (lambda t: t[:, :, :4], lambda t: t.narrow(2, 0, 4)),
    ],
    ids=["in place", "in place behind a view", "features moved", "some positions"],
)
def test_heads_whose_outputs_change_are_not_taken_for_the_networks_own(other, wanted):
    x, y = pixels()
    found = []
    for after in (other, wanted):
        model = Pixels(False, after).double()
        labels = y.reshape(model(x).shape[:-1]) if model(x).numel() == 4 * y.numel() else y[..., :4]
        likelihood = lp.Categorical(output_axis=-1)  # four positions of four classes, whose labels are drawn
        posterior = lp.Full(model, likelihood, parameters="last_layer").fit([(x, labels)])
        assert not Capture(posterior.network, x).pointwise
        found.append((posterior.log_marginal_likelihood(), posterior.functional_posterior(x).covariance))
    torch.testing.assert_close(*found)


class Language(nn.Module):
    """Tokens to tokens, with a table that the head shares or not."""

    def __init__(self, is_tied):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight if is_tied else nn.Parameter(self.table.weight.detach().clone())

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.table(x).cumsum(1))))


@pytest.mark.parametrize("make", CLASSES, ids=["full", "diagonal", "expand", "reduce", "diagonal outputs"])
def test_a_tied_head_alone_is_the_last_layer(make, tmp_path):
    x = torch.randint(7, (5, 3), generator=torch.Generator().manual_seed(1))
    data, found = [(x, x.roll(1, 1))], []
    for is_tied in (True, False):
        model = Language(is_tied).double()
        posterior = make(model, "classification", parameters="last_layer").fit(data)
        assert posterior.parameter_names == ("head.weight",)
        posterior.save(tmp_path / str(is_tied))
        loaded = lp.load(tmp_path / str(is_tied), model)
        generator = torch.Generator().manual_seed(0)
        found.append(
            [
                posterior.log_marginal_likelihood(),
                posterior.functional_posterior(x),
                loaded.functional_posterior(x),
                posterior.predictive(x, method="sampled", n_samples=3, generator=generator).mean,
                jvp(posterior.network, x, posterior.mean + 1),
            ]
        )
        assert Capture(loaded.network, x).pointwise
    torch.testing.assert_close(*found)
