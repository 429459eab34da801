"""Pages link to what is there, and the reference has every public name."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

import laplace_plus as lp

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "benchmarks", "notebooks")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
PAGES = sorted([*PAGES, *(ROOT / "notebooks").glob("*.ipynb")])
MODULES = ("curvature", "distributed", "geometry", "likelihoods", "linalg", "predictive", "structured", "tuning")
MODULES += ("applications.training",)
LINK = re.compile(r"(?<!`)\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GIVEN = re.compile(r"\bGiven [^.:]*[.:]")
BRACKETED = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@cache
def text_of(page):
    """The page without its code."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return FENCED.sub("", text)


def anchors(page):
    """The names that GitHub and the site give to headings."""
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(text_of(page)):
        plain = BRACKETED.sub(r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        yield f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1


def undefined(page):
    """Names that visible code uses before it defines them, and that no sentence with "Given" introduces."""
    text = HIDDEN.sub("", page.read_text())
    known = set(dir(builtins)).union(*(re.findall(r"`([A-Za-z_]\w*)`", sentence) for sentence in GIVEN.findall(text)))
    for block in PYTHON.findall(text):
        parts = [example.source for example in doctest.DocTestParser().get_examples(block)] or [block]
        nodes = list(ast.walk(ast.parse("".join(parts))))
        for node in nodes:
            if isinstance(node, ast.alias):
                known.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                known.add(node.id)
        yield from (node.id for node in nodes if isinstance(node, ast.Name) and node.id not in known)


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.stem)
def test_visible_code_can_be_copied(page):
    assert sorted(set(undefined(page))) == []


SHOWN = [page for page in sorted((ROOT / "docs").rglob("*.md")) if PYTHON.search(page.read_text())]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_visible_code_fits_a_desktop(page):
    lines = "".join(PYTHON.findall(HIDDEN.sub("", page.read_text()))).splitlines()
    assert [line for line in lines if len(line) > 97] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.stem)
def test_tables_are_whole(page):
    lines = FENCED.sub("", page.read_text()).splitlines()
    for above, row, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        assert row[:1] != "|" or above[:1] == "|" or (below and set(below) <= set("|-: ")), row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(text_of(page)):
        found = page if not target else page.parent / unquote(target)
        assert found.is_file() or (page.name == "README.md" and found.is_dir()), target
        if anchor:
            assert anchor in anchors(found), f"{target}#{anchor}"


def test_every_page_is_in_the_contents():
    """In a ``toctree``: the site's build warns of others, and so fails."""
    entries = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [re.sub(r"^.*<(.*)>$", r"\1", line) for line in block.splitlines() if line and line[0] != ":"]
            entries.update((page.parent / line).resolve() for line in lines)
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    pages += (ROOT / "benchmarks" / "results").glob("*.md")
    assert [p for p in pages if p.with_suffix("") not in entries and p.name != "index.md"] == []


def documented():
    """Full names in the reference; of a module all that it exports."""
    reference = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.rst"))
    for name in re.findall(r"^\.\. (?:auto)?(?:class|data|function|exception):: (\S+)$", reference, re.MULTILINE):
        yield name.removeprefix("laplace_plus.")
    for names in re.findall(r"^\.\. autosummary::\n(?:   :.*\n)*\n((?:   \S+\n)+)", reference, re.MULTILINE):
        yield from (name.removeprefix("laplace_plus.") for name in names.split())  # each with a page of its own
    modules = re.findall(r"^\.\. automodule:: laplace_plus\.(\S+)\n((?:   :.*\n)*)", reference, re.MULTILINE)
    for module, options in modules:
        yield module
        without = re.findall(r":exclude-members: (.*)", options)
        if ":no-members:" not in options:
            names = getattr(importlib.import_module(f"laplace_plus.{module}"), "__all__", ())
            yield from (f"{module}.{name}" for name in set(names) - set(", ".join(without).split(", ")))


def is_installed(name):
    """Whether the package that a name's adapter stands on is there."""
    adapter = re.fullmatch(r"integrations\.(\w+)\.\w+", name)
    return adapter is None or find_spec(adapter[1]) is not None


def test_the_reference_has_every_public_name_once():
    times = Counter(name for name in documented() if is_installed(name))
    assert [name for name, n in times.items() if n > 1] == []
    paths = set()
    for name in times:
        found = lp
        for part in name.split("."):
            has = hasattr(found, part)
            found = getattr(found, part) if has else importlib.import_module(f"{found.__name__}.{part}")
        paths.add(id(found))
    assert [name for name in lp.__all__ if id(getattr(lp, name)) not in paths] == []
    for module in map(importlib.import_module, (f"laplace_plus.{name}" for name in MODULES)):
        assert [name for name in module.__all__ if id(getattr(module, name)) not in paths] == [], module


class Page(HTMLParser):
    """What a page of the site links to, and what can be linked to on it."""

    def __init__(self, file):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.names.update(given[key] for key in ("id", "name") if given.get(key))
        self.links += [given[key] for key in ("href", "src") if given.get(key)]


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_its_links_lead_somewhere(tmp_path):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    pytest.importorskip("myst_nb", reason="needs the extra `docs`")
    command = re.search(r"^pip install -e '\.\[docs\]' && sphinx-build (.*)$", (ROOT / "README.md").read_text(), re.M)
    arguments = command[1].replace("build/docs", str(tmp_path)).split()
    done = subprocess.run([sys.executable, "-m", "sphinx", "-q", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {file: Page(file) for file in tmp_path.rglob("*.html")}
    assert tmp_path / "docs" / "index.html" in pages
    for file, page in pages.items():
        for link in page.links:
            if not re.match(r"[a-z]+:", link):
                target, _, anchor = unquote(link).partition("#")
                found = file if not target else (file.parent / target.partition("?")[0]).resolve()
                assert found.is_file(), f"{file}: {link}"
                if anchor and found in pages:
                    assert anchor in pages[found].names, f"{file}: {link}"
