"""The evidence lower bound of a last layer whose weights are Gaussian, independent from output to output.

Outputs are then ``z_k ~ N(m_kᵀφ, φᵀS_kφ)``, independent given φ. With a bound or an estimate where needed,

    L(q) = 1/T Σ_n E_q[log p(y_n|z_n)] − KL(q ‖ N(μ, I/α)) <= log evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from laplace_plus.likelihoods.gaussian import LOG_2PI
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.posteriors.variational_last_layer.gaussians import Gaussians, climb

_CHUNK_BYTES = 256 * 2**20
"""About what the graph of the rows that are looked at together takes."""


def resolve_bound(likelihood: Likelihood, bound: str | None) -> str:
    """The name of the bound, by default the likelihood's first; ConfigurationError for one that it does not have."""
    known: tuple[str, ...] = ("mc",) if likelihood.couples_outputs else ("quadrature", "mc")
    if isinstance(likelihood, Categorical):
        known = ("reduced_kn", "jensen", "mc")
    elif isinstance(likelihood, HeteroscedasticGaussian):
        known = ("exact", "mc")
    checks.choice("bound of this likelihood", bound, (None, *known))
    return bound or known[0]


def expected_log_density(
    likelihood: Likelihood, bound: str, mean: Tensor, variance: Tensor, targets: Tensor, noise: Tensor | None = None
) -> Tensor:
    """``E[log p(y|z)] [N]`` for ``z ~ N(mean, diag variance)``, both ``[N, C]``, or what stands for it.

    * ``"jensen"``: ``z̄_y − log Σ exp(z̄_k + v_k/2)``.
    * ``"reduced_kn"``: Knowles and Minka's (2011) ``z̄_y − log Σ exp(z̄_k + (1 − 2 a_k) v_k/2) − Σ a_k² v_k/2``, a lower
      bound for each a, at ``a = softmax(z̄)``, where it is the expectation to first order in v.
    * ``"exact"``, of noise that the network predicts; ``"quadrature"``, of outputs that the likelihood does not couple.
    * ``"mc"``: with standard normal ``noise [S, N, C]``, each number with both signs.
    """
    if bound in ("jensen", "reduced_kn"):
        # log p = tᵀz − T log Σ exp z with T = Σ t, which is 1 without class weights.
        total = -likelihood.log_density(torch.zeros_like(mean), targets) / math.log(mean.shape[1])
        shares = mean.softmax(-1) if bound == "reduced_kn" else torch.zeros_like(mean)
        raised = (mean + (0.5 - shares) * variance).logsumexp(-1) + (shares.square() * variance).sum(-1) / 2
        return likelihood.log_density(mean, targets) + total * (mean.logsumexp(-1) - raised)
    if bound == "exact":
        (center, log_variance), (spread, doubt) = mean.chunk(2, -1), variance.chunk(2, -1)
        squares = ((targets - center).square() + spread) * (doubt / 2 - log_variance).exp()
        return -(log_variance + squares + LOG_2PI).sum(-1) / 2
    nodes, weights = (torch.from_numpy(part).to(mean) for part in np.polynomial.hermite_e.hermegauss(20))
    if bound == "mc":
        assert noise is not None
        nodes = torch.cat([noise, -noise])
        weights = torch.ones_like(nodes[:, 0, 0])
    values = torch.stack([likelihood.log_density(mean + variance.sqrt() * node, targets) for node in nodes])
    return weights @ values / weights.sum()


class Bound(NamedTuple):
    """The bound of rows, features ``[n, D]`` with targets, at ``μ [C, D]``, α and T.

    Without a precision, α is ``C·D / Σ (‖m_k − μ_k‖² + tr S_k)``, the best one.
    """

    features: Tensor
    targets: Tensor
    likelihood: Likelihood
    kind: str
    prior_mean: Tensor
    precision: Tensor | None
    temperature: float
    n_samples: int
    keeps_mean: bool
    seed: int

    def best_precision(self, q: Gaussians) -> Tensor:
        """α, as given or best."""
        return q.mean.numel() / q.scatter(self.prior_mean) if self.precision is None else self.precision

    def divergence(self, q: Gaussians) -> Tensor:
        """``KL(q ‖ N(μ, I/α))`` in nats, 0-d."""
        alpha, size = self.best_precision(q), q.mean.numel()
        return (alpha * q.scatter(self.prior_mean) - size - size * alpha.log() - q.log_determinant()) / 2

    def expected(self, q: Gaussians, first: int, features: Tensor, targets: Tensor) -> Tensor:
        """``1/T Σ E_q[log p]`` over rows, of which ``first`` is the number of the first, 0-d."""
        noise, mean = None, features @ q.mean.mT
        if self.kind == "mc":
            generator = torch.Generator(mean.device).manual_seed((self.seed + first) % 2**63)
            noise = standard_normal((self.n_samples // 2, *mean.shape), like=mean, generator=generator)
        variance = q.pushed(features).square().sum(-1).mT
        return expected_log_density(self.likelihood, self.kind, mean, variance, targets, noise).sum() / self.temperature

    def value(self, gaussians: Callable[[], Gaussians], slope: bool = False) -> float:
        """``L`` in nats; with ``slope``, the gradient of −L goes to the leaves. One chunk's graph exists at a time."""
        with torch.set_grad_enabled(slope):
            rest = -self.divergence(q := gaussians())
            _ = slope and (-rest).backward()
            total, each = float(rest.detach()), 32 * len(q.mean) * (q.mean.shape[1] + 20 + self.n_samples)
            rows = max(1, _CHUNK_BYTES // each)
            for number, (features, targets) in enumerate(
                zip(self.features.split(rows), self.targets.split(rows), strict=True)
            ):
                found = self.expected(gaussians(), number * rows, features, targets)
                _ = slope and (-found).backward()
                total += float(found.detach())
        return total

    def maximise(self, start: Gaussians, iterations: int, progress: bool) -> tuple[Gaussians, float, bool]:
        """Gaussians, their bound, which is never below that of the start, and whether the search converged."""

        def value(at: list[Tensor], slope: bool = False) -> float:
            return self.value(lambda: start.moved(at[0] * (not self.keeps_mean), *at[1:]), slope)

        zeros = [torch.zeros_like(one) for one in (start.mean, start.mean, start.root)]
        found, converged = climb(value, zeros, iterations, progress)
        before, after = value(zeros), value(found)
        return (start.moved(*found), after, converged) if after >= before else (start, before, False)
