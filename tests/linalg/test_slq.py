"""Stochastic Lanczos quadrature: exactness, accuracy, no bias, gradients, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from problems import basis, generator, with_spectrum

from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.linalg import slq_logdet, slq_trace

DTYPE = torch.float64


def relative(x, y):
    return float((x - y).norm() / y.norm())


class TestLogDeterminants:
    @pytest.mark.parametrize("n", [1, 2, 9, 300])
    def test_exact_when_the_budget_covers_the_dimension(self, n):
        spectrum = torch.logspace(-3, 0, n, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        leaf = matrix.clone().requires_grad_()
        result = slq_logdet(lambda v: v @ leaf, n)
        assert float(result.value.detach()) == pytest.approx(float(spectrum.log().sum()), rel=1e-9)
        assert result.sem == 0 and result.converged and result.matvecs == n
        (gradient,) = torch.autograd.grad(result.value, leaf)
        assert relative(gradient, torch.linalg.inv(matrix)) < 1e-9

    def test_accuracy_on_a_condition_number_of_a_thousand(self):
        n = 1000
        spectrum = torch.logspace(-3, 0, n, dtype=DTYPE)
        exact = float(spectrum.log().sum())
        matrix = with_spectrum(spectrum)
        for seed in range(1):
            result = slq_logdet(lambda v: v @ matrix, n, probes=30, depth=30, generator=generator(seed))
            assert float(result.value) == pytest.approx(exact, rel=0.03)
            assert result.converged
        assert (result.probes, result.depth, result.matvecs) == (30, 30, 900)

    def test_unbiased_with_an_honest_standard_error(self):
        n = 60
        spectrum = torch.linspace(0.3, 4, n, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        results = [slq_logdet(lambda v: v @ matrix, n, probes=4, depth=14, generator=generator(s)) for s in range(40)]
        values = torch.stack([x.value for x in results])
        spread = values.std()
        assert abs(values.mean() - spectrum.log().sum()) < 4 * spread / 40**0.5
        sem = torch.stack([x.sem for x in results]).square().mean().sqrt()
        assert 0.75 < sem / spread < 1.33

    @pytest.mark.parametrize("depth", [1, 2, 6])
    def test_the_gradient_times_the_operator_is_the_dimension(self, depth):
        n = 50
        matrix = with_spectrum(torch.logspace(-2, 2, n, dtype=DTYPE))
        leaf = matrix.clone().requires_grad_()
        options = {"probes": 3, "depth": depth, "generator": generator()}
        result = slq_logdet(lambda v: v @ leaf, n, **options)
        (found,) = torch.autograd.grad(result.value, leaf)
        assert float((found * matrix).sum()) == pytest.approx(n, rel=1e-12)

    def test_the_gradients_are_unbiased(self):
        n = 16
        matrix = with_spectrum(torch.linspace(0.5, 2, n, dtype=DTYPE))
        leaf = matrix.clone().requires_grad_()
        exact = torch.linalg.inv(matrix.detach())
        found = []
        for seed in range(100):
            options = {"probes": 2, "depth": 5, "generator": generator(seed)}
            (new,) = torch.autograd.grad(slq_logdet(lambda v: v @ leaf, n, **options).value, leaf)
            found.append((new + new.mT) / 2)
        samples = torch.stack(found)
        errors = (samples.mean(0) - exact).abs() / (samples.std(0) / 100**0.5 + 1e-4)
        assert float(errors.max()) < 5

    def test_in_single_precision_on_an_operator_of_low_rank_plus_identity(self):
        n, rank = 300, 30
        spectrum = torch.ones(n, dtype=DTYPE)
        spectrum[:rank] += torch.logspace(0, 4, rank, dtype=DTYPE)
        matrix = with_spectrum(spectrum)

        def gradient(dtype):
            leaf = matrix.to(dtype).requires_grad_()
            options = {"probes": 1, "depth": 40, "generator": generator()}
            result = slq_logdet(lambda v: v @ leaf, n, **options)
            (found,) = torch.autograd.grad(result.value, leaf)
            assert found.dtype == dtype and result.value.dtype == dtype
            return found.double()

        assert relative(gradient(torch.float32), gradient(DTYPE)) < 2e-3

    def test_a_shift_takes_the_null_space_out_of_the_error(self):
        n, shift = 400, torch.tensor(1e-3, dtype=DTYPE, requires_grad=True)
        spectrum = torch.zeros(n, dtype=DTYPE)
        spectrum[:5] = torch.linspace(1, 2, 5, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        result = slq_logdet(lambda v: v @ matrix, n, shift=shift, generator=generator())
        exact = float((spectrum + 1e-3).log().sum())
        assert abs(float(result.value.detach()) - exact) < 4 * float(result.sem) < 0.02 * abs(exact)
        (gradient,) = torch.autograd.grad(result.value, shift)
        assert float(gradient) == pytest.approx(float((1 / (spectrum + 1e-3)).sum()), rel=0.01)
        zero = slq_logdet(lambda v: 0 * v, n, shift=2.0, dtype=DTYPE)
        assert float(zero.value) == pytest.approx(n * math.log(2)) and zero.sem == 0 and zero.converged

    @pytest.mark.parametrize("n", [3, 400])
    def test_no_logarithm_of_what_is_not_positive(self, n):
        spectrum = torch.linspace(-0.5, 1, n, dtype=DTYPE)
        with pytest.raises(NotPositiveDefiniteError, match="not positive definite"):
            slq_logdet(lambda v: v * spectrum, n)
        with pytest.raises(NotPositiveDefiniteError):
            slq_logdet(lambda v: v * spectrum, n, shift=0.4)
        result = slq_logdet(lambda v: v * spectrum, n, shift=0.6)
        assert float(result.value) == pytest.approx(float((spectrum + 0.6).log().sum()), rel=0.1, abs=0.1)
        with pytest.raises(NotPositiveDefiniteError):
            slq_logdet(lambda v: 0 * v, n, dtype=DTYPE)

    def test_too_few_steps_are_reported(self):
        n = 2000
        spectrum = torch.logspace(-6, 0, n, dtype=DTYPE)
        matrix = spectrum
        result = slq_logdet(lambda v: v * matrix, n, probes=20, depth=4, generator=generator())
        assert not result.converged
        assert abs(float(result.value) - float(spectrum.log().sum())) > 4 * float(result.sem)


def test_known_eigenpairs_are_deflated_by_the_caller():
    n = 600
    spectrum = torch.cat([torch.linspace(1, 2, 560, dtype=DTYPE), torch.logspace(1, 3, 40, dtype=DTYPE)])
    matrix, vectors = with_spectrum(spectrum), basis(n)
    leaf, u, exact = matrix.clone().requires_grad_(), vectors[:, -40:], float(spectrum.log().sum())

    def deflated(v):
        inside = v @ u @ u.mT
        return (v - inside) @ leaf - ((v - inside) @ leaf) @ u @ u.mT + inside

    options = {"probes": 4, "depth": 12}
    plain = slq_logdet(lambda v: v @ matrix, n, generator=generator(), **options)
    rest = slq_logdet(deflated, n, generator=generator(), **options)
    value = rest.value + (u.mT @ leaf @ u).diagonal().log().sum()
    assert abs(float(value.detach()) - exact) < 4 * float(rest.sem) < 0.8 * float(plain.sem)
    (found,) = torch.autograd.grad(value, leaf)
    assert float((found * matrix).sum()) == pytest.approx(n, rel=0.05)


class TestTracesOfFunctions:
    def test_indefinite_operators(self):
        n = 500
        spectrum = torch.linspace(-1, 1, n, dtype=DTYPE)
        matrix = with_spectrum(spectrum)
        result = slq_trace(lambda v: v @ matrix, torch.exp, n, generator=generator())
        exact = float(spectrum.exp().sum())
        assert abs(float(result.value) - exact) < 4 * float(result.sem) < 0.1 * exact

    def test_tensors_of_the_function_get_gradients(self):
        n = 400
        spectrum = torch.linspace(0, 1, n, dtype=DTYPE)
        for probes in (2, 30):  # stochastic and exact
            scale = torch.tensor(2.0, dtype=DTYPE, requires_grad=True)
            options = {"probes": probes, "depth": 20}
            result = slq_trace(lambda v: v * spectrum, lambda x, s=scale: torch.log1p(x / s), n, **options)
            (gradient,) = torch.autograd.grad(result.value, scale)
            assert float(gradient) == pytest.approx(float((1 / (spectrum + 2) - 1 / 2).sum()), rel=1e-6)

    def test_no_graph_and_no_gradient_work_without_gradients(self):
        matrix = torch.diag(torch.linspace(1, 2, 400, dtype=DTYPE)).requires_grad_()
        with torch.no_grad():
            result = slq_logdet(lambda v: v @ matrix, 400, probes=2, depth=10)
        assert not result.value.requires_grad and result.matvecs == 20


def test_one_step_does_not_count_as_converged():
    spectrum = torch.linspace(1e-4, 1, 200, dtype=DTYPE)

    options = {"probes": 4, "depth": 1, "generator": generator(), "dtype": DTYPE}
    assert not slq_logdet(lambda x: x * spectrum, 200, **options).converged
