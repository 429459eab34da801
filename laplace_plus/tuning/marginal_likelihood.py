"""Tuning by the Laplace evidence, the marginal likelihood at the network's own weights.

With the weights fixed and a positive semi-definite curvature H, the evidence is concave in the logarithms of all
hyperparameters together: ``det(e^b H + diag(e^u))`` is a sum of exponentials of linear functions with non-negative
coefficients, so its logarithm is convex. There is one optimum; the coarse grid of :meth:`Objective.start` only shortens
the way to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, UnsupportedError, warn
from laplace_plus.linalg.estimates import standard_error
from laplace_plus.priors import LAYERWISE, Groups, PriorStructure
from laplace_plus.structured import DiagonalBlock
from laplace_plus.tuning.base import Tunable, TuningResult, tunes_noise
from laplace_plus.tuning.groups import NAME as NORMALISED
from laplace_plus.tuning.groups import check_structure, chosen_groups, curvature_diagonal
from laplace_plus.tuning.laplace import LaplaceModel

REACH = 30.0
"""Half-width of the search in log precision around the scale of the parameters: a factor of 1e13 either way. Below
that, float64 rounds the prior away from eigenvalues of the curvature."""

SPAN = math.log(1e30)
"""Largest log precision, in absolute value: float32 ends at 1e38."""

WIDEST = 1e-4
"""Least precision of a single entry, as a part of the best common one: less would gain γ/20 000 nats in all."""

KNOWN = 0.01
"""Largest standard error of a log precision, from random vectors, that passes without a warning."""

NOISE_SHIFTS = (-1.0, 0.0, 0.7)
"""Log noise levels of the coarse grid, beside those of the residuals: with T < 1 or many parameters they differ."""


@dataclass(frozen=True)
class Objective:
    """The evidence as a function of one vector of logarithms, ``[log precisions…, log noise…]``, float64 on the CPU.

    Attributes:
        structure: ``"scalar"``, ``"layerwise"`` (one precision for each of the model's groups) or ``"diagonal"``.
        tune_noise: Whether noise levels are searched too.
        groups: The groups of the model; for other structures than ``"layerwise"`` those of the posterior.
        limits: The box ``[2, n]`` in which to search; None for the default.
    """

    model: LaplaceModel
    structure: PriorStructure
    temperature: Tensor
    tune_noise: bool
    groups: Groups
    limits: Tensor | None = None

    @classmethod
    def create(
        cls,
        posterior: Tunable,
        structure: str | Groups,
        data: Iterable[Any] | None = None,
        tune_noise: bool | None = None,
    ) -> Objective:
        """The objective of a posterior with the groups of a structure; ``ConfigurationError`` for bad choices."""
        model, groups, kind = posterior.laplace_model(), posterior.prior_groups, LAYERWISE
        if structure == "scalar" or structure == "diagonal":
            kind = "scalar" if structure == "scalar" else "diagonal"
        else:
            groups = chosen_groups(posterior, structure, data)
            model = replace(model, layer_index=groups.index)
        tune_noise = tunes_noise(model.likelihood, tune_noise)
        if kind == "diagonal" and model.sampled is not None:
            what = "Random vectors do not tell what the curvature has in single entries."
            fix = "With remainder_probes=0 lp.LowRank takes its pairs alone."
            raise UnsupportedError(what, expected='structure="scalar" or groups', fix=fix)
        return cls(model, kind, posterior.temperature.detach(), tune_noise, groups)

    @property
    def n_precisions(self) -> int:
        """The number of prior precisions."""
        return {"scalar": 1, "layerwise": self.model.n_layers, "diagonal": len(self.model.vector)}[self.structure]

    def split(self, logarithms: Tensor) -> tuple[Tensor, Tensor | None]:
        """Precisions and noise levels (None if they are not searched)."""
        precision, noise = logarithms[: self.n_precisions].exp(), logarithms[self.n_precisions :].exp()
        if self.structure == "scalar":
            precision = precision[0]
        if not self.tune_noise:
            return precision, None
        own = self.model.likelihood.noise_std
        return precision, noise[0] if own is not None and own.ndim == 0 else noise

    def value(self, logarithms: Tensor) -> Tensor:
        """The log evidence; differentiable."""
        precision, noise = self.split(logarithms)
        return self.model.log_marginal_likelihood(precision, self.temperature, noise)

    def at(self, logarithms: Tensor) -> EvidencePoint:
        """The log evidence and its gradient."""
        with torch.enable_grad():
            point = logarithms.detach().clone().requires_grad_()
            value = self.value(point)
            (gradient,) = torch.autograd.grad(value, point)
        return EvidencePoint(self, point.detach(), value.item(), gradient)

    def scatter(self) -> Tensor:
        """``Σ (θ̂−μ₀)_j²`` over the entries that share a precision, ``[n_precisions]``."""
        return self.model.scatter(self.structure).detach().cpu().view(-1)

    def sizes(self) -> Tensor:
        """The number of entries that share each precision, ``[n_precisions]`` float64."""
        n, size = self.n_precisions, len(self.model.vector)
        if self.structure == "layerwise":
            return torch.bincount(self.model.layer_index.cpu(), minlength=n).double()
        return torch.full((n,), size / n, dtype=torch.float64, device="cpu")

    @cached_property
    def scales(self) -> Tensor:
        """Log precisions ``log d_g/‖θ̂−μ‖²_g`` of the parameters' own size, ``[n_precisions]``.

        A search from there does not depend on the scale of a group. With a precision for each entry all are alike.
        """
        squares = self.scatter() / self.sizes()
        overall = squares.mean().clamp(1e-16, 1e26)
        if self.structure == "diagonal":
            return -overall.log().expand(len(squares))
        return -torch.where(squares > 1e-12 * overall, squares, overall).log()

    def start(self) -> Tensor:
        """The best point of a coarse grid: far away from the optimum the evidence is flat."""
        # One precision for all, as of a scalar prior, costs less where a block has several.
        mixed = self.structure == "layerwise" and self.model.mixes_layers
        costly = self.structure == "diagonal" or mixed or self.model.sampled is not None
        quick = replace(self, structure="scalar") if costly else self
        # A stationary precision is at most the scale, as γ ≤ d; it is e⁻¹⁵ of that for weights of 1e-7.
        levels = torch.linspace(-20.0, 5.0, 26, dtype=torch.float64, device="cpu")
        noises = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        if self.tune_noise:
            noises = [self.model.residual_noise() + shift for shift in NOISE_SHIFTS]
        # Where outputs have noise levels of their own, blocks keep the decomposition at the last ones.
        pairs = [(level, noise) for noise in noises for level in levels]
        with torch.no_grad():
            values = [quick.value(torch.cat([quick.scales + level, noise])) for level, noise in pairs]
        level, noise = pairs[max(range(len(pairs)), key=values.__getitem__)]
        return torch.cat([(quick.scales + level).expand(self.n_precisions), noise])

    @cached_property
    def box(self) -> Tensor:
        """The least and the greatest point that is searched, ``[2, n]``; wide on the scale of the parameters."""
        if self.limits is not None:
            return self.limits
        box = torch.stack([self.scales - REACH, self.scales + REACH]).clamp(-SPAN, SPAN)
        if not self.tune_noise:
            return box
        noise = self.model.residual_noise()
        return torch.cat([box, torch.stack([noise - 12, noise + 8])], 1)


@dataclass(frozen=True)
class EvidencePoint:
    """The log evidence (``value``, in nats) of an objective at one point, ``logarithms [n]``, with its gradient."""

    objective: Objective
    logarithms: Tensor
    value: float
    gradient: Tensor

    @cached_property
    def free(self) -> Tensor:
        """The gradient without the entries that only press against a bound."""
        (low, high), point = self.objective.box, self.logarithms
        pressing = ((point <= low + 1e-9) & (self.gradient < 0)) | ((point >= high - 1e-9) & (self.gradient > 0))
        return self.gradient.masked_fill(pressing, 0.0)

    @property
    def norm(self) -> float:
        """The largest derivative away from bounds."""
        return self.free.abs().max().item()

    @property
    def pressing(self) -> float:
        """The largest derivative at a bound, beyond which the evidence still rises."""
        return (self.gradient - self.free).abs().max().item()

    def effective_parameters(self) -> Tensor:
        """``γ_g = d_g − ∂ log det Λ / ∂ log λ_g``, the number of each precision's entries that the data determine.

        It follows from the evidence's gradient, ``∂E/∂log λ_g = ½ (γ_g − λ_g ‖θ−μ‖²_g)``.
        """
        n = self.objective.n_precisions
        effective = 2 * self.gradient[:n] + self.logarithms[:n].exp() * self.objective.scatter()
        return effective.clamp(min=0.0).minimum(self.objective.sizes())

    def sampling_errors(self) -> tuple[float, float]:
        """Standard errors of the value, and of the log precision that is known worst, by random vectors; or zeros.

        Those of the gradient pass through the inverse Hessian, by differences of gradients.
        """
        objective, model = self.objective, self.objective.model
        with torch.enable_grad():
            point = self.logarithms.clone().requires_grad_()
            precision, noise = objective.split(point)
            if (forms := model.forms(precision, objective.temperature, noise)) is None:
                return 0.0, 0.0
            rows = torch.stack([torch.autograd.grad(one, point, retain_graph=True)[0] / 2 for one in forms])
        value = float(standard_error(forms.detach())) / 2
        if bool(torch.eq(rows, rows[0]).all()):  # nothing is estimated
            return value, 0.0
        steps = 1e-2 * torch.eye(len(point), dtype=torch.float64)
        hessian = torch.stack([objective.at(self.logarithms + step).gradient - self.gradient for step in steps]) / 1e-2
        moved = rows @ torch.linalg.pinv((hessian + hessian.mT) / 2)
        return value, float(standard_error(moved)[: objective.n_precisions].max())

    def is_near(self, tolerance: float) -> bool:
        """Whether the best step along the gradient gains so few nats, and changes logarithms by :data:`KNOWN` at most.

        The evidence of millions of parameters is large. Rounding hides small gains, and gradients miss their tolerance.
        """
        slope, step = self.free.norm(), 1e-2
        ahead = self.objective.at(self.logarithms + step * self.free / slope).gradient
        curvature = (slope - ahead @ self.free / slope) / step
        return bool(curvature > 0 and slope / curvature <= KNOWN and slope.square() / (2 * curvature) <= tolerance)

    def has_converged(self, tolerance: float, what: str, advice: str, *, accurate: bool = True) -> bool:
        """Whether derivatives are within the tolerance, or the best is near, and weights ``accurate``; warns if not."""
        if self.pressing > tolerance:
            reason = (
                f"at the limits of the search, where the evidence still rises by {self.pressing:.2g} nats for each "
                "e-fold of a hyperparameter: the data do not determine it. Is the fit exact?"
            )
        elif accurate and (self.norm <= tolerance or self.is_near(tolerance)):
            return True
        else:
            reason = f"with a derivative of {self.norm:.2g} nats (tolerance {tolerance:.2g}) {advice}."
        warn(f"{what} ended {reason}", ConvergenceWarning)
        return False

    def ascend(self, tolerance: float, max_iterations: int, ticks: Iterator[int]) -> tuple[EvidencePoint, int]:
        """L-BFGS with bounds and line search (Byrd et al., 1995): where it ends, and the number of evaluations.

        Where H is diagonal, precisions of single entries have a closed form, and the search is over noise levels alone.
        Of one logarithm it looks for the root of the derivative, which spares a process the load of SciPy's optimisers.
        """
        objective = self.objective
        blocks = (block for _, block in objective.model.curvature)
        closed = objective.structure == "diagonal" and all(isinstance(block, DiagonalBlock) for block in blocks)
        at, first = (self._with_best_entries, objective.n_precisions) if closed else (objective.at, 0)

        def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
            next(ticks)
            found = at(torch.from_numpy(x))
            return -found.value, -found.gradient[first:].numpy()

        options = {"maxiter": max_iterations, "maxfun": 10 * max_iterations, "gtol": tolerance / 10, "ftol": 1e-15}
        start, bounds = self.logarithms[first:].numpy(), objective.box.T[first:].tolist()
        if not len(start):
            return at(self.logarithms[first:]), 1
        if len(start) == 1:
            return _root(at, start.item(), objective.box[:, first:], tolerance / 10, ticks, max_iterations)
        result = scipy.optimize.minimize(negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return at(torch.from_numpy(result.x)), int(result.nfev)

    def _with_best_entries(self, noise: Tensor) -> EvidencePoint:
        """The point at log noise levels where each entry of a diagonal H has its best precision.

        An entry with curvature h and deviation m from the prior mean adds ``½ [log d − log(h + d) − d m²]``, which is
        largest at ``d = 2h / (h m² + √(h² m⁴ + 4 h m²))``. Entries without curvature, of which the data say nothing,
        stay where they are; others fall to :data:`WIDEST` of that at most. Their derivatives count as zero.
        """
        objective, before = self.objective, self.logarithms[: self.objective.n_precisions]
        model, levels = objective.model, objective.split(torch.cat([before, noise]))[1]
        h = curvature_diagonal(model, model.weights(levels) / objective.temperature.to(model.vector.device)).cpu()
        share = h * objective.scatter()
        best = (2 * h / (share + (share.square() + 4 * share).sqrt())).log()
        low, high = objective.box[:, : len(h)]
        kept = best.maximum(low.maximum(before + math.log(WIDEST))).minimum(high).where(h > 0, before)
        found, settled = objective.at(torch.cat([kept, noise])), kept != best
        return replace(found, gradient=found.gradient.index_fill(0, settled.nonzero().squeeze(1), 0.0))

    def fixed_point_step(self, method: str) -> Tensor:
        """The point after one step of ``"mackay"`` or ``"em"``, for groups of ``d_g`` entries.

        MacKay's (1992) fixed point is ``λ_g = γ_g / ‖θ−μ‖²_g``; expectation maximisation is
        ``λ_g = d_g / (‖θ−μ‖²_g + (d_g − γ_g)/λ_g)``.
        """
        objective = self.objective
        n, precision = objective.n_precisions, self.logarithms[: objective.n_precisions].exp()
        scatter, size = objective.scatter().clamp_min(1e-30), objective.sizes()
        effective = self.effective_parameters()
        fixed = effective / scatter if method == "mackay" else size / (scatter + (size - effective) / precision)
        new = [fixed.clamp_min(1e-30).log()]
        if objective.tune_noise:
            temperature = objective.temperature.double().cpu()
            sums, counts = objective.model.statistics.double().chunk(2)
            # dE/dlogσ = (SSE/σ² − N)/T + γ
            noise_effective = self.gradient[n:] - (sums / (2 * self.logarithms[n:]).exp() - counts) / temperature
            new.append(updated_noise(objective.model.statistics, noise_effective, temperature).log())
        low, high = objective.box
        return torch.cat(new).clamp(low, high)


def _root(
    at: Callable[[Tensor], EvidencePoint], x: float, box: Tensor, tolerance: float, ticks: Iterator[int], most: int
) -> tuple[EvidencePoint, int]:
    """Where the derivative by one logarithm vanishes, or the bound that it points to, by regula falsi from x on.

    Steps double until the derivative changes its sign. Later an end that stays counts half (the Illinois method).
    """
    (low, high), step = box.flatten().tolist(), 1.0
    ends, before = dict[bool, list[float]](), False  # by whether the evidence rises there
    for count in range(1, most + 1):  # noqa: B007
        next(ticks)
        now = at(torch.tensor([x], dtype=torch.float64, device="cpu"))
        slope = float(now.gradient[-1])
        rises = slope > 0
        if abs(slope) <= tolerance or x == (high if rises else low):
            break
        ends[rises] = [x, slope]
        if len(ends) == 1:
            x, step = min(max(x + (step if rises else -step), low), high), 2 * step
        else:
            if rises == before:
                ends[not rises][1] /= 2
            (left, up), (right, down) = ends[True], ends[False]
            x = (left * down - right * up) / (down - up)
            if not left < x < right:  # as near as floats are
                break
        before = rises
    return now, count


def updated_noise(statistics: Tensor, effective: Tensor | float, temperature: Tensor | float) -> Tensor:
    """The noise levels ``σ² = SSE / (N − T γ)`` at which the evidence is stationary, ``[K]`` float64 on the CPU."""
    sums, counts = statistics.double().cpu().chunk(2)
    return (sums / (counts - temperature * effective).clamp_min(1e-12)).clamp_min(1e-30).sqrt()


RUNAWAY = 2.0
"""Ratio of a tuned noise to the training residuals from which tuning warns: then γ is more than ¾ of R."""


@dataclass(frozen=True)
class EvidenceTuner:
    """Options of the tuners by an evidence, and tuning by the Laplace evidence; see :class:`MarginalLikelihood`."""

    structure: str | Groups = "scalar"
    tune_noise: bool | None = None
    data: Iterable[Any] | None = field(default=None, repr=False)
    tolerance: float = 1e-3
    max_iterations: int = 2000

    name: ClassVar[str]
    passes_over_data: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_structure(self.structure)
        checks.positive("tolerance", self.tolerance)
        checks.count("max_iterations", self.max_iterations)
        if self.data is not None and self.structure != NORMALISED and not self.passes_over_data:
            what = f"{type(self).__name__} uses data for normalised groups only."
            expected = f'structure="{NORMALISED}", or lp.Validation(data)'
            raise ConfigurationError(what, expected=expected, got=f"data= with structure={self.structure!r}")

    def tune(
        self, posterior: Tunable, *, progress: bool = False, generator: torch.Generator | None = None
    ) -> TuningResult:
        """Maximise the evidence; arguments as for :class:`~laplace_plus.Tuner`.

        Raises:
            UnsupportedError: A prior that the posterior's structure does not take.
            DataError: Data are needed, and not at hand.

        Warns:
            ConvergenceWarning: The tolerance was not met, or only at the limits of the search; or the tuned noise is
                more than twice the training residuals, as γ takes more than three quarters of the data.
        """
        objective = Objective.create(posterior, self.structure, self.data, self.tune_noise)
        ticks = iter(progress_bar(itertools.count(1), enabled=progress, description=f"tuning by {self.name}"))
        now, count = objective.at(objective.start()), 0
        if self.name == "marginal_likelihood":
            now, count = now.ascend(self.tolerance, self.max_iterations, ticks)
        else:
            while count < self.max_iterations and now.norm > self.tolerance / 10:
                count, now = next(ticks), objective.at(now.fixed_point_step(self.name))
        advice = f"after {count} evaluations; raise max_iterations, or use lp.MarginalLikelihood"
        converged = now.has_converged(self.tolerance, f"Tuning by {self.name}", advice)
        precision, noise = objective.split(now.logarithms)
        if now.pressing <= self.tolerance:  # of which there was a warning
            warn_of_noise(now)
        sem, precision_sem = now.sampling_errors()
        converged = knows_precisions(f"Tuning by {self.name}", precision_sem) and converged
        precision, errors = precision.to(objective.model.vector.dtype), {"sem": sem, "precision_sem": precision_sem}
        shared: Any = {"groups": objective.groups, **errors}
        return TuningResult(self.name, precision, noise, now.value, converged, now.norm, count, **shared)


@dataclass(frozen=True)
class MarginalLikelihood(EvidenceTuner):
    """Maximises the Laplace evidence by line-searched ascent; see :mod:`laplace_plus.tuning.laplace`.

    Args:
        structure: ``"scalar"``, ``"layerwise"``, ``"normalized_groups"`` (one precision for each layer that feeds a
            normalisation, one for the last layer and one for the rest), ``"diagonal"`` where the curvature's structure
            allows one precision for each entry (in closed form where it is diagonal), or :class:`~laplace_plus.Groups`.
        tune_noise: Whether to tune Gaussian noise; None for whenever there is any.
        data: Training data, for ``"normalized_groups"`` alone; by default the loaders of the fit.
        tolerance: In nats. Converged when no derivative of the evidence by a log hyperparameter exceeds this, or the
            best step along the gradient would gain less, and change no hyperparameter by more than 1 %.
        max_iterations: Largest number of iterations.

    Raises:
        ConfigurationError: An option that is none of these.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.KFAC(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x + 0.1 * x.sin())])
        >>> posterior.fit_prior_precision(lp.MarginalLikelihood(structure="layerwise")).tuning.converged
        True
    """

    name: ClassVar[str] = "marginal_likelihood"


@dataclass(frozen=True)
class MacKay(EvidenceTuner):
    """Maximises the Laplace evidence by MacKay's (1992) fixed point; arguments as for :class:`MarginalLikelihood`."""

    name: ClassVar[str] = "mackay"


@dataclass(frozen=True)
class ExpectationMaximisation(EvidenceTuner):
    """Maximises the Laplace evidence by steps that never lower it; arguments as for :class:`MarginalLikelihood`."""

    name: ClassVar[str] = "em"


def knows_precisions(what: str, error: float) -> bool:
    """Whether random vectors tell the precision that is known worst; warns if not."""
    if error > KNOWN:
        figure = f"random vectors tell the precision that is known worst within {error:.1%} (standard error)"
        warn(f"{what} has not converged: {figure}; ask for more of them.", ConvergenceWarning)
    return error <= KNOWN


def warn_of_noise(now: EvidencePoint) -> None:
    """Warn where a noise that maximises an evidence is far above the residuals: γ takes most of the data."""
    objective = now.objective
    if not objective.tune_noise:
        return
    n, (errors, counts) = objective.n_precisions, objective.model.statistics.double().chunk(2)
    residual, noise = (errors / counts).sqrt(), now.logarithms[n:].exp()
    worst = int((noise / residual.clamp_min(1e-30)).argmax())
    own, left = float(noise[worst]), float(residual[worst])
    if own <= RUNAWAY * left:
        return
    spent = float(counts[worst] / objective.temperature.double().cpu()) * (1 - (left / own) ** 2)
    warn(
        f"The tuned noise of {own:.3g} is {own / max(left, 1e-30):.3g} times the training residuals ({left:.3g}): the "
        f"curvature counts {spent:.4g} of {int(counts[worst])} targets as spent, or the network interpolates. "
        "Use lp.tuning.noise_from_residuals(posterior), or tune on held-out data.",
        ConvergenceWarning,
    )
