"""Squares of gradients in Kronecker eigenbases, measured a good many examples at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.structured.gram_sum import EigenPairs, FactorSum
from laplace_plus.structured.stacks import OuterStack


class PendingSquares:
    """Outer products ``P = g aᵀ`` that wait to be added to ``Σ (Lᵀ P R)²``, the second moments that EKFAC measures.

    These are ``Σ (Lᵀ g)² ((Rᵀ a)²)ᵀ``: three matrix products, which take less time for many examples together. In a
    second pass over the same data the inputs are those that R comes from, and then ``Rᵀ a`` is known already.

    Args:
        bases: The eigendecompositions whose vectors are L ``[G, o, o]`` and R ``[G or 1, i, i]``.
        factors: The sums that were decomposed, or None where they are not at hand.
    """

    def __init__(self, bases: tuple[EigenPairs, EigenPairs], factors: tuple[FactorSum | None, FactorSum | None]):
        self.bases, self.factors = bases, factors
        self.n_rows = 0
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def append(self, stack: OuterStack, components: Tensor) -> None:
        """Copy the sides of a stack with one position.

        Args:
            stack: V × B outer products.
            components: ``[V]``: the component that each direction belongs to.
        """
        left, right = stack.sides(slice(0, stack.n_examples))
        # Copies, because loaders may write the next batch to the same memory.
        self._waiting.append((left[:, :, 0].detach().clone(), right[:, 0].detach().clone(), components))
        self.n_rows += stack.n_directions * stack.n_examples

    def multiply_into_(self, total: Tensor) -> None:
        """Add what waits to ``total [K, G, o, i]``."""
        if not self._waiting:
            return
        waiting, self._waiting, self.n_rows = self._waiting, [], 0
        lefts, rights, components = zip(*waiting, strict=True)
        a = self._squares(1, torch.cat(rights))  # [B, G or 1, i]
        rows = self._squares(0, torch.cat([left.flatten(0, 1) for left in lefts]))
        squares = rows.split([left.shape[0] * left.shape[1] for left in lefts])
        by_batch = [part.unflatten(0, left.shape[:2]) for part, left in zip(squares, lefts, strict=True)]
        for number, one in enumerate(total):
            kept = [part[own == number] for part, own in zip(by_batch, components, strict=True)]
            _add_products(one, torch.cat([part[0] if len(part) == 1 else part.sum(0) for part in kept]), a)

    def _squares(self, side: int, rows: Tensor) -> Tensor:
        """Squares of ``[n, G, d]`` rows in a side's basis, short of columns of zeros."""
        basis, factor = self.bases[side], self.factors[side]
        own = None
        if factor is not None and factor.holds(rows.transpose(0, 1)):
            own = basis.own_coordinates(len(rows))
        return (basis.rotate(rows) if own is None else own).square()


def _add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``Σ g aᵀ`` over rows ``[B, G, ≤ o]`` and ``[B, G or 1, ≤ i]`` to the corner of ``total [G, o, i]``."""
    corner = total[:, : left.shape[-1], : right.shape[-1]]
    if len(total) == 1:
        corner[0].addmm_(left[:, 0].T, right[:, 0])
    else:
        corner.baddbmm_(left.permute(1, 2, 0), right.expand(-1, len(total), -1).transpose(0, 1))
