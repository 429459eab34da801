"""The structures that a curvature can have, and the structured matrix itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from laplace_plus.curvature.gradients import Layout
from laplace_plus.errors import DataError
from laplace_plus.linalg import Block, DenseBlock, DiagonalBlock, KroneckerBlock, LowRankBlock, SampledSpectrum


@dataclass(frozen=True)
class FullStructure:
    """One dense matrix over all selected entries."""

    name: str = field(default="full", init=False)


@dataclass(frozen=True)
class DiagonalStructure:
    """The diagonal only."""

    name: str = field(default="diagonal", init=False)


@dataclass(frozen=True)
class KroneckerStructure:
    """One Kronecker product for each layer (KFAC; Martens and Grosse, 2015).

    Attributes:
        weight_sharing: How positions (tokens, pixels) are treated: ``"expand"`` as examples of their own, for
            token-level losses; ``"reduce"`` summed over first, for networks that pool over positions
            (Eschenhagen et al., 2023).
        eigenvalue_corrected: Whether the eigenvalues are measured in the Kronecker eigenbasis (EKFAC; George et al.,
            2018), which takes a second pass over the data.
        dense_limit: Parameters that no Kronecker rule covers get an exact dense block up to this size, and an exact
            diagonal one above.
    """

    weight_sharing: Literal["expand", "reduce"] = "expand"
    eigenvalue_corrected: bool = False
    dense_limit: int = 512
    name: str = field(default="KFAC", init=False)


@dataclass(frozen=True)
class LowRankStructure:
    """Leading eigenpairs of the whole matrix, from products with it; see :meth:`Backend.operator`."""

    name: str = field(default="low-rank", init=False)


Structure = FullStructure | DiagonalStructure | KroneckerStructure | LowRankStructure


@dataclass
class Curvature:
    """A block-diagonal matrix over the parameter vector.

    Attributes:
        blocks: Pairs of a layout and a block, which together cover every selected entry once.
    """

    blocks: list[tuple[Layout, Block]]

    def __iter__(self) -> Iterator[tuple[Layout, Block]]:
        return iter(self.blocks)

    def add_(self, other: Curvature) -> None:
        """Add the curvature of further data in place.

        Raises:
            DataError: The two treat some parameter differently.
        """
        mine, theirs = {lay.key: block for lay, block in self}, {lay.key: block for lay, block in other}
        if mine.keys() != theirs.keys() or any(type(mine[key]) is not type(theirs[key]) for key in mine):
            changed = sorted(mine.keys() ^ theirs.keys()) or [k for k in mine if type(mine[k]) is not type(theirs[k])]
            raise DataError(
                "The network used its parameters differently in one batch than in another.",
                expected="every batch to use every selected parameter in the same way",
                got=f"differences in {', '.join(changed[:4])}",
                fix="Exclude these parameters from the selection, or feed batches of one kind.",
            )
        for key, block in mine.items():
            block.add_(theirs[key])

    def get(self, key: str) -> Block | None:
        """The block of that key, if there is one yet."""
        return next((block for layout, block in self if layout.key == key), None)

    def clone(self) -> Curvature:
        """A copy that further data may be added to."""
        return Curvature(
            [
                (
                    layout,
                    block_from_tensors(block.storage, block.shape, {k: t.clone() for k, t in block.tensors().items()}),
                )
                for layout, block in self
            ]
        )

    def corrected(self, weights: Tensor) -> Curvature:
        """The same curvature with the eigenvalues of its Kronecker blocks set to zero, to be measured anew."""
        return Curvature(
            [
                (layout, block.with_correction(weights.to(block.left)) if isinstance(block, KroneckerBlock) else block)
                for layout, block in self
            ]
        )

    def add_block_(self, layout: Layout, block: Block) -> None:
        """Add to one block, or begin it."""
        begun = self.get(layout.key)
        if begun is None:
            self.blocks.append((layout, block))
        else:
            begun.add_(block)

    def dense(self, weights: Tensor) -> Tensor:
        """The whole matrix written out at component weights ``[K]``, ``[P, P]``; only for small P."""
        total = sum(layout.index.numel() for layout, _ in self)
        result: Tensor | None = None
        for layout, block in self:
            values = block.dense(weights)
            if result is None:
                result = values.new_zeros(total, total)
            for group, matrix in enumerate(values):
                place = layout.index[group].flatten().to(values.device)
                result[place[:, None], place] = matrix
        assert result is not None
        return result

    def n_bytes(self) -> int:
        """Memory that the blocks' tensors take."""
        return sum(t.numel() * t.element_size() for _, block in self for t in block.tensors().values())


def block_from_tensors(storage: str, shape: tuple[int, int, int], tensors: dict[str, Tensor]) -> Block:
    """Rebuild a block from what :meth:`Block.tensors` returned."""
    if storage == "diagonal":
        return DiagonalBlock(tensors["values"])
    if storage == "dense":
        return DenseBlock(tensors["matrix"], shape)
    if storage == LowRankBlock.storage:
        rest = SampledSpectrum(tensors["nodes"], tensors["node_weights"])
        return LowRankBlock(tensors["values"], tensors["vectors"], rest)
    return KroneckerBlock(
        tensors["left"], tensors["right"], tensors["count"], tensors.get("corrected"), tensors.get("basis_weights")
    )
