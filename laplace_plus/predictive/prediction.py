"""Predictive distributions: moments, their decomposition, entropies, log-probabilities.

The variance is split by the law of total variance, ``Var[y] = Var_f(E[y|f]) + E_f[Var(y|f)]``: epistemic, which
more data would reduce, and aleatoric, which it would not. The mutual information of target and outputs,
``H[E_f p(y|f)] - E_f H[p(y|f)]``, is the same split of the entropy (Houlsby et al. 2011, arXiv:1112.5745).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import scipy
import torch
from torch import Tensor
from torch.distributions import Distribution, MixtureSameFamily, Normal, StudentT

from laplace_plus import checks
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood, Marginal
from laplace_plus.likelihoods.base import each, observed_log_prob
from laplace_plus.likelihoods.sampling import draw, draw_seed
from laplace_plus.linalg.estimates import jackknife, standard_error

_MAX_ENTROPY_DRAWS = 128
"""Draws for a sampled entropy: the standard error is then below a tenth of the spread of log p, at S·128 densities."""

_HALVINGS = 60
"""Steps of the bisection for a mixture's quantile, which leave 1e-18 of the distance between its components."""


@dataclass(frozen=True)
class RandomSource:
    """Random streams that do not depend on the order of access; without a seed, the global generator."""

    seed: int | None = None
    device: str = "cpu"

    @classmethod
    def of(cls, generator: torch.Generator | None) -> RandomSource:
        """A source seeded by one draw from ``generator``."""
        return cls() if generator is None else cls(draw_seed(generator), str(generator.device))

    def stream(self, index: int) -> torch.Generator | None:
        """A fresh generator with the seed of this index."""
        if self.seed is None:
            return None
        return torch.Generator(device=self.device).manual_seed((self.seed + index) % 2**63)


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The predictive distribution of targets, from ``from_functional`` or ``from_samples``.

    Everything is differentiable in the mean, covariance or samples it was made from; sampled entropies treat the
    sampled targets of discrete likelihoods as constants.

    Attributes:
        likelihood: How targets are distributed given the outputs.
        functional_mean: Mean of the network's outputs, ``[B, *, C]``.
        functional_covariance: Their covariance as given, or ``None`` for a prediction from samples.
        link: How the outputs were integrated over: one of ``likelihood.links``, or ``"sampled"``.
        joint: Whether samples and log-probability are joint over all inputs.
        marginal: The likelihood's closed form; ``None`` for a prediction by Monte Carlo.
        n_samples: Number ``S`` of samples.
        source: Source of randomness.
        outputs: The samples of outputs, if the prediction was made from them.
        without_each: Of estimated variances, gives those without each of the S samples, ``[S, B, *, C]``.

    Example:
        >>> from laplace_plus.likelihoods import Gaussian
        >>> from laplace_plus.predictive import from_functional
        >>> prediction = from_functional(Gaussian(0.5), torch.zeros(1, 1), torch.full((1, 1, 1), 0.75))
        >>> prediction.variance, prediction.epistemic, prediction.aleatoric
        (tensor([[1.]]), tensor([[0.7500]]), tensor([[0.2500]]))
    """

    likelihood: Likelihood
    functional_mean: Tensor
    functional_covariance: Tensor | None
    link: str
    joint: bool = False
    marginal: Marginal | None = None
    n_samples: int = 100
    source: RandomSource = RandomSource()
    outputs: Tensor | None = None
    without_each: Callable[[], Tensor] | None = None

    def __repr__(self) -> str:
        shape = list(self.functional_mean.shape)
        return f"Prediction({self.likelihood!r}, outputs={shape}, link={self.link!r}, joint={self.joint})"

    # Samples ---------------------------------------------------------------------------------------------------------

    @cached_property
    def functional_samples(self) -> Tensor:
        """Samples of the network's outputs, ``[S, B, *, C]``; drawn at the first access.

        With variances only, the outputs of a row are drawn independently of each other.
        """
        if self.outputs is not None:
            return self.outputs
        assert self.functional_covariance is not None
        mean, covariance = self.functional_mean, self.functional_covariance
        if self.joint:
            mean = mean.reshape(-1)
            covariance = covariance.reshape(mean.numel(), mean.numel())
        samples = draw(mean, covariance, self.n_samples, generator=self.source.stream(0))
        return samples.reshape(self.n_samples, *self.functional_mean.shape)

    @cached_property
    def samples(self) -> Tensor:
        """``E[y|f]`` at the sampled outputs, ``[S, B, *, C]``: class probabilities, function values, rates."""
        return self._conditional_moments[0]

    @cached_property
    def _conditional_moments(self) -> tuple[Tensor, Tensor | None]:
        return self.likelihood.moments(self.functional_samples)

    # Moments ---------------------------------------------------------------------------------------------------------

    @cached_property
    def mean(self) -> Tensor:
        """``E[y]``, ``[B, *, C]``; for classes their probabilities."""
        return self.samples.mean(0) if self.marginal is None else self.marginal.mean

    @cached_property
    def standard_error(self) -> Tensor:
        """Standard error of :attr:`mean`, ``[B, *, C]``, from the samples behind it; zero where it does not use any.

        Of variances that were estimated, it is the jackknife's.
        """
        if self.marginal is None:
            return standard_error(self.samples)
        if self.without_each is None:
            return torch.zeros_like(self.mean)
        variances = self.without_each()
        mean = self.functional_mean.expand_as(variances)
        means = self.likelihood.predict(mean, variances, link=self.link).mean
        return jackknife(means) if len(means) > 1 else torch.full_like(self.mean, math.inf)

    @cached_property
    def variance(self) -> Tensor:
        """``Var[y]``, ``[B, *, C]``: epistemic plus aleatoric; for classes ``p (1 - p)``, whatever the posterior."""
        return self.epistemic + self.aleatoric if self.marginal is None else self.marginal.variance

    @property
    def epistemic(self) -> Tensor:
        """``Var_f(E[y|f])``, ``[B, *, C]``: the part of the variance that is due to not knowing the network."""
        return self._split[0]

    @property
    def aleatoric(self) -> Tensor:
        """``E_f[Var(y|f)]``, ``[B, *, C]``: the part of the variance that remains if the network is known.

        Raises:
            UnsupportedError: If the likelihood does not define its variance.
        """
        aleatoric = self._split[1]
        if aleatoric is None:
            fix = "Define distribution(outputs) or moments(outputs), or pass distribution= to LogDensity."
            self.likelihood.lacks("does not define the variance of its targets", fix=fix)
        return aleatoric

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor | None]:
        """Epistemic and aleatoric variance.

        Closed-form links of classifiers only give the total; the proportion of its parts is then that of the samples.
        """
        if self.marginal is not None and self.marginal.epistemic is not None:
            return self.marginal.epistemic, self.marginal.aleatoric
        conditional_mean, conditional_variance = self._conditional_moments
        epistemic = (conditional_mean - conditional_mean.mean(0)).square().mean(0)
        if conditional_variance is None:
            return epistemic, None
        aleatoric = conditional_variance.mean(0)
        if self.marginal is None:
            return epistemic, aleatoric
        total = epistemic + aleatoric
        share = torch.where(total > 0, epistemic / torch.where(total > 0, total, torch.ones_like(total)), total)
        return self.marginal.variance * share, self.marginal.variance * (1 - share)

    # Intervals -------------------------------------------------------------------------------------------------------

    @property
    def std(self) -> Tensor:
        """Standard deviation ``√Var[y]``, ``[B, *, C]``, in the targets' unit: of a new observation, noise included.

        ``epistemic.sqrt()`` is that of ``E[y|f]`` alone.

        Raises:
            UnsupportedError: For classes, or if the likelihood does not define its variance.
        """
        self._require_numbers("standard deviation")
        return self.variance.sqrt()

    def quantile(self, q: float | Tensor) -> Tensor:
        """The numbers below which each entry of ``y`` lies with probability ``q``, noise included.

        Exact for normal and Student-t distributions, and mixtures of normals (Monte Carlo, sampled networks); these by
        bisection. Differentiable where mean and variance are. Networks that predict their noise have, in closed form,
        the quantiles of the normal with the exact mean and variance.

        Args:
            q: Strictly between 0 and 1: a number, or ``[Q]``.

        Returns:
            ``[B, *, C]`` for a number, otherwise ``[Q, B, *, C]``.

        Raises:
            ConfigurationError: Another ``q``.
            UnsupportedError: For classes, counts and other distributions without a quantile function.
        """
        self._require_numbers("quantile")
        levels = _checked_levels(q, "q")
        distribution = self._marginal_distribution
        found = _quantiles(distribution, levels.reshape(-1, *[1] * len(distribution.batch_shape)))
        if found is None:
            what, fix = "has no quantile function.", "prediction.distribution.sample((1000,)).quantile(q, dim=0)"
            raise UnsupportedError(f"{type(distribution).__name__} {what}", fix=f"Draw targets: {fix}.")
        return found.reshape(*levels.shape, *self.mean.shape)

    def interval(self, level: float | Tensor = 0.95) -> tuple[Tensor, Tensor]:
        """Ends of the central interval that contains a new ``y`` with probability ``level``, of each entry by itself.

        These are ``quantile((1 − level) / 2)`` and ``quantile((1 + level) / 2)``; shapes and errors as there.

        Example:
            >>> from laplace_plus.likelihoods import Gaussian
            >>> from laplace_plus.predictive import from_functional
            >>> prediction = from_functional(Gaussian(0.6), torch.zeros(1, 1), torch.full((1, 1, 1), 0.64))
            >>> prediction.interval(0.95)
            (tensor([[-1.9600]]), tensor([[1.9600]]))
        """
        tail = (1 - _checked_levels(level, "level")) / 2
        return self.quantile(tail), self.quantile(1 - tail)

    def _require_numbers(self, what: str) -> None:
        if self.likelihood.is_classifier:
            fix = "Use prediction.mean, the probabilities of the classes. How far they differ from network to network "
            fix += "say prediction.epistemic.sqrt() and prediction.samples.quantile(q, dim=0)."
            self.likelihood.lacks(f"has classes, and a class has no {what}", fix=fix)

    # Distributions ---------------------------------------------------------------------------------------------------

    @cached_property
    def distribution(self) -> Distribution:
        """The distribution of ``y``: categorical over the classes, otherwise of each entry of ``y`` separately.

        Batch shape ``[B, *]`` for classes and ``[B, *, C]`` otherwise; a custom likelihood gives a mixture whose event
        is one whole target. With ``joint`` and a Gaussian likelihood it is a multivariate normal over all
        ``B * C`` numbers.

        Raises:
            UnsupportedError: If the likelihood only gives its log-density.
        """
        return self._marginal_distribution if self._across is None else self._across

    @cached_property
    def _marginal_distribution(self) -> Distribution:
        if self.marginal is None:
            return self.likelihood.mixture(self.functional_samples)
        return self.marginal.distribution

    @cached_property
    def _across(self) -> Distribution | None:
        """The closed-form joint distribution of all targets."""
        if not self.joint or self.marginal is None or self.functional_covariance is None:
            return None
        mean = self.functional_mean.reshape(-1, self.functional_mean.shape[-1])
        return self.likelihood.predict_joint(mean, self.functional_covariance.reshape(mean.numel(), mean.numel()))

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of targets under the prediction, in nats.

        The density is joint over the entries of one target: with their covariances for Gaussians in closed form, and as
        the mixture ``log (1/S) Σ_s p(y|f_s)`` for Monte Carlo.

        Args:
            y: Targets as the loader gives them. Ignored ones (``ignore_index``, NaN) contribute 0; soft labels q count
                as ``Σ_k q_k log p_k``.

        Returns:
            ``[B, *]``, one number for every row; with ``joint`` 0-d, the joint log-density of all targets.

        Raises:
            LabelError: If the targets do not fit the likelihood.
        """
        if not self.joint:
            self.likelihood.require_own_rows("Without joint=True, a log-probability is of single rows.")
        y = each(lambda own: own.to(self.functional_mean.device), y)
        self.likelihood.validate(self.functional_mean, y)
        outputs, targets, weight = self.likelihood.rows(self.functional_mean, y)
        lead = self.functional_mean.shape[:-1]
        if self._across is not None:
            return observed_log_prob(self._across, targets.reshape(-1)).to(outputs.dtype)
        soft = self.likelihood.is_classifier and self.likelihood.couples_outputs and targets.is_floating_point()
        if soft and self.joint:
            self.likelihood.lacks("has no joint density of soft labels", expected="joint=False", got="joint=True")
        if soft:
            mixed: Any = self._marginal_distribution
            return (targets.reshape(self.functional_mean.shape) * mixed.logits).sum(-1)
        if self.marginal is not None and not self.joint:
            targets = targets.reshape(*lead, *targets.shape[1:])
            density = self.likelihood.marginal_log_density(self.marginal, targets).to(outputs.dtype)
            return density.where(weight.reshape(lead) > 0, 0.0)
        density = self._conditional_log_density(targets).where(weight > 0, 0.0)
        density = (density.sum(-1) if self.joint else density).logsumexp(0) - math.log(self.n_samples)
        return density if self.joint else density.reshape(lead)

    def _conditional_log_density(self, targets: Tensor) -> Tensor:
        """``log p(y_n | f_sn)``, ``[S, N]``, for targets ``[N, ...]`` or ``[S, N, ...]``, one set for each sample."""
        samples = self.functional_samples
        size = samples.shape[-1]
        n = samples[0, ..., 0].numel()
        if self.likelihood.couples_rows:
            return torch.stack([self.likelihood.log_density(one.reshape(n, size), targets) for one in samples])
        per_sample = each(lambda own: own.expand(self.n_samples, *own.shape).reshape(-1, *own.shape[1:]), targets)
        return self.likelihood.log_density(samples.reshape(-1, size), per_sample).reshape(self.n_samples, n)

    # Entropies -------------------------------------------------------------------------------------------------------

    def entropy(self) -> Tensor:
        """Entropy of every row's prediction in nats, ``[B, *]`` (differential for continuous targets).

        Without a closed form (mixtures, counts) it is a Monte-Carlo estimate. The entropies of several binary outputs
        are added. With ``joint`` the entropy is still that of each row.

        Raises:
            UnsupportedError: If the likelihood only gives its log-density.
        """
        if self.marginal is not None and self.marginal.together is not None:
            return self.marginal.together.entropy()
        closed = _closed_entropy(self._marginal_distribution, self.functional_mean.dim() - 1)
        return self._sampled_entropy[0] if closed is None else closed

    def mutual_information(self) -> Tensor:
        """Mutual information of target and network in nats, ``[B, *]``: epistemic uncertainty, never negative.

        Exact for Gaussians in closed form; otherwise estimated from the samples, and then at most ``log S``. The terms
        of several binary outputs are added.

        Raises:
            UnsupportedError: If the likelihood only gives its log-density.
        """
        if self.marginal is not None and self.marginal.information is not None:
            return self.marginal.information
        total = _closed_entropy(self.likelihood.mixture(self.functional_samples), self.functional_mean.dim() - 1)
        if total is None:
            return self._sampled_entropy[1].clamp_min(0.0)
        conditional = _closed_entropy(self.likelihood.distribution(self.functional_samples), self.functional_mean.dim())
        assert conditional is not None  # a mixture with a closed entropy has components with one
        return (total - conditional.mean(0)).clamp_min(0.0)

    @cached_property
    def _sampled_entropy(self) -> tuple[Tensor, Tensor]:
        """Entropy and mutual information of the mixture over the samples, each ``[B, *]``.

        One target ``y_s ~ p(y|f_s)`` is drawn from each component (of more than 128, from evenly spaced ones). Then
        ``-log p(y_s)`` has the entropy as its mean, and ``log p(y_s|f_s) - log p(y_s)`` the mutual information.
        """
        samples = self.functional_samples
        targets = self.likelihood.sample(samples, generator=self.source.stream(1))
        targets = targets.reshape(self.n_samples, -1, *targets.shape[samples.dim() - 1 :])  # [S, N, ...]
        stride = -(-self.n_samples // _MAX_ENTROPY_DRAWS)
        entropy, information = [], []
        for index in range(0, self.n_samples, stride):
            conditional = self._conditional_log_density(targets[index])
            marginal = conditional.logsumexp(0) - math.log(self.n_samples)
            entropy.append(-marginal)
            information.append(conditional[index] - marginal)
        shape = self.functional_mean.shape[:-1]
        return torch.stack(entropy).mean(0).reshape(shape), torch.stack(information).mean(0).reshape(shape)


def _checked_levels(value: float | Tensor, name: str) -> Tensor:
    """Probabilities strictly between 0 and 1, 0-d or ``[Q]`` float64."""
    levels = torch.as_tensor(value, dtype=torch.float64).detach()
    checks.shape(name, levels, [None] * min(levels.ndim, 1))
    return checks.numbers(name, levels, above=0.0, below=1.0)


def _quantiles(distribution: Distribution, levels: Tensor) -> Tensor | None:
    """Quantiles ``[Q, *batch]`` at float64 levels ``[Q, 1, …]``; None but for normals, mixtures of them, Student-t."""
    if isinstance(distribution, Normal):
        return distribution.loc + distribution.scale * torch.special.ndtri(levels).to(distribution.loc)
    if isinstance(distribution, StudentT):
        units = scipy.special.stdtrit(distribution.df.detach().cpu().double().numpy(), levels.numpy())
        return distribution.loc + distribution.scale * torch.from_numpy(units).to(distribution.loc)
    if not isinstance(distribution, MixtureSameFamily) or not isinstance(distribution.component_distribution, Normal):
        return None
    components, weights = distribution.component_distribution, distribution.mixture_distribution.probs
    loc, scale, weights = components.loc.double(), components.scale.double(), weights.to(components.loc).double()

    def probability(values: Tensor) -> Tensor:
        return (weights * torch.special.ndtr((values[..., None] - loc) / scale)).sum(-1)

    with torch.no_grad():
        levels = levels.to(loc)
        each = loc + scale * torch.special.ndtri(levels)[..., None]  # the mixture's quantile lies among its components'
        low, high = each.amin(-1), each.amax(-1)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            below = probability(middle) < levels
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        root = (low + high) / 2
        density = (weights * (-((root[..., None] - loc) / scale).square() / 2).exp() / scale).sum(-1)
        slope = density / math.sqrt(2 * math.pi)
    if loc.requires_grad or scale.requires_grad:  # the derivative is that of −P(y ≤ root) over the density
        change = probability(root)
        root = root - (change - change.detach()) / slope
    return root.to(components.loc)


def _closed_entropy(distribution: Distribution, n_lead: int) -> Tensor | None:
    """Entropy, summed over the entries of a target, or ``None`` where torch has no closed form."""
    try:
        entropy = distribution.entropy()
    except NotImplementedError:
        return None
    return entropy.flatten(n_lead).sum(-1) if entropy.dim() > n_lead else entropy
