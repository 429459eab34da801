"""The package stays small enough to read, and no folder reaches into another's private names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import laplace_plus as lp
from benchmarks import size

ROOT = Path(__file__).parents[1]
PUBLIC_DESPITE_UNDERSCORE = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples
FOREIGN = {"torch", "aten", "nn", "forward_ad"}  # torch's own names, some of which have no public form
PRIVATE_OF_ANOTHER = re.compile(r"(?<!\bself\.)(?<!\bcls\.)\b_[a-zA-Z]")  # perhaps: files without any need no parsing
OF_TENSORS = {"_version", "_is_view", "_schema", "_ops"}
OF_MODULES = {"_modules", "_parameters", "_buffers"}


def defined(file):
    """Names that a file defines: functions, classes, attributes, arguments, variables."""
    for node in size.nodes_of(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def private(name):
    known = PUBLIC_DESPITE_UNDERSCORE | OF_TENSORS | OF_MODULES
    return name.startswith("_") and not name.startswith("__") and name not in known


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def own(node):
    """Whether an attribute is one of ``self``, ``cls`` or ``super()``."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def reaches(files, group):
    """Private attributes of other objects that no file of the same group defines."""
    suspects = [file for file in files if PRIVATE_OF_ANOTHER.search(file.read_text())]
    groups = {group(file) for file in suspects}
    known = defaultdict(set)
    for file in files:
        if group(file) in groups:
            known[group(file)].update(defined(file))
    for file in suspects:
        for node in size.nodes_of(file):
            if isinstance(node, ast.Attribute) and private(node.attr) and not own(node):
                if node.attr not in known[group(file)] and root_of(node) not in FOREIGN:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laplace_plus."):
                for alias in node.names:
                    if private(alias.name) and alias.name not in known[group(file)]:
                        yield f"{file.relative_to(ROOT)}:{node.lineno}: {alias.name}"


def test_no_folder_reaches_into_anothers_private_names():
    assert list(reaches(list(size.PACKAGE.rglob("*.py")), lambda file: file.parent)) == []


def test_tests_use_public_names():
    assert list(reaches(list((ROOT / "tests").rglob("*.py")), lambda file: file)) == []


def test_no_module_imports_another_for_its_types_only():
    """Such imports hide circles; optional foreign packages and lazily imported names of ``__init__`` are exempt."""
    for file in size.FILES.values():
        for node in size.nodes_of(file):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                modules = [getattr(entry, "module", None) or "" for entry in node.body]
                assert file.name == "__init__.py" or not any(m.startswith("laplace_plus") for m in modules), file


def test_files_are_short():
    long = {module: size.lines_of([module]) for module in size.FILES if size.lines_of([module]) > 510}
    assert long == {}


BUDGETS = {
    # lines, docstrings and comments included; lowered to what was reached, raised only by a commit that cuts elsewhere
    "applications": 6753,
    "cli": 90,
    "curvature": 1619,
    "distributed": 298,
    "experiments": 738,
    "geometry": 1365,
    "integrations": 1506,
    "kernels": 1052,
    "likelihoods": 1936,
    "linalg": 3616,
    "network": 3840,
    "persistence": 261,
    "posteriors": 7319,
    "predictive": 937,
    "structured": 3208,
    "testing": 322,
    "tuning": 4176,
}
REST = 1076
"""Lines of the files at the top: errors, checks, priors, metrics."""

APART = ("cli", "experiments", "integrations")
"""What nobody needs to read to understand the library."""


def part_of(module):
    """The folder or file at the package's top that a module belongs to; the rest are small files."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in BUDGETS else ""


def lines_by_part():
    found = dict.fromkeys([*BUDGETS, ""], 0)
    for module in size.FILES:
        found[part_of(module)] += size.lines_of([module])
    return found


def test_folders_keep_their_budgets():
    over = {part: n for part, n in lines_by_part().items() if n > BUDGETS.get(part, REST)}
    assert over == {}


def test_the_package_does_not_grow():
    lines = lines_by_part()
    assert sum(lines.values()) <= 40_112
    assert sum(n for part, n in lines.items() if part not in APART) <= 37_778
    assert size.lines_of(size.Imports().closure("laplace_plus.posteriors.kfac")) <= 13_320
    assert size.raises_of(size.FILES) <= 317
    assert len(size.public_names(lp.KFAC)) <= 45


def test_tests_do_not_grow():
    assert sum(len(file.read_text().splitlines()) for file in (ROOT / "tests").rglob("*.py")) <= 41_230


@pytest.mark.slow
def test_types_are_right():
    """The check of types that CONTRIBUTING.md names, beside the long tests."""
    if not hasattr(torch.distributed.ProcessGroup, "get_group_store"):
        pytest.skip("torch's own annotations are incomplete before 2.7")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
