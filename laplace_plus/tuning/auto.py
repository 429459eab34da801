"""The default tuning: the marginal likelihood's precision, and a scale of the covariance by leaving out training data.

The evidence of a network that fits its data well, or whose curvature is cut into blocks, may ask for more variance than
helps predictions. The default therefore scales the covariance by its leave-one-out loss, on training data alone:

1. The evidence gives a precision δ, at the noise of the residuals where there is noise.
2. Outputs are displaced as if each datum had been left out: ``f₋ₙ = f + V g`` in first order, which has no leverages
   that could reach one. V is that of all trained weights under Kronecker blocks, whatever the posterior's curvature and
   selection, at the precision that training acted with; see :func:`training_end`. Of few weights without normalisation
   the exact matrix gives ``f₋ₙ = f + V₋ₙ g``.
3. Of the covariance's scales from 1 (10 for a part of the weights) to 10⁻⁶, the least one is taken that keeps 85
   percent of the best one's gain over the network; or that of the least mean of this loss and the loss at midpoints of
   neighbouring data, if that is wider. Neither may be less sure than votes of neighbours are right; see
   :func:`~laplace_plus.tuning.deletions.compared_between`. A scale leaves the order of inputs by their uncertainty.
   Where none gains, the link ``"network"`` leaves the network's own probabilities, and the posterior at scale 1 still
   says how unsure they are.

In regression outputs are displaced so that residuals grow to what
:func:`~laplace_plus.tuning.noise_from_residuals` finds for new data. The noise then has the closed form of
:class:`~laplace_plus.LeaveOneOut`, which neither vanishes with residuals nor runs away. The largest scale within .005
nats of the best is taken, since wide posteriors serve in gaps between the data. A matrix over all weights fits single
data, so that its V is small at them alone: there ``V₋ₙ`` is compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from laplace_plus.curvature import FullStructure, KroneckerStructure, Native, Structure
from laplace_plus.errors import (
    DataError,
    LaplacePlusError,
    NoGainWarning,
    NonFiniteError,
    NotPositiveDefiniteError,
    UnsupportedError,
    warn,
)
from laplace_plus.network.batches import iterate
from laplace_plus.network.linearization import Linearization
from laplace_plus.network.network import Network
from laplace_plus.network.selection import trained
from laplace_plus.tuning.base import Tunable, TuningResult, trained_size, tunes_noise
from laplace_plus.tuning.deletions import (
    INTERPOLATION,
    Between,
    Covariances,
    Deletions,
    Leverages,
    Losses,
    compared_between,
    factor_covariances,
    left_out_losses,
    link_options,
    thinned,
)
from laplace_plus.tuning.groups import REST, normalized_groups
from laplace_plus.tuning.laplace import LaplaceModel, check_training_prior
from laplace_plus.tuning.leave_one_out import LeaveOneOut
from laplace_plus.tuning.marginal_likelihood import MarginalLikelihood
from laplace_plus.tuning.noise import noise_from_residuals
from laplace_plus.tuning.validation import Validation

SCALES = tuple(10 ** (-k / 4) for k in range(-4, 25))
"""Factors on the covariance; at the last one the variance of outputs is all but gone. Those above one are for a part
of the weights, which lacks the variance of the others, where all are displaced."""

TOLERANCE = 0.005
"""Nats for each observation by which a loss of regression may exceed the least; standard errors are rarely less."""

SHARE = 0.15
"""Of a classifier's gain over the network: what a narrower posterior may give up, as displacements are uncertain.
Chosen with ``LOSS_RATIO`` on the development cells of benchmarks/defaults: no other pair gained more without harm."""

NEGLIGIBLE = 0.001
"""Nats by which the best posterior's loss must be less than the network's, or else the network predicts."""

ENOUGH, LEAST, ENTRIES, PRODUCTS = 2000, 100, 1e8, 3e9
"""Examples (or positions) that are left out, evenly spread: at most 2000, whose mean loss has a standard error of about
.02 nats, and at least 100, as fewer tell nothing. In between as many as have 10⁸ covariances of outputs together, and
3·10⁹ outputs times weights, which take some ten seconds of a processor core."""

UNFINISHED = 2.0
"""Newton decrement of the end of training, in effective parameters, from which ``why`` says that it was early."""

LOSS_RATIO, BLOCKS_RATIO = 35.0, 45.0
"""The least precision of training in units of ``S/‖θ‖²``, chosen together with the default tuning's ``SHARE``; and the
most under Kronecker blocks: first-order steps fall short where no loss is left, and 4 δ̂ is then 60 to 90 units."""

DECAY_RATIO = 4.0
"""Precision for displacements in units of the weight decay, which overshoot what retraining gives: new data asked for
2 to 4 where weight decay was found, for more elsewhere."""

FEW, MANY, DETERMINED, OPERATIONS = 2000, 5000, 4.0, 2e10
"""Weights up to which displacements are exact Newton steps: always; where there are up to four for each output of each
example; and operations for their matrix. Data that determine their weights have leverages near one: first order saw .2
nats left out where new data cost 1.4, exact steps 1 to 4. Of five and more weights for each output they overshot."""

LEAST_LOSS = 1e-6
"""Nats for each example below which a loss is rounding."""

STATIONARY, STATIONARY_ROWS = 0.98, 0.5
"""Cosines over tensors, and over their rows, from which weights count as stationary under a weight decay. A tensor that
holds most of the norm decides the first alone."""


@dataclass(frozen=True, kw_only=True)
class AutoTuning(TuningResult):
    """What the default tuning chose; ``value`` is minus the mean loss in nats, left out (and at midpoints) or held out.

    Attributes:
        chosen: ``"marginal_likelihood"``, ``"leave_one_out"`` (another scale), ``"network"`` (predictions are
            the network's own, or in regression all but them) or ``"validation"``.
        why: A sentence.
        expected_gain: Over the network's own predictions, in nats for each observation; NaN where it is not known.
        training_prior_precision: What the end of training says, over all weights; None where it was not looked at.
        evidence: The tuning by the marginal likelihood; None for ``"validation"``.
        scales: Factors on the covariance that were compared, G of them.
        losses: The mean leave-one-out loss of each, ``[G]``.
        midpoint_losses: The mean loss of each at midpoints of neighbouring data, ``[G]``; None where there are none.
        neighbour_accuracy: Share of the data whose label is the vote of their neighbours, below which the mean
            confidence at midpoints may not fall; None where there are none.
    """

    chosen: str
    why: str
    expected_gain: float = math.nan
    training_prior_precision: float | None = None
    evidence: TuningResult | None = None
    scales: tuple[float, ...] = ()
    losses: Tensor | None = None
    midpoint_losses: Tensor | None = None
    neighbour_accuracy: float | None = None


@dataclass(frozen=True)
class Auto:
    """The default: at least as good as the network by leaving out training data; see the module's text.

    With held-out ``data`` it is :class:`~laplace_plus.Validation`.

    Args:
        data: Held-out batches; None for training data alone.
        weight_decay: That of training, as for :class:`~laplace_plus.LeaveOneOut`; by default a classifier's is read
            from where training ended.
        training_prior_precision: In place of the weight decay. Where noise is tuned, neither is used.
        link: As for ``predictive``.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.

    Raises:
        ConfigurationError: The prior of training twice.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    weight_decay: float | None = None
    training_prior_precision: float | Tensor | None = None
    link: str | None = None
    n_samples: int = 100
    tune_noise: bool | None = None

    def __post_init__(self) -> None:
        check_training_prior(self.training_prior_precision, self.weight_decay)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> AutoTuning:
        """Choose by leaving out training data; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            DataError: Other data than were fitted to.

        Warns:
            NoGainWarning: Training data are not at hand, or the network interpolates them, or the posterior had to step
                back to the network's own predictions.
            ConvergenceWarning: The evidence's tuning did not converge.
        """
        if self.data is not None:
            tuner = Validation(self.data, link=self.link, n_samples=self.n_samples, tune_noise=self.tune_noise)
            found = tuner.tune(posterior, progress=progress, generator=generator)
            return AutoTuning(**{**vars(found), "method": "auto"}, chosen="validation", why="Held-out data were given.")
        model = posterior.laplace_model()
        own = copy.copy(posterior)  # which shares what the model computes
        noisy = tunes_noise(model.likelihood, self.tune_noise) and model.likelihood.is_gaussian
        if noisy:
            residual = model.residual_noise().exp().to(model.vector)
            own.noise_std = residual if own.noise_std.ndim else residual.mean()
        evidence = MarginalLikelihood(tune_noise=False if noisy else self.tune_noise).tune(own, progress=progress)
        own.apply_tuning(evidence)
        return self._leave_out(own, evidence, noisy, progress, link_options(self, model.likelihood, generator))

    def _leave_out(
        self, posterior: Tunable, evidence: TuningResult, noisy: bool, progress: bool, options: dict[str, Any]
    ) -> AutoTuning:
        """The scale of the covariance that leaving out chooses, at the evidence's precision."""
        model, precision = posterior.laplace_model(), posterior.prior_precision.detach()
        n_data, size = posterior.n_data, posterior.network.n_parameters
        room = min(ENTRIES / model.n_outputs**2, max(LEAST, PRODUCTS / (model.n_outputs * size)))
        data, missing = _data_of_fit(posterior, room)
        if data is None:
            return self._by_evidence(posterior, evidence, missing, progress)
        first = next(iter(iterate(data, device=posterior.network.device)))
        rows = n_data * posterior.network.forward(first.inputs)[0, ..., 0].numel()  # examples times positions
        share = min(1.0, ENOUGH / n_data, room / rows)
        training, end, notes = self._end_of_training(posterior, data, rows, share, noisy, progress)
        leverages: Leverages = "full" if end and end.exact else "first_order"
        moving = {"share": share, "most": max(1, int(ENOUGH / (share * n_data))), "displacing": end and end.covariances}
        deletions = Deletions(posterior, data, DECAY_RATIO * training, None, leverages, "position", **moving)
        deletions.without_own = posterior.structure.name == "full"
        if noisy:
            error = noise_from_residuals(posterior)
            variance = posterior.noise_std.square().to(error.noise_std)
            deletions.inflation = (error.noise_std / error.residual_std - 1) * variance
            notes += f" {error.problem}" if error.problem else ""
        part = size < trained_size(posterior.network) and (noisy or end is not None)
        scales = SCALES if part else SCALES[SCALES.index(1.0) :]
        at = {"base": precision, "levels": torch.ones(1, device="cpu"), "scales": scales}
        search: Callable[..., Losses] = partial(left_out_losses, **at, progress=progress, **options)
        try:
            left_out = search(deletions, noisy=noisy)
        except NotPositiveDefiniteError:  # a datum that determines a weight alone, within rounding
            deletions.leverages = "first_order"
            left_out = search(deletions, noisy=noisy)
        except UnsupportedError as failure:  # a log-density that is not concave, or has no second derivatives
            return self._by_evidence(posterior, evidence, str(failure).partition(". ")[0], progress)
        between = None
        if model.likelihood.is_classifier and rows == n_data:
            try:
                between = compared_between(posterior, data, first, int(min(ENOUGH, room)), search)
            except LaplacePlusError as failure:  # a network may refuse what lies between its inputs
                notes += f" Midpoints were not compared: {str(failure).partition(chr(10))[0]}"
        may_be_own = not noisy and self.link is None and "network" in model.likelihood.links
        own, best, compared = _choice(left_out.losses, between, noisy, may_be_own)
        last, value = float(compared[-1]), float(compared[-1 if own else best])
        chosen = "marginal_likelihood" if scales[best] == 1 else "leave_one_out"
        if own or scales[best] < 1 and last <= value:
            chosen = "network"
        loss = -float(model.log_likelihood()) * deletions.n_examples / (n_data * deletions.n_observations)
        interpolated = loss if model.likelihood.is_classifier and loss < INTERPOLATION else None
        bounded = between is not None and best > 0 and not between.allowed[best - 1]
        why = _why(chosen, scales[best], bounded, interpolated, end) + notes
        if chosen == "network" or interpolated is not None:
            warn(f"{why} Held-out data= would tell more.", NoGainWarning)
        noise = float(left_out.factors[best]) if noisy else 1.0
        return AutoTuning(
            method="auto",
            prior_precision=precision / noise**2,
            noise_std=posterior.noise_std * noise if noisy else evidence.noise_std,
            value=-value,
            link="network" if own else None,
            covariance_scale=1.0 if own else scales[best],
            converged=evidence.converged,
            n_evaluations=evidence.n_evaluations + len(scales),
            groups=evidence.groups,
            chosen=chosen,
            why=why,
            expected_gain=last - value,
            training_prior_precision=None if end is None else end.precision,
            evidence=evidence,
            scales=scales,
            losses=left_out.losses,
            midpoint_losses=None if between is None else between.losses,
            neighbour_accuracy=None if between is None else between.accuracy,
        )

    def _by_evidence(self, posterior: Tunable, evidence: TuningResult, missing: str, progress: bool) -> AutoTuning:
        """The evidence's choice, and a warning of why there is no other."""
        why = f"{missing}, so that nothing was left out to compare with the network."
        warn(f"{why} Held-out data= would tell.", NoGainWarning)
        found = vars(MarginalLikelihood(tune_noise=self.tune_noise).tune(posterior, progress=progress))
        return AutoTuning(**{**found, "method": "auto"}, chosen="marginal_likelihood", why=why, evidence=evidence)

    def _end_of_training(
        self, posterior: Tunable, data: Iterable[Any], rows: int, share: float, noisy: bool, progress: bool
    ) -> tuple[Tensor, TrainingEnd | None, str]:
        """The precision of training as far as it is known, a classifier's end of training, and why that is missing."""
        model, network, n_data = posterior.laplace_model(), posterior.network, posterior.n_data
        training = posterior.prior_precision.detach()
        if known := not noisy and check_training_prior(self.training_prior_precision, self.weight_decay):
            given = LeaveOneOut(self.training_prior_precision, self.weight_decay)
            training = given.of_training(posterior, model, data, progress)[0]
        # The derivatives of each position's outputs pass through all positions of its example.
        affordable = share * rows**2 / n_data * model.n_outputs * trained_size(network) <= PRODUCTS
        if not (model.likelihood.is_classifier and affordable) or known and training.ndim:
            return training, None, ""
        rank, temperature = getattr(posterior.structure, "factor_rank", None), posterior.temperature.detach()
        try:
            decay = training if known else None
            return training, training_end(model, network, data, n_data, share, temperature, decay, rank), ""
        except (UnsupportedError, NotPositiveDefiniteError, NonFiniteError, torch.linalg.LinAlgError) as failure:
            # Weights outside of the selection may have no derivatives, or too large a curvature.
            return training, None, f" Only selected weights were displaced: {str(failure).splitlines()[0]}"


def _data_of_fit(posterior: Tunable, room: float) -> tuple[Iterable[Any] | None, str]:
    """The data that can be left out within ``room`` examples' operations, or None and the reason."""
    if room < min(LEAST, posterior.n_data):
        return None, f"The covariances of {posterior.laplace_model().n_outputs} outputs are too large"
    if posterior.likelihood.couples_rows:
        return None, "The rows of a batch depend on each other"
    try:
        return posterior.training_data.again(None, "The default tuning passes over the training data."), ""
    except DataError:
        return None, "The training data are not at hand"


def _why(chosen: str, scale: float, bounded: bool, interpolated: float | None, end: TrainingEnd | None) -> str:
    """What was chosen, and what is to know about it."""
    why = {
        "marginal_likelihood": "No other scale of the covariance has a clearly smaller leave-one-out loss.",
        "leave_one_out": f"{scale:.3g} times the evidence's covariance has all but the least loss"
        + (" of those that are sure enough." if bounded else "."),
        "network": "No posterior has a clearly smaller leave-one-out loss than the network, which predicts.",
    }[chosen]
    if interpolated is not None:
        why += f" The network interpolates its training data (loss {interpolated:.2g} nats)."
    if end is not None and not end.stationary:
        why += f" The prior of training ({end.precision:.2g}) was read from its loss, within a factor of four."
    if end is not None and end.decrement > UNFINISHED:
        why += f" Training stopped early (a Newton decrement of {end.decrement:.2g} for each parameter in use)."
    return why


def _choice(losses: Tensor, between: Between | None, noisy: bool, may_be_own: bool) -> tuple[bool, int, Tensor]:
    """Whether the network predicts, or else the place of the scale, and the losses that chose.

    By losses left out and their mean with those at midpoints: each is blind to some, so the wider, if allowed.
    """
    losses = losses if between is None else losses.where(between.allowed, torch.inf)
    both = [(losses, TOLERANCE if noisy else SHARE * float(losses[-1] - losses.min()))]
    if between is not None:
        both.append(((losses + between.losses) / 2, 0.0))
    found = []
    for compared, given_up in both:
        enough = (compared <= compared.min() + given_up).nonzero()[0 if noisy else -1]
        own = may_be_own and float(compared[-1] - compared.min()) <= NEGLIGIBLE
        found.append((own, 0 if own else int(enough), compared))
    return min(found, key=itemgetter(0, 1))


@dataclass(frozen=True)
class TrainingEnd:
    """Where training ended, over all trainable weights.

    Attributes:
        precision: The prior precision for displacements: that which training acted with, or some times as much.
        stationary: Whether a weight decay is known, or was found in weights that are stationary under it.
        decrement: ``gᵀ (H + δ)⁻¹ g / γ``.
        covariances: V of all weights at that precision.
        exact: Whether under their exact matrix, whose leverages count, in place of Kronecker blocks.
    """

    precision: float
    stationary: bool
    decrement: float
    covariances: Covariances
    exact: bool


def training_end(
    model: LaplaceModel,
    network: Network,
    data: Iterable[Any],
    n_data: int,
    share: float,
    temperature: Tensor,
    decay: Tensor | None = None,
    rank: int | None = None,
) -> TrainingEnd:
    """The prior precision that the training of a classifier acted with, read from where it ended.

    - Under weight decay training ends near ``g = −δ θ``, g the gradient of the summed loss: for each tensor k,
      ``−⟨gₖ, θₖ⟩ = δ ‖θₖ‖²``. Where the two sides are parallel over tensors and over rows, ``δ̂ = −⟨g, θ⟩/‖θ‖²`` is the
      weight decay within a few percent. On tables trained by Adam their cosine was at least .988 over tensors with
      weight decay, and at most .89 without.
    - Without it, an early end acts as a prior. Under gradient flow on homogeneous layers ``‖θ‖²`` grows with the time
      t at the order of the summed loss S, so that ``1/t``, the ridge that ending at t amounts to, is of the order
      ``S/‖θ‖²``. On the development cells of benchmarks/defaults, 16 times that displaces outputs as far as new data
      ask for, within a factor of 4 over four decades. A gain that does not come is worse than one that is missed, so
      more is taken.
    - The Newton decrement ``gᵀ (H + δ)⁻¹ g`` is γ, the effective number of parameters, for weights drawn from the
      posterior, and 0 at its mode. Where training stopped before and it exceeds γ, their ratio is one more factor.

    One pass looks at a share of each batch, scaled to all N data; ``decay`` is a known δ, ``rank`` a factor's.
    UnsupportedError: torch has no derivatives in all weights, or not the memory.
    """
    whole, likelihood, backend = network.selecting(trained), model.likelihood, Native()
    vector, curvature = whole.vector(), None
    gradient, n_examples = torch.zeros_like(vector), 0
    n_numbers = share * n_data * model.n_outputs
    exact = len(vector) <= max(FEW, min(MANY, DETERMINED * n_numbers)) and n_numbers * len(vector) ** 2 <= OPERATIONS
    for batch in thinned(iterate(data, device=network.device), share):
        if curvature is None:
            exact = exact and not _is_normalised(whole, batch.inputs)
        structure: Structure = FullStructure() if exact else KroneckerStructure(factor_rank=rank)
        try:
            curvature, outputs = backend.accumulate(curvature, whole, likelihood, batch, structure)
            flat, targets, weight = likelihood.rows(outputs.double(), batch.target)
            n_examples += len(outputs)
            slope = (likelihood.gradient(flat, targets) * weight[:, None]).view_as(outputs)
            gradient += Linearization(whole, vector, batch.inputs).pull.one(slope.to(outputs))
        except RuntimeError as failure:  # torch has one type for a missing derivative and whatever else goes wrong
            raise UnsupportedError(str(failure)) from failure
    assert curvature is not None
    mean = model.prior_mean if model.prior_mean.ndim == 0 else 0.0  # a tensor's is known for the selected weights alone
    away, scale = vector - mean, temperature.to(vector) * n_examples / n_data
    gradient, square = gradient / scale, away.square().sum().clamp_min(torch.finfo(vector.dtype).tiny)
    loss = (-model.log_likelihood().to(vector)).clamp_min(LEAST_LOSS * n_data) / temperature.to(vector)
    whole_model = replace(
        model,
        curvature=curvature,
        backend=backend,
        vector=vector,
        layer_index=torch.zeros((), dtype=torch.long).expand(len(vector)),
        prior_mean=torch.zeros_like(square),
    )
    stationary = decay is not None or _is_stationary(whole, gradient, away)
    decay = -(gradient @ away) / square if decay is None else decay.to(vector)
    precision = DECAY_RATIO * decay
    if not stationary:
        unit = loss / square
        precision = precision.clamp(LOSS_RATIO * unit, (math.inf if exact else BLOCKS_RATIO) * unit)
    factors = whole_model.factors(precision, scale)
    spent = (len(vector) - precision * whole_model.variances(factors).sum()).clamp_min(1.0)
    decrement = gradient @ whole_model.solve(factors, gradient) / spent
    if not stationary:
        precision = precision * decrement.clamp_min(1.0)
        factors = whole_model.factors(precision, scale)
    covariances = factor_covariances(whole, [factors], "position", model.n_outputs)
    return TrainingEnd(float(precision), stationary, float(decrement), covariances, exact)


def _is_normalised(network: Network, inputs: Any) -> bool:
    """Whether a normalisation takes the scale of weights away: ``‖θ‖`` then says little, and exact steps overshot."""
    return len({*normalized_groups(network, inputs).names} - {REST}) > 1


def _is_stationary(network: Network, gradient: Tensor, away: Tensor) -> bool:
    """Whether ``−⟨gₖ, θₖ⟩`` is parallel to ``‖θₖ‖²``, over tensors k and over their rows."""
    sizes, products = [item.size for item in network.selected], []
    for part in (gradient, -away):
        parts = zip(network.selected, part.split(sizes), away.split(sizes), strict=True)
        products.append([-(own * a).view(item.shape[0] if item.shape else 1, -1).sum(1) for item, own, a in parts])
    tensors = [torch.stack([rows.sum() for rows in own]) for own in products]
    pairs = tensors, [torch.cat(own) for own in products]
    cosines = [torch.cosine_similarity(along, square, dim=0) for along, square in pairs]
    return bool(cosines[0] >= STATIONARY and cosines[1] >= (STATIONARY if len(sizes) < 3 else STATIONARY_ROWS))
