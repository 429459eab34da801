"""Sums of outer products of limited rank against singular value decompositions of all rows."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.testing import assert_close

from laplace_plus.errors import NonFiniteError
from laplace_plus.structured.gram_sum import LimitedSum, Reflections, gram_sum

SIZE, RANK = 60, 4
OPTIONS = {"dtype": torch.float64, "device": torch.device("cpu")}


def rows_of(n, groups=2, decay=1.0, seed=0, size=SIZE):
    drawn = torch.randn(groups, n, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn * torch.arange(1, size + 1) ** -decay


def limited(rows, cuts=7, rank=RANK):
    total = gram_sum(len(rows), rows.shape[2], rank, **OPTIONS)
    for part in rows.split(cuts, 1):
        total.add_rows(part)
    return total


def test_reflections_are_orthogonal_and_begin_with_the_given_columns():
    leading = torch.linalg.qr(rows_of(RANK).mT)[0]
    leading[1, :, 2:] = 0  # a group of a lower rank
    leading[1, :, 1] = torch.eye(SIZE)[1]  # which need not be reflected
    leading[1, :, 0] = torch.eye(SIZE)[0]
    found, eye = Reflections.completing(leading), torch.eye(SIZE, dtype=torch.float64)
    dense = found @ eye
    assert_close(dense.mT @ dense, eye.expand(2, -1, -1), rtol=0, atol=1e-14)
    assert_close(dense[..., :RANK].abs() * (leading != 0), leading.abs(), rtol=0, atol=1e-14)
    x = rows_of(3)
    assert_close(x @ found, x @ dense, rtol=0, atol=1e-14)
    assert_close(found.mT @ x.mT, dense.mT @ x.mT, rtol=0, atol=1e-14)
    assert_close(x[1] @ found[1], x[1] @ dense[1], rtol=0, atol=1e-14)
    assert found.to(torch.float32).dtype == torch.float32


def test_rows_of_that_rank_are_kept_exactly():
    mixing = torch.randn(2, 500, RANK, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = mixing @ rows_of(RANK)
    total = limited(rows)
    assert_close(total.matrix(), rows.mT @ rows, rtol=1e-12, atol=1e-9)
    assert (total.leading()[1] < 1e-12 * rows.square().sum((1, 2))).all()


@pytest.mark.parametrize("cuts", [1, 7, 200])
def test_what_is_left_out_is_positive_and_its_trace_is_told(cuts):
    rows = rows_of(200)
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
    rows = rows_of(2 * RANK)
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    expected = vectors.mT[..., :RANK] * values[:, None, :RANK].square() @ vectors[:, :RANK]
    assert_close(limited(rows).matrix(), expected, rtol=1e-12, atol=1e-13)


def test_sums_add_and_copies_are_independent():
    first, second = rows_of(100), rows_of(50, seed=1)
    total = limited(first)
    copy = deepcopy(total)
    copy.add_(limited(second))
    before = total.matrix()
    rest = first.mT @ first + second.mT @ second - copy.matrix()
    assert_close(copy.leading()[1], rest.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12, atol=0)
    assert torch.equal(total.matrix(), before)


@pytest.mark.parametrize("n", [0, 3, 200])
def test_stored_sums_go_on_to_the_same_bits(n):
    one, more = limited(rows_of(n)), rows_of(30, seed=2)
    tensors = {name: tensor.clone() for name, tensor in one.tensors("left").items()}
    other = LimitedSum.of_rows(tensors["left.rows"], tensors["left.limit"])
    for total in (one, other):
        total.add_rows(more)
    assert torch.equal(one.matrix(), other.matrix())
    assert torch.equal(one.leading()[1], other.leading()[1])


def test_sides_no_wider_than_the_rank_are_whole():
    rows = rows_of(200)
    for rank in (SIZE, SIZE + 1):
        total = limited(rows, rank=rank)
        assert total.rank is None
        assert_close(total.matrix(), rows.mT @ rows, rtol=1e-14, atol=1e-11)


def test_what_is_not_finite_is_refused():
    rows = rows_of(20)
    rows[0, 3, 5] = torch.nan
    with pytest.raises(NonFiniteError):
        limited(rows)
