"""Inner products of long float32 vectors against float64."""

from __future__ import annotations

import pytest
import torch

from laplace_plus import kernels
from laplace_plus.linalg import lanczos

LENGTHS = [1, 1000, 2**17, 2**17 + 1, 3_000_001]


def vectors(count, n, seed=0):
    # of one sign, so that running totals lose the most
    return torch.rand(count, n, generator=torch.Generator().manual_seed(seed)) + 0.5


@pytest.mark.parametrize("n", LENGTHS)
def test_norms_and_inner_products_keep_their_digits(n):
    a, b = vectors(2, n), vectors(2, n, 1)
    wide, other = a.double(), b.double()
    for got, expected in [
        (kernels.vector_norm(a), wide.norm(dim=1)),
        (kernels.vector_norm(a[0]), wide[0].norm()),
        (kernels.inner(a, b), (wide * other).sum(1)),
        (kernels.inner(a[0], b[0]), wide[0] @ other[0]),
        (kernels.inner_products(a, b), wide @ other.T),
        (kernels.inner_products(a, b[0]), wide @ other[0]),
        (kernels.inner_products(a[None], b[None]), (wide @ other.T)[None]),
    ]:
        assert got.dtype is torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=0)


def test_float64_stays_as_it_is():
    a = vectors(2, 2**18).double()
    assert kernels.vector_norm(a).dtype is torch.float64
    torch.testing.assert_close(kernels.inner_products(a, a), a @ a.T, rtol=1e-14, atol=0)


def test_gram_schmidt_of_long_vectors_is_orthogonal():
    n = 3_000_001
    basis = vectors(1, n)
    basis /= basis.double().norm(dim=1, keepdim=True).float()
    rest, coefficients = kernels.orthogonalize(basis, vectors(1, n, 1)[0])
    assert (basis.double() @ rest.double()).abs() / rest.double().norm() < 2e-6
    torch.testing.assert_close(coefficients.double(), basis.double() @ vectors(1, n, 1)[0].double(), rtol=2e-6, atol=0)


def test_lanczos_of_long_vectors_is_orthonormal():
    n = 3_000_001
    entries = torch.linspace(1.0, 2.0, n)
    q = lanczos(lambda v: v * entries, torch.ones(n), 4).vectors.double()
    assert (q @ q.T - torch.eye(4, dtype=torch.float64)).abs().max() < 2e-6
