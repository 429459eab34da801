"""Scores against closed forms, direct sums, numerical integrals and, among the peers, torchmetrics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from laplace_plus import metrics
from laplace_plus.errors import ConfigurationError, EmptyDataError, LabelError, NonFiniteError

CLASSIFICATION = [
    metrics.accuracy,
    metrics.negative_log_likelihood,
    metrics.brier_score,
    metrics.expected_calibration_error,
    metrics.reliability_curve,
]
P = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.05, 0.9, 0.05], [0.5, 0.25, 0.25]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 2])


def random_predictions(seed, n=200, n_classes=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, n_classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, n_classes, (n,), generator=generator)
    return logits.softmax(-1).to(dtype), targets


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(float(actual), float(expected), rtol=tolerance, atol=tolerance)


# -- classification ---------------------------------------------------------------------------------------------------


def test_classification_by_hand():
    close(metrics.accuracy(P, Y), 0.5)
    close(metrics.negative_log_likelihood(P, Y), -sum(map(math.log, (0.7, 0.3, 0.9, 0.25))) / 4)
    brier = (0.3**2 + 0.2**2 + 0.1**2) + (0.3**2 + 0.7**2 + 0.4**2) + (2 * 0.05**2 + 0.1**2) + (0.25 + 0.0625 + 0.5625)
    close(metrics.brier_score(P, Y), brier / 4)
    # Two bins: (0, 1/2] holds the second and fourth prediction, both wrong; (1/2, 1] the others, both right.
    curve = metrics.reliability_curve(P, Y, n_bins=2)
    torch.testing.assert_close(curve.confidence, torch.tensor([0.45, 0.8], dtype=torch.float64))
    assert curve.accuracy.tolist() == [0.0, 1.0]
    assert curve.counts.tolist() == [2, 2]
    close(metrics.expected_calibration_error(P, Y, n_bins=2), (0.45 + 0.2) / 2)


def test_the_best_and_the_worst_predictions():
    right, wrong = torch.eye(3)[Y % 3], torch.eye(3)[(Y + 1) % 3]
    close(metrics.accuracy(right, Y % 3), 1.0)
    close(metrics.brier_score(right, Y % 3), 0.0)
    close(metrics.negative_log_likelihood(right, Y % 3), 0.0)
    close(metrics.expected_calibration_error(right, Y % 3), 0.0)
    close(metrics.accuracy(wrong, Y % 3), 0.0)
    close(metrics.brier_score(wrong, Y % 3), 2.0)
    assert metrics.negative_log_likelihood(wrong, Y % 3) == math.inf
    close(metrics.expected_calibration_error(wrong, Y % 3), 1.0)


def sum_over_bins(probabilities, targets, n_bins):
    """The calibration error by its definition, one prediction after the other."""
    gaps = [0.0] * n_bins
    for p, target in zip(probabilities.tolist(), targets.tolist(), strict=True):
        gaps[math.ceil(max(p) * n_bins) - 1] += (p.index(max(p)) == target) - max(p)
    return sum(map(abs, gaps)) / len(targets)


@pytest.mark.parametrize("n_bins", [1, 7, 15])
@pytest.mark.parametrize("seed", [0, 1])
def test_calibration_error_is_the_sum_over_bins_and_that_of_the_curve(seed, n_bins):
    probabilities, targets = random_predictions(seed)
    error = metrics.expected_calibration_error(probabilities, targets, n_bins)
    close(error, sum_over_bins(probabilities, targets, n_bins))
    curve = metrics.reliability_curve(probabilities, targets, n_bins)
    assert curve.counts.sum() == 200
    found = curve.counts > 0
    close(error, (((curve.accuracy - curve.confidence).abs() * curve.counts)[found]).sum() / 200)
    assert curve.confidence[~found].isnan().all()
    assert curve.accuracy[~found].isnan().all()


@pytest.mark.peers
@pytest.mark.parametrize("n_bins", [1, 15])
def test_calibration_error_and_auroc_are_those_of_torchmetrics(n_bins):
    theirs = pytest.importorskip("torchmetrics.functional.classification")
    probabilities, targets = random_predictions(0)
    wanted = theirs.multiclass_calibration_error(probabilities, targets, 4, n_bins)
    close(metrics.expected_calibration_error(probabilities, targets, n_bins), wanted, 1e-6)  # theirs is in float32
    scores = (10 * probabilities[:, 0]).round() / 10  # with ties
    wanted = theirs.binary_auroc(scores, targets == 0)
    close(metrics.ood_auroc(scores[targets != 0], scores[targets == 0]), wanted, 1e-6)


def test_bins_are_closed_on_the_right_and_full_confidence_is_in_the_last():
    probabilities = torch.tensor([[1.0, 0.0], [0.75, 0.25], [0.5, 0.5], [0.9, 0.1]])
    curve = metrics.reliability_curve(probabilities, torch.zeros(4, dtype=torch.long), n_bins=4)
    assert curve.counts.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("score", CLASSIFICATION)
@pytest.mark.parametrize(
    ("probabilities", "targets", "error", "message"),
    [
        (P[:, 0], Y, ConfigurationError, r"float64 \[4\].*stack"),
        (P.long(), Y, ConfigurationError, "sum of a row.*from 0 to 0"),
        (P, Y[:3], LabelError, r"real numbers \[4\].*int64 \[3\]"),
        (P, Y[:, None], LabelError, r"int64 \[4, 1\]"),
        (P, Y.double(), LabelError, "float64"),
        (P, Y + 1, LabelError, r"0 \.\.\. 2.*1 \.\.\. 3"),
        (P, torch.tensor([0, -100, 1, 2]), LabelError, "-100.*ignored"),
        (P[:0], Y[:0], EmptyDataError, "nothing to score"),
        (P.log(), Y, ConfigurationError, "softmax"),
        (2 * P, Y, ConfigurationError, "sum of a row.*4 numbers from 2 to 2|sum of a row.*Got: 2"),
        (torch.tensor([[1.5, -0.5]]), Y[:1], ConfigurationError, r"from -0\.5"),
        (P.where(P > 0.06, math.nan), Y, ConfigurationError, "nan"),
    ],
)
def test_classification_refuses(score, probabilities, targets, error, message):
    with pytest.raises(error, match=message):
        score(probabilities, targets)


@pytest.mark.parametrize("n_bins", [0, -1, 2.5, True])
def test_the_number_of_bins_is_checked(n_bins):
    with pytest.raises(ConfigurationError, match="n_bins is out of range"):
        metrics.expected_calibration_error(P, Y, n_bins)


# -- out of distribution ----------------------------------------------------------------------------------------------

scores = st.lists(st.sampled_from([-1e30, -3.0, 0.0, 0.5, 1.0, 20.0, 21.0, 1e30]), min_size=1, max_size=6)


@given(scores, scores)
@settings(max_examples=60, deadline=None)
def test_auroc_is_the_fraction_of_pairs_in_order(inside, outside):
    wins = [(out > into) + 0.5 * (out == into) for into in inside for out in outside]
    close(metrics.ood_auroc(torch.tensor(inside), torch.tensor(outside)), sum(wins) / len(wins), 1e-6)


def test_auroc_depends_on_the_order_alone():
    inside, outside = torch.randn(50, generator=torch.Generator().manual_seed(0)).double(), torch.arange(-2.0, 3.0)
    close(metrics.ood_auroc(inside, outside), metrics.ood_auroc(1000 + 100 * inside, 1000 + 100 * outside), 1e-6)
    close(metrics.ood_auroc(inside, outside) + metrics.ood_auroc(outside, inside), 1.0, 1e-6)
    close(metrics.ood_auroc(torch.tensor([1, 2]), torch.tensor([math.inf, 2.0])), 0.875, 1e-6)


@pytest.mark.parametrize(
    ("inside", "outside", "error", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(2), ConfigurationError, r"scores_in.*\[3, 1\]"),
        (torch.tensor([0.0, math.nan]), torch.zeros(2), NonFiniteError, "scores_in.*1 NaN"),
        (torch.zeros(2), torch.zeros(0), EmptyDataError, "no scores_out"),
    ],
)
def test_auroc_refuses(inside, outside, error, message):
    with pytest.raises(error, match=message):
        metrics.ood_auroc(inside, outside)


# -- regression -------------------------------------------------------------------------------------------------------


def random_regression(shape=(30, 2), dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    variance = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
    targets = mean + 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean.to(dtype), variance.to(dtype), targets.to(dtype)


def test_regression_against_direct_sums():
    mean, variance, targets = random_regression()
    close(metrics.root_mean_squared_error(mean, targets), ((mean - targets) ** 2).mean().sqrt())
    expected = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(targets).mean()
    close(metrics.gaussian_nll(mean, variance, targets), expected)


def test_crps_is_the_integral_over_the_distribution_function():
    mean, variance, targets = random_regression((3,))
    grid = torch.linspace(-40, 40, 400_001, dtype=torch.float64)
    total = 0.0
    for m, v, y in zip(mean, variance, targets, strict=True):
        distance = (torch.special.ndtr((grid - m) / v.sqrt()) - (grid >= y).double()) ** 2
        total += float(torch.trapezoid(distance, grid))
    close(metrics.crps_gaussian(mean, variance, targets), total / 3, 3e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_regression_is_scored_in_float32_at_least(dtype):
    mean, variance, targets = random_regression(dtype=dtype)
    for score in (metrics.gaussian_nll, metrics.crps_gaussian):
        assert score(mean, variance, targets).dtype is torch.float32
        close(score(mean, variance, targets), score(mean.double(), variance.double(), targets.double()), 1e-5)
    assert metrics.root_mean_squared_error(mean, targets.double()).dtype is torch.float32


@pytest.mark.parametrize(
    ("mean", "variance", "targets", "error", "message"),
    [
        (torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3), LabelError, r"\[3, 1\].*float32 \[3\].*reshape"),
        (torch.zeros(0), torch.ones(0), torch.zeros(0), EmptyDataError, "nothing to score"),
        (torch.zeros(3), torch.ones(3), torch.zeros(3).cfloat(), LabelError, "complex64"),
    ],
)
def test_regression_refuses(mean, variance, targets, error, message):
    for call in (
        lambda: metrics.root_mean_squared_error(mean, targets),
        lambda: metrics.gaussian_nll(mean, variance, targets),
        lambda: metrics.crps_gaussian(mean, variance, targets),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("score", [metrics.gaussian_nll, metrics.crps_gaussian])
@pytest.mark.parametrize(
    ("variance", "message"),
    [
        (torch.ones(3, 1), r"The variances.*\[3\].*\[3, 1\].*diagonal"),
        (torch.tensor([1.0, 0.0, 1.0]), "variance.*> 0.*from 0 to 1"),
        (torch.tensor([1.0, -2.0, 1.0]), "variance.*> 0.*from -2 to 1"),
        (torch.tensor([1.0, math.nan, 1.0]), "variance.*nan"),
    ],
)
def test_variances_are_checked(score, variance, message):
    with pytest.raises(ConfigurationError, match=message):
        score(torch.zeros(3), variance, torch.zeros(3))


# -- selective prediction, outliers, intervals ------------------------------------------------------------------------


def test_risks_by_hand():
    """Kept in the order 0, 0, 1, 1: risks 0, 0, 1/3, 1/2."""
    uncertainty, losses = torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert_close(metrics.area_under_risk_coverage(uncertainty, losses), torch.tensor((1 / 3 + 1 / 2) / 4))


def test_ties_have_the_mean_over_all_orders():
    generator = torch.Generator().manual_seed(0)
    uncertainty, losses = torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0, 3.0]), torch.rand(6, generator=generator)
    found = []
    for first in itertools.permutations(range(2)):
        for second in itertools.permutations(range(2, 5)):
            kept = losses[[*first, *second, 5]].cumsum(0) / torch.arange(1, 7)
            found.append(kept.mean())
    assert_close(metrics.area_under_risk_coverage(uncertainty, losses), torch.stack(found).mean())
    assert_close(metrics.area_under_risk_coverage(torch.ones(6), losses), losses.mean())


def test_risks_need_as_many_losses():
    with pytest.raises(LabelError):
        metrics.area_under_risk_coverage(torch.zeros(3), torch.zeros(4))


def test_ause_against_a_closed_form():
    """Of N = 100 errors, the mean of the rest is known at each share that is removed."""
    errors = torch.arange(1.0, 101.0)
    assert metrics.ause(errors, errors) == 0
    assert metrics.ause(errors.square() - 7, errors) == 0  # only the order counts
    # After k of 100, the mean of the rest is (101 - k)/2 if the largest went first, (101 + k)/2 if the smallest did.
    removed = torch.arange(100, dtype=torch.float64)
    best, worst = (101 - removed) / 2, (101 + removed) / 2
    expected = torch.trapezoid((worst - best) / 50.5, dx=0.01)
    assert_close(metrics.ause(-errors, errors), expected.float())
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert 0 < metrics.ause(order.float(), errors) < metrics.ause(-errors, errors)
    constant = torch.trapezoid((50.5 - best) / 50.5, dx=0.01)  # of equal uncertainties: by chance
    assert_close(metrics.ause(torch.ones(100), errors), constant.float())
    assert_close(metrics.ause(-errors, 3 * errors), expected.float())  # relative to the mean error
    assert metrics.ause(errors, torch.zeros(100)) == 0
    with pytest.raises(ConfigurationError, match="absolute error.*≥ 0"):
        metrics.ause(errors, -errors)
