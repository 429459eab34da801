"""Fits over ranks (gloo, on the CPU) against one process; see worker.py and sharded.py for the checks themselves."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import laplace_plus as lp
from laplace_plus import errors

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def checks() -> ModuleType:
    """The module beside this one; as a module of the tests it would be one of a package called distributed."""
    specification = importlib.util.spec_from_file_location("sharded_checks", HERE / "sharded.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.worker


def command(rank: int, size: int, folder: Path, names: list[str]) -> list[str]:
    return [sys.executable, str(HERE / "sharded.py"), str(rank), str(size), str(folder), *names]


def require(size: int, folder: Path, names: list[str], said: str) -> None:
    for rank in range(size):
        outcomes = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        failed = "\n".join(f"rank {rank}, {name}:\n{text}" for name, text in outcomes if text)
        assert not failed, failed
        assert [name for name, _ in outcomes] == names, f"a rank ended early: {said}"


@pytest.mark.parametrize("in_wrappers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_check_passes_on_two_ranks(in_wrappers: bool, tmp_path: Path) -> None:
    """This process is rank 0, another one is rank 1."""
    here = checks()
    names = [name for name in here.CHECKS if (name in here.WRAPPED) == in_wrappers]
    with subprocess.Popen(command(1, 2, tmp_path, names), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as other:
        try:
            here.take_part(0, 2, tmp_path, names)
            said = other.communicate(timeout=120)[1]
        finally:
            other.kill()
    require(2, tmp_path, names, said)


@pytest.mark.slow
def test_sharded_networks_on_four_ranks(tmp_path: Path) -> None:
    """Two of them without data."""
    names = [name for name, function in checks().CHECKS.items() if function.__module__ == "sharded_checks"]
    options: Any = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command(rank, 4, tmp_path, names), **options) for rank in range(4)]
    try:
        said = "\n".join(rank.communicate(timeout=900)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    require(4, tmp_path, names, said)


def torchrun(*script: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", "localhost:0", *script]
    done = subprocess.run(launch, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_trainer_with_adapters_under_fsdp2() -> None:
    for package in ("accelerate", "peft", "transformers"):
        pytest.importorskip(package)
    said = torchrun("tests/distributed/trainer.py")
    for rank in range(2):
        assert re.search(rf"rank {rank}: .*fitted to 16 examples\), \(3, 2\)", said), said


@pytest.mark.slow
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    said = torchrun("configs/distributed_example.py", str(tmp_path / "saved"))
    found = re.search(r"fitted to 1001 examples.*accuracy (\S+) on 503 examples", said)
    assert found is not None and float(found[1]) > 0.85, said
    assert (tmp_path / "saved").exists()


def test_one_process_alone_is_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="torchrun"):
        lp.distributed.fit(lp.Diagonal(nn.Linear(2, 1), "regression"), [])
