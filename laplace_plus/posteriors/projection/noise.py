"""Standard normal vectors, split into their projections onto the null space and the range of a network's rows.

The range is that of ``Aᵀ``, the orthogonal complement of the null space of A.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.curvature.linearization import ADModes
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, NonFiniteError, UnsupportedError
from laplace_plus.linalg import Estimate
from laplace_plus.linalg.null_space import (
    AlternatingProjection,
    LSMRProjection,
    ProjectionMethod,
    SVDProjection,
)
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network import Network
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.configuration import check_count, option_config, resolve_option
from laplace_plus.posteriors.projection.rows import NullSpaceRows, Rows
from laplace_plus.posteriors.resuming import Checkpoint, FitStart, ResumableFit, stage_generator
from laplace_plus.posteriors.sample_based import SampleBased
from laplace_plus.priors import as_hyperparameter

PROJECTORS: Mapping[str, type[ProjectionMethod]] = {
    "svd": SVDProjection,
    "lsmr": LSMRProjection,
    "alternating": AlternatingProjection,
}

_TOGETHER = 8
"""Vectors in one stage of a fit: products with so many share their passes, and an interruption loses little."""


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

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save."""
        return {
            "residual": self.residual,
            "iterations": self.iterations,
            "converged": self.converged,
            "rank": torch.stack([self.rank.value, self.rank.sem]).cpu(),
        }

    @staticmethod
    def read(tensors: dict[str, Tensor], header: dict[str, Any]) -> NoiseReport:
        """Restore a report from :meth:`tensors` and the posterior's header."""
        value, sem = tensors["rank"].cpu()
        converged = tensors["converged"].bool()
        probes = len(converged) if sem > 0 else 0
        rank = Estimate(value, sem, 0, bool(converged.all()), probes)
        return NoiseReport(tensors["residual"], tensors["iterations"], converged, rank, header["ignored_rows"])

    def warn_unless_converged(self, stacklevel: int) -> None:
        """Warn of projections that did not meet their tolerance."""
        if not bool(self.converged.all()):
            warnings.warn(
                f"{int((~self.converged).sum())} of {len(self.converged)} projections did not meet their tolerance; "
                f"the largest residual is {float(self.residual.max()):.2g}. Allow more iterations, raise the "
                "tolerance, or use projector='svd' where the rows fit into memory.",
                ConvergenceWarning,
                stacklevel=stacklevel + 1,
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
    checkpoint: Checkpoint | None = None,
    *,
    keep_range: bool = True,
    progress: bool = False,
) -> ProjectedNoise:
    """Draw ``count`` normal vectors by the seed and project them, a few at a time; finished ones go to the checkpoint.

    Raises NonFiniteError if a projection is not finite, and UnsupportedError if the null space is zero.
    """
    whole, projector = rows.whole, None
    rank: int | None = None
    # In checkpoints the components are called kernel and image.
    names = ("kernel", "image") if keep_range else ("kernel",)
    kept = {name: torch.empty(count, whole.shape[1], dtype=whole.dtype, device=whole.device) for name in names}
    stages: list[dict[str, Tensor]] = []
    for start in range(0, count, _TOGETHER):
        n = min(_TOGETHER, count - start)
        known = None if checkpoint is None else checkpoint.read(f"noise-{start}", whole.device)
        if known is None:
            projector = method.prepare(whole, rows.by_batch) if projector is None else projector
            noise = _normal(n, whole.shape[1], stage_generator(seed, start), kept["kernel"])
            split = projector.project(noise, progress=progress)
            in_range = noise.sub_(split.value)
            tensors = {
                "kernel": split.value,
                "squares": kernels.vector_norm(in_range).double().square(),
                "residual": split.residual,
                "iterations": split.iterations,
                "converged": split.converged,
            }
            if keep_range:
                tensors["image"] = in_range
            known = {"rank": projector.rank}, tensors
            if checkpoint is not None:
                checkpoint.write(f"noise-{start}", *known)
        rank, tensors = known[0]["rank"], dict(known[1])
        for name, vectors in kept.items():
            vectors[start : start + n] = tensors.pop(name)
        stages.append(tensors)
    squares, residual, iterations, converged = (
        torch.cat([stage[name] for stage in stages]) for name in ("squares", "residual", "iterations", "converged")
    )
    converged = converged.bool()
    dimension = range_dimension(kept["kernel"], squares, rank, converged=bool(converged.all()))
    report = NoiseReport(residual, iterations, converged, dimension, rows.n_ignored)
    return ProjectedNoise(kept["kernel"], kept.get("image", kept["kernel"][:0]), report)


def _normal(count: int, size: int, source: torch.Generator, like: Tensor) -> Tensor:
    return draw_probes("gaussian", count, size, generator=source, dtype=like.dtype, device=like.device)


def range_dimension(
    null_space: Tensor, squares: Tensor, rank: int | None = None, *, converged: bool = True
) -> Estimate:
    """The dimension of the range: ``rank`` if known, else from ``P ε [k, P]`` and the squares ``‖(I − P) ε‖² [k]``."""
    total, lengths = null_space.shape[1], kernels.vector_norm(null_space)
    if not bool(torch.isfinite(lengths).all()):
        raise NonFiniteError("A projection is not finite.", expected="finite samples", got="NaN or Inf")
    if rank == total or bool((lengths <= 1e3 * torch.finfo(null_space.dtype).eps * total**0.5).all()):
        raise UnsupportedError(
            "The training data leave no direction free: there are as many independent rows as parameters.",
            expected=f"fewer than {total:,} independent rows",
            got=f"rank {total:,}",
            fix='Use rows="loss", which has one row for each example, fewer data, or another posterior.',
        )
    if rank is not None:
        exact = torch.tensor(float(rank), dtype=torch.float64)
        return Estimate(exact, torch.zeros_like(exact), 0, True)
    value = squares.double().mean()
    # ‖(I − P) ε‖² has a χ² distribution with r degrees of freedom.
    return Estimate(value, (2 * value / len(squares)).sqrt(), 0, converged, len(squares))


class ProjectedNoisePosterior(SampleBased, ResumableFit):
    """A Gaussian whose draws are projected noise, with one prior precision for the whole null space."""

    rows: Rows
    projector: ProjectionMethod
    n_samples: int
    chunk_size: int
    _noise: ProjectedNoise | None = None

    def _take_options(
        self, projector: str | ProjectionMethod | dict[str, Any], n_samples: int, chunk_size: int
    ) -> None:
        """Check and set the options that the subclasses share."""
        check_count(n_samples, "n_samples")
        check_count(chunk_size, "chunk_size")
        self.projector = resolve_option("projector", projector, PROJECTORS)
        self.n_samples, self.chunk_size = n_samples, chunk_size
        self._ad_modes = ADModes()

    @override
    def options(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "projector": option_config(self.projector, PROJECTORS),
            "n_samples": self.n_samples,
            "chunk_size": self.chunk_size,
        }

    @property
    @override
    def prior_precision(self) -> Tensor:
        """Inverse prior variance, a single number.

        Raises:
            ConfigurationError: Setting several, besides what :class:`Posterior` raises.
        """
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        check_single(as_hyperparameter(value))
        Posterior.prior_precision.fset(self, value)  # type: ignore[attr-defined]

    @property
    def report(self) -> NoiseReport:
        """How the projections ended.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        self.require_fit()
        assert self._noise is not None
        return self._noise.report

    def _project(
        self, center: Network, data: Iterable[Any], start: FitStart, *, keep_range: bool, progress: bool
    ) -> ProjectedNoise:
        """Noise for the rows at a network's weights."""
        rows = NullSpaceRows(center, self.likelihood, data, self.rows, chunk_size=self.chunk_size)
        return project_noise(
            rows,
            self.projector,
            self.n_samples,
            start.seed,
            start.checkpoint,
            keep_range=keep_range,
            progress=progress,
        )

    def _take_noise(self, noise: ProjectedNoise, mean: Tensor, start: FitStart) -> None:
        """Make the results of a fit the posterior's own."""
        self._noise, self._vector, self._ad_modes = noise, mean, ADModes()
        self.n_data, self.n_outputs = start.n_data, start.n_outputs


def check_single(precision: Tensor) -> None:
    """Raise :class:`ConfigurationError` for a prior precision of several numbers."""
    if precision.numel() > 1:
        raise ConfigurationError(
            "One precision scales the whole null space.",
            expected="a single prior precision",
            got=f"{precision.numel()} of them",
        )
