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
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._memory import is_given
from laplace_plus.curvature import Backend
from laplace_plus.errors import ConfigurationError, SelectionError, UnsupportedError
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.network.adapters import adapter_pairs
from laplace_plus.network.gradients import forward_parts
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.configuration import common_arguments, full_precision
from laplace_plus.posteriors.predicting import Method
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.posteriors.training_free_lora.per_token import TokenNoise
from laplace_plus.posteriors.training_free_lora.search import ScaleSearch, largest, least

_DEAD = 1e-6
"""Singular values of B below this share of the largest one get no noise: B maps it to nothing."""


class TrainingFreeLoRA(Posterior):
    """Gaussian noise on trained low-rank adapters, as much of it as predictions bear; no gradient is needed.

    Choose it for adapted language models, where every other posterior is too large. :meth:`fit` passes over the anchors
    about 15 times with ``n_samples + 1`` forward passes: some hundred of the training inputs are enough, and labels are
    not needed for classes. All scales see the same noise, so that the search is reproducible.

    The prior precision has no part in it but for ``"elbo"``. Predictions are those of sampled networks.

    Args:
        model: A network with adapters as PEFT makes them (``lora_A``, ``lora_B``); the active ones count.
        likelihood: As for :class:`Posterior`.
        tolerance: By how much the score of sampled networks may exceed the network's: relatively for ``"nll"``, by that
            share of anchors for ``"accuracy"``; without effect for ``"elbo"``. None takes the scale with the least NLL
            of ``labels``, as a temperature is fitted; the anchors should then be held out.
        score: ``"nll"``, the mean negative log-likelihood of averaged predictions, or ``"accuracy"``, their share of
            errors. Or ``"elbo"``: the scale has the least ``−(Σ_n E_q log p(y_n|θ) − KL(q ‖ p))/N``, in nats for each
            anchor, under a prior N(``prior_mean``, 1/``prior_precision``) on A's entries; there is no tolerance then.
        labels: Whether scores are by the anchors' labels, or by the network's own most probable targets.
        per_token: Whether each token has noise of its own, by random signs, as in the authors' code: what is sampled is
            then no network, and joint predictions of tokens are without covariances. :meth:`sample` does not know it.
        n_samples: Number of sampled networks that are averaged in the search.
        halvings: Of the interval in which the scale lies; its relative error is ``2**-halvings``.
        parameters: ``"lora"``, or names of some of the adapters' A.
        prior_precision, prior_mean: As for :class:`Posterior`; for ``"elbo"`` the precision is one number.
        temperature, backend: As for :class:`Posterior`; without effect.
        memory_budget: As for :class:`Posterior`; with ``per_token`` a given one changes the random numbers.

    Attributes:
        noise_scale: The scale σ; 0 where none was accepted.
        report: A :class:`ScaleSearch`.

    Raises:
        SelectionError: No active adapter, one that is merged or disabled, or one whose B is zero.
        ConfigurationError: An unknown score, a number that is not positive, several prior precisions for ``"elbo"``, or
            no tolerance of another score than ``"nll"`` by labels.
        UnsupportedError: ``per_token`` with adapters of other than linear layers.

    Warns:
        ConvergenceWarning: No scale was accepted, or none rejected; or none has a smaller NLL than the network.
    """

    default_method: Method = "sampled"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        tolerance: float | None = 0.003,
        score: Literal["nll", "accuracy", "elbo"] = "nll",
        labels: bool = False,
        per_token: bool = False,
        n_samples: int = 10,
        halvings: int = 10,
        parameters: Selection = "lora",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        checks.choice("score", score, ("nll", "accuracy", "elbo"))
        if tolerance is not None:
            checks.positive("tolerance", tolerance)
        elif score == "accuracy" or (score == "nll" and not labels):
            what, got = "By the network's own labels, no noise is better than any.", f"score={score!r}, labels={labels}"
            what = what if score == "nll" else "Errors are counted: many scales have the fewest."
            expected = 'score="nll" and labels=True, on anchors that were held out'
            raise ConfigurationError(what, expected=expected, got=got, fix="Set a tolerance.")
        checks.count("n_samples", n_samples)
        checks.count("halvings", halvings)
        pairs = adapter_pairs(model) if isinstance(model, nn.Module) else {}  # what is no model is refused below
        common = {name: value for name, value in common_arguments(locals()).items() if name != "pairs"}
        super().__init__(
            model, likelihood, **{**common, "parameters": list(pairs) if parameters == "lora" else parameters}
        )
        for item in self.network.selected:
            if item.name not in pairs or item.mask is not None:
                expected, got = ", ".join([*pairs][:3]) + ", …", item.name
                raise SelectionError("Only whole matrices A of active adapters get noise.", expected=expected, got=got)
        self.tolerance, self.score, self.labels = tolerance, score, bool(labels)
        self.n_samples, self.halvings, self.per_token = n_samples, halvings, bool(per_token)

    @override
    def options(self) -> dict[str, Any]:
        names = ("tolerance", "score", "labels", "per_token", "n_samples", "halvings")
        return {name: getattr(self, name) for name in names}

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        if self.score == "elbo" and self.prior_precision.numel() > 1:
            what, got = "The bound is known for one prior precision.", f"{self.prior_precision.numel()} of them"
            raise ConfigurationError(what, expected="a number", got=got)
        require_restartable(data, "The search for the scale passes over the anchors again and again.")
        self.check_draws(n_samples=self.n_samples)
        maps, seed = self._maps(), draw_seed(generator)
        draws = self._draws(maps, self.n_samples, torch.Generator().manual_seed(seed))
        network, n_data, n_outputs = self._score(data, 0.0, [], [], seed, progress)

        def score(scale: float) -> float:  # all scales see the same noise
            return self._score(data, scale, maps, draws, seed, progress)[0]

        if self.score == "elbo" or self.tolerance is None:
            self.noise_scale, steps = least(score, self.halvings, math.inf if self.score == "elbo" else network)
        else:
            bound = network + self.tolerance * (abs(network) if self.score == "nll" else 1)
            self.noise_scale, steps = largest(score, bound, self.halvings)
        self.maps, self.report = maps, ScaleSearch(network, tuple(steps))
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

    def _draws(self, maps: list[Tensor], n: int, generator: torch.Generator | None) -> list[Tensor]:
        """E of each selected A, ``[n, q, d_in]``."""
        sizes = [
            (n, one.shape[1], item.size // len(one)) for one, item in zip(maps, self.network.selected, strict=True)
        ]
        return [standard_normal(size, like=one, generator=generator) for size, one in zip(sizes, maps, strict=True)]

    def _outputs(
        self, inputs: Any, scale: float, maps: list[Tensor], draws: list[Tensor], signs: torch.Generator
    ) -> list[Tensor]:
        """Outputs ``[B, *, C]`` of a network for each of the draws."""
        network = self.network
        if not self.per_token:
            return network.several(inputs, network.vector() + scale * _deviations(maps, draws))
        values, found = network.substitute(network.vector()), []
        # Parts have other signs, which must not depend on what memory is free.
        parts = forward_parts(network, inputs) if is_given() else [inputs]
        for drawn in zip(*draws, strict=True):
            pairs = {
                id(values[name]): (scale * one, e)
                for name, one, e in zip(self.parameter_names, maps, drawn, strict=True)
            }
            noise = TokenNoise(pairs, signs)
            with torch.no_grad(), noise:
                found.append(torch.cat([network(part, values) for part in parts]))
            if noise.used < len(pairs) * len(parts):
                what, got = "Only linear layers have noise for each token.", f"{noise.used} of {len(pairs)} adapters"
                raise UnsupportedError(what, expected="adapters that multiply by A", got=got, fix="per_token=False")
        return found

    def _score(
        self, data: Iterable[Any], scale: float, maps: list[Tensor], draws: list[Tensor], seed: int, progress: bool
    ) -> tuple[float, int, int]:
        """The score at a scale, without draws that of the network; and the numbers of examples and of outputs."""
        network, likelihood, signs = self.network, self.likelihood, torch.Generator().manual_seed(seed)
        total, count, seen, n_outputs, doubt = 0.0, 0.0, 0, 0, 0.0
        for batch in self.batches(data, progress=progress, description=f"TrainingFreeLoRA: scale {scale:.3g}"):
            forward_parts(network, batch.inputs)
            outputs = network.forward(batch.inputs)
            likelihood.validate(outputs, batch.target)
            flat, targets, weights = likelihood.rows(outputs, batch.target)
            targets = targets if self.labels else likelihood.distribution(flat).mode
            sampled = self._outputs(batch.inputs, scale, maps, draws, signs) if draws else [outputs]
            each = [likelihood.rows(one, batch.target)[0] for one in sampled]
            if self.score == "accuracy":
                losses = (likelihood.mixture(torch.stack(each)).mode != targets).to(weights)
            else:
                logs = torch.stack([likelihood.log_density(one, targets) for one in each])
                losses = -logs.mean(0) if self.score == "elbo" else math.log(len(each)) - logs.logsumexp(0)
            total, count = total + float(weights @ losses.to(weights)), count + float(weights.sum())
            doubt += 0.0 if draws else likelihood.evidence_for_probabilities(outputs, batch.target)
            seen, n_outputs = seen + len(outputs), outputs.shape[-1]
        if not count:
            raise self.zero_curvature()
        if doubt > 0:
            doubt_logits(likelihood, doubt)
        if draws and self.score == "elbo":
            total += self._divergence(scale, maps)
        return total / count, seen, n_outputs

    def _divergence(self, scale: float, maps: list[Tensor]) -> float:
        """``KL(q ‖ p)`` over the directions that have noise, for a prior N(μ₀, 1/δ) on all entries of A."""
        delta = float(self.prior_precision)
        total = delta * float((self.network.vector().double() - self.prior_mean).square().sum())
        for one, item in zip(maps, self.network.selected, strict=True):
            inverse = one.double().square().sum(0)  # 1/d²
            ratio = delta * scale**2 * inverse[inverse > 0]
            total += item.size // len(one) * float((ratio - 1 - ratio.log()).sum())
        return total / 2

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        self.require_fit()
        self.check_draws(n=n)
        return self.mean + self.noise_scale * _deviations(self.maps, self._draws(self.maps, n, generator))

    @override
    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        if not self.per_token:
            yield from super().sampled_outputs(x, n, generator)
            return
        x, signs = self.network.receive(x), torch.Generator().manual_seed(draw_seed(generator))
        for _ in range(n):
            draws = self._draws(self.maps, 1, generator)
            yield from self._outputs(x, self.noise_scale, self.maps, draws, signs)

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        header = {"noise_scale": self.noise_scale, "report": asdict(self.report)}
        return header, {f"map.{number}": one for number, one in enumerate(self.maps)}

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.noise_scale = float(header["noise_scale"])
        self.report = ScaleSearch(header["report"]["network"], tuple(map(tuple, header["report"]["steps"])))
        self.maps = [tensors[f"map.{number}"] for number in range(len(self.network.selected))]
        for one, name in zip(self.maps, self.parameter_names, strict=True):
            if one.dtype != self.network.dtype or one.shape[:-1] != self.network.parameters[name].shape[:1]:
                raise ValueError(f"a map {tuple(one.shape)} of {one.dtype}")


def _deviations(maps: list[Tensor], draws: list[Tensor]) -> Tensor:
    """``V diag(1/d) E`` of all layers, ``[n, P]``."""
    return torch.cat([(one @ drawn).flatten(1) for one, drawn in zip(maps, draws, strict=True)], 1)
