"""Uncertainty at about the price of one forward pass: a head on the network's own features, fitted to a posterior.

Of a linear last layer a variance is a quadratic form of what enters it; of all weights there is one for each layer,
times how the output depends on that. With the outputs and the inputs of some layers as features φ, the head is::

    log V_c(x) = log(ε_c + Σ_h U_ch (w_hᵀφ + b_h)²) + Σ_h R_ch tanh(s_hᵀφ + t_h),   U ≥ 0, ε > 0.

The form grows far from the data as the exact variance does; the rest is bounded.
Of classes, ``V_c`` is half the variance of logit c's difference from others, averaged by :func:`centring_weights`. For
the integral of ``"gumbel"`` stands, with ``a = m − max m`` and ``q = softmax m``, the second order in V up to MacKay's
approximation for pairs: ``p_c ∝ exp min(a_c + V_c (max q − q_c), a_c / √(1 + π/4 V_c))``.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.applications.serving import FrozenPosterior, pair_tables
from laplace_plus.errors import UnsupportedError, warn
from laplace_plus.likelihoods import Bernoulli, Categorical, Gaussian
from laplace_plus.likelihoods.base import widen
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network import batches
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.posteriors import Posterior
from laplace_plus.predictive.linearized import outputs_for

__all__ = ["Agreement", "DistillationQuality", "DistilledPosterior", "distill"]

MOST_TAPS, HELD, BATCH, RATE, DECAY, GOOD, FAR = 8, 5, 512, 1e-2, 0.3, 0.9, 0.02
"""Layers whose inputs are features; every fifth input is held back; rows of a step of AdamW, its largest rate and its
decay of what multiplies features; below which agreement, and above which divergence, there is a warning."""

_PASS = threading.local()
"""``.taken``: inputs of layers in the pass that runs in this thread; a context variable could not be compiled."""


class Agreement(NamedTuple):
    """Of log-variances R² and the correlation of ranks; of ``"gumbel"``'s probabilities KL in nats, else 0."""

    r2: float
    ranks: float
    kl: float


class DistillationQuality(NamedTuple):
    """How the head agrees with the posterior on inputs that were held back, and on altered copies of these."""

    held: Agreement
    altered: Agreement


class DistilledPosterior(FrozenPosterior):
    """A copy of the network with a head for variances, called as the network is; see :func:`distill`.

    The ``functional_variance`` of classes is the module text's ``V_c``, but for ``"probit"``.
    """

    quality: DistillationQuality

    def __init__(self, posterior: Posterior, link: str, inputs: Any):
        nn.Module.__init__(self)
        self.likelihood, self.link, self.heat = posterior.likelihood, link, posterior.output_temperature
        self.arrange, noise = posterior.network.arrange, posterior.likelihood.noise_std
        self.is_paired = isinstance(self.likelihood, Categorical) and link != "probit"
        self.body = copy.deepcopy(posterior.network.model).requires_grad_(False)
        layers = {name: own for name, own in self.body.named_modules() if next(own.parameters(False), None) is not None}
        hooks = {name: own.register_forward_pre_hook(partial(_take, name)) for name, own in layers.items()}
        self.taps = dict[str, partial[Tensor]]()  # what makes features [B, D] or [B, *, D] of layers' inputs
        args, keywords = batches.bind(self.train(False).body, batches.cut(inputs, slice(32)))
        outputs = self.features(*args, **keywords)[0]
        tables = pair_tables(link, outputs.flatten(0, -2)[0])
        self.has_noise, self.has_pair = noise is not None, bool(tables)
        for name, own in (tables | ({} if noise is None else {"noise": noise.detach().square().to(outputs)})).items():
            self.register_buffer(name, own)
        taken = {name: own for name, own in _PASS.taken.items() if own.ndim > 1 and len(own) == len(outputs)}
        names = [name for name, own in taken.items() if own.is_floating_point()]
        for place in torch.linspace(0, len(names) - 1, min(MOST_TAPS, len(names))).round().int().tolist():
            name, axis = names[place], 1 if isinstance(layers[names[place]], nn.modules.conv._ConvNd) else -1
            others = [other for other in range(1, taken[name].ndim) if other != axis % taken[name].ndim]
            last = partial(torch.movedim, source=axis, destination=-1)
            is_each = not others or last(taken[name]).shape[:-1] == outputs.shape[:-1]
            self.taps[name] = last if is_each else partial(torch.mean, dim=others)
        for name in hooks.keys() - self.taps.keys():
            hooks[name].remove()
        self._find_tokens(*args, **keywords)

    def _find_tokens(self, *args: Any, **keywords: Any) -> None:
        """Of a sequence, take the first or the last token, not the mean, where the outputs depend on it most."""
        for own in self.body.parameters():
            own.requires_grad_(own.is_floating_point())
        with torch.enable_grad():
            total = self.features(*args, **keywords)[0].square().sum()
            taken = {name: own for name, own in _PASS.taken.items() if own.ndim == 3 and own.requires_grad}  # noqa: PLR2004
            slopes = torch.autograd.grad(total, [*taken.values()], allow_unused=True) if taken else ()
        self.body.requires_grad_(False)
        for name, slope in zip(taken, slopes, strict=True):
            most = 1 if slope is None else int(slope.square().sum((0, 2)).argmax())
            if self.taps[name].keywords == {"dim": [1]} and most in (0, taken[name].shape[1] - 1):
                self.taps[name] = partial(torch.select, dim=1, index=-min(most, 1))

    def features(self, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The outputs ``[B, *, C]`` and the features ``[B, *, D]``."""
        _PASS.taken = {}
        outputs = widen(self.arrange(batches.output_tensor(self.body(*args, **keywords))))
        parts = [outputs]
        for name, reduced in self.taps.items():
            value = reduced(_PASS.taken[name])
            if value.ndim < outputs.ndim:
                value = value.view(value.shape[0], *[1] * (outputs.ndim - 2), -1).expand(*outputs.shape[:-1], -1)
            parts.append(value)
        return outputs if self.heat == 1 else outputs / self.heat, torch.cat(parts, -1)

    def log_variance(self, features: Tensor) -> Tensor:
        """The head: logarithms ``[B, *, C]`` of variances."""
        return _logs(self._buffers, features)

    def functional(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """The outputs ``[B, *, C]`` and their variances."""
        mean, features = self.features(*inputs, **keywords)
        return mean, self.log_variance(features.to(self._buffers["inner"])).exp()

    def predicted(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y; for ``"gumbel"`` by the closed form."""
        if self.link != "gumbel" or self.has_pair:
            return super().predicted(mean, covariance)
        ahead, q = mean - mean.amax(-1, keepdim=True), mean.softmax(-1)
        near = torch.addcmul(ahead, covariance, q - q.amax(-1, keepdim=True), value=-1)
        p = torch.minimum(near, ahead * (1 + math.pi / 4 * covariance).rsqrt()).softmax(-1)
        return p, torch.addcmul(p, p, p, value=-1)


def distill(
    posterior: Posterior,
    inputs: Any,
    *,
    link: str | None = None,
    copies: int = 8,
    width: int = 32,
    steps: int = 2000,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> DistilledPosterior:
    """A module for serving whose variances come from a small head; it exports as the network does: ``docs/serving.md``.

    The head is fitted to exact variances at the inputs and at altered copies of them: mixtures, rolls, other contrasts,
    noise, swapped tokens. Each input takes ``1 + copies`` exact predictions; some thousand inputs are enough. Every
    fifth is held back, to say in ``quality`` how well that went; a warning says so if any figure is below .9.

    Args:
        posterior: A fitted posterior of classes, binary or real outputs, with the hyperparameters to be served.
        inputs: A loader, whose targets are not looked at, or one batch's inputs.
        link: As of ``predictive``: any but ``"mc"`` and ``"bridge"``.
        copies: Altered copies of each input.
        width: Squares, and as many hidden units, of the head.
        steps: Steps of AdamW.
        progress: Whether to show progress bars.
        generator: Source of randomness; by default the head is the same each time.

    Raises:
        NotFittedError: Before the fit.
        UnsupportedError: Another likelihood, a mean that is not the network's output, or inputs without examples.
        ConfigurationError: Fewer than 20 inputs, or other options out of range.
    """
    likelihood = posterior.likelihood if isinstance(posterior, Posterior) else None
    if type(likelihood) not in (Categorical, Bernoulli, Gaussian):
        what, expected = f"{posterior!r} takes more than variances.", "a posterior of classes, binary or real outputs"
        raise UnsupportedError(what, expected=expected)
    posterior.require_fit()
    network, known = posterior.network, [one for one in likelihood.links if one not in ("mc", "bridge")]
    link = checks.choice("link", link or posterior.link or known[0], known)
    for name, value in {"copies": copies, "width": width, "steps": steps}.items():
        checks.count(name, value)
    source = torch.Generator().manual_seed(0 if checks.generator(generator) is None else draw_seed(generator))
    made: Any = None
    n, parts = 0, list[list[Any]](([], [], []))  # fitted to, held back, altered copies of the latter
    loader = [inputs] if isinstance(inputs, Tensor | Mapping) else inputs
    with exact_arithmetic(network), torch.no_grad():
        for item in progress_bar(loader, enabled=progress, description="distill: exact variances"):
            whole = network.receive(batches.inputs_of(item, whole=network.lists))
            size = batches.batch_size(whole)
            if not batches.can_be_cut(whole, size):
                what, expected = "Inputs cannot be cut into examples.", "tensors with examples along the first axis"
                raise UnsupportedError(what, expected=expected, got=checks.describe(whole))
            made = made or DistilledPosterior(posterior, link, whole)
            held = torch.arange(n, n + size, device=network.device) % HELD == HELD - 1
            n += size
            for rows, plain, altered in ((~held, 0, 0), (held, 1, 2)):
                part = batches.cut(whole, rows.nonzero()[:, 0])
                for number in range((1 + copies) * bool(rows.any())):
                    own = _altered(part, source) if number else part
                    parts[altered if number else plain].append(exact_logs(posterior, made, own))
        checks.count("The number of inputs", n, 20)
        data = [[*map(torch.cat, zip(*own, strict=True))] for own in parts]
        _fit(made, data[0], width, steps, source, progress)
        made.quality = DistillationQuality(*(_agreement(made, *own) for own in data[1:]))
    if not all(min(own.r2, own.ranks) >= GOOD and own.kl <= FAR for own in made.quality):
        what = f"Distilled variances differ from the posterior's on held-back inputs: {made.quality}."
        warn(f"{what} Give more inputs, width= or steps=. If only altered copies differ, so may other inputs.")
    return made


def _take(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Tensor) and name not in _PASS.taken:
        _PASS.taken[name] = args[0]


def _logs(head: Any, features: Tensor) -> Tensor:
    form, hidden = F.linear(features, head["inner"], head["shift"]).chunk(2, -1)
    return F.linear(form.square(), head["form"], head["floor"]).log() + F.linear(hidden.tanh(), head["outer"])


def exact_logs(posterior: Posterior, made: DistilledPosterior, inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[N, D]``, logarithms ``[N, C]`` of exact variances, and for ``"gumbel"`` probabilities ``[N, C]``."""
    args, keywords = batches.bind(made.body, inputs)
    outputs, features = made.features(*args, **keywords)
    needed = outputs_for(made.link, outputs.shape[-1]) or (None if made.is_paired else "diagonal")
    mean, variance = posterior.functional_posterior(inputs, outputs=needed)
    mean, variance = mean / made.heat, variance / made.heat**2
    tolerance = 10 * torch.finfo(outputs.dtype).eps ** 0.5
    if not torch.allclose(mean, outputs.to(mean), tolerance, tolerance * float(mean.abs().max())):
        what, expected = "The posterior's mean is not what a copy of its network gives.", "the network's own outputs"
        raise UnsupportedError(what, expected=expected)
    p = mean[..., :0]
    if made.is_paired:
        variance = independent_variances(mean, variance) if variance.dim() > mean.dim() else variance
        p = posterior.likelihood.predict(mean, variance, link=made.link).mean if made.link == "gumbel" else p
        shares = centring_weights(mean)
        others = (shares * variance).sum(-1, keepdim=True) - shares * variance
        variance = (variance + others / (1 - shares).clamp_min(1e-6)) / 2
    variance = variance.clamp_min(torch.finfo(torch.float32).tiny)
    return features.to(mean).flatten(0, -2), variance.log().flatten(0, -2), p.flatten(0, -2)


def _altered(inputs: Any, source: torch.Generator) -> Any:
    """Every example altered by some of: a mixture with another, a roll, another contrast or sign, noise.

    Integers that are more than zeros and ones, such as tokens, are swapped with those of another example.
    """
    leaves, rebuild = batches.flatten(inputs)
    size, drawn = batches.batch_size(inputs), dict[str, Any](generator=source, device="cpu")
    order, chance = torch.randperm(size, **drawn), torch.rand(8, size, **drawn)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        u, other = chance.to(leaf.device).view(8, size, *[1] * (leaf.ndim - 1)), leaf[order.to(leaf.device)]
        if not leaf.is_floating_point():
            swapped = torch.rand(leaf.shape, **drawn).to(u) < u[0]
            return leaf if int(leaf.max()) <= 1 else other.where(swapped, leaf)
        used, u, centre, spread = u[4:] < 0.4, u.to(leaf), leaf.mean(0), leaf.std(0, correction=0)  # noqa: PLR2004
        spread = torch.maximum(spread, spread.median() / 2)  # columns may have units of their own, borders none
        mixed = (other + (2 * u[0] - 0.5) * (leaf - other)).where(used[0], leaf)
        for axis in range(1, leaf.ndim):
            mixed = mixed.roll(int(torch.randint(leaf.shape[axis], (), **drawn)), axis).where(used[1], mixed)
        scale = (3.5 * u[1] - 2).exp() * torch.where(u[2] < 0.2, -1, 1)  # noqa: PLR2004
        mixed = (centre + scale * (mixed - centre)).where(used[2], mixed)
        noise = (4.7 * u[3] - 3).exp() * spread * torch.randn(leaf.shape, **drawn).to(leaf)
        return (mixed + noise).where(used[3], mixed)

    return rebuild(map(one, leaves))


def _fit(made: Any, data: Any, width: int, steps: int, source: torch.Generator, progress: bool) -> None:
    """Set the head of least mean squared error, by AdamW on standardised features."""
    features, logs, _ = data
    centre, scale = features.mean(0), features.std(0)
    scale = scale.clamp_min(1e-4 * float(scale.max()) + 1e-12)
    size = len(centre)
    normal: Any = partial(torch.randn, generator=source, device="cpu")
    form = (logs.mean(0) - math.log(2 * width))[:, None].repeat(1, width)
    raw = {"inner": normal(2 * width, size) / size**0.5, "shift": normal(2 * width), "form": form}
    raw |= {"outer": 0.1 * normal(logs.shape[1], width) / width**0.5, "floor": logs.amin(0) - 1}
    raw = {name: own.to(features).requires_grad_() for name, own in raw.items()}
    groups = [{"params": [own], "weight_decay": DECAY * (name == "inner")} for name, own in raw.items()]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in progress_bar(range(steps), enabled=progress, description="distill: head"):
        rows = torch.randint(len(features), (BATCH,), generator=source, device="cpu").to(features.device)
        optimizer.zero_grad()
        with torch.enable_grad():
            head = raw | {name: raw[name].exp() for name in ("form", "floor")}
            (_logs(head, (features[rows] - centre) / scale) - logs[rows]).square().mean().backward()
        optimizer.step()
        schedule.step()
    head = {name: raw[name].exp() if name in ("form", "floor") else raw[name].clone() for name in raw}
    head["inner"] /= scale
    head["shift"] -= head["inner"] @ centre
    for name, own in head.items():
        made.register_buffer(name, own)


def _agreement(made: DistilledPosterior, features: Tensor, wanted: Tensor, p: Tensor) -> Agreement:
    """R² with a mean for each output; Spearman's correlation, the mean over outputs; divergence from p, if there is."""
    found = made.log_variance(features)
    lost, spread = (own.square().sum() for own in (found - wanted, wanted - wanted.mean(0)))
    ranks = [float(spearmanr(*own.cpu()).statistic) for own in torch.stack([found, wanted]).permute(2, 0, 1)]
    q = made.predicted(features[:, : p.shape[1]] / made.heat, found.exp())[0] if p.numel() else p
    kl = torch.special.xlogy(p, p / q.clamp_min(1e-30)).sum(-1).mean()
    return Agreement(float(1 - lost / spread), sum(ranks) / len(ranks), float(kl))
