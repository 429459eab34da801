"""The objective of training: that of which Laplace expands the logarithm.

With prior ``N(μ, P₀⁻¹)``, temperature T and N examples, the log posterior is

    log p(θ|D) = 1/T Σₙ log p(yₙ|f(xₙ, θ)) − ½ (θ−μ)ᵀ P₀ (θ−μ) + constant,

and training minimises ``−1/N log p(θ|D)``. A minibatch b contributes

    ℓ_b(θ) = K/(N' T) Σ_{n∈b} −log p(yₙ|f(xₙ, θ)) + 1/(2N) (θ−μ)ᵀ P₀ (θ−μ),

where K batches with N' examples make an epoch, so that the mean of ℓ over the epoch's batches is the objective also
where batches differ in size. N' is N unless the curvature is computed on other data than those of training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from laplace_plus.batches import Batch, call, output_tensor
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network import Network
from laplace_plus.priors import GaussianPrior


class PriorPenalty:
    """``½ (θ−μ)ᵀ P₀ (θ−μ)`` of the network's own parameters; differentiable in them.

    Args:
        network: Says which entries the prior is over.
        prior: Over them.
    """

    def __init__(self, network: Network, prior: GaussianPrior):
        parameters = dict(network.model.named_parameters())
        sizes = [item.size for item in network.selected]
        precisions = prior.vector().detach().split(sizes)
        means = prior.mean.detach().expand(sum(sizes)).split(sizes)
        self._terms: list[tuple[nn.Parameter, Tensor | None, Tensor, Tensor]] = []
        for item, precision, mean in zip(network.selected, precisions, means, strict=True):
            parameter = parameters[item.name]
            index = None if item.mask is None else item.mask.to(parameter.device).nonzero().squeeze(-1)
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            precision = _shared(precision).to(parameter.device, dtype)
            self._terms.append((parameter, index, precision, _shared(mean).to(parameter.device, dtype)))

    def __call__(self) -> Tensor:
        """The penalty at the present weights, 0-d."""
        total: Tensor | None = None
        for parameter, index, precision, mean in self._terms:
            entries = parameter.flatten() if index is None else parameter.flatten()[index]
            term = (precision * (entries.to(precision.dtype) - mean).square()).sum() / 2
            total = term if total is None else total + term.to(total)
        assert total is not None
        return total


class TrainingObjective:
    """``ℓ_b(θ)`` of a minibatch, as the module's docstring has it.

    Args:
        model: The network as the user trains it, in whatever mode it is in.
        likelihood: At the current noise.
        penalty: The prior's at the current precision.
        temperature: T.
        n_data: N.
        mean_batch_size: ``N'/K``.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        penalty: PriorPenalty,
        *,
        temperature: float,
        n_data: int,
        mean_batch_size: float,
    ):
        self.model = model
        self.likelihood = likelihood
        self.penalty = penalty
        self.temperature = temperature
        self.n_data = n_data
        self.mean_batch_size = mean_batch_size

    def __call__(self, batch: Batch) -> Tensor:
        """``ℓ_b``, 0-d and differentiable in the network's parameters.

        Raises:
            OutputError: Network outputs that do not fit the likelihood.
            NonFiniteError: Outputs that are NaN or infinite.
            LabelError: Targets that do not fit it.
        """
        outputs = self.likelihood.arrange(output_tensor(call(self.model, batch.inputs)))
        self.likelihood.validate(outputs, batch.target)
        rows, targets, weights = self.likelihood.rows(outputs, batch.target)
        log_density = self.likelihood.log_density(rows, targets)
        fit = torch.where(weights > 0, log_density, torch.zeros_like(log_density)).sum()
        penalty = self.penalty() / self.n_data
        return penalty.to(fit) - fit / (self.temperature * self.mean_batch_size)


def _shared(values: Tensor) -> Tensor:
    """One number in place of as many equal ones."""
    low, high = values.aminmax()
    return low if bool(low == high) else values
