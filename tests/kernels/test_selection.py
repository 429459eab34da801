from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest
import torch

import laplace_plus
from laplace_plus import kernels
from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import selection


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    selection.forget()
    monkeypatch.delenv("LAPLACE_PLUS_KERNELS", raising=False)


def test_modes_nest_and_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selection.mode() == "auto"
    monkeypatch.setenv("LAPLACE_PLUS_KERNELS", "reference")
    assert selection.mode() == "reference"
    with selection.use("triton"):
        with selection.use("auto"):
            assert selection.mode() == "auto"
        assert selection.mode() == "triton"
    assert selection.mode() == "reference"
    monkeypatch.setenv("LAPLACE_PLUS_KERNELS", "fast")
    with pytest.raises(ConfigurationError, match="LAPLACE_PLUS_KERNELS"):
        selection.mode()
    with pytest.raises(ConfigurationError), selection.use("fast"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"torch": 1.0, "triton a": 0.5, "triton b": 0.4}, "triton b"),
        ({"torch": 1.0, "triton a": 1.1}, "torch"),
        ({"torch": 1.0, "triton a": 0.99}, "torch"),  # within the noise
        ({"torch": 1.0, "triton a": float("inf")}, "torch"),
    ],
)
def test_the_fastest_is_chosen_and_never_one_slower_than_torch(
    seconds: dict[str, float], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []
    monkeypatch.setattr(selection, "time_candidate", lambda name, _call: (timed.append(name), seconds[name])[1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: torch.no_grad())
    candidates = {name: lambda: None for name in seconds}
    device = torch.device("cuda")
    for _ in range(2):  # measured once
        assert selection.choose(("op", 1), device, 1e12, candidates) == chosen
    assert timed == list(seconds)
    assert selection.choices()["op", 1].seconds == seconds
    assert selection.choose(("op", 2), device, 1e3, candidates) == "torch"  # too small to measure
    assert selection.choose(("op", 3), torch.device("cpu"), 1e12, candidates) == "torch"
    with selection.use("reference"):
        assert selection.choose(("op", 4), device, 1e12, candidates) == "torch"
    with selection.use("triton"):
        assert selection.choose(("op", 5), device, 1e12, candidates) == "triton a"
        assert selection.choose(("op", 6), device, 1e12, {"torch": print, "loop": print}) == "torch"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert selection.choose(("op", 7), device, 1e12, candidates) == "torch"
    assert len(timed) == len(seconds)
    selection.forget()
    assert not selection.choices()


def test_a_kernel_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fails() -> None:
        raise RuntimeError("out of registers")

    with pytest.warns(RuntimeWarning, match="out of registers"):
        assert selection.time_candidate("triton", fails) == float("inf")
    with pytest.raises(RuntimeError):
        selection.time_candidate("torch", fails)

    def too_large() -> None:
        raise torch.OutOfMemoryError

    assert selection.time_candidate("torch", too_large) == float("inf")


def test_kernels_run_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules can be imported without it, and the reference does the work."""
    monkeypatch.setattr(laplace_plus, "kernels", kernels)  # put back at the end
    with mock.patch.dict(sys.modules, triton=None):  # as are the modules
        for name in [name for name in sys.modules if name.startswith("laplace_plus.kernels")]:
            del sys.modules[name]
        anew = importlib.import_module("laplace_plus.kernels")
        for name in ("gram_schmidt", "symmetric_update"):
            importlib.import_module(f"laplace_plus.kernels._triton.{name}")
        assert anew is not kernels
        with anew.use("triton"):
            total = anew.symmetric_update(torch.zeros(2, 2), torch.eye(2))
    assert total.equal(torch.eye(2))
