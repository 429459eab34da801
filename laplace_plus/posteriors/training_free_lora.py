"""Bayesian low-rank adapters without training (Shi et al., 2024, "Training-Free Bayesianization", arXiv:2412.05723).

A layer adds ``s B A x``. With the thin SVD ``B = U diag(d) Vᵀ``, the rows of ``Vᵀ A`` are independent Gaussians with
standard deviations ``σ / d_i`` around the trained ones. The update ``s B A`` is then ``s σ U E`` away from its mean, E
standard normal, so that ``Cov(ΔW x) = s² σ² ‖x‖² U Uᵀ``: isotropic where B can reach, however B A is split into
factors. A sample of A is ``A + V diag(σ/d) E``. One number is left, σ. It is the largest one at which the averaged
predictions of sampled networks are, on some anchors, almost as good as the network's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, SelectionError, warn
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.network.network import full_precision
from laplace_plus.network.selection import Selection, adapter_pairs
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.state import State, of_state, survey

_DEAD = 1e-6
"""Singular values of B below this share of the largest one get no noise: B maps it to nothing."""

_START, _MOST = 0.015, 40
"""The first scale that is tried (the authors' largest one), and how often a search moves on before giving up."""

Steps = tuple[tuple[float, float, bool], ...]


@stored
@dataclass(frozen=True)
class ScaleSearch:
    """How the scale was found.

    Attributes:
        network: The network's score on the anchors: the mean NLL in nats, or the share of errors.
        steps: What was tried, in order: scale, score, and whether it was accepted (of a least score: the least so far).
    """

    network: float
    steps: Steps


@stored
@dataclass(frozen=True)
class AdapterNoise(State):
    """σ, how it was found, and ``V diag(1/d) [r, q]`` of each selected A."""

    noise_scale: float
    maps: tuple[Tensor, ...]
    report: ScaleSearch


class TrainingFreeLoRA(Posterior):
    """Gaussian noise on trained low-rank adapters, as much of it as predictions bear; no gradient is needed.

    Choose it for adapted language models, where every other posterior is too large. :meth:`fit` passes over the anchors
    about 15 times with ``n_samples + 1`` forward passes: some hundred of the training inputs are enough, and labels are
    not needed for classes. All scales see the same noise, so that the search is reproducible.

    The prior has no part in it. Predictions are those of sampled networks.

    Args:
        model: A network with adapters as PEFT makes them (``lora_A``, ``lora_B``); the active ones count.
        likelihood: As for :class:`Posterior`.
        tolerance: By how much the score of sampled networks may exceed the network's: relatively for ``"nll"``, by that
            share of anchors for ``"accuracy"``. None takes the scale with the least NLL of ``labels``, as a temperature
            is fitted; the anchors should then be held out.
        score: ``"nll"``, the mean negative log-likelihood of averaged predictions, or ``"accuracy"``, their share of
            errors.
        labels: Whether scores are by the anchors' labels, or by the network's own most probable targets.
        n_samples: Number of sampled networks that are averaged in the search.
        halvings: Of the interval in which the scale lies; its relative error is ``2**-halvings``.
        parameters: ``"lora"``, or names of some of the adapters' A.
        **common: As for :class:`Posterior`; the prior, the temperature and the backend are without effect.

    Raises:
        SelectionError: No active adapter, one that is merged or disabled, or one whose B is zero.
        ConfigurationError: An unknown score, a number that is not positive, or no tolerance of another score than
            ``"nll"`` by labels.

    Warns:
        ConvergenceWarning: No scale was accepted, or none rejected; or none has a smaller NLL than the network.
    """

    default_method = "sampled"
    report = of_state("report", "How the scale was found, a :class:`ScaleSearch`.")
    noise_scale = of_state(
        "noise_scale",
        "The scale σ; 0 where none was accepted.",
        partial(checks.number, "noise_scale", least=0.0),
    )

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        tolerance: float | None = 0.003,
        score: Literal["nll", "accuracy"] = "nll",
        labels: bool = False,
        n_samples: int = 10,
        halvings: int = 10,
        parameters: Selection = "lora",
        **common: Any,
    ):
        self.score = checks.choice("score", score, ("nll", "accuracy"))
        if tolerance is not None:
            checks.positive("tolerance", tolerance)
        elif score == "accuracy" or not labels:
            what, got = "By the network's own labels, no noise is better than any.", f"score={score!r}, labels={labels}"
            what = what if score == "nll" else "Errors are counted: many scales have the fewest."
            expected = 'score="nll" and labels=True, on anchors that were held out'
            raise ConfigurationError(what, expected=expected, got=got, fix="Set a tolerance.")
        self.n_samples, self.halvings = checks.count("n_samples", n_samples), checks.count("halvings", halvings)
        self.tolerance, self.labels = tolerance, bool(labels)
        pairs = adapter_pairs(model) if isinstance(model, nn.Module) else {}  # what is no model is refused below
        super().__init__(model, likelihood, parameters=list(pairs) if parameters == "lora" else parameters, **common)
        for item in self.network.selected:
            if item.name not in pairs or item.mask is not None:
                expected, got = ", ".join([*pairs][:3]) + ", …", item.name
                raise SelectionError("Only whole matrices A of active adapters get noise.", expected=expected, got=got)

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> AdapterNoise:
        n_data, n_outputs, _ = survey(self, data, "The search for the scale passes over the anchors again and again.")
        maps, mean = self._maps(), self.network.vector()
        noise = self._noise(maps, self.n_samples, torch.Generator().manual_seed(draw_seed(generator)))
        network = self._score(data, mean[None], "the network", progress)

        def score(scale: float) -> float:  # all scales see the same noise
            return self._score(data, mean + scale * noise, f"scale {scale:.3g}", progress)

        if self.tolerance is None:
            scale, steps = _least(score, self.halvings, network)
        else:
            bound = network + self.tolerance * (abs(network) if self.score == "nll" else 1)
            scale, steps = _largest(score, self.halvings, bound)
        return AdapterNoise(mean, n_data, n_outputs, scale, maps, ScaleSearch(network, steps))

    def _maps(self) -> tuple[Tensor, ...]:
        """``V diag(1/d) [r, q]`` of each selected A, in at least float32."""
        parameters, pairs, maps = dict(self.network.model.named_parameters()), adapter_pairs(self.network.model), []
        for name in self.parameter_names:
            b = parameters[pairs[name]].detach().to(self.network.dtype).flatten(1)
            _, values, rotation = torch.linalg.svd(b, full_matrices=False)
            if not bool(values[0] > 0):
                got, fix = f"{pairs[name]} = 0", "Train the adapter first."
                raise SelectionError("The adapter does nothing.", expected="a trained adapter", got=got, fix=fix)
            alive = values > _DEAD * values[0]
            maps.append(rotation.mT * torch.where(alive, values, 1.0).reciprocal() * alive)
        return tuple(maps)

    def _noise(self, maps: tuple[Tensor, ...], n: int, generator: torch.Generator | None) -> Tensor:
        """``V diag(1/d) E`` of all layers at σ = 1, ``[n, P]``, with E ``[n, q, d_in]``."""
        parts = []
        for one, item in zip(maps, self.network.selected, strict=True):
            drawn = standard_normal((n, one.shape[1], item.size // len(one)), like=one, generator=generator)
            parts.append((one @ drawn).flatten(1))
        return torch.cat(parts, 1)

    def _score(self, data: Iterable[Any], vectors: Tensor, name: str, progress: bool) -> float:
        """The score of the averaged predictions of networks at ``vectors [n, P]``."""
        network, likelihood, total, count = self.network, self.likelihood, 0.0, 0.0
        for batch in self.batches(data, progress=progress, description=f"TrainingFreeLoRA: {name}"):
            flat, targets, weights = likelihood.rows(network.forward(batch.inputs), batch.target)
            targets = targets if self.labels else likelihood.distribution(flat).mode
            each = [likelihood.rows(one, batch.target)[0] for one in network.several(batch.inputs, vectors)]
            if self.score == "accuracy":
                losses = (likelihood.mixture(torch.stack(each)).mode != targets).to(weights)
            else:
                logs = torch.stack([likelihood.log_density(one, targets) for one in each])
                losses = math.log(len(each)) - logs.logsumexp(0)
            total, count = total + float(weights @ losses.to(weights)), count + float(weights.sum())
        return total / count

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        checks.count("n", n)
        self.require_fit()
        return self.mean + self.noise_scale * self._noise(self.state.maps, n, generator)


# -- searches for a scale ----------------------------------------------------------------------------------------------


def _largest(score: Callable[[float], float], halvings: int, bound: float) -> tuple[float, Steps]:
    """The largest scale found whose score is within the bound, by bisection; 0 where there is none. And the steps."""
    steps: list[tuple[float, float, bool]] = []

    def accepted(scale: float) -> bool:
        found = score(scale)
        steps.append((scale, found, found <= bound))
        return found <= bound

    low = high = _START
    first = accepted(_START)
    for _ in range(_MOST):
        low, high = (high, 2 * high) if first else (low / 2, low)
        if accepted(high if first else low) != first:
            break
    else:
        _warn(f"{'Every' if first else 'No'} scale was accepted", steps)
        return high if first else 0.0, tuple(steps)
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low, tuple(steps)


def _least(score: Callable[[float], float], halvings: int, without: float) -> tuple[float, Steps]:
    """The scale with the least score; 0 where none is better than the score without noise. And the steps.

    A place among octaves moves to the better one of its neighbours, or these come nearer by half.
    """
    steps: list[tuple[float, float, bool]] = []
    known: dict[float, float] = {}

    def at(place: float) -> float:
        if place not in known:
            known[place] = score(_START * 2.0**place)
            steps.append((_START * 2.0**place, known[place], known[place] <= min(known.values())))
        return known[place]

    place, step, moves = 0.0, 1.0, 0
    while step > 2.0**-halvings and moves < _MOST:
        best = min(place, place - step, place + step, key=at)
        if best < place and at(best) >= without:
            break  # smaller scales are better, and no noise is the best
        step, moves = (step / 2, moves) if best == place else (step, moves + 1)
        place = best
    if at(place) >= without:
        _warn("No scale was better than none", steps)
        return 0.0, tuple(steps)
    if moves == _MOST:
        _warn("The least score is at no scale", steps)
    return _START * 2.0**place, tuple(steps)


def _warn(what: str, steps: list[tuple[float, float, bool]]) -> None:
    warn(f"{what}; the last was {steps[-1][0]:.3g}.", ConvergenceWarning)
