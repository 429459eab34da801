"""Every stack against its own written-out matrices, whatever the chunk size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_plus.structured import DenseGradients, EmbeddingGradients, OuterGradients
from laplace_plus.structured import chunks as chunking
from laplace_plus.structured.gradients import JoinedGradients, MappedGradients, SelectedGradients, concatenate
from laplace_plus.structured.gradients import outer as outer_stacks

EVERY = slice(None)


def outer(v, b, s, g, o, i, generator):
    left = torch.randn(v, b, s, g, o, generator=generator, dtype=torch.float64)
    right = torch.randn(b, s, g, i, generator=generator, dtype=torch.float64)
    return OuterGradients(right, left), torch.einsum("vbsgo,bsgi->vbgoi", left, right)


def one_hot(v, b, s, o, i, generator):
    index = torch.randint(0, i, (b, s), generator=generator)
    left = torch.randn(v, b, s, o, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.one_hot(index, i).double()
    return EmbeddingGradients(index, left, i), torch.einsum("vbso,bsi->vboi", left, unit)[:, :, None]


def cases(v, b, s, g, o, i, seed):
    generator = torch.Generator().manual_seed(seed)
    yield outer(v, b, s, g, o, i, generator)
    yield outer(v, b, 1, g, o, i, generator)
    yield one_hot(v, b, s, o, i, generator)
    stack, dense = outer(v, b, s, g, o, i, generator)
    yield DenseGradients(dense), dense
    kept = torch.arange(0, g * o * i, 2)
    yield SelectedGradients(stack, kept), dense.flatten(2)[..., kept][:, :, None, None]
    other, other_dense = one_hot(v, b, s, o, i, generator)
    order = torch.randperm(g * o * i + o * i, generator=generator)
    joined = JoinedGradients([(stack, order[: g * o * i]), (other, order[g * o * i :])], len(order))
    whole = torch.empty(v, b, len(order), dtype=torch.float64)
    whole[..., order] = torch.cat([dense.flatten(2), other_dense.flatten(2)], -1)
    yield joined, whole[:, :, None, None]
    matrix = torch.randn(g, o * i, o * i, generator=generator, dtype=torch.float64)
    yield MappedGradients(stack, matrix), (dense.flatten(3)[..., None, :] @ matrix).squeeze(-2).view_as(dense)
    second, second_dense = outer(v, b, 2, g, o, i, generator)
    yield concatenate([stack, second]), dense + second_dense


sizes = st.integers(1, 3)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, sizes, st.sampled_from([1, 300, 10**9]), st.integers(0, 99))
def test_a_stack_is_its_matrices(v, b, s, g, o, i, chunk_bytes, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "CACHE_BYTES", chunk_bytes)
        for stack, dense in cases(v, b, s, g, o, i, seed):
            assert stack.shape == tuple(dense.shape[2:])
            torch.testing.assert_close(stack.dense(EVERY), dense)
            torch.testing.assert_close(torch.cat([values for _, values in stack.chunks()], 1), dense)
            torch.testing.assert_close(stack.squares(), dense.square().sum((0, 1)))
            weights = torch.rand(stack.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            joint = torch.einsum("vbgoi,goi,wcgoi->bvcw", dense, weights, dense)
            torch.testing.assert_close(stack.quadratic(weights, "joint"), joint)
            own = torch.einsum("bvbw->bvw", joint)
            torch.testing.assert_close(stack.quadratic(weights, "full"), own)
            torch.testing.assert_close(stack.quadratic(weights, "diagonal"), own.diagonal(dim1=1, dim2=2))
            last = torch.tensor([v - 1])
            torch.testing.assert_close(stack.select(last).dense(EVERY), dense[-1:])
            others = torch.randn(3, *stack.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            torch.testing.assert_close(stack.project(others), torch.einsum("vbgoi,rgoi->vbr", dense, others))
            single = stack.in_dtype(torch.float32)
            assert single.dtype is torch.float32
            torch.testing.assert_close(single.dense(EVERY), dense.float(), rtol=1e-4, atol=1e-5)


def test_half_precision_is_summed_in_float32():
    left = torch.full((1, 4096, 1, 1, 1), 0.1, dtype=torch.bfloat16)
    right = torch.ones(4096, 1, 1, 1, dtype=torch.bfloat16)
    squares = OuterGradients(right, left).squares()
    assert squares.dtype is torch.float32
    torch.testing.assert_close(squares.item(), 4096 * left[0, 0].float().item() ** 2, rtol=1e-5, atol=0)


@settings(max_examples=25, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, sizes, st.booleans(), st.sampled_from([1, 10**9]), st.integers(0, 99))
def test_entries_by_rows_are_those_of_the_matrices(v, b, s, g, o, i, one_right, chunk_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    stack, dense = outer(v, b, s, g, o, i, generator)
    if one_right:
        right = stack.raw_right[:, :, :1]
        stack, dense = (
            OuterGradients(right, stack.raw_left),
            torch.einsum("vbsgo,bsi->vbgoi", stack.raw_left, right[:, :, 0]),
        )
    some = torch.randperm(g * o * i, generator=generator)[: max(1, g * o * i // 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "CACHE_BYTES", chunk_bytes)
        for few in (0, 10**9):
            patch.setattr(outer_stacks, "_FEW", few)
            for examples in (EVERY, slice(b // 2, b), slice(0, 0)):
                expected = dense[:, examples].flatten(2)[..., some]
                torch.testing.assert_close(stack.entries(examples, some), expected, rtol=1e-12, atol=1e-12)


def test_few_entries_are_had_without_the_matrices(monkeypatch):
    stack, dense = outer(2, 3, 4, 1, 30, 40, torch.Generator().manual_seed(0))
    monkeypatch.setattr(OuterGradients, "dense", None)
    some = torch.tensor([1199, 0, 41, 40, 600])
    torch.testing.assert_close(SelectedGradients(stack, some).dense(EVERY)[:, :, 0, 0], dense.flatten(2)[..., some])
