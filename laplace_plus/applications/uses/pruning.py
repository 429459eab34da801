"""Pruning: which weights, channels or neurons a network can do without, and what the others become.

For a posterior ``N(θ̂, Σ)`` under a prior ``N(μ, Λ⁻¹)``, setting the weights g to zero changes the log evidence by the
Savage–Dickey ratio ``log N(0; θ̂_g, Σ_gg) − log N(0; μ_g, Λ_gg⁻¹)``, and the mean of the others to
``θ̂_r − Σ_rg Σ_gg⁻¹ θ̂_g``. Both are exact for linear models with Gaussian noise, and their sums over groups do not
depend on the order.

Sources: Dickey (1971), "The weighted likelihood ratio, linear hypotheses on normal location parameters"; Hassibi and
Stork (1992), "Second order derivatives for network pruning: optimal brain surgeon"; Dhahri et al. (2024), "Shaving
weights with Occam's razor: Bayesian sparsification for neural networks using the marginal likelihood".
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.uses.checks import require_posterior
from laplace_plus.applications.uses.units import Criterion, Unit, Units
from laplace_plus.errors import DataError, UnsupportedError
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.network.selection import refine, tied_names
from laplace_plus.posteriors import GaussianPosterior


class Pruned(NamedTuple):
    """A pruned network, and how it came about.

    Attributes:
        state_dict: That of the model without wrappers; copies of all tensors.
        masks: By name of each parameter of the posterior, False where it is zero now. They are a selection,
            ``parameters=masks``, for a posterior of what remains.
        log_evidence_change: ``[K]`` float64, in nats: of each pruned unit, given those before it. NaN for single
            weights of Kronecker blocks that are too large to be written out.
        order: ``[K]``, units in the order of pruning: positions in the concatenated values of :func:`saliency`.
        loss_increase: Of the negative log-likelihood, in nats for each example of the data; NaN without any at hand.
    """

    state_dict: dict[str, Tensor]
    masks: dict[str, Tensor]
    log_evidence_change: Tensor
    order: Tensor
    loss_increase: float


def saliency(
    posterior: GaussianPosterior, criterion: Criterion = "precision", unit: Unit = "weight"
) -> dict[str, Tensor]:
    """How much each unit matters: the least is pruned first.

    Args:
        posterior: A fitted Gaussian posterior; its ``covariance_scale`` does not count.
        criterion: ``"precision"``, ``Σ P_ii θ̂_i²`` over the unit, with the posterior precision P; ``"evidence"``, the
            log evidence that is lost where the unit alone becomes zero, in nats; ``"magnitude"``, ``‖θ̂‖``.
        unit: ``"weight"``, each entry of parameters of two axes or more; ``"channel"``, the weights into one output of
            a layer with its bias; ``"neuron"``, the weights out of one input of a layer; or names of parameters and
            modules, and globs, each of which is one unit.

    Returns:
        Float64 on the CPU, by name of the weights: of a weight's shape, ``[outputs]`` or ``[inputs]``; or 0-d by the
        given names. NaN for entries that the posterior does not cover.

    Raises:
        NotFittedError: Before the fit.
        ConfigurationError: An unknown criterion or unit, names that overlap.
        SelectionError: Names of nothing that the posterior covers, or no parameters that can be pruned.
        UnsupportedError: Anything but a Gaussian posterior; single uses of tied parameters; units whose covariance
            is too large.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> saliency(posterior)["weight"].shape
        torch.Size([1, 1])
    """
    _check(posterior, criterion)
    with exact_arithmetic(posterior.network), torch.no_grad():
        units = Units(posterior, unit)
        found, sizes = units.saliency(criterion).cpu(), [shape.numel() for shape in units.shapes.values()]
    return {n: own.view(units.shapes[n]) for n, own in zip(units.shapes, found.split(sizes), strict=True)}


def prune(
    posterior: GaussianPosterior,
    *,
    sparsity: float | None = None,
    stop: Literal["evidence"] | None = None,
    max_loss_increase: float | None = None,
    criterion: Criterion = "precision",
    unit: Unit = "weight",
    compensate: bool = True,
    data: Iterable[Any] | None = None,
    progress: bool = False,
) -> Pruned:
    """Set units to zero, the least salient first, and move the other weights to their mean given that.

    The posterior's prior should be tuned first: :meth:`Posterior.fit_prior_precision`. Both the evidence and the
    compensation are those of a quadratic model around the trained weights. Look at ``loss_increase``.

    Args:
        posterior: As for :func:`saliency`.
        sparsity: The share of all units to prune.
        stop: ``"evidence"``: where the evidence is largest along the order.
        max_loss_increase: Prune no further than the mean negative log-likelihood of ``data`` grows by so much, in nats
            for each example. Bisection finds how far; one of the three limits is needed, the least counts.
        criterion: As for :func:`saliency`. ``"evidence"`` takes account of what was pruned before.
        unit: As for :func:`saliency`.
        compensate: Whether the other weights move.
        data: Batches for the loss; by default those of the fit.
        progress: Whether to show a progress bar for each pass over the data.

    Returns:
        See :class:`Pruned`. The model stays as it is; ``model.load_state_dict(pruned.state_dict)`` prunes it.

    Raises:
        ConfigurationError: No limit, or one out of range.
        DataError: ``max_loss_increase`` without data.
        UnsupportedError: ``stop="evidence"`` where the evidence is not known.
        NotFittedError, SelectionError: As for :func:`saliency`.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 4), "regression").fit([(x, x * torch.tensor([1.0, 0.0, 2.0, 0.0]))])
        >>> pruned = prune(posterior, sparsity=0.5)
        >>> int(pruned.masks["weight"].sum()), posterior.model.weight.count_nonzero().item()
        (2, 4)
    """
    _check(posterior, criterion)
    checks.choice("stop", stop, ("evidence", None))
    cap = math.inf if max_loss_increase is None else checks.number("max_loss_increase", max_loss_increase, least=0.0)
    is_limited = sparsity is None and (stop is not None or cap < math.inf)
    share = checks.number("sparsity", 1.0 if is_limited else sparsity, least=0.0, most=1.0)
    with suppress(*[DataError] * (max_loss_increase is None and data is None)):  # then the loss is unknown
        data = posterior.training_data.again(data, "The loss is that of data.")
    with exact_arithmetic(posterior.network), torch.no_grad():
        units = Units(posterior, unit)
        order, rank, change = units.order(criterion, share)
        if stop is not None:
            if bool(change.isnan().any()):
                what, fix = "The evidence of single weights in large layers is unknown.", "Or take lp.Diagonal."
                raise UnsupportedError(what, expected="channels or neurons", got=repr(posterior), fix=fix)
            order = order[: int(torch.cat([change.new_zeros(1), change.cumsum(0)]).argmax())]

        def increase(n: int) -> float:
            vector = units.pruned(rank, n, compensate=compensate)
            return math.nan if data is None else _loss(posterior, data, vector, progress) - before

        before = math.nan if data is None else _loss(posterior, data, units.vector, progress)
        n, grown = len(order), increase(len(order))
        if max_loss_increase is not None and not grown <= cap:  # also for a loss that is not finite
            few, grown = 0, 0.0
            while n - few > 1:
                middle = (few + n) // 2
                if (found := increase(middle)) <= cap:
                    few, grown = middle, found
                else:
                    n = middle
            n = few
        vector, kept = units.pruned(rank, n, compensate=compensate), ~units.gone(rank, n)
        masks = refine(posterior.network.selected, kept)
        return Pruned(_state(posterior, vector), masks, change[:n].cpu(), order[:n].cpu(), grown)


def _check(posterior: Any, criterion: str) -> None:
    checks.choice("criterion", criterion, ("precision", "evidence", "magnitude"))
    require_posterior(posterior)
    posterior.require_fit()
    network = posterior.network
    whole = dict(network.model.named_parameters())
    odd = [n for n in network.parameter_names if n not in whole or "parametrizations." in n]
    if odd:
        what, expected = "These parameters cannot be pruned.", "whole tensors that the network multiplies by"
        raise UnsupportedError(what, expected=expected, got=", ".join(odd[:4]))


def _loss(posterior: GaussianPosterior, data: Iterable[Any], vector: Tensor, progress: bool) -> float:
    """Mean negative log-likelihood of an example, in nats."""
    network, statistics, count = posterior.network, [], 0
    parameters = network.substitute(vector)
    for batch in posterior.batches(data, progress=progress, description="Pruning: loss"):
        outputs = network(batch.inputs, parameters)
        posterior.likelihood.validate(outputs, batch.target)
        statistics.append(posterior.likelihood.statistics(outputs, batch.target).double().cpu())
        count += len(outputs)
    return -float(posterior.likelihood.log_likelihood(torch.stack(statistics).sum(0))) / count


def _state(posterior: GaussianPosterior, vector: Tensor) -> dict[str, Tensor]:
    """The model's, with a parameter vector in it."""
    network = posterior.network
    state, others = copy.deepcopy(network.model.state_dict()), tied_names(network.model)
    for name, value in network.substitute(vector).items():
        for known in (name, *others.get(name, ())):
            state[known] = value.to(state[known], copy=True)
    return state
