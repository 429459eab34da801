"""The sampled posterior passes the suite of all posteriors, with either solver."""

from __future__ import annotations

import laplace_plus as lp
from laplace_plus.testing import PosteriorConformance


class TestSampledLaplace(PosteriorConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.SampledLaplace(model, likelihood, **options)


class TestSampledLaplaceByDescent(PosteriorConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.SampledLaplace(model, likelihood, solver=lp.SGDSolver(epochs=3, tolerance=9.0), **options)
