from __future__ import annotations

import pytest
import torch

from laplace_plus.kernels import orthogonalize


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize(("probes", "rows", "n"), [(1, 1, 1), (2, 7, 33), (3, 40, 700)])
def test_projection(probes: int, rows: int, n: int, dtype: torch.dtype, tolerance: float) -> None:
    basis = torch.linalg.qr(random(probes, n, rows))[0].mT.to(dtype).contiguous()
    vector = random(probes, n, dtype=dtype)
    before = vector.clone()
    for k in {1, (rows + 1) // 2, rows}:
        rest, coefficients = orthogonalize(basis[:, :k], vector)
        used = basis[:, :k].double()
        exact = vector.double() - (vector.double().unsqueeze(1) @ used.mT @ used).squeeze(1)
        scale = vector.norm()
        assert coefficients.shape == (probes, k)
        assert (rest - exact).abs().max() <= tolerance * scale
        assert (used @ rest.double().unsqueeze(-1)).abs().max() <= tolerance * scale
        assert (coefficients.unsqueeze(1) @ used.to(dtype)).squeeze(1).add(rest).sub(vector).norm() <= tolerance * scale
        one, its = orthogonalize(basis[0, :k], vector[0])
        assert (one - rest[0]).abs().max() <= tolerance * scale
        assert its.shape == (k,)
    assert torch.equal(vector, before)


def test_twice_is_enough() -> None:
    """A vector that nearly lies in the span: one pass would leave 1e-16 / 1e-10 = 1e-6 of it."""
    basis = torch.linalg.qr(random(200, 20))[0].T.contiguous()
    vector = random(20) @ basis + 1e-10 * random(200)
    rest, coefficients = orthogonalize(basis, vector)
    assert (basis @ (rest / rest.norm())).abs().max() < 1e-14
    once = vector - basis @ vector @ basis
    assert (basis @ (once / once.norm())).abs().max() > 1e-9
    torch.testing.assert_close(once - basis @ once @ basis, rest, rtol=0, atol=1e-15)
    torch.testing.assert_close(basis @ vector + basis @ once, coefficients, rtol=1e-14, atol=0)


def test_nothing_to_subtract() -> None:
    vector = random(5)
    rest, coefficients = orthogonalize(torch.empty(0, 5, dtype=torch.float64), vector)
    assert torch.equal(rest, vector)
    assert coefficients.shape == (0,)


def test_nan_stays_visible() -> None:
    vector = random(4)
    vector[1] = float("nan")
    basis = torch.eye(4, dtype=torch.float64)[2:]
    assert torch.isnan(orthogonalize(basis, vector)[0]).any()
