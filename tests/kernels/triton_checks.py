"""Checks of the Triton kernels: collected by a pytest of its own, started by ``test_triton.py``.

The interpreter must be chosen before triton is imported for the first time, hence the separate process. Without
``TRITON_INTERPRET``, the same checks run on the CUDA device.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from laplace_plus import kernels
from laplace_plus.kernels import gram_schmidt
from laplace_plus.kernels._triton import gram_schmidt as triton_gram_schmidt
from laplace_plus.kernels._triton import symmetric_update as triton_update
from laplace_plus.kernels._triton.symmetric_update import Tiling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EXACT = "ieee" if INTERPRETED else "tf32x3"
SMALL = [Tiling(32, 16, 4, 2), Tiling(16, 16, 1, 1, transposed=True)]


def close(actual: Tensor, exact: Tensor, tolerance: float = 2e-6) -> None:
    exact = exact.to(torch.float64)
    assert torch.isfinite(actual).all()
    assert (actual.to(torch.float64) - exact).abs().max() <= tolerance * exact.abs().max()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("dtype", "tiling", "width"),
    [
        *((torch.float32, SMALL[0], width) for width in (1, 33, 70)),  # up to three by three tiles
        (torch.float32, SMALL[1], 33),
        *((dtype, SMALL[0], 33) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_update_symmetric(dtype: torch.dtype, tiling: Tiling, width: int) -> None:
    for n_rows in (1, 40, 270) if width == 33 else (1, 40):  # a step, three of them, and two splits
        rows = random(1, n_rows, width, dtype=dtype)
        total = torch.zeros(1, width, width, device=DEVICE)
        exact = rows.double().mT @ rows.double()
        for times in (1, 2) if width == 1 else (1,):  # accumulating twice gives twice as much
            triton_update.update(total, rows, precision=EXACT, tiling=tiling)
            close(total.tril(), times * exact.tril())
        assert not total.triu(tiling.side * (-(-width // tiling.side))).any()  # no tile above the diagonal is touched


def test_update_of_groups_and_strided_rows() -> None:
    rows = random(2, 33, 63).mT
    for tiling in SMALL:
        total = torch.zeros(2, 33, 33, device=DEVICE)
        triton_update.update(total, rows, precision=EXACT, tiling=tiling)
        close(total.tril(), (rows.double().mT @ rows.double()).tril())


def test_update_without_rows() -> None:
    total = torch.ones(1, 33, 33, device=DEVICE)
    triton_update.update(total, random(1, 0, 33), precision=EXACT, tiling=SMALL[0])
    assert (total == 1).all()


def test_update_nan() -> None:
    rows = random(1, 270, 40)
    rows[0, 17, 3] = float("nan")
    total = torch.zeros(1, 40, 40, device=DEVICE)
    triton_update.update(total, rows, precision="tf32", tiling=SMALL[0])
    spoilt = torch.isnan(total[0]).tril()
    assert spoilt[3, :4].all()
    assert spoilt[3:, 3].all()
    assert spoilt.sum() == 40


def test_every_tile_is_met_once() -> None:
    """Columns of ones: each entry of the triangle is counted once, however the rows are split."""
    for groups, width, n_rows in ((2, 70, 1), (1, 33, 270)):
        total = torch.zeros(groups, width, width, device=DEVICE)
        rows = torch.ones(groups, n_rows, width, device=DEVICE)
        triton_update.update(total, rows, precision="ieee", tiling=SMALL[0])
        assert torch.equal(total.tril(), torch.full_like(total, n_rows).tril())


def test_symmetric_update_dispatches_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    update = triton_update.update
    monkeypatch.setattr(triton_update, "update", lambda *a, **k: (calls.append(k["tiling"]), update(*a, **k))[1])
    for width in (20, 70):
        rows = random(30, width)
        total = torch.zeros(width, width, device=DEVICE)
        with kernels.use("triton"):
            kernels.symmetric_update(total, rows)
        close(kernels.symmetrize_(total), rows.double().T @ rows.double())
    assert len(calls) == 2
    with kernels.use("reference"):
        kernels.symmetric_update(torch.zeros(70, 70, device=DEVICE), random(30, 70))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("probes", "rows", "n", "dtype"),
    [
        (1, 1, 1, torch.float32),
        (3, 3, 70, torch.float32),
        (2, 5, 1100, torch.float32),  # two blocks of columns
        (6, 40, 300, torch.float32),  # two blocks of rows, and several of columns in a chunk
        (1, 130, 270, torch.float32),  # too many rows for the fused kernel
        (3, 3, 70, torch.float64),
        (1, 40, 150, torch.float64),
    ],
)
def test_gram_schmidt(probes: int, rows: int, n: int, dtype: torch.dtype) -> None:
    tolerance = 2e-6 if dtype == torch.float32 else 1e-13
    basis = torch.linalg.qr(random(probes, n, rows, dtype=torch.float64))[0].mT.to(dtype).contiguous()
    vector = random(probes, n, dtype=dtype)
    scale = vector.abs().max()
    exact = gram_schmidt.reference_orthogonalize(basis.double(), vector.double())
    actual = triton_gram_schmidt.orthogonalize(basis, vector)
    for one, other in zip(actual, exact, strict=True):
        assert (one - other).abs().max() <= tolerance * scale
    with kernels.use("triton"):
        part = kernels.orthogonalize(basis[:, : (rows + 1) // 2], vector)[0]
    assert (basis[:, : (rows + 1) // 2] @ part[..., None]).abs().max() <= tolerance * scale


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_lanczos_in_a_graph() -> None:
    basis = torch.linalg.qr(random(5000, 8))[0].T.contiguous()
    vector = random(5000)
    for choice in ("reference", "triton"):
        with kernels.use(choice):
            expected = kernels.orthogonalize(basis, vector)  # compiles
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured = kernels.orthogonalize(basis, vector)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.allclose(captured[0], expected[0], atol=1e-5)
