"""Error bars of images that a network reconstructs from linear measurements (a deep image prior)."""

from laplace_plus.applications.reconstruction.image_posterior import ImagePosterior

__all__ = ["ImagePosterior"]
