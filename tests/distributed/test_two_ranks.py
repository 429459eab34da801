"""Fits over two ranks (gloo, on the CPU) against fits in one process; see worker.py for the checks themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

import laplace_plus as lp
from laplace_plus import errors

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def worker() -> ModuleType:
    """The module beside this one; as a module of the tests it would be one of a package called distributed."""
    specification = importlib.util.spec_from_file_location("two_ranks_worker", HERE / "worker.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("in_wrappers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_check_passes_on_two_ranks(in_wrappers: bool, tmp_path: Path) -> None:
    """This process is rank 0, another one is rank 1."""
    here = worker()
    names = [name for name in here.CHECKS if (name in here.WRAPPED) == in_wrappers]
    command = [sys.executable, str(HERE / "worker.py"), "1", "2", str(tmp_path), *names]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as other:
        try:
            here.take_part(0, 2, tmp_path, names)
            said = other.communicate(timeout=120)[1]
        finally:
            other.kill()
    for rank in range(2):
        outcomes = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        failed = "\n".join(f"rank {rank}, {name}:\n{text}" for name, text in outcomes if text)
        assert not failed, failed
        assert [name for name, _ in outcomes] == names, f"a rank ended early: {said}"


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "configs/distributed_example.py", str(tmp_path / "saved")]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"fitted to 1001 examples.*accuracy (\S+) on 503 examples", done.stdout)
    assert found is not None and float(found[1]) > 0.85, done.stdout
    assert (tmp_path / "saved").exists()


def test_one_process_alone_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="torchrun"):
        lp.distributed.fit(lp.Diagonal(nn.Linear(2, 1), "regression"), [])
