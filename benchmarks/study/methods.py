"""The registry of methods: each turns a trained network into predictions, and says how it was tuned.

A method is a function of a :class:`Task` and of the options that its row of the configuration gives. It is tuned by
what it offers itself, on the training data, or on the validation part of the split; no method sees the test part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import laplace_plus as lp
from benchmarks.study.evaluation import n_correct, nll
from benchmarks.study.scored import Predict
from benchmarks.study.sets import Batches, DataSet
from benchmarks.study.training import Trained, restored
from laplace_plus.errors import ConfigurationError, LaplacePlusError, SamplingError
from laplace_plus.likelihoods import Likelihood

GRID = tuple(10.0**k for k in range(-2, 6))
"""Multiples of a prior precision that are tried on validation data."""


@dataclass(frozen=True)
class Task:
    """What a method starts from.

    Attributes:
        data: A split of a set.
        trained: The networks trained on it.
        network: The network's section of the configuration.
        weight_decay: Of training.
    """

    data: DataSet
    trained: Trained
    network: dict[str, Any]
    weight_decay: float

    @cached_property
    def model(self) -> nn.Sequential:
        """The MAP network."""
        return restored(self.network, self.data, self.trained.last[0])

    def member(self, number: int, *, early: bool) -> nn.Sequential:
        """Another network, at its end or where its validation loss was least."""
        return restored(self.network, self.data, (self.trained.early if early else self.trained.last)[number])

    @property
    def likelihood(self) -> Likelihood:
        """Classes, or numbers with the noise of training."""
        return lp.Categorical() if self.data.classification else lp.Gaussian(float(self.trained.noise[0]))

    @property
    def train(self) -> Batches:
        """Batches to fit to, in a fixed order."""
        return self.data.loader("train", 250)

    @property
    def validation(self) -> Batches:
        """Batches to tune on."""
        return self.data.loader("validation")

    @property
    def training_precision(self) -> float:
        """The prior precision under which training's last weights are a maximum of the posterior."""
        return max(self.weight_decay * len(self.data.train[0]), 1e-3)

    @staticmethod
    def generator() -> torch.Generator:
        """The same random numbers for every method."""
        return torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Fitted:
    """A method that is ready.

    Attributes:
        predict: From inputs to predictions.
        tuning: What was chosen, by what.
    """

    predict: Predict
    tuning: dict[str, Any] = field(default_factory=dict)


Method = Callable[..., Fitted]
METHODS: dict[str, Method] = {}


def method(function: Method) -> Method:
    """Register a method under its function's name."""
    METHODS[function.__name__] = function
    return function


def run(task: Task, options: dict[str, Any]) -> Fitted:
    """What a row of the configuration asks for.

    Raises:
        ConfigurationError: An unknown method.
    """
    name = options.get("method")
    if name not in METHODS:
        raise ConfigurationError("Unknown method.", expected=", ".join(sorted(METHODS)), got=repr(name))
    return METHODS[name](task, **{key: value for key, value in options.items() if key not in ("method", "only")})


def predictor(posterior: Any, **options: Any) -> Predict:
    """A posterior's predictions, the same random numbers for each batch."""

    def predict(x: Any) -> lp.Prediction:
        return posterior.predictive(x, generator=Task.generator(), **options)

    return predict


def least(
    task: Task,
    candidates: Iterable[float],
    set_to: Callable[[float], Predict],
    *,
    name: str,
    keep_accuracy: bool = False,
) -> tuple[float, dict[str, Any]]:
    """The candidate of least validation NLL, and what all of them gave.

    A candidate that fails (its samples diverge, say) counts as infinitely bad. With ``keep_accuracy`` those come first
    that predict as many validation data correctly as the network itself does, or, if none does, lack the fewest.
    """
    losses: dict[float, float] = {}
    lacking: dict[float, int] = {}
    needed = 0
    if keep_accuracy and task.data.classification:
        with torch.no_grad():
            needed = sum(int((task.model(x).argmax(-1) == y).sum()) for x, y in task.validation)
    for value in candidates:
        try:
            predict = set_to(value)
            losses[value] = nll(predict, task.validation)
            lacking[value] = max(0, needed - n_correct(predict, task.validation)) if needed else 0
        except (LaplacePlusError, ArithmeticError):
            losses[value] = float("inf")
        if losses[value] != losses[value]:
            losses[value] = float("inf")
    working = [value for value in losses if losses[value] < float("inf")] or list(losses)
    best = min(working, key=lambda value: (lacking.get(value, 0), losses[value]))
    tried = {f"{value:.4g}": round(loss, 5) if loss < float("inf") else "failed" for value, loss in losses.items()}
    found = {"by": "validation", name: best, "tried": tried}
    less = {f"{value:.4g}": count for value, count in lacking.items() if count}
    return best, found | ({"fewer_correct": less} if keep_accuracy else {})


@method
def best_of(task: Task, rows: dict[str, dict[str, Any] | None]) -> Fitted:
    """Other rows of the configuration, and of them the one of least validation NLL; what it costs is the sum of all.

    Rows that a set leaves out (None) are not tried. One that fails (its samples diverge, say) is left out, unless all
    do; what is configured wrongly is not.
    """
    losses: dict[str, float] = {}
    found: dict[str, Fitted] = {}
    wanted = {label: options for label, options in rows.items() if options is not None}
    for label, options in wanted.items():
        try:
            fitted = run(task, options)
            loss = nll(fitted.predict, task.validation)
        except ConfigurationError:
            raise
        except (LaplacePlusError, ArithmeticError):
            continue
        if loss == loss:
            losses[label], found[label] = loss, fitted
    if not losses:
        raise SamplingError("No method worked.", expected=" or ".join(wanted), got="none", fix="Run each by itself.")
    best = min(losses, key=losses.__getitem__)
    tried = {label: round(loss, 5) for label, loss in losses.items()}
    return Fitted(found[best].predict, {"by": "validation", "chosen": best, "tried": tried})


def precision_of(posterior: Any) -> dict[str, Any]:
    """The hyperparameters that a posterior ended with."""
    found: dict[str, Any] = {}
    if posterior.prior_precision.numel() == 1:
        found["prior_precision"] = float(posterior.prior_precision)
    if posterior.noise_std is not None:
        found["noise_std"] = float(posterior.noise_std)
    return found


def tune(posterior: Any, task: Task, by: str, **options: Any) -> dict[str, Any]:
    """Tune a Gaussian posterior by the default, the marginal likelihood, validation, leaving one out, or not at all.

    Raises:
        ConfigurationError: Unknown ways.
    """
    if by in ("auto", "marginal_likelihood", "mackay"):
        posterior.fit_prior_precision(by, **options)
    elif by == "validation":
        posterior.fit_prior_precision("validation", data=task.validation, **options)
    elif by == "leave_one_out":
        known = task.training_precision if task.weight_decay else None
        posterior.fit_prior_precision("leave_one_out", training_prior_precision=known, **options)
    elif by == "training":
        posterior.prior_precision = task.training_precision
    else:
        raise ConfigurationError(
            "Unknown way of tuning.",
            expected="auto, marginal_likelihood, mackay, validation, leave_one_out or training",
            got=repr(by),
        )
    why = {"why": posterior.tuning.why} if by == "auto" else {}
    return {"by": by, **why, **precision_of(posterior)}


# -- Laplace ----------------------------------------------------------------------------------------------------------


@method
def laplace(
    task: Task,
    posterior: str = "Full",
    tuned_by: str = "marginal_likelihood",
    predict: dict[str, Any] | None = None,
    tuning: dict[str, Any] | None = None,
    start: str | None = None,
    **options: Any,
) -> Fitted:
    """A Gaussian posterior by its name, tuned, with linearised or sampled predictions.

    With ``start="training"`` it is fitted at the precision of training's weight decay, near the one it is tuned to.
    """
    if start == "training":
        options["prior_precision"] = task.training_precision
    elif start is not None:
        raise ConfigurationError("Unknown start.", expected="training, or none", got=repr(start))
    fitted: Any = lp.get_posterior(posterior)(task.model, task.likelihood, **options)
    fitted.fit(task.train, generator=task.generator())
    if isinstance(task.likelihood, lp.Categorical):
        predict = {"link": "probit", **(predict or {})}  # of rows that name no other
    return Fitted(predictor(fitted, **(predict or {})), tune(fitted, task, tuned_by, **(tuning or {})))


@method
def laplace_sampled(
    task: Task, posterior: str = "Full", tuned_by: str = "marginal_likelihood", n_samples: int = 50, **options: Any
) -> Fitted:
    """Networks sampled from a Gaussian posterior, without linearisation.

    With ``tuned_by="validation"`` the precision is the best multiple of the marginal likelihood's *for such samples*.
    """
    fitted: Any = lp.get_posterior(posterior)(task.model, task.likelihood, **options)
    fitted.fit(task.train, generator=task.generator())
    predict = predictor(fitted, method="sampled", n_samples=n_samples)
    found = tune(fitted, task, "marginal_likelihood" if tuned_by == "validation" else tuned_by)
    if tuned_by == "validation":
        found = _scaled(fitted, task, predict)
    return Fitted(predict, found)


def _scaled(
    posterior: Any, task: Task, predict: Predict, *, of: str = "marginal_likelihood", keep_accuracy: bool = False
) -> dict[str, Any]:
    """Set the multiple of the present precision, which is ``of`` something, that is best on validation data."""
    base = posterior.prior_precision.clone()

    def at(factor: float) -> Predict:
        posterior.prior_precision = base * factor
        return predict

    best, found = least(task, GRID, at, name=f"times_{of}", keep_accuracy=keep_accuracy)
    at(best)
    return found | precision_of(posterior)


@method
def subnetwork(
    task: Task, fraction: float = 0.2, most: int = 2000, snapshots: int | None = None, **options: Any
) -> Fitted:
    """A full posterior over the weights of largest variance: a diagonal posterior's, or that of snapshots of SGD."""
    total = sum(parameter.numel() for parameter in task.model.parameters())
    size = min(most, max(1, round(fraction * total)))
    variances = "laplace" if snapshots is None else lp.DiagonalSWAG(n_snapshots=snapshots)
    fitted = lp.Subnetwork(task.model, task.likelihood, lp.LargestVariance(size, variances))
    fitted.fit(task.train, generator=task.generator())
    return Fitted(predictor(fitted, **options), {"weights": size, **tune(fitted, task, "marginal_likelihood")})


@method
def leave_one_out_recipe(task: Task, posterior: str = "Full", link: str = "probit", **options: Any) -> Fitted:
    """``lp.calibrate``: a temperature or a scale of the covariance from leave-one-out predictions, for classes."""
    fitted: Any = lp.get_posterior(posterior)(task.model, task.likelihood).fit(task.train)
    found = lp.calibrate(
        fitted,
        weight_decay=task.weight_decay or None,
        link=link,
        fallback="marginal_likelihood",
        generator=task.generator(),
        **options,
    )
    report = found.report
    chosen = {"temperature": found.temperature, "covariance_scale": found.covariance_scale}
    said = {"by": "leave_one_out", "rule": report.rule, "largest_leverage": report.largest_leverage, **chosen}
    return Fitted(predictor(found), said)


# -- kernels of the training Jacobian ---------------------------------------------------------------------------------


@method
def null_space(
    task: Task,
    tuned_by: str = "validation",
    predict: dict[str, Any] | None = None,
    keep_accuracy: bool = False,
    **options: Any,
) -> Fitted:
    """The projected posterior; its precision by its optimum, a line search on the training loss, or validation.

    With ``keep_accuracy`` the best multiple of the optimum on validation data, as :func:`least` has it.
    """
    fitted = lp.NullSpace(task.model, task.likelihood, **options)
    fitted.fit(task.train, generator=task.generator())
    if keep_accuracy:
        fitted.fit_prior_precision("optimal", generator=task.generator())
        ready = predictor(fitted, **(predict or {}))
        found = _scaled(fitted, task, ready, of="optimal", keep_accuracy=True)
        return Fitted(ready, {"rank": float(fitted.report.rank.value), **found})
    data = {"data": task.validation} if tuned_by == "validation" else {}
    fitted.fit_prior_precision(tuned_by, generator=task.generator(), **data)  # type: ignore[arg-type]
    rank = float(fitted.report.rank.value)
    return Fitted(predictor(fitted, **(predict or {})), {"by": tuned_by, "rank": rank, **precision_of(fitted)})


@method
def viking(
    task: Task, mode: Any = "post_hoc", batch_size: int = 250, predict: dict[str, Any] | None = None, **options: Any
) -> Fitted:
    """The variational kernel/image family; its scales maximise its own bound."""
    fitted = lp.VIKING(task.model, task.likelihood, mode=mode, prior_precision=task.training_precision, **options)
    fitted.fit(task.data.loader("train", batch_size), generator=task.generator())
    found = {"by": "ELBO", "image_std": float(fitted.image_std), **precision_of(fitted)}
    return Fitted(predictor(fitted, **(predict or {})), found)


@method
def variational_last_layer(task: Task, predict: dict[str, Any] | None = None, **options: Any) -> Fitted:
    """A last layer by variational inference, tuned by its own bound, which is the evidence in regression."""
    fitted = lp.VariationalLastLayer(task.model, task.likelihood, **options)
    fitted.fit(task.train, generator=task.generator()).fit_prior_precision()
    if isinstance(task.likelihood, lp.Categorical):
        predict = {"link": "probit", **(predict or {})}
    return Fitted(predictor(fitted, **(predict or {})), {"by": "ELBO", **precision_of(fitted)})


# -- along the loss surface -------------------------------------------------------------------------------------------


@method
def riemannian(
    task: Task,
    manifold: dict[str, Any] | str = "exponential",
    tangent: str = "Full",
    tuned_by: str = "marginal_likelihood",
    n_samples: int = 30,
    n_validation_samples: int = 10,
    grid: Iterable[float] = GRID,
    subset: int | None = None,
    keep_accuracy: bool = False,
    surface: str = "tuned",
) -> Fitted:
    """Samples by the exponential map or by diffusion.

    The tangent is tuned by the marginal likelihood; with ``tuned_by="validation"``, the best multiple of its precision
    on validation data is taken, with a few samples for each, and all samples are drawn there; with ``keep_accuracy``,
    among those that predict no fewer validation data correctly than the network. With ``surface="training"`` geodesics
    follow the loss of training, with its weight decay, and not that of the tangent's precision. ``subset`` takes that
    many training examples, which count for all of them (a temperature), for the tangent and the surface.
    """
    train = task.train
    if surface == "training":
        manifold = {"name": manifold} if isinstance(manifold, str) else manifold
        manifold = {**manifold, "training_prior_precision": task.training_precision}
    options: dict[str, Any] = {}
    if subset is not None and subset < len(task.data.train[0]):
        train = [(x[:subset], y[:subset]) for x, y in task.data.loader("train", subset)[:1]]
        options = {"temperature": subset / len(task.data.train[0])}
    fitted = lp.Riemannian(
        task.model, task.likelihood, tangent=tangent, method=manifold, n_samples=n_samples, **options
    ).fit(train, generator=task.generator())
    found = tune(fitted, task, "training" if tuned_by == "training" else "marginal_likelihood")
    predict = predictor(fitted, method="sampled", n_samples=n_samples)
    if tuned_by == "validation":
        base = fitted.prior_precision.clone()

        def at(factor: float) -> Predict:
            fitted.prior_precision = base * factor
            fitted.draw(n_validation_samples, generator=task.generator())
            return predict

        best, found = least(task, grid, at, name="times_marginal_likelihood", keep_accuracy=keep_accuracy)
        fitted.prior_precision = base * best
        found |= precision_of(fitted)
    fitted.draw(n_samples, generator=task.generator())
    report = fitted.report
    said = {"failed_samples": report.n_failed, "evaluations": int(report.n_evaluations.sum())}
    return Fitted(predict, found | said)


@method
def metric_bnn(
    task: Task, tuned_by: str | None = None, predict: dict[str, Any] | None = None, **options: Any
) -> Fitted:
    """Drifting particles and a latent model of their paths; how far samples reach by validation, or as far as they go.

    Raises:
        ConfigurationError: An unknown way of tuning.
    """
    if tuned_by not in (None, "validation"):
        raise ConfigurationError("Unknown way of tuning.", expected="validation or none", got=repr(tuned_by))
    fitted = lp.MetricBNN(task.model, task.likelihood, prior_precision=task.training_precision, **options)
    fitted.fit(task.train, generator=task.generator())
    if tuned_by == "validation":
        fitted.fit_prior_precision(data=task.validation, generator=task.generator())
    found = {"by": tuned_by or "nothing", "extent": fitted.extent, **precision_of(fitted)}
    return Fitted(predictor(fitted, **(predict or {})), found)


def stacked(networks: list[nn.Module], x: Tensor) -> Tensor:
    """Outputs of several networks, ``[M, B, C]``."""
    return torch.stack([network(x) for network in networks])
