"""Variational inference with two scales, in a null space and beside it (Roy, Miani, Krämer, Hauberg et al., 2025).

See :mod:`laplace_plus.posteriors.viking.elbo` for the family, its divergence and the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.geometry.loss import MovedNetwork, warn_of_kinks
from laplace_plus.likelihoods import resolve_likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg.null_space import ProjectionMethod
from laplace_plus.network.network import Network, full_precision
from laplace_plus.persistence import stored
from laplace_plus.posteriors.projection import NoiseState, ProjectedNoisePosterior, Rows
from laplace_plus.posteriors.state import of_state, require_same_data, survey
from laplace_plus.posteriors.storing import resolve_option
from laplace_plus.posteriors.viking.elbo import ELBO, BoundAtMean, ELBOTerms, ELBOTraining, Expectation, trained_mean
from laplace_plus.tuning import Tuner, TuningResult
from laplace_plus.tuning.base import VariationalBound, require_only

WHY = "The evidence lower bound passes over the data again and again."


@stored
@dataclass(frozen=True)
class VIKINGState(NoiseState):
    """What a fit finds besides the prior precision: σ_im, the bound's terms at each step, and a sum over the data."""

    image_std: float
    history: tuple[ELBOTerms, ...]
    data_sum: float


class VIKING(ProjectedNoisePosterior):
    """A Gaussian with one scale where the data determine nothing and another where they do, by variational inference.

    ``q = N(θ̂, σ_ker² P + σ_im² (I − P))`` with P the projector onto the null space (kernel) of the training data's rows
    and ``σ_ker = α^-½``, the prior's own scale; :meth:`fit` maximises the evidence lower bound. Choose it in place of
    :class:`NullSpace` where training data should get error bars, too. Its scales follow from a bound on the evidence
    rather than from the curvature at one point. Begin with the post-hoc mode, which costs what :class:`NullSpace` does.

    ``mode="post_hoc"`` leaves the mean at the trained weights and learns α and σ_im. ``mode="train"`` also learns the
    mean, on a copy: the network itself is never changed, :attr:`mean` is the learnt vector and **not** the network's
    weights, and all predictions, sampled and linearised, are around it. Finally α and σ_im are fitted once more at the
    learnt mean, as post hoc; the stored scales are thus an optimum of the bound itself. Training from weights that fit
    well takes many noisy steps to gain on the post-hoc bound; compare ``elbo()`` of both.

    Memory is that of ``2 n_samples`` vectors of the network's size, and time that of :class:`NullSpace` for half of
    them. Training adds at each step a projection onto the null space of the batch's rows, and one more solve for its
    gradient. The data come in the same batches, in the same order, each time.

    :meth:`fit` raises ConfigurationError if the weights equal the prior mean, where the bound has no optimum,
    NonFiniteError if the bound is not finite, and UnsupportedError if there are as many independent rows as parameters.
    It warns (ConvergenceWarning) if a projection or the search for α and σ_im did not converge, and (SmoothnessWarning)
    if the mean is trained through projections of a network that is not twice differentiable.

    For classes it loses where the network is not over-confident, as after early stopping or with strong weight decay:
    compare on held-out data.

    Args:
        model, likelihood: As for :class:`Posterior`.
        mode: ``"post_hoc"``, ``"train"``, or :class:`ELBOTraining` with options.
        rows: The rows whose null space P projects onto: ``"logit"``, ``"ggn"`` or ``"loss"``, as for
            :class:`NullSpace`; by default ``"logit"`` in regression and ``"loss"`` otherwise.
        projector: As for :class:`NullSpace`.
        expectation: Whether the expected log-likelihood, and predictions by default, are those of the ``"linearized"``
            network (by default post hoc) or of ``"sampled"`` networks (in training).
        image_std: Where σ_im starts. α starts at ``prior_precision``, and in a second fit where it is.
        n_samples: Number k of noise vectors that are projected and stored.
        parameters, prior_precision, prior_mean, temperature, backend: As for :class:`Posterior`.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
        >>> posterior = lp.VIKING(net, "regression", n_samples=5).fit([(x, 2 * x)])
        >>> bool(posterior.image_std < posterior.kernel_std)
        True
    """

    tuners: ClassVar[Mapping[str, type[Tuner]]] = dict.fromkeys(("elbo", "marginal_likelihood"), VariationalBound)
    keeps_range = True
    history = of_state("history", "The terms of the bound at each step of the fit; training has them from one batch.")
    image_std = of_state("image_std", "The scale σ_im.", lambda value: checks.positive("image_std", float(value)))

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        *,
        mode: str | ELBOTraining | dict[str, Any] = "post_hoc",
        rows: Rows | None = None,
        projector: str | ProjectionMethod | dict[str, Any] = "auto",
        expectation: Expectation | None = None,
        image_std: float = 0.1,
        n_samples: int = 30,
        **common: Any,
    ):
        if isinstance(mode, dict):
            mode = {"name": "train", **mode}
        self.training: ELBOTraining | None = resolve_option("mode", mode, {"post_hoc": NoneType, "train": ELBOTraining})
        default: Expectation = "linearized" if self.training is None else "sampled"
        self.expectation = checks.choice("expectation", expectation or default, ("linearized", "sampled"))
        self.default_method = self.expectation  # type: ignore[misc]
        self._first_image_std = checks.positive("image_std", image_std)
        own: Any = {"projector": projector, "n_samples": n_samples}
        own["rows"] = rows or ("logit" if resolve_likelihood(likelihood).is_gaussian else "loss")
        super().__init__(model, likelihood, **own, **common)

    @override
    def fit_batches(
        self, data: Iterable[Any], *, progress: bool = False, generator: torch.Generator | None = None
    ) -> VIKINGState:
        n_data, n_outputs, data_sum = survey(self, data, WHY)
        seed, center = draw_seed(generator), self.network
        history: list[ELBOTerms] = []
        logs = self._logs(self._first_image_std)
        elbo = ELBO(self, data, n_data)
        if self.training is not None:
            advice = 'Prefer tanh, GELU or SiLU, or mode="post_hoc".'
            warn_of_kinks(self.network, next(self.batches(data)).inputs, advice)
            theta, logs, history = trained_mean(elbo, logs, seed, progress=progress)
            center = MovedNetwork(self.network, theta)
        self.squared_distance(center.vector())  # at zero the bound has no optimum
        noise = self._fit_noise(center, data, seed, progress=progress)
        logs, steps, _ = BoundAtMean(elbo, center, noise, n_outputs).maximise(logs)
        alpha, image_std = logs.exp()
        self._prior_precision = alpha.to(center.dtype)
        return VIKINGState(center.vector(), n_data, n_outputs, noise, float(image_std), (*history, *steps), data_sum)

    def _bound(self, data: Iterable[Any] | None) -> BoundAtMean:
        again = self.training_data.again(data, WHY)
        n_data, _, data_sum = survey(self, again, WHY)
        require_same_data("the fit", (self.n_data, self.state.data_sum), (n_data, data_sum))
        return BoundAtMean(ELBO(self, again, n_data), self._center, self.noise, self.n_outputs)

    @property
    @override
    def _center(self) -> Network:
        return self.network if self.training is None else MovedNetwork(self.network, self.mean)

    @property
    def kernel_std(self) -> Tensor:
        """``σ_ker = α^-½``, 0-d."""
        return self._prior_precision.rsqrt()

    @full_precision
    def elbo(self, data: Iterable[Any] | None = None) -> ELBOTerms:
        """The terms of the bound at the present α and σ_im, with the stored noise.

        Args:
            data: The training data; by default those of :meth:`fit`.

        Raises:
            NotFittedError: Before :meth:`fit`.
            DataError: The training data are not available any more, or others than those of the fit.
            NonFiniteError: A term is NaN or infinite.
        """
        self.require_fit()
        return self._bound(data).evaluate(self._logs(self.image_std))[0]

    def _logs(self, image_std: float) -> Tensor:
        """``(log α, log σ_im)`` at the present α."""
        return torch.tensor([float(self._prior_precision), image_std], dtype=torch.float64).log()

    @override
    def run_tuner(self, tuner: Tuner, *, progress: bool, generator: torch.Generator | None) -> TuningResult:
        """Maximise the bound over α and σ_im once more, from where they are; see :class:`VariationalBound`."""
        assert isinstance(tuner, VariationalBound)
        require_only("VIKING", tuner, "data")
        logs, steps, converged = self._bound(tuner.data).maximise(self._logs(self.image_std))
        alpha, image = logs.exp()
        return TuningResult(
            method="elbo",
            prior_precision=alpha.to(self.mean.dtype),
            noise_std=None,
            value=steps[-1].elbo,
            converged=converged,
            n_evaluations=len(steps),
            settings={"image_std": float(image)},
        )

    def _components(self) -> tuple[Tensor, Tensor]:
        """The noise in the null space and in the range, scaled; ``[k, P]`` each."""
        null_space, in_range = self.noise.null_space, self.noise.range
        return self.kernel_std.to(null_space) * null_space, self.image_std * in_range

    @override
    def _deviations(self) -> Tensor:
        """Both components as independent draws, ``[2k, P]``, whose mean square is q's."""
        return 2**0.5 * torch.cat(self._components())

    @property
    @override
    def samples(self) -> Tensor:
        """The k independent draws ``θ̂ + σ_ker P ε + σ_im (I − P) ε`` that the posterior holds, ``[k, P]``."""
        return self.mean + sum(self._components())
