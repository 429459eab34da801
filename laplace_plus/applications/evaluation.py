"""How good predictions are, beside those of the network itself: scores with standard errors, and one sentence.

A score is a function θ(w) of the weights of rows: targets, or the tokens, pixels and labels that they consist of. Its
standard error is the infinitesimal jackknife's (Jaeckel, 1972), over E examples, as rows of one depend on each other:

    ``SE² = E/(E − 1) Σ_e (Σ_{n in e} w_n ∂θ/∂w_n)²``.

Of a mean it is the usual one, of an area under a ROC curve DeLong's. That of a difference to the network is of the
difference of both derivatives, since both are of the same rows.
"""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks, metrics
from laplace_plus._progress import progress_bar
from laplace_plus.applications import plotting
from laplace_plus.applications.abstention import AbstentionRule
from laplace_plus.applications.calibration import CalibratedPosterior
from laplace_plus.applications.conformal import ConformalPosterior, Grouping, _groups_of, observed
from laplace_plus.applications.mixtures import Ensemble, Mixture, predictor
from laplace_plus.applications.noise import NoisePosterior
from laplace_plus.applications.through import Through
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.gaussian import GivenNoise, HeteroscedasticGaussian
from laplace_plus.network.batches import Batch, inputs_of, iterate
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.persistence import replacing
from laplace_plus.predictive import Prediction, from_functional, from_samples

TITLES = {
    "accuracy": ("accuracy", 1, "is right more often", "is right less often"),
    "root_mean_squared_error": ("RMSE", -1, "is closer to the targets", "is further from the targets"),
    "negative_log_likelihood": ("NLL", -1, "predicts better", "predicts worse"),
    "brier_score": ("Brier", -1, "", ""),
    "crps": ("CRPS", -1, "", ""),
    "expected_calibration_error": ("ECE", -1, "is better calibrated", "is worse calibrated"),
    "quantile_calibration_error": ("error of quantiles", -1, "is better calibrated", "is worse calibrated"),
    "area_under_risk_coverage": ("area under risk–coverage", -1, "refuses better", "refuses worse"),
    "surest_error": ("error of the surest 80 %", -1, "", ""),
    "error_auroc": ("AUROC of errors", 1, "", ""),
    "ood_auroc": ("OOD AUROC", 1, "tells unfamiliar data better", "tells unfamiliar data worse"),
    "ood_fpr95": ("OOD FPR95", -1, "", ""),
}
"""What a score is called, whether more is better (1) or worse (−1), and what the verdict says if it is either."""

QUANTILES = torch.arange(1, 20, dtype=torch.float64, device="cpu") / 20
"""At which levels the quantiles of numbers are compared with the shares of targets below them."""

Columns = Mapping[str, Tensor]


class Score(NamedTuple):
    """A score, the network's, and the difference, each with its standard error; NaN where there is none."""

    value: float
    standard_error: float
    network: float
    network_standard_error: float
    difference: float
    difference_standard_error: float

    @property
    def differs(self) -> bool:
        """Whether the difference is more than two standard errors, and than a ten-thousandth of the score."""
        return abs(self.difference) > max(2 * self.difference_standard_error, 1e-4 * abs(self.value))


@dataclass(frozen=True, eq=False, repr=False)
class Report(Mapping[str, Score]):
    """What :func:`evaluate` found: a mapping from names to :class:`Score`, which prints as a table and a verdict.

    Attributes:
        scores: By name.
        rows: Of ``"network"`` and of what was evaluated, columns by name, with a row for each target that counts.
        n_examples: The number of examples that they belong to.
        groups: Reports on the examples of each group, by its number.
        advice: What the verdict says besides.
    """

    scores: Mapping[str, Score]
    rows: Mapping[str, Columns]
    n_examples: int
    groups: Mapping[int, Report] = field(default_factory=dict)
    advice: str = ""

    def __getitem__(self, name: str) -> Score:
        return self.scores[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scores)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def verdict(self) -> str:
        """One sentence: which scores differ from the network's by more than two standard errors, and what follows."""
        words: tuple[list[str], list[str], list[str]] = [], [], []
        for name, (title, sign, *phrases) in TITLES.items():
            if phrases[0] and name in self:
                gap, error = self[name].difference, self[name].difference_standard_error
                said = f"{phrases[gap * sign < 0]} by {with_error(abs(gap), error)} ({title})"
                words[gap * sign < 0 if self[name].differs else 2].append(said if self[name].differs else title)
        better, worse, same = map(", ".join, words)
        found = f"It does not help here: within two standard errors the network has the same {same}"
        if better:
            found = f"The posterior {better}" + f", but {worse}" * bool(worse)
        elif worse:
            found = f"It does harm here: the posterior {worse}"
        *_, own = self.rows.values()
        found = "This is the network by itself" if len(self.rows) == 1 else found
        if "risk" in own and int((own["risk"] > 0).sum()) >= 10:  # noqa: PLR2004 - half of fewer is chance
            kept, risks, _ = metrics.risk_coverage_curve(own["uncertainty"], own["risk"], own["weight"])
            shares = torch.arange(50, 1, -1, device="cpu")
            shares = shares[risks[torch.searchsorted(kept, 1 - 1 / shares.double())] <= risks[-1] / 2]
            what = "errors" if "right" in own else "squared errors"
            found += f"; refusing 1 in {int(shares[0])} halves the {what}" if len(shares) else ""
        if "ood_auroc" in self and self["ood_auroc"].value < 0.5:  # noqa: PLR2004 - chance
            found += "; unfamiliar data look less uncertain than familiar ones (OOD AUROC below ½)"
        return found + f"; {self.advice}" * bool(self.advice) + "."

    def table(self) -> list[list[str]]:
        """Rows of text: a head, and each score with its standard errors."""
        *_, label = self.rows
        rows = [["", label, "network", "difference"][: 2 * len(self.rows)]]
        for name, own in self.items():
            pairs = zip(own[::2], own[1::2], ("", "", "+"), strict=True)
            cells = [with_error(value, error, sign, 1e-6 * abs(own.value)) for value, error, sign in pairs]
            cells[2] += " *" if own.differs else "  "
            rows.append([title_of(name), *cells][: len(rows[0])])
        return rows

    def __repr__(self) -> str:
        note = f"{self.n_examples} examples; ± one standard error" + "; * more than two" * (len(self.rows) > 1)
        groups = [f"group {key}: {own.n_examples} examples\n{aligned(own.table())}" for key, own in self.groups.items()]
        return "\n\n".join([f"{aligned(self.table())}\n{note}", *groups, textwrap.fill(self.verdict, 100)])

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each score; ImportError without pandas."""
        import pandas

        return pandas.DataFrame.from_dict({name: own._asdict() for name, own in self.items()}, orient="index")

    def plot(self) -> Any:
        """One matplotlib figure: calibration, risk by coverage, uncertainties of unfamiliar data.

        UnsupportedError without matplotlib.
        """
        return plotting.evaluation(self.rows)

    def to_html(self, path: str | Path) -> None:
        """Write verdict, table and figure to one file that needs no other; UnsupportedError without matplotlib."""
        picture = io.BytesIO()
        self.plot().savefig(picture, dpi=150)
        parts = html.escape(self.verdict), base64.b64encode(picture.getvalue()).decode(), html.escape(str(self))
        with replacing(Path(path)) as beside:
            beside.write_text(_PAGE % parts, encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Evaluation</title>
<style>body {font: 16px system-ui; max-width: 60em; margin: 2em auto} img {max-width: 100%%}
pre {overflow-x: auto}</style>
<h1>Evaluation</h1><p><b>%s</b></p><img alt="figure" src="data:image/png;base64,%s"><pre>%s</pre></html>
"""


def title_of(name: str) -> str:
    """The title of a score, with an arrow to where better is."""
    title, sign, *_ = TITLES.get(name, (name.replace("_", " at ") + " %", 0))
    return title + {1: " ↑", -1: " ↓", 0: ""}[sign]


def with_error(value: float, error: float, sign: str = "", least: float = 0.0) -> str:
    """A number and its standard error, to two digits of this; what is at most ``least`` is rounding."""
    if not least < error < math.inf:
        return f"{value if not abs(value) <= least else 0:{sign}.4g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A text table, with a line below the first row."""
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
    return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


@torch.inference_mode(False)
@torch.no_grad()
def evaluate(
    posterior: Any,
    data: Iterable[Any],
    *,
    likelihood: Any = None,
    other: Iterable[Any] | None = None,
    by: str | Grouping | None = None,
    level: float = 0.9,
    progress: bool = False,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Report:
    """Score predictions of data that nothing was fitted to, beside those of the network itself, in one pass.

    Of classes: accuracy, NLL, Brier score, calibration error in 15 bins, coverage and mean size of the smallest sets
    with a probability of ``level``, area under the risk–coverage curve, the share of errors among the 80 % of least
    entropy, and how well the entropy tells errors. Tokens, pixels and several labels of an example are a row each.

    Of numbers: RMSE, and CRPS of normals with the predicted moments, over all entries that were observed; NLL of whole
    targets; coverage and mean width of central intervals; ``1/19 Σ_q |share of y below the q-quantile − q|`` at
    ``q = .05 … .95``; area under the curve of squared errors; RMSE of the 80 % of least variance.

    Args:
        posterior: A fitted and tuned posterior; what :func:`~laplace_plus.calibrate`, ``conformalize``, ``abstain``,
            ``learn_noise`` and ``through`` give; a ``Mixture`` or ``Ensemble``, beside its first network; or a network.
        data: Batches, with targets.
        likelihood: With a network: as for :class:`~laplace_plus.Posterior`; for numbers ``lp.Gaussian(noise_std)``.
        other: Batches of unfamiliar data, of which the inputs are used: adds how well the uncertainty tells them from
            ``data``, by AUROC and by the share that pass where 95 % of ``data`` do. Each position counts.
        by: Scores for groups, too: ``"class"``, or a function from inputs to integers ``[B]`` from 0 on.
        level: The probability of sets, and of intervals besides .5, .9 and .95. A conformal posterior has its own.
        progress: Whether to show a progress bar.
        generator: Source of randomness.
        **options: As of the posterior's ``predictive``, such as ``link`` and ``n_samples``.

    Raises:
        NotFittedError: Before ``fit``.
        ConfigurationError: What cannot be evaluated, no target that counts, groups that are none.
        DataError: Soft labels, or no batches.
        LabelError: Targets that do not fit the likelihood.
        UnsupportedError: Rows that depend on each other, or a network with a noise that is not known.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-2, 2, 60)[:, None]
        >>> y = (x[:, 0] > 0).long()
        >>> posterior = lp.KFAC(torch.nn.Linear(1, 2), "classification").fit([(x, y)])
        >>> report = lp.evaluate(posterior, [(x, y)])
        >>> abs(report["accuracy"].value - lp.metrics.accuracy(posterior.predictive(x), y)) < 1e-6
        tensor(True)
    """
    checks.generator(generator)
    checks.number("level", level, above=0.0, below=1.0)
    methods, network, advice = _methods(posterior, likelihood)
    if by is not None and not callable(by):
        checks.choice("grouping", by, ("class",) if methods["network"].likelihood.is_classifier else ())
    level = posterior.level if isinstance(posterior, ConformalPosterior) else level
    for batch in iterate(data, device=network.device, progress=progress, description="evaluate"):
        for method in methods.values():
            prediction = method.predict(batch.inputs, generator=generator, **options)
            method.parts.append(_columns(method, prediction, batch, level, by, generator))
    for item in progress_bar(other, enabled=progress, description="evaluate: other data") if other is not None else ():
        inputs = network.receive(inputs_of(item, whole=network.lists))
        for method in methods.values():
            prediction = method.predict(inputs, generator=generator, **options)
            doubt, n = metrics.uncertainty(prediction).double().cpu(), len(prediction.functional_mean)
            example = torch.arange(n, device="cpu").repeat_interleave(len(doubt) // n)
            method.strange.append({"strange": doubt, "strange_example": example})
    rows = {label: {**_joined(own.parts), **_joined(own.strange)} for label, own in methods.items()}
    checks.count("The number of targets that count", len(rows["network"]["loss"]))
    groups = {}
    for group in rows["network"]["group"].unique().tolist() if by is not None else ():
        groups[group] = _report({label: _subset(own, own["group"] == group) for label, own in rows.items()})
    return replace(_report(rows), groups=groups, advice=advice)


def _subset(own: Columns, kept: Tensor) -> Columns:
    return {name: column if name.startswith("strange") else column[kept] for name, column in own.items()}


@dataclass
class _Method:
    """How to predict what, and the columns of rows that came of it, batch by batch."""

    predict: Callable[..., Prediction]
    likelihood: Likelihood
    conformal: ConformalPosterior | None = None
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    strange: list[dict[str, Tensor]] = field(default_factory=list)


def _methods(posterior: Any, likelihood: Any) -> tuple[dict[str, _Method], Network, str]:
    """The network by itself and what is evaluated, the network, and what its user should know."""
    posterior = posterior.posterior if isinstance(posterior, AbstentionRule) else posterior
    model = predictor(posterior, likelihood)
    if model is not posterior:
        if isinstance(likelihood, str) and model.likelihood.noise_std is not None:
            model.likelihood.lacks("by its name alone has no noise level", fix="likelihood=lp.Gaussian(noise_std)")
        return {"network": _Method(model.predictive, model.likelihood)}, model.networks[0], ""
    inner: Any = posterior
    while isinstance(inner, ConformalPosterior | CalibratedPosterior | NoisePosterior | Mixture | Through):
        inner = inner.members[0] if isinstance(inner, Mixture) else inner.posterior
    network = inner.networks[0] if isinstance(inner, Ensemble) else inner.network
    conformal = posterior if isinstance(posterior, ConformalPosterior) else None
    own = getattr(posterior if conformal is None else conformal.posterior, "likelihood", None) or inner.likelihood
    plain = own if isinstance(posterior, Through) else inner.likelihood

    def alone(x: Any, **_: Any) -> Prediction:
        with exact_arithmetic(network):
            x = network.receive(x)
            view = posterior.functional_posterior(x).mean if isinstance(posterior, Through) else network.forward(x)
        return from_samples(plain, view[None])

    tunable = "auto" in getattr(inner, "tuners", ()) and not isinstance(posterior, CalibratedPosterior)
    advice = "it was never tuned: call fit_prior_precision()" if tunable and inner.is_guess else ""
    label = type(inner if conformal is not None else posterior).__name__
    return {"network": _Method(alone, plain), label: _Method(posterior.predictive, own, conformal)}, network, advice


# -- columns of rows ---------------------------------------------------------------------------------------------------


def _columns(
    method: _Method, prediction: Prediction, batch: Batch, level: float, by: Any, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Columns of a batch's rows that count, on the CPU."""
    likelihood, sets = method.likelihood, method.conformal
    likelihood.require_own_rows("Rows that depend on each other have no scores of their own.")
    targets, share = observed(prediction, likelihood, batch.target, several=True)
    density = prediction.log_prob(likelihood.separate(batch.target)[0]).flatten().double()
    found = {"uncertainty": metrics.uncertainty(prediction), "weight": share.reshape(len(targets), -1).amax(1)}
    n = len(targets)
    if likelihood.is_classifier:
        given = None if sets is None else sets.predict_set(batch.inputs, generator=generator)
        found |= _classes(prediction, targets.nan_to_num(0).long(), density, level, given)
    else:
        if isinstance(likelihood, GivenNoise):
            noise = likelihood.rows(prediction.functional_mean, batch.target)[1][..., 1]  # of each target, [N, C]
            mean, known = prediction.mean.flatten(0, -2), prediction.epistemic.flatten(0, -2)
            outputs = torch.cat([mean, 2 * noise.nan_to_num(1.0).log()], -1)
            known = torch.cat([known, torch.zeros_like(known)], -1)
            prediction = from_functional(HeteroscedasticGaussian(), outputs, known)
        ends = None if sets is None else sets.interval(batch.inputs, generator=generator)
        found |= {"loss": -density, **_numbers(prediction, targets.double(), level, ends)}
    found["example"] = torch.arange(batch.size, device="cpu").repeat_interleave(n // batch.size)
    found["group"] = found["label"] if by == "class" else _groups_of(batch.inputs, by, n)
    kept = (found["weight"] > 0).cpu()
    found = {name: own.cpu()[kept] for name, own in found.items()}
    return {name: own.double() if own.is_floating_point() else own for name, own in found.items()}


def _classes(prediction: Prediction, labels: Tensor, density: Tensor, level: float, sets: Any) -> dict[str, Tensor]:
    p = prediction.likelihood.class_probabilities(prediction.mean).double()
    if sets is None:
        ordered, order = p.sort(dim=1, descending=True, stable=True)
        sets = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, ordered.cumsum(1) - ordered < level)
    sets, (confidence, guess) = sets.reshape(p.shape), p.max(1)
    chosen, covered = (own.gather(1, labels[:, None])[:, 0] for own in (p, sets))
    return {
        "label": labels,
        "right": (guess == labels).double(),
        "risk": (guess != labels).double(),
        "confidence": confidence,
        # One of several labels of an example has no density of its own; where there is one, it does not underflow.
        "loss": -density if len(density) == len(p) else -chosen.log(),
        "brier": p.square().sum(1) - 2 * chosen + 1,
        f"coverage_{100 * level:g}": covered.double(),
        f"size_{100 * level:g}": sets.sum(1).double(),
    }


def _numbers(prediction: Prediction, y: Tensor, level: float, ends: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    with suppress(UnsupportedError):  # counts have no quantiles, targets of other kinds no variance
        std, mean = (own.flatten(0, -2).double() for own in (prediction.std, prediction.mean))
        if y.shape == mean.shape:
            found |= {"mean": mean, "variance": std.square(), "target": y, "risk": (y - mean).square().nanmean(1)}
            found["rank"] = (y > prediction.quantile(QUANTILES).flatten(1, -2)).sum(0)
        for own in sorted({0.5, 0.9, 0.95, level}) if found else ():
            pair = prediction.interval(own) if ends is None or own != level else ends
            low, high = (end.flatten(0, -2).double() for end in pair)
            found[f"coverage_{100 * own:g}"] = ((low <= y) & (y <= high)).double()
            found[f"width_{100 * own:g}"] = high - low
    return found


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The columns of all batches, with a number for each example."""
    for number, part in enumerate(parts):
        part |= {name: own + (number << 32) for name, own in part.items() if name.endswith("example")}
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


# -- scores ------------------------------------------------------------------------------------------------------------


def _scores(own: Columns, inside: Tensor, outside: Tensor | None = None) -> dict[str, Tensor]:
    """By the weights of rows, and of rows of other data."""
    doubt, target = own["uncertainty"], own.get("target")

    def mean(values: Tensor) -> Tensor:
        observed = None if target is None or values.dim() == 1 else ~target.isnan()
        return metrics.weighted_mean(values, inside, observed)

    found = {name: mean(values) for name, values in own.items() if name.startswith(("coverage", "width", "size"))}
    found["negative_log_likelihood"] = mean(own["loss"])
    if "risk" in own:
        found["area_under_risk_coverage"] = metrics.area_under_risk_coverage(doubt, own["risk"], inside)
        found["surest_error"] = metrics.selective_risk(doubt, own["risk"], 0.8, inside)
    if "right" in own:
        found |= {"accuracy": mean(own["right"]), "brier_score": mean(own["brier"])}
        found["expected_calibration_error"] = metrics.binned(own["confidence"], own["right"], weight=inside).error
        wrong = own["right"] == 0
        if bool(wrong.any() & ~wrong.all()):
            found["error_auroc"] = metrics.ood_auroc(doubt[~wrong], doubt[wrong], inside[~wrong], inside[wrong])
    elif target is not None:
        found["surest_error"] = found["surest_error"].sqrt()
        found["root_mean_squared_error"] = metrics.root_mean_squared_error(own["mean"], target, inside)
        found["crps"] = metrics.crps_gaussian(own["mean"], own["variance"], target, inside)
    if "rank" in own:
        below = torch.stack([mean((own["rank"] <= k).double()) for k in range(len(QUANTILES))])
        found["quantile_calibration_error"] = (below - QUANTILES).abs().mean()
    if "strange" in own:
        found["ood_auroc"] = metrics.ood_auroc(doubt, own["strange"], inside, outside)
        found["ood_fpr95"] = metrics.ood_fpr95(doubt, own["strange"], inside, outside)
    return {name: found[name] for name in [*TITLES, *found] if name in found}


def _differentiated(own: Columns) -> dict[str, tuple[float, list[Tensor]]]:
    """Each score, and ``Σ w_n ∂θ/∂w_n`` over the rows of each example: of the data, and of other data."""
    data = [(own["weight"], own["example"])]
    data += [(torch.ones_like(own["strange"]), own["strange_example"])] if "strange" in own else []
    weights = [weight.clone().requires_grad_() for weight, _ in data]
    places = [example.unique(return_inverse=True)[1] for _, example in data]
    found = {}
    with torch.enable_grad():
        values = _scores(own, *weights)
    for name, value in values.items():
        slopes = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
        sums = []
        for slope, (weight, _), index in zip(slopes, data, places, strict=True):
            sums.append(slope.new_zeros(int(index.max()) + 1).index_add(0, index, slope * weight))
        found[name] = float(value.detach()), sums
    return found


def _error(sums: Iterable[Tensor]) -> float:
    variances = [float(own.square().sum()) * len(own) / (len(own) - 1) if len(own) > 1 else math.nan for own in sums]
    return math.sqrt(sum(variances))


def _report(rows: Mapping[str, Columns]) -> Report:
    *_, label = rows
    network, scores = _differentiated(rows["network"]) if len(rows) > 1 else {}, {}
    for name, (value, sums) in _differentiated(rows[label]).items():
        plain, theirs = network.get(name, (math.nan, [own * math.nan for own in sums]))
        gap = _error(one - other for one, other in zip(sums, theirs, strict=True))
        scores[name] = Score(value, _error(sums), plain, _error(theirs), value - plain, gap)
    return Report(scores, rows, len(rows[label]["example"].unique()))
