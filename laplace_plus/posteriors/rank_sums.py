"""Sums over the data of several ranks.

Each rank adds up its own data; then every part of every block – a tensor, a sum of outer products, the rows of a linear
head – is reduced in one message. What consists of few rows on all ranks together is reduced as rows, each rank's in a
place of their own, and stays rows, so that its eigendecomposition stays that of a small Gram matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.curvature.structures import Layout, block_from_tensors
from laplace_plus.distributed import Group, OwnedSum, assign, balanced_eigen, broadcast_, collect_, sum_
from laplace_plus.errors import DataError, DistributedError, EmptyDataError
from laplace_plus.network import Network
from laplace_plus.posteriors.fit_sums import FitSums
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from laplace_plus.structured.blocks import OnceDiagonalised
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.kronecker import DiagonalOutputBlock
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock, SoftmaxOutputRows

Part = Tensor | GramSum | SoftmaxOutputBlock
"""A sum within a block."""


# -- what ranks tell each other before they add ------------------------------------------------------------------------


@dataclass(frozen=True)
class _PartPlan:
    """A part as one rank has it, without its content.

    Attributes:
        kind: A plain tensor, a sum of outer products, or a head's rows, both of which may also be a matrix.
        shape: Of the tensor or the matrix ``[G, n, n]``.
        dtype: Its type.
        width: Length of a row.
        n_rows: How many rows there are; None where they are a matrix already.
        coupled: See :class:`SoftmaxOutputRows`; None where there are none.
    """

    kind: Literal["tensor", "product", "head"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    width: int = 0
    n_rows: int | None = None
    coupled: bool | None = None

    @classmethod
    def of(cls, part: Part) -> _PartPlan:
        """The plan of a part."""
        if isinstance(part, Tensor):
            return cls("tensor", tuple(part.shape), part.dtype)
        rows = _rows(part)
        count = None if rows is None else rows.shape[1]
        if isinstance(part, GramSum):
            return cls("product", (part.groups, part.size, part.size), part.dtype, part.size, count)
        _, n_outputs, width = part.shape
        size = n_outputs * width
        if rows is None:
            return cls("head", (1, size, size), part.parts()[0].dtype, n_outputs + width)
        return cls("head", (1, size, size), rows.dtype, n_outputs + width, count, part.rows.coupled)

    def alike(self, other: _PartPlan) -> bool:
        """Whether the two can be added."""
        return replace(self, n_rows=None, coupled=None) == replace(other, n_rows=None, coupled=None)


@dataclass(frozen=True)
class _BlockPlan:
    """A block as one rank has it, without its content."""

    key: str
    names: tuple[str, ...]
    rule: str
    storage: str
    shape: tuple[int, int, int]
    layout_shape: tuple[int, int, int]
    n_components: int
    parts: tuple[_PartPlan, ...]

    def alike(self, other: _BlockPlan) -> bool:
        """Whether the two blocks can be added."""
        same = replace(self, parts=()) == replace(other, parts=()) and len(self.parts) == len(other.parts)
        return same and all(mine.alike(theirs) for mine, theirs in zip(self.parts, other.parts, strict=True))


@dataclass(frozen=True)
class _Plan:
    """One rank's sums, without their content; None in place of one where a rank has no data."""

    n_data: int
    n_outputs: int
    layers: tuple[str, ...]
    example_axes: dict[str, Any]
    statistics: _PartPlan
    blocks: tuple[_BlockPlan, ...]

    @classmethod
    def of(cls, sums: FitSums, network: Network) -> _Plan:
        """The plan of a rank's sums."""
        blocks = tuple(
            _BlockPlan(
                layout.key,
                layout.names,
                layout.rule,
                block.storage,
                block.shape,
                layout.shape,
                block.n_components,
                tuple(map(_PartPlan.of, _parts(block))),
            )
            for layout, block in sums.curvature
        )
        axes, statistics = dict(network.example_axes), _PartPlan.of(sums.statistics)
        return cls(sums.n_data, sums.n_outputs, network.layers, axes, statistics, blocks)

    def block(self, key: str) -> _BlockPlan:
        """The block of that key."""
        return next(block for block in self.blocks if block.key == key)


def _parts(block: Block) -> list[Part]:
    """The sums that a block is made of; none for kinds that are no sums."""
    if isinstance(block, DiagonalBlock):
        return [block.values]
    if isinstance(block, DenseBlock):
        return [*block.sums]
    if isinstance(block, KroneckerBlock):
        return [*block.left_sums, block.right_sum, block.count]
    if isinstance(block, DiagonalOutputBlock):
        return [block.left, block.right_sum, block.count]
    return [block] if isinstance(block, SoftmaxOutputBlock) else []


def _made_of(plan: _BlockPlan, parts: Sequence[Part]) -> Block:
    """The block that is made of these sums."""
    factors = [part for part in parts if isinstance(part, GramSum)]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if plan.storage == DiagonalBlock.storage:
        return DiagonalBlock(tensors[0])
    if plan.storage == DenseBlock.storage:
        return DenseBlock(factors, plan.shape)
    if plan.storage == DiagonalOutputBlock.storage:
        return DiagonalOutputBlock(tensors[0], factors[0], tensors[1])
    if isinstance(parts[0], SoftmaxOutputBlock):
        return parts[0]
    right = parts[-2]
    assert not isinstance(right, SoftmaxOutputBlock)
    return KroneckerBlock(factors[:-1] if isinstance(right, GramSum) else factors, right, tensors[-1])


def _rows(part: GramSum | SoftmaxOutputBlock) -> Tensor | None:
    """The rows ``[G, n, width]`` of a part that has no matrix yet."""
    if isinstance(part, GramSum):
        return None if part.is_formed else part.scaled_rows(1.0)
    if "matrix" in part.tensors():
        return None
    return torch.cat([part.rows.features, part.rows.scales], 1)[None]


# -- the reduction -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Summand:
    """What is reduced of one part.

    Attributes:
        plan: The part's.
        shape: The block's.
        tensor: Added to the other ranks'.
        form: A tensor, a symmetric matrix, or rows, each rank's in a place of their own.
        owner: The only rank that keeps the sum; −1 if all do.
    """

    plan: _PartPlan
    shape: tuple[int, int, int]
    tensor: Tensor
    form: Literal["tensor", "matrix", "rows"]
    owner: int = -1

    @classmethod
    def of(
        cls, own: Part | None, plans: Sequence[_PartPlan | None], shape: tuple[int, int, int], here: _Here
    ) -> _Summand:
        """The summand of this rank.

        Args:
            own: The rank's part; None where it has no data.
            plans: The part's plan on each rank.
            shape: The block's.
            here: The rank.
        """
        known = [plan for plan in plans if plan is not None]
        plan = next((plan for plan in known if plan.coupled is not None), known[0])
        if plan.kind == "tensor":
            return cls(plan, shape, here.zeros(plan.shape, plan) if own is None else here.tensor(own), "tensor")
        counts = [0 if other is None else other.n_rows for other in plans]
        few = [count for count in counts if count is not None]
        limit = plan.shape[-1] // 2 if plan.kind == "product" else plan.shape[-1]
        if len(few) < len(counts) or sum(few) > limit:
            return cls(plan, shape, here.zeros(plan.shape, plan) if own is None else here.matrix(own), "matrix")
        tensor = here.zeros((plan.shape[0], sum(few), plan.width), plan)
        rows = None if own is None or isinstance(own, Tensor) else _rows(own)
        if rows is not None:
            start = sum(few[: here.rank])
            tensor[:, start : start + rows.shape[1]] = rows
        return cls(plan, shape, tensor, "rows")

    def finished(self, rank: int) -> Part:
        """The part, once the tensor is the sum over the ranks; the tensor of others' sums is let go."""
        if self.owner >= 0:
            groups, size, _ = self.tensor.shape
            dtype, device = self.tensor.dtype, self.tensor.device
            own = self.tensor if rank == self.owner else None
            return OwnedSum(groups, size, owner=self.owner, total=own, dtype=dtype, device=device)
        if self.form == "tensor":
            return self.tensor
        if self.form == "matrix":
            total = GramSum.of(self.tensor)
            return (
                total
                if self.plan.kind == "product"
                else SoftmaxOutputBlock(DenseBlock([total], self.shape), self.shape)
            )
        if self.plan.kind == "head":
            features, scales = self.tensor[0].split([self.shape[2], self.shape[1]], 1)
            return SoftmaxOutputBlock(SoftmaxOutputRows(features, scales, bool(self.plan.coupled)), self.shape)
        groups, _, size = self.tensor.shape
        result = GramSum(groups, size, dtype=self.tensor.dtype, device=self.tensor.device)
        result.add_rows(self.tensor)
        return result


@dataclass(frozen=True)
class _Here:
    """This rank and its device."""

    rank: int
    device: torch.device

    def zeros(self, shape: Sequence[int], plan: _PartPlan) -> Tensor:
        """Zeros of a part's type."""
        return torch.zeros(tuple(shape), dtype=plan.dtype, device=self.device)

    @staticmethod
    def tensor(own: Part) -> Tensor:
        """A part that is a tensor."""
        assert isinstance(own, Tensor)
        return own

    @staticmethod
    def matrix(own: Part) -> Tensor:
        """A part as a matrix ``[G, n, n]``."""
        if isinstance(own, SoftmaxOutputBlock):
            tensors = own.tensors()
            return tensors["matrix"][0] if "matrix" in tensors else own.rows.dense()[None]
        assert isinstance(own, GramSum)
        return own.matrix()


def sum_over_ranks(group: Group, sums: FitSums | None, network: Network, before: Curvature | None = None) -> FitSums:
    """The sums over all ranks' data, on every rank, from one reduction.

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
    plans: list[_Plan | None] = group.exchange("the sums", None if sums is None else _Plan.of(sums, network))
    source, plan = _check(plans)
    _learn(network, plans)
    layouts = _layouts(group, sums, plan, source, shared=any(other is None for other in plans))
    here = _Here(group.rank, network.device)
    own = {} if sums is None else {layout.key: block for layout, block in sums.curvature}
    if sums is None:
        statistics = torch.zeros(plan.statistics.shape, dtype=plan.statistics.dtype)
    else:
        statistics = sums.statistics.clone()
    summands: list[list[_Summand]] = []
    for block in plan.blocks:
        of_ranks = [None if other is None else other.block(block.key).parts for other in plans]
        mine = _parts(own[block.key]) if block.key in own else [None] * len(block.parts)
        summands.append(
            [
                _Summand.of(part, [None if p is None else p[place] for p in of_ranks], block.shape, here)
                for place, part in enumerate(mine)
            ]
        )
    if before is not None:
        summands = _as_before(before, plan, summands)
    elif group.shard_factors:
        summands = _shared_out(group, plan, summands)
    flat = [summand for several in summands for summand in several]
    kept, owned = [s for s in flat if s.owner < 0], [s for s in flat if s.owner >= 0]
    sum_(group, [statistics, *(s.tensor for s in kept)], [False, *(s.form == "matrix" for s in kept)])
    if owned:
        collect_(group, [s.tensor for s in owned], [s.owner for s in owned])
    blocks: list[tuple[Layout, Block]] = []
    for layout, block, several in zip(layouts, plan.blocks, summands, strict=True):
        made = (
            _made_of(block, [s.finished(group.rank) for s in several]) if several else _added(group, own.get(block.key))
        )
        blocks.append((layout, made))
    n_data = sum(other.n_data for other in plans if other is not None)
    return FitSums(Curvature(blocks), statistics, n_data, plan.n_outputs)


def _shared_out(group: Group, plan: _Plan, summands: list[list[_Summand]]) -> list[list[_Summand]]:
    """Give each Kronecker factor to one rank, with about the same work for each; factors of few rows stay with all.

    Where there are several components, a change of the noise takes the factors again, so that all ranks keep them.
    """
    shareable = [
        block.storage in (KroneckerBlock.storage, DiagonalOutputBlock.storage) and block.n_components == 1
        for block in plan.blocks
    ]
    chosen = [
        (number, place)
        for number, (several, may) in enumerate(zip(summands, shareable, strict=True))
        for place, summand in enumerate(several)
        if may and summand.form == "matrix"
    ]
    costs = [float(summands[n][k].tensor.numel() * summands[n][k].tensor.shape[-1]) for n, k in chosen]
    for (number, place), owner in zip(chosen, assign(costs, group.size), strict=True):
        summands[number][place] = replace(summands[number][place], owner=owner)
    return summands


def _as_before(before: Curvature, plan: _Plan, summands: list[list[_Summand]]) -> list[list[_Summand]]:
    """Give those factors to one rank that lie on one already."""
    places = {layout.key: _parts(block) for layout, block in before}
    for block, several in zip(plan.blocks, summands, strict=True):
        for place, part in enumerate(places.get(block.key, [])):
            if isinstance(part, OwnedSum) and several[place].form == "matrix":
                several[place] = replace(several[place], owner=part.owner)
    return summands


def owned_sums(curvature: Curvature) -> list[OwnedSum]:
    """The factors that lie on one rank each, in an order that all ranks share."""
    return [part for _, block in curvature for part in _parts(block) if isinstance(part, OwnedSum)]


def require_owners(group: Group | None, owned: Sequence[OwnedSum]) -> None:
    """Raise :class:`DistributedError` unless the ranks are there on which factors lie."""
    if owned and (group is None or group.size <= max(part.owner for part in owned)):
        raise DistributedError(
            "The factors of this posterior lie on several ranks.",
            expected="an update() on the ranks of the fit",
            got="one process" if group is None else f"{group.size} ranks",
            fix="Call update() on all ranks, with an empty loader where there are no data.",
        )


def _check(plans: Sequence[_Plan | None]) -> tuple[int, _Plan]:
    """The first rank that has data, and its plan, which the others' agree with."""
    have = [(rank, plan) for rank, plan in enumerate(plans) if plan is not None]
    if not have:
        raise EmptyDataError(
            "No rank's loader yielded any data.", expected="at least one batch on one rank", got="none"
        )
    source, first = have[0]
    for rank, plan in have[1:]:
        difference = _difference(first, plan)
        if difference is not None:
            raise DataError(
                f"The network is used differently on rank {rank} than on rank {source}.",
                expected=f"{difference[0]} (rank {source})",
                got=f"{difference[1]} (rank {rank})",
                fix="Feed batches of one kind on all ranks, or exclude these parameters from the selection.",
            )
    return source, first


def _difference(first: _Plan, other: _Plan) -> tuple[str, str] | None:
    if first.n_outputs != other.n_outputs:
        return f"{first.n_outputs} outputs", f"{other.n_outputs} outputs"
    if first.layers != other.layers:
        return f"the layers {', '.join(first.layers)}", ", ".join(other.layers)
    if first.statistics != other.statistics:
        return f"statistics of shape {list(first.statistics.shape)}", f"{list(other.statistics.shape)}"
    mine, theirs = {block.key: block for block in first.blocks}, {block.key: block for block in other.blocks}
    for key in {**mine, **theirs}:
        a, b = mine.get(key), theirs.get(key)
        if a is None or b is None or not a.alike(b):
            return _words(key, a), _words(key, b)
    return None


def _words(key: str, block: _BlockPlan | None) -> str:
    return f"no block {key}" if block is None else f"{key} as a {block.storage} block of {list(block.shape)}"


def _learn(network: Network, plans: Sequence[_Plan | None]) -> None:
    """Take over what ranks with data found out: the layers that are selected, and the axes that run over examples."""
    for plan in plans:
        if plan is None:
            continue
        if network.layers != plan.layers:  # only the last layer depends on the data
            network.select_last_layer(plan.layers[0])
        for call, axis in plan.example_axes.items():
            network.example_axes.setdefault(call, axis)


def _layouts(group: Group, sums: FitSums | None, plan: _Plan, source: int, *, shared: bool) -> list[Layout]:
    """The layouts in the order of the plan; ranks without data get them from the ``source``."""
    known = {} if sums is None else {layout.key: layout for layout, _ in sums.curvature}
    if not shared:
        return [known[block.key] for block in plan.blocks]
    indices = [
        known[block.key].index.clone() if group.rank == source else torch.empty(block.layout_shape, dtype=torch.long)
        for block in plan.blocks
    ]
    broadcast_(group, indices, source)
    return [
        known.get(block.key) or Layout(block.key, block.names, block.rule, index)
        for block, index in zip(plan.blocks, indices, strict=True)
    ]


def _added(group: Group, own: Block | None) -> Block:
    """The sum of blocks of a kind that is no sum of tensors: all ranks' are gathered and added one by one."""
    mine = None if own is None else (own.storage, own.shape, {k: t.cpu() for k, t in own.tensors().items()})
    total: Block | None = None
    for theirs in group.exchange("the sums over the data", mine):
        if theirs is None:
            continue
        block = block_from_tensors(*theirs)
        if total is None:
            total = block
        else:
            total.add_(block)
    assert total is not None
    return total


def block_of_rank_zero(group: Group, own: Block | None, device: torch.device) -> Block:
    """The block that rank 0 has, on every rank.

    Args:
        group: The ranks.
        own: The block on rank 0, None elsewhere.
        device: Where it is wanted.
    """
    tensors = {} if own is None else own.tensors()
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    plan = None if own is None else (own.storage, own.shape, shapes)
    storage, shape, shapes = group.exchange("the eigenpairs", plan)[0]
    made = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in shapes.items()}
    received = {name: tensor.contiguous() for name, tensor in (tensors or made).items()}
    broadcast_(group, received.values(), 0)
    return block_from_tensors(storage, shape, received)


# -- decompositions and corrected eigenvalues --------------------------------------------------------------------------


def diagonalise_over_ranks(group: Group, curvature: Curvature, weights: Tensor) -> None:
    """Decompose every factor on one rank and tell the others, with about the same work for each.

    Args:
        group: The ranks.
        curvature: The same on every rank.
        weights: Component weights ``[K]``.
    """
    waiting = [b for _, b in curvature if isinstance(b, OnceDiagonalised) and not b.is_diagonalised(weights)]
    factors = [block.factors(block._key(weights)) for block in waiting]
    pairs = iter(balanced_eigen(group, [factor for own in factors for factor in own]))
    for block, own in zip(waiting, factors, strict=True):
        block.adopt_eigen(weights, [next(pairs) for _ in own])


def corrected_eigenvalues(curvature: Curvature) -> list[Tensor]:
    """The eigenvalues that a second pass over the data adds to, ``[K, G, o, i]`` for each Kronecker block."""
    return [b.corrected for _, b in curvature if isinstance(b, KroneckerBlock) and b.corrected is not None]
