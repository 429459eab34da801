"""Training of the contrastive autoencoder of ``latent_model``, and its use for sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.likelihoods.sampling import global_randomness, stage_generator
from laplace_plus.persistence import stored
from laplace_plus.posteriors.metric_bnn.latent_model import (
    Coordinates,
    LatentModel,
    attraction_loss,
    choose_coordinates,
    distances,
    draw_partners,
    reconstruction_loss,
    repulsion_loss,
)

_WINDOW = 50
"""Epochs over which losses are averaged, so that the noise of minibatches does not end the training."""


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
        parts = points.split(4096)
        latents = torch.cat([model.encoder(some) for some in parts])
        decoded = zip(parts, latents.split(4096), strict=True)
        missed = sum(float((some - model.decoder(own)).double().square().sum()) for some, own in decoded)
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
