"""What Gaussian posteriors' leave-one-out methods do; see :mod:`laplace_plus.leave_one_out.predictions`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.leave_one_out import LeaveOneOut, LeaveOneOutTuning, tune_leave_one_out
from laplace_plus.leave_one_out.covariances import Unit
from laplace_plus.leave_one_out.predictions import Leverages, checked_factor, leave_one_out
from laplace_plus.posteriors.tuning_options import check_options
from laplace_plus.priors import Groups, as_hyperparameter

if TYPE_CHECKING:
    from laplace_plus.posteriors.gaussian import GaussianPosterior

_WHY = "Leave-one-out passes over the training data."


def left_out(
    posterior: GaussianPosterior,
    data: Iterable[Any] | None,
    *,
    prior_precision: float | Tensor | None,
    noise_std: float | Tensor | None,
    kappa: float,
    leverages: Leverages,
    unit: Unit,
    progress: bool,
) -> LeaveOneOut:
    """As :meth:`GaussianPosterior.leave_one_out` says."""
    model = posterior.laplace_model()
    _require_network_mean(posterior)
    own = posterior.prior_precision.detach()
    training = own if prior_precision is None else as_hyperparameter(prior_precision).detach()
    return leave_one_out(
        model,
        posterior.network,
        posterior.training_data.again(data, _WHY),
        n_data=posterior.n_data,
        training_precision=checked_factor(kappa) * training,
        precision=own,
        training_noise_std=noise_std,
        temperature=posterior.temperature.detach(),
        leverages=leverages,
        unit=unit,
        progress=progress,
    )


def tuned_by_leaving_out(
    posterior: GaussianPosterior,
    structure: str | Groups,
    *,
    evidence: str,
    scaling: str | None,
    predictive_mean: str,
    data: Iterable[Any] | None,
    tune_noise: bool | None,
    progress: bool,
    **options: Any,
) -> LeaveOneOutTuning:
    """The tuning of :meth:`GaussianPosterior.fit_prior_precision`; changes nothing."""
    model = posterior.laplace_model()
    _require_network_mean(posterior)
    if (evidence, scaling, predictive_mean) != ("laplace", None, "network"):
        raise ConfigurationError(
            "Tuning by leave-one-out has no evidence, and predicts around the network's outputs.",
            expected='evidence="laplace", scaling=None and predictive_mean="network"',
            got=f"evidence={evidence!r}, scaling={scaling!r}, predictive_mean={predictive_mean!r}",
        )
    common: dict[str, Any] = {
        "n_data": posterior.n_data,
        "initial": posterior.prior_precision.detach(),
        "temperature": posterior.temperature.detach(),
        "structure": structure,
        "tune_noise": tune_noise,
        "progress": progress,
    }
    check_options(options, tune_leave_one_out, supplied=common)
    before = getattr(posterior, "tuning", None)
    if isinstance(before, LeaveOneOutTuning) and before.prior_precision is posterior.prior_precision:
        # What was tuned since is not the precision of training.
        if options.get("training_prior_precision") is None and options.get("weight_decay") is None:
            options["training_prior_precision"] = before.training_prior_precision
        options.setdefault("training_noise_std", before.training_noise_std)
    return tune_leave_one_out(
        model,
        posterior.network,
        posterior.training_data.again(data, _WHY),
        **common,
        **options,
    )


def _require_network_mean(posterior: GaussianPosterior) -> None:
    if posterior.predictive_mean != "network":
        raise UnsupportedError(
            "Leave-one-out displaces the network's own outputs.",
            expected="a posterior that predicts around them",
            got="predictions around the tangent model's optimum",
            fix='Set predictive_mean = "network".',
        )
