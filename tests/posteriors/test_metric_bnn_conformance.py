"""MetricBNN, its explored points and their Gaussian pass what every posterior passes."""

import laplace_plus as lp
from laplace_plus.testing import PosteriorConformance

QUICK = {"n_particles": 3, "n_steps": 4, "n_refinements": 2}


class TestMetricBNN(PosteriorConformance):
    one_pass = False
    rows = 12

    def make(self, model, likelihood, **options):
        latent = lp.LatentModel(dimension=3, hidden=(8,), epochs=5, tolerance=10.0)
        return lp.MetricBNN(model, likelihood, latent=latent, **QUICK, **options)


class TestExploration(TestMetricBNN):
    def make(self, model, likelihood, **options):
        return lp.MetricBNN(model, likelihood, sampling="exploration", minibatch=5, **QUICK, **options)


class TestExploredGaussian(TestMetricBNN):
    def make(self, model, likelihood, **options):
        return lp.MetricBNN(model, likelihood, sampling="gaussian", **QUICK, **options)
