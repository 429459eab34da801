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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.uses.conditioning import Joint, Large, iterate_, parts
from laplace_plus.applications.uses.continual import require_gaussian
from laplace_plus.errors import DataError, SelectionError, UnsupportedError
from laplace_plus.geometry import LossLandscape
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.network.selection import Selected, refine, select, tied_names
from laplace_plus.posteriors import GaussianPosterior

Criterion = Literal["precision", "evidence", "magnitude"]
Unit = Literal["weight", "channel", "neuron"] | Sequence[str]

_AT_A_TIME = 32
"""Weights that are chosen by the evidence before it is looked at again; at most one in 64."""


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
            modules, and globs, each of which is one unit; a parameter of several is of the last.

    Returns:
        Float64 on the CPU, by name of the weights: of a weight's shape, ``[outputs]`` or ``[inputs]``; or 0-d by the
        given names. NaN for entries that the posterior does not cover.

    Raises:
        NotFittedError: Before the fit.
        ConfigurationError: An unknown criterion or unit, or no parameters that can be pruned.
        SelectionError: Names of nothing that the posterior covers.
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
        units = _Units(posterior, unit)
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
        units = _Units(posterior, unit)
        order, rank, change = units.order(criterion, share)
        if stop is not None:
            if bool(change.isnan().any()):
                what, fix = "The evidence of single weights in large layers is unknown.", "Or take lp.Diagonal."
                raise UnsupportedError(what, expected="channels or neurons", got=repr(posterior), fix=fix)
            order = order[: int(torch.cat([change.new_zeros(1), change.cumsum(0)]).argmax())]

        network, likelihood = posterior.network, posterior.likelihood
        loss = None
        if data is not None:
            loss = LossLandscape(network, likelihood, data, prior_precision=0.0, progress=progress)

        def mean_loss(vector: Tensor) -> float:
            return math.nan if loss is None else float(loss.value(vector[None])) / loss.n_data

        def increase(n: int) -> float:
            return mean_loss(units.pruned(rank, n, compensate=compensate)) - before

        before = mean_loss(units.vector)
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
        state, others = copy.deepcopy(network.model.state_dict()), tied_names(network.model)
        for name, value in network.substitute(vector).items():
            for known in (name, *others.get(name, ())):
                state[known] = value.to(state[known], copy=True)
        return Pruned(state, masks, change[:n].cpu(), order[:n].cpu(), grown)


class _Units:
    """The units of a network's parameters, numbered, and the posterior's parts in terms of them."""

    def __init__(self, posterior: GaussianPosterior, unit: Unit):
        self.posterior, self.number = posterior, 0
        self.shapes: dict[str, torch.Size] = {}
        network, self.is_weights = posterior.network, unit == "weight"
        self.index = torch.full((network.n_parameters,), -1)
        if isinstance(unit, str):
            checks.choice("unit", unit, ("weight", "channel", "neuron"))
            self._by_layer(network, unit)
        else:
            self._by_name(network, unit)
        self.vector = posterior.laplace_model().vector
        self.index = self.index.to(self.vector.device)
        self.present = self.index[self.index >= 0].unique()
        checks.count("The number of units to prune", len(self.present))
        self.parts, self.precision = parts(posterior, self.index)

    def _place(self, network: Network, item: Selected, numbers: Tensor) -> None:
        own = numbers.expand(item.shape).flatten()
        start = network.offsets[item.name]
        self.index[start : start + item.size] = own if item.mask is None else own[item.mask.cpu()]

    def _by_layer(self, network: Network, unit: str) -> None:
        modules, named = dict(network.model.named_modules()), {item.name: item for item in network.selected}
        for item in network.selected:
            shape = item.shape
            if len(shape) < 2:  # noqa: PLR2004
                continue
            module = modules.get(item.layer)
            swapped = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Embedding)
            inner = [1] * (len(shape) - 2)
            if unit == "weight":
                numbers, count = torch.arange(shape.numel()).view(shape), shape.numel()
            elif (unit == "channel") != swapped:
                numbers, count = torch.arange(shape[0]).view(-1, 1, *inner), shape[0]
            else:  # each group of a convolution has inputs of its own
                groups = int(getattr(module, "groups", 1))
                first, count = torch.arange(shape[0]) // (shape[0] // groups) * shape[1], groups * shape[1]
                numbers = (first[:, None] + torch.arange(shape[1])).view(*shape[:2], *inner)
            self._place(network, item, self.number + numbers)
            prefix, _, own = item.name.rpartition(".")
            bias = named.get(f"{prefix}." * bool(prefix) + own.replace("weight", "bias"))
            if unit == "channel" and bias is not None and bias.shape == (count,):
                self._place(network, bias, self.number + torch.arange(count))
            self.shapes[item.name] = shape if unit == "weight" else torch.Size([count])
            self.number += count

    def _by_name(self, network: Network, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            names = {item.name for item in select(network.model, [pattern])}
            own = [item for item in network.selected if item.name in names]
            if not own:
                expected, got = f"some of {', '.join(network.parameter_names[:6])}", repr(pattern)
                raise SelectionError("The posterior has no such parameters.", expected=expected, got=got)
            for item in own:
                self.index[network.offsets[item.name] :][: item.size] = self.number
            self.shapes[pattern] = torch.Size()
            self.number += 1

    def saliency(self, criterion: Criterion) -> Tensor:
        """``[number]`` float64; NaN where there is nothing."""
        if criterion == "evidence":
            found = -torch.stack([part.changes(self.number) for part in self.parts]).sum(0)
        else:
            if criterion == "precision" and bool(self.precision.isnan().any()):
                what = "The diagonal of a precision is not known in a block so large."
                raise UnsupportedError(what, fix='Take criterion="evidence".')
            scale = self.precision if criterion == "precision" else 1.0
            squares = self.vector.double().square() * scale
            found = squares.new_zeros(self.number + 1).index_add_(0, self.index % (self.number + 1), squares)
            found = found.sqrt() if criterion == "magnitude" else found
        result = torch.full_like(found[:-1], math.nan)
        result[self.present] = found[self.present]
        return result

    def order(self, criterion: Criterion, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Units to prune, ``[K]``, the ranks of all ``[number]``, K for others, and changes of evidence ``[K]``."""
        count, scores = round(share * len(self.present)), self.saliency(criterion)
        if criterion == "evidence" and any(isinstance(part, Joint) for part in self.parts):
            chosen: list[Tensor] = []
            at_a_time = max(1, min(_AT_A_TIME, len(self.present) // 64)) if self.is_weights else 1
            each = torch.stack([part.changes(self.number) for part in self.parts])
            free = ~scores.isnan()
            while (left := count - sum(len(one) for one in chosen)) > 0:
                total = each.sum(0)[:-1].masked_fill(~free, -math.inf)
                chosen.append(total.topk(min(at_a_time, left)).indices)
                now = torch.zeros_like(free).index_fill_(0, chosen[-1], True)
                free &= ~now
                for place, part in enumerate(self.parts):
                    if part.eliminate(now):
                        each[place] = part.changes(self.number)
            order = torch.cat(chosen) if chosen else self.present[:0]
        else:
            order = scores.nan_to_num(math.inf).argsort(stable=True)[:count]
        rank = torch.full_like(scores, count, dtype=torch.long)
        rank[order] = torch.arange(count, device=rank.device)
        change = torch.stack([part.arrange(rank, count) for part in self.parts]).sum(0)
        return order, rank, change[order]

    def gone(self, rank: Tensor, n: int) -> Tensor:
        """Which entries ``[P]`` belong to the first n units."""
        return (rank[self.index] < n) & (self.index >= 0)

    def pruned(self, rank: Tensor, n: int, *, compensate: bool) -> Tensor:
        """The parameter vector without the first n units."""
        vector, gone = self.vector.clone(), self.gone(rank, n)
        if compensate and bool(gone.any()):
            large = torch.zeros_like(gone)
            for part in self.parts:
                part.move_(vector, n)
                if isinstance(part, Large):
                    large[part.index] = True
            vector[gone] = 0
            if bool((large & gone).any()):
                iterate_(vector, self.posterior, large & ~gone, self.precision)
        return vector.masked_fill_(gone, 0)


def _check(posterior: Any, criterion: str) -> None:
    checks.choice("criterion", criterion, ("precision", "evidence", "magnitude"))
    require_gaussian(posterior)
    posterior.require_fit()
    network = posterior.network
    whole = dict(network.model.named_parameters())
    odd = [n for n in network.parameter_names if n not in whole or "parametrizations." in n]
    if odd:
        what, expected = "These parameters cannot be pruned.", "whole tensors that the network multiplies by"
        raise UnsupportedError(what, expected=expected, got=", ".join(odd[:4]))
