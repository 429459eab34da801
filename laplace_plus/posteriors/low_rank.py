"""Laplace from the leading eigenpairs of the curvature.

Restarted Lanczos iterations find the pairs from products with the curvature, which pass over the data many times but
hold no matrix. The evidence is that of the whole curvature: the rest of its determinant is estimated by stochastic
Lanczos quadrature (Ubaru et al., 2017), once for all scalar prior precisions; several precisions take products anew.
Up to 1000 parameters the curvature is written out, and nothing is estimated.

A Nyström basis takes one pass. Its features are ``J(x) V``, V the gradients of K numbers in the training outputs, with
which the kernel ``J Jᵀ`` is known at these K (Deng, Zhou and Zhu, "Accelerated Linearized Laplace Approximation for
Bayesian Deep Learning", 2022: ELLA). ELLA's weights are zero beside V, so that its variances vanish far from the data
that V is from, and its curvature is ``V H Vᵀ``. Here the weights beside the features keep their prior, and all of
``H Vᵀ`` is used: ``H ≈ H Vᵀ (V H Vᵀ)⁻¹ V H``, which is at most H. So variances are between those of H and the prior's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature import Curvature, JacobianOperator, LowRankStructure, curvature_operator
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import Estimate, Operator
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import settle, whole_layout
from laplace_plus.network.network import Network, full_precision
from laplace_plus.posteriors.gaussian import GaussianPosterior, Reduce
from laplace_plus.posteriors.public import require_one_noise
from laplace_plus.posteriors.state import GaussianState, require_restartable, require_same_data
from laplace_plus.structured.low_rank import LowRankBlock

REMAINDER_FIX = "remainder_probes=0 takes the evidence of the low-rank curvature alone."
AGAIN = "The remainder under several prior precisions passes over the training data."


class LowRank(GaussianPosterior):
    """Laplace with the leading eigenpairs of the whole curvature, correlations between layers included.

    Choose it for networks that are too large for :class:`Full` where layers should not be taken as independent. Memory
    is ``rank`` vectors of the network's size, and ``2 rank + 1`` (at least ``rank + 20``) while fitting, which passes
    over the data about twice ``rank`` times. Directions outside the eigenvectors keep the prior's variance, so that a
    rank that is too small overestimates the uncertainty: then tune by the default or on held-out data, not by the
    evidence, whose precision suits the whole curvature. One precision for each entry is only tuned with
    ``remainder_probes=0``.

    With ``backend=Native(kind="hessian")`` the pairs are those of the loss's Hessian. Its negative eigenvalues are left
    out, and there is no correction for the rest.

    With ``basis="nystrom"`` the posterior is that of the tangent kernel's Gaussian process from K = ``rank`` of its
    features and all data: that of :class:`Full` once K gradients span all others, and else of larger variance. Fitting
    takes ``rank`` products in one pass, and ``remainder_probes``. Above 1000 parameters the evidence neglects how the
    pairs correlate with the rest.

    Args:
        model, likelihood: As for :class:`Posterior`.
        rank: Largest number of eigenpairs that are kept; K, the number of gradients of a Nyström basis.
        basis: ``"eigenvectors"``, or ``"nystrom"`` for gradients of the network's outputs at random training data.
        tolerance: An eigenpair counts once ``‖H u − λ u‖ ≤ tolerance · λ_max``.
        remainder_probes: Number of random vectors that tell the evidence what the pairs leave out, with twenty products
            of each at the fit, and at each evaluation under several precisions, for which the training data are needed.
            Tuning says how accurate they made it. 0 for the evidence of the low-rank curvature alone.
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
        basis: Literal["eigenvectors", "nystrom"] = "eigenvectors",
        tolerance: float = 1e-4,
        remainder_probes: int = 32,
        **common: Any,
    ):
        self.rank = checks.count("rank", rank)
        self.remainder_probes = checks.count("remainder_probes", remainder_probes, 0)
        self.tolerance = float(checks.number("tolerance", tolerance, above=0.0, most=0.999))
        self.basis = checks.choice("basis", basis, ("eigenvectors", "nystrom"))
        super().__init__(model, likelihood, **common)
        if self.basis == "nystrom" and self.backend.kind == "hessian":
            what, fix = "A Nyström basis needs a curvature that is not negative.", 'Use basis="eigenvectors".'
            raise UnsupportedError(what, expected='kind="ggn"', got='kind="hessian"', fix=fix)

    @full_precision
    def remainder(self) -> Estimate:
        """The correction of the evidence's log-determinant for the rest, ``tr log(I + H_rest/(T δ))``.

        Half of it is subtracted from the log evidence. Its standard error is that of the mean over the random vectors;
        ``converged`` says whether the last quarter of the Lanczos steps changed it by less than that. With
        ``remainder_probes=0`` or a Hessian the value is zero, and up to 1000 parameters it is exact.

        Raises:
            NotFittedError: Before :meth:`fit`.
            DataError: Several precisions, and training data that are not known.
            UnsupportedError: Several precisions, and a curvature of sampled labels.
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
    def sums(
        self, data: Iterable[Any], earlier: GaussianState | None, *, reduce: Reduce | None = None, **options: Any
    ) -> tuple[GaussianState, int]:
        require_restartable(data, "The eigenpairs come from many passes over the data.")
        require_one_noise(self)
        generator = options["generator"]
        state, seen = super().sums(data, earlier, reduce=reduce, accumulate=_outputs_alone, **options)
        own = curvature_operator(self.backend, self.network, self.likelihood, data, **options) if seen else None
        with torch.no_grad():
            start = self._gradients(data, **options) if self.basis == "nystrom" and seen else None
            if reduce is None:
                assert own is not None
                block = self._block(own, start, generator)
            else:  # all ranks look for the pairs of the sum, and take those of the first
                seed = reduce(draw_seed(generator), lambda mine, theirs: mine)
                if self.basis == "nystrom":
                    start = reduce(start, lambda mine, theirs: torch.cat([mine, theirs]))
                    start = start[Random(seed).sample(range(len(start)), min(self.rank, len(start)))]
                summed, source = _OverRanks(own, reduce, state.mean), torch.Generator().manual_seed(seed)
                block = reduce(self._block(summed, start, source), lambda mine, theirs: mine)
        return replace(state, curvature=Curvature([(whole_layout(self.network), block)])), seen

    def _block(self, operator: Operator, start: Tensor | None, generator: torch.Generator | None) -> LowRankBlock:
        if start is not None:
            return LowRankBlock.spanned(operator, start, self.remainder_probes, generator=generator)
        probes = 0 if self.backend.kind == "hessian" else self.remainder_probes  # whose rest is indefinite
        return LowRankBlock.of(operator, self.rank, probes, tolerance=self.tolerance, generator=generator)

    def _gradients(self, data: Iterable[Any], generator: torch.Generator | None, progress: bool) -> Tensor:
        """Gradients ``[K, P]`` of numbers in the outputs at random training data, or of all if there are fewer."""
        jacobian = JacobianOperator(self.network, data, progress=progress)
        numbers = range(jacobian.shape[0])
        chosen = Random(draw_seed(generator)).sample(numbers, min(self.rank, len(numbers)))
        return jacobian.rows(torch.tensor(sorted(chosen)))

    @override
    def _evidence_curvature(self, state: GaussianState) -> Curvature:
        """The pairs with products of the training data, which are looked for where several precisions ask for them."""
        ((layout, block),) = state.curvature
        assert isinstance(block, LowRankBlock)

        @cache
        def operator() -> Operator:
            if self.backend.kind == "ggn_mc":
                what = "The sampled labels of the fit are not kept, with which several precisions need products."
                raise UnsupportedError(what, expected='kind="ggn", or structure="scalar"', fix=REMAINDER_FIX)
            data = self.training_data.again(None, f"{AGAIN} {REMAINDER_FIX}")
            found = curvature_operator(self.backend, self.network, self.likelihood, data)
            require_same_data("the fit", (self.n_data, None), (getattr(found, "n_data", self.n_data), 0.0))
            return found

        return Curvature([(layout, replace(block, operator=lambda vectors: operator()(vectors)))])


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
    total: Any, network: Network, likelihood: Likelihood, batch: Batch, structure: Any, **options: Any
) -> tuple[Curvature, Tensor]:
    """A batch's outputs without a curvature; the first batch settles which layer is the last one."""
    settle(network, batch.inputs)
    outputs = network.forward(batch.inputs)
    likelihood.validate(outputs, batch.target)
    return Curvature([]), outputs
