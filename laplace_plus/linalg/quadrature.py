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
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.adjoints import hessenberg_pullback
from laplace_plus.linalg.block_lanczos import block_lanczos
from laplace_plus.linalg.krylov import (
    ArnoldiProcess,
    combine,
    krylov_map,
    require_symmetric,
    stacked,
    truncated_depth,
)
from laplace_plus.linalg.lanczos import tridiagonal
from laplace_plus.linalg.linear_maps import LinearMap, Matvec
from laplace_plus.linalg.operators import Operator

SpectralFunction = Callable[[Tensor], Tensor]
"""An elementwise function of eigenvalues, made of torch operations; its argument is float64."""


class KrylovSpace:
    """Lanczos' process with full re-orthogonalisation for a stack of start vectors, which can be continued.

    Args:
        matvec: A, symmetric.
        start: ``[n]`` or ``[..., n]``, not zero.
        parameters: The tensors A depends on, if they cannot be found.

    Attributes:
        operator: A on stacks of vectors.
        vectors: Q by rows, ``[batch, K, n]``; zero beyond the rank of a space.
        diagonal: Diagonal of T, ``[batch, K]`` in float64.
        off_diagonal: Off-diagonal of T, ``[batch, K − 1]`` in float64.
        norm: ``[batch]`` norms of the start vectors, in float64.
        residual_norm: ``[batch]`` norms of the residuals, in float64.
        rank: ``[batch]`` dimensions of the spaces.
        requested: Depth that was requested; K is smaller where all spaces are invariant before.
        complete: Whether all spaces are invariant, so that more steps would change nothing.
    """

    def __init__(self, matvec: Matvec, start: Tensor, *, parameters: Iterable[Tensor] | None = None):
        self.operator = krylov_map(matvec, start, symmetric=True, parameters=parameters)
        rows = stacked(start)
        self.norm = vector_norm(rows).double()
        self.vectors = rows.new_empty(len(rows), 0, rows.shape[1])
        self._process, self._outer = ArnoldiProcess(self.operator, rows), start.dtype
        self.requested, self.complete = 0, False

    def extend(self, depth: int) -> None:
        """Continue to the given depth, at most n, with one synchronisation with the device at the end.

        Raises:
            OperatorError: A start vector of zero, or an operator that is not symmetric.
            NonFiniteError: NaN or infinity in a start vector or a product.
        """
        self.requested = depth = min(depth, self.operator.n)
        if self.complete or depth <= self.depth:
            return
        found = self._process.extend(depth)
        kept = truncated_depth("Lanczos' process", found.scale, found.rank, found.hessenberg, found.residual)
        if self._outer == found.vectors.dtype:  # half precision is too coarse for the check
            require_symmetric(found.hessenberg)
        self.vectors, self.rank = found.vectors[:, :kept], found.rank
        self._scale, self._residual = found.scale, found.residual
        self.residual_norm = vector_norm(found.residual).double()
        small = found.hessenberg[:, :kept, :kept].double()
        self.diagonal, self.off_diagonal = small.diagonal(dim1=-2, dim2=-1), small.diagonal(-1, dim1=-2, dim2=-1)
        self.complete = bool(found.invariant.all())

    @property
    def depth(self) -> int:
        """K, the largest rank."""
        return self.vectors.shape[1]

    def spectrum(self, depth: int | None = None) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[batch, k]`` and vectors ``[batch, k, k]`` of the leading part of T, in float64.

        Rows beyond the rank of a space are decoupled. Their eigenvalue is set to the Rayleigh quotient ``vᵀAv/‖v‖²``,
        which lies within the spectrum, where functions are defined.
        """
        depth = self.depth if depth is None else depth
        inside = torch.arange(depth, device=self.rank.device) < self.rank[:, None]
        diagonal = torch.where(inside, self.diagonal[:, :depth], self.diagonal[:, :1])
        values, vectors = torch.linalg.eigh(tridiagonal(diagonal, self.off_diagonal[:, : depth - 1]))
        return values, vectors

    def earlier(self) -> int | None:
        """The depth, three quarters of the present one, that results are compared with; None after one step."""
        return _earlier(self.depth)

    @property
    def matvecs(self) -> int:
        """Number of products."""
        return self.operator.matvecs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors requiring gradients that A depends on."""
        return self.operator.tensors

    def coordinates(self, f: SpectralFunction, depth: int | None = None) -> Tensor:
        """``‖v‖ f(T) e₁``, the coordinates ``[batch, k]`` of ``f(A) v`` in the basis Q, in float64."""
        values, vectors = self.spectrum(depth)
        return self.norm[:, None] * (vectors * (evaluate(f, values) * vectors[:, 0])[:, None, :]).sum(-1)

    def quadrature(self, f: SpectralFunction, depth: int | None = None) -> Tensor:
        """``‖v‖² e₁ᵀ f(T) e₁ ≈ vᵀ f(A) v``, ``[batch]`` in float64."""
        values, vectors = self.spectrum(depth)
        return self.norm.square() * (vectors[:, 0].square() * evaluate(f, values)).sum(-1)

    def quadrature_gradients(self, f: SpectralFunction, *, adjoint: bool) -> tuple[Tensor, ...]:
        """The derivative of the sum of :meth:`quadrature` in A's tensors.

        Args:
            f: The function.
            adjoint: Whether the Krylov spaces are differentiated as well, or held fixed.
        """
        if not self.tensors:
            return ()
        matrix = quadrature_gradient(self, f)
        return self.adjoint(matrix)[1] if adjoint else self.parameter_gradients(matrix)

    def combine(self, coefficients: Tensor) -> Tensor:
        """``Σ_k x_k q_k`` for ``[batch, K]`` in float64, as ``[batch, n]`` in the working type."""
        return combine(coefficients.to(self.vectors.dtype), self.vectors)

    def parameter_gradients(self, matrix: Tensor) -> tuple[Tensor, ...]:
        """The derivative of ``Σ ⟨M, Q A Qᵀ⟩`` for ``[batch, K, K]`` in A's tensors, with the spaces held fixed."""
        return self.operator.parameter_pullback(self.vectors, matrix.to(self.vectors.dtype) @ self.vectors)

    def adjoint(
        self, matrix: Tensor, vectors: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The derivative of the decomposition itself.

        Args:
            matrix: Symmetric cotangent of T, ``[batch, K, K]``; entries outside the band are ignored.
            vectors: Cotangent of Q.
            scale: Cotangent of ``1/‖v‖``.

        Returns:
            The gradients in the start vectors, ``[batch, n]``, and in A's tensors.
        """
        dtype = self.vectors.dtype
        matrix = matrix.to(dtype)
        band = tridiagonal(matrix.diagonal(dim1=-2, dim2=-1), matrix.diagonal(1, dim1=-2, dim2=-1))
        small = tridiagonal(self.diagonal, self.off_diagonal).to(dtype)
        ragged = self.rank if bool((self.rank < self.depth).any()) else None
        return hessenberg_pullback(
            self.operator,
            (self.vectors, small, self._residual, self._scale),
            (vectors, band, None, None if scale is None else scale.to(dtype)),
            rank=ragged,
            symmetric=True,
        )


def evaluate(f: SpectralFunction, values: Tensor) -> Tensor:
    """``f`` at eigenvalues, with a graph to the tensors that f itself depends on.

    Raises:
        ConfigurationError: f is not elementwise.
        NonFiniteError: f is NaN or infinite at an eigenvalue.
    """
    results = f(values.detach())
    if not isinstance(results, Tensor) or results.shape != values.shape or not results.is_floating_point():
        got = f"{results.dtype} {tuple(results.shape)}" if isinstance(results, Tensor) else type(results).__name__
        raise ConfigurationError(
            "The function of eigenvalues is not elementwise.",
            expected=f"a real tensor of shape {tuple(values.shape)}",
            got=got,
        )
    finite = torch.isfinite(results)
    if not bool(finite.all()):
        raise NonFiniteError(
            "The function is not finite on the operator's spectrum.",
            expected="a function that is defined between the smallest and the largest eigenvalue",
            got=f"{results[~finite][0].item()} at {values[~finite][0].item():.6g}",
        )
    return results.double()


def derivative(f: SpectralFunction, values: Tensor) -> Tensor:
    """``f′`` at eigenvalues, from automatic differentiation.

    Raises:
        ConfigurationError: torch cannot differentiate f.
    """
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        results = f(leaf)
        gradient = None
        if results.requires_grad:
            (gradient,) = torch.autograd.grad(results.sum(), leaf, allow_unused=True)
    if gradient is None:
        if bool((results == results.flatten()[:1]).all()):
            return torch.zeros_like(values)
        raise ConfigurationError(
            "torch cannot differentiate the function of eigenvalues.",
            expected="a function made of torch operations",
            got="a result that does not depend on its argument in the autograd graph",
        )
    return gradient.detach()


def divided_differences(f: SpectralFunction, left: Tensor, right: Tensor) -> Tensor:
    """``(f(x) − f(y))/(x − y)``, and f′ where x = y, for ``x [..., k]`` and ``y [..., l]``, as ``[..., k, l]``.

    The quotient loses digits where x and y are close. It is replaced by the mean of f′ between them, by Gauss–Legendre
    quadrature of order six, where f′ varies by less than 1 % between x and y and both agree to the accuracy of the
    quotient. At 1 % the error of the quadrature is below machine epsilon for functions as smooth as log and powers.
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


def quadrature_gradient(space: KrylovSpace, f: SpectralFunction) -> Tensor:
    """The symmetric derivative of :meth:`KrylovSpace.quadrature` in T, ``[batch, K, K]``."""
    values, vectors = space.spectrum()
    first = vectors[:, 0]
    inner = divided_differences(f, values, values) * first[:, :, None] * first[:, None, :]
    return space.norm.square()[:, None, None] * (vectors @ inner @ vectors.mT)


class BlockKrylovSpace:
    """One Krylov space that several start vectors share; see :func:`~laplace_plus.linalg.block_lanczos.block_lanczos`.

    Args:
        matvec: A, symmetric.
        start: X, ``[p, n]``.
        parameters: The tensors A depends on, if they cannot be found.

    Attributes:
        tensors: The tensors requiring gradients that A depends on.
        matvecs: Number of products.
        depth: Number of blocks.
        complete: Whether the space is invariant.
    """

    def __init__(self, matvec: Matvec, start: Tensor, *, parameters: Iterable[Tensor] | None = None):
        self._matvec, self._start = matvec, start
        self._map = LinearMap(matvec, start.shape[-1], symmetric=True, parameters=parameters, dtype=start.dtype)
        if torch.is_grad_enabled() and parameters is None and not isinstance(matvec, Operator):
            self._map(start[:1])  # the tensors are known after the first product
        self.tensors = self._map.tensors
        self.matvecs, self.depth, self.complete = self._map.matvecs, 0, False

    def extend(self, depth: int) -> None:
        """Run to the given depth from the start: the block process cannot be continued."""
        self._found = block_lanczos(self._matvec, self._start, depth, parameters=self.tensors)
        self.matvecs += self._found.matvecs
        self.depth, self.complete = len(self._found.block_sizes), self._found.converged

    def earlier(self) -> int | None:
        """As in :class:`KrylovSpace`."""
        return _earlier(self.depth)

    def _spectrum(self, depth: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues ``[k]`` and vectors ``[k, k]`` of T, and the start vectors in the eigenbasis ``[k, p]``."""
        size = sum(self._found.block_sizes[:depth])
        first = self._found.start.detach().double()
        values, vectors = torch.linalg.eigh(self._found.matrix.detach()[:size, :size].double())
        return values, vectors, vectors[: len(first)].mT @ first

    def quadrature(self, f: SpectralFunction, depth: int | None = None) -> Tensor:
        """``vᵀ f(A) v`` for each start vector, ``[p]`` in float64."""
        values, _, start = self._spectrum(depth)
        return (start.square() * evaluate(f, values)[:, None]).sum(0)

    def quadrature_gradients(self, f: SpectralFunction, *, adjoint: bool) -> tuple[Tensor, ...]:
        """The derivative of the sum of :meth:`quadrature` in A's tensors."""
        if not self.tensors:
            return ()
        values, vectors, start = self._spectrum(None)
        matrix = vectors @ (divided_differences(f, values, values) * (start @ start.mT)) @ vectors.mT
        matrix = matrix.to(self._found.matrix.dtype)
        if adjoint:
            return tuple(torch.autograd.grad(self._found.matrix, self.tensors, matrix))
        basis = self._found.vectors.detach()
        self.matvecs += len(basis)
        return self._map.parameter_pullback(basis, matrix @ basis)


def _earlier(depth: int) -> int | None:
    return max(1, depth - max(2, depth // 4)) if depth > 1 else None
