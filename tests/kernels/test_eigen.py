from __future__ import annotations

import pytest
import torch

from laplace_plus.errors import NonFiniteError
from laplace_plus.kernels import symmetric_eigen


def symmetric(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    root = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    return (root @ root.mT).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 5), (2, 3, 33, 33), (300, 300), (0, 4, 4), (3, 0, 0)])
def test_decomposition(shape: tuple, dtype: torch.dtype, tolerance: float) -> None:
    matrix = symmetric(*shape, dtype=dtype)
    values, vectors = symmetric_eigen(matrix)
    assert values.shape == shape[:-1]
    assert vectors.shape == shape
    assert values.dtype == vectors.dtype == dtype
    if matrix.numel():
        scale = float(matrix.abs().amax()) * shape[-1]
        assert (vectors * values.unsqueeze(-2) @ vectors.mT - matrix).abs().max() <= tolerance * scale
        assert (values.diff(dim=-1) >= 0).all()


def test_only_the_lower_triangle_is_read() -> None:
    matrix = symmetric(4, 4)
    above = torch.ones(4, 4, dtype=torch.bool).triu(1)
    values, _ = symmetric_eigen(matrix.masked_fill(above, float("nan")))
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix))


def test_rows_of_zeros_have_unit_vectors() -> None:
    matrix = symmetric(2, 5, 5)
    matrix[:, [1, 3]] = matrix[:, :, [1, 3]] = 0
    values, vectors = symmetric_eigen(matrix)
    assert (values[:, :2] == 0).all()
    assert (vectors[:, [1, 3], [0, 1]] == 1).all()
    torch.testing.assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, matrix)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(5, dtype=torch.float64).expand(2, 5, 5))


def test_what_is_not_finite_is_an_error() -> None:
    matrix = symmetric(3, 4, 4)
    matrix[1, 2, 0] = float("inf")
    with pytest.raises(NonFiniteError):
        symmetric_eigen(matrix)


def test_what_does_not_converge_is_decomposed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy  # noqa: PLC0415

    solve = scipy.linalg.eigh

    def spoils(matrix, *, driver, **options):
        if driver == "evd":
            matrix[:] = 0
            raise scipy.linalg.LinAlgError
        return solve(matrix, driver=driver, **options)

    monkeypatch.setattr(scipy.linalg, "eigh", spoils)
    monkeypatch.setattr("laplace_plus.kernels.eigen.is_serial", lambda: True)
    matrix = symmetric(80, 80)
    matrix[3] = matrix[:, 3] = 0
    values, vectors = symmetric_eigen(matrix)
    torch.testing.assert_close(vectors * values @ vectors.mT, matrix)
