"""Gaussian posteriors ``N(θ̂, (H/T + P₀)⁻¹)``: the Laplace approximation in whatever structure H has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import is_
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.curvature import Curvature, KroneckerStructure, Structure
from laplace_plus.distributed import OwnedSum, sum_
from laplace_plus.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    LaplacePlusError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.network.batches import to_device
from laplace_plus.network.selection import tied_names
from laplace_plus.posteriors.configuration import Summary, full_precision
from laplace_plus.posteriors.configuration import check_positive as positive
from laplace_plus.posteriors.moments import Moments
from laplace_plus.posteriors.storing import curvature_state, restored_curvature
from laplace_plus.posteriors.sums import (
    FitSums,
    LostSums,
    corrected_eigenvalues,
    diagonalise_over_ranks,
    owned_sums,
    require_owners,
    sum_over_ranks,
)
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.predictive.deviations import moments
from laplace_plus.predictive.linearized import FunctionalPosterior, functional_posteriors
from laplace_plus.predictive.outputs import Outputs, pick
from laplace_plus.structured import Factor
from laplace_plus.structured.sampling import add_draws_
from laplace_plus.tuning.base import GAUSSIAN_TUNERS, Tuner
from laplace_plus.tuning.laplace import LaplaceModel

MANY_LEVELS = 16
"""Most outputs that get noise levels of their own by default; each adds one component to the curvature."""

LEVEL_COSTS = {"full": 2**22, "KFAC": 2**29, "diagonal": math.inf}
"""Largest costs of that, as each evaluation of the evidence then decomposes the sum of all components: entries of a
dense curvature, cubed sides of Kronecker factors. Tuning three layers of 512 units took 5 s on one core, not 0.4."""

NEARLY = 0.9
"""Share of the parameters that are effective from which :meth:`GaussianPosterior.summary` says so."""


class GaussianPosterior(Moments):
    """A Gaussian whose precision is a structured curvature plus the prior precision.

    A subclass only sets :attr:`structure`; evidence, tuning, sampling and the linearised predictive come with it.
    """

    over_ranks = True

    structure: Structure
    """The structure that this posterior asks a backend for."""

    tuners: ClassVar[Mapping[str, type[Tuner]]] = GAUSSIAN_TUNERS

    _sums: FitSums | None = None
    _factor_cache: tuple[tuple[Any, ...], dict[str, Factor]] | None = None
    _model_cache: tuple[tuple[Any, ...], LaplaceModel] | None = None

    # -- fitting -------------------------------------------------------------------------------------------------------

    def fit_batches(
        self, data: Iterable[Any], *, update: bool, progress: bool, generator: torch.Generator | None
    ) -> None:
        """Add up the curvature and the likelihood's statistics over the data."""
        structure = self.structure
        self.backend.check(structure, self.likelihood)
        corrected = isinstance(structure, KroneckerStructure) and structure.eigenvalue_corrected
        if corrected:
            require_restartable(data, "The eigenvalue correction passes over the data twice.")
        before = self.sums if update else self.earlier
        if before is not None:
            require_owners(self.group, owned_sums(before.curvature))
        sums, seen = self._total(data, before, progress=progress, generator=generator)
        if before is not None:
            sums = before.plus(sums)
        elif corrected:
            weights = self.backend.component_weights(self.likelihood)
            sums = replace(sums, curvature=sums.curvature.corrected(weights))
        if corrected:
            self._correct(data, sums.curvature, seen, progress=progress, generator=generator)
        may_be_zero = True
        for layout, block in sums.curvature.blocks:
            totals = []
            for part in block.parts():
                totals.append(float(part.sum()))
                if math.isfinite(totals[-1]):  # NaNs and infinities reach the sum
                    continue
                what = f"The curvature of {', '.join(layout.names)} is not finite."
                expected = "finite activations and gradients"
                fix = "Look for NaNs in the data, or run the network in float32 if it overflows in half precision."
                raise NonFiniteError(what, expected=expected, got="NaN or Inf", fix=fix)
            may_be_zero = may_be_zero and 0 in totals
        if self.group is not None:
            diagonalise_over_ranks(self.group, sums.curvature, self._component_weights())
        if may_be_zero and all(block.is_zero() for _, block in sums.curvature):
            raise self.zero_curvature()
        self.adopt(sums, self.network.vector())

    def _total(
        self,
        data: Iterable[Any],
        before: FitSums | None,
        *,
        progress: bool,
        generator: torch.Generator | None,
        accumulate: Callable[..., tuple[Curvature, Tensor]] | None = None,
    ) -> tuple[FitSums, int]:
        """The sums over all ranks' data, to be added to those ``before``, and the number of examples on this rank.

        ``accumulate`` takes the place of the backend's.
        """
        sums: FitSums | None = None
        doubt, separate = 0.0, accumulate is None and before is None
        accumulate = self.backend.accumulate if accumulate is None else accumulate
        batches = self.batches(data, progress=progress, description=f"{type(self).__name__}: curvature")
        for batch in batches:
            if separate and sums is None and self.noise_per_output and getattr(batch.target, "ndim", 1) > 1:
                self._separate_noise(self.network.forward(batch.inputs).shape[-1])
            total = None if sums is None else sums.curvature
            curvature, outputs = accumulate(
                total, self.network, self.likelihood, batch, self.structure, generator=generator
            )
            statistics = self.likelihood.statistics(outputs, batch.target).cpu()
            in_range = doubt > -math.inf and outputs.min() >= 0 and outputs.max() <= 1
            doubt += self.likelihood.evidence_for_probabilities(outputs, batch.target) if in_range else -math.inf
            n_data, n_outputs = outputs.shape[0], outputs.shape[-1]
            if sums is not None:
                if sums.n_outputs != n_outputs:
                    what = "The number of outputs changes from batch to batch."
                    fix = "Let the loader yield inputs of one kind."
                    raise DataError(what, expected=f"{sums.n_outputs} outputs", got=f"{n_outputs}", fix=fix)
                statistics, n_data = sums.statistics + statistics, sums.n_data + n_data
            sums = FitSums(curvature, statistics, n_data, n_outputs)
        if doubt > 0:
            doubt_logits(self.likelihood, doubt)
        seen = 0 if sums is None else sums.n_data
        if self.group is not None:
            result = sum_over_ranks(self.group, sums, self.network, None if before is None else before.curvature)
            if separate:  # a rank without data
                self._separate_noise(result.n_outputs)
            return result, seen
        assert sums is not None
        return sums, seen

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
            try:
                self.backend.check(self.structure, likelihood)
            except UnsupportedError:  # the backend cannot tell outputs apart
                return
            self.likelihood = likelihood

    def _correct(
        self, data: Iterable[Any], curvature: Curvature, seen: int, *, progress: bool, generator: torch.Generator | None
    ) -> None:
        """Add the data to the corrected eigenvalues, in place."""
        group = self.group
        if group is not None:
            diagonalise_over_ranks(group, curvature, self._component_weights())
            if group.rank > 0:  # what was there before counts once
                for values in corrected_eigenvalues(curvature):
                    values.zero_()
        name = f"{type(self).__name__}: eigenvalues"
        batches = self.batches(data, progress=progress, description=name) if seen else iter(())
        again = torch.zeros((), dtype=torch.long)
        for batch in batches:
            again += self.backend.correct(self.network, self.likelihood, batch, curvature, generator=generator)
        if again != seen:
            what = "The data changed from one pass to the other."
            fix = "Pass a loader that yields the same data each time."
            raise DataError(what, expected=f"{seen} examples again", got=f"{int(again)}", fix=fix)
        if group is not None:
            sum_(group, corrected_eigenvalues(curvature))

    @override
    def owned_sums(self) -> list[OwnedSum]:
        return [] if self._sums is None else owned_sums(self._sums.curvature)

    def _component_weights(self) -> Tensor:
        """The weights ``[K]`` at which the curvature is decomposed first."""
        return (self.backend.component_weights(self.likelihood) / self._temperature.detach()).to(self.network.vector())

    def adopt(self, sums: FitSums, mean: Tensor) -> None:
        """Make sums and a mean those of this posterior; ConfigurationError for a prior of another shape."""
        if self._prior_groups is not None and len(self._prior_groups.index) != len(mean):  # of another subnetwork
            self._prior_groups = None
        if self._prior_precision.numel() > 1 or self._prior_mean.numel() > 1:
            self.prior()  # refuses a prior of another shape
        self._sums, self._vector, self._factor_cache, self.tangent_mean = sums, mean, None, None
        self.link, self.covariance_scale = None, 1.0
        if self.tuning is not None and self.tuning.vector is not None:  # which is the optimum for other weights or data
            self.tuning = None
        self.n_data, self.n_outputs = sums.n_data, sums.n_outputs

    @property
    def sums(self) -> FitSums:
        """The curvature and statistics of the fit; :class:`NotFittedError` before it."""
        if self._sums is None:
            self.require_fit()
        assert self._sums is not None
        return self._sums

    @override
    def laplace_model(self, *, moved: bool = False) -> LaplaceModel:
        if not moved or self._sums is None:
            self.require_fit()
        sums, mean, prior_mean = self._sums, self._vector, self._prior_mean
        assert sums is not None and mean is not None
        # What it has computed for earlier hyperparameters holds as long as nothing but them changes.
        key = (sums, mean, prior_mean, prior_mean._version, self._prior_groups, self.likelihood)
        if self._model_cache is None or not all(map(is_, self._model_cache[0], key)):
            model = LaplaceModel(
                curvature=sums.curvature,
                vector=mean,
                prior_mean=prior_mean,
                layer_index=self._group_index(),
                likelihood=self.likelihood,
                statistics=sums.statistics,
                backend=self.backend,
                n_outputs=sums.n_outputs,
                travelled=sums.travelled,
            )
            self._model_cache = (key, model)
        return self._model_cache[1]

    # -- evidence ------------------------------------------------------------------------------------------------------

    @full_precision
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        noise_std: float | Tensor | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The Laplace evidence ``log p(D)``, in nats, constants included; see :mod:`laplace_plus.tuning`.

        Arguments only ask: the posterior stays as it is. Differentiable in all three.

        Args:
            prior_precision: 0-d, ``[L]`` or ``[P]``; by default the current one.
            noise_std: Gaussian noise, 0-d or ``[C]``; by default the current one.
            temperature: By default the current one.

        Returns:
            0-d float64.

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

    @override
    def factors(self) -> dict[str, Factor]:
        """The factorised posterior precision of each block, kept until a hyperparameter changes."""
        precision, temperature, scale = self._prior_precision, self._temperature, self.covariance_scale
        versions = precision._version, temperature._version
        key = (precision, temperature, *versions, scale, self.likelihood, self._prior_groups)
        if self._factor_cache is None or not all(map(is_, self._factor_cache[0], key)):
            if scale != 1:
                checks.positive("covariance_scale", scale)
            factors = self.laplace_model().factors(precision.detach() / scale, temperature.detach() * scale)
            self._factor_cache = key, factors
        return self._factor_cache[1]

    @override
    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        self.check_draws(n=n)
        model, factors = self.laplace_model(), self.factors()
        result = model.vector.expand(n, -1).clone()
        for key, placement in model.parameter_slices.items():
            add_draws_(result, factors[key], placement, generator)
        return result

    @override
    @full_precision
    def functional_posterior(
        self,
        x: Any,
        *,
        joint: bool = False,
        outputs: Outputs = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
        n_samples: int | None = None,
    ) -> FunctionalPosterior:
        """As of :class:`Posterior`; exact, or from ``n_samples`` draws."""
        self.require_fit()
        if n_samples is not None:
            self.check_samples(n_samples, x)
            if differentiable:
                raise UnsupportedError("Samples pass no gradients to x.", expected="n_samples=None for an exact result")
            with torch.no_grad():
                return moments(*self._pushed(x, generator, n_samples), joint=joint, outputs=outputs)
        if differentiable and self.tangent_mean is not None:
            # Third derivatives of torch's fused normalisations are wrong.
            what = "Predictions around the tangent model's optimum pass no gradients to x."
            raise UnsupportedError(what, expected='posterior.predictive_mean = "network"', got='"tangent"')
        assert self._sums is not None
        x = to_device(x, self.network.device)
        found = functional_posteriors(
            self.network,
            [self.factors()],
            x,
            joint=joint,
            outputs=outputs,
            differentiable=differentiable,
            expected_outputs=self.n_outputs or None,
            layouts=next(zip(*self._sums.curvature.blocks, strict=True)),
        )[0]
        if self.tangent_mean is None:
            return found
        shift = self.network.tangent(x, self.tangent_mean - self.mean)  # J(x) (θ* − θ̃)
        return FunctionalPosterior(found.mean + pick(shift, outputs).to(found.mean), found.covariance)

    @property
    def predictive_mean(self) -> Literal["network", "tangent"]:
        """What linearised predictions have as their mean: the ``"network"``'s outputs or the ``"tangent"`` optimum's.

        The tangent model's optimum is that of the last tuning by its evidence.

        Raises:
            ConfigurationError: Setting ``"tangent"`` without such a tuning.
        """
        return "network" if self.tangent_mean is None else "tangent"

    @predictive_mean.setter
    def predictive_mean(self, value: Literal["network", "tangent"]) -> None:
        checks.choice("mean of predictions", value, ("network", "tangent"))
        if value == "network":
            self.tangent_mean = None
        elif self.tangent_mean is None:
            if self.tuning is None or self.tuning.vector is None:
                what, got = "The tangent model's optimum is not known.", "no such tuning since the fit"
                raise ConfigurationError(what, expected='fit_prior_precision(evidence="tangent") first', got=got)
            self.tangent_mean = self.tuning.vector

    @override
    def summary(self) -> Summary:
        self.require_fit()
        curvature = self.sums.curvature
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
        title = f"{self!r}, {curvature.n_bytes() / 2**20:.1f} MiB of curvature"
        with suppress(LaplacePlusError):  # an indefinite curvature has none
            effective = float(self.effective_dimension())
            title += f", {effective:.1f} effective parameters"
            title += (
                ": nearly all, so that a larger network may fit better" if effective > NEARLY * len(self.mean) else ""
            )
        return Summary(title, tuple(rows), self.describe_groups())

    # -- storage -------------------------------------------------------------------------------------------------------

    @override
    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        sums = self.sums
        blocks, tensors = curvature_state(sums.curvature)
        tensors |= {"statistics": sums.statistics, "vector": self.mean}
        optional = {"tangent_mean": self.tangent_mean, "travelled": sums.travelled}
        tensors |= {name: own for name, own in optional.items() if own is not None}
        header = {"blocks": blocks, "link": self.link, "covariance_scale": self.covariance_scale}
        return {**header, "continued": self.earlier is not None}, tensors

    @override
    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        curvature = restored_curvature(header["blocks"], tensors)
        if {name for layout, _ in curvature for name in layout.names} != {*self.parameter_names}:
            raise CheckpointError("The blocks are of other parameters.", expected=", ".join(self.parameter_names))
        if any(block.n_components != self.likelihood.n_noise for _, block in curvature):
            raise CheckpointError("The blocks have another number of parts.", expected=f"{self.likelihood.n_noise}")
        self.likelihood.log_likelihood(tensors["statistics"])  # fails for those of another kind
        statistics, travelled = tensors["statistics"].cpu(), tensors.get("travelled")
        travelled = travelled if travelled is None else travelled.view_as(tensors["vector"])
        sums = FitSums(curvature, statistics, self.n_data, self.n_outputs, travelled)
        self.earlier = LostSums() if header.get("continued") else None
        self.adopt(sums, tensors["vector"])
        self.tangent_mean, self.link = tensors.get("tangent_mean"), header.get("link")
        checks.positive("covariance_scale", header.get("covariance_scale", 1.0))
        self.covariance_scale = float(header.get("covariance_scale", 1.0))
