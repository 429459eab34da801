"""What the uses ask of posteriors."""

from __future__ import annotations

from typing import Any

from laplace_plus.errors import UnsupportedError
from laplace_plus.posteriors import GaussianPosterior


def require_posterior(posterior: Any, kind: type[Any] = GaussianPosterior) -> None:
    """UnsupportedError for anything but such a posterior."""
    if not isinstance(posterior, kind):
        what = "This is no Gaussian posterior." if kind is GaussianPosterior else "This is no posterior."
        raise UnsupportedError(what, expected="such as lp.KFAC", got=repr(posterior))
