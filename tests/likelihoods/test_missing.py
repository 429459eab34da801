"""Targets that were not observed, NaN: against dense matrices in float64, and against the same data without them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus import metrics
from laplace_plus.applications.conformal import threshold
from laplace_plus.curvature import GGNOperator
from laplace_plus.errors import DataError, LabelError, SelectionError
from laplace_plus.predictive import from_functional
from laplace_plus.tuning import noise_from_residuals

NAN = math.nan
N, C = 30, 2
KINDS = {
    "regression": (lp.Gaussian(0.7), C),
    "noise levels": (lp.Gaussian(torch.tensor([0.5, 2.0])), C),
    "heteroscedastic": (lp.HeteroscedasticGaussian(), 2 * C),
    "given noise": (lp.GivenNoise(0.3), C),
    "binary": (lp.Bernoulli(), C),
    "counts": (lp.Poisson(), C),
}


def problem(kind, tokens=0):
    """A network, inputs, complete targets and which of them are observed."""
    likelihood, size = KINDS[kind]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, size)).double()
    shape = (N, tokens) if tokens else (N,)
    x, known = torch.randn(*shape, 3).double(), torch.rand(*shape, C) > 0.3
    known[0], known[-1], known[1] = False, False, torch.tensor([True, False])
    y = 2 * x[..., :C] + torch.randn(*shape, C).double()
    if kind in ("binary", "counts"):
        y = (y > 0).double() * (1 if kind == "binary" else 3)
    if kind == "given noise":
        y = torch.stack([y, torch.rand(*shape, C).double() + 0.2], -1)
    return likelihood, net, x, y, known


def without(y, known):
    return y.masked_fill(~(known if y.ndim == known.ndim else known[..., None]), NAN)


def weights_of(kind, f, y):
    """``Λ_n,cc`` by hand, without the noise of ``lp.Gaussian``."""
    if kind == "heteroscedastic":
        return torch.cat([(-f[..., C:]).exp(), torch.full_like(f[..., C:], 0.5)], -1)
    if kind == "given noise":
        return y[..., 1] ** -2
    sigmoid = f.sigmoid()
    return {"binary": sigmoid * (1 - sigmoid), "counts": f.exp()}.get(kind, torch.ones_like(f))


def log_density(kind, likelihood, f, y):
    """Of every entry, by torch's distributions."""
    if kind == "heteroscedastic":
        return torch.distributions.Normal(f[..., :C], (0.5 * f[..., C:]).exp()).log_prob(y)
    if kind == "given noise":
        return torch.distributions.Normal(f, y[..., 1]).log_prob(y[..., 0])
    if kind == "binary":
        return torch.distributions.Bernoulli(logits=f).log_prob(y)
    if kind == "counts":
        return torch.distributions.Poisson(f.exp()).log_prob(y)
    return torch.distributions.Normal(f, likelihood.noise_std.expand(C)).log_prob(y)


def dense(kind, likelihood, net, x, y, known):
    """The Gauss-Newton matrix of all weights, and the log-likelihood."""
    names = [name for name, _ in net.named_parameters()]
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    of = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, x.reshape(-1, 3)))(parameters)
    jacobian = torch.cat([of[name].flatten(2) for name in names], 2)  # [N, C, P]
    f, y, known = (
        net(x).detach().reshape(len(jacobian), -1),
        y.reshape(len(jacobian), *y.shape[known.ndim - 1 :]),
        known,
    )
    known = known.reshape(-1, C)
    seen = known.repeat(1, f.shape[1] // C)
    scale = 1.0 if likelihood.noise_std is None else likelihood.noise_std**-2
    curvature = torch.where(seen, weights_of(kind, f, y) * scale, 0.0)
    total = torch.einsum("ncp,nc,ncq->pq", jacobian, curvature, jacobian)
    return total, log_density(kind, likelihood, f, y)[known].sum()


@pytest.mark.parametrize(("kind", "tokens"), [*((kind, 2) for kind in KINDS), ("regression", 0)])
def test_curvature_and_evidence_are_those_of_what_was_observed(kind, tokens):
    likelihood, net, x, y, known = problem(kind, tokens)
    batches = [(x[:11], without(y, known)[:11]), (x[11:], without(y, known)[11:])]
    matrix, fit = dense(kind, likelihood, net, x, y, known)
    eye = torch.eye(len(matrix)).double()
    full = lp.Full(net, likelihood, prior_precision=2.0).fit(batches)
    assert_close(full.precision_matrix(), matrix + 2 * eye)
    assert_close(full.laplace_model().log_likelihood(), fit)
    at = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    evidence = fit - at @ at - (torch.logdet(matrix + 2 * eye) - len(at) * math.log(2)) / 2
    assert_close(full.log_marginal_likelihood(), evidence)
    diagonal = lp.Diagonal(net, likelihood, prior_precision=2.0).fit(batches)
    assert_close(diagonal.precision_matrix(), torch.diag(matrix.diagonal() + 2))
    if likelihood.n_noise == 1:
        low = lp.LowRank(net, likelihood, prior_precision=2.0, rank=len(matrix)).fit(batches)
        assert_close(low.precision_matrix(), matrix + 2 * eye, rtol=1e-6, atol=1e-6)
    last = lp.Full(net, likelihood, prior_precision=2.0, parameters="last_layer").fit(batches)
    assert_close(last.precision_matrix(), (matrix + 2 * eye)[12:, 12:])


@pytest.mark.parametrize("kind", ["regression", "binary", "heteroscedastic"])
def test_kronecker_factors_are_those_of_what_was_observed(kind):
    likelihood, _, x, y, known = problem(kind)
    net = nn.Linear(3, KINDS[kind][1]).double()
    rows = torch.cat([x, torch.ones(N, 1).double()], 1)
    seen = known.repeat(1, net.out_features // C)
    scale = 1.0 if likelihood.noise_std is None else likelihood.noise_std**-2
    each = torch.where(seen, weights_of(kind, net(x).detach(), y) * scale, 0.0)
    used = known.any(1)
    whole = torch.kron(torch.diag(each.sum(0)), rows[used].T @ rows[used]) / int(used.sum())
    place = torch.arange(net.out_features * 3).view(-1, 3)
    order = torch.cat([place, torch.arange(len(place))[:, None] + place.numel()], 1).flatten()
    posterior = lp.KFAC(net, likelihood, prior_precision=1.0).fit([(x, without(y, known))])
    eye = torch.eye(len(whole)).double()
    assert_close(posterior.precision_matrix()[order][:, order], whole + eye)
    corrected = lp.KFAC(net, likelihood, prior_precision=1.0, eigenvalue_corrected=True).fit([(x, without(y, known))])
    exact = torch.einsum("ni,nc,nj->cij", rows, each, rows)  # in the factors' eigenbasis, its diagonal
    vectors = torch.linalg.eigh(rows[used].T @ rows[used])[1]
    kept = [vectors @ torch.diag((vectors.T @ own @ vectors).diagonal()) @ vectors.T for own in exact]
    assert_close(corrected.precision_matrix()[order][:, order], torch.block_diag(*kept) + eye)


@pytest.mark.parametrize("curvature", ["ggn_mc", "empirical_fisher", "hessian"])
def test_other_curvatures_leave_missing_entries_out(curvature):
    likelihood, _, x, y, known = problem("binary")
    net = nn.Linear(3, C).double()
    backend = lp.Native(curvature, n_samples=500) if curvature == "ggn_mc" else lp.Native(curvature)
    fitted = lp.Full(net, likelihood, prior_precision=1.0, backend=backend)
    found = fitted.fit([(x, without(y, known))], generator=torch.Generator().manual_seed(0)).precision_matrix()
    jacobian = torch.stack([torch.block_diag(one, one) for one in x])
    jacobian = torch.cat([jacobian, torch.eye(C).double().expand(N, C, C)], 2)
    p = net(x).sigmoid().detach()
    if curvature == "empirical_fisher":
        gradient = torch.einsum("ncp,nc->np", jacobian, torch.where(known, p - y, 0.0))
        wanted = gradient.T @ gradient
    else:
        wanted = torch.einsum("ncp,nc,ncq->pq", jacobian, torch.where(known, p * (1 - p), 0.0), jacobian)
    wanted = wanted + torch.eye(8).double()
    tolerance = 0.1 if curvature == "ggn_mc" else 1e-8  # of 500 draws for each of 30 rows: standard errors of 0.02
    assert float((found - wanted).abs().max() / wanted.abs().max()) < tolerance


def test_outputs_with_noise_of_their_own_are_tuned_as_if_alone():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2).double(), torch.randn(40, 3).double()
    y = net(x).detach() + torch.tensor([0.3, 2.0]) * torch.randn(40, 2).double()
    known = torch.rand(40, 2) > torch.tensor([0.2, 0.6])
    both = lp.Full(net, lp.Gaussian(torch.ones(2)), prior_precision=1.0).fit([(x, without(y, known))])
    assert_close(both.laplace_model().statistics[2:], known.sum(0).double())
    alone = []
    for c in range(2):
        one = nn.Linear(3, 1).double()
        one.load_state_dict({"weight": net.weight[c : c + 1], "bias": net.bias[c : c + 1]})
        kept = known[:, c]
        alone.append(lp.Full(one, lp.Gaussian(1.0), prior_precision=1.0).fit([(x[kept], y[kept][:, [c]])]))
    for noise in (torch.tensor([0.4, 1.7]), torch.ones(2)):
        for c, one in enumerate(alone):
            one.noise_std = noise[c]
        both.noise_std = noise
        assert_close(both.log_marginal_likelihood(), sum(one.log_marginal_likelihood() for one in alone))


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        *(("regression", route) for route in ("marginal_likelihood", "validation", "leave_one_out", "residuals")),
        ("binary", "leave_one_out"),
    ],
)
@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")  # the network is not trained
def test_rows_without_a_target_change_no_tuning(kind, route):
    likelihood, net, x, y, known = problem(kind)
    known |= known.any(1, keepdim=True)
    kept, missing = known.all(1), without(y, known)
    found = []
    for batch in ((x, missing), (x[kept], y[kept])):
        posterior = lp.Full(net, likelihood, prior_precision=1.0).fit([batch])
        if route == "residuals":
            found.append(noise_from_residuals(posterior).noise_std)
            continue
        options = {
            "validation": {"data": [batch], "grid": [0.1, 1.0, 10.0]},
            "leave_one_out": {"training_prior_precision": 1.0},
        }.get(route, {})
        posterior.fit_prior_precision(route, **options)
        found.append(torch.stack([posterior.prior_precision, *([posterior.noise_std] if kind == "regression" else [])]))
    assert_close(*found, rtol=1e-6, atol=0)


def test_leave_one_out_residuals_of_entries():
    """Ridge regression by hand, without each example's observed entries."""
    likelihood, _, x, y, known = problem("regression")
    known[5] = torch.tensor([False, True])
    net = nn.Linear(3, C, bias=False).double()
    estimate = noise_from_residuals(lp.Full(net, likelihood).fit([(x, without(y, known))]))

    def squares(ridge):
        left = []
        for n in range(N):
            for c in range(C):
                if known[n, c]:
                    kept = known[:, c] & (torch.arange(N) != n)
                    rows = x[kept]
                    weights = torch.linalg.solve(rows.T @ rows + ridge * torch.eye(3).double(), rows.T @ y[kept, c])
                    left.append(y[n, c] - x[n] @ weights)
        return float(torch.stack(left).square().mean())

    least = min(squares(10.0**exponent) for exponent in torch.linspace(-1, 3, 30))
    observed = y.where(known, NAN)
    residual = (net(x).detach() - observed)[known].square().mean().sqrt()
    away = observed - observed.nanmean(0)
    assert_close(estimate.residual_std, residual)
    assert_close(estimate.target_std, (away[known].square().sum() / (known.sum() - C)).sqrt())
    assert (
        least * (1 - 1e-6) <= max(float(estimate.noise_std), least**0.5) ** 2 <= 1.05 * max(least, float(residual) ** 2)
    )


@pytest.mark.parametrize("joint", [False, True])
def test_predicted_densities_are_marginal(joint):
    torch.manual_seed(0)
    root = torch.randn(6, 6).double()
    across, mean = (root @ root.T).view(2, 3, 2, 3), torch.randn(2, 3).double()
    covariance = across if joint else torch.stack([across[n, :, n] for n in range(2)])
    y = torch.tensor([[0.3, NAN, -1.0], [NAN, NAN, NAN]]).double()
    found = from_functional(lp.Gaussian(0.5), mean, covariance, joint=joint).log_prob(y)
    some = torch.tensor([0, 2])
    whole = across[0, :, 0] + 0.25 * torch.eye(3)
    wanted = MultivariateNormal(mean[0, some], whole[some][:, some]).log_prob(y[0, some])
    assert_close(found, wanted if joint else torch.stack([wanted, torch.zeros(()).double()]))


def test_predicted_densities_of_samples_and_probabilities():
    f, y = torch.randn(50, 4, 2).double(), torch.tensor([[1.0, NAN], [0.0, 1.0], [NAN, NAN], [NAN, 0.0]]).double()
    found = lp.predictive.from_samples(lp.Bernoulli(), f).log_prob(y)
    each = torch.distributions.Bernoulli(logits=f).log_prob(y.nan_to_num())
    each = each.where(~y.isnan(), 0.0)
    assert_close(found, each.sum(-1).logsumexp(0) - math.log(50))
    assert found[2] == 0
    probit = from_functional(lp.Bernoulli(), f[0], f[1].square())
    assert_close(
        probit.log_prob(y),
        torch.distributions.Bernoulli(probit.mean).log_prob(y.nan_to_num()).where(~y.isnan(), 0.0).sum(-1),
    )


def test_conformal_thresholds_are_of_observed_numbers():
    likelihood, net, x, y, known = problem("regression")
    posterior = lp.Full(net, likelihood).fit([(x, without(y, known))])
    found = lp.conformalize(posterior, [(x, without(y, known))], level=0.8, score="residual")
    errors = (posterior.predictive(x).mean - y).abs()
    for c in range(C):
        own = errors[known[:, c], c]
        assert_close(found.thresholds[0, c], own.sort().values[math.ceil((len(own) + 1) * 0.8) - 1])
    few = threshold(torch.tensor([[1.0, NAN], [2.0, 3.0]]), 0.6, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert few.tolist() == [2.0, math.inf]


def test_scores_are_means_over_observed_numbers():
    mean, variance = torch.zeros(2, 2), torch.ones(2, 2)
    y = torch.tensor([[1.0, NAN], [3.0, 2.0]])
    some = torch.tensor([1.0, 3.0, 2.0])
    assert_close(metrics.root_mean_squared_error(mean, y), some.square().mean().sqrt())
    assert_close(metrics.gaussian_nll(mean, variance, y), metrics.gaussian_nll(torch.zeros(3), torch.ones(3), some))
    assert_close(metrics.crps_gaussian(mean, variance, y), metrics.crps_gaussian(torch.zeros(3), torch.ones(3), some))


def test_an_ensemble_has_the_noise_of_what_was_observed():
    _, net, x, y, known = problem("regression")
    found = lp.Ensemble([net], "regression").fit([(x, without(y, known))])
    errors = (net(x).detach() - y).square()
    assert_close(found.likelihood.noise_std, torch.stack([errors[known[:, c], c].mean() for c in range(C)]).sqrt())


def test_other_data_are_told_from_those_with_gaps():
    _, net, x, y, known = problem("regression")
    batches = [(x, without(y, known))]
    operator = GGNOperator(net, lp.Gaussian(), batches)
    batches[0] = x, without(y + 1, known)
    with pytest.raises(DataError, match="not the same in every pass"):
        operator(torch.ones(1, operator.shape[1]).double())


def test_what_is_no_gap():
    _, net, x, y, known = problem("regression")
    with pytest.raises(LabelError, match="or NaN where one is missing"):
        lp.Full(net, "regression").fit([(x, y.masked_fill(~known, math.inf))])
    with pytest.raises(DataError, match="no observed target"):
        lp.Full(net, lp.Gaussian(torch.ones(2))).fit([(x, torch.stack([y[:, 0], y[:, 0] * NAN], 1))])
    with pytest.raises(SelectionError, match="not ignored"):
        lp.Full(net, "binary").fit([(x, y * NAN)])
    noisy = torch.stack([y, y.abs() + 1], -1)
    noisy[0, 0, 1] = NAN
    with pytest.raises(LabelError, match="s > 0"):
        lp.Full(net, lp.GivenNoise(1.0)).fit([(x, noisy)])


def test_a_convolution_takes_batches_of_which_nothing_was_observed():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(9, 2)).double()
    x, y = torch.randn(6, 2, 5).double(), torch.randn(6, 2).double()
    batches = [(x, y), (x, y * NAN)]
    found, wanted = (lp.KFAC(net, "regression").fit(data).precision_matrix() for data in (batches, batches[:1]))
    assert_close(found, wanted)
