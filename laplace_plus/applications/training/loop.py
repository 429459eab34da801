"""Epochs of ordinary training: what both trainings of weights and hyperparameters share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau

from laplace_plus import checks
from laplace_plus.errors import CheckpointError, ConfigurationError, NonFiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import Batch, batch_size, iterate, output_tensor
from laplace_plus.network.network import Network
from laplace_plus.network.selection import uses
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.posteriors.state import require_restartable
from laplace_plus.priors import STRUCTURES, Groups
from laplace_plus.tuning.groups import chosen_groups

OptimizerFactory = Callable[..., optim.Optimizer]
SchedulerFactory = Callable[[optim.Optimizer], Any]


class Loop:
    """Epochs of training of all parameters that require gradients, and of ``further`` tensors.

    The keywords are those of :func:`~laplace_plus.train_marginal_likelihood`; ``other`` are its other batches.

    Attributes:
        losses: The mean of the objective over each epoch so far.
        n_data: N, the examples of an epoch; or those of other data.
        mean_batch_size: That of an epoch.
    """

    n_data: int
    mean_batch_size: float

    def __init__(
        self,
        model: nn.Module,
        network: Network,
        loader: Iterable[Any],
        *,
        epochs: int,
        optimizer: OptimizerFactory,
        optimizer_options: Mapping[str, Any],
        scheduler: SchedulerFactory | None,
        max_gradient_norm: float | None,
        generator: torch.Generator | None,
        other: Iterable[Any] | None = None,
        further: Sequence[Tensor] = (),
    ):
        checks.count("epochs", epochs)
        if max_gradient_norm is not None:
            checks.positive("max_gradient_norm", max_gradient_norm)
        for data in (loader, other):
            if isinstance(data, Iterator):  # iter() of a loader would draw a seed
                require_restartable(data, "Training passes over the data many times.")
        self.model, self.network, self.loader = model, network, loader
        self.max_gradient_norm, self.generator = max_gradient_norm, generator
        self.generators = _generators(network.device, [loader, other], generator)
        trained = [p for p in network.model.parameters() if p.requires_grad]
        self.optimizer = optimizer([*trained, *further], **optimizer_options)
        with_prior = {id(own) for name, own in uses(network.model).items() if name in network.parameter_names}
        for group in self.optimizer.param_groups:
            if group.get("weight_decay", 0) and any(id(own) in with_prior for own in group["params"]):
                what = "The prior already is the weight decay, which would count twice."
                got = f"{type(self.optimizer).__name__} with weight_decay={group['weight_decay']}"
                fix = 'Pass optimizer_options={"weight_decay": 0, ...}.'
                raise ConfigurationError(what, expected="an optimizer without weight decay", got=got, fix=fix)
        self.scheduler = None if scheduler is None else scheduler(self.optimizer)
        self.losses: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within, gradients are computed; afterwards modules have the modes of before, and parameters no gradients."""
        modes = [(module, module.training) for module in self.network.model.modules()]
        try:
            with torch.enable_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter in self.network.model.parameters():
                parameter.grad = None

    def begin(self, posterior: GaussianPosterior, data: Iterable[Any], structure: str | Groups) -> Groups | None:
        """Fit to one batch first: what posterior or data do not support is refused before hours of training.

        The groups of a prior's structure, which the posterior gets; None for plain structures.
        """
        posterior.network.check_finite()
        batch = next(iterate(data, device=posterior.network.device))
        posterior.fit([(batch.inputs, batch.target)], generator=self.generator)
        if structure in STRUCTURES:
            return None
        posterior.prior_groups = chosen_groups(posterior, structure, [(batch.inputs, batch.target)])
        return posterior.prior_groups

    def count(self, other: Iterable[Any] | None = None) -> None:
        """Set N and the mean batch size by a pass over the data; generators are as before."""
        states = [generator.get_state() for generator in self.generators]
        every = [self.loader] if other is None else [self.loader, other]
        sizes = [[batch_size(batch.target) for batch in iterate(data, device="cpu")] for data in every]
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        self.n_data, self.mean_batch_size = sum(sizes[-1]), sum(sizes[0]) / len(sizes[0])

    def train(self, objective: Callable[[Batch], Tensor]) -> float:
        """One epoch; the mean of the objective over its batches. NonFiniteError says where training diverged."""
        self.model.train()
        clipped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        total, sizes = 0.0, list[int]()
        try:
            for batch in iterate(self.loader, device=self.network.device):
                sizes.append(batch_size(batch.target))
                self.optimizer.zero_grad()
                loss = objective(batch)
                checks.finite("The loss", loss.detach())
                loss.backward()
                if self.max_gradient_norm is not None:
                    nn.utils.clip_grad_norm_(clipped, self.max_gradient_norm)
                self.optimizer.step()
                total += loss.item()
            self.network.check_finite()
        except NonFiniteError as error:
            what = f"Training diverged in epoch {len(self.losses) + 1}, by batch {len(sizes)}. {error}"
            raise NonFiniteError(what, fix="Use a smaller learning rate, or max_gradient_norm.") from error
        self.n_examples, self.mean_batch_size = sum(sizes), sum(sizes) / len(sizes)
        self.losses.append(total / len(sizes))
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self.losses[-1])
        elif self.scheduler is not None:
            self.scheduler.step()
        return self.losses[-1]

    def state(self) -> dict[str, Any]:
        """What the next epoch depends on, as copies."""
        return {
            "weights": weights_of(self.network.model),
            "losses": [*self.losses],
            "n_data": self.n_data,
            "mean_batch_size": self.mean_batch_size,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "scheduler": None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict()),
            "generators": [generator.get_state() for generator in self.generators],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`; CheckpointError for one of another network or of other generators."""
        names, known = weights_of(self.network.model).keys(), state.get("weights", {}).keys()
        if names != known or len(state.get("generators", ())) != len(self.generators):
            what, fix = "The state is not one of this training.", "Pass the same network, loaders and generator."
            raise CheckpointError(what, expected=f"weights {', '.join(names)}", got=", ".join(known), fix=fix)
        put_back(self.network.model, state["weights"])
        self.losses, self.n_data = [*state["losses"]], state["n_data"]
        self.mean_batch_size = state["mean_batch_size"]
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        for generator, own in zip(self.generators, state["generators"], strict=True):
            generator.set_state(own.cpu())


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, persistent or not."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def put_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write the values that :func:`weights_of` copied into the network's own tensors."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(weights[name])


def _generators(device: torch.device, loaders: list[Any], generator: torch.Generator | None) -> list[torch.Generator]:
    """What a run's random numbers come from: torch's global generators, those of loaders and samplers, the caller's."""
    held: list[Any] = [torch.default_generator]
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        holders = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        held += [getattr(holder, "generator", None) for holder in holders]
    held.append(generator)
    if device.type == "cuda":
        torch.cuda.init()
        held.append(torch.cuda.default_generators[device.index])
    return list({id(own): own for own in held if isinstance(own, torch.Generator)}.values())


def log_likelihood(likelihood: Likelihood, raw: Any, target: Any) -> Tensor:
    """``Σ log p(y | f)`` of a batch's rows that are not ignored, from what the model returns; differentiable."""
    outputs = likelihood.arrange(output_tensor(raw))
    likelihood.validate(outputs, target)
    return likelihood.log_densities(outputs, target).sum()
