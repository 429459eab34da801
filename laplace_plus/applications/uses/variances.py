"""A diagonal posterior from variances that something else has found, such as a variational optimizer.

- IVON (Shen et al., 2024, "Variational learning is effective for large deep networks") keeps ``hess [P]``, with
  ``1/variance = ess (hess + weight_decay)``: take ``prior_precision = ess · weight_decay`` and ``n_data = ess``. The
  mean is the network's weights outside of ``sampled_params``.
- Adam keeps ``exp_avg_sq``, a moving average of squared gradients of a batch's mean loss. For batches of B out of N
  data, ``v̂ = exp_avg_sq / (1 − β₂^step)`` and ``1/variance = N · B · v̂ + prior_precision``. Near an optimum gradients
  of single data cancel, so that their mean over B has a B-th of the variance of one (compare Khan et al., 2018, "Fast
  and scalable Bayesian deep learning by weight-perturbation in Adam"). It is the empirical Fisher matrix, by observed
  labels: too small where the network fits them, too large where it fits them badly. It lags by ``1/(1 − β₂)`` steps,
  and takes in clipping, loss scaling, and the weight decay of ``Adam``, though not of ``AdamW``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.uses.continual import TaskSums
from laplace_plus.curvature import Curvature
from laplace_plus.network.gradients import whole_layout
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors import Diagonal
from laplace_plus.structured import DiagonalBlock


def from_variance(
    model: nn.Module,
    variance: Mapping[str, Tensor] | Tensor,
    likelihood: Any,
    *,
    parameters: Selection = "all",
    prior_precision: float | Tensor | None = None,
    prior_mean: float | Tensor = 0.0,
    n_data: int = 1,
) -> Diagonal:
    """``N(θ̂, diag(variance))`` around the network's weights; ``lp.from_variance(model, variance, ...)``.

    It predicts, is saved, continued and updated as if it had been fitted: the precisions beyond the prior's are the
    curvature, ``h = 1/variance − prior_precision``. No evidence is known of data that it has not seen.

    Args:
        model: The network, whose weights are the mean.
        variance: Positive; ``[P]`` in the order of the selected parameters, or tensors by name. Names select.
        likelihood: As for :class:`Posterior`. Curvature scales with Gaussian noise that is set later.
        parameters: For variances ``[P]``, as for :class:`Posterior`.
        prior_precision: The prior's share of the precisions; by default the least precision.
        prior_mean: As for :class:`Posterior`.
        n_data: The number of data behind the variances, where it is known.

    Raises:
        ConfigurationError: Variances that are not positive and finite, of another shape, or larger than the prior's.
        SelectionError: Names or shapes that are not the network's.

    Example:
        >>> import laplace_plus as lp
        >>> net = nn.Linear(3, 2)
        >>> posterior = lp.from_variance(net, torch.full((8,), 0.01), "classification")
        >>> posterior.predictive(torch.zeros(4, 3)).mean.shape
        torch.Size([4, 2])
    """
    if isinstance(variance, Mapping):
        parameters = {name: torch.ones(own.shape, dtype=torch.bool) for name, own in variance.items()}
    posterior = Diagonal(model, likelihood, parameters=parameters, prior_mean=prior_mean)
    if isinstance(variance, Mapping):
        variance = torch.cat([variance[name].detach().flatten().double() for name in posterior.parameter_names])
    checks.shape("variance", variance, [posterior.n_parameters])
    checks.count("n_data", n_data)
    checks.positive("The least variance", float(variance.min()))
    precision = checks.finite("A variance", variance).detach().to(posterior.network.device, torch.float64).reciprocal()
    posterior.prior_precision = precision.min() if prior_precision is None else prior_precision
    ratio = posterior.prior().vector().to(precision) / precision
    checks.number("The largest ratio of a variance and the prior's", float(ratio.max()), most=1 + 1e-6)
    posterior.network.check_finite()
    adopt_variances(posterior, variance, n_data)
    return posterior


def adopt_variances(posterior: Diagonal, variance: Tensor, n_data: int, n_outputs: int = 0) -> None:
    """Give a posterior the variances ``[P]`` at its own prior, as sums that are known of no data."""
    network = posterior.network
    precision = variance.detach().to(network.device, torch.float64).reciprocal()
    values = precision - posterior.prior().vector().to(precision)
    weights = posterior.backend.component_weights(posterior.likelihood).to(values)
    each = values.clamp(min=0) / (len(weights) * weights[:, None])  # at unit noise, [K, P]
    size = 2 * len(weights) if posterior.likelihood.noise_std is not None else 1
    unknown = torch.full((size,), torch.nan, dtype=torch.float64)
    curvature = Curvature([(whole_layout(network), DiagonalBlock(each.to(network.dtype)[:, None, None]))])
    posterior.set_state(TaskSums(network.vector(), n_data, n_outputs, curvature, unknown))
