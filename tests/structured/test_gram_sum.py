"""Sums of outer products with postponed products: the same sums, and the same eigendecompositions."""

from __future__ import annotations

import itertools
import math
from copy import deepcopy

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.testing import assert_close

from laplace_plus.errors import NonFiniteError
from laplace_plus.structured.gram_sum import EigenPairs, GramSum, LimitedSum, Reflections, combine, formed, gram_sum

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
    values, vectors = pairs.values, formed(pairs.vectors)
    expected = torch.linalg.eigvalsh(matrix)
    assert ((values.sort(-1).values - expected).abs().amax() <= tolerance * scale).item()
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix)
    assert_close(vectors.mT @ vectors, identity, rtol=0, atol=tolerance)
    rebuilt = (vectors * values[:, None]) @ vectors.mT
    assert_close(rebuilt, matrix, rtol=0, atol=tolerance * float(scale))


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
    assert_close(deepcopy(total).matrix(), expected)
    require_decomposes(total.eigen(), expected)


@pytest.mark.parametrize("count", [SIZE - 1, SIZE, SIZE + 1])
@pytest.mark.parametrize("step", [1, 5, SIZE + 1])
def test_products_are_taken_when_there_are_as_many_rows_as_columns(count, step):
    rows, total = rows_of(count), empty()
    for part in rows.split(step, 1):
        total.add_rows(part)
    assert total.n_rows < SIZE
    assert_close(total.matrix(), rows.mT @ rows)
    assert not total.n_rows


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
    require_decomposes(EigenPairs(pairs.values.double(), pairs.vectors.to(torch.float64)), exact, tolerance)
    exact_values = torch.linalg.svdvals(rows.double())[0].square()
    rounding = torch.finfo(dtype).eps * exact_values + 1e-13 * exact_values[0]
    assert ((pairs.values[0, :90].double() - exact_values).abs() <= 2 * rounding).all()


def test_no_vector_depends_on_the_order_of_the_rows():
    """The complement of the rows is empty of data, but not of what further data will bring."""
    rows = rows_of(6)
    rows[:, 4:] = 0
    pairs, others = sum_of(rows).eigen(), sum_of(rows.flip(1)).eigen()
    assert_close(formed(pairs.vectors).abs(), formed(others.vectors).abs())


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
    assert_close(combine([sum_of(rows) for rows in parts], weights).matrix(), expected)


# -- limited rank, against singular value decompositions of all rows ---------------------------------------------------

WIDE, RANK = 60, 4


def decaying(n, groups=2, decay=1.0, seed=0, size=WIDE):
    drawn = torch.randn(groups, n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn * torch.arange(1, size + 1) ** -decay


def limited(rows, cuts=7, rank=RANK):
    total = gram_sum(len(rows), rows.shape[2], rank, dtype=torch.float64, device=CPU)
    for part in rows.split(cuts, 1):
        total.add_rows(part)
    return total


def test_reflections_are_orthogonal_and_begin_with_the_given_columns():
    leading = torch.linalg.qr(decaying(RANK).mT)[0]
    leading[1, :, 2:] = 0  # a group of a lower rank
    leading[1, :, 1] = torch.eye(WIDE)[1]  # which need not be reflected
    leading[1, :, 0] = torch.eye(WIDE)[0]
    found, eye = Reflections.completing(leading), torch.eye(WIDE, dtype=torch.float64)
    dense = found @ eye
    assert_close(dense.mT @ dense, eye.expand(2, -1, -1), rtol=0, atol=1e-14)
    assert_close(dense[..., :RANK].abs() * (leading != 0), leading.abs(), rtol=0, atol=1e-14)
    x = decaying(3)
    assert_close(x @ found, x @ dense, rtol=0, atol=1e-14)
    assert_close(found.mT @ x.mT, dense.mT @ x.mT, rtol=0, atol=1e-14)
    assert_close(x[1] @ found[1], x[1] @ dense[1], rtol=0, atol=1e-14)
    assert found.to(torch.float32).dtype == torch.float32


def test_rows_of_that_rank_are_kept_exactly():
    mixing = torch.randn(2, 500, RANK, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = mixing @ decaying(RANK)
    total = limited(rows)
    assert_close(total.matrix(), rows.mT @ rows, rtol=1e-12, atol=1e-9)
    assert (total.leading()[1] < 1e-12 * rows.square().sum((1, 2))).all()


@pytest.mark.parametrize("cuts", [1, 7, 200])
def test_what_is_left_out_is_positive_and_its_trace_is_told(cuts):
    rows = decaying(200)
    total, whole = limited(rows, cuts), rows.mT @ rows
    rest = whole - total.matrix()
    assert (torch.linalg.eigvalsh(rest) > -1e-12 * whole.diagonal(dim1=1, dim2=2).sum(1)[:, None]).all()
    assert_close(total.leading()[1], rest.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12, atol=0)
    best = torch.linalg.eigvalsh(whole)[:, :-RANK].sum(1)  # that of a singular value decomposition of all rows
    assert (best * (1 - 1e-12) <= total.leading()[1]).all()
    assert (total.leading()[1] < 1.1 * best).all()
    assert_close(total.eigen().values[:, :RANK], torch.linalg.eigvalsh(whole).flip(1)[:, :RANK], rtol=0.05, atol=0)
    assert not total.eigen().values[:, RANK:].any()


def test_one_decomposition_is_the_truncated_singular_value_decomposition():
    rows = decaying(2 * RANK)
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    expected = vectors.mT[..., :RANK] * values[:, None, :RANK].square() @ vectors[:, :RANK]
    assert_close(limited(rows).matrix(), expected, rtol=1e-12, atol=1e-13)


def test_sums_add_and_copies_are_independent():
    first, second = decaying(100), decaying(50, seed=1)
    total = limited(first)
    copy = deepcopy(total)
    copy.add_(limited(second))
    before = total.matrix()
    rest = first.mT @ first + second.mT @ second - copy.matrix()
    assert_close(copy.leading()[1], rest.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12, atol=0)
    assert torch.equal(total.matrix(), before)


@pytest.mark.parametrize("n", [0, 3, 200])
def test_stored_sums_go_on_to_the_same_bits(n):
    one, more = limited(decaying(n)), decaying(30, seed=2)
    tensors = {name: tensor.clone() for name, tensor in one.tensors("left").items()}
    other = LimitedSum.of_rows(tensors["left.rows"], tensors["left.limit"])
    for total in (one, other):
        total.add_rows(more)
    assert torch.equal(one.matrix(), other.matrix())
    assert torch.equal(one.leading()[1], other.leading()[1])


def test_sides_no_wider_than_the_rank_are_whole():
    rows = decaying(200)
    for rank in (WIDE, WIDE + 1):
        total = limited(rows, rank=rank)
        assert total.rank is None
        assert_close(total.matrix(), rows.mT @ rows, rtol=1e-14, atol=1e-11)


def test_what_is_not_finite_is_refused():
    rows = decaying(20)
    rows[0, 3, 5] = torch.nan
    with pytest.raises(NonFiniteError):
        limited(rows)
