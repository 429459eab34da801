"""Modules and configurations that tests of the command line write, and what they read of its answers."""

from __future__ import annotations

import json

from laplace_plus.cli import main

CLASSIFIER = """
import torch
from torch import nn

def data(seed=0, n=60, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    points = torch.randn(n, 2, generator=generator) + 2 * torch.eye(3)[labels, :2] + shift
    return [(points[:40], labels[:40]), (points[40:], labels[40:])]

def model(hidden=8):
    network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    return network

def count(n):
    return n
"""


def report_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def values(report, method):
    return {name: entry["values"] for name, entry in report["methods"][method]["metrics"].items()}


def wrap_config(module, output, **keys):
    config = {
        "model": f"{module}:model",
        "train_data": f"{module}:data",
        "test_data": f"{module}:data",
        "test_data_kwargs": {"seed": 1},
        "posteriors": [{"class": "Full"}],
        "output": str(output),
        **keys,
    }
    return json.dumps({key: value for key, value in config.items() if value is not None})  # JSON is YAML


def refused(arguments, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("laplace-plus: ")
    assert printed.err.count("\n") == 1
    return printed.err
