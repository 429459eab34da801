"""The library's scores and those of torchmetrics, on predictions that go into both as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus import metrics


@pytest.fixture(scope="module")
def theirs():
    """Imported by the worker alone that runs these tests, as it takes seconds."""
    return pytest.importorskip("torchmetrics", reason="needs the extra `torchmetrics`")


@pytest.fixture(params=[2, 4])
def classified(request):
    torch.manual_seed(0)
    n = request.param
    x = torch.randn(300, 3).double()
    y = (x[:, 0] + 0.5 * torch.randn(300)).mul(n / 4).add(n / 2).floor().clamp(0, n - 1).long()
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, n)).double()
    prediction = lp.Full(model, "classification").fit([(x, y)]).predictive(x)
    return prediction, y, n


def test_scores_of_classes_agree(classified, theirs):
    prediction, y, n = classified
    p = prediction.mean
    ours, other = metrics.accuracy(p, y), theirs.classification.MulticlassAccuracy(n, average="micro")(p, y)
    torch.testing.assert_close(ours.float(), other)
    ours, other = (
        metrics.expected_calibration_error(p, y, 10),
        theirs.classification.MulticlassCalibrationError(n, n_bins=10, norm="l1")(p, y),
    )
    torch.testing.assert_close(ours, other, check_dtype=False)
    brier = torch.stack([theirs.MeanSquaredError()(p[:, c], (y == c).double()) for c in range(n)]).sum()
    torch.testing.assert_close(metrics.brier_score(p, y), brier, check_dtype=False)
    perplexity = theirs.text.Perplexity()(prediction.functional_mean[None], y[None])  # of the network: it takes logits
    nll = metrics.negative_log_likelihood(prediction.functional_mean.softmax(-1), y)
    torch.testing.assert_close(perplexity.log(), nll, check_dtype=False)
    loss = nn.functional.nll_loss(p.log(), y)
    torch.testing.assert_close(metrics.negative_log_likelihood(p, y), loss)
    torch.testing.assert_close(-prediction.log_prob(y).mean(), loss)
    one_against_others = theirs.classification.MulticlassAUROC(n, average=None)(p, y)
    for c in range(n):
        own = metrics.ood_auroc(p[y != c, c], p[y == c, c])
        torch.testing.assert_close(own, one_against_others[c], check_dtype=False)


def test_scores_of_regression_agree(theirs):
    torch.manual_seed(0)
    x = torch.randn(100, 3).double()
    y = x[:, :1].sin() + 0.3 * torch.randn(100, 1)
    posterior = lp.Full(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double(), lp.Gaussian(0.3))
    prediction = posterior.fit([(x, y)]).predictive(x)
    rmse = metrics.root_mean_squared_error(prediction.mean, y)
    torch.testing.assert_close(rmse, theirs.MeanSquaredError(squared=False)(prediction.mean, y), check_dtype=False)
    draws = prediction.distribution.sample((2000,))[..., 0].T  # [N, S], as torchmetrics takes an ensemble
    estimates = torch.stack(
        [theirs.regression.ContinuousRankedProbabilityScore()(part, y[:, 0]) for part in draws.split(200, 1)]
    )
    error = estimates.std() / len(estimates) ** 0.5
    ours = metrics.crps_gaussian(prediction.mean, prediction.variance, y)
    assert abs(estimates.mean() - ours) < 4 * error + 0.3 / 200  # the ensemble's score is biased by about std / S
