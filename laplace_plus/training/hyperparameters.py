"""Steps of gradient ascent on the evidence, in the logarithms of prior precisions and noise levels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.priors import Groups, PriorStructure


class HyperparameterAscent:
    """Adam (Kingma and Ba, 2015) on the evidence of a fitted posterior, with moments kept from update to update.

    Args:
        posterior: Fitted at least once; its hyperparameters are what is searched.
        structure: ``"scalar"``, ``"layerwise"`` (one precision for each of the groups) or ``"diagonal"``.
        groups: Those that the posterior has; None for the layers.
        tune_noise: Whether noise levels are searched too.
        steps: Steps for each update; None for the optimum, found by line search.
        learning_rate: Of Adam, in e-folds.

    Raises:
        ConfigurationError: A current precision that does not have the structure.
        UnsupportedError: A structure that the posterior does not take.
    """

    def __init__(
        self,
        posterior: GaussianPosterior,
        structure: PriorStructure,
        groups: Groups | None = None,
        *,
        tune_noise: bool,
        steps: int | None,
        learning_rate: float,
    ):
        self.posterior = posterior
        self.structure, self.groups = structure, groups
        self.tune_noise = tune_noise
        self.steps = steps
        n_groups, n_entries = len(posterior.prior_groups.names), posterior.n_parameters
        shape = {"scalar": (), "layerwise": (n_groups,), "diagonal": (n_entries,)}[structure]
        precision = posterior.prior_precision.detach().double().cpu()
        if structure == "diagonal" and precision.shape == (n_groups,):
            precision = posterior.prior().vector().detach().double().cpu()
        if precision.numel() not in (1, math.prod(shape)):
            raise ConfigurationError(
                f'The prior precision is not one of the structure "{structure}".',
                expected=f"a number, or a tensor of shape {list(shape)}",
                got=f"shape {list(precision.shape)}",
            )
        precision = precision.reshape(-1).expand(math.prod(shape)).reshape(shape)
        self._checked(posterior.log_marginal_likelihood(precision).detach())  # shows whether the posterior takes it
        if steps is None:
            return
        self.log_precision = precision.log().requires_grad_()
        searched = [self.log_precision]
        self.log_noise: Tensor | None = None
        if tune_noise:
            assert posterior.noise_std is not None
            self.log_noise = posterior.noise_std.detach().double().cpu().log().requires_grad_()
            searched.append(self.log_noise)
        self.optimizer = torch.optim.Adam(searched, lr=learning_rate)

    def update(self) -> float:
        """Improve the posterior's hyperparameters at its present fit.

        Returns:
            The evidence with them, in nats.

        Raises:
            NonFiniteError: The evidence, or its gradient, is NaN or infinite.
        """
        if self.steps is None:
            structure = self.structure if self.groups is None else self.groups
            self.posterior.fit_prior_precision(structure=structure, tune_noise=self.tune_noise)
            return self._checked(self.posterior.log_marginal_likelihood().detach())
        with torch.enable_grad():
            for _ in range(self.steps):
                self.optimizer.zero_grad()
                value = self.posterior.log_marginal_likelihood(*self._point())
                self._checked(value.detach())
                (-value).backward()
                self.optimizer.step()
        with torch.no_grad():
            precision, noise = self._point()
            self._checked(precision.log().sum())
            self.posterior.prior_precision = precision
            if noise is not None:
                self.posterior.noise_std = noise
        return self._checked(self.posterior.log_marginal_likelihood().detach())

    def _point(self) -> tuple[Tensor, Tensor | None]:
        return self.log_precision.exp(), None if self.log_noise is None else self.log_noise.exp()

    def _checked(self, value: Tensor) -> float:
        number = value.item()
        if not math.isfinite(number):
            precision = self.posterior.prior_precision
            raise NonFiniteError(
                "The evidence is not finite.",
                expected="a number",
                got=f"{number} at prior precisions from {precision.min():.3g} to {precision.max():.3g}",
                fix="Use a smaller hyper_lr, or a longer burn_in.",
            )
        return number

    # -- to be continued -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that the next update depends on, the posterior's hyperparameters apart."""
        if self.steps is None:
            return {}
        searched = {"log_precision": self.log_precision.detach(), "optimizer": self.optimizer.state_dict()}
        return searched if self.log_noise is None else {**searched, "log_noise": self.log_noise.detach()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` returned."""
        if self.steps is None:
            return
        with torch.no_grad():
            self.log_precision.copy_(state["log_precision"])
            if self.log_noise is not None:
                self.log_noise.copy_(state["log_noise"])
        self.optimizer.load_state_dict(state["optimizer"])
