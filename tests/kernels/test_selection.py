from __future__ import annotations

import importlib
import importlib.util
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


def test_triton_runs_only_where_a_rule_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    card = torch.device("cuda")
    assert selection.triton_kernels("gram_schmidt", card) is None  # no kernel has been timed on a card
    with selection.use("reference"):
        assert selection.triton_kernels("gram_schmidt", card) is None
    with selection.use("triton"):
        assert selection.triton_kernels("gram_schmidt", torch.device("cpu")) is None
        if importlib.util.find_spec("triton"):
            assert selection.triton_kernels("gram_schmidt", card) == "laplace_plus.kernels._triton.gram_schmidt"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
        assert selection.triton_kernels("gram_schmidt", card) is None


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
