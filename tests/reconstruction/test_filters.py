"""Filter priors against dense covariances."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.applications.reconstruction import FilterCovariance
from laplace_plus.applications.reconstruction.filters import Filters
from laplace_plus.errors import ConfigurationError, SelectionError
from laplace_plus.network.network import Network

DOUBLE = {"dtype": torch.float64}


def layers():
    """Every kind of layer that has filters, and some that have none."""
    return nn.ModuleDict(
        {
            "one": nn.Conv1d(2, 3, 4),
            "two": nn.Conv2d(4, 2, 3, groups=2),
            "three": nn.Conv3d(1, 2, 2, bias=False),
            "up": nn.ConvTranspose2d(2, 3, (2, 3)),
            "point": nn.Conv2d(2, 2, 1),
            "line": nn.Linear(3, 2),
        }
    ).double()


def filters_of(model, blocks=None, parameters="all"):
    return Filters(Network(model, parameters, lambda out: out), blocks)


def dense(model, prior, names, block=lambda name: name.partition(".")[0]):
    """Λ⁻¹ entry by entry, from the definition."""
    found, length, variance = [], *prior.values()
    for name, parameter in model.named_parameters():
        number = names.index(block(name))
        ell, v = (float(value if value.ndim == 0 else value[number]) for value in (length, variance))
        taps = [(0,)]
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear) is False and parameter.ndim > 2:
            taps = torch.cartesian_prod(*map(torch.arange, parameter.shape[2:])).view(-1, parameter.ndim - 2).tolist()
        own = torch.zeros(len(taps), len(taps), **DOUBLE)
        for i, p in enumerate(taps):
            for j, q in enumerate(taps):
                distance = sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) ** 0.5
                kernel = torch.tensor(-distance / ell if ell else 0.0, **DOUBLE).exp() if i == j or ell else 0.0
                own[i, j] = v * (kernel + 1e-6 * (i == j))
        found += [own] * (parameter.numel() // len(taps))
    return torch.block_diag(*found)


def multiplied(filters, prior, n):
    return filters.product(torch.eye(n, **DOUBLE), torch.eye(n, **DOUBLE), filters.coefficients(prior))


@pytest.mark.parametrize("length", [0.7, torch.tensor([0.3, 1.0, 2.0, 0.0, 1.0, 5.0])])
def test_the_covariance_is_that_of_the_definition(length):
    model = layers()
    prior = FilterCovariance(length, torch.arange(1.0, 7.0, **DOUBLE))
    filters = filters_of(model)
    expected = dense(model, prior, filters.names)
    torch.testing.assert_close(multiplied(filters, prior, len(expected)), expected, rtol=1e-13, atol=1e-15)


def test_products_of_rows_are_those_of_the_dense_covariance():
    model = layers()
    filters = filters_of(model, lambda name: "ab"[name.startswith("t")])
    assert filters.names == ("a", "b")
    prior = FilterCovariance(torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.1]))
    expected = dense(model, prior, filters.names, lambda name: "ab"[name.startswith("t")])
    rows = torch.randn(7, len(expected), generator=torch.Generator().manual_seed(0), **DOUBLE)
    coefficients = filters.coefficients(prior)
    gram = rows @ expected @ rows.mT
    torch.testing.assert_close((coefficients @ filters.grams(rows).flatten(1)).view(7, 7), gram)
    torch.testing.assert_close(coefficients @ filters.grams(rows, diagonal=True), gram.diagonal())
    torch.testing.assert_close(filters.product(rows[:3], rows, coefficients), gram[:3])
    torch.testing.assert_close(
        filters.by_block(filters.grams(rows, diagonal=True).mT * coefficients).sum(-1), gram.diagonal()
    )


def test_rows_in_float32_are_multiplied_in_float64():
    filters = filters_of(layers())
    rows = torch.randn(5, 150)[:, : sum(p.numel() for p in layers().parameters())]
    ours = filters.grams(rows)
    assert ours.dtype == torch.float64
    assert torch.equal(ours, filters.grams(rows.double()))


@pytest.mark.parametrize("length", [0.0, 1e-3])
def test_without_length_it_is_a_scalar_prior(length):
    model = layers()
    n = sum(p.numel() for p in model.parameters())
    found = multiplied(filters_of(model), FilterCovariance(length, 2.0), n)
    torch.testing.assert_close(found, 2.0 * (1 + 1e-6) * torch.eye(n, **DOUBLE), rtol=1e-15, atol=0)


def test_filters_of_one_tap_have_a_scalar_prior_whatever_the_length():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Linear(3, 2)).double()
    filters = filters_of(model)
    assert not filters.correlated.any() and len(filters.blocks) == 2
    found = multiplied(filters, FilterCovariance(3.0, 2.0), 17)
    torch.testing.assert_close(found, 2.0 * (1 + 1e-6) * torch.eye(17, **DOUBLE), rtol=1e-15, atol=0)


def test_derivatives_by_hyperparameters():
    filters = filters_of(nn.Conv2d(1, 1, 3).double())

    def function(length, variance):
        return filters.coefficients(FilterCovariance(length, variance))

    inputs = [torch.tensor([value], requires_grad=True, **DOUBLE) for value in (0.8, 1.7)]
    assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)
    zero = torch.zeros(1, requires_grad=True, **DOUBLE)
    (gradient,) = torch.autograd.grad(function(zero, inputs[1]).sum(), zero)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("arguments", [(-1.0,), (1.0, 0.0), (float("nan"),), (1.0, float("inf")), (1.0, [])])
def test_bad_hyperparameters(arguments):
    with pytest.raises(ConfigurationError, match="out of range"):
        FilterCovariance(*arguments)


def test_other_bad_arguments():
    filters = filters_of(layers())
    with pytest.raises(ConfigurationError, match="one for each block: one, two, three"):
        filters.coefficients(FilterCovariance(torch.ones(4)))
    model = nn.Conv2d(1, 1, 3)
    mask = torch.ones(10, dtype=torch.bool)
    mask[4] = False
    with pytest.raises(SelectionError, match="left out"):
        filters_of(model, parameters=mask)


def test_the_top_level_has_it():
    assert lp.reconstruction.FilterCovariance is FilterCovariance
