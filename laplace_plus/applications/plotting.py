"""Plots of predictions with matplotlib (extra `demo`), without its global state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_plus import checks, metrics
from laplace_plus.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008): colours that colour-blind readers can tell apart, too.
_BLUE, _ORANGE, _GREEN, _RED, _PINK, _GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#707070"
_SHARES = ["#a4cfec", "#b9daf0", "#cfe5f5", "#e4f1fa", "#f6fafd", "#fef9f3", "#fdeedd", "#fbe1c5", "#f9d3aa", "#f6c48e"]
_TICKS = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]

STYLE = {  # the tutorials' look: plt.rcParams.update(plotting.STYLE)
    "axes.prop_cycle": f"cycler('color', {[_BLUE, _ORANGE, _GREEN, _RED, _PINK]})",
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": "medium"},
    **{"figure.dpi": 100, "font.size": 11, "legend.fontsize": "small", "legend.frameon": False, "hatch.linewidth": 0.6},
}


def curve(
    axes: Axes, x: Tensor, mean: Tensor, std: Tensor, *, total_std: Tensor | None = None, samples: Sequence[Tensor] = ()
) -> None:
    """Draw the prediction of a curve: its mean, a band of two standard deviations on either side, sampled functions.

    Set the limits of the y axis first: where the band is wider, it is hatched.

    Args:
        axes: Axes to draw into.
        x: Increasing inputs, N values in any shape; the following have as many each.
        mean: Predicted means.
        std: Standard deviations of what the posterior does not know.
        total_std: Standard deviations with the noise, for a second, lighter band.
        samples: Sampled functions. `ConfigurationError` if one of these has another number of values than ``x``.
    """
    x, mean, std, *rest = _plain(x.numel(), x, mean, std, *samples, *([] if total_std is None else [total_std]))
    bottom, top = axes.get_ylim()
    bands = [(rest[-1], "#dceef9", "± 2 standard deviations, with noise")] if total_std is not None else []
    for k, (spread, color, label) in enumerate([*bands, (std, "#a9d5f2", "± 2 standard deviations")]):
        low, high = mean - 2 * spread, mean + 2 * spread
        inside = (low > bottom) | (high < top)
        if not k and not inside.all():
            style: Any = {"facecolor": "none", "edgecolor": "#a9d5f2", "linewidth": 0}
            axes.fill_between(x, low, high, hatch="///", label="wider than the picture", **style)
        axes.fill_between(x, low, high, where=inside, facecolor=color, linewidth=0, label=label)
    for k, function in enumerate(rest[: len(samples)]):
        axes.plot(x, function, color=_ORANGE, linewidth=0.8, label="" if k else "sampled functions")
    axes.plot(x, mean, color=_BLUE, linewidth=1.8, label="mean")


def class_plane(axes: Axes, first: Tensor, second: Tensor, share: Tensor, inputs: Tensor, labels: Tensor) -> Any:
    """Draw the probability of class 1 of two over a plane, with lines at 0.1, 0.5 and 0.9, and the data.

    ``share`` has it for ``torch.cartesian_prod(first, second)``; ``inputs`` are ``[N, 2]``, ``labels`` are 0 or 1.
    Returns what ``figure.colorbar`` takes. Raises `ConfigurationError` if ``share`` has another number of values.
    """
    heights = _plain(len(first) * len(second), share)[0].clamp(0, 1).view(len(first), len(second)).T
    field = axes.contourf(first, second, heights, levels=[k / 10 for k in range(11)], colors=_SHARES)
    lines: Any = {"colors": "#404040", "linewidths": [0.8, 1.6, 0.8], "linestyles": ["--", "-", "--"]}
    axes.contour(first, second, heights, levels=[0.1, 0.5, 0.9], **lines)
    for k, (color, mark) in enumerate(((_BLUE, "o"), (_RED, "^"))):
        points: Any = {"marker": mark, "s": 26, "edgecolors": "white", "linewidths": 0.6, "label": f"class {k}"}
        axes.scatter(*inputs[labels == k].detach().cpu().T, color=color, **points)
    return field


def evaluation(rows: Mapping[str, Mapping[str, Tensor]]) -> Figure:
    """Draw the ``rows`` of a report of :func:`laplace_plus.evaluate`: calibration, risks, doubts.

    Reliability of each method's classes, or coverage of its intervals for numbers; mean loss by the share of
    predictions that is kept; how uncertain the last method is of the data and of unfamiliar ones.

    Returns:
        The figure; UnsupportedError if matplotlib is not installed.
    """
    *_, own = rows.values()
    colors = (_GREY, _BLUE, _ORANGE, _GREEN, _RED, _PINK)
    lines = [*zip(rows.items(), itertools.cycle(colors), strict=False)]
    n = len(rows) if "right" in own else int("rank" in own)
    figure, panels = _panels(n + ("risk" in own) + ("strange" in own), shared=False)
    if "right" in own:
        bins = {name: metrics.binned(one["confidence"], one["right"], 15, one["weight"]) for name, one in rows.items()}
        reliability_diagram(bins, axes=panels)
    elif n:
        panels[0].plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
        for (name, one), color in lines:  # between the k-th quantile from below and the k-th from above
            within = [((one["rank"] > k) & (one["rank"] < 19 - k)).double() for k in range(9, -1, -1)]
            shares = [float(metrics.weighted_mean(part, one["weight"], ~one["target"].isnan())) for part in within]
            panels[0].plot([k / 10 for k in range(11)], [*shares, 1.0], color=color, label=name)
        panels[0].set(title="intervals", xlabel="level of the interval", ylabel="share of targets within")
        panels[0].set(xlim=(0, 1), ylim=(0, 1))
        panels[0].legend(fontsize="small", frameon=False)
    if "risk" in own:
        for (name, one), color in lines:
            kept, risks, _ = metrics.risk_coverage_curve(one["uncertainty"], one["risk"], one["weight"])
            some = torch.linspace(0, len(kept) - 1, min(len(kept), 500), device="cpu").long()
            panels[n].plot(kept[some], risks[some], color=color, label=name)
        panels[n].set(xlabel="share of predictions kept", ylabel="errors" if "right" in own else "squared error")
        panels[n].set(title="refusing the least sure", xlim=(0, 1), ylim=(0, None))
        panels[n].legend(fontsize="small", frameon=False)
    if "strange" in own:
        both = [own["uncertainty"].numpy(), own["strange"].numpy()]
        style: Any = {"bins": 25, "density": True, "histtype": "stepfilled", "alpha": 0.6}
        panels[-1].hist(both, color=[_BLUE, _ORANGE], label=["these data", "unfamiliar"], **style)
        panels[-1].set(title="unfamiliar data", xlabel="uncertainty", yticks=[])
        panels[-1].legend(fontsize="small", frameon=False)
    return figure


def _plain(size: int, *parts: Tensor) -> list[Tensor]:
    return [checks.shape("One of the parts", part.detach().cpu().flatten(), [size]) for part in parts]


def reliability_diagram(
    predictions: Mapping[str, Any], *, axes: Sequence[Axes] | None = None, n_bins: int = 10
) -> Figure:
    r"""Draw accuracy against confidence, one panel for each method, all on the same scale.

    Bars show the accuracy within each bin of confidence. Red lines show the distance to the bin's mean confidence: up
    from the bar if the predictions are overconfident, down if they are underconfident. The dots below show the share of
    predictions in each bin. Confidence is the probability of the predicted class; each title gives the expected
    calibration error over the same bins.

    Args:
        predictions: By name, probabilities ``[N, C]`` with rows that sum to one, and class indices ``[N]``; or a
            :class:`~laplace_plus.metrics.ReliabilityCurve`, with its own bins.
        axes: Axes to draw into, one for each method; without them, a new figure with the panels side by side.
        n_bins: Number of bins of equal width.

    Returns:
        The figure with the panels; it belongs to no window, so `savefig` works without a display.

    Raises:
        UnsupportedError: matplotlib is not installed.

    Example:
        >>> probabilities = torch.tensor([[0.9, 0.1], [0.3, 0.7], [0.6, 0.4]])
        >>> figure = reliability_diagram({"MAP": (probabilities, torch.tensor([0, 1, 1]))})
        >>> figure.axes[0].get_title()
        'MAP\nECE 0.333'
    """
    axes = _panels(len(predictions))[1] if axes is None else axes
    for panel, (name, own) in zip(axes, predictions.items(), strict=False):
        bins = own if isinstance(own, metrics.ReliabilityCurve) else metrics.reliability_curve(own[0], own[1], n_bins)
        n_bins, error = len(bins.counts), float(bins.error)
        filled = bins.counts > 0
        accuracy, confidence = bins.accuracy[filled].tolist(), bins.confidence[filled].tolist()
        sizes = (220 * bins.counts[filled] / bins.counts.sum()).tolist()  # points squared: the area shows the share
        middles = ((torch.arange(n_bins) + 0.5) / n_bins)[filled.cpu()].tolist()
        panel.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        panel.bar(middles, accuracy, width=0.92 / n_bins, color=_BLUE, alpha=0.85, zorder=2, label="accuracy")
        panel.vlines(middles, accuracy, confidence, color=_RED, linewidth=2, zorder=3, label="gap to confidence")
        panel.scatter(middles, confidence, color=_RED, s=14, zorder=4, label="mean confidence")
        below = [-0.07] * len(middles)
        panel.scatter(middles, below, s=sizes, color=_GREY, zorder=4, clip_on=False, label="share of predictions")
        panel.axhline(0, color="black", linewidth=0.6)
        panel.set(title=f"{name}\nECE {error:.3f}", xlabel="confidence", xticks=_TICKS, yticks=_TICKS)
        panel.set(xlim=(0, 1), ylim=(-0.14, 1.02), aspect="equal")
    axes[0].set_ylabel("accuracy")
    legend = axes[0].legend(loc="upper left", fontsize="small", frameon=False, borderaxespad=0)
    for handle in legend.legend_handles:
        if handle is not None and hasattr(handle, "set_sizes"):
            handle.set_sizes([14])  # the first dot's own size would stand for all
    return axes[0].get_figure(root=True)  # type: ignore[return-value]


def _panels(n_panels: int, shared: bool = True) -> tuple[Figure, Sequence[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("matplotlib is not installed.", fix="pip install 'laplace_plus[demo]'") from error

    figure = Figure(figsize=(2.5 * n_panels + 0.4, 3.2), layout="constrained")
    panels = list(figure.subplots(1, n_panels, sharex=shared, sharey=shared, squeeze=False)[0])
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels
