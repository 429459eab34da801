"""Tuning by rows that the network was not trained on: folds of the rows of the fit.

On rows that a network has not seen its errors are honest. K folds then tell what new rows would lose: each fold is
predicted by the posterior of the others. Curvatures are sums over rows, so that K of them take one pass.

Outputs of left-out rows are ``N(f, V)``. Predictions are those of ``N(f, s V)`` with logits divided by T, or in
regression with the noise ``T σ₀``, σ₀ that of the residuals. For each scale s from zero on, T is the one of least loss;
s = 0 is the network at a temperature. Rows are few, so that doubt is settled by standard errors of paired differences:
s is the smallest whose loss is within one of the best, and without a posterior (s = 0) T is one unless another one
gains more than that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import scipy
import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import DataError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.marginal import variance_of
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import batch_size, can_be_cut, cut, iterate, joined, rejoined
from laplace_plus.predictive import from_functional
from laplace_plus.predictive.linearized import outputs_for
from laplace_plus.tuning.base import Tunable, TuningResult, tunes_noise
from laplace_plus.tuning.new_data import WORSE

SCALES = tuple(10 ** (k / 2) for k in range(-8, 5))
"""Mean variances ``s V`` of the outputs that are compared, as multiples of the noise's, or of one for logits."""

LEAST, LARGEST, CLOSE = -1.5, 3.0, 0.02
"""Between which logarithms a temperature is searched, and how closely."""

MOST, ENTRIES = 2000, 1e8
"""Left-out rows whose losses are compared, fewer where they have more than 10⁸ covariances of outputs together."""

Pairs = list[tuple[Any, Any]]

WHY = "Folds of unseen rows are made of the rows of the fit."


@dataclass(frozen=True, kw_only=True)
class UnseenTuning(TuningResult):
    """What folds of unseen rows chose; ``value`` is minus the mean left-out loss.

    Attributes:
        chosen: ``"network"``, ``"temperature"`` (of the network) or ``"posterior"``, with a temperature of its own.
        why: A sentence.
        expected_gain: Over the network's own predictions, in nats for each observation.
        scales: Factors on the covariance that were compared; the first is zero, the network.
        losses: The mean left-out loss of each, at its best temperature, ``[G]``.
    """

    chosen: str
    why: str
    expected_gain: float
    scales: tuple[float, ...]
    losses: Tensor


@dataclass(frozen=True)
class Unseen:
    """Chooses a temperature of the outputs and a scale of the covariance by folds of rows that training has not seen.

    For networks that were trained elsewhere, and some rows of one's own, to which the posterior is fitted; a few
    hundred will do. See :mod:`laplace_plus.tuning.unseen`. The network itself and its temperature alone are among the
    candidates. The prior precision stays. In regression the noise takes the temperature's place.

    Args:
        data: The rows of the fit; by default its loader.
        folds: K, at least 2.
        link: As for ``predictive``; None for ``"probit"`` where there is one. It takes each output's variance by
            itself, and lost less than ``"gumbel"`` wherever a posterior gained over the temperature.
        n_samples: As for ``predictive``.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
    """

    data: Iterable[Any] | None = field(default=None, repr=False)
    folds: int = 5
    link: str | None = None
    n_samples: int = 100
    tune_noise: bool | None = None

    def __post_init__(self) -> None:
        checks.count("folds", self.folds, 2)
        checks.count("n_samples", self.n_samples)

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> UnseenTuning:
        """Choose by left-out rows; arguments as for :class:`~laplace_plus.Tuner`; ``generator`` draws the folds.

        Raises:
            DataError: The rows of the fit are not at hand, or others were given; fewer rows than two for each fold.
            UnsupportedError: Rows that depend on each other.
        """
        own, likelihood = copy.copy(posterior), posterior.likelihood
        likelihood.require_own_rows("Rows that depend on each other cannot be left out.")
        noisy = tunes_noise(likelihood, self.tune_noise) and likelihood.is_gaussian
        if noisy:
            model = posterior.laplace_model()
            noise = model.residual_noise().exp().to(model.vector)
            own.noise_std = noise if own.noise_std.ndim else noise.mean()
        data = posterior.training_data.again(self.data, WHY)
        source = torch.Generator().manual_seed(0) if generator is None else generator
        link = self.link or ("probit" if "probit" in likelihood.links else likelihood.links[0])
        checks.choice("link", link, likelihood.links)
        options = {"link": link, "n_samples": self.n_samples, "seed": draw_seed(source) if link == "mc" else None}
        rows = _left_out(own, data, self.folds, link, source, progress)
        return _choice(own, rows, noisy, options)


def _choice(own: Tunable, rows: _LeftOut, noisy: bool, options: dict[str, Any]) -> UnseenTuning:
    """What is best beyond doubt, as a result."""
    likelihood, precision = own.likelihood, own.prior_precision.detach()
    moves = noisy or likelihood.is_classifier
    unit = 1.0 if own.noise_std is None else float(own.noise_std.square().mean())
    scales = (0.0, *(scale * unit / rows.mean_variance for scale in SCALES))
    path: list[tuple[float, float, Tensor]] = []
    n_evaluations = 0

    def losses(scale: float, heat: float) -> Tensor:
        nonlocal n_evaluations
        n_evaluations += 1
        return rows.losses(own.likelihood, scale, heat, noisy, options)

    def loss(place: float, scale: float) -> float:
        return rows.mean(losses(scale, math.exp(place)))

    network, heat = losses(0.0, 1.0), 1.0
    best, search = network, {"bounds": (LEAST, LARGEST), "method": "bounded", "options": {"xatol": CLOSE}}
    for scale in scales:
        if moves:
            heat = math.exp(scipy.optimize.minimize_scalar(loss, args=(scale,), **search).x)
        found = losses(scale, heat)
        path.append((scale, heat, found))
        if rows.mean(found) < rows.mean(best):
            best = found
        elif rows.mean(found) > rows.mean(best) + WORSE:
            break  # losses have one minimum along the path
    scale, heat, chosen = next(point for point in path if not rows.surpasses(best, point[2]))
    if scale == 0 and not rows.surpasses(chosen, network):
        heat, chosen = 1.0, network
    kind = "posterior" if scale else "temperature" if heat != 1 and not noisy else "network"
    alone = scale == 0 and "network" in likelihood.links
    scale = scale or (1.0 if alone else scales[1])
    return UnseenTuning(
        method="unseen",
        prior_precision=precision / heat**2 if noisy else precision,
        noise_std=own.noise_std * heat if noisy else None,
        value=-rows.mean(chosen),
        converged=LEAST + 2 * CLOSE < math.log(heat) < LARGEST - 2 * CLOSE and scale < scales[-1],
        n_evaluations=n_evaluations,
        link="network" if alone else options["link"],
        covariance_scale=scale / heat**2 if noisy else scale,
        output_temperature=1.0 if noisy else heat,
        chosen=kind,
        why=_WHY[kind].format(heat, scale),
        expected_gain=rows.mean(network) - rows.mean(chosen),
        scales=tuple(point[0] for point in path),
        losses=torch.tensor([rows.mean(point[2]) for point in path], dtype=torch.float64),
    )


_WHY = {
    "network": "No posterior and no temperature clearly loses less on left-out rows than the network, which predicts.",
    "temperature": "The network predicts at the temperature {:.3g}; no posterior clearly loses less on left-out rows.",
    "posterior": "{1:.3g} times the covariance, at the temperature {0:.3g}, loses least on left-out rows.",
}


@dataclass(frozen=True)
class _LeftOut:
    """Left-out rows of E examples: outputs ``[N, C]``, their covariances or variances, targets, weights, examples."""

    mean_outputs: Tensor
    covariance: Tensor
    targets: Any
    weights: Tensor
    example: Tensor

    @property
    def mean_variance(self) -> float:
        variances = variance_of(self.mean_outputs, self.covariance)
        return float(variances.mean().clamp_min(torch.finfo(variances.dtype).tiny))

    def losses(self, likelihood: Likelihood, scale: float, heat: float, noisy: bool, options: dict[str, Any]) -> Tensor:
        """Losses of each example at a scale and a temperature, times weights, ``[E]`` float64."""
        mean, covariance, seed = self.mean_outputs, scale * self.covariance, options["seed"]
        link = "network" if scale == 0 and "network" in likelihood.links else options["link"]
        if noisy:
            assert likelihood.noise_std is not None
            likelihood = likelihood.with_noise(likelihood.noise_std * heat)
        else:
            mean, covariance = mean / heat, covariance / heat**2
        source = None if seed is None else torch.Generator(device=mean.device).manual_seed(seed)
        chosen: Any = {"link": link, "n_samples": options["n_samples"], "generator": source}
        found = from_functional(likelihood, mean, covariance, **chosen).log_prob(self.targets)
        return self._by_example(-found * self.weights)

    def _by_example(self, values: Tensor) -> Tensor:
        size = int(self.example.max()) + 1
        return torch.zeros(size, dtype=torch.float64, device=values.device).index_add_(0, self.example, values.double())

    def mean(self, losses: Tensor) -> float:
        """The mean loss of an observation."""
        return float(losses.sum() / self.weights.double().sum())

    def surpasses(self, better: Tensor, other: Tensor) -> bool:
        """Whether losses are less than others by more than the standard error of the difference."""
        counts = self._by_example(self.weights)
        gain = other - better
        mean = gain.sum() / counts.sum()
        return bool(gain.sum() > (gain - mean * counts).square().sum().sqrt())


def _left_out(
    own: Tunable, data: Iterable[Any], count: int, link: str, source: torch.Generator, progress: bool
) -> _LeftOut:
    """Each fold's rows under the posterior of the others."""
    folds, n = folds_of(own.network, data, count, source, progress)
    if n != own.n_data:
        expected, got = f"its {own.n_data} examples, in any order", f"{n} examples"
        raise DataError("These are not the rows of the fit.", expected=expected, got=got)
    share = min(1.0, MOST / n, ENTRIES / (n * max(1, own.n_outputs) ** 2))
    parts, seen = [], 0
    for fold, state in zip(folds, _without_each(own, folds, source), strict=True):
        other = copy.copy(own)
        other.set_state(state)
        for inputs, target in fold:
            some = slice(max(1, round(share * batch_size(target))))
            inputs, target = cut(inputs, some), cut(target, some)
            found = other.functional_posterior(inputs, outputs=outputs_for(link, own.n_outputs))
            mean, covariance = found.mean.double(), found.covariance.double()
            own.likelihood.validate(mean, target)
            flat, targets, weight = own.likelihood.rows(mean, target)
            example = seen + torch.arange(len(mean), device=mean.device).repeat_interleave(len(flat) // len(mean))
            kept = weight.nonzero()[:, 0]
            rows = flat, covariance.flatten(0, mean.ndim - 2), targets, weight, example
            parts.append(tuple(cut(column, kept) for column in rows))
            seen += len(mean)
    return _LeftOut(*(joined(column) for column in zip(*parts, strict=True)))


def folds_of(
    network: Any, data: Iterable[Any], count: int, source: torch.Generator, progress: bool
) -> tuple[list[Pairs], int]:
    """Random parts of the examples, as equal as can be, of one pass over the data; and the number of examples."""
    folds: list[Pairs] = [[] for _ in range(count)]
    n = first = 0
    for batch in iterate(data, device=network.device, progress=progress, description="folds"):
        size = batch_size(batch.target)
        first = first or size
        if not can_be_cut(batch.inputs, size):
            raise DataError("Batches of these inputs cannot be cut into examples, so that none is left out.")
        order = torch.randperm(size, generator=source, device=source.device).cpu()
        for number, fold in enumerate(folds):
            chosen = order[(n + torch.arange(size)) % count == number]
            if len(chosen):
                fold.append((cut(batch.inputs, chosen.tolist()), cut(batch.target, chosen.tolist())))
        n += size
    if n < 2 * count:
        expected, got = f"two rows for each of {count} folds at least", f"{n} rows"
        raise DataError("There are too few rows to leave some out.", expected=expected, got=got)
    return [rejoined(fold, first) for fold in folds], n


def _without_each(own: Tunable, folds: list[Pairs], source: torch.Generator) -> Iterator[Any]:
    """The state of a fit without each fold, whose sums are those of the others."""
    adds_up = hasattr(own, "sums") and own.earlier is None
    if not adds_up or getattr(own.structure, "eigenvalue_corrected", False):
        for fold in folds:  # samples, and what is measured in a basis of the sum, do not add up
            others = [batch for other in folds if other is not fold for batch in other]
            yield copy.copy(own).fit_batches(others, generator=source)
        return
    parts = [own.sums(fold, None, progress=False, generator=None)[0] for fold in folds]
    for part in parts:
        yield reduce(lambda one, two: one.plus(two), [other for other in parts if other is not part])
