"""What the uses ask of posteriors and of numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from laplace_plus.errors import NonFiniteError, UnsupportedError
from laplace_plus.posteriors import GaussianPosterior


def require_posterior(posterior: Any, kind: type[Any] = GaussianPosterior) -> None:
    """UnsupportedError for anything but such a posterior."""
    if not isinstance(posterior, kind):
        what = "This is no Gaussian posterior." if kind is GaussianPosterior else "This is no posterior."
        raise UnsupportedError(what, expected="such as lp.KFAC", got=repr(posterior))


def require_finite(what: str, *values: Tensor) -> None:
    """NonFiniteError for NaN and infinity."""
    if not all(bool(value.isfinite().all()) for value in values):
        fix = "Look for NaN and infinite values among the inputs and in the network's outputs."
        raise NonFiniteError(f"Not finite: {what}.", expected="finite numbers", fix=fix)
