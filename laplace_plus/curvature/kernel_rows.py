"""The rows whose kernel a posterior may move in: the Jacobian of what must not change on the training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.batches import iterate
from laplace_plus.curvature.operators import (
    CHUNK_SIZE,
    FisherOperator,
    GGNOperator,
    JacobianOperator,
    RootOperator,
)
from laplace_plus.curvature.pieces import gradient_pieces
from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import Diagonal, Operator
from laplace_plus.linalg.operators import Product
from laplace_plus.network import Network

Rows = Literal["logit", "ggn", "loss"]
"""All outputs, what the curvature sees of them, or each example's loss."""

KINDS: tuple[Rows, ...] = ("logit", "ggn", "loss")


class KernelRows:
    """Rows ``[m, P]`` over a data set, as operators.

    ``"logit"``: ``∂f_nc/∂θ``. ``"ggn"``: ``Λ^½ J``; for classes its kernel holds a common shift of all logits, too.
    ``"loss"``: ``∂ℓ_n/∂θ``, one row for each example, scaled to unit length, which leaves the kernel as it is. Examples
    that are fitted exactly have gradients of rounding size, which would make it all directions: they are ignored.

    Args:
        network: The network.
        likelihood: Its likelihood.
        data: Batches that can be started again and keep their order.
        kind: One of the three.
        chunk_size: Number of vectors that are pushed through the network at a time.

    Attributes:
        whole: All rows.
        n_ignored: Number of rows that were ignored.

    Raises:
        ConfigurationError: Another kind.
        NonFiniteError: Gradients that are not finite.
    """

    def __init__(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        kind: Rows,
        *,
        chunk_size: int = CHUNK_SIZE,
    ):
        if kind not in KINDS:
            raise ConfigurationError("Unknown rows.", expected=", ".join(KINDS), got=repr(kind))
        self._network, self._likelihood, self._data = network, likelihood, data
        self._kind, self._chunk_size = kind, chunk_size
        self.n_ignored = 0
        self._scales = self._row_scales() if kind == "loss" else None
        self.whole = self._operator(data)

    def parts(self) -> Iterator[Operator]:
        """The rows of one batch after the other, ``[m_b, P]``."""
        first = 0
        for item in self._data:
            part = self._operator([item], first)
            first += part.shape[0]
            yield part

    def _operator(self, data: Iterable[Any], first: int = 0) -> Operator:
        options: dict[str, Any] = {"chunk_size": self._chunk_size}
        rows: JacobianOperator | RootOperator
        if self._kind == "logit":
            rows = JacobianOperator(self._network, data, **options)
        elif self._kind == "ggn":
            rows = GGNOperator(self._network, self._likelihood, data, **options).root()
        else:
            rows = FisherOperator(self._network, self._likelihood, data, kind="empirical", **options).root()
        if self._scales is None:
            return rows
        return _ScaledRows(self._scales[first : first + rows.shape[0]], rows)

    def _row_scales(self) -> Tensor:
        """The reciprocal length of each loss's gradient ``[N]``, zero for those of rounding size."""
        squares = []
        for batch in iterate(self._data, device=self._network.device, progress=False, description=""):
            for piece, gradients in gradient_pieces(self._network, batch):
                outputs = gradients.capture.outputs
                rows, targets, weight = self._likelihood.rows(outputs, piece.target)
                cotangent = self._likelihood.gradient(rows, targets).detach() * weight[:, None].to(rows.dtype)
                total = outputs.new_zeros(len(outputs), dtype=torch.float64)
                for _, stack in gradients.stacks(cotangent.reshape(1, *outputs.shape).to(outputs.dtype)):
                    ones = torch.ones(stack.shape, dtype=stack.dtype, device=stack.device)
                    total += stack.quadratic(ones, "diagonal")[:, 0].double()
                squares.append(total)
        # At another noise level all rows are scaled alike.
        scale = self._likelihood.curvature_weights().detach().max().to(squares[0])
        norms = scale * torch.cat(squares).clamp(min=0).sqrt()
        if not bool(torch.isfinite(norms).all()):
            raise NonFiniteError("Gradients of the losses are not finite.", expected="finite ones", got="NaN or Inf")
        floor = 100 * torch.finfo(self._network.dtype).eps * norms.max()
        kept = norms > floor
        self.n_ignored = int((~kept).sum())
        return torch.where(kept, norms.clamp(min=1e-300).reciprocal(), 0.0).to(self._network.dtype)


class _ScaledRows(Product):
    """``diag(s) A``, which is written out as A is."""

    def __init__(self, scales: Tensor, rows: Operator):
        super().__init__([Diagonal(scales), rows])
        self._scales, self._rows = scales, rows

    @override
    def dense(self, *, chunk_size: int | None = None) -> Tensor:
        return self._rows.dense(chunk_size=chunk_size).mul_(self._scales[:, None])
