"""Our own posteriors pass the suite that third parties' must pass."""

from __future__ import annotations

import dataclasses
from inspect import signature

import pytest
import torch
from problems import FittedOnce
from torch import nn

import laplace_plus as lp
from laplace_plus.posteriors import storing
from laplace_plus.testing import GaussianConformance, PosteriorConformance


class TestFull(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.Full(model, likelihood, **options)


class TestKFAC(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.KFAC(model, likelihood, **options)


@pytest.mark.slow
class TestReduceKFAC(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.KFAC(model, likelihood, weight_sharing="reduce", **options)


class TestEKFAC(GaussianConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.KFAC(model, likelihood, eigenvalue_corrected=True, **options)


class TestDiagonal(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.Diagonal(model, likelihood, **options)


class TestLowRank(FittedOnce, GaussianConformance):
    """With as many eigenpairs as the curvature has."""

    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.LowRank(model, likelihood, rank=100, **options)


@pytest.mark.slow
class TestNystrom(FittedOnce, GaussianConformance):
    """With gradients that span all others."""

    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.LowRank(model, likelihood, rank=1000, basis="nystrom", **options)


@pytest.mark.slow
class TestLowRankHessian(FittedOnce, GaussianConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.LowRank(model, likelihood, rank=100, backend=lp.Native("hessian"), **options)


class TestLastLayer(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.Full(model, likelihood, parameters="last_layer", **options)


class TestMasked(GaussianConformance):
    def make(self, model, likelihood, **options):
        total = sum(p.numel() for p in model.parameters())
        return lp.KFAC(model, likelihood, parameters=torch.arange(total) % 3 == 0, **options)


class Jittered(lp.Posterior):
    """A third party's posterior: independent noise of a fixed size on every parameter."""

    default_method = "sampled"

    def fit_batches(self, data, *, progress, before=None):
        n_data = 0 if before is None else before.n_data
        for batch in self.batches(data, progress=progress, description="Jittered"):
            outputs = self.network.forward(batch.inputs)
            self.likelihood.validate(outputs, batch.target)
            n_data += outputs.shape[0]
        return lp.State(self.network.vector(), n_data, 0)

    def sample(self, n, *, generator=None):
        noise = torch.randn(n, self.n_parameters, dtype=self.mean.dtype, generator=generator).to(self.mean)
        return self.mean + noise / self.prior_precision.sqrt()


lp.register("Jittered", Jittered)


class TestThirdParty(PosteriorConformance):
    def make(self, model, likelihood, **options):
        return Jittered(model, likelihood, prior_precision=100.0, **options)


def test_a_mean_of_ones_own_moves_linearised_predictions():
    class Shifted(Jittered):
        def fit_batches(self, data, *, progress, before=None):
            state = super().fit_batches(data, progress=progress, before=before)
            return dataclasses.replace(state, mean=self.network.vector() + 0.3)

    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3).double()
    posterior = Shifted(model, "regression").fit([(x, torch.zeros(5, 2).double())])
    expected = model(x).detach() + 0.3 * (x.sum(-1, keepdim=True) + 1)  # linear in the weights
    torch.testing.assert_close(posterior.functional_posterior(x).mean, expected)
    torch.testing.assert_close(posterior.predictive(x, method="linearized").mean, expected)


def test_registered_names_are_found():
    assert lp.get_posterior("Jittered") is Jittered
    lp.register("Jittered", Jittered)  # twice is fine
    with pytest.raises(lp.errors.ConfigurationError, match="name of another"):
        lp.register("Jittered", lp.Full)
    with pytest.raises(lp.errors.ConfigurationError, match="Unknown posterior.*'Nobody'"):
        lp.get_posterior("Nobody")


def test_entry_points_are_found(monkeypatch):
    class FromElsewhere(Jittered):
        pass

    class Point:
        name = "FromElsewhere"

        def load(self):
            return FromElsewhere

    monkeypatch.setattr(storing, "entry_points", lambda group: [Point()] if group == storing.ENTRY_POINTS else [])
    assert lp.get_posterior("FromElsewhere") is FromElsewhere


def test_unregistered_classes_cannot_be_saved(tmp_path):
    class Nameless(Jittered):
        pass

    model = nn.Linear(2, 2)
    posterior = Nameless(model, "classification").fit([(torch.randn(3, 2), torch.tensor([0, 1, 1]))])
    with pytest.raises(lp.errors.ConfigurationError, match="register"):
        posterior.save(tmp_path / "nameless")


NAMES = [
    "Full",
    "KFAC",
    "Diagonal",
    "LowRank",
    "Subnetwork",
    "NullSpace",
    "VIKING",
    "Riemannian",
    "MetricBNN",
    "SampledLaplace",
    "ABNN",
    "VariationalLastLayer",
    "SWAG",
    "SpatialField",
]


@pytest.mark.parametrize("name", NAMES)
def test_constructors_list_their_arguments(name):
    parameters = signature(lp.get_posterior(name)).parameters
    assert not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())
    assert parameters.keys() >= signature(lp.Posterior).parameters.keys()
