"""Bayesian low-rank adapters without training (Shi et al., 2024, "Training-Free Bayesianization", arXiv:2412.05723).

A layer adds ``s B A x``. With the thin SVD ``B = U diag(d) Vᵀ``, the rows of ``Vᵀ A`` are independent Gaussians with
standard deviations ``σ / d_i`` around the trained ones. The update ``s B A`` is then ``s σ U E`` away from its mean, E
standard normal, so that ``Cov(ΔW x) = s² σ² ‖x‖² U Uᵀ``: isotropic where B can reach, however B A is split into
factors. A sample of A is ``A + V diag(σ/d) E``. One number is left, σ. It is the largest one at which the averaged
predictions of sampled networks are, on some anchors, almost as good as the network's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, SelectionError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.network.adapters import adapter_pairs
from laplace_plus.network.selection import Selection
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.public import full_precision
from laplace_plus.posteriors.state import State, of_state
from laplace_plus.posteriors.training_data import require_restartable, survey
from laplace_plus.posteriors.training_free_lora.search import ScaleSearch, largest, least

_DEAD = 1e-6
"""Singular values of B below this share of the largest one get no noise: B maps it to nothing."""


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
        **common: As for :class:`Posterior`; the temperature and the backend are without effect.

    Raises:
        SelectionError: No active adapter, one that is merged or disabled, or one whose B is zero.
        ConfigurationError: An unknown score, a number that is not positive, several prior precisions for ``"elbo"``, or
            no tolerance of another score than ``"nll"`` by labels.
        UnsupportedError: ``per_token`` with adapters of other than linear layers.

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
        score: Literal["nll", "accuracy", "elbo"] = "nll",
        labels: bool = False,
        per_token: bool = False,
        n_samples: int = 10,
        halvings: int = 10,
        parameters: Selection = "lora",
        **common: Any,
    ):
        self.score = checks.choice("score", score, ("nll", "accuracy", "elbo"))
        if tolerance is not None:
            checks.positive("tolerance", tolerance)
        elif score == "accuracy" or (score == "nll" and not labels):
            what, got = "By the network's own labels, no noise is better than any.", f"score={score!r}, labels={labels}"
            what = what if score == "nll" else "Errors are counted: many scales have the fewest."
            expected = 'score="nll" and labels=True, on anchors that were held out'
            raise ConfigurationError(what, expected=expected, got=got, fix="Set a tolerance.")
        self._one_precision = score == "elbo"  # type: ignore[misc]
        self.n_samples, self.halvings = checks.count("n_samples", n_samples), checks.count("halvings", halvings)
        self.tolerance, self.labels, self.per_token = tolerance, bool(labels), bool(per_token)
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
        require_restartable(data, "The search for the scale passes over the anchors again and again.")
        n_data, n_outputs, _ = survey(self, data)
        maps, seed = self._maps(), draw_seed(generator)
        draws = self._draws(maps, self.n_samples, torch.Generator().manual_seed(seed))
        network = self._score(data, 0.0, (), [], seed, progress)

        def score(scale: float) -> float:  # all scales see the same noise
            return self._score(data, scale, maps, draws, seed, progress)

        if self.score == "elbo" or self.tolerance is None:
            scale, steps = least(score, self.halvings, math.inf if self.score == "elbo" else network)
        else:
            bound = network + self.tolerance * (abs(network) if self.score == "nll" else 1)
            scale, steps = largest(score, bound, self.halvings)
        return AdapterNoise(self.network.vector(), n_data, n_outputs, scale, maps, ScaleSearch(network, tuple(steps)))

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

    def _draws(self, maps: Sequence[Tensor], n: int, generator: torch.Generator | None) -> list[Tensor]:
        """E of each selected A, ``[n, q, d_in]``."""
        sizes = [
            (n, one.shape[1], item.size // len(one)) for one, item in zip(maps, self.network.selected, strict=True)
        ]
        return [standard_normal(size, like=one, generator=generator) for size, one in zip(sizes, maps, strict=True)]

    def _outputs(
        self, inputs: Any, scale: float, maps: Sequence[Tensor], draws: list[Tensor], signs: torch.Generator
    ) -> list[Tensor]:
        """Outputs ``[B, *, C]`` of a network for each of the draws."""
        network = self.network
        if not self.per_token:
            return network.several(inputs, network.vector() + scale * _deviations(maps, draws))
        values, found = network.substitute(network.vector()), []
        for drawn in zip(*draws, strict=True):
            pairs = {
                id(values[name]): (scale * one, e)
                for name, one, e in zip(self.parameter_names, maps, drawn, strict=True)
            }
            noise = TokenNoise(pairs, signs)
            with torch.no_grad(), noise:
                found.append(network(inputs, values))
            if noise.used < len(pairs):
                what, got = "Only linear layers have noise for each token.", f"{noise.used} of {len(pairs)} adapters"
                raise UnsupportedError(what, expected="adapters that multiply by A", got=got, fix="per_token=False")
        return found

    def _score(
        self, data: Iterable[Any], scale: float, maps: Sequence[Tensor], draws: list[Tensor], seed: int, progress: bool
    ) -> float:
        """The score at a scale, without draws that of the network."""
        network, likelihood, signs = self.network, self.likelihood, torch.Generator().manual_seed(seed)
        total, count = 0.0, 0.0
        for batch in self.batches(data, progress=progress, description=f"TrainingFreeLoRA: scale {scale:.3g}"):
            outputs = network.forward(batch.inputs)
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
        if draws and self.score == "elbo":
            total += self._divergence(scale, maps)
        return total / count

    def _divergence(self, scale: float, maps: Sequence[Tensor]) -> float:
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
        checks.count("n", n)
        self.require_fit()
        maps = self.state.maps
        return self.mean + self.noise_scale * _deviations(maps, self._draws(maps, n, generator))

    @override
    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        if not self.per_token:
            yield from super().sampled_outputs(x, n, generator)
            return
        x, signs = self.network.receive(x), torch.Generator().manual_seed(draw_seed(generator))
        for _ in range(n):
            draws = self._draws(self.state.maps, 1, generator)
            yield from self._outputs(x, self.noise_scale, self.state.maps, draws, signs)


def _deviations(maps: Sequence[Tensor], draws: list[Tensor]) -> Tensor:
    """``V diag(1/d) E`` of all layers, ``[n, P]``."""
    return torch.cat([(one @ drawn).flatten(1) for one, drawn in zip(maps, draws, strict=True)], 1)


class TokenNoise(TorchFunctionMode):
    """Noise of its own for each token of a sequence, as the authors' code has it (flipout; Wen et al., 2018).

    Adds ``M (r ∘ E (x ∘ s))`` to each token's ``A x``, with fresh random signs r and s for each token x.

    Uses of a weight are told by the tensor itself, so that the network is left as it is and other threads are, too.

    Args:
        noise: By the identity of a weight A ``[r, d_in]``, the pair of M ``[r, q]`` and E ``[q, d_in]``.
        generator: The source of the signs.
    """

    def __init__(self, noise: Mapping[int, tuple[Tensor, Tensor]], generator: torch.Generator):
        super().__init__()
        self.noise, self.generator, self.used = noise, generator, 0

    def signs(self, *shape: int, like: Tensor) -> Tensor:
        """Random signs."""
        return standard_normal(shape, like=like, generator=self.generator).sign()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not linear or len(args) < 2 or id(args[1]) not in self.noise:
            return result
        m, e = self.noise[id(args[1])]
        self.used += 1
        x = args[0].to(e)
        rows = (x * self.signs(*x.shape, like=e)) @ e.mT
        return result + ((rows * self.signs(*rows.shape, like=e)) @ m.mT).to(result)
