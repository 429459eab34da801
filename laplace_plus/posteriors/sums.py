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


# -- what ranks tell each other before they add ------------------------------------------------------------------------


@dataclass(frozen=True)
class _BlockPlan:
    """A block as one rank has it, without its content."""

    names: tuple[str, ...]
    rule: str
    storage: str
    shape: tuple[int, int, int]
    layout_shape: tuple[int, int, int]
    n_components: int
    tensors: dict[str, Form]


@dataclass(frozen=True)
class _Plan:
    """One rank's sums, without their content."""

    n_data: int
    n_outputs: int
    layers: tuple[str, ...]
    example_axes: dict[str, Any]
    statistics: Form
    blocks: dict[str, _BlockPlan]

    @classmethod
    def of(cls, sums: FitSums, tensors: dict[str, dict[str, Tensor]], network: Network) -> _Plan:
        """The plan of a rank's sums, of which ``tensors`` are those of each block."""
        blocks = {
            layout.key: _BlockPlan(
                layout.names,
                layout.rule,
                block.storage,
                block.shape,
                layout.shape,
                block.n_components,
                {name: _form(tensor) for name, tensor in tensors[layout.key].items()},
            )
            for layout, block in sums.curvature
        }
        axes = dict(network.example_axes)
        return cls(sums.n_data, sums.n_outputs, network.layers, axes, _form(sums.statistics), blocks)


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype


def _agreed(plans: Sequence[_Plan | None]) -> tuple[int, _Plan]:
    """The first rank that has data, and its plan, which the others' agree with."""
    have = [(rank, plan) for rank, plan in enumerate(plans) if plan is not None]
    if not have:
        raise EmptyDataError(
            "No rank's loader yielded any data.", expected="at least one batch on one rank", got="none"
        )
    source, first = have[0]
    for rank, plan in have[1:]:
        for mine, theirs in zip(*_comparable(first, plan), strict=True):
            if mine != theirs:
                raise DataError(
                    f"The network is used differently on rank {rank} than on rank {source}.",
                    expected=f"{mine} (rank {source})",
                    got=f"{theirs} (rank {rank})",
                    fix="Feed batches of one kind on all ranks, or exclude these parameters from the selection.",
                )
    return source, first


def _comparable(*plans: _Plan) -> list[list[str]]:
    """For each plan the lines that have to be the same on all ranks."""
    keys = list(dict.fromkeys(key for plan in plans for key in plan.blocks))
    lines = []
    for plan in plans:
        known = [f"{plan.n_outputs} outputs", f"the layers {', '.join(plan.layers)}", f"statistics {plan.statistics}"]
        for key in keys:
            block = plan.blocks.get(key)
            if block is None:
                known.append(f"no block {key}")
            else:
                form = f"{block.n_components} × {list(block.shape)}"
                known.append(f"{key} as a {block.storage} block of {form} for {', '.join(block.names)}")
        lines.append(known)
    return lines


# -- the sum -----------------------------------------------------------------------------------------------------------


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
    own = {} if sums is None else {layout.key: block.tensors() for layout, block in sums.curvature}
    plans: list[_Plan | None] = group.exchange("the sums", None if sums is None else _Plan.of(sums, own, network))
    source, plan = _agreed(plans)
    for other in plans:
        if other is not None:
            if network.layers != other.layers:  # only the last layer depends on the data
                network.select_last_layer(other.layers[0])
            for call, axis in other.example_axes.items():
                network.example_axes.setdefault(call, axis)
    layouts = _layouts(group, sums, plan, source, shared=None in plans)
    summable = [key for key in plan.blocks if _is_summable(key, plans)]
    statistics = _zeros(plan.statistics, torch.device("cpu")) if sums is None else sums.statistics.clone()
    for key in summable:
        if sums is None:
            own[key] = {name: _zeros(form, network.device) for name, form in plan.blocks[key].tensors.items()}
    sum_(group, [statistics, *(tensor for key in summable for tensor in own[key].values())])
    others = {key: {n: t.cpu() for n, t in own[key].items()} for key in own if key not in summable}
    gathered = group.exchange("the sums over the data", others) if len(summable) < len(plan.blocks) else []
    blocks: list[tuple[Layout, Block]] = []
    for layout, (key, entry) in zip(layouts, plan.blocks.items(), strict=True):
        if key in summable:
            total = block_from_tensors(entry.storage, entry.shape, own[key])
        else:
            each = [{n: t.to(network.device) for n, t in theirs[key].items()} for theirs in gathered if key in theirs]
            total = block_from_tensors(entry.storage, entry.shape, each[0])
            for tensors in each[1:]:
                total.add_(block_from_tensors(entry.storage, entry.shape, tensors))
        blocks.append((layout, total))
    if before is not None or group.shard_factors:
        _share_out(group, blocks, before)
    n_data = sum(other.n_data for other in plans if other is not None)
    return FitSums(Curvature(blocks), statistics, n_data, plan.n_outputs)


def _zeros(form: Form, device: torch.device) -> Tensor:
    return torch.zeros(form[0], dtype=form[1], device=device)


def _is_summable(key: str, plans: Sequence[_Plan | None]) -> bool:
    """Whether a block is made of the same tensors on all ranks with data, and their sums are those of its sum."""
    blocks = [plan.blocks[key] for plan in plans if plan is not None]
    known = blocks[0].storage in {cls.storage for cls in _SUMMABLE}
    return known and all(
        block.tensors == blocks[0].tensors and _SUMMABLE_TENSORS.issuperset(block.tensors) for block in blocks
    )


def _layouts(group: Group, sums: FitSums | None, plan: _Plan, source: int, *, shared: bool) -> list[Layout]:
    """The layouts in the order of the plan; ranks without data get them from the ``source``."""
    known = {} if sums is None else {layout.key: layout for layout, _ in sums.curvature}
    if not shared:
        return [known[key] for key in plan.blocks]
    indices = [
        known[key].index.clone() if group.rank == source else torch.empty(block.layout_shape, dtype=torch.long)
        for key, block in plan.blocks.items()
    ]
    broadcast_(group, indices, source)
    return [
        known.get(key) or Layout(key, block.names, block.rule, index)
        for (key, block), index in zip(plan.blocks.items(), indices, strict=True)
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
