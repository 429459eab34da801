"""Networks that were trained elsewhere: tuning by folds of rows that they have not seen."""

import math
import warnings

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, UnseenRowsWarning, UnsupportedError
from laplace_plus.tuning import AutoTuning, Unseen, UnseenTuning, noise_from_residuals
from laplace_plus.tuning.new_data import rows_of, surprise
from laplace_plus.tuning.unseen import folds_of

CLASSES = {
    "KFAC": lambda *a: lp.KFAC(*a),
    "EKFAC": lambda *a: lp.KFAC(*a, eigenvalue_corrected=True),
    "Full": lambda *a: lp.Full(*a),
    "Diagonal": lambda *a: lp.Diagonal(*a),
    "LowRank": lambda *a: lp.LowRank(*a, rank=5, remainder_probes=0),
    "last layer": lambda *a: lp.Full(*a, parameters="last_layer"),
    "Subnetwork": lambda *a: lp.Subnetwork(*a, lp.LargestMagnitude(10)),
}


def problem(likelihood="classification", n=60, size=3, overconfident=1.0, seed=0):
    """A network whose outputs are the truth's times a factor, and batches of rows."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, size)).double()
    x = torch.randn(n, 2).double()
    f = net(x).detach() * 2
    if likelihood == "regression":
        y = f / 2 + 0.3 * torch.randn_like(f)
    elif likelihood == "binary":
        y = (torch.rand_like(f) < f.sigmoid()).double()
    else:
        y = torch.distributions.Categorical(logits=f).sample()
    with torch.no_grad():
        if likelihood != "regression":
            for own in net[2].parameters():
                own.mul_(2 * overconfident)
    return net, [(x[i : i + 25], y[i : i + 25]) for i in range(0, n, 25)]


@pytest.mark.quick("binary", "regression")
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
def test_left_out_losses_are_those_of_refits(likelihood):
    net, data = problem(likelihood, size=2, overconfident=4.0)
    posterior = lp.Full(net, likelihood, prior_precision=0.3).fit(data)
    tuned = lp.Full(net, likelihood, prior_precision=0.3).fit(data).fit_prior_precision("unseen")
    found, (x, y) = tuned.tuning, (torch.cat(column) for column in zip(*data, strict=True))
    folds, n = folds_of(posterior.network, data, 5, torch.Generator().manual_seed(0), False)
    assert n == 60 == sum(len(t) for fold in folds for _, t in fold)
    assert {len(fold[0][1]) for fold in folds} == {12}
    total = 0.0
    for fold in folds:
        others = [pair for other in folds if other is not fold for pair in other]
        refit = lp.Full(net, likelihood).fit(others)
        if likelihood == "regression":
            refit.noise_std = tuned.noise_std
        refit.prior_precision = tuned.prior_precision
        refit.link, refit.covariance_scale = tuned.link, tuned.covariance_scale
        refit.output_temperature = tuned.output_temperature
        total -= sum(float(refit.predictive(inputs).log_prob(target).sum()) for inputs, target in fold)
    tolerance = 1e-9 if found.chosen != "network" or likelihood != "regression" else 1e-3
    assert total / 60 == pytest.approx(-found.value, abs=tolerance)
    if likelihood == "regression":
        residual = (y - net(x)).square().mean(0).sqrt()
        assert torch.allclose(tuned.noise_std / tuned.noise_std[0], (residual / residual[0]).to(tuned.noise_std))
    else:
        assert found.chosen != "network" and tuned.output_temperature > 2 and found.expected_gain > 0.1


@pytest.mark.quick("EKFAC", "LowRank", "Subnetwork")
@pytest.mark.parametrize("name", CLASSES)
def test_every_gaussian_class_finds_the_temperature(name):
    net, data = problem(overconfident=4.0)
    found = CLASSES[name](net, "classification").fit(data).fit_prior_precision("unseen")
    assert 1.5 < found.output_temperature < 12 and found.tuning.converged
    x, y = problem(n=2000, overconfident=4.0)[1][-1]
    assert float(found.predictive(x).log_prob(y).mean()) > -float(nn.functional.cross_entropy(net(x).detach(), y))


@pytest.mark.quick("regression")
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_in_doubt_the_network_predicts(likelihood):
    net, data = problem(likelihood, n=200)
    posterior = lp.KFAC(net, likelihood).fit(data).fit_prior_precision("unseen")
    x = data[0][0]
    assert posterior.tuning.chosen == "network" and posterior.tuning.expected_gain == 0
    assert "clearly" in posterior.tuning.why
    prediction = posterior.predictive(x)
    if likelihood == "classification":
        assert torch.allclose(prediction.mean, net(x).softmax(-1), atol=1e-6)
    else:  # all but the network
        assert bool((prediction.epistemic < 1e-2 * prediction.variance).all())


def test_the_generator_draws_the_folds():
    net, data = problem(overconfident=4.0)
    posterior = lp.Full(net, "classification", parameters="last_layer").fit(data)

    def tuned(seed):
        source = None if seed is None else torch.Generator().manual_seed(seed)
        return posterior.fit_prior_precision("unseen", generator=source).tuning.losses[-1]

    assert tuned(1) == tuned(1) != tuned(2)
    assert tuned(None) == tuned(0)


def test_rows_of_the_fit_are_needed():
    net, data = problem()
    posterior = lp.Full(net, "classification").fit(iter(data))
    with pytest.raises(DataError, match="data=train_loader"):
        posterior.fit_prior_precision("unseen")
    with pytest.raises(DataError, match="not the rows of the fit"):
        posterior.fit_prior_precision("unseen", data=data[:1])
    assert posterior.fit_prior_precision("unseen", data=data).tuning.method == "unseen"
    few = [(data[0][0][:9], data[0][1][:9])]
    with pytest.raises(DataError, match="too few rows"):
        lp.Full(net, "classification").fit(few).fit_prior_precision("unseen")
    with pytest.raises(ConfigurationError):
        Unseen(folds=1)
    ranked = lp.LogDensity(lambda f, y: f[:, 0].log_softmax(0), couples_rows=True)
    with pytest.raises(UnsupportedError, match="left out"):
        lp.Full(net, ranked).fit(data).fit_prior_precision("unseen")


# -- the temperature of the outputs ------------------------------------------------------------------------------------


@pytest.fixture
def warm():
    net, data = problem()
    posterior = lp.KFAC(net, "classification", parameters="last_layer").fit(data)
    posterior.output_temperature, posterior.covariance_scale = 2.0, 0.5
    return net, data[0][0], posterior


@pytest.mark.parametrize("link", ["gumbel", "probit", "network", "mc", "bridge"])
def test_predictions_are_at_the_temperature(warm, link):
    _, x, posterior = warm
    mean, covariance = posterior.functional_posterior(x)
    options = {"link": link, "generator": torch.Generator().manual_seed(1)}
    expected = lp.predictive.from_functional(posterior.likelihood, mean / 2, covariance / 4, **options)
    found = posterior.predictive(x, link=link, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(found.mean, expected.mean) and torch.allclose(found.functional_mean, mean / 2)
    assert torch.allclose(posterior.predict([(x,)], link=link).functional_mean, mean / 2)


def test_samples_are_at_the_temperature(warm):
    _, x, posterior = warm
    options = {"method": "sampled", "n_samples": 3}
    hot = posterior.predictive(x, generator=torch.Generator().manual_seed(0), **options)
    posterior.output_temperature = 1.0
    cold = posterior.predictive(x, generator=torch.Generator().manual_seed(0), **options)
    assert torch.allclose(hot.functional_samples, cold.functional_samples / 2)


def test_estimated_variances_are_at_the_temperature():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 600)).double()
    x, y = torch.randn(8, 2).double(), torch.arange(8)
    posterior = lp.Diagonal(net, "classification").fit([(x, y)])
    cold = posterior.predictive(x, link="probit", n_samples=5)
    posterior.output_temperature = 2.0
    hot = posterior.predictive(x, link="probit", n_samples=5)
    assert torch.allclose(hot.without_each(), cold.without_each() / 4)


def test_a_file_keeps_the_temperature(warm, tmp_path):
    net, x, posterior = warm
    posterior.save(tmp_path / "p")
    loaded = lp.load(tmp_path / "p", net)
    assert loaded.output_temperature == 2 and torch.allclose(loaded.predictive(x).mean, posterior.predictive(x).mean)


def test_a_new_prior_or_fit_forgets_it(warm):
    _, _, posterior = warm
    data = posterior.training_data.first
    posterior.prior_precision = 2.0
    assert posterior.output_temperature == 1
    posterior.output_temperature = 3.0
    assert posterior.fit(data).output_temperature == 1
    posterior.output_temperature = 3.0
    assert posterior.fit_prior_precision("marginal_likelihood").output_temperature == 1


def test_applications_know_it(warm):
    net, x, posterior = warm
    p = posterior.predictive(x).mean
    y = p.argmax(-1)
    conformal = lp.conformalize(posterior, [(x, y)], level=0.8)
    k = math.ceil(0.8 * (len(x) + 1))
    assert float(conformal.thresholds) == pytest.approx(float((1 - p.amax(-1)).sort().values[k - 1]))
    assert torch.allclose(lp.through(posterior, net, "classification").predictive(x).mean, p)
    numbers = lp.through(posterior, lambda x: net(x)[:, :1], "regression").predictive(x)
    assert torch.allclose(numbers.mean, net(x)[:, :1])
    for link in ("gumbel", "probit", "network"):
        frozen = lp.freeze(posterior, x, link)(x)
        assert torch.allclose(frozen.mean, posterior.predictive(x, link=link).mean)
    assert torch.allclose(posterior.predict_proba(x), p)


@pytest.mark.parametrize("make", [lp.Full, lp.Diagonal])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_frozen_copies_are_at_the_temperature(make, size, bias):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, size, bias=bias)).double()
    x, y = torch.randn(20, 2).double(), torch.arange(20) % size
    posterior = make(net, "classification", parameters="last_layer").fit([(x, y)])
    posterior.output_temperature = 2.5
    assert torch.allclose(lp.freeze(posterior, x)(x).mean, posterior.predictive(x).mean)


# -- rows that stand for others ----------------------------------------------------------------------------------------


@pytest.mark.diagonal
@pytest.mark.parametrize("likelihood", ["classification", "binary", "regression"])
@pytest.mark.parametrize("name", CLASSES)
def test_rows_that_stand_for_others_count_as_copies(name, likelihood, tmp_path):
    net, data = problem(likelihood, size=2)
    found = CLASSES[name](net, likelihood).fit(data, n_trained=180)
    copies = CLASSES[name](net, likelihood).fit([(x.repeat(3, 1), y.repeat(3, *[1] * (y.ndim - 1))) for x, y in data])
    assert found.n_data == copies.n_data == 180
    assert found.likelihood.config() == copies.likelihood.config()
    evidence = float(copies.log_marginal_likelihood(0.7))
    assert float(found.log_marginal_likelihood(0.7)) == pytest.approx(
        evidence, rel=1e-6 if name == "LowRank" else 1e-11
    )
    x = data[0][0]
    expected = copies.functional_posterior(x).covariance
    tolerance = 1e-3 if name == "LowRank" else 1e-9
    assert torch.allclose(found.functional_posterior(x).covariance, expected, rtol=tolerance)
    found.save(tmp_path / "p")
    assert float(lp.load(tmp_path / "p", net).log_marginal_likelihood(0.7)) == float(found.log_marginal_likelihood(0.7))


def test_rows_stand_for_no_fewer_than_they_are():
    net, data = problem()
    with pytest.raises(ConfigurationError, match="n_trained"):
        lp.Full(net, "classification").fit(data, n_trained=59)
    with pytest.raises(DataError, match="counted"):
        lp.Full(net, "classification").fit(iter(data), n_trained=100)
    same = lp.Full(net, "classification").fit(data, n_trained=60)
    assert torch.allclose(same.precision_matrix(), lp.Full(net, "classification").fit(data).precision_matrix())


def test_the_evidence_of_a_part_is_near_that_of_the_whole():
    torch.manual_seed(0)
    x = torch.randn(1000, 4).double()
    y = (x @ torch.randn(4, 3).double() + 0.5 * torch.randn(1000, 3).double()).argmax(-1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x), y) + 1e-3 * sum(w.square().sum() for w in net.parameters())).backward()
        optimizer.step()
    whole = lp.KFAC(net, "classification").fit([(x, y)]).fit_prior_precision("marginal_likelihood")
    part = lp.KFAC(net, "classification").fit([(x[:100], y[:100])], n_trained=1000)
    part.fit_prior_precision("marginal_likelihood")
    assert abs(float((part.prior_precision / whole.prior_precision).log())) < 0.2


# -- rows that the default finds unseen --------------------------------------------------------------------------------


def trained(likelihood, seed, steps=100, n=150):
    """A network that has learnt noisy labels of n rows by heart, as far as steps go, these and 300 others."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 300, 3, generator=source)
    f = x[:, :1] + x[:, 1:2] * x[:, 2:] + 0.7 * torch.randn(n + 300, 1, generator=source)
    y = {"classification": (f[:, 0] > 0).long(), "binary": (f > 0).float(), "regression": f}[likelihood]
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 2 if likelihood == "classification" else 1))
    loss = {"classification": nn.CrossEntropyLoss(), "binary": nn.BCEWithLogitsLoss(), "regression": nn.MSELoss()}
    optimizer = torch.optim.Adam(net.parameters(), 5e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss[likelihood](net(x[:n]), y[:n]).backward()
        optimizer.step()
    return net, (x[:n], y[:n]), (x[n:], y[n:])


def surprise_of(net, likelihood, x, y):
    network = lp.Full(net, likelihood, parameters="last_layer").fit([(x, y)])
    return surprise(network.likelihood, rows_of(network.network, network.likelihood, [(x, y)], len(x)))


@pytest.mark.quick("1-binary", "2-classification")
@pytest.mark.parametrize("likelihood", ["classification", "binary"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_training_do_not_surprise(likelihood, seed):
    for steps in (20, 100):
        net, own, _ = trained(likelihood, seed, steps)
        assert surprise_of(net, likelihood, *own) < 2.5


@pytest.mark.quick("classification")
@pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")
@pytest.mark.parametrize("likelihood", ["classification", "binary"])
def test_the_default_notices_unseen_rows(likelihood):
    net, own, (x, y) = trained(likelihood, 0)
    if likelihood == "classification":
        law = torch.distributions.Categorical(logits=net(x).detach().double())
        expected, draws = law.entropy(), law.probs * law.logits.square()
        z = (-law.log_prob(y) - expected).sum() / (draws.sum(1) - expected.square()).sum().sqrt()
        assert surprise_of(net, likelihood, x, y) == pytest.approx(float(z), rel=1e-6)
        assert surprise_of(net, lp.Categorical(label_smoothing=0.1), x, y) == 0
        ignored = torch.cat([y, torch.full((5,), -100)])
        assert surprise_of(net, "classification", torch.cat([x, x[:5]]), ignored) == pytest.approx(float(z), rel=1e-6)
    posterior = lp.Full(net, likelihood, parameters="last_layer").fit([(x, y)])
    with pytest.warns(UnseenRowsWarning, match="standard errors above") as seen:
        posterior.fit_prior_precision()
    assert len(seen) == 1 and isinstance(posterior.tuning, UnseenTuning) and posterior.output_temperature > 1.5
    assert isinstance(posterior.fit_prior_precision(seen=True).tuning, AutoTuning)
    assert isinstance(
        lp.Full(net, likelihood, parameters="last_layer").fit([own]).fit_prior_precision().tuning, AutoTuning
    )
    stands = lp.Full(net, likelihood, parameters="last_layer").fit([(x, y)], n_trained=600)
    with pytest.warns(UnseenRowsWarning, match="could not tune"):
        stands.fit_prior_precision()
    assert isinstance(stands.tuning, AutoTuning)


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")
def test_residuals_beyond_the_targets_deviation_are_noticed():
    net, own, (x, y) = trained("regression", 0)
    posterior = lp.Full(net, "regression", parameters="last_layer")
    assert isinstance(posterior.fit([own]).fit_prior_precision().tuning, AutoTuning)
    far = x, -y
    with pytest.warns(UnseenRowsWarning, match="times the deviation of the targets") as seen:
        posterior.fit([far]).fit_prior_precision()
    assert len(seen) == 1 and isinstance(posterior.tuning, UnseenTuning)


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")
def test_honest_residuals_are_told_from_fitted_ones():
    """Least squares of 300 rows by 270 weights, and the weights of the truth: both err less than left-out rows."""
    source = torch.Generator().manual_seed(0)
    x, truth = torch.randn(300, 270, generator=source).double(), torch.randn(270, 1, generator=source).double() / 20
    y = x @ truth + 0.1 * torch.randn(300, 1, generator=source).double()
    net = nn.Linear(270, 1, bias=False).double()
    posterior = lp.Diagonal(net, "regression")
    with torch.no_grad():
        net.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    estimate = noise_from_residuals(posterior.fit([(x, y)]))
    assert estimate.marks[0] < -0.5 and not estimate.is_honest
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnseenRowsWarning)
        posterior.fit_prior_precision()
    with torch.no_grad():
        net.weight.copy_(truth.T)
    estimate = noise_from_residuals(posterior.fit([(x, y)]))
    assert estimate.is_honest and estimate.noise_std > 0.15
    with pytest.warns(UnseenRowsWarning, match="no marks"):
        posterior.fit_prior_precision()
    assert isinstance(posterior.tuning, UnseenTuning) and 0.08 < posterior.noise_std < 0.12
    assert isinstance(posterior.fit_prior_precision(seen=True).tuning, AutoTuning)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_samples_are_drawn_anew_for_each_fold(likelihood):
    net, data = problem(likelihood, overconfident=4.0)
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    posterior = lp.SampledLaplace(net, likelihood, n_samples=3, prior_precision=30.0, parameters="last_layer")
    before = posterior.fit([(x, y)]).functional_posterior(x).covariance
    posterior.covariance_scale = 0.25
    assert torch.allclose(posterior.functional_posterior(x).covariance, before / 4)
    assert torch.allclose((posterior.samples - posterior.mean) * 2, posterior.state.samples)
    posterior.fit_prior_precision("unseen", folds=2)
    assert posterior.predictive(x).mean.isfinite().all() and posterior.tuning.method == "unseen"
    if likelihood == "classification":
        assert posterior.output_temperature > 1.5
    else:
        assert 0.8 < float(posterior.noise_std.mean() / (y - net(x)).detach().square().mean().sqrt()) < 1.2
