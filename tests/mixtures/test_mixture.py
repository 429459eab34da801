"""Mixtures against their definition, torch's own mixtures and integrals on a grid."""

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, InputError, NoGainWarning, UnsupportedError


def fitted(likelihood, n_members=3, n_outputs=3, kind=lp.KFAC):
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64)
    y = torch.randint(0, n_outputs, (40,)) if likelihood == "classification" else torch.sin(2 * x).sum(1, keepdim=True)
    members = []
    for _ in range(n_members):
        net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, n_outputs)).double()
        members.append(kind(net, lp.Gaussian(0.5) if likelihood == "regression" else likelihood).fit([(x, y)]))
    return members, x, y


def test_class_probabilities_are_weighted_means_and_variances_follow_the_law_of_total_variance():
    members, x, y = fitted("classification")
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mixed, own = lp.Mixture(members, weights).predictive(x), [member.predictive(x) for member in members]
    p = sum(w * each.mean for w, each in zip(weights, own, strict=True))
    torch.testing.assert_close(mixed.mean, p, rtol=1e-12, atol=0)
    torch.testing.assert_close(mixed.variance, p * (1 - p), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(mixed.log_prob(y), p.gather(1, y[:, None]).log()[:, 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mixed.entropy(), -(p * p.log()).sum(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mixed.epistemic + mixed.aleatoric, mixed.variance, rtol=1e-8, atol=1e-12)
    soft = torch.nn.functional.one_hot(y, 3).double()
    torch.testing.assert_close(mixed.log_prob(soft), mixed.log_prob(y), rtol=1e-10, atol=1e-12)


def test_mutual_information_of_certain_members_is_that_of_the_index():
    """Members without epistemic uncertainty: I = H[Σ w p_m] − Σ w H[p_m]."""
    members, x, _ = fitted("classification")
    for member in members:
        member.prior_precision = 1e12
    mixed = lp.Mixture(members).predictive(x, link="mc", n_samples=10)
    p = torch.stack([torch.softmax(member.network.forward(x), -1) for member in members])
    each = -(p * p.log()).sum(-1).mean(0)
    expected = -(p.mean(0) * p.mean(0).log()).sum(-1) - each
    torch.testing.assert_close(mixed.mutual_information(), expected, rtol=1e-3, atol=1e-6)


def test_regression_is_a_mixture_of_normals():
    members, x, y = fitted("regression", n_outputs=1)
    weights = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    mixed, own = lp.Mixture(members, weights).predictive(x), [member.predictive(x) for member in members]
    loc, scale = (torch.stack([f(each) for each in own], -1) for f in (lambda p: p.mean, lambda p: p.std))
    expected = MixtureSameFamily(Categorical(weights.expand_as(loc)), Normal(loc, scale))
    torch.testing.assert_close(mixed.log_prob(y), expected.log_prob(y)[:, 0], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mixed.mean, expected.mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mixed.variance, expected.variance, rtol=1e-10, atol=1e-14)
    low, high = mixed.interval(0.9)
    torch.testing.assert_close(expected.cdf(high) - expected.cdf(low), torch.full_like(low, 0.9), rtol=1e-8, atol=0)
    torch.testing.assert_close(mixed.std, expected.variance.sqrt(), rtol=1e-10, atol=1e-14)
    assert torch.equal(mixed.standard_error, torch.zeros_like(mixed.mean))


def test_entropy_and_information_of_a_mixture_of_normals_against_the_integral():
    members, x, _ = fitted("regression", n_members=2, n_outputs=1)
    mixed = lp.Mixture(members, [0.7, 0.3]).predictive(x[:3], generator=torch.Generator().manual_seed(0))
    density = mixed.distribution
    grid = torch.linspace(-12, 12, 2001, dtype=torch.float64)[:, None, None]
    p = density.log_prob(grid.expand(-1, 3, 1)).exp()
    expected = -torch.trapezoid(torch.special.entr(p).neg(), grid[:, 0, 0], dim=0)[:, 0]
    torch.testing.assert_close(mixed.entropy(), expected, rtol=0, atol=4 * 0.7 / 100**0.5)  # 100 draws


def test_equal_members_are_one_and_so_is_a_single_one():
    members, x, y = fitted("regression", n_members=1, n_outputs=1)
    one = members[0].predictive(x)
    for mixture in (lp.Mixture(members), lp.Mixture([members[0], copy.copy(members[0])], [0.2, 0.8])):
        mixed = mixture.predictive(x)
        for name in ("mean", "variance", "epistemic", "aleatoric"):
            torch.testing.assert_close(getattr(mixed, name), getattr(one, name), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(mixed.log_prob(y), one.log_prob(y), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixed.quantile(0.3), one.quantile(0.3), rtol=1e-9, atol=1e-9)
    assert float(lp.Mixture(members).predictive(x).mutual_information().min()) >= 0


def test_standard_errors_are_those_of_independent_members():
    members, x, _ = fitted("classification", n_members=2)
    generator = torch.Generator().manual_seed(0)
    mixed = lp.Mixture(members, [0.25, 0.75]).predictive(x, link="mc", n_samples=20, generator=generator)
    one, two = (each.standard_error for each in mixed.predictions)
    assert bool((one > 0).all() and (two > 0).all())
    expected = ((0.25 * one).square() + (0.75 * two).square()).sqrt()
    torch.testing.assert_close(mixed.standard_error, expected, rtol=1e-12, atol=0)


def test_joint_log_probability_mixes_joint_densities():
    members, x, y = fitted("regression", n_members=2, n_outputs=1)
    mixed = lp.Mixture(members, [0.25, 0.75]).predictive(x[:5], joint=True).log_prob(y[:5])
    own = torch.stack([member.predictive(x[:5], joint=True).log_prob(y[:5]) for member in members])
    expected = (own + torch.tensor([0.25, 0.75], dtype=torch.float64).log()).logsumexp(0)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


def test_evidence_weights_are_the_softmax_of_log_evidences():
    members, _, _ = fitted("regression", n_members=2, n_outputs=1)
    evidences = torch.stack([member.log_marginal_likelihood() for member in members])
    members[int(evidences.argmax())].prior_precision *= 1 + 1e-6
    with pytest.warns(NoGainWarning) if float(evidences.softmax(0).max()) > 0.99 else _nothing():
        mixture = lp.Mixture(members, "evidence")
    evidences = torch.stack([member.log_marginal_likelihood() for member in members])
    torch.testing.assert_close(mixture.weights, evidences.softmax(0).detach())


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def test_weights_of_held_out_data_are_the_optimum():
    """The optimum of a concave problem: the derivative by every weight in use is one, and at most one elsewhere."""
    torch.manual_seed(1)
    nets = [nn.Linear(2, 3).double() for _ in range(4)]
    for net in nets:
        net.weight.data *= 5
    members, held = [lp.Ensemble([net], "classification") for net in nets], torch.randn(400, 2, dtype=torch.float64)
    drawn = torch.multinomial(torch.tensor([0.6, 0.3, 0.1, 0.0]), 400, replacement=True)
    logits = torch.stack([net(held) for net in nets]).detach()[drawn, torch.arange(400)]
    labels = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    mixture = lp.Mixture(members).fit_weights([(held[:300], labels[:300]), (held[300:], labels[300:])])
    p = torch.stack([member.predictive(held).log_prob(labels).exp() for member in members])
    slopes = (p / (mixture.weights @ p)).mean(1)
    used = mixture.weights > 1e-3
    torch.testing.assert_close(slopes[used], torch.ones_like(slopes[used]), rtol=0, atol=1e-3)
    assert bool((slopes <= 1 + 1e-3).all())
    expected = torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64)
    torch.testing.assert_close(mixture.weights, expected, rtol=0, atol=0.15)


def test_errors_name_what_does_not_fit():
    members, x, y = fitted("classification", n_members=2)
    with pytest.raises(ConfigurationError, match="none"):
        lp.Mixture([])
    with pytest.raises(ConfigurationError, match="least weight"):
        lp.Mixture(members, [0.5, -0.5])
    with pytest.raises(ConfigurationError, match="uniform"):
        lp.Mixture(members, "validation")
    with pytest.raises(UnsupportedError, match="evidence"):
        lp.Mixture([lp.Ensemble([nn.Linear(2, 3)], "classification")], "evidence")
    with pytest.raises(DataError, match="cannot be found"):
        lp.Mixture(members).fit_weights([(x, torch.full_like(y, -100))])
    other = lp.KFAC(nn.Linear(2, 2).double(), "classification").fit([(x, y.clamp_max(1))])
    with pytest.raises(ConfigurationError, match="another shape"):
        lp.Mixture([members[0], other]).predictive(x)
    with pytest.raises(ConfigurationError, match="same kind"):
        lp.Mixture([members[0], fitted("regression", 1, 1)[0][0]])


# -- ensembles --------------------------------------------------------------------------------------------------------


def networks(n_outputs, n=4):
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, n_outputs)).double() for _ in range(n)
    ]


def test_probabilities_are_averaged_in_evaluation_mode_and_networks_stay_as_they_are():
    nets, x = networks(3), torch.randn(6, 2, dtype=torch.float64)
    prediction = lp.Ensemble(nets, "classification").predictive(x)
    assert all(net.training for net in nets)
    p = torch.stack([torch.softmax(net.eval()(x), -1) for net in nets]).detach()
    torch.testing.assert_close(prediction.mean, p.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.epistemic, p.var(0, correction=0), rtol=1e-10, atol=1e-14)
    information = -(p.mean(0) * p.mean(0).log()).sum(-1) + (p * p.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.mutual_information(), information, rtol=1e-10, atol=1e-12)


def test_noise_is_the_root_mean_square_of_the_mean_networks_residuals():
    nets, x = networks(2), torch.randn(30, 2, dtype=torch.float64)
    y = torch.randn(30, 2, dtype=torch.float64)
    ensemble = lp.Ensemble(nets, "regression").fit([(x[:20], y[:20]), (x[20:], y[20:])])
    f = torch.stack([net.eval()(x) for net in nets]).detach()
    noise = (f.mean(0) - y).square().mean(0)
    prediction = ensemble.predictive(x)
    torch.testing.assert_close(prediction.variance, f.var(0, correction=0) + noise, rtol=1e-10, atol=0)
    torch.testing.assert_close(prediction.mean, f.mean(0), rtol=1e-12, atol=0)


def test_errors_of_ensembles():
    x = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="number of networks"):
        lp.Ensemble([], "classification")
    with pytest.raises(ConfigurationError, match="another shape"):
        lp.Ensemble([*networks(3, 1), *networks(2, 1)], "classification").predictive(x)
    with pytest.raises(UnsupportedError, match="Gaussian"):
        lp.Ensemble(networks(3), "classification").fit([(x, torch.zeros(2).long())])
    one = networks(1, 1)
    with pytest.raises(ConfigurationError, match="noise_std is out of range"):
        lp.Ensemble(one, "regression").fit([(x, one[0].eval()(x).detach())])
    with pytest.raises(InputError):
        lp.Ensemble(networks(3), "classification").predictive(torch.zeros(2, 7, dtype=torch.float64))
