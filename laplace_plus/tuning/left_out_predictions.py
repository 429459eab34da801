"""Leave-one-out predictions of a Gaussian posterior, without refitting.

A datum has the output covariance ``V = J Σ Jᵀ`` under the posterior. Its negative log-likelihood has the Hessian ``Λ``
and the gradient ``g`` by its outputs ``f``. Without the datum's own term in the posterior precision,

    f₋ₙ = f + (I − V Λ)⁻¹ V g,        V₋ₙ = (I − V Λ)⁻¹ V.

For linear-Gaussian models both are exact (Allen, 1974, "The relationship between variable selection and data
augmentation and a method for prediction"). Otherwise ``f₋ₙ`` is one Newton step from the optimum of all the data
(Pregibon, 1981, "Logistic regression diagnostics"; Rad and Maleki, 2020, "A scalable estimate of the out-of-sample
prediction error via approximate leave-one-out cross-validation"). The eigenvalues of ``V Λ`` are the datum's leverages.
They lie below one where the posterior's curvature is the exact Gauss-Newton matrix of these data. With Kronecker
factors or diagonals they may exceed one, and the formula is then meaningless.

Two priors enter, and must be kept apart. The displacement ``f₋ₙ − f`` undoes the effect of training, so it belongs to
the prior of *training* (its weight decay). The covariance ``V₋ₙ`` belongs to the posterior that is to be used. If one
precision served both with the weights held fixed, a large precision would remove the displacement. The left-out loss
would then equal the training loss, and would always look best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._memory import budget, in_words
from laplace_plus.errors import ConfigurationError, DataError, NotPositiveDefiniteError, UnsupportedError
from laplace_plus.io.passes import Sums, summed
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import checked_log_density
from laplace_plus.network.batches import Batch, can_be_cut, cut, iterate
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.predictive import Prediction, from_functional
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.fitted_data import FittedData
from laplace_plus.tuning.leverages import Covariances, Leverages, Unit, exact_covariances, factor_covariances

INTERPOLATION = 0.01
"""Mean training loss in nats below which a classifier counts as interpolating: gradients at its data vanish.

An interpolating network had a leave-one-out loss of 0.000 where its test loss was 0.97.
"""


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
        route: The curvature of leverages and displacements: ``"own"``, ``"full"`` or ``"last_layer"``; or
            ``"first_order"``, ``f + V g`` with leverages of zero.
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
            got = f"scale={scale}, temperature={temperature}"
            raise ConfigurationError("scale must be non-negative and temperature positive.", got=got)
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
        return -(checked_log_density(self.likelihood, flat, targets) * weight).sum() / weight.sum()


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
        leverages: ``"own"``, of this posterior's curvature; ``"full"``, of the exact Gauss-Newton matrix, or
            ``"last_layer"``, of the last layer's, or none, ``"first_order"``, all with this posterior's ``V``.
        unit: ``"example"``, or ``"position"`` to leave out single tokens or pixels.
        progress: Whether to show a progress bar.

    Raises:
        NotFittedError: Before ``fit``.
        UnsupportedError: A class without leave-one-out predictions.
        ConfigurationError: Unknown choices.
        DataError: Other data than were fitted to, or none.
        NotPositiveDefiniteError: Leverages at or above one, which a curvature that is not the exact one may have.
    """
    with exact_arithmetic(posterior.network):
        require_leave_one_out(posterior)
        return _predictions(posterior, data, prior_precision, noise_std, kappa, leverages, unit, progress)


def require_leave_one_out(posterior: Any) -> None:
    """Raise :class:`UnsupportedError` where leave-one-out has no meaning for a posterior."""
    name = type(posterior).__name__
    if "leave_one_out" not in posterior.tuners:
        what, fix = f"{name} has no leave-one-out predictions.", "Compare predictions on held-out data."
        raise UnsupportedError(what, expected="a Gaussian posterior that lp.LeaveOneOut can tune", fix=fix)
    if posterior.predictive_mean != "network":
        what = "Leave-one-out displaces the network's own outputs."
        raise UnsupportedError(what, got=posterior.predictive_mean, fix='Set predictive_mean = "network".')


def _predictions(
    posterior: Tunable,
    data: Iterable[Any] | None,
    prior_precision: Any,
    noise_std: Any,
    kappa: float,
    leverages: Leverages,
    unit: Unit,
    progress: bool,
) -> LeaveOneOutPredictions:
    likelihood, n_data = posterior.laplace_model().likelihood, posterior.n_data
    precision = posterior.prior_precision.detach()
    training = precision if prior_precision is None else as_hyperparameter(prior_precision).detach()
    checks.positive("kappa", kappa)
    training = kappa * training
    data = posterior.training_data.again(data, "Leave-one-out passes over the training data.")
    deletions = Deletions(posterior, data, training, noise_std, leverages, unit)
    sums, limit = Sums(parts=[], largest=[], seen=0, taken=0), budget(deletions.network.device)
    for batch in deletions.batches([(precision, None)], sums, progress=progress):
        sums.seen += len(batch.network_outputs)
        sums.taken += 8 * batch.outputs.numel() * batch.outputs.shape[-1]
        needed = sums.taken * n_data // sums.seen
        if needed > limit:
            got = f"{in_words(needed)} for {n_data} examples of {batch.network_outputs[0].numel()} outputs"
            what, expected = "The covariances of all data do not fit into the memory budget.", in_words(limit)
            raise ConfigurationError(what, expected=f"at most {expected}", got=got, fix="Raise memory_budget.")
        (covariance,) = batch.covariances
        top = batch.leverages.amax(-1)
        sums.largest.append(top)
        if leverages == "own":
            own, _, covariance = leave_out(covariance, batch.root, batch.gradient)
            sums.largest[-1] = torch.maximum(top, own[batch.kept].amax(-1))
        traces, covariance = batch.leverages.sum(-1), batch.by_position(covariance) * posterior.covariance_scale
        sums.parts.append((batch.mean, covariance, batch.outputs, batch.targets, top, traces))
    deletions.check(sums.largest)
    try:
        mean, covariance, outputs, targets, top, traces = (torch.cat(own) for own in zip(*sums.parts, strict=True))
    except RuntimeError as error:
        got = ", ".join(sorted({str(list(part[2].shape[1:])) for part in sums.parts}))
        what, fix = "The batches' outputs are of different shapes.", 'Pass unit="position": one position at a time.'
        raise DataError(what, expected="as many positions in every batch", got=got, fix=fix) from error
    likelihood.validate(outputs, targets)  # of a checkpoint, perhaps
    return LeaveOneOutPredictions(mean, covariance, outputs, targets, top, traces, likelihood, leverages, unit)


def leave_out(
    covariance: Tensor, root: Tensor, gradient: Tensor, *, first_order: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Remove each deletion unit's own term: its leverages ``[U, r]``, ``f₋ₙ − f`` ``[U, b]`` and ``V₋ₙ [U, b, b]``.

    Given are V ``[U, b, b]``, a root S of ``Λ = S Sᵀ`` and the gradient g. The symmetric ``SᵀVS = Q diag(l) Qᵀ`` has
    the eigenvalues of ``V Λ``. Then ``V₋ₙ = V + V S Q diag(1/(1−l)) Qᵀ Sᵀ V`` and ``f₋ₙ − f = V₋ₙ g``. In first order
    these are 0, ``V g`` and V.
    """
    covariance, root, gradient = covariance.double(), root.double(), gradient.double()
    if first_order:
        return root.new_zeros(root.shape[0], root.shape[-1]), (covariance @ gradient[..., None])[..., 0], covariance
    product = covariance @ root
    inner = root.mT @ product
    leverages, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    product = product @ vectors
    # The caller refuses leverages of one and more. Here they must only not divide by zero.
    rest = (1 - leverages).masked_fill(leverages == 1, torch.finfo(leverages.dtype).tiny)
    left = covariance + (product / rest[:, None]) @ product.mT
    return leverages, (left @ gradient[..., None])[..., 0], left


@dataclass(frozen=True)
class DeletionBatch:
    """One batch's leave-one-out quantities.

    Attributes:
        network_outputs: ``[B, *, C]``.
        outputs: f, ``[U', *, C]`` float64, of the deletion units that are not ignored.
        targets: Their targets.
        kept: Index of these units in the batch.
        root: S with ``Λ = S Sᵀ`` at the likelihood's noise, ``[U, b, r]``.
        gradient: g at the likelihood's noise, ``[U, b]``.
        leverages: Of the U' units at the displacement's prior, ``[U', r]``.
        mean: ``f₋ₙ``, shaped like ``outputs``.
        covariances: V under the posterior at each requested point, ``[U, b, b]``.
    """

    network_outputs: Tensor
    outputs: Tensor
    targets: Tensor
    kept: Tensor | slice
    root: Tensor
    gradient: Tensor
    leverages: Tensor
    mean: Tensor
    covariances: tuple[Tensor, ...]

    def by_position(self, covariance: Tensor) -> Tensor:
        """The covariance ``[U', *, C, C]`` of each position's outputs, from the units' ``[U, b, b]``."""
        covariance, size = covariance.double()[self.kept], self.outputs.shape[-1]
        n, count = len(self.outputs), covariance.shape[-1] // size
        blocks = covariance.view(n, count, size, count, size).diagonal(dim1=1, dim2=3)  # [U', C, C, M]
        return blocks.movedim(-1, 1).reshape(*self.outputs.shape, size)


class Deletions:
    """Passes over the data of the fit that leave out each deletion unit.

    Displacements have a prior precision, a noise (None for the likelihood's) and a curvature of their own; or they come
    from covariances that are ``displacing``.

    Attributes:
        limit: Leverages from here on count as one: they are within some roundings of it in the network's type.
        share: Of each batch's examples, how many are left out, evenly spread. Below one, a pass does not check that the
            data are those of the fit.
        n_examples, n_observations: How many the last pass went over.
        most: Of each example's positions, how many are left out, evenly spread; None for all.
        inflation: Numbers ``[C]`` by which the gradients of a Gaussian's outputs are multiplied, in place of ``V``, to
            displace them: then residuals grow by a factor.
        without_own: Whether a tuner takes ``V₋ₙ`` where leverages are below one, though displacements are no ``V₋ₙ g``.
    """

    n_examples, n_observations = 0, 0.0
    inflation: Tensor | None = None
    without_own = False

    def __init__(
        self,
        posterior: Tunable,
        data: Iterable[Any],
        precision: Tensor,
        noise_std: Any,
        leverages: Leverages,
        unit: Unit,
        *,
        share: float = 1.0,
        most: int | None = None,
        displacing: Covariances | None = None,
    ):
        check_choices(leverages, unit)
        self.share, self.most, self.exact = share, most, displacing
        self.model, self.network, self.n_data = posterior.laplace_model(), posterior.network, posterior.n_data
        self.temperature = posterior.temperature.detach()
        self.data, self.precision, self.noise_std, self.unit = data, precision, noise_std, unit
        self.leverages = leverages
        self.limit = 1 - 16 * torch.finfo(self.network.dtype).eps
        if noise_std is not None:
            self.model.likelihood.curvature_weights(noise_std)  # raises for an unusable noise
        if displacing is None and leverages in ("full", "last_layer"):
            point = precision, self.temperature, noise_std
            self.exact = exact_covariances(leverages, self.model, self.network, data, point, unit)

    def batches(self, points: Sequence[tuple[Any, Any]], *sums: Any, progress: bool = False) -> Iterator[DeletionBatch]:
        """Pass over the data once.

        Args:
            *sums: What the caller adds up: of a call that is resumed, the pass is over what they lack.
            points: Pairs of a prior precision and a noise level, at which the posterior's covariance is wanted.
            progress: Whether to show a progress bar.

        Raises:
            DataError: After the last batch: other data than were fitted to.
            LabelError: Targets that do not fit.
            OutputError: Outputs that do not fit.
        """
        model, likelihood = self.model, self.model.likelihood
        fitted = FittedData(model, self.network, self.n_data)
        wanted = [(self.precision, self.noise_std), *points] if self.exact is None else list(points)
        sets = model.factor_sets(wanted, self.temperature)
        own = factor_covariances(self.network, sets, self.unit, model.n_outputs, model.curvature.layouts)
        loader = iterate(self.data, device=self.network.device, progress=progress, description="leave-one-out")
        for batch in summed("leave-one-out", thinned(loader, self.share), fitted, *sums):
            raw = self.network.forward(batch.inputs)
            likelihood.validate(raw, batch.target)
            number = fitted.n_batches
            fitted.add(raw, batch.target)
            outputs = raw.double()
            flat, targets, weight = likelihood.rows(outputs, batch.target)
            root = likelihood.output_root(flat, targets) * weight[:, None, None]
            gradient = likelihood.gradient(flat, targets) * weight[:, None]
            groups = [likelihood.output_groups(size).to(root.device) for size in (root.shape[-1], flat.shape[-1])]
            kept: Tensor | slice = slice(None)
            if self.unit == "position":
                kept = places = weight.nonzero()[:, 0]
                if self.most is not None and self.most * len(outputs) < len(places):
                    kept = places[torch.linspace(0, len(places) - 1, self.most * len(outputs)).round().long()]
                outputs, targets = flat[kept], targets[kept]
            else:
                targets, count = batch.target, len(flat) // len(outputs)
                # Block-diagonal roots [B, M·C, M·r] of examples, from those [B·M, C, r] of positions.
                unit = torch.eye(count, dtype=root.dtype, device=root.device)
                root = torch.einsum("bmcr,mn->bmcnr", root.unflatten(0, (-1, count)), unit).flatten(3).flatten(1, 2)
                gradient = gradient.reshape(len(outputs), -1)
                groups = [group.repeat(count) for group in groups]
            covariances = own(number, batch.inputs, raw)
            if self.exact is not None:
                covariances = [*self.exact(number, batch.inputs, raw), *covariances]

            at = self._at(root, gradient, groups, self.noise_std)
            leverages, shift, _ = leave_out(covariances[0], *at, first_order=self.leverages == "first_order")
            if self.inflation is not None:
                shift = at[1] * self.inflation.to(shift)
            mean = outputs + shift[kept].reshape(outputs.shape)
            own_terms, rest = self._at(root, gradient, groups), tuple(covariances[1:])
            yield DeletionBatch(raw, outputs, targets, kept, *own_terms, leverages[kept], mean, rest)
        self.n_examples, self.n_observations = fitted.n_examples, fitted.n_rows
        if self.share == 1:
            fitted.check()

    def _at(self, root: Tensor, gradient: Tensor, groups: list[Tensor], noise_std: Any = None) -> tuple[Tensor, Tensor]:
        """Root and gradient of the tempered log-likelihood at a noise level, from those at unit noise."""
        weights = self.model.likelihood.curvature_weights(noise_std) / self.temperature.double()
        weights = weights.to(gradient)
        return root * weights.sqrt()[groups[0]], gradient * weights[groups[1]]

    def check(self, largest: Sequence[Tensor]) -> None:
        """Raise :class:`NotPositiveDefiniteError` if largest leverages of some data are one or more."""
        values = torch.cat(list(largest))
        above = int((values >= self.limit).sum())
        if above:
            fix = "Use the prior precision that training had (a larger one), or float64."
            if self.leverages == "own":
                fix = "Take displacements from the exact Gauss-Newton matrix, and keep this posterior's covariance: "
                fix += 'leverages="full", or leverages="last_layer" in larger networks.'
            raise NotPositiveDefiniteError(
                f"{above} of {len(values)} data have a leverage of one or more: without such a datum, the posterior "
                "precision is not positive definite.",
                expected="leverages below 1, as of the exact Gauss-Newton matrix of these data",
                got=f"a largest leverage of {float(values.max()):.3g}",
                fix=fix,
            )


def thinned(batches: Iterable[Batch], share: float) -> Iterator[Batch]:
    """Evenly spread examples of each batch, of the first one at least; batches that cannot be cut stay whole."""
    owed = 1.0
    for batch in batches:
        size = len(batch.target)
        count = round(share * size)
        if not count:  # of many small batches, some give one example
            owed += share * size
            count = int(owed)
            owed -= count
        if share == 1 or not can_be_cut(batch.inputs, size):
            yield batch
        elif count:
            chosen = torch.linspace(0, size - 1, count).round().long().tolist()
            yield Batch(cut(batch.inputs, chosen), batch.target[chosen])


def check_choices(leverages: Any, unit: Any) -> None:
    """Raise :class:`ConfigurationError` unless both are among the known choices."""
    if leverages not in get_args(Leverages) or unit not in ("example", "position"):
        expected = f"leverages among {', '.join(get_args(Leverages))} and unit 'example' or 'position'"
        got = f"leverages={leverages!r}, unit={unit!r}"
        raise ConfigurationError("Unknown choice for leaving out.", expected=expected, got=got)
