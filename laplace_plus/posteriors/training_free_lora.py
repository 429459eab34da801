"""Bayesian low-rank adapters without training (Shi et al., 2024, "Training-Free Bayesianization", arXiv:2412.05723).

A layer adds ``s B A x``. With the thin SVD ``B = U diag(d) Vᵀ``, the rows of ``Vᵀ A`` are independent Gaussians with
standard deviations ``σ / d_i`` around the trained ones. The update ``s B A`` is then ``s σ U E`` away from its mean, E
standard normal, so that ``Cov(ΔW x) = s² σ² ‖x‖² U Uᵀ``: isotropic where B can reach, however B A is split into
factors. A sample of A is ``A + V diag(σ/d) E``. One number is left, σ. It is the largest one at which the averaged
predictions of sampled networks are, on some anchors, almost as good as the network's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus.adapters import adapter_pairs
from laplace_plus.curvature import Backend
from laplace_plus.errors import ConvergenceWarning, SelectionError, warn
from laplace_plus.evidence.tuning import check_choice, check_counts, check_positive
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.configuration import common_arguments, full_precision
from laplace_plus.posteriors.predicting import Method
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.selection import Selection

_DEAD = 1e-6
"""Singular values of B below this share of the largest one get no noise: B maps it to nothing."""

_START, _MOST = 0.015, 40
"""The first scale that is tried (the authors' largest one), and how often it is doubled or halved before giving up."""


@dataclass(frozen=True)
class ScaleSearch:
    """How the scale was found.

    Attributes:
        network: The network's score on the anchors: the mean NLL in nats, or the share of errors.
        steps: What was tried, in order: scale, score, and whether it was accepted.
    """

    network: float
    steps: tuple[tuple[float, float, bool], ...]


class TrainingFreeLoRA(Posterior):
    """Gaussian noise on trained low-rank adapters, as much of it as predictions bear; no gradient is needed.

    Choose it for adapted language models, where every other posterior is too large. :meth:`fit` passes over the anchors
    about 15 times with ``n_samples + 1`` forward passes: some hundred of the training inputs are enough, and labels are
    not needed for classes. All scales see the same noise, so that the search is reproducible.

    The prior precision has no part in it. Predictions are those of sampled networks.

    Args:
        model: A network with adapters as PEFT makes them (``lora_A``, ``lora_B``); the active ones count.
        likelihood: As for :class:`Posterior`.
        tolerance: By how much the score of sampled networks may exceed the network's: relatively for ``"nll"``, by that
            share of anchors for ``"accuracy"``.
        score: ``"nll"``, the mean negative log-likelihood, or ``"accuracy"``, the share of errors.
        labels: Whether scores are by the anchors' labels, or by the network's own most probable targets.
        n_samples: Number of sampled networks that are averaged in the search.
        halvings: Of the interval in which the scale lies; its relative error is ``2**-halvings``.
        parameters: ``"lora"``, or names of some of the adapters' A.
        prior_precision, prior_mean, temperature, backend, memory_budget: As for :class:`Posterior`; without effect.

    Attributes:
        noise_scale: The scale σ; 0 where none was accepted.
        report: A :class:`ScaleSearch`.

    Raises:
        SelectionError: No active adapter, one that is merged or disabled, or one whose B is zero.
        ConfigurationError: An unknown score, or a number that is not positive.

    Warns:
        ConvergenceWarning: No scale was accepted, or none rejected.
    """

    default_method: Method = "sampled"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        tolerance: float = 0.003,
        score: Literal["nll", "accuracy"] = "nll",
        labels: bool = False,
        n_samples: int = 10,
        halvings: int = 10,
        parameters: Selection = "lora",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        check_choice("score", score, ("nll", "accuracy"))
        check_positive(tolerance=tolerance)
        check_counts(n_samples=n_samples, halvings=halvings)
        pairs, common = adapter_pairs(model), common_arguments(locals())
        super().__init__(
            model, likelihood, **{**common, "parameters": list(pairs) if parameters == "lora" else parameters}
        )
        for item in self.network.selected:
            if item.name not in pairs or item.mask is not None:
                expected, got = ", ".join([*pairs][:3]) + ", …", item.name
                raise SelectionError("Only whole matrices A of active adapters get noise.", expected=expected, got=got)
        self.tolerance, self.score, self.labels = tolerance, score, bool(labels)
        self.n_samples, self.halvings = n_samples, halvings

    @override
    def options(self) -> dict[str, Any]:
        names = ("tolerance", "score", "labels", "n_samples", "halvings")
        return {name: getattr(self, name) for name in names}

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        require_restartable(data, "The search for the scale passes over the anchors again and again.")
        maps, seed, steps = self._maps(), draw_seed(generator), []
        vector = self.network.vector()
        noise = self._noise(maps, self.n_samples, torch.Generator().manual_seed(seed))
        score, n_data, n_outputs = self._score(data, vector[None], progress, "network")
        bound = score + self.tolerance * (abs(score) if self.score == "nll" else 1)

        def accepted(scale: float) -> bool:
            found, *_ = self._score(data, vector + scale * noise, progress, f"scale {scale:.3g}")
            steps.append((scale, found, found <= bound))
            return found <= bound

        low = high = _START
        first = accepted(_START)
        for _ in range(_MOST):
            low, high = (high, 2 * high) if first else (low / 2, low)
            if accepted(high if first else low) != first:
                break
        else:
            what = "Every scale was accepted" if first else "No scale was accepted"
            warn(f"{what}; the last was {steps[-1][0]:.3g}.", ConvergenceWarning)
            low = high = high if first else 0.0
        for _ in range(self.halvings if high > low else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if accepted(middle) else (low, middle)
        self.noise_scale, self.maps, self.report = low, maps, ScaleSearch(score, tuple(steps))
        self.n_data, self.n_outputs = n_data, n_outputs

    def _maps(self) -> list[Tensor]:
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
        return maps

    def _noise(self, maps: list[Tensor], n: int, generator: torch.Generator | None) -> Tensor:
        """Deviations of the samples at σ = 1, ``[n, P]``."""
        parts = []
        for item, one in zip(self.network.selected, maps, strict=True):
            drawn = standard_normal((n, one.shape[1], item.size // one.shape[0]), like=one, generator=generator)
            parts.append((one @ drawn).flatten(1))
        return torch.cat(parts, 1)

    def _score(self, data: Iterable[Any], vectors: Tensor, progress: bool, what: str) -> tuple[float, int, int]:
        """The score of the averaged predictions at some vectors ``[S, P]``, and numbers of examples and of outputs."""
        network, likelihood = self.network, self.likelihood
        total, count, seen, n_outputs = 0.0, 0.0, 0, 0
        for batch in self.batches(data, progress=progress, description=f"TrainingFreeLoRA: {what}"):
            outputs = network.forward(batch.inputs)
            likelihood.validate(outputs, batch.target)
            flat, targets, weights = likelihood.rows(outputs, batch.target)
            targets = targets if self.labels else likelihood.distribution(flat).mode
            each = [likelihood.rows(one, batch.target)[0] for one in network.several(batch.inputs, vectors)]
            if self.score == "nll":
                logs = torch.stack([likelihood.log_density(one, targets) for one in each])
                losses = math.log(len(each)) - logs.logsumexp(0)
            else:
                losses = (likelihood.mixture(torch.stack(each)).mode != targets).to(weights)
            total, count = total + float(weights @ losses.to(weights)), count + float(weights.sum())
            seen, n_outputs = seen + len(outputs), outputs.shape[-1]
        return total / max(1.0, count), seen, n_outputs

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        self.require_fit()
        check_counts(n=n)
        return self.mean + self.noise_scale * self._noise(self.maps, n, generator)

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        header = {"noise_scale": self.noise_scale, "report": asdict(self.report)}
        return header, {f"map.{number}": one for number, one in enumerate(self.maps)}

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.noise_scale = float(header["noise_scale"])
        self.report = ScaleSearch(header["report"]["network"], tuple(map(tuple, header["report"]["steps"])))
        self.maps = [tensors[f"map.{number}"] for number in range(len(self.network.selected))]
