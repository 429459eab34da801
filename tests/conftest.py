"""What holds for all tests."""

from __future__ import annotations

import os

WORKER = "PYTEST_XDIST_WORKER" in os.environ
if WORKER:  # workers that each use every core only get in each other's way
    os.environ["OMP_NUM_THREADS"] = "1"  # which NumPy, SciPy and the processes that tests start read

import pytest  # noqa: E402
import torch  # noqa: E402

collect_ignore = ["distributed/worker.py"]  # run in processes of its own; what it imports takes seconds

if WORKER:
    torch.set_num_threads(1)


@pytest.fixture
def double():
    """Float64 as torch's default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
