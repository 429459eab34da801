"""Functions of operators that are not symmetric against scipy's dense ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch.autograd import gradcheck

from laplace_plus.errors import OperatorError
from laplace_plus.linalg import arnoldi_function, of_eigenvalues, phi

N = 9
exp = torch.linalg.matrix_exp


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRIX = draw(N, N) / 3 + 2 * torch.eye(N, dtype=torch.float64)  # eigenvalues on the right
VECTORS = draw(2, N, seed=1)


def dense_phi(matrix, order):
    """By the recursion φ_{k+1}(z) = (φ_k(z) − 1/k!)/z."""
    found, factorial = scipy.linalg.expm(matrix), 1.0
    for k in range(order):
        found = np.linalg.solve(matrix, found - np.eye(len(matrix)) / factorial)
        factorial *= k + 1
    return found


@pytest.mark.parametrize(
    ("f", "dense"),
    [
        (exp, scipy.linalg.expm),
        (of_eigenvalues(torch.exp), scipy.linalg.expm),
        (of_eigenvalues(torch.sqrt), scipy.linalg.sqrtm),
        (of_eigenvalues(torch.log), scipy.linalg.logm),
        (torch.linalg.inv, np.linalg.inv),
        *((phi(k), lambda matrix, k=k: dense_phi(matrix, k)) for k in range(4)),
    ],
)
def test_a_whole_krylov_space_gives_the_dense_function(f, dense):
    found = arnoldi_function(lambda v: v @ MATRIX.T, f, VECTORS)
    expected = VECTORS @ torch.from_numpy(np.asarray(dense(MATRIX.numpy())).real).T
    torch.testing.assert_close(found.value, expected, rtol=1e-10, atol=1e-10)
    assert found.converged
    assert (found.depth, found.error.shape) == (N, (2,))


@pytest.mark.diagonal
@pytest.mark.parametrize("f", [exp, phi(1), of_eigenvalues(torch.sqrt)])
@pytest.mark.parametrize("depth", [2, 4])
def test_gradients_are_those_of_the_value(f, depth):
    def value(matrix, v):
        return arnoldi_function(lambda x: x @ matrix.T, f, v, depth=depth, parameters=[matrix]).value

    assert gradcheck(value, (MATRIX[:4, :4].clone().requires_grad_(), VECTORS[:1, :4].clone().requires_grad_()))


def test_gradients_of_the_function_itself():
    time = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    found = arnoldi_function(lambda v: v @ MATRIX.T, lambda matrix: exp(time * matrix), VECTORS[0]).value
    (slope,) = torch.autograd.grad(found.sum(), time)
    expected = MATRIX @ exp(0.7 * MATRIX) @ VECTORS[0]
    torch.testing.assert_close(slope, expected.sum())


def windy(n):
    """Advection and diffusion along a line of n points; on a grid, along both axes."""
    second = torch.diag(torch.ones(n - 1), 1) + torch.diag(torch.ones(n - 1), -1) - 2 * torch.eye(n)
    first = torch.diag(torch.ones(n - 1), 1) - torch.diag(torch.ones(n - 1), -1)
    return (0.5 * second + 0.4 * first).double()


def test_heat_that_the_wind_carries():
    """Advection and diffusion on a grid of 16² points; the error says how far a small space is off."""
    n = 16
    line = windy(n)
    matrix = torch.kron(line, torch.eye(n).double()) + torch.kron(torch.eye(n).double(), line)
    v = draw(n * n)
    expected = torch.from_numpy(scipy.linalg.expm(matrix.numpy())) @ v
    for depth, small in ((6, False), (25, True)):
        found = arnoldi_function(lambda x: x @ matrix.T, exp, v, depth=depth)
        distance = (found.value - expected).norm()
        assert distance <= found.error
        assert found.converged is small is bool(distance < 1e-8 * expected.norm())
        assert found.matvecs == depth


@pytest.mark.slow
def test_heat_on_a_fine_grid():
    """On 64² points, where the dense exponential of the grid is that of its axes."""
    n, time = 64, 3.0
    line, v = windy(n), draw(2, 64 * 64)
    whole = exp(time * line)
    expected = (whole @ v.view(2, n, n) @ whole.T).flatten(1)

    def multiply(x, coefficient=1.0):
        field = x.view(-1, n, n)
        return (coefficient * (line @ field + field @ line.T)).reshape(x.shape)

    sparse = scipy.sparse.csr_array(line.numpy())
    grid = scipy.sparse.kron(sparse, scipy.sparse.eye_array(n)) + scipy.sparse.kron(scipy.sparse.eye_array(n), sparse)
    by_scipy = torch.from_numpy(scipy.sparse.linalg.expm_multiply(time * grid.tocsr(), v.numpy().T).T.copy())
    torch.testing.assert_close(by_scipy, expected, rtol=1e-10, atol=1e-10)
    coefficient = torch.tensor(time, dtype=torch.float64, requires_grad=True)
    options = {"depth": 70, "parameters": [coefficient]}
    found = arnoldi_function(lambda x: multiply(x, coefficient), exp, v, **options)
    assert found.converged
    assert ((found.value - expected).norm(dim=1) <= 1e-9 * expected.norm(dim=1)).all()
    (slope,) = torch.autograd.grad((found.value * v).sum(), coefficient)
    torch.testing.assert_close(slope, (multiply(expected) * v).sum(), rtol=1e-8, atol=1e-8)


def test_whether_it_converged_is_told():
    line = windy(60)
    v, expected = draw(60), torch.from_numpy(scipy.linalg.expm(3 * windy(60).numpy())) @ draw(60)
    found = arnoldi_function(lambda x: 3 * x @ line.T, exp, v)
    assert found.converged and found.depth == found.matvecs == 30
    assert (found.value - expected).norm() <= 1e-10 * expected.norm()
    short = arnoldi_function(lambda x: 3 * x @ line.T, exp, v, depth=9)
    assert not short.converged and short.depth == 9


@pytest.mark.parametrize("stack", [VECTORS[0], VECTORS])
def test_a_space_that_ends_early_is_enough(stack):
    """Where all Krylov spaces end before the depth, as of the identity after one step."""
    for options in ({}, {"depth": 5}):
        found = arnoldi_function(lambda x: 2 * x, exp, stack, **options)
        torch.testing.assert_close(found.value, math.exp(2) * stack)
        assert found.converged and found.depth == 1 and (found.error == 0).all()


def test_an_invariant_space_is_exact():
    matrix = torch.block_diag(MATRIX[:3, :3], MATRIX[3:, 3:])
    v = torch.cat([draw(3), torch.zeros(N - 3).double()])
    for f, dense in ((exp, scipy.linalg.expm), (of_eigenvalues(torch.log), scipy.linalg.logm)):
        stack = torch.stack([v, VECTORS[0]])  # of different ranks
        found = arnoldi_function(lambda x: x @ matrix.T, f, stack)
        expected = stack @ torch.from_numpy(dense(matrix.numpy())).T
        torch.testing.assert_close(found.value, expected, rtol=1e-9, atol=1e-9)
        assert found.error[0] == 0


def test_half_precision_is_for_products_only():
    found = arnoldi_function(lambda v: v @ MATRIX.T.to(v.dtype), exp, VECTORS[0].bfloat16(), depth=4)
    assert found.value.dtype == torch.float32


def test_what_has_no_such_function_is_refused():
    v = torch.ones(2, dtype=torch.float64)
    jordan = torch.eye(3, dtype=torch.float64) + torch.diag(torch.ones(2, dtype=torch.float64), 1)
    with pytest.raises(OperatorError, match="nearly dependent"):
        arnoldi_function(lambda x: x @ jordan.T, of_eigenvalues(torch.sqrt), torch.ones(3, dtype=torch.float64))
    negative = torch.diag(torch.tensor([-1.0, -2.0], dtype=torch.float64))
    with pytest.raises(OperatorError, match=r"not real.*-"):
        arnoldi_function(lambda x: x @ negative, of_eigenvalues(torch.sqrt), v)
