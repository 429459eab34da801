from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is optional; it comes with torch's builds for CUDA")

HERE = Path(__file__).parent


def run(file: str, cache: Path, *options: str, **environment: str) -> None:
    """Run the checks of one file in a fresh process: how triton works is settled when it is first imported."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_", "LAPLACE_PLUS_"))}
    inherited |= {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    inherited |= environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", str(HERE / file), *options]
    root = HERE.parents[1]
    done = subprocess.run(command, env=inherited, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_in_the_interpreter(tmp_path: Path) -> None:
    quiet = "-Wignore:Conversion of an array:DeprecationWarning"  # Triton 3.2's interpreter with NumPy 1.25 or newer
    run("triton_checks.py", tmp_path, quiet, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_compiles_for_devices_that_are_not_there(tmp_path: Path) -> None:
    run("triton_compiles.py", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_the_device(tmp_path: Path) -> None:
    run("triton_checks.py", tmp_path)
