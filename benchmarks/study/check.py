"""Check that committed pages are those of the committed cells, and pack new cells.

    python benchmarks/study/check.py --results benchmarks/results
    python benchmarks/study/check.py --results benchmarks/results --pack
    python benchmarks/study/check.py --results benchmarks/results --write
    python benchmarks/study/check.py --results benchmarks/results --picture

Prints each page that differs and exits with 1 if there is one. ``--pack`` first compresses JSON lines.
``--write`` writes the page of every set: the repository keeps only those that the documentation links.
``--picture`` draws study.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.study import published, report, uncertainty
from benchmarks.study.cells import Results
from benchmarks.study.settings import Settings

CONFIGURATION = Path(__file__).resolve().parents[2] / "configs" / "study.yaml"
CLASSES = ("glass", "ionosphere", "australian", "breast_wisconsin_original")
SUITES = {
    "study": CLASSES,
    "study-no-decay": tuple(f"{name}_no_decay" for name in CLASSES),
    "study-regression": ("boston", "energy", "concrete"),
    "study-gaps": ("boston_gap", "energy_gap", "concrete_gap"),
    "study-large": ("naval", "power", "protein"),
    "study-large-gaps": ("naval_gap", "power_gap", "protein_gap"),
}


def _same(path: Path, text: str, *, skip: int = 0) -> bool:
    """Whether a page has this text, apart from its first lines."""
    return path.exists() and path.read_text().splitlines()[skip:] == text.splitlines()[skip:]


def differences(folder: Path, settings: Settings) -> Iterator[str]:
    """What is wrong with a folder of cells and pages, a line each."""
    results = Results(folder)
    labels = list(settings.content["methods"])
    tables = {}
    for name in results.names():
        section, rows = settings.section(name), results.rows(name)
        other = {r["method"] for r in rows if r["stamp"] != section.stamp_of(r["method"]) or not r["data"]}
        if other:
            yield f"study-{name}: cells of other settings: {', '.join(sorted(other))}"
        tables[name] = report.Table(rows, labels)
        page = folder / f"study-{name}.md"
        if page.exists() and not _same(page, tables[name].markdown(name)):
            yield f"{page.name}: not the page of its cells"
    for page, names in SUITES.items():
        if not set(names) <= tables.keys():
            yield f"{page}.md: cells of {', '.join(sorted(set(names) - tables.keys()))} are missing"
            continue
        chosen = {name: tables[name] for name in names}
        if not _same(folder / f"{page}.md", report.overview(chosen, report.ranking(chosen)), skip=1):
            yield f"{page}.md: not the ranking of its cells"
    content = yaml.safe_load(Path(published.__file__).with_name("published.yaml").read_text())
    if not _same(folder / "study-published.md", published.page(folder, content)):
        yield "study-published.md: not the page of the cells"
    if not _same(folder / "study-uncertainty.md", uncertainty.page(uncertainty.columns(folder, labels), labels)):
        yield "study-uncertainty.md: not the page of the cells"


def main(argv: list[str] | None = None) -> int:
    """Check a folder; 1 if a page differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder of cells and pages")
    parser.add_argument("--config", type=Path, default=CONFIGURATION)
    parser.add_argument("--pack", action="store_true", help="compress JSON lines first")
    parser.add_argument("--write", action="store_true", help="write the page of every set")
    parser.add_argument("--picture", action="store_true", help="draw the ranking of study.md")
    arguments = parser.parse_args(argv)
    results = Results(arguments.results)
    settings = Settings.read(arguments.config)
    for name in results.names() if arguments.pack else ():
        results.pack(name)
    for name in results.names() if arguments.write else ():
        table = report.Table(results.rows(name), list(settings.content["methods"]))
        (arguments.results / f"study-{name}.md").write_text(table.markdown(name))
    if arguments.picture:
        rows = {name: results.rows(name) for name in SUITES["study"]}
        tables = {name: report.Table(own, list(settings.content["methods"])) for name, own in rows.items()}
        report.ranking_picture(report.ranking(tables)).savefig(arguments.results / "study.png", dpi=110)
    found = list(differences(arguments.results, settings))
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(results.names())} sets, {len(found)} differences\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
