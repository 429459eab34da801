"""Rules that refuse: their promise in simulated deployments, what they do to rows, and what they say if they cannot."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.applications.abstention import walks
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError
from laplace_plus.predictive import from_functional

GRID = 20_000


class Known:
    """Predicts from outputs that are given as the inputs, without variance."""

    def __init__(self, likelihood):
        self.likelihood = likelihood

    def predictive(self, x, *, generator=None):
        variance = torch.zeros_like(x)
        return from_functional(self.likelihood, x, variance, link=None if self.likelihood.is_classifier else "exact")


LAWS = {  # of the error, by the share of inputs that are surer
    "rising": lambda q: 0.3 * q**2,
    "step": lambda q: np.where(q > 0.6, 0.5, 0.01),
    "bad at the top": lambda q: np.where(q < 0.1, 0.12, np.where(q < 0.5, 0.01, 0.4 * q)),
    "on the edge": lambda q: np.full_like(q, 0.0501),
}


def deployments(law, n, *, number=2000, levels=None, seed=0):
    """Losses ``[D, n]`` in order of scores, of which few are different, and the selective risk after each rank."""
    random = np.random.default_rng(seed)
    share = random.random((number, n))
    key = share if levels is None else np.ceil(share * levels) / levels  # how many of the inputs are surer
    order = np.lexsort((random.random((number, n)), key))
    share, key = (np.take_along_axis(one, order, 1) for one in (share, key))
    mean = law((np.arange(GRID) + 0.5) / GRID)
    risks = np.concatenate([[0.0], mean.cumsum() / np.arange(1, GRID + 1)])
    after = np.concatenate([key[:, 1:], np.full((number, 1), np.inf)], 1)
    ends = np.where(np.isinf(after), 1.0, after) if levels is None else np.minimum(after - 1 / levels, 1.0)
    risk = risks[(ends * GRID).round().astype(int)]
    return law(share), torch.from_numpy(risk), torch.from_numpy(after > key), torch.from_numpy(ends), random


def chosen(passed):
    """The last rank that passed, and whether there is one."""
    n = passed.shape[1]
    return n - 1 - passed.flip(1).int().argmax(1), passed.any(1)


@pytest.mark.parametrize("levels", [None, 12])
@pytest.mark.parametrize("law", LAWS)
def test_the_risk_holds_as_often_as_promised(law, levels):
    """2000 deployments: too large a risk in at most 5 % and two standard errors; without paying, in far more."""
    mean, risks, ends, _, random = deployments(LAWS[law], 400, levels=levels)
    losses = torch.from_numpy(random.random(mean.shape) < mean).double()
    last, found = chosen(walks(losses, 0.05, 0.05) & ends)
    wrong = (found & (risks.gather(1, last[:, None])[:, 0] > 0.05)).double().mean()
    assert wrong <= 0.05 + 2 * (0.05 * 0.95 / len(losses)) ** 0.5
    seen = losses.cumsum(1) / torch.arange(1, 401) <= 0.05
    last, found = chosen(seen & ends)
    assert (found & (risks.gather(1, last[:, None])[:, 0] > 0.05)).double().mean() > 0.25


def test_other_losses_keep_the_risk_too_and_at_what_cost():
    mean, risks, ends, shares, random = deployments(LAWS["rising"], 300)
    exact = torch.from_numpy(random.random(mean.shape) < mean).double()
    half = torch.from_numpy(random.random((2, *mean.shape)) < mean).double().mean(0)  # 0, ½ and 1
    accepted = []
    for losses, binary in ((exact, True), (exact, False), (half, False)):
        last, found = chosen(walks(losses, 0.05, 0.1, binary) & ends)
        wrong = (found & (risks.gather(1, last[:, None])[:, 0] > 0.05)).double().mean()
        assert wrong <= 0.1 + 2 * (0.09 / len(losses)) ** 0.5
        accepted.append(float((found * shares.gather(1, last[:, None])[:, 0]).mean()))
    assert accepted[0] > accepted[1] > 0.2 and accepted[0] > 0.3 and accepted[2] > 0.1  # of .71 if the law were known


@pytest.mark.parametrize(("n", "risk", "number"), [(90, 0.1, 2), (190, 0.02, 1), (400, 0.05, 3), (900, 0.03, 4)])
def test_walks_go_on_while_clopper_and_pearson_say_so(n, risk, number):
    losses = (torch.rand(3, n, generator=torch.Generator().manual_seed(n)) < 0.2 * risk).double()
    level = 0.05 / number
    first = next(j for j in range(1, n) if (1 - risk) ** j <= level)
    starts = {round(first * (n / first) ** (i / max(number - 1, 1))) for i in range(number)}
    passed = walks(losses, risk, 0.05)
    assert passed.any() and not passed.all()
    for own, found in zip(losses, passed, strict=True):
        walking, expected = False, []
        for j in range(1, n + 1):
            k = float(own[:j].sum())
            bound = scipy.special.betaincinv(k + 1, j - k, 1 - level) if k < j else 1.0
            walking = bool((walking or j in starts) and bound <= risk)
            expected.append(walking)
        assert found.tolist() == expected


def rows(n=3000, seed=0):
    """Logits of two classes, and labels that are surer where they are large."""
    generator = torch.Generator().manual_seed(seed)
    f = 3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return f, torch.bernoulli((1.5 * f).sigmoid(), generator=generator)


@pytest.mark.parametrize("control", ["error", "precision", "recall"])
def test_binary_controls_hold_in_deployment(control):
    f, y = rows()
    new, labels = rows(100_000, seed=1)
    batches = list(zip(f.split(700), y.split(700), strict=True))
    rule = lp.abstain(Known(lp.Bernoulli()), batches, risk=0.02, control=control)
    accepted = rule(new).accepted
    one, truth = new[:, 0] > 0, labels[:, 0] == 1
    counted = {"error": accepted, "precision": accepted & one, "recall": accepted & truth}[control]
    assert 0.005 < float((one != truth)[counted].double().mean()) <= 0.02
    assert {"error": torch.tensor(True), "precision": accepted[~one], "recall": accepted[one]}[control].all()
    assert rule.refused == pytest.approx(float((~rule.predictive(f).accepted).double().mean()))
    assert 0.02 < rule.refused < 0.6 and f"refuses {rule.refused:.1%}" in repr(rule)
    two = torch.cat([torch.zeros_like(f), f], 1), y[:, 0].long()
    same = lp.abstain(Known(lp.Categorical()), [two], risk=0.02, control=control)
    assert same.refused == pytest.approx(rule.refused) and same.threshold == pytest.approx(rule.threshold)


def test_several_positions_are_one_row_of_a_bounded_loss():
    f, y = rows(3200)
    f, y = f.view(800, 4), y.view(800, 4)
    rule = lp.abstain(Known(lp.Bernoulli()), [(f, y)], risk=0.08, confidence=0.8)
    accepted = rule(f).accepted
    sure = (f.sigmoid() - 0.5).abs().mean(1)
    assert accepted.shape == (800,) and sure[accepted].min() > sure[~accepted].max()
    loss = ((f > 0) != (y == 1)).double().mean(1)[sure.argsort(descending=True)]
    passed = walks(loss, 0.08, 0.2, binary=False)
    assert int(accepted.sum()) == int(passed.nonzero().max()) + 1
    y[:, 1] = math.nan  # was not observed, and does not count
    assert lp.abstain(Known(lp.Bernoulli()), [(f, y)], risk=0.15).n_rows == 800


def test_numbers_are_wrong_beyond_a_tolerance():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    y = f[:, :1] + f[:, 1:].exp() * torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    posterior = Known(lp.HeteroscedasticGaussian())
    rule = lp.abstain(posterior, [(f[:2000], y[:2000])], risk=0.1, tolerance=1.5)
    accepted = rule(f[2000:]).accepted
    error = (y - f[:, :1]).abs()[2000:, 0] > 1.5
    assert error.double().mean() > 0.2 and 0.05 < error[accepted].double().mean() < 0.11
    noise = rule(f[2000:]).prediction.std[:, 0]
    assert noise[accepted].max() < noise[~accepted].min() and accepted.double().mean() > 0.5
    for missing in (None, -1.0, torch.ones(2)):
        with pytest.raises(ConfigurationError, match="tolerance"):
            lp.abstain(posterior, [(f, y)], tolerance=missing)


def test_the_best_score_is_paid_for():
    """Epistemic variance knows which rows are wrong, confidence does not."""
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(1500, generator=generator) < 0.3
    labels = (torch.rand(1500, generator=generator) < 0.5).double()
    p = torch.stack([1 - labels, labels], 1).where(~wrong[:, None], torch.stack([labels, 1 - labels], 1))
    sampled = 3 * (2 * p - 1) + (0.1 + 2 * wrong[:, None]) * torch.randn(20, 1500, 2, generator=generator).double()

    class Sampled:
        likelihood = lp.Categorical()

        def predictive(self, x, *, generator=None):
            return lp.predictive.from_samples(self.likelihood, sampled[:, x])

    data = [(torch.arange(1500), labels.long())]
    best = lp.abstain(Sampled(), data, risk=0.05, score="best")
    each = {}
    for name in ("confidence", "epistemic", "mutual_information"):
        each[name] = lp.abstain(Sampled(), data, risk=0.05, score=name, confidence=1 - 0.05 / 3)
    assert best.threshold == each[best.score].threshold
    assert best.refused == min(one.refused for one in each.values()) < 0.4


def test_what_cannot_be_reached_is_said_with_what_can():
    f, y = rows(500)
    posterior = Known(lp.Bernoulli())
    with pytest.raises(UnsupportedError, match=r"risk ≥ .* Got: risk=0.001, and 500 rows.*2995 if none errs") as caught:
        lp.abstain(posterior, [(f, y)], risk=0.001)
    reached = float(str(caught.value).split("risk ≥ ")[1].split(",")[0])
    assert 0.01 < reached < 0.03
    assert lp.abstain(posterior, [(f, y)], risk=reached).refused < 1
    with pytest.raises(UnsupportedError):
        lp.abstain(posterior, [(f, y)], risk=0.97 * reached)


def test_all_equal_scores_are_accepted_together_or_not_at_all():
    f, y = torch.full((400, 1), 2.0), torch.ones(400, 1)
    assert lp.abstain(Known(lp.Bernoulli()), [(f, y)]).refused == 0
    y[:20] = 0
    with pytest.raises(UnsupportedError):
        lp.abstain(Known(lp.Bernoulli()), [(f, y)], risk=0.05)
    assert lp.abstain(Known(lp.Bernoulli()), [(f, y)], risk=0.09)(f).accepted.all()


def test_a_walk_that_ends_among_equal_scores_accepts_nothing():
    """Of 100 rows alike two are wrong: some orders have none among the first 59, and all have too many at the end."""
    f, y = torch.full((110, 1), 2.0), torch.ones(110, 1)
    f[:10], y[10:12] = 5.0, 0.0
    for seed in range(15, 22):
        with pytest.raises(UnsupportedError):
            lp.abstain(Known(lp.Bernoulli()), [(f, y)], risk=0.05, generator=torch.Generator().manual_seed(seed))


def trained():
    torch.manual_seed(0)
    x = torch.randn(600, 3)
    y = (x[:, 0] + 0.3 * torch.randn(600) > 0).long()
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:200]), y[:200]).backward()
        optimizer.step()
    return net, x, y


def test_whatever_predicts_can_refuse_and_be_saved(tmp_path):
    net, x, y = trained()
    held_out = [(x[200:400], y[200:400]), (x[400:], y[400:])]
    posterior = lp.KFAC(net, "classification", prior_precision=10.0).fit([(x[:200], y[:200])])
    rule = lp.abstain(posterior, held_out, risk=0.1, score="mutual_information")
    rule.save(tmp_path / "rule")
    loaded = lp.load(tmp_path / "rule", net)
    posterior.prior_precision = 1e-3  # the rule is of the posterior as it was
    sources = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert repr(loaded) == repr(rule) and 0 < rule.refused < 0.5
    assert torch.equal(*(one(x, generator=own).accepted for one, own in zip((rule, loaded), sources, strict=True)))
    net.requires_grad_(False).train()
    alone = lp.abstain(net, held_out, risk=0.1, likelihood="classification")
    assert net.training and not alone.posterior.predictive(x).epistemic.any()
    others = [lp.Ensemble([net, net], "classification"), lp.Mixture([posterior, posterior])]
    others.append(lp.calibrate(net, held_out, likelihood="classification"))
    for other in others:
        assert 0 < float(lp.abstain(other, held_out, risk=0.1)(x).accepted.double().mean()) < 1
    with pytest.raises(ConfigurationError, match="is not saved"):
        alone.save(tmp_path / "no")


def test_bad_calls_are_refused():
    f, y = rows(200)
    posterior, data = Known(lp.Bernoulli()), [(f, y)]
    wrong = [{"risk": 0.0}, {"confidence": 1.0}, {"score": "entropy"}, {"control": "f1"}, {"likelihood": "binary"}]
    for options in wrong:
        with pytest.raises(ConfigurationError):
            lp.abstain(posterior, data, **options)
    for model in (nn.Linear(1, 1), SimpleNamespace()):
        with pytest.raises(ConfigurationError, match="likelihood"):
            lp.abstain(model, data)
    with pytest.raises(ConfigurationError, match="rows that count"):
        lp.abstain(posterior, [(f, torch.full_like(y, math.nan))])
    with pytest.raises(DataError, match="weights"):
        lp.abstain(Known(lp.Bernoulli(weighted=True)), [(f, (y, torch.full((200,), 2.0)))])
    with pytest.raises(DataError, match="Soft"):
        lp.abstain(Known(lp.Categorical()), [(torch.zeros(4, 3), torch.full((4, 3), 1 / 3))])
    with pytest.raises(UnsupportedError, match="two classes"):
        lp.abstain(Known(lp.Categorical()), [(torch.zeros(4, 3), torch.zeros(4).long())], control="recall")
