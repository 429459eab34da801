"""The input factor of a convolution from correlations of the input with its own shifts.

Block (u, u') of the factor, for two taps u, u' of the kernel, is ``Σ_p x[s·p + δ·u − π] x[s·p + δ·u' − π]ᵀ`` over the
output positions p: a correlation of the input at the lag δ(u' − u), summed over a window that depends on u. Lags
repeat: a 3 × 3 kernel has 81 blocks but only 25 lags, by symmetry 13. One product of two shifted views of the same
zero-padded copy gives the sum over the whole image. The part outside u's window, a strip of a few rows and columns, is
subtracted. With a stride s, the input is split into s × s phases, each of which is such an image, and
the lags are those within and between phases.

The extra memory is one padded copy of the input, where patches take k² copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution.

    Attributes:
        size: Number of pixels.
        kernel: Extent of the kernel, in taps.
        stride: Step between output positions.
        dilation: Step between taps.
        padding: Zeros before and after.
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    padding: Pair

    @cached_property
    def positions(self) -> int:
        """Number of output positions."""
        return (self.size + sum(self.padding) - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def place(self, tap: int) -> Pair:
        """Phase of the pixels under a tap, and their offset within the phase from the output position."""
        offset, phase = divmod(self.dilation * tap - self.padding[0], self.stride)
        return phase, offset

    def length(self, phase: int) -> int:
        """Number of pixels of a phase."""
        return max(0, -(-(self.size - phase) // self.stride))

    @cached_property
    def gap(self) -> int:
        """Zeros between lines, so that no lag reaches the next line."""
        offsets = [self.place(tap)[1] for tap in range(self.kernel)]
        return max(offsets) - min(offsets)

    def window(self, left: int, right: int) -> tuple[Pair, Pair]:
        """Intervals in which two taps' pixels both lie in the image: for all lines, and for output positions only."""
        (phase, offset), (other_phase, other_offset) = self.place(left), self.place(right)
        lag = other_offset - offset
        low = max(0, -lag)
        high = max(low, min(self.length(phase), self.length(other_phase) - lag))
        first = min(max(low, offset), high)
        return (low, high), (first, max(first, min(high, offset + self.positions)))


@dataclass(frozen=True)
class Lag:
    """A lag between two phases: ``(phase, phase', lag)`` along each axis."""

    rows: tuple[int, int, int]
    columns: tuple[int, int, int]

    def reversed(self) -> Lag:
        """The lag of the transposed blocks."""
        (p, q, a), (r, s, b) = self.rows, self.columns
        return Lag((q, p, -a), (s, r, -b))

    def sign(self) -> tuple[int, ...]:
        """Order between a lag and its reverse: the larger one is computed, because its shift is not negative."""
        return (self.rows[2], self.columns[2], *self.rows[:2], *self.columns[:2])


def lags_of(rows: Axis, columns: Axis) -> dict[Lag, list[tuple[Pair, Pair]]]:
    """Every lag to be computed, with its blocks ``((u_y, u_x), (u'_y, u'_x))`` of the factor."""
    found: dict[Lag, list[tuple[Pair, Pair]]] = defaultdict(list)
    taps = list(product(range(rows.kernel), range(columns.kernel)))
    for i, left in enumerate(taps):
        for right in taps[: i + 1]:
            (p, o), (q, o2) = rows.place(left[0]), rows.place(right[0])
            (r, e), (s, e2) = columns.place(left[1]), columns.place(right[1])
            lag = Lag((p, q, o2 - o), (r, s, e2 - e))
            if lag.sign() >= lag.reversed().sign():
                found[lag].append((left, right))
            else:
                found[lag.reversed()].append((right, left))
    return found


def operations(inputs: Tensor, rows: Axis, columns: Axis) -> float:
    """Number of operations of :func:`add_lags`, strips excepted, for ``[N, C, H, W]`` in one group."""
    n, channels = inputs.shape[:2]
    lines = max(rows.length(0), 1) + rows.gap
    return 2.0 * len(lags_of(rows, columns)) * n * lines * (columns.length(0) + columns.gap) * channels**2


def add_lags(total: Tensor, inputs: Tensor, rows: Axis, columns: Axis) -> None:
    """Add the convolution's factor, without the bias's row, to both triangles of a total.

    Args:
        total: ``[G, c·k, c·k]`` for c channels in each group and k taps, in the order of torch's ``unfold``.
        inputs: ``[N, G·c, H, W]``.
        rows: The vertical axis.
        columns: The horizontal axis.
    """
    groups = total.shape[0]
    taps = rows.kernel * columns.kernel
    channels = inputs.shape[1] // groups
    blocks = total.unflatten(2, (channels, taps)).unflatten(1, (channels, taps))  # a view, whatever the strides
    images = _phases(inputs, groups, rows, columns, total.dtype)
    line = columns.length(0) + columns.gap
    for lag, pairs in lags_of(rows, columns).items():
        left = images[lag.rows[0], lag.columns[0]]
        right = images[lag.rows[1], lag.columns[1]]
        shift = lag.rows[2] * line + lag.columns[2]
        flat, shifted = left.flatten(1, 3), right.flatten(1, 3)
        everywhere = torch.bmm(flat[:, : flat.shape[1] - shift].mT, shifted[:, shift:])
        sums = _Windows(everywhere, left, right, lag)
        for (y, x), (y2, x2) in pairs:
            block = sums.within(rows.window(y, y2), columns.window(x, x2))
            tap, other = y * columns.kernel + x, y2 * columns.kernel + x2
            blocks[:, :, tap, :, other].add_(block)
            if tap != other:
                blocks[:, :, other, :, tap].add_(block.mT)


def _phases(inputs: Tensor, groups: int, rows: Axis, columns: Axis, dtype: torch.dtype) -> dict[Pair, Tensor]:
    """Each phase of the images as ``[G, N, lines, pixels, c]``, with zeros after each line and each image."""
    n = inputs.shape[0]
    grouped = inputs.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2)  # [G, N, H, W, c]
    used = product({rows.place(t)[0] for t in range(rows.kernel)}, {columns.place(t)[0] for t in range(columns.kernel)})
    lines, pixels = rows.length(0) + rows.gap, columns.length(0) + columns.gap
    images = {}
    for y, x in used:
        image = inputs.new_zeros(groups, n, lines, pixels, grouped.shape[-1], dtype=dtype)
        image[:, :, : rows.length(y), : columns.length(x)] = grouped[:, :, y :: rows.stride, x :: columns.stride]
        images[y, x] = image
    return images


class _Windows:
    """Sums of one lag over windows: the sum over the whole image minus the strips outside."""

    def __init__(self, everywhere: Tensor, left: Tensor, right: Tensor, lag: Lag):
        self.everywhere, self.left, self.right = everywhere, left, right
        self.lag = (lag.rows[2], lag.columns[2])
        self.known: dict[tuple[Pair, Pair], Tensor] = {}

    def within(self, rows: tuple[Pair, Pair], columns: tuple[Pair, Pair]) -> Tensor:
        """The sum over a window, given as (whole interval, window) along each axis."""
        inside = self.everywhere
        for strip in _outside(*rows):
            inside = inside - self._strip(strip, columns[0])
        for strip in _outside(*columns):
            inside = inside - self._strip(rows[0], strip)
            for crossing in _outside(*rows):  # subtracted twice
                inside = inside + self._strip(crossing, strip)
        return inside

    def _strip(self, rows: Pair, columns: Pair) -> Tensor:
        if (rows, columns) not in self.known:
            a, b = self.lag
            left = self.left[:, :, rows[0] : rows[1], columns[0] : columns[1]]
            right = self.right[:, :, rows[0] + a : rows[1] + a, columns[0] + b : columns[1] + b]
            self.known[rows, columns] = torch.bmm(left.flatten(1, 3).mT, right.flatten(1, 3))
        return self.known[rows, columns]


def _outside(everything: Pair, window: Pair) -> Iterator[Pair]:
    """The intervals of ``everything`` before and after a window."""
    if window[0] >= window[1]:
        if everything[0] < everything[1]:
            yield everything
        return
    for low, high in ((everything[0], window[0]), (window[1], everything[1])):
        if low < high:
            yield low, high
