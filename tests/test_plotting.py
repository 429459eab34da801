"""Reliability diagrams: what is drawn is what was computed."""

from __future__ import annotations

import sys

import pytest
import torch
from matplotlib.figure import Figure

from laplace_plus import metrics
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.plotting import reliability_diagram


def predictions(seed: int, sharpness: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(400, 5, generator=generator, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return (sharpness * logits).softmax(1), targets


def test_bars_are_the_accuracies_and_dots_the_confidences() -> None:
    probabilities, targets = predictions(0)
    figure = reliability_diagram({"MAP": (probabilities, targets)}, n_bins=8)
    panel = figure.axes[0]
    curve = metrics.reliability_curve(probabilities, targets, 8)
    filled = curve.counts > 0
    assert 0 < filled.sum() < 8  # five classes: no confidence below 1/5, so that there is an empty bin to leave out
    bars = torch.tensor([bar.get_height() for bar in panel.patches], dtype=torch.float64)
    centres = torch.tensor([bar.get_x() + bar.get_width() / 2 for bar in panel.patches], dtype=torch.float64)
    torch.testing.assert_close(bars, curve.accuracy[filled])
    torch.testing.assert_close(centres, ((torch.arange(8, dtype=torch.float64) + 0.5) / 8)[filled])
    dots = next(dots for dots in panel.collections if dots.get_label() == "mean confidence")
    torch.testing.assert_close(torch.tensor(dots.get_offsets()[:, 1].tolist()).double(), curve.confidence[filled])


def test_the_dots_below_show_the_share_of_predictions() -> None:
    probabilities, targets = predictions(1)
    panel = reliability_diagram({"MAP": (probabilities, targets)}).axes[0]
    counts = metrics.reliability_curve(probabilities, targets, 10).counts
    dots = next(dots for dots in panel.collections if dots.get_label() == "share of predictions")
    areas = torch.as_tensor(dots.get_sizes())
    torch.testing.assert_close(areas / areas.sum(), (counts[counts > 0] / counts.sum()).to(areas))


def test_one_titled_panel_for_each_method_in_order() -> None:
    methods = {"MAP": predictions(0, 3.0), "KFAC": predictions(1), "last layer": predictions(2, 0.5)}
    figure = reliability_diagram(methods, n_bins=15)
    assert len(figure.axes) == 3
    for panel, (name, (probabilities, targets)) in zip(figure.axes, methods.items(), strict=True):
        error = float(metrics.expected_calibration_error(probabilities, targets, 15))
        assert panel.get_title() == f"{name}\nECE {error:.3f}"
        assert panel.get_xlim() == (0, 1)


def test_draws_into_the_axes_that_are_given() -> None:
    figure = Figure()
    axes = figure.subplots(1, 2)
    methods = {"a": predictions(0), "b": predictions(1)}
    assert reliability_diagram(methods, axes=list(axes)) is figure
    assert [panel.get_title().split("\n")[0] for panel in figure.axes] == ["a", "b"]


def test_saves_without_a_display(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    path = tmp_path / "reliability.png"
    reliability_diagram({"MAP": predictions(0)}).savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_refuses_nothing_and_the_wrong_number_of_axes() -> None:
    with pytest.raises(ConfigurationError, match="nothing to draw"):
        reliability_diagram({})
    with pytest.raises(ConfigurationError, match=r"Expected: 1 axes\. Got: 2"):
        reliability_diagram({"MAP": predictions(0)}, axes=list(Figure().subplots(1, 2)))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'laplace_plus\[demo\]'"):
        reliability_diagram({"MAP": predictions(0)})
