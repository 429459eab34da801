"""Triton's symmetric rank-k update: one triangle, split over the rows, accumulated in float32.

Programs run over (tile of the lower triangle, group) × split. Tile t lies in row ``i = ⌊(√(8t+1) − 1)/2⌋`` and column
``j = t − i(i+1)/2`` of the grid of tiles. Where the triangle has fewer tiles than the device has multiprocessors, the
rows are split; each split writes its own partial product, and a second kernel adds them up in a fixed order, so the sum
is the same in every run (atomic additions are not).
"""

# Triton gives the arguments of its kernels their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.kernels._triton.compat import jit, multiprocessors, on_its_device, power_of_two, tl
from laplace_plus.kernels.selection import INTERPRETED


@dataclass(frozen=True)
class Tiling:
    """Configuration of a product: side of a tile, rows for each step, warps, pipeline stages, and whether to transpose.

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
def add_partial(
    target, workspace, splits, tiles, size, target_group, target_row, SIDE: tl.constexpr, PART: tl.constexpr
):
    """Add the partial products up, in order, and onto the target; each program does ``PART`` rows of one tile."""
    tile = tl.program_id(0) % tiles
    group = tl.program_id(0) // tiles
    i, j = tile_of(tile)
    local_row = tl.program_id(1) * PART + tl.arange(0, PART)[:, None]
    local_column = tl.arange(0, SIDE)[None, :]
    total = tl.zeros((PART, SIDE), dtype=tl.float32)
    place = workspace + (group.to(tl.int64) * tiles + tile) * SIDE * SIDE + local_row * SIDE + local_column
    for _ in range(splits):
        total += tl.load(place)
        place += tl.num_programs(0).to(tl.int64) * SIDE * SIDE
    row = i * SIDE + local_row
    column = j * SIDE + local_column
    inside = (row < size) & (column <= row)
    place = target + group.to(tl.int64) * target_group + row.to(tl.int64) * target_row + column
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)


@jit
def symmetric_product(
    rows,
    target,
    workspace,
    tiles,
    n_rows,
    size,
    stride_group,
    stride_row,
    stride_column,
    target_group,
    target_row,
    rows_per_split,
    SPLITS: tl.constexpr,
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
    left = (i * SIDE + tl.arange(0, SIDE))[:, None]
    right = (j * SIDE + tl.arange(0, SIDE))[None, :]
    rows += group.to(tl.int64) * stride_group
    first = split * rows_per_split
    last = tl.minimum(first + rows_per_split, n_rows)
    product = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(first, last, STEP):
        row = start + tl.arange(0, STEP)
        inside = row < last
        place = rows + row.to(tl.int64) * stride_row
        a = tl.load(place[None, :] + left.to(tl.int64) * stride_column, mask=inside[None, :] & (left < size), other=0.0)
        b = tl.load(
            place[:, None] + right.to(tl.int64) * stride_column, mask=inside[:, None] & (right < size), other=0.0
        )
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        product = tl.dot(a, b, product, input_precision=PRECISION)
    local_row = tl.arange(0, SIDE)[:, None]
    local_column = tl.arange(0, SIDE)[None, :]
    if SPLITS == 1:  # add the tile to the target
        row = i * SIDE + local_row
        column = j * SIDE + local_column
        inside = (row < size) & (column <= row)
        place = target + group.to(tl.int64) * target_group + row.to(tl.int64) * target_row + column
        tl.store(place, tl.load(place, mask=inside, other=0.0) + product, mask=inside)
    else:  # keep it in the workspace [splits, groups, tiles, side, side]
        base = split.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(workspace + base * SIDE * SIDE + local_row * SIDE + local_column, product)


def tilings(dtype: torch.dtype, size: int) -> list[Tiling]:
    """The configurations worth measuring for a type of rows and a number of columns; the first is used."""
    if size <= 64:
        side = power_of_two(size, 16)
        return [Tiling(64, 32, 4, 3) if side == 64 else Tiling(side, 64, 2, 3)]
    if dtype == torch.float32:
        found = [Tiling(128, 32, 8, 3), Tiling(128, 32, 8, 4, transposed=True), Tiling(64, 32, 4, 4, transposed=True)]
    else:
        found = [Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 4), Tiling(128, 64, 8, 3, transposed=True)]
    return found if size > 128 else [Tiling(64, 32, 4, 3), found[0]]


def splits_of(n_rows: int, tiles: int, step: int, device: torch.device) -> tuple[int, int]:
    """Number of splits and rows in each: enough programs to fill the device twice, and eight steps in each at least.

    It depends on the sizes and the device alone, so that the order of summation does.
    """
    splits = max(1, min(2 * multiprocessors(device) // tiles, n_rows // (8 * step), 512))
    per_split = max(1, -(-n_rows // (splits * step))) * step
    return max(1, -(-n_rows // per_split)), per_split


@on_its_device
def update(total: Tensor, rows: Tensor, *, precision: str, tiling: Tiling) -> None:
    """``total += rowsᵀ rows`` in the lower triangle, for ``[G, d, d]`` of float32 and rows ``[G, N, d]``.

    The total has contiguous rows. ``precision`` is Triton's name: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``.
    """
    if tiling.transposed:
        rows = rows.mT.contiguous().mT
    groups, n_rows, size = rows.shape
    side = tiling.side
    side_tiles = -(-size // side)
    tiles = side_tiles * (side_tiles + 1) // 2
    splits, per_split = splits_of(n_rows, tiles * groups, tiling.step, total.device)
    workspace = total if splits == 1 else total.new_empty(splits, groups, tiles, side, side)
    symmetric_product[(tiles * groups, splits)](
        rows, total, workspace, tiles, n_rows, size, *rows.stride(), *total.stride()[:2], per_split,
        SPLITS=splits, UPCAST=rows.dtype == torch.bfloat16 and INTERPRETED,  # it multiplies bfloat16's bit patterns
        PRECISION=precision, SIDE=side, STEP=tiling.step, enable_fp_fusion=True, num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip
    if splits > 1:
        part = min(side, 16)
        strides, sizes = total.stride()[:2], {"SIDE": side, "PART": part, "enable_fp_fusion": True}
        add_partial[(tiles * groups, side // part)](total, workspace, splits, tiles, size, *strides, **sizes)
