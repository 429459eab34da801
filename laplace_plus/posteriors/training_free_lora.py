"""Bayesian low-rank adapters without training (Shi et al., 2024, "Training-Free Bayesianization", arXiv:2412.05723).

A layer adds ``s B A x``. With the thin SVD ``B = U diag(d) Vᵀ``, the rows of ``Vᵀ A`` are independent Gaussians with
standard deviations ``σ / d_i`` around the trained ones. The update ``s B A`` is then ``s σ U E`` away from its mean, E
standard normal, so that ``Cov(ΔW x) = s² σ² ‖x‖² U Uᵀ``: isotropic where B can reach, however B A is split into
factors. A sample of A is ``A + V diag(σ/d) E``. One number is left, σ. It is the largest one at which the averaged
predictions of sampled networks are, on some anchors, almost as good as the network's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConvergenceWarning, SelectionError, warn
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.network.network import full_precision
from laplace_plus.network.selection import Selection, adapter_pairs
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.state import State, of_state, survey
from laplace_plus.tuning import Auto, Tuner, TuningResult, Validation
from laplace_plus.tuning.base import tunes_noise
from laplace_plus.tuning.marginal_likelihood import updated_noise

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
        network: The network's score on the anchors, the mean NLL in nats.
        steps: What was tried, in order: scale, score, and whether it was accepted.
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

    The scale of the fit, the paper's, leaves probabilities of an adapter that is sure of its training texts nearly as
    they are. ``fit_prior_precision()`` takes that of the largest evidence lower bound, by the anchors' labels, and with
    ``data=`` that of least loss on held-out labels. Else the prior has no part. Predictions are those of sampled
    networks.

    Args:
        model: A network with adapters as PEFT makes them (``lora_A``, ``lora_B``); the active ones count.
        likelihood: As for :class:`Posterior`.
        tolerance: By what share the mean negative log-likelihood of averaged predictions may exceed the network's.
        labels: Whether that is by the anchors' labels, or by the network's own most probable targets.
        n_samples: Number of sampled networks that are averaged in the search.
        halvings: Of the interval in which the scale lies; its relative error is ``2**-halvings``.
        parameters: ``"lora"``, or names of some of the adapters' A.
        **common: As for :class:`Posterior`; the prior, the temperature and the backend are without effect.

    Raises:
        SelectionError: No active adapter, one that is merged or disabled, or one whose B is zero.
        ConfigurationError: A number that is not positive.

    Warns:
        ConvergenceWarning: No scale was accepted, or none rejected.
    """

    default_method = "sampled"
    report = of_state("report", "How the scale was found, a :class:`ScaleSearch`.")
    noise_scale = of_state(
        "noise_scale",
        "The scale σ; 0 where none was accepted.",
        partial(checks.number, "noise_scale", least=0.0),
    )

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation, "auto": Auto}

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        tolerance: float = 0.003,
        labels: bool = False,
        n_samples: int = 10,
        halvings: int = 10,
        parameters: Selection = "lora",
        **common: Any,
    ):
        self.n_samples, self.halvings = checks.count("n_samples", n_samples), checks.count("halvings", halvings)
        self.tolerance, self.labels = checks.positive("tolerance", tolerance), bool(labels)
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

        scale, steps = _largest(score, self.halvings, network + self.tolerance * abs(network))
        return AdapterNoise(mean, n_data, n_outputs, scale, maps, ScaleSearch(network, steps))

    def tunables(self) -> dict[str, Sequence[float]]:
        """No noise, and scales around the one that the fit accepted: from an eighth to 64 times it."""
        first = max((scale for scale, _, accepted in self.report.steps if accepted), default=_START)
        return {"noise_scale": (0.0, *(first * 2 ** (step / 2) for step in range(-6, 13)))}

    @override
    def run_tuner(self, tuner: Any, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What a tuner finds; without held-out data the scale of the largest evidence lower bound, by the labels."""
        if tuner.data is not None:
            return super().run_tuner(tuner, progress=progress, generator=generator)
        data, seed = self.training_data.again(None, "The bound passes over the anchors."), draw_seed(generator)
        noisy = tunes_noise(self.likelihood, tuner.tune_noise)
        scales = self.tunables()["noise_scale"][1:]
        found = [self.bound(data, scale, seed, noisy, progress) for scale in scales]
        place = max(range(len(scales)), key=lambda number: found[number][0])
        value, precision, noise = found[place]
        if not (inside := 0 < place < len(scales) - 1):
            warn(f"The bound is largest at the last scale that was tried, {scales[place]:.3g}.", ConvergenceWarning)
        return TuningResult("elbo", precision, noise, value, inside, settings={"noise_scale": scales[place]})

    def bound(
        self, data: Iterable[Any], scale: float, seed: int, noisy: bool, progress: bool = False
    ) -> tuple[float, Tensor, Tensor | None]:
        """The evidence lower bound at a scale, in nats, and its prior precision and noise (None where that stays).

        ``E_q[log p(D|θ)] / T − KL(q ‖ N(μ, α⁻¹ I))`` over the P directions of A that have noise, of covariance σ² S,
        at the best precision, ``α = P / (‖θ̂ − μ‖² + σ² tr S)``.
        """
        vectors = self.mean + scale * self._noise(self.state.maps, self.n_samples, torch.Generator().manual_seed(seed))
        statistics: Any = 0.0
        for batch in self.batches(data, progress=progress, description=f"TrainingFreeLoRA: bound at {scale:.3g}"):
            drawn = self.network.several(batch.inputs, vectors)
            each = [self.likelihood.statistics(one, batch.target) for one in drawn]
            statistics = statistics + torch.stack(each).double().mean(0).cpu()
        levels: Any = self.noise_std
        noise = updated_noise(statistics, 0.0, 1.0).view(levels.shape) if noisy else None
        expected = float(self.likelihood.log_likelihood(statistics, noise) / self.temperature.detach())
        size = squares = log_determinant = 0.0
        away = (self.mean - self.prior_mean).split([item.size for item in self.network.selected])
        for one, own in zip(self.state.maps, away, strict=True):
            widths = one.norm(dim=0)
            rows = (one[:, widths > 0] / widths[widths > 0]).mT @ own.view(len(one), -1)
            size += rows.numel()
            squares += float(rows.square().sum()) + scale**2 * rows.shape[1] * float(widths.square().sum())
            log_determinant += 2 * rows.shape[1] * float((scale * widths[widths > 0]).log().sum())
        divergence = (size * math.log(squares / size) - log_determinant) / 2
        return expected - divergence, torch.tensor(size / squares, dtype=self.mean.dtype), noise

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
        what = f"{'Every' if first else 'No'} scale was accepted"
        warn(f"{what}; the last was {steps[-1][0]:.3g}.", ConvergenceWarning)
        return high if first else 0.0, tuple(steps)
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low, tuple(steps)
