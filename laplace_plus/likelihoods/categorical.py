"""One of ``C`` classes, with logits as outputs.

Links from a Gaussian over the logits to class probabilities:

* ``"gumbel"``: ``E[softmax(f)_k]`` is the probability that ``f_k`` plus standard Gumbel noise is the largest of all
  (Gumbel, 1954). Softmax depends on differences of logits alone, so the covariance is replaced by independent variances
  whose sums match the variances of those differences: :func:`independent_variances`. One integral over a line is left,
  ``p_k = ∫ F_k'(t) ∏_{j≠k} F_j(t) dt``, with F the distribution functions of Gaussian plus Gumbel. Exact for
  independent logits, for two classes, and for what all logits share.
* ``"probit"``: ``softmax(m / √(1 + π/8 diag V))``, the multi-class form of MacKay's (1992, "The evidence framework
  applied to classification networks") approximation; see Gibbs (1997, PhD thesis) and Lu, Ie & Sha (2020,
  arXiv:2006.07584).
* ``"mc"``: the average of softmax over samples.
* ``"bridge"``: the Laplace bridge, a Dirichlet whose Laplace approximation in the softmax basis is the Gaussian:
  MacKay (1998, "Choice of basis for Laplace approximation"), Hobbhahn, Kristiadi & Hennig (2022, arXiv:2003.01227).
  Exact for Gaussians that match a Dirichlet. The concentration follows from the variances, so the result is far from
  the integral for other variances, e.g. small and equal ones for classes of very different probability.
* ``"network"``: ``softmax(m)``, no integral; the posterior then only says how unsure these probabilities are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Categorical as CategoricalDistribution
from torch.nn.functional import one_hot
from torch.special import log_ndtr

from laplace_plus import checks
from laplace_plus.checks import describe
from laplace_plus.errors import LabelError, OutputError
from laplace_plus.likelihoods.base import (
    LAST_AXIS,
    Likelihood,
    OutputCurvature,
    refuse_several_targets,
    refuse_targets,
    widen,
)
from laplace_plus.likelihoods.marginal import Marginal, variance_of
from laplace_plus.likelihoods.sampling import draw_by

_REACH = 5.5
"""How many deviations of a logit the integrals of the link ``"gumbel"`` reach."""


def _nodes(count: int, total: float = 1.0) -> Tensor:
    """For equidistant τ from 0 to 1: ``τ − τ⁵`` and ``τ⁵``, each beside the trapezoidal weights times a total."""
    tau, step = torch.linspace(0, 1, count, dtype=torch.float64, device="cpu"), total / (count - 1)
    bent = 5 * step * tau**4
    return torch.stack([torch.cat([tau - tau**5, step - bent]), torch.cat([tau**5, bent])])


_TIMES, _NODES = _nodes(24), _nodes(20, (2 * math.pi) ** -0.5)
"""Nodes of the outer and of the inner integral. Against quadrature with 50 times as many, the largest error of a
probability was 3e-4 for variances up to 100, 6e-4 up to 1000, and 2e-2 beyond."""


def _scales(count: int) -> Tensor:
    """Variances ``τ²`` and logarithms of weights: for τ by its density, the logistic distribution is ``E N(0, τ²)``.

    τ/2 is distributed as Kolmogorov's statistic (Stefanski, 1991, "A normal scale mixture representation of the
    logistic distribution"). With 32 nodes, ``E σ`` is off by 1e-12, and its logarithm by 1e-6 for logits down to −30.
    """
    tau = torch.linspace(math.log(0.4), math.log(12), count, dtype=torch.float64, device="cpu").exp()
    terms = torch.arange(1, 30, dtype=torch.float64, device="cpu")[:, None] ** 2
    late = tau**2 * (terms * (2 * (terms % 2) - 1) * torch.exp(-terms * tau**2 / 2)).sum(0)
    rates = (4 * terms - 4 * terms.sqrt() + 1) * math.pi**2 / 2  # of the same, by its other series
    early = ((2 * rates / tau**2 - 1) / tau * torch.exp(-rates / tau**2)).sum(0)
    density = torch.where(tau < 1.5, math.sqrt(2 * math.pi) * early, late)
    return torch.stack([tau**2, (density / density.sum()).log()])


LOGISTIC_SCALES = _scales(32)

_SMOOTH = 3.0
"""A class ``(s + 2)²`` or more below a time, of deviation s up to 3, needs no inner integral. No probability of 105
Gaussians changed by 3e-6. For s = 4 the nodes' error, 3e-5 of F, must be equal at all times to cancel."""

_BYTES = {True: 2**22, False: 2**28}
"""Of the nodes of the rows that are integrated at once, on a CPU (its own caches) and elsewhere."""

_SMALL = 4e-4
"""Bound of ``Σ p^1.5 (e^d − 1)²`` over all classes but the top, d the variance of the difference from it, for second
order: no probability of 10 000 rows was off by 1e-4 then, nor its logarithm by 1e-2."""

_MASKED = 5e3
"""Logits so far below the largest are masks, as of half precision: −1e4, −65504."""

_LARGEST_WEIGHT = 0.45
"""Bound of a class's weight in the fit of independent variances. Mean KL to the truth was .0027, without it .0032."""


@final
@dataclass(frozen=True)
class Categorical(Likelihood):
    """``p(y = k | f) = softmax(f)_k`` over ``C >= 2`` classes.

    Targets are class indices ``[B, *]``, or soft labels: probabilities of the classes, laid out as the outputs are.
    The loss of soft labels q, weights w and smoothing ε is that of torch's cross-entropy, summed: ``−Σ_k t_k log p_k``
    with ``t_k = w_k ((1 − ε) q_k + ε/C)``. Its Hessian is ``(Σ_k t_k) (diag p − p pᵀ)``, the Fisher information where
    the factor is one. Weights and smoothing belong to training: predictions and their scores are without them.

    Args:
        ignore_index: Rows with this target are ignored.
        output_axis: The axis of the logits in the network's output; 1 for ``[B, C, H, W]``.
        weight: C non-negative numbers, as of ``torch.nn.CrossEntropyLoss``; None for ones.
        label_smoothing: ε, from 0 to below 1.
        weighted: Whether each target comes with a weight of its own; see :class:`~laplace_plus.Likelihood`.

    Raises:
        ConfigurationError: Weights or smoothing out of range.

    Example:
        >>> Categorical().log_density(torch.zeros(1, 4), torch.tensor([2])).exp()
        tensor([0.2500])
    """

    ignore_index: int = -100
    output_axis: int = LAST_AXIS
    weight: Any = None
    label_smoothing: float = 0.0
    weighted: bool = False
    per_output = ("weight",)
    training_options = {"weight": None, "label_smoothing": 0.0}  # noqa: RUF012
    config_name = "categorical"
    links = ("gumbel", "probit", "mc", "bridge", "network")
    is_classifier = True

    def __post_init__(self) -> None:
        if self.weight is not None:
            weight = checks.weights("the classes' weights", torch.as_tensor(self.weight, dtype=torch.float64), [None])
            object.__setattr__(self, "weight", tuple(weight.tolist()))
        checks.number("label_smoothing", self.label_smoothing, least=0.0, below=1.0)

    def _totals(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """``t [N, C]`` for soft labels ``[N, C]``, or weighted or smoothed labels ``[N]``; None for plain ones."""
        if not targets.is_floating_point() and self.weight is None and not self.label_smoothing:
            return None
        size = outputs.shape[-1]
        q = targets if targets.is_floating_point() else one_hot(targets.long(), size)
        q = (1 - self.label_smoothing) * q.to(outputs.dtype) + self.label_smoothing / size
        return q if self.weight is None else q * torch.tensor(self.weight, dtype=q.dtype, device=q.device)

    def check_targets(self, outputs: Tensor, targets: Any) -> None:
        """Refuse anything but class indices ``[B, *]`` or soft labels for outputs ``[B, *, C]`` with ``C >= 2``."""
        if not isinstance(targets, Tensor):
            refuse_several_targets(self, targets)
        n_classes = outputs.shape[-1]
        if n_classes == 1:
            expected = 'at least two outputs, or likelihood="binary"'
            raise OutputError("One logit does not define several classes.", expected=expected, got="C = 1")
        if targets.is_floating_point() and targets.dim() == outputs.dim():
            q = targets.movedim(self.output_axis, -1)
            close = (widen(q).sum(-1) - 1).abs() <= max(1e-4, 4 * torch.finfo(q.dtype).eps)
            if q.shape != outputs.shape or not bool(((q >= 0).all(-1) & close).all()):
                expected = f"probabilities {list(outputs.shape)} that sum to one over the classes"
                got, fix = describe(targets), "Of classes pass targets.long(), without an extra axis."
                raise LabelError("The soft labels are no distributions.", expected=expected, got=got, fix=fix)
            return
        integers = targets.dtype != torch.bool and not targets.is_floating_point() and not targets.is_complex()
        if targets.shape != outputs.shape[:-1] or not integers:
            raise LabelError(
                "The targets are not class indices.",
                expected=f"integers (torch.long) of shape {list(outputs.shape[:-1])}",
                got=describe(targets),
                fix="Pass targets.long(), targets.float() for one-hot vectors, targets.squeeze(-1) for an extra axis; "
                'use lp.Categorical(output_axis=1) for logits [B, C, H, W], likelihood="regression" for real numbers.',
            )
        labels = targets.long()
        wrong = ((labels < 0) | (labels >= n_classes)) & (labels != self.ignore_index)
        if bool(wrong.any()):
            known = f"0 … {n_classes - 1}, or ignore_index = {self.ignore_index}"
            fix = "Count classes from 0, and give the network one output for each"
            refuse_targets(wrong, labels, "Some class indices are out of range.", expected=known, fix=fix)

    def prepare(self, outputs: Tensor, targets: Tensor, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Soft labels ``[N, C]``, or class indices ``[N]``, of which ignored ones are 0 and do not count."""
        if targets.is_floating_point():
            return targets.movedim(self.output_axis, -1).reshape(flat.shape).to(flat.dtype), None
        labels = targets.reshape(-1).long()
        kept = labels != self.ignore_index
        return labels.where(kept, 0), kept

    def n_terms(self, targets: Tensor, weight: Tensor, n_outputs: int) -> float:
        """The labels' class weights, summed; the number of soft labels."""
        if self.weight is None or targets.is_floating_point():
            return super().n_terms(targets, weight, n_outputs)
        return float((torch.tensor(self.weight, device=targets.device)[targets] * weight).sum())

    def log_density(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log softmax(f)_y``, ``[N]``; in general ``Σ_k t_k log p_k``."""
        t = self._totals(outputs, targets)
        if t is not None:
            return (t * outputs.log_softmax(-1)).sum(-1)
        return outputs.log_softmax(-1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)

    def gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``p - e_y``, ``[N, C]``; in general ``(Σ t) p − t``."""
        p, complement = _probabilities(outputs)
        t = self._totals(p, targets)
        if t is not None:
            return t.sum(-1, keepdim=True) * p - t
        index = targets.long().unsqueeze(-1)
        return p.scatter(-1, index, -complement.gather(-1, index))

    def output_curvature(self, outputs: Tensor, targets: Tensor, weight: Tensor) -> OutputCurvature | None:
        """``diag p - p pᵀ``; zero for ignored rows; None with weights, which are no part of that form."""
        if self.weight is not None or self.weighted:
            return None
        p, complement = _probabilities(outputs)
        weight = weight.to(p.dtype).unsqueeze(-1)
        return OutputCurvature(weight * p, weight * p * complement, coupled=True)

    def output_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``(Σ t)^½ (diag √p - p √pᵀ)``, ``[N, C, C]``."""
        p, complement = _probabilities(outputs)
        root = p.sqrt()
        found = torch.diagonal_scatter(-p.unsqueeze(-1) * root.unsqueeze(-2), root * complement, dim1=-2, dim2=-1)
        t = None if self.weight is None else self._totals(p, targets)
        return found if t is None else found * t.sum(-1).sqrt()[..., None, None]

    def distribution(self, outputs: Tensor) -> CategoricalDistribution:
        """A categorical distribution with batch shape ``[...]``."""
        return CategoricalDistribution(logits=outputs, validate_args=False)

    def sample(self, outputs: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Class indices ``[...]``."""
        table = outputs.softmax(-1).reshape(-1, outputs.shape[-1])
        if not len(table):
            return torch.zeros(outputs.shape[:-1], dtype=torch.long, device=outputs.device)
        return draw_by(partial(torch.multinomial, num_samples=1), table, generator).reshape(outputs.shape[:-1])

    def class_probabilities(self, mean: Tensor) -> Tensor:
        """The means themselves, one row for each observation, ``[N, C]``."""
        return mean.reshape(-1, mean.shape[-1])

    def mixture(self, outputs: Tensor) -> CategoricalDistribution:
        """The categorical distribution of the average probabilities."""
        return CategoricalDistribution(logits=outputs.log_softmax(-1).logsumexp(0), validate_args=False)

    def predict(self, mean: Tensor, covariance: Tensor, *, link: str) -> Marginal:
        """``"gumbel"`` (takes variances alone for independent logits), ``"bridge"``, or those that need no more."""
        logits = mean
        if link == "gumbel":
            logits = _gumbel_logits(mean, covariance)
        elif link == "probit":
            logits = mean / (1 + math.pi / 8 * variance_of(mean, covariance)).sqrt()
        elif link == "bridge":
            logits = _bridge_log_concentration(mean, covariance)
        p = logits.softmax(-1)
        return Marginal(p, p * (1 - p), CategoricalDistribution(logits=logits, validate_args=False))


def _probabilities(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """``p`` and ``1 - p``, the latter without cancellation for ``p`` close to 1."""
    p = outputs.softmax(-1)
    top = p.argmax(-1, keepdim=True)
    return p, (1 - p).scatter(-1, top, p.scatter(-1, top, 0.0).sum(-1, keepdim=True))


def centring_weights(mean: Tensor) -> Tensor:
    """Weights ``w [..., C]`` of the classes for :func:`independent_variances`: more for those that may win.

    They sum to one. None of three or more classes reaches ½, where that problem has no stable solution in O(C). Masked
    classes, too far below the top to be reached, have no weight.
    """
    open_ = mean > mean.amax(-1, keepdim=True) - _MASKED
    count = open_.sum(-1, keepdim=True).to(mean.dtype)
    share = ((_LARGEST_WEIGHT - 1 / count) / (1 - 1 / count).clamp_min(0.5)).clamp_min(0.0)
    return share * (mean / 2).softmax(-1) + (1 - share) / count * open_


def independent_variances(mean: Tensor, covariance: Tensor) -> Tensor:
    """Variances ``d [..., C]`` of independent logits whose differences vary as nearly as can be as the given ones do.

    They minimise ``Σ_{k≠j} w_k w_j (d_k + d_j − V_kj)²`` for ``V_kj = Var(f_k − f_j)``, and are then clamped at zero:
    ``d_k = (r_k − A) / (1 − 2w_k)`` with ``r = V w`` and ``A = wᵀd``.

    Args:
        mean: ``[..., C]``; w are its :func:`centring_weights`.
        covariance: ``[..., C, C]``, or variances ``[..., C]`` of the centred logits ``f_k − wᵀf``, which determine r.
    """
    w, centred = centring_weights(mean), covariance
    if covariance.dim() > mean.dim():
        shared = (w.unsqueeze(-2) @ covariance).squeeze(-2)  # symmetric; columns first take twice as long
        centred = covariance.diagonal(dim1=-2, dim2=-1) - 2 * shared + (w * shared).sum(-1, keepdim=True)
    r = centred + (w * centred).sum(-1, keepdim=True)
    if mean.shape[-1] < 3:  # noqa: PLR2004 - only the sum V_12 of two matters
        return (r.sum(-1, keepdim=True) / 2).clamp_min(0.0).expand_as(mean)
    few = w.amax(-1, keepdim=True) >= 0.5  # noqa: PLR2004 - all but one or two are masked, of which r knows the sum
    slope = torch.where(few, 1.0, 1 - 2 * w).reciprocal()
    weight = w * slope
    total = (weight * r).sum(-1, keepdim=True) / (1 + weight.sum(-1, keepdim=True))
    fitted = torch.where(few, r, slope * (r - total))
    return torch.where(fitted < 0, 0.0, fitted)  # unlike clamp, differentiable at zero


def _gumbel_logits(mean: Tensor, covariance: Tensor) -> Tensor:
    """Logarithms of the probabilities that each logit is the largest after Gumbel noise, ``[..., C]``."""
    if mean.shape[-1] == 2:  # noqa: PLR2004 - E σ of the difference of two, which is Gaussian
        entries = covariance.flatten(mean.dim() - 1)
        variance = entries[..., :1] + entries[..., -1:]
        if entries.shape[-1] > 2:  # noqa: PLR2004
            variance = variance - entries[..., 1:2] - entries[..., 2:3]
        variance, ahead = variance.clamp_min(0.0), mean - mean.flip(-1)
        scales, log_weights = LOGISTIC_SCALES.to(mean)
        units = ahead.unsqueeze(-1) * (variance.unsqueeze(-1) + scales).rsqrt()
        logits = (log_ndtr(units) + log_weights).logsumexp(-1)
        return torch.where(ahead < -20 - 1.5 * variance, ahead + variance / 2, logits)  # there σ is exp
    variance = independent_variances(mean, covariance) if covariance.dim() > mean.dim() else covariance
    shape, mean, variance = mean.shape, mean.flatten(0, -2), variance.flatten(0, -2)
    p = mean.softmax(-1)
    top = p.argmax(-1, keepdim=True)
    spread = torch.expm1(variance + variance.gather(-1, top)).square() * p * p.sqrt()
    large = ~(spread.scatter(-1, top, 0.0).sum(-1) < _SMALL)
    result = (mean + variance / 2 * (1 - 2 * p)).log_softmax(-1)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # graphs that are recorded do not depend on values
        return torch.where(large.unsqueeze(-1), _integrated_logits(mean, variance), result).view(shape)
    if bool(large.any()):
        result = result.index_put((large,), _integrated_logits(mean[large], variance[large]))
    return result.view(shape)


def _integrated_logits(mean: Tensor, variance: Tensor) -> Tensor:
    """The same by integrals, for rows ``[N, C]``, a bounded number of rows at once.

    The trapezoidal rule converges geometrically here. Nodes are equidistant at first, then farther and farther apart:
    narrow steps cut wider ones off, so they lie near the end that nodes count from, whatever the variances' ratios.
    """
    times, nodes = _TIMES.to(mean), _NODES.to(mean)
    n_times, n_nodes, size = times.shape[1] // 2, nodes.shape[1] // 2, mean.shape[-1]
    rows = max(1, _BYTES[mean.device.type == "cpu"] // (2 * n_nodes * n_times * size * mean.element_size()))
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()  # graphs do not depend on values
    if not recorded and len(mean) > rows:
        pairs = zip(mean.split(rows), variance.split(rows), strict=True)
        return torch.cat([_integrated_logits(*own) for own in pairs])
    # The square root has no derivative at zero; the shift is rounding beside the Gumbel noise's variance.
    rounding = torch.finfo(mean.dtype).eps
    s = (variance + rounding).clamp_min(rounding / 2).sqrt()
    m = mean - mean.detach().amax(-1, keepdim=True)
    # From the time that the largest surely passes, by the class that tells, to the time that none does.
    reach = _REACH * s
    start, surest = (m - reach).max(-1, keepdim=True)
    width = (m + reach).amax(-1, keepdim=True) - start + (12 + math.log(size))
    near = torch.minimum(width, 0.9 * n_times + 0.9 * n_times * s.gather(-1, surest))
    t, spacing = (torch.cat([near, width], -1) @ times).unsqueeze(-1).split(n_times, 1)  # [N, T, 1]
    x, s = t + (start - 3.5).unsqueeze(1) - m.unsqueeze(1), s.unsqueeze(1)
    # F(x) = ∫ φ(ε) exp(−exp(−u)) dε, u = x − s ε. Far below a time, log F = −a and log F' = log a − a exp(s²) to
    # leading order in a = E exp(−u) = exp(s²/2 − x). Nodes count down from u = −4, where F's integrand ends.
    square, bound = s.clamp_max(_SMOOTH).square(), (s + 2).square().masked_fill(s > _SMOOTH, math.inf)
    log_density = (square / 2 - x).clamp_max(0.0)
    log_cdf = -log_density.exp()
    log_density = log_density + log_cdf * square.exp()
    close = (x < bound).flatten()
    chosen = slice(None) if recorded else close.nonzero().squeeze(1)
    x_close, s_close = x.reshape(-1)[chosen], s.expand_as(x).reshape(-1)[chosen]
    last = ((x_close + 4) / s_close).clamp_max(_REACH)
    span = (last + _REACH).clamp_min(4.0)
    sides = torch.stack([torch.minimum(span, 0.8 * n_nodes / s_close), span], -1)
    before, weights = (sides @ nodes).split(n_nodes, -1)  # last − ε, [pairs, Q]
    lowest = torch.addcmul(x_close, s_close, last, value=-1)
    falling = torch.exp(before * -s_close.unsqueeze(-1))  # exp(lowest − u)
    gumbel, epsilon = falling * -torch.exp(-lowest).unsqueeze(-1), before - last.unsqueeze(-1)
    values = torch.addcmul(gumbel, epsilon, epsilon, value=-0.5).exp() * weights
    found = values.sum(-1).log(), (values * falling).sum(-1).log() - lowest
    if recorded:
        log_cdf = torch.where(close, found[0], log_cdf.flatten()).view_as(x)
        log_density = torch.where(close, found[1], log_density.flatten()).view_as(x)
    else:
        log_cdf = log_cdf.flatten().scatter(0, chosen, found[0]).view_as(x)
        log_density = log_density.flatten().scatter(0, chosen, found[1]).view_as(x)
    densities = log_density - log_cdf + (log_cdf.sum(-1, keepdim=True) + spacing.log())
    return densities.logsumexp(1).log_softmax(-1)


def _bridge_log_concentration(mean: Tensor, covariance: Tensor) -> Tensor:
    """Logarithm of the Dirichlet's parameters ``[..., C]``.

    ``α_k = (1 - 2/C + exp(m_k)/C² Σ_l exp(-m_l)) / V_kk`` after conditioning the Gaussian on ``Σ_k f_k = 0``, because
    softmax does not depend on the sum.
    """
    n_classes = mean.shape[-1]
    row_sum = covariance.sum(-1)
    total = row_sum.sum(-1, keepdim=True)
    # If the covariance already fixes the sum, total is 0 up to rounding, and there is nothing to condition on.
    rounding = torch.finfo(mean.dtype).eps * n_classes * covariance.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    free = total > rounding
    gain = torch.where(free, row_sum / torch.where(free, total, 1.0), 0.0)
    centred = mean - gain * mean.sum(-1, keepdim=True)
    variance = covariance.diagonal(dim1=-2, dim2=-1) - gain * row_sum
    variance = variance.clamp_min(torch.finfo(mean.dtype).tiny)
    growth = centred - 2 * math.log(n_classes) + (-centred).logsumexp(-1, keepdim=True)
    if n_classes > 2:
        growth = torch.logaddexp(growth, torch.full_like(growth, math.log(1 - 2 / n_classes)))
    return growth - variance.log()
