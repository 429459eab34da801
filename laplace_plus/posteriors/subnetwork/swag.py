"""Variances of weights on the path of stochastic gradient descent (SWAG; Maddox et al., 2019), entry by entry."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._memory import require_room
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, NonFiniteError, SelectionError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import global_randomness
from laplace_plus.network import batches
from laplace_plus.network.gradients import forward_parts
from laplace_plus.network.network import Network


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
        ConfigurationError: A number out of range; or a given memory budget does not hold a step on a batch.
    """

    learning_rate: float = 0.01
    n_snapshots: int = 40
    momentum: float = 0.9
    weight_decay: float = 3e-4

    def __post_init__(self) -> None:
        checks.count("n_snapshots", self.n_snapshots)
        if self.n_snapshots < 2:  # noqa: PLR2004
            raise ConfigurationError("The variance of one snapshot is zero.", expected="n_snapshots >= 2", got="1")
        if not self.learning_rate > 0 or not 0 <= self.momentum < 1 or not self.weight_decay >= 0:
            expected = "learning_rate > 0, 0 <= momentum < 1, weight_decay >= 0"
            raise ConfigurationError("SGD cannot run with these settings.", expected=expected, got=repr(self))

    def run(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Variances ``[P]`` of the network's selected entries, over the snapshots (divided by their number)."""
        start, count = network.vector().double(), 0
        mean, square = torch.zeros_like(start), torch.zeros_like(start)  # of the deviation from the start

        def take(vector: Tensor) -> None:
            nonlocal count
            deviation, count = vector.double() - start, count + 1
            step = deviation - mean
            mean.add_(step / count)
            square.add_(step * (deviation - mean))

        self.follow(network, likelihood, data, take, progress=progress, generator=generator)
        return (square / self.n_snapshots).to(network.dtype)

    def follow(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        take: Callable[[Tensor], Any],
        *,
        name: str = "DiagonalSWAG",
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        """Train, and give the weights ``[P]`` to ``take`` as each epoch ends; progress and errors have the ``name``."""
        moving = copy.deepcopy(network.model).train().requires_grad_(False)
        vector = network.vector().clone().requires_grad_()  # the selected entries alone are trained
        rates: Any = {"lr": self.learning_rate, "momentum": self.momentum, "weight_decay": self.weight_decay}
        optimizer = torch.optim.SGD([vector], **rates)
        reached, epochs = False, progress_bar(range(self.n_snapshots), enabled=progress, description=f"{name}: epochs")
        with global_randomness(network.device, generator), torch.enable_grad():
            for epoch in epochs:
                for batch in batches.iterate(data, device=network.device):
                    forward_parts(network, batch.inputs)
                    size = len(batch.target)  # which stays whole: batch normalisation makes examples depend
                    each, what = network.bytes_per_example or 0, f"a step of training on {size} examples"
                    require_room(size * each, what, network.device, if_given=True)
                    args, kwargs = batches.bind(moving, batch.inputs)
                    raw = torch.func.functional_call(moving, network.substitute(vector), args, kwargs)
                    outputs = likelihood.arrange(batches.output_tensor(raw))
                    if not bool(torch.isfinite(outputs).all()):
                        what, fix = f"{name} diverged in epoch {epoch + 1}.", "Use a smaller learning_rate."
                        raise NonFiniteError(what, expected="finite outputs of the network", got="NaN or Inf", fix=fix)
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
                take(vector.detach())
