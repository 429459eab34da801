"""A contrastive autoencoder of parameter vectors, whose latent space is measured in steps of their trajectories.

Encoder φ and decoder ψ minimise ``λ₊ L₊ + λ₋ L₋ + λ_d L_d`` over stored points θ of T-step trajectories:

    L₊ = E (‖φ(θ) − φ(θ')‖ − 1/T)²      θ, θ' one step apart
    L₋ = E −log ‖φ(θ) − φ(θ″)‖          θ″ any other point
    L_d = E ‖x − ψ(φ(x))‖²              x the standardised θ

Points are deviations from the trained weights, divided by the root mean square of all entries. Those of large networks
are first expressed in coordinates of the span of all points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.likelihoods.sampling import global_randomness, stage_generator
from laplace_plus.persistence import stored

Negatives = Literal["derangement", "shuffle"]
Projection = Literal["auto", "none", "principal"]

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
        attraction: λ₊.
        repulsion: λ₋.
        reconstruction: λ_d.
        squared: Whether L_d is the mean squared distance, or the mean distance.
        anchored: Whether the trained weights are a point of each trajectory, at t = 0.
        negatives: Which other point is θ″: ``"derangement"``, never the point itself; ``"shuffle"``, any.
        standardize: Whether to divide deviations by the root mean square of their entries.
        projection: Inputs of the encoder and outputs of the decoder: ``"none"``, all P entries; ``"principal"``,
            coordinates along the points' principal directions; ``"auto"``, these where there are more than 256 entries.
        max_rank: Largest number of principal directions.
        kept: Fraction of the points' mean square that they keep, as far as ``max_rank`` allows.
        tolerance: Fraction of the points' mean square that may remain unexplained; beyond it the autoencoder counts as
            not converged.

    Raises:
        ConfigurationError: A number out of range or an unknown name.
    """

    dimension: int = 32
    hidden: Sequence[int] = (256, 256)
    epochs: int = 1000
    plateau: float = 1e-3
    learning_rate: float = 1e-3
    batch_size: int = 1024
    attraction: float = 1.0
    repulsion: float = 1.0
    reconstruction: float = 1.0
    squared: bool = True
    anchored: bool = True
    negatives: Negatives = "derangement"
    standardize: bool = True
    projection: Projection = "auto"
    max_rank: int = 512
    kept: float = 0.9999
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dimension", "epochs", "batch_size", "max_rank"):
            checks.count(name, getattr(self, name))
        for width in self.hidden:
            checks.count("hidden", width)
        object.__setattr__(self, "hidden", tuple(self.hidden))  # JSON has lists only
        checks.positive("learning_rate", self.learning_rate)
        checks.positive("tolerance", self.tolerance)
        checks.number("kept", self.kept, above=0.0, most=1.0)
        for name in ("attraction", "repulsion", "reconstruction", "plateau"):
            checks.number(name, getattr(self, name), least=0.0)
        checks.choice("negatives", self.negatives, ("derangement", "shuffle"))
        checks.choice("projection", self.projection, ("auto", "none", "principal"))


def distances(left: Tensor, right: Tensor) -> Tensor:
    """``(‖a − b‖² + 1e-12)^½`` of rows ``[n, k]``, ``[n]``."""
    return ((left - right).square().sum(-1) + _TINY).sqrt()


def attraction_loss(latents: Tensor, following: Tensor, step: float) -> Tensor:
    """``L₊``: mean ``(‖z − z'‖ − step)²`` of consecutive points' latents ``[n, k]``; 0-d."""
    return (distances(latents, following) - step).square().mean()


def repulsion_loss(latents: Tensor, others: Tensor) -> Tensor:
    """``L₋``: mean ``−log ‖z − z″‖``, 0-d."""
    return -distances(latents, others).log().mean()


def reconstruction_loss(points: Tensor, decoded: Tensor, *, squared: bool = True) -> Tensor:
    """``L_d``: mean ``‖x − x̂‖²`` of rows, or their mean distance; 0-d."""
    return (points - decoded).square().sum(-1).mean() if squared else distances(points, decoded).mean()


def draw_partners(n: int, negatives: Negatives, generator: torch.Generator) -> Tensor:
    """For each of n rows the number of another one, ``[n]``; with ``"derangement"`` never its own (for n > 1)."""
    order = torch.randperm(n, generator=generator)
    if negatives == "shuffle":
        return order
    partners = torch.empty_like(order)
    partners[order] = order.roll(1)  # one cycle through all rows
    return partners


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


def choose_coordinates(points: Tensor, options: LatentModel) -> tuple[Coordinates, Tensor]:
    """Coordinates for points ``[n, P]``, and those of the points, ``[n, r]``.

    Principal directions cost ``n² P`` operations and no copy of the points.
    """
    n, total = points.shape
    gram = torch.zeros(n, n, dtype=torch.float64, device=points.device)  # D Dᵀ
    for some in points.split(_COLUMNS, dim=1):
        gram += (some @ some.mT).double()
    square = float(gram.trace()) / n / total
    if options.projection == "none" or (options.projection == "auto" and total <= 256):  # noqa: PLR2004
        scale = square**0.5 if options.standardize else 1.0
        return Coordinates(None, scale, 1.0), points / scale
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    shares = values.cumsum(0) / values.sum()
    floor = torch.finfo(points.dtype).eps ** 0.5 * 10  # of singular values: below it are rounding errors
    certain = int((values.sqrt() > floor * values[0].sqrt()).sum())
    rank = min(int((shares < options.kept).sum()) + 1, options.max_rank, certain)
    roots = values[:rank].sqrt()
    own = vectors[:, :rank] * roots
    scale = float(own.square().mean()) ** 0.5 if options.standardize else 1.0
    weights = (vectors[:, :rank] / roots).mT
    return Coordinates(weights.to(points), scale, float(shares[rank - 1])), (own / scale).to(points)


class Autoencoder(nn.Module):
    """Two multilayer perceptrons with ReLU."""

    def __init__(self, size: int, dimension: int, hidden: Sequence[int]):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(), nn.Sequential()
        widths = [size, *hidden, dimension]
        for net, own in ((self.encoder, widths), (self.decoder, widths[::-1])):
            for before, after in pairwise(own):
                net.append(nn.Linear(before, after)).append(nn.ReLU())
            del net[-1]


@stored
@dataclass(frozen=True)
class LatentReport:
    """How the autoencoder was trained.

    Attributes:
        history: ``L₊``, ``L₋`` and ``L_d`` of each epoch, without their weights, ``[epochs, 3]`` float64.
        unexplained: ``Σ ‖x − ψ(φ(x))‖² / Σ ‖x‖²`` over the points, including what the coordinates leave out.
        rank: r, the number of coordinates.
        kept: Fraction of the points' mean square that the coordinates keep.
        spread: Mean distance between latents of random pairs of points; L₋ alone would let it grow without end.
    """

    history: Tensor
    unexplained: float
    rank: int
    kept: float
    spread: float


Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weights and biases of a multilayer perceptron."""


@stored
@dataclass(frozen=True)
class Latents:
    """A trained autoencoder of ``coordinates``, and the latents between which samples lie.

    Attributes:
        encoder, decoder: Their layers.
        start: The latent of the trained weights, ``[k]``.
        ends: Latents of the trajectories' last points, ``[N, k]``.
        farthest: Latents of the trajectories that are farthest from the start, ``[N, k]``.
    """

    encoder: Layers
    decoder: Layers
    coordinates: Coordinates
    report: LatentReport
    start: Tensor
    ends: Tensor
    farthest: Tensor

    def encode(self, deviations: Tensor, points: Tensor) -> Tensor:
        """Latents of deviations, given the points that define the coordinates: ``[..., P] -> [..., k]``."""
        return _perceptron(self.encoder, self.coordinates.of(deviations, points))

    def decode(self, latents: Tensor, points: Tensor) -> Tensor:
        """Deviations of latents, ``[..., k] -> [..., P]``."""
        return self.coordinates.back(_perceptron(self.decoder, latents.to(points)), points)

    def draw(self, n: int, weights: str, generator: torch.Generator | None) -> Tensor:
        """Indices of n trajectories, ``"uniform"`` or in proportion to their ``"length"``."""
        device = torch.device("cpu") if generator is None else generator.device
        if weights == "uniform":
            return torch.randint(len(self.ends), (n,), generator=generator, device=device).to(self.ends.device)
        lengths = (self.ends - self.start).norm(dim=-1).to(device)
        return torch.multinomial(lengths, n, replacement=True, generator=generator).to(self.ends.device)


def _perceptron(layers: Layers, x: Tensor) -> Tensor:
    for weight, bias in layers[:-1]:
        x = torch.relu(nn.functional.linear(x, weight, bias))
    return nn.functional.linear(x, *layers[-1])


class Training:
    """Trains an autoencoder on trajectories."""

    def __init__(self, deviations: Tensor, step: float, options: LatentModel, seed: int):
        self._options, self._seed, self._step = options, seed, step
        self._shape = n, s = deviations.shape[:2]
        self._coordinates, own = choose_coordinates(deviations.flatten(0, 1), options)
        self._rows = torch.cat([own.new_zeros(1, own.shape[1]), own])  # row 0 is the trained weights
        number = torch.arange(1, n * s + 1, device=own.device).view(n, s)
        before = torch.cat([torch.zeros_like(number[:, :1]), number[:, :-1]], dim=1)
        start = 0 if options.anchored else 1
        self._pairs = torch.stack([before[:, start:].flatten(), number[:, start:].flatten()])  # [2, pairs]
        self._weights = torch.tensor([options.attraction, options.repulsion, options.reconstruction]).double()

    def run(self, *, progress: bool = False) -> Latents:
        """Train from scratch."""
        options, rows = self._options, self._rows
        with global_randomness(rows.device, stage_generator(self._seed, 0)):
            model = Autoencoder(rows.shape[1], options.dimension, options.hidden).to(rows)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, fused=True)
        history = torch.zeros(0, 3, dtype=torch.float64)
        for epoch in progress_bar(range(options.epochs), enabled=progress, description="MetricBNN: autoencoder"):
            if self._has_settled(history):
                break
            history = torch.cat([history, self._epoch(model, optimizer, epoch)[None]])
        return self._result(model.requires_grad_(False), history)

    def _has_settled(self, history: Tensor) -> bool:
        if not self._options.plateau or len(history) < 2 * _WINDOW:
            return False
        losses = history @ self._weights
        before, now = losses[-2 * _WINDOW : -_WINDOW].mean(), losses[-_WINDOW:].mean()
        return bool(before - now < self._options.plateau * (losses[0] - now))

    @torch.enable_grad()
    def _epoch(self, model: Autoencoder, optimizer: torch.optim.Adam, epoch: int) -> Tensor:
        """One pass over all pairs; the means of ``L₊``, ``L₋`` and ``L_d``, each point encoded once a step."""
        options, source = self._options, stage_generator(self._seed, epoch + 1)
        n_pairs, device = self._pairs.shape[1], self._rows.device
        weights = self._weights.to(self._rows)
        total = torch.zeros(3, dtype=torch.float64)
        for some in torch.randperm(n_pairs, generator=source).split(min(options.batch_size, n_pairs)):
            which, (here, there) = torch.unique(self._pairs[:, some.to(device)], return_inverse=True)
            points = self._rows[which]
            latents = model.encoder(points)
            partners = draw_partners(len(which), options.negatives, source).to(device)
            losses = torch.stack(
                [
                    attraction_loss(latents[here], latents[there], self._step),
                    repulsion_loss(latents, latents[partners]),
                    reconstruction_loss(points, model.decoder(latents), squared=options.squared),
                ]
            )
            optimizer.zero_grad()
            (weights @ losses).backward()
            optimizer.step()
            total += losses.detach().double().cpu() * (len(some) / n_pairs)
        fix = "Use a smaller learning_rate of the latent model, or a smaller repulsion."
        checks.finite(f"A loss of the autoencoder in epoch {epoch + 1}", total, fix)
        return total

    @torch.no_grad()
    def _result(self, model: Autoencoder, history: Tensor) -> Latents:
        points, kept = self._rows[1:], self._coordinates.kept
        latents = model.encoder(points)
        missed = float((points - model.decoder(latents)).double().square().sum())
        total = float(points.double().square().sum())
        partners = draw_partners(len(latents), "derangement", torch.Generator().manual_seed(0)).to(latents.device)
        spread = float(distances(latents, latents[partners]).mean())
        report = LatentReport(history, 1 - kept * (1 - missed / total), points.shape[1], kept, spread)
        start, along = model.encoder(self._rows[:1])[0], latents.view(*self._shape, -1)
        far = (along - start).norm(dim=-1).argmax(1)
        numbers = torch.arange(len(along), device=far.device)
        encoder, decoder = (
            tuple((layer.weight.detach(), layer.bias.detach()) for layer in net if isinstance(layer, nn.Linear))
            for net in (model.encoder, model.decoder)
        )
        ends = along[:, -1], along[numbers, far]
        return Latents(encoder, decoder, self._coordinates, report, start, *ends)
