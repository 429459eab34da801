"""What a new process imports with the package, and how many functions the first calls enter.

In a process of its own, as what other tests have imported and what earlier calls remember change both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import laplace_plus as lp

SCRIPT = """
import json, sys
import laplace_plus as lp, torch
from benchmarks import size
def imported():
    adapters = {"botorch", "lightning", "sklearn", "torch_geometric", "transformers"}
    return sorted(({"backpack", "curvlinops", "matplotlib", "triton"} | adapters) & set(sys.modules))
found = {"entered": size.counts(size.first_calls())}
found["missing"] = sorted(set(dir(lp)) - {"BackPack", "Curvlinops"} - set(vars(lp)))
found["libraries"] = [imported()]
lp.Full(torch.nn.Linear(2, 1), "regression", backend="curvlinops")
found["libraries"].append(imported())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    # Warnings are errors here as well: the imports must keep theirs to themselves.
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    root = Path(__file__).parents[1]
    return json.loads(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout)


def test_libraries_are_imported_when_they_are_wanted(found):
    before, with_curvlinops = found["libraries"]
    assert before == []
    assert "curvlinops" in with_curvlinops
    assert "backpack" not in with_curvlinops


def test_public_names_are_attributes(found):
    assert found["missing"] == []
    assert {"curvature", "tuning", "likelihoods", "metrics", "plotting"} <= set(
        lp.__all__
    )  # modules that pages mention


def test_first_calls_enter_few_functions(found):
    functions, files = found["entered"]["fit"]
    assert functions <= 117 and files <= 24
    functions, files = found["entered"]["first predictive"]
    assert functions <= 79 and files <= 21
    assert found["entered"]["default tuning"][1] <= 40
