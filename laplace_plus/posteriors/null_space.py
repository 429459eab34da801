"""The projected Laplace posterior (Miani, Roy and Hauberg, 2025, *Bayes without underfitting*).

``N(θ̂, α⁻¹ P)`` with P the projector onto the null space of the training data's Jacobian: there the linearised network
can move without changing a prediction on the training data. With r the rank of the Jacobian the evidence of such a
model is, up to a constant, ``½ (r log α − α ‖θ̂ − μ‖²)``, so that ``α = r / ‖θ̂ − μ‖²`` maximises it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.geometry.loss import LossLandscape
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import Estimate
from laplace_plus.posteriors.projection import NoiseState, ProjectedNoisePosterior
from laplace_plus.posteriors.state import survey
from laplace_plus.tuning import MarginalLikelihood, Tuner, TuningResult, Validation
from laplace_plus.tuning.base import require_only

WHY = "The projection passes over the data again and again."


@dataclass(frozen=True)
class LineSearch:
    """Chooses the least precision at which *sampled networks* still fit the training data; for :class:`NullSpace`.

    Sampled networks are not linear in the samples, so that their mean training loss rises as the precision falls.

    Args:
        allowance: By how much it may exceed the trained network's, in nats for each target.
        n_samples: Number of sampled networks.
        data: The training data; by default the loaders of the fit.
    """

    allowance: float = 0.01
    n_samples: int = 10
    data: Iterable[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checks.positive("allowance", self.allowance)
        checks.count("n_samples", self.n_samples)

    def tune(
        self, posterior: NullSpace, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """Bisect the logarithm of α, to a twentieth of a decade; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            DataError: Training data that are not known any more.
        """
        data, mean = posterior.training_data.again(self.data, WHY), posterior.mean
        samples, optimum = posterior.noise.null_space[: self.n_samples], posterior.optimal_precision()
        landscape = LossLandscape(posterior.network, posterior.likelihood, data, prior_precision=0.0)
        n_targets = 0.0
        for batch in posterior.batches(data):
            outputs = posterior.network.forward(batch.inputs)
            n_targets += float(posterior.likelihood.rows(outputs, batch.target)[2].sum())

        def loss(decade: float) -> float:
            moved = mean + (optimum * 10.0**decade) ** -0.5 * samples
            return float(landscape.value(moved).mean()) / n_targets

        highest = float(landscape.value(mean[None])) / n_targets + self.allowance
        low, high, count = -12.0, 12.0, 2  # decades of α around the optimum
        while high - low > 0.05:  # noqa: PLR2004
            middle, count = (low + high) / 2, count + 1
            low, high = (low, middle) if loss(middle) <= highest else (middle, high)
        precision = torch.tensor(optimum * 10.0**high, dtype=mean.dtype)
        if not (converged := -11.9 < high < 12):  # noqa: PLR2004
            text = "The loss allows all precisions that were tried, or none; take another allowance."
            warn(text, ConvergenceWarning)
        return TuningResult("line_search", precision, None, -loss(high), converged, n_evaluations=count)


class NullSpace(ProjectedNoisePosterior):
    """The Gaussian ``N(θ̂, α⁻¹ P)`` on the null space of the training Jacobian: no uncertainty where there were data.

    Choose it for overparametrised networks, where samples of other Laplace approximations underfit. The linearised
    network's predictions on the training data are exactly the trained network's, and only others get error bars. It
    does not tell how uncertain predictions are near the training data (:class:`VIKING` does). The null space must not
    be zero: there have to be fewer independent rows than parameters.

    Memory is that of ``n_samples`` vectors of the network's size and a few for the projection. Up to a thousand rows or
    weights are decomposed. Else time is that of passes over the data: one Jacobian product and one transposed product
    for each iteration, a few samples at once. The number of iterations grows with the rows' condition number: tens on
    images with ``rows="loss"``, more than thousands for many points of a curve. Samples that did not converge still
    leave predictions on the training data nearly as they are (``report.residual``), but are too large elsewhere.

    The prior precision α scales all samples alike. :meth:`fit_prior_precision` sets it to its optimum
    ``rank / ‖θ̂ − μ‖²``, by a line search on the training loss, or by held-out data. The optimum often leaves the range
    in which the linearisation holds; predictions are therefore those of the linearised network by default.

    :meth:`fit` draws normal vectors and projects them. It warns (ConvergenceWarning) of projections that did not meet
    their tolerance, and raises UnsupportedError if there are as many independent rows as parameters.

    Args:
        model, likelihood: As for :class:`Posterior`.
        rows: What must not change on the training data: ``"logit"``, all outputs; ``"ggn"``, what the curvature sees of
            them (for classes, all but a common shift); ``"loss"``, the loss of each example to first order, which takes
            one row for each example rather than C and leaves a larger null space. Examples that are fitted exactly have
            no such row; the report counts them.
        projector: ``"svd"`` (exact, for small problems), ``"lsmr"``, ``"auto"`` for the one that suits the size,
            ``"alternating"`` (the paper's sweeps), or ``lp.linalg.SVDProjection``, ``LSMRProjection`` or
            ``AlternatingProjection`` with options.
        n_samples: Number k of samples.
        parameters, prior_precision, prior_mean, temperature, backend: As for :class:`Posterior`.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.NullSpace(net, "regression", n_samples=5).fit([(x, 2 * x)])
        >>> bool(posterior.functional_posterior(x).covariance.max() < 1e-4)
        True
    """

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {
        "marginal_likelihood": MarginalLikelihood,
        "optimal": MarginalLikelihood,
        "line_search": LineSearch,
        "validation": Validation,
    }
    keeps_range = False

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> NoiseState:
        n_data, n_outputs, _ = survey(self, data, WHY)
        noise = self._fit_noise(self.network, data, draw_seed(generator), progress=progress)
        return NoiseState(self.network.vector(), n_data, n_outputs, noise)

    @property
    def null_space_dimension(self) -> Estimate:
        """``P − rank``, with the error of the rank."""
        rank = self.report.rank
        return Estimate(self.n_parameters - rank.value, rank.sem, 0, rank.converged, rank.probes)

    def optimal_precision(self) -> float:
        """``α = r / ‖θ̂ − μ‖²``, which maximises the evidence; ConfigurationError for weights at the prior mean."""
        return float(self.report.rank.value / self.squared_distance(self.mean))

    def tunables(self) -> dict[str, list[float]]:
        """What :class:`~laplace_plus.Validation` tries: half decades of α around the optimum of the evidence."""
        optimum = self.optimal_precision()
        return {"prior_precision": [optimum * 10.0 ** (step / 2) for step in range(-8, 17)]}

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What a tuner finds; :class:`~laplace_plus.MarginalLikelihood`, also called ``"optimal"``, in closed form."""
        if not isinstance(tuner, MarginalLikelihood):
            return super().run_tuner(tuner, progress=progress, generator=generator)
        require_only("NullSpace", tuner)
        alpha, rank = self.optimal_precision(), float(self.report.rank.value)
        evidence = rank * (math.log(alpha) - 1) / 2  # ½ (r log α − α ‖θ̂ − μ‖²), up to a term without α
        return TuningResult(
            tuner.name, torch.tensor(alpha, dtype=self.mean.dtype), None, evidence, self.report.rank.converged
        )

    @override
    def _deviations(self) -> Tensor:
        samples = self.noise.null_space
        return samples * self._prior_precision.to(samples).rsqrt()
