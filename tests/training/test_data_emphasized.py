"""The data-emphasised bound: closed forms, what training does to a network, and tuning by it."""

from __future__ import annotations

import pytest
import torch
from problems import generator
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.testing import assert_close
from training.problems import LinearOracle, classes, classifier, linear_data, loader

import laplace_plus as lp
from laplace_plus.applications.training.data_emphasized import emphasis_of
from laplace_plus.errors import CheckpointError, ConfigurationError, NonFiniteError
from laplace_plus.priors import Groups

QUICK = {"epochs": 4, "optimizer_options": {"lr": 0.02}}


def train(net, data, likelihood="classification", **options):
    return lp.train_data_emphasized(net, data, likelihood, generator=generator(), **{**QUICK, **options})


def linear(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Linear(7, 1, bias=False, dtype=dtype)


# -- tuning, in closed form --------------------------------------------------------------------------------------------


def bound(weights, means, log_variance, log_prior, gram, kappa, fit):
    """J of the linearised network, written out with torch's divergence."""
    variance, prior = log_variance.exp(), log_prior.exp()
    q = Independent(Normal(weights, variance.sqrt().expand_as(weights)), 1)
    p = Independent(Normal(means, prior.sqrt().expand_as(weights)), 1)
    return kappa * (fit - variance * gram.trace() / 2) - kl_divergence(q, p)


@pytest.mark.parametrize("emphasis", [1.0, 3.0])
def test_the_tuner_is_the_optimum_of_the_bound(emphasis):
    x, y = linear_data()
    net = linear()
    weights = torch.linalg.lstsq(x, y).solution[:, 0]
    net.weight.data = weights[None].clone()
    posterior = lp.Full(net, lp.Gaussian(0.5), prior_mean=0.1).fit([(x, y)])
    result = posterior.fit_prior_precision(lp.DataEmphasized(emphasis=emphasis)).tuning
    gram = x.T @ x / 0.25
    fit = Normal(x @ weights, 0.5).log_prob(y[:, 0]).sum()
    logs = torch.tensor([0.0, -result.prior_precision.log().item()], dtype=torch.float64, requires_grad=True)
    h, prior = emphasis * gram.trace() / 7, 1 / result.prior_precision
    with torch.no_grad():
        logs[0] = (1 / (h + 1 / prior)).log()  # isotropic Laplace at emphasised data
    value = bound(weights, torch.full_like(weights, 0.1), logs[0], logs[1], gram, emphasis, fit)
    assert value.item() == pytest.approx(result.value, abs=1e-8)
    assert torch.autograd.grad(value, logs)[0].abs().max() < 1e-8
    if emphasis == 1:  # a bound on the evidence, which only a full covariance attains
        oracle = LinearOracle(x, y - 0.1 * x.sum(1, keepdim=True), [0] * 7)
        evidence = oracle.evidence([float(result.prior_precision)], 0.5)
        assert result.value < evidence
        full = lp.VariationalLastLayer(
            net, lp.Gaussian(0.5), mean="optimal", prior_mean=0.1, prior_precision=result.prior_precision
        )
        assert float(full.fit([(x, y)]).elbo()) == pytest.approx(evidence, abs=1e-8)


def test_groups_of_the_tuner_are_tuned_each_by_itself():
    net, (x, y) = classifier(), classes()
    posterior = lp.Diagonal(net, "classification").fit([(x, y)])
    both = posterior.fit_prior_precision("data_emphasized", "layerwise", emphasis=2.0).prior_precision
    assert posterior.tuning.converged and posterior.tuning.noise_std is None
    for number, name in enumerate(("0", "2")):
        own = lp.Diagonal(net, "classification", parameters=[name]).fit([(x, y)])
        own.fit_prior_precision(lp.DataEmphasized(emphasis=2.0))
        assert_close(own.prior_precision, both[number])


def test_the_emphasis_is_at_least_one():
    assert emphasis_of("P/N", 50, 100) == 1 and emphasis_of("P/N", 300, 100) == 3 and emphasis_of(0.5, 1, 2) == 0.5
    for wrong in ("N/P", 0.0, -1.0, float("nan"), None):
        with pytest.raises(ConfigurationError):
            lp.DataEmphasized(emphasis=wrong)
    with pytest.raises(ConfigurationError):
        lp.DataEmphasized(structure="unknown")
    net, (x, y) = classifier(), classes()
    posterior = lp.KFAC(net, "classification").fit([(x, y)])
    posterior = lp.KFAC(net, "classification", prior_mean=posterior.mean).fit([(x, y)])
    with pytest.raises(ConfigurationError, match="mean square"):
        posterior.fit_prior_precision("data_emphasized")


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_reaches_the_optimum_of_the_bound():
    """In linear regression J is a quadratic in θ and has one optimum in (θ, σ, τ), found here by Adam on J itself."""
    x, y = linear_data()
    net, kappa = linear(), 2.0
    result = train(
        net,
        [(x, y)],
        lp.Gaussian(0.5),
        epochs=700,
        emphasis=kappa,
        prior_mean=0.0,
        initial_std=0.05,
        optimizer=torch.optim.Adam,
        optimizer_options={"lr": 0.05},
        scheduler=lambda adam: torch.optim.lr_scheduler.CosineAnnealingLR(adam, 700),
        max_gradient_norm=None,
    )
    theta = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    log = torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
    gram = x.T @ x / 0.25
    search = torch.optim.LBFGS([theta, log], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def loss():
        prior = theta.square().mean() + log.exp()
        fit = Normal(x @ theta, 0.5).log_prob(y[:, 0]).sum()
        return -bound(theta, torch.zeros_like(theta), log, prior.log(), gram, kappa, fit)

    def closure():
        search.zero_grad()
        value = loss()
        value.backward()
        return value

    search.step(closure)
    theta, log = theta.detach(), log.detach()
    assert_close(net.weight[0].detach(), theta, rtol=0, atol=0.02)
    assert float(result.std) == pytest.approx(float((log / 2).exp()), rel=0.05)
    prior = theta.square().mean() + log.exp()
    assert float(result.prior_std) == pytest.approx(float(prior.sqrt()), rel=0.02)
    assert result.losses[-1] == pytest.approx(float(loss()) / (kappa * 60), abs=0.15)  # of one sample
    assert_close(result.posterior.variance(), torch.full((7,), float(result.std) ** 2, dtype=torch.float64))
    assert_close(result.posterior.prior_precision, 1 / result.prior_std.square())


def test_the_model_itself_is_trained_and_what_comes_back():
    net = classifier(dropout=0.2, norm=True).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    frozen = net[0].weight.requires_grad_(False)
    result = train(net, loader(*classes()))
    assert result.model is net and net.training and all(p.grad is None for p in net.parameters())
    assert torch.equal(frozen, before["0.weight"]) and not torch.equal(net[-1].weight, before["4.weight"])
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])
    assert len(result.losses) == 4 and result.n_data == 60 and result.emphasis == 1.0
    assert result.posterior.n_data == 60 and set(result.posterior.parameter_names) == {
        name for name, p in net.named_parameters() if p.requires_grad
    }
    assert result.prior_std.shape == (3,) and (result.prior_std >= result.std).all()
    theta, start = result.posterior.mean, torch.cat([before[n].flatten() for n in result.posterior.parameter_names])
    index = result.posterior.network.layer_index()
    for g in range(3):  # the pre-trained weights are the prior's mean
        expected = (theta - start)[index == g].double().square().mean() + result.std.square()
        assert_close(result.prior_std[g].square(), expected, rtol=1e-5, atol=0)
    assert result.posterior.predictive(classes()[0]).mean.shape == (60, 3)


@pytest.mark.quick("layerwise", "groups")
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "groups"])
def test_structures(structure, tmp_path):
    net, count = classifier(), {"scalar": 1, "layerwise": 2, "groups": 2}[structure]
    groups = Groups("halves", ("first", "second"), (torch.arange(67) > 30).long())
    result = train(net, loader(*classes()), structure=groups if structure == "groups" else structure, prior_mean=0.0)
    assert result.prior_std.shape == (count,)
    result.posterior.save(tmp_path / "saved")
    again = lp.load(tmp_path / "saved", net)
    assert_close(again.variance(), result.posterior.variance())
    assert_close(again.variance(), torch.full((67,), float(result.std) ** 2))


@pytest.mark.quick("pretrained")
@pytest.mark.parametrize("prior_mean", [0.0, "pretrained"])
def test_a_run_goes_on_where_it_was(prior_mean):
    data = classes()
    whole = train(classifier(), loader(*data), epochs=6, prior_mean=prior_mean)
    begun = train(classifier(), loader(*data), epochs=3, prior_mean=prior_mean)
    torch.manual_seed(5)  # whatever happened in between
    rest = train(classifier(seed=1), loader(*data), epochs=6, prior_mean=prior_mean, state=begun.state)
    assert rest.losses == whole.losses and torch.equal(rest.posterior.mean, whole.posterior.mean)
    assert torch.equal(rest.std, whole.std) and torch.equal(rest.prior_std, whole.prior_std)
    with pytest.raises(CheckpointError):
        train(classifier(norm=True), loader(*data), prior_mean=0.0, state=begun.state)


def test_failures_are_named():
    net = classifier()
    with pytest.raises(NonFiniteError, match="diverged in epoch 1"):
        train(net, loader(*classes()), optimizer_options={"lr": 1e30}, max_gradient_norm=None)
    for wrong in (
        {"emphasis": "all"},
        {"initial_std": 0.0},
        {"structure": "unknown"},
        {"structure": "diagonal"},
        {"epochs": 0},
        {"optimizer_options": {"lr": 0.1, "weight_decay": 0.1}},
    ):
        with pytest.raises(ConfigurationError):
            train(net, loader(*classes()), **wrong)
