"""Diagonal posteriors from given variances."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, UnsupportedError

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(30) % 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def some(n=32):
    return 0.1 + torch.rand(n, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.quick("classification", "likelihood2")
@pytest.mark.parametrize(
    "likelihood", ["classification", "regression", lp.Gaussian(noise_std=torch.tensor([0.3, 2.0]))]
)
def test_it_has_the_given_variances_and_predicts_with_them(likelihood, tmp_path):
    model, variance = net(), some()
    before = lp.testing.snapshot(model)
    posterior = lp.from_variance(model, variance, likelihood=likelihood)
    assert_close(posterior.variance(), variance)
    assert_close(posterior.prior_precision, variance.max().reciprocal())
    jacobian = torch.func.jacrev(lambda v: posterior.network(X[:4], posterior.network.substitute(v)))(posterior.mean)
    wanted = torch.einsum("ncp,p,ndp->ncd", jacobian, variance, jacobian)
    assert_close(posterior.functional_posterior(X[:4]).covariance, wanted)
    assert posterior.predictive(X[:4], method="sampled", generator=torch.Generator().manual_seed(0)).mean.shape == (
        4,
        2,
    )
    posterior.save(tmp_path / "given")
    loaded = lp.load(tmp_path / "given", model)
    assert_close(loaded.variance(), variance)
    assert_close(loaded.predictive(X).mean, posterior.predictive(X).mean)
    lp.testing.assert_untouched(model, before)
    draws = posterior.sample(4000, generator=torch.Generator().manual_seed(0))
    assert_close(draws.var(0) / variance, torch.ones(32).double(), rtol=0, atol=5 * (2 / 4000) ** 0.5)


def test_variances_by_name_select():
    model = net()
    variance = {"2.bias": torch.tensor([0.1, 0.2]), "0.weight": some(15).view(5, 3)}
    posterior = lp.from_variance(model, variance, "classification", n_data=30)
    assert posterior.parameter_names == ("0.weight", "2.bias")
    assert posterior.n_data == 30
    assert_close(posterior.variance(), torch.cat([some(15), variance["2.bias"].double()]))
    last = lp.from_variance(model, some(12), "classification", parameters="last_layer")
    assert last.parameter_names == ("2.weight", "2.bias")


def test_the_state_of_a_variational_optimizer():
    # What IVON keeps for N data with weight decay δ: 1/σ² = ess (hess + δ).
    hess, ess, decay = some(), 500, 1e-2
    variance = 1 / (ess * (hess + decay))
    options = {"prior_precision": ess * decay, "n_data": ess}
    posterior = lp.from_variance(net(), variance, "classification", **options)
    ((_, block),) = posterior.state.curvature
    assert_close(block.values.flatten(), ess * hess)
    assert posterior.n_data == ess
    assert_close(posterior.effective_dimension(), (hess / (hess + decay)).sum())


@pytest.mark.slow
def test_the_state_of_adam_is_the_empirical_fisher_matrix():
    # At the optimum, with a learning rate of zero; batches of 5 of the 30 data are drawn with replacement.
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    fitting = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        fitting.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        return loss

    fitting.step(closure)
    optimizer, beta, steps, size = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.0, 0.998)), 0.998, 3000, 5
    for rows in torch.randint(0, 30, (steps, size), generator=torch.Generator().manual_seed(0)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    second = {n: optimizer.state[p]["exp_avg_sq"] / (1 - beta**steps) for n, p in model.named_parameters()}
    variance = {name: 1 / (len(X) * size * own + 1.0) for name, own in second.items()}
    posterior = lp.from_variance(model, variance, "classification", prior_precision=1.0, n_data=30)
    fisher = lp.Diagonal(model, "classification", backend=lp.Native("empirical_fisher")).fit([(X, Y)])
    ratio = (1 / posterior.variance() - 1) / (1 / fisher.variance() - 1)
    error = (3 * (1 - beta) / (1 + beta)) ** 0.5  # of squares that are about normal, or less so
    assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=5 * error)


def test_data_may_be_added():
    model, variance = net(), some()
    given = lp.from_variance(model, variance, "classification")
    fitted = lp.Diagonal(model, "classification", prior_precision=1e-9).fit([(X, Y)])
    wanted = 1 / variance + 1 / fitted.variance()
    assert_close(1 / lp.continue_on(given, model).fit([(X, Y)]).variance(), wanted)
    assert_close(1 / given.update([(X, Y)]).variance(), wanted)
    assert given.n_data == 31
    assert lp.penalty(given, model) == 0


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_there_is_no_evidence_of_data_that_were_not_seen(likelihood):
    posterior = lp.from_variance(net(), some(), likelihood)
    with pytest.raises(UnsupportedError, match="not seen"):
        posterior.log_marginal_likelihood()
    for tuner in ("auto", "marginal_likelihood", "mackay", "em"):
        with pytest.raises(UnsupportedError, match="not seen"):
            posterior.fit_prior_precision(tuner)
    targets = Y if likelihood == "classification" else X[:, :2]
    noise = {"tune_noise": False} if likelihood == "regression" else {}
    tuner = lp.Validation([(X, targets)], grid=torch.tensor([0.1, 1.0, 10.0]), **noise)
    assert float(posterior.fit_prior_precision(tuner).prior_precision) > 0


BAD = {
    "zero": ({"variance": torch.zeros(32)}, "variance"),
    "negative": ({"variance": -some()}, "variance"),
    "infinite": ({"variance": torch.full((32,), torch.inf)}, "variance"),
    "NaN": ({"variance": torch.full((32,), torch.nan)}, "variance"),
    "short": ({"variance": some(31)}, "another shape"),
    "a number": ({"variance": 0.1}, "another shape"),
    "beyond the prior": ({"variance": some(), "prior_precision": 5.0}, "ratio of a variance"),
    "no data": ({"variance": some(), "n_data": 0}, "n_data"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_variances_are_refused(case):
    options, said = BAD[case]
    with pytest.raises(ConfigurationError, match=said):
        lp.from_variance(net(), likelihood="classification", **options)
