"""A network's image and measurements, linearised at its weights, and the evidence of a prior over these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from laplace_plus import checks, errors
from laplace_plus._progress import progress_bar
from laplace_plus.applications.reconstruction.filters import FilterCovariance, Filters
from laplace_plus.applications.reconstruction.images import differences, expected_absolute, operator_matrix
from laplace_plus.applications.reconstruction.search import maximise
from laplace_plus.network.batches import call, describe, output_tensor
from laplace_plus.network.network import Network
from laplace_plus.network.selection import Selection
from laplace_plus.posteriors.public import full_precision
from laplace_plus.priors import as_hyperparameter
from laplace_plus.tuning.tangent_model import batch_jacobian

_LENGTHS, _VARIANCES, _NOISE = (1e-2, 1e2), (1e-10, 1e6), (1e-3, 1e2)
"""Where hyperparameters are sought: taps, squared weights, and multiples of the measurements' root mean square."""
_ENTRIES = 2**26
"""Of a Jacobian's rows that are held at a time where all of them are not kept."""


class LinearizedImage:
    """What :class:`ImagePosterior` knows before it predicts: rows of Jacobians, the evidence and its maximum."""

    def __init__(
        self,
        model: nn.Module,
        operator: Any,
        *,
        noise_std: float | Tensor = 1.0,
        prior: FilterCovariance | None = None,
        blocks: Callable[[str], str] | None = None,
        optimum: str = "network",
        parameters: Selection = "all",
    ):
        checks.choice("optimum", optimum, ("tangent", "network"))
        self.network = Network(model, parameters, output_tensor)
        self.filters = Filters(self.network, blocks)
        self.blocks = self.filters.names
        self.operator, self.noise_std, self.optimum = operator, noise_std, optimum
        self.prior = FilterCovariance() if prior is None else prior
        self._mark: Any = None

    @full_precision
    def fit(self, z: Any, y: Tensor) -> Self:
        """Linearise the network for its input z and the measurements y, d_y numbers in any shape.

        DataError or OperatorError for several images, another number of measurements than A's, or what is not linear;
        NonFiniteError for NaN and infinity.
        """
        network = self.network
        network.check_finite()
        inputs = network.receive(z)
        images = network.forward(inputs)
        if images.ndim < 2 or len(images) != 1:  # noqa: PLR2004
            raise errors.DataError("This is not one image.", expected="outputs [1, *, H, W]", got=describe(images))
        image = images[0].to(network.dtype)
        matrix = operator_matrix(self.operator, image)
        y = torch.as_tensor(y).double().to(network.device).flatten()
        checks.shape("y", y, [len(matrix)])
        for what, values in (("The image", image), ("The operator", matrix), ("A measurement", y)):
            checks.finite(what, values)
        rows = self._rows(inputs, lambda found: found.flatten(1) @ matrix.mT)
        grams = self.filters.grams(rows)
        self.image, self._z, self._matrix, self._jacobian, self._grams = image, inputs, matrix, rows, grams
        # To the tangent model, these measurements are of J θ.
        self._residual = y - matrix.double() @ image.flatten().double()
        self._seen = self._residual + rows.double() @ network.vector().double()
        self._squares, self._scale = torch.empty(0), float(y.square().mean().sqrt()) or 1.0
        self._mark = network.mark()
        return self

    def require_fit(self) -> None:
        """NotFittedError before the fit, ModelChangedError where the network's weights are no longer those of it."""
        if self._mark is None:
            what = f"This {type(self).__name__} has not been fitted."
            raise errors.NotFittedError(what, expected="fit(z, y) first", got="no measurements so far")
        if self.network.mark() != self._mark:
            what, fix = "The network is no longer that of the fit.", "Call fit() again, or give the posterior a copy."
            raise errors.ModelChangedError(what, fix=fix)

    @full_precision
    def log_marginal_likelihood(
        self, prior: FilterCovariance | None = None, noise_std: float | Tensor | None = None
    ) -> Tensor:
        """The evidence of the measurements in nats, 0-d float64; differentiable. Arguments only ask.

        NotPositiveDefiniteError if the noise is too small for float64.
        """
        self.require_fit()
        seen, root = self._seen, self._root(prior, noise_std)
        if self.optimum == "network":
            noise = self._noise(self.noise_std if noise_std is None else noise_std)
            coefficients = self.filters.coefficients(self.prior if prior is None else prior)
            energy = self.filters.energy(self.network.vector(), coefficients)
            misfit = self._residual.square().sum() / noise.square() + energy + len(seen) * math.log(2 * math.pi)
            return -misfit / 2 - root.diagonal().log().sum()
        return MultivariateNormal(torch.zeros_like(seen), scale_tril=root, validate_args=False).log_prob(seen)

    @full_precision
    def complexity(self, prior: FilterCovariance | None = None, *, progress: bool = False) -> Tensor:
        """κ ``[n_blocks]`` float64, differentiable: the expected total variation of ``N(f(z), K_b)``, of block b alone.

        It is a closed form; the first call differentiates all differences of neighbours.
        """
        self.require_fit()
        mean = differences(self.image.double()).flatten()
        if not self._squares.numel():
            rows = self._chunks(len(mean), lambda found: differences(found).flatten(1), progress)
            self._squares = torch.cat([self.filters.grams(some, diagonal=True).mT for some in rows])
        coefficients = self.filters.coefficients(self.prior if prior is None else prior)
        return expected_absolute(mean[:, None], self.filters.by_block(self._squares * coefficients)).sum(0)

    @full_precision
    def log_hyperprior(self, rate: float, prior: FilterCovariance | None = None) -> Tensor:
        """TV-PredCP, ``Σ_b −γ κ_b + log |∂κ_b/∂ℓ_b|``, 0-d float64; differentiable. γ is ``rate``.

        The sum is over blocks with filters of several taps that move the image; ConfigurationError if there are none.
        """
        self.require_fit()
        checks.positive("rate", rate)
        if not bool(self.filters.correlated.any()):
            what, fix = "No weights have a length scale.", "Tune without total_variation."
            raise errors.ConfigurationError(what, expected="filters of several taps", fix=fix)
        prior = self.prior if prior is None else prior
        with torch.enable_grad():
            length = prior.values()[0].to(self.image.device).expand(len(self.blocks))
            length = length if length.requires_grad else length.clone().requires_grad_()
            kappa = self.complexity(FilterCovariance(length, prior.variance))
            (slope,) = torch.autograd.grad(kappa.sum(), length, create_graph=True)
            moving = self.filters.by_block(self._squares.abs().sum(0) * (self.filters.distances > 0)) > 0
            return (slope[moving].abs().log() - rate * kappa[moving]).sum()

    @full_precision
    def fit_prior(
        self,
        *,
        total_variation: float | None = None,
        tune_noise: bool = True,
        min_variance: float = 1e-3,
        tolerance: float = 1e-2,
        max_steps: int = 500,
        progress: bool = False,
    ) -> Self:
        """Maximise the evidence over ℓ and v of each block and σ, from those of now, by L-BFGS in their logarithms.

        Args:
            total_variation: γ of :meth:`log_hyperprior`, to be added; by default there is none. For a network trained
                with ``‖y − A f‖²/d_y + g TV(f)`` the authors take ``g d_y``.
            tune_noise: Whether to tune σ. Lengths ℓ = 0 stay in any case.
            min_variance: Least v; 1e-3 is the authors'.
            tolerance: On each derivative, in nats; a ConvergenceWarning says that it was not met.
            max_steps: Largest number of steps.
            progress: Whether to show progress bars.
        """
        self.require_fit()
        checks.positive("min_variance", min_variance)
        checks.positive("tolerance", tolerance)
        checks.count("max_steps", max_steps)
        if total_variation is not None:
            self.complexity(progress=progress)
        n, device = len(self.blocks), self.image.device
        length, variance = (one.detach().to(device).expand(n).clone() for one in self.prior.values())
        free, noise = self.filters.correlated & (length > 0), self._noise(self.noise_std).detach()
        sizes = [int(free.sum()), n, int(tune_noise)]

        def split(numbers: Tensor) -> tuple[FilterCovariance, Tensor]:
            lengths, variances, std = numbers.split(sizes)
            return FilterCovariance(length.masked_scatter(free, lengths), variances), std[0] if tune_noise else noise

        def value(numbers: Tensor) -> Tensor:
            prior, std = split(numbers)
            found = self.log_marginal_likelihood(prior, std)
            return found if total_variation is None else found + self.log_hyperprior(total_variation, prior)

        lowest, highest = min(self._scale * _NOISE[0], float(noise)), max(self._scale * _NOISE[1], float(noise))
        limits = torch.tensor([_LENGTHS, (max(min_variance, _VARIANCES[0]), _VARIANCES[1]), (lowest, highest)])
        low, high = limits.double().repeat_interleave(torch.tensor(sizes), 0).to(length.device).unbind(1)
        start = torch.cat([length[free], variance, noise.expand(int(tune_noise))]).clamp(low, high)
        self.prior, self.noise_std = split(maximise(value, start, low, high, tolerance, max_steps, progress))
        return self

    def _noise(self, value: float | Tensor) -> Tensor:
        found = as_hyperparameter(value).double().to(self._grams.device)
        checks.positive("noise_std", found.tolist())
        return found

    def _root(self, prior: FilterCovariance | None = None, noise_std: float | Tensor | None = None) -> Tensor:
        """The Cholesky factor of S; differentiable."""
        coefficients = self.filters.coefficients(self.prior if prior is None else prior)
        noise = self._noise(self.noise_std if noise_std is None else noise_std)
        total = (coefficients @ self._grams.flatten(1)).view(self._grams.shape[1:])
        total = total + noise.square() * torch.eye(len(total)).to(total)
        return _cholesky(total, "covariance of measurements", "Raise noise_std.")

    def _rows(self, inputs: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The Jacobian ``[n, P]`` of a linear function of the image, ``[1, *, H, W] -> [1, n]``."""
        model, dtype = self.network.model, self.network.dtype

        def view(*positional: Any, **named: Any) -> Tensor:
            x: Any = named or (positional if len(positional) > 1 else positional[0])
            return function(output_tensor(call(model, x)).to(dtype))

        return batch_jacobian(self.network.of(view, lambda found: found), inputs)[1]

    def _chunks(self, parts: int | list[Tensor], function: Any, progress: bool) -> Iterator[Tensor]:
        """Some rows at a time of the Jacobian of a linear function of the image; of n, as many as memory suggests."""
        if isinstance(parts, int):
            parts = [*torch.arange(parts).split(max(1, _ENTRIES // self.network.n_parameters))]
        for part in progress_bar(parts, enabled=progress, description="Jacobian of the image"):
            index = part.to(self._jacobian.device)
            yield self._rows(self._z, lambda found, index=index: function(found)[:, index])  # type: ignore[misc]


def _cholesky(matrix: Tensor, what: str, fix: str) -> Tensor:
    root, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(root.detach().diagonal()).all()):
        raise errors.NotPositiveDefiniteError(f"The {what} is singular.", expected="positive eigenvalues", fix=fix)
    return root
