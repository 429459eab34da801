"""Input factors of convolutions: sums of ``patch patchᵀ`` over all examples and output positions.

A k × k convolution is a linear map of patches, so KFAC's input factor (Grosse and Martens 2016) is a sum of their outer
products. Unfolding the input into patches takes k² times its memory, and the product k⁴ C² operations for each
position. Two methods do with less:

* *lags*, for stride 1: block (u, u') of the factor, for two taps u and u' of the kernel, is the correlation of the
  input at the lag δ(u' − u) with dilation δ, summed over a window that depends on u. Lags repeat: a 3 × 3 kernel has 81
  blocks but 25 lags, by symmetry 13. One product of two shifted views of a zero-padded copy gives the sum over the
  whole image; the few rows and columns outside u's window are subtracted;
* *patches*, unfolded in chunks of bounded size, each added by a
  :func:`~laplace_plus.kernels.symmetric_update.symmetric_update` of one triangle.

A card takes patches, in a few large products: lags are about two hundred small ones for each layer. The CPU takes lags
where counted operations say that they are faster. On one core of an EPYC (Zen 4), in float32, they take 1.8 to 4.0
times less time at 3 × 3 layers of ResNets with 16 to 128 channels. With 512 channels of 4 × 4 pixels, and with stride
2, patches are faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from laplace_plus.kernels.symmetric_update import symmetric_update, symmetrize_

Extent = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]
Pair = tuple[int, int]

_CHUNK = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Bytes of patches in memory at a time: about the caches of a CPU, and enough to fill a GPU."""


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution: pixels, taps, steps between output positions and between taps, zeros on both sides."""

    size: int
    kernel: int
    stride: int
    dilation: int
    padding: Pair

    @cached_property
    def positions(self) -> int:
        """Number of output positions."""
        return (self.size + sum(self.padding) - self.reach - 1) // self.stride + 1

    @property
    def reach(self) -> int:
        """Distance between the first tap and the last, the largest lag."""
        return self.dilation * (self.kernel - 1)

    def windows(self, tap: int, lag: int) -> tuple[Pair, Pair]:
        """Pixels whose partner at the lag lies in the image: all of them, and those under the tap (stride 1)."""
        low = max(0, -lag)
        high = max(low, min(self.size, self.size - lag))
        offset = self.dilation * tap - self.padding[0]
        first = min(max(low, offset), high)
        return (low, high), (first, max(first, min(high, offset + self.positions)))


def convolution_factor(
    inputs: Tensor,
    kernel_size: Extent,
    *,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    bias: bool = False,
    total: Tensor | None = None,
    method: str | None = None,
) -> Tensor:
    """``Σ_n Σ_p patch patchᵀ`` over the examples n and output positions p of a convolution.

    Args:
        inputs: ``[N, C, *space]`` with one to three axes of space.
        kernel_size: Taps along each axis.
        stride: Step between output positions.
        padding: Zeros on both sides of each axis, or pairs (before, after).
        dilation: Step between taps.
        groups: Number G of groups of channels; each has its own factor.
        bias: Append the bias's entry, 1, to each patch.
        total: Add to this one, ``[G, d, d]`` of float32 or float64, in place. Only its lower triangle is then right,
            until :func:`~laplace_plus.kernels.symmetric_update.symmetrize_` after the last batch.
        method: ``"lags"`` (stride 1, up to two axes of space) or ``"patches"``; by default the faster one.

    Returns:
        ``[G, d, d]`` with d = C/G·k (+ 1 with a bias), entries in the order of :func:`torch.nn.functional.unfold`:
        channel, then tap. It is ``total`` if that was given, and symmetric otherwise. Without ``total``, sums are of
        the inputs' type, at least float32.

    Example:
        >>> image = torch.arange(4.0).reshape(1, 1, 1, 4)
        >>> convolution_factor(image, (1, 2), bias=True)  # patches (0, 1), (1, 2), (2, 3)
        tensor([[[ 5.,  8.,  3.],
                 [ 8., 14.,  6.],
                 [ 3.,  6.,  3.]]])
    """
    axes = _axes(inputs, kernel_size, stride, padding, dilation)
    can_take_lags = len(axes) < 3 and all(axis.stride == 1 for axis in axes)
    size = inputs.shape[1] // groups * math.prod(axis.kernel for axis in axes) + bias
    target = total
    if target is None:
        target = inputs.new_zeros(groups, size, size, dtype=torch.promote_types(inputs.dtype, torch.float32))
    image = inputs.detach()
    if not inputs.numel():
        return target
    if len(axes) == 1:
        image, axes = image.unsqueeze(2), (Axis(1, 1, 1, 1, (0, 0)), *axes)
    lags = can_take_lags and (method or ("lags" if _prefers_lags(image, axes, groups) else "patches")) == "lags"
    (_add_lags if lags else _add_patches)(image, axes, bias, target.detach())
    return symmetrize_(target) if total is None else target


def _axes(inputs: Tensor, kernel_size: Extent, stride: Extent, padding: Padding, dilation: Extent) -> tuple[Axis, ...]:
    """The axes of space."""
    space = inputs.ndim - 2
    given: tuple[Any, ...] = (kernel_size, stride, dilation, padding)
    columns = [list(x) if isinstance(x, Sequence) else [x] * space for x in given]
    pairs = [(pad, pad) if isinstance(pad, int) else (pad[0], pad[1]) for pad in columns.pop()]
    return tuple(map(Axis, inputs.shape[2:], *columns, pairs))


def _prefers_lags(inputs: Tensor, axes: tuple[Axis, ...], groups: int) -> bool:
    """Whether counted operations favour lags, on the CPU; see the measurements above.

    Their products are smaller (75 against 95 GFLOP/s), and their blocks are scattered over the factor (4 ns for each
    entry). With less than 16 channels in a group, the products are too small.
    """
    channels = inputs.shape[1] // groups
    n_lags, pixels, size = 1, float(len(inputs)), channels
    for axis in axes:
        n_lags *= 2 * axis.kernel - 1
        pixels *= axis.size + axis.reach
        size *= axis.kernel
    triangle = float(len(inputs)) * math.prod(axis.positions for axis in axes) * size**2
    operations = (n_lags + 1) * pixels * channels**2  # by symmetry, half of the lags
    return inputs.device.type == "cpu" and channels >= 16 and operations + 280.0 * size**2 < 0.8 * triangle


def _add_lags(inputs: Tensor, axes: tuple[Axis, ...], bias: bool, total: Tensor) -> None:
    """Add the factor ``[G, c·k, c·k]`` by lags, to both triangles."""
    rows, columns = axes
    groups, size, taps = total.shape[0], total.shape[1] - bias, list(product(range(rows.kernel), range(columns.kernel)))
    # A view, whatever the strides.
    blocks = total[:, :size, :size].unflatten(2, (-1, len(taps))).unflatten(1, (-1, len(taps)))
    grouped = inputs.unflatten(1, (groups, -1)).permute(1, 0, 3, 4, 2)  # [G, N, H, W, c]
    # Zeros after each line and each image, so that no lag reaches the next one.
    lines, pixels = rows.size + rows.reach, columns.size + columns.reach
    image = total.new_zeros(groups, len(inputs), lines, pixels, grouped.shape[-1])
    image[:, :, : rows.size, : columns.size] = grouped
    by_lag: dict[Pair, list[tuple[int, int]]] = defaultdict(list)
    for i, left in enumerate(taps):
        for j, right in enumerate(taps[: i + 1]):
            lag = rows.dilation * (right[0] - left[0]), columns.dilation * (right[1] - left[1])
            if lag >= (0, 0):  # of a lag and its reverse, the one whose shift is not negative
                by_lag[lag].append((i, j))
            else:
                by_lag[-lag[0], -lag[1]].append((j, i))
    for lag, pairs in by_lag.items():
        flat, shift = image.flatten(1, 3), lag[0] * pixels + lag[1]
        whole = torch.bmm(flat[:, : flat.shape[1] - shift].mT, flat[:, shift:])
        strip = cache(partial(_sum_within, image, lag))
        for tap, other in pairs:
            height, inside = rows.windows(taps[tap][0], lag[0])
            width, within = columns.windows(taps[tap][1], lag[1])
            block = whole.clone()
            for part in _outside(height, inside):
                block -= strip(part, width)
            for part in _outside(width, within):
                block -= strip(height, part)
                for crossing in _outside(height, inside):  # subtracted twice
                    block += strip(crossing, part)
            blocks[:, :, tap, :, other].add_(block)
            if tap != other:
                blocks[:, :, other, :, tap].add_(block.mT)
    if bias:
        _add_ones(total, inputs, axes)


def _sum_within(image: Tensor, lag: Pair, rows: Pair, columns: Pair) -> Tensor:
    """The sum of one lag over some rows and columns of ``[G, N, H, W, c]``."""
    left = image[:, :, rows[0] : rows[1], columns[0] : columns[1]]
    right = image[:, :, rows[0] + lag[0] : rows[1] + lag[0], columns[0] + lag[1] : columns[1] + lag[1]]
    return torch.bmm(left.flatten(1, 3).mT, right.flatten(1, 3))


def _outside(whole: Pair, window: Pair) -> list[Pair]:
    """The intervals of ``whole`` before and after a window."""
    parts = [whole] if window[0] >= window[1] else [(whole[0], window[0]), (window[1], whole[1])]
    return [(low, high) for low, high in parts if low < high]


def _add_ones(total: Tensor, inputs: Tensor, axes: tuple[Axis, ...]) -> None:
    """Add the bias's row: the sum of the patches, and their number.

    The sum at one tap is over a window of the image, hence a product with the window's indicator along each axis
    (Dangel 2023).
    """
    sums = inputs.sum(0, dtype=total.dtype)  # [C, *space]
    for number, axis in reversed(list(enumerate(axes, start=1))):
        tap = torch.arange(axis.kernel, device=sums.device)[:, None] * axis.dilation - axis.padding[0]
        step = torch.arange(axis.size, device=sums.device) - tap
        met = (step >= 0) & (step % axis.stride == 0) & (step < axis.stride * axis.positions)  # [k, size]
        sums = (sums.movedim(number, -1) @ met.to(sums.dtype).T).movedim(-1, number)
    last = total.shape[1] - 1
    total[:, last, :last] += sums.reshape(total.shape[0], -1)
    total[:, last, last] += math.prod(axis.positions for axis in axes) * inputs.shape[0]


def _add_patches(inputs: Tensor, axes: tuple[Axis, ...], bias: bool, total: Tensor) -> None:
    """Add the factor by unfolding chunks of examples into patches."""
    groups, space = total.shape[0], len(axes)
    pads = [amount for axis in reversed(axes) for amount in axis.padding]
    positions = math.prod(axis.positions for axis in axes)
    patch_bytes = total.element_size() * positions * groups * total.shape[1]
    examples = max(1, _CHUNK.get(total.device.type, _CHUNK["cuda"]) // patch_bytes)
    for chunk in inputs.split(examples):
        padded = F.pad(chunk.to(total.dtype) if total.device.type == "cpu" else chunk, pads)
        if space == 2:
            kernel, dilation, stride = zip(*((axis.kernel, axis.dilation, axis.stride) for axis in axes), strict=True)
            columns = F.unfold(padded, kernel, dilation=dilation, stride=stride)  # [N, C·k, S]
            rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        else:
            for number, axis in enumerate(axes, start=2):
                padded = padded.unfold(number, axis.reach + 1, axis.stride)[..., :: axis.dilation]
            padded = padded.unflatten(1, (groups, -1)).movedim((1, 2), (0, 2 + space))  # [G, N, *out, C/G, *k]
            rows = padded.flatten(2 + space).flatten(1, 1 + space)
        symmetric_update(total, F.pad(rows, (0, 1), value=1.0) if bias else rows)
