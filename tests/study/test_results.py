"""The committed pages of the study are those of its committed cells, and these are of the present configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.study import published, report, uncertainty
from benchmarks.study.settings import Settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELLS = sorted(RESULTS.glob("study-*.jsonl"))
SETTINGS = Settings.read(RESULTS.parents[1] / "configs" / "study.yaml")
LABELS = list(SETTINGS.content["methods"])
SUITES = {
    "study": ["glass", "ionosphere", "australian", "breast_wisconsin_original"],
    "study-no-decay": [
        "glass_no_decay",
        "ionosphere_no_decay",
        "australian_no_decay",
        "breast_wisconsin_original_no_decay",
    ],
    "study-regression": ["boston", "energy", "concrete"],
    "study-gaps": ["boston_gap", "energy_gap", "concrete_gap"],
    "study-large": ["naval", "power", "protein"],
    "study-large-gaps": ["naval_gap", "power_gap", "protein_gap"],
}


def rows(name):
    return [json.loads(line) for line in (RESULTS / f"study-{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", CELLS, ids=lambda path: path.stem.removeprefix("study-"))
def test_a_sets_page_is_that_of_its_cells(path):
    name = path.stem.removeprefix("study-")
    section = SETTINGS.section(name)
    found = rows(name)
    assert all(row["stamp"] == section.stamp_of(row["method"]) and row["data"] for row in found)
    assert len({(row["method"], row["split"]) for row in found}) == len(found)
    assert report.Table(found, LABELS).markdown(name) == path.with_suffix(".md").read_text()


@pytest.mark.parametrize(("page", "names"), SUITES.items(), ids=list(SUITES))
def test_rankings_are_those_of_the_cells(page, names):
    tables = {name: report.Table(rows(name), LABELS) for name in names}
    written = (RESULTS / f"{page}.md").read_text()
    lines = report.overview(tables, report.ranking(tables)).splitlines()
    assert written.splitlines()[1:] == lines[1:]  # their titles differ


def test_pages_beside_are_those_of_the_cells():
    content = yaml.safe_load(Path(published.__file__).with_name("published.yaml").read_text())
    assert published.page(RESULTS, content) == (RESULTS / "study-published.md").read_text()
    found = uncertainty.columns(RESULTS, LABELS)
    assert uncertainty.page(found, LABELS) == (RESULTS / "study-uncertainty.md").read_text()
