"""Scores of predictions and their uncertainties: proper scores, calibration, out-of-distribution detection.

All scores are 0-dimensional tensors and *means* over the data, unlike the sums that fitting works with. They are
computed in the dtype of the predictions, but at least in float32. Densities and probabilities are scored in nats.

Classification takes probabilities ``[N, C]`` and integer targets ``[N]``; the probabilities of a binary problem are two
columns, ``torch.stack([1 - p, p], dim=-1)``, and ignored tokens are removed beforehand. Regression takes means,
variances (of the observation, noise included) and targets of one shape, ``[N]`` or ``[N, C]``, and scores every scalar
by itself, but for those whose targets are NaN: not observed. Means are weighted by ``weight [N]``, where it is given:
numbers of at least 0, such as scikit-learn's ``sample_weight``.

References:
    Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 2007.
    Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import EmptyDataError, LabelError, NonFiniteError
from laplace_plus.likelihoods.base import spread, widen

# -- classification ---------------------------------------------------------------------------------------------------


def accuracy(probabilities: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the fraction of the data whose most probable class is the target.

    Args:
        probabilities: ``[N, C]``.
        targets: Integers, ``[N]``.
        weight: How often each row counts, ``[N]``; None for once.

    Returns:
        A number in ``[0, 1]``.

    Raises:
        ConfigurationError: If the probabilities or weights are invalid.
        LabelError: If the targets are not among the classes.

    Example:
        >>> accuracy(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    probabilities, targets = _check_classification(probabilities, targets)
    return weighted_mean((probabilities.argmax(dim=1) == targets).float(), weight)


def negative_log_likelihood(probabilities: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute ``-1/N sum_n log p_n[y_n]``, in nats.

    It is infinite if one target has probability zero; probabilities are not clamped, because that would hide it.
    Arguments and errors as for :func:`accuracy`.
    """
    probabilities, targets = _check_classification(probabilities, targets)
    return weighted_mean(-probabilities.gather(1, targets[:, None])[:, 0].log(), weight)


def brier_score(probabilities: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute ``1/N sum_n sum_c (p_n[c] - 1[y_n = c])^2``.

    The sum runs over all classes, so that the score of a binary problem is twice the one of its single column.
    Arguments and errors as for :func:`accuracy`.
    """
    probabilities, targets = _check_classification(probabilities, targets)
    one_hot = torch.nn.functional.one_hot(targets, probabilities.shape[1])
    return weighted_mean((probabilities - one_hot).square().sum(dim=1), weight)


class ReliabilityCurve(NamedTuple):
    """What :func:`reliability_curve` found in each bin.

    Attributes:
        confidence: Mean probability of the predicted class, ``[n_bins]``; NaN in an empty bin.
        accuracy: Fraction of right predictions, ``[n_bins]``; NaN in an empty bin.
        counts: Number of predictions, integers, ``[n_bins]``; with weights, the sums of these.
    """

    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def reliability_curve(
    probabilities: Tensor, targets: Tensor, n_bins: int = 15, weight: Tensor | None = None
) -> ReliabilityCurve:
    """Compare confidence and accuracy in bins of equal width, as a reliability diagram shows them.

    Bin ``m`` of ``M`` holds the predictions whose largest probability is in ``((m - 1)/M, m/M]`` (Guo et al., 2017), so
    that full confidence belongs to the last one.

    Arguments and errors as for :func:`accuracy`; ``n_bins`` is the number ``M`` of bins.
    """
    probabilities, targets = _check_classification(probabilities, targets)
    checks.count("n_bins", n_bins)
    confidence, predicted = probabilities.max(dim=1)
    edges = torch.linspace(0, 1, n_bins + 1, dtype=confidence.dtype, device=confidence.device)
    bins = torch.bucketize(confidence, edges[1:-1])
    share = None if weight is None else checks.weights("weight", weight, confidence.shape).to(confidence)
    counts = torch.bincount(bins, share, minlength=n_bins)
    rows = torch.stack([confidence, (predicted == targets).to(confidence)]) * (1 if share is None else share)
    total_confidence, n_right = rows.new_zeros(2, n_bins).index_add(1, bins, rows)
    return ReliabilityCurve(total_confidence / counts, n_right / counts, counts)


def expected_calibration_error(
    probabilities: Tensor, targets: Tensor, n_bins: int = 15, weight: Tensor | None = None
) -> Tensor:
    """Compute the mean distance of confidence and accuracy, ``sum_m n_m/N |accuracy_m - confidence_m|``.

    It is computed from the :func:`reliability_curve`, so that the two always agree. It differs from ``torchmetrics``
    only for confidences on the edge of a bin: torchmetrics puts a confidence of 1 into a bin of its own. The error is a
    biased estimate that grows with the number of bins.

    Returns:
        A number in ``[0, 1]``.
    """
    curve = reliability_curve(probabilities, targets, n_bins, weight)
    gaps = torch.where(curve.counts > 0, (curve.accuracy - curve.confidence).abs(), 0.0)
    return (gaps * curve.counts).sum() / curve.counts.sum()


def ood_auroc(scores_in: Tensor, scores_out: Tensor) -> Tensor:
    """Compute the probability that an out-of-distribution input scores higher than one from the distribution.

    Ties count one half. Only the order of the scores matters, so they may be on any scale: entropies, variances, ....

    Args:
        scores_in: Scores of inputs from the distribution, one each, ``[N]``.
        scores_out: Scores of inputs from outside it, ``[M]``.

    Returns:
        A number in ``[0, 1]``: 1 if every outlier is found, 0.5 by chance.

    Raises:
        ConfigurationError: If the scores are not one number for each input.
        EmptyDataError: If there are none of one kind.
        NonFiniteError: If one is NaN.

    Example:
        >>> ood_auroc(torch.tensor([0.1, 0.2]), torch.tensor([3.0, 0.15]))
        tensor(0.7500)
    """
    _check_scores(scores_in=scores_in, scores_out=scores_out)
    inside, outside = torch.cat([scores_in.detach(), scores_out.detach()]).split([len(scores_in), len(scores_out)])
    ordered = inside.sort().values
    # Half of those below with and half of those below without ties: a tie counts one half.
    below = torch.searchsorted(ordered, outside) + torch.searchsorted(ordered, outside, right=True)
    return below.double().mean().float() / (2 * len(inside))


# -- selective prediction ---------------------------------------------------------------------------------------------


def area_under_risk_coverage(uncertainty: Tensor, losses: Tensor) -> Tensor:
    """Compute ``1/N Σ_k r_k``, with the risk ``r_k``: the mean loss of the k predictions of least uncertainty (AURC).

    Of equal uncertainties it is the mean over all orders.

    Args:
        uncertainty: ``[N]``, on any scale.
        losses: ``[N]``: zeros and ones for right and wrong classes, squared errors, ….

    Returns:
        A number on the scale of the losses; smaller is better, and the mean loss by chance.

    Raises:
        ConfigurationError: If one is not one number for each prediction.
        EmptyDataError: If there are none.
        NonFiniteError: If one is NaN.

    Example:
        >>> area_under_risk_coverage(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 0.0, 1.0]))
        tensor(0.1111)
    """
    return _risks(uncertainty, losses).mean().float()


def ause(uncertainty: Tensor, error: Tensor) -> Tensor:
    """Compute that area for depth maps and images, relative to the mean error, from 100 shares that are removed.

    At shares 0, 0.01, …, 0.99 of largest uncertainty, or of largest error, it takes the mean error of the rest over
    that of all, and integrates the difference of the two curves by the trapezoidal rule.

    Args:
        uncertainty: ``[N]``, on any scale.
        error: Absolute errors ``[N]``.

    Returns:
        A number of at least 0: 0 for uncertainties in the order of the errors, the largest one for the reverse order.

    Errors as for :func:`area_under_risk_coverage`, and ConfigurationError for a negative error.
    """
    gap, mean = _risks(uncertainty, error) - _risks(error, error), error.double().mean()
    checks.numbers("An absolute error", error, least=0.0)
    removed = torch.arange(100, device=gap.device) * len(gap) // 100
    return torch.trapezoid(gap[len(gap) - 1 - removed] / mean.clamp_min(1e-300), dx=0.01).float()


def _risks(uncertainty: Tensor, losses: Tensor) -> Tensor:
    """The risk at each coverage 1/N … 1, ``[N]`` float64."""
    _check_scores(uncertainty=uncertainty, losses=losses)
    _check_targets(uncertainty, losses)
    order = uncertainty.argsort()
    total = _shared(uncertainty, losses.double())[order].cumsum(0)
    return total / torch.arange(1, len(total) + 1, device=total.device)


def _shared(keys: Tensor, values: Tensor) -> Tensor:
    """Of equal keys ``[N]`` the mean of their values ``[N]``."""
    _, group, counts = keys.unique(return_inverse=True, return_counts=True)
    return (values.new_zeros(len(counts)).index_add_(0, group, values) / counts)[group]


# -- regression -------------------------------------------------------------------------------------------------------


def root_mean_squared_error(mean: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute ``sqrt(mean (mean - y)^2)``, in the units of the targets, over all entries.

    Args:
        mean: Predictive means, ``[N]`` or ``[N, C]``.
        targets: Of the same shape.
        weight: How often each row counts, ``[N]``; None for once.

    Returns:
        A number of at least 0.

    Raises:
        ConfigurationError: If the means are not floating-point numbers, or weights are invalid.
        LabelError: If the targets are of another shape.
    """
    mean, targets = _check_regression(mean, targets)
    return weighted_mean((mean - targets).square(), weight, ~targets.isnan()).sqrt()


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the mean of ``(log(2 pi v) + (y - m)^2 / v) / 2``, in nats per scalar, over all entries.

    Args:
        mean: Predictive means ``m``, ``[N]`` or ``[N, C]``.
        variance: Predictive variances ``v``, observation noise included, of the same shape.
        targets: ``y``, of the same shape.
        weight: How often each row counts, ``[N]``; None for once.

    Raises:
        ConfigurationError: If means or variances are of the wrong kind, or a variance is not positive.
        LabelError: If the targets are of another shape.
    """
    mean, variance, targets = _check_moments(mean, variance, targets)
    densities = math.log(2 * math.pi) + variance.log() + (targets - mean).square() / variance
    return 0.5 * weighted_mean(densities, weight, ~targets.isnan())


def crps_gaussian(mean: Tensor, variance: Tensor, targets: Tensor, weight: Tensor | None = None) -> Tensor:
    r"""Compute the mean continuous ranked probability score of Gaussian predictions, in the units of the targets.

    With ``s = sqrt(variance)`` and ``z = (y - mean) / s``, the score of one scalar is
    ``s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))`` (Gneiting and Raftery, 2007). It becomes the absolute error as
    the variance goes to zero. Arguments and errors as for :func:`gaussian_nll`.
    """
    mean, variance, targets = _check_moments(mean, variance, targets)
    scale = variance.sqrt()
    z = (targets - mean) / scale
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    scores = scale * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))
    return weighted_mean(scores, weight, ~targets.isnan())


# -- means and checks -------------------------------------------------------------------------------------------------


def weighted_mean(values: Tensor, weight: Tensor | None = None, observed: Tensor | None = None) -> Tensor:
    """Of values ``[N, *]``, by weights ``[N]`` of rows, over entries ``observed [N, *]``; None for all alike."""
    if weight is None and (observed is None or bool(observed.all())):
        return values.mean()
    share = torch.ones_like(values) if observed is None else observed.to(values)
    if weight is not None:
        share = share * spread(checks.weights("weight", weight, values.shape[:1]), values.shape).to(values)
    return (share * values.where(share > 0, 0.0)).sum() / share.sum()


def _check_scores(**named: Tensor) -> None:
    for name, scores in named.items():
        checks.shape(name, scores, [None])
        if n_nan := int(scores.isnan().sum()):
            raise NonFiniteError(f"{name} cannot be put in order.", expected="no NaN", got=f"{n_nan} NaN")


def _check_classification(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    fix = "flatten tokens; for one probability p per input use torch.stack([1 - p, p], dim=-1)"
    checks.shape("The probabilities", probabilities, [None, None], fix)
    _check_targets(probabilities[:, 0], targets)
    labels, n_classes = targets.long(), probabilities.shape[1]
    if targets.is_floating_point() or labels.min() < 0 or labels.max() >= n_classes:
        got = f"{checks.describe(targets)}, {labels.min()} ... {labels.max()}"
        fix = "remove the rows of ignored targets first"
        raise LabelError("A target is not a class.", expected=f"integers 0 ... {n_classes - 1}", got=got, fix=fix)
    probabilities = probabilities if probabilities.is_floating_point() else probabilities.float()
    # A sum of C probabilities that were rounded one by one is off by about the precision of their dtype.
    tolerance = max(1e-4, 4 * torch.finfo(probabilities.dtype).eps)
    probabilities = widen(probabilities)
    fix = "give probabilities, not logits or log-probabilities: torch.softmax(logits, dim=-1)"
    checks.numbers("A probability", probabilities, least=-tolerance, fix=fix)
    checks.numbers("The sum of a row", probabilities.sum(1), least=1 - tolerance, most=1 + tolerance, fix=fix)
    return probabilities.clamp(0, 1), labels


def _check_regression(mean: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    _check_targets(mean, targets)
    return widen(mean), targets.to(widen(mean).dtype)


def _check_moments(mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, targets = _check_regression(mean, targets)
    fix = "give variances, not covariances: covariance.diagonal(dim1=-2, dim2=-1)"
    checks.numbers("A variance", checks.shape("The variances", variance, mean.shape, fix), above=0.0)
    return mean, variance.to(mean.dtype), targets


def _check_targets(predictions: Tensor, targets: Tensor) -> None:
    # Broadcasting [N] against [N, 1] would compare every prediction with every target.
    if targets.shape != predictions.shape or targets.is_complex():
        what, got = "The targets do not fit the predictions.", checks.describe(targets)
        fix = "bring both to one shape, e.g. targets.reshape(mean.shape)"
        raise LabelError(what, expected=f"real numbers {list(predictions.shape)}", got=got, fix=fix)
    if targets.numel() == 0:
        raise EmptyDataError("There is nothing to score.", expected="at least one prediction", got="none")
