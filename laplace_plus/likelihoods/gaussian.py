"""Real numbers with Gaussian noise: of a known level, of one that the network predicts, or of an unknown precision."""

from __future__ import annotations

import math
import reprlib
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution, MultivariateNormal, Normal, StudentT

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, LabelError, OutputError, UnsupportedError
from laplace_plus.likelihoods.base import LAST_AXIS, Likelihood, Marginal, describe, require_one_target, variance_of
from laplace_plus.likelihoods.elementwise import Elementwise
from laplace_plus.likelihoods.sampling import cholesky, is_full, standard_normal

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
    def distribution(self, outputs: Tensor) -> Normal:
        """Normal distributions with batch shape ``[..., D]``."""

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

    def __init__(self, noise_std: float | Tensor = 1.0, *, output_axis: int = -1, weighted: bool = False):
        with torch.inference_mode(False):  # tensors made in inference mode cannot be differentiated later
            self._noise_std = _checked_noise(noise_std).detach().clone()
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
        noise = self._noise_std if noise_std is None else _checked_noise(noise_std, self.n_noise)
        return noise.reshape(-1).expand(self.n_noise)

    def validate(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse anything but finite floating targets of the outputs' shape."""
        if self.n_noise not in (1, outputs.shape[-1]):
            expected = f"{self.n_noise} outputs, or noise_std of one number"
            raise OutputError("The noise levels do not fit the outputs.", expected=expected, got=describe(outputs))
        super().validate(outputs, targets)

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

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Ones (unit noise)."""
        return torch.ones_like(outputs)

    def output_hessian(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The identity (unit noise), ``[N, C, C]``, stored once; without the entries that were not observed."""
        if bool(targets.isnan().any()):
            return torch.diag_embed(self.observed(targets).to(outputs.dtype))
        identity = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return identity.expand(*outputs.shape, -1)

    output_root = output_hessian

    def distribution(self, outputs: Tensor) -> Normal:
        """Normal distributions with batch shape ``[..., C]``."""
        return Normal(outputs, self._noise_std.to(outputs).expand_as(outputs), validate_args=False)

    def sample_targets(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """``f + ε`` (unit noise), ``[..., C]``."""
        return outputs + standard_normal(outputs.shape, like=outputs, generator=generator)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: ``N(m, V + σ²)``."""
        noise_variance = self._noise_std.to(mean).square().expand_as(mean)
        return noisy_normal(mean, covariance, noise_variance)

    def predict_joint(self, mean: Tensor, covariance: Tensor) -> Distribution:
        """``N(m, V + σ²)`` of all ``N C`` numbers."""
        noise_variance = self._noise_std.to(mean).square().expand_as(mean).reshape(-1)
        found = noisy_normal(mean.reshape(-1), covariance, noise_variance)
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
        >>> HeteroscedasticGaussian().output_root(torch.zeros(1, 2), torch.zeros(1, 1)).square()
        tensor([[[1.0000, 0.0000],
                 [0.0000, 0.5000]]])
    """

    output_axis: int = LAST_AXIS
    weighted: bool = False
    config_name = "heteroscedastic_gaussian"
    scales = (
        "variances or deviations",
        "log-variances",
        "any real numbers, of which exp is the variance",
        "Return torch.log(variance), or 2 * torch.log(deviation), beside the means; or leave out the last softplus or "
        "exp, and train so.",
    )
    couples_outputs = True

    def n_targets(self, n_outputs: int) -> int:
        """D, half the outputs."""
        return n_outputs // 2

    def validate(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse an odd number of outputs, and anything but finite floating targets ``[B, *, D]``."""
        if outputs.shape[-1] % 2:
            expected = "an even number of outputs: D means, then D log-variances"
            raise OutputError("The outputs do not come in pairs.", expected=expected, got=describe(outputs))
        super().validate(outputs, targets)

    def entries(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``-½ (l_d + (y_d - m_d)² exp(-l_d) + log 2π)``, ``[N, D]``."""
        mean, log_variance = outputs.chunk(2, -1)
        return -0.5 * (log_variance + (targets - mean).square() * (-log_variance).exp() + LOG_2PI)

    def evidence_for_another_scale(self, outputs: Tensor, targets: Tensor) -> float:
        """The larger log-likelihood of positive numbers as variances or deviations, less that as log-variances."""
        mean, spread = outputs.chunk(2, -1)
        if spread.min() <= 0:
            return -math.inf
        readings = spread.log(), 2 * spread.log(), spread
        first, second, own = (self.statistics(torch.cat([mean, one], -1), targets) for one in readings)
        return float(torch.maximum(first, second) - own)

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``(exp(-l/2), √½)``, ``[N, 2 D]``, of the expected information."""
        _, log_variance = outputs.chunk(2, -1)
        return torch.cat([(-0.5 * log_variance).exp(), torch.full_like(log_variance, math.sqrt(0.5))], -1)

    def distribution(self, outputs: Tensor) -> Normal:
        """Normal distributions with batch shape ``[..., D]``."""
        mean, log_variance = outputs.chunk(2, -1)
        return Normal(mean, (0.5 * log_variance).exp(), validate_args=False)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: the exact mean ``m`` and variance ``V_m + exp(l + V_l / 2)``, as those of a normal."""
        size = mean.shape[-1] // 2
        variance = variance_of(mean, covariance)
        aleatoric = (mean[..., size:] + 0.5 * variance[..., size:]).exp()
        block = covariance[..., :size, :size] if is_full(mean, covariance) else covariance[..., :size]
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
        require_one_target(self, targets)
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
        raise UnsupportedError("Targets with given noise cannot be drawn.", fix='Use backend="native".')

    def distribution(self, outputs: Tensor) -> Normal:
        """Normal distributions of new targets, with batch shape ``[..., C]``."""
        return Normal(outputs, torch.full_like(outputs, self.new_noise_std), validate_args=False)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: ``N(m, V + s²)`` of new targets."""
        return noisy_normal(mean, covariance, torch.full_like(mean, self.new_noise_std**2))

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

    def distribution(self, outputs: Tensor, epistemic: float | Tensor = 0.0) -> Distribution:  # type: ignore[override]
        """Student-t distributions with batch shape ``[..., C]``, of outputs with a variance of their own."""
        scale = ((epistemic + (self.rate / (self.shape - 1)).to(outputs)) * (1 - 1 / self.shape)).sqrt()
        return StudentT(
            torch.full_like(outputs, 2 * self.shape), outputs, scale.expand_as(outputs), validate_args=False
        )

    def root_diagonal(self, outputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Ones (unit noise)."""
        return torch.ones_like(outputs)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"exact"``: weights and noise are integrated out together."""
        epistemic, noise = variance_of(mean, covariance), (self.rate / (self.shape - 1)).to(mean).expand_as(mean)
        law, information = self.distribution(mean, epistemic), independent_information(epistemic, noise)
        return Marginal(mean, epistemic + noise, law, epistemic, noise, information=information)

    def predict_joint(self, mean: Tensor, covariance: Tensor) -> Distribution:
        """UnsupportedError: torch has no multivariate Student-t distribution."""
        raise UnsupportedError("Student-t noise has no joint density here.", expected="joint=False", got="joint=True")


def noisy_normal(mean: Tensor, covariance: Tensor, noise_variance: Tensor) -> Marginal:
    """``N(mean, covariance + diag(noise_variance))`` for ``mean [..., C]`` and variances or a full covariance.

    The mutual information of noisy and noiseless values is ``½ log det(I + D⁻¹ covariance D⁻¹)`` in nats ``[...]``,
    with ``D² = diag(noise_variance)``.
    """
    variance = variance_of(mean, covariance)
    total = variance + noise_variance
    every = mean, total, Normal(mean, total.sqrt(), validate_args=False), variance, noise_variance
    # torch's multivariate normal cannot evaluate an empty batch.
    if mean.shape[-1] == 1 or mean.numel() == 0 or not is_full(mean, covariance):
        return Marginal(*every, information=independent_information(variance, noise_variance))
    deviation = noise_variance.sqrt()
    # In units of the noise the matrix is at least the identity, however small the noise.
    identity = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
    root = cholesky(identity + covariance / (deviation.unsqueeze(-1) * deviation.unsqueeze(-2)))
    together = MultivariateNormal(mean, scale_tril=deviation.unsqueeze(-1) * root, validate_args=False)
    return Marginal(*every, together, root.diagonal(dim1=-2, dim2=-1).log().sum(-1).clamp_min(0.0))


def independent_information(variance: Tensor, noise_variance: Tensor) -> Tensor:
    """Mutual information ``[...]`` of noisy and noiseless values ``[..., C]`` that are independent, in nats."""
    return 0.5 * torch.log1p(variance / noise_variance).sum(-1)


def _checked_noise(noise_std: float | Tensor, count: int | None = None) -> Tensor:
    """A noise as float64, 0-d or ``[C]``; ConfigurationError for other values, or neither one nor ``count``."""
    try:
        noise = torch.as_tensor(noise_std, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        noise = torch.empty(0)
    fits = noise.dim() <= 1 and noise.numel() in (1, count or noise.numel() or 1)
    if not fits or not bool((torch.isfinite(noise) & (noise > 0)).all()):
        what, expected = "The noise must be a standard deviation.", "a positive finite number, or [C] of them"
        raise ConfigurationError(what, expected=expected, got=reprlib.repr(noise_std))
    return noise
