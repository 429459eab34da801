"""Predictions: functional posteriors, samples of outputs, and the predictive distribution made of either."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._memory import budget, require_free
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError, unknown_option
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import batch_size, inputs_of, signature_of
from laplace_plus.network.gradients import forward_parts
from laplace_plus.network.linearization import ADModes
from laplace_plus.posteriors.configuration import full_precision
from laplace_plus.posteriors.storing import Stored
from laplace_plus.predictive import Prediction, from_functional, from_samples
from laplace_plus.predictive.deviations import (
    MOST_SAMPLES,
    EstimatedPosterior,
    is_sampled,
    moments,
    n_samples_for,
    pushed,
)
from laplace_plus.predictive.linearized import FunctionalPosterior
from laplace_plus.predictive.outputs import MANY_OUTPUTS, Outputs, outputs_for, require_outputs

Method = Literal["linearized", "sampled"]


class Predicting(Stored, ABC):
    """How a posterior predicts; a subclass gives :meth:`sample`, and perhaps its own :meth:`functional_posterior`."""

    default_method: Method = "linearized"

    other_likelihood: Likelihood | None = None
    """That of the predictions, where they are of other outputs than the fit's; see ``lp.through``."""

    tangent_mean: Tensor | None = None
    """The tangent model's optimum, where linearised predictions have it as their mean."""

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
        self,
        x: Any,
        *,
        joint: bool = False,
        outputs: Outputs = None,
        differentiable: bool = False,
        generator: torch.Generator | None = None,
    ) -> FunctionalPosterior:
        """Mean and covariance of the linearised network's outputs.

        By default from 100 samples of the posterior, pushed through the network's tangent at its own weights.

        Args:
            x: A batch's inputs, as the network takes them: a tensor, a tuple or a mapping.
            joint: Whether to give the covariance across inputs, ``[B, C, B, C]``.
            outputs: None for all outputs, ``"diagonal"`` for variances only, ``"independent"`` for the variances of
                independent outputs whose differences vary as nearly as can be likewise, or indices of some outputs.
            differentiable: Whether gradients flow to ``x``.
            generator: Source of randomness, for methods that use any.

        Returns:
            Mean ``[B, *, C]`` and covariance ``[B, *, C, C]``.

        Raises:
            NotFittedError: Before :meth:`fit`.
            UnsupportedError: ``differentiable``, where this method only knows samples.
        """
        self.require_fit()
        if differentiable:
            what = f"{type(self).__name__} passes no gradients to x."
            raise UnsupportedError(what, expected="differentiable=False", got="differentiable=True")
        with torch.no_grad():
            return moments(*self._pushed(x, generator), joint=joint, outputs=outputs)

    def _pushed(self, x: Any, generator: torch.Generator | None = None, n: int = MOST_SAMPLES) -> tuple[Tensor, Tensor]:
        """The mean of the linearised outputs ``[B, *, C]``, and samples' deviations from it, ``[S, B, *, C]``."""
        x, chunks = self.network.receive(x), (drawn - self.mean for drawn in self._sampled_chunks(n, generator))
        modes = vars(self).setdefault("_ad_modes", ADModes())
        mean, moved = pushed(self.network, chunks, x, n_outputs=self.n_outputs or None, ad_modes=modes)
        return mean + self._mean_shift(x), moved

    @full_precision
    def predictive(
        self,
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
        if x is None:
            x = inputs_of(batch)
        elif batch:
            options_known = [*signature_of(Predicting.predictive).parameters][2:-1]
            raise unknown_option("predictive", next(iter(batch)), options_known)
        likelihood = self.other_likelihood or self.likelihood
        chosen = self.default_method if method is None else method
        if chosen not in ("linearized", "sampled"):
            checks.choice("method", method, ("linearized", "sampled"))
        first, many = link or self.link or likelihood.links[0], self.n_outputs > MANY_OUTPUTS
        given, n_samples = n_samples, MOST_SAMPLES if n_samples is None else n_samples
        if chosen == "sampled" or first == "mc":
            self.check_samples(n_samples, x)
        if chosen == "sampled":
            if self.tangent_mean is not None or link not in (None, "mc") or differentiable:
                what = "Sampled networks take no link and no gradients, and their mean is the network's weights."
                expected = 'method="linearized", or predictive_mean="network", link=None and differentiable=False'
                got = f'method="sampled", link={link!r}, differentiable={differentiable}'
                raise ConfigurationError(what, expected=expected, got=got)
            with torch.no_grad():
                drawn = torch.stack(list(self.sampled_outputs(x, n_samples, generator)))
                if self.n_outputs:
                    require_outputs(drawn.shape, self.n_outputs, x)
                return from_samples(likelihood, drawn, generator=generator, joint=joint)
        if first == "mc" and many and not differentiable:
            samples = self.functional_samples(x, n_samples, joint=joint, generator=generator)
            if samples is not None:
                return from_samples(likelihood, samples, generator=generator, joint=joint)
        needed = outputs_for(first, self.n_outputs) if many and not joint else None
        options: dict[str, Any] = {"outputs": needed, "differentiable": differentiable}
        known = signature_of(type(self).functional_posterior).parameters
        if "generator" in known:  # a class may do without
            options["generator"] = generator
        may_estimate = needed and "n_samples" in known and method is None and not differentiable
        if may_estimate and is_sampled(self.network, self.network.receive(x), variances=True):
            own = torch.Generator(self.network.device).manual_seed(0) if generator is None else generator
            options |= {"n_samples": given or n_samples_for(self.n_parameters), "generator": own}
        with torch.set_grad_enabled(differentiable):
            found = self.functional_posterior(x, joint=joint, **options)
            prediction = from_functional(
                likelihood, *found, link=first, n_samples=n_samples, generator=generator, joint=joint
            )
            if isinstance(found, EstimatedPosterior):
                prediction = replace(prediction, without_each=found.without_each)
            if prediction.marginal is None:
                _ = prediction.samples  # drawn here and now rather than under the caller's autocast
            return prediction

    def check_samples(self, n_samples: int, x: Any) -> None:
        """Raise :class:`ConfigurationError` unless samples of the outputs for x are a positive number, and fit."""
        checks.count("n_samples", n_samples)
        if not batch_size(x):
            raise DataError("There is nothing to predict.", expected="at least one example", got="none")
        size = n_samples * batch_size(x) * max(1, self.n_outputs) * self.network.dtype.itemsize
        what, fix = f"{n_samples} samples of the outputs", "Lower n_samples, or predict for fewer inputs at a time."
        require_free(size, what, self.network.device, fix)

    def sampled_outputs(self, x: Any, n: int, generator: torch.Generator | None) -> Iterable[Tensor]:
        """Outputs ``[B, *, C]`` of n sampled networks, or of fewer where a method has no more."""
        x = self.network.receive(x)
        forward_parts(self.network, x)  # as the fit may have seen smaller batches, or none where it was loaded
        for vectors in self._sampled_chunks(n, generator):
            outputs, vectors = self.network.several(x, vectors), None  # type: ignore[assignment]
            yield from outputs

    def functional_samples(self, x: Any, n: int, *, joint: bool, generator: torch.Generator | None) -> Tensor | None:
        """Samples ``[S, B, *, C]`` of the linearised outputs, where their covariance would be too large; else None."""
        if not is_sampled(self.network, self.network.receive(x), joint=joint):
            return None
        with torch.no_grad():
            mean, moved = self._pushed(x, generator, n)
            return mean + moved

    def _mean_shift(self, x: Any) -> Tensor | float:
        """``J(x) (E[θ] − θ̂)``: how a mean other than the network's weights moves the linearised outputs."""
        shift = (self.mean if self.tangent_mean is None else self.tangent_mean) - self.network.vector()
        parts = self.network.cut(x, 4 * (self.network.bytes_per_example or 0)) if bool(shift.any()) else []
        return torch.cat([self.network.tangent(part, shift) for part in parts]) if parts else 0.0

    def _sampled_chunks(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Chunks of n parameter vectors, a few at a time: all of them may be many times the network's size."""
        each = max(1, self.n_parameters * self.network.dtype.itemsize)
        if n * each <= 2**26:
            yield self.sample(n, generator=generator)
            return
        step = max(1, min(2**29, budget(self.network.device) // 4) // each)
        for start in range(0, n, step):  # drawn singly: the same ones in chunks of any size
            drawn = [self.sample(1, generator=generator) for _ in range(start, min(n, start + step))]
            yield torch.cat(drawn) if len(drawn) > 1 else drawn.pop()  # no second copy where memory is short
