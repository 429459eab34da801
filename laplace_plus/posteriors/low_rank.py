"""Laplace from the leading eigenpairs of the curvature.

Restarted Lanczos iterations find the pairs from products with the curvature, which pass over the data many times but
hold no matrix. The rest of the evidence's determinant, ``tr log(I + H_rest/δ)``, is estimated by stochastic Lanczos
quadrature on the orthogonal complement (Ubaru et al., 2017), once for every prior precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks, kernels
from laplace_plus.checks import PRODUCTS
from laplace_plus.curvature import Curvature, LowRankStructure, Structure, curvature_operator
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import Estimate, Operator, eigsh, lanczos
from laplace_plus.linalg.estimates import draw_probes
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import settle, whole_layout
from laplace_plus.network.network import Network, full_precision
from laplace_plus.posteriors.gaussian import GaussianPosterior, Reduce
from laplace_plus.posteriors.public import require_one_noise
from laplace_plus.posteriors.state import GaussianState, require_restartable
from laplace_plus.structured import LowRankBlock, SampledSpectrum

MOST_RESTARTS, REMAINDER_DEPTH = 50, 10
"""Of the Lanczos iteration for the pairs, and its steps for each vector that estimates the rest."""


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
        remainder_probes: Number of random vectors that estimate the correction of the evidence's determinant for what
            the pairs leave out, with ten passes over the data; 0 for the evidence of the low-rank curvature alone.
        **common: As for :class:`Posterior`: parameters, prior_precision, prior_mean, temperature, backend.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.LowRank(net, "regression", rank=10).fit([(x, 2 * x)])
        >>> posterior = posterior.fit_prior_precision("marginal_likelihood")
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
        remainder_probes: int = 8,
        **common: Any,
    ):
        self.rank = checks.count("rank", rank)
        self.remainder_probes = checks.count("remainder_probes", remainder_probes, 0)
        self.tolerance = float(checks.number("tolerance", tolerance, above=0.0, most=0.999))
        super().__init__(model, likelihood, **common)

    @full_precision
    def remainder(self) -> Estimate:
        """The correction of the evidence's log-determinant for the rest, ``tr log(I + H_rest/(T δ))``.

        Half of it is subtracted from the log evidence. Its standard error is that of a normal distribution, from the
        spectrum as the random vectors saw it, and rather too large in small networks; ``converged`` says whether the
        last quarter of the Lanczos steps changed it by less than that. With ``remainder_probes=0`` or a Hessian nothing
        is estimated, and the value is zero.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: A prior precision that differs from entry to entry.
        """
        model = self.laplace_model()
        weights = model.weights() / self._temperature.to(model.vector.device)
        ((layout, block),) = model.curvature
        assert isinstance(block, LowRankBlock)
        diagonal = model.diagonals(self._prior_precision)[layout.key].to(weights)
        value, sem, change = block.remainder(weights, diagonal)
        probes, depth = len(block.rest), block.rest.nodes.shape[2]
        rounding = torch.finfo(block.vectors.dtype).eps ** 0.5 * value.abs()
        settled = change <= (torch.maximum(sem, rounding) if probes > 1 else rounding)
        return Estimate(value, sem, probes * depth, bool(settled), probes, depth)

    # -- fitting -------------------------------------------------------------------------------------------------------

    @override
    def _added(
        self,
        data: Iterable[Any],
        earlier: GaussianState | None,
        *,
        progress: bool,
        generator: torch.Generator | None,
        reduce: Reduce | None = None,
        accumulate: Any = None,
    ) -> tuple[GaussianState, int]:
        require_restartable(data, "The eigenpairs come from many passes over the data.")
        require_one_noise(self)
        options: dict[str, Any] = {"progress": progress, "generator": generator}
        state, seen = super()._added(data, earlier, reduce=reduce, accumulate=_outputs_alone, **options)
        own = curvature_operator(self.backend, self.network, self.likelihood, data, **options) if seen else None
        with torch.no_grad():
            if reduce is None:
                assert own is not None
                block = self._block(own, generator)
            else:  # all ranks look for the eigenpairs of the sum, and take those of the first
                seed = reduce(draw_seed(generator), lambda mine, theirs: mine)
                summed = _OverRanks(own, reduce, state.mean)
                block = reduce(self._block(summed, torch.Generator().manual_seed(seed)), lambda mine, theirs: mine)
        return replace(state, curvature=Curvature([(whole_layout(self.network), block)])), seen

    def _block(self, operator: Operator, generator: torch.Generator | None) -> LowRankBlock:
        total = self.network.n_parameters
        wanted = min(self.rank, total)
        tolerance = max(self.tolerance, 2 * PRODUCTS.get())  # half precision converges no further
        limits: Any = {"tolerance": tolerance, "max_restarts": MOST_RESTARTS}
        pairs = eigsh(operator, total, wanted, generator=generator, **limits)
        if not pairs.converged:
            warn(
                f"Of {wanted} eigenpairs of the curvature, {len(pairs.values)} met the tolerance of {tolerance:g} "
                f"within {MOST_RESTARTS} restarts; only these are kept. Raise the tolerance, or ask for a lower rank.",
                ConvergenceWarning,
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

        def project(z: Tensor) -> Tensor:
            return z - kernels.inner_products(z, vectors) @ vectors

        # Where the pairs are complete, the rest is rounding error and not even symmetric.
        depth = min(REMAINDER_DEPTH, total)
        rest = lanczos(lambda z: project(operator(project(z))), project(probes), depth, check_symmetry=False)
        floor = rounding * float(values.amax()) if len(values) else 0.0
        return LowRankBlock(values, vectors, SampledSpectrum.of(rest.tridiagonal(), rest.scale, floor=floor))


class _OverRanks(Operator):
    """The sum of the ranks' symmetric operators; None where a rank has no data."""

    symmetric = True

    def __init__(self, own: Operator | None, reduce: Reduce, like: Tensor):
        self.own, self.reduce = own, reduce
        self.shape, self.dtype, self.device = (len(like), len(like)), like.dtype, like.device

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self.reduce(torch.zeros_like(vectors) if self.own is None else self.own(vectors), torch.add)


def _outputs_alone(
    total: Curvature | None,
    network: Network,
    likelihood: Likelihood,
    batch: Batch,
    structure: Structure,
    *,
    generator: torch.Generator | None,
) -> tuple[Curvature, Tensor]:
    """A batch's outputs without a curvature; the first batch settles which layer is the last one."""
    settle(network, batch.inputs)
    outputs = network.forward(batch.inputs)
    likelihood.validate(outputs, batch.target)
    return Curvature([]), outputs
