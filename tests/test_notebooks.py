"""Every notebook runs from top to bottom."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="the notebooks draw pictures")
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    drawn = []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.append(pyplot.close("all")))
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    namespace: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in sources:
            exec(compile(source, str(path), "exec"), namespace)
    assert len(drawn) == sum(source.count("plt.show()") for source in sources) > 0
