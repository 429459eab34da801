"""The linearised deep image prior (Antorán, Barbano, Leuschner, Hernández-Lobato and Jin, 2022, arXiv:2203.00479)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from laplace_plus import checks
from laplace_plus.applications.reconstruction.linearized_image import LinearizedImage, _cholesky
from laplace_plus.posteriors.public import full_precision


class ImagePosterior(LinearizedImage):
    """Error bars of an image that a network reconstructs from linear measurements ``y = A f(z) + ε``, ε ~ N(0, σ² I).

    The network f was trained on this one image, from a fixed input z. It is linearised at its weights θ̃, with
    ``J = ∂f/∂θ`` and the prior ``N(0, Λ⁻¹)`` of a :class:`FilterCovariance`. With ``K = J Λ⁻¹ Jᵀ`` and
    ``S = A K Aᵀ + σ² I``, the image has the mean f(z) and the covariance ``K − K Aᵀ S⁻¹ A K``. The evidence is
    ``−½ (log det S + ‖y − A f_θ‖²/σ² + θᵀ Λ θ + d_y log 2π)``, of the tangent model f_θ. What is kept is the Jacobian
    ``[d_y, P]`` of the measurements, and one matrix ``[d_y, d_y]`` for each block and distance of taps.

    Args:
        model: The trained network; ``f(z)`` is one image ``[1, *, H, W]``.
        operator: A, from flat images: a tensor ``[d_y, d_x]``, dense or sparse, a scipy matrix or an
            ``lp.linalg.Operator``; or a linear function of images, ``[N, *, H, W] -> [N, *]``.
        noise_std: σ, in units of the measurements.
        prior: Over the weights; its numbers are those of all blocks, or of each.
        blocks: Gives the block of a parameter by its name, such as ``lambda name: name.split(".")[0]``; by default each
            layer is a block.
        optimum: θ in the evidence: ``"network"``, the trained weights, as the authors do; or ``"tangent"``, the optimum
            of the tangent model, where it is ``log N(y − A (f(z) − J θ̃); 0, S)``. Its error bars were too narrow.
        parameters: Which weights; see :mod:`laplace_plus.network.selection`.

    Attributes:
        image: f(z), ``[*, H, W]``, once fitted.
        prior, noise_std: May be set; :meth:`fit_prior` sets them.
        blocks: Names of the blocks, in the order of the prior's numbers.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Sigmoid(), torch.nn.Conv2d(4, 1, 1))
        >>> z, projector = torch.randn(1, 1, 6, 6), torch.randn(12, 36)
        >>> posterior = ImagePosterior(net, projector, noise_std=0.1).fit(z, torch.randn(12)).fit_prior()
        >>> posterior.image.shape, posterior.variance().shape
        (torch.Size([1, 6, 6]), torch.Size([1, 6, 6]))
    """

    @full_precision
    def covariance(self) -> Tensor:
        """The posterior covariance of all pixels, ``[d_x, d_x]`` float64."""
        self.require_fit()
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
            extra_variance: c ≥ 0, added to the variance of each pixel, such as :meth:`image_noise`;
                NotPositiveDefiniteError where the sum is singular.
            progress: Whether to show a progress bar.
        """
        self.require_fit()
        image = torch.as_tensor(image).double().to(self.image.device)
        checks.finite("The image", checks.shape("The image", image, self.image.shape))
        mean, image = self.image.double().flatten(), image.flatten()
        parts = _patches(self.image.shape, max(self.image.shape[-2:]) if patch is None else patch)
        total = torch.zeros_like(mean[0])
        for part, covariance in zip(parts, self._covariances(parts, progress), strict=True):
            covariance.diagonal().add_(extra_variance)
            root = _cholesky(covariance, "covariance of pixels", "Raise extra_variance.")
            own = part.to(mean.device)
            total += MultivariateNormal(mean[own], scale_tril=root, validate_args=False).log_prob(image[own])
        return total / len(mean)

    @full_precision
    def image_noise(self, rank: int = 100) -> Tensor:
        """``σ² · mean diag (AᵀA)⁺`` of the ``rank`` leading singular vectors of A: noise in the image; 0-d float64."""
        self.require_fit()
        checks.count("rank", rank)
        values = torch.linalg.svdvals(self._matrix.double())
        values = values[values > values[0] * max(self._matrix.shape) * torch.finfo(torch.float64).eps][:rank]
        return self._noise(self.noise_std).detach().square() * values.pow(-2).sum() / self._matrix.shape[1]

    @full_precision
    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Images from the posterior, ``[n, *, H, W]``."""
        self.require_fit()
        checks.count("n", n)
        values, vectors = torch.linalg.eigh(self.covariance())
        device = values.device if generator is None else generator.device
        noise = torch.randn(n, len(values), generator=generator, device=device, dtype=values.dtype)
        drawn = (noise.to(values) * values.clamp_min(0).sqrt()) @ vectors.mT
        return self.image + drawn.view(n, *self.image.shape).to(self.image)

    def _covariances(self, parts: int | list[Tensor], progress: bool = False) -> Iterator[Tensor]:
        """The posterior covariance of some pixels at a time."""
        root, coefficients = self._root().detach(), self.filters.coefficients(self.prior).detach()
        for rows in self._chunks(parts, lambda found: found.flatten(1), progress):
            across = self.filters.product(rows, self._jacobian, coefficients)
            white = torch.linalg.solve_triangular(root, across.mT, upper=False)
            yield self.filters.product(rows, rows, coefficients) - white.mT @ white


def _patches(shape: torch.Size, size: int) -> list[Tensor]:
    """Flat indices of the pixels of each patch."""
    checks.count("patch", size)
    index = torch.arange(shape.numel()).view(-1, *shape[-2:])
    return [cell.flatten() for row in index.split(size, -2) for cell in row.split(size, -1)]
