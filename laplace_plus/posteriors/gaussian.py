"""Gaussian posteriors ``N(θ̂, (H/T + P₀)⁻¹)``: the Laplace approximation in whatever structure H has."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.batches import describe
from laplace_plus.curvature import Curvature, KroneckerStructure, Structure
from laplace_plus.curvature.layouts import Layout
from laplace_plus.curvature.structures import block_from_tensors
from laplace_plus.distributed import OwnedSum, sum_
from laplace_plus.errors import DataError, EmptyDataError, InputError, NonFiniteError
from laplace_plus.evidence import LaplaceModel, tune
from laplace_plus.linalg import Factor
from laplace_plus.linalg.sampling import add_draws_
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.fit_sums import FitSums
from laplace_plus.posteriors.methods import check_count, exactly
from laplace_plus.posteriors.rank_sums import (
    corrected_eigenvalues,
    diagonalise_over_ranks,
    owned_sums,
    require_owners,
    sum_over_ranks,
)
from laplace_plus.posteriors.summary import Summary
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.predictive.linearized import FunctionalPosterior, Outputs, functional_posteriors


class GaussianPosterior(Posterior):
    """A Gaussian whose precision is a structured curvature plus the prior precision.

    A subclass only names the structure; evidence, tuning, sampling and the linearised predictive come with it.
    """

    over_ranks = True

    _sums: FitSums | None = None
    _factor_cache: tuple[tuple[Any, ...], dict[str, Factor]] | None = None
    _model_cache: tuple[tuple[Any, ...], LaplaceModel] | None = None

    @property
    @abstractmethod
    def structure(self) -> Structure:
        """The structure that this posterior asks a backend for."""

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, data: Iterable[Any], *, update: bool, progress: bool, generator: torch.Generator | None) -> None:
        structure = self.structure
        self.backend.check(structure, self.likelihood)
        corrected = isinstance(structure, KroneckerStructure) and structure.eigenvalue_corrected
        if corrected:
            require_restartable(data, "The eigenvalue correction passes over the data twice.")
        before = self._require_sums().curvature if update else None
        require_owners(self._group, [] if before is None else owned_sums(before))
        sums, seen = self._total(data, before, progress=progress, generator=generator)
        if update:
            assert self._sums is not None
            sums = self._sums.plus(sums)
        elif corrected:
            weights = self.backend.component_weights(self.likelihood)
            sums = replace(sums, curvature=sums.curvature.corrected(weights))
        if corrected:
            self._correct(data, sums.curvature, seen, progress=progress, generator=generator)
        _require_finite(sums.curvature)
        if self._group is not None:
            diagonalise_over_ranks(self._group, sums.curvature, self._component_weights())
        self._adopt(sums, self.network.vector())

    def _total(
        self, data: Iterable[Any], before: Curvature | None, *, progress: bool, generator: torch.Generator | None
    ) -> tuple[FitSums, int]:
        """The sums over all ranks' data, to be added to those ``before``, and the number of examples on this one."""
        if self._group is None:
            sums = self._accumulate(data, progress=progress, generator=generator)
            return sums, sums.n_data
        try:
            own: FitSums | None = self._accumulate(data, progress=progress, generator=generator)
        except EmptyDataError:  # somebody else has data, or this is raised once more
            own = None
        seen = 0 if own is None else own.n_data
        return sum_over_ranks(self._group, own, self.network, before), seen

    def _correct(
        self,
        data: Iterable[Any],
        curvature: Curvature,
        seen: int,
        *,
        progress: bool,
        generator: torch.Generator | None,
    ) -> None:
        """Add the data to the corrected eigenvalues, in place."""
        group, again = self._group, 0
        if group is not None:
            diagonalise_over_ranks(group, curvature, self._component_weights())
            if group.rank > 0:  # what was there before counts once
                for values in corrected_eigenvalues(curvature):
                    values.zero_()
        name = f"{type(self).__name__}: eigenvalues"
        for batch in self._batches(data, progress=progress, description=name) if seen else ():
            again += self.backend.correct(self.network, self.likelihood, batch, curvature, generator=generator)
        if again != seen:
            raise DataError(
                "The data changed from the first pass to the second.",
                expected=f"{seen} examples again",
                got=f"{again}",
                fix="Pass a loader that yields the same data each time.",
            )
        if group is not None:
            sum_(group, corrected_eigenvalues(curvature))

    @override
    def owned_sums(self) -> list[OwnedSum]:
        return [] if self._sums is None else owned_sums(self._sums.curvature)

    def _component_weights(self) -> Tensor:
        """The weights ``[K]`` at which the curvature is decomposed first."""
        return (self.backend.component_weights(self.likelihood) / self._temperature.detach()).to(self.network.vector())

    def _accumulate(self, data: Iterable[Any], *, progress: bool, generator: torch.Generator | None) -> FitSums:
        """Curvature and statistics summed over the data."""
        sums: FitSums | None = None
        first = ""
        for batch in self._batches(data, progress=progress, description=f"{type(self).__name__}: curvature"):
            shapes = describe(batch.inputs)
            try:
                curvature, outputs = self.backend.accumulate(
                    None if sums is None else sums.curvature,
                    self.network,
                    self.likelihood,
                    batch,
                    self.structure,
                    generator=generator,
                )
            except InputError as error:
                if sums is None or shapes == first:
                    raise
                raise _changed(first, shapes) from error
            statistics = self.likelihood.statistics(outputs, batch.target).cpu()
            part = FitSums(curvature, statistics, outputs.shape[0], outputs.shape[-1])
            if sums is None:
                sums, first = part, shapes
                continue
            if sums.n_outputs != part.n_outputs:
                raise _changed(f"{sums.n_outputs} outputs", f"{part.n_outputs} outputs")
            sums = replace(sums, statistics=sums.statistics + statistics, n_data=sums.n_data + part.n_data)
        if sums is None:
            raise EmptyDataError("The loader yielded no data.", expected="at least one batch", got="none")
        return sums

    def _adopt(self, sums: FitSums, vector: Tensor) -> None:
        self._check_prior()  # the selection is final by now: refuse a prior of the wrong shape before anything is kept
        self._sums, self._vector, self._factor_cache = sums, vector, None
        self.n_data, self.n_outputs = sums.n_data, sums.n_outputs

    def _require_sums(self) -> FitSums:
        self._require_fit()
        assert self._sums is not None
        return self._sums

    def laplace_model(self) -> LaplaceModel:
        """What the evidence is a function of, apart from the hyperparameters."""
        sums = self._require_sums()
        mean, prior_mean, layers = self._vector, self._prior_mean, self.network.layer_index()
        assert mean is not None
        # What it has computed for earlier hyperparameters holds as long as nothing but them changes.
        key = (sums, mean, prior_mean, prior_mean._version, layers, self.likelihood)
        if self._model_cache is None or any(a is not b for a, b in zip(self._model_cache[0], key, strict=True)):
            model = LaplaceModel(
                curvature=sums.curvature,
                vector=mean,
                prior_mean=prior_mean,
                layer_index=layers,
                likelihood=self.likelihood,
                statistics=sums.statistics,
                backend=self.backend,
                n_outputs=sums.n_outputs,
            )
            self._model_cache = (key, model)
        return self._model_cache[1]

    # -- evidence ------------------------------------------------------------------------------------------------------

    @exactly
    def log_marginal_likelihood(
        self,
        prior_precision: float | Tensor | None = None,
        noise_std: float | Tensor | None = None,
        *,
        temperature: float | Tensor | None = None,
    ) -> Tensor:
        """The Laplace evidence ``log p(D)``, in nats, constants included; see :mod:`laplace_plus.evidence`.

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
            self._temperature if temperature is None else temperature,
            noise_std,
        )

    @exactly
    def fit_prior_precision(
        self,
        method: str = "marginal_likelihood",
        structure: str = "scalar",
        *,
        data: Iterable[Any] | None = None,
        tune_noise: bool | None = None,
        progress: bool = False,
        **options: Any,
    ) -> Self:
        """Tune the prior precision and, in regression, the noise level with it.

        Args:
            method: ``"marginal_likelihood"`` (line-searched ascent of the evidence), ``"mackay"`` (its fixed point),
                ``"em"`` (slower and monotone), or ``"validation"`` (least loss on held-out ``data``).
            structure: ``"scalar"``, ``"layerwise"``, or ``"diagonal"`` where the structure allows.
            data: Held-out batches for ``"validation"``.
            tune_noise: Whether to tune the Gaussian noise; by default whenever there is any.
            progress: Whether to show a progress bar.
            **options: Passed to the method; see :func:`laplace_plus.evidence.tune`.

        Returns:
            The posterior itself, with ``prior_precision`` (and ``noise_std``) set.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: An unknown method or structure.
            UnsupportedError: A prior that the posterior's structure does not take.

        Warns:
            ConvergenceWarning: The tuning ended before it met its tolerance.
        """
        result = tune(
            self.laplace_model(),
            method=method,
            structure=structure,
            initial=self._prior_precision,
            temperature=self._temperature,
            tune_noise=tune_noise,
            network=self.network,
            data=data,
            progress=progress,
            **options,
        )
        self._prior_precision = result.prior_precision
        if result.noise_std is not None:
            self.noise_std = result.noise_std
        self.tuning = result
        return self

    # -- the Gaussian --------------------------------------------------------------------------------------------------

    def _factors(self) -> dict[str, Factor]:
        """The factorised posterior precision, kept until a hyperparameter changes."""
        precision, temperature = self._prior_precision, self._temperature
        key = (precision, precision._version, temperature, temperature._version, self.likelihood)
        cached = self._factor_cache
        if cached is None or any(a is not b for a, b in zip(cached[0], key, strict=True)):
            factors = self.laplace_model().factors(precision.detach(), temperature.detach())
            self._factor_cache = cached = (key, factors)
        return cached[1]

    @exactly
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw parameter vectors, ``[n, P]`` in ``parameter_names`` order.

        Args:
            n: Number of draws.
            generator: Source of randomness; may live on another device.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: A number of draws that is not a positive integer.
        """
        check_count(n, "n")
        model, factors = self.laplace_model(), self._factors()
        result = model.vector.expand(n, -1).clone()
        for key, placement in model.placements.items():
            add_draws_(result, factors[key], placement, generator)
        return result

    @override
    @exactly
    def functional_posterior(
        self, x: Any, *, joint: bool = False, outputs: Outputs = None, differentiable: bool = False
    ) -> FunctionalPosterior:
        self._require_fit()
        return functional_posteriors(
            self.network,
            [self._factors()],
            self.network.receive(x),
            joint=joint,
            outputs=outputs,
            differentiable=differentiable,
            expected_outputs=self.n_outputs,
        )[0]

    @exactly
    def variance(self) -> Tensor:
        """Posterior variance of each parameter entry, ``[P]``."""
        return self.laplace_model().variances(self._factors())

    @exactly
    def precision_matrix(self) -> Tensor:
        """The posterior precision ``H/T + P₀`` written out, ``[P, P]``; only for small P."""
        model = self.laplace_model()
        weights = (model.weights() / self._temperature.to(model.vector.device)).to(model.vector)
        return model.curvature.dense(weights) + torch.diag(self.prior().vector().to(model.vector))

    @exactly
    def covariance_matrix(self) -> Tensor:
        """The posterior covariance written out, ``[P, P]``; only for small P."""
        total = torch.zeros(self.n_parameters, self.n_parameters, dtype=self.mean.dtype, device=self.mean.device)
        factors = self._factors()
        for layout, _ in self._require_sums().curvature:
            for group, matrix in enumerate(factors[layout.key].covariance()):
                place = layout.index[group].flatten().to(total.device)
                total[place[:, None], place] = matrix
        return total

    def summary(self) -> Summary:
        """Which parameter is treated how.

        Raises:
            NotFittedError: Before :meth:`fit`.
        """
        curvature = self._require_sums().curvature
        treatment: dict[str, list[str]] = {}
        for layout, block in curvature:
            groups = f"{layout.shape[0]} × " if layout.shape[0] > 1 else ""
            text = f"{block.kind}, {groups}{layout.shape[1]} × {layout.shape[2]} ({layout.rule})"
            for name in layout.names:
                if text not in treatment.setdefault(name, []):
                    treatment[name].append(text)
        rows = [(s.name, s.size, s.layer, "; ".join(treatment[s.name])) for s in self.network.selected]
        return Summary(f"{self!r}, {curvature.n_bytes() / 2**20:.1f} MiB of curvature", tuple(rows))

    # -- storage -------------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        sums = self._require_sums()
        tensors, blocks = {"statistics": sums.statistics, "vector": self.mean}, []
        for number, (layout, block) in enumerate(sums.curvature):
            blocks.append(
                {
                    "key": layout.key,
                    "names": list(layout.names),
                    "rule": layout.rule,
                    "kind": block.storage,
                    "shape": list(block.shape),
                }
            )
            tensors[f"block.{number}.index"] = layout.index
            tensors |= {f"block.{number}.{name}": value for name, value in block.tensors().items()}
        return {"blocks": blocks}, tensors

    def _restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        blocks = []
        for number, entry in enumerate(header["blocks"]):
            prefix = f"block.{number}."
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            layout = Layout(entry["key"], tuple(entry["names"]), entry["rule"], own.pop("index").cpu())
            blocks.append((layout, block_from_tensors(entry["kind"], tuple(entry["shape"]), own)))
        sums = FitSums(Curvature(blocks), tensors["statistics"].cpu(), self.n_data, self.n_outputs)
        self._adopt(sums, tensors["vector"])


def _changed(expected: str, got: str) -> DataError:
    return DataError(
        "A batch is of another shape than the first one, and the network cannot take it.",
        expected=expected,
        got=got,
        fix="Let the loader yield inputs of one kind.",
    )


def _require_finite(curvature: Curvature) -> None:
    for layout, block in curvature:
        if not block.is_finite():
            raise NonFiniteError(
                f"The curvature of {', '.join(layout.names)} is not finite.",
                expected="finite activations and output gradients",
                got="NaN or Inf",
                fix="Look for NaNs in the data, or run the network in float32 if it overflows in half precision.",
            )
