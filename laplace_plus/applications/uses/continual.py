"""Continual learning: the posterior of earlier tasks is the prior of the next one.

A Gaussian posterior of precision ``Λ_t = Σ_{s≤t} H_s/T + P₀`` keeps earlier tasks in mind while the network learns the
next one: its loss is ``Σ_n −log p(y_n|f(x_n)) + ½ (θ − θ̂_t)ᵀ Λ_t (θ − θ̂_t)``. At the optimum, the new posterior's mean,
the next task's curvature is added. For linear models with Gaussian noise, that is the posterior of all tasks' data.

Huszár (2018), "Note on the quadratic penalties in elastic weight consolidation"; Ritter, Botev and Barber (2018),
"Online structured Laplace approximations for overcoming catastrophic forgetting". Kirkpatrick et al. (2017) keep a
diagonal, and one penalty for each task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.uses.checks import require_posterior
from laplace_plus.applications.uses.task_sums import TaskSums, moved
from laplace_plus.curvature import Curvature
from laplace_plus.errors import ConfigurationError
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.network.selection import Selection, refine, select, uses
from laplace_plus.network.shadow import unwrap
from laplace_plus.posteriors import GaussianPosterior, Subnetwork, get_posterior
from laplace_plus.priors import LAYERWISE, Groups


def penalty(posterior: GaussianPosterior, parameters: nn.Module | Mapping[str, Tensor] | Tensor) -> Tensor:
    """``−log q(θ)`` up to its constant, ``½ (θ − θ̂)ᵀ Σ⁻¹ (θ − θ̂)``, in nats; ``lp.penalty(posterior, parameters)``.

    Add it to the next task's negative log-likelihood, summed over its data; to a mean over N data, add ``penalty / N``.
    It takes one product with the posterior precision, and the network may have moved since the fit. A posterior that
    :func:`continue_on` gave has that of its prior until it is fitted.

    Args:
        posterior: A fitted Gaussian posterior, or a continued one.
        parameters: A model, or tensors by name, of which those of the posterior count; or ``[P]`` in
            ``parameter_names`` order. They may be on any device and of any floating type.

    Returns:
        0-d float64, zero at the mean; differentiable in the parameters.

    Raises:
        NotFittedError: Before :meth:`fit`.
        ConfigurationError: Parameters that are missing or of other shapes.
        UnsupportedError: No Gaussian posterior.

    Example:
        >>> import laplace_plus as lp
        >>> x, net = torch.linspace(-1, 1, 20)[:, None], nn.Linear(1, 1)
        >>> posterior = lp.Full(net, "regression").fit([(x, 2 * x)])
        >>> float(lp.penalty(posterior, net).detach())
        0.0
    """
    require_posterior(posterior)
    is_prior = not posterior.is_fitted and isinstance(posterior.earlier, TaskSums)
    with exact_arithmetic(posterior.network):
        model = posterior.earlier.laplace_model(posterior) if is_prior else posterior.laplace_model(moved=True)
        vector = _vector(posterior.network, parameters, model.vector)[None]
        squares = model.squared_distance(vector, posterior.prior_precision, posterior.temperature)
        return squares[0] / (2 * posterior.covariance_scale)


def continue_on(
    posterior: GaussianPosterior, model: nn.Module, *, parameters: Selection | None = None
) -> GaussianPosterior:
    """A posterior whose prior is this one, to be fitted to the next task; ``lp.continue_on(posterior, model)``.

    Call it before or after the network has learnt the next task; ``fit`` then adds the task's curvature to that of the
    earlier ones, and the mean moves to the network's weights. Kronecker factors are pooled: ``(ΣG) ⊗ (ΣA) / Σn``. The
    evidence is that of all tasks, with the likelihood of earlier ones as a quadratic. Noise, temperature and prior are
    kept, and the scale of the covariance, which is for predictions, becomes one.

    Args:
        posterior: A fitted Gaussian posterior; it stays as it is.
        model: The moved network, or another with the same parameters and perhaps more, such as a new head.
        parameters: A selection of further parameters, under the prior alone so far. By default they are all new ones
            that require gradients, if the posterior was over ``"all"`` parameters or over every one; otherwise none.

    Returns:
        A posterior of the same class; of a :class:`Subnetwork`, of the class within.

    Raises:
        NotFittedError: Before :meth:`fit`.
        ConfigurationError: Parameters that are missing or of other shapes, or new ones under several prior precisions.
        SelectionError: No such parameters.
        UnsupportedError: No Gaussian posterior.

    Example:
        >>> import laplace_plus as lp
        >>> x, net = torch.linspace(-1, 1, 20)[:, None], nn.Linear(1, 1)
        >>> posterior = lp.Full(net, "regression").fit([(x, 2 * x)])
        >>> lp.continue_on(posterior, net).fit([(x, 2 * x)]).n_data
        40
    """
    require_posterior(posterior)
    old, before = posterior.network, posterior.laplace_model(moved=True)
    cls, options, sums = type(posterior), posterior.options, posterior.state
    if isinstance(posterior, Subnetwork):
        cls, options = get_posterior(options["posterior"]), options["posterior_options"]
    _named(old, uses(unwrap(model)))  # refuses a network without them
    masks = {**_further(old, unwrap(model), parameters), **refine(old.selected)}
    network = Network(model, masks, posterior.likelihood.arrange)
    starts = [torch.arange(item.size) + network.offsets[item.name] for item in old.selected]
    places, size = torch.cat(starts), network.n_parameters
    precision, prior_mean, groups = posterior.prior_precision, posterior.prior_mean, posterior.prior_groups
    if size > len(places) and precision.numel() * prior_mean.numel() > 1:
        what, fix = (
            "The prior of new parameters is not known.",
            "Pass parameters=posterior.parameter_names, or set one.",
        )
        got = f"{precision.numel()} precisions and {prior_mean.numel()} means"
        raise ConfigurationError(what, expected="one prior precision and one mean", got=got, fix=fix)

    def placed(values: Tensor, filling: Tensor | float) -> Tensor:
        filled = torch.as_tensor(filling).to(values).expand(size).clone()
        return filled.index_copy(0, places.to(values.device), values)

    found = cls(
        model,
        posterior.likelihood,
        parameters=refine(network.selected),
        prior_mean=placed(prior_mean, 0.0) if prior_mean.ndim and len(prior_mean) == len(places) else prior_mean,
        temperature=posterior.temperature,
        backend=posterior.backend,
        **options,
    )
    if precision.numel() > 1 and groups.name == LAYERWISE and len(precision) == len(old.layers):
        precision = precision[[old.layers.index(layer) for layer in found.network.layers]]
    elif precision.numel() == len(places) > 1:
        precision = placed(precision, 1.0)
    if size == len(places) and groups.name != LAYERWISE:
        found.prior_groups = Groups(groups.name, groups.names, placed(groups.index, 0))
    found.prior_precision = precision
    travelled = (before.vector - prior_mean.to(before.vector)).abs() if sums.travelled is None else sums.travelled
    blocks = [moved(layout, block, places, found.network) for layout, block in sums.curvature]
    found.earlier = TaskSums(
        placed(before.vector, prior_mean),
        sums.n_data,
        sums.n_outputs,
        Curvature(blocks),
        sums.statistics,
        placed(travelled, 0.0),
    )
    return found


def _further(old: Network, model: nn.Module, parameters: Selection | None) -> dict[str, Tensor]:
    """Masks of the parameters that join, by name."""
    if parameters is not None:
        return refine(select(model, parameters))
    known = dict(old.model.named_parameters())
    every = known.keys() <= {item.name for item in old.selected if item.mask is None}
    if not every and not (isinstance(old.selection, str) and old.selection == "all"):
        return {}
    new = {name: one for name, one in model.named_parameters() if one.requires_grad and name not in known}
    return {name: torch.ones(one.shape, dtype=torch.bool) for name, one in new.items()}


def _named(network: Network, known: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of the network's selected parameters; ConfigurationError unless all are there."""
    found = []
    for item in network.selected:
        own = known.get(item.name)
        if not isinstance(own, Tensor) or own.shape != item.shape or not own.is_floating_point():
            got = f"{own.dtype} {list(own.shape)}" if isinstance(own, Tensor) else f"none among {', '.join(known)}"
            raise ConfigurationError(
                f"There is no parameter {item.name!r} of the posterior.", expected=f"floats {list(item.shape)}", got=got
            )
        found.append(own)
    return found


def _vector(network: Network, parameters: Any, like: Tensor) -> Tensor:
    """The entries of the posterior, ``[P]``."""
    if isinstance(parameters, Tensor):
        return checks.shape("The vector of parameters", parameters, like.shape)
    if isinstance(parameters, nn.Module):
        parameters = uses(unwrap(parameters))
    parts = []
    for item, own in zip(network.selected, _named(network, parameters), strict=True):
        flat = own.to(like).flatten()
        parts.append(flat if item.mask is None else flat[item.mask.to(flat.device)])
    return torch.cat(parts)
