"""What the Krylov decompositions share: start vectors, products with them, and the Arnoldi process itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, OperatorError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, require_finite
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.orthogonalization import orthogonalize


class Products:
    """Products of an operator with stacks of vectors, in the form and type that its caller works in.

    One start vector ``[n]`` is multiplied as ``[n]``, several as one stack. Half-precision start vectors are multiplied
    in half precision; everything else is done in float32.

    Args:
        matvec: The operator.
        start: Start vectors, ``[..., n]``.
        m: Length of the vectors that the operator gives; n by default.
        rmatvec: The transpose.
        symmetric: Whether the operator is its own transpose.
        parameters: The tensors it depends on, where they are not to be found.
    """

    def __init__(
        self,
        matvec: Matvec,
        start: Tensor,
        *,
        m: int | None = None,
        rmatvec: Matvec | None = None,
        symmetric: bool = False,
        parameters: Iterable[Tensor] | None = None,
    ):
        self.map = LinearMap(matvec, start.shape[-1], m=m, rmatvec=rmatvec, symmetric=symmetric, parameters=parameters)
        self.has_transpose = symmetric or rmatvec is not None or isinstance(matvec, Operator)
        self.single = start.ndim == 1
        self.batch = start.shape[:-1]
        self.outer, self.inner = start.dtype, working_type(start.dtype)

    def stacked(self, vectors: Tensor) -> Tensor:
        """``[..., n]`` as ``[batch, n]`` in the working type, without a graph."""
        return vectors.detach().reshape(-1, vectors.shape[-1]).to(self.inner)

    def __call__(self, vectors: Tensor) -> Tensor:
        """``A v`` for ``[batch, n]``."""
        return self._given_back(self.map(self._handed(vectors)))

    def transposed(self, vectors: Tensor) -> Tensor:
        """``Aᵀ u`` for ``[batch, m]``."""
        return self._given_back(self.map.transposed(self._handed(vectors)))

    def pullback(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``Aᵀ u``, and the derivative of ``Σ ⟨u, A v⟩`` in the operator's tensors."""
        product, gradients = self.map.pullback(self._handed(vectors), self._handed(cotangents))
        return self._given_back(product), gradients

    def parameter_pullback(self, vectors: Tensor, cotangents: Tensor) -> tuple[Tensor, ...]:
        """The derivative of ``Σ ⟨u, A v⟩`` over stacks ``[..., n]`` in the operator's tensors."""
        vectors, cotangents = vectors.flatten(0, -2).to(self.outer), cotangents.flatten(0, -2).to(self.outer)
        return self.map.parameter_pullback(vectors, cotangents)

    def _handed(self, vectors: Tensor) -> Tensor:
        return (vectors[0] if self.single else vectors).to(self.outer)

    def _given_back(self, product: Tensor) -> Tensor:
        return (product[None] if self.single else product).to(self.inner)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type of a recurrence: that of its vectors, but at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def start_vectors(v: Tensor, depth: int, dtype: torch.dtype | None) -> Tensor:
    """The start vectors in the type that was asked for.

    Raises:
        ConfigurationError: Something that is no stack of real floating-point vectors, or a depth below one.
    """
    if not isinstance(v, Tensor) or v.ndim == 0 or not v.is_floating_point() or v.numel() == 0:
        raise ConfigurationError(
            "These are no start vectors.",
            expected="a floating-point tensor [n], or a stack [..., n]",
            got=f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__,
        )
    if depth < 1:
        raise ConfigurationError("There is no such depth.", expected="depth ≥ 1", got=str(depth))
    return v if dtype is None else v.to(dtype)


@dataclass(frozen=True)
class Krylov:
    """An Arnoldi process that has ended, for ``[batch, n]`` start vectors; see :func:`krylov`."""

    vectors: Tensor  # [batch, K, n]
    hessenberg: Tensor  # [batch, K, K]
    residual: Tensor  # [batch, n]
    scale: Tensor  # [batch]
    rank: Tensor  # [batch]
    invariant: Tensor  # [batch], whether the Krylov space ended there


def krylov(products: Products, start: Tensor, depth: int, tolerance: float | None) -> Krylov:
    """The Arnoldi process with two passes of Gram–Schmidt, free of synchronisation with the device.

    Args:
        products: The operator.
        start: ``[batch, n]``.
        depth: K ≤ n.
        tolerance: Where ``‖w‖ ≤ tolerance · max_j ‖A q_j‖`` the Krylov space has ended; ten roundings by default. It
            has also ended where ``‖w‖`` is ten roundings of its own ``‖A q_k‖``: what is left is no direction at all.

    Returns:
        The decomposition, not truncated: rows beyond a vector's own rank are zero.
    """
    batch, n = start.shape
    limit = breakdown_limit(tolerance, start.dtype)
    norm = vector_norm(start)
    scale = norm.reciprocal()
    basis = start.new_empty(batch, depth, n)
    hessenberg = start.new_zeros(batch, depth, depth)
    residual, largest = torch.zeros_like(start), torch.zeros_like(norm)
    going = torch.ones_like(norm, dtype=torch.bool)
    rank = torch.zeros_like(norm, dtype=torch.int64)
    vector = start * scale[:, None]
    for k in range(depth):
        basis[:, k] = vector
        product = products(vector)
        length = vector_norm(product)
        largest = torch.maximum(largest, length)
        rest, hessenberg[:, : k + 1, k] = orthogonalize(basis[:, : k + 1], product)
        size = vector_norm(rest)
        residual = torch.where(going[:, None], rest, residual)
        rank += going
        # NaN goes on, and is reported at the end
        going = going & ~(size <= torch.maximum(limit * largest, breakdown_limit(None, start.dtype) * length))
        if k + 1 < depth:
            hessenberg[:, k + 1, k] = torch.where(going, size, 0.0)
            vector = torch.where(going[:, None], rest / size[:, None], 0.0)
    return Krylov(basis, hessenberg, residual, scale, rank, ~going | (rank == n))


def breakdown_limit(tolerance: float | None, dtype: torch.dtype) -> float:
    """The relative size below which a new direction is rounding.

    Raises:
        ConfigurationError: A negative tolerance.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ConfigurationError("There is no such tolerance.", expected="tolerance ≥ 0", got=str(tolerance))
    return 10 * torch.finfo(dtype).eps if tolerance is None else tolerance


def truncated_depth(name: str, scale: Tensor, rank: Tensor, *results: Tensor) -> int:
    """The largest rank of a batch, after checking what was computed: the one synchronisation with the device.

    Raises:
        OperatorError: A start vector of zero.
        NonFiniteError: NaN or infinity in a start vector or in a product.
    """
    if bool(torch.isinf(scale).any()):
        raise OperatorError(
            "A start vector is zero.",
            expected="vectors of positive norm",
            got=f"{int(torch.isinf(scale).sum())} of {scale.numel()} of norm zero",
            fix="Leave zero vectors out: they span no Krylov space.",
        )
    require_finite(name, scale, *results)
    return int(rank.max())


def require_symmetric(matrix: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check ``Q A Qᵀ``, which is symmetric if A is: a test that costs no product.

    Args:
        matrix: ``[..., K, K]``.
        dtype: Type in which the products were computed, whose rounding counts; that of the matrix by default.

    Raises:
        OperatorError: ``max |H − Hᵀ| > √eps · max |H|``.
    """
    asymmetry, size = (matrix - matrix.mT).abs().amax(dim=(-2, -1)), matrix.abs().amax(dim=(-2, -1))
    limit = torch.finfo(dtype or matrix.dtype).eps ** 0.5
    if bool((asymmetry > limit * size).any()):
        relative = float((asymmetry / size).max())
        raise OperatorError(
            "The operator is not symmetric.",
            expected=f"uᵀAv = vᵀAu to a relative {limit:.0e}",
            got=f"a relative difference of {relative:.1e} on its Krylov space",
            fix="Symmetrise it, use arnoldi, or pass check_symmetry=False if this is rounding in the operator.",
        )
