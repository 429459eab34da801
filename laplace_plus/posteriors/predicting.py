"""How a posterior predicts: from samples of its weights, linearised at the network's own, or as it knows better."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    EmptyDataError,
    ModelChangedError,
    NotFittedError,
    UnsupportedError,
    warn,
)
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg.estimates import draw_probes
from laplace_plus.network.batches import batch_size, inputs_of, signature_of
from laplace_plus.network.linearization import jvp
from laplace_plus.network.network import Network, exact_arithmetic, full_precision
from laplace_plus.predictive import Prediction, from_functional, from_samples
from laplace_plus.predictive.from_outputs import stacked
from laplace_plus.predictive.linearized import (
    MANY_OUTPUTS,
    MOST_SAMPLES,
    EstimatedPosterior,
    FunctionalPosterior,
    Outputs,
    is_sampled,
    moments,
    n_samples_for,
    outputs_for,
    pushed,
    require_outputs,
)

Method = Literal["linearized", "sampled"]

DRAWN_AT_ONCE, DRAWN_SINGLY = 2**26, 2**29
"""Bytes of parameter vectors that are drawn in one call, and that are alive at a time where there are more."""


class Predicting(ABC):
    """The predictions of :class:`~laplace_plus.Posterior`."""

    network: Network
    likelihood: Likelihood
    link: str | None
    tangent_mean: Tensor | None
    output_temperature: float
    is_guess: bool
    _found: Any  # the state of the fit, and a mark of the network then
    _mark: Any

    default_method: ClassVar[Method] = "linearized"
    """How ``predictive`` predicts unless it is told."""

    _other_likelihood: Likelihood | None = None
    """That of the predictions, where they are of other outputs than the fit's; see ``lp.through``."""

    def require_fit(self) -> None:
        """Look whether there is a fit that still holds.

        Raises:
            NotFittedError: There is none.
            ModelChangedError: The network's tensors or modules are no longer those of the fit.
        """
        if self._found is None:
            what = f"This {type(self).__name__} has not been fitted."
            raise NotFittedError(what, expected="fit(loader) first", got="no data so far")
        now = self.network.mark()
        if now is not self._mark and now != self._mark:
            raise changed(self._mark, now, "The network is no longer the one that the posterior was fitted on.")

    @abstractmethod
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw parameter vectors, ``[n, P]`` in ``parameter_names`` order.

        Args:
            n: Number of draws.
            generator: Source of randomness; may live on another device.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: A number of draws that is not a positive integer.
        """

    @full_precision
    def functional_posterior(
        self: Any,
        x: Any,
        *,
        joint: bool = False,
        outputs: Outputs = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
        n_samples: int | None = None,
    ) -> FunctionalPosterior:
        """Mean and covariance of the linearised network's outputs: exact where the method knows them.

        Else they are from 100 samples of the posterior, pushed through the network's tangent at its own weights.

        Args:
            x: A batch's inputs, as the network takes them: a tensor, a tuple or a mapping.
            joint: Whether to give the covariance across inputs, ``[B, C, B, C]``.
            outputs: None for all outputs, ``"diagonal"`` for variances only, ``"independent"`` for the variances of
                independent outputs whose differences vary as nearly as can be likewise, or indices of some outputs.
            differentiable: Whether gradients flow to ``x``.
            generator: Source of randomness, for samples.
            n_samples: So many samples in any case; a method that holds samples takes these.

        Returns:
            Mean ``[B, *, C]`` and covariance ``[B, *, C, C]``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: ``differentiable``, where there are only samples.
        """
        self.require_fit()
        x = self.network.receive(x)
        options: dict[str, Any] = {"joint": joint, "outputs": outputs, "differentiable": differentiable}
        with torch.set_grad_enabled(differentiable):
            exact = self._exact(x, **options) if n_samples is None else None
            return exact or self._estimated(x, n_samples, generator, **options)

    def _exact(self, x: Any, *, joint: bool, outputs: Outputs, differentiable: bool) -> FunctionalPosterior | None:
        """The functional posterior in closed form, for a class that has one; None where samples have to tell."""
        return None

    def _estimated(
        self, x: Any, n: int | None, generator: torch.Generator | None, *, differentiable: bool, **choice: Any
    ) -> FunctionalPosterior:
        """The functional posterior from n samples, of outputs as :func:`moments` takes the choice."""
        if differentiable:
            what = f"{type(self).__name__} passes no gradients to x here: samples have none."
            raise UnsupportedError(what, expected="differentiable=False", got="differentiable=True")
        count = MOST_SAMPLES if n is None else checks.count("n_samples", n)
        return moments(*self._pushed(x, generator, count), **choice)

    def predictive(
        self: Any,
        x: Any = None,
        *,
        method: Method | None = None,
        link: str | None = None,
        n_samples: int | None = None,
        joint: bool = False,
        generator: torch.Generator | None = None,
        differentiable: bool = False,
        **batch: Any,
    ) -> Prediction:
        """The posterior predictive distribution ``p(y | x, D)``.

        With more than 64 outputs, the links ``"gumbel"`` and ``"probit"`` are given variances only: those of
        ``functional_posterior(x, outputs="independent")`` or ``"diagonal"``. Mean, variance and log-probability are
        the same, but what the prediction estimates by Monte Carlo (the split of the variance, the mutual information)
        then treats outputs as uncorrelated. Where an example has more than 512 outputs (of all positions) and more than
        the last layer is selected, these variances would take as many backward passes. They are then estimated from
        samples, and ``prediction.standard_error`` says how well; the same call gives the same estimate.
        ``method="linearized"`` computes them exactly, whatever it takes.

        Args:
            x: A batch's inputs.
            method: ``"linearized"`` (a Gaussian over outputs) or ``"sampled"`` (sampled networks); by default what
                suits the class, and the quicker way to the former.
            link: How a Gaussian over outputs becomes a distribution of y: ``"gumbel"``, ``"probit"``, ``"mc"`` or
                ``"bridge"`` for classification, or ``"network"`` for the network's own probabilities; by default
                :attr:`link`, or else the likelihood's first.
            n_samples: Number of samples where any are drawn; by default 100, or of those variances as many as hold 2²⁶
                numbers, from 5 to 100.
            joint: Whether inputs are treated jointly, with their cross-covariances.
            generator: Source of randomness.
            differentiable: Whether gradients flow to ``x`` (linearised only).
            **batch: In place of ``x``, the entries of a batch that is a mapping; its target is left out.

        Raises:
            NotFittedError: Before :meth:`fit`.
            ConfigurationError: An unknown method, link or option.
            DataError: Inputs that are no batch of what was fitted to.
            ModelChangedError: The network's weights have changed since the fit.
        """
        self.require_fit()
        if self.is_guess and "tangent" in self.tuners:  # of classes whose predictions hang on it
            warn(
                f"The prior precision of this {type(self).__name__} is a guess: call fit_prior_precision(), or set it."
            )
        if generator is not None:
            checks.generator(generator)
        if x is None:
            x = inputs_of(batch)
        elif batch:
            known = [*signature_of(Predicting.predictive).parameters][2:-1]
            checks.options("predictive", batch, known)
        likelihood, how = self._other_likelihood or self.likelihood, method or self.default_method
        way, many = link or self.link or likelihood.links[0], self._found.n_outputs > MANY_OUTPUTS
        count = MOST_SAMPLES if n_samples is None else checks.count("n_samples", n_samples)
        heat = self.output_temperature
        with exact_arithmetic(self.network), torch.set_grad_enabled(differentiable):
            x = self.network.receive(x)
            if how == "sampled":
                if self.tangent_mean is not None or link not in (None, "mc") or differentiable:
                    what = "Sampled networks take no link and no gradients, and their mean is the network's weights."
                    expected = 'method="linearized", or predictive_mean="network", link=None and differentiable=False'
                    got = f'method="sampled", link={link!r}, differentiable={differentiable}'
                    raise ConfigurationError(what, expected=expected, got=got)
                drawn = torch.stack(list(self.sampled_outputs(x, count, generator)))
                require_outputs(drawn.shape, self._found.n_outputs or None, x)
                return from_samples(likelihood, drawn / heat, generator=generator, joint=joint)
            if how != "linearized":
                checks.options("predictive", [how], ("linearized", "sampled"), "method")
            if way == "mc" and many and not differentiable and is_sampled(self.network, x, joint=joint):
                drawn = self._linear_samples(x, count, generator)
                return from_samples(likelihood, drawn / heat, generator=generator, joint=joint)
            needed = outputs_for(way, self._found.n_outputs) if many and not joint else None
            options: dict[str, Any] = {"joint": joint, "outputs": needed, "differentiable": differentiable}
            found = None
            if needed and method is None and not differentiable and is_sampled(self.network, x, variances=True):
                source = torch.Generator(self.network.device).manual_seed(0) if generator is None else generator
                found = self._estimated(x, n_samples or n_samples_for(self.n_parameters), source, **options)
            found = found or self._exact(x, **options) or self._estimated(x, None, generator, **options)
            own = found if heat == 1 else (found.mean / heat, found.covariance / heat**2)
            made = from_functional(likelihood, *own, link=way, n_samples=count, generator=generator, joint=joint)
            if isinstance(found, EstimatedPosterior):
                each = found.without_each
                made = replace(made, without_each=lambda: each() / heat**2)
            if made.marginal is None:
                _ = made.samples  # drawn here and now rather than under the caller's autocast
            return made

    def __call__(self, x: Any = None, **options: Any) -> Prediction:
        """:meth:`predictive`."""
        return self.predictive(x, **options)

    def predict_proba(self, x: Any, **options: Any) -> Tensor:
        """Class probabilities of one batch, ``[N, K]``, a row for each observation; UnsupportedError without classes.

        Arguments as of :meth:`predictive`; of binary outputs the columns are no and yes.
        """
        return self.likelihood.class_probabilities(self.predictive(x, **options).mean)

    def predict(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None, **options: Any
    ) -> Prediction:
        """One prediction for all batches of a loader, in its order.

        Args:
            data: Batches as :meth:`fit` takes them, or their inputs alone. Of a tuple of several the last entry is the
                target, and not looked at.
            progress: Whether to show a progress bar.
            generator: Source of randomness. Sampled networks are the same for all batches.
            **options: As for :meth:`predictive`, without ``joint``.

        Raises:
            EmptyDataError: No batch came.
            DataError: One batch in place of a loader, or batches whose outputs differ in shape.
        """
        checks.generator(generator)
        if isinstance(data, (Tensor, Mapping)) or not isinstance(data, Iterable) or options.get("joint"):
            what, got = "predict takes a loader, batch by batch.", checks.describe(data)
            raise DataError(what, got=got, fix="Call posterior(x), for joint predictions with joint=True.")
        device = self.network.device if generator is None else generator.device
        seed, found = draw_seed(generator), []
        for item in progress_bar(data, enabled=progress, description=f"{type(self).__name__}: predict"):
            inputs = self.network.receive(inputs_of(item, whole=self.network.lists))
            if batch_size(inputs):
                source = torch.Generator(device).manual_seed(seed)
                found.append(self.predictive(inputs, generator=source, **options))
        if not found:
            raise EmptyDataError("The loader yielded no data.", expected="at least one example", got="none")
        return stacked(found)

    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        """Outputs ``[B, *, C]`` of n sampled networks, or of fewer where a method has no more."""
        x = self.network.receive(x)
        for vectors in self._sampled_chunks(n, generator):
            yield from self.network.several(x, vectors)

    def _linear_samples(self, x: Any, n: int, generator: torch.Generator | None) -> Tensor:
        """Samples ``[n, B, *, C]`` of the linearised outputs, where their covariance would be too large."""
        mean, moved = self._pushed(x, generator, n)
        return mean + moved

    def _pushed(
        self: Any, x: Any, generator: torch.Generator | None = None, n: int = MOST_SAMPLES
    ) -> tuple[Tensor, Tensor]:
        """The mean of the linearised outputs ``[B, *, C]``, and samples' deviations from it, ``[S, B, *, C]``."""
        x, chunks = self.network.receive(x), (drawn - self.mean for drawn in self._sampled_chunks(n, generator))
        mean, moved = pushed(self.network, chunks, x, n_outputs=self.n_outputs or None)
        # A mean other than the network's weights moves the linearised outputs by J(x) (E[θ] − θ̂).
        shift = (self.mean if self.tangent_mean is None else self.tangent_mean) - self.network.vector()
        return mean + (jvp(self.network, x, shift) if bool(shift.any()) else 0.0), moved

    def _sampled_chunks(self: Any, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Chunks of n parameter vectors, a few at a time: all of them may be many times the network's size."""
        each = max(1, self.n_parameters * self.network.dtype.itemsize)
        if n * each <= DRAWN_AT_ONCE:
            yield self.sample(n, generator=generator)
            return
        step = max(1, DRAWN_SINGLY // each)
        for start in range(0, n, step):  # drawn singly: the same ones in chunks of any size
            yield torch.cat([self.sample(1, generator=generator) for _ in range(start, min(n, start + step))])


class SampleBased(Predicting):
    """A Gaussian around the trained weights whose covariance is that of k draws, ``1/k Σ z zᵀ``.

    A subclass gives :meth:`_deviations`. Memory is O(k·P), and the relative standard error of a variance ``(2/k)^½``.
    """

    @abstractmethod
    def _deviations(self) -> Tensor:
        """Draws ``z = θ − θ̂`` at the present hyperparameters, ``[k, P]``."""

    @property
    def _center(self) -> Network:
        """The network with the posterior mean as its weights."""
        return self.network

    @property
    def samples(self: Any) -> Tensor:
        """The k independent draws that the posterior holds, ``[k, P]``."""
        return self.mean + self._deviations()

    @override
    @full_precision
    def sample(self: Any, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws from the Gaussian with the samples' covariance: ``θ̂ + k^-½ Σ w_s z_s`` with standard normal w.

        Args:
            n: Number of draws; those beyond k bring nothing new to the covariance.
            generator: Source of randomness; may live on another device.

        Returns:
            ``[n, P]``.
        """
        result = checks.zeros("The matrix of samples", checks.count("n", n), len(self.mean), self.mean)
        return result.add_(self.mean).addmm_(self._combinations(n, generator), self._deviations())

    def _combinations(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Weights ``[n, k]`` with which combinations of samples have their covariance."""
        z = self._deviations()
        weights = draw_probes("gaussian", n, len(z), generator=generator, dtype=z.dtype, device=z.device)
        return weights / len(z) ** 0.5

    @override
    def _pushed(self: Any, x: Any, generator: torch.Generator | None = None, n: int = 0) -> tuple[Tensor, Tensor]:
        """From the k samples that the posterior holds."""
        return pushed(self._center, self._deviations(), self.network.receive(x), n_outputs=self.n_outputs)

    @override
    def _linear_samples(self, x: Any, n: int, generator: torch.Generator | None) -> Tensor:
        mean, deviations = self._pushed(x)  # k products, however many samples are asked for
        combined = self._combinations(n, generator).to(deviations) @ deviations.flatten(1)
        return mean + combined.view(n, *mean.shape)


def changed(before: Any, now: Any, what: str) -> ModelChangedError:
    """The error that names the first tensor which two marks of a network tell apart."""
    names = [new[0] for old, new in zip(before or [], now, strict=False) if old != new and type(old) is tuple]
    got, fix = f"another {names[0]}" if names else "other modules", "Call fit() again, or give it a copy of the model."
    return ModelChangedError(what, expected="the weights and buffers at the time of fit()", got=got, fix=fix)
