"""Low-rank matrices plus diagonal ones, against the same matrices written out."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from laplace_plus.errors import NotPositiveDefiniteError, UnsupportedError
from laplace_plus.linalg import lanczos
from laplace_plus.structured import low_rank as module
from laplace_plus.structured.composed import JoinedGradients
from laplace_plus.structured.gradients import OuterGradients
from laplace_plus.structured.layout import Places
from laplace_plus.structured.low_rank import LowRankBlock, SampledSpectrum

N, RANK = 12, 4
WEIGHT = torch.tensor([1.7], dtype=torch.float64)
NONE = SampledSpectrum.unknown()
SCALAR = torch.tensor(0.3, dtype=torch.float64)
VARIED = torch.linspace(0.1, 2.0, N, dtype=torch.float64).view(1, 1, N)
DIAGONALS = pytest.mark.parametrize("diagonal", [SCALAR, VARIED], ids=["scalar", "varied"])


def spectrum_of(decomposition):
    return SampledSpectrum.of([decomposition])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def block(rank=RANK, *, orthonormal=True, rest=NONE):
    vectors = draw(rank, N)
    if orthonormal:
        vectors = torch.linalg.qr(vectors.T)[0].T.contiguous()
    return LowRankBlock(torch.linspace(9.0, 0.1, rank, dtype=torch.float64), vectors, rest)


def matrix(low_rank, diagonal):
    own = low_rank.vectors.T @ torch.diag(low_rank.values) @ low_rank.vectors * WEIGHT
    return own + torch.diag(diagonal.expand(1, 1, N).flatten())


@DIAGONALS
@pytest.mark.parametrize("orthonormal", [True, False])
@pytest.mark.parametrize("rank", [0, 1, RANK, N])
def test_factor_is_the_dense_inverse(rank, orthonormal, diagonal):
    low_rank = block(rank, orthonormal=orthonormal)
    dense = matrix(low_rank, diagonal)
    inverse = dense.inverse()
    factor = low_rank.factor(WEIGHT, diagonal)
    torch.testing.assert_close(low_rank.dense(WEIGHT)[0], dense - torch.diag(diagonal.expand(1, 1, N).flatten()))
    torch.testing.assert_close(factor.covariance()[0], inverse)
    torch.testing.assert_close(factor.variances().flatten(), inverse.diagonal())
    torch.testing.assert_close(factor.log_determinant(), dense.logdet())
    torch.testing.assert_close(low_rank.log_determinant(WEIGHT, diagonal), dense.logdet())
    root = factor.sample(torch.eye(N, dtype=torch.float64)[:, None, None]).flatten(1)
    torch.testing.assert_close(root.T @ root, inverse)


@DIAGONALS
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("rank", [RANK, 2 * N])  # more directions than entries: some say nothing
def test_quadratic_forms_are_the_dense_ones(rank, positions, diagonal):
    low_rank = block(rank, orthonormal=rank < N)
    left, right = draw(3, 5, positions, 1, 3, seed=1), draw(5, positions, 1, 4, seed=2)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3)).view(1, 3, 4)
    gradients = OuterGradients(right, left)
    stack = JoinedGradients([(gradients, Places(order.view(gradients.shape)))], N)
    rows = stack.dense(slice(None)).flatten(2)
    factor, inverse = low_rank.factor(WEIGHT, diagonal), matrix(low_rank, diagonal).inverse()
    coordinates = factor.basis.coordinates(stack)
    joint = torch.einsum("vbi,ij,wcj->bvcw", rows, inverse, rows)
    own = torch.einsum("bvbw->bvw", joint)
    torch.testing.assert_close(factor.quadratic_form(coordinates, "joint"), joint)
    torch.testing.assert_close(factor.quadratic_form(coordinates, "full"), own)
    torch.testing.assert_close(factor.quadratic_form(coordinates, "diagonal"), own.diagonal(dim1=1, dim2=2))


def test_variances_survive_single_precision():
    # The data leave a ten-millionth of the prior's variance, less than one rounding of it.
    vectors = torch.linalg.qr(draw(N, RANK))[0].T.float().contiguous()
    values = torch.full((RANK,), 1e7, dtype=torch.float64)
    low_rank = LowRankBlock(values, vectors, NONE)
    gradients = OuterGradients(vectors[:1, None, None], torch.ones(1, 1, 1, 1, 1))
    stack = JoinedGradients([(gradients, Places(torch.arange(N).view(gradients.shape)))], N)
    one = torch.ones(1, dtype=torch.float64)
    factor = low_rank.factor(one, torch.ones((), dtype=torch.float64))
    got = factor.quadratic_form(factor.basis.coordinates(stack), "diagonal")
    wide = low_rank.vectors.double()
    dense = (wide.T * values) @ wide + torch.eye(N, dtype=torch.float64)
    torch.testing.assert_close(got[0, 0], wide[0] @ dense.inverse() @ wide[0], rtol=1e-6, atol=0)


@DIAGONALS
def test_log_determinant_is_differentiable(diagonal):
    low_rank = block()
    assert gradcheck(low_rank.log_determinant, (WEIGHT.clone().requires_grad_(), diagonal.clone().requires_grad_()))


def test_remainder_adds_its_quadrature():
    nodes = torch.tensor([[[0.5, 0.0], [0.2, 0.1]], [[0.4, 0.0], [0.2, 0.0]]], dtype=torch.float64)
    weights = torch.tensor([[[2.0, 5.0], [3.0, 1.0]], [[2.5, 0.0], [4.0, 0.0]]], dtype=torch.float64)
    whole, bare = block(rest=SampledSpectrum(nodes, weights)), block()
    each = (weights * torch.log1p(nodes * WEIGHT / SCALAR)).sum(-1)
    value, sem, change = whole.remainder(WEIGHT, SCALAR)
    torch.testing.assert_close(value, each[0].mean())
    torch.testing.assert_close(sem, each[0].std() / 2**0.5)
    torch.testing.assert_close(change, (each[0] - each[1]).mean().abs())
    difference = whole.log_determinant(WEIGHT, SCALAR) - bare.log_determinant(WEIGHT, SCALAR)
    torch.testing.assert_close(difference, each[0].mean())
    with pytest.raises(UnsupportedError, match=r"Got: one precision for each of \d+ parameters.*remainder_probes=0"):
        whole.log_determinant(WEIGHT, VARIED)


def test_a_sampled_spectrum_is_the_quadrature_of_its_vectors():
    root = draw(5, N)
    curvature = root.T @ root  # of rank 5: six steps are exact
    vectors = draw(4, N, seed=1)
    found = spectrum_of(lanczos(lambda v: v @ curvature, vectors, 6))

    def logarithm(x):
        return torch.log1p(1e4 * x)

    values, basis = torch.linalg.eigh(curvature)
    exact = ((vectors @ basis).square() * logarithm(values.clamp(min=0))).sum(1)
    full, earlier = found.forms(logarithm)
    torch.testing.assert_close(full, exact)
    assert (full - earlier).mean().abs() > 1e-3 * full.mean(), "fewer steps are not enough"
    depth = found.nodes.shape[2]
    shallow = spectrum_of(lanczos(lambda v: v @ curvature, vectors, depth - depth // 4))
    torch.testing.assert_close(earlier, shallow.forms(logarithm)[0])
    one = spectrum_of(lanczos(lambda v: v @ curvature, vectors, 1))
    assert not one.forms(logarithm)[1].any(), "one step says nothing of the next"


@pytest.mark.parametrize("whole", [0, N], ids=["vectors", "written out"])
def test_the_rest_under_several_precisions(whole, monkeypatch):
    """Of vectors with ``Σ z zᵀ = m I``, value and derivatives are those of the dense matrix."""
    monkeypatch.setattr(module, "WHOLE", whole)
    monkeypatch.setattr(module, "draw_probes", lambda *_, **__: N**0.5 * torch.linalg.qr(draw(N, N, seed=4))[0])
    root = draw(N, N, seed=3)
    curvature = root.T @ root
    values, vectors = torch.linalg.eigh(curvature)
    rest = SampledSpectrum(*torch.ones(2, 2, N, 1, dtype=torch.float64))
    own = values[-RANK:], vectors.T[-RANK:].contiguous(), rest
    low_rank = LowRankBlock(*own, operator=lambda v: v @ curvature)
    weight, diagonal = WEIGHT.clone().requires_grad_(), VARIED.clone().requires_grad_()
    dense = (weight * curvature + diagonal.flatten().diag()).logdet()
    value = low_rank.log_determinant(weight, diagonal)
    torch.testing.assert_close(value, dense)
    for one, other in zip(*(torch.autograd.grad(v, (weight, diagonal)) for v in (value, dense)), strict=True):
        torch.testing.assert_close(one, other)


def test_adding_keeps_both_parts():
    nodes, weights = draw(2, 3, 2).square(), draw(2, 3, 2, seed=1).square()
    one = block(rest=SampledSpectrum(nodes, weights))
    two = block(2, rest=SampledSpectrum(nodes[:, :2, :1], weights[:, :2, :1]))
    expected = one.dense(WEIGHT) + two.dense(WEIGHT)
    rests = one.remainder(WEIGHT, SCALAR)[0] + two.remainder(WEIGHT, SCALAR)[0]
    one.eigenvalues()
    one.add_(two)
    torch.testing.assert_close(one.dense(WEIGHT), expected)
    torch.testing.assert_close(one.remainder(WEIGHT, SCALAR)[0], rests)
    dense = expected[0] + torch.eye(N, dtype=torch.float64) * SCALAR
    torch.testing.assert_close(one.log_determinant(WEIGHT, SCALAR), dense.logdet() + rests)
    bare = block(1)
    bare.add_(two)
    torch.testing.assert_close(bare.remainder(WEIGHT, SCALAR)[0], two.remainder(WEIGHT, SCALAR)[0])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_no_positive_prior_is_refused(bad):
    for diagonal in (torch.tensor(bad, dtype=torch.float64), torch.full((1, 1, N), bad, dtype=torch.float64)):
        with pytest.raises(NotPositiveDefiniteError):
            block().factor(WEIGHT, diagonal)
        with pytest.raises(NotPositiveDefiniteError):
            block().log_determinant(WEIGHT, diagonal)
