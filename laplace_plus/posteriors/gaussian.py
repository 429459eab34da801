"""Gaussian posteriors ``N(θ̂, (H/T + P₀)⁻¹)``: the Laplace approximation in whatever structure H has."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from operator import is_
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature import Curvature, KroneckerStructure, Structure
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    EmptyDataError,
    LaplacePlusError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.likelihoods.doubts import Doubts
from laplace_plus.network.linearization import jvp
from laplace_plus.network.network import full_precision
from laplace_plus.network.selection import tied_names
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.public import Summary, describe_groups, positive, require_influence
from laplace_plus.posteriors.state import GaussianState, StandIns, TrainingData, require_restartable
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, functional_posteriors, pick
from laplace_plus.structured import Factor, KroneckerBlock
from laplace_plus.structured.blocks import add_draws_
from laplace_plus.tuning import GAUSSIAN_TUNERS, Tuner
from laplace_plus.tuning.laplace import LaplaceModel

MANY_LEVELS = 16
"""Most outputs that get noise levels of their own by default; each adds one component to the curvature."""

LEVEL_COSTS = {"full": 2**22, "KFAC": 2**29, "diagonal": math.inf}
"""Largest costs of that, as each evaluation of the evidence then decomposes the sum of all components: entries of a
dense curvature, cubed sides of Kronecker factors. Tuning three layers of 512 units took 5 s on one core, not 0.4."""

NEARLY = 0.9
"""Share of the parameters that are effective from which :meth:`GaussianPosterior.summary` says so."""

Reduce = Callable[[Any, Callable[[Any, Any], Any]], Any]


class GaussianPosterior(Posterior):
    """A Gaussian whose precision is a structured curvature plus the prior precision.

    A subclass only sets :attr:`structure`; evidence, tuning, sampling and the linearised predictive come with it.
    """

    structure: Structure
    """The structure that this posterior asks a backend for."""

    tuners: ClassVar[Mapping[str, type[Tuner]]] = GAUSSIAN_TUNERS

    _factor_cache: tuple[tuple[Any, ...], dict[str, Factor]] | None = None
    _model_cache: tuple[tuple[Any, ...], LaplaceModel] | None = None

    # -- fitting -------------------------------------------------------------------------------------------------------

    @override
    def fit(
        self,
        data: Iterable[Any],
        *,
        n_trained: int | None = None,
        progress: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Fit to data in one pass (or what the method needs), forgetting any earlier fit.

        Args:
            data: An iterable of batches; errors are as of :meth:`Posterior.fit`.
            n_trained: N, for data of which n examples stand for N like them, such as a part of the training data: the
                curvature and the log-likelihood are taken N/n times, and :attr:`n_data` is N, so that the evidence is
                that of N examples. With whole N/n it equals a fit to each example so many times. Takes one pass more.
                Tunings that pass over the training data again will not take the n examples for those of the fit.
            progress: Whether to show a progress bar.
            generator: Source of randomness, for methods that use any.
        """
        options: dict[str, Any] = {"progress": progress, "generator": generator}
        if n_trained is None:
            return super().fit(data, **options)
        require_restartable(data, "Examples are counted before they stand for others.")
        count = sum(batch.size for batch in self.batches(data))
        factor = checks.count("n_trained", n_trained, count) / count
        own, weighted = copy.copy(self), copy.copy(self.likelihood)
        object.__setattr__(weighted, "weighted", True)  # also of frozen dataclasses
        own.likelihood = weighted
        own.fit(StandIns(data, self.likelihood, factor, self.network.device), **options)
        own.set_state(replace(own.state, n_data=n_trained))
        fitted = copy.copy(own.likelihood)  # which may have more noise levels
        object.__setattr__(fitted, "weighted", self.likelihood.weighted)
        own.likelihood, own.training_data = fitted, TrainingData(data)
        self.__dict__ = vars(own)
        return self

    def fit_batches(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        before: GaussianState | None = None,
        reduce: Reduce | None = None,
    ) -> GaussianState:
        """Add up the curvature and the likelihood's statistics over the data."""
        structure = self.structure
        options: Any = {"progress": progress, "generator": generator, "reduce": reduce}
        self.backend.check(structure, self.likelihood)
        corrected = isinstance(structure, KroneckerStructure) and structure.eigenvalue_corrected
        if corrected:
            require_restartable(data, "The eigenvalue correction passes over the data twice.")
        earlier = before or self.earlier
        state, seen = self.sums(data, earlier, **options)
        state = state if earlier is None else earlier.plus(state)
        if corrected:
            state = replace(state, curvature=state.curvature.corrected(self.backend.component_weights(self.likelihood)))
            self._correct(data, state.curvature, seen, **options)
        if self.likelihood.n_noise > 1 and not bool((state.statistics.chunk(2)[1] > 0).all()):
            what, fix = "An output has no observed target, and so no noise level.", "Use noise_per_output=False."
            raise DataError(what, expected="a target of each output that is not NaN", got="NaN in all", fix=fix)
        is_zero = True
        for layout, block in state.curvature.blocks:
            may_be_zero = False
            for part in block.parts():
                total = float(part.sum())  # which NaNs and infinities reach
                may_be_zero = may_be_zero or total == 0
                if not math.isfinite(total):
                    what = f"The curvature of {', '.join(layout.names)} is not finite."
                    fix = "Look for NaNs in the data, or run the network in float32 if it overflows in half precision."
                    raise NonFiniteError(what, expected="finite activations and gradients", got="NaN or Inf", fix=fix)
            is_zero = is_zero and may_be_zero and block.is_zero()  # which may decompose it
        if is_zero:
            require_influence(self, False)
        return state

    def sums(
        self,
        data: Iterable[Any],
        earlier: GaussianState | None,
        *,
        progress: bool,
        generator: torch.Generator | None,
        reduce: Reduce | None = None,
        accumulate: Callable[..., tuple[Curvature, Tensor]] | None = None,
    ) -> tuple[GaussianState, int]:
        """The sums over these data of all ranks, and the number of examples of this one.

        ``accumulate`` takes the place of the backend's.
        """
        curvature: Curvature | None = None
        statistics, n_data, n_outputs, doubts = torch.zeros(()), 0, 0, Doubts(self.likelihood)
        separate = accumulate is None and earlier is None and self.noise_per_output
        add = self.backend.accumulate if accumulate is None else accumulate
        with suppress(EmptyDataError) if reduce is not None else nullcontext():
            for batch in self.batches(data, progress=progress, description=f"{type(self).__name__}: curvature"):
                if separate and curvature is None and getattr(self.likelihood.separate(batch.target)[0], "ndim", 1) > 1:
                    self._separate_noise(self.network.forward(batch.inputs).shape[-1])
                curvature, outputs = add(
                    curvature, self.network, self.likelihood, batch, self.structure, generator=generator
                )
                if n_outputs not in (0, outputs.shape[-1]):
                    what, fix = "The number of outputs changes from batch to batch.", "Feed inputs of one kind."
                    raise DataError(what, expected=f"{n_outputs} outputs", got=f"{outputs.shape[-1]}", fix=fix)
                statistics = statistics + self.likelihood.statistics(outputs, batch.target).cpu()
                n_data, n_outputs = n_data + len(outputs), outputs.shape[-1]
                doubts.add(outputs, batch.target)
        if n_data:
            doubts.settle()
        own = None
        if curvature is not None:
            own = GaussianState(self.network.vector(), n_data, n_outputs, curvature, statistics)
        if reduce is None:
            assert own is not None
            return own, n_data
        layers = reduce(None if own is None else list(self.network.layers), lambda mine, theirs: mine)
        if list(self.network.layers) != layers:  # a rank without data does not know which layer is the last
            self.network.select_last_layer(layers[0])
        total = reduce(own, GaussianState.plus)
        if separate:
            self._separate_noise(total.n_outputs)
        return total, n_data

    def _separate_noise(self, n_outputs: int) -> None:
        """Give several outputs a noise level each, where ``noise_per_output`` asks for it and it is affordable."""
        likelihood, size = self.likelihood, self.network.n_parameters
        if not self.noise_per_output or likelihood.noise_std is None or likelihood.n_noise > 1:
            return
        if self.structure.name == "full":
            cost = n_outputs * size**2
        else:
            shapes = [item.shape for item in self.network.selected if len(item.shape) > 1]
            cost = sum(shape[0] ** 3 + shape[1:].numel() ** 3 for shape in shapes)
        if 1 < n_outputs <= MANY_LEVELS and cost <= LEVEL_COSTS.get(self.structure.name, 0):
            likelihood = likelihood.with_noise(likelihood.noise_std.expand(n_outputs))
            with suppress(UnsupportedError):  # the backend cannot tell outputs apart
                self.backend.check(self.structure, likelihood)
                self.likelihood = likelihood

    def _correct(
        self,
        data: Iterable[Any],
        curvature: Curvature,
        seen: int,
        *,
        progress: bool,
        generator: torch.Generator | None,
        reduce: Reduce | None = None,
    ) -> None:
        """Add the data to the corrected eigenvalues, in place."""
        values = [b.corrected for _, b in curvature if isinstance(b, KroneckerBlock) and b.corrected is not None]
        if not values:  # no Kronecker product among the blocks
            return
        before = [own.clone() for own in values]
        for own in values if reduce is not None else ():
            own.zero_()
        again, name = 0, f"{type(self).__name__}: eigenvalues"
        for batch in self.batches(data, progress=progress, description=name) if seen else ():
            _, outputs = self.backend.accumulate(
                curvature, self.network, self.likelihood, batch, self.structure, generator=generator
            )
            again += len(outputs)
        if again != seen:
            what, fix = "The data changed from one pass to the other.", "Pass a loader that yields the same data."
            raise DataError(what, expected=f"{seen} examples again", got=f"{again}", fix=fix)
        if reduce is not None:
            added = reduce(values, lambda mine, theirs: [a + b for a, b in zip(mine, theirs, strict=True)])
            for own, old, new in zip(values, before, added, strict=True):
                own.copy_(old + new)

    @override
    def set_state(self, state: GaussianState) -> None:
        """Make sums those of this posterior; ConfigurationError for a prior of another shape."""
        if self._prior_groups is not None and len(self._prior_groups.index) != len(state.mean):  # of a subnetwork
            self._prior_groups = None
        if self._prior_precision.numel() > 1 or self._prior_mean.numel() > 1:
            self.prior()  # refuses a prior of another shape
        super().set_state(state)
        self.tangent_mean = self.link = None
        self.covariance_scale = self.output_temperature = 1.0
        if self.tuning is not None and self.tuning.vector is not None:  # which is the optimum for other weights or data
            self.tuning = None

    def laplace_model(self, *, moved: bool = False) -> LaplaceModel:
        """What the evidence is a function of, apart from the hyperparameters; ``moved`` networks are not refused."""
        if not moved or self._found is None:
            self.require_fit()
        state, prior_mean = self._found, self._prior_mean
        # What it has computed for earlier hyperparameters holds as long as nothing but them changes.
        key = (state, prior_mean, prior_mean._version, self._prior_groups, self.likelihood)
        if self._model_cache is None or not all(map(is_, self._model_cache[0], key)):
            model = LaplaceModel(
                curvature=self._evidence_curvature(state),
                vector=state.mean,
                prior_mean=prior_mean,
                layer_index=self._group_index(),
                likelihood=self.likelihood,
                statistics=state.statistics,
                backend=self.backend,
                n_outputs=state.n_outputs,
                travelled=state.travelled,
            )
            self._model_cache = (key, model)
        return self._model_cache[1]

    def _evidence_curvature(self, state: GaussianState) -> Curvature:
        """H as the evidence and the factors take it; a class whose state holds only a part adds to this."""
        return state.curvature

    # -- evidence ------------------------------------------------------------------------------------------------------

    @full_precision
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        noise_std: float | Tensor | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The Laplace evidence ``log p(D)``, in nats, constants included, 0-d float64; see :mod:`laplace_plus.tuning`.

        Arguments only ask: the posterior stays as it is. Differentiable in all three.

        Args:
            prior_precision: 0-d, ``[L]`` or ``[P]``; by default the current one.
            noise_std: Gaussian noise, 0-d or ``[C]``; by default the current one.
            temperature: By default the current one.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: A prior that the structure does not take.
        """
        return self.laplace_model().log_marginal_likelihood(
            self._prior_precision if prior_precision is None else prior_precision,
            self._temperature if temperature is None else positive(temperature, "temperature"),
            noise_std,
        )

    # -- the Gaussian --------------------------------------------------------------------------------------------------

    def factors(self) -> dict[str, Factor]:
        """The factorised posterior precision of each block, kept until a hyperparameter changes."""
        precision, temperature, scale = self._prior_precision, self._temperature, self.covariance_scale
        versions = precision._version, temperature._version
        curvature = None if self._found is None else self._found.curvature
        key = (curvature, precision, temperature, *versions, scale, self.likelihood, self._prior_groups)
        if self._factor_cache is None or not all(map(is_, self._factor_cache[0], key)):
            if scale != 1:
                checks.positive("covariance_scale", scale)
            found = self.laplace_model().factors(precision.detach() / scale, temperature.detach() * scale)
            self._factor_cache = key, found
        return self._factor_cache[1]

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        checks.count("n", n)
        model, factors = self.laplace_model(), self.factors()
        result = checks.zeros("The matrix of samples", n, len(model.vector), model.vector).add_(model.vector)
        for key, placement in model.places.items():
            add_draws_(result, factors[key], placement, generator)
        return result

    @override
    def _exact(self, x: Any, *, joint: bool, outputs: Outputs, differentiable: bool) -> FunctionalPosterior | None:
        if differentiable and self.tangent_mean is not None:
            # Third derivatives of torch's fused normalisations are wrong.
            what = "Predictions around the tangent model's optimum pass no gradients to x."
            raise UnsupportedError(what, expected='posterior.predictive_mean = "network"', got='"tangent"')
        found = functional_posteriors(
            self.network,
            [self.factors()],
            x,
            joint=joint,
            outputs=outputs,
            differentiable=differentiable,
            expected_outputs=self._found.n_outputs or None,
            layouts=next(zip(*self._found.curvature.blocks, strict=True)),
        )[0]
        if self.tangent_mean is None:
            return found
        shift = jvp(self.network, x, self.tangent_mean - self.mean)  # J(x) (θ* − θ̃)
        return FunctionalPosterior(found.mean + pick(shift, outputs).to(found.mean), found.covariance)

    @property
    def predictive_mean(self) -> Literal["network", "tangent"]:
        """What linearised predictions have as their mean: the ``"network"``'s outputs or the ``"tangent"`` optimum's.

        The latter is that of the last tuning by its evidence; ConfigurationError for setting it without one.
        """
        return "network" if self.tangent_mean is None else "tangent"

    @predictive_mean.setter
    def predictive_mean(self, value: Literal["network", "tangent"]) -> None:
        checks.choice("mean of predictions", value, ("network", "tangent"))
        known = self.tangent_mean if self.tuning is None or self.tuning.vector is None else self.tuning.vector
        if value == "tangent" and known is None:
            what, got = "The tangent model's optimum is not known.", "no such tuning since the fit"
            raise ConfigurationError(what, expected='fit_prior_precision(evidence="tangent") first', got=got)
        self.tangent_mean = known if value == "tangent" else None

    @override
    def summary(self) -> Summary:
        self.require_fit()
        curvature = self.laplace_model().curvature
        treatment: dict[str, list[str]] = {}
        for layout, block in curvature:
            groups = f"{layout.shape[0]} × " if layout.shape[0] > 1 else ""
            text = f"{block.kind}, {groups}{layout.shape[1]} × {layout.shape[2]} ({layout.rule})"
            share = getattr(block, "discarded_trace", 0.0)
            text += f", {share:.1%} of its trace left out" if share >= 5e-4 else ""
            text += ", zero: keeps the prior" if block.is_zero() else ""
            for name in layout.names:
                if text not in treatment.setdefault(name, []):
                    treatment[name].append(text)
        for first, others in tied_names(self.network.model).items():
            treatment.get(first, []).append(f"tied to {', '.join(others)}")
            for name in others:
                treatment.get(name, []).append(f"this use alone, tied to {first}")
        rows = [(s.name, s.size, s.layer, "; ".join(treatment[s.name])) for s in self.network.selected]
        title = f"{self!r}, {sum(own.n_bytes() for _, own in curvature) / 2**20:.1f} MiB of curvature"
        with suppress(LaplacePlusError):  # an indefinite curvature has none
            effective = float(self.effective_dimension())
            title += f", {effective:.1f} effective parameters"
            nearly_all = effective > NEARLY * len(self.mean)
            title += ": nearly all, so that a larger network may fit better" * nearly_all
        return Summary(title, tuple(rows), describe_groups(self))

    # -- the Gaussian over weights -------------------------------------------------------------------------------------

    @full_precision
    def log_prob(self, theta: Tensor) -> Tensor:
        """Log-density of weights under the posterior, ``log N(θ; θ̂, Σ)``, in nats; differentiable in θ.

        ``theta`` is ``[P]`` or ``[n, P]``, in ``parameter_names`` order, as :meth:`sample` gives them; the result 0-d
        or ``[n]``, float64, and NaN for weights that are not finite. ConfigurationError for vectors of another length.
        """
        single = getattr(theta, "ndim", 1) == 1
        vectors = checks.shape("theta", theta[None] if single else theta, [None, self.n_parameters])
        squares = self.laplace_model().squared_distance(vectors, self._prior_precision, self._temperature)
        determinant = sum(factor.log_determinant() for factor in self.factors().values())
        found = (determinant - self.n_parameters * math.log(2 * math.pi) - squares / self.covariance_scale) / 2
        return found[0] if single else found

    @full_precision
    def effective_dimension(self) -> Tensor:
        """The number of parameters that the data determine, ``γ = Σ λ/(λ + α)``, between 0 and P (MacKay, 1992).

        λ are the eigenvalues of ``H/T``; in general ``γ = P − tr((H/T + P₀)⁻¹ P₀)``, 0-d float64. The covariance's
        scale does not count. At the evidence's optimum in one α, ``α ‖θ̂ − μ₀‖² = γ``.
        """
        return self.laplace_model().effective_dimension(self._prior_precision, self._temperature)

    @full_precision
    def variance(self) -> Tensor:
        """Posterior variance of each parameter entry, ``[P]``."""
        return self.laplace_model().variances(self.factors())

    @full_precision
    def precision_matrix(self) -> Tensor:
        """The posterior precision ``(H/T + P₀) / s`` written out, ``[P, P]``; only for small P."""
        model = self.laplace_model()
        weights = (model.weights() / self._temperature.to(model.vector.device)).to(model.vector)
        precision = model.curvature.dense(weights)
        precision.diagonal().add_(self.prior().vector().to(model.vector))
        return precision / self.covariance_scale

    @full_precision
    def covariance_matrix(self) -> Tensor:
        """The posterior covariance written out, ``[P, P]``; only for small P."""
        total = checks.zeros("The covariance matrix", self.n_parameters, self.n_parameters, self.mean)
        factors = self.factors()
        for layout, _ in self.laplace_model().curvature:
            for group, matrix in enumerate(factors[layout.key].covariance()):
                place = layout.index[group].flatten().to(total.device)
                total[place[:, None], place] = matrix
        return total
