"""A few eigenpairs, against dense decompositions and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from problems import generator, normal, with_spectrum
from torch import Tensor

from laplace_plus.linalg.partial_eigen import eigsh

float64 = torch.float64


def constant(value: float, times: int) -> Tensor:
    return torch.full((times,), value, dtype=float64)


def linear(start: float, end: float, steps: int) -> Tensor:
    return torch.linspace(start, end, steps, dtype=float64)


SPECTRA = {
    "uniform": (linear(-1, 2, 150), 5),
    "identity": (constant(1.0, 150), 5),
    "multiple": (torch.cat([constant(5.0, 4), constant(-3.0, 3), constant(-5.5, 2), linear(0, 1, 141)]), 6),
    "cluster": (torch.cat([5 + 1e-6 * torch.arange(4, dtype=float64), linear(0, 1, 146)]), 4),
    "low rank": (torch.cat([torch.arange(1, 6, dtype=float64), constant(0.0, 145)]), 8),
    "small": (torch.arange(1, 6, dtype=float64), 5),
    "zero": (constant(0.0, 30), 3),
    "one": (constant(-2.0, 1), 1),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_eigenpairs_of_every_kind_of_spectrum(name, which):
    spectrum, k = SPECTRA[name]
    a = with_spectrum(spectrum)
    found = eigsh(lambda v: v @ a, len(spectrum), k, which=which, generator=generator())
    key = {"largest": spectrum, "smallest": -spectrum, "magnitude": spectrum.abs()}[which]
    expected = spectrum[key.argsort(descending=True)][:k]
    assert found.converged and found.vectors.shape == (k, len(spectrum))
    error = found.values - expected if which != "magnitude" else found.values.abs() - expected.abs()
    assert float(error.abs().max()) <= 1e-12
    assert float((found.vectors @ found.vectors.T - torch.eye(k)).abs().max()) <= 1e-12
    residuals = (found.vectors @ a - found.values[:, None] * found.vectors).norm(dim=-1)
    assert float(residuals.max()) <= 1e-10 * float(spectrum.abs().max())
    torch.testing.assert_close(found.residuals, residuals, rtol=0.1, atol=1e-14)


@pytest.mark.quick("largest-LA", "magnitude-LM")
@pytest.mark.parametrize(("which", "name"), [("largest", "LA"), ("smallest", "SA"), ("magnitude", "LM")])
def test_eigenpairs_are_those_of_scipy(which, name):
    a = with_spectrum(torch.cat([linear(-1, 1, 240), linear(1.5, 3, 6), linear(-4, -2, 4)]))
    expected = scipy.sparse.linalg.eigsh(a.numpy(), k=6, which=name, v0=np.ones(250))
    found = eigsh(lambda v: v @ a, 250, 6, which=which, generator=generator())
    order = found.values.argsort()
    np.testing.assert_allclose(found.values[order], np.sort(expected[0]), rtol=1e-11)
    vectors = expected[1].T[np.argsort(expected[0])]
    np.testing.assert_allclose(np.abs(np.sum(vectors * found.vectors[order].numpy(), axis=1)), 1, atol=1e-10)


def test_only_converged_pairs_are_returned():
    a = with_spectrum(torch.cat([constant(10.0, 1), linear(0, 1, 399)]))
    found = eigsh(lambda v: v @ a, 400, 4, max_restarts=0, generator=generator())
    assert not found.converged and found.values.tolist() == pytest.approx([10.0], abs=1e-11)
    assert found.matvecs == 24 + 1  # one filling of the subspace, and the check
    loose = eigsh(lambda v: v @ a, 400, 4, tolerance=1e-2, generator=generator())
    tight = eigsh(lambda v: v @ a, 400, 4, generator=generator())
    assert loose.converged and loose.matvecs < tight.matvecs
    assert float(loose.residuals.max()) <= 2e-1
    none = eigsh(lambda v: v @ a, 400, 3, which="smallest", max_restarts=0, subspace=5)
    assert not none.converged and none.values.shape == (0,) and none.vectors.shape == (0, 400)


def test_as_many_pairs_as_dimensions():
    a = with_spectrum(torch.arange(1, 6, dtype=float64))
    found = eigsh(lambda v: v @ a, 5, 5, generator=generator())
    assert found.converged
    torch.testing.assert_close(found.values, torch.arange(5, 0, -1, dtype=float64), rtol=1e-12, atol=0)


def test_eigenvalues_are_differentiable():
    factor, shift = normal(10, 4).requires_grad_(), normal(10, seed=1).exp().requires_grad_()

    def values(f: Tensor, d: Tensor) -> Tensor:
        def operator(v: Tensor) -> Tensor:
            return (v @ f) @ f.T + d * v

        return eigsh(operator, 10, 3, generator=generator(), parameters=[f, d]).values

    assert torch.autograd.gradcheck(values, (factor, shift), eps=1e-6, atol=1e-7)
    found = eigsh(lambda v: (v @ factor) @ factor.T + shift * v, 10, 3, generator=generator())
    expected = torch.linalg.eigvalsh(factor @ factor.T + torch.diag(shift)).flip(0)[:3]
    for x, y in zip(
        torch.autograd.grad(found.values, [factor, shift], torch.arange(3.0, dtype=float64)),
        torch.autograd.grad(expected, [factor, shift], torch.arange(3.0, dtype=float64)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    assert not found.vectors.requires_grad


def test_the_sum_of_a_multiple_eigenvalue_is_differentiable():
    d = torch.tensor([3.0, 3.0, 3.0, 1.0, 0.5], dtype=float64).requires_grad_()
    found = eigsh(lambda v: v * d, 5, 3, generator=generator())
    gradient = torch.autograd.grad(found.values.sum(), d)[0]
    torch.testing.assert_close(gradient, torch.tensor([1.0, 1, 1, 0, 0], dtype=float64), rtol=0, atol=1e-12)


def test_single_and_half_precision():
    a = with_spectrum(torch.cat([linear(0, 1, 95), linear(2, 4, 5)]))
    a32 = a.float()
    single = eigsh(lambda v: v @ a32, 100, 3, generator=generator())
    assert single.converged and single.values.dtype == torch.float32
    torch.testing.assert_close(single.values.double(), torch.tensor([4.0, 3.5, 3.0], dtype=float64), rtol=1e-5, atol=0)
    b = torch.diag(linear(0, 1, 16)).bfloat16()
    half = eigsh(lambda v: v @ b, 16, 1, generator=generator())
    assert half.vectors.dtype == torch.float32
    assert half.values.tolist() == pytest.approx([1.0], abs=0.02)
