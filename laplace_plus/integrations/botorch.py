"""A surrogate model for BoTorch: a network with its linearised posterior; see ``docs/how-to/botorch.md``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from botorch.models.model import FantasizeMixin, Model
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.integrations.training import Standardised, train
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.posteriors import Posterior, get_posterior
from laplace_plus.tuning.base import Tuner
from laplace_plus.tuning.tangent import Tangent

__all__ = ["LaplaceSurrogate"]

TUNER = Tangent(predictive_mean="network")

TOGETHER = 64
"""Points whose covariances are computed together: those across batches are in vain, but cost less than single calls."""


class LaplaceSurrogate(Model, FantasizeMixin):
    """A regression network with its linearised posterior, in place of a Gaussian process.

    ``posterior(X)`` is jointly Gaussian over the q points of each batch, and differentiable. The network is trained
    when the model is made; a new model takes new data, or :meth:`condition_on_observations` without training.

    Args:
        train_X: ``[n, d]``, and ``train_Y [n, m]``.
        train_Yvar: Refused: the noise is one level for each output, and is tuned.
        module: An ``nn.Module``, of which a copy is trained; a function ``(d, m) -> nn.Module``; or None for two hidden
            layers of 50 tanh units on standardised inputs, in the type of ``train_X``.
        posterior: The class of a Gaussian posterior, or its name.
        parameters: Those that are uncertain. The default is the last layer, whose features are bounded; the variance of
            all weights grows towards the corners of the domain, where the search then stays.
        tuner: As for ``fit_prior_precision``. The default is the tangent model's evidence: leaving out single data does
            not see the variance between them that exploration lives on.
        input_transform: Applied to inputs in training and prediction.
        outcome_transform: Likewise to outcomes; None for none.
        epochs: Passes over the data by Adam, from the step ``lr`` on, which shrinks to zero along a cosine.
        weight_decay: Adam's, with the mean squared error.
        batch_size: Examples in a minibatch.
        generator: Source of initial weights and minibatches; the global one by default.

    Attributes:
        laplace: The library's posterior, over transformed inputs and outcomes.

    Raises:
        UnsupportedError: ``train_Yvar``.
        ConfigurationError: Data of other shapes.
    """

    likelihood = None  # which `fantasize` looks at
    _observed: tuple[Tensor, Tensor, Tensor] | None = None

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        *,
        module: nn.Module | Callable[[int, int], nn.Module] | None = None,
        posterior: str | type[Posterior] = "Full",
        parameters: Any = "last_layer",
        tuner: Tuner | str = TUNER,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | Literal["standardize"] | None = "standardize",
        epochs: int = 500,
        lr: float = 1e-2,
        weight_decay: float = 1e-3,
        batch_size: int = 64,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        m = train_Y.shape[-1]
        if train_Yvar is not None:
            raise UnsupportedError("Observed noise is not supported.", expected="train_Yvar=None", got="train_Yvar")
        checks.shape("train_Y", train_Y, [*checks.shape("train_X", train_X, [None, None]).shape[:1], None])
        self._take(input_transform, Standardize(m) if outcome_transform == "standardize" else outcome_transform)
        self.to(train_X)
        with torch.no_grad():
            X = self.transform_inputs(train_X)
            Y = self.outcome_transform(train_Y, X=X)[0] if hasattr(self, "outcome_transform") else train_Y
        seed = draw_seed(torch.default_generator if generator is None else generator)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = _network(module, X, m)
            X, Y = (own.to(next(network.parameters()).dtype) for own in (X, Y))
            train(network, X, Y, nn.MSELoss(), epochs=epochs, lr=lr, weight_decay=weight_decay, batch_size=batch_size)
        cls = get_posterior(posterior) if isinstance(posterior, str) else posterior
        self.laplace: Posterior = cls(network, "regression", parameters=parameters).fit([(X, Y)])
        self.laplace.fit_prior_precision(tuner)
        self.eval()

    @classmethod
    def from_posterior(
        cls,
        posterior: Posterior,
        *,
        input_transform: InputTransform | None = None,
        outcome_transform: OutcomeTransform | None = None,
    ) -> Self:
        """A model of a posterior that is fitted and tuned, over inputs and outcomes as these transforms give them."""
        posterior.require_fit()
        if not posterior.likelihood.is_gaussian:
            raise ConfigurationError("The posterior is not of a regression.", got=repr(posterior.likelihood))
        self = cls.__new__(cls)
        Model.__init__(self)
        self._take(input_transform, outcome_transform)
        self.laplace = posterior
        return self.eval()

    def _take(self, input_transform: InputTransform | None, outcome_transform: OutcomeTransform | None) -> None:
        if input_transform is not None:
            self.input_transform = input_transform
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform

    def eval(self) -> Self:
        """Evaluation mode of the transforms; there are no training inputs to transform."""
        nn.Module.train(self, False)
        return self

    @property
    def num_outputs(self) -> int:
        """Number of outcomes m."""
        return self.laplace.n_outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Empty, but for models that are conditioned on batches."""
        if self._observed is None:
            return torch.Size()
        return torch.broadcast_shapes(*(own.shape[:-2] for own in self._observed))

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The Gaussian over outcomes at ``X [*, q, d]``, joint over q and m.

        Args:
            X: Points; gradients flow to them.
            output_indices: Some of the outcomes.
            observation_noise: Whether to add the noise, or other variances ``[*, 1 or q, m]`` of transformed outcomes.
            posterior_transform: Applied to the ``GPyTorchPosterior``, or to what the outcome transform makes of it.
        """
        self.eval()
        inputs = self.transform_inputs(X)
        mean, covariance = self._conditioned(inputs)
        if isinstance(observation_noise, Tensor) or observation_noise:
            given = observation_noise if isinstance(observation_noise, Tensor) else self._noise(mean)
            covariance = covariance + torch.diag_embed(given.expand(mean.shape).flatten(-2))
        transform = getattr(self, "outcome_transform", None)
        if output_indices is not None:
            m, chosen = mean.shape[-1], torch.tensor(output_indices)
            which = (torch.arange(mean.shape[-2])[:, None] * m + chosen % m).flatten()
            mean, covariance = mean[..., chosen], covariance[..., which[:, None], which]
            transform = None if transform is None else transform.subset_output(output_indices)
        lazy = to_linear_operator(covariance)  # decomposed when it is sampled from, with jitter
        one = mean.shape[-1] == 1
        distribution = MultivariateNormal(mean.squeeze(-1), lazy) if one else MultitaskMultivariateNormal(mean, lazy)
        found: Any = GPyTorchPosterior(distribution)
        found = found if transform is None else transform.untransform_posterior(found, X=inputs)
        return found if posterior_transform is None else posterior_transform(posterior=found, X=X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any) -> Self:
        """The linearised network, conditioned on further outcomes ``Y [*, n, m]`` at ``X [*, n, d]``, without training.

        ``noise [*, n, m]`` are variances of transformed outcomes, by default the tuned one.
        """
        self.eval()
        inputs = self.transform_inputs(X)
        outcomes = self.outcome_transform(Y, X=inputs)[0] if hasattr(self, "outcome_transform") else Y
        new = [inputs, outcomes, (self._noise(outcomes) if noise is None else noise).expand(outcomes.shape)]
        if self._observed is not None:
            new = [_cat(old, own) for old, own in zip(self._observed, new, strict=True)]
        result = copy.copy(self)
        result._observed = tuple(new)
        return result

    def _noise(self, like: Tensor) -> Tensor:
        noise = self.laplace.noise_std
        assert noise is not None
        return noise.detach().square().to(like)

    def _conditioned(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[*, q, m]`` and covariance ``[*, q·m, q·m]`` at transformed inputs."""
        if self._observed is None:
            return self._joint(X)
        inputs, outcomes, noise = self._observed
        mean, covariance = self._joint(_cat(inputs, X))
        n, m = outcomes.shape[-2:]
        known, own = mean[..., :n, :], mean[..., n:, :]
        cross, within = covariance[..., : n * m, n * m :], covariance[..., : n * m, : n * m]
        root = psd_safe_cholesky(within + torch.diag_embed(noise.flatten(-2)))
        half = torch.linalg.solve_triangular(root, cross.expand(*root.shape[:-1], -1), upper=False)
        residual = (outcomes - known).flatten(-2).unsqueeze(-1)
        shift = half.mT @ torch.linalg.solve_triangular(root, residual, upper=False)
        covariance = covariance[..., n * m :, n * m :] - half.mT @ half
        return own + shift.squeeze(-1).unflatten(-1, (-1, m)), covariance.expand(*shift.shape[:-2], -1, -1)

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """The network's own mean and covariance of the q points of each batch."""
        q, m = X.shape[-2], self.num_outputs
        dtype = self.laplace.network.dtype
        options: dict[str, Any] = {"joint": True, "differentiable": torch.is_grad_enabled() and X.requires_grad}
        means, covariances = [], []
        for points in X.reshape(-1, q, X.shape[-1]).to(dtype).split(max(1, TOGETHER // q)):
            mean, covariance = self.laplace.functional_posterior(points.flatten(0, 1), **options)
            means.append(mean)
            each = covariance.reshape(len(points), q * m, -1, q * m).diagonal(dim1=0, dim2=2)  # [q·m, q·m, b]
            covariances.append(each.movedim(-1, 0))
        lead = X.shape[:-2]
        return torch.cat(means).view(*lead, q, m).to(X), torch.cat(covariances).view(*lead, q * m, q * m).to(X)


def _network(module: Any, X: Tensor, m: int) -> nn.Module:
    d = X.shape[-1]
    if module is None:
        layers = Standardised(X), nn.Linear(d, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, m)
        return nn.Sequential(*layers).to(X)
    return copy.deepcopy(module) if isinstance(module, nn.Module) else module(d, m)


def _cat(first: Tensor, second: Tensor) -> Tensor:
    """Along the second last axis, after the batches are broadcast."""
    lead = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([own.expand(*lead, *own.shape[-2:]) for own in (first, second)], -2)
