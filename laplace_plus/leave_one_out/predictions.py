"""Leave-one-out predictions of a Gaussian posterior, without fitting anything again.

With output covariance ``V = J Σ Jᵀ`` of a datum under the posterior, the Hessian ``Λ`` and the gradient ``g`` of its
negative log-likelihood by its outputs ``f``, taking the datum's own part away from the posterior precision gives

    f₋ₙ = f + (I − V Λ)⁻¹ V g,        V₋ₙ = (I − V Λ)⁻¹ V.

For linear-Gaussian models both are exact (Allen, 1974, "The relationship between variable selection and data
augmentation and a method for prediction"); otherwise ``f₋ₙ`` is one Newton step from the optimum of all the data
(Pregibon, 1981, "Logistic regression diagnostics"; Rad and Maleki, 2020, "A scalable estimate of the out-of-sample
prediction error via approximate leave-one-out cross-validation"). The eigenvalues of ``V Λ`` are the datum's leverages.
They lie below one where the posterior's curvature is the exact Gauss-Newton matrix of these data; where it is not
(Kronecker factors, diagonals), they need not, and the formula then means nothing.

Two priors enter, and are kept apart. The displacement ``f₋ₙ − f`` undoes what training did, so that it belongs to the
prior of *training* (its weight decay); the covariance ``V₋ₙ`` belongs to the posterior that is to be used. With one
precision in both places and the weights where they are, a large one would erase the displacement: predictions of data
left out would then be those of data seen in training, and would always look best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus._memory import budget, in_words
from laplace_plus.batches import iterate
from laplace_plus.errors import ConfigurationError, DataError, NotPositiveDefiniteError, UnsupportedError
from laplace_plus.evidence.fitted_data import FittedData
from laplace_plus.evidence.laplace import LaplaceModel
from laplace_plus.evidence.tuning import Tunable
from laplace_plus.leave_one_out.covariances import Covariances, FactorCovariances, Unit, split_units
from laplace_plus.leave_one_out.leverages import Displacement, last_layer_route, whole_route
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import checked_log_density
from laplace_plus.network import Network
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.priors import as_hyperparameter

Leverages = Literal["own", "full", "last_layer"]
ROUTES = ("own", "full", "last_layer")

INTERPOLATION = 0.01
"""Nats per datum below which a classifier's training loss leaves no gradients that leaving out could undo."""


@dataclass(frozen=True, eq=False)
class LeaveOneOutPredictions:
    """What the posterior says about each datum without having seen it.

    A unit is an example, or with ``unit="position"`` one of its positions, those that count in a row one after the
    other. All tensors are in the order of the data and in float64.

    Attributes:
        mean: ``f₋ₙ``, ``[N, *, C]``; positions as units ``[R, C]``.
        covariance: ``V₋ₙ``, ``[N, *, C, C]`` at the posterior's own prior; with leverages of another curvature than the
            posterior's, the posterior's ``V`` itself.
        outputs: ``f``, the network's outputs, shaped like ``mean``.
        targets: As the loader gave them.
        leverages: Largest eigenvalue of ``V Λ`` of each unit at the displacement's prior, ``[N]``, all below 1.
        traces: Sum of them, ``[N]``; over all units, the effective number of parameters.
        likelihood: How targets are distributed given the outputs.
        route: ``"own"``, ``"full"`` or ``"last_layer"``: of which curvature the leverages and displacements are.
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
        if not (scale >= 0 and math.isfinite(scale) and temperature > 0 and math.isfinite(temperature)):
            raise ConfigurationError(
                "There is no such scaling.",
                expected="scale >= 0 and temperature > 0",
                got=f"scale={scale}, temperature={temperature}",
            )
        mean, covariance = self.mean / temperature, self.covariance * (scale / temperature**2)
        return from_functional(self.likelihood, mean, covariance, link=link, n_samples=n_samples, generator=generator)

    def log_prob(self, **options: Any) -> Tensor:
        """``log p(yₙ | D₋ₙ)`` of each row in nats, ``[N, *]``, 0 for ignored ones; options as of :meth:`predictive`."""
        return self.predictive(**options).log_prob(self.targets)

    def nll(self, **options: Any) -> Tensor:
        """Minus the mean of :meth:`log_prob` over the rows that count: 0-d float64, in nats; options likewise."""
        return -self.log_prob(**options).sum().double() / self.n_rows

    @property
    def n_rows(self) -> float:
        """How many rows (examples, or positions) count: ignored targets do not."""
        return float(self.likelihood.rows(self.outputs, self.targets)[2].sum())

    def training_nll(self) -> Tensor:
        """``−log p(yₙ|f)`` of the network itself, averaged over the rows that count: 0-d float64, in nats."""
        rows, targets, weight = self.likelihood.rows(self.outputs, self.targets)
        return -(checked_log_density(self.likelihood, rows, targets) * weight).sum() / weight.sum()

    def summary(self) -> str:
        """A few lines in words."""
        top = self.leverages
        return "\n".join(
            [
                f"leave-one-out over {len(self.mean)} {self.unit}s, leverages of route {self.route!r}",
                f"leverages: mean {top.mean():.3f}, largest {top.max():.3f}, above 0.9: {int((top > 0.9).sum())}",
                f"effective parameters: {self.traces.sum():.1f}",
                f"displacement: {self.displacement.abs().mean():.3g} on average",
                f"NLL: {self.training_nll():.4f} in training, {self.nll():.4f} left out",
            ]
        )


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
    """Leave each datum out once, in one pass over batches (two more for the leverages of another curvature).

    Arguments and errors as for :meth:`laplace_plus.GaussianPosterior.leave_one_out`.
    """
    model, network, n_data = posterior.laplace_model(), posterior.network, posterior.n_data
    require_network_mean(posterior)
    precision = posterior.prior_precision.detach()
    training = precision if prior_precision is None else as_hyperparameter(prior_precision).detach()
    training = checked_factor(kappa) * training
    data = posterior.training_data.again(data, "Leave-one-out passes over the training data.")
    leaving = LeavingOut.create(
        model,
        network,
        data,
        n_data=n_data,
        precision=training,
        noise_std=noise_std,
        temperature=posterior.temperature.detach(),
        route=leverages,
        unit=unit,
    )
    outputs, targets, means, covariances = [], [], [], []
    values: list[Tensor] = []
    others: list[Tensor] = []  # at the covariance's prior
    seen, taken, limit = 0, 0, budget(network.device)
    for piece in leaving.pieces(data, [(precision, None)], progress=progress):
        seen += len(piece.network_outputs)
        taken += 8 * piece.outputs.numel() * piece.outputs.shape[-1]
        needed = taken * n_data // seen
        if needed > limit:
            raise ConfigurationError(
                "The covariances of all data do not fit into the memory budget.",
                expected=f"at most {in_words(limit)}",
                got=f"{in_words(needed)} for {n_data} examples of {piece.network_outputs[0].numel()} outputs",
                fix="Raise memory_budget.",
            )
        (covariance,) = piece.covariances
        if leverages == "own":
            left = leave_out(covariance, *piece.terms.at())
            covariance = left.covariance
            others.append(left.values)
        covariances.append(piece.each(covariance))
        outputs.append(piece.outputs)
        targets.append(piece.targets)
        means.append(piece.mean)
        values.append(piece.left.values[piece.kept])
    check_leverages(values, leverages, network.dtype)
    if others:
        check_leverages(others, leverages, network.dtype)
    try:
        mean, covariance, together, wanted = map(torch.cat, (means, covariances, outputs, targets))
    except RuntimeError as error:
        raise DataError(
            "The batches' outputs are of different shapes.",
            expected="as many positions in every batch",
            got=", ".join(sorted({str(list(part.shape[1:])) for part in outputs})),
            fix='Pass unit="position", which leaves out one position at a time.',
        ) from error
    largest = torch.cat([part.amax(-1) for part in values])
    traces = torch.cat([part.sum(-1) for part in values])
    tensors = mean, covariance, together, wanted, largest, traces
    return LeaveOneOutPredictions(*tensors, model.likelihood, leverages, unit)


@dataclass(frozen=True)
class Left:
    """What comes out for some units: eigenvalues of V Λ ``[U, r]``, ``f₋ₙ − f`` ``[U, b]`` and ``V₋ₙ [U, b, b]``."""

    values: Tensor
    shift: Tensor
    covariance: Tensor


def leave_out(covariance: Tensor, root: Tensor, gradient: Tensor) -> Left:
    """Take each unit's own part away.

    Through ``SᵀVS = Q diag(l) Qᵀ``, which has the eigenvalues of ``V Λ`` with ``Λ = S Sᵀ`` and is symmetric:
    ``V₋ₙ = V + V S Q diag(1/(1−l)) Qᵀ Sᵀ V`` and ``f₋ₙ − f = V₋ₙ g``.

    Args:
        covariance: V, ``[U, b, b]``.
        root: S, ``[U, b, r]``.
        gradient: g, ``[U, b]``.
    """
    covariance, root, gradient = covariance.double(), root.double(), gradient.double()
    reach = covariance @ root
    product = root.mT @ reach
    values, vectors = torch.linalg.eigh((product + product.mT) / 2)
    turned = reach @ vectors
    # Values of one and more are refused by whoever called; here they must only not divide by zero.
    rest = (1 - values).masked_fill(values == 1, torch.finfo(values.dtype).tiny)
    left = covariance + (turned / rest[:, None]) @ turned.mT
    return Left(values, (left @ gradient[..., None])[..., 0], left)


@dataclass(frozen=True)
class Terms:
    """Roots ``[U, b, r]`` of Hessians and gradients ``[U, b]`` at unit noise, and the noise groups of r and b."""

    root: Tensor
    gradient: Tensor
    groups: tuple[Tensor, Tensor]
    likelihood: Likelihood
    temperature: Any

    def at(self, noise_std: Any = None) -> tuple[Tensor, Tensor]:
        """Root and gradient of the tempered log-likelihood at a noise level, by default the likelihood's."""
        temperature = as_hyperparameter(self.temperature).detach().double()
        weights = (self.likelihood.curvature_weights(noise_std) / temperature).to(self.gradient)
        directions, outputs = (groups.to(self.root.device) for groups in self.groups)
        return self.root * weights.sqrt()[directions], self.gradient * weights[outputs]


@dataclass(frozen=True)
class Piece:
    """One batch: what left-out results are made of.

    Attributes:
        network_outputs: ``[B, *, C]``.
        outputs: f, ``[U', *, C]`` float64, of the units that count.
        targets: Theirs.
        kept: Which of the batch's units these are: all, or the positions that are not ignored.
        terms: Hessians and gradients.
        left: At the displacement's prior.
        covariances: V under the posterior at each point that was asked for, ``[U, b, b]``.
    """

    network_outputs: Tensor
    outputs: Tensor
    targets: Tensor
    kept: Tensor | slice
    terms: Terms
    left: Left
    covariances: tuple[Tensor, ...]

    @property
    def mean(self) -> Tensor:
        """``f₋ₙ``, shaped like ``outputs``."""
        return self.outputs + self.left.shift[self.kept].reshape(self.outputs.shape)

    def each(self, covariance: Tensor) -> Tensor:
        """Covariances of units ``[U, b, b]`` as those of every position by itself, ``[U', *, C, C]``."""
        return split_units(covariance.double()[self.kept], self.outputs)


@dataclass(frozen=True)
class LeavingOut:
    """Where ``f₋ₙ`` comes from, and passes over the data that compute it.

    Attributes:
        model: The posterior's curvature and all that the evidence is a function of.
        network: The network.
        n_data: How many examples the posterior was fitted to.
        precision: Prior precision of the displacement.
        noise_std: Noise of the displacement; None for the likelihood's.
        temperature: Divides gradients and Hessians.
        route: Of which curvature the leverages are.
        exact: Covariances under another curvature than the posterior's; None for its own.
        unit: What is left out.
    """

    model: LaplaceModel
    network: Network
    n_data: int
    precision: Any
    noise_std: Any
    temperature: Any
    route: Leverages
    exact: Covariances | None
    unit: Unit

    @classmethod
    def create(
        cls,
        model: LaplaceModel,
        network: Network,
        data: Iterable[Any],
        *,
        n_data: int,
        precision: Any,
        noise_std: Any = None,
        temperature: Any = 1.0,
        route: Leverages = "own",
        unit: Unit = "example",
    ) -> LeavingOut:
        """Check the choices and prepare the route.

        Raises:
            ConfigurationError: An unknown choice, a noise that does not fit the likelihood's, or a curvature that does
                not fit into the memory budget.
            UnsupportedError: Noise of a likelihood that has none.
        """
        check_choices(route, unit)
        if noise_std is not None:
            model.likelihood.curvature_weights(noise_std)  # refuses what is no noise
        exact = None
        if route != "own":
            prepare = whole_route if route == "full" else last_layer_route
            exact = prepare(Displacement(model, network, data, precision, temperature, noise_std, unit))
        return cls(model, network, n_data, precision, noise_std, temperature, route, exact, unit)

    def pieces(
        self, data: Iterable[Any], points: Sequence[tuple[Any, Any]] = (), *, progress: bool = False
    ) -> Iterator[Piece]:
        """Pass over the data once.

        Args:
            data: The batches.
            points: Pairs of a prior precision and a noise level, at which the posterior's covariance is wanted, too.
            progress: Whether to show a progress bar.

        Raises:
            DataError: After the last batch: other data than were fitted to.
            LabelError: Targets that do not fit.
            OutputError: Outputs that do not.
        """
        likelihood, model = self.model.likelihood, self.model
        fitted = FittedData(model, self.network, self.n_data)
        displaced: tuple[Any, Any] = (self.precision, self.noise_std)
        wanted = [displaced, *points] if self.exact is None else list(points)
        sets = model.factor_sets(wanted, self.temperature) if wanted else []
        source = FactorCovariances(self.network, sets, self.unit, model.n_outputs, model.curvature.layouts)
        if self.exact is not None:
            self.exact.start()
        for batch in iterate(data, device=self.network.device, progress=progress, description="leave-one-out"):
            raw = self.network.forward(batch.inputs)
            likelihood.validate(raw, batch.target)
            fitted.add(raw, batch.target)
            outputs = raw.double()
            rows, targets, weight = likelihood.rows(outputs, batch.target)
            root = likelihood.output_root(rows, targets) * weight[:, None, None]
            gradient = likelihood.gradient(rows, targets) * weight[:, None]
            groups = likelihood.output_groups(root.shape[-1]), likelihood.output_groups(rows.shape[-1])
            kept: Tensor | slice = slice(None)
            if self.unit == "position":
                kept = weight > 0
                outputs, own = rows[kept], targets[kept]
            else:
                own, count = batch.target, len(rows) // len(outputs)
                root, gradient = _by_example(root, count), gradient.reshape(len(outputs), -1)
                groups = groups[0].repeat(count), groups[1].repeat(count)
            found = source.of(batch.inputs, raw) if sets else []
            if self.exact is not None:
                found = [*self.exact.of(batch.inputs, raw), *found]
            terms = Terms(root, gradient, groups, likelihood, self.temperature)
            left = leave_out(found[0], *terms.at(self.noise_std))
            yield Piece(raw, outputs, own, kept, terms, left, tuple(found[1:]))
        fitted.check()


def _by_example(root: Tensor, count: int) -> Tensor:
    """Roots ``[B·M, C, r]`` of positions as block-diagonal ones of examples, ``[B, M·C, M·r]``."""
    if count == 1:
        return root
    size, rank = root.shape[-2:]
    result = root.new_zeros(len(root) // count, count, size, count, rank)
    number = torch.arange(count, device=root.device)
    result[:, number, :, number] = root.view(-1, count, size, rank).transpose(0, 1)
    return result.reshape(len(result), count * size, count * rank)


def ceiling(dtype: torch.dtype) -> float:
    """Leverages from here on cannot be told from one in a network's arithmetic."""
    return 1 - 16 * torch.finfo(dtype).eps


def check_leverages(values: Sequence[Tensor], route: str, dtype: torch.dtype) -> None:
    """Refuse leverages for which leaving out means nothing.

    Raises:
        NotPositiveDefiniteError: Some are at or above one.
    """
    largest = torch.cat([part.amax(-1) for part in values])
    above = int((largest >= ceiling(dtype)).sum())
    if not above:
        return
    fixes = {
        "own": "Take displacements from the exact Gauss-Newton matrix, which keeps this posterior's covariance: "
        'leverages="full", or leverages="last_layer" in networks too large for that.',
        "full": "Use the prior precision that training had (a larger one), or float64.",
        "last_layer": "Use the prior precision that training had (a larger one), or float64.",
    }
    raise NotPositiveDefiniteError(
        f"{above} of {len(largest)} data have a leverage of one or more: without one of them, the posterior precision "
        "would not be positive definite, and what it says when leaving them out means nothing.",
        expected="leverages below 1, as of the exact Gauss-Newton matrix of these data",
        got=f"a largest leverage of {float(largest.max()):.3g}",
        fix=fixes[route],
    )


def checked_factor(kappa: float) -> float:
    """A leverage factor.

    Raises:
        ConfigurationError: It is not a positive number.
    """
    if isinstance(kappa, bool) or not isinstance(kappa, (int, float)) or not 0 < kappa < math.inf:
        raise ConfigurationError("There is no such leverage factor.", expected="kappa > 0", got=repr(kappa))
    return float(kappa)


def check_choices(leverages: Any, unit: Any) -> None:
    """Raise :class:`ConfigurationError` unless both are among the known choices."""
    if leverages not in ROUTES or unit not in ("example", "position"):
        raise ConfigurationError(
            "Unknown choice for leaving out.",
            expected=f"leverages among {', '.join(ROUTES)} and unit 'example' or 'position'",
            got=f"leverages={leverages!r}, unit={unit!r}",
        )


def require_network_mean(posterior: Tunable) -> None:
    """Raise :class:`UnsupportedError` where predictions are around the tangent model's optimum."""
    if posterior.predictive_mean != "network":
        raise UnsupportedError(
            "Leave-one-out displaces the network's own outputs.",
            expected="a posterior that predicts around them",
            got="predictions around the tangent model's optimum",
            fix='Set predictive_mean = "network".',
        )
