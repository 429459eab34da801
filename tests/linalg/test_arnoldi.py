"""Arnoldi's decomposition of operators that are not symmetric."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import normal

from laplace_plus.linalg import arnoldi

float64 = torch.float64


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 40),
    depth=st.integers(1, 45),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    dtype=st.sampled_from([torch.float32, float64]),
    seed=st.integers(0, 1000),
)
def test_the_equations_hold(n, depth, batch, dtype, seed):
    a, v = normal(n, n, seed=seed).to(dtype), normal(*batch, n, seed=seed + 1).to(dtype)
    depth, limit = min(depth, n), 1e-12 if dtype == float64 else 2e-6
    found = arnoldi(lambda x: x @ a.T, v, depth)
    assert found.vectors.shape == (*batch, depth, n) and found.converged == (depth == n)
    assert found.matvecs == depth * v.shape[:-1].numel()
    gram = found.vectors @ found.vectors.mT
    assert float((gram - torch.eye(depth, dtype=dtype)).abs().max()) <= limit
    rest = found.vectors @ a.T - found.hessenberg.mT @ found.vectors
    rest[..., -1, :] -= found.residual
    assert float(rest.abs().max() / torch.linalg.matrix_norm(a, 2)) <= limit
    assert float((found.vectors @ found.residual[..., None]).abs().max()) <= limit * float(a.norm())
    assert not found.hessenberg.tril(-2).any()


def test_spectrum_at_full_depth():
    a = normal(30, 30)
    found = arnoldi(lambda x: x @ a.T, normal(30, seed=1), 30)
    for expected in torch.linalg.eigvals(a):
        assert float((torch.linalg.eigvals(found.hessenberg) - expected).abs().min()) <= 1e-10


def test_invariant_subspaces():
    d = torch.tensor([1.0, 2.0, 4.0, 7.0], dtype=float64)
    v = torch.tensor([[1.0, 0, 0, 0], [1.0, 1, 1, 0]], dtype=float64)
    found = arnoldi(lambda x: x * d, v, 4)
    assert found.rank.tolist() == [1, 3] and found.hessenberg.shape == (2, 3, 3) and found.converged
    assert not found.vectors[0, 1:].any() and not found.hessenberg[0, 1:].any() and not found.hessenberg[0, :, 1:].any()
