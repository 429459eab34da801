"""The linearised deep image prior against dense formulas, and against posteriors of the measurements."""

from __future__ import annotations

import math

import pytest
import scipy.sparse
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.applications.reconstruction import ImagePosterior
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    ModelChangedError,
    NonFiniteError,
    NotFittedError,
    NotPositiveDefiniteError,
    SelectionError,
)

DOUBLE = {"dtype": torch.float64}
PRIOR = torch.tensor([0.5, 1.0, 2.0])


class Net(nn.Module):
    """Convolutions, a transposed one and a skip of 1 × 1; a sigmoid at the end."""

    def __init__(self):
        super().__init__()
        self.down, self.skip = nn.Conv2d(1, 4, 3, 2, 1), nn.Conv2d(1, 2, 1)
        self.up = nn.ConvTranspose2d(4, 2, 2, 2)
        self.dropout = nn.Dropout()

    def forward(self, z):
        return (self.up(self.dropout(torch.tanh(self.down(z)))) + self.skip(z)).sum(1, keepdim=True).sigmoid()


class Measured(nn.Module):
    def __init__(self, net, matrix):
        super().__init__()
        self.net, self.matrix = net, matrix

    def forward(self, z):
        return self.net(z).flatten(1) @ self.matrix.mT


def problem(size=6, n=14, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    net = Net().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    z, matrix = (torch.randn(*shape, generator=generator, **DOUBLE) for shape in ((1, 1, size, size), (n, size**2)))
    y = matrix @ torch.rand(size**2, generator=generator, **DOUBLE) + 0.3 * torch.randn(
        n, generator=generator, **DOUBLE
    )
    return net, z.to(dtype), matrix, y


def fitted(prior=PRIOR, noise_std=0.3):
    net, z, matrix, y = problem()
    return ImagePosterior(net, matrix, noise_std=noise_std, prior_variance=prior).fit(z, y)


def dense(posterior, net, z, matrix, y):
    """Mean, prior covariance K of the image, S and the prior's variances ``[P]``, from the definitions."""
    values = {name: p.detach() for name, p in net.named_parameters()}
    found = torch.func.jacrev(lambda own: torch.func.functional_call(net.eval(), own, (z,)).flatten())(values)
    jacobian = torch.cat([found[name].flatten(1) for name in values], 1)
    each = dict(zip(posterior.blocks, torch.as_tensor(posterior.prior_variance).double().expand(3), strict=True))
    variances = torch.cat([each[name.split(".")[0]].expand(p.numel()) for name, p in net.named_parameters()])
    prior = jacobian * variances @ jacobian.mT
    total = matrix @ prior @ matrix.mT + float(posterior.noise_std) ** 2 * torch.eye(len(y), **DOUBLE)
    return net(z).detach().flatten(), prior, total, variances


def conditional(prior, total, matrix):
    return prior - prior @ matrix.mT @ torch.linalg.solve(total, matrix @ prior)


# -- against dense formulas --------------------------------------------------------------------------------------------


def test_evidence_is_the_dense_one():
    net, z, matrix, y = problem()
    posterior = fitted()
    mean, _, total, variances = dense(posterior, net, z, matrix, y)
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    misfit = (y - matrix @ mean).square().sum() / 0.09 + (weights.square() / variances).sum()
    expected = -(torch.logdet(total) + misfit + len(y) * math.log(2 * math.pi)) / 2
    torch.testing.assert_close(posterior.log_marginal_likelihood(), expected, rtol=1e-9, atol=0)
    before = float(expected)
    assert float(posterior.fit_prior().log_marginal_likelihood()) > before


def test_posterior_covariance_is_the_conditional_one():
    posterior = fitted()
    mean, prior, total, *_ = dense(posterior, *problem())
    expected = conditional(prior, total, problem()[2])
    torch.testing.assert_close(posterior.image.flatten(), mean)
    torch.testing.assert_close(posterior.covariance(), expected, rtol=0, atol=1e-8 * float(expected.abs().max()))
    torch.testing.assert_close(posterior.variance().flatten(), expected.diagonal(), rtol=1e-8, atol=1e-12)
    assert posterior.variance().shape == posterior.image.shape == (1, 6, 6)


def test_variances_in_parts_are_the_same(monkeypatch):
    monkeypatch.setattr("laplace_plus.applications.reconstruction.image_posterior._ENTRIES", 1)
    posterior = fitted()
    torch.testing.assert_close(posterior.variance().flatten(), posterior.covariance().diagonal())


@pytest.mark.parametrize("patch", [None, 1, 4, 6, 9])
def test_log_probabilities(patch):
    posterior = fitted()
    image = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(3))
    covariance = posterior.covariance() + 0.01 * torch.eye(36, **DOUBLE)
    size = 6 if patch is None else patch
    row, column = torch.arange(36) // 6 // size, torch.arange(36) % 6 // size
    expected = 0.0
    for number in (10 * row + column).unique():
        own = 10 * row + column == number
        normal = torch.distributions.MultivariateNormal(posterior.image.flatten()[own], covariance[own][:, own])
        expected += float(normal.log_prob(image.flatten()[own].double())) / 36
    assert math.isclose(float(posterior.log_prob(image, patch=patch, extra_variance=0.01)), expected, rel_tol=1e-9)


def test_samples_have_the_posteriors_moments():
    posterior, n = fitted(), 20_000
    drawn = posterior.sample(n, generator=torch.Generator().manual_seed(0)).flatten(1)
    covariance = posterior.covariance()
    assert ((drawn.mean(0) - posterior.image.flatten()) / (covariance.diagonal() / n).sqrt()).abs().max() < 4
    error = (covariance.diagonal().outer(covariance.diagonal()) + covariance.square()) / n
    assert ((torch.cov(drawn.mT) - covariance) / error.sqrt()).abs().max() < 4.5  # of 666 entries
    again = [posterior.sample(2, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*again) and again[0].shape == (2, 1, 6, 6)


# -- against posteriors of the measurements ----------------------------------------------------------------------------


def test_scalar_priors_give_the_posterior_of_the_measurements():
    net, z, matrix, y = problem()
    ours = ImagePosterior(net, matrix, noise_std=0.3, prior_variance=0.4).fit(z, y)
    theirs = lp.Full(Measured(net, matrix), lp.Gaussian(0.3), prior_precision=2.5).fit([(z, y[None])])
    view = lp.through(theirs, lambda z: net(z).flatten(1), "regression")
    expected = view.functional_posterior(z).covariance[0]
    torch.testing.assert_close(ours.covariance(), expected, rtol=0, atol=1e-8 * float(expected.abs().max()))


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def test_derivatives_of_the_evidence():
    posterior = fitted()
    inputs = [torch.tensor(v, requires_grad=True, **DOUBLE) for v in ([0.5, 1.0, 2.0], 0.3)]
    assert torch.autograd.gradcheck(posterior.log_marginal_likelihood, inputs)


def test_tuning_ends_at_a_maximum():
    posterior = fitted()
    before = float(posterior.log_marginal_likelihood())
    posterior.fit_prior(min_variance=1e-6, tolerance=1e-3)
    best, variance = float(posterior.log_marginal_likelihood()), posterior.prior_variance
    assert best > before + 0.1
    for factor in (0.9, 1.1):
        assert float(posterior.log_marginal_likelihood(None, posterior.noise_std * factor)) <= best + 1e-4
        for block in range(3):
            moved = variance.clone()
            moved[block] = max(1e-6, float(variance[block]) * factor)
            assert float(posterior.log_marginal_likelihood(moved)) <= best + 1e-4


def test_tuning_keeps_what_it_is_asked_to():
    posterior = fitted(1.0).fit_prior(tune_noise=False, min_variance=0.2)
    assert float(posterior.noise_std) == 0.3
    assert posterior.prior_variance.min() >= 0.2 * (1 - 1e-12)
    with pytest.warns(ConvergenceWarning, match="raise max_steps"):
        fitted().fit_prior(max_steps=1, tolerance=1e-6)


# -- networks, operators and types -------------------------------------------------------------------------------------


def operators(matrix):
    yield matrix.float()
    yield matrix.to_sparse()
    yield scipy.sparse.csr_array(matrix.numpy())
    yield matrix.numpy()
    yield lp.linalg.as_operator(lambda v: v @ matrix.mT, tuple(matrix.shape), dtype=torch.float64)
    yield lambda images: images.flatten(1) @ matrix.to(images).mT


def test_all_forms_of_an_operator_agree():
    net, z, matrix, y = problem()
    found = [ImagePosterior(net, one, prior_variance=PRIOR).fit(z, y).variance() for one in operators(matrix)]
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_other_types(dtype, tolerance):
    exact, (net, z, matrix, y) = fitted(), problem(dtype=dtype)
    posterior = ImagePosterior(net, matrix, noise_std=0.3, prior_variance=PRIOR).fit(z, y)
    assert posterior.image.dtype == torch.float32 and posterior.variance().dtype == torch.float64
    torch.testing.assert_close(posterior.variance(), exact.variance(), rtol=tolerance, atol=0)
    torch.testing.assert_close(
        posterior.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=tolerance, atol=0
    )
    assert posterior.sample(2).dtype == torch.float32


def test_little_noise_is_no_problem_in_float32():
    net, z, matrix, y = problem(n=60, dtype=torch.float32)  # more measurements than pixels
    posterior = ImagePosterior(net, matrix, noise_std=1e-3, prior_variance=PRIOR).fit(z, y)
    assert torch.isfinite(posterior.log_marginal_likelihood()) and (posterior.variance() > 0).all()


def test_the_network_stays_as_it_is():
    net, z, matrix, y = problem()
    net.train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    posterior = ImagePosterior(net, matrix, prior_variance=PRIOR).fit(z, y).fit_prior()
    posterior.sample(1)
    assert net.training and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert torch.equal(
        posterior.variance(),
        ImagePosterior(net.eval(), matrix, noise_std=posterior.noise_std, prior_variance=posterior.prior_variance)
        .fit(z, y)
        .variance(),
    )
    with pytest.raises(ConfigurationError):
        ImagePosterior(net.train(), matrix[:, :4]).fit(z, y)
    assert net.training


def test_frozen_and_selected_parameters():
    net, z, matrix, y = problem()
    net.up.requires_grad_(False)
    frozen = ImagePosterior(net, matrix).fit(z, y)
    net.up.requires_grad_(True)
    selected = ImagePosterior(net, matrix, parameters=["down", "skip"]).fit(z, y)
    assert frozen.blocks == selected.blocks == ("down", "skip")
    assert torch.equal(frozen.variance(), selected.variance())


def test_a_linear_last_layer_behind_an_operator():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3, padding=1)).double()
    _, z, matrix, y = problem()
    options = {"prior_variance": 0.8, "parameters": ["2"], "blocks": lambda _: "all"}
    posterior = ImagePosterior(net, matrix, **options).fit(z, y)
    values = nn.functional.unfold(net[:2](z).detach(), 3, padding=1)[0].mT  # [36, 27]
    rows = torch.cat([values, torch.ones(36, 1, **DOUBLE)], 1)
    prior = 0.8 * rows @ rows.mT
    total = matrix @ prior @ matrix.mT + torch.eye(14, **DOUBLE)
    torch.testing.assert_close(posterior.covariance(), conditional(prior, total, matrix))


# -- errors ------------------------------------------------------------------------------------------------------------


def test_before_the_fit_and_after_a_change():
    net, z, matrix, y = problem()
    posterior = ImagePosterior(net, matrix)
    for call in (
        posterior.variance,
        posterior.covariance,
        posterior.fit_prior,
        posterior.log_marginal_likelihood,
        lambda: posterior.sample(1),
    ):
        with pytest.raises(NotFittedError):
            call()
    posterior.fit(z, y)
    with torch.no_grad():
        net.up.weight[0, 0, 0, 0] += 1.0
    with pytest.raises(ModelChangedError):
        posterior.variance()
    posterior.fit(z, y).variance()


@pytest.mark.parametrize(
    ("operator", "error"),
    [
        (torch.zeros(5, 7), ConfigurationError),
        (torch.zeros(36), ConfigurationError),
        (torch.full((14, 36), float("nan")), NonFiniteError),
    ],
)
def test_bad_operators(operator, error):
    net, z, _, y = problem()
    with pytest.raises(error):
        ImagePosterior(net, operator).fit(z, y)


def test_bad_data():
    net, z, matrix, y = problem()
    posterior = ImagePosterior(net, matrix)
    with pytest.raises(ConfigurationError, match="14"):
        posterior.fit(z, y[:5])
    with pytest.raises(DataError, match="one image"):
        posterior.fit(z.expand(2, -1, -1, -1), y)
    with pytest.raises(NonFiniteError, match="measurement"):
        posterior.fit(z, y * float("inf"))
    posterior.fit(z, y)
    with pytest.raises(ConfigurationError, match="another shape"):
        posterior.log_prob(torch.zeros(6, 6))
    with pytest.raises(NotPositiveDefiniteError, match="extra_variance"):
        posterior.log_prob(torch.zeros(1, 6, 6), extra_variance=-10.0)


def test_bad_arguments():
    posterior = fitted()
    for noise in (0.0, -1.0, [1.0, 2.0]):
        with pytest.raises(ConfigurationError, match="noise_std"):
            posterior.log_marginal_likelihood(noise_std=noise)
    with pytest.raises(ConfigurationError, match="generator"):
        posterior.sample(1, generator=3)
    for wrong in ({"max_steps": 0}, {"tolerance": -1.0}, {"min_variance": 0.0}):
        with pytest.raises(ConfigurationError):
            posterior.fit_prior(**wrong)
    with pytest.raises(ConfigurationError, match="patch"):
        posterior.log_prob(torch.zeros(1, 6, 6), patch=0)
    with pytest.raises(SelectionError):
        ImagePosterior(Net(), torch.eye(36), parameters=["nothing"])
    for variance in (0.0, [1.0, -1.0, 1.0], [1.0, 2.0], float("nan")):
        with pytest.raises(ConfigurationError, match="prior_variance"):
            ImagePosterior(Net(), torch.eye(36), prior_variance=variance)
    assert float(posterior.noise_std) == 0.3 and posterior.prior_variance is PRIOR  # a failure changes nothing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_another_device():
    net, z, matrix, y = problem()
    posterior = ImagePosterior(net.cuda(), matrix, noise_std=0.3, prior_variance=PRIOR).fit(z, y)
    torch.testing.assert_close(posterior.variance().cpu(), fitted().variance())
    posterior.fit_prior()
    assert posterior.sample(1, generator=torch.Generator().manual_seed(0)).is_cuda
