"""Trace estimators: the accuracy their authors report, no bias, honest standard errors, gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import generator, normal, with_spectrum

from laplace_plus.linalg import draw_probes, trace
from laplace_plus.linalg.traces import Sketch

DTYPE = torch.float64
METHODS = ["xtrace", "xnystrace", "hutchinson"]


def semi_definite(n, rank=None, seed=0):
    root = normal(n, rank or n, seed=seed)
    return root @ root.mT / n


class TestProbes:
    @pytest.mark.parametrize("kind", ["signs", "sphere", "gaussian"])
    def test_their_second_moment_is_the_identity(self, kind):
        probes = draw_probes(kind, 40000, 4, generator=generator(), dtype=DTYPE)
        torch.testing.assert_close(probes.mT @ probes / 40000, torch.eye(4, dtype=DTYPE), rtol=0, atol=0.03)
        if kind != "gaussian":
            torch.testing.assert_close(probes.norm(dim=1), torch.full((40000,), 2.0, dtype=DTYPE))

    @given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**6))
    @settings(max_examples=40, deadline=None)
    def test_what_a_sketch_loses_without_a_column(self, m, rank, seed):
        n, rank = 12, min(m, rank)
        sketch = normal(n, rank, seed=seed) @ normal(rank, m, seed=seed + 1)
        made = Sketch(sketch.mT)
        q, r = made.basis.mT, made.triangle
        torch.testing.assert_close(q @ r, sketch, rtol=0, atol=1e-11)
        basis, columns, lost = made.leave_one_out()
        assert basis.shape[1] == rank
        torch.testing.assert_close(basis @ columns, r, rtol=0, atol=1e-11)
        for i in range(m):
            others = torch.cat([sketch[:, :i], sketch[:, i + 1 :]], 1)
            u, s, _ = torch.linalg.svd(others, full_matrices=False)
            u = u[:, s > 1e-10 * max(1.0, float(s.max()) if m > 1 else 1.0)]
            kept = q @ basis @ (torch.eye(rank, dtype=DTYPE) - torch.outer(lost[:, i], lost[:, i])) @ (q @ basis).mT
            torch.testing.assert_close(kept, u @ u.mT, rtol=0, atol=1e-6)


class TestAccuracy:
    """The table of errors for n = 1000 and 60 products, in a random basis: signs are exact for diagonal matrices."""

    n = 1000
    index = torch.arange(1, 1001, dtype=DTYPE)
    spectra = {
        "flat": 3 - 2 * (index - 1) / 999,
        "algebraic": index**-2,
        "exponential": 0.7**index,
        "step": torch.where(index <= 50, 1.0, 1e-3).to(DTYPE),
    }

    @pytest.mark.quick("algebraic-hutchinson-0.12", "step-xtrace-0.034", "exponential-xnystrace-6e-09")
    @pytest.mark.parametrize(
        ("spectrum", "method", "expected"),
        [
            ("flat", "xtrace", 2.0e-3),
            ("flat", "xnystrace", 1.6e-3),
            ("algebraic", "hutchinson", 1.2e-1),
            ("algebraic", "xtrace", 9.5e-4),
            ("algebraic", "xnystrace", 8e-4),
            ("exponential", "hutchinson", 7.6e-2),
            ("exponential", "xtrace", 8e-6),
            ("exponential", "xnystrace", 6e-9),
            ("step", "hutchinson", 2.2e-2),
            ("step", "xtrace", 3.4e-2),
            ("step", "xnystrace", 7e-3),
        ],
    )
    def test_errors_and_standard_errors(self, spectrum, method, expected):
        values = self.spectra[spectrum]
        exact, matrix = values.sum(), with_spectrum(values)
        results = [trace(lambda v: v @ matrix, self.n, method=method, generator=generator(seed)) for seed in range(16)]
        error = torch.stack([x.value / exact - 1 for x in results]).square().mean().sqrt()
        sem = torch.stack([x.sem / exact for x in results]).square().mean().sqrt()
        assert expected / 3 < error < 2 * expected
        assert 0.55 < sem / error < 2.8
        assert all(x.matvecs <= 60 and x.converged for x in results)

    @pytest.mark.parametrize("method", METHODS)
    def test_in_single_precision(self, method):
        values = self.spectra["exponential"].float()
        result = trace(lambda v: v * values, self.n, method=method, generator=generator())
        assert result.value.dtype == torch.float32
        limit = {"xtrace": 5e-5, "xnystrace": 1e-5, "hutchinson": 1e-6}[method]
        assert float(result.value) == pytest.approx(float(values.sum()), rel=limit)

    @pytest.mark.parametrize("method", METHODS)
    def test_products_in_half_precision(self, method):
        values = (1 + torch.arange(200) % 4).bfloat16()
        result = trace(lambda v: v * values, 200, method=method, generator=generator())
        assert result.value.dtype == torch.float32
        assert abs(float(result.value) - 500) < 5 * float(result.sem) + 5


class TestUnbiased:
    n = 10

    @pytest.mark.parametrize("method", METHODS)
    def test_value_standard_error_and_gradient(self, method):
        matrix = semi_definite(self.n) if method == "xnystrace" else normal(self.n, self.n)
        values, errors, gradients = [], [], []
        runs = 100
        for seed in range(runs):
            leaf = matrix.clone().requires_grad_()
            options = {"matvecs": 8, "method": method}
            result = trace(lambda v, a=leaf: v @ a.mT, self.n, dtype=DTYPE, generator=generator(seed), **options)
            values.append(result.value.detach())
            errors.append(result.sem)
            gradients.append(torch.autograd.grad(result.value, leaf)[0])
        sample = torch.stack(values)
        assert abs(sample.mean() - matrix.trace()) < 4 * sample.std() / runs**0.5
        assert 0.4 < torch.stack(errors).square().mean().sqrt() / sample.std() < 2.5
        sample = torch.stack(gradients)
        distance = (sample.mean(0) - torch.eye(self.n, dtype=DTYPE)).abs()
        assert float((distance / (sample.std(0) / runs**0.5 + 1e-12)).max()) < 4.5

    def test_operators_that_are_neither_symmetric_nor_definite(self):
        matrix = normal(200, 200) / 200**0.5 + torch.diag(torch.linspace(-1, 2, 200, dtype=DTYPE))
        for method in ("xtrace", "hutchinson"):
            result = trace(lambda v: v @ matrix.mT, 200, method=method, generator=generator(3))
            assert abs(result.value - matrix.trace()) < 4 * result.sem


class TestExact:
    @pytest.mark.parametrize("n", [1, 2, 5, 60])
    @pytest.mark.parametrize("method", METHODS)
    def test_when_the_budget_covers_the_dimension(self, method, n):
        matrix = semi_definite(n)
        leaf = matrix.clone().requires_grad_()
        result = trace(lambda v: v @ leaf.mT, n, method=method)
        torch.testing.assert_close(result.value.detach(), matrix.trace())
        assert result.sem == 0 and result.converged and result.matvecs == n
        (gradient,) = torch.autograd.grad(result.value, leaf)
        assert torch.equal(gradient, torch.eye(n, dtype=DTYPE))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
    def test_when_the_budget_covers_the_rank(self, method, dtype):
        matrix = semi_definite(300, 7).to(dtype)
        result = trace(lambda v: v @ matrix, 300, method=method, generator=generator())
        eps = torch.finfo(dtype).eps
        assert abs(result.value - matrix.trace()) < 200 * eps * matrix.trace()
        assert result.sem < 100 * eps * matrix.trace()

    @pytest.mark.parametrize("method", METHODS)
    def test_the_zero_operator(self, method):
        result = trace(lambda v: 0 * v, 300, method=method, dtype=DTYPE)
        assert result.value == 0 and result.sem == 0


class TestControl:
    matrix = semi_definite(500, 400)

    @pytest.mark.parametrize("method", ["xtrace", "hutchinson"])
    def test_the_gradient_is_linear_in_the_operator(self, method):
        leaf = self.matrix.clone().requires_grad_()
        result = trace(lambda v: v @ leaf, 500, matvecs=60, method=method, generator=generator())
        assert result.matvecs == 60
        (gradient,) = torch.autograd.grad(result.value, leaf)
        # It is linear in the operator with everything else held fixed, hence consistent with the value.
        assert float((gradient * self.matrix).sum()) == pytest.approx(float(result.value.detach()), rel=1e-10)

    def test_hutchinson_has_the_gradient_of_the_computed_value(self):
        root = normal(12, 12).requires_grad_()

        def value(root):
            options = {"matvecs": 5, "method": "hutchinson", "generator": generator(), "parameters": [root]}
            return trace(lambda v: v @ root @ root.mT, 12, dtype=DTYPE, **options).value

        assert torch.autograd.gradcheck(value, (root,))
