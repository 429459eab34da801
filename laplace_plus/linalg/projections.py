"""Projection onto the null space of an operator, with its exact derivative."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.errors import OperatorError
from laplace_plus.linalg.arguments import without_autocast
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, require_callable
from laplace_plus.linalg.lsmr import (
    LeastSquaresOptions,
    LeastSquaresSolution,
    Outcome,
    least_squares_options,
    solve_least_squares,
)
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.solving import (
    RightHandSides,
    converted,
    parameter_gradients,
    warn_unless_converged,
    where_used,
)


@without_autocast
def project_null_space(
    matvec: Matvec,
    rmatvec: Matvec | None,
    v: Tensor,
    *,
    atol: float | None = None,
    btol: float | None = None,
    conlim: float = 1e8,
    max_iterations: int | None = None,
    m: int | None = None,
    parameters: Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> LeastSquaresSolution:
    """``P v = v - A⁺A v``, the part of v that A maps to zero.

    It is the residual ``v - Aᵀz`` of the least-squares problem ``z = argmin ‖Aᵀz - v‖``, which LSMR solves; A may have
    any shape and rank, and need not fit into memory. Costs as :func:`~laplace_plus.linalg.lsmr.lsmr`. With the
    cotangent ū and ``z_u = argmin ‖Aᵀz_u - ū‖`` the gradient is ``v̄ = P ū`` and ``Ā = -z_u (P v)ᵀ - z (P ū)ᵀ``, exact
    wherever the rank of A does not change: one solve more.

    Args:
        matvec: The operator A on row-stacked vectors, ``[..., n] -> [..., m]``.
        rmatvec: Its transpose; without it torch differentiates through ``matvec``, at twice the cost.
        v: ``[..., n]``.
        atol: Relative error to be expected of A; 1e-12 in float64, 1e-6 in float32, 1e-2 in half precision by default.
        btol: The same of v.
        conlim: The iteration ends when the condition number seems to exceed this.
        max_iterations: Cap; ``max(1000, 10 min(m, n))`` by default.
        m: Number of rows; otherwise it is taken from an operator's shape or that of ``matvec(v)``.
        parameters: The tensors ``matvec`` depends on, where they are not its leaves.
        dtype: Type to work in, to which v is converted; that of v by default.
        progress: Whether to show a progress bar.

    Returns:
        P v, with ``residual`` an estimate of ``‖A P v‖`` and the statuses of LSMR.

    Raises:
        ConfigurationError: A bad vector, tolerance or cap.
        OperatorError: An operator of the wrong shape or type, or ``rmatvec`` that is not its transpose.

    Example:
        >>> A = torch.tensor([[1.0, 1.0, 0.0]])
        >>> v = torch.tensor([1.0, 3.0, 5.0])
        >>> project_null_space(lambda v: v @ A.T, lambda u: u @ A, v).value.round(decimals=4)
        tensor([-1.,  1.,  5.])
    """
    v = converted(dtype, v)
    sides = RightHandSides("v", v)
    m, spent = _rows(matvec, sides, v) if m is None else (m, 0)
    A = LinearMap(matvec, sides.length, m=m, rmatvec=rmatvec, parameters=parameters)
    A.matvecs += spent
    default = 1e-12 if v.dtype == torch.float64 else None
    atol, btol = (default if x is None else x for x in (atol, btol))
    options = least_squares_options(atol, btol, conlim, max_iterations, min(m, sides.length), v.dtype, progress)
    with torch.no_grad():
        projected, z, outcome = _project(A, sides, options)
        z, projected = (sides.restore(x) for x in (z, projected))

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        if cotangent is None:
            return (None,) * (1 + len(A.tensors))
        cotangent = cotangent.contiguous()
        backward = RightHandSides("ū", cotangent)
        rows, z_rows, ending = _project(A, backward, options)
        warn_unless_converged("project_null_space", ending.state.statuses, backward.restore_norms(ending.residual))
        projected_cotangent, z_cotangent = backward.restore(rows), backward.restore(z_rows)
        kept, z_kept = where_used(cotangent, outputs[0], z)
        pairs = [(kept, -z_cotangent), (projected_cotangent, -z_kept)]
        return projected_cotangent, *parameter_gradients(A, pairs)

    (value,) = attach([projected], [v, *A.tensors], pullback)
    shape, state = sides.shape, outcome.state
    return LeastSquaresSolution(
        value,
        sides.restore_norms(outcome.residual),
        state.iterations.reshape(shape),
        state.statuses.reshape(shape),
        A.matvecs,
        sides.restore_norms(outcome.misfit),
        outcome.operator_norm.reshape(shape),
        outcome.condition_number.reshape(shape),
    )


class NullSpaceProjector(Operator):
    """The orthogonal projector onto the null space of an operator, as an operator.

    Args:
        matvec: The operator A on row-stacked vectors, ``[..., n] -> [..., m]``.
        rmatvec: Its transpose, or None.
        shape: ``(m, n)`` of A.
        dtype: Type of the vectors.
        device: Where they live.
        atol: As in :func:`project_null_space`, like all that follow.
        btol: Relative error to be expected of the vectors.
        conlim: Limit of the condition number.
        max_iterations: Cap.
        parameters: The tensors ``matvec`` depends on. As an operator's tensors they are not looked for.

    Example:
        >>> A = torch.tensor([[1.0, 1.0, 0.0]])
        >>> P = NullSpaceProjector(lambda v: v @ A.T, lambda u: u @ A, shape=(1, 3))
        >>> P(torch.eye(3)).round(decimals=4) + 0.0
        tensor([[ 0.5000, -0.5000,  0.0000],
                [-0.5000,  0.5000,  0.0000],
                [ 0.0000,  0.0000,  1.0000]])
    """

    symmetric = True

    def __init__(
        self,
        matvec: Matvec,
        rmatvec: Matvec | None,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        atol: float | None = None,
        btol: float | None = None,
        conlim: float = 1e8,
        max_iterations: int | None = None,
        parameters: Iterable[Tensor] = (),
    ):
        self.shape = (shape[1], shape[1])
        self.dtype, self.device = dtype, torch.device(device)
        self._matvec, self._rmatvec, self._m = matvec, rmatvec, shape[0]
        self._atol, self._btol, self._conlim, self._max_iterations = atol, btol, conlim, max_iterations
        self._parameters = tuple(parameters)

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return project_null_space(
            self._matvec,
            self._rmatvec,
            vectors,
            atol=self._atol,
            btol=self._btol,
            conlim=self._conlim,
            max_iterations=self._max_iterations,
            m=self._m,
            parameters=self._parameters or None,
        ).value

    @override
    def _transpose(self) -> Operator:
        return self

    @override
    def tensors(self) -> tuple[Tensor, ...]:
        return self._parameters


def _rows(matvec: Matvec, sides: RightHandSides, v: Tensor) -> tuple[int, int]:
    """The number of rows of an operator, and the number of products that it took to find it."""
    require_callable(matvec)
    if isinstance(matvec, Operator):
        return matvec.shape[0], 0
    with torch.no_grad():
        product = matvec(v.detach())
    if not isinstance(product, Tensor) or product.shape[:-1] != sides.shape:
        raise OperatorError(
            "The operator gave something of another shape.",
            expected=f"{(*sides.shape, 'm')} for vectors {tuple(v.shape)}",
            got=str(tuple(product.shape)) if isinstance(product, Tensor) else type(product).__name__,
        )
    return product.shape[-1], sides.shape.numel()


def _project(A: LinearMap, sides: RightHandSides, options: LeastSquaresOptions) -> tuple[Tensor, Tensor, Outcome]:
    """``P v`` and z on rows."""
    transposed = sides.on_rows(A.transposed)
    damp = sides.rows.new_zeros(())
    z, outcome = solve_least_squares(transposed, sides.on_rows(A), sides, A.m, damp, None, options)
    return sides.rows - transposed(z), z, outcome
