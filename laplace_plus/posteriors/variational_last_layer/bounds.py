"""The evidence of a last layer whose weights are Gaussian, independent from output to output, and bounds on it.

With features Φ, residuals r of the trained weights w, β = 1/(σ²T) and prior ``N(μ, I/α)``, linear regression has

    m = w + P⁻¹ (β Φᵀr − α (w − μ)),   P = β ΦᵀΦ + α I,   S = P⁻¹,
    log p(y) = −N/2T log 2πσ² − ½ (β ‖r − Φ(m − w)‖² + α ‖m − μ‖²) − ½ log det(P/α).

At another m, such as w, that is a bound on it, and Laplace's approximation. Where σ⁻² has the prior
``Gamma(a₀, a₀ σ₀²)`` and the weights ``N(μ, σ²/α)``, β = 1/T, and σ⁻² has the posterior ``Gamma(a, b)``:
``a = a₀ + N/2T``, and b is half of what is in brackets above more than ``a₀ σ₀²``.

Of other likelihoods, outputs are ``z_k ~ N(m_kᵀφ, φᵀS_kφ)``, independent given φ. With a bound or an estimate where
needed,

    L(q) = 1/T Σ_n E_q[log p(y_n|z_n)] − KL(q ‖ N(μ, I/α)) <= log evidence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from laplace_plus.likelihoods.gaussian import LOG_2PI
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.persistence import stored

_CHUNK_BYTES = 256 * 2**20
"""About what the graph of the rows that are looked at together takes."""

_HISTORY, _TOLERANCE = 10, 1e-2
"""Steps that L-BFGS remembers, each of twice the memory of what it searches; largest derivative where it converged."""


@stored
@dataclass(frozen=True)
class Gaussians:
    """``N(m_k, S_k)`` over the D weights of each of C outputs, float64: ``m [C, D]`` and ``R [C, D, D]``, ``S = R Rᵀ``.

    Where a determinant is asked for, R is upper triangular. Of diagonal ones it is the standard deviations ``[C, D]``.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def laplace(cls, mean: Tensor, curvature: Tensor, alpha: Tensor) -> Gaussians:
        """With precisions ``curvature + α I``, ``[C, D, D]`` or their diagonals ``[C, D]``."""
        if curvature.shape == mean.shape:
            return cls(mean, (curvature + alpha).rsqrt())
        identity = torch.eye(mean.shape[1]).to(curvature)
        factor = torch.linalg.cholesky(curvature + alpha * identity)
        return cls(mean, torch.linalg.solve_triangular(factor.mT, identity, upper=True))

    def moved(self, shift: Tensor, scale: Tensor, mix: Tensor) -> Gaussians:
        """Others, by coordinates ``[C, D]``, ``[C, D]`` and as the root, in units of these: zero changes nothing."""
        if self.root.shape == self.mean.shape:
            return Gaussians(self.mean + self.root * shift, self.root * scale.exp())
        triangle = mix.triu(1) + torch.diag_embed(scale.exp())
        return Gaussians(self.mean + (self.root @ shift.unsqueeze(-1)).squeeze(-1), self.root @ triangle)

    def log_determinant(self) -> Tensor:
        """``Σ_k log det S_k``, 0-d."""
        diagonal = self.root if self.root.shape == self.mean.shape else self.root.diagonal(dim1=-2, dim2=-1)
        return 2 * diagonal.abs().log().sum()

    def pushed(self, features: Tensor) -> Tensor:
        """``Rᵀφ``, ``[C, N, D]``, for features ``[N, D]``: ``Cov(w_kᵀφ_n, w_kᵀφ_m)`` are their products."""
        return features * self.root.unsqueeze(1) if self.root.shape == self.mean.shape else features @ self.root

    def scatter(self, mean: Tensor) -> Tensor:
        """``Σ_k ‖m_k − μ_k‖² + tr S_k``, 0-d."""
        return (self.mean - mean).square().sum() + self.root.square().sum()

    def deviations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Draws of ``w − m``, ``[n, C, D]``."""
        noise = standard_normal((n, *self.mean.shape), like=self.mean, generator=generator)
        return self.root * noise if self.root.ndim == self.mean.ndim else torch.einsum("cde,nce->ncd", self.root, noise)


# -- regression --------------------------------------------------------------------------------------------------------


class Solution(NamedTuple):
    """The posterior of weights, the evidence, and the Gamma posterior's shape and rate ``[C]`` where there is one."""

    q: Gaussians
    evidence: Tensor
    shape: float = 0.0
    rate: Tensor | None = None


@stored
@dataclass(frozen=True)
class Regression:
    """Sums over the rows in the eigenbasis V of ``ΦᵀΦ``, float64.

    Attributes:
        values, vectors: Eigenvalues ``[D, 1]`` and V.
        cross: ``Vᵀ Φᵀr [D, C]``.
        squares: ``Σ r² [C]``.
        size: The number of rows.
        weights: w, ``[C, D]``.
    """

    values: Tensor
    vectors: Tensor
    cross: Tensor
    squares: Tensor
    size: float
    weights: Tensor

    @classmethod
    def of(cls, gram: Tensor, cross: Tensor, squares: Tensor, size: float, weights: Tensor) -> Regression:
        """Of ``ΦᵀΦ``, ``Φᵀr`` and ``Σ r²``."""
        values, vectors = torch.linalg.eigh(gram)
        return cls(values.clamp_min(0.0).unsqueeze(1), vectors, vectors.mT @ cross, squares, size, weights)

    def solve(self, alpha: Tensor, noise: Tensor, mean: Tensor, heat: float, shape: float, keeps: bool) -> Solution:
        """The posterior at α, σ (with ``shape`` a₀ > 0: σ₀), ``μ [C, D]`` and T, with ``m = w`` if it ``keeps`` w."""
        values, cross = self.values, self.cross
        variance = noise.to(self.squares).square().expand_as(self.squares)
        beta = (torch.ones_like(variance) if shape else 1 / variance) / heat
        away = self.vectors.mT @ (self.weights - mean).mT  # [D, C], in the eigenbasis
        total = values * beta + alpha
        step = (beta * cross - alpha * away) / total * (not keeps)
        errors = self.squares + (step * (values * step - 2 * cross)).sum(0)
        fit = beta * errors.clamp_min(0.0) + alpha * (away + step).square().sum(0)
        half, root = self.size / (2 * heat), self.vectors * total.rsqrt().mT.unsqueeze(1)
        evidence, weights = (alpha / total).log().sum(0) / 2 - half * LOG_2PI, self.weights + (self.vectors @ step).mT
        if not shape:
            return Solution(Gaussians(weights, root), (evidence - half * variance.log() - fit / 2).sum())
        first, a, rate = shape * variance, shape + half, shape * variance + fit / 2
        checks.number("noise_shape + N/2, with which Student-t noise has a variance,", a, above=1.0)
        gammas = torch.lgamma(torch.tensor([a, shape], dtype=torch.float64)).diff().neg().to(rate)
        q = Gaussians(weights, root * (rate / (a - 1)).sqrt()[:, None, None])
        return Solution(q, (evidence + gammas + shape * first.log() - a * rate.log()).sum(), a, rate)


# -- other likelihoods -------------------------------------------------------------------------------------------------


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
        return -(log_variance + squares + LOG_2PI).where(~targets.isnan(), 0.0).sum(-1) / 2
    nodes, weights = (torch.from_numpy(part).to(mean) for part in np.polynomial.hermite_e.hermegauss(20))
    if bound == "mc":
        assert noise is not None
        nodes = torch.cat([noise, -noise])
        weights = torch.ones_like(nodes[:, 0, 0])
    values = torch.stack([likelihood.log_density(mean + variance.sqrt() * node, targets) for node in nodes])
    return weights @ values / weights.sum()


class Bound(NamedTuple):
    """A posterior's bound of rows, features ``[n, D]`` with targets and weights ``[n]``, at ``μ [C, D]`` and α.

    Without a precision, α is ``C·D / Σ (‖m_k − μ_k‖² + tr S_k)``, the best one.
    """

    features: Tensor
    targets: Tensor
    shares: Tensor
    posterior: Any
    prior_mean: Tensor
    precision: Tensor | None
    seed: int

    def best_precision(self, q: Gaussians) -> Tensor:
        """α, as given or best."""
        return q.mean.numel() / q.scatter(self.prior_mean) if self.precision is None else self.precision

    def divergence(self, q: Gaussians) -> Tensor:
        """``KL(q ‖ N(μ, I/α))`` in nats, 0-d."""
        alpha, size = self.best_precision(q), q.mean.numel()
        return (alpha * q.scatter(self.prior_mean) - size - size * alpha.log() - q.log_determinant()) / 2

    def expected(self, q: Gaussians, first: int, features: Tensor, targets: Tensor, shares: Tensor) -> Tensor:
        """``1/T Σ w E_q[log p]`` over rows, of which ``first`` is the number of the first, 0-d."""
        posterior, noise, mean = self.posterior, None, features @ q.mean.mT
        if posterior.bound == "mc":
            generator = torch.Generator(mean.device).manual_seed((self.seed + first) % 2**63)
            noise = standard_normal((posterior.n_samples // 2, *mean.shape), like=mean, generator=generator)
        variance = q.pushed(features).square().sum(-1).mT
        found = expected_log_density(posterior.likelihood, posterior.bound, mean, variance, targets, noise)
        return shares @ found / float(posterior.temperature)

    def value(self, gaussians: Callable[[], Gaussians], slope: bool = False) -> float:
        """``L`` in nats; with ``slope``, the gradient of −L goes to the leaves. One chunk's graph exists at a time."""
        with torch.set_grad_enabled(slope):
            rest = -self.divergence(q := gaussians())
            _ = slope and (-rest).backward()
            total, each = float(rest.detach()), 32 * len(q.mean) * (q.mean.shape[1] + 20 + self.posterior.n_samples)
            rows = max(1, _CHUNK_BYTES // each)
            parts = self.features.split(rows), self.targets.split(rows), self.shares.split(rows)
            for number, part in enumerate(zip(*parts, strict=True)):
                found = self.expected(gaussians(), number * rows, *part)
                _ = slope and (-found).backward()
                total += float(found.detach())
        return total

    def maximise(self, start: Gaussians, iterations: int, progress: bool) -> tuple[Gaussians, float, bool]:
        """Gaussians, their bound, which is never below that of the start, and whether the search converged."""

        def value(at: list[Tensor], slope: bool = False) -> float:
            return self.value(lambda: start.moved(at[0] * (not self.posterior.keeps_mean), *at[1:]), slope)

        zeros = [torch.zeros_like(one) for one in (start.mean, start.mean, start.root)]
        found, converged = climb(value, zeros, iterations, progress)
        before, after = value(zeros), value(found)
        return (start.moved(*found), after, converged) if after >= before else (start, before, False)


def climb(
    value: Callable[[list[Tensor], bool], float], start: list[Tensor], iterations: int, progress: bool
) -> tuple[list[Tensor], bool]:
    """Maximise a function, which leaves its negative gradient with the coordinates if asked to: where L-BFGS ends."""
    leaves = [torch.zeros(one.shape).to(one).copy_(one).requires_grad_() for one in start]
    options: dict[str, Any] = {"max_iter": iterations, "tolerance_grad": 1e-5, "tolerance_change": 1e-11}
    search = torch.optim.LBFGS(leaves, history_size=_HISTORY, line_search_fn="strong_wolfe", **options)
    ticks = iter(progress_bar(itertools.count(1), enabled=progress, description="VariationalLastLayer: bound"))

    def closure() -> float:
        next(ticks)
        search.zero_grad()
        return -value(leaves, True)

    with torch.enable_grad():
        search.step(closure)
        closure()
    if not (converged := all(float(leaf.grad.abs().max()) <= _TOLERANCE for leaf in leaves if leaf.grad is not None)):
        warn("The search ended before the slope vanished; raise max_iterations.", ConvergenceWarning)
    return [leaf.detach() for leaf in leaves], converged
