"""Every notebook runs from top to bottom, and holds the pictures that it draws."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures == sum("".join(cell["source"]).count("plt.show()") for cell in cells) > 0
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))


@pytest.mark.slow
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
    with warnings.catch_warnings(), pyplot.rc_context():  # whose look is not for other tests
        warnings.simplefilter("error")
        for source in sources:
            exec(compile(source, str(path), "exec"), namespace)
    assert len(drawn) == sum(source.count("plt.show()") for source in sources) > 0
