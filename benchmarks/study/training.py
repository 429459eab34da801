"""Networks of the study and their training: five at a time, each with initial weights and an order of its own.

The first of the five is the MAP network that all posteriors are built on; all five are the deep ensemble. At the end of
each epoch their validation loss is looked at, and the weights of its least are kept besides the last ones: early
stopping, of one or of five. In regression the noise level is learnt with the weights.

The loss is the mean negative log-likelihood of a batch plus ``weight_decay/2 ‖θ‖²``, torch's own weight decay, so that
the last weights are near a maximum of the posterior under a prior of precision ``N · weight_decay``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from benchmarks.study.sets import DataSet
from laplace_plus.errors import ConfigurationError, NonFiniteError

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """Networks after training.

    Attributes:
        last: Weights at the end, member by member; the first are the MAP network's.
        early: Weights of least validation loss.
        noise: Noise levels ``[M]`` that belong to ``last``, in the targets' standardised unit; NaN for classes.
        early_noise: Those that belong to ``early``.
        epochs: The epoch of ``early``, for each.
        seconds: Of processor time, for all.
    """

    last: list[State]
    early: list[State]
    noise: Tensor
    early_noise: Tensor
    epochs: list[int]
    seconds: float


def build(settings: dict[str, Any], data: DataSet) -> nn.Sequential:
    """A network with initial weights, from its section of the configuration.

    Raises:
        ConfigurationError: Unknown settings.
    """
    name = settings.get("activation", "relu")
    if name not in ACTIVATIONS or settings.keys() - {"activation", "hidden", "channels"}:
        raise ConfigurationError(
            "There is no such network.",
            expected=f"hidden, channels, activation: {' or '.join(ACTIVATIONS)}",
            got=repr(settings),
        )
    activation = ACTIVATIONS[name]
    layers: list[nn.Module] = []
    width = math.prod(data.train[0].shape[1:])
    if channels := settings.get("channels"):
        # LeCun's arrangement: two convolutions of 5×5, each with pooling, then dense layers.
        first, second = channels
        colours, side, _ = data.train[0].shape[1:]
        layers += [nn.Conv2d(colours, first, 5), activation(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(first, second, 5), activation(), nn.MaxPool2d(2), nn.Flatten()]
        width = second * ((side // 2 - 2) // 2 - 2) ** 2
    for size in settings.get("hidden", ()):
        layers += [nn.Linear(width, size), activation()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, data.n_outputs))


def restored(settings: dict[str, Any], data: DataSet, state: State) -> nn.Sequential:
    """The network with these weights, in evaluation mode."""
    network = build(settings, data)
    network.load_state_dict(state)
    return network.eval()


def train(network: dict[str, Any], schedule: dict[str, Any], data: DataSet, members: int = 5) -> Trained:
    """Train all members together.

    Args:
        network: The network's section of the configuration.
        schedule: Epochs, learning rate, batch size, weight decay, ``optimizer`` "adam" or "sgd".
        data: What to train and validate on.
        members: How many.

    Raises:
        NonFiniteError: Training diverged.
    """
    started = time.process_time()
    networks = []
    for member in range(members):
        torch.manual_seed(1000 * data.number + member)
        networks.append(build(network, data))
    parameters = {name: value.detach().clone() for name, value in stack_module_state(networks)[0].items()}
    parameters["log_noise"] = torch.full((members,), math.log(0.5))
    forward = _batched(networks)
    loop = _Loop(parameters, forward, data, schedule)
    loop.run()
    n = range(members)
    return Trained(
        [{key: value[k].clone() for key, value in loop.last.items() if key != "log_noise"} for k in n],
        [{key: value[k].clone() for key, value in loop.early.items() if key != "log_noise"} for k in n],
        loop.last["log_noise"].exp(),
        loop.early["log_noise"].exp(),
        loop.epochs.tolist(),
        time.process_time() - started,
    )


Forward = Callable[[dict[str, Tensor], Tensor], Tensor]


def _batched(networks: list[nn.Sequential]) -> Forward:
    """All networks at once: stacked weights and inputs ``[M, B, …]`` to outputs ``[M, B, C]``."""
    first = networks[0]
    if all(isinstance(layer, (nn.Linear, *ACTIVATIONS.values())) for layer in first):

        def dense(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            for number, layer in enumerate(first):
                if isinstance(layer, nn.Linear):
                    bias = parameters[f"{number}.bias"][:, None]
                    x = torch.baddbmm(bias, x, parameters[f"{number}.weight"].mT)
                else:
                    x = layer(x)
            return x

        return dense

    def one(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(first, parameters, (x,))

    def general(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return vmap(one)({key: value for key, value in parameters.items() if key != "log_noise"}, x)

    return general


class _Loop:
    """Training, and the weights of least validation loss."""

    def __init__(self, parameters: dict[str, Tensor], forward: Forward, data: DataSet, schedule: dict[str, Any]):
        self.schedule = {"optimizer": "adam", "learning_rate": 1e-3, "batch_size": 32, "weight_decay": 0.0, **schedule}
        unknown = self.schedule.keys() - {"optimizer", "learning_rate", "batch_size", "weight_decay", "epochs"}
        if unknown or "epochs" not in self.schedule:
            raise ConfigurationError(
                "Training cannot run with these settings.",
                expected="epochs, batch_size, learning_rate, weight_decay, optimizer",
                got=repr(schedule),
            )
        self.parameters = {key: value.requires_grad_() for key, value in parameters.items()}
        self.forward, self.data = forward, data
        self.members = len(parameters["log_noise"])
        self.last: dict[str, Tensor] = {}
        self.early = {key: value.detach().clone() for key, value in parameters.items()}
        self.best = torch.full((self.members,), torch.inf)
        self.epochs = torch.zeros(self.members, dtype=torch.long)

    def _optimizer(self) -> torch.optim.Optimizer:
        weights = [value for key, value in self.parameters.items() if key != "log_noise"]
        rate, decay = self.schedule["learning_rate"], self.schedule["weight_decay"]
        groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": decay}]
        if not self.data.classification:
            groups.append({"params": [self.parameters["log_noise"]], "weight_decay": 0.0})
        kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        if self.schedule["optimizer"] not in kinds:
            raise ConfigurationError(
                "Unknown optimizer.", expected=" or ".join(kinds), got=repr(self.schedule["optimizer"])
            )
        return kinds[self.schedule["optimizer"]](groups, lr=rate, fused=True)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of each member, ``[M]``, for inputs ``[M, B, …]``."""
        outputs = self.forward(self.parameters, x)
        if self.data.classification:
            loss = functional.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none")
            return loss.view(y.shape).mean(1)
        log_noise = self.parameters["log_noise"][:, None, None]
        residual = (outputs - y) * torch.exp(-log_noise)
        return (0.5 * residual.square() + log_noise + 0.5 * math.log(2 * math.pi)).mean((1, 2))

    def run(self) -> None:
        """All epochs."""
        optimizer = self._optimizer()
        generators = [torch.Generator().manual_seed(1000 * self.data.number + k) for k in range(self.members)]
        inputs, targets = self.data.train
        held_out = [part.expand(self.members, *part.shape) for part in self.data.validation]
        size = int(self.schedule["batch_size"])
        for epoch in range(int(self.schedule["epochs"])):
            order = torch.stack([torch.randperm(len(inputs), generator=g) for g in generators])
            for rows in order.split(size, 1):
                loss = self.losses(inputs[rows], targets[rows])
                optimizer.zero_grad(set_to_none=True)
                loss.sum().backward()
                optimizer.step()
            self._look(epoch + 1, *held_out)
        self.last = {key: value.detach().clone() for key, value in self.parameters.items()}

    def _look(self, epoch: int, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            loss = self.losses(x, y)
            if not bool(torch.isfinite(loss).all()):
                raise NonFiniteError(
                    f"{self.data.name}: training diverged in epoch {epoch}.",
                    expected="a finite validation loss",
                    got=str(loss.tolist()),
                    fix="Use a smaller learning_rate.",
                )
            better = loss < self.best
            if bool(better.any()):
                self.best = torch.where(better, loss, self.best)
                self.epochs[better] = epoch
                for key, value in self.parameters.items():
                    self.early[key][better] = value.detach()[better]


def trained(
    folder: Path, network: dict[str, Any], schedule: dict[str, Any], data: DataSet, members: int, stamp: str
) -> Trained:
    """The networks of a split, from the folder if they are there, of the same data and settings (``stamp``)."""
    path = folder / f"{data.name}-{data.number}-{stamp}-{data.checksum}.pt"
    if path.exists():
        return Trained(**torch.load(path, weights_only=True))
    found = train(network, schedule, data, members)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    torch.save(vars(found), temporary)
    temporary.replace(path)
    return found
