"""Normal vectors split into their parts in the kernel of a network's rows and beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_plus import kernels
from laplace_plus.batches import iterate
from laplace_plus.curvature.kernel_rows import KernelRows
from laplace_plus.curvature.streaming import DataSums
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, NonFiniteError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import Estimate, Operator
from laplace_plus.linalg.kernel_projectors import (
    AlternatingProjection,
    KernelProjector,
    LSMRProjection,
    ProjectionMethod,
    SVDProjection,
)
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.posteriors.resuming import Checkpoint

if TYPE_CHECKING:
    from laplace_plus.posteriors.base import Posterior

_METHODS: dict[str, type[ProjectionMethod]] = {
    "svd": SVDProjection,
    "lsmr": LSMRProjection,
    "alternating": AlternatingProjection,
}

_TOGETHER = 8
"""Vectors that are projected at a time, so that an interrupted fit loses little."""


@dataclass(frozen=True)
class NoiseReport:
    """How the projections of stored noise ended.

    Attributes:
        residual: ``‖A v‖ / (‖A‖ ‖ε‖)`` of each, ``[k]``.
        iterations: Iterations or sweeps of each, ``[k]``.
        converged: Whether each met its tolerance, ``[k]`` bool.
        rank: The dimension of the image: exact with ``projector="svd"``, else ``mean ‖(I − P) ε‖²``, which is
            unbiased, with its standard error.
        ignored_rows: Number of rows that are too small, beside the largest, to say anything.
    """

    residual: Tensor
    iterations: Tensor
    converged: Tensor
    rank: Estimate
    ignored_rows: int

    def tensors(self) -> dict[str, Tensor]:
        """To be stored."""
        return {
            "residual": self.residual,
            "iterations": self.iterations,
            "converged": self.converged,
            "rank": torch.stack([self.rank.value, self.rank.sem]).cpu(),
        }

    @staticmethod
    def read(tensors: dict[str, Tensor], header: dict[str, Any]) -> NoiseReport:
        """What :meth:`tensors` gave, with the rest of it."""
        value, sem = tensors["rank"].cpu()
        converged = tensors["converged"].bool()
        probes = len(converged) if sem > 0 else 0
        rank = Estimate(value, sem, 0, bool(converged.all()), probes)
        return NoiseReport(tensors["residual"], tensors["iterations"], converged, rank, header["ignored_rows"])


@dataclass(frozen=True)
class KernelNoise:
    """``ε = kernel + image`` for k normal vectors ε, both ``[k, P]``; no images where they were not to be kept."""

    kernel: Tensor
    image: Tensor
    report: NoiseReport


def resolve_projector(projector: str | ProjectionMethod | dict[str, Any]) -> ProjectionMethod:
    """A projection method by name, or as it is.

    Raises:
        ConfigurationError: There is none of that name.
    """
    if isinstance(projector, ProjectionMethod):
        return projector
    options = dict(projector) if isinstance(projector, dict) else {"name": projector}
    name = options.pop("name", None)
    if name not in _METHODS:
        raise ConfigurationError(
            "Unknown projector.",
            expected=f"{', '.join(_METHODS)}, or lp.linalg.LSMRProjection(...) and the like with options",
            got=repr(projector),
        )
    return _METHODS[name](**options)


def projector_config(projector: ProjectionMethod) -> dict[str, Any]:
    """What :func:`resolve_projector` reads, in JSON's terms."""
    name = next(name for name, cls in _METHODS.items() if isinstance(projector, cls))
    return {"name": name, **asdict(projector)}  # type: ignore[call-overload]


def noise_seed(checkpoint: Checkpoint | None, generator: torch.Generator | None) -> int:
    """The seed that a checkpoint holds, or a new one, which is written to it."""
    saved = None if checkpoint is None else checkpoint.read("draws")
    if saved is not None:
        return int(saved[0]["seed"])
    seed = int(torch.randint(2**62, ())) if generator is None else draw_seed(generator)
    if checkpoint is not None:
        checkpoint.write("draws", {"seed": seed}, {})
    return seed


def survey(posterior: Posterior, data: Iterable[Any]) -> tuple[int, int, list[str]]:
    """Number of examples and of outputs, and what tells the data from others, or from another order."""
    network, n_outputs = posterior.network, 0
    sums = DataSums(network.device)
    for batch in iterate(data, device=network.device, progress=False, description=""):
        outputs = network.forward(batch.inputs)
        posterior.likelihood.validate(outputs, batch.target)
        sums.add(batch, len(outputs))
        n_outputs = outputs.shape[-1]
    return sums.count, n_outputs, [f"{value:.6e}" for value in sums.values()]


def check_single(precision: Tensor) -> None:
    """Raise :class:`ConfigurationError` for a prior precision of several numbers."""
    if precision.numel() > 1:
        raise ConfigurationError(
            "One precision scales all directions of the kernel.",
            expected="a single prior precision",
            got=f"{precision.numel()} of them",
        )


def warn_unless_projected(report: NoiseReport, stacklevel: int) -> None:
    """Warn of projections that did not meet their tolerance."""
    if not bool(report.converged.all()):
        warnings.warn(
            f"{int((~report.converged).sum())} of {len(report.converged)} projections did not meet their tolerance; "
            f"the largest residual is {float(report.residual.max()):.2g}. Allow for more iterations, raise the "
            "tolerance, or use projector='svd' where the rows fit into memory.",
            ConvergenceWarning,
            stacklevel=stacklevel + 1,
        )


def draw_kernel_noise(
    rows: KernelRows,
    method: ProjectionMethod,
    count: int,
    seed: int,
    checkpoint: Checkpoint | None = None,
    *,
    keep_image: bool = True,
    progress: bool = False,
) -> KernelNoise:
    """Draw normal vectors and split them, a few at a time.

    Args:
        rows: What the kernel is of.
        method: How to project.
        count: k.
        seed: Of the noise; the vectors depend on it and their number alone.
        checkpoint: Where finished vectors are kept.
        keep_image: Whether images are wanted, too, which take as much memory again.
        progress: Whether to show progress bars.

    Raises:
        NonFiniteError: A projection is not finite.
        UnsupportedError: There is no kernel.
    """
    whole = rows.whole
    projector: KernelProjector | None = None
    rank: int | None = None
    kept = {name: _empty(count, whole) for name in (("kernel", "image") if keep_image else ("kernel",))}
    endings: dict[str, list[Tensor]] = {name: [] for name in ("squares", "residual", "iterations", "converged")}
    for start in range(0, count, _TOGETHER):
        n = min(_TOGETHER, count - start)
        stage = f"noise-{start}"
        known = None if checkpoint is None else checkpoint.read(stage, whole.device)
        if known is None:
            projector = method.prepare(whole, rows.parts) if projector is None else projector
            source = torch.Generator().manual_seed((seed + start * 0x9E3779B97F4A7C15) % 2**63)
            noise = draw_probes("gaussian", n, whole.shape[1], generator=source, dtype=whole.dtype, device=whole.device)
            split = projector.project(noise, progress=progress)
            image = noise.sub_(split.value)
            tensors = {
                "kernel": split.value,
                "image": image,
                "squares": kernels.vector_norm(image).double().square(),
                "residual": split.residual,
                "iterations": split.iterations,
                "converged": split.converged,
            }
            known = {"rank": projector.rank}, {name: x for name, x in tensors.items() if name != "image" or keep_image}
            if checkpoint is not None:
                checkpoint.write(stage, *known)
        rank = known[0]["rank"]
        for name, vectors in kept.items():
            vectors[start : start + n] = known[1][name]
        for name, values in endings.items():
            values.append(known[1][name])
    ending = {name: torch.cat(values) for name, values in endings.items()}
    converged = ending["converged"].bool()
    estimate = image_rank(kept["kernel"], ending["squares"], rank, converged=bool(converged.all()))
    report = NoiseReport(ending["residual"], ending["iterations"], converged, estimate, rows.n_ignored)
    return KernelNoise(kept["kernel"], kept.get("image", kept["kernel"][:0]), report)


def _empty(count: int, rows: Operator) -> Tensor:
    return torch.empty(count, rows.shape[1], dtype=rows.dtype, device=rows.device)


def image_rank(kernel: Tensor, squares: Tensor, rank: int | None = None, *, converged: bool = True) -> Estimate:
    """The dimension of the image from split normal vectors, unless it is known.

    Args:
        kernel: ``P ε``, ``[k, P]``.
        squares: ``‖(I − P) ε‖²``, ``[k]``.
        rank: What is known.
        converged: Whether the projections are.

    Raises:
        NonFiniteError: The vectors are not finite.
        UnsupportedError: Nothing of them is in the kernel.
    """
    total, lengths = kernel.shape[1], kernels.vector_norm(kernel)
    if not bool(torch.isfinite(lengths).all()):
        raise NonFiniteError("A projection is not finite.", expected="finite samples", got="NaN or Inf")
    if rank == total or bool((lengths <= 1e3 * torch.finfo(kernel.dtype).eps * total**0.5).all()):
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
    # ‖(I − P) ε‖² is χ² with r degrees of freedom
    return Estimate(value, (2 * value / len(squares)).sqrt(), 0, converged, len(squares))
