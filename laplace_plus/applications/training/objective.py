"""The two objectives of training: the log posterior in the weights, and its Laplace evidence in the hyperparameters.

With prior ``N(μ, P₀⁻¹)``, temperature T and N examples, the log posterior is

    log p(θ|D) = 1/T Σₙ log p(yₙ|f(xₙ, θ)) − ½ (θ−μ)ᵀ P₀ (θ−μ) + constant,

and training minimises ``−1/N log p(θ|D)``. A minibatch b contributes

    ℓ_b(θ) = K/(N' T) Σ_{n∈b} −log p(yₙ|f(xₙ, θ)) + 1/(2N) (θ−μ)ᵀ P₀ (θ−μ),

where K batches with N' examples make an epoch. The mean of ℓ over the epoch's batches is thus the objective also where
batches differ in size. N' is N unless the curvature is computed on other data than those of training.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.training.loop import log_likelihood
from laplace_plus.errors import NonFiniteError
from laplace_plus.network.batches import Batch, call
from laplace_plus.network.selection import uses
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.priors import LAYERWISE, Groups, PriorStructure


class TrainingObjective:
    """``ℓ_b(θ)`` of a minibatch, at a posterior's likelihood, prior and temperature."""

    def __init__(self, model: nn.Module, posterior: GaussianPosterior, *, n_data: int, mean_batch_size: float):
        network, prior = posterior.network, posterior.prior()
        self._model, self._likelihood = model, posterior.likelihood
        self._n_data, self._scale = n_data, float(posterior.temperature) * mean_batch_size
        parameters = uses(network.model)
        self._entries = [(parameters[item.name], item.mask) for item in network.selected]
        vector = network.vector()
        self._precision, self._mean = prior.vector().detach().to(vector), prior.mean.detach().to(vector)

    def penalty(self) -> Tensor:
        """``½ (θ−μ)ᵀ P₀ (θ−μ)`` of the network's own parameters, 0-d; differentiable in them."""
        flat = []
        for parameter, mask in self._entries:
            entries = parameter.flatten() if mask is None else parameter.flatten()[mask.to(parameter.device)]
            flat.append(entries.to(self._precision))
        return (self._precision * (torch.cat(flat) - self._mean).square()).sum() / 2

    def __call__(self, batch: Batch) -> Tensor:
        """``ℓ_b``, 0-d and differentiable in the network's parameters."""
        fit = log_likelihood(self._likelihood, call(self._model, batch.inputs), batch.target)
        return (self.penalty() / self._n_data).to(fit) - fit / self._scale


class HyperparameterAscent:
    """Gradient ascent on the evidence of a fitted posterior, in the logarithms of prior precisions and noise levels.

    By Adam (Kingma and Ba, 2015), whose moments are kept from update to update, or by the posterior's own line search.
    """

    def __init__(
        self,
        posterior: GaussianPosterior,
        structure: str | Groups,
        groups: Groups | None = None,
        *,
        tune_noise: bool,
        steps: int | None,
        learning_rate: float,
    ):
        self.posterior, self.groups = posterior, groups
        self.structure: PriorStructure = LAYERWISE if groups is not None else structure  # type: ignore[assignment]
        self.tune_noise, self.steps = tune_noise, steps
        n_groups, n_entries = len(posterior.prior_groups.names), posterior.n_parameters
        shape = {"scalar": (), "layerwise": (n_groups,), "diagonal": (n_entries,)}[self.structure]
        precision = posterior.prior_precision.detach().double().cpu()
        if self.structure == "diagonal" and precision.shape == (n_groups,):
            precision = posterior.prior().vector().detach().double().cpu()
        if precision.numel() > 1:
            checks.shape("prior_precision", precision, shape)
        precision = precision.reshape(-1).expand(math.prod(shape)).reshape(shape)
        self._checked(posterior.log_marginal_likelihood(precision).detach())  # a structure may be unsupported
        # Searched in e-folds: the precisions, and the noise levels if they are tuned.
        self._logs = [precision.log().requires_grad_()]
        if tune_noise:
            assert posterior.noise_std is not None
            self._logs.append(posterior.noise_std.detach().double().cpu().log().requires_grad_())
        self._optimizer = torch.optim.Adam(self._logs, lr=learning_rate)

    def update(self) -> float:
        """Improve the posterior's hyperparameters at its present fit; the evidence with them, in nats."""
        posterior = self.posterior
        if self.steps is None:
            structure = self.structure if self.groups is None else self.groups
            posterior.fit_prior_precision(structure=structure, tune_noise=self.tune_noise)
            return self._checked(posterior.log_marginal_likelihood().detach())
        with torch.enable_grad():
            for _ in range(self.steps):
                self._optimizer.zero_grad()
                value = posterior.log_marginal_likelihood(*(log.exp() for log in self._logs))
                self._checked(value.detach())
                (-value).backward()
                self._optimizer.step()
        levels = [log.detach().exp() for log in self._logs]
        self._checked(levels[0].log().sum())
        posterior.prior_precision = levels[0]
        if self.tune_noise:
            posterior.noise_std = levels[1]
        return self._checked(posterior.log_marginal_likelihood().detach())

    def _checked(self, value: Tensor) -> float:
        number = value.item()
        if not math.isfinite(number):
            precision = self.posterior.prior_precision
            what = "The evidence is not finite."
            got = f"{number} at prior precisions from {precision.min():.3g} to {precision.max():.3g}"
            raise NonFiniteError(what, expected="a number", got=got, fix="Use a smaller hyper_lr, or a longer burn_in.")
        return number

    def state(self) -> dict[str, Any]:
        """What the next update depends on, apart from the posterior's hyperparameters."""
        if self.steps is None:
            return {}
        logs = [log.detach().clone() for log in self._logs]
        return {"logs": logs, "optimizer": copy.deepcopy(self._optimizer.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` returned."""
        if self.steps is None:
            return
        with torch.no_grad():
            for log, known in zip(self._logs, state["logs"], strict=True):
                log.copy_(known)
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
