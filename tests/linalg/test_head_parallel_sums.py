"""Variances of a softmax head from one inverse for each class: their values and bound, and when they are not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_reference import relative_error

from laplace_plus.linalg import head_parallel_sums
from laplace_plus.linalg.head_forms import QuadraticForms
from laplace_plus.linalg.head_inverses import inverse_by_blocks, inverse_in_quarters
from laplace_plus.linalg.head_stack import HeadStack
from laplace_plus.linalg.head_variances import HeadVariances
from laplace_plus.linalg.heads import HeadFactor, HeadRows

N, D, C, B = 75, 24, 600, 40
DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def rows_of(*, peaked: float = 0.1, common: float = 0.0, size: int = C) -> HeadRows:
    """Probabilities whose classes differ by more than their rows do, as those of a network do."""
    scores = 0.3 * draw(size, seed=1) + peaked * draw(N, size, seed=2)
    return HeadRows((draw(N, D, seed=3) + common).float().double(), scores.softmax(1).float().double(), True)


def single(rows: HeadRows) -> HeadRows:
    return HeadRows(rows.features.float(), rows.scales.float(), rows.coupled)


def factor_of(rows: HeadRows, weight: float = 1.3, precision: float = 4.0) -> HeadFactor:
    return HeadFactor(rows, torch.tensor(weight), torch.tensor(precision))


def weigh(factor: HeadFactor, features: torch.Tensor) -> torch.Tensor:
    stack = HeadStack(features.to(factor.dtype), torch.arange(factor.n_outputs), factor.n_outputs)
    result = factor.weigh(stack, "diagonal").double()
    assert factor._variances is not None
    return result


def variances_of(rows: HeadRows, dtype: torch.dtype, weight: float = 1.3, precision: float = 4.0) -> HeadVariances:
    numbers = (torch.tensor(value, dtype=DOUBLE) for value in (weight, precision))
    return HeadVariances(rows.features, rows.scales, *numbers, dtype)


def test_inverses_in_quarters_and_what_is_done_with_them():
    root = draw(3, N, N)
    matrices = root @ root.mT + torch.eye(N, dtype=DOUBLE)
    want, _, _ = inverse_by_blocks(matrices)
    quarters = inverse_in_quarters(matrices)
    assert quarters is not None
    whole = torch.empty_like(want)
    quarters.write_into(whole)
    torch.testing.assert_close(whole, want, rtol=0, atol=0)
    rows, weights = draw(3, 2, N, seed=1), draw(2, 3, seed=2)
    assert relative_error(quarters.times(rows), rows @ want) < 1e-13
    assert relative_error(quarters.weighted(weights), torch.einsum("mc,cij->mij", weights, want)) < 1e-13
    one, other = (QuadraticForms(3, N, 0, want) for _ in range(2))
    one.put(slice(0, 3), want, None)
    other.put_quarters(slice(0, 3), quarters)
    for first, second in zip(one.blocks, other.blocks, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    matrices[1, N - 1, N - 1] = -1
    assert inverse_in_quarters(matrices) is None


@pytest.mark.parametrize("common", [0.0, 6.0])
@pytest.mark.parametrize("weight", [0.7, 1.3])
def test_they_are_those_of_the_exact_matrices_in_float32(common, weight):
    rows, features = rows_of(common=common), draw(B, D, seed=4) + common
    factor, exact = factor_of(single(rows), weight), factor_of(rows, weight)
    assert factor.dtype is torch.float32
    assert (len(variances_of(rows, DOUBLE, weight).values) > 0) == (common > 0)
    got, want = weigh(factor, features.float().double()), weigh(exact, features.float().double())
    assert factor._kept is None, "K was computed first"
    assert exact._kept is not None  # float64 keeps its digits
    rounding = 2 * head_parallel_sums.ROUNDINGS * torch.finfo(torch.float32).eps
    assert (got / want - 1).abs().max() < rounding


@pytest.mark.parametrize("common", [0.0, 4.0, 6.0])
@pytest.mark.parametrize("peaked", [0.02, 0.1, 0.2])
def test_the_bound_holds(common, peaked, monkeypatch):
    """In float64 there is nothing but the error that is bounded."""
    rows, features = rows_of(peaked=peaked, common=common), draw(B, D, seed=4) + common
    want = weigh(factor_of(rows), features)
    eps, tried = torch.finfo(DOUBLE).eps, []
    for exponent in range(-14, -5):
        limit = 4.0**exponent
        monkeypatch.setattr(head_parallel_sums, "ROUNDINGS", limit / eps)
        variances = variances_of(rows, DOUBLE)
        if head_parallel_sums.fill(variances, [slice(0, 150), slice(150, 400), slice(400, C)], DOUBLE):
            error = (variances(features) / want - 1).abs().max().item()
            assert error < limit
            tried.append(error)
            break
    assert tried, "the bound was never small enough"
    assert tried[0] > 1e-13, "nothing was left out"


def test_probabilities_of_zero_are_allowed():
    rows = rows_of()
    scales = rows.scales.clone()
    scales[3, 5], scales[7, :4] = 0, 1e-30
    rows = HeadRows(rows.features, (scales / scales.sum(1, keepdim=True)).float().double(), True)
    features = draw(B, D, seed=4)
    factor = factor_of(single(rows))
    assert relative_error(weigh(factor, features), weigh(factor_of(rows), features)) < 1e-5


@pytest.mark.parametrize("why", ["peaked", "large", "few rows", "indefinite"])
def test_otherwise_the_matrices_are_computed_in_two_steps(why, monkeypatch):
    rows = {"peaked": rows_of(peaked=3.0), "large": rows_of(size=60)}.get(why, rows_of())
    if why == "few rows":
        rows = HeadRows(rows.features[:60], rows.scales[:60], True)
    if why == "indefinite":
        known, calls = head_parallel_sums.inverse_in_quarters, []

        def fails_late(matrices):
            calls.append(len(matrices))
            return known(matrices) if len(calls) < 2 else None

        monkeypatch.setattr(head_parallel_sums, "inverse_in_quarters", fails_late)
        monkeypatch.setattr("laplace_plus.linalg.heads.CACHE_BYTES", 2**20)
    features = draw(B, D, seed=4)
    factor = factor_of(single(rows))
    assert relative_error(weigh(factor, features), weigh(factor_of(rows), features)) < 1e-5
    assert factor._kept is not None


def test_a_sum_that_is_not_what_was_expected_is_refused(monkeypatch):
    """The bound is checked against the sum that the inverses give."""
    rows = rows_of(common=6.0)
    known = head_parallel_sums._expected

    def misled(variances):
        expected = known(variances)
        total = expected.total * 1.01
        return replace(expected, total=total, lower=torch.linalg.cholesky(total))

    assert head_parallel_sums.fill(variances_of(rows, torch.float32), [slice(0, C)], torch.float32)
    monkeypatch.setattr(head_parallel_sums, "_expected", misled)
    assert not head_parallel_sums.fill(variances_of(rows, torch.float32), [slice(0, C)], torch.float32)
