"""What holds for all tests."""

from __future__ import annotations

import os

import torch

collect_ignore = ["distributed/worker.py"]  # run in processes of its own; what it imports takes seconds

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that each use every core only get in each other's way
    torch.set_num_threads(1)
