"""Functions of operators against eigendecompositions, and their gradients against finite differences."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import basis, normal, with_spectrum
from torch.autograd import gradcheck

from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.linalg import matrix_function
from laplace_plus.linalg.quadrature import divided_differences

DTYPE = torch.float64


def dense_function(f, matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * f(values)) @ vectors.mT


def relative(x, y):
    return float((x - y).norm() / y.norm())


FUNCTIONS = {
    "log": torch.log,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "cube": lambda x: x**3,
    "one": torch.ones_like,
    "step": lambda x: torch.tanh(20 * (x - 1)),
}


class TestDividedDifferences:
    @pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-12, 1e-8, 1e-5, 1e-3, 1e-2, 0.1, 1.0])
    @pytest.mark.parametrize("at", [1e-3, 1.0, 1e4])
    def test_the_logarithm_at_every_distance(self, gap, at):
        x = torch.tensor([at, at * (1 + gap)], dtype=DTYPE)
        found = divided_differences(torch.log, x, x)
        relative_gap = float((x[1] - x[0]) / x[0])
        exact = (math.log1p(relative_gap) / relative_gap if relative_gap else 1.0) / at
        assert found[0, 0] == pytest.approx(1 / at, rel=1e-12)
        assert found[0, 1] == pytest.approx(exact, rel=1e-11)
        assert torch.equal(found, found.mT)

    def test_an_offset_far_above_the_eigenvalues_costs_no_digits(self):
        x = torch.tensor([1e-9, 2e-9, 1e-3], dtype=DTYPE)
        found = divided_differences(lambda t: torch.log(t + 1.0), x, x)
        gap = x[:, None] - x
        exact = torch.log1p(gap / (1 + x)) / gap
        off = ~torch.eye(3, dtype=torch.bool)
        torch.testing.assert_close(found[off], exact[off], rtol=1e-11, atol=0)

    def test_a_function_that_oscillates_between_its_arguments(self):
        x = torch.linspace(0, 10, 41, dtype=DTYPE)
        found = divided_differences(lambda t: torch.sin(40 * torch.pi * t), x, x)
        # Equal values and slopes at all points: the quotient is zero although every slope is 40π.
        off = ~torch.eye(41, dtype=torch.bool)
        assert found[off].abs().max() < 1e-9
        torch.testing.assert_close(found.diagonal(), torch.full_like(x, 40 * torch.pi))


class TestFunctions:
    @pytest.mark.diagonal
    @pytest.mark.parametrize("name", FUNCTIONS)
    @pytest.mark.parametrize("n", [1, 2, 7, 25])
    def test_exact_when_the_depth_covers_the_dimension(self, name, n):
        spectrum = torch.linspace(0.5, 2, n, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        v = normal(3, n, seed=1)
        f = FUNCTIONS[name]
        exact = v @ dense_function(f, matrix)
        result = matrix_function(lambda x: x @ matrix, f, v, depth=40)
        torch.testing.assert_close(result.value, exact, rtol=1e-9, atol=1e-9)
        assert result.converged and result.depth <= n and bool((result.error == 0).all())
        assert result.matvecs == 3 * n

    @given(st.integers(2, 30), st.integers(1, 12), st.integers(0, 10**6))
    @settings(max_examples=12, deadline=None)
    def test_polynomials_are_exact(self, n, depth, seed):
        matrix = normal(n, n, seed=seed)
        matrix = (matrix + matrix.mT) / n**0.5
        v = normal(n, seed=seed + 1)
        depth = min(depth, n)
        power = matrix_function(lambda x: x @ matrix, lambda t: t ** (2 * depth - 1), v, depth=depth).value @ v
        exact = v.clone()
        for _ in range(2 * depth - 1):
            exact = exact @ matrix
        assert float(power) == pytest.approx(float(exact @ v), rel=1e-8, abs=1e-8 * 3 ** (2 * depth) * n)
        value = matrix_function(lambda x: x @ matrix, lambda t: t ** (depth - 1), v, depth=depth).value
        exact = v.clone()
        for _ in range(depth - 1):
            exact = exact @ matrix
        torch.testing.assert_close(value, exact, rtol=1e-8, atol=1e-8 * 3**depth)

    def test_krylov_spaces_of_different_dimensions_in_one_stack(self):
        matrix, vectors = with_spectrum(torch.arange(1, 9, dtype=DTYPE)), basis(8)
        v = torch.stack([vectors[:, 0], vectors[:, 2] + vectors[:, 5], normal(8)])
        result = matrix_function(lambda x: x @ matrix, torch.log, v, depth=8)
        torch.testing.assert_close(result.value, v @ dense_function(torch.log, matrix), rtol=1e-9, atol=1e-9)

    def test_one_vector_reaches_the_operator_as_one_vector(self):
        matrix = with_spectrum(torch.linspace(1, 3, 6, dtype=DTYPE))
        v = normal(6)
        result = matrix_function(lambda x: matrix @ x, torch.sqrt, v)  # right for vectors only
        torch.testing.assert_close(result.value, v @ dense_function(torch.sqrt, matrix))
        assert result.error.shape == ()

    def test_whether_it_converged_is_told(self):
        spectrum = torch.logspace(-3, 0, 400, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        v = normal(2, 400, seed=3)
        exact = v @ dense_function(torch.log, matrix)
        result = matrix_function(lambda x: x @ matrix, torch.log, v, depth=250)
        assert result.converged and result.matvecs == 2 * result.depth == 500
        assert relative(result.value, exact) < 1e-6
        short = matrix_function(lambda x: x @ matrix, torch.log, v, depth=12)
        assert not short.converged and short.depth == 12
        assert bool((short.error > 0).all())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_types(self, dtype):
        spectrum = torch.linspace(1, 2, 20, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        narrow = matrix.to(dtype)
        v = normal(2, 20).to(dtype)
        result = matrix_function(lambda x: x @ narrow, torch.log, v)
        assert result.value.dtype == torch.float32
        exact = (v.to(DTYPE) @ dense_function(torch.log, matrix)).float()
        assert relative(result.value, exact) < (1e-5 if dtype is torch.float32 else 0.05)


class TestFunctionGradients:
    root = normal(4, 4, seed=5) / 4**0.5

    def apply(self, root, v, offset, depth):
        return matrix_function(
            lambda x: (x @ root) @ root.mT + 0.3 * x,
            lambda t: torch.log(t + offset),
            v,
            depth=depth,
            parameters=[root],
        ).value

    def test_the_gradient_is_exact_on_the_whole_space(self):
        inputs = [self.root, normal(2, 4, seed=6), torch.tensor(0.7, dtype=DTYPE)]
        inputs = [x.clone().requires_grad_() for x in inputs]
        assert gradcheck(partial(self.apply, depth=4), inputs, atol=1e-7)

    def test_the_gradient_converges_to_the_dense_one(self):
        spectrum = torch.linspace(0.5, 3, 60, dtype=DTYPE)
        base = with_spectrum(spectrum)
        v0, weight = normal(2, 60, seed=7), normal(2, 60, seed=8)

        def gradients(evaluate):
            matrix, v = base.clone().requires_grad_(), v0.clone().requires_grad_()
            value = evaluate(matrix, v)
            (value * weight).sum().backward()
            return (matrix.grad + matrix.grad.mT) / 2, v.grad

        def exact(matrix, v):
            return v @ dense_function(torch.log, (matrix + matrix.mT) / 2)

        expected = gradients(exact)
        errors = []
        for depth in (6, 25):
            found = gradients(lambda m, w, d=depth: matrix_function(lambda z: z @ m, torch.log, w, depth=d).value)
            errors.append(max(relative(a, b) for a, b in zip(found, expected, strict=True)))
        assert errors[1] < 1e-8 < errors[0] < 0.1

    def test_repeated_eigenvalues_have_finite_gradients(self):
        matrix = torch.eye(6, dtype=DTYPE).requires_grad_()
        v = normal(6)
        value = matrix_function(lambda x: x @ matrix, torch.log, v).value
        (gradient,) = torch.autograd.grad(value @ v, matrix)
        torch.testing.assert_close(gradient, torch.outer(v, v))

    def test_a_cotangent_of_zero_for_one_of_the_vectors(self):
        matrix = with_spectrum(torch.linspace(1, 2, 6, dtype=DTYPE))
        v = normal(2, 6).requires_grad_()
        value = matrix_function(lambda x: x @ matrix, torch.exp, v).value
        (gradient,) = torch.autograd.grad(value[0].sum(), v)
        assert bool((gradient[1] == 0).all())
        torch.testing.assert_close(gradient[0], dense_function(torch.exp, matrix).sum(0))


class TestOneStep:
    """After one step there is nothing to compare with."""

    spectrum = torch.linspace(0.01, 10, 100, dtype=DTYPE)

    def test_no_error_is_known(self):
        v = torch.ones(100, dtype=DTYPE)
        found = matrix_function(lambda x: x * self.spectrum, torch.sqrt, v, depth=1)
        assert not found.converged and bool((found.error == math.inf).all())
        exact = matrix_function(lambda x: x * self.spectrum, lambda x: 2 * x + 1, v / 10, depth=1)
        assert not exact.converged

    def test_of_an_invariant_space_is_exact(self):
        found = matrix_function(lambda x: 4 * x, torch.sqrt, torch.ones(100, dtype=DTYPE), depth=1)
        assert found.converged and found.error == 0
        torch.testing.assert_close(found.value, torch.full((100,), 2.0, dtype=DTYPE))


class TestInvariantSpaces:
    """The gradient of ``f(A) v`` needs more than the space of v, which ends early here for some of the vectors."""

    spectrum = torch.arange(1.0, 11, dtype=DTYPE)

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_gradient_of_the_default(self, count):
        v = torch.zeros(3, 10, dtype=DTYPE)
        v[0, 0], v[1, :3], v[2] = 1, 1, 1  # one, three and ten eigenvectors
        v = v[:count].requires_grad_()
        scale, cotangent = torch.ones(10, dtype=DTYPE, requires_grad=True), normal(count, 10)
        value = matrix_function(lambda x: x * (self.spectrum * scale), torch.log, v, depth=10).value
        to_v, to_scale = torch.autograd.grad(value, [v, scale], cotangent)
        torch.testing.assert_close(to_v, cotangent * self.spectrum.log())
        torch.testing.assert_close(to_scale, (cotangent * v.detach()).sum(0))


class TestBadFunctions:
    matrix = torch.diag(torch.tensor([-1.0, 1.0, 2.0], dtype=DTYPE))

    def test_a_function_that_is_not_finite_on_the_spectrum(self):
        with pytest.raises(NonFiniteError, match="not finite"):
            matrix_function(lambda x: x @ self.matrix, torch.log, torch.ones(3, dtype=DTYPE))

    def test_a_function_that_is_not_elementwise(self):
        with pytest.raises(ConfigurationError, match="elementwise"):
            matrix_function(lambda x: x @ self.matrix, torch.sum, torch.ones(3, dtype=DTYPE))

    def test_a_function_that_torch_cannot_differentiate(self):
        matrix = self.matrix.clone().requires_grad_()
        result = matrix_function(lambda x: x @ matrix, lambda t: t.detach().square(), torch.ones(3, dtype=DTYPE))
        with pytest.raises(ConfigurationError, match="cannot differentiate"):
            result.value.sum().backward()
