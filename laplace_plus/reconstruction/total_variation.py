"""The total variation of a Gaussian image in closed form, and the prior over length scales that it gives.

TV-PredCP (Antorán et al., 2022, arXiv:2203.00479) lets the complexity ``κ_b = E TV(f)``, of images in which block b
alone is random, be exponentially distributed. The authors estimate κ and its derivatives from samples. But each
difference of neighbours is ``N(m, v)``, whose expected absolute value is known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laplace_plus.errors import DataError


def expected_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """``E|N(m, v)| = √(2v/π) exp(−m²/2v) + m erf(m/√(2v))``, and ``|m|`` where v = 0; twice differentiable where v > 0.

    Example:
        >>> expected_absolute(torch.tensor([0.0, -3.0]), torch.tensor([1.0, 0.0]))
        tensor([0.7979, 3.0000])
    """
    known = variance > 0
    some = torch.where(known, variance, 1.0)  # no division by zero may enter derivatives
    scaled = mean / (2 * some).sqrt()
    spread = (2 * some / math.pi).sqrt() * torch.exp(-scaled.square()) + mean * torch.erf(scaled)
    return torch.where(known, spread, mean.abs())


def differences(images: Tensor) -> Tensor:
    """Differences of vertical and of horizontal neighbours, ``[*, H, W] -> [*, (H−1) W + H (W−1)]``.

    The sum of their absolute values is the anisotropic total variation. DataError for less than two axes.
    """
    if images.ndim < 2:  # noqa: PLR2004
        raise DataError("There are no neighbours.", expected="images [*, H, W]", got=f"{tuple(images.shape)}")
    return torch.cat([images.diff(dim=-2).flatten(-2), images.diff(dim=-1).flatten(-2)], -1)
