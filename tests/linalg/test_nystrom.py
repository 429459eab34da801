"""The Nyström approximation: exactness, order, gradients, and what it does as a preconditioner."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import generator, normal, with_spectrum

from laplace_plus.errors import ConfigurationError
from laplace_plus.linalg.nystrom import nystrom

DTYPE = torch.float64


def dense(found):
    return (found.vectors.mT * found.values) @ found.vectors


class TestApproximation:
    @given(st.integers(1, 25), st.integers(1, 25), st.integers(0, 25), st.integers(0, 10**6))
    @settings(max_examples=40, deadline=None)
    def test_never_above_the_operator_and_exact_from_its_rank_on(self, n, rank, true_rank, seed):
        root = normal(n, min(true_rank, n), seed=seed)
        matrix = root @ root.mT
        result = nystrom(lambda v: v @ matrix, n, rank, generator=generator(seed), dtype=DTYPE)
        count = min(rank, n)
        assert result.values.shape == (count,) and result.vectors.shape == (count, n)
        identity = torch.eye(count, dtype=DTYPE)
        torch.testing.assert_close(result.vectors @ result.vectors.mT, identity, rtol=0, atol=1e-9)
        assert bool((result.values >= 0).all()) and bool((result.values.diff() <= 0).all())
        approximation = dense(result)
        size = float(matrix.abs().max()) + 1e-300
        assert float(torch.linalg.eigvalsh(matrix - approximation).min()) > -1e-9 * size
        if rank >= true_rank:
            torch.testing.assert_close(approximation, matrix, rtol=0, atol=1e-9 * size)
        assert result.matvecs == count

    def test_close_to_the_best_approximation_of_a_decaying_spectrum(self):
        spectrum = 0.8 ** torch.arange(300, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        result = nystrom(lambda v: v @ matrix, 300, 40, generator=generator())
        error = torch.linalg.matrix_norm(matrix - dense(result), 2)
        assert spectrum[40] <= error < 30 * spectrum[40]
        torch.testing.assert_close(result.values[:10], spectrum[:10], rtol=1e-2, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_types(self, dtype):
        spectrum = torch.cat([torch.tensor([4.0, 2.0, 1.0]), torch.zeros(60)]).to(DTYPE)
        matrix = with_spectrum(spectrum).to(dtype)
        result = nystrom(lambda v: v @ matrix, 63, 10, generator=generator())
        assert result.values.dtype == torch.float32
        limit = 1e-5 if dtype == torch.float32 else 0.2
        torch.testing.assert_close(result.values[:3], spectrum[:3].float(), rtol=limit, atol=0)
        assert float(result.values[3:].max()) < limit * 4


class TestGradients:
    @pytest.mark.parametrize("rank", [3, 9])
    def test_of_the_computed_result(self, rank):
        root = normal(9, 9, seed=4)
        inputs = (root.requires_grad_(), torch.linspace(0.5, 3, 9, dtype=DTYPE).requires_grad_())

        def results(root, diagonal):
            options = {"generator": generator(), "dtype": DTYPE, "parameters": [root, diagonal]}
            return nystrom(lambda v: (v @ root) @ root.mT + v * diagonal, 9, rank, **options).values

        assert torch.autograd.gradcheck(results, inputs, atol=1e-6, fast_mode=True)

    def test_finite_for_repeated_and_for_missing_values(self):
        leaf = torch.diag(torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0], dtype=DTYPE)).requires_grad_()
        for rank in (4, 5):
            found = nystrom(lambda v: v @ leaf, 5, rank, generator=generator())
            (gradient,) = torch.autograd.grad(found.values.sum(), leaf)
            torch.testing.assert_close(gradient[:3, :3], torch.eye(3, dtype=DTYPE), rtol=0, atol=1e-6)


class TestPreconditioner:
    def test_it_is_the_formula(self):
        matrix = with_spectrum(0.5 ** torch.arange(30, dtype=DTYPE))
        found = nystrom(lambda v: v @ matrix, 30, 6, generator=generator())
        inverse = found.preconditioner(0.1)(torch.eye(30, dtype=DTYPE))
        u, inner = found.vectors, (found.values[-1] + 0.1) / (found.values + 0.1)
        expected = torch.eye(30, dtype=DTYPE) - u.mT @ u + (u.mT * inner) @ u
        torch.testing.assert_close(inverse, expected)

    def test_it_lowers_the_condition_number(self):
        spectrum = 1e3 * 0.85 ** torch.arange(400, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        shift = 0.1
        apply = nystrom(lambda v: v @ matrix, 400, 80, generator=generator()).preconditioner(shift)
        system = matrix + shift * torch.eye(400, dtype=DTYPE)
        root = torch.linalg.cholesky(apply(torch.eye(400, dtype=DTYPE)))
        assert float(torch.linalg.cond(system)) > 5e3
        assert float(torch.linalg.cond(root.mT @ system @ root)) < 10

    def test_it_takes_other_types_and_stacks(self):
        matrix = with_spectrum(torch.linspace(0.1, 1, 20, dtype=DTYPE))
        apply = nystrom(lambda v: v @ matrix, 20, 4, generator=generator()).preconditioner(torch.tensor(0.5))
        stack = normal(2, 3, 20)
        torch.testing.assert_close(apply(stack)[1, 2], apply(stack[1, 2]))
        assert apply(stack.float()).dtype == torch.float32

    @pytest.mark.parametrize("shift", [-1.0, 0.0, float("nan")])
    def test_shifts_that_do_not_invert(self, shift):
        found = nystrom(lambda v: 0 * v, 10, 3, dtype=DTYPE)
        with pytest.raises(ConfigurationError, match="shift"):
            found.preconditioner(shift)
