"""Leave-one-out predictions of a Gaussian posterior; see :mod:`laplace_plus.tuning.deletions`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import DataError, UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.deletions import Deletions, Leverages, Unit, leave_out


@dataclass(frozen=True, eq=False)
class LeaveOneOutPredictions:
    """What the posterior says about each datum without having seen it.

    A deletion unit is an example, or with ``unit="position"`` one position that is not ignored. All tensors are in
    the order of the data and in float64.

    Attributes:
        mean: ``f₋ₙ``, ``[N, *, C]``; with positions as deletion units ``[R, C]``.
        covariance: ``V₋ₙ``, ``[N, *, C, C]``, at the posterior's own prior; the posterior's ``V`` itself where the
            leverages are those of another curvature.
        outputs: ``f``, the network's outputs, shaped like ``mean``.
        targets: As the loader gave them.
        leverages: Largest eigenvalue of each unit's ``V Λ`` at the displacement's prior, ``[N]``, all below 1.
        traces: Trace of each unit's ``V Λ``, ``[N]``; their sum is the effective number of parameters.
        likelihood: The distribution of targets given the outputs.
        route: The curvature of leverages and displacements: ``"own"`` or ``"full"``; or ``"first_order"``, ``f + V g``
            with leverages of zero.
        unit: ``"example"`` or ``"position"``.
    """

    mean: Tensor
    covariance: Tensor
    outputs: Tensor
    targets: Tensor
    leverages: Tensor
    traces: Tensor
    likelihood: Likelihood
    route: str
    unit: str

    def __repr__(self) -> str:
        largest = float(self.leverages.max())
        return f"LeaveOneOutPredictions({len(self.mean)} {self.unit}s, leverages up to {largest:.3g})"

    @property
    def displacement(self) -> Tensor:
        """``f₋ₙ − f``, shaped like ``mean``."""
        return self.mean - self.outputs

    def predictive(
        self,
        *,
        link: str | None = None,
        scale: float = 1.0,
        temperature: float = 1.0,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The leave-one-out predictive, of the Gaussian ``N(f₋ₙ/T, s V₋ₙ/T²)`` over each datum's outputs.

        Args:
            link: As for ``posterior.predictive``.
            scale: ``s ≥ 0``.
            temperature: ``T > 0``, by which outputs are divided.
            n_samples: Number of samples where any are drawn.
            generator: Source of randomness.

        Raises:
            ConfigurationError: An unknown link, a negative scale or a temperature that is not positive.
        """
        checks.number("scale", scale, least=0.0)
        checks.positive("temperature", temperature)
        mean, covariance = self.mean / temperature, self.covariance * (scale / temperature**2)
        return from_functional(self.likelihood, mean, covariance, link=link, n_samples=n_samples, generator=generator)

    def log_prob(self, **options: Any) -> Tensor:
        """``log p(yₙ | D₋ₙ)`` in nats, ``[N, *]``, 0 for ignored targets; options as for :meth:`predictive`."""
        return self.predictive(**options).log_prob(self.targets)

    def nll(self, **options: Any) -> Tensor:
        """Minus the mean of :meth:`log_prob` over targets that are not ignored, 0-d float64, in nats."""
        return -self.log_prob(**options).sum().double() / self.n_rows

    @property
    def n_rows(self) -> float:
        """Number of flattened observations (examples, or positions) whose targets are not ignored."""
        return float(self.likelihood.rows(self.outputs, self.targets)[2].sum())

    def training_nll(self) -> Tensor:
        """The network's own mean loss ``−log p(yₙ|f)`` over targets that are not ignored, 0-d float64, in nats."""
        flat, targets, weight = self.likelihood.rows(self.outputs, self.targets)
        return -(self.likelihood.log_density(flat, targets) * weight).sum() / weight.sum()


def leave_one_out(
    posterior: Tunable,
    data: Iterable[Any] | None = None,
    *,
    prior_precision: float | Tensor | None = None,
    noise_std: float | Tensor | None = None,
    kappa: float = 1.0,
    leverages: Leverages = "own",
    unit: Unit = "example",
    progress: bool = False,
) -> LeaveOneOutPredictions:
    """What a posterior says about each datum without having seen it; see :mod:`laplace_plus.tuning`.

    Exact, in mean and covariance, for linear models with Gaussian noise; otherwise one Newton step. The mean depends on
    the prior of training, the covariance on the posterior's own. Takes one pass over the data, and one more for the
    leverages of another curvature.

    Args:
        posterior: A fitted Gaussian posterior that :class:`~laplace_plus.LeaveOneOut` can tune.
        data: The data that the posterior was fitted to; by default the loaders that its ``fit`` saw.
        prior_precision: That of training, for the displacement; by default the posterior's.
        noise_std: Gaussian noise that belongs to it; by default the posterior's.
        kappa: Factor on it; 1 is the formula.
        leverages: ``"own"``, of this posterior's curvature; ``"full"``, of the exact Gauss-Newton matrix ``[P, P]``; or
            none, ``"first_order"``, where that is too large. The latter two have this posterior's ``V``.
        unit: ``"example"``, whose outputs must have one shape, or ``"position"`` to leave out single tokens or pixels.
        progress: Whether to show a progress bar.

    Raises:
        NotFittedError: Before ``fit``.
        UnsupportedError: A class without leave-one-out predictions.
        ConfigurationError: Unknown choices.
        DataError: Other data than were fitted to, or none.
        NotPositiveDefiniteError: Leverages at or above one, which a curvature that is not the exact one may have.
    """
    require_leave_one_out(posterior)
    likelihood = posterior.laplace_model().likelihood
    checks.positive("kappa", kappa)
    precision = posterior.prior_precision.detach()
    training = kappa * (precision if prior_precision is None else as_hyperparameter(prior_precision).detach())
    data = posterior.training_data.again(data, "Leave-one-out passes over the training data.")
    parts, largest = [], []
    with exact_arithmetic(posterior.network):
        deletions = Deletions(posterior, data, training, noise_std, leverages, unit)
        for batch in deletions.batches([(precision, None)], progress=progress):
            (covariance,) = batch.covariances
            top = batch.leverages.amax(-1)
            largest.append(top)
            if leverages == "own":
                own, _, covariance = leave_out(covariance, batch.root, batch.gradient)
                largest[-1] = torch.maximum(top, own[batch.kept].amax(-1))
            covariance = batch.by_position(covariance) * posterior.covariance_scale
            parts.append((batch.mean, covariance, batch.outputs, batch.targets, top, batch.leverages.sum(-1)))
    deletions.check(largest)
    shapes = sorted({tuple(part[2].shape[1:]) for part in parts})
    if len(shapes) > 1:
        what, fix = "The batches' outputs are of different shapes.", 'Pass unit="position": one position at a time.'
        raise DataError(what, expected="as many positions in every batch", got=str(shapes), fix=fix)
    mean, covariance, outputs, targets, top, traces = (torch.cat(own) for own in zip(*parts, strict=True))
    return LeaveOneOutPredictions(mean, covariance, outputs, targets, top, traces, likelihood, leverages, unit)


def require_leave_one_out(posterior: Any) -> None:
    """Raise :class:`UnsupportedError` where leave-one-out has no meaning for a posterior."""
    if "leave_one_out" not in posterior.tuners:
        what, fix = f"{type(posterior).__name__} has no leave-one-out predictions.", "Compare held-out predictions."
        raise UnsupportedError(what, expected="a Gaussian posterior that lp.LeaveOneOut can tune", fix=fix)
    if posterior.predictive_mean != "network":
        what = "Leave-one-out displaces the network's own outputs."
        raise UnsupportedError(what, got=posterior.predictive_mean, fix='Set predictive_mean = "network".')
