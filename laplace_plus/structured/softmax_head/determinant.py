"""The log-determinant of a linear head's precision, with derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laplace_plus.structured.softmax_head.precision import HeadFactor
from laplace_plus.structured.softmax_head.rows import HeadRows


class HeadLogDeterminant(torch.autograd.Function):
    """``log det (w H + D)`` with its exact derivatives, ``tr (M⁻¹ H)`` and the diagonal of ``M⁻¹``."""

    @staticmethod
    def forward(ctx: Any, rows: HeadRows, weight: Tensor, diagonal: Tensor) -> Tensor:
        """The value; see :class:`HeadFactor`."""
        wanted = any(ctx.needs_input_grad[1:])
        dtype = torch.float64 if wanted else None
        factor = HeadFactor(rows, weight, diagonal, dtype=dtype, derivatives=wanted and not diagonal.ndim)
        value = factor.log_determinant()
        if wanted:
            size = factor.n_outputs * factor.n_features
            if diagonal.ndim:
                by_diagonal = factor.variances().to(diagonal).view_as(diagonal)
                left = (by_diagonal * diagonal).sum()
            else:
                by_diagonal = factor.trace_of_inverse().to(diagonal)
                left = by_diagonal * diagonal
            # tr M⁻¹ (w H + D) = P
            ctx.save_for_backward((size - left) / weight, by_diagonal)
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        """The derivatives by ``weight`` and ``diagonal``."""
        (gradient,) = gradients
        by_weight, by_diagonal = ctx.saved_tensors
        return None, (gradient * by_weight).to(by_weight), (gradient * by_diagonal).to(by_diagonal)
