"""Views reach the same entries as lists of positions."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.structured.layout import ParameterSlices


def matrix(rows, columns, *, start=0, groups=1):
    return torch.arange(start, start + groups * rows * columns).view(groups, rows, columns)


CASES = {
    "weight": (matrix(3, 4, start=2), True),
    "weight and bias": (torch.cat([matrix(3, 4), matrix(3, 1, start=12)], -1), True),
    "bias and weight": (torch.cat([matrix(3, 1, start=20), matrix(3, 4)], -1), True),
    "transposed weight and bias": (torch.cat([matrix(4, 3).mT, matrix(3, 1, start=12)], -1), True),
    "groups": (torch.cat([matrix(2, 5, groups=3), matrix(2, 1, groups=3, start=40)], -1), True),
    "one column and bias": (torch.cat([matrix(3, 1), matrix(3, 1, start=3)], -1), True),
    "a vector": (matrix(1, 5, start=3), True),
    "one entry": (matrix(1, 1, start=7), True),
    "rows of a larger matrix": (matrix(4, 6)[:, :, :3], False),
    "every other entry": (torch.tensor([[[0, 2, 4, 6]]]), False),
    "a permutation": (torch.randperm(30, generator=torch.Generator().manual_seed(0)).view(1, 5, 6), False),
    "nearly a range": (torch.tensor([[[0, 1, 2], [3, 5, 4]]]), False),
}


@pytest.mark.parametrize("name", CASES)
def test_gather_scatter_and_add(name):
    index, contiguous = CASES[name]
    placement = ParameterSlices(index)
    assert placement.shape == tuple(index.shape)
    assert bool(placement.slices) == contiguous
    n = int(index.max()) + 3
    for lead in ((), (2,), (2, 3)):
        vector = torch.randn(*lead, n, requires_grad=True)
        found = placement.gather(vector)
        assert torch.equal(found, vector[..., index])
        weights = torch.randn(found.shape)
        (gradient,) = torch.autograd.grad((found * weights).sum(), vector)
        (want,) = torch.autograd.grad((vector[..., index] * weights).sum(), vector)
        assert torch.equal(gradient, want)
    vectors, values = torch.randn(2, n), torch.randn(2, *index.shape)
    scattered, added = vectors.clone(), vectors.clone()
    placement.scatter_(scattered, values)
    placement.add_(added, values)
    want = vectors.clone()
    want[:, index] = values
    assert torch.equal(scattered, want)
    want = vectors.clone()
    want[:, index] += values
    assert torch.equal(added, want)


def test_vectors_need_not_be_contiguous():
    placement = ParameterSlices(CASES["weight and bias"][0])
    vectors, values = torch.zeros(40, 2).T[:, ::2], torch.randn(2, 1, 3, 5)
    placement.scatter_(vectors, values)
    assert torch.equal(placement.gather(vectors), values)
