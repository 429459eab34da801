"""Riemannian Laplace approximations: samples that follow the loss surface."""

from laplace_plus.posteriors.riemannian.drawing import ExponentialMap
from laplace_plus.posteriors.riemannian.riemannian import Riemannian

__all__ = ["ExponentialMap", "Riemannian"]
