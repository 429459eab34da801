"""How large the package is to read: lines, what one file pulls in, and how many functions the first calls enter.

    python benchmarks/size.py            # the figures
    python benchmarks/size.py --list     # and the functions, by file

The import closure of a module follows each ``from laplace_plus.x import name`` to the file that defines the name; files
``__init__.py`` that only re-export are not followed, names taken from an imported package (``io.write``) are. Functions
are counted while KFAC is fitted to, and then tuned and predicts with, a network of two linear layers; lambdas and
comprehensions count as functions.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import laplace_plus as lp

PACKAGE = Path(lp.__file__).parent
FILES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Every node of a file's syntax tree; the tree itself is the first."""
    return list(ast.walk(ast.parse(file.read_text())))


def lines_of(modules: Any) -> int:
    """All lines of some modules."""
    return sum(len(FILES[module].read_text().splitlines()) for module in modules)


def code_of(modules: Any) -> int:
    """Lines that are neither empty nor a comment nor a docstring."""
    total = 0
    for module in modules:
        text = FILES[module].read_text()
        strings = [
            node
            for node in nodes_of(FILES[module])
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        documented = {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        lines = (line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in documented)
        total += sum(1 for line in lines if line and not line.startswith("#"))
    return total


def raises_of(modules: Any) -> int:
    """How many ``raise`` statements some modules have."""
    return sum(isinstance(node, ast.Raise) for module in modules for node in nodes_of(FILES[module]))


def public_names(cls: type) -> list[str]:
    """The names of a class that do not start with an underscore."""
    return [name for name in dir(cls) if not name.startswith("_")]


class Imports:
    """Which file an imported name is defined in."""

    def __init__(self) -> None:
        self.trees = {module: nodes_of(file)[0] for module, file in FILES.items()}
        self.names = {module: set(self._defined(tree)) for module, tree in self.trees.items()}

    @staticmethod
    def _defined(tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            yield from (target.id for target in targets if isinstance(target, ast.Name))

    def resolve(self, module: str, name: str) -> str:
        """The module that defines a name which is imported from a module."""
        if name in self.names.get(module, ()):
            return module
        if f"{module}.{name}" in FILES:
            return f"{module}.{name}"
        for node in self.trees[module].body if module in self.trees else ():
            for alias in node.names if isinstance(node, ast.ImportFrom) and node.module else ():
                if (alias.asname or alias.name) == name:
                    return self.resolve(str(node.module), alias.name)  # type: ignore[union-attr]
        return module

    def closure(self, start: str) -> set[str]:
        """Every module that a module needs."""
        seen: set[str] = set()
        todo = [start]
        while todo:
            module = todo.pop()
            if module in seen or module not in FILES:
                continue
            seen.add(module)
            if self.is_package(module):
                continue
            nodes = nodes_of(FILES[module])
            for node in nodes:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("laplace_plus"):
                    todo += [self.resolve(str(node.module), alias.name) for alias in node.names]
            packages = {name.rpartition(".")[2]: name for name in todo if name in FILES and self.is_package(name)}
            for node in nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
                    todo.append(self.resolve(packages[node.value.id], node.attr))
        return seen

    @staticmethod
    def is_package(module: str) -> bool:
        """Whether a module is a folder's ``__init__.py``."""
        return FILES[module].name == "__init__.py"


def entered(call: Callable[[], Any]) -> dict[str, set[str]]:
    """The package's functions that a call enters, by file."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    found: dict[str, set[str]] = {}
    for code in codes:
        file = Path(code.co_filename)
        if PACKAGE in file.parents:
            found.setdefault(str(file.relative_to(PACKAGE)), set()).add(code.co_qualname)
    return found


def first_calls() -> dict[str, dict[str, set[str]]]:
    """The functions that KFAC's ``fit`` and first ``predictive`` enter, by file."""
    torch.manual_seed(0)
    x, y = torch.randn(50, 4), torch.randint(0, 3, (50,))
    posterior = lp.KFAC(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), "classification")
    fit = entered(lambda: posterior.fit([(x, y)]))
    tuning = entered(posterior.fit_prior_precision)
    return {"fit": fit, "default tuning": tuning, "first predictive": entered(lambda: posterior.predictive(x[:5]))}


def counts(calls: dict[str, dict[str, set[str]]]) -> dict[str, tuple[int, int]]:
    """Numbers of functions and of files for each call."""
    return {name: (sum(map(len, functions.values())), len(functions)) for name, functions in calls.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the functions")
    arguments = parser.parse_args()
    imports = Imports()
    reached = imports.closure("laplace_plus.posteriors.kfac")
    say = sys.stdout.write
    say(
        f"package: {lines_of(FILES)} lines in {len(FILES)} files, {code_of(FILES)} of code, {raises_of(FILES)} raises\n"
    )
    say(f"lp.KFAC: {len(public_names(lp.KFAC))} public names\n")
    say(f"import closure of posteriors/kfac.py: {lines_of(reached)} lines in {len(reached)} files\n")
    for name, functions in first_calls().items():
        say(f"{name} of KFAC: {sum(map(len, functions.values()))} functions in {len(functions)} files\n")
        for file, names in sorted(functions.items()) if arguments.list else ():
            say(f"  {file}: {', '.join(sorted(names))}\n")


if __name__ == "__main__":
    main()
