"""Determinants from prepared spectra equal the sums over all eigenvalues, and so do all their derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.structured import DiagonalBlock
from laplace_plus.structured.log_determinants import CHUNK, Spectrum, log_determinant

WEIGHTS = [1e-8, 0.3, 1e6]
SHIFTS = [1e-12, 1e-3, 1.0, 1e8]


def number(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


ONE = torch.ones(1, 1)


def prepared(left, right=ONE):
    """``log det(w H + δ I)`` from a prepared spectrum, as a function of w and δ."""
    spectrum, size = Spectrum.of(left, right), left.numel() * right.shape[1]
    return lambda weight, shift: size * shift.log() + spectrum.log_ratio(weight, shift)


def spread_out(*shape, seed=0):
    """Positive numbers over some twenty orders of magnitude, and zeros."""
    values = (6 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).exp()
    return torch.where(values < 1e-3, 0.0, values)


def assert_agrees(found, values, weight, shift):
    """Value and both derivatives against the sum over all eigenvalues in float64."""
    terms = weight * values.double() + shift
    scale = terms.detach().log().abs().sum()
    assert abs(found.item() - terms.log().sum().item()) <= 1e-13 * scale
    want = torch.autograd.grad(terms.log().sum(), (weight, shift))
    got = torch.autograd.grad(found, (weight, shift))
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_nodes_stand_for_all_eigenvalues(weight, shift):
    values = spread_out(30_000)
    assert len(Spectrum.of(values.view(1, -1), ONE).nodes) < 1500
    weight, shift = number(weight), number(shift)
    assert_agrees(prepared(values.view(1, -1))(weight, shift), values, weight, shift)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_products_are_never_written_out(weight, shift):
    rows, columns = spread_out(90), spread_out(2000, seed=1)
    assert len(Spectrum.of(rows[None], columns[None]).nodes) < 2000
    weight, shift = number(weight), number(shift)
    assert_agrees(prepared(rows[None], columns[None])(weight, shift), rows[:, None] * columns, weight, shift)


def test_groups_share_a_side():
    rows, columns = spread_out(3, 90), spread_out(1, 200, seed=1)
    weight, shift = number(0.7), number(2.0)
    assert_agrees(prepared(rows, columns)(weight, shift), rows[:, :, None] * columns, weight, shift)


def test_blocks_with_shifts_of_their_own_are_joined():
    values = [spread_out(1, 400, seed=seed) for seed in range(4)]
    spectra, groups = [Spectrum.of(own, ONE) for own in values], [2, 0, 2, 3]
    weight, shifts = number(0.7), number([0.3, 1.0, 1e3, 2e-4])
    found = Spectrum.joined(spectra, groups).log_ratio(weight, shifts)
    want = sum(torch.log1p(weight * own / shifts[at]).sum() for own, at in zip(values, groups, strict=True))
    torch.testing.assert_close(found, want, rtol=1e-13, atol=0)
    for mine, exact in zip(
        torch.autograd.grad(found, (weight, shifts)), torch.autograd.grad(want, (weight, shifts)), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=0)


def test_long_spectra_are_condensed_in_parts():
    values = spread_out(16 * CHUNK + 500).float()
    weight, shift = number(0.7), number(2.0)
    assert_agrees(prepared(values[None])(weight, shift), values, weight, shift)


def test_extreme_eigenvalues():
    """All of one size, all zero, none at all, and the ends of what float32 holds."""
    weight, shift = number(2.0), number(0.5)
    for values in (torch.full((5000,), 3.0), torch.zeros(7), torch.tensor([1e-45, 1e-38, 3e38] * 2000)):
        assert_agrees(prepared(values.view(1, -1))(weight, shift), values, weight, shift)
    assert prepared(torch.zeros(1, 0))(weight, shift) == 0


def test_further_derivatives():
    weight, shift = number(1.3), number(0.4)
    values = spread_out(6000)
    assert torch.autograd.gradcheck(prepared(values.view(1, -1)), (weight, shift))
    assert torch.autograd.gradgradcheck(prepared(values.view(1, -1)), (weight, shift))
    few = spread_out(2, 5).clamp(1e-2, 1e2)
    shifts = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 0.5
    weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
    for inputs in ((weights, shift.detach()), (weights, shifts)):
        inputs = tuple(x.clone().requires_grad_() for x in inputs)
        assert torch.autograd.gradcheck(lambda w, d: log_determinant(few, w, d), inputs)
        assert torch.autograd.gradgradcheck(lambda w, d: log_determinant(few, w, d), inputs)


@pytest.mark.parametrize("per_entry", [False, True])
@pytest.mark.parametrize("components", [1, 3])
def test_one_pass_over_float32_eigenvalues(components, per_entry):
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(components, CHUNK + 777, generator=generator)
    weights = torch.rand(components, generator=generator, dtype=torch.float64).requires_grad_()
    shift = torch.rand(CHUNK + 777 if per_entry else (), generator=generator, dtype=torch.float64).requires_grad_()
    want = (weights @ values.double() + shift).log().sum()
    found = log_determinant(values, weights, shift)
    torch.testing.assert_close(found, want, rtol=1e-13, atol=0)
    for mine, exact in zip(
        torch.autograd.grad(found, (weights, shift)), torch.autograd.grad(want, (weights, shift)), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=0)


def test_only_the_derivatives_that_are_asked_for():
    values, shift = spread_out(3, 50), number(1.0)
    log_determinant(values, torch.ones(3), shift).backward()
    torch.testing.assert_close(shift.grad, (values.sum(0) + 1).reciprocal().sum(), rtol=1e-13, atol=0)


def test_what_is_not_positive_is_named():
    indefinite = DiagonalBlock(torch.tensor([-1.0, 2.0]).view(1, 1, 1, 2))
    assert indefinite.log_determinant(torch.tensor([2.0]), torch.tensor(3.0)).item() == pytest.approx(math.log(7))
    with pytest.raises(NotPositiveDefiniteError, match="-1"):
        indefinite.log_determinant(torch.tensor([2.0]), torch.tensor(1.0))
    with pytest.raises(NotPositiveDefiniteError, match="nan"):
        log_determinant(torch.tensor([[1.0, torch.nan]]), torch.ones(1), torch.ones(()))
    with pytest.raises(NotPositiveDefiniteError, match="0"):
        DiagonalBlock(torch.ones(1, 1, 1, 3)).log_determinant(torch.ones(1), torch.zeros(()))
