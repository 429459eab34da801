"""Calibrated class probabilities from training data alone, by leave-one-out predictions.

The recipe, for a network trained with weight decay, in the notation of :mod:`laplace_plus.leave_one_out.predictions`:

1. Compute leave-one-out outputs ``f₋ₙ`` at ``κ α₀``, where ``α₀`` is the prior precision of training.
2. Let ``T`` minimise the mean of ``−log p(yₙ | f₋ₙ/T)``. If ``T < 1``, the network is underconfident, which no
   covariance can repair. Predictions are then ``p(y | f/T)``.
3. Otherwise predict with the covariance ``s V(α₀)``, where ``s`` in [0, 1] minimises the leave-one-out loss of ``f₋ₙ``
   and ``s V₋ₙ(α₀)``.

``κ = 2`` is an empirical choice: networks stop short of the optimum, and the plain formula overshoots retraining.
Leverages of the last layer alone are lower bounds, so the losses come out too low. A ``T < 1`` from them is therefore
not used, and predictions are the network's own. Networks that interpolate their training data are refused: gradients
vanish there, and leaving out is blind.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from laplace_plus import io
from laplace_plus.batches import can_be_cut, cut, iterate
from laplace_plus.errors import (
    CheckpointError,
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    UnsupportedError,
)
from laplace_plus.evidence.fitted_data import (
    FittedData,
    check_training_prior,
    precision_of_weight_decay,
    survey,
    unknown_training_prior,
)
from laplace_plus.leave_one_out.predictions import INTERPOLATION, LeaveOneOutPredictions, Leverages
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import checked_log_density
from laplace_plus.network import Network
from laplace_plus.posteriors import GaussianPosterior, Posterior, load
from laplace_plus.posteriors.configuration import check_name, full_precision
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.predictive.linearized import MANY_OUTPUTS, FunctionalPosterior, Outputs, require_outputs
from laplace_plus.priors import as_hyperparameter

Refit = Callable[[list[tuple[Any, Tensor]]], nn.Module]
"""Trains a new network on some batches of the training data."""

TEMPERATURES = (1 / 8, 8.0)
"""Range of the search for a temperature, a factor of 8 either way; an optimum at its ends gives a warning."""

HELD_OUT = 0.2
"""Share of the training data that a refit holds out, as in five-fold cross-validation."""


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration found.

    Attributes:
        rule: How predictions are made: ``"temperature"`` (T < 1), ``"covariance"`` (s), ``"network"`` (neither, where
            T < 1 rests on leverages of the last layer), or the fallbacks ``"refit"`` and ``"marginal_likelihood"``.
        fitted_temperature: The T that was found, used or not; NaN for ``"marginal_likelihood"``.
        training_nll: Mean loss of the network on its training data, in nats.
        leave_one_out_nll: Mean leave-one-out loss of the network itself; NaN where nothing was left out.
        calibrated_nll: The same after calibration, minimised over one number; for ``"refit"`` the loss of the fold.
        largest_leverage: At ``κ α₀``; NaN where nothing was left out.
        kappa: The leverage factor.
        converged: Whether T lies inside the searched range. For ``"refit"`` T = 1 counts as inside.
    """

    rule: Literal["temperature", "covariance", "network", "refit", "marginal_likelihood"]
    fitted_temperature: float
    training_nll: float
    leave_one_out_nll: float
    calibrated_nll: float
    largest_leverage: float
    kappa: float
    converged: bool


@dataclass(eq=False, repr=False)
class CalibratedPosterior:
    """A posterior whose outputs are divided by a temperature, or whose covariance is scaled; see :func:`calibrate`.

    Args:
        posterior: The posterior, at the prior precision that its covariance is to have.
        temperature: Divides the outputs.
        covariance_scale: Multiplies their covariance.
        link: The default of :meth:`predictive`.
        report: How these were found.

    All arguments are attributes.
    """

    posterior: Posterior
    _: KW_ONLY
    temperature: float
    covariance_scale: float
    link: str
    report: CalibrationReport

    def __repr__(self) -> str:
        scales = f"temperature={self.temperature:.4g}, covariance_scale={self.covariance_scale:.4g}"
        return f"CalibratedPosterior({self.posterior!r}, {scales})"

    def functional_posterior(self, x: Any, *, joint: bool = False, outputs: Outputs = None) -> FunctionalPosterior:
        """``N(f/T, s V/T²)``; arguments and shapes as of :meth:`Posterior.functional_posterior`."""
        mean, covariance = self.posterior.functional_posterior(x, joint=joint, outputs=outputs)
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
        likelihood = self.posterior.likelihood
        link = self.link if link is None else link
        if self.covariance_scale == 0:
            check_name(link, likelihood.links, "link")
            mean = _outputs(self.posterior, x) / self.temperature
            nothing = mean.new_zeros(*mean.shape, *mean.shape) if joint else torch.zeros_like(mean)
            return from_functional(
                likelihood, mean, nothing, link="probit", n_samples=n_samples, generator=generator, joint=joint
            )
        many = self.posterior.n_outputs > MANY_OUTPUTS and not joint and link == "probit"
        with torch.no_grad():
            mean, covariance = self.functional_posterior(x, joint=joint, outputs="diagonal" if many else None)
            return from_functional(
                likelihood, mean, covariance, link=link, n_samples=n_samples, generator=generator, joint=joint
            )

    def save(self, path: str | Path) -> None:
        """Write the posterior and its calibration to two folders inside ``path``, creating it where needed.

        Raises:
            CheckpointError: One of the folders holds something else.
        """
        self.posterior.save(Path(path) / "posterior")
        header = {
            "temperature": self.temperature,
            "covariance_scale": self.covariance_scale,
            "link": self.link,
            # JSON has no NaN
            "report": {key: None if value != value else value for key, value in asdict(self.report).items()},
        }
        io.write(Path(path) / "calibration", {"calibration": header}, {})

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module, *, likelihood: Any = None) -> CalibratedPosterior:
        """Load what :meth:`save` wrote; arguments and errors as of :func:`laplace_plus.load`."""
        posterior = load(Path(path) / "posterior", model, likelihood=likelihood)
        header, _ = io.read(Path(path) / "calibration")
        found = header.get("calibration")
        if not isinstance(found, dict):
            raise CheckpointError("No calibration was found.", expected="a folder that save() wrote", got=str(path))
        report: dict[str, Any] = {key: math.nan if value is None else value for key, value in found["report"].items()}
        return cls(
            posterior,
            temperature=found["temperature"],
            covariance_scale=found["covariance_scale"],
            link=found["link"],
            report=CalibrationReport(**report),
        )


def calibrate(
    posterior: GaussianPosterior,
    data: Iterable[Any] | None = None,
    *,
    training_prior_precision: float | Tensor | None = None,
    weight_decay: float | None = None,
    kappa: float = 2.0,
    leverages: Leverages = "own",
    link: str = "probit",
    n_samples: int = 100,
    generator: torch.Generator | None = None,
    interpolation: float = INTERPOLATION,
    fallback: Literal["raise", "marginal_likelihood"] = "raise",
    refit: Refit | None = None,
    progress: bool = False,
) -> CalibratedPosterior:
    """Calibrate a classifier by leave-one-out on its training data; see :mod:`laplace_plus.calibration`.

    It needs the weight decay that the network was trained with. On small networks it was level with, or ahead of, the
    network itself and a temperature fitted to validation data.

    Args:
        posterior: A fitted Gaussian posterior of a classifier, which is not changed. Its prior precision is not used.
        data: The training data; by default the data of the fit.
        training_prior_precision: ``α₀`` for the loss summed over the data: 0-d, ``[G]`` or ``[P]``.
        weight_decay: Instead, the ``weight_decay`` of torch's SGD or Adam (not AdamW) with the *mean* loss. Then
            ``α₀ = N · weight_decay``, where N counts the terms of the mean: examples or positions that are not ignored,
            times the outputs for several binary ones.
        kappa: The leverage factor.
        leverages: The curvature of leverages and displacements. ``"own"`` is the posterior's; leverages of KFAC and
            Diagonal may exceed one, and are then refused. ``"full"`` is the exact Gauss-Newton matrix. ``"last_layer"``
            is that of the last layer, which gives lower bounds and never sharpens predictions.
        link: ``"probit"`` or ``"mc"``, for the tuning of s and for predictions.
        n_samples: Number of samples for ``"mc"``.
        generator: Source of randomness.
        interpolation: The mean training loss, in nats, below which the network counts as interpolating; 0 for never.
        fallback: For networks that interpolate or have no weight decay: ``"raise"`` an error, or predict at the prior
            precision of largest ``"marginal_likelihood"``, with ``s = T = 1``.
        refit: Instead of the fallback, a function that trains a network on 80 % of the training data, given as a list
            of batches, and returns it. ``T ≥ 1`` is fitted to the other 20 %; predictions have no covariance.
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
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
        >>> for _ in range(100):
        ...     optimizer.zero_grad()
        ...     nn.functional.cross_entropy(model(x), y).backward()
        ...     optimizer.step()
        >>> calibrated = lp.calibrate(lp.Full(model, "classification").fit([(x, y)]), weight_decay=0.1)
        >>> calibrated.report.rule, calibrated.temperature < 1  # so much weight decay is more than the data ask for
        ('temperature', True)
    """
    known = check_training_prior(training_prior_precision, weight_decay)
    _check(posterior, link, fallback, interpolation)
    again = posterior.training_data.again(data, "Calibration by leave-one-out passes over the training data.")
    training_nll, seen = _training_loss(posterior, again, progress)
    own = copy.copy(posterior)  # shares the curvature and the network
    if not known or training_nll < interpolation:
        if refit is not None:
            return _refitted(own, again, refit, training_nll, link, generator, kappa)
        if fallback == "marginal_likelihood":
            own.fit_prior_precision()
            nan = math.nan
            report = CalibrationReport("marginal_likelihood", nan, training_nll, nan, nan, nan, kappa, True)
            return CalibratedPosterior(own, temperature=1.0, covariance_scale=1.0, link=link, report=report)
        raise _refusal(known, training_nll, interpolation)
    if training_prior_precision is None:
        assert weight_decay is not None
        model = posterior.laplace_model()
        training_prior_precision = precision_of_weight_decay(weight_decay, seen, model, posterior.temperature)
    own.prior_precision = as_hyperparameter(training_prior_precision)
    left = own.leave_one_out(again, kappa=kappa, leverages=leverages, progress=progress)
    observations = left.likelihood.rows(left.mean.double(), left.targets)
    temperature, loss, inside = _best_temperature(left.likelihood, observations, TEMPERATURES)
    as_it_is, scale, applied = float(left.nll(link="probit", scale=0.0)), 0.0, 1.0
    rule: Literal["temperature", "covariance", "network"] = "covariance"
    if temperature >= 1:
        scale, loss = _best_scale(left, link, n_samples, generator)
    elif leverages == "last_layer":
        rule, loss = "network", as_it_is
    else:
        rule, applied = "temperature", temperature
    report = CalibrationReport(
        rule=rule,
        fitted_temperature=temperature,
        training_nll=training_nll,
        leave_one_out_nll=as_it_is,
        calibrated_nll=loss,
        largest_leverage=float(left.leverages.max()),
        kappa=float(kappa),
        converged=inside,
    )
    return CalibratedPosterior(own, temperature=applied, covariance_scale=scale, link=link, report=report)


def _check(posterior: Any, link: str, fallback: str, interpolation: Any) -> None:
    if not isinstance(posterior, GaussianPosterior):
        raise ConfigurationError(
            "Only Gaussian posteriors are calibrated.",
            expected="a fitted lp.Full, lp.KFAC, …",
            got=type(posterior).__name__,
        )
    posterior.require_fit()
    if not posterior.likelihood.is_classifier:
        raise UnsupportedError(
            "Only classifiers are calibrated: other outputs have no temperature.",
            expected='likelihood="classification" or "binary"',
            got=repr(posterior.likelihood),
            fix='Use fit_prior_precision(method="leave_one_out"), which tunes precision and noise.',
        )
    check_name(link, ("probit", "mc"), "link")
    check_name(fallback, ("raise", "marginal_likelihood"), "fallback")
    number = isinstance(interpolation, (int, float)) and not isinstance(interpolation, bool)
    if not (number and 0 <= interpolation < math.inf):
        raise ConfigurationError(
            "interpolation must be a non-negative number.", expected="interpolation >= 0", got=repr(interpolation)
        )


def _refusal(known: bool, training_nll: float, threshold: float) -> Exception:
    fix = (
        'Pass fallback="marginal_likelihood" to predict with the marginal likelihood\'s prior precision, or refit= to '
        "have a temperature fitted to a fold that a second training run did without."
    )
    if not known:
        return unknown_training_prior(fix)
    return UnsupportedError(
        "The network fits its training data all but perfectly; leaving one of them out then changes nothing.",
        expected=f"a mean training loss of at least {threshold:.3g} nats",
        got=f"{training_nll:.3g}",
        fix=fix,
    )


@full_precision
def _outputs(posterior: Posterior, x: Any) -> Tensor:
    """The network's outputs ``[B, *, C]``, in at least float32."""
    posterior.require_fit()
    outputs = posterior.network.forward(posterior.network.receive(x))
    require_outputs(outputs.shape, posterior.n_outputs, x)
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


@full_precision
def _training_loss(posterior: GaussianPosterior, data: Iterable[Any], progress: bool) -> tuple[float, FittedData]:
    """The network's mean loss on the data of the fit, and what they count."""
    model = posterior.laplace_model()
    seen = survey(model, posterior.network, data, posterior.n_data, progress=progress, description="training loss")
    if not seen.n_rows:
        raise DataError("All targets are ignored.", expected="some that count", got="none")
    return -float(model.log_likelihood()) / seen.n_rows, seen


def _best_temperature(
    likelihood: Likelihood, observations: tuple[Tensor, Tensor, Tensor], limits: tuple[float, float]
) -> tuple[float, float, bool]:
    """The temperature of least mean loss, that loss, and whether it lies inside the limits; T = 1 always does.

    The observations are flattened outputs, their targets and weights.
    """
    flat, targets, weight = observations

    def loss(logarithm: float) -> float:
        densities = checked_log_density(likelihood, flat / math.exp(logarithm), targets)
        return -float((densities * weight).sum() / weight.sum())

    low, high = map(math.log, limits)  # the loss is convex in 1/T
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    best = min((low, float(found.x), high), key=loss)
    inside = (limits[0] == 1 or low + 1e-4 < best) and best < high - 1e-4
    if not inside:
        warnings.warn(
            f"The temperature ended at {math.exp(best):.3g}, the end of the range that is searched.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return math.exp(best), loss(best), inside


def _best_scale(
    left: LeaveOneOutPredictions, link: str, n_samples: int, generator: torch.Generator | None
) -> tuple[float, float]:
    """The scale in [0, 1] of least leave-one-out loss, and that loss, with common random numbers."""
    seed = 0
    if link == "mc":
        source = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=source))

    def loss(scale: float) -> float:
        common = torch.Generator(device=left.mean.device).manual_seed(seed)
        return float(left.nll(link=link, scale=scale, n_samples=n_samples, generator=common))

    grid = [number / 10 for number in range(11)]
    best = min(grid, key=loss)
    bounds = max(best - 0.1, 0.0), min(best + 0.1, 1.0)
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    best = min((best, float(found.x)), key=loss)
    return best, loss(best)


def _refitted(
    posterior: GaussianPosterior,
    data: Iterable[Any],
    refit: Refit,
    training_nll: float,
    link: str,
    generator: torch.Generator | None,
    kappa: float,
) -> CalibratedPosterior:
    """Calibrate by a temperature that a second training run's held-out fold determines."""
    kept, fold = _fold(posterior, data, generator)
    likelihood = posterior.likelihood
    network = Network(refit(kept), "all", likelihood.arrange)
    each = [likelihood.rows(network.forward(inputs).double(), target) for inputs, target in fold]
    used = [weight > 0 for _, _, weight in each]
    flat, targets, weight = (
        torch.cat([one[use] for one, use in zip(column, used, strict=True)]) for column in zip(*each, strict=True)
    )
    temperature, loss, inside = _best_temperature(likelihood, (flat, targets, weight), (1.0, 1e3))
    report = CalibrationReport("refit", temperature, training_nll, math.nan, loss, math.nan, kappa, inside)
    return CalibratedPosterior(posterior, temperature=temperature, covariance_scale=0.0, link=link, report=report)


def _fold(
    posterior: GaussianPosterior, data: Iterable[Any], generator: torch.Generator | None
) -> tuple[list[tuple[Any, Tensor]], list[tuple[Any, Tensor]]]:
    """The training data in two random parts, batch by batch: to train on, and held out."""
    source = "cpu" if generator is None else generator.device
    order = torch.randperm(posterior.n_data, generator=generator, device=source).cpu()
    held_out = torch.zeros(posterior.n_data, dtype=torch.bool)
    held_out[order[: max(1, round(HELD_OUT * posterior.n_data))]] = True
    kept: list[tuple[Any, Tensor]] = []
    fold: list[tuple[Any, Tensor]] = []
    start = 0
    for batch in iterate(data, device=posterior.network.device, description="folds"):
        size = len(batch.target)
        if not can_be_cut(batch.inputs, size):
            raise DataError(
                "The training data cannot be split into examples.",
                expected="inputs whose tensors all have the examples along their first axis",
                got="other inputs",
                fix='Pass fallback="marginal_likelihood".',
            )
        own = held_out[start : start + size]
        start += size
        for part, chosen in ((kept, ~own), (fold, own)):
            number = chosen.nonzero().flatten().tolist()
            if number:
                part.append((cut(batch.inputs, number), batch.target[number]))
    if start != posterior.n_data:
        raise DataError("Other data than were fitted to.", expected=f"{posterior.n_data} examples", got=f"{start}")
    return kept, fold
