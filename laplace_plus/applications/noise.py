"""Noise that depends on the input: a small head on a trained regressor, fitted to data that it was not trained on.

A posterior of a regressor knows one noise σ² for each output. :func:`learn_noise` puts another beside each prediction:

    ``log σ²(x) = b₀ + b₁ log v(x) + wᵀh(x)``,

with the posterior's own variance v of the output and the features h that enter a linear last layer, both standardised.
The coefficients of an output have the least mean of ``½ log(v + σ²) + ½ r²/(v + σ²) + ½ λ |w|²`` over the residuals r.
Residuals on training data are too small, so they are those of held-out data, or of training data that are left out.

Folds choose between a constant, ``b₁`` alone, and features with several λ, with and without ``b₁``: what has the least
left-out loss, or a constant where that gains no more than a standard error. On other inputs σ² stays within what it is
on the data, since a line in log σ² says nothing beyond. Prediction costs one pass to the features more.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.distances import last_layer, last_layer_inputs
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods.gaussian import LOG_2PI, Gaussian, HeteroscedasticGaussian
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import iterate
from laplace_plus.network.network import Network
from laplace_plus.persistence import stored
from laplace_plus.posteriors import Posterior
from laplace_plus.posteriors.storing import save
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.tuning.leave_one_out import leave_one_out

RIDGES = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01)
"""Values of λ that are tried, from few features to many."""

FOLDS = 5

STEPS = 100
"""Of a search, at most."""


@stored
@dataclass(frozen=True, kw_only=True)
class LearntNoise:
    """What :func:`learn_noise` found; losses are left-out mean negative log-likelihoods of an entry, in nats.

    Attributes:
        chosen: ``"constant"``, ``"variance"``, ``"features"`` or ``"both"``.
        ridge: The λ of the features; infinite without any.
        constant_nll: With one noise for each output.
        nll: With the noise that was chosen.
        standard_error: Of the difference of both.
        n_data: The number of targets.
    """

    chosen: str
    ridge: float
    constant_nll: float
    nll: float
    standard_error: float
    n_data: int


@stored
@dataclass(eq=False, repr=False)
class NoisePosterior:
    """A posterior whose noise depends on the input; see :func:`learn_noise`. All arguments are attributes.

    Args:
        posterior: The posterior, whose own noise is not used.
        coefficients: Of a one, the standardised log-variance and the standardised features, ``[C, 2 + D]``; of log σ².
        centre, scale: Of log-variances, ``[C]``, and features, ``[D]``; each a pair.
        limits: The least and largest log σ² of the data, ``[2, C]``.
        report: How they were found.
    """

    posterior: Posterior
    _: KW_ONLY
    coefficients: Tensor
    centre: tuple[Tensor, Tensor]
    scale: tuple[Tensor, Tensor]
    limits: Tensor
    report: LearntNoise

    def __repr__(self) -> str:
        return f"NoisePosterior({self.posterior!r}, {self.report.chosen!r})"

    @property
    def likelihood(self) -> HeteroscedasticGaussian:
        """That of the predictions, whose outputs are ``[m_1 … m_C, log σ²_1 … log σ²_C]``."""
        own: Any = self.posterior.likelihood
        return HeteroscedasticGaussian(output_axis=own.output_axis, weighted=own.weighted)

    def predictive(
        self, x: Any, *, n_samples: int = 100, joint: bool = False, generator: torch.Generator | None = None
    ) -> Prediction:
        """``N(m, V + σ²(x))``: ``epistemic`` is the posterior's, ``aleatoric`` is σ²(x).

        Args:
            x: A batch's inputs.
            n_samples: Number of samples for what is drawn: a joint log-probability.
            joint: Whether inputs are treated jointly, with their cross-covariances.
            generator: Source of randomness, for samples.
        """
        mean, covariance = self.posterior.functional_posterior(x, joint=joint, generator=generator)
        size, lead = mean.shape[-1], mean.shape[:-1]
        square = covariance.reshape(mean.numel(), -1) if joint else covariance
        variance = square.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        known = covariance.new_zeros(*lead, 2 * size, *(lead if joint else ()), 2 * size)
        known[..., :size].narrow(len(lead), 0, size).copy_(covariance)
        outputs = torch.cat([mean, self._log_noise(x, variance).to(mean)], -1)
        return from_functional(self.likelihood, outputs, known, n_samples=n_samples, joint=joint, generator=generator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior with its noise, as one file; errors as of its own ``save``."""
        save(self, path)

    @cached_property
    def _layer(self) -> Network:
        return last_layer(self.posterior.network)

    def _log_noise(self, x: Any, variance: Tensor) -> Tensor:
        """``log σ²(x)``, ``[B, *, C]`` float64."""
        rows = variance.detach().double().reshape(-1, variance.shape[-1])
        features = _features(self._layer, x, len(rows)) if len(self.centre[1]) else rows[:, :0]
        columns = _columns(rows, features, self.centre, self.scale)
        found = (columns * self.coefficients).sum(-1)
        return found.clamp(*self.limits).view(variance.shape)


def learn_noise(
    posterior: Posterior,
    data: Iterable[Any] | None = None,
    *,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> NoisePosterior:
    """Fit a noise that depends on the input; see :mod:`laplace_plus.applications.noise`.

    Args:
        posterior: A fitted and tuned posterior of a regressor with ``lp.Gaussian``, which is not changed.
        data: Data that the network was not trained on; some hundred will do. The posterior may have been fitted to
            them. None leaves out each of the training data in turn, for classes of which ``lp.leave_one_out`` knows it.
        progress: Whether to show a progress bar.
        generator: Source of randomness, for the folds; by default they are the same each time.

    Returns:
        A posterior with its own ``predictive``, and with ``.report``.

    Raises:
        NotFittedError: Before ``fit``.
        UnsupportedError: Another likelihood.
        ConfigurationError: Fewer than 20 rows.
        NotPositiveDefiniteError: Training data with leverages of one or more: pass ``data=``.

    Example:
        >>> import laplace_plus as lp
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.rand(400, 1, generator=generator)
        >>> y = x + x * torch.randn(400, 1, generator=generator)
        >>> line = torch.nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _ = line.weight.fill_(1.0), line.bias.zero_()
        >>> noisy = lp.learn_noise(lp.Full(line, "regression").fit([(x, y)]), [(x, y)])
        >>> near, far = noisy.predictive(torch.tensor([[0.1], [0.9]])).std.flatten().tolist()
        >>> print(f"{near:.1f} {far:.1f}")
        0.1 0.8
    """
    if not isinstance(posterior, Posterior) or not isinstance(posterior.likelihood, Gaussian):
        got = repr(getattr(posterior, "likelihood", posterior))
        what, expected = "A noise is learnt beside real outputs.", "a fitted posterior with lp.Gaussian"
        raise UnsupportedError(what, expected=expected, got=got)
    posterior.require_fit()
    checks.generator(generator)
    left, again = None, data
    if again is None:
        again = posterior.training_data.again(None, "A noise is learnt from left-out residuals.")
        left = leave_one_out(posterior, again, progress=progress)
    residuals, variances, shares, features = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    layer, first = last_layer(posterior.network), 0
    for batch in iterate(again, device=posterior.network.device, progress=progress, description="noise"):
        if left is None:
            mean, variance = posterior.functional_posterior(batch.inputs, outputs="diagonal")
        else:
            own = slice(first, first + batch.size)
            mean, variance = left.mean[own], left.covariance[own].diagonal(dim1=-2, dim2=-1)
            first += batch.size
        posterior.likelihood.validate(mean, batch.target)
        flat, targets, share = posterior.likelihood.rows(mean.double(), batch.target)
        residuals.append((targets - flat).nan_to_num(0.0))
        shares.append((share[:, None] * ~targets.isnan()).double())
        variances.append(variance.double().reshape(flat.shape))
        features.append(_features(layer, batch.inputs, len(flat)).double())
    return _fitted(posterior, _Rows(*map(torch.cat, (residuals, variances, shares, features))), generator)


def _features(layer: Network, x: Any, n_rows: int) -> Tensor:
    """What enters a linear last layer, ``[n_rows, D]``; D = 0 where there is none, or has other rows."""
    found = last_layer_inputs(layer, x)[0]
    return found if found is not None and len(found) == n_rows else torch.zeros(n_rows, 0, device=layer.device)


def _columns(variance: Tensor, features: Tensor, centre: Any, scale: Any) -> Tensor:
    """One, log-variance and features of each row and output, standardised, ``[n, C, 2 + D]``."""
    logs = (_log(variance) - centre[0]) / scale[0]
    shared = ((features.double() - centre[1]) / scale[1])[:, None].expand(-1, logs.shape[1], -1)
    return torch.cat([torch.ones_like(logs)[..., None], logs[..., None], shared], -1)


def _log(variance: Tensor) -> Tensor:
    return variance.clamp_min(torch.finfo(torch.float32).tiny).log()


@dataclass(frozen=True)
class _Rows:
    """Residuals, variances and shares ``[n, C]`` of targets, and what enters their last layer ``[n, D]``, float64."""

    residuals: Tensor
    variances: Tensor
    shares: Tensor
    features: Tensor

    def some(self, index: Tensor) -> _Rows:
        """Those of an index."""
        return _Rows(*(own[index] for own in vars(self).values()))


def _fitted(posterior: Posterior, rows: _Rows, generator: torch.Generator | None) -> NoisePosterior:
    """The noise that folds choose, fitted to all rows."""
    rows = rows.some(rows.shares.any(1))
    n = len(rows.residuals)
    checks.count("The number of rows that a noise is learnt from", n, 4 * FOLDS)
    source = torch.Generator().manual_seed(0 if generator is None else draw_seed(generator))
    fold = torch.randperm(n, generator=source).to(rows.residuals.device) % FOLDS
    choices = [("constant", math.inf), ("variance", math.inf)]
    if rows.features.shape[1]:
        choices += [(name, ridge) for ridge in RIDGES for name in ("features", "both")]
    losses = torch.stack([_left_out(rows, fold, *choice) for choice in choices])  # [candidates, n]
    means = losses.mean(1)
    picked = int(means.argmin())
    if float(means[0] - means[picked]) <= float((losses[0] - losses[picked]).std()) / math.sqrt(n) + 1e-9:  # noqa: PLR2004
        picked = 0
    name, ridge = choices[picked]
    scaling = _scaling(rows)
    columns, weight = _columns(rows.variances, rows.features, *scaling), _fit(rows, scaling, name, ridge)
    found = (columns * weight).sum(-1)
    entries = rows.shares.sum() / n  # entries that count of a row, to which the losses are summed
    report = LearntNoise(
        chosen=name,
        ridge=ridge,
        constant_nll=float(means[0] / entries),
        nll=float(means[picked] / entries),
        standard_error=float((losses[picked] - losses[0]).std() / math.sqrt(n) / entries),
        n_data=int((rows.shares > 0).sum()),
    )
    limits = torch.stack([found.amin(0), found.amax(0)])
    own = copy.copy(posterior)  # shares the curvature and the network
    return NoisePosterior(own, coefficients=weight, centre=scaling[0], scale=scaling[1], limits=limits, report=report)


def _scaling(rows: _Rows) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Mean and deviation of the log-variances ``[C]`` and the features ``[D]``, by shares; of what does not vary, 1."""
    share = rows.shares.sum(1) / rows.shares.sum()
    means = [(own, share @ own) for own in (_log(rows.variances), rows.features)]
    both = [(mean, (share @ (own - mean).square()).sqrt()) for own, mean in means]
    deviations = [torch.where(std > 1e-9 * mean.abs() + 1e-30, std, 1.0) for mean, std in both]  # noqa: PLR2004
    return (both[0][0], both[1][0]), (deviations[0], deviations[1])


def _left_out(rows: _Rows, fold: Tensor, name: str, ridge: float) -> Tensor:
    """Each row's loss, summed over its entries, by a noise that other folds were fitted by, ``[n]``."""
    losses = torch.zeros_like(rows.residuals[:, 0])
    for number in range(FOLDS):
        kept, out = rows.some(fold != number), rows.some(fold == number)
        scaling = _scaling(kept)
        weight = _fit(kept, scaling, name, ridge)
        known = (_columns(kept.variances, kept.features, *scaling) * weight).sum(-1)
        noise = (_columns(out.variances, out.features, *scaling) * weight).sum(-1)
        losses[fold == number] = _loss(out, noise.clamp(known.amin(0), known.amax(0))).sum(1)
    return losses


def _loss(rows: _Rows, log_noise: Tensor) -> Tensor:
    """``-log N(r; 0, v + σ²)`` times the share, ``[n, C]``."""
    total = rows.variances + log_noise.exp()
    return rows.shares * (total.log() + rows.residuals.square() / total + LOG_2PI) / 2


def _fit(rows: _Rows, scaling: Sequence[Any], name: str, ridge: float) -> Tensor:
    """The coefficients ``[C, 2 + D]`` of least loss, 0 where a candidate has none."""
    columns = _columns(rows.variances, rows.features, *scaling)
    used = torch.ones(columns.shape[2], dtype=torch.bool, device=columns.device)
    used[1], used[2:] = name in ("variance", "both"), name in ("features", "both")
    columns, count = columns[..., used], rows.shares.sum(0).clamp_min(torch.finfo(torch.float32).tiny)  # [n, C, K]
    size = (rows.shares * rows.residuals.square()).sum(0) / count
    least = size.clamp_min(torch.finfo(torch.float32).tiny) / 2
    weight = torch.zeros_like(columns[0])
    weight[:, 0] = torch.maximum(size - (rows.shares * rows.variances).sum(0) / count, least).log()
    weight.requires_grad_()
    search = torch.optim.LBFGS([weight], max_iter=STEPS, tolerance_change=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        each = _loss(rows, (columns * weight).sum(-1)).sum(0) / count
        total = each.sum() + (ridge * weight[:, 1 + int(used[1]) :].square().sum() / 2 if math.isfinite(ridge) else 0.0)
        total.backward()
        return total

    with torch.enable_grad():
        search.step(loss)
    found = torch.zeros(len(weight), len(used), dtype=columns.dtype, device=columns.device)
    found[:, used] = weight.detach()
    return found
