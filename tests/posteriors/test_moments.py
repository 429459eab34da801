"""Densities of weights and numbers of effective parameters, against dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError


def fitted(cls, likelihood="classification", *, dtype=torch.float64, outputs=3, rows=20, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).to(dtype)
    x = torch.randn(rows, 3).to(dtype)
    y = torch.randn(rows, outputs).to(dtype) if likelihood == "regression" else torch.randint(0, outputs, (rows,))
    options = {"prior_precision": 0.7, "temperature": 1.5, **options}
    return cls(net, likelihood, **options).fit([(x, y)])


CASES = [
    (lp.Full, {}),
    (lp.Full, {"parameters": "last_layer", "rows": 5}),  # kept as its rows of data
    (lp.Full, {"likelihood": "regression"}),  # three noise levels
    (lp.Full, {"prior_precision": torch.linspace(0.1, 2.0, 45).double()}),
    (lp.KFAC, {}),
    (lp.KFAC, {"eigenvalue_corrected": True}),
    (lp.KFAC, {"likelihood": "regression", "prior_precision": torch.tensor([0.5, 3.0]).double()}),
    (lp.KFAC, {"parameters": "last_layer", "output_factor": "diagonal"}),
    (lp.Diagonal, {}),
    (lp.LowRank, {"rank": 7, "remainder_probes": 0}),
    (lp.LowRank, {"rank": 7, "remainder_probes": 0, "prior_precision": torch.tensor([0.5, 3.0]).double()}),
    (lp.Subnetwork, {"selector": lp.Random(11, seed=0)}),
]


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_the_density_is_that_of_the_dense_normal(cls, options):
    posterior = fitted(cls, **options)
    posterior.covariance_scale = 0.3
    theta = posterior.sample(4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    dense = MultivariateNormal(posterior.mean, posterior.covariance_matrix())
    found = posterior.log_prob(theta)
    assert_close(found, dense.log_prob(theta), rtol=1e-9, atol=1e-8)
    assert_close(posterior.log_prob(theta[0]), found[0])
    own, wanted = (torch.autograd.grad(value.sum(), theta)[0] for value in (found, dense.log_prob(theta)))
    assert_close(own, wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_effective_parameters_are_those_of_the_dense_matrices(cls, options):
    posterior = fitted(cls, **options)
    prior = torch.diag(posterior.prior().vector().double())
    wanted = torch.linalg.solve(posterior.precision_matrix(), posterior.precision_matrix() - prior).trace()
    assert_close(posterior.effective_dimension(), wanted, rtol=1e-8, atol=1e-8)
    posterior.covariance_scale = 0.01
    assert_close(posterior.effective_dimension(), wanted, rtol=1e-8, atol=1e-8)


def test_density_in_single_precision():
    posterior = fitted(lp.KFAC, dtype=torch.float32)
    theta = posterior.sample(3, generator=torch.Generator().manual_seed(0))
    dense = MultivariateNormal(posterior.mean.double(), posterior.covariance_matrix().double())
    assert_close(posterior.log_prob(theta), dense.log_prob(theta.double()), rtol=1e-4, atol=1e-3)


@pytest.mark.quick("KFAC")
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
def test_after_mackay_the_squared_weights_are_the_effective_parameters(cls):
    posterior = fitted(cls, "regression", temperature=1.0).fit_prior_precision("mackay", tolerance=1e-6)
    weighed = posterior.prior_precision * posterior.mean.square().sum()
    assert_close(weighed.double(), posterior.effective_dimension(), rtol=1e-5, atol=1e-5)


def test_a_summary_says_how_many_parameters_count():
    wide = fitted(lp.Full, prior_precision=1e6)
    assert f"{float(wide.effective_dimension()):.1f} effective parameters" in wide.summary().title
    assert "larger network" not in wide.summary().title
    assert "larger network" in fitted(lp.Full, "regression", prior_precision=1e-9, rows=200).summary().title
    indefinite = fitted(lp.Full, backend=lp.Native("hessian"), prior_precision=1e-6)
    assert "effective" not in indefinite.summary().title


def test_vectors_of_another_length_have_no_density():
    with pytest.raises(ConfigurationError, match="45"):
        fitted(lp.Full).log_prob(torch.zeros(44))
    with pytest.raises(ConfigurationError, match="45"):
        fitted(lp.Full).log_prob(torch.zeros(2, 3, 45))
