"""How time and memory grow with the batch, the width, the depth, the outputs, the tokens and the number of data.

Small networks, one size varied at a time; slopes in logarithms over the upper half of the sizes, where what every call
costs anyway no longer counts. Small tensors leave the slope of memory rough.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import Call, keep_freed_memory, peak_memory
from models import multilayer
from tasks import Row
from torch import Tensor, nn

import laplace_plus as lp

FAMILIES = ("mlp", "conv", "transformer")
KINDS = (lp.KFAC, lp.Diagonal)


@dataclass(frozen=True)
class Sizes:
    """Of one network and its data.

    Attributes:
        n_data: To fit to.
        batch: Of the fit, or of the prediction.
        width: Of each hidden layer; channels.
        depth: Number of hidden layers.
        outputs: C.
        side: Of an image.
        tokens: T.
    """

    n_data: int = 512
    batch: int = 128
    width: int = 256
    depth: int = 3
    outputs: int = 8
    side: int = 12
    tokens: int = 64

    def network(self, family: str) -> tuple[nn.Module, tuple[int, ...]]:
        """A network of these sizes, and the shape of its inputs."""
        torch.manual_seed(0)
        if family == "mlp":
            return multilayer(*[self.width] * (self.depth + 1), self.outputs).eval(), (self.width,)
        if family == "transformer":
            return TokenMean(self.width, self.depth, self.outputs).eval(), (self.tokens, self.width)
        channels = [self.width] * (self.depth + 1)
        layers: list[nn.Module] = []
        for a, b in zip(channels, channels[1:], strict=False):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.width, self.outputs)]
        return nn.Sequential(*layers).eval(), (self.width, self.side, self.side)


class TokenMean(nn.Module):
    """Encoder layers, and a linear head on the mean of the tokens."""

    def __init__(self, width: int, depth: int, outputs: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, width]`` to logits ``[B, outputs]``."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def _doubled(start: int, number: int = 6) -> tuple[int, ...]:
    return tuple(start * 2**power for power in range(number))


BASES = {
    "mlp": Sizes(),
    "conv": Sizes(n_data=64, batch=32, width=16, depth=2, outputs=4, side=12),
    "transformer": Sizes(n_data=16, batch=8, width=64, depth=1, outputs=2),
}
# Along what, over which sizes, and the mathematics' exponents of time: products of two sides for a layer of that width,
# cubes for decompositions, and for predictions at most the square of the outputs, as the covariance has it.
FIT_AXES: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "mlp": {
        "n_data": (_doubled(128), "1"),
        "batch": (_doubled(16), "0"),
        "width": (_doubled(64, 5), "2"),
        "depth": (_doubled(1), "1"),
        "outputs": (_doubled(2, 7), "1"),
    },
    "conv": {
        "n_data": (_doubled(16), "1"),
        "width": (_doubled(4, 5), "2"),
        "side": (_doubled(4, 4), "2"),
    },
    "transformer": {"tokens": (_doubled(16, 5), "1 to 2")},
}
PREDICT_AXES: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "mlp": {
        "batch": (_doubled(32), "1"),
        "width": (_doubled(64, 5), "2"),
        "depth": (_doubled(1), "1"),
        "outputs": (_doubled(2, 7), "1 to 2"),
    },
    "conv": {
        "batch": (_doubled(8), "1"),
        "width": (_doubled(4, 5), "2"),
        "side": (_doubled(4, 4), "2"),
    },
    "transformer": {"tokens": (_doubled(16, 5), "1 to 2")},
}
LABELS = {along: along for along in ("batch", "width", "depth", "outputs", "side", "tokens")} | {"n_data": "data"}


def _data(sizes: Sizes, shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = torch.randn(sizes.n_data, *shape), torch.randint(sizes.outputs, (sizes.n_data,))
    return list(zip(inputs.split(sizes.batch), targets.split(sizes.batch), strict=True))


def _fit(family: str, kind: type[lp.GaussianPosterior], sizes: Sizes) -> Call:
    model, shape = sizes.network(family)
    data = _data(sizes, shape)
    return lambda: kind(model, "classification").fit(data)


def _predict(family: str, kind: type[lp.GaussianPosterior], sizes: Sizes) -> Call:
    model, shape = sizes.network(family)
    posterior = kind(model, "classification").fit(_data(replace(sizes, n_data=32), shape))
    posterior.sample(1)  # decompositions wait until they are needed
    x = torch.randn(sizes.batch, *shape)
    return partial(posterior.functional_posterior, x)


def _measured(call: Call, seconds: float) -> tuple[float, float]:
    """Least CPU seconds, and peak memory in MB."""
    keep_freed_memory(False)
    call()
    peak = peak_memory(call)
    keep_freed_memory(True)
    call()
    least, spent, rounds = float("inf"), 0.0, 0
    while rounds < 3 or (spent < seconds and rounds < 200):
        start = time.process_time()
        call()
        least = min(least, time.process_time() - start)
        spent += time.process_time() - start
        rounds += 1
    return least, peak


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the logarithms over the upper half of the sizes."""
    half = len(sizes) // 2
    logarithms = np.log(np.maximum(values[half:], 1e-9))
    return float(np.polyfit(np.log(sizes[half:]), logarithms, 1)[0])


def rows(family: str, seconds: float) -> Iterator[Row]:
    """One for each quantity and each size that is varied."""
    for words, make, axes in (("fit", _fit, FIT_AXES), ("predictive", _predict, PREDICT_AXES)):
        for kind in KINDS:
            for along, (sizes, expected) in axes[family].items():
                found = []
                for size in sizes:
                    found.append(_measured(make(family, kind, replace(BASES[family], **{along: size})), seconds / 20))
                    gc.collect()
                times, peaks = [pair[0] for pair in found], [pair[1] for pair in found]
                yield {
                    "case": "growth",
                    "model": family,
                    "quantity": f"{kind.__name__} {words} against {LABELS[along]}",
                    "kind": f"{kind.__name__} {words}",
                    "along": along,
                    "sizes": list(sizes),
                    "seconds": times,
                    "peak_mb": peaks,
                    "exponent": exponent(sizes, times),
                    "memory_exponent": exponent(sizes, peaks),
                    "expected": expected,
                }


COLOURS = {
    "KFAC fit": "#0072b2",
    "Diagonal fit": "#56b4e9",
    "KFAC predictive": "#d55e00",
    "Diagonal predictive": "#e69f00",
}
MARKS = {"KFAC fit": "o", "Diagonal fit": "s", "KFAC predictive": "o", "Diagonal predictive": "s"}


def plot(found: Sequence[Row], path: Path) -> None:
    """Time and beside it memory, a pair of panels for each size that is varied; exponents beside the marks."""
    from matplotlib.figure import Figure  # noqa: PLC0415  -- an extra

    pairs = list(dict.fromkeys((row["model"], row["along"]) for row in found))
    figure = Figure(figsize=(7.2, 0.5 + 1.6 * -(-len(pairs) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(pairs) // 2), 4, squeeze=False).reshape(-1, 2)
    for panel in panels[len(pairs) :].flat:
        panel.axis("off")
    for (model, along), two in zip(pairs, panels, strict=False):
        own = [row for row in found if (row["model"], row["along"]) == (model, along)]
        for panel, value, slope, unit in zip(
            two, ("seconds", "peak_mb"), ("exponent", "memory_exponent"), ("CPU seconds", "peak MB"), strict=True
        ):
            for row in own:
                heights = np.maximum(row[value], 1e-2 if value == "peak_mb" else 1e-9)
                style = {"color": COLOURS[row["kind"]], "marker": MARKS[row["kind"]], "markersize": 3, "linewidth": 1.2}
                panel.plot(row["sizes"], heights, label=f"{row[slope]:.2f}", **style)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.legend(fontsize=7, frameon=False, loc="upper left", handlelength=1, ncols=2, columnspacing=0.6)
            panel.set_ylim(panel.get_ylim()[0], panel.get_ylim()[1] * 9)  # room for the exponents
            panel.minorticks_off()
            panel.tick_params(labelsize=7)
            panel.set_title(f"{model}: {unit}", fontsize=8, loc="left")
            panel.set_xlabel(LABELS[along], fontsize=8)
            panel.spines[["top", "right"]].set_visible(False)
    lines = [
        figure.axes[0].plot([], [], color=colour, marker=MARKS[name], markersize=3, linewidth=1.2)[0]
        for name, colour in COLOURS.items()
    ]
    figure.legend(lines, list(COLOURS), loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
