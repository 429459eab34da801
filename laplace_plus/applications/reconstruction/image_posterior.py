"""The linearised deep image prior (Antorán, Barbano, Leuschner, Hernández-Lobato and Jin, 2022, arXiv:2203.00479)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import scipy
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from laplace_plus import checks, errors
from laplace_plus._progress import progress_bar
from laplace_plus.likelihoods.sampling import standard_normal
from laplace_plus.linalg import Operator
from laplace_plus.network.batches import call, output_tensor
from laplace_plus.network.linearization import batch_jacobian
from laplace_plus.network.network import Network, full_precision
from laplace_plus.network.selection import Selection
from laplace_plus.priors import as_hyperparameter

_VARIANCES, _NOISE = (1e-10, 1e6), (1e-3, 1e2)
"""Where hyperparameters are sought: squared weights, and multiples of the measurements' root mean square."""
_ENTRIES = 2**26
"""Of a Jacobian's rows that are held at a time where all of them are not kept."""


class ImagePosterior:
    """Error bars of an image that a network reconstructs from linear measurements ``y = A f(z) + ε``, ε ~ N(0, σ² I).

    The network f was trained on this one image, from a fixed input z. It is linearised at its weights θ̃, with
    ``J = ∂f/∂θ`` and the prior ``N(0, Λ⁻¹)`` of one variance v for each block of weights. With ``K = J Λ⁻¹ Jᵀ`` and
    ``S = A K Aᵀ + σ² I``, the image has the mean f(z) and the covariance ``K − K Aᵀ S⁻¹ A K``. The evidence is
    ``−½ (log det S + ‖y − A f(z)‖²/σ² + θ̃ᵀ Λ θ̃ + d_y log 2π)``. What is kept is the Jacobian ``[d_y, P]`` of the
    measurements, and for each block its matrix ``A J_b J_bᵀ Aᵀ [d_y, d_y]``, of which ``A K Aᵀ`` is ``Σ_b v_b`` times.

    Args:
        model: The trained network; ``f(z)`` is one image ``[1, *, H, W]``.
        operator: A, from flat images: a tensor ``[d_y, d_x]``, dense or sparse, a scipy matrix or an
            ``lp.linalg.Operator``; or a function of images, ``[N, *, H, W] -> [N, *]``, which must be linear.
        noise_std: σ, in units of the measurements.
        prior_variance: v > 0, in squared units of the weights; of all blocks, or of each, ``[n_blocks]``.
        blocks: Gives the block of a parameter by its name, such as ``lambda name: name.split(".")[0]``; by default each
            layer is a block.
        parameters: Which weights; see :mod:`laplace_plus.network.selection`.

    Attributes:
        image: f(z), ``[*, H, W]``, once fitted.
        prior_variance, noise_std: May be set; :meth:`fit_prior` sets them.
        blocks: Names of the blocks, in the order of the variances.

    Raises:
        ConfigurationError: Variances that are not positive, or of another number of blocks.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Sigmoid(), torch.nn.Conv2d(4, 1, 1))
        >>> z, projector = torch.randn(1, 1, 6, 6), torch.randn(12, 36)
        >>> posterior = ImagePosterior(net, projector, noise_std=0.1).fit(z, torch.randn(12)).fit_prior()
        >>> posterior.image.shape, posterior.variance().shape
        (torch.Size([1, 6, 6]), torch.Size([1, 6, 6]))
    """

    def __init__(
        self,
        model: nn.Module,
        operator: Any,
        *,
        noise_std: float | Tensor = 1.0,
        prior_variance: float | Tensor = 1.0,
        blocks: Callable[[str], str] | None = None,
        parameters: Selection = "all",
    ):
        self.network = Network(model, parameters, output_tensor)
        names = [item.layer if blocks is None else blocks(item.name) for item in self.network.selected]
        self.blocks = tuple(dict.fromkeys(names))
        self._pieces: list[tuple[int, slice]] = []  # of each parameter, its block and entries
        for item, name in zip(self.network.selected, names, strict=True):
            start = self.network.offsets[item.name]
            self._pieces.append((self.blocks.index(name), slice(start, start + item.size)))
        self.operator, self.noise_std, self.prior_variance = operator, noise_std, prior_variance
        self._variances()
        self._mark: Any = None

    @full_precision
    def fit(self, z: Any, y: Tensor) -> Self:
        """Linearise the network for its input z and the measurements y, d_y numbers in any shape.

        DataError for several images; ConfigurationError for an A or y of another size; NonFiniteError for NaN and
        infinity.
        """
        network = self.network
        network.check_finite()
        inputs = network.receive(z)
        images = network.forward(inputs)
        if images.ndim < 2 or len(images) != 1:  # noqa: PLR2004
            got = checks.describe(images)
            raise errors.DataError("This is not one image.", expected="outputs [1, *, H, W]", got=got)
        image = images[0].to(network.dtype)
        matrix = _operator_matrix(self.operator, image)
        y = torch.as_tensor(y).double().to(network.device).flatten()
        checks.shape("y", y, [len(matrix)])
        for what, values in (("The image", image), ("The operator", matrix), ("A measurement", y)):
            checks.finite(what, values)
        rows = self._rows(inputs, lambda found: found.flatten(1) @ matrix.mT)
        grams, vector = y.new_zeros(len(self.blocks), len(y), len(y)), network.vector().double()
        squares = y.new_zeros(len(self.blocks))
        for block, own in self._pieces:
            wide = rows[:, own].double()
            grams[block].addmm_(wide, wide.mT)
            squares[block] += vector[own].square().sum()
        self.image, self._z, self._jacobian, self._grams, self._squares = image, inputs, rows, grams, squares
        self._residual = y - matrix.double() @ image.flatten().double()
        self._scale = float(y.square().mean().sqrt()) or 1.0
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
        self, prior_variance: float | Tensor | None = None, noise_std: float | Tensor | None = None
    ) -> Tensor:
        """The evidence of the measurements in nats, 0-d float64; differentiable. Arguments only ask.

        NotPositiveDefiniteError if the noise is too small for float64.
        """
        self.require_fit()
        root, variance, noise = self._factored(prior_variance, noise_std)
        misfit = self._residual.square().sum() / noise.square() + (self._squares / variance).sum()
        return -(misfit + len(root) * math.log(2 * math.pi)) / 2 - root.diagonal().log().sum()

    @full_precision
    def fit_prior(
        self,
        *,
        tune_noise: bool = True,
        min_variance: float = 1e-3,
        tolerance: float = 1e-2,
        max_steps: int = 500,
        progress: bool = False,
    ) -> Self:
        """Maximise the evidence over v of each block and σ, from those of now, by L-BFGS in their logarithms.

        Args:
            tune_noise: Whether to tune σ.
            min_variance: Least v; 1e-3 is the authors'.
            tolerance: On each derivative, in nats; a ConvergenceWarning says that it was not met.
            max_steps: Largest number of steps.
            progress: Whether to show a progress bar.
        """
        self.require_fit()
        checks.positive("min_variance", min_variance)
        checks.positive("tolerance", tolerance)
        checks.count("max_steps", max_steps)
        n, variance = len(self.blocks), self._variances().detach()
        noise = as_hyperparameter(self.noise_std).detach().to(variance)

        def split(numbers: Tensor) -> tuple[Tensor, Tensor]:
            return numbers[:n], numbers[n] if tune_noise else noise

        lowest, highest = min(self._scale * _NOISE[0], float(noise)), max(self._scale * _NOISE[1], float(noise))
        limits = torch.tensor([(max(min_variance, _VARIANCES[0]), _VARIANCES[1]), (lowest, highest)]).to(variance)
        low, high = limits.repeat_interleave(torch.tensor([n, int(tune_noise)], device=limits.device), 0).unbind(1)
        start = torch.cat([variance, noise.expand(int(tune_noise))]).clamp(low, high)
        found = _maximise(
            lambda numbers: self.log_marginal_likelihood(*split(numbers)),
            start,
            low,
            high,
            tolerance,
            max_steps,
            progress,
        )
        self.prior_variance, self.noise_std = split(found)
        return self

    @full_precision
    def covariance(self) -> Tensor:
        """The posterior covariance of all pixels, ``[d_x, d_x]`` float64."""
        self.require_fit()
        checks.zeros("The covariance of all pixels", self.image.numel(), self.image.numel(), self.image.double())
        return next(self._covariances([torch.arange(self.image.numel())]))

    @full_precision
    def variance(self, *, progress: bool = False) -> Tensor:
        """The posterior variance of each pixel, ``[*, H, W]`` float64."""
        self.require_fit()
        found = self._covariances(self.image.numel(), progress)
        return torch.cat([one.diagonal() for one in found]).view(self.image.shape)

    @full_precision
    def log_prob(
        self, image: Tensor, *, patch: int | None = None, extra_variance: float = 1e-6, progress: bool = False
    ) -> Tensor:
        """Log-density of an image, in nats per pixel, 0-d float64.

        Args:
            image: Of the shape of f(z); ConfigurationError for another.
            patch: p: patches of p × p pixels, less at the border, are taken as independent; by default all are one.
            extra_variance: c ≥ 0, added to the variance of each pixel, such as that of a noise in the
                image; NotPositiveDefiniteError where the sum is singular.
            progress: Whether to show a progress bar.
        """
        self.require_fit()
        image = torch.as_tensor(image).double().to(self.image.device)
        checks.finite("The image", checks.shape("The image", image, self.image.shape))
        mean, image = self.image.double().flatten(), image.flatten()
        size = checks.count("patch", max(self.image.shape[-2:]) if patch is None else patch)
        index = torch.arange(len(mean)).view(-1, *self.image.shape[-2:])
        parts = [cell.flatten() for row in index.split(size, -2) for cell in row.split(size, -1)]
        total = torch.zeros_like(mean[0])
        for part, covariance in zip(parts, self._covariances(parts, progress), strict=True):
            covariance.diagonal().add_(extra_variance)
            root = _cholesky(covariance, "covariance of pixels", "Raise extra_variance.")
            own = part.to(mean.device)
            total += MultivariateNormal(mean[own], scale_tril=root, validate_args=False).log_prob(image[own])
        return total / len(mean)

    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Images from the posterior, ``[n, *, H, W]``."""
        self.require_fit()
        checks.count("n", n)
        values, vectors = torch.linalg.eigh(self.covariance())
        noise = standard_normal((n, len(values)), like=values, generator=generator)
        drawn = (noise * values.clamp_min(0).sqrt()) @ vectors.mT
        return self.image + drawn.view(n, *self.image.shape).to(self.image)

    def _variances(self, value: float | Tensor | None = None) -> Tensor:
        """The prior variance of each block, ``[n_blocks]`` float64; differentiable."""
        given = as_hyperparameter(self.prior_variance if value is None else value).double().to(self.network.device)
        checks.numbers("prior_variance", given, above=0.0)
        fix = f"Pass one number, or one for each block: {', '.join(self.blocks)}."
        return checks.shape("prior_variance", given, [len(self.blocks)] * given.ndim, fix).expand(len(self.blocks))

    def _factored(
        self, prior_variance: float | Tensor | None = None, noise_std: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The Cholesky factor of S, v of each block and σ; differentiable."""
        noise = as_hyperparameter(self.noise_std if noise_std is None else noise_std).double().to(self._grams.device)
        checks.positive("noise_std", noise.tolist())
        variance = self._variances(prior_variance)
        total = torch.tensordot(variance, self._grams, 1)
        total = total + noise.square() * torch.eye(len(total)).to(total)
        return _cholesky(total, "covariance of measurements", "Raise noise_std."), variance, noise

    def _product(self, left: Tensor, right: Tensor, variance: Tensor) -> Tensor:
        """``L Λ⁻¹ Rᵀ`` in float64, for rows ``[n, P]`` and ``[m, P]``."""
        found = variance.new_zeros(len(left), len(right))
        for block, own in self._pieces:
            found.addmm_(left[:, own].double() * variance[block], right[:, own].double().mT)
        return found

    def _rows(self, inputs: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The Jacobian ``[n, P]`` of a linear function of the image, ``[1, *, H, W] -> [1, n]``."""
        model, dtype = self.network.model, self.network.dtype

        def view(*positional: Any, **named: Any) -> Tensor:
            x: Any = named or (positional if len(positional) > 1 else positional[0])
            return function(output_tensor(call(model, x)).to(dtype))

        return batch_jacobian(self.network.of(view, lambda found: found), inputs)[1]

    def _covariances(self, parts: int | list[Tensor], progress: bool = False) -> Iterator[Tensor]:
        """The posterior covariance of some pixels at a time, or of all, as many at a time as memory suggests."""
        root, variance, _ = (one.detach() for one in self._factored())
        if isinstance(parts, int):
            parts = [*torch.arange(parts).split(max(1, _ENTRIES // self.network.n_parameters))]
        for part in progress_bar(parts, enabled=progress, description="Jacobian of the image"):
            index = part.to(self._jacobian.device)
            rows = self._rows(self._z, lambda found, index=index: found.flatten(1)[:, index])  # type: ignore[misc]
            white = torch.linalg.solve_triangular(root, self._product(self._jacobian, rows, variance), upper=False)
            yield self._product(rows, rows, variance) - white.mT @ white


def _operator_matrix(operator: Any, image: Tensor) -> Tensor:
    """A as a dense matrix ``[d_y, d_x]``, for images like this one."""
    if isinstance(operator, Operator | Tensor):
        found = operator.dense() if isinstance(operator, Operator) else operator.to_dense()
    elif hasattr(operator, "toarray") or hasattr(operator, "__array__"):  # of scipy, of numpy
        found = torch.as_tensor(operator.toarray() if hasattr(operator, "toarray") else operator)
    else:
        with torch.no_grad():
            found = operator(torch.eye(image.numel()).to(image).view(-1, *image.shape)).flatten(1).mT
    checks.shape("The operator", found, [None, image.numel()])
    return found.detach().to(image)


def _maximise(
    value: Callable[[Tensor], Tensor],
    start: Tensor,
    low: Tensor,
    high: Tensor,
    tolerance: float,
    n: int,
    progress: bool,
) -> Tensor:
    """Where a differentiable value in nats of positive numbers is largest, by at most n steps of L-BFGS in logarithms.

    The tolerance is that on derivatives by logarithms that stay within the limits.
    """
    ticks = iter(progress_bar(itertools.count(), enabled=progress, description="Image prior"))

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        next(ticks)
        point = torch.tensor(values, device=start.device, requires_grad=True)
        with torch.enable_grad():
            found = -value(point.exp())
            (gradient,) = torch.autograd.grad(found, point)
        return float(found.detach()), gradient.cpu().numpy()

    first, least, most = (numbers.double().log().cpu().numpy() for numbers in (start, low, high))
    options = {"maxiter": n, "gtol": tolerance, "ftol": 0.0}
    bounds = list(zip(least, most, strict=True))
    found = scipy.optimize.minimize(loss, first, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    inside = ((found.x > least) | (found.jac < 0)) & ((found.x < most) | (found.jac > 0))
    norm = float(np.abs(found.jac[inside]).max(initial=0.0))
    if norm > tolerance:
        message = f"The search ended with a derivative of {norm:.2g} nats; raise max_steps or tolerance."
        errors.warn(message, errors.ConvergenceWarning)
    return torch.tensor(found.x, device=start.device).exp()


def _cholesky(matrix: Tensor, what: str, fix: str) -> Tensor:
    root, info = torch.linalg.cholesky_ex(matrix)
    if int(info) or not bool(torch.isfinite(root.detach().diagonal()).all()):
        raise errors.NotPositiveDefiniteError(f"The {what} is singular.", expected="positive eigenvalues", fix=fix)
    return root
