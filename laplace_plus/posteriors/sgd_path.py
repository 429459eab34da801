"""Weights on the path of stochastic gradient descent, and their moments (SWAG; Maddox et al., 2019)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import SelectionError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import global_randomness
from laplace_plus.network import batches
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored


@stored
@dataclass(frozen=True)
class PathMoments:
    """What is known of the weights ``θ_1 … θ_T`` on a path.

    Attributes:
        mean: The running mean ``θ̄_T``, ``[P]`` float64.
        squares: ``Σ (θ_t − θ̄_T)²``, ``[P]`` float64.
        deviations: ``θ_t − θ̄_t`` of the last weights, ``[k, P]``.
        count: T.
    """

    mean: Tensor
    squares: Tensor
    deviations: Tensor
    count: int = 0

    @classmethod
    def none(cls, like: Tensor) -> PathMoments:
        """Those of no weights yet; they will be ``like`` a vector ``[P]``."""
        zeros = torch.zeros_like(like, dtype=torch.float64)
        return cls(zeros, zeros, like.new_zeros(0, len(like)))

    def plus(self, vector: Tensor, rank: int = 0) -> PathMoments:
        """With further weights ``[P]``; the last ``rank`` deviations are kept."""
        count = self.count + 1
        step = vector.to(self.mean) - self.mean
        mean = self.mean + step / count
        deviation = vector.to(mean) - mean
        kept = torch.cat([self.deviations, deviation[None].to(self.deviations)])
        return PathMoments(mean, self.squares + step * deviation, kept[max(0, len(kept) - rank) :], count)

    @property
    def variance(self) -> Tensor:
        """``1/T Σ θ_t² − θ̄_T²``, ``[P]`` float64."""
        return self.squares / self.count


@stored
@dataclass(frozen=True)
class DiagonalSWAG:
    """Train a copy of the network further by SGD, and take the variance of each weight over the epochs' ends.

    The loss is the mean negative log-likelihood of a batch plus half of ``weight_decay`` times the squared norm, as
    ``torch.optim.SGD`` has it; the copy is in training mode. The network itself stays as it is.

    Args:
        learning_rate: Constant; large enough that the weights keep moving.
        n_snapshots: Number of epochs, each of which ends with a snapshot; at least 2.
        momentum: Of SGD.
        weight_decay: Of SGD.

    Raises:
        ConfigurationError: A number out of range.
    """

    learning_rate: float = 0.01
    n_snapshots: int = 40
    momentum: float = 0.9
    weight_decay: float = 3e-4

    def __post_init__(self) -> None:
        checks.count("n_snapshots", self.n_snapshots, 2, fix="The variance of one snapshot is zero.")
        checks.positive("learning_rate", self.learning_rate)
        checks.number("momentum", self.momentum, least=0.0, most=1.0)
        checks.number("weight_decay", self.weight_decay, least=0.0)

    def follow(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        *,
        rank: int = 0,
        name: str = "DiagonalSWAG",
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> PathMoments:
        """Train, and give the moments of the network's selected entries; progress and errors have the ``name``.

        Raises:
            NonFiniteError: Training diverges.
            SelectionError: No output depends on a selected entry.
        """
        moving = copy.deepcopy(network.model).train().requires_grad_(False)
        vector = network.vector().clone().requires_grad_()  # the selected entries alone are trained
        rates: Any = {"lr": self.learning_rate, "momentum": self.momentum, "weight_decay": self.weight_decay}
        optimizer, moments, reached = torch.optim.SGD([vector], **rates), PathMoments.none(network.vector()), False
        epochs = progress_bar(range(self.n_snapshots), enabled=progress, description=f"{name}: epochs")
        with global_randomness(network.device, generator), torch.enable_grad():
            for epoch in epochs:
                for batch in batches.iterate(data, device=network.device):
                    args, keywords = batches.bind(moving, batch.inputs)
                    raw = torch.func.functional_call(moving, network.substitute(vector), args, keywords)
                    outputs = likelihood.arrange(batches.output_tensor(raw))
                    what = f"{name} diverged in epoch {epoch + 1}: the network's output"
                    checks.finite(what, outputs, fix="Use a smaller learning_rate.")
                    likelihood.validate(outputs.detach(), batch.target)
                    rows, targets, weight = likelihood.rows(outputs, batch.target)
                    loss = -(likelihood.log_density(rows, targets) * weight).sum() / weight.sum().clamp(min=1)
                    if loss.requires_grad:
                        (vector.grad,) = torch.autograd.grad(loss, vector)
                        reached = reached or bool(vector.grad.any())
                    optimizer.step()
                if not reached:
                    what, expected = f"{name} has nothing to train.", "outputs that depend on selected parameters"
                    raise SelectionError(what, expected=expected, got="losses without gradients")
                moments = moments.plus(vector.detach(), rank)
        return moments
