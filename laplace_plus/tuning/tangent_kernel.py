"""The network's tangent kernel ``J Jᵀ`` between chosen numbers among its outputs, without the Jacobian.

The gradient of one output in a layer's weight is ``g aᵀ`` wherever the layer is used once, so that two of them have the
inner product ``(g · g')(a · a')``: ``o + i`` multiplications, not ``o i``. Other blocks are written out. Where one of
them has more than 1024 entries, normal matrices from both sides make it as small, which keeps inner products in
expectation (Johnson and Lindenstrauss, 1984).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import Gradients
from laplace_plus.network.network import Network
from laplace_plus.structured.gradients import ExampleGradients, OuterGradients, slices

_ENTRIES, _ROWS = 1024, 32
"""Most entries of a block that is written out, and rows among them."""

_CHUNK = 2 * 2**20
"""Bytes of a kernel's rows that are formed together, which stay in a processor's cache."""


@dataclass
class OutputGradients:
    """Gradients of p numbers, block by block, as float64 factors: of each ``[p, ·]``, products of inner products."""

    blocks: dict[str, list[Tensor]]
    count: int

    @classmethod
    def join(cls, parts: Sequence[OutputGradients]) -> OutputGradients:
        """All of them; a batch may not have used a block, whose gradients are zero there."""
        like = {key: sides for part in parts for key, sides in part.blocks.items()}
        joined = {}
        for key, sides in like.items():
            each = [
                part.blocks.get(key) or [one.new_zeros(part.count, one.shape[1]) for one in sides] for part in parts
            ]
            joined[key] = [torch.cat(column) for column in zip(*each, strict=True)]
        return cls(joined, sum(part.count for part in parts))

    def at(self, positions: Tensor) -> OutputGradients:
        """Some of them, or all in another order."""
        blocks = {key: [side[positions.to(side.device)] for side in sides] for key, sides in self.blocks.items()}
        return OutputGradients(blocks, len(positions))

    def times(self, factors: Tensor) -> OutputGradients:
        """Each gradient by its factor, ``[p]``."""
        blocks = {key: [first * factors.to(first)[:, None], *rest] for key, (first, *rest) in self.blocks.items()}
        return OutputGradients(blocks, self.count)

    def by_block(self, weights: Tensor) -> OutputGradients:
        """Each block's gradients by their mean square norm, of which each counts by its weight ``[p]``."""
        blocks = {}
        for key, (first, *rest) in self.blocks.items():
            squares = first.square().sum(1)
            for side in rest:
                squares = squares * side.square().sum(1)
            mean = weights.to(squares) @ squares / len(squares)
            blocks[key] = [first / mean.clamp_min(torch.finfo(first.dtype).tiny), *rest]
        return OutputGradients(blocks, self.count)

    def kernel(self, others: OutputGradients) -> Tensor:
        """Inner products with other gradients, ``[p, p']`` float64."""
        device = next((side.device for sides in self.blocks.values() for side in sides), torch.device("cpu"))
        total = torch.zeros(self.count, others.count, dtype=torch.float64, device=device)
        for own in slices(self.count, 8 * others.count, _CHUNK):
            for key in self.blocks.keys() & others.blocks.keys():
                first, *rest = [a[own] @ b.T for a, b in zip(self.blocks[key], others.blocks[key], strict=True)]
                for factor in rest:
                    first *= factor
                total[own] += first
        return total


def output_gradients(network: Network, inputs: Any, chosen: Tensor) -> tuple[OutputGradients, Tensor]:
    """Of p numbers in the outputs ``[B, *, C]`` the gradients and ``J θ̃ [p]``, float64.

    ``chosen [p]`` are positions in the flattened outputs.
    """
    capture = Capture(network, inputs)
    gradients = Gradients(network, capture)
    outputs, vector = capture.outputs.to(network.dtype), network.vector()[None]  # may count positions as examples
    n, size = len(outputs), outputs[0].numel()
    chosen = chosen.to(outputs.device)
    one_hot = torch.eye(size, dtype=outputs.dtype, device=outputs.device).view(size, 1, *outputs.shape[1:])
    parts, lines, order = [], [], []
    for some in gradients.cotangent_chunks(size):
        number = chosen % size
        own = ((number >= some.start) & (number < some.stop)).nonzero().squeeze(-1)
        at = number[own] - some.start, chosen[own] // size  # cotangents and examples
        blocks, line = {}, torch.zeros(len(own), dtype=torch.float64, device=outputs.device)
        for layout, layer in gradients.blocks(one_hot[some].expand(-1, n, *outputs.shape[1:])):
            wide = layer.in_dtype(torch.float64)
            line += wide.project(layout.places.gather(vector).double())[..., 0][at]
            blocks[layout.key] = _factors(wide, *at)
        parts.append(OutputGradients(blocks, len(own)))
        lines.append(line)
        order.append(own)
    as_chosen = torch.cat(order).argsort()
    return OutputGradients.join(parts).at(as_chosen), torch.cat(lines)[as_chosen]


def _factors(gradients: ExampleGradients, cotangents: Tensor, examples: Tensor) -> list[Tensor]:
    """One block's gradients of chosen cotangents and examples."""
    if isinstance(gradients, OuterGradients) and gradients.n_positions == 1 and gradients.shape[0] == 1:
        every = slice(None)
        return [gradients.left(every)[cotangents, examples, 0, 0], gradients.right(every)[examples, 0, 0]]
    groups, rows, columns = gradients.shape
    fewer = min(rows, _ROWS) if groups * rows * columns > _ENTRIES else rows
    narrower = min(columns, max(1, _ENTRIES // (groups * fewer))) if groups * rows * columns > _ENTRIES else columns
    left = None if fewer == rows else _mixing(groups, rows, fewer, gradients.device)
    right = None if narrower == columns else _mixing(groups, columns, narrower, gradients.device)
    small = gradients if left is right is None else gradients.in_basis(left, right)
    return [small.dense(slice(0, small.n_examples))[cotangents, examples].flatten(1)]


def _mixing(groups: int, size: int, fewer: int, device: torch.device) -> Tensor:
    """``Ω [G, n, k]`` with ``E Ω Ωᵀ = I``, the same each time."""
    source = torch.Generator().manual_seed(size)
    return (torch.randn(groups, size, fewer, generator=source, dtype=torch.float64) / fewer**0.5).to(device)
