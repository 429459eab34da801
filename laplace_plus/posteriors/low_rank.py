"""Laplace from the leading eigenpairs of the curvature.

Restarted Lanczos iterations find the pairs from products with the curvature, which pass over the data many times but
hold no matrix. The rest of the evidence's determinant, ``tr log(I + H_rest/δ)``, is estimated by stochastic Lanczos
quadrature on the orthogonal complement (Ubaru et al., 2017), once for every prior precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.curvature import Backend, Curvature, LowRankStructure, curvature_operator
from laplace_plus.curvature.capture import capture_batch
from laplace_plus.curvature.structures import whole_layout
from laplace_plus.distributed import SummedOperator
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, DataError, UnsupportedError
from laplace_plus.linalg import Estimate, Operator, eigsh, lanczos
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.posteriors.configuration import check_count, full_precision
from laplace_plus.posteriors.gaussian import GaussianPosterior
from laplace_plus.posteriors.sums import FitSums, block_of_rank_zero, sum_over_ranks
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.selection import Selection
from laplace_plus.structured import Block, LowRankBlock, SampledSpectrum


class LowRank(GaussianPosterior):
    """Laplace with the leading eigenpairs of the whole curvature, correlations between layers included.

    Choose it for networks that are too large for :class:`Full` where layers should not be taken as independent. Memory
    is ``rank`` vectors of the network's size, and ``2 rank + 1`` (at least ``rank + 20``) while fitting, which passes
    over the data about twice ``rank`` times. Directions outside the eigenvectors keep the prior's variance, so that a
    rank that is too small overestimates the uncertainty. Takes scalar priors; with ``remainder_probes=0`` also
    layer-wise and diagonal ones.

    With ``backend=Native(kind="hessian")`` the pairs are those of the loss's Hessian. Its negative eigenvalues are left
    out, and there is no correction for the rest.

    Args:
        model, likelihood: As for :class:`Posterior`.
        rank: Largest number of eigenpairs that are kept.
        tolerance: An eigenpair counts once ``‖H u − λ u‖ ≤ tolerance · λ_max``.
        max_restarts: Largest number of restarts of the Lanczos iteration.
        remainder_probes: Number of random vectors that estimate the correction of the evidence's determinant for what
            the pairs leave out; 0 for the evidence of the low-rank curvature alone.
        remainder_depth: Lanczos steps for each of them: passes over the data.
        parameters, prior_precision, prior_mean, temperature, backend, memory_budget: As for :class:`Posterior`.

    Raises:
        ConfigurationError: An option out of range, besides what :class:`Posterior` raises.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.LowRank(net, "regression", rank=10).fit([(x, 2 * x)]).fit_prior_precision()
        >>> posterior.predictive(x[:3]).variance.shape
        torch.Size([3, 1])
    """

    structure = LowRankStructure()

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        rank: int = 50,
        tolerance: float = 1e-4,
        max_restarts: int = 50,
        remainder_probes: int = 8,
        remainder_depth: int = 10,
        parameters: Selection = "all",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        check_count(rank, "rank")
        check_count(max_restarts, "max_restarts")
        check_count(remainder_depth, "remainder_depth")
        if remainder_probes != 0:
            check_count(remainder_probes, "remainder_probes")
        if not 0 < tolerance < 1:
            raise ConfigurationError(
                "tolerance must lie between 0 and 1.", expected="0 < tolerance < 1", got=repr(tolerance)
            )
        self.rank, self.tolerance, self.max_restarts = rank, float(tolerance), max_restarts
        self.remainder_probes, self.remainder_depth = remainder_probes, remainder_depth
        super().__init__(
            model,
            likelihood,
            parameters=parameters,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
            backend=backend,
            memory_budget=memory_budget,
        )

    @override
    def options(self) -> dict[str, Any]:
        names = ("rank", "tolerance", "max_restarts", "remainder_probes", "remainder_depth")
        return {name: getattr(self, name) for name in names}

    @full_precision
    def remainder(self) -> Estimate:
        """The correction of the evidence's log-determinant for the rest, ``tr log(I + H_rest/(T δ))``.

        Half of it is subtracted from the log evidence. Its standard error is over the random vectors; ``converged``
        says whether the last quarter of the Lanczos steps changed it by less than that. With ``remainder_probes=0`` or
        a Hessian nothing is estimated, and the value is zero.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: A prior precision that differs from entry to entry.
        """
        model = self.laplace_model()
        weights = model.weights() / self._temperature.to(model.vector.device)
        ((layout, block),) = model.curvature
        assert isinstance(block, LowRankBlock)
        diagonal = self.prior().on(layout.index).to(weights)
        value, sem, change = block.remainder(weights, diagonal)
        probes, depth = len(block.rest), block.rest.depth
        rounding = torch.finfo(block.vectors.dtype).eps ** 0.5 * value.abs()
        settled = change <= (torch.maximum(sem, rounding) if probes > 1 else rounding)
        return Estimate(value, sem, probes * depth, bool(settled), probes, depth)

    # -- fitting -------------------------------------------------------------------------------------------------------

    @override
    def _total(
        self, data: Iterable[Any], before: FitSums | None, *, progress: bool, generator: torch.Generator | None
    ) -> tuple[FitSums, int]:
        require_restartable(data, "The eigenpairs come from many passes over the data.")
        if self.likelihood.n_noise > 1:
            raise UnsupportedError(
                "Eigenpairs of a curvature with several noise levels hold for those levels only.",
                expected="one noise level",
                got=f"{self.likelihood.n_noise}",
                fix="Use lp.Gaussian() with a single noise_std, or lp.Full or lp.KFAC.",
            )
        group, network = self.group, self.network
        own = self._statistics(data, progress=progress)
        sums = own if group is None else sum_over_ranks(group, own, network)
        assert sums is not None
        operator: Operator | None = None
        if own is not None:
            operator = curvature_operator(
                self.backend, network, self.likelihood, data, generator=generator, progress=progress
            )
        block: Block | None = None
        with torch.no_grad():
            if group is None:
                assert operator is not None
                block = self._block(operator, generator)
            else:  # rank 0 looks for the eigenpairs of the sum of all ranks' curvatures, and tells the others
                summed = SummedOperator(
                    group, operator, network.n_parameters, dtype=network.dtype, device=network.device
                )
                if group.rank == 0:
                    block = self._block(summed, generator)
                    summed.finish()
                else:
                    summed.serve()
                block = block_of_rank_zero(group, block, network.device)
        curvature = Curvature([(whole_layout(network), block)])
        return replace(sums, curvature=curvature), 0 if own is None else own.n_data

    def _statistics(self, data: Iterable[Any], *, progress: bool) -> FitSums | None:
        """The sums of this rank, without a curvature, from one pass without gradients; None if it has no data."""
        sums: FitSums | None = None
        for batch in self.batches(data, progress=progress, description=f"{type(self).__name__}: likelihood"):
            if sums is None and self.is_last_layer:
                capture_batch(self.network, batch)  # settles which layer is the last one
            outputs = self.network.forward(batch.inputs)
            self.likelihood.validate(outputs, batch.target)
            part = self.likelihood.statistics(outputs, batch.target).cpu()
            batch_sums = FitSums(Curvature([]), part, outputs.shape[0], outputs.shape[-1])
            if sums is not None and sums.n_outputs != batch_sums.n_outputs:
                raise DataError(
                    "The number of outputs changes from batch to batch.",
                    expected=f"{sums.n_outputs}",
                    got=f"{batch_sums.n_outputs}",
                )
            sums = batch_sums if sums is None else sums.plus(batch_sums)
        return sums

    def _block(self, operator: Operator, generator: torch.Generator | None) -> LowRankBlock:
        total = self.network.n_parameters
        wanted = min(self.rank, total)
        pairs = eigsh(
            operator,
            total,
            wanted,
            which="largest",
            tolerance=self.tolerance,
            max_restarts=self.max_restarts,
            generator=generator,
        )
        if not pairs.converged:
            warnings.warn(
                f"Of {wanted} eigenpairs of the curvature, {len(pairs.values)} met the tolerance of {self.tolerance:g} "
                f"within {self.max_restarts} restarts; only these are kept. Raise max_restarts or the tolerance, or "
                "ask for a lower rank.",
                ConvergenceWarning,
                stacklevel=6,
            )
        values = pairs.values.double()
        # Values below ten units of rounding of the largest one are rounding errors, whatever the number of weights.
        rounding = 10 * torch.finfo(pairs.values.dtype).eps
        kept = values > rounding * values.clamp(min=0).amax() if len(values) else values > 0
        values, vectors = values[kept], pairs.vectors[kept]
        indefinite = self.backend.kind == "hessian"
        complete = wanted == total or len(values) < len(pairs.values)
        if self.remainder_probes == 0 or indefinite or complete:
            return LowRankBlock(values, vectors, SampledSpectrum.unknown(values.device))
        probes = draw_probes(
            "signs", self.remainder_probes, total, generator=generator, dtype=operator.dtype, device=operator.device
        )
        deflated = _Deflated(operator, vectors)
        # Where the pairs are complete, the rest is rounding error and not even symmetric.
        rest = lanczos(deflated, deflated.project(probes), self.remainder_depth, check_symmetry=False)
        floor = rounding * float(values.amax()) if len(values) else 0.0
        return LowRankBlock(values, vectors, SampledSpectrum.of(rest.tridiagonal(), rest.scale, floor=floor))


@dataclass(frozen=True)
class _Deflated:
    """``(I − UᵀU) H (I − UᵀU)`` on row-stacked vectors."""

    operator: Operator
    vectors: Tensor

    def project(self, vectors: Tensor) -> Tensor:
        return vectors - kernels.inner_products(vectors, self.vectors) @ self.vectors

    def __call__(self, vectors: Tensor) -> Tensor:
        return self.project(self.operator(self.project(vectors)))
