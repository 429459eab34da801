"""Plots of predictions with matplotlib (extra `demo`), without its global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace_plus import metrics
from laplace_plus.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _RED, _GREY = "#3b6ea8", "#c8553d", "#8a8a8a"
_N_TICKS = 5


def reliability_diagram(
    predictions: Mapping[str, tuple[Tensor, Tensor]], *, axes: Sequence[Axes] | None = None, n_bins: int = 10
) -> Figure:
    r"""Draw accuracy against confidence, one panel for each method, all on the same scale.

    Bars show the accuracy within each bin of confidence. Red lines show the distance to the bin's mean confidence: up
    from the bar if the predictions are overconfident, down if they are underconfident. The dots below show the share of
    predictions in each bin. Confidence is the probability of the predicted class; each title gives the expected
    calibration error over the same bins.

    Args:
        predictions: By name, probabilities ``[N, C]`` with rows that sum to one, and class indices ``[N]``.
        axes: Axes to draw into, one for each method; without them, a new figure with the panels side by side.
        n_bins: Number of bins of equal width.

    Returns:
        The figure with the panels; it belongs to no window, so `savefig` works without a display.

    Raises:
        ConfigurationError: No predictions, or another number of axes than of methods.
        UnsupportedError: matplotlib is not installed.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]])
        >>> figure = reliability_diagram({"MAP": (probabilities, torch.tensor([0, 1, 1]))})
        >>> figure.axes[0].get_title()
        'MAP\nECE 0.333'
    """
    if not predictions:
        raise ConfigurationError("There is nothing to draw.", expected="at least one method's predictions")
    if axes is None:
        axes = _panels(len(predictions))
    elif len(axes) != len(predictions):
        expected, got = f"{len(predictions)} axes", str(len(axes))
        raise ConfigurationError("The axes do not match the predictions.", expected=expected, got=got)
    for panel, (name, (probabilities, targets)) in zip(axes, predictions.items(), strict=True):
        _draw(panel, name, probabilities, targets, n_bins)
    axes[0].set_ylabel("accuracy")
    legend = axes[0].legend(loc="upper left", fontsize="x-small", frameon=False)
    for handle in legend.legend_handles:
        if handle is not None and hasattr(handle, "set_sizes"):
            handle.set_sizes([14])  # the first dot's own size would stand for all
    return axes[0].get_figure(root=True)  # type: ignore[return-value]


def _panels(n_panels: int) -> Sequence[Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("matplotlib is not installed.", fix="pip install 'laplace_plus[demo]'") from error

    figure = Figure(figsize=(3.2 * n_panels + 0.4, 3.8), layout="constrained")
    return list(figure.subplots(1, n_panels, sharex=True, sharey=True, squeeze=False)[0])


def _draw(panel: Axes, name: str, probabilities: Tensor, targets: Tensor, n_bins: int) -> None:
    curve = metrics.reliability_curve(probabilities, targets, n_bins)
    error = float(metrics.expected_calibration_error(probabilities, targets, n_bins))
    filled = curve.counts > 0
    accuracy, confidence = curve.accuracy[filled].tolist(), curve.confidence[filled].tolist()
    sizes = (220 * curve.counts[filled] / curve.counts.sum()).tolist()  # points squared: the area shows the share
    middles = ((torch.arange(n_bins) + 0.5) / n_bins)[filled.cpu()].tolist()

    panel.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    panel.bar(middles, accuracy, width=0.92 / n_bins, color=_BLUE, alpha=0.85, zorder=2, label="accuracy")
    panel.vlines(middles, accuracy, confidence, color=_RED, linewidth=2, zorder=3, label="gap to confidence")
    panel.scatter(middles, confidence, color=_RED, s=14, zorder=4, label="mean confidence")
    below = [-0.07] * len(middles)
    panel.scatter(middles, below, s=sizes, color=_GREY, zorder=4, clip_on=False, label="share of predictions")
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set(title=f"{name}\nECE {error:.3f}", xlabel="confidence", xlim=(0, 1), ylim=(-0.14, 1.02), aspect="equal")
    ticks = [tick / _N_TICKS for tick in range(_N_TICKS + 1)]
    panel.set(xticks=ticks, yticks=ticks)
    panel.spines[["top", "right"]].set_visible(False)
