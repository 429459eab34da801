"""The geometry of loss surfaces: metric, geodesics, exponential map, diffusions and scalar curvature."""

from laplace_plus.geometry.curvature import estimate_scalar_curvature, scalar_curvature
from laplace_plus.geometry.diffusion import Diffusion, DiffusionResult, NoiseField, diffuse
from laplace_plus.geometry.geodesic import GeodesicResult, GraphMetric, PathStatus, geodesic
from laplace_plus.geometry.landscape import Derivatives, FunctionLandscape, Landscape
from laplace_plus.geometry.loss import LossLandscape, kinks

__all__ = [
    "Derivatives",
    "Diffusion",
    "DiffusionResult",
    "FunctionLandscape",
    "GeodesicResult",
    "GraphMetric",
    "Landscape",
    "LossLandscape",
    "NoiseField",
    "PathStatus",
    "diffuse",
    "estimate_scalar_curvature",
    "geodesic",
    "kinks",
    "scalar_curvature",
]
