"""A few eigenpairs of a symmetric operator, each with a checked residual, by thick-restart Lanczos.

K. Wu and H. Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM Journal on Matrix
Analysis and Applications 2000. A single start vector has one direction in each eigenspace. Two measures find multiple
eigenvalues: the process continues with a random vector when its space becomes invariant, and it is repeated in the
complement of the pairs found until that finds nothing better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError
from laplace_plus.kernels import orthogonalize, vector_norm
from laplace_plus.linalg.estimates import draw_probes, working_type
from laplace_plus.linalg.krylov import product_length
from laplace_plus.linalg.linear_maps import (
    LinearMap,
    Matvec,
    attach_one,
    number_type,
    require_adjoint,
    require_finite,
    without_autocast,
)

Which = Literal["largest", "smallest", "magnitude"]

_COLUMNS = 2**14
"""Entries of each vector that a restart combines at a time, for which it needs no second basis."""


@dataclass(frozen=True)
class PartialEigen:
    """Eigenpairs ``A u = λ u`` with ``uᵀu = 1``.

    Attributes:
        values: λ, ``[j]``, the most wanted first; j is smaller than k if fewer converged. Differentiable.
        vectors: u by rows, ``[j, n]``, orthonormal; not differentiable.
        residuals: ``‖A u − λ u‖``, ``[j]``, from products with the returned vectors.
        matvecs: Number of operator–vector products.
        converged: Whether all requested pairs are returned.
    """

    values: Tensor
    vectors: Tensor
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
    generator: torch.Generator | None = None,
    parameters: Iterable[Tensor] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> PartialEigen:
    """The k largest, smallest or largest-in-magnitude eigenpairs of a symmetric operator.

    Thick-restart Lanczos with full re-orthogonalisation. Multiple eigenvalues are found with their multiplicity: the
    search is repeated in the complement of the pairs found, from a random vector, until it finds nothing better. It
    reads two numbers from the device in each step. If ``subspace`` ≥ n, one product with all n unit vectors gives the
    pairs exactly up to rounding.

    The eigenvalues are differentiable in the tensors that the operator depends on, ``dλ = uᵀ (dA) u``, at the cost of
    one vector–Jacobian product of k vectors. Where an eigenvalue is multiple, the derivative exists for functions that
    treat its copies alike, such as their sum. The eigenvectors are not differentiable, because their derivative depends
    on the eigenvectors that were not computed; use :func:`~laplace_plus.linalg.lanczos.lanczos` for that.

    Args:
        matvec: A, a symmetric operator on row-stacked vectors.
        n: Its size.
        k: Number of pairs, from 1 to n.
        which: ``"largest"``, ``"smallest"`` or ``"magnitude"``.
        tolerance: A pair is returned if ``‖A u − λ u‖ ≤ tolerance · ‖A‖``; by default eps^(2/3), which is 4e-11 in
            float64 and 2e-5 in float32.
        max_restarts: Cap on restarts; each costs at most ``subspace`` products.
        subspace: Number of vectors to store; by default the larger of 2k + 1 and k + 20.
        generator: Source of the randomness.
        parameters: The tensors to differentiate in.
        dtype: Type of the vectors.
        device: Device of the vectors.

    Raises:
        ConfigurationError: Bad sizes or option.
        OperatorError: An operator of another shape or type, or one that is not symmetric.
        NonFiniteError: NaN or infinity in a product.

    Example:
        >>> import torch
        >>> a = torch.diag(torch.tensor([3.0, 1.0, 3.0, 2.0], dtype=torch.float64))
        >>> result = eigsh(lambda v: v @ a, 4, 2, generator=torch.Generator().manual_seed(0))
        >>> [round(x, 6) for x in result.values.tolist()], result.converged
        ([3.0, 3.0], True)
    """
    checks.count("n", n)
    checks.count("k", k)
    checks.choice("which", which, get_args(Which))
    checks.count("max_restarts", max_restarts, 0)
    subspace = checks.count("subspace", max(2 * k + 1, k + 20) if subspace is None else subspace, k + 2)
    if tolerance is not None:
        checks.number("tolerance", tolerance, least=0.0)
    if k > n:
        raise ConfigurationError(f"eigsh gives at most {n} values.", expected=f"k <= {n}", got=f"k = {k}")
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, symmetric=True, parameters=parameters, dtype=dtype)
    wide, eps = working_type(dtype), torch.finfo(dtype).eps
    random = partial(draw_probes, "gaussian", 1, n, generator=generator, dtype=wide, device=device)
    # residuals below a few units of rounding cannot be reached
    level = eps ** (2 / 3) if tolerance is None else max(tolerance, 10 * eps)
    with torch.no_grad():
        search = _ThickRestart(operator, which, level, subspace, max_restarts, random, dtype)
        complete = search.find(random()[0], k)
        vectors = search.vectors
        products = operator(vectors) if len(vectors) else vectors
        values = (vectors * products).sum(dim=-1)
        residuals = vector_norm(products - values[:, None] * vectors)
        good = residuals <= 2 * level * search.norm
        values, vectors, residuals = values[good], vectors[good], residuals[good]
    converged, matvecs = complete and bool(good.all()), operator.matvecs

    def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
        return operator.parameter_pullback(vectors, cotangent[:, None] * vectors)

    return PartialEigen(attach_one(values, operator.tensors, pullback), vectors, residuals, matvecs, converged)


@dataclass
class _ThickRestart:
    """A search for the outermost eigenpairs of a symmetric operator; see :func:`eigsh` for its options.

    It finds ``values [j]``, the most wanted first, in float64 on the CPU, and ``vectors [j, n]``; ``norm`` is a lower
    bound of ‖A‖.
    """

    operator: LinearMap
    which: Which
    level: float
    subspace: int
    restarts: int
    random: Callable[[], Tensor]
    dtype: torch.dtype
    norm: float = 0.0

    def find(self, start: Tensor, k: int) -> bool:
        """Whether k pairs converged, and a search from a random vector found nothing better."""
        n = len(start)
        if self.subspace >= n:
            self._solve_whole(torch.eye(n).to(start), k)
            return True
        self.values, self.vectors = torch.zeros(0, dtype=torch.float64), start.new_zeros(0, n)
        complete = self._search(start, k, None)
        while complete and len(self.values) < n:
            # the complement may contain another copy of an eigenvalue that was found
            last, found = self.values[k - 1], len(self.values)
            complete = self._search(self.random()[0], 1, last)
            rounding = 10 * torch.finfo(start.dtype).eps * self.norm
            if len(self.values) == found or self._key(self.values[-1]) <= self._key(last) + rounding:
                break
            self._sort()
        self._sort()
        self.values, self.vectors = self.values[:k], self.vectors[:k]
        return complete

    def _solve_whole(self, identity: Tensor, k: int) -> None:
        """Find the pairs from products with all unit vectors at once, as many as an iteration would take."""
        matrix = self.operator(identity)
        lengths = product_length(matrix)
        require_finite("The search for eigenpairs", lengths)
        self.norm = float(lengths.max())
        require_adjoint(matrix, matrix.mT, self.norm, self.dtype)
        values, vectors = torch.linalg.eigh(matrix.double().cpu())
        self.norm = max(self.norm, float(values.abs().max()))
        chosen = self._order(values)[:k]
        self.values, self.vectors = values[chosen], vectors.T[chosen].to(identity)

    def _sort(self) -> None:
        order = self._order(self.values)
        self.values, self.vectors = self.values[order], self.vectors[order.to(self.vectors.device)]

    def _key(self, values: Tensor) -> Tensor:
        return {"largest": values, "smallest": -values, "magnitude": values.abs()}[self.which]

    def _order(self, values: Tensor) -> Tensor:
        return self._key(values).argsort(descending=True, stable=True)

    def _search(self, start: Tensor, k: int, threshold: Tensor | None) -> bool:
        """Find k pairs in the complement of the known ones, or show that none exceeds a threshold."""
        known, n = self.vectors.shape
        free = n - known
        k, size = min(k, free), min(self.subspace, free)
        basis = start.new_zeros(known + size, n)
        basis[:known] = self.vectors
        # Q A Qᵀ: on and above the diagonal from products, below it as it follows from symmetry.
        matrix = start.new_zeros(size + 1, size)
        vector, kept, beta = self._unit(start, basis[:known]), 0, 0.0
        while True:
            for j in range(kept, size):
                basis[known + j] = vector
                product = self.operator(vector)
                rest, coefficients = orthogonalize(basis[: known + j + 1], product)
                matrix[: j + 1, j] = coefficients[known:]
                lengths = torch.stack([product_length(product), vector_norm(rest)])
                require_finite("The search for eigenpairs", lengths)
                length, beta = lengths.tolist()
                self.norm = max(self.norm, length)
                if beta > 10 * torch.finfo(start.dtype).eps * self.norm:
                    vector = rest / beta
                else:
                    beta = 0.0
                    if j + 1 < free:
                        vector = self._unit(self.random()[0], basis[: known + j + 1])
                matrix[j + 1, j] = beta
            square = matrix[:size]
            require_adjoint(square, square.mT, self.norm, self.dtype)
            values, vectors = torch.linalg.eigh(square.double().cpu(), UPLO="U")
            order = self._order(values)
            values, vectors = values[order], vectors[:, order]
            residuals = beta * vectors[-1].abs()
            self.norm = max(self.norm, float(values.abs().max()))
            good = residuals <= self.level * self.norm
            done = bool(good[:k].all())
            beaten = threshold is not None and bool(self._key(values)[0] + residuals[0] < self._key(threshold))
            if done or beaten or self.restarts == 0:
                if not beaten:
                    chosen = torch.nonzero(good[:k])[:, 0]
                    self.vectors = torch.cat([self.vectors, vectors[:, chosen].T.to(basis) @ basis[known:]])
                    self.values = torch.cat([self.values, values[chosen]])
                return done or beaten
            self.restarts -= 1
            kept = min(k + (size - k) // 2, size - 1)
            turn = vectors[:, :kept].to(basis).T
            for columns in basis[known:].split(_COLUMNS, 1):  # in place
                columns[:kept] = turn @ columns
            matrix.zero_()
            matrix[:kept, :kept] = torch.diag(values[:kept]).to(basis)
            matrix[kept, :kept] = beta * vectors[-1, :kept].to(basis)

    def _unit(self, vector: Tensor, basis: Tensor) -> Tensor:
        """A unit vector orthogonal to the basis."""
        for _ in range(2):
            vector = orthogonalize(basis, vector / vector_norm(vector))[0]
        return vector / vector_norm(vector)
