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
from typing import Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.persistence import stored

Negatives = Literal["derangement", "shuffle"]
Projection = Literal["auto", "none", "principal"]

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
