"""Targets with weights, (x, (y, w)): against repeated rows for whole numbers, dense matrices in float64 for others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus import metrics
from laplace_plus.applications.uses import influence
from laplace_plus.errors import ConfigurationError, InputError, LabelError, OutputError, UnsupportedError
from laplace_plus.likelihoods import likelihood_from_config
from laplace_plus.tuning import noise_from_residuals

N = 24


def laplacian(outputs, targets):
    return torch.distributions.StudentT(4.0, outputs).log_prob(targets.view_as(outputs)).sum(-1)


KINDS = {
    "classes": (lp.Categorical, 3, {}),
    "class weights": (lp.Categorical, 3, {"weight": (0.5, 2.0, 1.0)}),
    "soft": (lp.Categorical, 3, {}),
    "binary": (lp.Bernoulli, 2, {}),
    "rare": (lp.Bernoulli, 2, {"pos_weight": (3.0, 0.5)}),
    "gaps": (lp.Bernoulli, 2, {}),
    "regression": (lp.Gaussian, 2, {"noise_std": 0.7}),
    "gaps in regression": (lp.Gaussian, 2, {"noise_std": torch.tensor([0.5, 2.0])}),
    "heteroscedastic": (lp.HeteroscedasticGaussian, 2, {}),
    "given noise": (lp.GivenNoise, 2, {"new_noise_std": 0.5}),
    "counts": (lp.Poisson, 2, {}),
}


def problem(kind, tokens=0):
    """A network, inputs, targets, whole weights, and the same rows as often as these say."""
    make, size, options = KINDS[kind]
    torch.manual_seed(0)
    shape = (N, tokens) if tokens else (N,)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, size)).double()
    x, noise = torch.randn(*shape, 3).double(), torch.randn(*shape, size).double()
    y = x[..., :size] + noise
    if kind in ("classes", "class weights"):
        y = y.argmax(-1).masked_fill(torch.rand(shape) > 0.9, -100)
    elif kind == "soft":
        y = y.softmax(-1)
    elif make is lp.Bernoulli:
        y = (y > 0).double()
    elif kind == "counts":
        y = y.abs().round()
    elif kind == "heteroscedastic":
        y = y[..., :1]
    elif kind == "given noise":
        y = (y, noise.abs() + 0.3)
    if kind.startswith("gaps"):
        y = y.masked_fill(torch.rand(y.shape) > 0.7, math.nan)
    weight = torch.randint(0, 4, (N,)).double()
    return make(**options), make(**options, weighted=True), net, x, y, weight


def cut(y, some):
    return tuple(own[some] for own in y) if isinstance(y, tuple) else y[some]


def weighted(x, y, w, at=10):
    return [(x[some], (cut(y, some), w[some])) for some in (slice(at), slice(at, None))]


def repeated(x, y, w):
    index = torch.arange(N).repeat_interleave(w.long())
    return [(x[some], cut(y, some)) for some in (index[:7], index[7:])]


CLASSES = {
    "Full": lambda net, likelihood: lp.Full(net, likelihood, prior_precision=2.0),
    "KFAC": lambda net, likelihood: lp.KFAC(net, likelihood, prior_precision=2.0),
    "EKFAC": lambda net, likelihood: lp.KFAC(net, likelihood, prior_precision=2.0, eigenvalue_corrected=True),
    "reduce": lambda net, likelihood: lp.KFAC(net, likelihood, prior_precision=2.0, weight_sharing="reduce"),
    "Diagonal": lambda net, likelihood: lp.Diagonal(net, likelihood, prior_precision=2.0),
    "LowRank": lambda net, likelihood: lp.LowRank(net, likelihood, prior_precision=2.0, rank=20),
    "last": lambda net, likelihood: lp.KFAC(net, likelihood, prior_precision=2.0, parameters="last_layer"),
    "last full": lambda net, likelihood: lp.Full(net, likelihood, prior_precision=2.0, parameters="last_layer"),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_weights_are_repeated_rows(kind, name):
    plain, own, net, x, y, w = problem(kind)
    if name == "LowRank" and plain.n_noise > 1:
        pytest.skip("one noise level")
    a = CLASSES[name](net, own).fit(weighted(x, y, w))
    b = CLASSES[name](net, plain).fit(repeated(x, y, w))
    assert_close(a.log_marginal_likelihood(), b.log_marginal_likelihood())
    assert_close(a.precision_matrix(), b.precision_matrix(), rtol=1e-6, atol=1e-6)
    assert_close(a.predictive(x).mean, b.predictive(x).mean)
    new = cut(y, slice(None))
    assert_close(a.predictive(x).log_prob(new), b.predictive(x).log_prob(new))
    assert repr(a.likelihood.of_new_targets) == repr(plain.of_new_targets)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["Full", "KFAC", "EKFAC", "reduce", "Diagonal", "last"])
@pytest.mark.parametrize("kind", ["classes", "gaps in regression"])
def test_weights_of_sequences(kind, name):
    plain, own, net, x, y, w = problem(kind, tokens=2)
    a = CLASSES[name](net, own).fit(weighted(x, y, w))
    b = CLASSES[name](net, plain).fit(repeated(x, y, w))
    each = CLASSES[name](net, own).fit(weighted(x, y, w[:, None].expand(N, 2)))
    assert_close(a.log_marginal_likelihood(), b.log_marginal_likelihood())
    assert_close(a.precision_matrix(), b.precision_matrix())
    assert_close(each.precision_matrix(), b.precision_matrix())


@pytest.mark.parametrize("curvature", ["empirical_fisher", "hessian"])
def test_other_curvatures_of_repeated_rows(curvature):
    plain, own, net, x, y, w = problem("classes")
    options = {"prior_precision": 20.0, "backend": lp.Native(curvature)}
    a = lp.Full(net, own, **options).fit(weighted(x, y, w))
    assert_close(a.precision_matrix(), lp.Full(net, plain, **options).fit(repeated(x, y, w)).precision_matrix())


def test_sampled_labels_have_the_weighted_curvature_in_expectation():
    _, own, _, x, y, w = problem("classes")
    net, y = nn.Linear(3, 3).double(), y.clamp_min(0)
    backend = lp.Native("ggn_mc", n_samples=1000)
    found = lp.Full(net, own, prior_precision=1.0, backend=backend)
    found = found.fit([(x, (y, w))], generator=torch.Generator().manual_seed(0)).precision_matrix()
    wanted = lp.Full(net, own, prior_precision=1.0).fit([(x, (y, w))]).precision_matrix()
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 0.05  # standard errors below 0.01


@pytest.mark.quick("gaps in regression", "heteroscedastic")
@pytest.mark.parametrize("kind", ["classes", "rare", "gaps in regression", "heteroscedastic"])
def test_fractional_weights_scale_the_log_likelihood(kind):
    plain, own, net, x, y, _ = problem(kind)
    w = torch.rand(N).double() * 2
    whole, fit = torch.zeros(()).double(), 0.0
    for n in range(N):
        one = lp.Full(net, plain, prior_precision=1.0)
        rows, target, share = plain.rows(net(x[n : n + 1]).detach(), cut(y, slice(n, n + 1)))
        if not share:
            continue
        statistics = plain.statistics(net(x[n : n + 1]).detach(), cut(y, slice(n, n + 1)))
        fit = fit + w[n] * plain.log_likelihood(statistics)
        if kind == "gaps in regression" and bool(
            target.isnan().any()
        ):  # a level for each output, of which one is missing
            one = lp.Full(net, lp.Gaussian(plain.noise_std), prior_precision=1.0)
            one.fit([(x[[n, n]], torch.cat([target, target.nan_to_num()]))])
            both = one.precision_matrix()
            one.fit([(x[[n]], target.nan_to_num())])
            whole = whole + w[n] * (both - one.precision_matrix())
            continue
        one.fit([(x[n : n + 1], cut(y, slice(n, n + 1)))])
        whole = whole + w[n] * (one.precision_matrix() - torch.eye(len(one.mean)).double())
    posterior = lp.Full(net, own, prior_precision=1.0).fit(weighted(x, y, w))
    assert_close(posterior.precision_matrix(), whole + torch.eye(len(whole)).double())
    assert_close(posterior.laplace_model().log_likelihood(), fit)


@pytest.mark.diagonal
@pytest.mark.parametrize("route", ["marginal_likelihood", "validation", "leave_one_out", "residuals"])
@pytest.mark.parametrize("kind", ["gaps in regression", "classes", "regression"])
@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")  # the network is not trained
def test_tuning_is_that_of_repeated_rows(kind, route):
    plain, own, net, x, y, w = problem(kind)
    if (kind, route) == ("classes", "residuals"):
        pytest.skip("no noise")
    found, values = [], []
    for likelihood, data in ((own, weighted(x, y, w)), (plain, repeated(x, y, w))):
        posterior = lp.Full(net, likelihood, prior_precision=1.0).fit(data)
        if route == "residuals":
            estimate = noise_from_residuals(posterior)
            found.append(torch.stack([estimate.noise_std, estimate.target_std]))
            continue
        options = {
            "validation": {"data": data, "grid": [0.1, 1.0, 10.0]},
            "leave_one_out": {"training_prior_precision": 1.0},
        }.get(route, {})
        posterior.fit_prior_precision(route, **options)
        noise = posterior.noise_std
        found.append(torch.cat([posterior.prior_precision[None], *([] if noise is None else [noise.view(-1)])]))
        values.append(posterior.tuning.value)
    assert_close(*found, rtol=1e-5, atol=0)
    assert values == [] or values[0] == pytest.approx(values[1])


def test_a_loss_of_ones_own_is_one_number_a_datum():
    _, own, net, x, y, w = problem("classes")
    posterior = lp.Full(net, own).fit(weighted(x, y, w))
    with pytest.raises(ConfigurationError, match="one number for each datum"):
        posterior.fit_prior_precision("validation", data=weighted(x, y, w), loss=lambda p, t: -p.log_prob(t).sum())


def test_left_out_residuals_of_fractions():
    """By hand: without a row's weight, or the weight one of it."""
    torch.manual_seed(0)
    x, y, w = torch.randn(12, 3).double(), torch.randn(12, 1).double(), torch.rand(12).double() * 3
    net = nn.Linear(3, 1, bias=False).double()
    estimate = noise_from_residuals(lp.Full(net, lp.Gaussian(weighted=True)).fit([(x, (y, w))]))

    def mean_square(ridge):
        left = []
        for n in range(12):
            share = w.clone()
            share[n] = max(float(w[n]) - 1, 0.0)
            weights = torch.linalg.solve(x.T @ (share[:, None] * x) + ridge * torch.eye(3), x.T @ (share * y[:, 0]))
            left.append(y[n, 0] - x[n] @ weights)
        return float(w @ torch.stack(left).square() / w.sum())

    least = min(mean_square(10.0**level) for level in torch.linspace(-3, 4, 60).tolist())
    residual = w @ (net(x).detach() - y)[:, 0].square() / w.sum()
    assert (
        max(least, float(residual)) * (1 - 1e-6) <= float(estimate.noise_std) ** 2 <= 1.05 * max(least, float(residual))
    )


@pytest.mark.quick("heteroscedastic", "classes")
@pytest.mark.parametrize("kind", ["classes", "rare", "heteroscedastic", "regression"])
def test_the_last_layers_bound_is_that_of_repeated_rows(kind):
    plain, own, net, x, y, w = problem(kind)
    bounds = [
        lp.VariationalLastLayer(net, likelihood, prior_precision=1.0).fit(data).elbo()
        for likelihood, data in ((own, weighted(x, y, w)), (plain, repeated(x, y, w)))
    ]
    assert_close(*bounds, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")
def test_conformal_thresholds_and_temperatures_of_repeated_rows():
    plain, own, net, x, y, w = problem("classes")
    for call in (lp.conformalize, lambda p, data: lp.calibrate(p, data, method="temperature")):
        found = []
        for likelihood, data in ((own, weighted(x, y, w)), (plain, repeated(x, y, w))):
            made = call(lp.Full(net, likelihood).fit(data), data)
            found.append(made.thresholds if hasattr(made, "thresholds") else torch.tensor(made.report.calibrated_nll))
        assert_close(*found)


def test_members_of_a_mixture_are_weighed_by_repeated_rows():
    plain, own, net, x, y, w = problem("classes")
    torch.manual_seed(5)
    other, found = nn.Linear(3, 3).double(), []
    for likelihood, data in ((own, weighted(x, y, w)), (plain, repeated(x, y, w))):
        members = [lp.Full(one, likelihood).fit(data) for one in (net, other)]
        found.append(lp.Mixture(members).fit_weights(data).weights)
    assert_close(*found)


def test_influence_is_in_proportion_to_the_weight():
    plain, own, net, x, y, w = problem("regression")
    w = w + 1
    asked = [(x[:2], y[:2])]
    first = torch.cat([torch.zeros(1), w.cumsum(0)[:-1]]).long()
    a = influence(lp.Full(net, own, prior_precision=1.0).fit([(x, (y, w))]), [(x[:2], (y[:2], w[:2]))]).mean
    b = influence(lp.Full(net, plain, prior_precision=1.0).fit(repeated(x, y, w)), asked).mean
    assert_close(a, b[:, first] * w)


def test_scores_are_those_of_repeated_rows():
    torch.manual_seed(0)
    p, y, w = torch.rand(N, 3).softmax(-1), torch.randint(0, 3, (N,)), torch.randint(0, 4, (N,))
    index = torch.arange(N).repeat_interleave(w)
    for score in (metrics.accuracy, metrics.negative_log_likelihood, metrics.brier_score):
        assert_close(score(p, y, weight=w), score(p[index], y[index]))
    assert_close(
        metrics.expected_calibration_error(p, y, weight=w), metrics.expected_calibration_error(p[index], y[index])
    )
    mean, variance, targets = p, torch.rand(N, 3) + 0.1, torch.randn(N, 3).masked_fill(p > 0.45, math.nan)
    for score in (metrics.gaussian_nll, metrics.crps_gaussian):
        assert_close(score(mean, variance, targets, w), score(mean[index], variance[index], targets[index]))
    assert_close(
        metrics.root_mean_squared_error(mean, targets, w), metrics.root_mean_squared_error(mean[index], targets[index])
    )
    with pytest.raises(ConfigurationError, match="weight.*> 0"):
        metrics.accuracy(p, y, weight=0 * w)


@pytest.mark.parametrize("pos_weight", [3.0, (3.0, 0.5)])
def test_pos_weight_is_that_of_torch(pos_weight):
    torch.manual_seed(0)
    f, y = torch.randn(N, 2).double(), (torch.rand(N, 2) > 0.5).double()
    likelihood = lp.Bernoulli(pos_weight=pos_weight)
    loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(pos_weight).double(), reduction="none")
    rows, targets, share = likelihood.rows(f, y)
    assert_close(-likelihood.log_density(rows, targets), loss(f, y).sum(-1))
    leaf = f.clone().requires_grad_()
    assert_close(likelihood.gradient(f, y), torch.autograd.grad(loss(leaf, y).sum(), leaf)[0])
    hessian = torch.autograd.functional.hessian(lambda at: loss(at, y).sum(), f)
    hessian, root = torch.einsum("ncnd->ncd", hessian), likelihood.output_root(f, y)
    assert_close(root @ root.mT, hessian)
    assert_close(likelihood.output_curvature(rows, targets, share).diagonal, hessian.diagonal(dim1=-2, dim2=-1))
    mean = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(pos_weight).double())(f, y)
    assert_close(-likelihood.log_density(f, y).sum() / likelihood.n_terms(y, share, 2), mean)
    assert likelihood_from_config(likelihood.config()) == likelihood
    assert likelihood.of_new_targets == lp.Bernoulli()


def test_weights_survive_a_file(tmp_path):
    _, own, net, x, y, w = problem("regression")
    posterior = lp.Full(net, own).fit([(x, (y, w))])
    posterior.noise_std = 0.3
    posterior.save(tmp_path / "posterior")
    found = lp.load(tmp_path / "posterior", net)
    assert found.likelihood.weighted and repr(found.likelihood) == "Gaussian(noise_std=0.3, weighted=True)"


@pytest.mark.parametrize(
    ("likelihood", "batch", "error", "part"),
    [
        (
            "classification",
            "xyw",
            InputError,
            r"\(x, \(y, w\)\).*weighted=True.*\[\(x, y\) for x, y, index in loader\]",
        ),
        ("classification", "pair", LabelError, "weighted=True"),
        (lp.Categorical(weighted=True), "plain", LabelError, "leave weighted=True out|Leave weighted=True out"),
        (lp.Categorical(weighted=True), "negative", LabelError, "weight of a target.*≥ 0"),
        (lp.Categorical(weighted=True), "shape", LabelError, r"w \[24\].*squeeze"),
        (lp.Bernoulli(pos_weight=(1.0, 2.0)), "plain", OutputError, "2 outputs, or one pos_weight"),
    ],
)
def test_other_batches_are_told_what_to_write(likelihood, batch, error, part):
    _, _, net, x, y, w = problem("classes")
    batches = {
        "xyw": (x, y, w),
        "pair": (x, (y, w)),
        "plain": (x, y),
        "negative": (x, (y, w - 1)),
        "shape": (x, (y, w[:, None].expand(N, 3))),
    }
    with pytest.raises(error, match=part):
        lp.Full(net, likelihood).fit([batches[batch]])


def test_what_has_no_weights():
    _, own, net, x, y, w = problem("classes")
    with pytest.raises(ConfigurationError, match="pos_weight.*> 0"):
        lp.Bernoulli(pos_weight=-1.0)
    with pytest.raises(UnsupportedError, match="cannot draw"):
        lp.Full(net, lp.Bernoulli(pos_weight=2.0), backend=lp.Native("ggn_mc")).fit([(x, torch.zeros(N, 3))])
