"""The curvature of a tangent model at another point: H from the likelihood's Hessians at ``h(θ, x_n)``, J unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature.structures import Curvature, KroneckerStructure
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.tangent_model import TangentModel


class _At:
    """A likelihood at given outputs ``[B, *, C]`` and targets; in place of targets it takes numbers of examples."""

    def __init__(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor):
        self._likelihood, self._outputs, self._targets = likelihood, outputs, targets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._likelihood, name)

    def validate(self, outputs: Tensor, numbers: Tensor) -> None:
        """Targets were validated with the network's outputs."""

    def rows(self, outputs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those at the given outputs."""
        return self._likelihood.rows(self._outputs[numbers], self._targets[numbers])


def curvature_at(posterior: Tunable, tangent: TangentModel, vector: Tensor) -> Curvature:
    """``Σ_n J_nᵀ Λ(h(θ, x_n)) J_n`` at unit noise for a vector θ ``[P]``, in the posterior's structure.

    It takes one pass over the data, two with corrected eigenvalues.

    Raises:
        UnsupportedError: The posterior's curvature is not the native exact one, or a low-rank one.
    """
    network, backend, structure = posterior.network, posterior.backend, posterior.structure
    if (backend.name, backend.kind) != ("native", "ggn") or structure.name == "low-rank":
        what, got = (
            "This curvature is at the network's outputs only.",
            f"{structure.name}, {backend.name} {backend.kind}",
        )
        fix = 'Take curvature_at="network", or lp.Full, lp.KFAC or lp.Diagonal with lp.Native("ggn").'
        raise UnsupportedError(what, expected="the native exact Gauss-Newton matrix", got=got, fix=fix)

    def batches() -> Iterator[tuple[Any, Batch]]:
        for batch, outputs in tangent.outputs_at(vector):
            numbers = torch.arange(len(outputs), device=outputs.device)
            yield _At(posterior.likelihood, outputs, batch.target), Batch(batch.inputs, numbers)

    total: Any = None
    with exact_arithmetic(network):
        for likelihood, batch in batches():
            total, _ = backend.accumulate(total, network, likelihood, batch, structure)
        if isinstance(structure, KroneckerStructure) and structure.eigenvalue_corrected:
            total = total.corrected(backend.component_weights(posterior.likelihood))
            for likelihood, batch in batches():
                backend.correct(network, likelihood, batch, total)
    return total
