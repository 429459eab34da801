"""Training of the contrastive autoencoder of ``latent_model``, and its use for sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.io.checkpoints import Checkpoint, packed, taking_up, unpacked
from laplace_plus.likelihoods.sampling import global_randomness
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
from laplace_plus.posteriors.resuming import stage_generator
from laplace_plus.posteriors.storing import with_prefix

_SAVED = 100
"""Epochs between checkpoints: some seconds of work."""

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


@dataclass(frozen=True)
class Latents:
    """A trained autoencoder of ``coordinates``, and the latents between which samples lie.

    Attributes:
        start: The latent of the trained weights, ``[k]``.
        ends: Latents of the trajectories' last points, ``[N, k]``.
        farthest: Latents of the trajectories that are farthest from the start, ``[N, k]``.
    """

    autoencoder: Autoencoder
    coordinates: Coordinates
    report: LatentReport
    start: Tensor
    ends: Tensor
    farthest: Tensor

    @torch.no_grad()
    def encode(self, deviations: Tensor, points: Tensor) -> Tensor:
        """Latents of deviations, given the points that define the coordinates: ``[..., P] -> [..., k]``."""
        latents: Tensor = self.autoencoder.encoder(self.coordinates.of(deviations, points))
        return latents

    @torch.no_grad()
    def decode(self, latents: Tensor, points: Tensor) -> Tensor:
        """Deviations of latents, ``[..., k] -> [..., P]``."""
        return self.coordinates.back(self.autoencoder.decoder(latents.to(points)), points)

    def draw(self, n: int, weights: str, generator: torch.Generator | None) -> Tensor:
        """Indices of n trajectories, ``"uniform"`` or in proportion to their ``"length"``."""
        device = torch.device("cpu") if generator is None else generator.device
        if weights == "uniform":
            return torch.randint(len(self.ends), (n,), generator=generator, device=device).to(self.ends.device)
        lengths = (self.ends - self.start).norm(dim=-1).to(device)
        return torch.multinomial(lengths, n, replacement=True, generator=generator).to(self.ends.device)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The header and tensors to save."""
        report = asdict(self.report)
        tensors = {f"model.{name}": value for name, value in self.autoencoder.state_dict().items()}
        tensors |= {"start": self.start, "ends": self.ends, "farthest": self.farthest, "history": report.pop("history")}
        if self.coordinates.weights is not None:
            tensors["weights"] = self.coordinates.weights
        return {"scale": self.coordinates.scale, **report}, tensors

    @classmethod
    def read(cls, header: dict[str, Any], tensors: dict[str, Tensor], options: LatentModel) -> Latents:
        """Restore what :meth:`state` returned."""
        numbers = {name: value for name, value in header.items() if name != "scale"}
        checks.positive("scale", header["scale"] if isinstance(header["scale"], float) else None)
        coordinates = Coordinates(tensors.get("weights"), header["scale"], header["kept"])
        model = Autoencoder(header["rank"], options.dimension, options.hidden).to(tensors["start"])
        model.load_state_dict(with_prefix(tensors, "model."))
        report = LatentReport(tensors["history"].cpu(), **numbers)
        own = (tensors[name] for name in ("start", "ends", "farthest"))
        return cls(model.requires_grad_(False), coordinates, report, *own)


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
        if not self._pairs.shape[1]:
            expected = "two stored points or more in each trajectory, or anchored=True"
            raise ConfigurationError("There are no pairs of consecutive points.", expected=expected, got=f"{s}")
        self._weights = torch.tensor([options.attraction, options.repulsion, options.reconstruction]).double()

    def run(self, checkpoint: Checkpoint | None = None, *, progress: bool = False) -> Latents:
        """Train from scratch, or from a checkpoint."""
        options, rows = self._options, self._rows
        with global_randomness(rows.device, stage_generator(self._seed, 0)):
            model = Autoencoder(rows.shape[1], options.dimension, options.hidden).to(rows)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, fused=True)
        history = torch.zeros(0, 3, dtype=torch.float64)
        saved = None if checkpoint is None else checkpoint.read("latent", rows.device)
        if saved is not None:
            history, weights, adam = unpacked(saved)
            with taking_up():
                model.load_state_dict(weights)
                optimizer.load_state_dict(adam)
        epochs = range(len(history), options.epochs)
        for epoch in progress_bar(epochs, enabled=progress, description="MetricBNN: autoencoder"):
            if self._has_settled(history):
                break
            history = torch.cat([history, self._epoch(model, optimizer, epoch)[None]])
            if checkpoint is not None and (len(history) % _SAVED == 0 or len(history) == options.epochs):
                checkpoint.write("latent", *packed([history, model.state_dict(), optimizer.state_dict()]))
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
        if not bool(torch.isfinite(total).all()):
            what = f"The autoencoder diverged in epoch {epoch + 1}."
            fix = "Use a smaller learning_rate of the latent model, or a smaller repulsion."
            raise NonFiniteError(what, expected="finite losses", got=f"L₊, L₋, L_d = {total.tolist()}", fix=fix)
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
        return Latents(model, self._coordinates, report, start, along[:, -1], along[numbers, far])
