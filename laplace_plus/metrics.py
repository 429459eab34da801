"""Scores of predictions and their uncertainties: proper scores, calibration, out-of-distribution detection.

All scores are 0-dimensional tensors and *means* over the data, unlike the sums that fitting works with. They are
computed in the dtype of the predictions, but at least in float32. Densities and probabilities are scored in nats.

Classification takes probabilities ``[N, C]`` and integer targets ``[N]``; the probabilities of a binary problem are two
columns, ``torch.stack([1 - p, p], dim=-1)``, and ignored tokens are removed beforehand. Regression takes means,
variances (of the observation, noise included) and targets of one shape, ``[N]`` or ``[N, C]``, and scores every scalar
by itself, but for those whose targets are NaN: not observed. Means are weighted by ``weight [N]``, where it is given:
numbers of at least 0, such as scikit-learn's ``sample_weight``. Scores are differentiable in these.

NumPy arrays do as well as tensors. A :class:`~laplace_plus.Prediction` stands for its probabilities, for its mean, or
for mean and variance, and then targets are as the loader gives them: ``accuracy(prediction, y)`` and
``crps_gaussian(prediction, y)``, with tokens and pixels flattened and ignored ones left out. In place of a score of
uncertainty it stands for its :func:`uncertainty`.

References:
    Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 2007.
    Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks", ICML 2017.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.special import entr

from laplace_plus import checks
from laplace_plus.errors import EmptyDataError, LabelError, NonFiniteError, UnsupportedError
from laplace_plus.likelihoods.base import each, spread, widen


def uncertainty(prediction: Any) -> Tensor:
    """One number for each observation ``[N]`` of a :class:`~laplace_plus.Prediction`; the larger, the less sure.

    For classes the entropy in nats; for numbers the mean of the variances of a target's entries, noise included, or
    the epistemic ones where the likelihood has no variance.
    """
    likelihood = prediction.likelihood
    if likelihood.is_classifier:
        return entr(likelihood.class_probabilities(prediction.mean)).sum(-1)
    try:
        return prediction.variance.flatten(0, -2).mean(-1)
    except UnsupportedError:
        return prediction.epistemic.flatten(0, -2).mean(-1)


# -- classification ---------------------------------------------------------------------------------------------------


def accuracy(probabilities: Any, targets: Any, weight: Tensor | None = None) -> Tensor:
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
    probabilities, targets, weight = _check_classification(probabilities, targets, weight)
    return weighted_mean((probabilities.argmax(dim=1) == targets).float(), weight)


def negative_log_likelihood(probabilities: Any, targets: Any, weight: Tensor | None = None) -> Tensor:
    """Compute ``-1/N sum_n log p_n[y_n]``, in nats.

    It is infinite if one target has probability zero; probabilities are not clamped, because that would hide it.
    Arguments and errors as for :func:`accuracy`.
    """
    probabilities, targets, weight = _check_classification(probabilities, targets, weight)
    return weighted_mean(-probabilities.gather(1, targets[:, None])[:, 0].log(), weight)


def brier_score(probabilities: Any, targets: Any, weight: Tensor | None = None) -> Tensor:
    """Compute ``1/N sum_n sum_c (p_n[c] - 1[y_n = c])^2``.

    The sum runs over all classes, so that the score of a binary problem is twice the one of its single column.
    Arguments and errors as for :func:`accuracy`.
    """
    probabilities, targets, weight = _check_classification(probabilities, targets, weight)
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

    @property
    def error(self) -> Tensor:
        """``sum_m n_m/N |accuracy_m - confidence_m|``, over bins that are not empty."""
        filled = self.counts > 0
        gaps = (self.accuracy - self.confidence)[filled].abs()
        return (gaps * self.counts[filled]).sum() / self.counts.sum()


def reliability_curve(probabilities: Any, targets: Any, n_bins: int = 15, weight: Any = None) -> ReliabilityCurve:
    """Compare confidence and accuracy in bins of equal width, as a reliability diagram shows them.

    Bin ``m`` of ``M`` holds the predictions whose largest probability is in ``((m - 1)/M, m/M]`` (Guo et al., 2017), so
    that full confidence belongs to the last one.

    Arguments and errors as for :func:`accuracy`; ``n_bins`` is the number ``M`` of bins.
    """
    probabilities, targets, weight = _check_classification(probabilities, targets, weight)
    confidence, predicted = probabilities.max(dim=1)
    return binned(confidence, (predicted == targets).to(confidence), n_bins, weight)


def binned(confidence: Tensor, right: Tensor, n_bins: int = 15, weight: Tensor | None = None) -> ReliabilityCurve:
    """The :func:`reliability_curve` of confidences ``[N]`` and of which predictions were right, ones and zeros."""
    checks.count("n_bins", n_bins)
    edges = torch.linspace(0, 1, n_bins + 1, dtype=confidence.dtype, device=confidence.device)
    bins = torch.bucketize(confidence, edges[1:-1])
    rows = torch.stack([torch.ones_like(right), confidence, right])
    rows = rows if weight is None else rows * checks.weights("weight", weight, confidence.shape).to(confidence)
    counts, total_confidence, n_right = rows.new_zeros(3, n_bins).index_add(1, bins, rows)
    found = ReliabilityCurve(total_confidence / counts, n_right / counts, counts)
    return found._replace(counts=counts.round().long()) if weight is None else found


def expected_calibration_error(probabilities: Any, targets: Any, n_bins: int = 15, weight: Any = None) -> Tensor:
    """Compute the mean distance of confidence and accuracy, ``sum_m n_m/N |accuracy_m - confidence_m|``.

    It is computed from the :func:`reliability_curve`, so that the two always agree. It differs from ``torchmetrics``
    only for confidences on the edge of a bin: torchmetrics puts a confidence of 1 into a bin of its own. The error is a
    biased estimate that grows with the number of bins.

    Returns:
        A number in ``[0, 1]``.
    """
    return reliability_curve(probabilities, targets, n_bins, weight).error


def ood_auroc(scores_in: Any, scores_out: Any, weight_in: Any = None, weight_out: Any = None) -> Tensor:
    """Compute the probability that an out-of-distribution input scores higher than one from the distribution.

    Ties count one half. Only the order of the scores matters, so they may be on any scale: entropies, variances, ....

    Args:
        scores_in: Scores of inputs from the distribution, one each, ``[N]``.
        scores_out: Scores of inputs from outside it, ``[M]``.
        weight_in: How often each counts, ``[N]``; None for once.
        weight_out: The same, ``[M]``.

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
    below, upto, share = _ranked(scores_in, scores_out, weight_in, weight_out)
    return _like(scores_in, (share * (below + upto)).sum() / (2 * share.sum()))


def ood_fpr95(scores_in: Any, scores_out: Any, weight_in: Any = None, weight_out: Any = None) -> Tensor:
    """Compute how many outliers pass the least threshold that lets 95 % of inputs from the distribution pass.

    An input passes whose score is at most the threshold. Arguments and errors as for :func:`ood_auroc`. The derivative
    by weights is that of a threshold which passes between 93 % and 97 %, as one threshold has none.

    Example:
        >>> ood_fpr95(torch.arange(20.0), torch.tensor([3.0, 18.5, 25.0, 30.0]))
        tensor(0.2500)
    """
    below, upto, share = _ranked(scores_in, scores_out, weight_in, weight_out)
    passed = (below < 0.95 - 1e-12).double()
    return _like(scores_in, _smoothed(share, passed, 0.95 - (below + upto) / 2, 0.02))


# -- selective prediction ---------------------------------------------------------------------------------------------


def risk_coverage_curve(uncertainty: Any, losses: Any, weight: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the coverages ``[N]`` up to each prediction, from the least uncertain on, their risks, and the weights.

    A risk is the mean loss of those up to there; arguments and errors as for :func:`area_under_risk_coverage`. All are
    float64, and of equal uncertainties each has the mean loss of these.
    """
    uncertainty, losses = _check_scores(uncertainty=uncertainty, losses=losses)
    _check_targets(uncertainty, losses)
    share, order = _weights(uncertainty, weight), uncertainty.argsort()
    _, group = uncertainty.unique(return_inverse=True)
    totals = share.new_zeros(2, len(uncertainty)).index_add(1, group, torch.stack([share, share * losses.double()]))
    mean, share = (totals[1] / totals[0].clamp_min(1e-300))[group][order], share[order]
    reached = share.cumsum(0)
    return reached / reached[-1], (share * mean).cumsum(0) / reached.clamp_min(1e-300), share


def area_under_risk_coverage(uncertainty: Any, losses: Any, weight: Any = None) -> Tensor:
    """Compute ``1/N Σ_k r_k``, with the risk ``r_k``: the mean loss of the k predictions of least uncertainty (AURC).

    Of equal uncertainties it is the mean over all orders. With weights it is that of as many repeated predictions.

    Args:
        uncertainty: ``[N]``, on any scale.
        losses: ``[N]``: zeros and ones for right and wrong classes, squared errors, ….
        weight: How often each counts, ``[N]``; None for once.

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
    _, risks, share = risk_coverage_curve(uncertainty, losses, weight)
    reached = share.cumsum(0)
    upto, before = risks * reached, torch.cat([share.new_zeros(1), (risks * reached)[:-1]])
    # Of w equal losses l, after W with the sum L, risks sum to Σ_k (L + k l)/(W + k) = w l + (L − W l) Σ_k 1/(W + k).
    mean, below = (upto - before) / share.clamp_min(1e-300), reached - share
    steps = torch.digamma(reached + 1) - torch.digamma(below + 1)
    return _like(losses, (upto - before + (before - below * mean) * steps).sum() / share.sum())


def selective_risk(uncertainty: Any, losses: Any, coverage: float = 0.8, weight: Any = None) -> Tensor:
    """Compute the mean loss of the share ``coverage`` of predictions that are of least uncertainty.

    Of equal uncertainties, and of the one that is cut, a part counts. Arguments and errors as for
    :func:`area_under_risk_coverage`. The derivative by weights takes the loss at the cut to be the mean of those within
    5 % of the coverage.

    Example:
        >>> selective_risk(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 1.0, 1.0, 1.0]), coverage=0.5)
        tensor(0.5000)
    """
    checks.number("coverage", coverage, above=0.0, most=1.0)
    uncertainty, losses = _check_scores(uncertainty=uncertainty, losses=losses)
    _check_targets(uncertainty, losses)
    below, upto, share = _ranked(uncertainty, uncertainty, weight, weight)
    kept = ((coverage - below) / (upto - below).clamp_min(1e-300)).clamp(0, 1)
    inside, width = coverage - (below + upto) / 2, min(0.05, (1 - coverage) / 2)
    return _like(losses, _smoothed(share, kept, inside, width, losses.double()))


def ause(uncertainty: Any, error: Any) -> Tensor:
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
    uncertainty, error = _check_scores(uncertainty=uncertainty, error=error)
    gap = risk_coverage_curve(uncertainty, error)[1] - risk_coverage_curve(error, error)[1]
    mean = error.double().mean()
    checks.numbers("An absolute error", error, least=0.0)
    removed = torch.arange(100, device=gap.device) * len(gap) // 100
    return torch.trapezoid(gap[len(gap) - 1 - removed] / mean.clamp_min(1e-300), dx=0.01).float()


def _ranked(inside: Any, at: Any, weight: Any, weight_at: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Which shares of the scores inside are below each score ``at [M]``, and at most it; and the weights of these."""
    inside, at = _check_scores(scores_in=inside, scores_out=at)
    ordered, order = inside.detach().to(torch.promote_types(inside.dtype, at.dtype)).sort()
    total = torch.nn.functional.pad(_weights(inside, weight)[order].cumsum(0), (1, 0))
    below, upto = (total[torch.searchsorted(ordered, at.detach().to(ordered), right=right)] for right in (False, True))
    return below / total[-1], upto / total[-1], _weights(at, weight_at)


def _smoothed(share: Tensor, kept: Tensor, inside: Tensor, width: float, losses: Tensor | None = None) -> Tensor:
    """The share that is kept, or its mean loss; with derivatives as if ± the width inside the cut were kept in part."""

    def mean(factor: Tensor) -> Tensor:
        own = share * factor
        return own.sum() / share.sum() if losses is None else (own * losses).sum() / own.sum().clamp_min(1e-300)

    ramp = mean((inside / (2 * max(width, 1e-12)) + 0.5).clamp(0, 1))
    return (mean(kept) - ramp).detach() + ramp


def _weights(scores: Tensor, weight: Any) -> Tensor:
    found = torch.ones(len(scores)) if weight is None else checks.weights("weight", _tensor(weight), scores.shape)
    return found.to(scores.device, torch.float64)


def _like(scores: Any, value: Tensor) -> Tensor:
    return value.to(torch.promote_types((value if _is_prediction(scores) else _tensor(scores)).dtype, torch.float32))


# -- regression -------------------------------------------------------------------------------------------------------


def root_mean_squared_error(mean: Any, targets: Any, weight: Any = None) -> Tensor:
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
    (mean,), targets, weight = _rows(mean, targets, weight, "mean")
    mean, targets = _check_regression(mean, targets)
    return weighted_mean((mean - targets).square(), weight, ~targets.isnan()).sqrt()


def gaussian_nll(mean: Any, variance: Any = None, targets: Any = None, weight: Any = None) -> Tensor:
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
    mean, variance, targets, weight = _check_moments(mean, variance, targets, weight)
    densities = math.log(2 * math.pi) + variance.log() + (targets - mean).square() / variance
    return 0.5 * weighted_mean(densities, weight, ~targets.isnan())


def crps_gaussian(mean: Any, variance: Any = None, targets: Any = None, weight: Any = None) -> Tensor:
    r"""Compute the mean continuous ranked probability score of Gaussian predictions, in the units of the targets.

    With ``s = sqrt(variance)`` and ``z = (y - mean) / s``, the score of one scalar is
    ``s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))`` (Gneiting and Raftery, 2007). It becomes the absolute error as
    the variance goes to zero. Arguments and errors as for :func:`gaussian_nll`.
    """
    mean, variance, targets, weight = _check_moments(mean, variance, targets, weight)
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


def _tensor(value: Any) -> Any:
    return torch.as_tensor(value) if hasattr(value, "__array__") else value


def _is_prediction(value: Any) -> bool:
    return hasattr(value, "functional_mean") and hasattr(value, "likelihood")


def _rows(given: Any, targets: Any, weight: Any, *parts: str) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """A tensor, targets and weights; in place of a prediction its parts, or its probabilities where there are none."""
    targets, weight = _tensor(targets), _tensor(weight)
    if not _is_prediction(given):
        return [_tensor(given)], targets, weight
    likelihood, targets = given.likelihood, each(lambda own: own.to(given.functional_mean.device), targets)
    _, targets, share = likelihood.rows(given.functional_mean, targets)
    columns = [getattr(given, part).flatten(0, -2 if targets.dim() > 1 else -1) for part in parts]
    if not parts:
        columns = [likelihood.class_probabilities(given.mean)]
        targets = targets if likelihood.couples_outputs else targets.reshape(-1)
        share = share.repeat_interleave(len(columns[0]) // len(share))
        if targets.dim() == 1:  # no soft labels
            share, targets = share * ~targets.isnan(), targets.nan_to_num(0).long()
    if weight is not None:
        share = share * weight.reshape(-1).to(share).repeat_interleave(len(share) // weight.numel())
    return columns, targets, share


def _check_scores(**named: Any) -> list[Tensor]:
    found = [uncertainty(scores) if _is_prediction(scores) else _tensor(scores) for scores in named.values()]
    for name, scores in zip(named, found, strict=True):
        if not checks.shape(name, scores, [None]).numel():
            raise EmptyDataError(f"There are no {name}.", expected="at least one number", got="none")
        if n_nan := int(scores.isnan().sum()):
            raise NonFiniteError(f"{name} cannot be put in order.", expected="no NaN", got=f"{n_nan} NaN")
    return found


def _check_classification(given: Any, targets: Any, weight: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    (probabilities,), targets, weight = _rows(given, targets, weight)
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
    return probabilities.clamp(0, 1), labels, weight


def _check_regression(mean: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    _check_targets(mean, targets)
    return widen(mean), targets.to(widen(mean).dtype)


def _check_moments(mean: Any, variance: Any, targets: Any, weight: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if _is_prediction(mean):
        targets = variance if targets is None else targets
    (mean, *spreads), targets, weight = _rows(mean, targets, weight, "mean", "variance")
    variance = spreads[0] if spreads else _tensor(variance)
    mean, targets = _check_regression(mean, targets)
    fix = "give variances, not covariances: covariance.diagonal(dim1=-2, dim2=-1)"
    checks.numbers("A variance", checks.shape("The variances", variance, mean.shape, fix), above=0.0)
    return mean, variance.to(mean.dtype), targets, weight


def _check_targets(predictions: Tensor, targets: Tensor) -> None:
    # Broadcasting [N] against [N, 1] would compare every prediction with every target.
    if targets.shape != predictions.shape or targets.is_complex():
        what, got = "The targets do not fit the predictions.", checks.describe(targets)
        fix = "bring both to one shape, e.g. targets.reshape(mean.shape)"
        raise LabelError(what, expected=f"real numbers {list(predictions.shape)}", got=got, fix=fix)
    if targets.numel() == 0:
        raise EmptyDataError("There is nothing to score.", expected="at least one prediction", got="none")
