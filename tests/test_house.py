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

from benchmarks import size

ROOT = Path(__file__).parents[1]
PUBLIC_DESPITE_UNDERSCORE = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples
FOREIGN = {"torch", "aten", "nn", "forward_ad"}  # torch's own names, some of which have no public form
PRIVATE_OF_ANOTHER = re.compile(r"(?<!\bself\.)(?<!\bcls\.)\b_[a-zA-Z]")  # perhaps: files without any need no parsing
BACKENDS = {f"laplace_plus.integrations.{name}" for name in ("backpack", "curvlinops", "foreign")}
OF_TENSORS = {"_version", "_is_view", "_schema", "_ops"}


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
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_DESPITE_UNDERSCORE | OF_TENSORS


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


ADAPTERS = [  # to packages that the library does not need
    module for module in size.FILES if module.startswith("laplace_plus.integrations.") and module not in BACKENDS
]


METHODS = {  # folders that nothing but the top level imports, by their limit in lines
    f"laplace_plus.{folder}": 600
    for folder in (
        "posteriors.abnn",
        "posteriors.swag",
        "posteriors.training_free_lora",
        "mixtures",
        "serving",
        "training.data_emphasized",
    )
} | {
    "laplace_plus.applications.constraints": 645,
    "laplace_plus.applications.fields": 612,
    "laplace_plus.posteriors.variational_last_layer": 611,
    "laplace_plus.applications.reconstruction": 657,
    "laplace_plus.applications.uses": 1675,  # of eleven files
}


def in_folder(folder):
    return [module for module in size.FILES if module == folder or module.startswith(f"{folder}.")]


def test_the_package_does_not_grow():
    # Adapters to other packages and self-contained methods are counted by themselves: nobody needs to read one to
    # understand the library.
    apart = {*ADAPTERS, *(module for folder in METHODS for module in in_folder(folder))}
    core = [module for module in size.FILES if module not in apart]
    assert size.lines_of(core) <= 39_440
    assert size.code_of(core) <= 25_053
    assert size.lines_of(size.Imports().closure("laplace_plus.posteriors.kfac")) <= 16_180


def test_adapters_are_thin():
    assert {module: size.lines_of([module]) for module in ADAPTERS if size.lines_of([module]) > 250} == {}


def test_methods_are_short_and_stand_alone():
    for folder, limit in METHODS.items():
        assert size.lines_of(in_folder(folder)) <= limit, folder
        for module in size.FILES:
            if not module.startswith(folder) and size.FILES[module].name != "__init__.py":
                assert f"from {folder}" not in size.FILES[module].read_text(), (module, folder)


def test_uses_are_short():
    """A posterior's uses, one file each."""
    uses = in_folder("laplace_plus.applications.uses")
    assert {module: size.lines_of([module]) for module in uses if size.lines_of([module]) > 250} == {}


def test_types_are_right():
    """Here, so that it runs beside the other tests."""
    if not hasattr(torch.distributed.ProcessGroup, "get_group_store"):
        pytest.skip("torch's own annotations are incomplete before 2.7")
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
