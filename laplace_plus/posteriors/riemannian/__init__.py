"""Riemannian Laplace approximations: samples that follow the loss surface."""
