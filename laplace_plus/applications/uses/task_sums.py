"""What is added up over tasks that move a network and may use other heads, and what the posterior of some was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature import Curvature
from laplace_plus.curvature.structures import used_differently
from laplace_plus.network.gradients import whole_layout
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.posteriors.state import GaussianState
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, LowRankBlock
from laplace_plus.structured.layout import Layout
from laplace_plus.tuning.laplace import LaplaceModel


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

    def laplace_model(self, posterior: GaussianPosterior) -> LaplaceModel:
        """The Gaussian of earlier tasks, for a posterior that has not seen the next one."""
        return LaplaceModel(
            curvature=self.curvature,
            vector=self.mean,
            prior_mean=posterior.prior_mean,
            layer_index=posterior.prior_groups.index,
            likelihood=posterior.likelihood,
            statistics=self.statistics,
            backend=posterior.backend,
            n_outputs=self.n_outputs,
        )


def moved(layout: Layout, block: Block, places: Tensor, network: Network) -> tuple[Layout, Block]:
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
    if mine.keys() == theirs.keys() or any(getattr(block, "corrected", None) is not None for _, block in old):
        return old.clone().add_(new)  # corrected eigenvalues are measured in the old blocks' bases
    if all(isinstance(block, DiagonalBlock) for one in (old, new) for _, block in one):
        return _regrouped(old, new, size).add_(new)
    shared = mine.keys() & theirs.keys()
    found = Curvature([pair for pair in old if pair[0].key in shared]).clone()
    found.add_(Curvature([pair for pair in new if pair[0].key in shared]))
    alone = [pair for pair in (*old, *new) if pair[0].key not in shared]
    covered = torch.zeros(size, dtype=torch.long)
    for layout in found.layouts:
        covered[layout.index] += 1
    for layout, block in sorted(alone, key=lambda pair: pair[1].is_zero()):
        if not covered[layout.index].any() or not block.is_zero():
            found.blocks.append((layout, block.clone()))
            covered[layout.index] += 1
    if not bool((covered == 1).all()):
        raise used_differently([layout.key for layout, _ in alone])
    return found


def _regrouped(old: Curvature, new: Curvature, size: int) -> Curvature:
    """A diagonal in the other's blocks."""
    first: Any = old.blocks[0][1]
    total = first.values.new_zeros(first.n_components, size)
    for layout, block in old:
        assert isinstance(block, DiagonalBlock)
        layout.scatter_(total, block.values)
    return Curvature([(layout, DiagonalBlock(layout.gather(total))) for layout in new.layouts])
