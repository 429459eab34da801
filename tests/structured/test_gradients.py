"""Batched per-example gradients against their own written-out matrices, in any chunking, with derivatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_plus.structured import DenseGradients, EmbeddingGradients, KroneckerBasis, OuterGradients
from laplace_plus.structured import gradients as gradients_file
from laplace_plus.structured.composed import JoinedGradients, MappedGradients, SelectedGradients
from laplace_plus.structured.gradients import concatenate, times
from laplace_plus.structured.layout import Places
from laplace_plus.structured.one_hot import OutputLayerGradients

EVERY = slice(None)
MODES = ("full", "diagonal", "joint")


def outer(v, b, s, g, o, i, generator, *, channels_first=False, shared_right=False):
    """Outer products and their matrices; with few rows or columns and 40 positions, matrices are written out."""
    shape = (v, b, g, o, s) if channels_first else (v, b, s, g, o)
    left = torch.randn(shape, generator=generator, dtype=torch.float64)
    right = torch.randn(b, s, 1 if shared_right else g, i, generator=generator, dtype=torch.float64)
    if channels_first:  # as a convolution's output gradients lie in memory
        gradients = OuterGradients(right, left, expand_left=lambda x: x.permute(0, 1, 4, 2, 3))
        left = left.permute(0, 1, 4, 2, 3)
    else:
        gradients = OuterGradients(right, left)
    return gradients, torch.einsum("vbsgo,bsgi->vbgoi", left, right.expand(-1, -1, g, -1))


def one_hot(v, b, s, o, i, generator):
    index = torch.randint(0, i, (b, s), generator=generator)
    left = torch.randn(v, b, s, o, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.one_hot(index, i).double()
    return EmbeddingGradients(index, left, i), torch.einsum("vbso,bsi->vboi", left, unit)[:, :, None]


def cases(v, b, s, g, o, i, generator):
    yield outer(v, b, s, g, o, i, generator)
    yield outer(v, b, 40, g, o, i, generator, channels_first=True)
    yield outer(v, b, 40, g, o, i, generator, shared_right=True)
    yield outer(v, b, 1, g, o, i, generator)
    yield one_hot(v, b, s, o, i, generator)
    gradients, dense = outer(v, b, s, g, o, i, generator)
    yield DenseGradients(dense), dense
    kept = torch.arange(0, g * o * i, 2)
    yield SelectedGradients(gradients, kept), dense.flatten(2)[..., kept][:, :, None, None]
    other, other_dense = one_hot(v, b, s, o, i, generator)
    order = torch.randperm(g * o * i + o * i, generator=generator)
    first, second = order[: g * o * i].view(g, o, i), order[g * o * i :].view(other.shape)
    joined = JoinedGradients([(gradients, Places(first)), (other, Places(second))], len(order))
    whole = torch.empty(v, b, len(order), dtype=torch.float64)
    whole[..., order] = torch.cat([dense.flatten(2), other_dense.flatten(2)], -1)
    yield joined, whole[:, :, None, None]
    matrix = torch.randn(g, o * i, o * i, generator=generator, dtype=torch.float64)
    mapped = MappedGradients(gradients, lambda rows: times(rows, matrix))
    yield mapped, (dense.flatten(3)[..., None, :] @ matrix).squeeze(-2).view_as(dense)
    second, second_dense = outer(v, b, 2, g, o, i, generator)
    yield concatenate([gradients, second]), dense + second_dense
    outputs = torch.randint(0, o, (b, v), generator=generator)
    features = torch.randn(b, i, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.one_hot(outputs, o).double()
    yield OutputLayerGradients(features, outputs, o), torch.einsum("bvo,bi->vboi", unit, features)[:, :, None]


def expected(dense, weights, mode):
    joint = torch.einsum("vbgoi,goi,wcgoi->bvcw", dense, weights, dense)
    own = torch.einsum("bvbw->bvw", joint)
    return {"joint": joint, "full": own, "diagonal": own.diagonal(dim1=1, dim2=2)}[mode]


def squares(gradients):
    total = torch.zeros(gradients.shape, dtype=gradients.dtype)
    gradients.add_squares_(total)
    return total


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


sizes = st.integers(1, 3)


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, sizes, st.sampled_from([2**8, 2**22]), st.integers(0, 99))
def test_gradients_are_their_matrices(v, b, s, g, o, i, chunk, seed):
    generator = torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_WRITTEN", "_JOINT", "_SIDES"):  # chunks of few examples, or of all
            patch.setattr(gradients_file, name, chunk)
        for gradients, dense in cases(v, b, s, g, o, i, generator):
            assert gradients.shape == tuple(dense.shape[2:])
            close(gradients.dense(EVERY), dense)
            close(torch.cat([values for _, values in gradients.chunks()], 1), dense)
            close(squares(gradients), dense.square().sum((0, 1)))
            weights = torch.rand(gradients.shape, generator=generator, dtype=torch.float64)
            for mode in MODES:
                close(gradients.quadratic(weights, mode), expected(dense, weights, mode))
            close(gradients.select(torch.tensor([v - 1])).dense(EVERY), dense[-1:])
            others = torch.randn(3, *gradients.shape, generator=generator, dtype=torch.float64)
            close(gradients.project(others), torch.einsum("vbgoi,rgoi->vbr", dense, others))
            single = gradients.in_dtype(torch.float32)
            assert single.dtype is torch.float32
            torch.testing.assert_close(single.dense(EVERY), dense.float(), rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, st.sampled_from([1, 2, 40]), sizes, sizes, st.booleans())
def test_a_change_of_basis_comes_before_every_product(v, b, s, o, i, channels_first):
    generator = torch.Generator().manual_seed(0)
    for g, shared_right in ((1, False), (2, True), (3, False)):
        gradients, dense = outer(v, b, s, g, o, i, generator, channels_first=channels_first, shared_right=shared_right)
        weights = torch.rand(g, o, i, generator=generator, dtype=torch.float64)
        left = torch.linalg.qr(torch.randn(g, o, o, generator=generator, dtype=torch.float64)).Q
        right = torch.randn(1 if shared_right else g, i, i, generator=generator, dtype=torch.float64)
        right = torch.linalg.qr(right).Q.expand(g, i, i)
        for basis, want in (
            (KroneckerBasis(left, right), left.mT @ dense @ right),
            (KroneckerBasis(None, right), dense @ right),
        ):
            coordinates = basis.coordinates(gradients)
            close(coordinates.dense(EVERY), want)
            close(squares(coordinates), want.square().sum((0, 1)))
            for mode in MODES:
                close(coordinates.quadratic(weights, mode), expected(want, weights, mode))


@pytest.mark.diagonal
@pytest.mark.parametrize("positions", [1, 2, 40])
@pytest.mark.parametrize("mode", MODES)
def test_derivatives_flow_to_both_sides(positions, mode):
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(2, 3, positions, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    right = torch.randn(3, positions, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 2, 2, generator=generator, dtype=torch.float64)

    def product(left, right):
        return OuterGradients(right, left).quadratic(weights, mode)

    assert torch.autograd.gradcheck(product, (left, right), fast_mode=positions == 40)  # in random directions there


def test_half_precision_is_summed_in_float32():
    left = torch.full((1, 4096, 1, 1, 1), 0.1, dtype=torch.bfloat16)
    right = torch.ones(4096, 1, 1, 1, dtype=torch.bfloat16)
    found = squares(OuterGradients(right, left))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.item(), 4096 * left[0, 0].float().item() ** 2, rtol=1e-5, atol=0)


def test_repeated_columns_of_an_embedding_are_summed_before_they_are_squared():
    index = torch.tensor([[0, 0, 2], [1, 2, 1]])
    left = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = EmbeddingGradients(index, left, 3)
    unit = torch.nn.functional.one_hot(index, 3).double()
    dense = torch.einsum("vbso,bsi->vboi", left, unit)[:, :, None]
    weights = torch.rand(1, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    close(squares(gradients), dense.square().sum((0, 1)))
    for mode in MODES:
        close(gradients.quadratic(weights, mode), expected(dense, weights, mode))
