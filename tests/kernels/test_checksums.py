"""Checksums show every kind of change to any entry."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.kernels import checksums
from laplace_plus.kernels.checksums import _ROWS, _SMALL


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (), (0,), (_ROWS * 2,), (257, 300), (_SMALL + _ROWS + 1,))
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*drawn, torch.tensor(7), torch.arange(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_the_same_each_time(dtype):
    assert checksums(tensors(dtype)) == checksums([tensor.clone() for tensor in tensors(dtype)])


@pytest.mark.parametrize("which", [0, 1, 3, 4, 5, 6, 7])
def test_any_entry_counts(which):
    before = checksums(tensors())
    for position in {0, tensors()[which].numel() // 2, tensors()[which].numel() - 1}:
        changed = tensors()
        flat = changed[which].view(-1)
        flat[position] += 1e-3 if flat.is_floating_point() else 1
        assert checksums(changed) != before


@pytest.mark.parametrize("which", [0, 3, 4, 5, 7])
def test_permutations_count(which):
    before = checksums(tensors())
    for distance in (1, -1):  # neighbours, and the two ends
        changed = tensors()
        flat = changed[which].view(-1)
        flat[0], flat[distance] = flat[distance].clone(), flat[0].clone()
        assert checksums(changed) != before
    swapped = tensors()
    if swapped[which].ndim == 2:
        swapped[which] = swapped[which].flip(0)
        assert checksums(swapped) != before
