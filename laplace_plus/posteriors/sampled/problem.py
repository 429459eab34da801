"""The linear systems of posterior samples for some data: their solution, and preconditioners that serve all priors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus.curvature import KroneckerStructure, Native
from laplace_plus.curvature.structures import Curvature
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.nystrom import nystrom
from laplace_plus.network import Network, exact_arithmetic
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Rows, Solved, TangentCurvature
from laplace_plus.posteriors.sampled.solvers import CGSolver, Solver

Preconditioner = Callable[[PriorUnits], Rows]
"""Gives the approximate inverse of a system."""


class TangentProblem:
    """The linear systems of some data: the curvature ``M₁``, the batches and the solver, with its preconditioner."""

    def __init__(
        self, network: Network, likelihood: Likelihood, data: Iterable[Any], solver: Solver, *, chunk_size: int
    ):
        self.curvature = TangentCurvature(network, likelihood, data, chunk_size=chunk_size)
        self.data, self.solver = data, solver
        self._made: Preconditioner | None = None

    def preconditioner(self, system: PriorUnits) -> Rows | None:
        """That of a system, in the prior's units; None for none."""
        solver = self.solver
        if not isinstance(solver, CGSolver) or solver.preconditioner == "none":
            return None
        if self._made is None:
            with exact_arithmetic(self.curvature.network), torch.no_grad():
                if solver.preconditioner == "kfac":
                    self._made = _kronecker_preconditioner(self.curvature, self.data)
                else:
                    self._made = _nystrom_preconditioner(self.curvature, solver.rank)
        return self._made(system)

    def solve(self, system: PriorUnits, draws: Draws, start: Tensor | None, **options: Any) -> Solved:
        """Solve for all samples together."""
        solver, curvature = self.solver, self.curvature
        with exact_arithmetic(curvature.network), torch.no_grad():
            b = system.right_hand_side(draws)
            guess = None if start is None else start * system.root
            if isinstance(solver, CGSolver):
                precondition = self.preconditioner(system)
                u, n = solver.iterate(system.system, b, start=guess, precondition=precondition, **options)
            else:
                rate = solver.learning_rate or 0.0
                if solver.learning_rate is None and options.get("state") is None:
                    rate = system.learning_rate(draws, solver.momentum)

                def products() -> Iterator[Rows]:
                    return (partial(system.system, product=product) for product in curvature.minibatches())

                u, n = solver.iterate(products, curvature.n_batches, b, rate=rate, start=guess, **options)
            return system.check(u, draws, solver.largest_residual, n)


def _kronecker_preconditioner(curvature: TangentCurvature, data: Iterable[Any]) -> Preconditioner:
    """``A^½ (K + A)⁻¹ A^½`` with Kronecker factors K of the curvature ``M₁``, from one pass over the data.

    A block whose entries have several prior precisions takes their geometric mean; a preconditioner may be inexact.
    """
    backend, network = Native(), curvature.network
    total: Curvature | None = None
    for batch in batches.iterate(data, device=network.device):
        total, _ = backend.accumulate(total, network, curvature.likelihood, batch, KroneckerStructure())
    assert total is not None
    blocks = list(total)

    def at(system: PriorUnits) -> Rows:
        weights = torch.tensor([system.weight], dtype=curvature.dtype, device=curvature.device)
        precision = system.root.square()
        means = [layout.gather(precision).log().mean().exp() for layout, _ in blocks]
        factors = [(layout, block.factor(weights, own)) for (layout, block), own in zip(blocks, means, strict=True)]

        def apply(vectors: Tensor) -> Tensor:
            scaled, result = vectors * system.root, torch.zeros_like(vectors)
            for layout, factor in factors:
                layout.scatter_(result, factor.solve(layout.gather(scaled)))
            return result.mul_(system.root)

        return apply

    return at


def _nystrom_preconditioner(curvature: TangentCurvature, rank: int) -> Preconditioner:
    """``(I + A^-½ Uᵀ Λ U A^-½)⁻¹`` with a randomised Nyström approximation ``Uᵀ Λ U`` of ``M₁``.

    The approximation is that of the curvature alone (Frangella, Tropp and Udell, 2023); the prior enters by Woodbury's
    identity, so that one sketch serves all priors.
    """
    found = nystrom(
        curvature,
        curvature.shape[0],
        rank,
        generator=torch.Generator().manual_seed(0),  # changes the number of iterations, not their result
        dtype=curvature.dtype,
        device=curvature.device,
        parameters=(),
    )
    positive = found.values > torch.finfo(found.values.dtype).eps * found.values.max()
    values, vectors = found.values[positive].double(), found.vectors[positive]

    def at(system: PriorUnits) -> Rows:
        rows = vectors / system.root
        core = torch.diag(1 / (system.weight * values)) + (rows @ rows.mT).double()
        inverse = torch.linalg.inv(core).to(rows.dtype)
        inverse = (inverse + inverse.mT) / 2
        return lambda u: u - u @ rows.mT @ inverse @ rows

    return at
