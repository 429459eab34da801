"""Roots of semi-definite matrices and draws from multivariate normals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import generator, normal

from laplace_plus.errors import (
    NotPositiveDefiniteError,
)
from laplace_plus.likelihoods.sampling import cholesky, draw


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(-8, 8), st.integers(0, 100))
def test_the_root_of_a_semi_definite_matrix(size, rank, exponent, seed):
    factor = normal(2, size, min(rank, size), seed=seed)
    matrix = 10.0**exponent * factor @ factor.mT
    root = cholesky(matrix)
    scale = matrix.abs().amax().item()
    torch.testing.assert_close(root @ root.mT, matrix, rtol=0.0, atol=1e-12 * scale)
    torch.testing.assert_close(root, root.tril())


def test_the_root_of_zero_is_zero_and_has_a_derivative():
    matrix = torch.zeros(2, 3, 3, requires_grad=True)
    root = cholesky(matrix)
    assert torch.equal(root, torch.zeros(2, 3, 3))
    root.sum().backward()
    assert matrix.grad.isfinite().all()


def test_an_indefinite_matrix_has_no_root():
    with pytest.raises(NotPositiveDefiniteError, match="eigenvalue of -1"):
        cholesky(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))


def test_draws_have_the_covariance():
    n = 50_000
    factor = normal(2, 3, 3)
    mean, covariance = normal(2, 3, seed=1), factor @ factor.mT
    for given_covariance in (covariance, covariance.diagonal(dim1=-2, dim2=-1)):
        samples = draw(mean, given_covariance, n, generator=generator(0)) - mean
        wanted = covariance if given_covariance.dim() == 3 else torch.diag_embed(given_covariance)
        products = samples.unsqueeze(-1) * samples.unsqueeze(-2)
        assert ((products.mean(0) - wanted).abs() <= 4.5 * products.std(0) / math.sqrt(n)).all()


def test_a_covariance_below_all_rounding_has_the_root_zero():
    tiny = 1e-39 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    batch = torch.stack([tiny, torch.eye(2)])
    torch.testing.assert_close(cholesky(batch), torch.stack([torch.zeros(2, 2), torch.eye(2)]))
