"""Standard normal vectors, split into their projections onto the null space and the range of a network's rows.

The range is that of ``Aᵀ``, the orthogonal complement of the null space of A.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks, kernels
from laplace_plus.errors import ConvergenceWarning, NonFiniteError, UnsupportedError, warn
from laplace_plus.io.checkpoints import Checkpoint
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.null_space import PROJECTORS, ProjectionMethod
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network.linearization import ADModes
from laplace_plus.network.network import Network
from laplace_plus.posteriors.configuration import option_config, resolve_option
from laplace_plus.posteriors.projection.rows import NullSpaceRows, Rows, check_rows
from laplace_plus.posteriors.resuming import FitStart, ResumableFit, stage_generator
from laplace_plus.posteriors.sample_based import SampleBased
from laplace_plus.structured.blocks import check_forms

_TOGETHER = 8
"""Vectors in one stage of a fit: products with so many share their passes, and an interruption loses little."""

_VECTORS, _IN_RANGE = 10, 3
"""Vectors that the projection of one takes, as measured, and more for each whose part in the range is kept."""


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

    def warn_unless_converged(self) -> None:
        """Warn of projections that did not meet their tolerance."""
        if not bool(self.converged.all()):
            warn(
                f"{int((~self.converged).sum())} of {len(self.converged)} projections did not meet their tolerance; "
                f"the largest residual is {float(self.residual.max()):.2g}. Allow more iterations, raise the "
                "tolerance, or use projector='svd' where the rows fit into memory.",
                ConvergenceWarning,
            )


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
    checkpoint: Checkpoint,
    *,
    keep_range: bool = True,
    progress: bool = False,
) -> ProjectedNoise:
    """Draw ``count`` normal vectors by the seed and project them, a few at a time; finished ones go to the checkpoint.

    Raises NonFiniteError if a projection is not finite, and UnsupportedError if the null space is zero.
    """
    whole, projector = rows.whole, None
    # In checkpoints the components are called kernel and image.
    names = ("kernel", "image") if keep_range else ("kernel",)
    kept = {name: torch.empty(count, whole.shape[1], dtype=whole.dtype, device=whole.device) for name in names}
    stages: list[dict[str, Tensor]] = []
    for start in range(0, count, _TOGETHER):
        part = slice(start, start + _TOGETHER)
        known = checkpoint.read(f"noise-{start}", whole.device)
        if known is None:
            projector = projector or method.prepare(whole, rows.by_batch)
            noise = normal_like(kept["kernel"][part], stage_generator(seed, start))
            split = projector.project(noise, progress=progress)
            in_range = noise.sub_(split.value)
            tensors = {name: getattr(split, name) for name in ("residual", "iterations", "converged")}
            tensors["squares"] = kernels.vector_norm(in_range).double().square()
            tensors |= zip(names, (split.value, in_range), strict=False)
            known = {"rank": projector.rank}, tensors
            checkpoint.write(f"noise-{start}", *known)
        rank, tensors = known[0]["rank"], known[1]
        for name, vectors in kept.items():
            vectors[part] = tensors[name]
        stages.append({name: tensors[name] for name in ("residual", "iterations", "converged", "squares")})
    found = {name: torch.cat([stage[name] for stage in stages]) for name in stages[0]}
    converged = found["converged"].bool()
    dimension = range_dimension(kept["kernel"], found["squares"], rank, converged=bool(converged.all()))
    report = NoiseReport(found["residual"], found["iterations"], converged, dimension, rows.n_ignored)
    return ProjectedNoise(kept["kernel"], kept.get("image", kept["kernel"][:0]), report)


def normal_like(vectors: Tensor, source: torch.Generator) -> Tensor:
    """Standard normal numbers for ``vectors [k, P]``."""
    return draw_probes("gaussian", *vectors.shape, generator=source, dtype=vectors.dtype, device=vectors.device)


def range_dimension(
    null_space: Tensor, squares: Tensor, rank: int | None = None, *, converged: bool = True
) -> Estimate:
    """The dimension of the range: ``rank`` if known, else from ``P ε [k, P]`` and the squares ``‖(I − P) ε‖² [k]``."""
    total, lengths = null_space.shape[1], kernels.vector_norm(null_space)
    if not bool(torch.isfinite(lengths).all()):
        raise NonFiniteError("A projection is not finite.", expected="finite samples", got="NaN or Inf")
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


class ProjectedNoisePosterior(SampleBased, ResumableFit):
    """A Gaussian whose draws are projected noise, with one prior precision for the whole null space.

    Of arguments it takes those that its subclasses share, and all of :class:`Posterior`.
    """

    one_precision = True
    stored_as: ClassVar[tuple[str, ...]]
    """Names in checkpoints of the components that are kept: that in the null space, and perhaps that in the range."""

    _noise: ProjectedNoise | None = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        rows: Rows | None,
        projector: str | ProjectionMethod | dict[str, Any],
        n_samples: int,
        chunk_size: int,
        **common: Any,
    ):
        checks.count("n_samples", n_samples)
        checks.count("chunk_size", chunk_size)
        self.projector = resolve_option("projector", projector, PROJECTORS)
        self.n_samples, self.chunk_size, self._ad_modes = n_samples, chunk_size, ADModes()
        super().__init__(model, likelihood, **common)
        self.check_draws(n_samples=n_samples)
        self.rows: Rows = rows or ("logit" if self.likelihood.is_gaussian else "loss")
        check_rows(self.rows)

    @override
    def options(self) -> dict[str, Any]:
        projector = option_config(self.projector, PROJECTORS)
        return {"rows": self.rows, "projector": projector, "n_samples": self.n_samples, "chunk_size": self.chunk_size}

    @property
    def noise(self) -> ProjectedNoise:
        """The projected noise; :class:`NotFittedError` before :meth:`fit`."""
        self.require_fit()
        assert self._noise is not None
        return self._noise

    @property
    def report(self) -> NoiseReport:
        """How the projections ended; :class:`NotFittedError` before :meth:`fit`."""
        return self.noise.report

    @override
    def _start(self, *args: Any, **options: Any) -> FitStart:
        n = _VECTORS * min(_TOGETHER, self.n_samples) + (len(self.stored_as) > 1) * _IN_RANGE * self.n_samples
        self.require_vectors(n, f"the projection of {self.n_samples} samples")
        return super()._start(*args, **options)

    def _project(self, center: Network, data: Iterable[Any], start: FitStart, *, progress: bool) -> ProjectedNoise:
        """Noise for the rows at a network's weights."""
        rows, keep = NullSpaceRows(center, self.likelihood, data, self.rows, chunk_size=self.chunk_size), self.stored_as
        own = self.projector, self.n_samples, start.seed, start.checkpoint
        return project_noise(rows, *own, keep_range=len(keep) > 1, progress=progress)

    def _take_noise(self, noise: ProjectedNoise, mean: Tensor, start: FitStart) -> None:
        """Make the results of a fit the posterior's own."""
        if not float(noise.report.rank.value) > 0:
            raise self.zero_curvature()
        self._noise, self._vector, self._ad_modes = noise, mean, ADModes()
        self.n_data, self.n_outputs = start.n_data, start.n_outputs

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        noise, report = self.noise, self.report
        tensors = {name: getattr(report, name) for name in ("residual", "iterations", "converged")}
        tensors["rank"] = torch.stack([report.rank.value, report.rank.sem]).cpu()
        tensors |= zip(self.stored_as, (noise.null_space, noise.range), strict=False)
        return {"ignored_rows": report.ignored_rows}, tensors

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        check_forms(tensors, dict.fromkeys(self.stored_as, "kP"), P=self.n_parameters)
        null_space, *others = (tensors[name] for name in self.stored_as)
        (value, sem), converged = tensors["rank"].cpu(), tensors["converged"].bool()
        rank = Estimate(value, sem, 0, bool(converged.all()), len(converged) if sem > 0 else 0)
        report = NoiseReport(tensors["residual"], tensors["iterations"], converged, rank, header["ignored_rows"])
        self._noise, self._vector = ProjectedNoise(null_space, (*others, null_space[:0])[0], report), tensors["vector"]
