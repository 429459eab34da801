"""A contrastive autoencoder of parameter vectors, whose latent space is measured in steps of their trajectories.

Encoder φ and decoder ψ minimise ``L₊ + L₋ + L_d`` over the points θ of T-step trajectories:

    L₊ = E (‖φ(θ) − φ(θ')‖ − 1/T)²      θ, θ' one step apart, the first of each trajectory the trained weights
    L₋ = E −log ‖φ(θ) − φ(θ″)‖          θ″ any other point
    L_d = E ‖x − ψ(φ(x))‖²              x the standardised θ

Points are deviations from the trained weights, divided by the root mean square of all entries. Those of large networks
are first expressed in coordinates of the span of all points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.likelihoods.sampling import global_randomness, stage_generator
from laplace_plus.persistence import stored

MANY_ENTRIES = 256
"""With more entries than this, the autoencoder sees coordinates along the points' principal directions:"""

MOST_DIRECTIONS, KEPT = 512, 0.9999
"""as many as keep this fraction of the points' mean square, but no more than that."""

_WINDOW = 50
"""Epochs over which losses are averaged, so that the noise of minibatches does not end the training."""

_TINY = 1e-12
"""Added to squared distances, whose root and logarithm then have derivatives at zero."""

_COLUMNS = 2**16
"""Parameters at a time in the Gram matrix, whose float64 copies then take little memory beside the points."""


@stored
@dataclass(frozen=True)
class LatentModel:
    """Options of the autoencoder.

    Args:
        dimension: k, of the latent space.
        hidden: Widths of the encoder's hidden layers; the decoder has them in reverse.
        epochs: Most passes over all pairs of consecutive points.
        plateau: Training ends sooner once the mean loss of 50 epochs is below that of the 50 before by less than this
            fraction of its fall since the start; 0 for all epochs in any case.
        learning_rate: Adam's.
        batch_size: Pairs in a step of Adam, or all if there are fewer.
        tolerance: Fraction of the points' mean square that may remain unexplained; beyond it the autoencoder counts as
            not converged.

    Raises:
        ConfigurationError: A number out of range.
    """

    dimension: int = 32
    hidden: Sequence[int] = (256, 256)
    epochs: int = 1000
    plateau: float = 1e-3
    learning_rate: float = 1e-3
    batch_size: int = 1024
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dimension", "epochs", "batch_size"):
            checks.count(name, getattr(self, name))
        for width in self.hidden:
            checks.count("hidden", width)
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON has lists only
        checks.positive("learning_rate", self.learning_rate)
        checks.positive("tolerance", self.tolerance)
        checks.number("plateau", self.plateau, least=0.0)


# -- coordinates -------------------------------------------------------------------------------------------------------


@stored
@dataclass(frozen=True)
class Coordinates:
    """Parameter vectors as inputs of the autoencoder: divided by ``scale``, along principal directions or as they are.

    Attributes:
        weights: Principal directions as combinations of the points, ``[r, n]``, which take less memory than the
            directions; None for all entries.
        kept: Fraction of the points' mean square that the coordinates keep.
    """

    weights: Tensor | None
    scale: float
    kept: float

    def of(self, deviations: Tensor, points: Tensor) -> Tensor:
        """Coordinates ``[m, r]`` of deviations ``[m, P]``, given the points ``[n, P]``."""
        if self.weights is None:
            return deviations / self.scale
        return (deviations @ points.mT) @ self.weights.mT / self.scale

    def back(self, coordinates: Tensor, points: Tensor) -> Tensor:
        """Deviations ``[m, P]`` with these coordinates ``[m, r]``."""
        if self.weights is None:
            return coordinates * self.scale
        flat = torch.linalg.multi_dot([coordinates.flatten(0, -2) * self.scale, self.weights, points])
        return flat.unflatten(0, coordinates.shape[:-1])


def choose_coordinates(points: Tensor) -> tuple[Coordinates, Tensor]:
    """Coordinates for points ``[n, P]``, and those of the points, ``[n, r]``.

    Principal directions cost ``n² P`` operations and no copy of the points.
    """
    n, total = points.shape
    gram = torch.zeros(n, n, dtype=torch.float64, device=points.device)  # D Dᵀ
    for some in points.split(_COLUMNS, dim=1):
        gram += (some @ some.mT).double()
    if total <= MANY_ENTRIES:
        scale = (float(gram.trace()) / n / total) ** 0.5
        return Coordinates(None, scale, 1.0), points / scale
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    shares = values.cumsum(0) / values.sum()
    floor = torch.finfo(points.dtype).eps ** 0.5 * 10  # of singular values: below it are rounding errors
    certain = int((values.sqrt() > floor * values[0].sqrt()).sum())
    rank = min(int((shares < KEPT).sum()) + 1, MOST_DIRECTIONS, certain)
    roots = values[:rank].sqrt()
    own = vectors[:, :rank] * roots
    scale = float(own.square().mean()) ** 0.5
    weights = (vectors[:, :rank] / roots).mT
    return Coordinates(weights.to(points), scale, float(shares[rank - 1])), (own / scale).to(points)


# -- the autoencoder ---------------------------------------------------------------------------------------------------

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weights and biases of a multilayer perceptron with ReLU."""


@stored
@dataclass(frozen=True)
class LatentReport:
    """How the autoencoder was trained.

    Attributes:
        history: ``L₊``, ``L₋`` and ``L_d`` of each epoch, ``[epochs, 3]`` float64.
        unexplained: ``Σ ‖x − ψ(φ(x))‖² / Σ ‖x‖²`` over the points, including what the coordinates leave out.
    """

    history: Tensor
    unexplained: float


@stored
@dataclass(frozen=True)
class Latents:
    """A trained autoencoder of ``coordinates``, and the latents between which samples lie.

    Attributes:
        encoder, decoder: Their layers.
        start: The latent of the trained weights, ``[k]``.
        ends: Latents of the trajectories' last points, ``[N, k]``.
    """

    encoder: Layers
    decoder: Layers
    coordinates: Coordinates
    report: LatentReport
    start: Tensor
    ends: Tensor

    def encode(self, deviations: Tensor, points: Tensor) -> Tensor:
        """Latents of deviations, given the points that define the coordinates: ``[..., P] -> [..., k]``."""
        return _perceptron(self.encoder, self.coordinates.of(deviations, points))

    def decode(self, latents: Tensor, points: Tensor) -> Tensor:
        """Deviations of latents, ``[..., k] -> [..., P]``."""
        return self.coordinates.back(_perceptron(self.decoder, latents.to(points)), points)


def _perceptron(layers: Layers, x: Tensor) -> Tensor:
    for weight, bias in layers[:-1]:
        x = torch.relu(nn.functional.linear(x, weight, bias))
    return nn.functional.linear(x, *layers[-1])


def _initial(widths: Sequence[int], like: Tensor) -> Layers:
    linear = [nn.Linear(before, after).to(like) for before, after in pairwise(widths)]
    return tuple((layer.weight, layer.bias) for layer in linear)


def distances(left: Tensor, right: Tensor) -> Tensor:
    """``(‖a − b‖² + 1e-12)^½`` of rows ``[n, k]``, ``[n]``."""
    return ((left - right).square().sum(-1) + _TINY).sqrt()


def attraction_loss(latents: Tensor, following: Tensor, step: float) -> Tensor:
    """``L₊``: mean ``(‖z − z'‖ − step)²`` of consecutive points' latents ``[n, k]``; 0-d."""
    return (distances(latents, following) - step).square().mean()


def repulsion_loss(latents: Tensor, others: Tensor) -> Tensor:
    """``L₋``: mean ``−log ‖z − z″‖``, 0-d."""
    return -distances(latents, others).log().mean()


def reconstruction_loss(points: Tensor, decoded: Tensor) -> Tensor:
    """``L_d``: mean ``‖x − x̂‖²`` of rows; 0-d."""
    return (points - decoded).square().sum(-1).mean()


def draw_partners(n: int, generator: torch.Generator) -> Tensor:
    """For each of n rows the number of another one (for n > 1), ``[n]``: one cycle through all rows."""
    order = torch.randperm(n, generator=generator)
    partners = torch.empty_like(order)
    partners[order] = order.roll(1)
    return partners


@torch.enable_grad()
def train(trajectories: Tensor, options: LatentModel, seed: int, *, progress: bool = False) -> Latents:
    """Train an autoencoder on trajectories of deviations, ``[N, T, P]``, each point encoded once a step."""
    n, length = trajectories.shape[:2]
    coordinates, own = choose_coordinates(trajectories.flatten(0, 1))
    rows = torch.cat([own.new_zeros(1, own.shape[1]), own])  # row 0 is the trained weights
    number = torch.arange(1, len(rows), device=own.device).view(n, length)
    before = torch.cat([torch.zeros_like(number[:, :1]), number[:, :-1]], dim=1)
    pairs = torch.stack([before.flatten(), number.flatten()])
    widths = [rows.shape[1], *options.hidden, options.dimension]
    with global_randomness(rows.device, stage_generator(seed, 0)):
        encoder, decoder = _initial(widths, rows), _initial(widths[::-1], rows)
    optimizer = torch.optim.Adam(chain(*encoder, *decoder), lr=options.learning_rate, fused=True)
    history = torch.zeros(0, 3, dtype=torch.float64)
    for epoch in progress_bar(range(options.epochs), enabled=progress, description="MetricBNN: autoencoder"):
        if _has_settled(history.sum(1), options.plateau):
            break
        source, total = stage_generator(seed, epoch + 1), torch.zeros(3, dtype=torch.float64)
        for some in torch.randperm(pairs.shape[1], generator=source).split(options.batch_size):
            which, (here, there) = torch.unique(pairs[:, some.to(pairs.device)], return_inverse=True)
            points = rows[which]
            latents = _perceptron(encoder, points)
            others = latents[draw_partners(len(which), source).to(rows.device)]
            attraction = attraction_loss(latents[here], latents[there], 1 / length)
            reconstruction = reconstruction_loss(points, _perceptron(decoder, latents))
            losses = torch.stack([attraction, repulsion_loss(latents, others), reconstruction])
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            total += losses.detach().double().cpu() * (len(some) / pairs.shape[1])
        fix = "Use a smaller learning_rate of the latent model."
        checks.finite(f"A loss of the autoencoder in epoch {epoch + 1}", total, fix)
        history = torch.cat([history, total[None]])
    with torch.no_grad():
        latents = _perceptron(encoder, rows)
        missed = (rows - _perceptron(decoder, latents))[1:].double().square().sum() / rows.double().square().sum()
        report = LatentReport(history, 1 - coordinates.kept * (1 - float(missed)))
        encoder, decoder = (tuple((w.detach(), b.detach()) for w, b in layers) for layers in (encoder, decoder))
        return Latents(encoder, decoder, coordinates, report, latents[0], latents[1:].view(n, length, -1)[:, -1])


def _has_settled(losses: Tensor, plateau: float) -> bool:
    """Whether the losses of all epochs so far no longer fall."""
    if not plateau or len(losses) < 2 * _WINDOW:
        return False
    before, now = losses[-2 * _WINDOW : -_WINDOW].mean(), losses[-_WINDOW:].mean()
    return bool(before - now < plateau * (losses[0] - now))
