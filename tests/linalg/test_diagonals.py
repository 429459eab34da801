"""Diagonal estimators: no bias, honest standard errors, accuracy, gradients."""

from __future__ import annotations

import pytest
import torch
from problems import generator, normal

from laplace_plus.errors import OperatorError
from laplace_plus.linalg import diagonal

DTYPE = torch.float64
METHODS = ["xdiag", "hutchinson"]


def decaying(n, seed=0):
    vectors = torch.linalg.qr(normal(n, n, seed=seed))[0]
    return (vectors * 0.7 ** torch.arange(n, dtype=DTYPE)) @ vectors.mT


class TestUnbiased:
    n = 10

    @pytest.mark.parametrize("method", METHODS)
    def test_value_standard_error_and_gradient(self, method):
        matrix, weight = normal(self.n, self.n), normal(self.n, seed=1)
        values, errors, gradients = [], [], []
        runs = 100
        for seed in range(runs):
            leaf = matrix.clone().requires_grad_()
            options = {"matvecs": 8, "method": method}
            result = diagonal(lambda v, a=leaf: v @ a.mT, self.n, dtype=DTYPE, generator=generator(seed), **options)
            values.append(result.value.detach())
            errors.append(result.sem)
            gradients.append(torch.autograd.grad(result.value @ weight, leaf)[0])
        sample = torch.stack(values)
        assert float(((sample.mean(0) - matrix.diagonal()).abs() / (sample.std(0) / runs**0.5 + 1e-12)).max()) < 4
        ratio = torch.stack(errors).square().mean(0).sqrt() / sample.std(0)
        assert float(ratio.min()) > 0.7 and float(ratio.max()) < 1.4
        sample = torch.stack(gradients)
        distance = (sample.mean(0) - torch.diag(weight)).abs()
        assert float((distance / (sample.std(0) / runs**0.5 + 1e-12)).max()) < 4.5

    @pytest.mark.quick("algebraic")
    @pytest.mark.parametrize("spectrum", ["flat", "algebraic"])
    def test_xdiags_errors_are_within_the_standard_errors(self, spectrum):
        n, runs = 60, 60
        index = torch.arange(1, n + 1, dtype=DTYPE)
        values = {"flat": 3 - 2 * (index - 1) / (n - 1), "algebraic": index**-2}[spectrum]
        vectors = torch.linalg.qr(normal(n, n))[0]
        matrix = (vectors * values) @ vectors.mT
        inside = []
        for seed in range(runs):
            result = diagonal(lambda v: v @ matrix, n, matvecs=30, symmetric=True, generator=generator(seed))
            inside.append((result.value - matrix.diagonal()).abs() < 2 * result.sem)
        share = torch.stack(inside).double().mean(1)  # of each run: its entries depend on each other
        standard = float(share.std() / runs**0.5)
        assert 0.9 - 4 * standard < float(share.mean())
        assert spectrum == "algebraic" or float(share.mean()) < 0.97, "too large"

    def test_the_sketch_helps_where_the_spectrum_decays(self):
        matrix = decaying(400)
        exact = matrix.diagonal()

        def error(method):
            results = [
                diagonal(lambda v: v @ matrix, 400, method=method, symmetric=True, generator=generator(s))
                for s in range(5)
            ]
            assert all(x.matvecs == 60 for x in results)
            return max(float((x.value - exact).norm() / exact.norm()) for x in results)

        assert error("xdiag") < 1e-3
        assert error("hutchinson") > 1e-2


class TestExact:
    @pytest.mark.parametrize("n", [1, 3, 60])
    @pytest.mark.parametrize("method", METHODS)
    def test_when_the_budget_covers_the_dimension(self, method, n):
        matrix, weight = normal(n, n), normal(n, seed=1)
        leaf = matrix.clone().requires_grad_()
        result = diagonal(lambda v: v @ leaf.mT, n, method=method)
        torch.testing.assert_close(result.value.detach(), matrix.diagonal())
        assert bool((result.sem == 0).all()) and result.converged and result.matvecs == n
        (gradient,) = torch.autograd.grad(result.value @ weight, leaf)
        torch.testing.assert_close(gradient, torch.diag(weight))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_when_the_budget_covers_the_rank(self, dtype):
        left, right = normal(300, 6).to(dtype), normal(300, 6, seed=1).to(dtype)
        result = diagonal(lambda v: (v @ right) @ left.mT, 300, generator=generator())
        exact = (left * right).sum(1)
        assert float((result.value - exact).abs().max()) < 1e3 * torch.finfo(dtype).eps
        assert float(result.sem.abs().max()) < 1e3 * torch.finfo(dtype).eps

    @pytest.mark.parametrize("method", METHODS)
    def test_diagonal_operators_need_one_sign_and_zero_none(self, method):
        spectrum = torch.linspace(-1, 1, 300, dtype=DTYPE)
        result = diagonal(lambda v: v * spectrum, 300, method="hutchinson", matvecs=2)
        torch.testing.assert_close(result.value, spectrum)
        zero = diagonal(lambda v: 0 * v, 300, method=method, dtype=DTYPE)
        assert bool((zero.value == 0).all())


class TestTransposes:
    matrix = decaying(200) + 0.01 * normal(200, 200, seed=2)

    def test_from_differentiation_or_from_the_caller(self):
        leaf = self.matrix
        plain = diagonal(lambda v: v @ leaf.mT, 200, generator=generator())
        given = diagonal(lambda v: v @ leaf.mT, 200, rmatvec=lambda u: u @ leaf, generator=generator())
        torch.testing.assert_close(plain.value, given.value)
        assert plain.matvecs == given.matvecs == 60

    def test_cut_off_from_its_argument(self):
        with pytest.raises(OperatorError, match="cannot differentiate"):
            diagonal(lambda v: v.detach() @ self.matrix.mT, 200, dtype=DTYPE)
        result = diagonal(lambda v: v.detach() @ self.matrix.mT, 200, dtype=DTYPE, rmatvec=lambda u: u @ self.matrix)
        assert bool(torch.isfinite(result.value).all())


class TestControl:
    matrix = decaying(500) + 0.02 * torch.eye(500, dtype=DTYPE)

    def test_the_gradient_is_linear_in_the_operator(self):
        leaf, weight = self.matrix.clone().requires_grad_(), normal(500)
        result = diagonal(lambda v: v @ leaf, 500, matvecs=60, symmetric=True, generator=generator())
        value = result.value @ weight
        (gradient,) = torch.autograd.grad(value, leaf)
        # It is linear in the operator with everything else held fixed, hence consistent with the value.
        assert float((gradient * self.matrix).sum()) == pytest.approx(float(value.detach()), rel=1e-9)

    @pytest.mark.parametrize("method", METHODS)
    def test_narrow_types(self, method):
        first = diagonal(lambda v: v @ self.matrix, 500, method=method, generator=generator(1), dtype=DTYPE).value
        narrow = self.matrix.float()
        single = diagonal(lambda v: v @ narrow, 500, method=method, generator=generator(1)).value
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), first, rtol=0, atol=1e-4)
        half = self.matrix.bfloat16()
        assert diagonal(lambda v: v @ half, 500, method=method, generator=generator(1)).value.dtype == torch.float32

    def test_hutchinson_has_the_gradient_of_the_computed_value(self):
        root = normal(12, 12).requires_grad_()

        def value(root):
            options = {"matvecs": 5, "method": "hutchinson", "generator": generator(), "parameters": [root]}
            return diagonal(lambda v: v @ root @ root.mT, 12, dtype=DTYPE, **options).value

        assert torch.autograd.gradcheck(value, (root,))
