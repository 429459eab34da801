"""What a fit adds up over the data, and over the ranks that share the data.

Each rank adds up its own data. Blocks that are plain matrices or vectors of one form on every rank are then reduced in
one message. The others (a few rows in place of a matrix, structures of third parties) come from each rank in turn, and
every rank adds them in the same order. All ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.distributed import Group, OwnedSum, assign, balanced_eigen, broadcast_, sum_
from laplace_plus.errors import ConfigurationError, DataError, DistributedError, EmptyDataError
from laplace_plus.network.network import Network
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from laplace_plus.structured.blocks import block_from_tensors
from laplace_plus.structured.eigen import DecomposedBlock
from laplace_plus.structured.gram_sum import DiagonalSum, GramSum
from laplace_plus.structured.layout import Layout
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock

_SUMMABLE = {cls.storage for cls in (DiagonalBlock, DenseBlock, KroneckerBlock, SoftmaxOutputBlock)}
"""Kinds of blocks whose sum has the sums of their tensors, apart from those whose names end as below."""

_UNSUMMABLE = (".rows", ".limit", "features", "scales", "coupled")


@dataclass(frozen=True)
class FitSums:
    """What a fit adds up over the data: H at unit noise, and the likelihood's additive statistics."""

    curvature: Curvature
    statistics: Tensor
    n_data: int
    n_outputs: int
    travelled: Tensor | None = None
    """Of a posterior that was continued: in place of ``|θ̂ − μ₀|``, the length of the way from task to task, ``[P]``."""

    def plus(self, other: FitSums) -> FitSums:
        """The sums over both data sets; neither is changed."""
        curvature = self.curvature.clone()
        curvature.add_(other.curvature)
        return replace(
            self, curvature=curvature, statistics=self.statistics + other.statistics, n_data=self.n_data + other.n_data
        )


class LostSums:
    """In place of the sums of earlier tasks, once a checkpoint has added them to the last one's."""

    @property
    def curvature(self) -> Curvature:
        """ConfigurationError: the last task cannot be fitted again."""
        raise ConfigurationError(
            "A checkpoint holds the sum over all tasks, so that the last one cannot be fitted again.",
            expected="update(data), or lp.continue_on(posterior, model) for the next task",
            got="fit() after lp.load",
        )


# -- over ranks --------------------------------------------------------------------------------------------------------


Form = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape and type of a tensor, and whether it lies on the CPU whatever the network's device."""


@dataclass(frozen=True)
class _Plan:
    """One rank's sums, without their content: the example axes that the network has learnt, and the forms of tensors.

    ``uses`` has to be the same on all ranks: the number of outputs, the layers, shape and type of the statistics, and
    for each block its names, rule, storage, shape, the shape of its layout and its number of components.
    """

    n_data: int
    axes: dict[str, Any]
    uses: dict[str, Any]
    tensors: dict[str, dict[str, Form]]


def _form(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.dtype, tensor.is_cpu


def _zeros(forms: dict[str, Form], network: Network) -> dict[str, Tensor]:
    return {
        name: torch.zeros(shape, dtype=dtype, device="cpu" if on_cpu else network.device)
        for name, (shape, dtype, on_cpu) in forms.items()
    }


def sum_over_ranks(group: Group, sums: FitSums | None, network: Network, before: Curvature | None = None) -> FitSums:
    """The sums over all ranks' data, on every rank, from ``sums`` of this rank's data (None where it had none).

    The network learns what the others found out about it, such as which layer is the last. Where the result is to be
    added to ``before``, the same factors lie on the same ranks. Raises DistributedError if another rank failed,
    EmptyDataError if no rank has data, and DataError if their data are of different kinds.
    """
    own: dict[str, dict[str, Tensor]] = {}
    layouts: dict[str, Layout] = {}
    mine: _Plan | None = None
    if sums is not None:
        layouts = {layout.key: layout for layout, _ in sums.curvature}
        own = {layout.key: block.tensors() for layout, block in sums.curvature}
        uses: dict[str, Any] = {"outputs": sums.n_outputs, "layers": network.layers}
        uses["statistics"] = _form(sums.statistics)[:2]
        for lay, block in sums.curvature:
            uses[lay.key] = lay.names, lay.rule, block.storage, block.shape, lay.shape, block.n_components
        forms = {key: {name: _form(tensor) for name, tensor in its.items()} for key, its in own.items()}
        mine = _Plan(sums.n_data, dict(network.example_axes), uses, forms)
    plans = {rank: plan for rank, plan in enumerate(group.exchange("the sums", mine)) if plan is not None}
    if not plans:
        raise EmptyDataError(
            "No rank's loader yielded any data.", expected="at least one batch on one rank", got="none"
        )
    source, first = next(iter(plans.items()))
    for rank, plan in plans.items():
        for name in {**first.uses, **plan.uses}:
            if first.uses.get(name) != plan.uses.get(name):
                raise DataError(
                    f"The network is used differently on rank {rank} than on rank {source}.",
                    expected=f"{name}: {first.uses.get(name, 'none')} (rank {source})",
                    got=f"{name}: {plan.uses.get(name, 'none')} (rank {rank})",
                    fix="Feed batches of one kind on all ranks, or exclude these parameters from the selection.",
                )
        for call, axis in plan.axes.items():
            network.example_axes.setdefault(call, axis)
    if network.layers != first.uses["layers"]:  # only the last layer depends on the data
        network.select_last_layer(first.uses["layers"][0])
    blocks = {key: entry for key, entry in first.uses.items() if key in first.tensors}
    if len(plans) < group.size:  # ranks without data have no layouts
        indices = [
            layouts[key].index.clone() if group.rank == source else torch.empty(entry[4], dtype=torch.long)
            for key, entry in blocks.items()
        ]
        broadcast_(group, indices, source)
        for (key, entry), index in zip(blocks.items(), indices, strict=True):
            layouts.setdefault(key, Layout(key, entry[0], entry[1], index))
    alike = {
        key: forms
        for key, forms in first.tensors.items()
        if blocks[key][2] in _SUMMABLE
        and not any(name.endswith(_UNSUMMABLE) for name in forms)
        and all(plan.tensors[key] == forms for plan in plans.values())
    }
    if sums is None:
        own = {key: _zeros(forms, network) for key, forms in alike.items()}
    shape, dtype = first.uses["statistics"]
    statistics = torch.zeros(shape, dtype=dtype) if sums is None else sums.statistics.clone()
    sum_(group, [statistics, *(own[key][name] for key, forms in alike.items() for name in forms)])
    found = {key: block_from_tensors(blocks[key][2], blocks[key][3], own[key]) for key in alike}
    others = [key for key in blocks if key not in alike]
    for rank, plan in plans.items() if others else ():
        there = {key: own[key] if rank == group.rank else _zeros(plan.tensors[key], network) for key in others}
        broadcast_(group, [tensor for tensors in there.values() for tensor in tensors.values()], rank)
        for key in others:
            part = block_from_tensors(blocks[key][2], blocks[key][3], there[key])
            if key in found:
                found[key].add_(part)
            else:
                found[key] = part
    curvature = Curvature([(layouts[key], found[key]) for key in blocks])
    total = FitSums(curvature, statistics, sum(plan.n_data for plan in plans.values()), first.uses["outputs"])
    if before is not None or group.shard_factors:
        _share_out(group, list(total.curvature), before)
    return total


# -- factors that lie on one rank each ---------------------------------------------------------------------------------


def _factors(block: Block) -> dict[str, GramSum]:
    """The factors of a block that may lie on one rank alone, by the names of their tensors.

    Where there are several components, a change of the noise takes the factors again, so that all ranks keep them.
    """
    if not isinstance(block, KroneckerBlock) or block.n_components > 1:
        return {}
    both = {"left": block.left_sums[0], "right": block.right_sum}
    return {name: own for name, own in both.items() if not isinstance(own, DiagonalSum)}


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
        owned = OwnedSum(part, owner, part.matrix() if group.rank == owner else None)
        assert isinstance(block, KroneckerBlock)
        if key[1] == "left":
            block.left_sums[0] = owned
        else:
            block.right_sum = owned


def owned_sums(curvature: Curvature) -> list[OwnedSum]:
    """The factors that lie on one rank each, in an order that all ranks share."""
    return [part for _, block in curvature for part in _factors(block).values() if isinstance(part, OwnedSum)]


def require_owners(group: Group | None, owned: Sequence[OwnedSum]) -> None:
    """Raise :class:`DistributedError` unless the ranks are there on which factors lie."""
    if owned and (group is None or group.size <= max(part.owner for part in owned)):
        what = "The factors of this posterior lie on several ranks."
        got = "one process" if group is None else f"{group.size} ranks"
        fix = "Call update() on all ranks, with an empty loader where there are no data."
        raise DistributedError(what, expected="an update() on the ranks of the fit", got=got, fix=fix)


# -- decompositions and corrected eigenvalues --------------------------------------------------------------------------


def diagonalise_over_ranks(group: Group, curvature: Curvature, weights: Tensor) -> None:
    """Decompose every factor on one rank and tell the others, with about the same work for each.

    All ranks have the same curvature and component weights ``[K]``.
    """
    waiting = [b for _, b in curvature if isinstance(b, DecomposedBlock) and not b.is_diagonalised(weights)]
    factors = [block.sums_at(weights) for block in waiting]
    pairs = iter(balanced_eigen(group, [factor for own in factors for factor in own]))
    for block, own in zip(waiting, factors, strict=True):
        block.adopt_eigen(weights, [next(pairs) for _ in own])


def corrected_eigenvalues(curvature: Curvature) -> list[Tensor]:
    """The eigenvalues that a second pass over the data adds to, ``[K, G, o, i]`` for each Kronecker block."""
    return [b.corrected for _, b in curvature if isinstance(b, KroneckerBlock) and b.corrected is not None]
