"""Operators far from the size of one: the same answers, or an error, never a wrong number."""

from __future__ import annotations

import pytest
import torch
from problems import generator
from torch import Tensor

from laplace_plus import linalg
from laplace_plus.errors import NonFiniteError, OperatorError
from laplace_plus.linalg.solving import Status

SPECTRUM = torch.linspace(1.0, 7.0, 60)
TALL = torch.linalg.qr(torch.randn(30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
TALL = TALL * torch.linspace(1.0, 4.0, 20, dtype=torch.float64)


def scaled(scale: float):
    return lambda v: v * (scale * SPECTRUM)


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_single_precision_within_its_squares(scale):
    ones = torch.ones(60)
    plain = linalg.lanczos(scaled(1.0), ones, 8)
    torch.testing.assert_close(linalg.lanczos(scaled(scale), ones, 8).diagonal / scale, plain.diagonal)
    top = linalg.eigsh(scaled(scale), 60, 2, generator=generator())
    assert top.converged
    torch.testing.assert_close(top.values / scale, SPECTRUM[-2:].flip(0))
    estimate = linalg.slq_logdet(scaled(scale), 60, probes=2, depth=10, generator=generator())
    one = linalg.slq_logdet(scaled(1.0), 60, probes=2, depth=10, generator=generator())
    shift = 60 * torch.tensor(scale, dtype=torch.float64).log().float()
    torch.testing.assert_close(estimate.value - shift, one.value, rtol=0, atol=2e-3)
    sizes = linalg.nystrom(scaled(scale), 60, rank=5, generator=generator()).values / scale
    torch.testing.assert_close(sizes, linalg.nystrom(scaled(1.0), 60, rank=5, generator=generator()).values)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_that_vanish_or_overflow_are_errors(scale):
    uses = [
        lambda: linalg.lanczos(scaled(scale), torch.ones(60), 4),
        lambda: linalg.arnoldi(scaled(scale), torch.ones(60), 4),
        lambda: linalg.slq_logdet(scaled(scale), 60, probes=2, depth=5),
        lambda: linalg.eigsh(scaled(scale), 60, 2),
        lambda: linalg.nystrom(scaled(scale), 60, rank=4),
        lambda: linalg.trace(scaled(scale), 60, matvecs=10, method="xnystrace"),
    ]
    for use in uses:
        with pytest.raises((NonFiniteError, OperatorError)):
            use()


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_least_squares_report_them_as_a_status(scale, stacked):
    b = torch.ones(2, 5) if stacked else torch.ones(5)
    solution = linalg.lsmr(lambda v: v * scale, lambda u: u * scale, b)
    assert solution.status is Status.NOT_FINITE and bool(solution.value.isnan().all())


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1.0, 1e12])
def test_the_condition_number_has_no_scale(scale):
    b = torch.ones(30, dtype=torch.float64)

    def forward(v: Tensor) -> Tensor:
        return v @ (scale * TALL).T

    solution = linalg.lsmr(forward, lambda u: u @ (scale * TALL), b)
    assert solution.converged
    assert 1.5 < solution.condition_number < 4, "a lower bound of 4"
    expected = torch.linalg.lstsq(TALL, b[:, None]).solution[:, 0]
    torch.testing.assert_close(solution.value * scale, expected, rtol=1e-8, atol=1e-8)
