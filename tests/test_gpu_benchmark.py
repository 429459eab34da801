"""The command for a graphics card, on the CPU: it must run when a card is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import images, measuring, report, right, run

ROOT = Path(__file__).parents[1]


def called(monkeypatch, folder, *options):
    monkeypatch.setattr(sys, "argv", ["run.py", "--tiny", "--output", str(folder), *options])
    run.main()
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _precision(monkeypatch):
    """The command sets torch's, for all that follows."""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    for name in ("allow_tf32", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))


@pytest.fixture
def steps(monkeypatch):
    """Parts of three rows, of which one fails and one takes too long; and what was measured."""
    seen = []

    def row(name, value):
        seen.append(name)
        if name == "broken":
            raise RuntimeError("no kernel image")
        while name == "endless":
            pass
        return {"fit_epochs": value}

    def part(settings):
        for name in ("KFAC", "broken", "endless"):
            yield measuring.Step(name, 0.0, lambda name=name: row(name, 2.5))

    monkeypatch.setattr(run, "PARTS", {"quality": part})
    return seen


def test_a_row_is_written_at_once_and_a_failing_one_is_measured_again(steps, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "stopped_after", lambda limit, stop=run.stopped_after: stop(min(limit, 0.05)))
    first = called(monkeypatch, tmp_path, "--parts", "quality")
    assert [row["name"] for row in first] == steps == ["KFAC", "broken", "endless"]
    assert "error" not in first[0]
    assert first[1]["error"] == "RuntimeError: no kernel image"
    assert first[1]["place"].startswith("test_gpu_benchmark.py:")
    assert "TimeoutError" in first[2]["error"]
    again = called(monkeypatch, tmp_path, "--parts", "quality")
    assert [row["name"] for row in again[3:]] == ["broken", "endless"]


def test_the_page_has_cards_alone_and_sets_goals_beside():
    card = {"part": "quality", "name": "KFAC", "device": "A card", "torch": "2", "fit_epochs": 9.0, "clean nll": 0.25}
    failed = {"part": "kernels", "name": "one", "device": "A card", "torch": "2", "error": "no memory", "place": "a:1"}
    page = report.page([card, failed, card | {"device": "CPU", "name": "elsewhere"}])
    assert "Measured on A card, torch 2." in page
    assert "| exact KFAC fit, epochs | 9 | 8 |" in page
    assert "| KFAC | 0.25 | 9 |" in page
    assert "- one: no memory a:1" in page
    assert "elsewhere" not in page
    written = (ROOT / "benchmarks" / "results" / "gpu.md").read_text()
    assert written == report.page([]) or "Measured on " in written


def test_outcomes_are_read_of_one_process_and_of_several(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "tests/a.py::test_x[1] PASSED [ 10%]\n[gw0] [ 20%] FAILED tests/a.py::test_y \n"
        "tests/a.py::T::test_z SKIPPED (no)\n"
        "=== short test summary info ===\nFAILED tests/a.py::test_y - error\n"
    )
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    row = right.Running("a", process, log, 0.0).row(ended=False)
    assert {name: row[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 1, "skipped": 1}
    assert row["failing"] == ["test_y"]
    assert "error" not in row
    process.returncode = 4
    assert "error" in right.Running("a", process, log, 0.0).row(ended=False)


def test_waits_are_counted_by_batch():
    def fit(n):
        for _ in range(n):
            torch.ones(3).sum().item()

    found, places = measuring.per_batch(fit, "cpu")
    assert found == 1
    assert "_local_scalar_dense × 1" in places[0]


def test_images_are_those_of_their_coefficients(tmp_path):
    """One flat grey image, and one whose light rises by 8 in its first block, as its constant coefficient says."""
    coefficients = np.zeros((64, 24, 2), np.int8)
    coefficients[0, 0, 1] = 8
    written = {"coef": coefficients, "ovf_index": np.array([], int), "ovf_value": np.array([], np.int16)}
    np.savez(tmp_path / "a.npz", **written, q=np.full((2, 64), 8), y=np.array([3, 5]))
    pixels, labels = images.decoded(tmp_path / "a.npz")
    assert pixels.shape == (2, 3, 32, 32)
    assert labels.tolist() == [3, 5]
    assert (pixels[0] == 128).all()
    assert (pixels[1, :, :8, :8] == 136).all()
    assert (pixels[1, :, 8:] == 128).all()


@pytest.mark.slow
def test_devices_do_not_mix_on_a_pretended_card():
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of torch has no devices that are written in Python")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--device",
        "card",
        "tests/test_devices.py",
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout[-4000:]
    assert "passed" in found.stdout and "skipped" not in found.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # as in a process of its own
def test_every_branch_runs(monkeypatch, tmp_path):
    rows = called(monkeypatch, tmp_path)
    assert [row for row in rows if "error" in row or row.get("failed")] == []
    assert {row["part"] for row in rows} == {"right", "quality", "speed", "kernels"}
    assert {"KFAC", "EKFAC", "Diagonal", "last layer"} <= {row["name"] for row in rows}
