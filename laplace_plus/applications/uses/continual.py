"""Continual learning: the posterior of earlier tasks is the prior of the next one.

A Gaussian posterior of precision ``Λ_t = Σ_{s≤t} H_s/T + P₀`` keeps earlier tasks in mind while the network learns the
next one: its loss is ``Σ_n −log p(y_n|f(x_n)) + ½ (θ − θ̂_t)ᵀ Λ_t (θ − θ̂_t)``. At the optimum, the new posterior's mean,
the next task's curvature is added. For linear models with Gaussian noise, that is the posterior of all tasks' data.

Huszár (2018), "Note on the quadratic penalties in elastic weight consolidation"; Ritter, Botev and Barber (2018),
"Online structured Laplace approximations for overcoming catastrophic forgetting". Kirkpatrick et al. (2017) keep a
diagonal, and one penalty for each task.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.curvature import Curvature
from laplace_plus.curvature.structures import used_differently
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.network.gradients import whole_layout
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.network.selection import Selection, refine, select, uses
from laplace_plus.network.shadow import unwrap
from laplace_plus.persistence import stored
from laplace_plus.posteriors import GaussianPosterior, Subnetwork, get_posterior
from laplace_plus.posteriors.state import GaussianState
from laplace_plus.priors import LAYERWISE, Groups
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock
from laplace_plus.structured.layout import Layout
from laplace_plus.structured.low_rank import LowRankBlock


def require_gaussian(posterior: Any) -> None:
    """UnsupportedError for anything but a Gaussian posterior."""
    if not isinstance(posterior, GaussianPosterior):
        raise UnsupportedError("This is no Gaussian posterior.", expected="such as lp.KFAC", got=repr(posterior))


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
    require_gaussian(posterior)
    if not posterior.is_fitted and posterior.earlier is not None:
        posterior = copy.copy(posterior)
        posterior.set_state(posterior.earlier)
    with exact_arithmetic(posterior.network):
        model = posterior.laplace_model(moved=True)
        vector = entries_of(posterior.network, parameters, model.vector)[None]
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
    require_gaussian(posterior)
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
        what = "The prior of new parameters is not known."
        fix = "Pass parameters=posterior.parameter_names, or set one."
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
    blocks = [_placed(layout, block, places, found.network) for layout, block in sums.curvature]
    found.earlier = TaskSums(
        placed(before.vector, prior_mean),
        sums.n_data,
        sums.n_outputs,
        Curvature(blocks),
        sums.statistics,
        placed(travelled, 0.0),
    )
    return found


@stored
@dataclass(frozen=True)
class TaskSums(GaussianState):
    """Sums over tasks that may use other heads, at the ``mean [P]`` of the last one; the next may move the network."""

    def plus(self, other: GaussianState) -> TaskSums:
        """The sums over both, at the network's present weights; the likelihood of earlier data follows as a quadratic.

        DataError if the two treat some parameter differently.
        """
        mean = other.mean
        moved = mean - self.mean
        squares = torch.zeros(len(self.statistics), dtype=torch.float64)
        n_components = self.curvature.blocks[0][1].n_components
        for number, unit in enumerate(torch.eye(n_components).to(mean)):
            parts = [block.quadratic(unit, layout.gather(moved)[None])[0] for layout, block in self.curvature]
            squares[number] = torch.stack(parts).double().sum()
        squares = squares if len(squares) == 2 * n_components else -squares / 2  # of errors, or else a log-likelihood
        travelled = None if self.travelled is None else torch.hypot(self.travelled, moved)
        return replace(
            self,
            curvature=_sum(self.curvature, other.curvature, len(mean)),
            statistics=self.statistics + squares + other.statistics,
            n_data=self.n_data + other.n_data,
            n_outputs=other.n_outputs,
            travelled=travelled,
            mean=mean,
        )


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
            what, expected = f"There is no parameter {item.name!r} of the posterior.", f"floats {list(item.shape)}"
            got = f"{own.dtype} {list(own.shape)}" if isinstance(own, Tensor) else f"none among {', '.join(known)}"
            raise ConfigurationError(what, expected=expected, got=got)
        found.append(own)
    return found


def entries_of(network: Network, parameters: Any, like: Tensor) -> Tensor:
    """The selected entries of a model's parameters, of tensors by name or of a vector, ``[P]``; differentiable."""
    if isinstance(parameters, Tensor):
        return checks.shape("The vector of parameters", parameters, like.shape)
    if isinstance(parameters, nn.Module):
        parameters = uses(unwrap(parameters))
    parts = []
    for item, own in zip(network.selected, _named(network, parameters), strict=True):
        flat = own.to(like).flatten()
        parts.append(flat if item.mask is None else flat[item.mask.to(flat.device)])
    return torch.cat(parts)


def _placed(layout: Layout, block: Block, places: Tensor, network: Network) -> tuple[Layout, Block]:
    """A block at the positions of the same entries in another network's vector; blocks of all entries are zero else."""
    size = network.n_parameters
    if len(places) == size and torch.equal(places, torch.arange(size)):
        return layout, block
    if layout.key != whole_layout(network).key:
        return Layout(layout.key, layout.names, layout.rule, places[layout.index.cpu()]), block
    if isinstance(block, LowRankBlock):
        vectors = block.vectors.new_zeros(len(block.vectors), size)
        vectors[:, places.to(vectors.device)] = block.vectors
        return whole_layout(network), LowRankBlock(block.values, vectors, block.rest)
    if isinstance(block, DiagonalBlock):
        values = block.values.new_zeros(*block.values.shape[:3], size)
        values[..., places.to(values.device)] = block.values
        return whole_layout(network), DiagonalBlock(values)
    units = torch.eye(block.n_components).to(block.parts()[0])
    each = torch.stack([block.dense(unit) for unit in units])
    places, wide = places.to(each.device), each.new_zeros(len(each), 1, size, size)
    wide[..., places[:, None], places] = each
    return whole_layout(network), DenseBlock(wide, (1, 1, size))


def _sum(old: Curvature, new: Curvature, size: int) -> Curvature:
    """The sum of two tasks' curvatures, where a head that one of them does not use is zero, in whatever blocks."""
    mine, theirs = ({layout.key: layout for layout, _ in one} for one in (old, new))
    if mine.keys() == theirs.keys():
        return old.clone().add_(new)
    if any(getattr(block, "corrected", None) is not None for _, block in old):
        raise used_differently(sorted(mine.keys() ^ theirs.keys()))  # eigenvalues are measured in the old blocks' bases
    if all(isinstance(block, DiagonalBlock) for one in (old, new) for _, block in one):
        first: Any = old.blocks[0][1]
        total = first.values.new_zeros(first.n_components, size)
        for layout, block in old:
            assert isinstance(block, DiagonalBlock)
            layout.scatter_(total, block.values)
        regrouped = Curvature([(layout, DiagonalBlock(layout.gather(total))) for layout in new.layouts])
        return regrouped.add_(new)
    return old.clone().add_(new)
