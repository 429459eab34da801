"""Class weights, label smoothing, soft labels and given noise: against torch's losses and dense matrices in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, LabelError, NoGainWarning, UnsupportedError
from laplace_plus.likelihoods import likelihood_from_config
from laplace_plus.predictive import from_functional

WEIGHT = torch.tensor([0.5, 2.0, 1.0]).double()
MODIFIED = [
    {"weight": WEIGHT},
    {"label_smoothing": 0.2},
    {"weight": WEIGHT, "label_smoothing": 0.3},
]


def problem(rows=24, kind="hard"):
    torch.manual_seed(0)
    x = torch.randn(rows, 3).double()
    y = torch.randint(0, 3, (rows,))
    soft = torch.randn(rows, 3).double().softmax(-1)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return net, x, y if kind == "hard" else soft


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("options", [{}, *MODIFIED])
def test_losses_and_derivatives_are_those_of_torch(options, kind):
    _, x, y = problem(kind=kind)
    likelihood, f = lp.Categorical(**options), x.clone().requires_grad_()

    def loss(outputs):
        return cross_entropy(outputs, y, reduction="none", **options)

    rows, targets, _ = likelihood.rows(f, y)
    assert_close(-likelihood.log_density(rows, targets), loss(f))
    assert_close(likelihood.gradient(rows, targets), torch.autograd.grad(loss(f).sum(), f)[0])
    whole = torch.autograd.functional.hessian(lambda outputs: loss(outputs).sum(), x)
    hessian, root = torch.einsum("ncnd->ncd", whole), likelihood.output_root(rows, targets)
    assert_close(root @ root.mT, hessian)
    assert_close(-likelihood.statistics(f, y)[0], loss(f).sum())


@pytest.mark.diagonal
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("options", [{}, *MODIFIED])
def test_curvatures_are_those_of_the_weighted_loss(cls, options, kind):
    net, x, y = problem(kind=kind)
    for parameters in ("all", "last_layer"):
        posterior = cls(net, lp.Categorical(**options), parameters=parameters).fit([(x[:9], y[:9]), (x[9:], y[9:])])
        network = posterior.network
        f = network.forward(x)
        jacobian = torch.func.jacrev(lambda v, n=network: n(x, n.substitute(v)))(network.vector())
        likelihood = posterior.likelihood
        root = likelihood.output_root(*likelihood.rows(f, y)[:2])
        hessian = root @ root.mT
        exact = torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian)
        own = posterior.precision_matrix() - torch.eye(len(exact)).double()
        if cls is lp.Full:
            assert_close(own, exact)
        elif cls is lp.Diagonal:
            assert_close(own.diagonal(), exact.diagonal())
        elif parameters == "last_layer":  # a bias's block is Σ Λ
            assert_close(own[-3:, -3:], exact[-3:, -3:])


def test_predictions_are_without_weights_and_smoothing():
    net, x, y = problem()
    plain = lp.Full(net, "classification").fit([(x, y)])
    posterior = lp.Full(net, lp.Categorical(weight=WEIGHT, label_smoothing=0.1)).fit([(x, y)])
    prediction = posterior(x)
    assert_close(prediction.log_prob(y), prediction.mean.log().gather(1, y[:, None])[:, 0])
    sampled = posterior.predictive(x, method="sampled", n_samples=7, generator=torch.Generator().manual_seed(0))
    assert_close(sampled.log_prob(y), sampled.mean.log().gather(1, y[:, None])[:, 0])
    assert plain(x).likelihood == prediction.likelihood
    fit = -cross_entropy(net(x), y, weight=WEIGHT, label_smoothing=0.1, reduction="none").sum()
    assert_close(posterior.laplace_model().log_likelihood(), fit.detach())


@pytest.mark.parametrize("options", [{}, {"link": "mc"}, {"method": "sampled"}])
def test_soft_labels_are_scored_by_cross_entropy(options):
    net, x, q = problem(kind="soft")
    posterior = lp.KFAC(net, "classification").fit([(x, q)])
    prediction = posterior.predictive(x, generator=torch.Generator().manual_seed(0), **options)
    assert_close(prediction.log_prob(q), (q * prediction.mean.log()).sum(-1))
    with pytest.raises(UnsupportedError, match="joint"):
        posterior.predictive(x, joint=True).log_prob(q)


def test_one_hot_targets_are_class_indices():
    net, x, y = problem()
    one_hot = nn.functional.one_hot(y, 3).double()
    hard, soft = (lp.KFAC(net, "classification").fit([(x, target)]) for target in (y, one_hot))
    assert_close(hard.precision_matrix(), soft.precision_matrix())
    assert_close(hard.log_marginal_likelihood(), soft.log_marginal_likelihood())
    maps = lp.Categorical(output_axis=1)
    flat = maps.rows(torch.zeros(2, 4, 5, 3), torch.eye(3)[torch.randint(0, 3, (2, 4, 5))].movedim(-1, 1))[1]
    assert flat.shape == (40, 3)
    assert (flat.sum(-1) == 1).all()


@pytest.mark.quick("options2")
@pytest.mark.parametrize("options", MODIFIED)
def test_modified_classes_are_tuned_stored_and_refused_where_they_must(options, tmp_path):
    net, x, y = problem()
    likelihood = lp.Categorical(**options)
    assert likelihood_from_config(likelihood.config()) == likelihood
    posterior = lp.KFAC(net, likelihood).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGainWarning)
        posterior.fit_prior_precision()
    posterior.save(tmp_path / "posterior")
    assert torch.equal(lp.load(tmp_path / "posterior", net)(x).mean, posterior(x).mean)
    with pytest.raises(UnsupportedError, match="native"):
        lp.KFAC(net, likelihood, backend=lp.Native("ggn_mc")).fit([(x, y)])
    fisher = lp.Full(net, likelihood, backend=lp.Native("empirical_fisher")).fit([(x, y)])
    gradients = torch.func.vmap(
        torch.func.grad(lambda w, a, b: cross_entropy(torch.func.functional_call(net, w, a[None]), b[None], **loss)),
        in_dims=(None, 0, 0),
    )
    loss = {**options, "reduction": "sum"}
    rows = gradients({name: p.detach() for name, p in net.named_parameters()}, x, y)
    flat = torch.cat([rows[name].flatten(1) for name, _ in net.named_parameters()], 1)
    assert_close(fisher.precision_matrix(), flat.mT @ flat + torch.eye(flat.shape[1]).double())


def test_the_weight_decay_of_a_weighted_mean():
    _, x, y = problem()
    likelihood = lp.Categorical(weight=WEIGHT)
    total = cross_entropy(x, y, weight=WEIGHT, reduction="sum") / cross_entropy(x, y, weight=WEIGHT)
    assert likelihood.n_terms(*likelihood.rows(x, y)[1:], 3) == pytest.approx(float(total))


def test_what_is_no_weight_and_no_distribution():
    net, x, y = problem()
    for wrong in ([-1.0, 1, 1], [0.0, 0, 0], [[1.0]], [float("nan"), 1, 1]):
        with pytest.raises(ConfigurationError, match="weights"):
            lp.Categorical(weight=wrong)
    with pytest.raises(ConfigurationError, match="label_smoothing"):
        lp.Categorical(label_smoothing=1.0)
    for soft in (x, torch.full((24, 3), 0.5).double()):
        with pytest.raises(LabelError, match="distributions"):
            lp.Full(net, "classification").fit([(x, soft)])


# -- given noise -------------------------------------------------------------------------------------------------------


def regression(outputs, *, per_output=True):
    torch.manual_seed(0)
    x, y = torch.randn(12, 3).double(), torch.randn(12, outputs).double()
    noise = 0.2 + torch.rand(12, outputs).double()
    return x, y, noise if per_output else noise[:, 0]


@pytest.mark.parametrize(
    ("outputs", "per_output"),
    [(2, True), *[pytest.param(*case, marks=pytest.mark.slow) for case in ((1, False), (1, True), (2, False))]],
)
def test_given_noise_is_weighted_linear_regression(outputs, per_output):
    """Posterior, predictive and evidence of a linear model at its optimum are exact."""
    x, y, noise = regression(outputs, per_output=per_output)
    each = noise if per_output else noise[:, None].expand_as(y)
    design = torch.cat([x, torch.ones(12, 1).double()], 1)
    net, alpha = nn.Linear(3, outputs).double(), 0.7
    precisions = [design.mT @ (design / s.square()[:, None]) + alpha * torch.eye(4).double() for s in each.unbind(1)]
    best = [torch.linalg.solve(p, design.mT @ (t / s**2)) for p, t, s in zip(precisions, y.T, each.T, strict=True)]
    with torch.no_grad():
        net.weight.copy_(torch.stack(best)[:, :3])
        net.bias.copy_(torch.stack(best)[:, 3])
    data = [(x[:5], (y[:5], noise[:5])), (x[5:], (y[5:], noise[5:]))]
    posterior = lp.Full(net, lp.GivenNoise(0.3), prior_precision=alpha).fit(data)
    new = torch.randn(4, 3).double()
    rows = torch.cat([new, torch.ones(4, 1).double()], 1)
    variance = torch.stack([(rows @ torch.linalg.inv(p) * rows).sum(1) for p in precisions], 1)
    prediction = posterior(new)
    assert_close(prediction.mean, rows @ torch.stack(best).mT)
    assert_close(prediction.epistemic, variance)
    assert_close(prediction.variance, variance + 0.09)
    evidence = sum(
        MultivariateNormal(torch.zeros(12).double(), design @ design.mT / alpha + torch.diag(s**2)).log_prob(t)
        for t, s in zip(y.T, each.T, strict=True)
    )
    assert_close(posterior.log_marginal_likelihood(), evidence)
    target, own = torch.randn(4, outputs).double(), torch.rand(4, outputs).double() + 0.1
    wanted = Normal(prediction.mean, (variance + own**2).sqrt()).log_prob(target).sum(1)
    assert_close(prediction.log_prob(torch.stack([target, own], -1)), wanted)
    without = Normal(prediction.mean, prediction.std).log_prob(target).sum(1)
    assert_close(prediction.log_prob(target), without)
    many = posterior.predictive(new, method="sampled", n_samples=1000, generator=torch.Generator().manual_seed(0))
    assert_close(many.log_prob(torch.stack([target, own], -1)), wanted, rtol=0, atol=0.2)


def test_correlated_outputs_with_given_noise():
    x, y, noise = regression(2)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    prediction = lp.Full(net, lp.GivenNoise(0.3)).fit([(x, (y, noise))])(x)
    covariance = prediction.functional_covariance + torch.diag_embed(noise**2)
    assert_close(
        prediction.log_prob(torch.stack([y, noise], -1)), MultivariateNormal(prediction.mean, covariance).log_prob(y)
    )


@pytest.mark.quick("KFAC", "Diagonal")
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, lp.LowRank])
def test_given_noise_is_tuned_stored_and_predicted(cls, tmp_path):
    x, y, noise = regression(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = [(x, (y, noise))]
    posterior = cls(net, lp.GivenNoise(0.3)).fit(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGainWarning)
        for tuner in ("marginal_likelihood", "validation", "auto"):
            posterior.fit_prior_precision(tuner, data=data if tuner == "validation" else None)
    posterior.save(tmp_path / "posterior")
    loaded = lp.load(tmp_path / "posterior", net)
    assert torch.equal(loaded.predict(data).variance, posterior(x).variance)
    constant = lp.KFAC(net, lp.GivenNoise(0.5)).fit([(x, y)])
    known = lp.KFAC(net, lp.Gaussian(0.5)).fit([(x, y)])
    assert_close(constant.precision_matrix(), known.precision_matrix())
    assert_close(constant.log_marginal_likelihood(), known.log_marginal_likelihood())


def test_what_is_no_noise():
    x, y, noise = regression(2)
    net = nn.Linear(3, 2).double()
    with pytest.raises(LabelError, match="finite floating"):
        lp.Full(net, lp.GivenNoise(0.3)).fit([(x, (y, -noise))])
    with pytest.raises(LabelError, match="one tensor as its target"):
        lp.Full(net, lp.Gaussian(0.3)).fit([(x, (y, noise))])
    for wrong in (0.0, torch.ones(2)):
        with pytest.raises(ConfigurationError, match="noise"):
            lp.GivenNoise(wrong)
    with pytest.raises(UnsupportedError, match="native"):
        lp.Full(net, lp.GivenNoise(0.3), backend=lp.Native("ggn_mc")).fit([(x, (y, noise))])


@pytest.mark.parametrize("link", [link for link in lp.Categorical.links if link != "mc"])
@pytest.mark.parametrize("size", [2, 3])
def test_links_take_half_precision(link, size):
    mean, covariance = torch.randn(5, size).bfloat16(), torch.eye(size).expand(5, size, size).bfloat16()
    found = from_functional(lp.Categorical(), mean, covariance, link=link).mean
    torch.testing.assert_close(found, lp.Categorical().predict(mean.float(), covariance.float(), link=link).mean)
