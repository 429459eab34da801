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
