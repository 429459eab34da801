"""Standard normal vectors, split into their projections onto the null space and the range of a network's rows.

The range is that of ``Aᵀ``, the orthogonal complement of the null space of A.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laplace_plus import checks, kernels
from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.likelihoods.sampling import stage_generator
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.estimates import draw_probes
from laplace_plus.linalg.null_space import PROJECTORS, ProjectionMethod
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored
from laplace_plus.posteriors.projection.rows import NullSpaceRows, Rows
from laplace_plus.posteriors.public import zero_curvature
from laplace_plus.posteriors.registry import resolve_option
from laplace_plus.posteriors.sample_based import SampleBased
from laplace_plus.posteriors.state import State, of_state

_TOGETHER = 8
"""Vectors that are projected together: products share their passes, and LSMR takes ten vectors of memory for each."""


stored(Estimate)
for _method in PROJECTORS.values():
    stored(_method)


@stored
@dataclass(frozen=True)
class NoiseReport:
    """How the projections of the stored noise ended.

    Attributes:
        residual: ``‖A v‖ / (‖A‖ ‖ε‖)`` of each, ``[k]``.
        iterations: Iterations or sweeps of each, ``[k]``.
        converged: Whether each met its tolerance, ``[k]`` bool.
        rank: The dimension of the range: exact with ``projector="svd"``, else ``mean ‖(I − P) ε‖²``, which is
            unbiased, with its standard error.
        ignored_rows: Number of rows that are rounding errors beside the largest row.
    """

    residual: Tensor
    iterations: Tensor
    converged: Tensor
    rank: Estimate
    ignored_rows: int


@stored
@dataclass(frozen=True)
class ProjectedNoise:
    """``ε = null_space + range`` for k standard normal vectors ε, both ``[k, P]``.

    ``range`` has no rows where it was not to be kept.
    """

    null_space: Tensor
    range: Tensor
    report: NoiseReport


def project_noise(
    rows: NullSpaceRows,
    method: ProjectionMethod,
    count: int,
    seed: int,
    *,
    keep_range: bool = True,
    progress: bool = False,
) -> ProjectedNoise:
    """Draw ``count`` normal vectors by the seed and project them, a few at a time.

    Raises NonFiniteError if a projection is not finite, and UnsupportedError if the null space is zero.
    """
    whole, projector = rows.whole, method.prepare(rows.whole, rows.by_batch)
    null_space = torch.empty(count, whole.shape[1], dtype=whole.dtype, device=whole.device)
    in_range = torch.empty_like(null_space) if keep_range else null_space[:0]
    found, squares = [], []
    for start in range(0, count, _TOGETHER):
        part = slice(start, start + _TOGETHER)
        noise = normal_like(null_space[part], stage_generator(seed, start))
        found.append(projector.project(noise, progress=progress))
        null_space[part] = found[-1].value
        noise -= found[-1].value
        squares.append(kernels.vector_norm(noise).double().square())
        if keep_range:
            in_range[part] = noise
    residual, iterations, converged = (
        torch.cat([getattr(one, name) for one in found]) for name in ("residual", "iterations", "converged")
    )
    rank = range_dimension(null_space, torch.cat(squares), projector.rank, converged=bool(converged.all()))
    return ProjectedNoise(null_space, in_range, NoiseReport(residual, iterations, converged, rank, rows.n_ignored))


def normal_like(vectors: Tensor, source: torch.Generator) -> Tensor:
    """Standard normal numbers for ``vectors [k, P]``."""
    return draw_probes("gaussian", *vectors.shape, generator=source, dtype=vectors.dtype, device=vectors.device)


def range_dimension(
    null_space: Tensor, squares: Tensor, rank: int | None = None, *, converged: bool = True
) -> Estimate:
    """The dimension of the range: ``rank`` if known, else from ``P ε [k, P]`` and the squares ``‖(I − P) ε‖² [k]``."""
    total, lengths = null_space.shape[1], kernels.vector_norm(null_space)
    checks.finite("The length of a projection", lengths)
    # An iterative projector leaves as much in the range as its tolerance and the rows' condition allow: more than
    # rounding. In a null space of d dimensions each squared length has a χ² distribution with d degrees of freedom, so
    # that one in a hundred of d = 1 is taken for none, and hardly any of more.
    each = torch.stack([torch.ones_like(lengths), lengths.square()]).double()
    share = torch.special.gammainc(*each.sum(1) / 2)
    if rank == total or (rank is None and bool(share < 0.01)):  # noqa: PLR2004
        what = "The training data leave no direction free: there are as many independent rows as parameters."
        fix = 'Use rows="loss", which has one row for each example, fewer data, or another posterior.'
        raise UnsupportedError(what, expected=f"fewer than {total:,} independent rows", got=f"rank {total:,}", fix=fix)
    if rank is not None:
        exact = torch.tensor(float(rank), dtype=torch.float64)
        return Estimate(exact, torch.zeros_like(exact), 0, True)
    value = squares.double().mean()
    # ‖(I − P) ε‖² has a χ² distribution with r degrees of freedom.
    return Estimate(value, (2 * value / len(squares)).sqrt(), 0, converged, len(squares))


@stored
@dataclass(frozen=True)
class NoiseState(State):
    """What a fit to projected noise finds."""

    noise: ProjectedNoise


class ProjectedNoisePosterior(SampleBased):
    """A Gaussian whose draws are projected noise, with one prior precision for the whole null space."""

    _one_precision = True
    keeps_range: ClassVar[bool]
    """Whether the noise's component in the range is kept beside that in the null space."""

    noise = of_state("noise", "The projected noise, a :class:`ProjectedNoise`.")

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        rows: Rows = "logit",
        projector: str | ProjectionMethod | dict[str, Any] = "auto",
        n_samples: int = 30,
        chunk_size: int = 16,
        **common: Any,
    ):
        self.n_samples, self.chunk_size = checks.count("n_samples", n_samples), checks.count("chunk_size", chunk_size)
        self.projector = resolve_option("projector", projector, PROJECTORS)
        self.rows: Rows = checks.choice("rows", rows, ("logit", "ggn", "loss"))
        super().__init__(model, likelihood, **common)

    @property
    def report(self) -> NoiseReport:
        """How the projections ended; :class:`NotFittedError` before :meth:`fit`."""
        found: NoiseReport = self.noise.report
        return found

    def _fit_noise(self, center: Network, data: Iterable[Any], seed: int, *, progress: bool) -> ProjectedNoise:
        """Noise for the rows at a network's weights."""
        rows = NullSpaceRows(center, self.likelihood, data, self.rows, chunk_size=self.chunk_size)
        options: dict[str, Any] = {"keep_range": self.keeps_range, "progress": progress}
        noise = project_noise(rows, self.projector, self.n_samples, seed, **options)
        report = noise.report
        if not float(report.rank.value) > 0:
            raise zero_curvature(self)
        if not bool(report.converged.all()):
            what = f"{int((~report.converged).sum())} of {self.n_samples} projections did not meet their tolerance; the"
            what += f" largest residual is {float(report.residual.max()):.2g}. Allow more iterations, raise the"
            warn(f"{what} tolerance, or use projector='svd' where the rows fit into memory.", ConvergenceWarning)
        return noise

    def squared_distance(self, mean: Tensor) -> Tensor:
        """``‖θ − μ‖²`` of a mean θ ``[P]`` from the prior's, 0-d float64; ConfigurationError where it is zero."""
        found = (mean - self._prior_mean.to(mean)).double().square().sum()
        checks.positive("The weights' squared distance from the prior mean", float(found))
        return found
