"""Conformal sets and intervals: exact coverage of exchangeable draws, ties, small data, groups, saving."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.applications import conformal
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.predictive import from_functional

N, CALIBRATIONS = 20, 100


class Known:
    """Predicts from outputs that are given as the inputs, without variance."""

    def __init__(self, likelihood):
        self.likelihood, self.network = likelihood, SimpleNamespace(device="cpu")
        self.n_data, self.link, self.covariance_scale = 1, None, 1.0

    def require_fit(self):
        pass

    def predictive(self, x, *, generator=None):
        link = "network" if self.likelihood.is_classifier else "exact"
        return from_functional(self.likelihood, x, torch.zeros_like(x), link=link, generator=generator)


def classes(n, generator, *, rounded=False):
    """Logits of four classes, and labels that do not follow them."""
    logits = 2 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
    true = (0.3 * logits).softmax(-1)
    labels = torch.multinomial(true, 1, generator=generator)[:, 0]
    return (logits.round() if rounded else logits), labels


@pytest.mark.parametrize("n", [9, 30])
def test_thresholds_cover_as_often_as_the_ranks_say(n):
    """Without ties, the next of n + 1 exchangeable scores is below the threshold with ⌈(n+1) level⌉/(n+1)."""
    level, repetitions = 0.85, 2000
    scores = torch.randn(n + 1, repetitions, generator=torch.Generator().manual_seed(n), dtype=torch.float64).exp()
    covered = (scores[n] <= conformal.threshold(scores[:n], level, torch.ones_like(scores[:n]))).double()
    wanted = math.ceil((n + 1) * level) / (n + 1)
    assert abs(covered.mean() - wanted) < 3 * covered.std() / repetitions**0.5


@pytest.mark.quick("threshold", "regularized")
@pytest.mark.parametrize("score", ["threshold", "adaptive", "regularized"])
def test_sets_cover_as_often_as_promised(score):
    """From end to end: the coverage of one calibration is random, its mean over calibrations is known.

    Its standard error is 0.01: a rank too low, 1/21, is almost 5 of them.
    """
    generator, n, level, m = torch.Generator().manual_seed(0), N, 0.8, 200
    posterior, covered = Known(lp.Categorical()), []
    for _ in range(CALIBRATIONS):
        logits, labels = classes(n + m, generator)
        made = lp.conformalize(posterior, [(logits[:n], labels[:n])], level=level, score=score, generator=generator)
        held = made.predict_set(logits[n:], generator=generator).gather(1, labels[n:, None])
        covered.append(float(held.double().mean()))
    check_coverage(covered)


def check_coverage(covered):
    """Of calibrations on 20 data at the level 0.8: ⌈0.8 · 21⌉/21 = 17/21, where ⌈0.8 · 20⌉ = 16 would be too few."""
    covered = torch.tensor(covered)
    error = covered.std() / CALIBRATIONS**0.5
    assert len(covered) == CALIBRATIONS and error < 0.0105
    assert abs(covered.mean() - 17 / 21) < 3 * error


@pytest.mark.parametrize("score", ["scaled", "residual", "quantile"])
def test_intervals_cover_as_often_as_promised(score):
    generator, n, m, covered = torch.Generator().manual_seed(1), N, 200, []
    posterior = Known(lp.HeteroscedasticGaussian())
    for _ in range(CALIBRATIONS):
        f = torch.randn(n + m, 2, generator=generator, dtype=torch.float64)
        y = f[:, 0] + 3 * f[:, 1].exp() * torch.randn(n + m, generator=generator, dtype=torch.float64)
        made = lp.conformalize(posterior, [(f[:n], y[:n])], level=0.8, score=score)
        low, high = made.interval(f[n:])
        covered.append(float(((low[:, 0] <= y[n:]) & (y[n:] <= high[:, 0])).double().mean()))
    check_coverage(covered)


def test_few_data_give_full_sets():
    logits, labels = classes(8, torch.Generator().manual_seed(0))
    assert lp.conformalize(Known(lp.Categorical()), [(logits, labels)]).predict_set(logits).all()
    low, high = lp.conformalize(Known(lp.Gaussian()), [(logits[:, :1], logits[:, 1:2])]).interval(logits[:, :1])
    assert low.isinf().all() and high.isinf().all()


def test_scores_by_hand():
    """p = (.5, .3, .2), label 1; and equal probabilities."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).double().log()
    known = torch.Generator().manual_seed(5)
    _ = draw_seed(known)  # the prediction's
    u = float(torch.rand(1, 1, generator=known, dtype=torch.float64))
    wanted = {"threshold": 0.7, "adaptive": 0.5 + 0.3 * u, "regularized": 0.5 + 0.3 * u}
    for score, value in wanted.items():
        source = torch.Generator().manual_seed(5)
        data = [(logits, torch.tensor([1]))]
        made = lp.conformalize(Known(lp.Categorical()), data, level=0.5, score=score, generator=source)
        assert float(made.thresholds) == pytest.approx(value)
    many = torch.full((1, 8), 1 / 8).double().log()
    many[0, 7] -= 1  # the least probable has rank 8: a penalty of .01 · 3
    source = torch.Generator().manual_seed(5)
    made = lp.conformalize(
        Known(lp.Categorical()), [(many, torch.tensor([7]))], level=0.5, score="regularized", generator=source
    )
    p = many.softmax(-1)[0]
    assert float(made.thresholds) == pytest.approx(float(p[:7].sum() + u * p[7]) + 0.03)


def test_ties_only_enlarge_sets():
    generator = torch.Generator().manual_seed(2)
    logits, labels = classes(4000, generator, rounded=True)
    for score in conformal.CLASS_SCORES:
        made = lp.conformalize(
            Known(lp.Categorical()), [(logits[:2000], labels[:2000])], level=0.8, score=score, generator=generator
        )
        held = made.predict_set(logits[2000:], generator=generator).gather(1, labels[2000:, None]).double()
        assert held.mean() > 0.8 - 4 * (0.16 / 2000 + 0.16 / 2000) ** 0.5


def test_groups_are_covered_one_by_one():
    generator = torch.Generator().manual_seed(3)
    logits, labels = classes(8000, generator)
    halves = (logits[:4000], labels[:4000]), (logits[4000:], labels[4000:])
    posterior = Known(lp.Categorical())
    by_class = lp.conformalize(posterior, [halves[0]], level=0.9, by="class")
    sets = by_class.predict_set(halves[1][0])
    for k in range(4):
        own = sets[halves[1][1] == k, k].double()
        assert abs(own.mean() - 0.9) < 4 * (0.09 / len(own) * 2) ** 0.5
    numbers = Known(lp.Gaussian())
    f = torch.randn(4000, 1, generator=generator).double()
    y = f + torch.where(f > 0, 3.0, 0.5) * torch.randn(4000, 1, generator=generator).double()
    made = lp.conformalize(numbers, [(f[:2000], y[:2000])], by=lambda x: (x[:, 0] > 0).long())
    low, high = made.interval(f[2000:])
    for side in (f[2000:] > 0, f[2000:] <= 0):
        own = ((low <= y[2000:]) & (y[2000:] <= high))[side].double()
        assert abs(own.mean() - 0.9) < 4 * (0.09 / len(own) * 2) ** 0.5
    narrow = lp.conformalize(numbers, [(f[:2000], y[:2000])], by=lambda x: torch.zeros(len(x)))
    unseen = lp.conformalize(numbers, [(f[:50], y[:50])], by=lambda x: torch.full((len(x),), 2))
    assert unseen.thresholds[:2].isinf().all()
    assert narrow.thresholds.shape == (1, 1)


def fitted(likelihood="classification"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = torch.randn(60, 3).double()
    y = torch.randint(0, 3, (60,)) if likelihood == "classification" else torch.randn(60, 3).double()
    return lp.KFAC(net, likelihood).fit([(x[:30], y[:30])]), net, x, y


@pytest.mark.parametrize(
    ("likelihood", "by"), [("classification", None), ("classification", "class"), ("regression", None)]
)
def test_saved_and_loaded_thresholds_hold_for_the_posterior_as_it_was(likelihood, by, tmp_path):
    posterior, net, x, y = fitted(likelihood)
    made = lp.conformalize(posterior, [(x[30:], y[30:])], level=0.97 if by else 0.9, by=by)
    made.save(tmp_path / "conformal")
    loaded = lp.load(tmp_path / "conformal", net)
    call = "predict_set" if likelihood == "classification" else "interval"
    for own, other in zip(getattr(made, call)(x), getattr(loaded, call)(x), strict=True):
        assert torch.equal(own, other)
    assert torch.equal(loaded.predictive(x).mean, posterior(x).mean)
    known = getattr(made, call)(x)
    posterior.fit([(x[:30], y[:30].flip(0))])
    posterior.prior_precision = 7.0 * posterior.prior_precision
    for own, other in zip(known, getattr(made, call)(x), strict=True):
        assert torch.equal(own, other)


def test_a_calibrated_posterior_is_conformalized_and_saved(tmp_path):
    posterior, net, x, y = fitted()
    calibrated = lp.calibrate(posterior, fallback="marginal_likelihood")
    made = lp.conformalize(calibrated, [(x[30:], y[30:])])
    made.save(tmp_path / "both")
    loaded = lp.load(tmp_path / "both", net)
    assert isinstance(loaded.posterior, lp.CalibratedPosterior)
    assert torch.equal(loaded.predict_set(x), made.predict_set(x))


def test_what_cannot_be_conformal_is_refused(tmp_path):
    posterior, net, x, y = fitted()
    data = [(x[30:], y[30:])]
    for options in ({"score": "scaled"}, {"level": 1.0}, {"by": "colour"}):
        with pytest.raises(ConfigurationError):
            lp.conformalize(posterior, data, **options)
    with pytest.raises(UnsupportedError, match="predict_set"):
        lp.conformalize(posterior, data).interval(x)
    with pytest.raises(ConfigurationError, match="targets that count"):
        lp.conformalize(posterior, [(x, torch.full((60,), -100))])
    with pytest.raises(DataError, match="Soft labels"):
        lp.conformalize(posterior, [(x, torch.full((60, 3), 1 / 3).double())])
    with pytest.raises(ConfigurationError, match="function"):
        lp.conformalize(posterior, data, by=lambda x: torch.zeros(len(x))).save(tmp_path / "no")
    several = lp.KFAC(net, "binary").fit([(x, (x > 0).double())])
    with pytest.raises(UnsupportedError, match="binary"):
        lp.conformalize(several, [(x, (x > 0).double())])


# -- streams that drift ------------------------------------------------------------------------------------------------


def stream(kind, generator, n=6000):
    """Outputs and targets whose spread or labels change for good, and back, and change slowly."""
    t = torch.arange(n) / n
    if kind == "numbers":
        f = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        spread = torch.where((t > 0.2) & (t < 0.4), 6.0, 1 + 4 * (t - 0.6).clamp_min(0))
        return f, f + spread[:, None] * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    logits, labels = classes(n, generator)
    other = torch.randint(0, 4, (n,), generator=generator)
    return logits, torch.where(torch.rand(n, generator=generator) < t, other, labels)


@pytest.mark.parametrize(("kind", "rows"), [("numbers", 1), ("numbers", 40), ("classes", 20)])
def test_coverage_of_a_stream_is_the_level_in_the_long_run(kind, rows):
    """Gibbs and Candès' bound, (1 + rate B) / (rate T), holds for every stream; thresholds that stay miss far more."""
    generator, rate, level = torch.Generator().manual_seed(0), 0.05, 0.9
    f, y = stream(kind, generator, 300 if rows == 1 else 4000)
    posterior = Known(lp.Gaussian() if kind == "numbers" else lp.Categorical())
    known, first = (f[:200], y[:200]) if kind == "classes" else (f[:200], f[:200] + torch.randn(200, 2).double())
    now = still = lp.conformalize(posterior, [(known, first)], level=level)

    def missed(conformal, x, target):
        if kind == "classes":
            return ~conformal.predict_set(x).gather(1, target[:, None])
        low, high = conformal.interval(x)
        return (target < low) | (target > high)

    errors, fixed = [], []
    for x, target in zip(f.split(rows), y.split(rows), strict=True):
        errors.append(missed(now, x, target))
        fixed.append(missed(still, x, target))
        now = now.adapt(x, target, rate=rate)
    share = torch.cat(errors).double().mean(0)
    assert (share - (1 - level)).abs().max() <= (1 + rate * rows) / (rate * len(f)) + 1e-12
    assert torch.cat(fixed).double().mean() > (0.25 if kind == "numbers" else 0.14) and len(now.scores) == 200


def test_a_stream_without_a_drift_keeps_the_threshold_of_its_latest_scores():
    generator = torch.Generator().manual_seed(0)
    logits, labels = classes(300, generator)
    made = lp.conformalize(Known(lp.Categorical()), [(logits[:200], labels[:200])])
    moved = made.adapt(logits[200:], labels[200:], rate=1e-9)
    again = lp.conformalize(Known(lp.Categorical()), [(logits[100:], labels[100:])])
    assert torch.equal(moved.thresholds, again.thresholds) and made.current is None
    low = made.adapt(logits[200:], logits[200:].argmax(1), rate=1.0)  # all held: a level below 0 holds nothing
    assert not low.predict_set(logits).any() and low.adapt(logits[:90], labels[:90], rate=1.0).predict_set(logits).all()
    with pytest.raises(UnsupportedError, match="groups"):
        lp.conformalize(Known(lp.Categorical()), [(logits, labels)], by="class").adapt(logits, labels)


def test_a_stream_goes_on_after_loading(tmp_path):
    posterior, net, x, y = fitted("regression")
    made = lp.conformalize(posterior, [(x[30:], y[30:])], level=0.8).adapt(x[:5], y[:5])
    made.save(tmp_path / "stream")
    loaded = lp.load(tmp_path / "stream", net)
    assert torch.equal(loaded.adapt(x[5:9], y[5:9]).thresholds, made.adapt(x[5:9], y[5:9]).thresholds)


# -- networks alone, noise, serving ------------------------------------------------------------------------------------


def test_a_network_alone_has_sets_and_intervals():
    _, net, x, y = fitted()
    net.requires_grad_(False)
    made = lp.conformalize(net, [(x, y)], likelihood="classification")
    known = lp.conformalize(Known(lp.Categorical()), [(net(x), y)])
    assert torch.equal(made.predict_set(x), known.predict_set(net(x)))
    y = torch.randn(60, 3).double()
    made = lp.conformalize(net, [(x, y)], likelihood="regression", level=0.8)
    residual = lp.conformalize(net, [(x, y)], likelihood="regression", level=0.8, score="residual")
    for own, other in zip(made.interval(x), residual.interval(x), strict=True):
        torch.testing.assert_close(own, other)
    noise = (net(x) - y).square().mean(0).sqrt()  # fitted, not one
    torch.testing.assert_close(made.predictive(x).std, noise.expand(60, 3))
    with pytest.raises(ConfigurationError, match="likelihood="):
        lp.conformalize(net, [(x, y)])
    with pytest.raises(ConfigurationError, match="is not saved"):
        made.save("nowhere")


def test_intervals_of_a_learnt_noise_are_narrow_where_the_noise_is_small():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1800, 1, generator=generator).double()
    y = x + (0.1 + 2 * x) * torch.randn(1800, 1, generator=generator).double()
    line = nn.Linear(1, 1).double()
    with torch.no_grad():
        _ = line.weight.fill_(1.0), line.bias.zero_()
    posterior = lp.Full(line, lp.Gaussian(1.0), prior_precision=100.0).fit([(x[:300], y[:300])])
    noisy = lp.learn_noise(posterior, [(x[:300], y[:300])])
    for score, closest in (("scaled", 0.05), ("quantile", 0.05), ("residual", 0.1)):
        low, high = lp.conformalize(noisy, [(x[300:900], y[300:900])], score=score).interval(x[900:])
        held = ((low <= y[900:]) & (y[900:] <= high)).double()
        small = x[900:] < 0.3
        gap = float((held[small].mean() - 0.9).abs())
        assert gap < closest if score != "residual" else gap > 0.08


def test_a_missing_binary_label_does_not_count():
    f = torch.tensor([[2.0], [2.0], [-2.0]]).double()
    y = torch.tensor([[1.0], [math.nan], [0.0]]).double()
    made = lp.conformalize(Known(lp.Bernoulli()), [(f, y)], level=0.5)
    assert len(made.scores) == 2 and float(made.thresholds) == pytest.approx(
        1 - torch.sigmoid(torch.tensor(2.0)).item()
    )


@pytest.mark.parametrize(
    ("likelihood", "score", "by"),
    [
        ("classification", "threshold", None),
        ("classification", "threshold", "class"),
        ("binary", "threshold", None),
        ("regression", "scaled", None),
        ("regression", "residual", None),
        ("regression", "quantile", None),
    ],
)
def test_frozen_sets_and_intervals_are_those_of_the_posterior(likelihood, score, by):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1 if likelihood == "binary" else 2)).double()
    x = torch.randn(60, 3).double()
    y = {"classification": torch.randint(0, 2, (60,)), "binary": torch.randint(0, 2, (60, 1)).double()}
    posterior = lp.KFAC(net, likelihood, parameters="last_layer")
    y = y.get(likelihood, torch.randn(60, 2).double())
    made = lp.conformalize(posterior.fit([(x[:30], y[:30])]), [(x[30:], y[30:])], score=score, by=by, level=0.8)
    frozen = lp.freeze(made)
    served = torch.export.export(frozen, (x,), strict=False).module() if score == "scaled" else frozen
    prediction, *found = served(x)
    torch.testing.assert_close(prediction.mean, made.predictive(x).mean)
    wanted = made.interval(x) if likelihood == "regression" else [made.predict_set(x)]
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)


def test_what_cannot_be_frozen_is_refused():
    posterior, net, x, y = fitted()
    data = [(x[30:], y[30:])]
    calibrated = lp.calibrate(net, data, likelihood="classification")
    for made in (lp.conformalize(posterior, data, score="adaptive"), lp.conformalize(calibrated, data)):
        with pytest.raises(UnsupportedError, match="frozen"):
            made.freeze(x)
