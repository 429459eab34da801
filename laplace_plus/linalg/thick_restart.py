"""Lanczos' process with thick restarts: a few eigenpairs of a symmetric operator in a fixed amount of memory.

K. Wu and H. Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM Journal on Matrix
Analysis and Applications 2000. A single start vector has no more than one direction in each eigenspace. Two measures
find eigenvalues of any multiplicity: the process goes on with a random vector when its space has become invariant, and
it is repeated in the complement of what was found until that brings nothing better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from laplace_plus.errors import NonFiniteError, OperatorError
from laplace_plus.kernels import vector_norm
from laplace_plus.linalg.orthogonalization import orthogonalize
from laplace_plus.linalg.sketches import require_squares

Which = Literal["largest", "smallest", "magnitude"]


class ThickRestart:
    """A search for the outermost eigenpairs of a symmetric operator.

    Args:
        product: ``A v`` for one vector ``[n]``.
        start: First vector ``[n]``; not zero.
        k: Number of pairs; at most n.
        which: Which end of the spectrum.
        limit: The largest residual of a converged pair, given the eigenvalues ``[j]`` and an estimate of ``‖A‖``.
        subspace: Number of vectors to store at a time.
        max_restarts: Cap on all restarts together.
        random: Draws a vector ``[n]``.
        dtype: Type in which the products are computed.
        symmetric: Name of the operator in errors.

    Attributes:
        values: ``[j]`` eigenvalues found, the most wanted first; float64 on the CPU.
        vectors: ``[j, n]`` their eigenvectors.
        norm: A lower bound of ‖A‖, usually close.
        complete: Whether ``k`` pairs converged, and nothing better is left as far as random vectors can tell.
    """

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        start: Tensor,
        k: int,
        which: Which,
        limit: Callable[[Tensor, float], Tensor],
        *,
        subspace: int,
        max_restarts: int,
        random: Callable[[], Tensor],
        dtype: torch.dtype,
        symmetric: str = "A",
    ):
        self._product, self._which, self._limit, self._random = product, which, limit, random
        self._subspace, self._restarts = subspace, max_restarts
        self._name, self._asymmetry = symmetric, torch.finfo(dtype).eps ** 0.5
        self.values, self.vectors = torch.zeros(0, dtype=torch.float64), start.new_zeros(0, start.shape[0])
        self.norm = 0.0
        self.complete = self._search(start, k, None)
        n = start.shape[0]
        while self.complete and self.values.shape[0] < n:
            # another copy of an eigenvalue that was found may be left in the complement
            last, found = self.values[k - 1], self.values.shape[0]
            self.complete = self._search(random(), 1, last)
            rounding = 10 * torch.finfo(start.dtype).eps * self.norm
            if self.values.shape[0] == found or self._key(self.values[-1]) <= self._key(last) + rounding:
                break
            self._sort()
        self._sort()
        self.values, self.vectors = self.values[:k], self.vectors[:k]

    def _sort(self) -> None:
        order = self._wanted(self.values).argsort()
        self.values, self.vectors = self.values[order], self.vectors[order.to(self.vectors.device)]

    def _key(self, values: Tensor) -> Tensor:
        return {"largest": values, "smallest": -values, "magnitude": values.abs()}[self._which]

    def _wanted(self, values: Tensor) -> Tensor:
        """The place of each value, zero for the most wanted."""
        return self._key(values).argsort(descending=True, stable=True).argsort()

    def _search(self, start: Tensor, k: int, threshold: Tensor | None) -> bool:
        """Find k pairs in the complement of those known, or show that there is none beyond a threshold."""
        known, n = self.vectors.shape
        free = n - known
        k, size = min(k, free), min(self._subspace, free)
        basis = torch.cat([self.vectors, start.new_zeros(size, n)])
        eps = torch.finfo(start.dtype).eps
        projected = start.new_zeros(size, size)
        coupling = start.new_zeros(0)  # what symmetry says of the new column
        asymmetry = start.new_zeros(())
        vector, kept = self._unit(start, basis[:known]), 0
        while True:
            beta = 0.0
            for j in range(kept, size):
                basis[known + j] = vector
                product = self._product(vector)
                rest, coefficients = orthogonalize(basis[None, : known + j + 1], product[None])
                column = coefficients[0, known:]
                if j:
                    asymmetry = torch.maximum(asymmetry, (column[:j] - coupling).abs().max())
                projected[: j + 1, j] = projected[j, : j + 1] = column
                length, beta = torch.stack([vector_norm(product), vector_norm(rest[0])]).tolist()
                self._require_finite(beta)
                if length == 0:
                    require_squares(product, vector_norm(product))
                self.norm = max(self.norm, length)
                coupling = torch.nn.functional.pad(start.new_zeros(j), (0, 1), value=beta)
                if beta > 10 * eps * self.norm:
                    vector = rest[0] / beta
                else:
                    beta, coupling = 0.0, torch.zeros_like(coupling)
                    if j + 1 < free:
                        vector = self._unit(self._random(), basis[: known + j + 1])
            self._require_symmetric(float(asymmetry))
            values, rotation = torch.linalg.eigh(projected.double().cpu())
            order = self._key(values).argsort(descending=True, stable=True)
            values, rotation = values[order], rotation[:, order]
            residuals = beta * rotation[-1].abs()
            self.norm = max(self.norm, float(values.abs().max()))
            good = residuals <= self._limit(values, self.norm)
            done = bool(good[:k].all())
            beaten = threshold is not None and bool(self._key(values)[0] + residuals[0] < self._key(threshold))
            if done or beaten or self._restarts == 0:
                chosen = torch.nonzero(good[:k])[:, 0]
                if not beaten:
                    rotated = rotation[:, chosen].T.to(basis) @ basis[known:]
                    self.vectors = torch.cat([self.vectors, rotated])
                    self.values = torch.cat([self.values, values[chosen]])
                return done or beaten
            self._restarts -= 1
            kept = min(k + (size - k) // 2, size - 1)
            rotation = rotation[:, :kept].to(basis)
            basis[known : known + kept] = rotation.T @ basis[known:]
            projected.zero_()
            projected[:kept, :kept] = torch.diag(values[:kept]).to(basis)
            coupling = beta * rotation[-1]

    def _unit(self, vector: Tensor, basis: Tensor) -> Tensor:
        """A unit vector orthogonal to the basis."""
        for _ in range(2):
            vector = vector / vector_norm(vector)
            if basis.shape[0]:
                vector = orthogonalize(basis[None], vector[None])[0][0]
        return vector / vector_norm(vector)

    def _require_finite(self, size: float) -> None:
        if not size < float("inf"):
            raise NonFiniteError(
                "The search for eigenpairs met NaN or infinity.",
                expected="an operator with finite entries",
                got="a product that is not finite",
            )

    def _require_symmetric(self, asymmetry: float) -> None:
        if asymmetry > self._asymmetry * self.norm:
            plain = self._name == "A"
            raise OperatorError(
                "The operator is not symmetric." if plain else "rmatvec is not the transpose.",
                expected=f"uᵀ({self._name})v = vᵀ({self._name})u to a relative {self._asymmetry:.0e}",
                got=f"a relative difference of {asymmetry / self.norm:.1e} on its Krylov space",
                fix="Symmetrise it, or use svds." if plain else "Leave rmatvec out to let torch differentiate matvec.",
            )
