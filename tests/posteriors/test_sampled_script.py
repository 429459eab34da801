"""The full-size configuration for a ResNet-18 runs, in its tiny form."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from laplace_plus.errors import ConvergenceWarning

SCRIPT = Path(__file__).parents[2] / "configs" / "sampled_laplace_resnet18.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("sampled_laplace_resnet18", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("solver", ["sgd", "cg"])
@pytest.mark.slow
def test_the_tiny_form_runs(script, tmp_path, solver):
    pytest.importorskip("torchvision")
    arguments = ["--tiny", "--samples", "2", "--solver", solver, "--device", "cpu"]
    arguments += ["--output", str(tmp_path / "result.json")]
    with pytest.warns(ConvergenceWarning):  # one step is not enough
        first = script.main([*arguments, "--steps", "1"])
    with pytest.warns(ConvergenceWarning):
        second = script.main([*arguments, "--steps", "2"])
    assert len(first["log_precision"]) == 1 and len(second["log_precision"]) == 2
    assert second["log_precision"][0] == first["log_precision"][0]
    assert json.loads((tmp_path / "result.json").read_text()) == second
    assert 0 < second["test"]["nll"] < 10


def test_the_network_is_the_resnet18_for_small_images(script):
    pytest.importorskip("torchvision")
    model = script.network()
    weights = sum(p.numel() for name, p in model.named_parameters() if script.is_weight(name, p))
    assert weights == 11_210_532
    assert model.conv1.stride == (1, 1)
