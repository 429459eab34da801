"""Adjoint derivatives of the decompositions against autograd through dense loops, and where autograd is no guide."""

from __future__ import annotations

import pytest
import torch
from problems import normal
from torch import Tensor

from laplace_plus.linalg import arnoldi, lanczos

float64 = torch.float64


def without(w: Tensor, vectors: list[Tensor]) -> Tensor:
    for _ in range(2):
        for q in vectors:
            w = w - (w @ q) * q
    return w


def dense_lanczos(a: Tensor, v: Tensor, depth: int) -> tuple[Tensor, ...]:
    vectors, diagonal, off_diagonal, w = [v / v.norm()], [], [], v
    for k in range(depth):
        w = a @ vectors[k]
        diagonal.append(w @ vectors[k])
        w = without(w, vectors)
        if k + 1 < depth:
            off_diagonal.append(w.norm())
            vectors.append(w / w.norm())
    return torch.stack(vectors), torch.stack(diagonal), torch.stack(off_diagonal), w, 1 / v.norm()


def dense_arnoldi(a: Tensor, v: Tensor, depth: int) -> tuple[Tensor, ...]:
    vectors, columns, w = [v / v.norm()], [], v
    for k in range(depth):
        w = a @ vectors[k]
        column = [w @ q for q in vectors]
        w = without(w, vectors)
        if k + 1 < depth:
            column.append(w.norm())
            vectors.append(w / w.norm())
        columns.append(torch.stack([*column, *[v.new_zeros(())] * (depth - len(column))]))
    return torch.stack(vectors), torch.stack(columns, dim=1), w, 1 / v.norm()


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def compare(outputs, expected, inputs, cotangents) -> None:
    for x, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    gradients = torch.autograd.grad(outputs, inputs, cotangents)
    for x, y in zip(gradients, torch.autograd.grad(expected, inputs, cotangents), strict=True):
        assert relative(x, y) <= 1e-9


def symmetric(s: Tensor) -> Tensor:
    return (s + s.T) / 2


@pytest.mark.parametrize("depth", [2, 7, 12])
def test_lanczos_against_autograd(depth):
    s, v = normal(24, 24).requires_grad_(), normal(24, seed=1).requires_grad_()
    found = lanczos(lambda x: x @ symmetric(s), v, depth)
    outputs = (found.vectors, found.diagonal, found.off_diagonal, found.residual, found.scale)
    expected = dense_lanczos(symmetric(s), v, depth)
    compare(outputs, expected, [s, v], [normal(*x.shape, seed=2) for x in expected])


@pytest.mark.diagonal
@pytest.mark.parametrize("depth", [1, 2, 7, 12])
@pytest.mark.parametrize("transpose", [True, False])
def test_arnoldi_against_autograd(depth, transpose):
    a, v = normal(24, 24).requires_grad_(), normal(24, seed=1).requires_grad_()
    rmatvec = (lambda x: x @ a) if transpose else None
    found = arnoldi(lambda x: x @ a.T, v, depth, rmatvec=rmatvec)
    expected = dense_arnoldi(a, v, depth)
    cotangents = [normal(*x.shape, seed=2) for x in expected]
    compare((found.vectors, found.hessenberg, found.residual, found.scale), expected, [a, v], cotangents)


def test_gradcheck_in_start_vectors_and_tensors():
    factor, shift = normal(6, 3).requires_grad_(), normal(6, seed=3).exp().requires_grad_()
    v = normal(2, 6, seed=1).requires_grad_()

    def operator(f: Tensor, d: Tensor):
        return lambda x: (x @ f) @ f.T + d * x

    def with_lanczos(f: Tensor, d: Tensor, v: Tensor):
        found = lanczos(operator(f, d), v, 3, parameters=[f, d])
        return found.vectors, found.diagonal, found.off_diagonal, found.residual, found.scale

    def with_arnoldi(f: Tensor, d: Tensor, v: Tensor):
        found = arnoldi(lambda x: operator(f, d)(x).cumsum(-1), v, 3, parameters=[f, d])
        return found.vectors, found.hessenberg, found.residual, found.scale

    for function in (with_lanczos, with_arnoldi):
        assert torch.autograd.gradcheck(function, (factor, shift, v), eps=1e-6, atol=1e-7, fast_mode=True)


def test_derivatives_of_a_stack_are_those_of_its_vectors():
    s, v = normal(10, 10).requires_grad_(), normal(2, 3, 10, seed=1).requires_grad_()
    together = lanczos(lambda x: x @ symmetric(s), v, 4)
    cotangent = normal(2, 3, 4, 10, seed=2)
    expected = [torch.zeros(10, 10, dtype=float64), torch.zeros(2, 3, 10, dtype=float64)]
    for i in range(2):
        for j in range(3):
            alone = lanczos(lambda x: x @ symmetric(s), v[i, j], 4)
            gradients = torch.autograd.grad(alone.vectors, [s, v], cotangent[i, j])
            expected = [x + y for x, y in zip(expected, gradients, strict=True)]
    for x, y in zip(torch.autograd.grad(together.vectors, [s, v], cotangent), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_derivative_where_the_krylov_spaces_end_at_different_depths():
    """A vector within k eigenspaces has rank k; perturbations that keep it there are differentiable."""
    d = torch.tensor([1.0, 2.0, 4.0, 7.0, 11.0], dtype=float64).requires_grad_()
    w = normal(3, 5).abs() + 0.3
    w = (w * torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])).requires_grad_()
    found = lanczos(lambda x: d * x, w, 4)
    assert found.rank.tolist() == [2, 4, 3]
    cotangents = [normal(3, 4, seed=2), normal(3, 3, seed=3), normal(3, 4, 5, seed=4)]
    gradients = torch.autograd.grad([found.diagonal, found.off_diagonal, found.vectors], [d, w], cotangents)
    expected = [torch.zeros(5, dtype=float64), torch.zeros(3, 5, dtype=float64)]
    for i, rank in enumerate([2, 4, 3]):
        vectors, diagonal, off_diagonal, _, _ = dense_lanczos(torch.diag(d), w[i], rank)
        parts = [cotangents[0][i, :rank], cotangents[1][i, : rank - 1], cotangents[2][i, :rank]]
        new = torch.autograd.grad([diagonal, off_diagonal, vectors], [d, w], parts)
        expected = [x + y for x, y in zip(expected, new, strict=True)]
    support = w[0] != 0
    torch.testing.assert_close(gradients[0], expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients[1][1], expected[1][1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients[1][0][support], expected[1][0][support], rtol=1e-9, atol=1e-9)


def hilbert_error(n: int) -> float:
    """RMS error of the Jacobian of A ↦ Q H Qᵀ = A at depth n, which is the identity, for the Hilbert matrix.

    The mean square of ``(J − I)ᵀ c`` over random directions c estimates that of the entries of ``J − I``, times n².
    """
    i = torch.arange(1, n + 1, dtype=float64)
    a = (1 / (i[:, None] + i - 1)).requires_grad_()
    v = torch.rand(n, dtype=float64, generator=torch.Generator().manual_seed(0))
    found = arnoldi(lambda x: x @ a.T, v, n)
    product = found.vectors.T @ found.hessenberg @ found.vectors
    directions = normal(12, n, n, seed=1)
    errors = [torch.autograd.grad(product, a, c, retain_graph=True)[0] - c for c in directions]
    return float(torch.stack(errors).square().mean().sqrt()) / n


@pytest.mark.quick("12-2e-05")
@pytest.mark.parametrize(("n", "error"), [(6, 1e-12), (8, 1e-10), (10, 1e-7), (12, 2e-5)])
def test_reprojection_on_the_hilbert_matrix(n, error):
    """Measured 1e-14, 2e-12, 2e-9, 4e-7 with, and 2e-12, 1e-8, 1e-6, 9e-4 without re-projection."""
    assert hilbert_error(n) <= error


def test_lanczos_adjoint_on_the_hilbert_matrix():
    i = torch.arange(1, 11, dtype=float64)
    a = (1 / (i[:, None] + i - 1)).requires_grad_()
    v = torch.rand(10, dtype=float64, generator=torch.Generator().manual_seed(0))
    found = lanczos(lambda x: x @ symmetric(a), v, 10)
    product = found.vectors.T @ found.tridiagonal() @ found.vectors
    cotangent = symmetric(normal(10, 10))
    assert relative(torch.autograd.grad(product, a, cotangent)[0], cotangent) <= 1e-6


def test_the_derivative_keeps_its_digits_where_eigenvalues_converge():
    """Float32, ten eigenvalues far above the others, which converge within the first half of the steps."""
    basis = torch.linalg.qr(normal(120, 120))[0]
    spectrum = torch.cat([torch.linspace(10, 100, 10, dtype=float64), torch.linspace(1, 2, 110, dtype=float64)])
    v = normal(120, seed=1)

    def gradient(dtype: torch.dtype) -> Tensor:
        s = spectrum.to(dtype, copy=True).requires_grad_()
        q = basis.to(dtype)
        found = lanczos(lambda x: ((x @ q) * s) @ q.T, v.to(dtype), 40)
        value = (found.vectors[-1] ** 2 * torch.linspace(0, 1, 120).to(dtype)).sum()
        return torch.autograd.grad(value, s)[0].double()

    assert relative(gradient(torch.float32), gradient(float64)) <= 0.02


def test_no_graph_of_a_product_is_stored():
    s, v = normal(50, 50).requires_grad_(), normal(50, seed=1).requires_grad_()
    graphs: list[bool] = []

    def operator(x: Tensor) -> Tensor:
        graphs.append(torch.is_grad_enabled())
        return torch.tanh(s).T @ (torch.tanh(s) @ x) if x.ndim == 1 else x @ torch.tanh(s).T @ torch.tanh(s)

    saved: list[int] = []
    for run in (
        lambda: lanczos(operator, v, 20).vectors.sum(),
        lambda: arnoldi(operator, v, 20).vectors.sum(),
    ):
        graphs.clear()
        saved.clear()
        kept: list[Tensor] = []

        def pack(x: Tensor, saved: list[int] = saved, kept: list[Tensor] = kept) -> Tensor:
            saved.append(x.untyped_storage().nbytes())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            value = run()
        assert graphs.count(True) <= 1  # the first product, from whose graph the tensors are found, and which is let go
        # at most the first product's graph (let go) and the results: far from 20 products of 50 × 50 matrices
        assert sum(saved) <= 8 * (4 * 50 * 50 + 10 * 20 * 50)
        value.backward()
        assert s.grad is not None and torch.isfinite(s.grad).all()


def test_half_precision_vectors_are_differentiated_in_float32():
    s = symmetric(normal(12, 12)).to(torch.bfloat16).requires_grad_()
    v = normal(12, seed=1).to(torch.bfloat16).requires_grad_()
    found = lanczos(lambda x: x @ s.T, v, 4)
    assert found.vectors.dtype == torch.float32
    found.diagonal.sum().backward()
    assert v.grad.dtype == s.grad.dtype == torch.bfloat16
    s64, v64 = s.detach().double().requires_grad_(), v.detach().double().requires_grad_()
    lanczos(lambda x: x @ s64.T, v64, 4).diagonal.sum().backward()
    assert relative(v.grad.double(), v64.grad) <= 0.1
    assert relative(s.grad.double(), s64.grad) <= 0.1


@pytest.mark.parametrize("batch", [(), (3,)])
def test_one_step(batch):
    a, v = symmetric(normal(5, 5)), normal(*batch, 5, seed=1)

    def diagonal(a: Tensor, v: Tensor) -> Tensor:
        return lanczos(lambda x: x @ symmetric(a), v, 1).diagonal

    assert torch.autograd.gradcheck(diagonal, (a.requires_grad_(), v.requires_grad_()))
