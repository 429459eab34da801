"""Reliability diagrams: what is drawn is what was computed."""

from __future__ import annotations

import sys

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import laplace_plus as lp
from laplace_plus import metrics
from laplace_plus.applications.plotting import class_plane, curve, reliability_diagram
from laplace_plus.errors import UnsupportedError


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


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'laplace_plus\[demo\]'"):
        reliability_diagram({"MAP": predictions(0)})


def drawn_curve(std: torch.Tensor, **options) -> tuple[Axes, torch.Tensor]:
    x = torch.linspace(0, 1, 11, dtype=torch.float64)
    axes = Figure().subplots()
    axes.set_ylim(-1, 1)
    curve(axes, x[:, None], x.square()[:, None], std, **options)
    return axes, x


def test_a_curve_has_its_mean_its_samples_and_a_band_of_two_standard_deviations() -> None:
    std = torch.linspace(0.1, 0.2, 11, dtype=torch.float64)
    samples = torch.randn(3, 11, 1, generator=torch.Generator().manual_seed(0))
    axes, x = drawn_curve(std, total_std=std + 0.1, samples=samples)
    assert axes.get_legend_handles_labels()[1] == [
        "± 2 standard deviations, with noise",
        "± 2 standard deviations",
        "sampled functions",
        "mean",
    ]
    band = axes.collections[1].get_paths()[0].vertices
    for k in range(11):
        at = band[abs(band[:, 0] - float(x[k])) < 1e-9][:, 1]
        assert at.min() == pytest.approx(float(x[k] ** 2 - 2 * std[k]))
        assert at.max() == pytest.approx(float(x[k] ** 2 + 2 * std[k]))
    lines = [torch.as_tensor(line.get_ydata()) for line in axes.lines]
    torch.testing.assert_close(torch.stack(lines[:3]), samples[..., 0])
    torch.testing.assert_close(lines[3], x.square())


def test_a_band_that_is_wider_than_the_axes_hides_nothing() -> None:
    std = torch.where(torch.arange(11) < 5, 0.1, 9.0)
    axes, x = drawn_curve(std)
    lines, filled = axes.collections
    assert lines.get_hatch() and lines.get_facecolor().size == 0 and lines.get_label() == "wider than the picture"
    assert max(path.vertices[:, 0].max() for path in filled.get_paths()) == pytest.approx(float(x[4]))


def test_a_plane_of_classes_shows_the_probabilities_where_they_are() -> None:
    first, second = torch.linspace(0, 3, 7), torch.linspace(0, 1, 5)
    share = torch.cartesian_prod(first, second)[:, 0] / 3  # grows along the first input only
    inputs, labels = torch.tensor([[0.5, 0.2], [2.5, 0.8], [2.0, 0.5]]), torch.tensor([0, 1, 1])
    axes = Figure().subplots()
    field = class_plane(axes, first, second, share, inputs, labels)
    for level, path in zip(field.levels, field.get_paths(), strict=False):
        assert path.vertices[:, 0].min() == pytest.approx(3 * level, abs=1e-6)
    points = {dots.get_label(): torch.as_tensor(dots.get_offsets().data) for dots in axes.collections[-2:]}
    for k in (0, 1):
        torch.testing.assert_close(points[f"class {k}"].float(), inputs[labels == k])


def test_coverage_is_that_of_the_intervals() -> None:
    """Deviations of ±1/2, ±1 and ±2 standard deviations: two thirds lie within 68.3 %, all within 95.5 %."""
    targets = torch.tensor([[0.5, -0.5, 1.0, -1.0, 2.0, -2.0]]).double().mT * 3 + 7
    network = lp.Ensemble([torch.nn.Linear(1, 1).double()], lp.Gaussian(3.0))
    torch.nn.init.zeros_(network.networks[0].model.weight)
    torch.nn.init.constant_(network.networks[0].model.bias, 7.0)
    panel = lp.evaluate(network, [(targets, targets)]).plot().axes[0]
    levels, covered = panel.lines[2].get_data()
    assert [round(10 * level) for level in levels] == [*range(11)]
    assert covered == pytest.approx([0, 0, 0, 0, 1 / 3, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1])
    assert panel.get_xlabel() and panel.get_ylabel()
