"""Projections onto the kernel of stacked rows: their invariants, and that all ways lead to the same point."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laplace_plus.linalg import Dense
from laplace_plus.linalg.null_space import (
    AlternatingProjection,
    AutoProjection,
    LSMRProjection,
    SVDProjection,
    row_space,
)

METHODS = {
    "svd": SVDProjection(),
    "lsmr": LSMRProjection(),
    "sweeps": AlternatingProjection(tolerance=1e-12, accelerate=False),
    "accelerated": AlternatingProjection(tolerance=1e-12),
}


def problem(m=12, n=30, rank=9, seed=0, dtype=torch.float64):
    """Rows of a rank below their number, with singular values between 1 and 3, and five vectors."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(m, rank, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64))[0]
    rows = (left * torch.linspace(1, 3, rank, dtype=torch.float64)) @ right.mT
    return rows.to(dtype), torch.randn(5, n, generator=generator, dtype=torch.float64).to(dtype)


def prepared(method, rows, size=4):
    return method.prepare(Dense(rows), lambda: [Dense(part) for part in rows.split(size)])


def dense_projector(rows, rtol=1e-10):
    return torch.eye(rows.shape[1], dtype=rows.dtype) - torch.linalg.pinv(rows, rtol=rtol) @ rows


def test_svd_is_an_orthogonal_projector_of_integer_trace():
    rows, v = problem()
    projector = prepared(SVDProjection(), rows)
    found = projector.project(v)
    assert (rows @ found.value.mT).norm(dim=0).le(1e-10 * v.norm(dim=1)).all()
    torch.testing.assert_close(projector.project(found.value).value, found.value, rtol=0, atol=1e-12)
    P = projector.project(torch.eye(30, dtype=torch.float64)).value
    torch.testing.assert_close(P, P.mT, rtol=0, atol=1e-12)
    assert projector.rank == 9
    assert abs(float(P.trace()) - (30 - 9)) < 1e-10
    assert found.converged.all()
    assert (found.residual < 1e-12).all()


@pytest.mark.parametrize(("m", "n"), [(300, 400), (400, 300)])
def test_gram_matrices_of_single_precision_tell_small_singular_values_from_zero(m, n):
    generator = torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(m, 290, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, 290, generator=generator, dtype=torch.float64))[0]
    values = torch.cat([torch.logspace(0, -5, 270, dtype=torch.float64), torch.logspace(-8, -10, 20)])
    rows = (left * values) @ right.mT  # float64 rows with the cutoff of float32: the last twenty are below it
    projector = prepared(SVDProjection(rtol=1e-6), rows)
    assert projector.rank == 270
    found, _, _ = row_space(rows, 1e-6)
    torch.testing.assert_close(found.sort(descending=True).values, values[:270], rtol=1e-5, atol=0)
    v = torch.randn(5, n, generator=generator, dtype=torch.float64)
    expected = v - (v @ right[:, :270]) @ right[:, :270].mT
    torch.testing.assert_close(projector.project(v).value, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_every_way_leads_to_the_projection(name):
    rows, v = problem()
    found = prepared(METHODS[name], rows).project(v)
    torch.testing.assert_close(found.value, v @ dense_projector(rows), rtol=0, atol=1e-6)
    assert found.converged.all()


@pytest.mark.parametrize("name", METHODS)
def test_single_precision(name):
    rows, v = problem(dtype=torch.float32)
    methods = METHODS | {"sweeps": AlternatingProjection(accelerate=False), "accelerated": AlternatingProjection()}
    found = prepared(methods[name], rows).project(v)
    expected = v.double() @ dense_projector(rows.double(), 1e-5)
    torch.testing.assert_close(found.value.double(), expected, rtol=0, atol=2e-4)
    assert found.value.dtype == torch.float32


def test_one_batch_is_exact_after_one_sweep():
    rows, v = problem()
    once = prepared(AlternatingProjection(max_sweeps=1, accelerate=False), rows, 12).project(v).value
    torch.testing.assert_close(once, v @ dense_projector(rows), rtol=0, atol=1e-10)
    twice = prepared(AlternatingProjection(max_sweeps=2, tolerance=0.0, accelerate=False), rows, 12).project(v).value
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-10)
    assert prepared(AlternatingProjection(), rows, 12).rank == 9


@pytest.mark.diagonal
@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("order", ["forward", "backward"])
def test_sweeps_keep_the_kernel_part_and_come_nearer(accelerate, order):
    rows, v = problem(m=20, n=25, rank=16, seed=3)
    rows = rows if order == "forward" else rows.flip(0)
    P = dense_projector(rows)
    distances, lengths = [], []
    for sweeps in range(1, 12):
        method = AlternatingProjection(max_sweeps=sweeps, tolerance=0.0, accelerate=accelerate)
        now = prepared(method, rows).project(v).value
        torch.testing.assert_close(now @ P, v @ P, rtol=0, atol=1e-12)
        distances.append((now - v @ P).norm(dim=1))
        lengths.append(now.norm(dim=1))
    for values in (distances, lengths):
        steps = torch.stack(values).diff(dim=0)
        assert (steps <= 1e-12).all()


def test_acceleration_takes_fewer_sweeps():
    rows, v = problem(m=20, n=40, rank=20, seed=5)
    plain = prepared(AlternatingProjection(max_sweeps=5000, accelerate=False, tolerance=1e-8), rows).project(v)
    quick = prepared(AlternatingProjection(max_sweeps=5000, tolerance=1e-8), rows).project(v)
    assert plain.converged.all()
    assert quick.converged.all()
    assert quick.iterations.max() < plain.iterations.max()


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10_000))
def test_scaling_rows_changes_nothing(seed):
    rows, v = problem(seed=seed % 50)
    scale = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    for method in (SVDProjection(), LSMRProjection(), AlternatingProjection(tolerance=1e-12)):
        one, other = (prepared(method, r).project(v).value for r in (rows, scale * rows))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_cap_is_told():
    rows, v = problem(m=20, n=40, rank=20, seed=5)
    assert not prepared(AlternatingProjection(max_sweeps=2), rows).project(v).converged.any()
    found = prepared(LSMRProjection(max_iterations=2), rows).project(v)
    assert not found.converged.any()
    assert (found.residual > 1e-6).all()


def test_rows_of_zeros_leave_everything():
    v = problem()[1]
    zeros = torch.zeros(4, 30, dtype=torch.float64)
    for method in METHODS.values():
        found = prepared(method, zeros).project(v)
        torch.testing.assert_close(found.value, v, rtol=0, atol=0)
        assert found.converged.all()


def test_the_default_decomposes_what_is_small():
    chosen = [prepared(AutoProjection(), torch.ones(m, n)).rank for m, n in ((30, 2000), (2000, 30), (1100, 1200))]
    assert chosen == [1, 1, None]
    assert prepared(AutoProjection(), torch.ones(300, 150_000)).rank is None  # 45 million entries
