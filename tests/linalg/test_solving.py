"""The recurrences give the same in tensors that the host rarely looks at, as on a GPU, and in plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor

from laplace_plus.errors import OperatorError
from laplace_plus.linalg import solving
from laplace_plus.linalg.cg import cg
from laplace_plus.linalg.lsmr import lsmr
from laplace_plus.linalg.minres import minres
from laplace_plus.linalg.results import Solution, Status

# The functions hide the modules of the same names.
MODULES = [import_module(f"laplace_plus.linalg.{name}") for name in ("cg", "lsmr", "minres")]

N = 21


def matrix() -> Tensor:
    basis = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    return (basis * torch.linspace(1, 20, N, dtype=torch.float64)) @ basis.T


METHODS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Solution]] = {
    "cg": cg,
    "preconditioned cg": lambda A, b: cg(A, b, preconditioner=lambda r: r / torch.linspace(1, 2, N, dtype=b.dtype)),
    "minres": minres,
    "minres with shifts": lambda A, b: minres(A, b, shifts=torch.tensor([0.5], dtype=b.dtype)),
    "lsmr": lambda A, b: lsmr(A, A, b),
    "damped lsmr": lambda A, b: lsmr(A, A, b, damp=0.3, x0=torch.ones_like(b)),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (solving, *MODULES):
        monkeypatch.setattr(module, "is_single", lambda rows: False)

    def over(state: solving.Progress, iteration: int) -> bool:
        return iteration % 8 == 0 and not bool(state.active.any())

    monkeypatch.setattr(solving.Progress, "over", over)


@pytest.fixture
def expected() -> dict[str, Solution]:
    b = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {name: method(lambda v: v @ matrix(), b) for name, method in METHODS.items()}


@pytest.mark.parametrize("name", METHODS)
def test_the_same_solution(name: str, expected: dict[str, Solution], as_on_a_gpu: None) -> None:
    b = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solution = METHODS[name](lambda v: v @ matrix(), b)
    assert solution.converged and expected[name].converged
    assert solution.matvecs > expected[name].matvecs  # iterations after the last change nothing
    assert abs(int(solution.iterations) - int(expected[name].iterations)) <= 1
    torch.testing.assert_close(solution.value, expected[name].value, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_statuses(name: str, as_on_a_gpu: None) -> None:
    method = METHODS[name]
    if name != "damped lsmr":  # damping pulls towards a first guess that is not zero
        nothing = method(lambda v: v @ matrix(), torch.zeros(N, dtype=torch.float64))
        assert nothing.converged and (nothing.value == 0).all()
    broken = method(lambda v: v * torch.nan, torch.ones(N, dtype=torch.float64))
    assert broken.status is Status.NOT_FINITE and broken.value.isnan().all()
    tilted = torch.triu(torch.ones(N, N, dtype=torch.float64)) + 3 * matrix()
    with pytest.raises(OperatorError):
        method(lambda v: v @ tilted, torch.arange(1.0, N + 1, dtype=torch.float64))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "damped lsmr"])
@pytest.mark.parametrize("size", [2.0**-90, 2.0**-70, 2.0**70, 2.0**118])
@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_no_square_under_or_overflows(name: str, size: float, shape: tuple[int, ...]) -> None:
    A = matrix().float()
    b = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    usual, scaled = METHODS[name](lambda v: v @ A, b), METHODS[name](lambda v: v @ A, size * b)
    assert scaled.status is usual.status and torch.equal(scaled.iterations, usual.iterations)
    assert torch.equal(scaled.value / size, usual.value) and torch.equal(scaled.residual / size, usual.residual)


@pytest.mark.parametrize("shape", [(N,), (2, N)])
def test_an_operator_may_give_back_what_it_got(shape: tuple[int, ...]) -> None:
    b = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for method in METHODS.values():
        solution = method(lambda v: v, b)
        assert solution.converged
        value = solution.value.reshape(shape)
        if method is METHODS["minres with shifts"]:
            value = 1.5 * value
        if method is METHODS["damped lsmr"]:
            value = value * 1.09 - 0.09
        torch.testing.assert_close(value, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(N,), (2, N)])
@pytest.mark.parametrize("shifts", [None, [0.0, 2.0]])
def test_absolute_tolerances_of_minres(shape: tuple[int, ...], shifts: list[float] | None) -> None:
    b = 100 * torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = None if shifts is None else torch.tensor(shifts, dtype=torch.float64)
    loose = minres(lambda v: v @ matrix(), b, rtol=0.0, atol=1.0, shifts=moved)
    tight = minres(lambda v: v @ matrix(), b, rtol=0.0, atol=1e-6, shifts=moved)
    assert loose.converged and tight.converged and (loose.iterations < tight.iterations).all()
    assert 1e-3 < loose.residual.max() <= 1 and tight.residual.max() <= 1e-6
