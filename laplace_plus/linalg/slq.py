"""Stochastic Lanczos quadrature: traces of functions of a symmetric operator, above all its log-determinant.

``tr f(A) = E[vᵀ f(A) v]`` over random v with ``E[v vᵀ] = I``, each quadratic form by Gauss quadrature on a Krylov space
(S. Ubaru, J. Chen and Y. Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", 2017). The gradient is
``tr(f′(A) ∂A/∂θ)``, by the Daleckii–Krein formula on the same Krylov spaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.linalg.estimates import Estimate, draw_probes, standard_error, working_type
from laplace_plus.linalg.linear_maps import (
    LinearMap,
    Matvec,
    attach_one,
    number_type,
    require_adjoint,
    require_finite,
    without_autocast,
)
from laplace_plus.linalg.quadrature import SpectralFunction, SpectralSpace, derivative, evaluate


@without_autocast
def slq_logdet(matvec: Matvec, n: int, *, shift: float | Tensor = 0.0, **options: Any) -> Estimate:
    """Estimate ``log det(A + shift · I)`` of a positive definite operator; negative where the determinant is below one.

    With a shift the value is ``n log(shift) + tr log(I + A/shift)``. The first term is exact, so that the null space of
    A does not contribute to the error; ``log det(I + A/shift)`` is the value less ``n log(shift)``. The value is
    differentiable in the shift. Without one the gradient G in A satisfies ``⟨G, A⟩ = n = tr(A⁻¹ A)`` at every depth.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        n: Its size.
        shift: The multiple of the identity that is added, a number or a 0-d tensor.
        **options: Those of :func:`slq_trace`.

    Raises:
        NotPositiveDefiniteError: A Ritz value of ``A + shift`` is zero or negative.
        ConfigurationError: Bad arguments.
        OperatorError: The operator is not square or not symmetric.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(torch.tensor([0.1, 0.2, 0.5]))
        >>> round(slq_logdet(lambda v: v @ matrix, 3).value.item(), 4)  # exact: the budget covers the dimension
        -4.6052

        A known eigenpair (λ, u) is taken out exactly: with eigenvalue one it has no share in the log-determinant.

        >>> u, scale = torch.eye(3)[2], torch.tensor(0.5)
        >>> deflated = slq_logdet(lambda v: v @ matrix + (1 - scale) * (v @ u)[:, None] * u, 3)
        >>> round((deflated.value + scale.log()).item(), 4)
        -4.6052
    """
    size = shift.detach().item() if isinstance(shift, Tensor) else float(shift)
    checks.number("shift", size, least=0.0)

    def logarithm(values: Tensor) -> Tensor:
        smallest = values.detach().min().item()
        if smallest + size <= 0:
            what, got = "The operator is not positive definite.", f"a Ritz value of {smallest + size:.6g}"
            expected = "vᵀ (A + shift) v > 0 for all vectors, as a real log-determinant needs"
            fix = "Pass a (larger) shift= if A is semi-definite; an indefinite operator has no log-determinant."
            raise NotPositiveDefiniteError(what, expected=expected, got=got, fix=fix)
        if size == 0:
            return values.log()
        return torch.log1p(values / (shift.double() if isinstance(shift, Tensor) else size))

    estimate = slq_trace(matvec, logarithm, n, **options)
    if size == 0:
        return estimate
    exact = n * shift.log() if isinstance(shift, Tensor) else n * math.log(size)
    return replace(estimate, value=(estimate.value + exact).to(estimate.value.dtype))


@without_autocast
def slq_trace(
    matvec: Matvec,
    f: SpectralFunction,
    n: int,
    *,
    probes: int = 10,
    depth: int = 30,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Estimate:
    """Estimate ``tr f(A)`` for a symmetric operator.

    Costs ``probes · depth`` products and memory for as many vectors. Where that budget covers the dimension, ``probes ·
    depth ≥ n``, the result is exact: n products with the unit vectors, and an eigendecomposition.

    The value is differentiable in the tensors that A depends on, and in those that f depends on. The gradient in A's
    tensors costs one vector–Jacobian product of ``probes · depth`` vectors, and estimates ``tr(f′(A) ∂A/∂θ)`` with no
    bias except that of the depth.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        f: Elementwise function of eigenvalues, made of torch operations, defined on the whole spectrum.
        n: Its size.
        probes: Number of random vectors of signs; two at least for a standard error.
        depth: K, the number of Lanczos steps.
        generator: Source of the randomness.
        dtype: Type of the vectors.
        device: Device of the vectors.
        parameters: The tensors to differentiate in.

    Returns:
        ``value`` and ``sem``, 0-d of the vectors' type (float32 for half precision); ``converged`` means that
        the change over the last quarter of the steps is below the standard error, or is rounding.

    Raises:
        ConfigurationError: Bad arguments, or an f that is not elementwise.
        OperatorError: The operator is not square or not symmetric.
        NonFiniteError: A product is NaN or infinite, or f is so on the spectrum.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
        >>> round(slq_trace(lambda v: v @ matrix, torch.sqrt, 3).value.item(), 4)
        6.0
    """
    for name, number in (("n", n), ("probes", probes), ("depth", depth)):
        checks.count(name, number)
    dtype, device = number_type(matvec, dtype, device)
    if probes * depth >= n:
        operator = LinearMap(matvec, n, symmetric=True, parameters=parameters, dtype=dtype)
        return _exact(operator, f, torch.eye(n, dtype=dtype, device=device))
    drawn = draw_probes("signs", probes, n, generator=generator, dtype=dtype, device=device)
    space = SpectralSpace(matvec, drawn, parameters=parameters)
    forms, change = space.evaluated(partial(space.quadrature, f), depth)
    matvecs, wide, samples = space.operator.matvecs, working_type(dtype), forms.detach()[:, 0]
    mean, sem, bias = samples.mean(), standard_error(samples), change.mean()
    # the change over the last steps is below the other errors
    rounding = torch.finfo(wide).eps ** 0.5 * mean.abs()
    converged = bool(bias <= (torch.maximum(sem, rounding) if probes > 1 else rounding))

    def pullback(x: Tensor) -> tuple[Tensor, ...]:
        return space.parameter_gradients(x / probes * space.quadrature_gradient(f))

    value = attach_one(mean.to(wide), space.operator.tensors, pullback)
    if forms.requires_grad:  # f depends on tensors of its own
        value = value + (forms.mean() - mean).to(wide)
    return Estimate(value, sem.to(wide), matvecs, converged, probes, space.depth)


def _exact(operator: LinearMap, f: SpectralFunction, identity: Tensor) -> Estimate:
    """The trace from the eigendecomposition of the dense matrix."""
    wide = working_type(identity.dtype)
    matrix = operator(identity).double()
    require_finite("The operator", matrix)
    require_adjoint(matrix, matrix.mT, matrix.abs().max(), identity.dtype)
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    with_graph = evaluate(f, values).sum()
    total, matvecs = with_graph.detach(), operator.matvecs

    def pullback(x: Tensor) -> tuple[Tensor, ...]:
        return operator.parameter_pullback(identity, x * (vectors * derivative(f, values)) @ vectors.mT)

    value = attach_one(total.to(wide), operator.tensors, pullback)
    if with_graph.requires_grad:  # f depends on tensors of its own
        value = value + (with_graph - total).to(wide)
    return Estimate(value, torch.zeros_like(value.detach()), matvecs, True)
