"""Linear functions of images: measurements, and differences, whose absolute values are the total variation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import OperatorError
from laplace_plus.linalg import Operator


def operator_matrix(operator: Any, image: Tensor) -> Tensor:
    """A as a dense matrix ``[d_y, d_x]``, for images like this one; smaller than the Jacobian of the measurements.

    OperatorError for another shape, or what is not linear.
    """
    if isinstance(operator, Operator | Tensor):
        found = operator.dense() if isinstance(operator, Operator) else operator.to_dense()
    elif hasattr(operator, "toarray") or hasattr(operator, "__array__"):  # of scipy, of numpy
        found = torch.as_tensor(operator.toarray() if hasattr(operator, "toarray") else operator)
    else:
        with torch.no_grad():
            found = operator(torch.eye(image.numel()).to(image).view(-1, *image.shape)).flatten(1).mT
            at = operator(image[None]).flatten()
        if not torch.allclose(found @ image.flatten(), at, rtol=0, atol=1e-3 * float(at.abs().max())):
            raise OperatorError("The operator is not linear.", expected="A(f + g) = A(f) + A(g)", got="another sum")
    if found.ndim != 2 or found.shape[1] != image.numel():  # noqa: PLR2004
        expected, got = f"[d_y, {image.numel()}]", f"{tuple(found.shape)}"
        raise OperatorError("The operator does not fit the image.", expected=expected, got=got)
    return found.detach().to(image)


def differences(images: Tensor) -> Tensor:
    """Differences of vertical and of horizontal neighbours, ``[*, H, W] -> [*, (H−1) W + H (W−1)]``."""
    return torch.cat([images.diff(dim=-2).flatten(-2), images.diff(dim=-1).flatten(-2)], -1)


def expected_absolute(mean: Tensor, variance: Tensor) -> Tensor:
    """``E|N(m, v)| = √(2v/π) exp(−m²/2v) + m erf(m/√(2v))``, and ``|m|`` where v = 0; twice differentiable where v > 0.

    >>> expected_absolute(torch.tensor([0.0, -3.0]), torch.tensor([1.0, 0.0]))
    tensor([0.7979, 3.0000])
    """
    known = variance > 0
    some = torch.where(known, variance, 1.0)  # no division by zero may enter derivatives
    scaled = mean / (2 * some).sqrt()
    spread = (2 * some / math.pi).sqrt() * torch.exp(-scaled.square()) + mean * torch.erf(scaled)
    return torch.where(known, spread, mean.abs())
