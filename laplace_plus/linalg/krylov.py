"""What the Krylov decompositions share: start vectors, products with them, and the Arnoldi process itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.errors import OperatorError
from laplace_plus.kernels import three_term_update, vector_norm
from laplace_plus.linalg.arguments import require_tolerance, working_type
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


@dataclass(frozen=True)
class Krylov:
    """A Krylov process that has ended, for ``[batch, n]`` start vectors."""

    vectors: Tensor  # [batch, K, n], zero beyond a vector's own rank
    hessenberg: Tensor  # [batch, K, K]
    residual: Tensor  # [batch, n]
    scale: Tensor  # [batch]
    rank: Tensor  # [batch]
    invariant: Tensor  # [batch], whether the Krylov space ended there


class ArnoldiProcess:
    """The Arnoldi process with full re-orthogonalisation; it can go on where it paused.

    Gram–Schmidt runs twice. With a symmetric operator the three-term recurrence leaves nothing but rounding along the
    other vectors, so that one run after it does as well, unless what is left is of the size of rounding itself. To see
    that costs nothing on the CPU, where this halves the work; elsewhere nothing waits for the device.

    Args:
        products: The operator.
        start: ``[batch, n]``.
        tolerance: Where ``‖w‖ ≤ tolerance · max_j ‖A q_j‖`` the Krylov space has ended; ten roundings by default. It
            has also ended where ``‖w‖`` is ten roundings of its own ``‖A q_k‖``: what is left is no direction at all.
    """

    def __init__(self, products: Products, start: Tensor, tolerance: float | None = None):
        batch, self._n = start.shape
        self._products = products
        self._limit, self._rounding = (breakdown_limit(t, start.dtype) for t in (tolerance, None))
        norm = vector_norm(start)
        self._scale = norm.reciprocal()
        self._basis, self._hessenberg = start.new_empty(batch, 0, self._n), start.new_zeros(batch, 0, 0)
        self._residual, self._largest = torch.zeros_like(start), torch.zeros_like(norm)
        self._going = torch.ones_like(norm, dtype=torch.bool)
        self._rank = torch.zeros_like(norm, dtype=torch.int64)
        self._next, self._size = start * self._scale[:, None], torch.zeros_like(norm)

    def extend(self, depth: int) -> Krylov:
        """The decomposition after as many steps in all; ``depth`` ≤ n, and not less than before."""
        done = self._basis.shape[1]
        basis = self._basis.new_empty(len(self._basis), depth, self._n)
        hessenberg = self._hessenberg.new_zeros(len(basis), depth, depth)
        basis[:, :done], hessenberg[:, :done, :done] = self._basis, self._hessenberg
        self._basis, self._hessenberg = basis, hessenberg
        for k in range(done, depth):
            if k:
                hessenberg[:, k, k - 1] = self._size
            basis[:, k] = self._next
            product = self._products(self._next)
            length = product_length(product, k)
            self._largest = torch.maximum(self._largest, length)
            rest, hessenberg[:, : k + 1, k] = self._outside(product, k)
            size = vector_norm(rest)
            self._residual = kept_where(self._going, rest, self._residual)
            self._rank = self._rank + self._going
            # NaN goes on, and is reported at the end
            small = torch.maximum(self._limit * self._largest, self._rounding * length)
            self._going = self._going & ~ended(size, small)
            self._size = torch.where(self._going, size, 0.0)
            if k + 1 < self._n:
                self._next = rest * torch.where(self._going, size.reciprocal(), 0.0)[:, None]
        invariant = ~self._going | (self._rank == self._n)
        return Krylov(basis, hessenberg, self._residual, self._scale, self._rank, invariant)

    def _outside(self, product: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """What remains of ``A q_k`` outside of the vectors so far, and its coefficients in these."""
        if not self._products.map.symmetric or product.device.type != "cpu":
            return orthogonalize(self._basis[:, : k + 1], product)
        previous = (self._basis[:, k - 1], self._size) if k else (None, None)
        rest, alpha, size = three_term_update(product, self._next, *previous)
        tiny = bool((size < torch.finfo(size.dtype).eps ** 0.5 * self._largest).any())
        rest, coefficients = orthogonalize(self._basis[:, : k + 1], rest, passes=2 if tiny else 1)
        coefficients[:, k] += alpha
        if k:
            coefficients[:, k - 1] += self._size
        return rest, coefficients


def product_length(product: Tensor, step: int) -> Tensor:
    """``‖A q‖``, ``[batch]``; NaN where the first product's squares underflow, which must not pass for a zero."""
    length = vector_norm(product)
    return length if step else torch.where((length == 0) & (product != 0).any(-1), torch.nan, length)


def ended(size: Tensor, small: Tensor) -> Tensor:
    """Where a Krylov space has ended: neither NaN nor an overflow counts, so that both are reported later."""
    return (size <= small) & (small < torch.inf)


def kept_where(going: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` for the vectors that go on, ``old`` for the others; ``[batch, n]``."""
    if going.device.type == "cpu" and bool(going.all()):  # a look is free there, and a copy is not
        return new
    return torch.where(going[:, None], new, old)


def breakdown_limit(tolerance: float | None, dtype: torch.dtype) -> float:
    """The relative size below which a new direction is rounding.

    Raises:
        ConfigurationError: A negative tolerance, or one that is not finite.
    """
    require_tolerance(tolerance=tolerance)
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
