"""The search for hyperparameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import scipy
import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConvergenceWarning, warn


def maximise(
    value: Callable[[Tensor], Tensor],
    start: Tensor,
    low: Tensor,
    high: Tensor,
    tolerance: float,
    n: int,
    progress: bool,
) -> Tensor:
    """Where a differentiable value in nats of positive numbers is largest, by at most n steps of L-BFGS in logarithms.

    A ConvergenceWarning says that some derivative by a logarithm that stays within the limits exceeds the tolerance.
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
        warn(
            f"The search ended with a derivative of {norm:.2g} nats; raise max_steps or tolerance.", ConvergenceWarning
        )
    return torch.tensor(found.x, device=start.device).exp()
