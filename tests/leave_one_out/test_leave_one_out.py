"""Leave-one-out predictions against data that are really left out, or left out by one dense Newton step."""

from __future__ import annotations

import math

import pytest
import torch
from leave_one_out_problems import LIKELIHOODS, chunks, problem
from problems import jacobian, relative_error
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    NotFittedError,
    NotPositiveDefiniteError,
)


def newton_step(likelihood, outputs, targets, jacobians, precision, temperature=1.0):
    """Mean and covariance of each datum's outputs after one Newton step on all others, every matrix written out."""
    f = outputs.clone().requires_grad_()
    flat, rows, _ = likelihood.rows(f, targets)
    losses = -likelihood.log_density(flat, rows if likelihood.couples_outputs else rows.double())
    gradients = torch.autograd.grad(losses.sum(), f)[0] / temperature
    weights = likelihood.curvature_weights()[likelihood.output_groups(outputs.shape[-1])]
    root = likelihood.output_root(outputs, targets)
    unit = root @ root.mT
    hessians = unit * (weights.sqrt()[:, None] * weights.sqrt()) / temperature
    each = torch.einsum("ncp,ncd,ndq->npq", jacobians, hessians, jacobians)
    means, covariances = [], []
    for n in range(len(outputs)):
        others = torch.linalg.inv(each.sum(0) - each[n] + torch.diag(precision))
        covariance = jacobians[n] @ others @ jacobians[n].T
        means.append(outputs[n] + covariance @ gradients[n])
        covariances.append(covariance)
    return torch.stack(means), torch.stack(covariances)


def ridge(features, targets, noise, precision):
    covariance = torch.linalg.inv(features.T @ features / noise**2 + torch.diag(precision))
    return covariance @ features.T @ targets / noise**2, covariance


@pytest.mark.parametrize("parameters", ["all", "last_layer"])
def test_ridge_regression_is_left_out_exactly(parameters):
    torch.manual_seed(1)
    x = torch.randn(25, 4, dtype=torch.float64)
    y = x @ torch.randn(4, 2, dtype=torch.float64) + 0.4 * torch.randn(25, 2, dtype=torch.float64)
    net = nn.Linear(4, 2).double()
    noise, precision = 0.5, torch.full((5,), 0.7, dtype=torch.float64)
    features = torch.cat([x, torch.ones(25, 1)], 1)
    weights, _ = ridge(features, y, noise, precision)
    with torch.no_grad():
        net.weight.copy_(weights[:4].T)
        net.bias.copy_(weights[4])
    posterior = lp.Full(net, lp.Gaussian(noise), parameters=parameters, prior_precision=0.7)
    left = lp.leave_one_out(posterior.fit(chunks(x, y, 7, 18)))
    for n in range(25):
        others = torch.arange(25) != n
        own, covariance = ridge(features[others], y[others], noise, precision)
        torch.testing.assert_close(left.mean[n], features[n] @ own, rtol=0, atol=1e-12)
        variance = features[n] @ covariance @ features[n]
        torch.testing.assert_close(left.covariance[n], variance * torch.eye(2).double(), rtol=0, atol=1e-12)
        exact = torch.distributions.Normal(features[n] @ own, (variance + noise**2).sqrt()).log_prob(y[n]).sum()
        assert abs(left.log_prob()[n] - exact) < 1e-11
    # the hat matrix's diagonal, for each of two outputs
    hat = features @ ridge(features, y, noise, precision)[1] @ features.T / noise**2
    torch.testing.assert_close(left.leverages, hat.diagonal(), rtol=0, atol=1e-12)


@pytest.mark.diagonal
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_one_newton_step(name, temperature):
    net, x, y = problem(name)
    likelihood = LIKELIHOODS[name]
    posterior = lp.Full(net, likelihood, prior_precision=0.3, temperature=temperature).fit(chunks(x, y, 5, 11))
    precision = torch.full((posterior.n_parameters,), 0.3, dtype=torch.float64)
    mean, covariance = newton_step(likelihood, net(x).detach(), y, jacobian(net, x), precision, temperature)
    left = lp.leave_one_out(posterior)
    assert relative_error(left.mean, mean) < 1e-10
    assert relative_error(left.covariance, covariance) < 1e-10
    expected = lp.predictive.from_functional(likelihood, mean, covariance).log_prob(y)
    torch.testing.assert_close(left.log_prob(), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(left.nll(), -expected.mean(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(left.outputs, net(x).detach())
    assert float(left.leverages.max()) < 1


def test_the_two_priors_are_kept_apart():
    net, x, y = problem("classification")
    posterior = lp.Full(net, "classification", prior_precision=2.0).fit([(x, y)])
    training = torch.tensor([0.5, 3.0], dtype=torch.float64)  # one for each layer
    each = training[posterior.network.layer_index()]
    outputs, jacobians = net(x).detach(), jacobian(net, x)
    left = lp.leave_one_out(posterior, prior_precision=training, kappa=1.5)
    mean, _ = newton_step(lp.Categorical(), outputs, y, jacobians, 1.5 * each)
    _, covariance = newton_step(lp.Categorical(), outputs, y, jacobians, torch.full_like(each, 2.0))
    assert relative_error(left.mean, mean) < 1e-10
    assert relative_error(left.covariance, covariance) < 1e-10


@pytest.mark.diagonal
@pytest.mark.parametrize("sizes", [(1,) * 8, (3, 4, 1)])
@pytest.mark.parametrize("leverages", ["own", "full"])
def test_any_chunks_give_the_same(sizes, leverages):
    net, x, y = problem("classification", n=8)
    whole = lp.leave_one_out(lp.Full(net, "classification").fit([(x, y)]), leverages=leverages)
    left = lp.leave_one_out(lp.Full(net, "classification").fit(chunks(x, y, *sizes)), leverages=leverages)
    for name in ("mean", "covariance", "outputs", "targets", "leverages"):
        torch.testing.assert_close(getattr(left, name), getattr(whole, name), rtol=1e-9, atol=1e-10)


def trained(n=40, precision=0.5):
    """A softmax regression at its optimum, by Newton's method."""
    torch.manual_seed(3)
    x = torch.randn(n, 3, dtype=torch.float64)
    y = (x @ torch.randn(3, 3, dtype=torch.float64) + torch.randn(n, 3, dtype=torch.float64)).argmax(-1)
    net = nn.Linear(3, 3).double()
    optimise(net, x, y, precision)
    return net, x, y


def optimise(net, x, y, precision):
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=500, tolerance_grad=1e-10, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in net.parameters())
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum") + precision / 2 * squares
        loss.backward()
        return loss

    optimizer.step(closure)


def test_really_retrained_softmax_regression():
    net, x, y = trained()
    left = lp.leave_one_out(lp.Full(net, "classification", prior_precision=0.5).fit([(x, y)]))
    means = torch.zeros(len(x), 3, dtype=torch.float64)
    for n in range(len(x)):
        others, again = torch.arange(len(x)) != n, nn.Linear(3, 3).double()
        again.load_state_dict(net.state_dict())
        optimise(again, x[others], y[others], 0.5)
        means[n] = again(x[n]).detach()
    losses = nn.functional.cross_entropy(means, y, reduction="none")
    error = left.nll(scale=0.0) - losses.mean()
    assert abs(float(error)) < 0.02
    seen = nn.functional.cross_entropy(left.outputs, y)
    assert float(losses.mean() - seen) > 5 * abs(float(error))
    moved, exact = (left.mean - left.outputs).flatten(), (means - left.outputs).flatten()
    assert abs(float(moved @ exact / moved.square().sum()) - 1) < 0.1
    assert float(torch.corrcoef(torch.stack([moved, exact]))[0, 1]) > 0.98


# -- leverages of one and more ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal])
def test_leverages_of_one_are_refused_or_taken_from_the_exact_matrix(cls):
    net, x, y = problem("classification", n=12)
    posterior = cls(net, "classification", prior_precision=1e-3).fit(chunks(x, y, 5, 7))
    with pytest.raises(NotPositiveDefiniteError, match=r"of 12 data.*leverage of \d.*leverages=\"full\"") as caught:
        lp.leave_one_out(posterior)
    with pytest.raises(NotPositiveDefiniteError, match='leverages="full"'):
        posterior.fit_prior_precision("leave_one_out", training_prior_precision=1e-3)
    assert float(posterior.prior_precision) == 1e-3
    # how many, and the largest one
    precision = posterior.functional_posterior(x).covariance
    root = lp.Categorical().output_root(net(x).detach(), y)
    hessian = root @ root.mT
    values = torch.linalg.eigvals(precision @ hessian).real.amax(-1)
    assert f"{int((values >= 1).sum())} of 12" in str(caught.value)
    assert f"{float(values.max()):.3g}" in str(caught.value)
    left = lp.leave_one_out(posterior, leverages="full")
    exact = lp.leave_one_out(lp.Full(net, "classification", prior_precision=1e-3).fit([(x, y)]))
    torch.testing.assert_close(left.mean, exact.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(left.leverages, exact.leverages, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(left.covariance, precision, rtol=1e-10, atol=1e-12)


def test_leverages_at_the_covariance_s_prior_count_too():
    net, x, y = problem("classification", n=12)
    posterior = lp.KFAC(net, "classification", prior_precision=1e-3).fit([(x, y)])
    with pytest.raises(NotPositiveDefiniteError, match="of 12 data"):
        lp.leave_one_out(posterior, prior_precision=100.0)
    posterior.prior_precision = 100.0
    assert float(lp.leave_one_out(posterior).leverages.max()) < 1


# -- positions --------------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Three outputs for each of T tokens, every one of which sees all."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.inner(x).tanh()
        return self.head(hidden + hidden.mean(1, keepdim=True))


def tokens():
    torch.manual_seed(0)
    net = Tokens().double()
    x, y = torch.randn(6, 3, 2, dtype=torch.float64), torch.randint(0, 3, (6, 3))
    y[1, 2] = y[4, 0] = -100
    return net, x, y


@pytest.mark.diagonal
@pytest.mark.parametrize("leverages", ["own", "full"])
def test_tokens(leverages):
    net, x, y = tokens()
    posterior = lp.Full(net, lp.Categorical(output_axis=-1), prior_precision=0.4).fit(chunks(x, y, 2, 4))
    left = lp.leave_one_out(posterior, leverages=leverages)
    outputs, jacobians = net(x).detach(), jacobian(net, x).view(6, 3, 3, -1)
    used = y != -100
    safe = torch.where(used, y, 0)
    root = lp.Categorical().output_root(outputs.view(-1, 3), safe.view(-1))
    hessians = (root @ root.mT).view(6, 3, 3, 3) * used[..., None, None]
    gradients = (outputs.softmax(-1) - nn.functional.one_hot(safe, 3)) * used[..., None]
    each = torch.einsum("ntcp,ntcd,ntdq->ntpq", jacobians, hessians, jacobians)
    total = each.sum((0, 1)) + 0.4 * torch.eye(posterior.n_parameters, dtype=torch.float64)
    means = outputs.clone()
    for n in range(6):
        pulled = torch.einsum("tcp,tc->p", jacobians[n], gradients[n])
        means[n] += jacobians[n] @ torch.linalg.solve(total - each[n].sum(0), pulled)
    torch.testing.assert_close(left.mean, means, rtol=1e-9, atol=1e-10)
    losses = -means[used].log_softmax(-1).gather(-1, y[used][:, None])
    torch.testing.assert_close(left.nll(scale=0.0), losses.mean(), rtol=1e-9, atol=1e-10)
    assert left.n_rows == 16
    assert float(left.log_prob()[1, 2]) == 0.0
    assert left.covariance.shape == posterior.functional_posterior(x).covariance.shape


def test_batches_of_different_lengths():
    net, x, y = tokens()
    data = [(x[:3], y[:3]), (x[3:, :2], y[3:, :2])]
    posterior = lp.Full(net, "classification").fit(data)
    with pytest.raises(DataError, match="different shapes"):
        lp.leave_one_out(posterior)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_before_fitting():
    net, x, y = problem("classification")
    with pytest.raises(NotFittedError):
        lp.leave_one_out(lp.Full(net, "classification"))


def test_other_data_than_fitted():
    net, x, y = problem("classification")
    posterior = lp.Full(net, "classification").fit([(x, y)])
    for data in ([(x[:9], y[:9])], [(x, y), (x, y)]):
        with pytest.raises(DataError, match="16 examples"):
            lp.leave_one_out(posterior, data)
        with pytest.raises(DataError, match="16 examples"):
            posterior.fit_prior_precision("leave_one_out", data=data, training_prior_precision=1.0)


def test_data_that_are_gone(tmp_path):
    net, x, y = problem("classification")
    posterior = lp.Full(net, "classification").fit(iter([(x, y)]))
    for call in (lambda: lp.leave_one_out(posterior), lambda: lp.leave_one_out(posterior, iter([(x, y)]))):
        with pytest.raises(DataError, match="Leave-one-out"):
            call()
    expected = lp.leave_one_out(posterior, [(x, y)])
    posterior.save(tmp_path / "posterior")
    loaded = lp.load(tmp_path / "posterior", net)
    with pytest.raises(DataError, match="train_loader"):
        lp.leave_one_out(loaded)
    torch.testing.assert_close(lp.leave_one_out(loaded, [(x, y)]).mean, expected.mean)


@pytest.mark.parametrize(
    "options",
    [
        {"leverages": "exact"},
        {"kappa": 0.0},
        {"kappa": -1},
        {"kappa": math.nan},
        {"kappa": "2"},
        {"prior_precision": -1.0},
        {"prior_precision": torch.ones(3)},
    ],
)
def test_unknown_choices(options):
    net, x, y = problem("classification")
    with pytest.raises(ConfigurationError):
        lp.leave_one_out(lp.Full(net, "classification").fit([(x, y)]), **options)


def test_scalings_of_the_prediction():
    net, x, y = problem("classification")
    left = lp.leave_one_out(lp.Full(net, "classification").fit([(x, y)]))
    torch.testing.assert_close(left.predictive(scale=0.0).mean, left.mean.softmax(-1))
    scaled = left.predictive(scale=0.25).functional_covariance
    torch.testing.assert_close(scaled, left.covariance / 4)
    sampled = left.nll(link="mc", n_samples=4000, generator=torch.Generator().manual_seed(0))
    assert abs(float(sampled - left.nll())) < 0.1
    for options in ({"scale": -1.0}, {"link": "exact"}):
        with pytest.raises(ConfigurationError):
            left.predictive(**options)


def test_the_posterior_stays_as_it_is():
    net, x, y = problem("classification")
    posterior = lp.Full(net, "classification", prior_precision=0.3).fit([(x, y)])
    before = posterior.functional_posterior(x)
    lp.leave_one_out(posterior, prior_precision=7.0, kappa=3.0)
    assert float(posterior.prior_precision) == 0.3
    torch.testing.assert_close(posterior.functional_posterior(x).covariance, before.covariance)
    largest = [float(lp.leave_one_out(posterior, kappa=kappa).leverages.max()) for kappa in (1.0, 2.0)]
    assert largest[0] > largest[1]
