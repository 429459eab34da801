"""Published numbers beside those of the study."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.study import check, published
from benchmarks.study.settings import Settings

PUBLISHED = yaml.safe_load("""
sets: {mine: Mine, other: Other}
rows:
  first: {ours: [A, B], nll: {mine: [0.5, 0.1], other: [1.0, 0.2]}}
yardsticks: [MAP]
""")


def test_rows_are_beside_each_other_and_missing_ones_are_empty(tmp_path):
    def row(method, split, nll):
        return json.dumps({"method": method, "split": split, "status": "done", "scores": {"nll": nll}})

    rows = [row("MAP", 0, 0.4), row("MAP", 1, 0.6), row("B", 0, 0.25), row("B", 1, 0.35), row("A", 1, 0.125)]
    (tmp_path / "study-mine.jsonl").write_text("\n".join(rows))
    page = published.page(tmp_path, PUBLISHED)
    assert "| first | published | 0.50 ± 0.10 | 1.00 ± 0.20 |" in page
    assert "|  | measured | 0.300 ± 0.050 (B) |  |" in page  # A is the first of the two, but lacks a split
    assert "| MAP | measured | 0.500 ± 0.100 |  |" in page
    assert "Splits: Mine 2, Other 0." in page


def test_the_published_table_is_complete():
    table = yaml.safe_load((published.Path(published.__file__).parent / "published.yaml").read_text())
    for row in table["rows"].values():
        assert row["nll"].keys() == table["sets"].keys()
        assert all(mean > 0 and error > 0 for mean, error in row["nll"].values())


@pytest.mark.slow
def test_committed_pages_are_those_of_cells_of_the_present_settings():
    folder = Path(check.__file__).parents[1] / "results"
    assert list(check.differences(folder, Settings.read(check.CONFIGURATION))) == []
