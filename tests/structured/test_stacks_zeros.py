"""Positions whose output gradients are zero are left out, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.structured import DiagonalBlock, KroneckerBasis, OuterGradients
from laplace_plus.structured.factor import EigenFactor

V, B, S, G, ROWS, COLUMNS = 3, 4, 5, 2, 3, 4
USED = [[], [2], [0, 3], [0, 1, 2, 4], [0, 1, 2, 3, 4]]


def sides(used, groups=G):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(V, B, S, groups, ROWS, generator=generator, dtype=torch.float64)
    right = torch.randn(B, S, groups, COLUMNS, generator=generator, dtype=torch.float64)
    unused = [place for place in range(S) if place not in used]
    left[:, :, unused] = 0
    return left, right


@pytest.mark.parametrize("used", USED)
def test_positions_of_zeros_are_left_out(used):
    left, right = sides(used)
    dense = torch.einsum("vbsgo,bsgi->vbgoi", left, right)
    stack = OuterGradients(right, left)
    some = stack.without_zeros()
    assert some.n_positions == max(1, len(used)) and some.shape == stack.shape
    torch.testing.assert_close(some.dense(slice(None)), dense)
    torch.testing.assert_close(some.select(torch.tensor([2, 0])).dense(slice(1, 3)), dense[[2, 0], 1:3])
    # Channels first and expanded late, as in a convolution.
    late = OuterGradients(
        right.flip(1),
        left.permute(0, 1, 3, 4, 2).contiguous(),
        expand_right=lambda raw: raw.flip(1),
        expand_left=lambda raw: raw.permute(0, 1, 4, 2, 3),
    )
    torch.testing.assert_close(late.without_zeros().dense(slice(None)), dense)
    total = torch.ones(G, ROWS, COLUMNS, dtype=torch.float64)
    late.add_squares_(total)
    torch.testing.assert_close(total, 1 + dense.square().sum((0, 1)))


def test_zeros_of_some_matrices_alone_stay():
    left, right = sides(range(S))
    left[0] = 0
    left[:, 0] = 0
    left[1, 1, 3] = 0
    stack = OuterGradients(right, left)
    assert stack.without_zeros() is stack


def test_a_row_that_is_not_finite_is_not_zero():
    left, right = sides([1])
    left[0, 0, 3, 0, 0] = torch.nan
    assert OuterGradients(right, left).without_zeros().n_positions == 2


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("mode", ["full", "diagonal", "joint"])
def test_quadratic_forms_stay_the_same(used, mode):
    left, right = sides(used, 1)
    generator = torch.Generator().manual_seed(1)
    values = 0.1 + torch.rand(1, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    turns = [torch.linalg.qr(torch.randn(1, n, n, generator=generator, dtype=torch.float64)).Q for n in (ROWS, COLUMNS)]
    one = torch.ones(1, dtype=torch.float64)
    for factor in (
        EigenFactor(KroneckerBasis(*turns), values),
        DiagonalBlock(values[None]).factor(one, torch.tensor(0.3, dtype=torch.float64)),
    ):
        dense = torch.einsum("vbso,bsi->vboi", left[:, :, :, 0], right[:, :, 0])
        matrix = factor.covariance()[0]
        joint = torch.einsum("vbp,pq,wcq->bvcw", dense.flatten(2), matrix, dense.flatten(2))
        own = torch.einsum("bvbw->bvw", joint)
        want = {"joint": joint, "full": own, "diagonal": own.diagonal(dim1=1, dim2=2)}[mode]
        torch.testing.assert_close(factor.quadratic(OuterGradients(right, left), mode), want)


def test_derivatives_at_zero_are_kept():
    left, right = sides([2], 1)
    left.requires_grad_()
    stack = OuterGradients(right, left)
    assert stack.without_zeros() is stack
    weights = torch.ones(1, ROWS, COLUMNS, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(stack.quadratic(weights, "full").sum(), left)
    assert bool((gradient[:, :, 0] != 0).any())
