"""Uncertainty of radiance fields and other functions of coordinates, as a displacement of their inputs."""

from laplace_plus.applications.fields.spatial_field import SpatialField
from laplace_plus.posteriors import register

__all__ = ["SpatialField"]

register("SpatialField", SpatialField)
