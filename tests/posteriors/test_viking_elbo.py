"""The divergence of VIKING's family from its prior, against dense Gaussians and closed forms."""

import pytest
import torch

from laplace_plus.posteriors.viking.elbo import ELBOTerms, prior_divergence

D = torch.float64


@pytest.mark.parametrize(("alpha", "image_std"), [(2.0, 0.3), (0.5, 1.7)])
def test_divergence_is_that_of_dense_gaussians(alpha, image_std):
    source = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(8, 3, generator=source, dtype=D))[0]
    P = torch.eye(8, dtype=D) - basis @ basis.T
    mean = torch.randn(8, generator=source, dtype=D)
    covariance = P / alpha + image_std**2 * (torch.eye(8, dtype=D) - P)
    q = torch.distributions.MultivariateNormal(mean, covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=D), torch.eye(8, dtype=D) / alpha)
    found = prior_divergence(mean.square().sum(), 3, alpha, image_std)
    assert abs(found - torch.distributions.kl_divergence(q, prior)) < 1e-8
    assert found >= 0


@pytest.mark.parametrize("rank", [0, 1, 40, 10**9])
def test_divergence_of_an_isotropic_posterior_knows_no_rank(rank):
    assert float(prior_divergence(torch.tensor(3.0), rank, 4.0, 0.5)) == 6.0


def test_divergence_is_stationary_where_it_should_be():
    distance, rank = torch.tensor(3.0, dtype=D), 5
    alpha = (rank / (distance + rank * 0.4**2)).requires_grad_()
    (slope,) = torch.autograd.grad(prior_divergence(distance, rank, alpha, 0.4), alpha)
    assert abs(slope) < 1e-12
    image = torch.tensor(4.0, dtype=D).rsqrt().requires_grad_()
    (slope,) = torch.autograd.grad(prior_divergence(distance, rank, 4.0, image), image)
    assert abs(slope) < 1e-12


def test_terms_add_up():
    assert ELBOTerms(3.0, 2.0, 1.0, 0.5, 4.0, 0.25).elbo == -3.5
