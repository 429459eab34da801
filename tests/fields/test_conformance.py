"""A spatial field passes the suite that every posterior passes, as far as it applies."""

from __future__ import annotations

import pytest
import torch

import laplace_plus as lp
from laplace_plus.testing import GaussianConformance


class TestSpatialField(GaussianConformance):
    """All tests but one: displacements are not among the model's parameters, and may be more than these."""

    structure = "diagonal"

    def make(self, model, likelihood, **options):
        box = [[-4.0] * 3, [4.0] * 3]
        return lp.SpatialField(model, likelihood, box=box, resolution=2, structure=self.structure, **options)

    def test_samples_have_the_parameters_shape(self):
        posterior, _, _ = self.fitted()
        samples = posterior.sample(4, generator=torch.Generator().manual_seed(0))
        assert samples.shape == (4, posterior.n_parameters) == (4, (27 + 1) * 3)
        assert posterior.parameter_names == ("displacement",) and torch.isfinite(samples).all()

    def test_tuning_raises_the_evidence(self):
        """It has no optimum in the prior precision, as the mean is the prior's: such tuners are refused."""
        posterior, _, data = self.fitted()
        values = torch.stack([posterior.log_marginal_likelihood(prior_precision=10.0**n) for n in range(-4, 9)])
        assert (values.diff() > 0).all()
        with pytest.raises(lp.errors.ConfigurationError, match="marginal_likelihood"):
            posterior.fit_prior_precision("marginal_likelihood")
        grid = [1e-4, 1e-2, 1.0]
        with pytest.warns(lp.errors.ConvergenceWarning):  # targets are random here
            posterior.fit_prior_precision("validation", data=data, grid=grid)
        value, losses = posterior.tuning.value, []
        for posterior.prior_precision in grid:
            losses.append(-sum(posterior.predictive(x).log_prob(y).sum() for x, y in data) / self.rows)
        assert value == pytest.approx(-float(min(losses)), rel=1e-9)


class TestBlocks(TestSpatialField):
    structure = "block"
