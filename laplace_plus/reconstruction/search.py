"""The search for the hyperparameters of an image's prior."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import scipy
import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning, warn
from laplace_plus.reconstruction.filters import FilterCovariance

_LENGTHS, _VARIANCES, _NOISE = (1e-2, 1e2), (1e-10, 1e6), (1e-3, 1e2)
"""Where hyperparameters are sought: taps, squared weights, and multiples of a scale of the measurements."""


def maximise(
    value: Callable[[FilterCovariance, Tensor], Tensor],
    prior: FilterCovariance,
    noise: Tensor,
    *,
    free: Tensor,
    scale: float | None,
    min_variance: float,
    tolerance: float,
    max_steps: int,
    progress: bool,
) -> tuple[FilterCovariance, Tensor]:
    """The maximum of a value in nats over ℓ of blocks where ``free``, v of all and σ, by L-BFGS in their logarithms.

    ``scale`` is the unit of the limits of σ; None keeps it. Other arguments as for ``ImagePosterior.fit_prior``.
    """
    n, seeks_noise, device = len(free), int(scale is not None), free.device
    length, variance = (one.detach().to(device).expand(n).clone() for one in prior.values())

    def split(point: Tensor) -> tuple[FilterCovariance, Tensor]:
        lengths, variances, rest = point.exp().split([int(free.sum()), n, seeks_noise])
        own = FilterCovariance(length.masked_scatter(free, lengths), variances)
        return own, rest[0] if seeks_noise else noise

    ticks = iter(progress_bar(itertools.count(), enabled=progress, description="Image prior"))

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        next(ticks)
        point = torch.tensor(values, device=device, requires_grad=True)
        with torch.enable_grad():
            found = -value(*split(point))
            (gradient,) = torch.autograd.grad(found, point)
        return float(found.detach()), gradient.cpu().numpy()

    limits = [_LENGTHS] * int(free.sum()) + [(max(min_variance, _VARIANCES[0]), _VARIANCES[1])] * n
    limits += [(low * (scale or 1.0), high * (scale or 1.0)) for low, high in [_NOISE] * seeks_noise]
    low, high = np.log(np.array(limits)).T
    start = torch.cat([length[free], variance, noise.expand(seeks_noise)]).log().cpu().numpy().clip(low, high)
    options = {"maxiter": max_steps, "gtol": tolerance, "ftol": 0.0}
    bounds = list(zip(low, high, strict=True))
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    # At a limit, a derivative that points outwards is no reason to go on.
    inside = ((found.x > low) | (found.jac < 0)) & ((found.x < high) | (found.jac > 0))
    norm = float(np.abs(found.jac[inside]).max(initial=0.0))
    if norm > tolerance:
        what = f"The search for an image's prior ended with a derivative of {norm:.2g} nats"
        warn(f"{what}; raise max_steps, or the tolerance.", ConvergenceWarning)
    return split(torch.tensor(found.x, device=device))
