"""Riemannian posteriors pass what every posterior passes."""

from __future__ import annotations

import laplace_plus as lp
from laplace_plus.testing import PosteriorConformance


class TestExponentialMap(PosteriorConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.Riemannian(model, likelihood, n_samples=3, prior_precision=10.0, **options)


class TestLinearizedExponentialMap(PosteriorConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        method = lp.ExponentialMap(linearized=True, minibatch=12)
        return lp.Riemannian(model, likelihood, tangent="KFAC", method=method, n_samples=3, prior_precision=10.0)


class TestDiffusion(PosteriorConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        method = lp.Diffusion(n_steps=2)
        return lp.Riemannian(model, likelihood, tangent=lp.Diagonal, method=method, n_samples=3, **options)
