"""Error bars of images that a network reconstructs from linear measurements (a deep image prior)."""

from laplace_plus.applications.reconstruction.filters import FilterCovariance
from laplace_plus.applications.reconstruction.image_posterior import ImagePosterior, differences, expected_absolute

__all__ = ["FilterCovariance", "ImagePosterior", "differences", "expected_absolute"]
