"""Checksums show every kind of change to any entry."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.network import checksums


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (), (0,), (502,), (257, 300), (65788,))
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


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("size", [3, 400])  # few and many entries
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_change_with_entries_and_places(layout: torch.layout, size: int) -> None:
    dense = torch.ones(size, size).tril()
    before = checksums([dense.to_sparse(layout=layout)])
    assert checksums([dense.clone().to_sparse(layout=layout)]) == before
    entry, moved = dense.clone(), dense.clone()
    entry[-1, 0] += 1e-3
    moved[-1, :2] = moved[:2, -1] = torch.tensor([0.0, 1.0])
    for changed in (entry, moved, dense.mT):
        assert checksums([changed.to_sparse(layout=layout)]) != before


def test_sparse_tensors_may_hold_entries_in_parts() -> None:
    whole = torch.eye(3).to_sparse()
    parts = torch.sparse_coo_tensor(
        torch.cat([whole.indices()] * 2, 1), torch.cat([whole.values() / 2] * 2), (3, 3), check_invariants=True
    )
    assert checksums([parts]) == checksums([whole])
