"""Linear operators from images to measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, OperatorError
from laplace_plus.linalg import Operator


def operator_matrix(operator: Any, image: Tensor) -> Tensor:
    """A as a dense matrix ``[d_y, d_x]``, for images like this one; smaller than the Jacobian of the measurements.

    ConfigurationError for neither a matrix nor a function, OperatorError for another shape or what is not linear.
    """
    like = {"dtype": image.dtype, "device": image.device}
    if isinstance(operator, Operator | Tensor):
        found = operator.dense() if isinstance(operator, Operator) else operator.to_dense()
    elif isinstance(operator, np.ndarray) or hasattr(operator, "toarray"):
        found = torch.as_tensor(operator if isinstance(operator, np.ndarray) else operator.toarray())
    elif callable(operator):
        with torch.no_grad():
            units = torch.eye(image.numel(), **like).view(-1, *image.shape)
            found, at = operator(units).flatten(1).mT, operator(image[None]).flatten()
        if not torch.allclose(found @ image.flatten(), at, rtol=0, atol=1e-3 * float(at.abs().max())):
            raise OperatorError("The operator is not linear.", expected="A(f + g) = A(f) + A(g)", got="another sum")
    else:
        expected = "a matrix, an lp.linalg.Operator, or a linear function of images"
        raise ConfigurationError("The operator takes no images.", expected=expected, got=type(operator).__name__)
    if found.ndim != 2 or found.shape[1] != image.numel():  # noqa: PLR2004
        expected, got = f"[d_y, {image.numel()}]", f"{tuple(found.shape)}"
        raise OperatorError("The operator does not fit the image.", expected=expected, got=got)
    return found.detach().to(**like)
