"""Input factors of convolutions: sums of ``patch patchᵀ`` over all examples and output positions.

A k × k convolution is a linear map of patches, so KFAC's input factor (Grosse and Martens 2016) is a sum of their outer
products. Unfolding the input into patches takes k² times its memory, and the product k⁴ C² operations for each
position. Three methods do with less:

* the *lags* of :mod:`laplace_plus.kernels.lags`: a sixth of the operations for 3 × 3 kernels and large images, and one
  copy of the input;
* *patches*, unfolded in chunks of bounded size, each added by a
  :func:`~laplace_plus.kernels.symmetric_update.symmetric_update` of one triangle;
* on CUDA, a Triton kernel that gathers the patches' entries while it multiplies.

The CPU takes lags where counted operations say that they are faster than patches. On one core of an EPYC (Zen 4),
float32, they take 4.0 (16 channels, 32 × 32 pixels), 2.1 (32, 16 × 16), 2.2 (64, 8 × 8), 2.4 (64, 32 × 32), 1.8 (64,
56 × 56) and 2.1 times (128, 28 × 28) less time at 3 × 3 layers of ResNets; with 512 channels of 4 × 4 pixels, and with
stride 2, patches are faster.
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
from laplace_plus.kernels.selection import INTERPRETED, REFERENCE, Key, choose, size_class, triton_kernels
from laplace_plus.kernels.symmetric_update import dot_precision, symmetric_update, symmetrize_

Method = Literal["lags", "patches"]
Extent = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_CHUNK = {"cpu": 1 << 25, "cuda": 1 << 28}
"""Bytes of patches in memory at a time: about the caches of a CPU, and enough to fill a GPU."""


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
    method: Method | None = None,
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
        method: ``"lags"`` (up to two axes of space) or ``"patches"``; by default the faster one.

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
        raise ConfigurationError("Unknown method.", expected=" or ".join(map(repr, get_args(Method))), got=repr(method))
    if method == "lags" and len(axes) == 3:
        raise ConfigurationError("Lags take images.", expected="one or two axes of space", got="three")
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
        target, image = total.detach(), inputs.detach()
        if len(axes) == 1:
            image, axes = image.unsqueeze(2), (Axis(1, 1, 1, 1, (0, 0)), *axes)
        if method is None:
            method = "lags" if len(axes) == 2 and _prefers_lags(image, axes, groups) else "patches"
            if len(axes) == 2 and (INTERPRETED or target.is_cuda):
                _on_device(target, image, axes, bias, method)
                return total if given else symmetrize_(total)
        _METHODS[method](target, image, axes, bias)
    return total if given else symmetrize_(total)


def _axes(
    inputs: Tensor, kernel_size: Extent, stride: Extent, padding: Padding, dilation: Extent, groups: int
) -> tuple[Axis, ...]:
    """The axes of space, checked."""
    space = inputs.ndim - 2
    if space not in (1, 2, 3) or inputs.dtype not in _TYPES:
        raise ConfigurationError(
            "The inputs do not fit a convolution.",
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
            "The padding must be given in numbers.",
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


def _prefers_lags(inputs: Tensor, axes: tuple[Axis, ...], groups: int) -> bool:
    """Whether counted operations favour lags; see the measurements above.

    Their products are smaller (75 against 95 GFLOP/s), and their blocks are scattered over the factor (4 ns for each
    entry). With less than 16 channels in a group, the products are too small.
    """
    channels = inputs.shape[1] // groups
    size = channels * math.prod(axis.kernel for axis in axes)
    triangle = float(inputs.shape[0]) * math.prod(axis.positions for axis in axes) * size**2
    one_group = inputs[:, :channels]
    return channels >= 16 and operations(one_group, axes[0], axes[1]) + 280.0 * size**2 < 0.8 * triangle


def _add_by_lags(total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], bias: bool) -> None:
    size = total.shape[1] - bias
    add_lags(total[:, :size, :size], inputs, axes[0], axes[1])
    if bias:
        _add_ones(total, inputs, axes)


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


def _add_by_patches(total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], bias: bool) -> None:
    groups, space = total.shape[0], len(axes)
    pads = [amount for axis in reversed(axes) for amount in axis.padding]
    positions = math.prod(axis.positions for axis in axes)
    patch_bytes = total.element_size() * positions * groups * total.shape[1]
    examples = max(1, _CHUNK.get(total.device.type, _CHUNK["cuda"]) // patch_bytes)
    for chunk in inputs.split(examples):
        padded = F.pad(chunk.to(total.dtype) if total.device.type == "cpu" else chunk, pads)
        if space == 2:
            kernel, dilation, stride = (tuple(getattr(axis, name) for axis in axes) for name in _SETTINGS)
            columns = F.unfold(padded, kernel, dilation=dilation, stride=stride)  # [N, C·k, S]
            rows = columns.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        else:
            for number, axis in enumerate(axes, start=2):
                extent = (axis.kernel - 1) * axis.dilation + 1
                padded = padded.unfold(number, extent, axis.stride)[..., :: axis.dilation]
            padded = padded.unflatten(1, (groups, -1)).movedim((1, 2), (0, 2 + space))  # [G, N, *out, C/G, *k]
            rows = padded.flatten(2 + space).flatten(1, 1 + space)
        symmetric_update(total, F.pad(rows, (0, 1), value=1.0) if bias else rows)


_SETTINGS = ("kernel", "dilation", "stride")
_METHODS: dict[str, Callable[[Tensor, Tensor, tuple[Axis, ...], bool], None]] = {
    "lags": _add_by_lags,
    "patches": _add_by_patches,
}


def _on_device(total: Tensor, inputs: Tensor, axes: tuple[Axis, ...], bias: bool, method: Method) -> None:
    """The fastest of Triton's kernels, lags and patches for two axes of space; ``method`` is the reference."""
    usable = total.dtype == torch.float32 and inputs.dtype != torch.float64 and total.stride(2) == 1
    kernels: Any = triton_kernels("convolution", total.device) if usable else None
    precision, size = dot_precision(), total.shape[1]

    def add(name: str, target: Tensor) -> None:
        if name not in tilings:
            _METHODS[method if name == REFERENCE else name](target, inputs, axes, bias)
            return
        kernels.update(
            target[:, : size - bias, : size - bias],
            inputs,
            kernel=tuple(axis.kernel for axis in axes),
            stride=tuple(axis.stride for axis in axes),
            dilation=tuple(axis.dilation for axis in axes),
            padding=tuple(axis.padding[0] for axis in axes),
            output=tuple(axis.positions for axis in axes),
            precision=precision,
            tiling=tilings[name],
        )
        if bias:
            _add_ones(target, inputs, axes)

    scratch: list[Tensor] = []

    def trial(name: str) -> None:
        if not scratch:
            scratch.append(torch.zeros_like(total))
        add(name, scratch[0])

    tilings = {} if kernels is None else {f"triton {tiling}": tiling for tiling in kernels.tilings(inputs.dtype, size)}
    names = [REFERENCE, *tilings, *(other for other in _METHODS if other != method)]
    key: Key = ("convolution_factor", total.device, inputs.dtype, total.dtype, precision, bias, total.shape[0])
    key += (*axes, inputs.shape[1], *size_class(inputs.shape[0]))
    work = 2.0 * inputs.shape[0] * math.prod(axis.positions for axis in axes) * total.shape[0] * size**2
    add(choose(key, total.device, work, {name: partial(trial, name) for name in names}), total)
