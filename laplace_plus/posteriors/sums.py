"""What a fit adds up over the data, and over the ranks that share the data.

Each rank adds up its own data. Blocks that are plain matrices or vectors on every rank are then reduced in one message.
Other blocks (a few rows in place of a matrix, structures of third parties) are gathered, and added one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.curvature.structures import Layout
from laplace_plus.distributed import Group, OwnedSum, assign, balanced_eigen, broadcast_, sum_
from laplace_plus.errors import DataError, DistributedError, EmptyDataError
from laplace_plus.network import Network
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from laplace_plus.structured.blocks import DecomposedBlock, block_from_tensors
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.kronecker import DiagonalOutputBlock
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock

_SUMMABLE = (DiagonalBlock, DenseBlock, KroneckerBlock, DiagonalOutputBlock, SoftmaxOutputBlock)
"""Blocks whose sum has the sums of their tensors, as long as these have the names below."""

_SUMMABLE_TENSORS = frozenset({"values", "matrix", "left", "right", "count"})

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor."""


@dataclass(frozen=True)
class FitSums:
    """What a fit adds up over the data.

    Attributes:
        curvature: H at unit noise.
        statistics: The likelihood's additive statistics.
        n_data: Number of examples seen.
        n_outputs: C.
    """

    curvature: Curvature
    statistics: Tensor
    n_data: int
    n_outputs: int

    def plus(self, other: FitSums) -> FitSums:
        """The sums over both data sets; neither is changed."""
        curvature = self.curvature.clone()
        curvature.add_(other.curvature)
        return replace(
            self, curvature=curvature, statistics=self.statistics + other.statistics, n_data=self.n_data + other.n_data
        )


# -- over ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """One rank's sums, without their content.

    Attributes:
        counts: Number of examples, and number of outputs.
        layers, example_axes: What the network has learnt.
        statistics: Form of the likelihood's statistics.
        blocks: For each block its names, rule, storage, shape, the shape of its layout and its number of components.
        tensors: Forms of the tensors of each block.
    """

    counts: tuple[int, int]
    layers: tuple[str, ...]
    example_axes: dict[str, Any]
    statistics: Form
    blocks: dict[str, tuple[Any, ...]]
    tensors: dict[str, dict[str, Form]]

    def uses(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        own = {"outputs": self.counts[1], "layers": self.layers, "statistics": self.statistics}
        return {**own, **{f"block {key}": entry for key, entry in self.blocks.items()}}


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype


def _zeros(form: Form, device: torch.device) -> Tensor:
    return torch.zeros(form[0], dtype=form[1], device=device)


def sum_over_ranks(group: Group, sums: FitSums | None, network: Network, before: Curvature | None = None) -> FitSums:
    """The sums over all ranks' data, on every rank.

    Args:
        group: The ranks.
        sums: Those of this rank's data, which are used up; None where it had none.
        network: It learns what the others found out about it, such as which layer is the last.
        before: What the sums are to be added to, if to anything: then the same factors lie on the same ranks.

    Raises:
        DistributedError: Another rank failed.
        EmptyDataError: No rank has data.
        DataError: The ranks' data are of different kinds.
    """
    own: dict[str, dict[str, Tensor]] = {}
    mine: _Plan | None = None
    if sums is not None:
        own = {layout.key: block.tensors() for layout, block in sums.curvature}
        blocks = {
            lay.key: (lay.names, lay.rule, block.storage, block.shape, lay.shape, block.n_components)
            for lay, block in sums.curvature
        }
        forms = {key: {name: _form(tensor) for name, tensor in tensors.items()} for key, tensors in own.items()}
        counts, axes = (sums.n_data, sums.n_outputs), dict(network.example_axes)
        mine = _Plan(counts, network.layers, axes, _form(sums.statistics), blocks, forms)
    everyone: list[_Plan | None] = group.exchange("the sums", mine)
    plans = {rank: plan for rank, plan in enumerate(everyone) if plan is not None}
    if not plans:
        raise EmptyDataError(
            "No rank's loader yielded any data.", expected="at least one batch on one rank", got="none"
        )
    source, plan = next(iter(plans.items()))
    for rank, other in plans.items():
        _require_same_use(plan.uses(), other.uses(), source, rank)
        if network.layers != other.layers:  # only the last layer depends on the data
            network.select_last_layer(other.layers[0])
        for call, axis in other.example_axes.items():
            network.example_axes.setdefault(call, axis)
    layouts = _layouts(group, sums, plan, source, shared=len(plans) < group.size)
    storages = {cls.storage for cls in _SUMMABLE}
    summable = [
        key
        for key, entry in plan.blocks.items()
        if entry[2] in storages
        and _SUMMABLE_TENSORS.issuperset(plan.tensors[key])
        and all(other.tensors[key] == plan.tensors[key] for other in plans.values())
    ]
    statistics = _zeros(plan.statistics, torch.device("cpu")) if sums is None else sums.statistics.clone()
    for key in summable:
        if sums is None:
            own[key] = {name: _zeros(form, network.device) for name, form in plan.tensors[key].items()}
    sum_(group, [statistics, *(tensor for key in summable for tensor in own[key].values())])
    others = {key: {n: t.cpu() for n, t in own[key].items()} for key in own if key not in summable}
    gathered = group.exchange("the sums over the data", others) if len(summable) < len(plan.blocks) else []
    totals: list[tuple[Layout, Block]] = []
    for layout, (key, (_, _, storage, shape, *_)) in zip(layouts, plan.blocks.items(), strict=True):
        each = [own[key]] if key in summable else [theirs[key] for theirs in gathered if key in theirs]
        there = [{name: tensor.to(network.device) for name, tensor in tensors.items()} for tensors in each]
        total = block_from_tensors(storage, shape, there[0])
        for tensors in there[1:]:
            total.add_(block_from_tensors(storage, shape, tensors))
        totals.append((layout, total))
    if before is not None or group.shard_factors:
        _share_out(group, totals, before)
    n_data = sum(other.counts[0] for other in plans.values())
    return FitSums(Curvature(totals), statistics, n_data, plan.counts[1])


def _require_same_use(first: dict[str, Any], other: dict[str, Any], source: int, rank: int) -> None:
    """Raise :class:`DataError` unless two ranks' data use the network in the same way."""
    for name in {**first, **other}:
        if first.get(name) != other.get(name):
            raise DataError(
                f"The network is used differently on rank {rank} than on rank {source}: {name}.",
                expected=f"{first.get(name, 'none')} (rank {source})",
                got=f"{other.get(name, 'none')} (rank {rank})",
                fix="Feed batches of one kind on all ranks, or exclude these parameters from the selection.",
            )


def _layouts(group: Group, sums: FitSums | None, plan: _Plan, source: int, *, shared: bool) -> list[Layout]:
    """The layouts in the order of the plan; ranks without data get them from the ``source``."""
    known = {} if sums is None else {layout.key: layout for layout, _ in sums.curvature}
    if not shared:
        return [known[key] for key in plan.blocks]
    indices = [
        known[key].index.clone() if group.rank == source else torch.empty(entry[4], dtype=torch.long)
        for key, entry in plan.blocks.items()
    ]
    broadcast_(group, indices, source)
    return [
        known.get(key) or Layout(key, entry[0], entry[1], index)
        for (key, entry), index in zip(plan.blocks.items(), indices, strict=True)
    ]


def block_of_rank_zero(group: Group, own: Block | None, device: torch.device) -> Block:
    """The block that rank 0 has, on every rank.

    Args:
        group: The ranks.
        own: The block on rank 0, None elsewhere.
        device: Where it is wanted.
    """
    tensors = {} if own is None else own.tensors()
    forms = {name: _form(tensor) for name, tensor in tensors.items()}
    storage, shape, forms = group.exchange("a block", None if own is None else (own.storage, own.shape, forms))[0]
    received = {
        name: tensors[name].contiguous() if name in tensors else _zeros(form, device) for name, form in forms.items()
    }
    broadcast_(group, received.values(), 0)
    return block_from_tensors(storage, shape, received)


# -- factors that lie on one rank each ---------------------------------------------------------------------------------


def _factors(block: Block) -> dict[str, GramSum]:
    """The factors of a block that may lie on one rank alone, by the names of their tensors.

    Where there are several components, a change of the noise takes the factors again, so that all ranks keep them.
    """
    if isinstance(block, KroneckerBlock) and block.n_components == 1:
        right = {"right": block.right_sum} if isinstance(block.right_sum, GramSum) else {}
        return {"left": block.left_sums[0], **right}
    return {"right": block.right_sum} if isinstance(block, DiagonalOutputBlock) and block.n_components == 1 else {}


def _share_out(group: Group, blocks: list[tuple[Layout, Block]], before: Curvature | None) -> None:
    """Keep factors on one rank each: the same as ``before``, or so that ranks get equal work; thin ones stay on all."""
    factors = {(lay.key, name): (block, part) for lay, block in blocks for name, part in _factors(block).items()}
    if before is None:
        large = [key for key, (_, part) in factors.items() if not part.is_thin]
        costs = [float(factors[key][1].groups * factors[key][1].size ** 3) for key in large]
        owners = dict(zip(large, assign(costs, group.size), strict=True))
    else:
        known = {(lay.key, name): part for lay, block in before for name, part in _factors(block).items()}
        owners = {key: part.owner for key, part in known.items() if isinstance(part, OwnedSum)}
    for key, owner in owners.items():
        block, part = factors[key]
        total = part.matrix() if group.rank == owner else None
        owned = OwnedSum(part.groups, part.size, owner=owner, total=total, dtype=part.dtype, device=part.device)
        if key[1] == "left":
            assert isinstance(block, KroneckerBlock)
            block.left_sums[0] = owned
        else:
            assert isinstance(block, (KroneckerBlock, DiagonalOutputBlock))
            block.right_sum = owned


def owned_sums(curvature: Curvature) -> list[OwnedSum]:
    """The factors that lie on one rank each, in an order that all ranks share."""
    return [part for _, block in curvature for part in _factors(block).values() if isinstance(part, OwnedSum)]


def require_owners(group: Group | None, owned: Sequence[OwnedSum]) -> None:
    """Raise :class:`DistributedError` unless the ranks are there on which factors lie."""
    if owned and (group is None or group.size <= max(part.owner for part in owned)):
        raise DistributedError(
            "The factors of this posterior lie on several ranks.",
            expected="an update() on the ranks of the fit",
            got="one process" if group is None else f"{group.size} ranks",
            fix="Call update() on all ranks, with an empty loader where there are no data.",
        )


# -- decompositions and corrected eigenvalues --------------------------------------------------------------------------


def diagonalise_over_ranks(group: Group, curvature: Curvature, weights: Tensor) -> None:
    """Decompose every factor on one rank and tell the others, with about the same work for each.

    Args:
        group: The ranks.
        curvature: The same on every rank.
        weights: Component weights ``[K]``.
    """
    waiting = [b for _, b in curvature if isinstance(b, DecomposedBlock) and not b.is_diagonalised(weights)]
    factors = [block.factors_at(weights) for block in waiting]
    pairs = iter(balanced_eigen(group, [factor for own in factors for factor in own]))
    for block, own in zip(waiting, factors, strict=True):
        block.adopt_eigen(weights, [next(pairs) for _ in own])


def corrected_eigenvalues(curvature: Curvature) -> list[Tensor]:
    """The eigenvalues that a second pass over the data adds to, ``[K, G, o, i]`` for each Kronecker block."""
    return [b.corrected for _, b in curvature if isinstance(b, KroneckerBlock) and b.corrected is not None]
