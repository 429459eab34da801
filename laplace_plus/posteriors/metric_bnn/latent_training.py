"""Training of the contrastive autoencoder of ``latent_model``, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, NonFiniteError
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
from laplace_plus.posteriors.resuming import Checkpoint

_SAVED = 100
"""Epochs between checkpoints."""

_WINDOW = 50
"""Epochs over which losses are averaged to see whether they still fall."""


class Autoencoder(nn.Module):
    """Two multilayer perceptrons with ReLU.

    Args:
        size: r, of the input.
        dimension: k.
        hidden: Widths of the encoder's hidden layers.
    """

    def __init__(self, size: int, dimension: int, hidden: Sequence[int]):
        super().__init__()
        self.encoder = _perceptron([size, *hidden, dimension])
        self.decoder = _perceptron([dimension, *reversed(hidden), size])


def _perceptron(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class LatentReport:
    """How the autoencoder was trained.

    Attributes:
        history: ``L₊``, ``L₋`` and ``L_d`` of each epoch, without their weights, ``[epochs, 3]`` float64.
        unexplained: ``Σ ‖x − ψ(φ(x))‖² / Σ ‖x‖²`` over the points, what the coordinates leave out included.
        rank: r, the number of coordinates.
        kept: Part of the points' mean square that the coordinates hold.
        spread: Mean distance between latents of random pairs of points; L₋ alone would let it grow without end.
    """

    history: Tensor
    unexplained: float
    rank: int
    kept: float
    spread: float

    def numbers(self) -> dict[str, Any]:
        """All but the history."""
        return {"unexplained": self.unexplained, "rank": self.rank, "kept": self.kept, "spread": self.spread}


@dataclass(frozen=True)
class Trained:
    """A trained autoencoder with the coordinates that it sees."""

    autoencoder: Autoencoder
    coordinates: Coordinates
    report: LatentReport


class Training:
    """Trains an autoencoder on trajectories.

    Args:
        deviations: The points, ``[N, S, P]``.
        step: 1/T times the number of steps from one stored point to the next.
        options: Losses, epochs and the like.
        seed: Of the first weights, the order of batches and the negatives.
    """

    def __init__(self, deviations: Tensor, step: float, options: LatentModel, seed: int):
        self._options, self._seed, self._step = options, seed, step
        n, s, _ = deviations.shape
        points = deviations.flatten(0, 1)
        self._coordinates, own = choose_coordinates(points, options)
        self._rows = torch.cat([own.new_zeros(1, own.shape[1]), own])  # row 0 is the trained weights
        number = torch.arange(1, n * s + 1, device=own.device).view(n, s)
        before = torch.cat([torch.zeros_like(number[:, :1]), number[:, :-1]], dim=1)
        start = 0 if options.anchored else 1
        self._pairs = torch.stack([before[:, start:].flatten(), number[:, start:].flatten()])  # [2, pairs]
        if not self._pairs.shape[1]:
            raise ConfigurationError(
                "There are no pairs of consecutive points.",
                expected="two stored points or more in each trajectory, or anchored=True",
                got=f"{s}",
            )

    def run(self, checkpoint: Checkpoint | None = None, *, progress: bool = False) -> Trained:
        """Train from scratch, or from a checkpoint.

        Raises:
            NonFiniteError: The losses are not finite.
        """
        options, rows = self._options, self._rows
        with global_randomness(rows.device, torch.Generator().manual_seed(self._seed % 2**63)):
            model = Autoencoder(rows.shape[1], options.dimension, options.hidden).to(rows)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, fused=True)
        history = torch.zeros(options.epochs, 3, dtype=torch.float64)
        first = 0 if checkpoint is None else self._resume(checkpoint, model, optimizer, history)
        done = first
        with torch.enable_grad():
            epochs = range(first, options.epochs)
            for epoch in progress_bar(epochs, enabled=progress, description="MetricBNN: autoencoder"):
                if self._has_settled(history[:done]):
                    break
                history[epoch] = self._epoch(model, optimizer, epoch)
                done = epoch + 1
                if checkpoint is not None and (done % _SAVED == 0 or done == options.epochs):
                    _keep(checkpoint, done, model, optimizer, history)
        history = history[:done]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        return Trained(model, self._coordinates, self._report(model, history))

    def _has_settled(self, history: Tensor) -> bool:
        options, done = self._options, len(history)
        if not options.plateau or done < 2 * _WINDOW:
            return False
        weights = history.new_tensor([options.attraction, options.repulsion, options.reconstruction])
        losses = history @ weights
        before, now = losses[-2 * _WINDOW : -_WINDOW].mean(), losses[-_WINDOW:].mean()
        return bool(before - now < options.plateau * (losses[0] - now))

    def _epoch(self, model: Autoencoder, optimizer: torch.optim.Adam, epoch: int) -> Tensor:
        source = torch.Generator().manual_seed((self._seed + (epoch + 1) * 0x9E3779B97F4A7C15) % 2**63)
        n_pairs = self._pairs.shape[1]
        order = torch.randperm(n_pairs, generator=source)
        total = torch.zeros(3, dtype=torch.float64)
        for some in order.split(min(self._options.batch_size, n_pairs)):
            losses = self._losses(model, self._pairs[:, some.to(self._pairs.device)], source)
            options = self._options
            loss = options.attraction * losses[0] + options.repulsion * losses[1] + options.reconstruction * losses[2]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += losses.detach().double().cpu() * (len(some) / n_pairs)
        if not bool(torch.isfinite(total).all()):
            raise NonFiniteError(
                f"The autoencoder diverged in epoch {epoch + 1}.",
                expected="finite losses",
                got=f"L₊, L₋, L_d = {total.tolist()}",
                fix="Use a smaller learning_rate of the latent model, or a smaller repulsion.",
            )
        return total

    def _losses(self, model: Autoencoder, pairs: Tensor, source: torch.Generator) -> Tensor:
        """``L₊``, ``L₋`` and ``L_d`` of some pairs ``[2, b]``; each point goes through the autoencoder once."""
        which, where = torch.unique(pairs, return_inverse=True)
        points = self._rows[which]
        latents = model.encoder(points)
        decoded = model.decoder(latents)
        partners = draw_partners(len(which), self._options.negatives, source).to(latents.device)
        attraction = attraction_loss(latents[where[0]], latents[where[1]], self._step)
        repulsion = repulsion_loss(latents, latents[partners])
        return torch.stack([attraction, repulsion, reconstruction_loss(points, decoded, squared=self._options.squared)])

    def _report(self, model: Autoencoder, history: Tensor) -> LatentReport:
        points, kept = self._rows[1:], self._coordinates.kept
        missed, total, latents = 0.0, 0.0, []
        with torch.no_grad():
            for some in points.split(4096):
                latents.append(model.encoder(some))
                missed += float((some - model.decoder(latents[-1])).double().square().sum())
                total += float(some.double().square().sum())
            whole = torch.cat(latents)
            partners = draw_partners(len(whole), "derangement", torch.Generator().manual_seed(0)).to(whole.device)
            spread = float(distances(whole, whole[partners]).mean())
        unexplained = 1 - kept * (1 - missed / total)
        return LatentReport(history, unexplained, self._rows.shape[1], kept, spread)

    @staticmethod
    def _resume(checkpoint: Checkpoint, model: Autoencoder, optimizer: torch.optim.Adam, history: Tensor) -> int:
        """Take up the last epoch's state; its number, or 0."""
        saved = checkpoint.read("latent", next(model.parameters()).device)
        if saved is None:
            return 0
        header, tensors = saved
        model.load_state_dict(part(tensors, "model."))
        state = {}
        for number in range(len(list(model.parameters()))):
            state[number] = part(tensors, f"adam.{number}.")
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        epochs = int(header["epochs"])
        history[:epochs] = tensors["history"].cpu()[:epochs]
        return epochs


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _keep(
    checkpoint: Checkpoint, epochs: int, model: Autoencoder, optimizer: torch.optim.Adam, history: Tensor
) -> None:
    tensors = {f"model.{name}": value.detach() for name, value in model.state_dict().items()}
    tensors["history"] = history
    for number, own in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": value.detach() for name, value in own.items()}
    checkpoint.write("latent", {"epochs": epochs}, tensors)


@dataclass(frozen=True)
class Latents:
    """A trained autoencoder, and the latents of the trained weights ``[k]`` and of trajectories' ends ``[N, k]``."""

    autoencoder: Autoencoder
    coordinates: Coordinates
    report: LatentReport
    start: Tensor
    ends: Tensor
    farthest: Tensor

    def encode(self, deviations: Tensor, points: Tensor) -> Tensor:
        """Latents of deviations, given the points that coordinates are made of: ``[..., P] -> [..., k]``."""
        with torch.no_grad():
            return self.autoencoder.encoder(self.coordinates.of(deviations, points))

    def decode(self, latents: Tensor, points: Tensor) -> Tensor:
        """Deviations of latents, ``[..., k] -> [..., P]``."""
        with torch.no_grad():
            return self.coordinates.back(self.autoencoder.decoder(latents.to(points)), points)

    def draw(self, n: int, weights: str, generator: torch.Generator | None) -> Tensor:
        """Numbers of n trajectories."""
        device = torch.device("cpu") if generator is None else generator.device
        if weights == "uniform":
            return torch.randint(len(self.ends), (n,), generator=generator, device=device).to(self.ends.device)
        lengths = (self.ends - self.start).norm(dim=-1).to(device)
        return torch.multinomial(lengths, n, replacement=True, generator=generator).to(self.ends.device)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """To be stored."""
        tensors = {f"model.{name}": value for name, value in self.autoencoder.state_dict().items()}
        tensors |= {"start": self.start, "ends": self.ends, "farthest": self.farthest, "history": self.report.history}
        if self.coordinates.weights is not None:
            tensors["weights"] = self.coordinates.weights
        return {"scale": self.coordinates.scale, **self.report.numbers()}, tensors

    @classmethod
    def read(cls, header: dict[str, Any], tensors: dict[str, Tensor], options: LatentModel) -> Latents:
        """What :meth:`state` gave."""
        numbers = {name: value for name, value in header.items() if name != "scale"}
        coordinates = Coordinates(tensors.get("weights"), header["scale"], header["kept"])
        model = Autoencoder(header["rank"], options.dimension, options.hidden).to(tensors["start"])
        model.load_state_dict(part(tensors, "model."))
        report = LatentReport(tensors["history"].cpu(), **numbers)
        own = (tensors[name] for name in ("start", "ends", "farthest"))
        return cls(model.requires_grad_(False), coordinates, report, *own)


def latents_of(trained: Trained, deviations: Tensor) -> Latents:
    """A trained autoencoder with the latents that samples lie between, for points ``[N, S, P]``."""
    points = deviations.flatten(0, 1)
    empty = deviations.new_zeros(0)
    found = Latents(trained.autoencoder, trained.coordinates, trained.report, empty, empty, empty)
    start = found.encode(torch.zeros_like(points[:1]), points)[0]
    along = torch.stack([found.encode(own, points) for own in deviations])  # [N, S, k]
    far = (along - start).norm(dim=-1).argmax(1)
    return replace(found, start=start, ends=along[:, -1], farthest=along[torch.arange(len(along)), far])
