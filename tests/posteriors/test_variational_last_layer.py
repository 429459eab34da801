"""The variational last layer: closed forms in regression, bounds of the evidence for classes, and what it refuses."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy
import torch
from problems import generator
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, DataError, ModelChangedError, UnsupportedError
from laplace_plus.posteriors.variational_last_layer.bounds import Gaussians, expected_log_density
from laplace_plus.testing import PosteriorConformance


class TestVariationalLastLayer(PosteriorConformance):
    def make(self, model, likelihood, **options):
        return lp.VariationalLastLayer(model, likelihood, **options)


class TestStudentT(TestVariationalLastLayer):
    def make(self, model, likelihood, **options):
        noise = {"noise": "student_t"} if likelihood == "regression" else {}
        return lp.VariationalLastLayer(model, likelihood, **noise, **options)

    def test_regression_variance_holds_the_noise(self):
        model, data = self.regression()
        prediction = self.make(model, "regression").fit(data).predictive(data[0][0])
        assert_close(prediction.variance, prediction.epistemic + prediction.aleatoric)
        assert_close(prediction.variance, prediction.distribution.variance)
        assert (prediction.aleatoric > 0.01).all()


def network(outputs, features=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, features), nn.Tanh(), nn.Linear(features, outputs)).double()


def inputs(n, seed=1):
    return torch.randn(n, 3, generator=generator(seed), dtype=torch.float64)


def regression(outputs=1, n=40, noise=0.3):
    x = inputs(n)
    y = torch.stack([(x[:, 0] * (k + 1)).sin() + x[:, 1] for k in range(outputs)], 1)
    y = y + noise * torch.randn(y.shape, generator=generator(2), dtype=torch.float64)
    return network(outputs), [(x[:15], y[:15]), (x[15:], y[15:])]


def classes(n=30, outputs=3):
    x = inputs(n)
    y = (x[:, 0] > 0).long() + (outputs > 2) * (x[:, 1] > 0.3).long()
    net = network(outputs)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net, [(x[:13], y[:13]), (x[13:], y[13:])]


def features_of(net, x):
    with torch.no_grad():
        return torch.cat([net[:-1](x), torch.ones(len(x), 1, dtype=x.dtype)], 1)


def at_mean(posterior, net):
    """The network with the posterior's mean as its last layer."""
    moved = copy.deepcopy(net)
    nn.utils.vector_to_parameters(posterior.mean, moved[-1].parameters())
    return moved


# -- regression --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outputs", "temperature"), [(1, 1.0), (2, 1.0), (2, 2.5)])
def test_regression_is_the_full_last_layer_at_its_own_optimum(outputs, temperature):
    net, data = regression(outputs)
    noise = torch.tensor([0.2, 0.5], dtype=torch.float64)[:outputs]
    options = {"prior_precision": 1.7, "prior_mean": 0.1, "temperature": temperature}
    own = lp.VariationalLastLayer(net, lp.Gaussian(noise), mean="optimal", **options).fit(data)
    full = lp.Full(at_mean(own, net), lp.Gaussian(noise), parameters="last_layer", **options).fit(data)
    assert_close(own.elbo(), full.log_marginal_likelihood(), rtol=1e-8, atol=1e-8)
    for joint in (False, True):
        ours, theirs = (p.functional_posterior(inputs(5, 9), joint=joint) for p in (own, full))
        assert_close(ours.mean, theirs.mean, rtol=1e-8, atol=1e-8)
        assert_close(ours.covariance, theirs.covariance, rtol=1e-8, atol=1e-10)
    slope = torch.autograd.grad(  # the mean is the mode: the trained weights of full are a maximum of the posterior
        sum(lp.Gaussian(noise).log_density(full.network.model(x), y).sum() for x, y in data) / temperature,
        list(full.network.model[-1].parameters()),
    )
    away = (own.mean - 0.1) * 1.7
    assert_close(torch.cat([part.flatten() for part in slope]), away, rtol=1e-6, atol=1e-7)


def test_regression_at_the_trained_weights_is_the_full_last_layer():
    net, data = regression(2)
    own = lp.VariationalLastLayer(net, "regression", prior_precision=0.6).fit(data)
    full = lp.Full(net, "regression", parameters="last_layer", prior_precision=0.6).fit(data)
    for _ in range(2):
        assert_close(own.elbo(), full.log_marginal_likelihood(), rtol=1e-8, atol=1e-8)
        assert torch.equal(own.mean, full.mean)
        ours, theirs = (p.functional_posterior(inputs(5, 9)) for p in (own, full))
        assert_close(ours.mean, theirs.mean)
        assert_close(ours.covariance, theirs.covariance, rtol=1e-8, atol=1e-12)
        own.prior_precision = full.prior_precision = 3.0
        own.noise_std = full.noise_std = torch.tensor([0.3, 0.7], dtype=torch.float64)
    tuned = full.fit_prior_precision(lp.MarginalLikelihood(tolerance=1e-8)).tuning
    assert own.fit_prior_precision().tuning.value == pytest.approx(tuned.value, abs=1e-6)
    assert_close(own.noise_std, full.noise_std, rtol=1e-4, atol=0)


def test_the_trained_weights_stay_the_mean_unless_another_is_asked_for():
    net, data = classes()
    kept, moved = (lp.VariationalLastLayer(net, "classification", mean=m) for m in ("trained", "optimal"))
    kept, moved = (one.fit(data).fit_prior_precision() for one in (kept, moved))
    assert torch.equal(kept.mean, kept.network.vector()) and not torch.equal(moved.mean, kept.mean)
    assert kept.tuning.value < moved.tuning.value
    x = data[0][0]
    assert_close(kept.functional_posterior(x).mean, net(x).detach())


def test_hyperparameters_of_regression_take_effect_at_once():
    net, data = regression(2)
    own = lp.VariationalLastLayer(net, "regression").fit(data)
    assert own.noise_std.shape == (2,)
    own.prior_precision, own.noise_std = 3.0, 0.4
    again = lp.VariationalLastLayer(net, lp.Gaussian(torch.tensor([0.4, 0.4])), prior_precision=3.0).fit(data)
    assert_close(own.mean, again.mean)
    assert_close(own.elbo(), again.elbo())
    assert_close(own.predictive(inputs(3)).variance, again.predictive(inputs(3)).variance)


@pytest.mark.parametrize("noise", ["gaussian", "student_t"])
def test_tuning_of_regression_ends_at_a_maximum_of_the_evidence(noise):
    net, data = regression(2)
    own = lp.VariationalLastLayer(net, "regression", noise=noise).fit(data)
    before = own.elbo()
    own.fit_prior_precision()
    best = own.elbo()
    assert own.tuning.converged and best > before and float(best) == pytest.approx(own.tuning.value, abs=1e-9)
    alpha, levels = own.prior_precision.clone(), own.noise_std.clone()
    for factor in (0.95, 1.05):
        own.prior_precision = alpha * factor
        assert own.elbo() < best
        own.prior_precision = alpha
        for k in range(2):
            own.noise_std = levels * torch.where(torch.arange(2) == k, factor, 1.0)
            assert own.elbo() < best
        own.noise_std = levels
    fixed = lp.VariationalLastLayer(net, lp.Gaussian(0.3), noise=noise).fit(data).fit_prior_precision(tune_noise=False)
    assert float(fixed.noise_std) == 0.3 and fixed.tuning.converged


def student_integrals(net, data, y, phi, alpha, shape, scale):
    """By quadrature over log σ²: the evidence, and the density of one more target y at features phi."""
    x, targets = (torch.cat(part) for part in zip(*data, strict=True))
    design, prior = features_of(net, x).numpy(), scipy.stats.invgamma(shape, scale=shape * scale**2)
    grid = np.linspace(-8, 4, 1201)
    logs = []
    for more in (False, True):
        rows = np.vstack([design, phi]) if more else design
        values = np.concatenate([targets[:, 0].numpy(), [y]]) if more else targets[:, 0].numpy()
        gram = np.eye(len(rows)) + rows @ rows.T / alpha  # covariance of the targets in units of σ²
        square, determinant = values @ np.linalg.solve(gram, values), np.linalg.slogdet(gram)[1]
        inside = -len(rows) / 2 * (math.log(2 * math.pi) + grid) - determinant / 2 - square * np.exp(-grid) / 2
        inside = inside + prior.logpdf(np.exp(grid)) + grid
        logs.append(scipy.special.logsumexp(inside) + math.log(grid[1] - grid[0]))
    return logs[0], logs[1] - logs[0]


def test_student_t_noise_is_that_of_numerical_integration():
    net, data = regression(n=12)
    own = lp.VariationalLastLayer(
        net, lp.Gaussian(0.4), mean="optimal", noise="student_t", noise_shape=1.5, prior_precision=0.8
    ).fit(data)
    x, y = inputs(1, 7), torch.tensor([[0.9]], dtype=torch.float64)
    evidence, density = student_integrals(net, data, 0.9, features_of(net, x).numpy(), 0.8, 1.5, 0.4)
    assert float(own.elbo()) == pytest.approx(evidence, abs=1e-7)
    prediction = own.predictive(x)
    assert float(prediction.log_prob(y)) == pytest.approx(density, abs=1e-7)
    line = torch.linspace(-60, 60, 200_001, dtype=torch.float64)
    total = torch.trapezoid(prediction.distribution.log_prob(line[:, None, None]).exp()[:, 0, 0], line)
    assert float(total) == pytest.approx(1, abs=1e-6)
    low, high = prediction.interval(0.9)
    assert_close(prediction.distribution.log_prob(low), prediction.distribution.log_prob(high))
    freedom, middle = 2 * 1.5 + 12, (high - prediction.mean) / prediction.distribution.scale
    assert float(middle) == pytest.approx(scipy.stats.t(freedom).ppf(0.95), abs=1e-9)
    loader = own.predict([(x, y), (x, y)])
    assert_close(loader.log_prob(torch.cat([y, y])), prediction.log_prob(y).expand(2))
    with pytest.raises(UnsupportedError, match="joint"):
        _ = own.predictive(inputs(2), joint=True).log_prob(y.expand(2, 1))


def test_student_t_predictions_tend_to_normal_ones():
    net, data = regression(n=4000)
    own = lp.VariationalLastLayer(net, lp.Gaussian(0.3), noise="student_t").fit(data)
    x = inputs(4, 7)
    prediction = own.predictive(x)
    like = Normal(prediction.mean, prediction.std)
    for shift in (0.0, 1.0, 2.0):
        at = prediction.mean + shift * prediction.std
        assert_close(prediction.distribution.log_prob(at), like.log_prob(at), atol=2e-3, rtol=0)


@pytest.mark.parametrize("noise", ["gaussian", "student_t"])
def test_samples_have_the_covariance(noise):
    net, data = regression(2, n=8)
    own = lp.VariationalLastLayer(net, "regression", noise=noise, noise_shape=4.0).fit(data)
    x, n = inputs(2, 5), 300
    weights = own.sample(n, generator=generator())
    assert weights.shape == (n, own.n_parameters)
    outputs = torch.stack(own.network.several(x, weights))
    expected = own.functional_posterior(x)
    error = expected.covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((outputs.mean(0) - expected.mean).abs() < 4 * error / n**0.5).all()
    ratio = outputs.var(0) / error.square()
    assert ((ratio - 1).abs() < 5 * (4 / n) ** 0.5).all()  # a Student-t's fourth moments are up to twice a normal's


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_divergence_is_that_of_torch():
    net, data = classes()
    own = lp.VariationalLastLayer(net, "classification", prior_precision=2.0, prior_mean=0.3, bound="jensen").fit(data)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    mean, covariance = own.functional_posterior(x)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    expected = expected_log_density(lp.Categorical(), "jensen", mean, variance, y).sum()
    total = 0.0
    for m, root in zip(own.q.mean, own.q.root, strict=True):
        q = MultivariateNormal(m, root @ root.T)
        prior = MultivariateNormal(torch.full_like(m, 0.3), torch.eye(len(m), dtype=m.dtype) / 2)
        total += kl_divergence(q, prior)
    assert_close(own.elbo(), expected - total, rtol=1e-9, atol=1e-9)


def test_bounds_are_in_order_and_below_the_evidence():
    """Jensen <= reduced Knowles–Minka's, in their own optima; both, and q's true bound, <= log evidence."""
    net, data = classes(n=20, outputs=2)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    values, fitted = {}, {}
    for bound in ("jensen", "reduced_kn", "mc"):
        own = lp.VariationalLastLayer(
            net, "classification", mean="optimal", bound=bound, prior_precision=1.5, n_samples=40
        )
        fitted[bound] = own.fit(data, generator=generator())
        values[bound] = float(fitted[bound].elbo())
    phi = features_of(net, x)
    q, index = fitted["mc"], fitted["mc"].state.index
    n = 20_000
    theta = q.sample(n, generator=generator(3))
    logits = torch.einsum("nd,scd->snc", phi, theta[:, index])
    likelihood = logits.log_softmax(-1).gather(-1, y.expand(n, -1)[..., None])[..., 0].sum(-1)
    prior = Normal(0.0, 1.5**-0.5).log_prob(theta).sum(-1)
    log_q = torch.zeros(n, dtype=torch.float64)
    for row, m, root in zip(index, q.q.mean, q.q.root, strict=True):
        log_q += MultivariateNormal(m, root @ root.T).log_prob(theta[:, row])
    ratios = likelihood + prior - log_q
    evidence = ratios.logsumexp(0) - math.log(n)
    error = (ratios - evidence).exp().std() / n**0.5
    assert error < 0.05
    true, spread = float(ratios.mean()), float(ratios.std()) / n**0.5  # q's own bound, unbiased
    assert values["jensen"] < values["reduced_kn"] < float(evidence) + 3 * float(error)
    assert true <= float(evidence) + 3 * float(error)
    assert values["reduced_kn"] <= true + 3 * spread + 1e-6 * abs(true) + 0.05  # q maximises the bound with other noise
    assert abs(values["mc"] - true) < 0.5


@pytest.mark.quick("dense-jensen", "diagonal-reduced_kn", "diagonal-mc")
@pytest.mark.parametrize(
    ("covariance", "bound"), [("dense", "jensen"), ("diagonal", "reduced_kn"), ("dense", "mc"), ("diagonal", "mc")]
)
def test_the_bound_is_never_below_its_start(covariance, bound):
    net, data = classes()
    options = {"mean": "optimal", "covariance": covariance, "bound": bound, "n_samples": 4, "prior_precision": 0.7}
    short = lp.VariationalLastLayer(net, "classification", max_iterations=1, **options)
    with pytest.warns(ConvergenceWarning):
        short.fit(data, generator=generator())
    full = lp.VariationalLastLayer(net, "classification", **options).fit(data, generator=generator())
    x = torch.cat([x for x, _ in data])
    y, phi, p = torch.cat([y for _, y in data]), features_of(net, x), net(x).detach().softmax(-1)
    curvature = torch.einsum("nc,nd,ne->cde", p * (1 - p), phi, phi) + 0.7 * torch.eye(7, dtype=phi.dtype)
    start = Gaussians.laplace(
        net[-1].weight.detach().new_tensor(torch.cat([net[-1].weight, net[-1].bias[:, None]], 1).tolist()),
        (curvature if covariance == "dense" else curvature.diagonal(dim1=-2, dim2=-1)),
        torch.zeros((), dtype=phi.dtype),
    )
    if bound != "mc":
        variance = start.pushed(phi).square().sum(-1).mT
        value = expected_log_density(lp.Categorical(), bound, phi @ start.mean.mT, variance, y).sum()
        scatter = 0.7 * (start.mean.square().sum() + start.root.square().sum())
        value = value - (scatter - 21 - 21 * math.log(0.7) - start.log_determinant()) / 2
        assert short.elbo() >= value - 1e-9
    assert full.elbo() >= short.elbo() - 1e-9 and full.q.mean.shape == (3, 7)
    before = full.elbo()
    full.fit_prior_precision()
    assert full.elbo() >= before and float(full.elbo()) == pytest.approx(full.tuning.value, abs=1e-8)
    assert float(full.prior_precision) == pytest.approx(21 / float(full.q.scatter(torch.zeros(3, 7))), rel=1e-9)


def test_the_search_ends_where_nothing_more_is_to_gain():
    """The optimum's covariance is (Σ λ φφᵀ + α I)⁻¹ with λ = −2 ∂E/∂v, and its mean has no slope."""
    net, data = classes()
    own = lp.VariationalLastLayer(net, "classification", mean="optimal", bound="reduced_kn").fit(data)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    phi, q = features_of(net, x), own.q
    mean = (phi @ q.mean.mT).requires_grad_()
    variance = (phi @ q.root).square().sum(-1).mT.clone().requires_grad_()
    total = expected_log_density(lp.Categorical(), "reduced_kn", mean, variance, y).sum()
    by_mean, by_variance = torch.autograd.grad(total, (mean, variance))
    precision = torch.einsum("nc,nd,ne->cde", -2 * by_variance, phi, phi) + torch.eye(7, dtype=phi.dtype)
    assert_close(q.root @ q.root.mT, torch.linalg.inv(precision), rtol=1e-3, atol=1e-4)
    assert_close(by_mean.mT @ phi, q.mean, rtol=1e-3, atol=1e-3)


def test_noise_that_the_network_predicts():
    x = inputs(60)
    y = x[:, :1].sin() + (0.1 + 0.5 * (x[:, 1:2] > 0)) * torch.randn(60, 1, generator=generator(), dtype=torch.float64)
    net, likelihood = network(2), lp.HeteroscedasticGaussian()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        (-likelihood.log_density(net(x), y).mean()).backward()
        optimizer.step()
    own = lp.VariationalLastLayer(net, likelihood).fit([(x, y)]).fit_prior_precision()
    assert own.tuning.converged
    prediction = own.predictive(x)
    quiet, loud = (prediction.aleatoric[x[:, 1] * sign > 0].mean() for sign in (-1, 1))
    assert loud > 3 * quiet and prediction.log_prob(y).mean() > -0.6


@pytest.mark.parametrize("likelihood", [lp.Bernoulli(), lp.Poisson()])
def test_other_likelihoods_are_bounded_by_quadrature(likelihood):
    x = inputs(40)
    y = (x[:, :2] > 0).double()
    own = lp.VariationalLastLayer(network(2), likelihood).fit([(x, y)])
    before = own.elbo()
    assert own.fit_prior_precision().elbo() > before and own.predictive(x).log_prob(y).isfinite().all()


def test_known_noise_of_each_target_is_exact():
    x = inputs(30)
    noise = 0.2 + torch.rand(30, 1, generator=generator(), dtype=torch.float64)
    y = x[:, :1].sin() + noise * torch.randn(30, 1, generator=generator(1), dtype=torch.float64)
    net = network(1)
    own = lp.VariationalLastLayer(net, lp.GivenNoise(0.3), mean="optimal", prior_precision=1.3).fit([(x, (y, noise))])
    phi = features_of(net, x)
    precision = (phi / noise.square()).mT @ phi + 1.3 * torch.eye(7, dtype=phi.dtype)
    assert_close(own.mean, torch.linalg.solve(precision, (phi / noise.square()).mT @ y)[:, 0], rtol=1e-4, atol=1e-5)
    covariance = torch.diag(noise[:, 0].square()) + phi @ phi.mT / 1.3
    evidence = MultivariateNormal(torch.zeros(30, dtype=phi.dtype), covariance).log_prob(y[:, 0])
    assert float(own.elbo()) == pytest.approx(float(evidence), abs=1e-5)


# -- data and networks -------------------------------------------------------------------------------------------------


def test_ignored_labels_and_positions():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    tokens = torch.randint(0, 9, (8, 4), generator=generator())
    y = (tokens % 3).clone()
    y[:, 3] = -100
    own = lp.VariationalLastLayer(net, "classification").fit([(tokens, y)])
    rows = lp.VariationalLastLayer(net, "classification").fit([(tokens[:, :3].flatten(), y[:, :3].flatten())])
    assert own.n_data == 8
    assert_close(own.mean, rows.mean, rtol=1e-4, atol=1e-5)
    assert own.predictive(tokens).mean.shape == (8, 4, 3)
    ours = own.functional_posterior(tokens, joint=True).covariance
    assert_close(
        ours.diagonal(dim1=0, dim2=3).permute(4, 0, 1, 2, 3)[:, 0, :, 0],
        ours[torch.arange(8), 0, :, torch.arange(8), 0],
    )


def test_chosen_outputs_and_gradients_in_x():
    net, data = classes()
    own = lp.VariationalLastLayer(net, "classification").fit(data)
    x = data[0][0][:4]
    mean, covariance = own.functional_posterior(x)
    some = own.functional_posterior(x, outputs=[2, 0])
    assert_close(some.mean, mean[:, [2, 0]])
    assert_close(some.covariance, covariance[:, [2, 0]][..., [2, 0]])
    assert_close(own.functional_posterior(x, outputs="diagonal").covariance, covariance.diagonal(dim1=-2, dim2=-1))
    with pytest.raises(ConfigurationError):
        own.functional_posterior(x, outputs="all")

    def variance(x):
        return own.functional_posterior(x, differentiable=True).covariance, own.predictive(x, differentiable=True).mean

    assert torch.autograd.gradcheck(variance, (x.clone().requires_grad_(),))
    margin = lp.through(own, lambda x: net(x)[:, :1] - net(x)[:, 1:2]).functional_posterior(x)
    exact = covariance[:, 0, 0] + covariance[:, 1, 1]
    assert ((margin.covariance[:, 0, 0] / exact - 1).abs() < 6 * (2 / 100) ** 0.5).all()


def test_regression_is_saved_with_its_sums(tmp_path):
    net, data = regression(2)
    own = lp.VariationalLastLayer(net, "regression", noise="student_t").fit(data).fit_prior_precision()
    own.save(tmp_path / "saved")
    again = lp.load(tmp_path / "saved", net)
    x, y = data[0]
    assert_close(again.predictive(x).log_prob(y), own.predictive(x).log_prob(y))
    assert_close(again.sample(2, generator=generator()), own.sample(2, generator=generator()))
    assert again.fit_prior_precision().tuning.value == pytest.approx(own.tuning.value, abs=1e-8)


def test_other_data_and_other_weights_are_found():
    net, data = classes()
    own = lp.VariationalLastLayer(net, "classification").fit(data)
    with pytest.raises(DataError, match="not the data"):
        own.elbo(data[:1])
    with pytest.raises(DataError, match="not the data"):
        own.fit_prior_precision(data=[(x + 1, y) for x, y in data])
    with torch.no_grad():
        net[0].weight.mul_(1.1)
    with pytest.raises(ModelChangedError):
        own.predictive(data[0][0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.table(tokens).tanh())


def test_what_is_refused():
    tokens, labels = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 4])
    with pytest.raises(UnsupportedError, match="tied"):
        lp.VariationalLastLayer(Tied(), "classification").fit([(tokens, labels)])
    x = torch.randn(4, 3, generator=generator())
    for last in (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), nn.Sequential(nn.Linear(3, 4), nn.Softplus())):
        with pytest.raises(UnsupportedError, match="linear last layer"):
            lp.VariationalLastLayer(last, "classification").fit([(x, labels % 4)])
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    for parameters in ("all", ["2.weight"]):
        with pytest.raises(UnsupportedError, match="linear last layer"):
            lp.VariationalLastLayer(net, "classification", parameters=parameters).fit([(x, labels)])
    for likelihood, options in [
        ("regression", {"covariance": "diagonal"}),
        ("regression", {"bound": "jensen"}),
        ("classification", {"bound": "quadrature"}),
        ("classification", {"noise": "student_t"}),
        ("classification", {"n_samples": 3}),
        ("binary", {"bound": "jensen"}),
        ("classification", {"covariance": "full"}),
        ("classification", {"prior_precision": torch.ones(5)}),
    ]:
        with pytest.raises(ConfigurationError):
            lp.VariationalLastLayer(net, likelihood, **options)
    fitted = lp.VariationalLastLayer(net, "classification").fit([(x, labels)])
    with pytest.raises(UnsupportedError):
        fitted.fit_prior_precision(lp.MarginalLikelihood())
    own = lp.VariationalLastLayer(net[:1], "regression", noise="student_t", noise_shape=0.25)
    with pytest.raises(ConfigurationError, match="variance"):
        own.fit([(x[:1], x[:1, [0] * 4])])
