"""Each form of the products of outer stacks against written-out matrices, in any chunking, with gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_plus._memory import memory_budget
from laplace_plus.errors import ConfigurationError
from laplace_plus.structured import EmbeddingGradients, KroneckerBasis, OuterGradients
from laplace_plus.structured import chunks as chunking
from laplace_plus.structured.gradients import contractions

MODES = ("full", "diagonal", "joint")


def problem(v, b, s, g, o, i, seed, *, channels_first=False, shared_right=False):
    generator = torch.Generator().manual_seed(seed)
    shape = (v, b, g, o, s) if channels_first else (v, b, s, g, o)
    left = torch.randn(shape, generator=generator, dtype=torch.float64)
    right = torch.randn(b, s, 1 if shared_right else g, i, generator=generator, dtype=torch.float64)
    weights = torch.rand(g, o, i, generator=generator, dtype=torch.float64)
    if channels_first:  # as a convolution's output gradients lie in memory
        stack = OuterGradients(right, left, expand_left=lambda x: x.permute(0, 1, 4, 2, 3))
        left = left.permute(0, 1, 4, 2, 3)
    else:
        stack = OuterGradients(right, left)
    dense = torch.einsum("vbsgo,bsgi->vbgoi", left, right.expand(-1, -1, g, -1))
    return stack, dense, weights


def expected(dense, weights, mode):
    joint = torch.einsum("vbgoi,goi,wcgoi->bvcw", dense, weights, dense)
    own = torch.einsum("bvbw->bvw", joint)
    return {"joint": joint, "full": own, "diagonal": own.diagonal(dim1=1, dim2=2)}[mode]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


sizes = st.integers(1, 4)


@settings(max_examples=40, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, sizes, st.booleans(), st.booleans(), st.sampled_from([1, 200, 10**9]))
def test_every_form_is_the_dense_product(v, b, s, g, o, i, channels_first, shared_right, cache):
    stack, dense, weights = problem(v, b, s, g, o, i, 0, channels_first=channels_first, shared_right=shared_right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "CACHE_BYTES", cache)
        for form in (None, "stream", "gram"):
            for mode in MODES:
                close(stack.quadratic(weights, mode, form), expected(dense, weights, mode))
            total = torch.ones(stack.shape, dtype=torch.float64)
            stack.add_squares_(total, form)
            close(total, 1 + dense.square().sum((0, 1)))
        separable = weights[:, :, :1] * weights[:, :1]
        for mode in MODES[:2]:
            close(stack.quadratic(separable, mode, "separable"), expected(dense, separable, mode))
            close(stack.quadratic(separable, mode), expected(dense, separable, mode))


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, st.sampled_from([1, 200, 10**9]))
def test_a_rotation_comes_before_every_form(v, b, s, o, i, cache):
    for g, shared_right in ((1, False), (2, True), (3, False)):
        stack, dense, weights = problem(v, b, s, g, o, i, 1, shared_right=shared_right)
        left = torch.linalg.qr(torch.randn(g, o, o, dtype=torch.float64)).Q
        right = torch.linalg.qr(torch.randn(1 if shared_right else g, i, i, dtype=torch.float64)).Q
        right = right.expand(g, i, i)
        rotated = left.mT @ dense @ right
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunking, "CACHE_BYTES", cache)
            turned = KroneckerBasis(left, right).coordinates(stack)
            close(turned.dense(slice(None)), rotated)
            for form in ("stream", "gram"):
                for mode in MODES:
                    close(turned.quadratic(weights, mode, form), expected(rotated, weights, mode))


@pytest.mark.parametrize("form", ["stream", "gram", "separable"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_flow_through_every_form(form, mode):
    if form == "separable" and mode == "joint":
        pytest.skip("there is no such form")
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(2, 3, 3, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    right = torch.randn(3, 3, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(2, 2, 1, generator=generator, dtype=torch.float64) * torch.ones(2, dtype=torch.float64)

    def product(left, right):
        return OuterGradients(right, left).quadratic(weights, mode, form)

    assert torch.autograd.gradcheck(product, (left, right))


def test_the_form_is_the_one_with_the_fewest_operations():
    # 3 × 3 convolutions of a ResNet at 32 × 32: many positions and few channels, then the other way round.
    wide, deep = (10, 64, 64, 576), (10, 4, 256, 2304)
    for mode in ("full", "diagonal"):
        costs = contractions.quadratic_costs(*wide, mode)
        assert costs["stream"] < costs["gram"]
        costs = contractions.quadratic_costs(*deep, mode)
        assert 4 * costs["gram"] < costs["stream"]
        assert costs["separable"] < costs["gram"]
    assert contractions.cheapest(contractions.square_costs(*deep)) == "gram"
    assert contractions.cheapest(contractions.square_costs(1, 64, 64, 576)) == "stream"
    for sizes in (wide, deep, (100, 65, 768, 193)):
        assert min(contractions.quadratic_costs(*sizes, "diagonal").values()) < min(
            contractions.quadratic_costs(*sizes, "full").values()
        )


def test_constant_weights_are_recognised():
    weights = torch.full((2, 3, 4), 0.3)
    assert contractions.separated(weights) is not None
    weights[1, 2, 3] *= 1 + 1e-5
    assert contractions.separated(weights) is None
    assert contractions.separated(torch.zeros(1, 2, 2)) is None  # no first entry to divide by


def test_repeated_columns_of_an_embedding_add_up_before_they_are_squared():
    index = torch.tensor([[0, 0, 2], [1, 2, 1]])
    left = torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stack = EmbeddingGradients(index, left, 3)
    unit = torch.nn.functional.one_hot(index, 3).double()
    dense = torch.einsum("vbso,bsi->vboi", left, unit)[:, :, None]
    weights = torch.rand(1, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    close(stack.squares(), dense.square().sum((0, 1)))
    for mode in MODES:
        close(stack.quadratic(weights, mode), expected(dense, weights, mode))


def test_chunks_keep_to_the_budget():
    stack, dense, weights = problem(2, 6, 3, 1, 4, 5, 0)
    each = 3 * (2 * 4 + 5) * 8
    with memory_budget(each):
        close(stack.quadratic(weights, "full"), expected(dense, weights, "full"))
        assert max(values.shape[1] for _, values in stack.chunks()) == 1
    with memory_budget(each - 1), pytest.raises(ConfigurationError, match="memory budget"):
        stack.quadratic(weights, "full")
