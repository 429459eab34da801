"""Projection onto the null space of an operator: a differentiable function, and three methods for many rows.

The methods compute ``P v = v − A⁺A v`` for a tall matrix A, such as the Jacobian of a network over a data set, with a
cutoff relative to the largest singular value:

* :class:`SVDProjection` forms A; exact, for small problems, and finds the rank; :class:`AutoProjection` takes it there;
* :class:`LSMRProjection` solves ``min ‖v − Aᵀz‖`` by LSMR on products with A (Fong and Saunders, 2011);
* :class:`AlternatingProjection` projects onto the null space of one batch of rows after the other, repeatedly (von
  Neumann, 1950; Miani et al., 2025), with the exact line search of Gearhart and Koshy (1989) after each sweep.

LSMR minimises the residual over the Krylov space. For the same number of products it is far ahead of sweeps where
batches have few rows or correlate with each other. Sweeps invert the Gram matrix of each batch, which takes one product
in each direction per row beforehand; they are ahead in the first sweeps where batches have many rows. Both are slow
where singular values span many orders of magnitude.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus._progress import progress_bar
from laplace_plus.checks import count, number
from laplace_plus.linalg.linear_maps import Matvec, require_finite, vectors_of, without_autocast
from laplace_plus.linalg.lsmr import LeastSquaresSolution, lsmr, other_length, solve_least_squares
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.solving import Problem, Status, attach_solution, where_used

_GRAM_RTOL = 5e-7
"""A Gram matrix in float64 separates singular values down to √eps ≈ 1.5e-8 of the largest from zero; 30 times that."""

_GRAM_SIZE = 256
"""Smallest dimension from which a Gram matrix is used; below, an SVD takes milliseconds."""

_FEW, _ENTRIES = 1024, 2**25
"""Rows or columns, and entries, up to which A is decomposed by default: in seconds, where LSMR may take minutes."""


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
    progress: bool = False,
) -> LeastSquaresSolution:
    """``P v = v - A⁺A v``, the orthogonal projection of v onto the null space of A.

    It is the residual ``v - Aᵀz`` of the least-squares problem ``z = argmin ‖Aᵀz - v‖``, which LSMR solves. A may have
    any shape and rank, and is only multiplied with. Costs as :func:`~laplace_plus.linalg.lsmr.lsmr`. With the cotangent
    ū and ``z_u = argmin ‖Aᵀz_u - ū‖`` the gradient is ``v̄ = P ū`` and ``Ā = -z_u (P v)ᵀ - z (P ū)ᵀ``, exact wherever
    the rank of A does not change; it takes one more solve.

    The arguments are those of :func:`~laplace_plus.linalg.lsmr`, with v ``[..., n]`` for b. The tolerances are 1e-12 in
    float64 by default, ``btol`` is that of v, and m is the number of rows, otherwise taken from an operator's shape or
    that of ``matvec(v)``.

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
    v = vectors_of("v", v)
    n = v.shape[-1]
    m, spent = other_length(m, matvec, 0, matvec, v)
    options: Any = {"conlim": conlim, "max_iterations": max_iterations, "progress": progress}
    options["default"] = 1e-12 if v.dtype == torch.float64 else None
    problem = Problem("project_null_space", v, min(m, n), atol=atol, rtol=btol, **options)
    A = problem.map(matvec, n, m=m, rmatvec=rmatvec, parameters=parameters)

    def project(problem: Problem) -> tuple[LeastSquaresSolution, Tensor]:
        """Z and P v."""
        z, found = solve_least_squares(A, problem, problem.rows.new_zeros(()), transposed=True)
        return found, problem.restore(problem.rows - A.transposed(z))

    def gradient(value: Tensor, cotangent: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        backward = problem.again(cotangent)
        found, projected = project(backward)
        backward.warn_unless_converged(found.residual)
        kept, z_kept = where_used(cotangent, value, z)
        return [projected], [(kept, -found.value), (projected, -z_kept)]

    found, projected = project(problem)
    z, matvecs = found.value, A.matvecs + spent
    return replace(found, value=attach_solution(projected, A, [v], gradient), matvecs=matvecs)


@dataclass(frozen=True)
class Projection:
    """Vectors projected onto the null space of A.

    Attributes:
        value: ``[k, n]``.
        residual: ``‖A P v‖ / (‖A‖ ‖v‖)``, ``[k]``. For an ill-conditioned A a small residual does not imply a small
            distance from the projection.
        iterations: Iterations or sweeps, ``[k]``.
        converged: Whether the tolerance was met, or rounding allows no more, ``[k]`` bool.
    """

    value: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor


@dataclass(frozen=True)
class Projector:
    """Projects row-stacked vectors ``[k, n]`` onto the null space of one matrix A, whose rank it may know exactly."""

    project: Callable[..., Projection]
    rank: int | None = None


class ProjectionMethod(ABC):
    """A method of projection, with its options."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("rtol", "tolerance") and value is not None:
                number(name, value, least=0.0, most=1.0)

    @abstractmethod
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> Projector:
        """The projector for ``A [m, n]``, or for its rows as operators ``[m_b, n]``, batch by batch."""


def _cutoff(given: float | None, dtype: torch.dtype) -> float:
    return (1e-12 if dtype == torch.float64 else 1e-6) if given is None else given


@dataclass(frozen=True)
class SVDProjection(ProjectionMethod):
    """Form A and decompose it.

    Args:
        rtol: Singular values of at most this fraction of the largest count as zero; 1e-12 in float64 and 1e-6 in
            float32 by default.
    """

    rtol: float | None = None

    @override
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> Projector:
        rows = whole.dense().double()
        require_finite("The projection", rows)
        values, basis, by_rows = row_space(rows, _cutoff(self.rtol, whole.dtype))
        scale = float(values.amax()) if len(values) else 1.0

        def project(vectors: Tensor, *, progress: bool = False) -> Projection:
            wide = vectors.double()
            for _ in range(2):  # the second pass removes rounding errors and the effect of V's loss of orthogonality
                inside = (wide @ rows.mT if by_rows else wide) @ basis.mT @ basis
                wide = wide - (inside @ rows if by_rows else inside)
            residual = (wide @ rows.mT).norm(dim=-1) / (scale * vectors.double().norm(dim=-1)).clamp(min=1e-300)
            ones = torch.ones(len(vectors), dtype=torch.int64, device=vectors.device)
            return Projection(wide.to(vectors.dtype), residual.to(vectors.dtype), ones, ones.bool())

        return Projector(project, len(values))


def row_space(rows: Tensor, rtol: float) -> tuple[Tensor, Tensor, bool]:
    """Singular values ``[r]`` of A ``[m, n]`` above a fraction of the largest, and its row space, for float64.

    With the cutoff of single precision they come from the eigenvectors of a Gram matrix, in a tenth of the time.
    Returns the values; orthonormal V ``[r, n]``, or coefficients ``W [r, m]`` with ``V = W A``, whichever is smaller;
    and whether it is W.
    """
    m, n = rows.shape
    if min(m, n) < _GRAM_SIZE or rtol < _GRAM_RTOL:
        _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
        by_rows = False
    else:
        gram = kernels.symmetric_update(rows.new_zeros(min(m, n), min(m, n)), rows.mT if m < n else rows)
        squares, columns = kernels.symmetric_eigen(gram)  # reads the lower triangle
        values, vectors, by_rows = squares.clamp(min=0).sqrt(), columns.mT, m < n
    kept = values > rtol * values.amax() if len(values) else values > 0
    values = values[kept]
    return values, vectors[kept] / values[:, None] if by_rows else vectors[kept], by_rows


@dataclass(frozen=True)
class LSMRProjection(ProjectionMethod):
    """Solve ``min ‖v − Aᵀz‖`` by LSMR, all vectors together; an iteration takes one product with A and one with Aᵀ.

    Args:
        tolerance: Of LSMR (its ``atol`` and ``btol``); 1e-12 in float64 and 1e-6 in float32 by default.
        conlim: The iteration ends when the estimated condition number exceeds this; 0 for no limit.
        max_iterations: Cap; by default that of :func:`~laplace_plus.linalg.lsmr`.
        refinements: Number of further solves that remove the rest of ``A v``: rounding leaves about ε‖A‖‖v‖, which
            matters in single precision. One in float32 and none in float64 by default; each takes as long as the first
            solve.
    """

    tolerance: float | None = None
    conlim: float = 1e8
    max_iterations: int | None = None
    refinements: int | None = None

    @override
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> Projector:
        return Projector(partial(self._project, whole))

    @torch.no_grad()
    def _project(self, rows: Operator, vectors: Tensor, *, progress: bool = False) -> Projection:
        caps = {"conlim": self.conlim, "max_iterations": self.max_iterations, "progress": progress}
        solver: dict[str, Any] = {"atol": self.tolerance, "btol": self.tolerance, **caps}
        found = project_null_space(rows, None, vectors, **solver)
        value, residual, iterations = found.value, found.residual, found.iterations
        default = 0 if vectors.dtype == torch.float64 else 1
        for _ in range(default if self.refinements is None else self.refinements):
            left = lsmr(rows, None, rows(value), **solver)
            value, iterations = value - left.value, iterations + left.iterations
            residual = kernels.vector_norm(rows(value))
        norms = (found.operator_norm * kernels.vector_norm(vectors)).clamp(min=torch.finfo(vectors.dtype).tiny)
        # A solve that stagnated is as accurate as rounding allows.
        converged = (found.statuses == int(Status.CONVERGED)) | (found.statuses == int(Status.STAGNATED))
        return Projection(value, residual / norms, iterations, converged)


@dataclass(frozen=True)
class AutoProjection(ProjectionMethod):
    """:class:`SVDProjection` where A has few rows or columns, else :class:`LSMRProjection`."""

    @override
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> Projector:
        m, n = whole.shape
        small = min(m, n) <= _FEW and m * n <= _ENTRIES
        return (SVDProjection() if small else LSMRProjection()).prepare(whole, parts)


@dataclass(frozen=True)
class AlternatingProjection(ProjectionMethod):
    """Project onto the null space of one batch of rows after the other.

    Stores the eigendecomposition of each batch's ``A_b A_bᵀ``: ``Σ m_b²`` numbers for batches of m_b rows.

    Args:
        tolerance: Sweeps end when the largest residual of a batch, ``‖A_b v‖ / (‖A_b‖ ‖v‖)``, is at most this; 1e-10 in
            float64 and 1e-5 in float32 by default.
        max_sweeps: Cap.
        accelerate: Whether an exact line search towards the null space follows each sweep.
        rtol: Eigenvalues of ``A_b A_bᵀ`` of at most this fraction of the largest count as zero; 1e-12 in float64 and
            1e-6 in float32 by default.
    """

    tolerance: float | None = None
    max_sweeps: int = 1000
    accelerate: bool = True
    rtol: float | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        count("max_sweeps", self.max_sweeps)

    @override
    @torch.no_grad()
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> Projector:
        batches = []
        for part in parts():
            gram = (part @ part.T).dense().double()
            values, vectors = kernels.symmetric_eigen((gram + gram.mT) / 2)
            largest = values.amax().clamp(min=0)
            kept = values > _cutoff(self.rtol, part.dtype) * largest
            inverse = values[kept].reciprocal().to(part.dtype)
            batches.append((part, vectors[:, kept].to(part.dtype), inverse, float(largest.sqrt())))
        return Projector(partial(self._project, batches), len(batches[0][2]) if len(batches) == 1 else None)

    @torch.no_grad()
    def _project(self, batches: list[_Batch], vectors: Tensor, *, progress: bool = False) -> Projection:
        default = 1e-10 if vectors.dtype == torch.float64 else 1e-5
        tolerance = default if self.tolerance is None else self.tolerance
        v, norms = vectors.clone(), kernels.vector_norm(vectors).clamp(min=torch.finfo(vectors.dtype).tiny)
        sweeps = torch.zeros(len(v), dtype=torch.long, device=v.device)
        residual, active = torch.full_like(norms, torch.inf), torch.ones_like(norms, dtype=torch.bool)
        for _ in progress_bar(range(self.max_sweeps), enabled=progress, description="alternating projections"):
            before = v[active]
            # What one sweep subtracts is summed. A difference of v before and after would contain rounding errors in
            # the null space, which the line search would amplify once the step is of the size √ε ‖v‖.
            seen, moved = torch.zeros_like(norms[active]), torch.zeros_like(before)
            for part, basis, inverse, norm in batches:
                rows = part(before - moved)
                seen = torch.maximum(seen, rows.norm(dim=-1) / (norm * norms[active])) if norm > 0 else seen
                moved = moved + part.T((rows @ basis * inverse) @ basis.mT)
            residual[active] = seen  # of each batch before its own projection in this sweep
            v[active] = before - (_step(before, moved) if self.accelerate else 1.0) * moved
            sweeps[active] += 1
            active[active.clone()] = seen > tolerance
            if not bool(active.any()):
                break
        return Projection(v, residual, sweeps, ~active)


PROJECTORS: Mapping[str, type[ProjectionMethod]] = {
    "auto": AutoProjection,
    "svd": SVDProjection,
    "lsmr": LSMRProjection,
    "alternating": AlternatingProjection,
}

_Batch = tuple[Operator, Tensor, Tensor, float]
"""``A_b``, the eigenvectors of ``A_b A_bᵀ`` and the inverses of its eigenvalues above the cutoff, and ``‖A_b‖``."""


def _step(v: Tensor, moved: Tensor) -> Tensor:
    """The step along ``moved`` to the point nearest to the projection (Gearhart and Koshy, 1989), ``[k, 1]``."""
    length = kernels.vector_norm(moved)
    # Below this length, ``moved`` consists of rounding errors.
    counts = length > 100 * torch.finfo(v.dtype).eps * kernels.vector_norm(v)
    return torch.where(counts, kernels.inner(v, moved) / length.square(), 1.0)[:, None]
