"""What the uses ask of posteriors."""

from __future__ import annotations

from typing import Any

from laplace_plus.errors import UnsupportedError
from laplace_plus.posteriors import GaussianPosterior


def require_gaussian(posterior: Any) -> None:
    """UnsupportedError for anything but a Gaussian posterior."""
    if not isinstance(posterior, GaussianPosterior):
        raise UnsupportedError("This is no Gaussian posterior.", expected="such as lp.KFAC", got=repr(posterior))
