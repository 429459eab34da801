"""The structures that a curvature can have, which blocks they are made of, and the matrix itself."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import DataError, warn
from laplace_plus.network.gradients import whole_layout
from laplace_plus.network.network import Network
from laplace_plus.structured import (
    Block,
    DenseBlock,
    DiagonalBlock,
    EmbeddingGradients,
    ExampleGradients,
    GramSum,
    KroneckerBlock,
    OuterGradients,
)
from laplace_plus.structured.gram_sum import gram_sum
from laplace_plus.structured.layout import CHANNELS, EMBEDDING, MATRIX, Layout

LARGE = 8192
"""Rows of a dense matrix from which a fit says what costs less: decomposing one takes minutes on a CPU."""

DENSE_OUTPUTS = 4096
"""With more outputs than this, KFAC keeps the diagonal of a last layer's output factor unless told otherwise.

At this size the dense factor takes 64 MiB in float32, and its eigendecomposition about a minute on one core.
"""


class Structure(ABC):
    """Which entries of a curvature are kept, by the blocks that it is made of.

    Attributes:
        name: The structure's name, in errors and in :attr:`Backend.supported`.
        adds_up: Whether a backend adds it up batch by batch, over any entries; else its posterior fits in its own way.
    """

    name: str
    adds_up: ClassVar[bool] = True

    def layouts(self, network: Network, layers: Sequence[Layout]) -> Sequence[Layout]:
        """The blocks, which together cover every selected entry once; by default one for each layer.

        Args:
            network: The network.
            layers: The layers' own layouts: a weight with its bias, or a single parameter.
        """
        return layers

    def create(
        self,
        layout: Layout,
        gradients: ExampleGradients,
        n_components: int,
        dtype: torch.dtype,
        *,
        is_last: bool = False,
    ) -> Block:
        """An empty block, to which gradients are added; by default a dense one.

        Args:
            layout: Its layout.
            gradients: Those of the first batch that uses it, which tell the form and the device.
            n_components: K, the number of noise levels whose curvatures are kept apart.
            dtype: The type of the sums.
            is_last: Whether the layout's rows are the network's outputs.
        """
        groups, rows, columns = layout.shape
        if rows * columns >= LARGE:
            cheaper = 'lp.KFAC, lp.Diagonal or parameters="last_layer"'
            _warn_of_size(f"One dense matrix over {', '.join(layout.names[:3])}", rows * columns, cheaper)
        sums = []
        for _ in range(n_components):
            sums.append(GramSum(groups, rows * columns, dtype=dtype, device=gradients.device))
        return DenseBlock(sums, layout.shape)


def _warn_of_size(what: str, size: int, cheaper: str) -> None:
    message = f"{what} is {size:,} × {size:,}: with as many rows of data (examples times outputs or positions), adding "
    warn(message + f"them up and its decomposition take on the order of {size:,}³ operations. Cheaper: {cheaper}.")


@dataclass(frozen=True)
class FullStructure(Structure):
    """One dense matrix over all selected entries."""

    name: str = field(default="full", init=False)

    def layouts(self, network: Network, layers: Sequence[Layout]) -> Sequence[Layout]:
        """A single block."""
        return [whole_layout(network)]


@dataclass(frozen=True)
class DiagonalStructure(Structure):
    """The diagonal only."""

    name: str = field(default="diagonal", init=False)

    def create(
        self,
        layout: Layout,
        gradients: ExampleGradients,
        n_components: int,
        dtype: torch.dtype,
        *,
        is_last: bool = False,
    ) -> Block:
        """A diagonal block."""
        return DiagonalBlock(torch.zeros(n_components, *layout.shape, dtype=dtype, device=gradients.device))


@dataclass(frozen=True)
class KroneckerStructure(Structure):
    """One Kronecker product for each layer (KFAC; Martens and Grosse, 2015).

    Attributes:
        weight_sharing: Treatment of positions (tokens, pixels): ``"expand"`` takes them as examples of their own, for
            token-level losses; ``"reduce"`` sums over them first, for networks that pool over positions
            (Eschenhagen et al., 2023).
        eigenvalue_corrected: Whether the eigenvalues are measured in the Kronecker eigenbasis (EKFAC; George et al.,
            2018), which takes a second pass over the data.
        dense_limit: Parameters that no Kronecker rule covers get an exact dense block up to this size, and an exact
            diagonal one above.
        output_factor: Form of a last layer's output factor: ``"dense"``; ``"diagonal"``, without covariances between
            outputs; or ``"auto"``, dense up to ``DENSE_OUTPUTS`` outputs and diagonal beyond.
        factor_rank: How many eigenpairs of each factor but a last layer's output factor are kept; None for all.
    """

    weight_sharing: Literal["expand", "reduce"] = "expand"
    eigenvalue_corrected: bool = False
    dense_limit: int = 512
    output_factor: Literal["auto", "dense", "diagonal"] = "auto"
    factor_rank: int | None = None
    name: str = field(default="KFAC", init=False)

    @property
    def dense_outputs(self) -> float:
        """The largest number of outputs for which a last layer's output factor is dense."""
        if self.output_factor == "diagonal":
            return 0
        return DENSE_OUTPUTS if self.output_factor == "auto" and not self.eigenvalue_corrected else math.inf

    def create(
        self,
        layout: Layout,
        gradients: ExampleGradients,
        n_components: int,
        dtype: torch.dtype,
        *,
        is_last: bool = False,
    ) -> Block:
        """A Kronecker product for a linear map or a table; for other parameters a dense or a diagonal block."""
        groups, rows, columns = layout.shape
        options: Any = {"dtype": dtype, "device": gradients.device}
        if layout.rule not in (MATRIX, EMBEDDING) or not isinstance(gradients, (OuterGradients, EmbeddingGradients)):
            if layout.rule == CHANNELS or layout.n_entries <= self.dense_limit:
                return super().create(layout, gradients, n_components, dtype)
            return DiagonalBlock(torch.zeros(n_components, *layout.shape, **options))
        wide = max(rows if rows <= self.dense_outputs or not is_last else 0, columns if layout.rule == MATRIX else 0)
        if wide >= LARGE and self.factor_rank is None:
            cheaper = 'lp.KFAC(..., factor_rank=100), lp.Diagonal or parameters="last_layer"'
            _warn_of_size(f"A Kronecker factor of {layout.names[0]}", wide, cheaper)
        right: Any = torch.zeros(groups, columns, **options)
        if isinstance(gradients, OuterGradients):  # groups that share their input (attention's projections) share it
            right = gram_sum(gradients.right_shape[0], columns, self.factor_rank, **options)
        is_last = is_last and groups == 1
        left: Any = []
        if is_last and rows > self.dense_outputs and isinstance(gradients, OuterGradients):
            left = torch.zeros(n_components, 1, rows, **options)
        else:
            for _ in range(n_components):
                left.append(gram_sum(groups, rows, None if is_last else self.factor_rank, **options))
        return KroneckerBlock(left, right, torch.zeros((), dtype=torch.float64))


@dataclass(frozen=True)
class LowRankStructure(Structure):
    """Leading eigenpairs of the whole matrix, from products with it; see :meth:`Backend.operator`."""

    name: str = field(default="low-rank", init=False)
    adds_up: ClassVar[bool] = False


@dataclass
class Curvature:
    """A block-diagonal matrix over the parameter vector.

    Attributes:
        blocks: Pairs of a layout and a block, which together cover every selected entry once.
    """

    blocks: list[tuple[Layout, Block]]

    def __iter__(self) -> Iterator[tuple[Layout, Block]]:
        return iter(self.blocks)

    @property
    def layouts(self) -> list[Layout]:
        """The blocks' layouts."""
        return [layout for layout, _ in self.blocks]

    def differences(self, other: Curvature) -> list[str]:
        """Keys of the blocks that the two do not have in common."""
        mine, theirs = {lay.key: type(block) for lay, block in self}, {lay.key: type(block) for lay, block in other}
        return sorted(mine.keys() ^ theirs.keys()) or [key for key in mine if mine[key] is not theirs[key]]

    def add_(self, other: Curvature) -> Curvature:
        """Add further data's, in place of zero blocks too; :class:`DataError` if they treat a parameter differently."""
        changed, theirs = self.differences(other), {layout.key: block for layout, block in other}
        alone = [pair for pair in (*self, *other) if pair[0].key in changed]
        self.blocks = [pair for pair in self if pair[0].key not in changed]
        for layout, block in self:
            block.add_(theirs[layout.key])
        if not changed:
            return self
        for layout, block in sorted(alone, key=lambda pair: pair[1].is_zero()):
            if not block.is_zero() or not any(bool(torch.isin(layout.index, own.index).any()) for own in self.layouts):
                self.blocks.append((layout, block.clone()))
        places = torch.cat([layout.index.flatten() for layout in self.layouts])
        if len(places) != sum(layout.n_entries for layout in other.layouts) or len(places.unique()) < len(places):
            raise used_differently(changed)
        return self

    def clone(self) -> Curvature:
        """A copy that further data may be added to."""
        return Curvature([(layout, block.clone()) for layout, block in self])

    def corrected(self, weights: Tensor) -> Curvature:
        """The same curvature, where eigenvalues of Kronecker blocks without a correction are zero, to be measured."""
        return Curvature([(lay, b.with_correction(weights) if isinstance(b, KroneckerBlock) else b) for lay, b in self])

    def dense(self, weights: Tensor) -> Tensor:
        """The whole matrix written out at component weights ``[K]``, ``[P, P]``; only for small P."""
        total = sum(layout.n_entries for layout in self.layouts)
        result = checks.zeros("The matrix of all parameters", total, total, weights)
        for layout, block in self:
            for positions, matrix in zip(layout.index.flatten(1).to(result.device), block.dense(weights), strict=True):
                result[positions[:, None], positions] = matrix
        return result


def used_differently(keys: Sequence[str]) -> DataError:
    """The error for blocks that differ from one batch to another."""
    return DataError(
        "The network used its parameters differently in one batch than in another.",
        expected="every batch to use every selected parameter in the same way",
        got=f"differences in {', '.join(keys[:4])}",
        fix="Exclude these parameters from the selection, or feed batches of one kind.",
    )
