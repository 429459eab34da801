"""Noise in normalisation layers, and a few epochs of fine-tuning (Franchi et al., 2024, "Make me a BNN").

A normalisation gives ``γ ∘ ĥ ∘ (1 + α ε) + β`` with standard normal ε in place of ``γ ∘ ĥ + β``. Each of M members
starts at the trained network and moves γ and β alone, by a few epochs of SGD on the loss of the noisy network, in which
some random classes may count more. Predictions are averaged over members and noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._memory import budget, is_given, require_room
from laplace_plus._progress import progress_bar
from laplace_plus.curvature import Backend
from laplace_plus.errors import (
    ConfigurationError,
    NoGainWarning,
    NonFiniteError,
    SelectionError,
    UnsupportedError,
    warn,
)
from laplace_plus.io.checkpoints import count_of
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.network.batches import Batch, batch_size
from laplace_plus.network.gradients import forward_parts, pieces
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.abnn.noise import ElementNoise, norm_parameters
from laplace_plus.posteriors.configuration import common_arguments, full_precision
from laplace_plus.posteriors.predicting import Method
from laplace_plus.posteriors.resuming import FitStart, ResumableFit, stage_generator
from laplace_plus.posteriors.sample_based import held_out_scores
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.predictive import Prediction, from_samples
from laplace_plus.tuning import Tuner, TuningResult, Validation
from laplace_plus.tuning.base import require_only, tunes_noise
from laplace_plus.tuning.deletions import INTERPOLATION

_WHY = "Fine-tuning passes over the data again and again."

_MOMENTUM, _DECAY = 0.9, 1e-4
"""Of SGD: Nesterov's momentum, and weight decay."""

_SCALES = (0.05, 0.1, 0.2, 0.3, 0.5)
"""What is tried on held-out data, besides no noise."""

_DRAWS = 2
"""Noisy networks of each member by which the fit is judged on the training data."""

_DROP = 0.02
"""By how much the accuracy on the training data may fall."""


@dataclass(frozen=True)
class FineTuning:
    """How noisy networks do on the training data at the scale that :meth:`ABNN.fit` ended with, averaged.

    Attributes:
        network_nll, nll: Mean negative log-likelihoods in nats.
        network_accuracy, accuracy: Shares of correct classes; None in regression.
    """

    network_nll: float
    nll: float
    network_accuracy: float | None
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class NoiseResult(TuningResult):
    """What a tuning of an :class:`ABNN` found; its prior precision stays as it is.

    Attributes:
        noise_scale: α.
        fine_tuned: Whether γ and β are the members', or the network's own.
    """

    noise_scale: float
    fine_tuned: bool


class ABNN(ResumableFit):
    """Noise on what normalisation layers put out, around γ and β of several fine-tuned members.

    Choose it for networks with batch, instance, group, layer or RMS normalisation that are too large for curvature:
    a fit takes ``n_members · epochs`` passes of training, with gradients of γ and β alone, and stores those only.
    Running statistics stay as they are, and dropout is off. Normalisations that are not torch's own are not seen.

    The prior has no part in it, and neither has the temperature. Predictions are those of sampled networks, members in
    turn; a few dozen are enough. With ``noise="channel"`` every draw is a network with ``γ ∘ (1 + α ε)`` in place of γ:
    a distribution over weights with :meth:`sample` and joint predictions. With ``noise="element"``, the authors', each
    activation of each example has noise of its own, which no weights have.

    How much noise predictions bear depends on the network's depth, as relative variances multiply. :meth:`fit` halves
    the scale while averaged predictions lose more than .02 of the network's accuracy on the training data. Held-out
    data tell more: see :meth:`fit_scale`. Both can fall back to the network itself.

    Args:
        model: A trained network with normalisation layers.
        likelihood: As for :class:`Posterior`.
        noise: ``"channel"`` or ``"element"``.
        scale: α.
        n_members: M.
        epochs: Of fine-tuning; 0 for noise alone.
        prior_weight: η, by which ``⌊√C⌋`` random classes count more in each member's loss. It biases each member's
            probabilities.
        learning_rate: Of SGD with Nesterov's momentum .9 and weight decay 1e-4; a tenth of it after the first epoch,
            and a hundredth after the fourth.
        parameters: ``"all"`` γ and β that require gradients, or some of them by name.
        prior_precision, prior_mean, temperature, backend: As for :class:`Posterior`; without effect.
        memory_budget: As for :class:`Posterior`; with ``noise="element"`` a given one changes the random numbers.

    Attributes:
        noise_scale: The present α: ``scale``, or what :meth:`fit` or :meth:`fit_scale` made of it.
        fine_tuned: Whether γ and β are the members', or the network's own.
        report: A :class:`FineTuning`.

    Raises:
        UnsupportedError: No normalisation layer with γ; with ``noise="element"``, a γ that no function of torch uses.
        SelectionError: Parameters of other layers, parts of some, or no γ.
        ConfigurationError: A number out of range, or class weights without classes.
        NonFiniteError: Fine-tuning diverged.

    Warns:
        NoGainWarning: The scale is not the one that was asked for, or the network interpolates its training data.

    Example:
        >>> import laplace_plus as lp
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))
        >>> posterior = lp.ABNN(net, "classification").fit([(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]))])
        >>> posterior.members.shape, posterior.predictive(torch.ones(5, 2), n_samples=20).mean.shape
        (torch.Size([4, 18]), torch.Size([5, 3]))
    """

    default_method: Method = "sampled"

    tuners: ClassVar[Mapping[str, type[Tuner]]] = {"validation": Validation}

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        noise: Literal["channel", "element"] = "channel",
        scale: float = 0.2,
        n_members: int = 4,
        epochs: int = 5,
        prior_weight: float = 1.0,
        learning_rate: float = 5e-3,
        parameters: Selection = "all",
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        backend: str | Backend = "native",
        memory_budget: int | str | None = None,
    ):
        checks.choice("noise", noise, ("channel", "element"))
        checks.count("n_members", n_members)
        checks.count("epochs", epochs if epochs != 0 else 1)
        checks.positive("prior_weight", prior_weight)
        checks.positive("learning_rate", learning_rate)
        self.noise, self.n_members, self.epochs = noise, n_members, epochs
        self.prior_weight, self.learning_rate = float(prior_weight), float(learning_rate)
        self.noise_scale, self.fine_tuned = scale, True
        self.scale = self.noise_scale
        common, known = common_arguments(locals()), {}
        if isinstance(model, nn.Module):
            known = norm_parameters(model)
            if not any(known.values()):
                what, expected = (
                    "The network has no normalisation layer with γ.",
                    "torch's batch, layer, … normalisation",
                )
                raise UnsupportedError(what, expected=expected, got=type(model).__name__, fix="Take lp.KFAC.")
        if isinstance(parameters, str) and parameters == "all":
            own = dict(model.named_parameters(remove_duplicate=False)) if known else {}
            common["parameters"] = [name for name in known if own[name].requires_grad] if known else "all"
        super().__init__(model, likelihood, **common)
        known, parts = norm_parameters(self.network.model), []
        for item in self.network.selected:
            if item.name not in known or item.mask is not None:
                expected = f"whole γ and β, such as {', '.join([*known][:3])}"
                raise SelectionError("Only normalisation layers get noise.", expected=expected, got=item.name)
            parts.append(torch.full((item.size,), known[item.name]))
        self._is_scale = torch.cat(parts)
        if not bool(self._is_scale.any()):
            raise SelectionError("Noise belongs to γ.", expected="some γ", got=", ".join(self.parameter_names))
        if prior_weight != 1 and not (self.likelihood.is_classifier and self.likelihood.couples_outputs):
            what, got = (
                "Class weights need one of several classes.",
                f"prior_weight={prior_weight}, {self.likelihood!r}",
            )
            raise ConfigurationError(what, expected="prior_weight=1, or classification", got=got)
        self._members: Tensor | None = None

    @property
    def noise_scale(self) -> float:
        """The present α."""
        return self._noise_scale

    @noise_scale.setter
    def noise_scale(self, value: float) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            what = "The scale of the noise is out of range."
            raise ConfigurationError(what, expected="a number from 0", got=repr(value))
        self._noise_scale = float(value)

    @override
    def options(self) -> dict[str, Any]:
        names = ("noise", "scale", "n_members", "epochs", "prior_weight", "learning_rate")
        return {name: getattr(self, name) for name in names}

    @property
    def members(self) -> Tensor:
        """γ and β of the fine-tuned members, ``[M, P]``."""
        self.require_fit()
        assert self._members is not None
        return self._members

    # -- the fit -------------------------------------------------------------------------------------------------------

    @override
    def fit_batches(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> None:  # type: ignore[override]
        start = self._start(data, generator, _WHY)
        if self.noise == "element":
            self._require_seen(next(iter(self.batches(data))))
        self.check_draws(n_members=self.n_members)
        self.require_vectors(4 * self.n_members, "fine-tuning")
        members = self._fine_tuned(data, start, progress=progress)
        self._members, self.mean, self.n_data, self.n_outputs = members, members.mean(0), start.n_data, start.n_outputs
        lost: list[float] = []
        for scale, fine_tuned in [*((self.scale / 2**halvings, True) for halvings in range(5)), (0.0, False)]:
            self._set(scale, fine_tuned)
            self.report = self._compared(data, start, progress=progress)
            lost.append((self.report.network_accuracy or 0.0) - (self.report.accuracy or 0.0))
            if lost[-1] <= _DROP:
                break
        if len(lost) > 1:
            what = f"Noise of scale {self.scale:.3g} costs {lost[0]:.1%} of the accuracy on the training data"
            now = f"it is {scale:.3g} now" if fine_tuned else "the posterior now is the network"
            warn(f"{what}; {now}. fit_scale(held_out) chooses better.", NoGainWarning)
        elif self.likelihood.is_classifier and self.report.network_nll < INTERPOLATION and self.scale:
            what = "The network interpolates its training data, which then do not tell whether noise helps."
            warn(f"{what} fit_scale(held_out) does.", NoGainWarning)

    def _fine_tuned(self, data: Iterable[Any], start: FitStart, *, progress: bool) -> Tensor:
        """Members after SGD, ``[M, P]``; all take their steps in the same pass."""
        theta = self.network.vector().repeat(self.n_members, 1)
        source = stage_generator(start.seed, 0)
        weights = theta.new_ones(self.n_members, start.n_outputs)
        for own in weights if self.prior_weight != 1 else ():
            own[torch.randperm(len(own), generator=source)[: math.isqrt(len(own))]] = self.prior_weight
        velocity, first = torch.zeros_like(theta), 0
        saved = start.checkpoint.read("training", theta.device)
        if saved is not None:
            first, tensors = count_of(saved[0], "epochs"), saved[1]
            theta.copy_(tensors["members"])
            velocity.copy_(tensors["velocity"])
        for epoch in range(first, self.epochs):
            rate = self.learning_rate * 0.1 ** ((epoch >= 1) + (epoch >= 4))  # noqa: PLR2004
            source = stage_generator(start.seed, epoch + 1)
            for batch in self.batches(data, progress=progress, description=f"ABNN: epoch {epoch + 1}"):
                pairs = zip(theta, weights, strict=True)
                slopes = torch.stack([self._gradient(batch, own, some, source) for own, some in pairs])
                slopes += _DECAY * theta
                velocity = _MOMENTUM * velocity + slopes
                theta -= rate * (slopes + _MOMENTUM * velocity)
            if not bool(torch.isfinite(theta).all()):
                fix = "Take a smaller learning_rate or scale."
                raise NonFiniteError("Fine-tuning diverged.", expected="finite γ and β", got="NaN or Inf", fix=fix)
            start.checkpoint.write("training", {"epochs": epoch + 1}, {"members": theta, "velocity": velocity})
        return theta

    def _gradient(self, batch: Batch, vector: Tensor, weights: Tensor, source: torch.Generator) -> Tensor:
        """Of the mean loss of one noisy network, ``[P]``; ``weights [C]`` are those of the classes."""
        total, count = torch.zeros_like(vector), vector.new_zeros(())
        with torch.enable_grad():
            leaf = vector.clone().requires_grad_()
            values = self._values(leaf, self.scale, source)
            for part in self._parts(batch):
                outputs = self._noisy(part.inputs, values, self.scale, source)
                outputs, targets, share = self.likelihood.rows(outputs, part.target)
                if self.prior_weight != 1:
                    weights = weights.to(share)
                    share = share * (targets @ weights if targets.is_floating_point() else weights[targets])
                loss = -(share * self.likelihood.log_density(outputs, targets)).sum()
                if not loss.requires_grad:
                    raise self.zero_curvature()
                total += torch.autograd.grad(loss, leaf, retain_graph=True)[0]  # the noise of γ is that of all parts
                count += share.detach().sum()
        return total / count.clamp_min(torch.finfo(count.dtype).tiny)

    def _parts(self, batch: Batch) -> list[Batch]:
        """A batch in parts that the memory budget holds."""
        network, size, element = self.network, len(batch.target), self.noise == "element"
        if element and not is_given():  # parts have other noise, which must not depend on what memory is free
            return [batch]
        forward_parts(network, batch.inputs)
        each = (network.bytes_per_example or 0) * (2 if element else 1)  # noise doubles what a graph keeps
        parts = pieces(network, batch.inputs, each, budget(network.device) // 2)
        size = size if len(parts) == 1 else batch_size(parts[0])
        require_room(each * size, f"a backward pass for {size} examples", network.device, if_given=True)
        return [Batch(*pair) for pair in zip(parts, batch.target.split(size), strict=True)]

    def _require_seen(self, batch: Batch) -> None:
        """Raise :class:`UnsupportedError` for a γ whose normalisation the mode does not see."""
        parameters = self.network.parameters
        scales = {name: parameters[name] for name, yes in norm_parameters(self.network.model).items() if yes}
        with torch.no_grad(), ElementNoise(0.0, scales.values(), None) as mode:
            self.network(forward_parts(self.network, batch.inputs)[0], parameters)
        missed = [name for name in self.parameter_names if name in scales and id(scales[name]) not in mode.seen]
        if missed:
            what, fix = f"No function of torch normalises with {', '.join(missed)}.", 'Take noise="channel".'
            raise UnsupportedError(what, expected="F.batch_norm, F.layer_norm, …", got="none", fix=fix)

    def _compared(self, data: Iterable[Any], start: FitStart, *, progress: bool) -> FineTuning:
        """The averaged predictions of noisy networks on the training data, beside the network's."""
        source, likelihood, sums, count = stage_generator(start.seed, self.epochs + 1), self.likelihood, [0.0] * 4, 0.0
        for batch in self.batches(data, progress=progress, description="ABNN: training data"):
            drawn = self.sampled_outputs(batch.inputs, _DRAWS * self.n_members, source)
            for place, outputs in enumerate(([self.network.forward(batch.inputs)], list(drawn))):
                rows = [likelihood.rows(one, batch.target) for one in outputs]
                _, targets, share = rows[0]
                logs = torch.stack([likelihood.log_density(one, targets) for one, *_ in rows])
                sums[place] -= float(share @ (logs.logsumexp(0) - math.log(len(rows))).to(share))
                if likelihood.is_classifier:
                    right = likelihood.mixture(torch.stack([one for one, *_ in rows])).mode
                    labels = targets.argmax(-1) if targets.ndim > right.ndim else targets
                    sums[2 + place] += float(share @ (right == labels).to(share).reshape(len(share), -1).mean(1))
            count += float(share.sum())
        found = [total / count for total in sums]
        return FineTuning(found[0], found[1], *(found[2:] if likelihood.is_classifier else (None, None)))

    # -- noise ---------------------------------------------------------------------------------------------------------

    def _values(self, vector: Tensor, alpha: float, source: torch.Generator | None) -> dict[str, Tensor]:
        """γ and β by name, differentiable in the vector ``[P]``, with the noise of channels in γ."""
        return self.network.substitute(self._jittered(vector, alpha, source) if self.noise == "channel" else vector)

    def _noisy(self, inputs: Any, values: Mapping[str, Tensor], alpha: float, source: torch.Generator | None) -> Tensor:
        """Outputs ``[B, *, C]`` of a network with γ and β of :meth:`_values`, with the noise of elements."""
        with ElementNoise(alpha, values.values(), source) if self.noise == "element" else nullcontext():
            return self.network(inputs, values)

    def _jittered(self, vectors: Tensor, alpha: float, source: torch.Generator | None) -> Tensor:
        """``γ ∘ (1 + α ε)`` in place of γ."""
        noise = standard_normal(vectors.shape, like=vectors, generator=source)
        return vectors * (1 + alpha * noise * self._is_scale.to(vectors))

    def _drawn(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Members in turn from a random one on, ``[n, P]``; or the network's own vector."""
        if not self.fine_tuned:
            return self.mean.expand(n, -1)
        device = None if generator is None else generator.device
        first = torch.randint(self.n_members, (), generator=generator, device=device)
        return self.members[(torch.arange(n) + first.cpu()) % self.n_members]

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw γ and β, ``[n, P]``; errors as of :class:`Posterior`.

        Raises:
            UnsupportedError: With ``noise="element"``.
        """
        self.require_fit()
        self.check_draws(n=n)
        if self.noise == "element":
            what, fix = (
                "Noise of each activation is no distribution over weights.",
                'Take noise="channel", or .members.',
            )
            raise UnsupportedError(what, expected='predictive(x, method="sampled")', got="samples of weights", fix=fix)
        return self._jittered(self._drawn(n, generator), self.noise_scale, generator)

    @override
    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        return super().sampled_outputs(x, n, generator) if self.noise == "channel" else self._element(x, n, generator)

    def _element(self, x: Any, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        x = self.network.receive(x)
        parts = forward_parts(self.network, x) if is_given() else [x]  # as for the gradient
        for vector in self._drawn(n, generator):
            values = self._values(vector, self.noise_scale, generator)
            with torch.no_grad():
                yield torch.cat([self._noisy(part, values, self.noise_scale, generator) for part in parts])

    # -- the scale -----------------------------------------------------------------------------------------------------

    @full_precision
    def fit_scale(
        self,
        data: Iterable[Any],
        *,
        grid: Sequence[float] = _SCALES,
        tune_noise: bool = False,
        n_samples: int = 20,
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Choose α, and whether γ and β are the members', by the log-probability of held-out targets.

        The network without noise is among the candidates.

        Args:
            data: Held-out batches.
            grid: Positive scales to try, besides 0.
            tune_noise: Whether a Gaussian likelihood's noise level is chosen, too, beside each scale: from half to
                twice the present one, in steps of 2^¼.
            n_samples: Sampled networks in each prediction.
            progress: Whether to show a progress bar.
            generator: Source of randomness; each candidate sees the same random numbers.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: An empty grid, scales out of range, or no noise to tune.
            DataError: Data that can be run over only once.

        Warns:
            NoGainWarning: The network without noise was best; the posterior then is the network.
        """
        tuner = Validation(data, grid=tuple(grid), tune_noise=tune_noise, n_samples=n_samples)
        return self.fit_prior_precision(tuner, progress=progress, generator=generator)

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """Choose :attr:`noise_scale`, which takes the place of a prior precision; see :meth:`fit_scale`."""
        assert isinstance(tuner, Validation) and tuner.data is not None
        require_only(type(self).__name__, tuner, "data", "grid", "n_samples", "tune_noise")
        require_restartable(tuner.data, "Each scale is tried on the data.")
        noise, likelihoods = self.noise_std, [self.likelihood]
        if tunes_noise(self.likelihood, tuner.tune_noise) and noise is not None:
            likelihoods = [self.likelihood.with_noise(noise * 2 ** (step / 4)) for step in range(-4, 5)]
        scales = (0.0, *_SCALES) if tuner.grid is None else (0.0, *(float(scale) for scale in tuner.grid))
        candidates = list(product((False, True), scales))
        seed, scores, before = draw_seed(generator), [], dict(vars(self))
        try:
            for fine_tuned, scale in progress_bar(candidates, enabled=progress, description="ABNN: scales"):
                self._set(scale, fine_tuned)
                source = torch.Generator().manual_seed(seed)
                least = self.n_members if fine_tuned else 1  # without noise these are all there are

                def predictions(
                    x: Any, n: int = tuner.n_samples if scale else least, source: Any = source
                ) -> list[Prediction]:
                    self.check_samples(n, x)
                    outputs = torch.stack(list(self.sampled_outputs(x, n, source)))
                    return [from_samples(likelihood, outputs, generator=source) for likelihood in likelihoods]

                scores.append(held_out_scores(self, tuner.data, predictions))
        finally:
            self.__dict__ = before
        table = torch.stack(scores).nan_to_num(nan=-torch.inf)  # [candidates, likelihoods]
        best = int(table.argmax())
        fine_tuned, scale = candidates[best // len(likelihoods)]
        if not fine_tuned and scale == 0:
            what = "On the held-out data no noise predicts better than the network, which is what the posterior now is."
            warn(what, NoGainWarning)
        return NoiseResult(
            method="validation",
            prior_precision=self._prior_precision,
            noise_std=likelihoods[best % len(likelihoods)].noise_std if len(likelihoods) > 1 else None,
            value=float(table.flatten()[best]),
            converged=True,
            n_evaluations=table.numel(),
            noise_scale=scale,
            fine_tuned=fine_tuned,
        )

    @override
    def apply_tuning(self, result: TuningResult) -> None:
        assert isinstance(result, NoiseResult)
        super().apply_tuning(result)
        self._set(result.noise_scale, result.fine_tuned)

    def _set(self, scale: float, fine_tuned: bool) -> None:
        self.noise_scale, self.fine_tuned = scale, fine_tuned
        self.mean = self.members.mean(0) if fine_tuned else self.network.vector()

    # -- files ---------------------------------------------------------------------------------------------------------

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        header = {"noise_scale": self.noise_scale, "fine_tuned": self.fine_tuned, "report": asdict(self.report)}
        return header, {"members": self.members}

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._members, self.report = tensors["members"], FineTuning(**header["report"])
        self.noise_scale, self.fine_tuned = header["noise_scale"], bool(header["fine_tuned"])
        if self._members.shape != (self.n_members, self.n_parameters):
            raise ValueError(f"members {tuple(self._members.shape)}")
