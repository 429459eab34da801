"""Mixtures of posteriors: ``p(y | x) = Σ_m w_m p_m(y | x)``.

With one posterior for each of several networks trained from different starts, these are the mixtures of Laplace
approximations of Eschenhagen et al. (2021, arXiv:2111.03577). Moments follow from the law of total variance: with
``m̄ = Σ w_m E_m[y]`` the epistemic variance is ``Σ w_m (epistemic_m + (E_m[y] − m̄)²)``. The mutual information of the
target with the member and its network is ``H[p] − Σ w_m (H[p_m] − I_m)``.

Deep ensembles (Lakshminarayanan, Pritzel & Blundell, 2017, arXiv:1612.01474) are plain networks in place of posteriors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, MixtureSameFamily, Normal

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, DataError, NoGainWarning, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import spread
from laplace_plus.likelihoods.resolve import resolve_likelihood
from laplace_plus.network.batches import inputs_of, iterate, to_device
from laplace_plus.network.network import Network
from laplace_plus.predictive import Prediction, from_samples

_NEARLY_ALL = 0.99
"""Weight of one member from which a warning says that the mixture is that member."""

_TOLERANCE, _MOST = 1e-10, 10_000
"""Of the weights by held-out data: change of the mean log-probability in nats, and steps."""


@dataclass(frozen=True, eq=False, repr=False)
class MixturePrediction(Prediction):
    """The mixture of predictions of the same inputs; everything of :class:`~laplace_plus.Prediction`, differentiable.

    Attributes:
        predictions: Those of the members, M of them.
        weights: ``[M]``, which sum to one.
    """

    predictions: tuple[Prediction, ...] = ()
    weights: Tensor = torch.ones(0)

    def _average(self, each: Sequence[Tensor]) -> Tensor:
        return torch.tensordot(self.weights.to(each[0]), torch.stack(list(each)), 1)

    @cached_property
    def mean(self) -> Tensor:
        """``Σ w_m E_m[y]``, ``[B, *, C]``."""
        return self._average([each.mean for each in self.predictions])

    @cached_property
    def standard_error(self) -> Tensor:
        """Of :attr:`mean`, as members' errors are independent."""
        errors = torch.stack([each.standard_error for each in self.predictions])
        return torch.tensordot(self.weights.to(errors).square(), errors.square(), 1).sqrt()

    @cached_property
    def _spread(self) -> Tensor:
        return self._average([(each.mean - self.mean).square() for each in self.predictions])

    @cached_property
    def variance(self) -> Tensor:
        """``Σ w_m (Var_m[y] + (E_m[y] − m̄)²)``, ``[B, *, C]``."""
        return self._average([each.variance for each in self.predictions]) + self._spread

    @property
    def epistemic(self) -> Tensor:
        """``Σ w_m (epistemic_m + (E_m[y] − m̄)²)``, ``[B, *, C]``."""
        return self._average([each.epistemic for each in self.predictions]) + self._spread

    @property
    def aleatoric(self) -> Tensor:
        """``Σ w_m aleatoric_m``, ``[B, *, C]``."""
        return self._average([each.aleatoric for each in self.predictions])

    @cached_property
    def functional_samples(self) -> Tensor:
        """Samples of the members' outputs, ``[S, B, *, C]``, as many of each as its weight says."""
        ends = (self.weights.double().cumsum(0) * self.n_samples).round().long()
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        drawn = [each.functional_samples for each in self.predictions]
        return torch.cat([own[torch.arange(count) % len(own)] for own, count in zip(drawn, counts, strict=True)])

    @cached_property
    def _marginal_distribution(self) -> Distribution:
        if self.likelihood.is_classifier and self.likelihood.couples_outputs:
            return Categorical(probs=self.mean, validate_args=False)
        parts = [_normals(each.distribution) for each in self.predictions]
        if any(part is None for part in parts):
            return self.likelihood.mixture(self.functional_samples)
        means, deviations, shares = zip(*[part for part in parts if part is not None], strict=True)
        weights = torch.cat([own * weight.to(own) for own, weight in zip(shares, self.weights, strict=True)], -1)
        normals = Normal(torch.cat(means, -1), torch.cat(deviations, -1), validate_args=False)
        return MixtureSameFamily(Categorical(weights, validate_args=False), normals, validate_args=False)

    def log_prob(self, y: Tensor) -> Tensor:
        """``log Σ w_m p_m(y)``; arguments, shape and errors as of :class:`~laplace_plus.Prediction`."""
        each = torch.stack([own.log_prob(y) for own in self.predictions])
        if self.likelihood.is_classifier and self.likelihood.couples_outputs and y.is_floating_point():
            return (y.reshape(self.mean.shape) * self.mean.log()).nansum(-1)
        return (each.movedim(0, -1) + self.weights.to(each).log()).logsumexp(-1)

    def mutual_information(self) -> Tensor:
        """``H[p] − Σ w_m (H[p_m] − I_m)``, ``[B, *]``, in nats: of the target with the member and its network."""
        known = [own.entropy() - own.mutual_information() for own in self.predictions]
        return (self.entropy() - self._average(known)).clamp_min(0.0)


class Mixture:
    """Posteriors of several networks behind one predictive: ``Σ_m w_m p_m(y | x)``.

    Members keep their own prior precisions and noise; fit and tune each before. They may be of different classes and
    architectures. Save and load them one by one.

    Args:
        members: M posteriors of the same kind of targets, or anything else with ``likelihood`` and ``predictive``.
        weights: ``"uniform"``; ``"evidence"``, in proportion to ``exp(log_marginal_likelihood())``, which is the
            probability of each member given the data of all, and mostly that of one; or numbers ``[M]``.
            :meth:`fit_weights` takes held-out data instead.

    Attributes:
        members: The same, a tuple.
        weights: ``[M]``, float64, which sum to one.

    Raises:
        ConfigurationError: No members, likelihoods of different kinds, or weights that are none.
        UnsupportedError: Weights by evidence, for members without one.

    Warns:
        NoGainWarning: One member has all but all of the weight.

    Example:
        >>> import laplace_plus as lp
        >>> data = [(torch.randn(20, 2), torch.randint(0, 3, (20,)))]
        >>> nets = [torch.nn.Linear(2, 3) for _ in range(2)]
        >>> mixture = Mixture([lp.KFAC(net, "classification").fit(data) for net in nets])
        >>> mixture.predictive(torch.zeros(5, 2)).mean.shape
        torch.Size([5, 3])
    """

    def __init__(
        self, members: Iterable[Any], weights: Literal["uniform", "evidence"] | Tensor | Sequence[float] = "uniform"
    ):
        self.members = tuple(members)
        kinds = {type(member.likelihood).__name__ for member in self.members}
        if len(kinds) != 1:
            expected, got = "one or more posteriors of the same kind of likelihood", ", ".join(sorted(kinds)) or "none"
            raise ConfigurationError("These members cannot be mixed.", expected=expected, got=got)
        if isinstance(weights, str):
            checks.choice("weights", weights, ("uniform", "evidence"))
            size = len(self.members)
            self._set(torch.full((size,), 1 / size) if weights == "uniform" else self._evidence().softmax(0))
        else:
            self._set(torch.as_tensor(weights))

    def __repr__(self) -> str:
        return f"Mixture({len(self.members)} members, weights={[round(w, 4) for w in self.weights.tolist()]})"

    @property
    def likelihood(self) -> Likelihood:
        """That of the first member."""
        return self.members[0].likelihood

    def _set(self, weights: Tensor) -> None:
        weights = checks.shape("The weights", weights.detach().double().cpu(), [len(self.members)])
        checks.number("The least weight", float(weights.min()), least=0.0)
        checks.positive("The sum of the weights", float(weights.sum()))
        self.weights = weights / weights.sum()
        if len(weights) > 1 and float(self.weights.max()) > _NEARLY_ALL:
            what = f"Member {int(self.weights.argmax())} has {float(self.weights.max()):.2%} of the weight"
            warn(f'{what}: the mixture is that member alone. Take weights="uniform".', NoGainWarning)

    def _evidence(self) -> Tensor:
        if not all(hasattr(member, "log_marginal_likelihood") for member in self.members):
            what, fix = "Not all members have an evidence.", "Take uniform weights, or fit_weights(held_out)."
            raise UnsupportedError(what, expected="Gaussian posteriors", got=repr(self.members), fix=fix)
        return torch.stack([member.log_marginal_likelihood().detach().double().cpu() for member in self.members])

    def fit_weights(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> Self:
        """Choose the weights that maximise the mean log-probability of held-out targets.

        That is concave in the weights; expectation maximisation, ``w_m ← mean_n w_m p_m(y_n) / Σ_k w_k p_k(y_n)``,
        ends within 1e-10 nats. Ignored targets do not count.

        Args:
            data: Held-out batches.
            progress: Whether to show a progress bar.
            generator: Source of randomness of the predictions.

        Raises:
            DataError: No targets, or a target that no member thinks possible.
        """
        rows, counts = [], []
        with torch.no_grad():
            for batch in iterate(data, device=torch.device("cpu"), progress=progress, description="Mixture: data"):
                own = [each.predictive(batch.inputs, generator=generator) for each in self.members]
                target, weight = self.members[0].likelihood.separate(batch.target)
                logs = torch.stack([one.log_prob(to_device(target, one.functional_mean.device)) for one in own])
                share = torch.ones_like(logs[0]) if weight is None else spread(weight, logs[0].shape).to(logs)
                kept = (logs != 0).any(0) & (share > 0)
                rows.append(logs[:, kept].double().cpu())
                counts.append(share[kept].double().cpu())
        logs, count = torch.cat(rows, 1), torch.cat(counts)
        if not logs.numel() or not bool(logs.amax(0).isfinite().all()):
            what, expected = "The weights cannot be found from these data.", "targets that some member thinks possible"
            raise DataError(what, expected=expected, got=f"{logs.shape[1]} of them, of finite log-probability or not")
        weights = torch.full((len(self.members),), 1 / len(self.members), dtype=torch.float64)
        before = -math.inf
        for _ in range(_MOST):
            shares = logs + weights.log()[:, None]
            now = float(count @ shares.logsumexp(0) / count.sum())
            if now - before <= _TOLERANCE:
                break
            before, weights = now, shares.softmax(0) @ count / count.sum()
        self._set(weights)
        return self

    def predictive(self, x: Any, **options: Any) -> MixturePrediction:
        """``Σ_m w_m p_m(y | x)``; options and errors as of the members' own ``predictive``."""
        found = [member.predictive(x, **options) for member in self.members]
        shape = found[0].functional_mean.shape
        mean = torch.stack([checks.shape("A member's output", own.functional_mean, shape) for own in found])
        return MixturePrediction(
            likelihood=found[0].likelihood,
            functional_mean=torch.tensordot(self.weights.to(mean), mean, 1),
            functional_covariance=None,
            link="mixture",
            joint=found[0].joint,
            n_samples=max(own.n_samples for own in found),
            source=found[0].source,
            predictions=tuple(found),
            weights=self.weights,
        )


class Ensemble:
    """Trained networks behind one predictive ``1/M Σ_m p(y | f_m(x))``; their differences are epistemic.

    Networks stay as they are, and are called in evaluation mode. Members of :class:`Mixture` are posteriors.

    Args:
        models: M trained networks with the same inputs and outputs.
        likelihood: As for :class:`Posterior`. Gaussian noise that is not given is fitted to the residuals of the mean
            of the networks by :meth:`fit`, without which nothing else needs one.

    Raises:
        ConfigurationError: No networks, or what are none.

    Example:
        >>> nets = [nn.Linear(2, 3) for _ in range(5)]
        >>> Ensemble(nets, "classification").predictive(torch.zeros(4, 2)).mean.shape
        torch.Size([4, 3])
    """

    def __init__(self, models: Iterable[nn.Module], likelihood: Any):
        self.likelihood: Likelihood = resolve_likelihood(likelihood)
        several = () if isinstance(models, nn.Module) else models  # a Sequential iterates over its layers
        every: Any = lambda *_: True  # noqa: E731 - frozen weights, too
        self.networks = tuple(Network(model, every, self.likelihood.arrange) for model in several)
        checks.count("The number of networks", len(self.networks))

    def __repr__(self) -> str:
        return f"Ensemble({len(self.networks)} networks, {self.likelihood!r})"

    @property
    def network(self) -> Network:
        """The first one."""
        return self.networks[0]

    def fit(self, data: Iterable[Any], *, progress: bool = False) -> Self:
        """Set Gaussian noise to the root mean square of the residuals of the networks' mean, one level an output.

        Training residuals are too small where networks interpolate: held-out data give a better noise.

        Args:
            data: Batches.
            progress: Whether to show a progress bar.

        Raises:
            UnsupportedError: The likelihood has no noise.
            ConfigurationError: Residuals are all zero.
        """
        total = torch.zeros((), dtype=torch.float64)
        for batch in iterate(data, device=self.networks[0].device, progress=progress, description="Ensemble: noise"):
            mean = self._outputs(batch.inputs).mean(0)
            each = self.likelihood.with_noise(torch.ones(mean.shape[-1]))
            total = total + each.statistics(mean, batch.target).cpu()
        errors, counts = total.chunk(2)
        self.likelihood = self.likelihood.with_noise((errors / counts).sqrt().to(mean))
        return self

    def _outputs(self, x: Any) -> Tensor:
        with torch.no_grad():
            found = [network.forward(network.receive(x)) for network in self.networks]
        return torch.stack([checks.shape("A network's output", own, found[0].shape).to(found[0]) for own in found])

    def predictive(
        self, x: Any = None, *, joint: bool = False, generator: torch.Generator | None = None, **batch: Any
    ) -> Prediction:
        """``1/M Σ p(y | f_m(x))``.

        Args:
            x: A batch's inputs.
            joint: Whether log-probabilities are of all inputs together.
            generator: Source of randomness of entropies without a closed form.
            **batch: In place of ``x``, the entries of a batch that is a mapping.

        Raises:
            ConfigurationError: Networks with other outputs than the first one's.
            InputError: A network fails on these inputs.
        """
        checks.generator(generator)
        outputs = self._outputs(inputs_of(batch) if x is None else x)
        return from_samples(self.likelihood, outputs, generator=generator, joint=joint)


def predictor(found: Any, likelihood: Any = None, data: Any = None) -> Any:
    """What predicts, as it is; a bare network as an :class:`Ensemble` of it, with the noise of data for "regression".

    ConfigurationError for a network without a likelihood, a posterior with one, and what does not predict.
    """
    alone = isinstance(found, nn.Module)
    if alone == (likelihood is None) or not alone and getattr(found, "likelihood", None) is None:
        expected = 'a posterior, or a network with its likelihood, such as likelihood="classification"'
        raise ConfigurationError("It does not predict.", expected=expected, got=f"{type(found)}, {likelihood=}")
    model = Ensemble([found], likelihood) if alone else found
    fits = data is not None and isinstance(likelihood, str) and model.likelihood.is_gaussian
    return model.fit(data) if fits else model


def _normals(distribution: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Means, deviations and weights ``[..., K]`` of a mixture of normals; None for another distribution."""
    if isinstance(distribution, Normal):
        loc = distribution.loc[..., None]
        return loc, distribution.scale.expand_as(distribution.loc)[..., None], torch.ones_like(loc)
    if isinstance(distribution, MixtureSameFamily) and isinstance(distribution.component_distribution, Normal):
        own = distribution.component_distribution
        return own.loc, own.scale.expand_as(own.loc), distribution.mixture_distribution.probs.expand_as(own.loc)
    return None
