"""The structures that a curvature can have, and the structured matrix itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from laplace_plus.curvature.layouts import Layout
from laplace_plus.errors import DataError
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, KroneckerBlock, LowRankBlock, SampledSpectrum
from laplace_plus.structured.gram_sum import restored
from laplace_plus.structured.kronecker import DiagonalOutputBlock
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock

DENSE_OUTPUTS = 4096
"""With more outputs than this, KFAC keeps the diagonal of a last layer's output factor unless told otherwise."""


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
        output_factor: How the output factor of a last layer is kept: ``"dense"``; ``"diagonal"``, without covariances
            between outputs; or ``"auto"``, dense up to ``DENSE_OUTPUTS`` outputs and diagonal beyond.
    """

    weight_sharing: Literal["expand", "reduce"] = "expand"
    eigenvalue_corrected: bool = False
    dense_limit: int = 512
    output_factor: Literal["auto", "dense", "diagonal"] = "auto"
    name: str = field(default="KFAC", init=False)

    def keeps_diagonal(self, n_outputs: int) -> bool:
        """Whether the factor of so many outputs is kept as its diagonal."""
        if self.output_factor == "auto":
            return n_outputs > DENSE_OUTPUTS and not self.eigenvalue_corrected
        return self.output_factor == "diagonal"


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

    def add_(self, other: Curvature) -> Curvature:
        """Add the curvature of further data in place, and return the sum.

        Raises:
            DataError: The two treat some parameter differently.
        """
        mine, theirs = {lay.key: block for lay, block in self}, {lay.key: block for lay, block in other}
        if mine.keys() != theirs.keys() or any(type(mine[key]) is not type(theirs[key]) for key in mine):
            changed = sorted(mine.keys() ^ theirs.keys()) or [k for k in mine if type(mine[k]) is not type(theirs[k])]
            raise used_differently(changed)
        for key, block in mine.items():
            block.add_(theirs[key])
        return self

    def clone(self) -> Curvature:
        """A copy that further data may be added to."""
        return Curvature([(layout, block.clone()) for layout, block in self])

    def corrected(self, weights: Tensor) -> Curvature:
        """The same curvature with the eigenvalues of its Kronecker blocks set to zero, to be measured anew."""
        return Curvature(
            [
                (layout, block.with_correction(weights) if isinstance(block, KroneckerBlock) else block)
                for layout, block in self
            ]
        )

    def dense(self, weights: Tensor) -> Tensor:
        """The whole matrix written out at component weights ``[K]``, ``[P, P]``; only for small P."""
        total = sum(layout.n_entries for layout, _ in self)
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
        """Memory that the blocks take."""
        return sum(block.n_bytes() for _, block in self)


def used_differently(keys: Sequence[str]) -> DataError:
    """The error for blocks that some batch does not treat as another one did."""
    return DataError(
        "The network used its parameters differently in one batch than in another.",
        expected="every batch to use every selected parameter in the same way",
        got=f"differences in {', '.join(keys[:4])}",
        fix="Exclude these parameters from the selection, or feed batches of one kind.",
    )


def block_from_tensors(storage: str, shape: tuple[int, int, int], tensors: dict[str, Tensor]) -> Block:
    """Rebuild a block from what :meth:`Block.tensors` returned."""
    if storage == "diagonal":
        return DiagonalBlock(tensors["values"])
    if storage == "dense":
        return DenseBlock(restored(tensors, "matrix"), shape)
    if storage == LowRankBlock.storage:
        rest = SampledSpectrum(tensors["nodes"], tensors["node_weights"])
        return LowRankBlock(tensors["values"], tensors["vectors"], rest)
    if storage == SoftmaxOutputBlock.storage:
        return SoftmaxOutputBlock.from_tensors(tensors, shape)
    if storage == DiagonalOutputBlock.storage:
        return DiagonalOutputBlock(tensors["left"], tensors["right"], tensors["count"])
    return KroneckerBlock.from_tensors(tensors)
