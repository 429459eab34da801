"""Riemannian Laplace approximations: samples that follow the loss surface instead of the tangent space.

By the exponential map: Bergamin, Moreno-Muñoz, Hauberg and Arvanitidis, "Riemannian Laplace approximations for Bayesian
neural networks", 2023; see :mod:`laplace_plus.geometry.geodesic`. By diffusion: Roy, Miani, Ek, Hennig, Pförtner,
Tatzel and Hauberg, "Reparameterization invariance in approximate Bayesian inference", 2024; see
:mod:`laplace_plus.geometry.diffusion`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, SamplingError, warn
from laplace_plus.geometry import Diffusion, LossLandscape, NoiseField, PathStatus, diffuse, geodesic
from laplace_plus.geometry.geodesic import check_settings, failures
from laplace_plus.geometry.loss import warn_of_kinks
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.likelihoods.sampling import draw_seed, standard_normal
from laplace_plus.network.linearization import Linearization
from laplace_plus.network.network import full_precision
from laplace_plus.network.shadow import unwrap
from laplace_plus.persistence import stored
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.gaussian import GaussianPosterior
from laplace_plus.posteriors.state import State, require_same_data, survey
from laplace_plus.posteriors.storing import get_posterior, name_of, resolve_option
from laplace_plus.tuning import Tuner, TuningResult, laplace

WHY = "Samples along the loss surface come from many passes over the data."

_DECREMENT_SAMPLES = 16
"""Tangent samples that estimate the decrement; their relative standard error is ``(2/16)^½ = 0.35``."""

_SHARED = "network model likelihood noise_per_output backend "
_SHARED += "_prior_precision is_guess _prior_mean _temperature _prior_groups covariance_scale"
"""What a posterior and its tangent have in common."""

_GROUP, _GROUP_BYTES, _VECTORS = 32, 2**30, 80
"""Geodesics that advance together, at most, and in how much memory: each takes some 80 vectors of the parameters'
length, as measured, for the stages of a step, their combinations and gradients."""


@stored
@dataclass(frozen=True)
class ExponentialMap:
    """Options of sampling by the exponential map: geodesics along tangent samples.

    Args:
        rtol: Relative tolerance of a step's error. With ReLUs, whose kinks shorten steps, 1e-3 takes a tenth of the
            evaluations that the default does.
        atol: Its absolute tolerance, in units of the parameters.
        max_evaluations: Cap on gradients with Hessian-vector products for each sample.
        max_energy_change: Relative change of a geodesic's energy beyond which a step is repeated with a smaller one;
            where that does not help, the surface has a crease, and the velocity is refracted.
        linearized: Whether to take the network's tangent for the network, on the surface and in predictions.
        minibatch: Number of examples, drawn at random for each sample, that its surface is of, all if there are fewer;
            their log-likelihood counts for that of all.
        training_prior_precision: Precision of the prior in the loss that the surface is of; by default the tangent's.
            Where that has been tuned away from the one under which the network was trained (weight decay times number
            of data, for a mean loss), the weights are no minimum of the loss, and geodesics slide down towards smaller
            weights instead of along the valley: give the one of training here, zero for training without weight decay.

    Raises:
        ConfigurationError: Numbers out of range.
    """

    rtol: float = 3e-7
    atol: float = 3e-7
    max_evaluations: int = 10_000
    max_energy_change: float = 0.3
    linearized: bool = False
    minibatch: int | None = None
    training_prior_precision: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.rtol, self.atol, self.max_evaluations, self.max_energy_change)
        if self.minibatch is not None:
            checks.count("minibatch", self.minibatch)
        if self.training_prior_precision is not None:
            checks.number("training_prior_precision", self.training_prior_precision, least=0.0)


stored(Diffusion)
Manifold = ExponentialMap | Diffusion

METHODS: Mapping[str, type[Manifold]] = {"exponential": ExponentialMap, "diffusion": Diffusion}


@stored
@dataclass(frozen=True)
class PathReport:
    """How the samples of a :class:`~laplace_plus.Riemannian` posterior were found, failed ones included.

    Attributes:
        statuses: ``[n]`` integers, :class:`~laplace_plus.geometry.PathStatus`.
        n_evaluations: Gradients with Hessian-vector products, or curvatures of a diffusion, for each, ``[n]``.
        decrement: ``½ ∇Lᵀ Σ ∇L`` with the gradient of the negative log-posterior, summed over the data, and the
            tangent's covariance Σ, estimated from samples: about how many nats the weights are above the loss's
            stationary point. Where it is not small, they are not the mode of the posterior that the tangent
            approximates: the prior precision may not be the weight decay of training.
    """

    statuses: Tensor
    n_evaluations: Tensor
    decrement: float = 0.0

    @property
    def n_failed(self) -> int:
        """Number of samples that were left out."""
        return int((self.statuses != PathStatus.ARRIVED).sum())


@stored
@dataclass(frozen=True)
class Drawn:
    """Samples ``[n, P]``, their report, and the hyperparameters at which they were drawn."""

    points: Tensor
    report: PathReport
    hyperparameters: Tensor


@stored
@dataclass(frozen=True)
class RiemannianState(State):
    """The tangent's state, the seed of samples, a number by which the data are recognised, and the samples, if any."""

    tangent: State
    seed: int
    data_sum: float
    drawn: Drawn | None = None


class Riemannian(Posterior):
    """Samples that follow the loss surface, so that few of them land where the loss is high.

    Samples of a Laplace approximation lie in a flat ellipsoid, and the loss is not flat: nonlinear networks at such
    samples often predict badly. With ``method="exponential"`` a sample of the ``tangent`` Gaussian is the initial
    velocity of a geodesic on the loss surface, which bends away from high loss; the sample is its end. With
    ``"diffusion"`` a sample is the end of a random walk whose steps are small Laplace approximations around wherever it
    is. Choose it for small and medium networks whose full uncertainty matters and that sampled Laplace underfits with;
    where predictions of the *linearised* network will do, the tangent alone gives them at no further cost. Geodesics
    take hundreds to thousands of gradients with Hessian-vector products over the data for each sample, more the broader
    the tangent is: tune its prior precision first. Diffusions take ``n_steps · rank`` products with the curvature, and
    keep to the valley less closely.

    :meth:`fit` fits the tangent, whose hyperparameters are those of this posterior, set and tuned here. Samples are
    drawn when they are first needed, or by :meth:`draw`, and again when hyperparameters have changed. Predictions
    average over the stored samples of the nonlinear network, or of the linearised one with
    ``lp.ExponentialMap(linearized=True)``. The loss should be twice differentiable. The class cannot be updated.

    Args:
        model, likelihood: As for :class:`Posterior`.
        tangent: Class or name of a Gaussian posterior, or a fitted one, of which a copy is then taken as it is.
        tangent_options: Keyword arguments of the class.
        method: ``"exponential"``, ``"diffusion"``, or :class:`ExponentialMap`/:class:`~laplace_plus.Diffusion` with
            options.
        n_samples: Number of samples to draw.
        **common: As for :class:`Posterior`; not with a fitted tangent, which has its own.

    Raises:
        ConfigurationError: A tangent that is none, an unknown method, besides what :class:`Posterior` raises.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> method = lp.ExponentialMap(rtol=1e-3, atol=1e-3)
        >>> posterior = lp.Riemannian(net, "regression", method=method, n_samples=2).fit([(x, 2 * x)])
        >>> posterior.predictive(x[:3]).variance.shape, posterior.report.n_failed
        (torch.Size([3, 1]), 0)
    """

    default_method = "sampled"

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        tangent: type[Posterior] | str | Posterior = "Full",
        tangent_options: dict[str, Any] | None = None,
        method: Any = "exponential",
        n_samples: int = 50,
        **common: Any,
    ):
        self.n_samples = checks.count("n_samples", n_samples)
        self.method = resolve_option("method", method, METHODS)
        known = get_posterior(tangent) if isinstance(tangent, str) else tangent
        kind = known if isinstance(known, type) else type(known)
        if not issubclass(kind, Posterior) or kind.default_method == "sampled":  # from no Gaussian
            expected = "a class such as lp.Full, its name, or a fitted posterior of this network"
            raise ConfigurationError("The tangent is a Gaussian posterior.", expected=expected, got=repr(tangent))
        self._given = isinstance(known, Posterior)
        if isinstance(known, Posterior):
            _check_given(known, model, likelihood, {**(tangent_options or {}), **common})
            inner = copy.copy(known)
        else:
            inner = known(model, likelihood, **common, **(tangent_options or {}))
        super().__init__(model, inner.likelihood, **common)
        self._tangent = inner
        _share(inner, self)
        self.options |= {"tangent": name_of(kind), "tangent_options": inner.options, "method": self.method}

    # -- the tangent ---------------------------------------------------------------------------------------------------

    @property
    def tangent(self) -> Posterior:
        """The Gaussian posterior, at the present hyperparameters, which are set and tuned here."""
        _share(self, self._tangent)
        return self._tangent

    def log_marginal_likelihood(self, *args: Any, **kwargs: Any) -> Tensor:
        """The tangent's evidence, in nats; see its own method."""
        self.require_fit()
        return self.tangent.log_marginal_likelihood(*args, **kwargs)  # type: ignore[attr-defined]

    @property
    def tuners(self) -> Mapping[str, type[Tuner]]:  # type: ignore[override]
        """Those of the tangent, without the two that compare linearised predictions."""
        return {name: tuner for name, tuner in self.tangent.tuners.items() if name not in ("auto", "unseen")}

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """What the tuner finds for the tangent."""
        return self.tangent.run_tuner(tuner, progress=progress, generator=generator)

    # -- fitting and drawing -------------------------------------------------------------------------------------------

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> RiemannianState:
        n_data, _, data_sum = survey(self, data, WHY)
        tangent = self.tangent  # of a copy of the posterior
        if not self._linearized:
            advice = "Prefer smooth activations such as tanh or GELU, or lp.ExponentialMap(linearized=True)."
            warn_of_kinks(self.network, next(self.batches(data)).inputs, advice)
        if self._given:
            known = getattr(tangent.state, "data_sum", None)
            require_same_data("the tangent's fit", (tangent.n_data, known), (n_data, data_sum))
            if isinstance(tangent, GaussianPosterior):
                laplace.survey(tangent.laplace_model(), tangent.network, data, tangent.n_data)
        else:
            tangent.fit(data, progress=progress, generator=generator)
            _share(tangent, self)
        own = tangent.mean, tangent.n_data, tangent.n_outputs
        return RiemannianState(*own, tangent.state, draw_seed(generator), data_sum)

    @override
    def set_state(self, state: RiemannianState) -> None:
        if not self._tangent.is_fitted:  # loaded
            self.tangent.set_state(state.tangent)
            _share(self._tangent, self)
        super().set_state(state)

    @property
    def _linearized(self) -> bool:
        return isinstance(self.method, ExponentialMap) and self.method.linearized

    @full_precision
    def draw(
        self,
        n: int | None = None,
        *,
        data: Iterable[Any] | None = None,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Self:
        """Draw samples at the present hyperparameters, in place of those that were there.

        Args:
            n: Number of samples; by default ``n_samples``.
            data: The training data; by default those of :meth:`fit`.
            generator: Source of randomness; by default the seed that :meth:`fit` drew.
            progress: Whether to show a progress bar.

        Raises:
            NotFittedError: Before :meth:`fit`.
            DataError: The data are not known any more, or not those of the fit.
            SamplingError: Every sample failed.
            UnsupportedError: A loss that cannot be differentiated twice.

        Warns:
            ConvergenceWarning: Some samples failed, and are left out.
        """
        self.require_fit()
        count = self.n_samples if n is None else checks.count("n", n)
        precision = self.prior().vector()
        if isinstance(self.method, ExponentialMap) and self.method.training_prior_precision is not None:
            precision = torch.full_like(precision, self.method.training_prior_precision)
        landscape = LossLandscape(
            self.network,
            self.likelihood,
            self.training_data.again(data, WHY),
            prior_precision=precision,
            prior_mean=self._prior_mean,
            temperature=self._temperature,
            linearized=self._linearized,
        )
        now = landscape.n_data, landscape.checksum
        require_same_data("the tangent's fit", (self.n_data, self.state.data_sum), now)
        seed = self.state.seed if generator is None else draw_seed(generator)

        def tangents(n: int, source: torch.Generator) -> Tensor:
            return self.tangent.sample(n, generator=source) - self.tangent.mean

        points, report = _draw(self.method, landscape, self.mean, tangents, count, seed, progress=progress)
        slopes = tangents(_DECREMENT_SAMPLES, torch.Generator().manual_seed(seed))
        slopes = slopes @ landscape.gradient(self.mean[None])[0]
        report = replace(report, decrement=float(slopes.square().mean()) / 2)
        if report.n_failed:
            said = failures(report.statuses)
            fix = "Tune the prior precision first (a broad tangent makes long paths), allow for more evaluations, or "
            fix += "use minibatches."
            if report.n_failed == count:
                what, expected = "No sample could be drawn.", f"{count} paths that arrive"
                raise SamplingError(what, expected=expected, got=said, fix=fix)
            warn(f"{report.n_failed} of {count} samples failed and are left out: {said}. {fix}", ConvergenceWarning)
        drawn = Drawn(points[report.statuses == PathStatus.ARRIVED], report, self._hyperparameters())
        self.set_state(replace(self.state, drawn=drawn))
        return self

    def _hyperparameters(self) -> Tensor:
        """All that samples depend on besides the data, in one vector."""
        scale = torch.tensor(self.covariance_scale)
        own = self.prior().vector(), self._prior_mean, self._temperature, self.noise_std, scale
        return torch.cat([one.detach().double().cpu().flatten() for one in own if one is not None])

    def _bank(self) -> Drawn:
        """The samples at the present hyperparameters, drawn if there are none."""
        self.require_fit()
        drawn = self.state.drawn
        if drawn is None or not torch.equal(drawn.hyperparameters.cpu(), self._hyperparameters()):
            self.draw(None if drawn is None else len(drawn.report.statuses))
        return self.state.drawn

    @property
    @full_precision
    def samples(self) -> Tensor:
        """The samples that succeeded, ``[m, P]``; drawn if need be."""
        return self._bank().points

    @property
    @full_precision
    def report(self) -> PathReport:
        """How all samples were found; they are drawn if need be."""
        return self._bank().report

    @override
    @full_precision
    def save(self, path: str | PathLike[str]) -> None:
        """As of :class:`Posterior`, with samples, which are drawn if need be."""
        self._bank()
        super().save(path)

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Parameter vectors ``[n, P]``: stored samples in random order, each as often as the others or once more.

        Args:
            n: Number of draws. Beyond the number of stored samples they are repeated; :meth:`draw` gives more.
            generator: Source of randomness; may live on another device.

        Raises:
            NotFittedError: Before :meth:`fit`.
            SamplingError: Every sample failed.
        """
        checks.count("n", n)
        points = self._bank().points
        return points[self._order(len(points), n, generator).to(points.device)]

    @staticmethod
    def _order(m: int, n: int, generator: torch.Generator | None) -> Tensor:
        device = None if generator is None else generator.device
        rounds = [torch.randperm(m, generator=generator, device=device) for _ in range(-(-n // m))]
        return torch.cat(rounds)[:n]

    # -- predictions ---------------------------------------------------------------------------------------------------

    @override
    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        points = self._bank().points
        x = self.network.receive(x)
        order = self._order(len(points), min(n, len(points)), generator).to(points.device)
        line = Linearization(self.network, self.mean, x) if self._linearized else None
        for some in order.split(CHUNK_SIZE):
            if line is None:
                yield from self.network.several(x, points[some])
            else:
                yield from line.outputs + line.push(points[some] - self.mean)


def _share(source: Posterior, target: Posterior) -> None:
    vars(target).update({name: getattr(source, name) for name in _SHARED.split()})


def _check_given(tangent: Posterior, model: nn.Module, likelihood: Any, options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` unless a fitted posterior can serve as the tangent, without ``options``."""
    same = tangent.is_fitted and tangent.network.model is unwrap(model)
    same = same and type(resolve_likelihood(likelihood)) is type(tangent.likelihood)
    if not same or options:
        what = "The tangent has not been fitted to this network with this likelihood."
        what = "A fitted tangent has its own settings." if same else what
        expected = "a posterior of the same model and likelihood, after fit(), without options; or a class"
        raise ConfigurationError(what, expected=expected, got=", ".join([repr(tangent), *options]))


# -- paths -------------------------------------------------------------------------------------------------------------


def _draw(
    method: Manifold,
    landscape: LossLandscape,
    start: Tensor,
    tangents: Callable[[int, torch.Generator], Tensor],
    n: int,
    seed: int,
    *,
    progress: bool,
) -> tuple[Tensor, PathReport]:
    """Draw n samples ``[n, P]``, NaN for those that failed."""
    source = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (n,), generator=source)
    if isinstance(method, ExponentialMap):
        velocities = tangents(n, source)
        size = max(1, min(_GROUP, _GROUP_BYTES // max(1, _VECTORS * start.nbytes)))
        parts = progress_bar(torch.arange(n).split(size), enabled=progress, description="Riemannian")
        found = [_by_geodesics(method, landscape, start, velocities[some], seeds[some].tolist()) for some in parts]
    else:
        numbers = progress_bar(seeds.tolist(), enabled=progress, description="Riemannian")
        found = [_by_diffusion(method, landscape, start, number) for number in numbers]
    points, statuses, evaluations = zip(*found, strict=True)
    return torch.cat(points), PathReport(torch.cat(statuses), torch.cat(evaluations))


def _by_geodesics(
    method: ExponentialMap, landscape: LossLandscape, start: Tensor, velocities: Tensor, seeds: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Ends, statuses, and numbers of evaluations."""
    surface: LossLandscape | list[LossLandscape] = landscape
    if method.minibatch is not None:  # one random subset for each seed, all of them gathered in one pass
        orders = [torch.randperm(landscape.n_data, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        surface = landscape.subsets([order[: method.minibatch] for order in orders])
    options = {name: getattr(method, name) for name in ("rtol", "atol", "max_evaluations", "max_energy_change")}
    found = geodesic(surface, start, velocities, **options)
    return found.endpoint, found.statuses, found.n_evaluations


def _by_diffusion(
    method: Diffusion, landscape: LossLandscape, start: Tensor, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """End, status, and number of curvatures."""
    generator = torch.Generator().manual_seed(seed)
    noise = standard_normal((method.n_steps, len(start)), like=start, generator=generator)
    field = NoiseField(landscape, method, generator=generator)
    found = diffuse(field, start, noise[None], scheme=method.scheme)
    steps = torch.full_like(found.statuses, method.n_steps * (2 if method.scheme == "heun" else 1))
    return found.endpoint, found.statuses, steps
