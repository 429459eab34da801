"""Preconditioners for the system ``(I + W) u = b`` of posterior samples; none depends on the prior but at its use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus.curvature import KroneckerStructure, Native
from laplace_plus.curvature.structures import Curvature
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.nystrom import nystrom
from laplace_plus.network import Network, exact_arithmetic
from laplace_plus.posteriors.sampled.iterations import Rows
from laplace_plus.posteriors.sampled.sample_then_optimise import CGSolver, PriorUnits, Solver, TangentCurvature
from laplace_plus.structured import Factor


class KroneckerPreconditioner:
    """``A^½ (K + A)⁻¹ A^½`` with Kronecker factors K of the curvature, from one pass over the data.

    A block whose entries have several prior precisions takes their geometric mean; a preconditioner may be inexact.

    Args:
        curvature: M₁.
        data: The batches.
    """

    def __init__(self, curvature: TangentCurvature, data: Iterable[Any]):
        backend, network = Native(), curvature.network
        total: Curvature | None = None
        for batch in batches.iterate(data, device=network.device):
            total, _ = backend.accumulate(total, network, curvature.likelihood, batch, KroneckerStructure())
        assert total is not None
        self._curvature = total

    def at(self, system: PriorUnits) -> Rows:
        """The preconditioner of a system."""
        weights = torch.tensor([system.weight], dtype=system.curvature.dtype, device=system.curvature.device)
        precision = system.root.square()
        factors: list[tuple[Any, Factor]] = []
        for layout, block in self._curvature:
            own = layout.gather(precision).log().mean().exp()
            factors.append((layout, block.factor(weights, own)))

        def apply(vectors: Tensor) -> Tensor:
            scaled, result = vectors * system.root, torch.zeros_like(vectors)
            for layout, factor in factors:
                layout.scatter_(result, _inverse(factor, layout.gather(scaled)))
            return result.mul_(system.root)

        return apply


class NystromPreconditioner:
    """``(I + A^-½ Uᵀ Λ U A^-½)⁻¹`` with a randomised Nyström approximation ``Uᵀ Λ U`` of the curvature.

    The approximation is that of the curvature alone (Frangella, Tropp and Udell, 2023); the prior enters by Woodbury's
    identity, so that one sketch serves all of them.

    Args:
        curvature: M₁.
        rank: Number of vectors.
    """

    def __init__(self, curvature: TangentCurvature, rank: int):
        # Where the sketch starts from changes how fast the iteration is and not what it finds.
        generator = torch.Generator().manual_seed(0)
        found = nystrom(
            curvature,
            curvature.shape[0],
            rank,
            generator=generator,
            dtype=curvature.dtype,
            device=curvature.device,
            parameters=(),
        )
        positive = found.values > torch.finfo(found.values.dtype).eps * found.values.max()
        self._values, self._vectors = found.values[positive].double(), found.vectors[positive]

    def at(self, system: PriorUnits) -> Rows:
        """The preconditioner of a system."""
        rows = self._vectors / system.root
        if not len(rows):
            return lambda vectors: vectors.clone()
        core = torch.diag(1 / (system.weight * self._values)) + (rows @ rows.mT).double()
        inverse = torch.linalg.inv(core).to(rows.dtype)
        inverse = (inverse + inverse.mT) / 2

        def apply(vectors: Tensor) -> Tensor:
            return vectors - vectors @ rows.mT @ inverse @ rows

        return apply


class TangentProblem:
    """The curvature of some data, and the preconditioner that a solver asks for, made when it is first needed.

    Args:
        network: The network.
        likelihood: The likelihood.
        data: An iterable of batches that can be started again.
        solver: The solver.
        chunk_size: Number of vectors that are pushed through the network at a time.

    Attributes:
        curvature: ``M₁``.
        data: The batches.
    """

    def __init__(
        self, network: Network, likelihood: Likelihood, data: Iterable[Any], solver: Solver, *, chunk_size: int
    ):
        self.curvature = TangentCurvature(network, likelihood, data, chunk_size=chunk_size)
        self.data, self._solver = data, solver
        self._found: KroneckerPreconditioner | NystromPreconditioner | None = None

    def preconditioner(self, system: PriorUnits) -> Rows | None:
        """That of a system, in the prior's units; None for none."""
        solver = self._solver
        if not isinstance(solver, CGSolver) or solver.preconditioner == "none":
            return None
        if self._found is None:
            kronecker = solver.preconditioner == "kfac"
            with exact_arithmetic(self.curvature.network), torch.no_grad():
                self._found = (
                    KroneckerPreconditioner(self.curvature, self.data)
                    if kronecker
                    else NystromPreconditioner(self.curvature, solver.rank)
                )
        return self._found.at(system)


def _inverse(factor: Factor, blocks: Tensor) -> Tensor:
    """``M⁻¹ v`` for ``[k, G, o, i]`` by ``M⁻¹ = S Sᵀ``, with the S that turns white noise into draws."""
    with torch.enable_grad():
        noise = torch.zeros_like(blocks, requires_grad=True)
        (pulled,) = torch.autograd.grad(factor.sample(noise), noise, blocks)
    return factor.sample(pulled).detach()
