"""Sums of outer products with postponed products: the same sums, and the same eigendecompositions."""

from __future__ import annotations

import itertools
import math
from copy import deepcopy

import numpy as np
import pytest
import scipy.linalg
import torch

from laplace_plus.errors import NonFiniteError
from laplace_plus.structured.gram_sum import EigenPairs, GramSum, combine

SIZE = 12
CPU = torch.device("cpu")


def empty(groups: int = 1, size: int = SIZE, dtype: torch.dtype = torch.float64) -> GramSum:
    return GramSum(groups, size, dtype=dtype, device=CPU)


def rows_of(count: int, *, groups: int = 1, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(groups, count, size, generator=generator, dtype=torch.float64)


def sum_of(rows: torch.Tensor) -> GramSum:
    total = empty(rows.shape[0], rows.shape[2], rows.dtype)
    total.add_rows(rows)
    return total


def require_decomposes(pairs: EigenPairs, matrix: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Eigenvalues, orthogonality and reconstruction against the dense matrix ``[G, d, d]``."""
    scale = torch.linalg.eigvalsh(matrix).abs().amax().clamp(min=1e-300)
    values, vectors = pairs.values, pairs.vectors
    expected = torch.linalg.eigvalsh(matrix)
    assert ((values.sort(-1).values - expected).abs().amax() <= tolerance * scale).item()
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
    torch.testing.assert_close(vectors.mT @ vectors, identity, rtol=0, atol=tolerance)
    rebuilt = (vectors * values[:, None]) @ vectors.mT
    torch.testing.assert_close(rebuilt, matrix, rtol=0, atol=tolerance * float(scale))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("order", list(itertools.permutations(["rows", "many rows", "products", "formed sum"])))
def test_equals_the_dense_sum_in_every_order(order, groups):
    total, expected = empty(groups), torch.zeros(groups, SIZE, SIZE, dtype=torch.float64)
    for seed, what in enumerate(order):
        rows = rows_of(2 * SIZE if what == "many rows" else 5, groups=groups, seed=seed)
        dense = rows.mT @ rows
        if what in ("rows", "many rows"):
            total.add_rows(rows)
        elif what == "products":
            total.lower().add_(dense.tril())
        else:
            other = GramSum.of(dense.clone()) if what == "formed sum" else sum_of(rows)
            total.add_(other)
        expected += dense
    torch.testing.assert_close(deepcopy(total).matrix(), expected)
    require_decomposes(total.eigen(), expected)


@pytest.mark.parametrize("count", [SIZE - 1, SIZE, SIZE + 1])
@pytest.mark.parametrize("step", [1, 5, SIZE + 1])
def test_products_are_taken_when_there_are_as_many_rows_as_columns(count, step):
    rows, total = rows_of(count), empty()
    for part in rows.split(step, 1):
        total.add_rows(part)
    assert total.n_rows < SIZE
    torch.testing.assert_close(total.matrix(), rows.mT @ rows)
    assert not total.n_rows


@pytest.mark.parametrize("count", [3, SIZE + 1])
def test_clones_do_not_share_sums(count):
    total = sum_of(rows_of(count))
    expected = deepcopy(total).matrix().clone()
    copy = deepcopy(total)
    copy.add_rows(rows_of(2 * SIZE, seed=1))
    torch.testing.assert_close(deepcopy(total).matrix(), expected)
    total.add_rows(rows_of(4, seed=2))
    assert not torch.allclose(total.matrix(), expected)
    third = rows_of(2 * SIZE, seed=1)
    torch.testing.assert_close(copy.matrix(), expected + third.mT @ third)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("count", [1, 5, 9])
def test_few_rows_decompose_as_their_matrix_does(count, groups):
    total = sum_of(rows_of(count, groups=groups))
    assert total.is_thin
    require_decomposes(total.eigen(), deepcopy(total).matrix())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_factors_keep_their_accuracy(dtype):
    rows = rows_of(90, size=150).to(dtype) * torch.logspace(0, -4, 150, dtype=dtype)
    total = sum_of(rows)
    assert total.is_thin
    pairs, exact = total.eigen(), rows.double().mT @ rows.double()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    require_decomposes(EigenPairs(pairs.values.double(), pairs.vectors.double()), exact, tolerance)
    exact_values = torch.linalg.svdvals(rows.double())[0].square()
    rounding = torch.finfo(dtype).eps * exact_values + 1e-13 * exact_values[0]
    assert ((pairs.values[0, :90].double() - exact_values).abs() <= 2 * rounding).all()


def test_no_vector_depends_on_the_order_of_the_rows():
    """The complement of the rows is empty of data, but not of what further data will bring."""
    rows = rows_of(6)
    rows[:, 4:] = 0
    pairs, others = sum_of(rows).eigen(), sum_of(rows.flip(1)).eigen()
    torch.testing.assert_close(pairs.vectors.abs(), others.vectors.abs())


def test_zero_rows_and_repeated_rows():
    rows = rows_of(8)
    rows[:, 2:5] = 0
    rows[:, 5:] = rows[:, :1]
    pairs = sum_of(rows).eigen()
    require_decomposes(pairs, rows.mT @ rows)
    assert (pairs.values > 0).sum() == 2  # what is rounding counts as zero


@pytest.mark.parametrize("count", [0, 4])
def test_rank_zero(count):
    total = sum_of(torch.zeros(1, count, SIZE, dtype=torch.float64))
    assert total.is_thin
    require_decomposes(total.eigen(), torch.zeros(1, SIZE, SIZE, dtype=torch.float64))
    formed = GramSum.of(torch.zeros(1, SIZE, SIZE, dtype=torch.float64))
    require_decomposes(formed.eigen(), formed.matrix())


@pytest.mark.parametrize("count", [3, SIZE + 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_rows_are_named(bad, count):
    rows = rows_of(count)
    rows[0, 1, 2] = bad
    with pytest.raises(NonFiniteError, match="not finite"):
        sum_of(rows).eigen()


@pytest.mark.parametrize("count", [80, 101])
def test_failing_divide_and_conquer_is_replaced(count, monkeypatch):
    rows = rows_of(count, size=110)
    drivers, original = [], scipy.linalg.eigh

    def failing(matrix, *args, driver=None, **kwargs):
        drivers.append(driver)
        if driver == "evd":
            raise np.linalg.LinAlgError("did not converge")
        return original(matrix, *args, driver=driver, **kwargs)

    def refuse(matrix, *args, **kwargs):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(scipy.linalg, "eigh", failing)
    monkeypatch.setattr(torch.linalg, "eigh", refuse)  # on several threads it is torch's that comes first
    require_decomposes(sum_of(rows).eigen(), rows.mT @ rows)
    assert drivers[-1] == "ev"


@pytest.mark.parametrize("counts", [(3, 4), (3, SIZE + 1), (SIZE, SIZE)])
def test_weighted_sums(counts):
    parts = [rows_of(count, groups=2, seed=seed) for seed, count in enumerate(counts)]
    weights = torch.tensor([0.5, 3.0], dtype=torch.float64)
    expected = sum(w * (rows.mT @ rows) for w, rows in zip(weights, parts, strict=True))
    torch.testing.assert_close(combine([sum_of(rows) for rows in parts], weights).matrix(), expected)
