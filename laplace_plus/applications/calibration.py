"""Calibrated class probabilities: from training data alone, or by scaling outputs on held-out data.

The recipe by leave-one-out, for a network trained with weight decay, in the notation of
:mod:`laplace_plus.tuning.deletions`:

1. Compute leave-one-out outputs ``f₋ₙ`` at ``κ α₀``, where ``α₀`` is the prior precision of training.
2. Let ``T`` minimise the mean of ``−log p(yₙ | f₋ₙ/T)``. If ``T < 1``, the network is underconfident, which no
   covariance can repair. Predictions are then ``p(y | f/T)``.
3. Otherwise predict with the covariance ``s V(α₀)``, where ``s`` in [0, 1] minimises the leave-one-out loss of ``f₋ₙ``
   and ``s V₋ₙ(α₀)``.

``κ = 2`` is an empirical choice: networks stop short of the optimum, and the plain formula overshoots retraining.
Networks that interpolate their training data are refused: gradients vanish there, and leaving out is blind.

Held-out data make the Gaussian over outputs ``N(f/T, s V/T²)``, with the least mean loss of their targets (Guo et al.,
2017), s 1, .1, .01 or 0: the network alone. The loss is no larger than the posterior's, and a temperature's of the
network.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Literal

import scipy
import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.mixtures import Ensemble, predictor
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import iterate
from laplace_plus.network.network import exact_arithmetic, full_precision
from laplace_plus.persistence import stored
from laplace_plus.posteriors import GaussianPosterior, Posterior
from laplace_plus.posteriors.storing import save
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, outputs_for, require_outputs
from laplace_plus.tuning.deletions import INTERPOLATION, Leverages
from laplace_plus.tuning.laplace import check_training_prior, precision_of_weight_decay, survey, unknown_training_prior
from laplace_plus.tuning.leave_one_out import leave_one_out

LARGEST = 8.0
"""A temperature beyond this, or its inverse, is taken for a search that did not end, and gives a warning."""


@stored
@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """What a calibration found.

    Attributes:
        rule: How predictions are made: ``"temperature"`` (T < 1), ``"covariance"`` (s), the fallback
            ``"marginal_likelihood"``; ``"temperature"`` on held-out data, too.
        fitted_temperature: The T that was found, used or not; NaN for ``"marginal_likelihood"``.
        training_nll: Mean loss of the network on its training data, in nats.
        leave_one_out_nll: Mean leave-one-out loss of the network itself; NaN where nothing was left out.
        calibrated_nll: The same after calibration.
        largest_leverage: At ``κ α₀``; NaN where nothing was left out.
        kappa: The leverage factor.
        converged: Whether T lies inside the searched range.
        held_out_nll: Mean loss of the posterior on held-out data, before they scaled it.
    """

    rule: Literal["temperature", "covariance", "marginal_likelihood"]
    fitted_temperature: float = math.nan
    training_nll: float = math.nan
    leave_one_out_nll: float = math.nan
    calibrated_nll: float = math.nan
    largest_leverage: float = math.nan
    kappa: float = math.nan
    converged: bool = True
    held_out_nll: float = math.nan


@stored
@dataclass(eq=False, repr=False)
class CalibratedPosterior:
    """A posterior whose outputs are divided by a temperature, or whose covariance is scaled; see :func:`calibrate`.

    Args:
        posterior: The posterior, at the prior precision that its covariance is to have; or a network's ``Ensemble``.
        temperature: Divides the outputs.
        covariance_scale: Multiplies their covariance.
        link: The default of :meth:`predictive`.
        report: How these were found.

    All arguments are attributes.
    """

    posterior: Any
    _: KW_ONLY
    temperature: float
    covariance_scale: float
    link: str
    report: CalibrationReport

    def __repr__(self) -> str:
        scales = f"temperature={self.temperature:.4g}, covariance_scale={self.covariance_scale:.4g}"
        return f"CalibratedPosterior({self.posterior!r}, {scales})"

    @property
    def likelihood(self) -> Likelihood:
        """That of the posterior."""
        return self.posterior.likelihood

    def __copy__(self) -> CalibratedPosterior:
        return replace(self, posterior=copy.copy(self.posterior))

    def functional_posterior(
        self, x: Any, *, joint: bool = False, outputs: Outputs = None, generator: torch.Generator | None = None
    ) -> FunctionalPosterior:
        """``N(f/T, s V/T²)``; as of :meth:`Posterior.functional_posterior`."""
        mean, covariance = self.posterior.functional_posterior(x, joint=joint, outputs=outputs, generator=generator)
        scale = self.covariance_scale / self.temperature**2
        return FunctionalPosterior(mean / self.temperature, covariance * scale)

    def predictive(
        self,
        x: Any,
        *,
        link: str | None = None,
        n_samples: int = 100,
        joint: bool = False,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The calibrated predictive distribution; arguments and errors as of :meth:`Posterior.predictive`.

        Without a covariance, every link gives ``p(y | f/T)``, at the cost of a forward pass.
        """
        likelihood = self.likelihood
        link = self.link if link is None else link
        checks.choice("link", link, likelihood.links)
        if self.covariance_scale == 0:
            link, mean = "probit", _outputs(self.posterior, x) / self.temperature
            covariance = mean.new_zeros(*mean.shape, *mean.shape) if joint else torch.zeros_like(mean)
        else:
            needed = None if joint else outputs_for(link, self.posterior.n_outputs)
            mean, covariance = self.functional_posterior(x, joint=joint, outputs=needed, generator=generator)
        options: dict[str, Any] = {"link": link, "n_samples": n_samples, "generator": generator, "joint": joint}
        return from_functional(likelihood, mean.detach(), covariance.detach(), **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the posterior with its calibration, as one file; errors as of its own ``save``."""
        save(self, path)


def calibrate(
    posterior: Posterior | nn.Module,
    data: Iterable[Any] | None = None,
    method: Literal["leave_one_out", "temperature"] | None = None,
    *,
    likelihood: Any = None,
    training_prior_precision: float | Tensor | None = None,
    weight_decay: float | None = None,
    kappa: float = 2.0,
    leverages: Leverages = "own",
    link: str | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    fallback: Literal["raise", "marginal_likelihood"] = "raise",
    progress: bool = False,
) -> CalibratedPosterior:
    """Calibrate a classifier; see :mod:`laplace_plus.applications.calibration`.

    By default it leaves out training data, and needs the weight decay that the network was trained with. On small
    networks it was level with, or ahead of, the network itself and a temperature fitted to validation data.

    Args:
        posterior: A fitted Gaussian posterior of a classifier, which is not changed. Its prior precision is not used.
        data: The training data, by default those of the fit; for a temperature held-out data.
        method: ``"leave_one_out"``, the default of posteriors; or ``"temperature"`` by held-out data, the default of
            networks. Any classifier then does, and of the arguments below only ``link``, ``n_samples``, ``generator``
            and ``progress`` are taken.
        likelihood: That of a bare network in place of a posterior: ``"classification"`` or ``"binary"``.
        training_prior_precision: ``α₀`` for the loss summed over the data: 0-d, ``[G]`` or ``[P]``.
        weight_decay: Instead, the ``weight_decay`` of torch's SGD or Adam (not AdamW) with the *mean* loss. Then
            ``α₀ = N · weight_decay``, where N counts the terms of the mean: examples or positions that are not ignored,
            times the outputs for several binary ones.
        kappa: The leverage factor.
        leverages: The curvature of leverages and displacements. ``"own"`` is the posterior's; leverages of KFAC and
            Diagonal may exceed one, and are then refused. ``"full"`` is the exact Gauss-Newton matrix ``[P, P]``.
        link: For the tuning of s and for predictions; as for ``predictive``.
        n_samples: Number of samples for ``"mc"``.
        generator: Source of randomness.
        fallback: For networks that interpolate or have no weight decay: ``"raise"`` an error, or predict at the prior
            precision of largest ``"marginal_likelihood"``, with ``s = T = 1``.
        progress: Whether to show a progress bar.

    Returns:
        A posterior with its own ``predictive``, and with ``.temperature``, ``.covariance_scale`` and ``.report``.

    Raises:
        NotFittedError: Before ``fit``.
        ConfigurationError: Unknown choices, or no weight decay.
        UnsupportedError: No classifier, or one that interpolates its training data.
        DataError: Other data than were fitted to.
        NotPositiveDefiniteError: Leverages at or above one.

    Warns:
        ConvergenceWarning: T lies at an end of the searched range.

    Example:
        >>> import laplace_plus as lp
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.randn(100, 2, generator=generator)
        >>> y = (x[:, 0] + torch.randn(100, generator=generator) > 0).long()
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> calibrated = lp.calibrate(lp.Full(model, "classification").fit([(x, y)]), weight_decay=0.1)
        >>> calibrated.report.rule, calibrated.temperature < 1  # so much weight decay is more than the data ask for
        ('temperature', True)
    """
    alone = isinstance(posterior, nn.Module)
    posterior = predictor(posterior, likelihood)
    method = method or ("temperature" if alone else "leave_one_out")
    checks.choice("method", method, ("leave_one_out", "temperature"))
    kind: Any = GaussianPosterior if method == "leave_one_out" else Ensemble if alone else Posterior
    if not isinstance(posterior, kind):
        expected, got = f"a fitted {kind.__name__}, such as lp.KFAC", type(posterior).__name__
        raise ConfigurationError("This cannot be calibrated.", expected=expected, got=got)
    if not alone:
        posterior.require_fit()
    if not posterior.likelihood.is_classifier:
        what, got = "Only classifiers are calibrated: other outputs have no temperature.", repr(posterior.likelihood)
        fix = "Use fit_prior_precision(), which tunes precision and noise."
        raise UnsupportedError(what, expected='likelihood="classification" or "binary"', got=got, fix=fix)
    if method != "leave_one_out":
        if data is None or any(one is not None for one in (training_prior_precision, weight_decay)):
            expected, got = "data=held_out, and no prior of training", f"method={method!r}"
            raise ConfigurationError("A temperature is fitted to held-out data.", expected=expected, got=got)
        return _by_temperature(posterior, data, link=link, n_samples=n_samples, generator=generator, progress=progress)
    known = check_training_prior(training_prior_precision, weight_decay)
    checks.choice("fallback", fallback, ("raise", "marginal_likelihood"))
    link = posterior.likelihood.links[0] if link is None else link
    checks.choice("link", link, [name for name in posterior.likelihood.links if name != "bridge"])
    again = posterior.training_data.again(data, "Calibration by leave-one-out passes over the training data.")
    with exact_arithmetic(posterior.network):
        model, network = posterior.laplace_model(), posterior.network
        seen = survey(model, network, again, posterior.n_data, progress=progress, description="training loss")
        checks.positive("The number of targets that count", seen.n_rows)
        training_nll = -float(model.log_likelihood()) / seen.n_rows
    own = copy.copy(posterior)  # shares the curvature and the network

    def result(rule: Any, *, temperature: float = 1.0, scale: float = 0.0, **found: Any) -> CalibratedPosterior:
        report = CalibrationReport(rule=rule, training_nll=training_nll, kappa=float(kappa), **found)
        return CalibratedPosterior(own, temperature=temperature, covariance_scale=scale, link=link, report=report)

    if not known or training_nll < INTERPOLATION:
        if fallback == "marginal_likelihood":
            own.fit_prior_precision("marginal_likelihood")
            return result("marginal_likelihood", scale=1.0)
        fix = 'Pass fallback="marginal_likelihood" to predict with that prior precision, or calibrate on held-out data.'
        if not known:
            raise unknown_training_prior(fix)
        what = "The network fits its training data all but perfectly; leaving one of them out then changes nothing."
        expected = f"a mean training loss of at least {INTERPOLATION:.3g} nats"
        raise UnsupportedError(what, expected=expected, got=f"{training_nll:.3g}", fix=fix)
    if weight_decay is not None:
        training_prior_precision = precision_of_weight_decay(weight_decay, seen, model, posterior.temperature)
    own.prior_precision = training_prior_precision
    left = leave_one_out(own, again, kappa=kappa, leverages=leverages, progress=progress)
    flat, targets, weight = left.likelihood.rows(left.mean.double(), left.targets)

    def heated_loss(temperature: float) -> float:
        densities = left.likelihood.log_density(flat / temperature, targets)
        return -float((densities * weight).sum() / weight.sum())

    fitted, loss = _best_temperature(heated_loss)
    inside = _is_inside(fitted)
    found = {
        "fitted_temperature": fitted,
        "leave_one_out_nll": float(left.nll(link="probit", scale=0.0)),
        "largest_leverage": float(left.leverages.max()),
        "converged": inside,
    }
    if fitted >= 1:
        seed = draw_seed(generator) if link == "mc" else 0

        def left_out_loss(scale: float) -> float:  # with common random numbers
            common = torch.Generator(device=left.mean.device).manual_seed(seed)
            return float(left.nll(link=link, scale=scale, n_samples=n_samples, generator=common))

        scale, loss = _minimum(left_out_loss, 0.0, 1.0)
        return result("covariance", scale=scale, calibrated_nll=loss, **found)
    return result("temperature", temperature=fitted, calibrated_nll=loss, **found)


@full_precision
def _outputs(posterior: Any, x: Any) -> Tensor:
    """The network's outputs ``[B, *, C]``, in at least float32."""
    if not isinstance(posterior, Ensemble):
        posterior.require_fit()
    outputs = posterior.network.forward(posterior.network.receive(x))
    require_outputs(outputs.shape, getattr(posterior, "n_outputs", outputs.shape[-1]), x)
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def _minimum(loss: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Where a loss is least, and that loss: on a grid of 11 points, then around the best of them."""
    best = min((low + (high - low) * number / 10 for number in range(11)), key=loss)
    bounds = max(best - (high - low) / 10, low), min(best + (high - low) / 10, high)
    found = scipy.optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    best = min((best, float(found.x)), key=loss)
    return best, loss(best)


def _best_temperature(loss: Callable[[float], float]) -> tuple[float, float]:
    """The temperature of least loss between the largest one and its inverse, and that loss."""
    end = math.log(LARGEST)
    best, least = _minimum(lambda logarithm: loss(math.exp(logarithm)), -end, end)
    return math.exp(best), least


def _is_inside(temperature: float) -> bool:
    """Whether a temperature lies inside the range that is searched; warns if not."""
    if not (inside := abs(math.log(temperature)) < math.log(LARGEST) - 1e-4):
        message = f"The temperature ended at {temperature:.3g}, the end of the range that is searched."
        warn(message, ConvergenceWarning)
    return inside


def _by_temperature(
    posterior: Any,
    data: Iterable[Any],
    *,
    link: str | None,
    n_samples: int,
    generator: torch.Generator | None,
    progress: bool,
) -> CalibratedPosterior:
    """The posterior, or the network alone, at a temperature by held-out data; all else as of :func:`calibrate`."""
    likelihood, alone, parts = posterior.likelihood, isinstance(posterior, Ensemble), list[tuple[Tensor, ...]]()
    link = link or getattr(posterior, "link", None) or likelihood.links[0]
    checks.choice("link", link, likelihood.links)
    for batch in iterate(data, device=posterior.network.device, progress=progress, description="calibrate"):
        raw = _outputs(posterior, batch.inputs)
        mean, covariance = raw, torch.zeros_like(raw)
        if not alone:
            mean, covariance = posterior.functional_posterior(batch.inputs, generator=generator)
        likelihood.validate(mean, batch.target)
        flat, targets, weight = likelihood.rows(mean.double(), batch.target)
        covariance = covariance.double().reshape(*flat.shape, *covariance.shape[mean.dim() :])
        parts.append((flat, covariance, raw.double().reshape(flat.shape), targets, weight))
    mean, covariance, raw, targets, weight = (torch.cat(column) for column in zip(*parts, strict=True))
    checks.positive("The number of targets that count", float(weight.sum()))
    seed = draw_seed(generator) if link == "mc" else 0

    def loss(scale: float, heat: float) -> float:  # with common random numbers
        common = torch.Generator(device=mean.device).manual_seed(seed)
        options: dict[str, Any] = {"link": link if scale else "probit", "n_samples": n_samples, "generator": common}
        own = (mean if scale else raw) / heat, scale * covariance / heat**2
        return -float((from_functional(likelihood, *own, **options).log_prob(targets) * weight).sum() / weight.sum())

    first = float(not alone)
    before = loss(first, 1.0)
    found = [(before, first, 1.0)]
    for scale in (0.0,) if alone else (1.0, 0.1, 0.01, 0.0):
        heat, after = _best_temperature(partial(loss, scale))
        found.append((after, scale, heat))
    after, scale, heat = min(found, key=lambda one: round(one[0], 9))
    report = CalibrationReport(
        rule="temperature",
        fitted_temperature=heat,
        calibrated_nll=after,
        held_out_nll=before,
        converged=_is_inside(heat),
    )
    return CalibratedPosterior(copy.copy(posterior), temperature=heat, covariance_scale=scale, link=link, report=report)
