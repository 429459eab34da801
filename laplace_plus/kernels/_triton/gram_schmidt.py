"""Classical Gram–Schmidt, run twice in three passes over the basis, and the three-term update of Lanczos.

``h = Q w``, then ``w₁ = w − Qᵀ h`` together with ``h' = Q w₁``, then ``w₂ = w₁ − Qᵀ h'``: the middle pass holds a block
of columns of the basis in registers for both products, so the basis is read three times, not four. Inner products are
summed in chunks of the vector, one for each program, and the chunks in a fixed order: equal in each run. Nothing is
read back by the host, so that a CUDA graph can capture all of it.
"""

# Triton gives the arguments of its kernels their types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from laplace_plus.kernels._triton.compat import jit, multiprocessors, on_its_device, power_of_two, tl

FUSED_UP_TO = 128
"""Rows of the basis whose block of columns fits in the registers."""


@partial(jit, do_not_specialize=["rows"])
def inner_products(
    basis,
    vector,
    partials,
    n,
    rows,
    chunk,
    basis_probe,
    basis_row,
    vector_probe,
    partial_probe,
    partial_chunk,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``partials[probe, chunk, row] = Σ basis[probe, row, c] vector[probe, c]`` over the columns c of a chunk."""
    probe = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, n)
    lines = basis + probe * basis_probe + row.to(tl.int64)[:, None] * basis_row
    sums = tl.zeros((ROWS, COLUMNS), dtype=vector.dtype.element_ty)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < last
        w = tl.load(vector + probe * vector_probe + column, mask=inside, other=0.0)
        sums += tl.load(lines + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0) * w[None, :]
    target = partials + probe * partial_probe + tl.program_id(0).to(tl.int64) * partial_chunk + row
    tl.store(target, tl.sum(sums, 1), mask=row < rows)


@partial(jit, do_not_specialize=["rows"])
def subtract_and_multiply(
    basis,
    vector,
    coefficients,
    output,
    partials,
    n,
    rows,
    chunk,
    basis_probe,
    basis_row,
    vector_probe,
    coefficient_probe,
    partial_probe,
    partial_chunk,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``output = vector − basisᵀ coefficients`` and, from the same block, the inner products of basis and output."""
    probe = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    h = tl.load(coefficients + probe * coefficient_probe + row, mask=row < rows, other=0.0)
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, n)
    lines = basis + probe * basis_probe + row.to(tl.int64)[:, None] * basis_row
    sums = tl.zeros((ROWS,), dtype=vector.dtype.element_ty)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < last
        block = tl.load(lines + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(vector + probe * vector_probe + column, mask=inside, other=0.0) - tl.sum(block * h[:, None], 0)
        tl.store(output + probe * n + column, w, mask=inside)
        sums += tl.sum(block * w[None, :], 1)
    target = partials + probe * partial_probe + tl.program_id(0).to(tl.int64) * partial_chunk + row
    tl.store(target, sums, mask=row < rows)


@partial(jit, do_not_specialize=["rows"])
def subtract(
    basis,
    vector,
    coefficients,
    output,
    n,
    rows,
    basis_probe,
    basis_row,
    vector_probe,
    coefficient_probe,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``output = vector − basisᵀ coefficients``."""
    probe = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    w = tl.load(vector + probe * vector_probe + column, mask=inside, other=0.0)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        h = tl.load(coefficients + probe * coefficient_probe + row, mask=row < rows, other=0.0)
        lines = basis + probe * basis_probe + row.to(tl.int64)[:, None] * basis_row
        block = tl.load(lines + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        w -= tl.sum(block * h[:, None], 0)
    tl.store(output + probe * n + column, w, mask=inside)


@jit
def three_terms(
    vector,
    current,
    previous,
    alphas,
    betas,
    output,
    squares,
    n,
    chunk,
    vector_probe,
    current_probe,
    previous_probe,
    COLUMNS: tl.constexpr,
):
    """``output = vector − α current − β previous`` and the sums of its squares in each chunk."""
    probe = tl.program_id(1).to(tl.int64)
    alpha = tl.load(alphas + probe)
    beta = tl.load(betas + probe)
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, n)
    sums = tl.zeros((COLUMNS,), dtype=vector.dtype.element_ty)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < last
        w = tl.load(vector + probe * vector_probe + column, mask=inside, other=0.0)
        w -= alpha * tl.load(current + probe * current_probe + column, mask=inside, other=0.0)
        w -= beta * tl.load(previous + probe * previous_probe + column, mask=inside, other=0.0)
        tl.store(output + probe * n + column, w, mask=inside)
        sums += w * w
    tl.store(squares + probe * tl.num_programs(0) + tl.program_id(0), tl.sum(sums, 0))


def _chunks(n: int, probes: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Number of chunks of a vector, about four for each multiprocessor in all, and the entries in each."""
    wanted = max(1, 4 * multiprocessors(device) // probes)
    chunk = max(1, -(-n // (wanted * columns))) * columns
    return -(-n // chunk), chunk


def _columns(rows: int, itemsize: int) -> int:
    """Columns in a block, so that it takes 32 kB: up to 64 registers in each of 128 threads."""
    return power_of_two(32768 // (rows * itemsize), 64, 1024)


def dots(basis: Tensor, vector: Tensor) -> Tensor:
    """``[m, k]`` inner products of ``[m, k, n]`` with ``[m, n]``."""
    probes, rows, n = basis.shape
    row_block = power_of_two(rows, 1, 32)
    columns = _columns(row_block, vector.element_size())
    chunks, chunk = _chunks(n, probes, columns, vector.device)
    partials = vector.new_empty(probes, chunks, rows)
    inner_products[(chunks, -(-rows // row_block), probes)](
        basis, vector, partials, n, rows, chunk, basis.stride(0), basis.stride(1), vector.stride(0),
        partials.stride(0), partials.stride(1),
        ROWS=row_block, COLUMNS=columns, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return partials.sum(1)


def combine(basis: Tensor, vector: Tensor, coefficients: Tensor) -> Tensor:
    """``vector − basisᵀ coefficients``."""
    probes, rows, n = basis.shape
    row_block = power_of_two(rows, 1, 32)
    columns = _columns(row_block, vector.element_size())
    output = vector.new_empty(probes, n)
    subtract[(-(-n // columns), probes)](
        basis, vector, coefficients, output, n, rows, basis.stride(0), basis.stride(1), vector.stride(0),
        coefficients.stride(0),
        ROWS=row_block, COLUMNS=columns, num_warps=4, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return output


def combine_and_dots(basis: Tensor, vector: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`combine`, and the :func:`dots` of its result, in one pass over the basis."""
    probes, rows, n = basis.shape
    if rows > FUSED_UP_TO:
        output = combine(basis, vector, coefficients)
        return output, dots(basis, output)
    row_block = power_of_two(rows)
    columns = _columns(row_block, vector.element_size())
    chunks, chunk = _chunks(n, probes, columns, vector.device)
    output, partials = vector.new_empty(probes, n), vector.new_empty(probes, chunks, rows)
    subtract_and_multiply[(chunks, probes)](
        basis, vector, coefficients, output, partials, n, rows, chunk, basis.stride(0), basis.stride(1),
        vector.stride(0), coefficients.stride(0), partials.stride(0), partials.stride(1),
        ROWS=row_block, COLUMNS=columns, num_warps=4, num_stages=2, enable_fp_fusion=True,
    )  # fmt: skip
    return output, partials.sum(1)


@on_its_device
def orthogonalize(basis: Tensor, vector: Tensor, passes: int = 2) -> tuple[Tensor, Tensor]:
    """Classical Gram–Schmidt, once or twice, of ``[m, n]`` against the rows of ``[m, k, n]`` with k ≥ 1.

    Rows and vectors have contiguous entries. Returns the vectors ``[m, n]`` and the coefficients ``[m, k]``.
    """
    first = dots(basis, vector)
    if passes == 1:
        return combine(basis, vector, first), first
    vector, second = combine_and_dots(basis, vector, first)
    return combine(basis, vector, second), first + second


@on_its_device
def three_term_update(vector: Tensor, current: Tensor, previous: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``w − α q − β p``, α and its norm, for ``[m, n]`` each and ``β`` of ``[m]``; ``α = ⟨w, q⟩``."""
    probes, n = vector.shape
    alpha = dots(current.unsqueeze(1), vector).squeeze(1)
    columns = 1024
    chunks, chunk = _chunks(n, probes, columns, vector.device)
    output, squares = vector.new_empty(probes, n), vector.new_empty(probes, chunks)
    three_terms[(chunks, probes)](
        vector, current, previous, alpha, beta, output, squares, n, chunk, vector.stride(0), current.stride(0),
        previous.stride(0),
        COLUMNS=columns, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return output, alpha, squares.sum(1).sqrt()
