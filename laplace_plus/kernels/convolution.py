"""Input factors of convolutions: sums of ``patch patchᵀ`` over all output positions, and averaged patches.

A k × k convolution is a linear map of patches, so the input factor of KFAC (Grosse and Martens 2016) is a sum of their
outer products. Unfolding the input into patches takes k² times its memory, and the product k⁴ C² operations for each
position. Three ways do with less:

* the *lags* of :mod:`laplace_plus.kernels.lags`: a sixth of the operations for 3 × 3 kernels and large images, and one
  copy of the input;
* *patches* unfolded in chunks of bounded size, each added by a
  :func:`~laplace_plus.kernels.symmetric_update.symmetric_update` of one triangle;
* on CUDA, a Triton kernel that gathers the patches' entries while it multiplies.

On the CPU the first is chosen where counted operations say that it is faster. On one core of an EPYC (Zen 4), float32,
at 3 × 3 layers of ResNets with stride 1, it takes 2.5 (64 channels, 56 × 56 pixels), 2.1 (128, 28 × 28) and 1.4 times
(256, 14 × 14) less time than the second, and 5, 5 and 2.6 times less than unfolding and multiplying; with 512
channels of 7 × 7 pixels, and with stride 2, the second is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels.lags import Axis, add_lags, operations
from laplace_plus.kernels.selection import REFERENCE, Key, choose, interpreting, size_class, triton_kernels
from laplace_plus.kernels.symmetric_update import (
    Precision,
    current_precision,
    multiplying_in,
    symmetric_update,
    symmetrize_,
)

Method = Literal["lags", "patches"]
Extent = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of patches in memory at a time, in bytes: about what fits in the caches of a CPU, and enough to fill a GPU.
_CHUNK = {"cpu": 1 << 25, "cuda": 1 << 28}


def convolution_factor(
    inputs: Tensor,
    kernel_size: Extent,
    *,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    bias: bool = False,
    alpha: float = 1.0,
    total: Tensor | None = None,
    method: Method | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """``α Σ_n Σ_p patch patchᵀ`` over the examples n and output positions p of a convolution.

    Args:
        inputs: ``[N, C, *space]`` with one to three axes of space.
        kernel_size: Taps along each axis.
        stride: Step between output positions.
        padding: Zeros on both sides of each axis, or pairs (before, after).
        dilation: Step between taps.
        groups: Number G of groups of channels; each has its own factor.
        bias: Append the bias's entry, 1, to each patch.
        alpha: Factor of the sum, such as 1/(N·S) for S output positions.
        total: Add to this one, ``[G, d, d]`` of float32 or float64, in place. Only its lower triangle is then right,
            until :func:`~laplace_plus.kernels.symmetric_update.symmetrize_` after the last batch.
        method: ``"lags"`` (up to two axes of space) or ``"patches"``; by default the faster one.
        precision: How float32 is multiplied on CUDA; see
            :func:`~laplace_plus.kernels.symmetric_update.symmetric_update`.

    Returns:
        ``[G, d, d]`` with d = C/G·k (+ 1 with a bias), entries in the order of :func:`torch.nn.functional.unfold`:
        channel, then tap. It is ``total`` if that was given, and symmetric otherwise. Without ``total``, sums are of
        the inputs' type, at least float32.

    Raises:
        ConfigurationError: Shapes, types or options that do not fit.

    Example:
        >>> image = torch.arange(4.0).reshape(1, 1, 1, 4)
        >>> convolution_factor(image, (1, 2), bias=True)  # patches (0, 1), (1, 2), (2, 3)
        tensor([[[ 5.,  8.,  3.],
                 [ 8., 14.,  6.],
                 [ 3.,  6.,  3.]]])
    """
    axes = _axes(inputs, kernel_size, stride, padding, dilation, groups)
    if method is not None and method not in get_args(Method):
        raise ConfigurationError(
            "There is no such method.", expected=" or ".join(map(repr, get_args(Method))), got=repr(method)
        )
    if method == "lags" and len(axes) == 3:
        raise ConfigurationError("Lags are of images.", expected="one or two axes of space", got="three")
    size = inputs.shape[1] // groups * math.prod(axis.kernel for axis in axes) + bias
    given = total is not None
    if total is None:
        total = inputs.new_zeros(groups, size, size, dtype=torch.promote_types(inputs.dtype, torch.float32))
    elif total.shape != (groups, size, size) or total.dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            "The total does not fit the convolution.",
            expected=f"[{groups}, {size}, {size}] of float32 or float64",
            got=f"{list(total.shape)} of {total.dtype}",
        )
    elif total.device != inputs.device:
        raise ConfigurationError(
            "Inputs and total are on different devices.", expected=str(total.device), got=str(inputs.device)
        )
    if inputs.numel() > 0:
        _add(total.detach(), inputs.detach(), axes, bias, alpha, method, precision or current_precision())
    return total if given else symmetrize_(total)


def averaged_patches(
    inputs: Tensor,
    kernel_size: Extent,
    *,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    bias: bool = False,
) -> Tensor:
    """Patches averaged over the output positions: the rows of KFAC-reduce's input factor.

    The average at one tap is a sum over a window of the image, hence a product with the window's indicator along each
    axis (Dangel 2023): O(C·H·W·k) operations for each example and no patches.

    Args:
        inputs: ``[N, C, *space]`` with one to three axes of space.
        kernel_size: Taps along each axis.
        stride: Step between output positions.
        padding: Zeros on both sides of each axis, or pairs (before, after).
        dilation: Step between taps.
        groups: Number G of groups of channels.
        bias: Append the bias's entry, 1.

    Returns:
        ``[G, N, d]`` with d = C/G·k (+ 1), the rows that
        :func:`~laplace_plus.kernels.symmetric_update.symmetric_update` takes, of the inputs' type, at least float32.

    Raises:
        ConfigurationError: Shapes, types or options that do not fit.

    Example:
        >>> averaged_patches(torch.arange(4.0).reshape(1, 1, 1, 4), (1, 2), bias=True)
        tensor([[[1., 2., 1.]]])
    """
    axes = _axes(inputs, kernel_size, stride, padding, dilation, groups)
    sums = inputs.detach().to(torch.promote_types(inputs.dtype, torch.float32))
    for number, axis in reversed(list(enumerate(axes, start=2))):
        indicator = _indicator(axis, sums)
        # The last axis is a product of one matrix with many rows; the others are at most k times as long as it.
        sums = (sums.movedim(number, -1) @ indicator.T).movedim(-1, number)
    sums = sums / math.prod(axis.positions for axis in axes)
    rows = sums.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)
    return F.pad(rows, (0, 1), value=1.0) if bias else rows


def _indicator(axis: Axis, like: Tensor) -> Tensor:
    """``[k, size]``: which pixels a tap meets on its way over the output positions."""
    tap = torch.arange(axis.kernel, device=like.device)[:, None] * axis.dilation - axis.padding[0]
    pixel = torch.arange(axis.size, device=like.device)
    step = pixel - tap
    met = (step >= 0) & (step % axis.stride == 0) & (step < axis.stride * axis.positions)
    return met.to(like.dtype)


def _axes(
    inputs: Tensor, kernel_size: Extent, stride: Extent, padding: Padding, dilation: Extent, groups: int
) -> tuple[Axis, ...]:
    """The axes of space, checked."""
    space = inputs.ndim - 2
    if space not in (1, 2, 3) or inputs.dtype not in _TYPES:
        raise ConfigurationError(
            "These are no inputs of a convolution.",
            expected="[N, C, *space] with one to three axes of space, floating point",
            got=f"{list(inputs.shape)} of {inputs.dtype}",
        )
    if groups < 1 or inputs.shape[1] % groups:
        raise ConfigurationError(
            "The channels do not divide into the groups.", expected=f"a divisor of {inputs.shape[1]}", got=str(groups)
        )
    taps, steps, spread = (_each(value, space, 1) for value in (kernel_size, stride, dilation))
    if isinstance(padding, str):
        raise ConfigurationError(
            "The padding is no number.",
            expected="zeros on both sides of each axis, or pairs (before, after)",
            got=repr(padding),
            fix='Take the numbers that the module itself uses: padding="same" is (kernel_size − 1)·dilation in all.',
        )
    given: list[Any] = [padding] * space if isinstance(padding, int) else list(padding)
    pairs = [(value, value) if isinstance(value, int) else (value[0], value[1]) for value in given]
    if len(pairs) != space or min(min(pair) for pair in pairs) < 0:
        raise ConfigurationError("The padding does not fit.", expected=f"{space} numbers ≥ 0", got=str(padding))
    axes = tuple(map(Axis, inputs.shape[2:], taps, steps, spread, pairs))
    if min(axis.positions for axis in axes) < 1:
        raise ConfigurationError(
            "The kernel is larger than the image with its padding.",
            expected="at least one output position",
            got=f"a kernel of {taps} on {list(inputs.shape[2:])}",
        )
    return axes


def _each(value: Extent, count: int, least: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    if len(values) != count or min(values) < least:
        raise ConfigurationError(
            "A setting of the convolution does not fit.", expected=f"{count} numbers ≥ {least}", got=str(value)
        )
    return values


def _add(
    total: Tensor,
    inputs: Tensor,
    axes: tuple[Axis, ...],
    bias: bool,
    alpha: float,
    method: Method | None,
    precision: Precision,
) -> None:
    """Add the factor to the lower triangle of a total."""
    if len(axes) == 1:
        inputs, axes = inputs.unsqueeze(2), (Axis(1, 1, 1, 1, (0, 0)), *axes)
    ways: dict[str, Callable[[Tensor], None]] = {
        "lags": lambda target: _add_by_lags(target, inputs, axes, bias, alpha, precision),
        "patches": lambda target: _add_by_patches(target, inputs, axes, bias, alpha, precision),
    }
    if method is not None or len(axes) == 3:
        ways[method or "patches"](total)
        return
    static = "lags" if _prefers_lags(inputs, axes, total.shape[0]) else "patches"
    ways = {REFERENCE: ways.pop(static), **_ways_of_triton(total, inputs, axes, bias, alpha, precision), **ways}
    scratch: list[Tensor] = []

    def trial(name: str) -> None:
        if not scratch:
            scratch.append(torch.zeros_like(total))
        ways[name](scratch[0])

    key: Key = ("convolution_factor", total.device, inputs.dtype, total.dtype, precision, bias, total.shape[0])
    key += (*axes, inputs.shape[1], *size_class(inputs.shape[0]))
    positions = math.prod(axis.positions for axis in axes)
    work = 2.0 * inputs.shape[0] * positions * total.shape[0] * total.shape[1] ** 2
    ways[choose(key, total.device, work, {name: partial(trial, name) for name in ways})](total)


def _ways_of_triton(
    total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], bias: bool, alpha: float, precision: Precision
) -> dict[str, Callable[[Tensor], None]]:
    usable = total.dtype == torch.float32 and inputs.dtype != torch.float64 and total.stride(2) == 1
    kernels: Any = triton_kernels("convolution", total.device) if usable else None
    if kernels is None:
        return {}
    exact = "ieee" if interpreting() else "tf32x3"
    size = total.shape[1]

    def add(tiling: Any, target: Tensor) -> None:
        fused = bias and size <= _FUSED_UP_TO
        kernels.update(
            target if fused or not bias else target[:, :-1, :-1],
            inputs,
            kernel=tuple(axis.kernel for axis in axes),
            stride=tuple(axis.stride for axis in axes),
            dilation=tuple(axis.dilation for axis in axes),
            padding=tuple(axis.padding[0] for axis in axes),
            output=tuple(axis.positions for axis in axes),
            bias=fused,
            alpha=alpha,
            precision="tf32" if precision == "tf32" else exact,
            tiling=tiling,
        )
        if bias and not fused:
            _add_ones(target, inputs, axes, alpha)

    found = kernels.tilings(inputs.dtype, size)
    return {f"triton {tiling}": partial(add, tiling) for tiling in found}


# Beyond, a column of ones would often cost a row of tiles more than the sums of the windows do.
_FUSED_UP_TO = 128


def _prefers_lags(inputs: Tensor, axes: tuple[Axis, ...], groups: int) -> bool:
    """Whether counted operations speak for lags: see the measurements above.

    Their products are smaller (75 against 95 GFLOP/s), and their blocks are scattered over the factor, at 4 ns for
    each entry. With less than 16 channels in a group, the products are too small to be worth it.
    """
    channels = inputs.shape[1] // groups
    size = channels * math.prod(axis.kernel for axis in axes)
    triangle = float(inputs.shape[0]) * math.prod(axis.positions for axis in axes) * size**2
    one_group = inputs[:, :channels]
    return channels >= 16 and operations(one_group, axes[0], axes[1]) + 280.0 * size**2 < 0.8 * triangle


def _add_by_lags(
    total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], bias: bool, alpha: float, precision: Precision
) -> None:
    size = total.shape[1] - bias
    with multiplying_in(precision, total):
        add_lags(total[:, :size, :size], inputs, axes[0], axes[1], alpha)
    if bias:
        _add_ones(total, inputs, axes, alpha)


def _add_ones(total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], alpha: float) -> None:
    """Add the bias's row: the sums of the patches, and their number."""
    groups, last = total.shape[0], total.shape[1] - 1
    positions = math.prod(axis.positions for axis in axes)
    image = inputs.sum(0, keepdim=True, dtype=total.dtype)
    means = averaged_patches(
        image,
        [axis.kernel for axis in axes],
        stride=[axis.stride for axis in axes],
        padding=[axis.padding for axis in axes],
        dilation=[axis.dilation for axis in axes],
        groups=groups,
    )
    total[:, last, :last].add_(means[:, 0], alpha=alpha * positions)
    total[:, last, last] += alpha * positions * inputs.shape[0]


def _add_by_patches(
    total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], bias: bool, alpha: float, precision: Precision
) -> None:
    groups = total.shape[0]
    pads = [amount for axis in reversed(axes) for amount in axis.padding]
    positions = math.prod(axis.positions for axis in axes)
    patch_bytes = total.element_size() * positions * groups * total.shape[1]
    # Single images with many entries are unfolded into columns, which need no further copy; calls for others cost more.
    singly = total.device.type == "cpu" and positions >= 256 and patch_bytes >= 1 << 18 and groups == 1
    examples = 1 if singly else max(1, _CHUNK.get(total.device.type, _CHUNK["cuda"]) // patch_bytes)
    for chunk in inputs.split(examples):
        padded = F.pad(chunk.to(total.dtype) if total.device.type == "cpu" else chunk, pads)
        symmetric_update(total, _patches(padded, axes, groups), alpha=alpha, bias=bias, precision=precision)


def _patches(padded: Tensor, axes: tuple[Axis, ...], groups: int) -> Tensor:
    """Rows ``[G, N·S, C/G·k]`` of a padded input; a view of columns for a single image."""
    if len(axes) == 2:
        kernel, dilation, stride = (
            tuple(getattr(axis, name) for axis in axes) for name in ("kernel", "dilation", "stride")
        )
        columns = F.unfold(padded, kernel, dilation=dilation, stride=stride)  # [N, C·k, S]
        return columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    for number, axis in enumerate(axes, start=2):
        extent = (axis.kernel - 1) * axis.dilation + 1
        padded = padded.unfold(number, extent, axis.stride)[..., :: axis.dilation]
    space = len(axes)
    padded = padded.unflatten(1, (groups, -1)).movedim((1, 2), (0, 2 + space))  # [G, N, *out, C/G, *k]
    return padded.flatten(2 + space).flatten(1, 1 + space)
