"""Functions of a symmetric operator on Krylov spaces, by Gauss quadrature, and their traces.

With Lanczos' ``A Q = Q T + r e_Kᵀ`` and ``T = S Λ Sᵀ``, ``vᵀ f(A) v ≈ ‖v‖² Σ s_i² f(λ_i)`` where s is the first row of
S: Gauss quadrature for the spectral measure of v (G. H. Golub and G. Meurant, "Matrices, Moments and Quadrature with
Applications", 2010). Its derivative in T is ``‖v‖² S (F ∘ s sᵀ) Sᵀ`` with the divided differences
``F_ij = (f_i − f_j)/(λ_i − λ_j)`` (the Daleckii–Krein formula). Unlike the derivative of an eigendecomposition it is
finite for equal eigenvalues.

Stochastic Lanczos quadrature takes the mean over random v: ``tr f(A) = E[vᵀ f(A) v]`` for ``E[v vᵀ] = I`` (S. Ubaru,
J. Chen and Y. Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", 2017). The gradient is
``tr(f′(A) ∂A/∂θ)``, by the same formula on the same Krylov spaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, NonFiniteError, NotPositiveDefiniteError
from laplace_plus.linalg.estimates import Estimate, draw_probes, standard_error, working_type
from laplace_plus.linalg.krylov import KrylovSpace, combine, map_of
from laplace_plus.linalg.linear_maps import (
    LinearMap,
    Matvec,
    attach_one,
    number_type,
    require_adjoint,
    require_finite,
    without_autocast,
)

SpectralFunction = Callable[[Tensor], Tensor]
"""An elementwise function of eigenvalues, made of torch operations; its argument is float64."""


class SpectralSpace(KrylovSpace):
    """A Krylov space of a symmetric operator, and functions of the operator on it."""

    def evaluated(self, evaluate: Callable[[int | None], Tensor]) -> tuple[Tensor, Tensor]:
        """A result and its errors ``[batch]``.

        ``evaluate`` gives the result ``[batch, k]`` of so many steps, or of all (None). The error is the norm of its
        change over the last quarter of the steps: zero if the space is invariant, infinite after one step.
        """
        value = evaluate(None)
        now, error = value.detach(), self.norm.new_zeros(len(value), dtype=torch.float64)
        if not self.complete:
            error = error + torch.inf
            if self.depth > 1:
                before = evaluate(max(1, self.depth - max(2, self.depth // 4))).detach()
                now = torch.cat([now[:, : before.shape[1]] - before, now[:, before.shape[1] :]], 1)
                error = now.norm(dim=-1)
        return value, error

    def spectrum(self, depth: int | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[batch, k]`` and vectors ``[batch, k, k]`` of the leading part of T, in float64.

        Rows beyond the rank of a space are decoupled. Their eigenvalue is set to the Rayleigh quotient ``vᵀAv/‖v‖²``,
        which lies within the spectrum, where functions are defined.
        """
        matrix = self.matrix[:, :depth, :depth].double()
        outside = torch.arange(matrix.shape[-1], device=self.rank.device) >= self.rank[:, None]
        values, vectors = torch.linalg.eigh(matrix + torch.diag_embed(outside * matrix[:, 0, :1]))
        return values, vectors

    def coordinates(self, f: SpectralFunction, depth: int | None = None) -> Tensor:
        """``‖v‖ f(T) e₁``, the coordinates ``[batch, k]`` of ``f(A) v`` in the basis Q, in float64."""
        values, vectors = self.spectrum(depth)
        return self.norm.double()[:, None] * (vectors * (evaluate(f, values) * vectors[:, 0])[:, None, :]).sum(-1)

    def quadrature(self, f: SpectralFunction, depth: int | None = None) -> Tensor:
        """``‖v‖² e₁ᵀ f(T) e₁ ≈ vᵀ f(A) v``, ``[batch, 1]`` in float64."""
        values, vectors = self.spectrum(depth)
        forms = (vectors[:, 0].square() * evaluate(f, values)).sum(-1, keepdim=True)
        return self.norm.double()[:, None].square() * forms

    def quadrature_gradient(self, f: SpectralFunction) -> Tensor:
        """The symmetric derivative of :meth:`quadrature` in T, ``[batch, K, K]``."""
        values, vectors = self.spectrum()
        first = vectors[:, 0]
        inner = divided_differences(f, values, values) * first[:, :, None] * first[:, None, :]
        return self.norm.double().square()[:, None, None] * (vectors @ inner @ vectors.mT)

    def combine(self, coefficients: Tensor) -> Tensor:
        """``Σ_k x_k q_k`` for ``[batch, K]`` in float64, as ``[batch, n]`` in the working type."""
        return combine(coefficients.to(self.vectors.dtype), self.vectors)


def evaluate(f: SpectralFunction, values: Tensor) -> Tensor:
    """``f`` at eigenvalues, with a graph to the tensors that f itself depends on.

    ConfigurationError if f is not elementwise, NonFiniteError if it is NaN or infinite at an eigenvalue.
    """
    results = f(values.detach())
    if not isinstance(results, Tensor) or results.shape != values.shape or not results.is_floating_point():
        got = f"{results.dtype} {tuple(results.shape)}" if isinstance(results, Tensor) else type(results).__name__
        what = "The function of eigenvalues is not elementwise."
        raise ConfigurationError(what, expected=f"a real tensor of shape {tuple(values.shape)}", got=got)
    finite = torch.isfinite(results)
    if not bool(finite.all()):
        raise NonFiniteError(
            "The function is not finite on the operator's spectrum.",
            expected="a function that is defined between the smallest and the largest eigenvalue",
            got=f"{results[~finite][0].item()} at {values[~finite][0].item():.6g}",
        )
    return results.double()


def derivative(f: SpectralFunction, values: Tensor) -> Tensor:
    """``f′`` at eigenvalues, from automatic differentiation; :class:`ConfigurationError` if torch cannot."""
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        results = f(leaf)
        gradient = None
        if results.requires_grad:
            (gradient,) = torch.autograd.grad(results.sum(), leaf, allow_unused=True)
    if gradient is None:
        if bool((results == results.flatten()[:1]).all()):
            return torch.zeros_like(values)
        what = "torch cannot differentiate the function of eigenvalues."
        got = "a result that does not depend on its argument in the autograd graph"
        raise ConfigurationError(what, expected="a function made of torch operations", got=got)
    return gradient.detach()


def divided_differences(f: SpectralFunction, left: Tensor, right: Tensor) -> Tensor:
    """``(f(x) − f(y))/(x − y)``, and f′ where x = y, for ``x [..., k]`` and ``y [..., l]``, as ``[..., k, l]``.

    The quotient loses digits where x and y are close. There it is replaced by the mean of f′ between them, by
    Gauss–Legendre quadrature of order six. This needs an f′ that varies by less than 1 % between x and y, and a mean
    that agrees with the quotient to its accuracy. At 1 % the error of the quadrature is below machine epsilon for
    functions as smooth as log and powers.
    """
    f_left, f_right = evaluate(f, left).detach(), evaluate(f, right).detach()
    slope_left, slope_right = derivative(f, left)[..., :, None], derivative(f, right)[..., None, :]
    gap = left[..., :, None] - right[..., None, :]
    difference = f_left[..., :, None] - f_right[..., None, :]
    quotient = difference / torch.where(gap == 0, 1.0, gap)
    middle = (left[..., :, None] + right[..., None, :]) / 2
    offset = gap * (0.15**0.5)
    nodes = torch.stack([middle - offset, middle, middle + offset])
    slopes = derivative(f, nodes)
    mean = (5 * (slopes[0] + slopes[2]) + 8 * slopes[1]) / 18
    every = torch.stack([*slopes, slope_left.expand_as(mean), slope_right.expand_as(mean)])
    size = every.abs().amax(0)
    smooth = every.amax(0) - every.amin(0) <= 1e-2 * size
    arguments = torch.maximum(left.abs().amax(-1), right.abs().amax(-1))[..., None, None]
    largest = torch.maximum(f_left.abs().amax(-1), f_right.abs().amax(-1))[..., None, None]
    rounding = 16 * torch.finfo(gap.dtype).eps * (largest + arguments * size)
    agree = (difference - mean * gap).abs() <= 1e-3 * size * gap.abs() + rounding
    close = gap.abs() <= 1e-7 * arguments
    return torch.where((smooth & (agree | close)) | (gap == 0), mean, quotient)


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
    space = SpectralSpace(map_of(matvec, drawn, symmetric=True, parameters=parameters), drawn, depth)
    forms, change = space.evaluated(partial(space.quadrature, f))
    matvecs, wide, samples = space.operator.matvecs, working_type(dtype), forms.detach()[:, 0]
    mean, sem, bias = samples.mean(), standard_error(samples), change.mean()
    # the change over the last steps is below the other errors
    rounding = torch.finfo(wide).eps ** 0.5 * mean.abs()
    converged = bool(bias <= (torch.maximum(sem, rounding) if probes > 1 else rounding))

    def pullback(x: Tensor) -> tuple[Tensor, ...]:
        slope = (x / probes * space.quadrature_gradient(f)).to(space.vectors.dtype)  # with the spaces held fixed
        return space.operator.parameter_pullback(space.vectors, slope @ space.vectors)

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
