"""The Laplace evidence and its parts, and whether data are those that a posterior was fitted to.

With curvature H of the negative log-likelihood, posterior precision ``Λ = H/T + P₀`` and prior ``N(μ₀, P₀⁻¹)``,

    log Z = log p(D|θ̂)/T − ½ (θ̂−μ₀)ᵀ P₀ (θ̂−μ₀) − ½ log det Λ + ½ log det P₀        (MacKay, 1992)

All constants of the likelihood are included. H is diagonalised once, and all sums over parameters that do not depend on
a hyperparameter are taken once; each evaluation after that costs one pass over eigenvalues at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature.base import Backend
from laplace_plus.curvature.structures import Curvature
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError, warn
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import iterate
from laplace_plus.network.network import AMBIENT, Network
from laplace_plus.priors import GaussianPrior, as_hyperparameter
from laplace_plus.structured import Block, Factor
from laplace_plus.structured.layout import Layout, Places
from laplace_plus.structured.log_determinants import Spectrum


@dataclass(frozen=True)
class LaplaceModel:
    """Everything that the evidence is a function of, apart from the hyperparameters.

    Attributes:
        curvature: H at unit noise, in components.
        vector: θ̂, ``[P]``.
        prior_mean: μ₀, 0-d or ``[P]``.
        layer_index: ``[P]`` integers: the layer of each entry.
        likelihood: Gives ``log p(D|θ̂)`` from the data's additive ``statistics`` at any noise level.
        backend: Knows how H's components scale with the noise.
        n_outputs: C.
        travelled: What takes the place of ``|θ̂ − μ₀|`` after several tasks, ``[P]``.
    """

    curvature: Curvature
    vector: Tensor
    prior_mean: Tensor
    layer_index: Tensor
    likelihood: Likelihood
    statistics: Tensor
    backend: Backend
    n_outputs: int
    travelled: Tensor | None = None
    _known_scatter: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _known_spectra: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def prior(self, precision: Any) -> GaussianPrior:
        """The prior at a precision (0-d, ``[L]`` or ``[P]``), which is checked."""
        return self._unit_prior.with_precision(precision)

    @property
    def n_layers(self) -> int:
        """L, the number of precisions of a layer-wise prior."""
        return self._unit_prior.n_layers

    @cached_property
    def places(self) -> dict[str, Places]:
        """Where each block lies in the parameter vector, by layout key."""
        return {layout.key: layout.places for layout, _ in self.curvature}

    def scatter(self, structure: str) -> Tensor:
        """``(θ̂−μ₀)²``, summed over the entries that share a precision: 0-d, ``[L]`` or ``[P]``, float64."""
        known = {} if self.prior_mean.requires_grad else self._known_scatter  # a derivative's graph is used up by one
        if structure not in known:
            away = self._unit_prior.deviation(self.vector) if self.travelled is None else self.travelled
            squares = away.double().square()
            if structure == "scalar":
                squares = squares.sum()
            if structure == "layerwise":
                empty = torch.zeros(self.n_layers, dtype=torch.float64, device=squares.device)
                squares = empty.index_add(0, self.layer_index.to(squares.device), squares)
            known[structure] = squares
        return known[structure]

    @cached_property
    def _unit_prior(self) -> GaussianPrior:
        return GaussianPrior.create(1.0, self.prior_mean, self.layer_index)

    @cached_property
    def _layers(self) -> dict[str, int | Tensor]:
        """By layout key the layer that a block is part of, or, where there are several, that of each of its entries."""
        result: dict[str, int | Tensor] = {}
        for key, placement in self.places.items():
            layers = placement.gather(self.layer_index)
            low, high = layers.aminmax()
            result[key] = int(low) if low == high else layers.to(self.vector.device)
        return result

    @property
    def mixes_layers(self) -> bool:
        """Whether a block holds entries of several layers."""
        return any(isinstance(layer, Tensor) for layer in self._layers.values())

    def diagonals(self, precision: Tensor) -> dict[str, Tensor]:
        """By layout key the prior precision of a block, 0-d or ``[G, o, i]``, float64."""
        precision = precision.to(self.vector.device, torch.float64)
        if precision.numel() == 1:
            return dict.fromkeys(self.places, precision.squeeze())
        if len(precision) == len(self.layer_index):
            return {key: placement.gather(precision) for key, placement in self.places.items()}
        single = precision.unbind()
        return {key: single[at] if isinstance(at, int) else precision[at] for key, at in self._layers.items()}

    def weights(self, noise_std: Any = None) -> Tensor:
        """The curvature's component weights ``[K]`` at a noise level, by default the likelihood's own, float64."""
        if noise_std is None:
            return self.own_weights
        return self.backend.component_weights(self.likelihood, noise_std).to(self.vector.device, torch.float64)

    @cached_property
    def own_weights(self) -> Tensor:
        """:meth:`weights` at the likelihood's own noise."""
        return self.backend.component_weights(self.likelihood).to(self.vector.device, torch.float64)

    def factors(self, precision: Tensor, temperature: Any = 1.0, noise_std: Any = None) -> dict[str, Factor]:
        """The posterior precision's blocks, ready to be inverted, by layout key, at a checked prior precision.

        Raises:
            UnsupportedError: The structure does not take this prior.
            NotPositiveDefiniteError: The precision is not positive definite.
        """
        weights = self.own_weights if noise_std is None else self.weights(noise_std)
        if isinstance(temperature, Tensor):
            temperature = temperature.to(self.vector.device)
        weights = (weights / temperature).to(self.vector)
        diagonals = self.diagonals(precision)
        result: dict[str, Factor] = {}
        for layout, block in self.curvature.blocks:
            result[layout.key] = block.factor(weights, diagonals[layout.key].to(weights))
        return result

    def factor_sets(self, points: Sequence[tuple[Any, Any]], temperature: Any = 1.0) -> list[dict[str, Factor]]:
        """As :meth:`factors`, for several pairs of a prior precision and a noise level, which share eigenbases."""
        temperature = as_hyperparameter(temperature)
        return [self.factors(self.prior(precision).precision, temperature, noise) for precision, noise in points]

    def squared_distance(self, vectors: Tensor, precision: Any, temperature: Any) -> Tensor:
        """``(θ − θ̂)ᵀ Λ (θ − θ̂)`` for ``[n, P]``, ``[n]`` float64; differentiable in θ."""
        moved = vectors.to(self.vector) - self.vector
        weights = (self.weights() / temperature.to(moved.device)).to(moved)
        squares = moved.square().double() @ self.prior(precision).vector().to(moved.device, torch.float64)
        for layout, block in self.curvature:
            squares = squares + block.quadratic(weights, layout.places.gather(moved)).double()
        return squares

    def log_likelihood(self, noise_std: Any = None) -> Tensor:
        """``log p(D|θ̂)``, 0-d float64; UnsupportedError where the posterior has seen no data."""
        if self.statistics.isnan().any():
            what = "The evidence of data that were not seen is not known."
            fix = "Fit to data, or tune by validation, without the noise."
            raise UnsupportedError(what, expected="a posterior after fit()", got="one from given variances", fix=fix)
        return self.likelihood.log_likelihood(self.statistics, noise_std)

    def residual_noise(self) -> Tensor:
        """Log noise levels of the training residuals, ``[n_noise]`` float64."""
        self.log_likelihood()  # refuses what has seen no data
        sums, counts = self.statistics.double().chunk(2)
        return (sums / counts).clamp_min(1e-20).log() / 2

    @cached_property
    def _own_log_likelihood(self) -> Tensor:
        return self.log_likelihood()

    def log_marginal_likelihood(self, precision: Any, temperature: Any = 1.0, noise_std: Any = None) -> Tensor:
        """The evidence, 0-d float64; differentiable in all three arguments; errors as :meth:`factors`."""
        prior = self.prior(precision)
        precision = prior.precision.to(self.vector.device, torch.float64)
        temperature = as_hyperparameter(temperature).to(self.vector.device, torch.float64)
        weights = self.weights(noise_std) / temperature
        fit = self._own_log_likelihood if noise_std is None else self.log_likelihood(noise_std)
        fit, scatter = fit.to(precision.device) / temperature, self.scatter(prior.structure)
        fit = torch.addcmul(fit, precision, scatter, value=-0.5) if not scatter.ndim else fit - precision @ scatter / 2
        return torch.sub(fit, self._log_ratio(prior.structure, precision, weights), alpha=0.5)

    @property
    def sampled(self) -> Block | None:
        """The curvature, where random vectors estimate a part of its determinant."""
        return next((block for _, block in self.curvature if block.is_sampled), None)

    def forms(self, precision: Tensor, temperature: Any = 1.0, noise_std: Any = None) -> Tensor | None:
        """What each random vector tells of log det Λ, ``[m]`` float64, differentiable; None where none are used."""
        if (block := self.sampled) is None:
            return None
        weights = self.weights(noise_std) / as_hyperparameter(temperature).to(self.vector.device, torch.float64)
        return block.sampled_determinants(weights, next(iter(self.diagonals(precision).values())))

    def effective_dimension(self, precision: Any, temperature: Any = 1.0) -> Tensor:
        """``γ = P − tr(Λ⁻¹ P₀)``, 0-d float64: the sum of ``∂ (log det P₀ − log det Λ)/∂ log λ`` over precisions λ."""
        prior = self.prior(precision)
        weights = self.weights() / as_hyperparameter(temperature).to(self.vector.device, torch.float64)
        with torch.enable_grad():
            point = prior.precision.detach().to(self.vector.device, torch.float64).requires_grad_()
            (slope,) = torch.autograd.grad(self._log_ratio(prior.structure, point, weights.detach()), point)
        return -(slope * point.detach()).sum()

    def _log_ratio(self, structure: str, precision: Tensor, weights: Tensor) -> Tensor:
        """``log det Λ − log det P₀``, 0-d float64."""
        if structure not in self._known_spectra:
            self._known_spectra[structure] = self._joined_spectra(structure)
        joined, others = self._known_spectra[structure]
        total = precision.new_zeros(()) if joined is None else joined.log_ratio(weights[0], precision)
        diagonals = self.diagonals(precision) if others else {}
        for layout, block in others:
            own = diagonals[layout.key]
            total = total + block.log_determinant(weights, own).double() - own.log().mean() * layout.n_entries
        return total

    def _joined_spectra(self, structure: str) -> tuple[Spectrum | None, list[tuple[Layout, Block]]]:
        """Together all blocks with known eigenvalues and one precision each, and the other blocks."""
        spectra, groups, others = [], [], []
        for layout, block in self.curvature:
            layer = 0 if structure == "scalar" else self._layers[layout.key]
            if structure == "diagonal" or isinstance(layer, Tensor) or (spectrum := block.spectrum()) is None:
                others.append((layout, block))
            else:
                spectra.append(spectrum)
                groups.append(layer)
        return Spectrum.joined(spectra, groups) if spectra else None, others

    def solve(self, factors: Mapping[str, Factor], vector: Tensor) -> Tensor:
        """``M⁻¹ v`` for ``[P]`` and the factors of a posterior precision M, in the vector's type."""
        result = torch.zeros_like(vector)
        for key, placement in self.places.items():
            placement.scatter_(result, factors[key].solve(placement.gather(vector.to(self.vector))[None])[0])
        return result

    def variances(self, factors: Mapping[str, Factor]) -> Tensor:
        """Posterior variance of each entry, ``[P]``."""
        result = torch.zeros_like(self.vector)
        for key, placement in self.places.items():
            placement.scatter_(result, factors[key].variances())
        return result


ACCURACY = 1e-9
"""Relative accuracy of outputs to which statistics are compared: 5e6 float64 roundings; coarser in float32."""


class FittedData:
    """Adds up the likelihood's statistics of a pass over data, and compares them with those of the fit.

    A fit keeps additive statistics at the network's outputs, such as ``Σ log p(yₙ|f(xₙ))``. The comparison detects
    other inputs, and targets that belong to other inputs, also where the number of examples agrees.

    Attributes:
        n_examples: Number of examples so far.
        n_rows: Number of flattened observations (examples, or positions) that are not ignored.
        n_entries: Number of terms in the mean that torch's losses for classes take.
    """

    def __init__(self, model: LaplaceModel, network: Network, n_data: int):
        self._model, self._network, self._n_data = model, network, n_data
        self._statistics = torch.zeros_like(model.statistics)
        self._epsilon = self._slope = self._square = 0.0
        self.n_examples, self.n_rows, self.n_entries = 0, 0.0, 0.0

    def add(self, outputs: Tensor, target: Any) -> None:
        """Add a batch's outputs ``[B, *, C]`` and its target, which must be valid for the likelihood."""
        likelihood = self._model.likelihood
        self._statistics += likelihood.statistics(outputs, target).to(self._statistics)
        flat, targets, weight = likelihood.rows(outputs.double(), target)
        gradient = likelihood.gradient(flat, targets) * weight[:, None]
        self._slope += float((gradient * flat).abs().sum())
        self._square += float(flat.square().sum())
        enabled, dtype = AMBIENT.get() or (False, outputs.dtype)
        dtypes = (outputs.dtype, self._network.dtype, *([dtype] if enabled else []))
        self._epsilon = max(self._epsilon, *(torch.finfo(one).eps for one in dtypes))
        counted = float(weight.sum())
        self.n_examples += len(outputs)
        self.n_rows += counted
        self.n_entries += likelihood.n_terms(targets, weight, outputs.shape[-1])

    def check(self, *, strict: bool = True) -> None:
        """Raise :class:`DataError` for other data than were fitted to, once all batches were added.

        Unless ``strict``, as many examples of another log-likelihood are random augmentations: a warning says so.

        With outputs ``f`` of relative accuracy r and gradients g, ``−Σ log p`` has the accuracy ``r Σ |g f|`` in first
        order. A sum of squared errors has ``2 r Σ |g f| + r² Σ f²``.
        """
        likelihood, fitted = self._model.likelihood, self._model.statistics
        accuracy = max(ACCURACY, 100 * self._epsilon)
        # Log-densities are rounded on the scale of one. Squared errors have no such scale.
        rounding = 0.0 if likelihood.is_gaussian else accuracy * self.n_rows
        allowed = accuracy * (fitted.abs() + 2 * self._slope) + accuracy**2 * self._square + rounding
        same = bool(((self._statistics - fitted).abs() <= allowed).all())
        if not same and not strict and self.n_examples == self._n_data:
            message = (
                "The loader gives other inputs in each pass, as random augmentation does: the tuning is about those "
            )
            warn(message + "that it saw, the curvature about those of the fit. A loader without augmentation is exact.")
        elif self.n_examples != self._n_data or not same:
            raise DataError(
                "These are not the data that the posterior was fitted to.",
                expected=f"{self._n_data} examples of log-likelihood {float(self._model.log_likelihood()):.6g}",
                got=f"{self.n_examples} of {float(likelihood.log_likelihood(self._statistics)):.6g}",
                fix="Pass the training data, each once and without random augmentation, with the autocast of the fit.",
            )


def survey(
    model: LaplaceModel,
    network: Network,
    data: Iterable[Any],
    n_data: int,
    *,
    progress: bool = False,
    description: str = "training data",
) -> FittedData:
    """Run the network once over data and check that they are those of the fit; arguments as :class:`FittedData`."""
    found = FittedData(model, network, n_data)
    loader = iterate(data, device=network.device, progress=progress, description=description)
    for batch in loader:
        outputs = network.forward(batch.inputs)
        model.likelihood.validate(outputs, batch.target)
        found.add(outputs, batch.target)
    found.check()
    return found


def check_training_prior(precision: Any, weight_decay: Any) -> bool:
    """Whether the prior of training is given; :class:`ConfigurationError` if twice, or by a bad weight decay."""
    if precision is not None and weight_decay is not None:
        raise ConfigurationError("Training has one of training_prior_precision and weight_decay.", got="both")
    if weight_decay is not None:
        checks.number("weight_decay", weight_decay, least=0.0)
    return precision is not None or bool(weight_decay)


def unknown_training_prior(fix: str | None = None) -> ConfigurationError:
    """The error where neither a precision nor a weight decay of training is given."""
    fix = fix or "Pass the weight decay of training; without one, tune by marginal likelihood or on held-out data."
    expected = "training_prior_precision=, or weight_decay= above 0"
    return ConfigurationError("Leave-one-out needs the prior precision of training.", expected=expected, fix=fix)


def precision_of_weight_decay(
    weight_decay: float, data: FittedData, model: LaplaceModel, temperature: float | Tensor
) -> float:
    """``α₀ = N · weight_decay / T`` for N terms in the mean loss of training; only for classifiers."""
    if not model.likelihood.is_classifier:
        raise UnsupportedError(
            "weight_decay= needs a classifier trained on a mean of −log p(y|f).",
            got=repr(model.likelihood),
            fix="Pass training_prior_precision=; with nn.MSELoss over N examples of C outputs and a noise of σ it is "
            "N · C · weight_decay / (2 σ²).",
        )
    return data.n_entries * weight_decay / float(temperature)
