"""Functions of a symmetric operator times a vector, by Lanczos' method.

``f(A) v ≈ ‖v‖ Q f(T) e₁`` on the Krylov space of v (V. Druskin and L. Knizhnerman, "Two polynomial methods of
calculating functions of symmetric matrices", 1989). The derivative is that of f(A) itself, by the Daleckii–Krein
formula on the Krylov spaces. That of the computed value is the adjoint of :func:`~laplace_plus.linalg.lanczos`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from laplace_plus.checks import count
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.arguments import start_vectors, without_autocast
from laplace_plus.linalg.linear_maps import Matvec, attach_one
from laplace_plus.linalg.quadrature import SpectralFunction, SpectralSpace, divided_differences

Pullback = Callable[[SpectralSpace, Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]


@dataclass(frozen=True)
class FunctionValue:
    """A function of an operator, evaluated on a Krylov space.

    Attributes:
        value: The result; differentiable.
        error: ``[...]`` for each start vector, the norm of the change of the value over the last quarter of the steps.
            It bounds the remaining error if convergence is geometric and halves the error in that many steps; zero if
            the space is invariant.
        matvecs: Number of operator–vector products.
        converged: Whether every error is below the tolerance.
        depth: Number of steps.
    """

    value: Tensor
    error: Tensor
    matvecs: int
    converged: bool
    depth: int


@without_autocast
def matrix_function(
    matvec: Matvec,
    f: SpectralFunction,
    v: Tensor,
    *,
    depth: int = 30,
    tolerance: float | None = None,
    cap: int = 100,
    dtype: torch.dtype | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> FunctionValue:
    """``f(A) v`` for a symmetric operator.

    Costs one product (of the stack) per step and memory for K vectors each. Exact once K reaches the number of distinct
    eigenvalues, and for polynomials of degree below K. Otherwise the error is at most 2‖v‖ times that of the best
    polynomial of degree K − 1 on the spectrum. Other operators: :func:`~laplace_plus.linalg.arnoldi_function`.

    The value is differentiable in v, in the tensors that A depends on, and in those that f depends on. For a cotangent
    u, ``f(A) u`` on the Krylov space of u is the gradient in v, and the Daleckii–Krein formula between both spaces that
    in A. It takes K more products and one vector–Jacobian product batched over K vectors, and is about as accurate as
    the value.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        f: Elementwise function of eigenvalues, of torch operations, e.g. ``torch.exp``.
        v: ``[n]``, or a stack ``[..., n]``.
        depth: K, at most n steps are taken.
        tolerance: Add steps until the error is below this fraction of the value's norm, for each vector. None takes
            ``depth`` steps, and ``converged`` then compares with the square root of machine epsilon.
        cap: Limit on the number of steps with a tolerance.
        dtype: Type of the vectors.
        parameters: The tensors to differentiate in.

    Returns:
        ``value [..., n]`` (float32 for half precision), ``error [...]``.

    Raises:
        ConfigurationError: Bad arguments, or an f that is not elementwise.
        OperatorError: A vector of zero, or an operator that is not symmetric or of another shape.
        NonFiniteError: NaN in a product, or an f that is not finite on the spectrum.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
        >>> matrix_function(lambda v: v @ matrix, torch.sqrt, torch.ones(3)).value.round(decimals=4)
        tensor([1., 2., 3.])
    """

    def pullback(space: SpectralSpace, start: Tensor, u: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return _two_sided(matvec, f, space, start, u)

    options = depth, tolerance, cap, dtype, parameters
    return _evaluate(matvec, f, v, SpectralSpace.coordinates, SpectralSpace.combine, pullback, *options)


@without_autocast
def bilinear(
    matvec: Matvec,
    f: SpectralFunction,
    v: Tensor,
    *,
    depth: int = 30,
    tolerance: float | None = None,
    cap: int = 100,
    dtype: torch.dtype | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> FunctionValue:
    """``vᵀ f(A) v`` for a symmetric operator, by Gauss quadrature.

    Costs one product per step, and converges twice as fast as ``f(A) v``: exact for polynomials of degree below 2K.

    The value is differentiable in v, in the tensors that A depends on, and in those that f depends on. The derivative
    is that with the Krylov space held fixed, ``2 f(A) v`` for v and one vector–Jacobian product batched over K vectors
    for A; it is as accurate as ``f(A) v``.

    Arguments and errors are those of :func:`matrix_function`; ``tolerance`` is relative to the value.

    Returns:
        ``value [...]`` and ``error [...]`` (float32 for half precision).

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
        >>> round(bilinear(lambda v: v @ matrix, torch.sqrt, torch.ones(3)).value.item(), 4)
        6.0
    """

    def pullback(space: SpectralSpace, start: Tensor, u: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        to_start = space.combine(2 * u[:, None] * space.coordinates(f).detach())
        return to_start, space.parameter_gradients(u.double()[:, None, None] * space.quadrature_gradient(f))

    def result(space: SpectralSpace, forms: Tensor) -> Tensor:
        return forms[:, 0].to(space.vectors.dtype)

    options = depth, tolerance, cap, dtype, parameters
    return _evaluate(matvec, f, v, SpectralSpace.quadrature, result, pullback, *options)


def _evaluate(
    matvec: Matvec,
    f: SpectralFunction,
    v: Tensor,
    coordinates: Callable[[SpectralSpace, SpectralFunction, int | None], Tensor],
    result: Callable[[SpectralSpace, Tensor], Tensor],
    pullback: Pullback,
    depth: int,
    tolerance: float | None,
    cap: int,
    dtype: torch.dtype | None,
    parameters: Iterable[Tensor] | None,
) -> FunctionValue:
    """A function on the Krylov spaces of v, which are extended to the tolerance.

    ``coordinates`` are what converges with the depth, ``[batch, k]``; ``result`` makes the value ``[batch, ...]`` of
    them. ``pullback`` takes the spaces, the start vectors and a cotangent ``[batch, ...]``, and gives the gradients in
    v and in A's tensors.
    """
    count("cap", cap)
    start = start_vectors(v, depth, dtype, tolerance)
    space = SpectralSpace(matvec, start, parameters=parameters)
    limit = torch.finfo(space.vectors.dtype).eps ** 0.5 if tolerance is None else tolerance
    cap = depth if tolerance is None else cap

    def met(now: Tensor, error: Tensor) -> bool:
        return bool((error <= limit * now.norm(dim=-1)).all())

    def shaped(x: Tensor) -> Tensor:
        return x.reshape((*start.shape[:-1], *x.shape[1:]))

    depth = min(depth, cap)
    while True:
        with_graph, error = space.evaluated(partial(coordinates, space, f), depth)
        now, matvecs = with_graph.detach(), space.operator.matvecs
        if space.complete or depth >= cap or met(now, error):
            break
        depth = min(cap, depth + max(4, depth // 4))
    value = result(space, now)
    flat = value.shape

    def differentiate(cotangent: Tensor) -> tuple[Tensor, ...]:
        to_start, gradients = pullback(space, start, cotangent.reshape(flat))
        return shaped(to_start).to(start.dtype), *gradients

    value = attach_one(shaped(value), [start, *space.operator.tensors], differentiate)
    if with_graph.requires_grad:  # f depends on tensors of its own
        value = value + shaped(result(space, with_graph - now))
    return FunctionValue(value, shaped(error.to(value.dtype)), matvecs, met(now, error), space.depth)


def _two_sided(
    matvec: Matvec, f: SpectralFunction, space: SpectralSpace, start: Tensor, cotangents: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The derivative of ``Σ uᵀ f(A) v`` in v and A, from the Krylov spaces of the v and of the u.

    ``A ≈ P R Pᵀ`` on the space of u and ``A ≈ Q T Qᵀ`` on that of v. The derivative ``uᵀ L_f(A, E) v`` is a sum over
    the eigenvectors of R and T, weighted by the divided differences of f between their eigenvalues.
    """
    alive = (vector_norm(cotangents) > 0)[:, None]
    unit = torch.where(alive, cotangents, space.vectors[:, 0])
    other = SpectralSpace(matvec, (unit[0] if start.ndim == 1 else unit).to(start.dtype), parameters=())
    other.extend(space.requested)  # the space of v may be smaller than that of u
    mu, left = other.spectrum()
    lam, right = space.spectrum()
    to_start = other.combine(alive * other.coordinates(f).detach())
    inner = divided_differences(f, mu, lam) * left[:, 0, :, None] * right[:, 0, None, :]
    sizes = alive * (other.norm.double() * space.norm.double())[:, None]
    matrix = sizes[..., None] * (left @ inner @ right.mT)  # [batch, K of u, K of v]
    return to_start, space.operator.parameter_pullback(space.vectors, matrix.to(unit.dtype).mT @ other.vectors)
