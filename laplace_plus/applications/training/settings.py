"""The arguments of a training run, checked before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn, optim

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError
from laplace_plus.io import digest
from laplace_plus.network.network import Network
from laplace_plus.posteriors import GaussianPosterior, get_posterior
from laplace_plus.priors import Groups, as_hyperparameter

OptimizerFactory = Callable[..., optim.Optimizer]
SchedulerFactory = Callable[[optim.Optimizer], Any]
PosteriorFactory = Callable[..., GaussianPosterior]


class Settings(SimpleNamespace):
    """The arguments of :func:`~laplace_plus.train_marginal_likelihood`, without data and randomness; checked."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        checks.count("epochs", self.epochs)
        checks.count("frequency", self.frequency)
        checks.count("burn_in", self.burn_in or 1)
        checks.count("hyper_steps", 1 if self.hyper_steps is None else self.hyper_steps)
        checks.count("patience", 1 if self.patience is None else self.patience)
        clip = 1.0 if self.max_gradient_norm is None else self.max_gradient_norm
        checks.positive("temperature", self.temperature)
        checks.positive("hyper_lr", self.hyper_lr)
        checks.positive("max_gradient_norm", clip)
        checks.choice("schedule_by", self.schedule_by, ("epoch", "batch"))
        if self.burn_in >= self.epochs:
            what, expected = "The hyperparameters would never be updated.", "fewer epochs of burn_in than epochs"
            raise ConfigurationError(what, expected=expected, got=f"burn_in={self.burn_in}, epochs={self.epochs}")
        if self.patience is not None and not self.early_stopping:
            raise ConfigurationError(
                "Patience belongs to early stopping.", expected="early_stopping=True", got="early_stopping=False"
            )
        if self.resume and self.checkpoint is None:
            raise ConfigurationError("There is nothing to resume from.", expected="checkpoint=path", got="None")

    def updates_after(self, epoch: int) -> bool:
        """Whether the hyperparameters are updated after an epoch, counted from 1."""
        beyond = epoch - self.burn_in
        return bool(epoch == self.epochs or (beyond > 0 and beyond % self.frequency == 0))

    def make_posterior(self, model: nn.Module, noise_std: Tensor | None = None) -> GaussianPosterior:
        """A posterior of these settings, with unit prior precision."""
        likelihood = self.likelihood if noise_std is None else self.likelihood.with_noise(noise_std)
        options: dict[str, Any] = {} if self.backend is None else {"backend": self.backend}
        made = self.posterior(
            model, likelihood, prior_precision=1.0, prior_mean=self.prior_mean, temperature=self.temperature, **options
        )
        if not isinstance(made, GaussianPosterior):
            what = "The posterior has no evidence."
            expected = "a Gaussian posterior's class, such as lp.KFAC, or a function that returns one"
            raise ConfigurationError(what, expected=expected, got=f"a {type(made).__name__}")
        return made

    def make_optimizer(self, network: Network) -> optim.Optimizer:
        """The optimizer of all parameters that require gradients."""
        parameters = [parameter for parameter in network.model.parameters() if parameter.requires_grad]
        made = self.optimizer(parameters, **self.optimizer_options) if callable(self.optimizer) else self.optimizer
        if not isinstance(made, optim.Optimizer):
            what = "The optimizer argument returned no optimizer."
            expected = "a class such as torch.optim.Adam, or a function that returns an optimizer of the parameters"
            raise ConfigurationError(what, expected=expected, got=f"a {type(made).__name__}")
        under_prior = {id(network.held.places[name][2]) for name in network.parameter_names}
        for group in made.param_groups:
            if group.get("weight_decay", 0) and any(id(parameter) in under_prior for parameter in group["params"]):
                what = "The prior already is the weight decay, which would count twice."
                got = f"{type(made).__name__} with weight_decay={group['weight_decay']}"
                fix = 'Pass optimizer_options={"weight_decay": 0, ...}.'
                raise ConfigurationError(what, expected="an optimizer without weight decay", got=got, fix=fix)
        return made

    def described(self, posterior: GaussianPosterior, optimizer: optim.Optimizer, scheduler: Any) -> dict[str, Any]:
        """The settings that a continued run must share with the one before, as JSON gives them back."""
        same = (
            *("temperature", "tune_noise", "schedule_by", "max_gradient_norm", "burn_in", "frequency"),
            *("hyper_steps", "hyper_lr", "early_stopping"),
        )
        structure = self.structure
        if isinstance(structure, Groups):
            structure = [structure.name, *structure.names, digest(structure.index)]
        described = {name: getattr(self, name) for name in same} | {
            "structure": structure,
            "likelihood": self.likelihood.config(),
            "posterior": [type(posterior).__name__, posterior.options()],
            "backend": posterior.backend.config(),
            "prior_precision": digest(as_hyperparameter(self.prior_precision).double()),
            "prior_mean": digest(as_hyperparameter(self.prior_mean).double()),
            "optimizer": type(optimizer).__name__,
            "optimizer_options": {name: _comparable(value) for name, value in self.optimizer_options.items()},
            "scheduler": None if scheduler is None else type(scheduler).__name__,
        }
        back: dict[str, Any] = json.loads(json.dumps(described))
        return back


def resolve_posterior(posterior: str | PosteriorFactory) -> PosteriorFactory:
    """A class by its name, or the factory itself."""
    found = get_posterior(posterior) if isinstance(posterior, str) else posterior
    if not callable(found):
        what = "The posterior is not a class."
        expected = "a Gaussian posterior's class, its name, or a function (model, likelihood, **options)"
        fix = "Pass lp.KFAC itself; functools.partial(lp.KFAC, ...) gives it options."
        raise ConfigurationError(what, expected=expected, got=f"a {type(posterior).__name__}", fix=fix)
    return found  # make_posterior checks what it makes


def _comparable(value: Any) -> Any:
    """An optimizer's option as JSON; objects by their type, since their texts may hold addresses."""
    if isinstance(value, Tensor):
        return digest(value.double())
    if isinstance(value, (list, tuple)):
        return [_comparable(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
