from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_plus.kernels import symmetric_update, symmetrize_

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([1, 31, 33, 70, 130, 260]),
    n_rows=st.sampled_from([1, 7, 100]),
    groups=st.sampled_from([None, 1, 3]),
    strided=st.booleans(),
    types=st.sampled_from(
        [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16),
         (torch.float32, torch.float16), (torch.float64, torch.float32), (torch.float32, torch.float64)]
    ),
)  # fmt: skip
def test_equals_the_product_in_float64(
    width: int, n_rows: int, groups: int | None, strided: bool, types: tuple
) -> None:
    generator = torch.Generator().manual_seed(width * n_rows)
    lead = () if groups is None else (groups,)
    shape = (*lead, width, n_rows) if strided else (*lead, n_rows, width)
    rows = torch.randn(*shape, generator=generator).to(types[1])
    rows = rows.transpose(-1, -2) if strided else rows
    total = torch.zeros(*lead, width, width, dtype=types[0])
    exact = rows.double().mT @ rows.double()
    for times in (1, 2):  # accumulating twice gives twice as much
        returned = symmetric_update(total, rows)
        assert returned is total
        error = (total.double() - times * exact).tril().abs().max()
        assert error <= TOLERANCE[types[0]] * times * exact.abs().max()
    symmetrize_(total)
    assert torch.equal(total, total.mT)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [127, 128, 300])
def test_every_way_of_the_cpu(width: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread of torch and of BLAS: syrk; more threads: torch's product."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = torch.randn(40, width, dtype=dtype, generator=torch.Generator().manual_seed(0))
        columns = rows.T.contiguous().T  # the same numbers, laid out by columns
        exact = rows.double().T @ rows.double()
        for given_rows in (rows, columns, rows.repeat_interleave(2, 1)[:, ::2]):
            total = torch.ones(width, width, dtype=dtype)
            symmetric_update(total, given_rows)
            assert (total.double() - 1 - exact).tril().abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    finally:
        torch.set_num_threads(before)


def test_totals_need_not_be_contiguous() -> None:
    rows = torch.randn(50, 130, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = torch.zeros(2, 200, 200, dtype=torch.float64)
    symmetric_update(whole[1, :130, :130], rows)
    torch.testing.assert_close(whole[1, :130, :130].tril(), (rows.T @ rows).tril())
    assert not whole[0].any()
    assert not whole[1, 130:].any()


def test_nothing_to_add() -> None:
    total = torch.ones(3, 3)
    assert torch.equal(symmetric_update(total, torch.empty(0, 3)), torch.ones(3, 3))
    assert symmetric_update(torch.zeros(0, 4, 4), torch.empty(0, 7, 4)).shape == (0, 4, 4)


@pytest.mark.parametrize("width", [5, 200])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(width: int, value: float) -> None:
    rows = torch.ones(9, width)
    rows[4, 2] = value
    total = symmetrize_(symmetric_update(torch.zeros(width, width), rows))
    assert not torch.isfinite(total[2]).any()
    assert torch.isfinite(total).sum() == (width - 1) ** 2


def test_symmetrize_copies_the_lower_triangle() -> None:
    matrix = torch.randn(2, 600, 600, generator=torch.Generator().manual_seed(0))
    expected = matrix.tril() + matrix.tril(-1).mT
    assert torch.equal(symmetrize_(matrix.clone()), expected)
    above = torch.ones(600, 600, dtype=torch.bool).triu(1)
    assert torch.equal(symmetrize_(matrix.masked_fill(above, float("nan"))), expected)  # whatever was there before


def test_no_graph_is_built() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    total = symmetric_update(torch.zeros(3, 3), rows)
    assert not total.requires_grad
