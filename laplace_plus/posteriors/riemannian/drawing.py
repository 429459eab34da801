"""Samples along the loss surface, by geodesics or by diffusion, in groups that an interruption leaves intact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._memory import budget, require_room
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError
from laplace_plus.geometry import Diffusion, LossLandscape, PathStatus, diffuse, exponential_map, noise_field
from laplace_plus.geometry.geodesic import check_settings
from laplace_plus.io.checkpoints import Checkpoint, Part, Stage
from laplace_plus.linalg import draw_probes

_GROUP = 32
"""Geodesics that advance together, if memory allows; an interruption loses at most so many."""

_VECTORS = 80
"""Vectors of the parameters' length that one geodesic takes, as measured: positions and velocities in the stages of a
step and their combinations, gradients, and, in double precision, velocities behind a crease."""


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
        minibatch: Number of examples, drawn at random for each sample, that its surface is of; their log-likelihood
            counts for that of all. By default all data.
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
        given = self.training_prior_precision
        if given is not None and not (0 <= given < math.inf):
            raise ConfigurationError(
                "Bad precision of training's prior.", expected="training_prior_precision >= 0", got=repr(given)
            )


Manifold = ExponentialMap | Diffusion

METHODS: Mapping[str, type[Manifold]] = {"exponential": ExponentialMap, "diffusion": Diffusion}


@dataclass(frozen=True)
class PathReport:
    """How the samples of a :class:`~laplace_plus.Riemannian` posterior were found, failed ones included.

    Attributes:
        statuses: ``[n]`` integers, :class:`~laplace_plus.geometry.PathStatus`.
        n_evaluations: Gradients with Hessian-vector products, or curvatures of a diffusion, for each, ``[n]``.
        energy_drift: Sum of the relative changes of a geodesic's energy that were corrected for, ``[n]``; zero for
            diffusions.
        tail: Largest fraction of the curvature's trace that a diffusion left unresolved; see
            :class:`~laplace_plus.Diffusion`.
        gradient_norm: ``‖∇L(θ̂)‖`` of the negative log-posterior, summed over the data.
        decrement: ``½ ∇Lᵀ Σ ∇L`` with the tangent's covariance Σ, estimated from samples: about how many nats the
            weights are above the loss's stationary point. Where it is not small, they are not the mode of the posterior
            that the tangent approximates: the prior precision may not be the weight decay of training.
    """

    statuses: Tensor
    n_evaluations: Tensor
    energy_drift: Tensor
    tail: float = 0.0
    gradient_norm: float = 0.0
    decrement: float = 0.0

    @property
    def n_failed(self) -> int:
        """Number of samples that were left out."""
        return int((self.statuses != PathStatus.ARRIVED).sum())

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> PathReport:
        """From the entries that each sample has, among others, and those for all samples together."""
        return cls(tensors["statuses"], tensors["n_evaluations"], tensors["energy_drift"], **numbers)


@dataclass(frozen=True)
class Drawn:
    """Samples ``[n, P]``, NaN for those that failed, and their report."""

    points: Tensor
    report: PathReport


def draw(
    method: Manifold,
    landscape: LossLandscape,
    start: Tensor,
    tangents: Callable[[int, torch.Generator], Tensor],
    n: int,
    seed: int,
    checkpoint: Checkpoint,
    *,
    progress: bool,
) -> Drawn:
    """Draw n samples, in stages of a checkpoint: the tail, and the points with the other entries of their report."""
    geodesics = isinstance(method, ExponentialMap)

    def first() -> Stage:
        source = torch.Generator().manual_seed(seed)
        seeds = {"seeds": torch.randint(2**62, (n,), generator=source)}
        return {}, {**seeds, "velocities": tangents(n, source)} if geodesics else seeds

    noise = checkpoint.stage("draws", first, start.device)[1]

    def samples(some: Tensor) -> Stage:
        seeds = noise["seeds"][some.to(noise["seeds"].device)].tolist()
        if isinstance(method, ExponentialMap):
            return _by_geodesics(method, landscape, start, noise["velocities"][some.to(start.device)], seeds)
        return _by_diffusion(method, landscape, start, seeds[0])

    room = budget(start.device) // 2
    size = max(1, min(_GROUP, room // max(1, _VECTORS * start.nbytes))) if geodesics else 1
    vectors = _VECTORS if isinstance(method, ExponentialMap) else method.n_steps + min(method.rank, len(start)) + 10
    require_room(vectors * start.nbytes, f"one sample ({vectors} parameter vectors)", start.device, if_given=True)
    parts = progress_bar(torch.arange(n).split(size), enabled=progress, description="Riemannian")
    groups = [
        checkpoint.stage(f"samples-{number:05d}", partial(samples, some), start.device)
        for number, some in enumerate(parts)
    ]
    tensors = Part({name: torch.cat([own[name] for _, own in groups]) for name in groups[0][1]})
    tail = max(float(header["tail"]) for header, _ in groups)
    return Drawn(tensors["points"], PathReport.read(tensors, {"tail": tail}))


def _by_geodesics(
    method: ExponentialMap, landscape: LossLandscape, start: Tensor, velocities: Tensor, seeds: list[int]
) -> Stage:
    surface: LossLandscape | list[LossLandscape] = landscape
    if method.minibatch is not None:  # one random subset for each seed, all of them gathered in one pass
        if method.minibatch > landscape.n_data:
            what = "A minibatch is larger than the data."
            raise ConfigurationError(what, expected=f"minibatch <= {landscape.n_data}", got=repr(method.minibatch))
        orders = [torch.randperm(landscape.n_data, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        surface = landscape.subsets([order[: method.minibatch] for order in orders])
    options = {name: getattr(method, name) for name in ("rtol", "atol", "max_evaluations", "max_energy_change")}
    found = exponential_map(surface, start, velocities, **options)
    own = {name: getattr(found, name) for name in ("statuses", "n_evaluations", "energy_drift")}
    return {"tail": 0.0}, {"points": found.endpoint, **own}


def _by_diffusion(method: Diffusion, landscape: LossLandscape, start: Tensor, seed: int) -> Stage:
    generator = torch.Generator().manual_seed(seed)
    size = method.n_steps, len(start)
    noise = draw_probes("gaussian", *size, generator=generator, dtype=start.dtype, device=start.device)
    field = noise_field(landscape, method, generator=generator)
    found = diffuse(field, start, noise[None], scheme=method.scheme)
    steps = torch.full_like(found.statuses, method.n_steps * (2 if method.scheme == "heun" else 1))
    own = {"statuses": found.statuses, "n_evaluations": steps, "energy_drift": start.new_zeros(1)}
    return {"tail": field.tail}, {"points": found.endpoint, **own}
