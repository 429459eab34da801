"""Rows ``A [m, P]`` whose null space a posterior may move in: derivatives of what must not change on the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, JacobianOperator
from laplace_plus.curvature.output_roots import gradient_root
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import Diagonal, Operator
from laplace_plus.network.batches import iterate
from laplace_plus.network.gradients import micro_batches
from laplace_plus.network.network import Network

Rows = Literal["logit", "ggn", "loss"]
"""All outputs, what the curvature sees of them, or each example's loss."""

ROWS: tuple[Rows, ...] = ("logit", "ggn", "loss")


def inverse_lengths(norms: Tensor) -> Tensor:
    """Reciprocals of the rows' lengths; zero for rows of rounding size, whose direction means nothing."""
    floor = 100 * torch.finfo(norms.dtype).eps * norms.max()
    return torch.where(norms > floor, norms.clamp(min=1e-30).reciprocal(), torch.zeros_like(norms))


class NullSpaceRows:
    """The rows of a data set at the network's own weights, as matrix-free operators.

    ``"logit"``: ``∂f_nc/∂θ``. ``"ggn"``: ``Λ^½ J``; for classes its null space also holds a common shift of all logits.
    ``"loss"``: ``∂ℓ_n/∂θ``, one row for each example, scaled to unit length, which does not change the null space.
    Gradients of examples that are fitted exactly are rounding errors and would count as constraints: they are ignored.
    ``whole`` is the operator of all rows, ``[m, P]``. The data must keep the order of their batches.
    """

    def __init__(
        self, network: Network, likelihood: Likelihood, data: Iterable[Any], kind: Rows, *, chunk_size: int = CHUNK_SIZE
    ):
        self._network, self._likelihood, self._data = network, likelihood, data
        self._kind, self._chunk_size = kind, chunk_size
        self._scales = self._row_scales() if kind == "loss" else None
        self.n_ignored = 0 if self._scales is None else int((self._scales == 0).sum())
        self.whole = self._operator(data)

    def by_batch(self) -> Iterator[Operator]:
        """The rows of one batch after the other, ``[m_b, P]``."""
        first = 0
        for item in self._data:
            rows = self._operator([item], first)
            first += rows.shape[0]
            yield rows

    def _operator(self, data: Iterable[Any], first: int = 0) -> Operator:
        if self._kind == "logit":
            return JacobianOperator(self._network, data, chunk_size=self._chunk_size)
        if self._scales is None:
            return GGNOperator(self._network, self._likelihood, data, chunk_size=self._chunk_size).root()
        losses = FisherOperator(self._network, self._likelihood, data, kind="empirical", chunk_size=self._chunk_size)
        rows = losses.root()
        return Diagonal(self._scales[first : first + rows.shape[0]]) @ rows

    def _row_scales(self) -> Tensor:
        """The reciprocal length of each loss's gradient, ``[N]``."""
        squares = []
        for batch in iterate(self._data, device=self._network.device, progress=False, description=""):
            for piece, gradients in micro_batches(self._network, batch):
                outputs, shape = gradients.capture.outputs, gradients.capture.output_shape
                root = gradient_root(self._likelihood, outputs.view(shape), piece.target)
                cotangent = root.up(outputs.new_ones(1, root.size)).view(1, *outputs.shape)
                total = outputs.new_zeros(len(outputs), dtype=torch.float64)
                for _, stack in gradients.blocks(cotangent):
                    ones = torch.ones(stack.shape, dtype=stack.dtype, device=stack.device)
                    total += stack.quadratic(ones, "diagonal")[:, 0].double()
                squares.append(total.view(shape[0], -1).sum(1))  # over positions that went as examples of their own
        norms = checks.finite("The length of a loss's gradient", torch.cat(squares).clamp(min=0).sqrt())
        return inverse_lengths(norms.to(self._network.dtype))
