"""Symmetric rank-k update: one triangle, split over the rows, accumulated in float32.

Programs run over (tile of the lower triangle, group) × split. Tile t lies in row ``i = ⌊(√(8t+1) − 1)/2⌋`` and column
``j = t − i(i+1)/2`` of the grid of tiles. Where the triangle has fewer tiles than the device has multiprocessors, the
rows are split; each split writes its own partial product, and a second kernel adds them up in a fixed order, so the sum
is the same in every run (atomic additions are not).
"""

# Triton gives the arguments of its kernels their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laplace_plus.kernels._triton.compat import jit, multiprocessors, needs_upcast, on_its_device, power_of_two, tl


@dataclass(frozen=True)
class Tiling:
    """How a product is cut up: sides of a tile, rows for each step, warps, pipeline stages, and whether to transpose.

    With ``transposed``, the rows are first copied so that the summed axis is contiguous, which is how tensor cores take
    32-bit operands; the copy costs one pass over the rows.
    """

    side: int
    step: int
    warps: int
    stages: int
    transposed: bool = False


@jit
def tile_of(index):
    """Row and column of a tile in the lower triangle; the square root is exact after one correction either way."""
    i = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > index, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= index, i + 1, i)
    return i, index - i * (i + 1) // 2


@jit
def store_tile(
    product,
    target,
    workspace,
    alpha,
    i,
    j,
    tile,
    tiles,
    group,
    split,
    groups,
    size,
    target_group,
    target_row,
    SPLITS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Add a tile to the target, or keep it in the workspace ``[splits, groups, tiles, side, side]``."""
    local_row = tl.arange(0, SIDE)[:, None]
    local_column = tl.arange(0, SIDE)[None, :]
    if SPLITS == 1:
        row = i * SIDE + local_row
        column = j * SIDE + local_column
        inside = (row < size) & (column <= row)
        place = target + group.to(tl.int64) * target_group + row.to(tl.int64) * target_row + column
        tl.store(place, tl.load(place, mask=inside, other=0.0) + alpha * product, mask=inside)
    else:
        base = (split.to(tl.int64) * groups + group) * tiles + tile
        tl.store(workspace + base * SIDE * SIDE + local_row * SIDE + local_column, product)


@jit
def add_partial(
    target,
    workspace,
    alpha,
    split_stride,
    tiles,
    size,
    target_group,
    target_row,
    SPLITS: tl.constexpr,
    SIDE: tl.constexpr,
    PART: tl.constexpr,
):
    """Add the partial products up, in order, and onto the target; each program does ``PART`` rows of one tile."""
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    i, j = tile_of(tile)
    local_row = tl.program_id(1) * PART + tl.arange(0, PART)[:, None]
    local_column = tl.arange(0, SIDE)[None, :]
    total = tl.zeros((PART, SIDE), dtype=tl.float32)
    place = workspace + (group.to(tl.int64) * tiles + tile) * SIDE * SIDE + local_row * SIDE + local_column
    for _ in range(SPLITS):
        total += tl.load(place)
        place += split_stride
    row = i * SIDE + local_row
    column = j * SIDE + local_column
    inside = (row < size) & (column <= row)
    place = target + group.to(tl.int64) * target_group + row.to(tl.int64) * target_row + column
    tl.store(place, tl.load(place, mask=inside, other=0.0) + alpha * total, mask=inside)


@jit
def load_columns(
    rows,
    group,
    column,
    row,
    last_row,
    n_positions,
    width,
    stride_group,
    stride_row,
    stride_position,
    stride_column,
    COLUMNS_FIRST: tl.constexpr,
    MODE: tl.constexpr,
    BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Entries of the rows in the given columns; one is the bias's column of ones, beyond the last is zero."""
    if COLUMNS_FIRST:
        column = column[:, None]
        row = row[None, :]
    else:
        column = column[None, :]
        row = row[:, None]
    inside = (row < last_row) & (column < width)
    start = rows + group.to(tl.int64) * stride_group + column.to(tl.int64) * stride_column
    if MODE == "each":
        offset = (row // n_positions).to(tl.int64) * stride_row + (row % n_positions).to(tl.int64) * stride_position
        values = tl.load(start + offset, mask=inside, other=0.0)
    elif MODE == "flat":
        values = tl.load(start + row.to(tl.int64) * stride_row, mask=inside, other=0.0)
    else:
        start += row.to(tl.int64) * stride_row
        values = tl.load(start, mask=inside, other=0.0).to(tl.float32)
        for _ in range(1, n_positions):
            start += stride_position
            values += tl.load(start, mask=inside, other=0.0).to(tl.float32)
        if MODE == "mean":
            values = values / n_positions
    if UPCAST:
        values = values.to(tl.float32)
    if BIAS:
        values = tl.where((column == width) & (row < last_row), 1.0, values).to(values.dtype)
    return values


@jit
def symmetric_product(
    rows,
    target,
    workspace,
    alpha,
    groups,
    tiles,
    n_rows,
    n_positions,
    width,
    size,
    stride_group,
    stride_row,
    stride_position,
    stride_column,
    target_group,
    target_row,
    rows_per_split,
    SPLITS: tl.constexpr,
    MODE: tl.constexpr,
    BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """One tile of ``rowsᵀ rows`` over one split of the rows."""
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    split = tl.program_id(1)
    i, j = tile_of(tile)
    left = i * SIDE + tl.arange(0, SIDE)
    right = j * SIDE + tl.arange(0, SIDE)
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, n_rows)
    product = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        a = load_columns(
            rows, group, left, row, last, n_positions, width,
            stride_group, stride_row, stride_position, stride_column, True, MODE, BIAS, UPCAST,
        )  # fmt: skip
        b = load_columns(
            rows, group, right, row, last, n_positions, width,
            stride_group, stride_row, stride_position, stride_column, False, MODE, BIAS, UPCAST,
        )  # fmt: skip
        product = tl.dot(a, b, product, input_precision=PRECISION)
    store_tile(
        product, target, workspace, alpha, i, j, tile, tiles, group, split, groups, size,
        target_group, target_row, SPLITS, SIDE,
    )  # fmt: skip


def tilings(dtype: torch.dtype, size: int) -> list[Tiling]:
    """The configurations worth measuring for a type of rows and a number of columns."""
    if size <= 32:
        return [Tiling(power_of_two(size, 16), 64, 2, 3)]
    if size <= 64:
        return [Tiling(64, 32, 4, 3)]
    if dtype == torch.float32:
        found = [Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 4, transposed=True), Tiling(64, 32, 4, 4, transposed=True)]
    else:
        found = [Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 4), Tiling(128, 64, 8, 3, transposed=True)]
    return found if size > 128 else [Tiling(64, 32, 4, 3), found[0]]


def splits_of(n_rows: int, tiles: int, step: int, device: torch.device) -> tuple[int, int]:
    """Number of splits and rows in each: enough programs to fill the device twice, and eight steps in each at least.

    It depends on the sizes and the device alone, so that the order of summation does.
    """
    wanted = max(1, 2 * multiprocessors(device) // tiles)
    splits = max(1, min(wanted, n_rows // (8 * step), 512))
    per_split = -(-n_rows // splits)
    per_split = -(-per_split // step) * step
    return max(1, -(-n_rows // per_split)) if n_rows else 1, max(per_split, step)


def add_up(total: Tensor, workspace: Tensor, alpha: float, tiles: int, size: int, splits: int, side: int) -> None:
    """Launch :func:`add_partial` for a total ``[G, d, d]``."""
    part = min(side, 16)
    add_partial[(tiles * total.shape[0], side // part)](
        total, workspace, alpha, workspace.stride(0), tiles, size, total.stride(0), total.stride(1),
        SPLITS=splits, SIDE=side, PART=part, enable_fp_fusion=True,
    )  # fmt: skip


@on_its_device
def update(
    total: Tensor,
    rows: Tensor,
    *,
    alpha: float,
    bias: bool,
    positions: Literal["each", "mean", "sum"],
    precision: str,
    tiling: Tiling,
) -> None:
    """``total += alpha · rowsᵀ rows`` in the lower triangle.

    Args:
        total: ``[G, d, d]`` of float32, with contiguous rows.
        rows: ``[G, N, S, d]`` or, with ``bias``, ``[G, N, S, d − 1]``, with any strides.
        alpha: Factor of the product.
        bias: Whether a column of ones is meant after the last.
        positions: Whether the S positions are rows of their own, or first averaged or summed.
        precision: Triton's name of the multiplication: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.
        tiling: The configuration.
    """
    groups, n_rows, n_positions, width = rows.shape
    mode: str = positions
    if positions == "each":
        n_rows *= n_positions
        mode = "each"
        if n_positions == 1 or rows.stride(1) == n_positions * rows.stride(2):
            mode = "flat"
            row_stride = rows.stride(1) if n_positions == 1 else rows.stride(2)
            rows = rows.as_strided((groups, n_rows, 1, width), (rows.stride(0), row_stride, 0, rows.stride(3)))
            n_positions = 1
        if tiling.transposed:
            rows = rows.flatten(1, 2).transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(2)
            n_positions, mode = 1, "flat"
    elif n_positions == 1:
        mode = "flat"
    size, side = total.shape[-1], tiling.side
    side_tiles = -(-size // side)
    tiles = side_tiles * (side_tiles + 1) // 2
    splits, per_split = splits_of(n_rows, tiles * groups, tiling.step, total.device)
    workspace = total if splits == 1 else total.new_empty(splits, groups, tiles, side, side)
    symmetric_product[(tiles * groups, splits)](
        rows, total, workspace, alpha, groups, tiles, n_rows, n_positions, width, size, *rows.stride(),
        total.stride(0), total.stride(1), per_split,
        SPLITS=splits, MODE=mode, BIAS=bias, UPCAST=needs_upcast(rows.dtype), PRECISION=precision,
        SIDE=side, STEP=tiling.step, enable_fp_fusion=True, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if splits > 1:
        add_up(total, workspace, alpha, tiles, size, splits, side)
