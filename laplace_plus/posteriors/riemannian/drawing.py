"""Samples along the loss surface, by geodesics or by diffusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.geometry import Diffusion, LossLandscape, PathStatus, diffuse, geodesic, noise_field
from laplace_plus.geometry.geodesic import check_settings
from laplace_plus.linalg import draw_probes
from laplace_plus.persistence import stored

_GROUP, _GROUP_BYTES, _VECTORS = 32, 2**30, 80
"""Geodesics that advance together, at most, and in how much memory: each takes some 80 vectors of the parameters'
length, as measured, for the stages of a step, their combinations and gradients."""


@stored
@dataclass(frozen=True)
class ExponentialMap:
    """Options of sampling by the exponential map: geodesics along tangent samples.

    Args:
        rtol: Relative tolerance of a step's error. With ReLUs, whose kinks shorten steps, 1e-3 takes a tenth of the
            evaluations that the default does.
        atol: Its absolute tolerance, in units of the parameters.
        max_evaluations: Cap on gradients with Hessian-vector products for each sample.
        max_energy_change: Relative change of a geodesic's energy beyond which a step is repeated with a smaller one;
            where that does not help, the surface has a crease, and the velocity is refracted.
        linearized: Whether to take the network's tangent for the network, on the surface and in predictions.
        minibatch: Number of examples, drawn at random for each sample, that its surface is of, all if there are fewer;
            their log-likelihood counts for that of all.
        training_prior_precision: Precision of the prior in the loss that the surface is of; by default the tangent's.
            Where that has been tuned away from the one under which the network was trained (weight decay times number
            of data, for a mean loss), the weights are no minimum of the loss, and geodesics slide down towards smaller
            weights instead of along the valley: give the one of training here, zero for training without weight decay.

    Raises:
        ConfigurationError: Numbers out of range.
    """

    rtol: float = 3e-7
    atol: float = 3e-7
    max_evaluations: int = 10_000
    max_energy_change: float = 0.3
    linearized: bool = False
    minibatch: int | None = None
    training_prior_precision: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.rtol, self.atol, self.max_evaluations, self.max_energy_change)
        if self.minibatch is not None:
            checks.count("minibatch", self.minibatch)
        if self.training_prior_precision is not None:
            checks.number("training_prior_precision", self.training_prior_precision, least=0.0)


stored(Diffusion)
Manifold = ExponentialMap | Diffusion

METHODS: Mapping[str, type[Manifold]] = {"exponential": ExponentialMap, "diffusion": Diffusion}


@stored
@dataclass(frozen=True)
class PathReport:
    """How the samples of a :class:`~laplace_plus.Riemannian` posterior were found, failed ones included.

    Attributes:
        statuses: ``[n]`` integers, :class:`~laplace_plus.geometry.PathStatus`.
        n_evaluations: Gradients with Hessian-vector products, or curvatures of a diffusion, for each, ``[n]``.
        tail: Largest fraction of the curvature's trace that a diffusion left unresolved; see
            :class:`~laplace_plus.Diffusion`.
        decrement: ``½ ∇Lᵀ Σ ∇L`` with the gradient of the negative log-posterior, summed over the data, and the
            tangent's covariance Σ, estimated from samples: about how many nats the weights are above the loss's
            stationary point. Where it is not small, they are not the mode of the posterior that the tangent
            approximates: the prior precision may not be the weight decay of training.
    """

    statuses: Tensor
    n_evaluations: Tensor
    tail: float = 0.0
    decrement: float = 0.0

    @property
    def n_failed(self) -> int:
        """Number of samples that were left out."""
        return int((self.statuses != PathStatus.ARRIVED).sum())


def draw(
    method: Manifold,
    landscape: LossLandscape,
    start: Tensor,
    tangents: Callable[[int, torch.Generator], Tensor],
    n: int,
    seed: int,
    *,
    progress: bool,
) -> tuple[Tensor, PathReport]:
    """Draw n samples ``[n, P]``, NaN for those that failed."""
    source = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (n,), generator=source)
    if isinstance(method, ExponentialMap):
        velocities = tangents(n, source)
        size = max(1, min(_GROUP, _GROUP_BYTES // max(1, _VECTORS * start.nbytes)))
        parts = progress_bar(torch.arange(n).split(size), enabled=progress, description="Riemannian")
        found = [_by_geodesics(method, landscape, start, velocities[some], seeds[some].tolist()) for some in parts]
    else:
        numbers = progress_bar(seeds.tolist(), enabled=progress, description="Riemannian")
        found = [_by_diffusion(method, landscape, start, number) for number in numbers]
    points, statuses, evaluations, tails = zip(*found, strict=True)
    return torch.cat(points), PathReport(torch.cat(statuses), torch.cat(evaluations), max(tails))


def _by_geodesics(
    method: ExponentialMap, landscape: LossLandscape, start: Tensor, velocities: Tensor, seeds: list[int]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Ends, statuses, numbers of evaluations, and no tail."""
    surface: LossLandscape | list[LossLandscape] = landscape
    if method.minibatch is not None:  # one random subset for each seed, all of them gathered in one pass
        orders = [torch.randperm(landscape.n_data, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        surface = landscape.subsets([order[: method.minibatch] for order in orders])
    options = {name: getattr(method, name) for name in ("rtol", "atol", "max_evaluations", "max_energy_change")}
    found = geodesic(surface, start, velocities, **options)
    return found.endpoint, found.statuses, found.n_evaluations, 0.0


def _by_diffusion(
    method: Diffusion, landscape: LossLandscape, start: Tensor, seed: int
) -> tuple[Tensor, Tensor, Tensor, float]:
    """End, status, number of curvatures, and the tail."""
    generator = torch.Generator().manual_seed(seed)
    size = method.n_steps, len(start)
    noise = draw_probes("gaussian", *size, generator=generator, dtype=start.dtype, device=start.device)
    field = noise_field(landscape, method, generator=generator)
    found = diffuse(field, start, noise[None], scheme=method.scheme)
    steps = torch.full_like(found.statuses, method.n_steps * (2 if method.scheme == "heun" else 1))
    return found.endpoint, found.statuses, steps, field.tail
