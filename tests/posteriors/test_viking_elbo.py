"""The divergence of the kernel/image family from its prior, against dense Gaussians and closed forms."""

import pytest
import torch

from laplace_plus.errors import NonFiniteError
from laplace_plus.posteriors.viking.elbo import (
    ELBOTerms,
    divergence_optimum,
    kernel_image_kl,
    terms_from_tensor,
    terms_to_tensor,
)

D = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def projector_of(rows):
    return torch.eye(rows.shape[1], dtype=D) - torch.linalg.pinv(rows) @ rows


def test_divergence_is_that_of_dense_gaussians():
    P = projector_of(torch.randn(3, 8, generator=generator(), dtype=D))
    mean = torch.randn(8, generator=generator(), dtype=D)
    for alpha, image, kernel in ((2.0, 0.3, None), (0.5, 1.7, None), (3.0, 0.2, 0.9)):
        covariance = (1 / alpha if kernel is None else kernel**2) * P + image**2 * (torch.eye(8, dtype=D) - P)
        q = torch.distributions.MultivariateNormal(mean, covariance)
        prior = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=D), torch.eye(8, dtype=D) / alpha)
        options = {} if kernel is None else {"kernel_std": kernel, "dimension": 8}
        found = kernel_image_kl(mean.square().sum(), 3, alpha, image, **options)
        assert abs(found - torch.distributions.kl_divergence(q, prior)) < 1e-8
        assert found >= 0
    with pytest.raises(ValueError, match="dimension"):
        kernel_image_kl(torch.tensor(1.0), 3, 1.0, 1.0, kernel_std=1.0)


@pytest.mark.parametrize("rank", [0, 1, 40, 10**9])
def test_divergence_of_an_isotropic_posterior_knows_no_rank(rank):
    assert float(kernel_image_kl(torch.tensor(3.0), rank, 4.0, 0.5)) == 6.0


def test_divergence_is_stationary_where_it_should_be():
    distance, rank = torch.tensor(3.0, dtype=D), 5
    alpha = divergence_optimum(distance, rank, 0.4).requires_grad_()
    (slope,) = torch.autograd.grad(kernel_image_kl(distance, rank, alpha, 0.4), alpha)
    assert abs(slope) < 1e-12
    image = torch.tensor(4.0, dtype=D).rsqrt().requires_grad_()
    (slope,) = torch.autograd.grad(kernel_image_kl(distance, rank, 4.0, image), image)
    assert abs(slope) < 1e-12


def test_terms_add_up_and_are_stored():
    terms = ELBOTerms(3.0, 2.0, 1.0, 0.5, 4.0, 0.25)
    assert terms.elbo == -3.5
    assert terms_from_tensor(terms_to_tensor([terms, terms])) == [terms, terms]
    assert terms_from_tensor(terms_to_tensor([])) == []
    assert terms.require_finite() is terms
    with pytest.raises(NonFiniteError, match="expected_nll=nan"):
        ELBOTerms(float("nan"), 2.0, 1.0, 0.5, 4.0, 1.0).require_finite()
