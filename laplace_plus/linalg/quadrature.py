"""Functions of a symmetric operator on Krylov spaces: Gauss quadrature and its derivative.

With Lanczos' ``A Q = Q T + r e_Kᵀ`` and ``T = S Λ Sᵀ``, ``vᵀ f(A) v ≈ ‖v‖² Σ s_i² f(λ_i)`` where s is the first row of
S: Gauss quadrature for the spectral measure of v (G. H. Golub and G. Meurant, "Matrices, Moments and Quadrature with
Applications", 2010). Its derivative in T is ``‖v‖² S (F ∘ s sᵀ) Sᵀ`` with the divided differences
``F_ij = (f_i − f_j)/(λ_i − λ_j)`` (the Daleckii–Krein formula). Unlike the derivative of an eigendecomposition it is
finite for equal eigenvalues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.linalg.krylov import KrylovSpace, combine, map_of
from laplace_plus.linalg.linear_maps import Matvec

SpectralFunction = Callable[[Tensor], Tensor]
"""An elementwise function of eigenvalues, made of torch operations; its argument is float64."""


class SpectralSpace(KrylovSpace):
    """A Krylov space of a symmetric operator, and functions of the operator on it."""

    def __init__(self, matvec: Matvec, start: Tensor, *, parameters: Iterable[Tensor] | None = None):
        super().__init__(map_of(matvec, start, symmetric=True, parameters=parameters), start)

    def evaluated(self, evaluate: Callable[[int | None], Tensor], depth: int) -> tuple[Tensor, Tensor]:
        """A result after ``depth`` steps, and its errors ``[batch]``.

        ``evaluate`` gives the result ``[batch, k]`` at a depth, or at the present one (None). The error is the norm of
        its change over the last quarter of the steps: zero if the space is invariant, infinite after one step.
        """
        self.extend(depth)
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

    def parameter_gradients(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The derivative of ``Σ ⟨M, Q A Qᵀ⟩`` for ``[batch, K, K]`` in A's tensors, with the spaces held fixed."""
        return self.operator.parameter_pullback(self.vectors, matrix.to(self.vectors.dtype) @ self.vectors)


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
