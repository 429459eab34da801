"""The input factor of a convolution as one product whose operands are gathered from the image: no patches in memory.

The kernel is that of :mod:`~laplace_plus.kernels._triton.symmetric_update`; entry (r, i) of the rows that it
multiplies, for output position r = (n, y, x) and patch entry i = (c, u, v), is read from the image where it lies.
"""

# Triton gives the arguments of its kernels their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.kernels._triton.compat import jit, needs_upcast, on_its_device, power_of_two, tl
from laplace_plus.kernels._triton.symmetric_update import Tiling, add_up, splits_of, store_tile, tile_of


@jit
def gather(
    image,
    entry,
    position,
    last_position,
    height,
    width,
    out_height,
    out_width,
    entries,
    stride_example,
    stride_channel,
    stride_row,
    stride_column,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    PADDING_Y: tl.constexpr,
    PADDING_X: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Entries of patches, for broadcast patch entries and output positions; zero in the padding."""
    out_x = position % out_width
    out_y = (position // out_width) % out_height
    example = position // (out_width * out_height)
    channel = entry // (TAPS_Y * TAPS_X)
    y = out_y * STRIDE_Y + (entry // TAPS_X) % TAPS_Y * DILATION_Y - PADDING_Y
    x = out_x * STRIDE_X + entry % TAPS_X * DILATION_X - PADDING_X
    inside = (position < last_position) & (entry < entries) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    offset = example.to(tl.int64) * stride_example + channel.to(tl.int64) * stride_channel
    offset += y.to(tl.int64) * stride_row + x * stride_column
    values = tl.load(image + offset, mask=inside, other=0.0)
    if UPCAST:
        values = values.to(tl.float32)
    return values


@jit
def patch_product(
    image,
    target,
    workspace,
    groups,
    tiles,
    positions,
    entries,
    size,
    height,
    width,
    out_height,
    out_width,
    stride_group,
    stride_example,
    stride_channel,
    stride_row,
    stride_column,
    target_group,
    target_row,
    positions_per_split,
    SPLITS: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    PADDING_Y: tl.constexpr,
    PADDING_X: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of the sum of ``patch patchᵀ`` over one split of the positions."""
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    split = tl.program_id(1)
    i, j = tile_of(tile)
    left = (i * SIDE + tl.arange(0, SIDE))[:, None]
    right = (j * SIDE + tl.arange(0, SIDE))[None, :]
    image += group.to(tl.int64) * stride_group
    first = split * positions_per_split
    last = tl.minimum(first + positions_per_split, positions)
    product = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(first, last, STEP):
        position = start + tl.arange(0, STEP)
        a = gather(
            image, left, position[None, :], last, height, width, out_height, out_width, entries,
            stride_example, stride_channel, stride_row, stride_column,
            TAPS_Y, TAPS_X, STRIDE_Y, STRIDE_X, DILATION_Y, DILATION_X, PADDING_Y, PADDING_X, UPCAST,
        )  # fmt: skip
        b = gather(
            image, right, position[:, None], last, height, width, out_height, out_width, entries,
            stride_example, stride_channel, stride_row, stride_column,
            TAPS_Y, TAPS_X, STRIDE_Y, STRIDE_X, DILATION_Y, DILATION_X, PADDING_Y, PADDING_X, UPCAST,
        )  # fmt: skip
        product = tl.dot(a, b, product, input_precision=PRECISION)
    store_tile(
        product, target, workspace, i, j, tile, tiles, group, split, groups, size,
        target_group, target_row, SPLITS, SIDE,
    )  # fmt: skip


def tilings(dtype: torch.dtype, size: int) -> list[Tiling]:
    """The configurations worth measuring."""
    if size <= 64:
        return [Tiling(power_of_two(size, 16), 32, 4, 3)]
    found = [Tiling(64, 32, 4, 3), Tiling(128, 32, 8, 3)]
    return found if dtype == torch.float32 else [*found, Tiling(128, 64, 8, 3)]


@on_its_device
def update(
    total: Tensor,
    image: Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int],
    output: tuple[int, int],
    precision: str,
    tiling: Tiling,
) -> None:
    """``total += Σ patch patchᵀ`` in the lower triangle.

    Args:
        total: ``[G, d, d]`` of float32, with contiguous rows.
        image: ``[N, C, H, W]``, with any strides.
        kernel: Taps along each axis.
        stride: Steps between output positions.
        dilation: Steps between taps.
        padding: Zeros before the first row and column; those behind the last follow from ``output``.
        output: Number of output positions along each axis.
        precision: Triton's name of the multiplication.
        tiling: The configuration; its ``transposed`` is not used.
    """
    groups, size = total.shape[:2]
    examples, channels, height, width = image.shape
    per_group = channels // groups
    entries = per_group * kernel[0] * kernel[1]
    positions = examples * output[0] * output[1]
    side_tiles = -(-size // tiling.side)
    tiles = side_tiles * (side_tiles + 1) // 2
    splits, per_split = splits_of(positions, tiles * groups, tiling.step, total.device)
    workspace = total if splits == 1 else total.new_empty(splits, groups, tiles, tiling.side, tiling.side)
    patch_product[(tiles * groups, splits)](
        image, total, workspace, groups, tiles, positions, entries, size, height, width, *output,
        image.stride(1) * per_group, *image.stride(), total.stride(0), total.stride(1), per_split,
        SPLITS=splits, TAPS_Y=kernel[0], TAPS_X=kernel[1], STRIDE_Y=stride[0], STRIDE_X=stride[1],
        DILATION_Y=dilation[0], DILATION_X=dilation[1], PADDING_Y=padding[0], PADDING_X=padding[1],
        UPCAST=needs_upcast(image.dtype), PRECISION=precision, SIDE=tiling.side, STEP=tiling.step,
        enable_fp_fusion=True, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if splits > 1:
        add_up(total, workspace, tiles, size, splits, tiling.side)
