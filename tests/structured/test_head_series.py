"""Variances of a softmax head by a series: their values and bound, and when they are not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_reference import relative_error

from laplace_plus.structured.softmax_head import series as head_series
from laplace_plus.structured.softmax_head.gradients import HeadStack
from laplace_plus.structured.softmax_head.precision import HeadFactor
from laplace_plus.structured.softmax_head.rows import HeadRows
from laplace_plus.structured.softmax_head.series import HeadSeries

N, D, C, B = 75, 24, 600, 40
DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def means(common: float, size: int) -> torch.Tensor:
    """What features have in common: one direction, and for half of them another one."""
    result = torch.full((size, D), common, dtype=DOUBLE)
    result[::2, ::2] *= -1
    return result


def rows_of(*, peaked: float = 0.1, common: float = 0.0, size: int = C, n: int = N) -> HeadRows:
    """Probabilities whose classes differ by more than their rows do, as those of a network do."""
    scores = 0.3 * draw(size, seed=1) + peaked * draw(n, size, seed=2)
    return HeadRows((draw(n, D, seed=3) + means(common, n)).float().double(), scores.softmax(1).float().double(), True)


def inputs(common: float = 0.0) -> torch.Tensor:
    return (draw(B, D, seed=4) + means(common, B)).float().double()


def single(rows: HeadRows) -> HeadRows:
    return HeadRows(rows.features.float(), rows.scales.float(), rows.coupled)


def factor_of(rows: HeadRows, weight: float = 1.3, precision: float = 4.0) -> HeadFactor:
    return HeadFactor(rows, torch.tensor(weight, dtype=DOUBLE), torch.tensor(precision, dtype=DOUBLE))


def weigh(factor: HeadFactor, features: torch.Tensor) -> torch.Tensor:
    stack = HeadStack(features.to(factor.rows.features), torch.arange(factor.n_outputs), factor.n_outputs)
    return factor.weigh(stack, "diagonal").double()


def series_of(rows: HeadRows, dtype: torch.dtype, weight: float = 1.3, precision: float = 4.0) -> HeadSeries | None:
    numbers = (torch.tensor(value, dtype=DOUBLE) for value in (weight, precision))
    return HeadSeries.create(rows.features, rows.scales, *numbers, dtype)


def dense(rows: HeadRows, features: torch.Tensor, weight: float = 1.3, precision: float = 4.0) -> torch.Tensor:
    """``φᵀ [(w H + δ)⁻¹]_cc φ`` from the curvature written out."""
    size = rows.scales.shape[1]
    identity = torch.eye(size * D, dtype=DOUBLE)
    inverse = torch.linalg.inv(weight * rows.dense() + precision * identity).view(size, D, size, D)
    return torch.einsum("bi,cicj,bj->bc", features, inverse, features)


@pytest.mark.parametrize("common", [0.0, 4.0, 6.0])
@pytest.mark.parametrize("weight", [0.7, 1.3])
def test_they_are_those_of_the_exact_matrices_in_float32(common, weight):
    rows, features = rows_of(common=common), inputs(common)
    factor, exact = factor_of(single(rows), weight), factor_of(rows, weight)
    got, want = weigh(factor, features), weigh(exact, features)
    assert factor._series is not None
    assert factor._series._strong == (2 if common else 0)
    assert factor._kept is factor._variances is None, "no class has a matrix of its own"
    assert exact._series is None  # float64 keeps its digits
    rounding = head_series.ROUNDINGS * torch.finfo(torch.float32).eps
    assert (got / want - 1).abs().max() < rounding


def test_they_are_those_of_the_curvature_written_out(monkeypatch):
    limit = 1e-3  # of few classes each counts for more
    monkeypatch.setattr(head_series, "ROUNDINGS", limit / torch.finfo(torch.float32).eps)
    rows, features = rows_of(size=120, common=4.0, peaked=0.02), inputs(4.0)
    series = series_of(single(rows), torch.float32, precision=8.0)
    assert series is not None
    got = series(features.float())
    assert got is not None
    assert (got / dense(rows, features, precision=8.0) - 1).abs().max() < limit / 4


@pytest.mark.parametrize("n", [20, N])
@pytest.mark.parametrize("common", [0.0, 4.0, 6.0])
@pytest.mark.parametrize("peaked", [0.02, 0.1, 0.2])
def test_the_bound_holds(common, peaked, n, monkeypatch):
    """In float64 there is nothing but the error that is bounded."""
    rows, features = rows_of(peaked=peaked, common=common, n=n), inputs(common)
    want = weigh(factor_of(rows), features)
    eps, tried = torch.finfo(DOUBLE).eps, []
    for exponent in range(-14, -3):
        limit = 4.0**exponent
        monkeypatch.setattr(head_series, "ROUNDINGS", limit / eps)
        series = series_of(rows, DOUBLE)
        got = None if series is None else series(features)
        if got is not None:
            error = (got / want - 1).abs().max().item()
            assert error < limit
            tried.append(error)
            break
    assert tried, "the bound was never small enough"
    assert tried[0] > 1e-11, "nothing was left out"


def test_derivatives_are_those_of_the_matrices():
    rows, weights = rows_of(common=4.0), draw(B, C, seed=5)

    def gradient(factor: HeadFactor) -> torch.Tensor:
        features = inputs(4.0).to(factor.rows.features).requires_grad_()
        (found,) = torch.autograd.grad((weigh(factor, features) * weights).sum(), features)
        return found.double()

    assert relative_error(gradient(factor_of(single(rows))), gradient(factor_of(rows))) < 1e-4


def test_probabilities_of_zero_are_allowed():
    rows = rows_of()
    scales = rows.scales.clone()
    scales[3, 5], scales[7, :4] = 0, 1e-30
    rows = HeadRows(rows.features, (scales / scales.sum(1, keepdim=True)).float().double(), True)
    factor = factor_of(single(rows))
    assert relative_error(weigh(factor, inputs()), weigh(factor_of(rows), inputs())) < 1e-5


@pytest.mark.parametrize("why", ["peaked", "large", "many directions"])
def test_otherwise_every_class_has_a_matrix(why):
    rows = {"peaked": rows_of(peaked=3.0), "large": rows_of(size=60)}.get(why, rows_of())
    precision = 0.01 if why == "many directions" else 4.0
    factor = factor_of(single(rows), precision=precision)
    want = weigh(factor_of(rows, precision=precision), inputs())
    assert relative_error(weigh(factor, inputs()), want) < 1e-4
    assert factor._series is None
    assert factor._kept is not None


def test_inputs_for_which_the_bound_is_too_large_are_refused(monkeypatch):
    """Whether the bound is small enough is seen for each input; where it is not, the matrices are computed."""
    rows = rows_of()
    factor = factor_of(single(rows))
    weigh(factor, inputs())
    series = factor._series
    assert series is not None
    monkeypatch.setattr(series, "_changes", series._changes + 2 * series._limit)
    assert relative_error(weigh(factor, inputs()), weigh(factor_of(rows), inputs())) < 1e-5
    assert factor._series is None
    assert factor._kept is not None


def test_what_the_sum_of_all_classes_is_taken_for_counts(monkeypatch):
    """Each part of the coupling is needed, and a wrong one shows."""
    rows, features = rows_of(common=6.0), inputs(6.0)
    want = weigh(factor_of(rows), features)
    known = head_series._coupling
    limit = head_series.ROUNDINGS * torch.finfo(torch.float32).eps

    def error(**others) -> float:
        def changed(*arguments):
            found = known(*arguments)
            return replace(found, **{name: factor * getattr(found, name) for name, factor in others.items()})

        monkeypatch.setattr(head_series, "_coupling", changed)
        series = series_of(single(rows), torch.float32)
        assert series is not None
        got = series(features.float())
        assert got is not None
        return (got.double() / want - 1).abs().max().item()

    assert error() < limit
    for name in ("level", "leading"):
        assert error(**{name: 0.9}) > limit
