"""Quadratic forms with flat eigenvalues against dense products, within the bound that is promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_plus._memory import memory_budget
from laplace_plus.structured import KroneckerBasis, OuterStack, plateaus
from laplace_plus.structured.factor import EigenFactor

V, B, S, ROWS, COLUMNS = 3, 2, 6, 40, 24
DTYPE = torch.float64


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    monkeypatch.setattr(plateaus, "_LEAST", 0)


def orthogonal(size, generator):
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=DTYPE)).Q


def problem(values, seed=0, *, rows=ROWS, columns=COLUMNS, positions=S):
    """A stack, a factor with given eigenvalues ``[o, i]``, and the written-out matrices in the eigenbasis."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(V, B, positions, 1, rows, generator=generator, dtype=DTYPE)
    right = torch.randn(B, positions, 1, columns, generator=generator, dtype=DTYPE)
    basis = KroneckerBasis(orthogonal(rows, generator)[None], orthogonal(columns, generator)[None])
    dense = basis.left[0].mT @ torch.einsum("vbso,bsi->vboi", left[:, :, :, 0], right[:, :, 0]) @ basis.right[0]
    return OuterStack(right, left), EigenFactor(basis, values[None]), dense


def products(rate, prior, *, rows=ROWS, columns=COLUMNS, seed=0):
    """Eigenvalues ``γ_k α_j + δ`` that decay by some rate, in any order."""
    generator = torch.Generator().manual_seed(seed)
    left = (rate ** torch.arange(rows, dtype=DTYPE))[torch.randperm(rows, generator=generator)]
    right = (rate ** torch.arange(columns, dtype=DTYPE))[torch.randperm(columns, generator=generator)]
    return left[:, None] * right + prior


def covariance(dense, values):
    return torch.einsum("vboi,oi,wboi->bvw", dense, values.reciprocal(), dense)


def chosen(factor):
    """The plateau that was used."""
    (plateau,) = factor._plateaus.values()
    assert plateau is not None
    return plateau


def apart(plateau):
    """Which entries, in order, are not on the plateau ``[o, i]``."""
    m, r, stairs = plateau.n_rows, plateau.n_columns, plateau.stairs
    result = torch.zeros(plateau.values.shape, dtype=torch.bool)
    result[:m] = result[:, :r] = True
    blocks = [(slice(start, stop), slice(r, last)) for start, stop, last in stairs.panels]
    below = stairs.panels[-1][1] if stairs.panels else m
    blocks += [(slice(below, last), slice(start, stop)) for start, stop, last in stairs.groups]
    for block in blocks:
        assert not result[block].any()  # nothing is subtracted twice
        result[block] = True
    return result


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.data())
def test_a_reflection_gives_the_complement(size, data):
    count = data.draw(st.integers(0, size))
    kind = data.draw(st.sampled_from(["generic", "permuted", "negative"]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 5)))
    vectors = orthogonal(size, generator)
    if kind != "generic":  # dead units leave eigenvectors with a single entry
        vectors = torch.eye(size, dtype=DTYPE)[torch.randperm(size, generator=generator)]
    vectors = (-vectors if kind == "negative" else vectors)[:, :count]
    leading, mix = plateaus.reflection(vectors)
    complement = plateaus.complement_rows(leading, mix, torch.eye(size, dtype=DTYPE))
    torch.testing.assert_close(leading.abs(), vectors.abs())
    torch.testing.assert_close(
        torch.cat([leading, complement], 1).mT @ torch.cat([leading, complement], 1), torch.eye(size, dtype=DTYPE)
    )


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("prior", [1.0, 1e3])
def test_flat_eigenvalues_change_nothing_in_float64(rate, prior):
    values = products(rate, prior)
    stack, factor, dense = problem(values)
    want = covariance(dense, values)
    torch.testing.assert_close(factor.quadratic(stack, "full"), want, rtol=1e-12, atol=0)
    plateau = chosen(factor)
    assert plateau.n_rows < ROWS
    diagonal = factor.quadratic(stack, "diagonal")
    torch.testing.assert_close(diagonal, want.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=0)
    with memory_budget(2**16):  # a few examples or one at a time
        torch.testing.assert_close(factor.quadratic(stack, "full"), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("n_rows", "n_columns"), [(0, 0), (0, 8), (16, 0), (16, 8), (32, 16)])
def test_every_part_of_the_form(n_rows, n_columns):
    # Eigenvalues that are no products, as corrected ones are: all but a corner differ.
    generator = torch.Generator().manual_seed(1)
    values = 2 + torch.rand(ROWS, COLUMNS, generator=generator, dtype=DTYPE)
    values[n_rows:, n_columns:] = 1.0
    rows, columns = torch.randperm(ROWS, generator=generator), torch.randperm(COLUMNS, generator=generator)
    values = values[rows][:, columns]
    stack, factor, dense = problem(values)
    vectors = factor.basis.left[0], factor.basis.right[0]
    order = plateaus.Plateau(rows.argsort(), columns.argsort(), n_rows, n_columns, *vectors, values)
    want = covariance(dense, values)
    torch.testing.assert_close(order.quadratic(stack, "full"), want, rtol=1e-12, atol=1e-12)
    want = want.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(order.quadratic(stack, "diagonal"), want, rtol=1e-12, atol=1e-12)


STAIRS = {
    "none": ((), ()),
    "panels": (((16, 24, 24), (24, 30, 16)), ()),
    "groups": ((), ((8, 13, 40), (13, 20, 24))),
    "both": (((16, 20, 24), (20, 22, 17)), ((8, 10, 36), (10, 16, 30))),
}


@pytest.mark.parametrize("kind", STAIRS)
@pytest.mark.parametrize("mode", ["full", "diagonal"])
def test_a_staircase_is_subtracted(monkeypatch, kind, mode):
    monkeypatch.setattr(plateaus, "_GROUP", 3)  # the first columns in more than one piece
    generator = torch.Generator().manual_seed(4)
    rows, columns = torch.randperm(ROWS, generator=generator), torch.randperm(COLUMNS, generator=generator)
    stairs = plateaus.Staircase(*STAIRS[kind])
    ordered = torch.ones(ROWS, COLUMNS, dtype=DTYPE)
    order = plateaus.Plateau(rows.argsort(), columns.argsort(), 16, 8, ordered, ordered, ordered, stairs)
    differ = apart(order)
    ordered[differ] += torch.rand(int(differ.sum()), generator=generator, dtype=DTYPE)
    ordered[:16] *= 50
    ordered[:, :8] *= 20
    values = ordered[rows][:, columns]
    stack, factor, dense = problem(values)
    vectors = factor.basis.left[0], factor.basis.right[0]

    def quadratic(stairs):
        return plateaus.Plateau(rows.argsort(), columns.argsort(), 16, 8, *vectors, values, stairs).quadratic(
            stack, mode
        )

    want = covariance(dense, values)
    want = want if mode == "full" else want.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(quadratic(stairs), want, rtol=1e-12, atol=1e-12)
    with memory_budget(2**16):
        torch.testing.assert_close(quadratic(stairs), want, rtol=1e-12, atol=1e-12)
    for part in ("panels", "groups"):
        if getattr(stairs, part):
            assert float((quadratic(replace(stairs, **{part: ()})) / want - 1).abs().max()) > 1e-3


@pytest.mark.parametrize("prior", [1e-2, 1e-1])
def test_a_staircase_is_chosen_where_it_is_less_work_and_takes_little_away(monkeypatch, prior):
    for name, size in {"_STEP": 1, "_PANEL": 2, "_GROUP": 3, "_STEEP": 8}.items():
        monkeypatch.setattr(plateaus, name, size)
    values = products(0.2, prior, rows=96, columns=64)
    stack, factor, dense = problem(values, rows=96, columns=64, positions=12)
    want = covariance(dense, values)
    torch.testing.assert_close(factor.quadratic(stack, "full"), want, rtol=1e-12, atol=1e-12 / prior)
    plateau = chosen(factor)
    assert plateau.n_rows
    assert plateau.stairs.panels
    assert plateau.stairs.groups
    ordered = values[plateau.rows][:, plateau.columns]
    plain = ordered[plateau.n_rows :, plateau.n_columns :]
    assert float(plain.max() / ordered.min()) <= 2
    flat = ordered[~apart(plateau)]
    assert float(flat.max() / flat.min()) <= 1 + 2 * plateaus.ROUNDINGS * torch.finfo(DTYPE).eps
    # In float32 no variance loses more than it would in a sum of positive terms.
    single = EigenFactor(KroneckerBasis(factor.basis.left.float(), factor.basis.right.float()), factor.values.float())
    got = single.quadratic(stack.in_dtype(torch.float32), "diagonal").double()
    assert chosen(single).stairs.panels or chosen(single).stairs.groups
    torch.testing.assert_close(got, want.diagonal(dim1=1, dim2=2), rtol=1e-5, atol=0)


def test_a_staircase_may_take_the_whole_plain():
    values = 1 + torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5), dtype=DTYPE)
    stack, factor, dense = problem(values)
    vectors, orders = (factor.basis.left[0], factor.basis.right[0]), (torch.arange(ROWS), torch.arange(COLUMNS))
    whole = plateaus.Staircase(((0, 20, COLUMNS),), ((0, COLUMNS, ROWS),))
    plateau = plateaus.Plateau(*orders, 0, 0, *vectors, values, whole)
    torch.testing.assert_close(plateau.quadratic(stack, "full"), covariance(dense, values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("roundings", [1e9, 1e12, 1e13])
def test_no_variance_is_off_by_more_than_the_bound(monkeypatch, roundings):
    bound = roundings * torch.finfo(DTYPE).eps
    monkeypatch.setattr(plateaus, "ROUNDINGS", roundings)
    values = products(0.5, 1.0)
    stack, factor, dense = problem(values)
    want = covariance(dense, values)
    error = (factor.quadratic(stack, "full") - want).abs()
    deviations = want.diagonal(dim1=1, dim2=2).sqrt()
    assert float((error / (deviations[:, :, None] * deviations[:, None])).max()) < bound * (1 + 1e-6)
    assert float(error.max()) > 1e-13  # the plateau is not exactly flat
    flat = values[chosen(factor).rows][:, chosen(factor).columns][~apart(chosen(factor))]
    assert float(flat.max() / flat.min()) <= 1 + 2 * bound


def test_in_float32_the_result_is_as_good_as_without():
    values = products(0.5, 1.0)
    stack, factor, dense = problem(values)
    single = EigenFactor(KroneckerBasis(factor.basis.left.float(), factor.basis.right.float()), factor.values.float())
    got = single.quadratic(stack.in_dtype(torch.float32), "full").double()
    want = covariance(dense, values)
    deviations = want.diagonal(dim1=1, dim2=2).sqrt()
    assert chosen(single).n_rows < 32
    assert float(((got - want).abs() / (deviations[:, :, None] * deviations[:, None])).max()) < 1e-5


def test_eigenvalues_that_differ_have_no_plateau():
    generator = torch.Generator().manual_seed(2)
    values = 1 + torch.rand(ROWS, COLUMNS, generator=generator, dtype=DTYPE)
    stack, factor, dense = problem(values)
    torch.testing.assert_close(factor.quadratic(stack, "full"), covariance(dense, values))
    assert list(factor._plateaus.values()) == [None]


def test_small_stacks_and_recorded_ones_have_no_plateau(monkeypatch):
    values = products(0.05, 1.0)
    stack, factor, _ = problem(values)
    left = stack.raw_left.clone().requires_grad_()
    (found,) = torch.autograd.grad(factor.quadratic(OuterStack(stack.raw_right, left), "full").sum(), left)
    assert not factor._plateaus
    matrix = (factor.basis.left[0] @ values.reciprocal().sqrt()) @ factor.basis.right[0].mT  # any direction will do
    step = 1e-5 * matrix.mean(1).expand_as(left)
    ends = [factor.quadratic(OuterStack(stack.raw_right, stack.raw_left + sign * step), "full") for sign in (1, -1)]
    torch.testing.assert_close((found * step).sum(), (ends[0] - ends[1]).sum() / 2)
    factor._plateaus.clear()
    monkeypatch.setattr(plateaus, "_LEAST", 2**20)
    factor.quadratic(stack, "full")
    assert list(factor._plateaus.values()) == [None]


def test_sequences_of_similar_lengths_share_a_plateau():
    values = products(0.3, 1.0)
    _, factor, _ = problem(values)
    generator = torch.Generator().manual_seed(3)
    for length in range(40, 70):
        left = torch.randn(V, 1, length, 1, ROWS, generator=generator, dtype=DTYPE)
        right = torch.randn(1, length, 1, COLUMNS, generator=generator, dtype=DTYPE)
        turned = factor.basis.rotate(OuterStack(right, left))
        want = turned.quadratic(factor.values.reciprocal(), "full")
        torch.testing.assert_close(factor.weigh(turned, "full"), want)
    assert 1 <= len(factor._plateaus) <= 3
