"""Real numbers with Gaussian noise: of a known level, of one that the network predicts, or of an unknown precision."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal, StudentT

from laplace_plus import checks
from laplace_plus.checks import describe
from laplace_plus.errors import LabelError, OutputError
from laplace_plus.likelihoods.base import LAST_AXIS, Likelihood, refuse_several_targets
from laplace_plus.likelihoods.elementwise import Elementwise
from laplace_plus.likelihoods.marginal import Marginal, noisy_normal, variance_of
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.priors import as_hyperparameter

LOG_2PI = math.log(2 * math.pi)


class RealTargets(Elementwise):
    """Real targets that are normal given the outputs."""

    links = ("exact", "mc")
    wrong_targets = "Some targets are not finite real numbers."
    valid_targets = "finite floating targets, or NaN where one is missing"
    hint = (
        'Convert integers by float(), mark missing targets by NaN; use likelihood="classification" for class indices.'
    )

    @abstractmethod
    def new_noise(self, outputs: Tensor) -> Tensor:
        """The deviation of new targets, ``[..., D]``."""

    def distribution(self, outputs: Tensor) -> Normal:
        """Normal distributions of new targets, with batch shape ``[..., D]``."""
        noise = self.new_noise(outputs)
        return Normal(outputs[..., : noise.shape[-1]], noise, validate_args=False)

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Ones (unit noise)."""
        return torch.ones_like(outputs)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: ``N(m, V + σ²)`` of new targets."""
        return noisy_normal(mean, covariance, self.new_noise(mean).square())

    def is_valid(self, targets: Tensor) -> Tensor:
        """Finite floating numbers, and NaN."""
        return ~targets.isinf() & targets.is_floating_point()

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Real numbers ``[..., D]``."""
        normal = self.distribution(outputs)
        return normal.loc + normal.scale * standard_normal(normal.loc.shape, like=normal.loc, generator=generator)


@final
class Gaussian(RealTargets):
    """``p(y | f) = N(f, σ²)``, independent over the ``C`` outputs of a row.

    Curvature, gradients and sampled targets are those at unit noise; :meth:`curvature_weights` gives the ``1/σ²``.

    Args:
        noise_std: ``σ``: one number for all outputs, or one for each, ``[C]``.
        output_axis: The axis of the outputs in the network's output, and of their targets.
        weighted: Whether targets come with weights; see :class:`~laplace_plus.Likelihood`.

    Raises:
        ConfigurationError: If ``σ`` is not positive and finite.

    Example:
        >>> Gaussian(noise_std=0.5).curvature_weights()
        tensor([4.], dtype=torch.float64)
    """

    is_gaussian = True
    per_output = ("noise_std",)

    def __init__(self, noise_std: float | Tensor = 1.0, *, output_axis: int = -1, weighted: bool = False):
        with torch.inference_mode(False):  # tensors made in inference mode cannot be differentiated later
            self._noise_std = checked_noise(noise_std).detach().clone()
        self.n_noise = self._noise_std.numel()  # 1, or C for one noise level per output
        self.output_axis, self.weighted = output_axis, weighted

    def __repr__(self) -> str:
        axis = "" if self.output_axis == -1 else f", output_axis={self.output_axis}"
        return f"Gaussian(noise_std={self._noise_std.tolist()}{axis}{', weighted=True' * self.weighted})"

    @property
    def noise_std(self) -> Tensor:
        """``σ``, 0-d or ``[C]``, ``float64``."""
        return self._noise_std

    def with_noise(self, noise_std: float | Tensor) -> Gaussian:
        """The same likelihood with another noise, of one level or ``[C]``."""
        return Gaussian(noise_std, output_axis=self.output_axis, weighted=self.weighted)

    def curvature_weights(self, noise_std: float | Tensor | None = None) -> Tensor:
        """``1/σ²``, ``[K]`` ``float64``, differentiable in ``noise_std``."""
        return self._groups(noise_std) ** -2

    def _groups(self, noise_std: float | Tensor | None) -> Tensor:
        """The noise ``[K]``; a single number applies to all groups."""
        noise = (self._noise_std if noise_std is None else checked_noise(noise_std)).reshape(-1)
        return checks.shape("noise_std", noise.expand(self.n_noise) if len(noise) == 1 else noise, [self.n_noise])

    def statistics(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``[SSE_1 … SSE_K, count_1 … count_K]``: summed squared errors and their number, for every noise group."""
        flat, targets, weight = self.rows(outputs.double(), targets)
        observed = weight.unsqueeze(-1) * self.observed(targets)
        sums = torch.stack([(observed * self.gradient(flat, targets).square()).sum(0), observed.sum(0)])
        return (sums.sum(1) if self.n_noise == 1 else sums).flatten()

    def log_likelihood(self, statistics: Tensor, noise_std: float | Tensor | None = None) -> Tensor:
        """``Σ_k -½ SSE_k / σ_k² - count_k (log σ_k + ½ log 2π)``, differentiable in ``noise_std``."""
        errors, count = statistics.double().chunk(2)
        noise = self._groups(noise_std).to(statistics.device)
        return (-0.5 * errors / noise**2 - count * (noise.log() + 0.5 * LOG_2PI)).sum()

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``f - y`` (unit noise), ``[N, C]``; 0 for entries that were not observed."""
        return (outputs - targets).where(self.observed(targets), 0.0)

    def new_noise(self, outputs: Tensor) -> Tensor:
        """``σ``."""
        return self._noise_std.to(outputs).expand_as(outputs)

    def sample_targets(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """``f + ε`` (unit noise), ``[..., C]``."""
        return outputs + standard_normal(outputs.shape, like=outputs, generator=generator)

    def predict_joint(self, mean: Tensor, covariance: Tensor) -> Distribution:
        """``N(m, V + σ²)`` of all ``N C`` numbers."""
        found = noisy_normal(mean.reshape(-1), covariance, self.new_noise(mean).square().reshape(-1))
        if found.together is not None:
            return found.together
        return MultivariateNormal(found.mean, scale_tril=found.variance.sqrt().unsqueeze(-1), validate_args=False)

    def config(self) -> dict[str, Any]:
        """``{"name": "gaussian", "noise_std": …, "output_axis": …, "weighted": …}``."""
        options = {"output_axis": self.output_axis, "weighted": self.weighted}
        return {"name": "gaussian", "noise_std": self._noise_std.tolist(), **options}


@final
@dataclass(frozen=True)
class HeteroscedasticGaussian(RealTargets):
    """``p(y | m, l) = N(m, exp l)`` with outputs ``[m_1 … m_D, l_1 … l_D]``: ``D`` means, then ``D`` log-variances.

    The Hessian of ``-log p`` is indefinite where a target is close to its mean. The curvature of this likelihood is
    therefore its expectation over targets, the Fisher information ``diag(exp(-l), ½)``, in :meth:`output_root`.

    Args:
        output_axis: The axis of the outputs in the network's output, and of their targets.
        weighted: Whether targets come with weights; see :class:`~laplace_plus.Likelihood`.

    Example:
        >>> import laplace_plus as lp
        >>> x, _ = torch.linspace(-1, 1, 20)[:, None], torch.manual_seed(0)
        >>> posterior = lp.KFAC(torch.nn.Linear(1, 2), lp.HeteroscedasticGaussian()).fit([(x, x)])
    """

    output_axis: int = LAST_AXIS
    weighted: bool = False
    config_name = "heteroscedastic_gaussian"
    couples_outputs = True

    def n_targets(self, n_outputs: int) -> int:
        """D, half the outputs; OutputError for an odd number of these."""
        if n_outputs % 2:
            expected = "an even number of outputs: D means, then D log-variances"
            raise OutputError("The outputs do not come in pairs.", expected=expected, got=f"{n_outputs} outputs")
        return n_outputs // 2

    def entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``-½ (l_d + (y_d - m_d)² exp(-l_d) + log 2π)``, ``[N, D]``."""
        mean, log_variance = outputs.chunk(2, -1)
        return -0.5 * (log_variance + (targets - mean).square() * (-log_variance).exp() + LOG_2PI)

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``(exp(-l/2), √½)``, ``[N, 2 D]``, of the expected information."""
        log_variance = outputs.chunk(2, -1)[1]
        return torch.cat([(-0.5 * log_variance).exp(), torch.full_like(log_variance, math.sqrt(0.5))], -1)

    def new_noise(self, outputs: Tensor) -> Tensor:
        """``exp(l/2)``."""
        return (0.5 * outputs.chunk(2, -1)[1]).exp()

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: the exact mean ``m`` and variance ``V_m + exp(l + V_l / 2)``, as those of a normal."""
        size = mean.shape[-1] // 2
        variance = variance_of(mean, covariance)
        aleatoric = (mean[..., size:] + 0.5 * variance[..., size:]).exp()
        block = covariance[..., :size, :size] if covariance.dim() > mean.dim() else covariance[..., :size]
        return replace(noisy_normal(mean[..., :size], block, aleatoric), information=None)


@final
@dataclass(frozen=True)
class GivenNoise(RealTargets):
    """``p(y_n | f) = N(f, s_n²)``, independent over the ``C`` outputs, with a known noise for each target.

    Targets are pairs: a loader yields ``(x, (y, s))`` with the standard deviations s of y's shape, or ``[B]`` for all
    entries of a target; one tensor ``torch.stack([y, s], -1)`` is the same. The curvature is ``diag(1/s_n²)``. Tuning
    leaves the noise as it is.

    Args:
        new_noise_std: The standard deviation of targets that come without one, such as those that are predicted.
        weighted: Whether targets come with weights, ``(x, ((y, s), w))``; see :class:`~laplace_plus.Likelihood`.

    Raises:
        ConfigurationError: If it is not positive and finite.

    Example:
        >>> GivenNoise(0.1).output_root(torch.zeros(1, 1), torch.tensor([[[0.0, 0.5]]]))
        tensor([[[2.]]])
    """

    new_noise_std: float
    weighted: bool = False
    config_name = "given_noise"
    hint = "Give (y, s) with s > 0 for each of the outputs."

    def __post_init__(self) -> None:
        checks.positive("new_noise_std", self.new_noise_std)

    def align(self, outputs: Tensor, targets: Any) -> Tensor:
        """Pairs ``[B, *, C, 2]`` of targets and their noise."""
        if isinstance(targets, (tuple, list)) and len(targets) == 2:  # noqa: PLR2004
            values, noise = targets
            if values.shape[: noise.dim()] != noise.shape:
                what, expected = "The noise does not pair with the targets.", f"the shape {list(values.shape)} of y"
                raise LabelError(what, expected=expected, got=describe(targets), fix=self.hint)
            noise = noise.reshape(noise.shape + (1,) * (values.dim() - noise.dim()))
            targets = torch.stack([values, noise.to(values).expand_as(values)], -1)
        if not isinstance(targets, Tensor):
            refuse_several_targets(self, targets)
        if targets.shape == (*outputs.shape, 2):
            return targets
        if outputs.shape[-1] == 1 and targets.shape == (*outputs.shape[:-1], 2):
            return targets.unsqueeze(-2)
        plain = super().align(outputs, targets)
        return torch.stack([plain, torch.full_like(plain, self.new_noise_std)], -1)

    def is_valid(self, targets: Tensor) -> Tensor:
        """Finite numbers with positive noise; NaN with any."""
        values, noise = targets.unbind(-1)
        return (
            super().is_valid(targets) & torch.stack([torch.ones_like(noise), noise], -1).gt(0)
            | values.isnan()[..., None]
        )

    def observed(self, targets: Tensor) -> Tensor:
        """Which entries ``[N, C]`` have a value."""
        return ~targets[..., 0].isnan()

    def entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log N(y_c; f_c, s_c²)``, ``[N, C]``."""
        values, noise = targets.unbind(-1)
        return -((((outputs - values) / noise).square() + LOG_2PI) / 2 + noise.log())

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``1/s``, by default that of new targets."""
        return torch.full_like(outputs, 1 / self.new_noise_std) if targets is None else targets[..., 1].reciprocal()

    def sample_targets(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """UnsupportedError: drawn targets have no noise of their own."""
        self.lacks("cannot draw targets with given noise", fix='Use backend="native".')

    def new_noise(self, outputs: Tensor) -> Tensor:
        """The deviation of targets that come without one."""
        return torch.full_like(outputs, self.new_noise_std)

    def marginal_log_density(self, marginal: Marginal, targets: Tensor) -> Tensor:
        """``log N(y; m, V + diag s²)`` with each target's own noise."""
        values, noise = targets.unbind(-1)
        assert marginal.epistemic is not None and marginal.aleatoric is not None
        covariance = marginal.epistemic
        if isinstance(marginal.together, MultivariateNormal):
            covariance = marginal.together.covariance_matrix - torch.diag_embed(marginal.aleatoric)
        own = noisy_normal(marginal.mean, covariance, noise.nan_to_num(1.0).square().to(marginal.mean))
        return super().marginal_log_density(own, values.where(self.observed(targets), math.nan))


class StudentTNoise(RealTargets):
    """Predictions under noise precisions ``Gamma(shape, rate [C])``: Student-t with ``2 shape`` degrees of freedom.

    The variance of y given its output is ``rate/(shape − 1)``; that of the output has the same factor, and adds to it.
    """

    couples_outputs = False
    sample = Likelihood.sample

    def __init__(self, shape: float, rate: Tensor, output_axis: int = -1):
        self.shape, self.rate, self.output_axis = shape, rate, output_axis

    def new_noise(self, outputs: Tensor) -> Tensor:
        """``√(rate/(shape − 1))``."""
        return (self.rate / (self.shape - 1)).sqrt().to(outputs).expand_as(outputs)

    def distribution(self, outputs: Tensor, epistemic: float | Tensor = 0.0) -> Distribution:  # type: ignore[override]
        """Student-t distributions with batch shape ``[..., C]``, of outputs with a variance of their own."""
        scale = ((epistemic + self.new_noise(outputs).square()) * (1 - 1 / self.shape)).sqrt()
        return StudentT(torch.full_like(outputs, 2 * self.shape), outputs, scale, validate_args=False)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: weights and noise are integrated out together."""
        variance = variance_of(mean, covariance)
        found = noisy_normal(mean, variance, self.new_noise(mean).square())
        return replace(found, distribution=self.distribution(mean, variance))

    def predict_joint(self, mean: Tensor, covariance: Tensor) -> Distribution:
        """UnsupportedError: torch has no multivariate Student-t distribution."""
        self.lacks("has no joint density", expected="joint=False", got="joint=True")


def checked_noise(noise_std: float | Tensor) -> Tensor:
    """A noise as float64, 0-d or ``[C]``; ConfigurationError unless it is made of positive numbers."""
    return checks.numbers("noise_std", as_hyperparameter(noise_std).double(), above=0.0)
