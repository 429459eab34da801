"""A few eigenpairs or singular triplets of an operator: only those whose residual was checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.arguments import (
    require_choice,
    require_count,
    require_tolerance,
    without_autocast,
    working_type,
)
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, number_type
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.thick_restart import ThickRestart, Which


@dataclass(frozen=True)
class PartialEigen:
    """Eigenpairs ``A u = λ u`` with ``uᵀu = 1``.

    Attributes:
        values: λ, ``[j]``, the most wanted first; j is smaller than k if fewer converged. Differentiable.
        vectors: u by rows, ``[j, n]``, orthonormal; not differentiable.
        residuals: ``‖A u − λ u‖``, ``[j]``, from products with the returned vectors.
        matvecs: Number of operator-vector products.
        converged: Whether all that were asked for are there.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    matvecs: int
    converged: bool


@dataclass(frozen=True)
class PartialSVD:
    """Singular triplets ``A v = σ u`` and ``Aᵀ u = σ v`` with ``uᵀu = vᵀv = 1``.

    Attributes:
        values: σ, ``[j]``, the largest first; j is smaller than k if fewer converged. Differentiable.
        left: u by rows, ``[j, m]``, orthonormal; not differentiable.
        right: v by rows, ``[j, n]``, orthonormal; not differentiable.
        residuals: The larger of ``‖A v − σ u‖`` and ``‖Aᵀ u − σ v‖``, ``[j]``, from products with what is returned.
        matvecs: Number of operator-vector products, transposed ones included.
        converged: Whether all that were asked for are there.
    """

    values: Tensor
    left: Tensor
    right: Tensor
    residuals: Tensor
    matvecs: int
    converged: bool


@without_autocast
def eigsh(
    matvec: Matvec,
    n: int,
    k: int,
    *,
    which: Which = "largest",
    tolerance: float | None = None,
    max_restarts: int = 300,
    subspace: int | None = None,
    v0: Tensor | None = None,
    generator: torch.Generator | None = None,
    parameters: Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PartialEigen:
    """The k largest, smallest or largest-in-magnitude eigenpairs of a symmetric operator.

    Thick-restart Lanczos with full re-orthogonalisation. Multiple eigenvalues are found with their multiplicity: the
    search is repeated in the complement of what was found, from a random vector, until nothing better turns up. It
    reads two numbers from the device in each step. Exact, up to rounding, if ``subspace`` ≥ n.

    The eigenvalues can be differentiated in the tensors that the operator depends on, ``dλ = uᵀ (dA) u``, at the cost
    of one vector–Jacobian product of k vectors. Where an eigenvalue is multiple, that derivative exists for functions
    that treat its copies alike, like their sum. The eigenvectors are not differentiable: their derivative depends on
    the eigenvectors that were not computed; use :func:`~laplace_plus.linalg.lanczos.lanczos` for that.

    Args:
        matvec: A, a symmetric operator on row-stacked vectors.
        n: Its size.
        k: Number of pairs ≥ 1; at most n are returned.
        which: ``"largest"``, ``"smallest"`` or ``"magnitude"``.
        tolerance: A pair is returned if ``‖A u − λ u‖ ≤ tolerance · ‖A‖``; by default eps^(2/3), which is 4e-11 in
            float64 and 2e-5 in float32.
        max_restarts: Cap on restarts; each costs at most ``subspace`` products.
        subspace: Number of vectors to store; by default the larger of 2k + 1 and k + 20.
        v0: Start vector ``[n]``; random by default.
        generator: Source of the random vectors.
        parameters: The tensors to differentiate in, where they are not to be found from the operator.
        dtype: Type of the vectors; by default that of ``v0`` or of the operator. Half precision is for products only.
        device: Where to work; by default where ``v0`` or the operator is.

    Raises:
        ConfigurationError: Sizes, an option or a start vector that make no sense.
        OperatorError: An operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a product.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([3.0, 1.0, 3.0, 2.0], dtype=torch.float64))
        >>> result = eigsh(lambda v: v @ a, 4, 2, generator=torch.Generator().manual_seed(0))
        >>> [round(x, 6) for x in result.values.tolist()], result.converged
        ([3.0, 3.0], True)
    """
    require_choice("which", which, Which)
    operator = LinearMap(matvec, n, symmetric=True, parameters=parameters)
    outer, random, start = _vectors(matvec, n, n, k, max_restarts, v0, generator, dtype, device)
    level = _tolerance(tolerance, outer)
    with torch.no_grad():
        found = ThickRestart(
            lambda v: operator(v.to(outer)).to(start.dtype),
            start,
            min(k, n),
            which,
            lambda values, norm: torch.full_like(values, level * norm),
            subspace=_subspace(k, subspace),
            max_restarts=max_restarts,
            random=random,
            dtype=outer,
        )
        vectors = found.vectors
        products = operator(vectors.to(outer)).to(start.dtype) if vectors.shape[0] else vectors
        values = (vectors * products).sum(dim=-1)
        residuals = vector_norm(products - values[:, None] * vectors)
        good = residuals <= 2 * level * found.norm
        values, vectors, residuals = values[good], vectors[good], residuals[good]
    converged = found.complete and bool(good.all())
    matvecs = operator.matvecs

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        (cotangent,) = cotangents
        if cotangent is None or not vectors.shape[0]:
            return [None] * len(operator.tensors)
        return operator.parameter_pullback(vectors.to(outer), (cotangent[:, None] * vectors).to(outer))

    (values,) = attach([values], operator.tensors, pullback)
    return PartialEigen(values, vectors, residuals, matvecs, converged)


@without_autocast
def svds(
    matvec: Matvec,
    n: int,
    k: int,
    *,
    m: int | None = None,
    rmatvec: Matvec | None = None,
    tolerance: float | None = None,
    max_restarts: int = 300,
    subspace: int | None = None,
    v0: Tensor | None = None,
    generator: torch.Generator | None = None,
    parameters: Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PartialSVD:
    """The k largest singular values of an operator, with their vectors.

    Thick-restart Lanczos on the smaller of AᵀA and AAᵀ, followed by a Rayleigh–Ritz step on A itself; see :func:`eigsh`
    for multiplicities and costs (a step is a product with A and one with Aᵀ). Squaring limits it: triplets with ``σ /
    σ_max`` below about √eps are not resolved, fail the check of their residual, and are not returned.

    The singular values can be differentiated in the tensors that the operator depends on, ``dσ = uᵀ (dA) v``; the
    vectors are not differentiable.

    Args:
        matvec: A, an operator on row-stacked vectors ``[..., n] -> [..., m]``.
        n: Length of the vectors that it takes.
        k: Number of triplets ≥ 1; at most min(m, n) are returned.
        m: Length of the vectors that it gives; by default the operator's, or n for a plain callable.
        rmatvec: Aᵀ; found by differentiating through ``matvec`` if it is not given.
        tolerance: A triplet is returned if both of its residuals are at most ``tolerance · σ_max``; by default
            eps^(2/3).
        max_restarts: Cap on restarts; each costs at most ``subspace`` products of either kind.
        subspace: Number of vectors to store; by default the larger of 2k + 1 and k + 20.
        v0: Start vector of length min(m, n) – ``[n]`` if n ≤ m, or else ``[m]``; random by default.
        generator: Source of the random vectors.
        parameters: The tensors to differentiate in, where they are not to be found from the operator.
        dtype: Type of the vectors; by default that of ``v0`` or of the operator. Half precision is for products only.
        device: Where to work; by default where ``v0`` or the operator is.

    Raises:
        ConfigurationError: Sizes or a start vector that make no sense.
        OperatorError: An operator of another shape or type, or a transpose that is none.
        NonFiniteError: NaN or infinity in a product.

    Example:
        >>> import torch
        >>> a = torch.tensor([[3.0, 0.0], [4.0, 5.0], [0.0, 0.0]], dtype=torch.float64)
        >>> result = svds(lambda v: v @ a.T, 2, 1, m=3, generator=torch.Generator().manual_seed(0))
        >>> round(float(result.values[0]), 6)
        6.708204
    """
    if m is None:
        m = matvec.shape[0] if isinstance(matvec, Operator) else n
    operator = LinearMap(matvec, n, m=m, rmatvec=rmatvec, parameters=parameters)
    size = min(m, n)
    outer, random, start = _vectors(matvec, n, size, k, max_restarts, v0, generator, dtype, device)
    inner = start.dtype
    level, eps = _tolerance(tolerance, outer), torch.finfo(outer).eps

    scale = 1.0

    def multiply(vectors: Tensor) -> Tensor:
        return operator(vectors.to(outer)).to(inner) / scale

    def transposed(vectors: Tensor) -> Tensor:
        return operator.transposed(vectors.to(outer)).to(inner) / scale

    def limit(values: Tensor, norm: float) -> Tensor:
        # ‖Aᵀu − σv‖ = ‖AᵀAv − σ²v‖ / σ
        return torch.clamp(level * (norm * values.clamp(min=0)).sqrt(), min=10 * eps * norm)

    with torch.no_grad():
        # The first product tells the tensors that A depends on, and a power of two to divide by: AᵀA holds squares.
        largest = float(multiply(start if size == n else start.new_ones(n)).abs().amax())
        scale = 2.0 ** math.frexp(largest)[1] if 0 < largest < math.inf else 1.0
        found = ThickRestart(
            (lambda v: transposed(multiply(v))) if n <= m else (lambda u: multiply(transposed(u))),
            start,
            min(k, size),
            "largest",
            limit,
            subspace=_subspace(k, subspace),
            max_restarts=max_restarts,
            random=random,
            dtype=outer,
            symmetric="AᵀA",
        )
        if found.vectors.shape[0]:
            image = multiply(found.vectors) if n <= m else transposed(found.vectors)
            rotation, values, other = torch.linalg.svd(image, full_matrices=False)
            pair = (other, rotation.mT @ found.vectors)
            left, right = pair if n <= m else pair[::-1]
            residuals = torch.maximum(
                vector_norm(multiply(right) - values[:, None] * left),
                vector_norm(transposed(left) - values[:, None] * right),
            )
        else:
            left, right, values, residuals = start.new_zeros(0, m), start.new_zeros(0, n), start[:0], start[:0]
        good = residuals <= 2 * level * found.norm**0.5
        values, residuals = values * scale, residuals * scale
        left, right, values, residuals = left[good], right[good], values[good], residuals[good]
    converged = found.complete and bool(good.all())
    matvecs = operator.matvecs

    def pullback(outputs: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        (cotangent,) = cotangents
        if cotangent is None or not right.shape[0]:
            return [None] * len(operator.tensors)
        return operator.parameter_pullback(right.to(outer), (cotangent[:, None] * left).to(outer))

    (values,) = attach([values], operator.tensors, pullback)
    return PartialSVD(values, left, right, residuals, matvecs, converged)


def _vectors(
    matvec: Matvec,
    n: int,
    size: int,
    k: int,
    max_restarts: int,
    v0: Tensor | None,
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[torch.dtype, Callable[[], Tensor], Tensor]:
    """The type of the products, a source of random vectors, and the start vector."""
    require_count("n", n, 1)
    require_count("k", k, 1)
    require_count("max_restarts", max_restarts, 0)
    if v0 is not None:
        if v0.shape != (size,) or not v0.is_floating_point() or not float(v0.norm()) > 0:
            raise ConfigurationError(
                "This is no start vector.",
                expected=f"a floating-point tensor [{size}] other than zero",
                got=f"{v0.dtype} {tuple(v0.shape)}",
            )
        dtype, device = v0.dtype if dtype is None else dtype, v0.device if device is None else device
    outer, device = number_type(matvec, dtype, device)
    inner = working_type(outer)

    def random() -> Tensor:
        source = device if generator is None else generator.device
        return torch.randn(size, generator=generator, dtype=inner, device=source).to(device)

    return outer, random, random() if v0 is None else v0.detach().to(device, inner)


def _tolerance(tolerance: float | None, dtype: torch.dtype) -> float:
    require_tolerance(tolerance=tolerance)
    eps = torch.finfo(dtype).eps
    # nothing below a few roundings can be met
    return eps ** (2 / 3) if tolerance is None else max(tolerance, 10 * eps)


def _subspace(k: int, subspace: int | None) -> int:
    size = max(2 * k + 1, k + 20) if subspace is None else subspace
    if size < k + 2:
        raise ConfigurationError("The subspace is too small.", expected=f"subspace ≥ k + 2 = {k + 2}", got=str(size))
    return size
