"""Projections onto the kernel of a tall stack of rows, such as the Jacobian of a network over a data set.

Three ways to ``P v = v − A⁺A v``, each with a cutoff relative to the largest singular value:

* :class:`SVDProjection` writes A out; exact, for small problems, and knows the rank;
* :class:`LSMRProjection` solves ``min ‖v − Aᵀz‖`` by LSMR on products with A (Fong and Saunders, 2011);
* :class:`AlternatingProjection` projects onto the kernel of one batch of rows after the other, again and again (von
  Neumann, 1950; Miani et al., 2025), with the exact line search of Gearhart and Koshy (1989) after each sweep.

At the same number of products LSMR is far ahead of sweeps where batches have few rows or rows of different batches are
correlated; its iterates minimise the residual over the whole Krylov space. Sweeps invert each batch's own Gram matrix,
which takes one product in each direction for each of its rows beforehand, and are ahead at first where batches have
many rows. Neither comes near the projection soon where singular values span many orders of magnitude.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.linalg.lsmr import lsmr
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.projections import project_null_space
from laplace_plus.linalg.symmetric import symmetric_eigen

_GRAM_RTOL = 5e-7
"""Cutoffs of at least so much are above what the rounding of Gram matrices in double precision hides."""

_GRAM_SIZE = 256
"""Smaller matrices are decomposed themselves, which takes no time."""


@dataclass(frozen=True)
class Projection:
    """Vectors projected onto the kernel of A.

    Attributes:
        value: ``[k, n]``.
        residual: ``‖A P v‖ / (‖A‖ ‖v‖)``, ``[k]``; how far A is from mapping them to zero. A small one is necessary,
            and not sufficient, for being near the projection where A is ill-conditioned.
        iterations: Iterations or sweeps, ``[k]``.
        converged: Whether the tolerance was met, ``[k]`` bool.
    """

    value: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor


class KernelProjector(ABC):
    """Projects onto the kernel of one matrix A.

    Attributes:
        rank: A's rank, where it is known exactly, else None.
    """

    rank: int | None = None

    @abstractmethod
    def project(self, vectors: Tensor, *, progress: bool = False) -> Projection:
        """Project row-stacked vectors ``[k, n]``."""


class ProjectionMethod(ABC):
    """A way to project, with its options; A is handed over whole and in parts."""

    @abstractmethod
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> KernelProjector:
        """Make the projector.

        Args:
            whole: A, ``[m, n]``.
            parts: Gives A's rows as operators ``[m_b, n]``, batch by batch.
        """


def _cutoff(given: float | None, dtype: torch.dtype) -> float:
    return (1e-12 if dtype == torch.float64 else 1e-6) if given is None else given


def _check(name: str, value: float | None) -> None:
    if value is not None and not 0 <= value < 1:
        raise ConfigurationError("There is no such tolerance.", expected=f"0 <= {name} < 1", got=repr(value))


@dataclass(frozen=True)
class SVDProjection(ProjectionMethod):
    """Write A out and decompose it.

    Args:
        rtol: Singular values of at most this fraction of the largest count as zero; 1e-12 in float64 and 1e-6 in
            float32 by default.
        max_entries: Largest m·n that is written out.
    """

    rtol: float | None = None
    max_entries: int = 2**28

    def __post_init__(self) -> None:
        _check("rtol", self.rtol)

    @override
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> KernelProjector:
        m, n = whole.shape
        if m * n > self.max_entries:
            raise ConfigurationError(
                "The rows are too many to be written out.",
                expected=f"at most {self.max_entries:,} entries",
                got=f"{m:,} rows of {n:,}",
                fix='Use projector="lsmr".',
            )
        return DenseKernelProjector(whole.dense(), _cutoff(self.rtol, whole.dtype))


def row_space(rows: Tensor, rtol: float) -> tuple[Tensor, Tensor, bool]:
    """Singular values ``[r]`` of A ``[m, n]`` above a cutoff, and orthonormal vectors V ``[r, n]`` of its row space.

    Where the cutoff is that of single precision, they are from the eigenvectors of a Gram matrix, in a tenth of the
    time: in double precision those tell singular values of down to about 1e-8 of the largest from zero.

    Args:
        rows: A, float64.
        rtol: Singular values of at most this fraction of the largest count as zero.

    Returns:
        The values; V, or weights ``W [r, m]`` of the rows with ``V = W A``, where they are smaller; whether it is W.
    """
    m, n = rows.shape
    if min(m, n) < _GRAM_SIZE or rtol < _GRAM_RTOL:
        _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
        by_rows = False
    else:
        gram = torch.zeros(min(m, n), min(m, n), dtype=rows.dtype, device=rows.device)
        gram = kernels.symmetric_update(gram, rows.mT if m < n else rows)
        squares, columns = kernels.symmetric_eigen(gram)  # reads the lower triangle
        values, vectors, by_rows = squares.clamp(min=0).sqrt(), columns.mT, m < n
    kept = values > rtol * values.amax() if len(values) else values > 0
    values = values[kept]
    return values, vectors[kept] / values[:, None] if by_rows else vectors[kept], by_rows


class DenseKernelProjector(KernelProjector):
    """The projector from an orthonormal basis V of the row space, or from the weights W of the rows in ``V = Wᵀ A``.

    Args:
        rows: A, ``[m, n]``.
        rtol: Singular values of at most this fraction of the largest count as zero.

    Attributes:
        singular_values: Those that count, ``[r]``, float64.
    """

    def __init__(self, rows: Tensor, rtol: float):
        self.rows = rows.double()
        if not bool(torch.isfinite(self.rows).all()):
            raise _not_finite()
        self.singular_values, self._basis, self._of_rows = row_space(self.rows, rtol)
        self.rank = len(self.singular_values)

    @override
    def project(self, vectors: Tensor, *, progress: bool = False) -> Projection:
        wide = vectors.double()
        for _ in range(2):  # the second time takes away what rounding left, and what V lacks in orthogonality
            wide = wide - self._in_row_space(wide)
        scale = self.singular_values.amax() if self.rank else 1.0
        residual = (wide @ self.rows.mT).norm(dim=-1) / (scale * vectors.double().norm(dim=-1)).clamp(min=1e-300)
        value = wide.to(vectors.dtype)
        ones = torch.ones(len(vectors), device=vectors.device)
        return Projection(value, residual.to(vectors.dtype), ones.long(), ones.bool())

    def _in_row_space(self, vectors: Tensor) -> Tensor:
        coordinates = vectors @ self.rows.mT if self._of_rows else vectors
        part = coordinates @ self._basis.mT @ self._basis
        return part @ self.rows if self._of_rows else part


@dataclass(frozen=True)
class LSMRProjection(ProjectionMethod):
    """Solve ``min ‖v − Aᵀz‖`` by LSMR, all vectors at once; each iteration takes one product with A and one with Aᵀ.

    Args:
        tolerance: Of LSMR (its ``atol`` and ``btol``); 1e-12 in float64 and 1e-6 in float32 by default.
        conlim: The iteration ends when the condition number seems to exceed this.
        max_iterations: Cap; as many as :func:`~laplace_plus.linalg.lsmr` takes by default.
        refinements: How often what is left of ``A v`` is solved for and taken away: rounding leaves some ε‖A‖‖v‖, which
            single precision notices. One in float32 and none in float64 by default; each takes as long as the first
            solve.
    """

    tolerance: float | None = None
    conlim: float = 1e8
    max_iterations: int | None = None
    refinements: int | None = None

    def __post_init__(self) -> None:
        _check("tolerance", self.tolerance)

    @override
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> KernelProjector:
        return LSMRKernelProjector(whole, self)


@dataclass(frozen=True)
class LSMRKernelProjector(KernelProjector):
    """The projector by LSMR.

    Attributes:
        rows: A.
        options: Its tolerances and caps.
    """

    rows: Operator
    options: LSMRProjection

    @override
    def project(self, vectors: Tensor, *, progress: bool = False) -> Projection:
        options = self.options
        solver: dict[str, Any] = {
            "atol": options.tolerance,
            "btol": options.tolerance,
            "conlim": options.conlim,
            "max_iterations": options.max_iterations,
            "progress": progress,
        }
        with torch.no_grad():
            found = project_null_space(self.rows, None, vectors, **solver)
            value, residual, iterations = found.value, found.residual, found.iterations
            default = 0 if vectors.dtype == torch.float64 else 1
            for _ in range(default if options.refinements is None else options.refinements):
                left = lsmr(self.rows, None, self.rows(value), **solver)
                value, iterations = value - left.value, iterations + left.iterations
                residual = kernels.vector_norm(self.rows(value))
        norms = (found.operator_norm * kernels.vector_norm(vectors)).clamp(min=torch.finfo(vectors.dtype).tiny)
        # Rounding ends an iteration as well as its tolerance does; a cap, or a matrix too ill-conditioned, does not.
        converged = (found.statuses == 0) | (found.statuses == 2)  # noqa: PLR2004
        return Projection(value, residual / norms, iterations, converged)


@dataclass(frozen=True)
class AlternatingProjection(ProjectionMethod):
    """Project onto the kernel of one batch of rows after the other.

    Keeps the eigendecomposition of each batch's ``A_b A_bᵀ``: ``Σ m_b²`` numbers for batches of m_b rows.

    Args:
        tolerance: Sweeps end when the largest residual of a batch, ``‖A_b v‖ / (‖A_b‖ ‖v‖)``, is at most this; 1e-10 in
            float64 and 1e-5 in float32 by default.
        max_sweeps: Cap.
        accelerate: Whether each sweep is followed by an exact line search towards the kernel.
        rtol: Eigenvalues of ``A_b A_bᵀ`` of at most this fraction of the largest count as zero; 1e-12 in float64 and
            1e-6 in float32 by default.
    """

    tolerance: float | None = None
    max_sweeps: int = 1000
    accelerate: bool = True
    rtol: float | None = None

    def __post_init__(self) -> None:
        _check("tolerance", self.tolerance)
        _check("rtol", self.rtol)
        if isinstance(self.max_sweeps, bool) or not isinstance(self.max_sweeps, int) or self.max_sweeps < 1:
            raise ConfigurationError("There is no such cap.", expected="max_sweeps >= 1", got=repr(self.max_sweeps))

    @override
    def prepare(self, whole: Operator, parts: Callable[[], Iterable[Operator]]) -> KernelProjector:
        return AlternatingKernelProjector(list(parts()), self)


class AlternatingKernelProjector(KernelProjector):
    """The projector by alternating projections.

    Args:
        parts: ``A_b``, batch by batch.
        options: Tolerance and caps.

    Attributes:
        rank_bound: The sum of the batches' ranks, an upper bound of A's.
    """

    def __init__(self, parts: Sequence[Operator], options: AlternatingProjection):
        self.parts, self.options = parts, options
        rtol = _cutoff(options.rtol, parts[0].dtype)
        self._inverses = []
        self._norms = []
        for part in parts:
            with torch.no_grad():
                gram = (part @ part.T).dense().double()
            values, vectors = symmetric_eigen((gram + gram.mT) / 2)
            largest = values.amax().clamp(min=0)
            kept = values > rtol * largest
            self._inverses.append((vectors[:, kept].to(part.dtype), values[kept].reciprocal().to(part.dtype)))
            self._norms.append(float(largest.sqrt()))
        self.rank_bound = sum(len(inverse) for _, inverse in self._inverses)
        self.rank = self.rank_bound if len(parts) == 1 else None

    @override
    def project(self, vectors: Tensor, *, progress: bool = False) -> Projection:
        default = 1e-10 if vectors.dtype == torch.float64 else 1e-5
        tolerance = default if self.options.tolerance is None else self.options.tolerance
        v = vectors.clone()
        norms = kernels.vector_norm(v).clamp(min=torch.finfo(v.dtype).tiny)
        sweeps = torch.zeros(len(v), dtype=torch.long, device=v.device)
        residual = torch.full_like(norms, float("inf"))
        active = torch.ones(len(v), dtype=torch.bool, device=v.device)
        for _ in progress_bar(range(self.options.max_sweeps), enabled=progress, description="alternating projections"):
            before = v[active]
            moved, seen = self._sweep(before, norms[active])
            # What a sweep finds is the residual before it, at the place of each batch within the sweep.
            residual[active] = seen
            done = seen <= tolerance
            v[active] = before - (self._step(before, moved) if self.options.accelerate else 1.0) * moved
            sweeps[active] += 1
            active[active.clone()] = ~done
            if not bool(active.any()):
                break
        return Projection(v, residual, sweeps, ~active)

    def _sweep(self, v: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """What one sweep takes away from v, and the largest residual of a batch.

        It is summed as it is taken away: as a difference of vectors it would hold their rounding, part of it in the
        kernel, and the line search would follow that as soon as it is ``√ε`` of them.
        """
        worst, moved = torch.zeros_like(norms), torch.zeros_like(v)
        with torch.no_grad():
            for part, (vectors, inverse), norm in zip(self.parts, self._inverses, self._norms, strict=True):
                rows = part(v - moved)
                worst = torch.maximum(worst, rows.norm(dim=-1) / (norm * norms)) if norm > 0 else worst
                moved = moved + part.T(((rows @ vectors) * inverse) @ vectors.mT)
        return moved, worst

    @staticmethod
    def _step(v: Tensor, moved: Tensor) -> Tensor:
        """How far along ``moved`` the point nearest to the projection is (Gearhart and Koshy, 1989), ``[k, 1]``."""
        length = kernels.vector_norm(moved)
        # Of a sweep that hardly moves anything the length is rounding.
        counts = length > 100 * torch.finfo(v.dtype).eps * kernels.vector_norm(v)
        return torch.where(counts, kernels.inner(v, moved) / length.square(), 1.0)[:, None]


def _not_finite() -> NonFiniteError:
    return NonFiniteError("The rows hold NaN or infinity.", expected="finite derivatives", got="others")
