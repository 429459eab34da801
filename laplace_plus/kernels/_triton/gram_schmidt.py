"""Classical Gram–Schmidt, run twice in three passes over the basis.

``h = Q w``, then ``w₁ = w − Qᵀ h`` together with ``h' = Q w₁``, then ``w₂ = w₁ − Qᵀ h'``: the middle pass holds a block
of columns of the basis in registers for both products, so the basis is read three times, not four. Inner products are
summed in chunks of the vector, one for each program, and the chunks in a fixed order: equal in each run. Nothing is
read back by the host, so that a CUDA graph can capture all of it.
"""

# Triton gives the arguments of its kernels their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_plus.kernels._triton.compat import jit, multiprocessors, on_its_device, power_of_two, tl

FUSED_UP_TO = 128
"""Rows of the basis whose block of columns fits in the registers."""

_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}


@partial(jit, do_not_specialize=["rows"])
def inner_products(
    basis, vector, sums, n, rows, chunk, basis_probe, basis_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """``sums[probe, chunk, row] = Σ basis[probe, row, c] vector[probe, c]`` over the columns c of a chunk."""
    probe = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, n)
    lines = basis + probe * basis_probe + row.to(tl.int64)[:, None] * basis_row
    total = tl.zeros((ROWS, COLUMNS), dtype=vector.dtype.element_ty)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < last
        w = tl.load(vector + probe * n + column, mask=inside, other=0.0)
        total += tl.load(lines + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0) * w[None, :]
    place = sums + (probe * tl.num_programs(0) + tl.program_id(0)) * rows + row
    tl.store(place, tl.sum(total, 1), mask=row < rows)


@partial(jit, do_not_specialize=["rows"])
def subtract_and_multiply(
    basis, vector, factors, output, sums, n, rows, chunk, probes, lines, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """``output = vector − basisᵀ factors`` and, from the same block, the inner products of basis and output.

    ``probes`` and ``lines`` are the basis' strides.
    """
    probe = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    h = tl.load(factors + probe * rows + row, mask=row < rows, other=0.0)
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, n)
    line = basis + probe * probes + row.to(tl.int64)[:, None] * lines
    total = tl.zeros((ROWS,), dtype=vector.dtype.element_ty)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < last
        block = tl.load(line + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(vector + probe * n + column, mask=inside, other=0.0) - tl.sum(block * h[:, None], 0)
        tl.store(output + probe * n + column, w, mask=inside)
        total += tl.sum(block * w[None, :], 1)
    place = sums + (probe * tl.num_programs(0) + tl.program_id(0)) * rows + row
    tl.store(place, total, mask=row < rows)


@partial(jit, do_not_specialize=["rows"])
def subtract(
    basis, vector, factors, output, n, rows, basis_probe, basis_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """``output = vector − basisᵀ factors``."""
    probe = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    w = tl.load(vector + probe * n + column, mask=inside, other=0.0)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        h = tl.load(factors + probe * rows + row, mask=row < rows, other=0.0)
        lines = basis + probe * basis_probe + row.to(tl.int64)[:, None] * basis_row
        block = tl.load(lines + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w -= tl.sum(block * h[:, None], 0)
    tl.store(output + probe * n + column, w, mask=inside)


def _blocks(rows: int, n: int, probes: int, like: Tensor) -> tuple[int, int, int, int]:
    """Rows and columns of a block, and the number and length of a vector's chunks.

    A block takes 32 kB: up to 64 registers in each of 128 threads. All probes have about four chunks for each
    multiprocessor.
    """
    columns = power_of_two(32768 // (rows * like.element_size()), 64, 1024)
    wanted = max(1, 4 * multiprocessors(like.device) // probes)
    chunk = max(1, -(-n // (wanted * columns))) * columns
    return rows, columns, -(-n // chunk), chunk


def dots(basis: Tensor, vector: Tensor) -> Tensor:
    """``[m, k]`` inner products of ``[m, k, n]`` with contiguous ``[m, n]``."""
    probes, rows, n = basis.shape
    side, columns, chunks, chunk = _blocks(power_of_two(rows, 1, 32), n, probes, vector)
    sums, strides = vector.new_empty(probes, chunks, rows), basis.stride()[:2]
    grid = (chunks, -(-rows // side), probes)
    inner_products[grid](basis, vector, sums, n, rows, chunk, *strides, ROWS=side, COLUMNS=columns, **_OPTIONS)
    return sums.sum(1)


def combine(basis: Tensor, vector: Tensor, factors: Tensor) -> Tensor:
    """``vector − basisᵀ factors``."""
    probes, rows, n = basis.shape
    side, columns, _, _ = _blocks(power_of_two(rows, 1, 32), n, probes, vector)
    output, strides = torch.empty_like(vector), basis.stride()[:2]
    grid = (-(-n // columns), probes)
    subtract[grid](basis, vector, factors, output, n, rows, *strides, ROWS=side, COLUMNS=columns, **_OPTIONS)
    return output


def combine_and_dots(basis: Tensor, vector: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`combine`, and the :func:`dots` of its result, in one pass over the basis."""
    probes, rows, n = basis.shape
    if rows > FUSED_UP_TO:
        output = combine(basis, vector, factors)
        return output, dots(basis, output)
    side, columns, chunks, chunk = _blocks(power_of_two(rows), n, probes, vector)
    output, sums = torch.empty_like(vector), vector.new_empty(probes, chunks, rows)
    sizes = {"ROWS": side, "COLUMNS": columns, **_OPTIONS, "num_stages": 2}
    tensors = (basis, vector, factors, output, sums)
    subtract_and_multiply[(chunks, probes)](*tensors, n, rows, chunk, *basis.stride()[:2], **sizes)
    return output, sums.sum(1)


@on_its_device
def orthogonalize(basis: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Classical Gram–Schmidt, twice, of ``[m, n]`` against the rows of ``[m, k, n]`` with k ≥ 1.

    The rows have contiguous entries. Returns the vectors ``[m, n]`` and the coefficients ``[m, k]``.
    """
    vector = vector.contiguous()
    first = dots(basis, vector)
    vector, second = combine_and_dots(basis, vector, first)
    return combine(basis, vector, second), first + second
