"""Refusing inputs so that the error of the rest stays below a risk: selective prediction with a guarantee.

A rule accepts inputs of a score ``s > λ``. Its *selective risk* is a ratio, ``R(λ) = E[ℓ | s > λ]`` for losses ℓ in
[0, 1]. From held-out rows, independent draws of what is to come, its λ has ``R(λ) ≤ risk`` with a probability of at
least ``confidence``, whatever the network and the distribution ("Learn then test", Angelopoulos et al., 2021).

**One threshold.** The number of accepted rows is random. Given that it is j, and the score λ after them, they are a
sample of the inputs above λ, so that k errors are ``Bin(j, R(λ))``, and ``p_j = P(Bin(j, risk) ≤ k)`` (Clopper and
Pearson, 1934) is at most δ with a probability of at most δ if ``R(λ) > risk``. Of losses between 0 and 1 with the mean
m, ``p_j = min(exp(−j kl(min(m, risk), risk)), e P(Bin(j, risk) ≤ ⌈j m⌉))`` (Hoeffding, 1963; Bentkus, 2004).

**A walk over thresholds.** Rows are in order of their scores, equal ones at random. A walk begins at a rank that n,
risk and δ determine, and goes on to the next one while ``p_j ≤ δ``. It passes any λ of ``R(λ) > risk`` with a
probability of at most δ: let t be the score after its first rank. If ``R(t) > risk``, it would have to pass t. If not,
it would have to pass the first threshold below t where R crosses the risk. As ``R = risk`` at crossings, the mean loss
between neighbouring ones is the risk, too; so given how many rows lie between which, which says where t is, the errors
down to there are ``Bin(j, risk)``. The risk need not fall with the score; the rule takes its λ where the score changes.

**Multiplicity.** One to four walks begin at ranks in geometric progression, each with δ = (1 − confidence) / (number of
walks); ``score="best"`` has a third of that for each score.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.special import bdtr, rel_entr
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.conformal import observed
from laplace_plus.applications.mixtures import predictor
from laplace_plus.errors import DataError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import iterate
from laplace_plus.persistence import stored
from laplace_plus.posteriors.storing import save
from laplace_plus.predictive import Prediction

SCORES = ("confidence", "epistemic", "mutual_information")


class Decision(NamedTuple):
    """The posterior's prediction of a batch, and whether the rule accepts each row, boolean ``[B]``."""

    prediction: Prediction
    accepted: Tensor


@stored
@dataclass(frozen=True, eq=False, repr=False)
class AbstentionRule:
    """A posterior that refuses inputs, with the arguments of :func:`abstain`; ``rule(x)`` is ``rule.predictive(x)``.

    Inputs of a ``score`` above the ``threshold`` are accepted. It ``refused`` that share of the held-out rows, of which
    ``n_rows`` counted.
    """

    posterior: Any
    score: str
    threshold: float
    risk: float
    confidence: float
    control: str
    tolerance: Tensor | None
    refused: float
    n_rows: int

    def __repr__(self) -> str:
        promise = f"{self.control} at a risk ≤ {self.risk:g} with a confidence of {self.confidence:g}"
        return f"AbstentionRule({self.posterior!r}, refuses {self.refused:.1%} by {self.score}, for {promise})"

    def predictive(self, x: Any, *, generator: torch.Generator | None = None) -> Decision:
        """The prediction of a batch's inputs, and which of them are accepted ``[B]``; errors as of the posterior's."""
        prediction = self.posterior.predictive(x, generator=generator)
        score = _scores(prediction, [self.score], self.control, self.tolerance)[:, 0]
        return Decision(prediction, score > self.threshold)

    __call__ = predictive

    def save(self, path: str | Path) -> None:
        """Write the posterior with its rule, which :func:`laplace_plus.load` reads; errors as of its ``save``."""
        save(self, path)


def abstain(
    posterior: Any,
    data: Iterable[Any],
    *,
    risk: float = 0.01,
    confidence: float = 0.95,
    control: Literal["error", "precision", "recall"] = "error",
    score: Literal["confidence", "epistemic", "mutual_information", "best"] = "confidence",
    tolerance: float | Tensor | None = None,
    likelihood: Any = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> AbstentionRule:
    """Refuse inputs so that the error of the rest stays below a risk; see :mod:`laplace_plus.applications.abstention`.

    Args:
        posterior: A fitted and tuned posterior, a calibrated one, an ensemble; or a bare network, with ``likelihood``.
        data: Held-out batches, which neither training nor tuning has seen: independent draws. An example of several
            positions or binary outputs (tokens, pixels) is one row, with the mean of their losses and scores.
        risk: The largest error of what is accepted, strictly between 0 and 1; to be chosen before.
        confidence: The probability over held-out data with which that holds.
        control: ``"error"``: the share of wrong classes, or of numbers beyond ``tolerance``. Of two classes
            ``"precision"``: the share of zeros among what is accepted as a 1; no predicted 0 is refused. ``"recall"``:
            the share of accepted ones that are predicted as 0; no predicted 1 is refused.
        score: ``"confidence"``, the largest probability or minus the predictive deviation; minus the ``"epistemic"``
            variance or deviation; minus the ``"mutual_information"`` (of classes both are estimated from samples, as
            ``generator`` says); or the ``"best"`` of them, which refuses least.
        tolerance: Of numbers, the largest error that is none, and the unit of deviations: one number, or ``[C]``, where
            the worst output counts.
        likelihood: That of a bare network, as for :class:`Posterior`.
        progress: Whether to show a progress bar.
        generator: Source of randomness, also of the order of equal scores, which is fixed by default.

    Raises:
        UnsupportedError: The rows cannot show such a risk; the message says which they could.
        ConfigurationError: Unknown choices, no tolerance of numbers, no rows. DataError: Soft labels, or weights.

    Example:
        >>> x = torch.linspace(-1, 1, 400)[:, None]
        >>> y = (x > 0) ^ (x.abs() < 0.1)
        >>> line = torch.nn.Linear(1, 1).requires_grad_(False)
        >>> _ = line.weight.fill_(20.0), line.bias.zero_()
        >>> rule = abstain(line, [(x, y.float())], risk=0.05, likelihood="binary")
        >>> round(rule.refused, 2), rule(torch.tensor([[0.01], [0.9]])).accepted
        (0.08, tensor([False,  True]))
    """
    checks.number("risk", risk, above=0.0, below=1.0)
    checks.number("confidence", confidence, above=0.0, below=1.0)
    checks.choice("score", score, (*SCORES, "best"))
    checks.choice("control", control, ("error", "precision", "recall"))
    checks.generator(generator)
    model = predictor(posterior, likelihood, data)
    allowed = None
    if not model.likelihood.is_classifier:
        allowed = torch.as_tensor(math.nan if tolerance is None else tolerance, dtype=torch.float64)
        checks.numbers("The tolerance of numbers", allowed, above=0.0, got=repr(tolerance))
    names = SCORES if score == "best" else (score,)
    parts, exact = list[tuple[Tensor, ...]](), True
    for batch in iterate(data, device="cpu", progress=progress, description="abstain"):
        prediction = model.predictive(batch.inputs, generator=generator)
        rows = observed(prediction, model.likelihood, batch.target)
        loss, counts, binary = _losses(prediction, rows, control, allowed)
        parts.append((_scores(prediction, names, control, allowed).cpu(), loss.double().cpu(), counts.cpu()))
        exact = exact and binary
    scores, losses, counts = map(torch.cat, zip(*parts, strict=True))
    n = checks.count("The number of rows that count", int(counts.sum()))
    ties = torch.randperm(n, generator=torch.Generator().manual_seed(0 if generator is None else draw_seed(generator)))
    ranked, places = scores[counts][ties].sort(0, descending=True)  # [n, S]
    ordered, level = losses[counts][ties][places].T, (1 - confidence) / len(names)
    after = torch.cat([ranked[1:], torch.full_like(ranked[:1], -math.inf)])

    def rules(risk: float) -> list[tuple[float, float, str]]:
        passed = walks(ordered, risk, level, exact) & (after < ranked).T
        limits = after.T.where(passed, math.inf).amin(1)
        found = zip((scores <= limits).double().mean(0).tolist(), limits.tolist(), names, strict=True)
        return sorted(one for one in found if one[1] < math.inf)

    if not (found := rules(risk)):
        reached = next((one for one in np.geomspace(risk, 0.999, 300) if rules(one)), 1.0)
        raise UnsupportedError(
            f"These rows cannot show that some are accepted at a risk of {risk:g}.",
            expected=f"risk ≥ {math.ceil(1e4 * reached) / 1e4:g}, for these rows and a confidence of {confidence:g}",
            got=f"risk={risk:g}, and {n} rows that count, with a mean loss of {float(losses[counts].mean()):.3g}",
            fix=f"Take a larger risk, or more rows: {math.ceil(math.log(level) / math.log1p(-risk))} if none errs.",
        )
    refused, limit, name = found[0]
    return AbstentionRule(copy.copy(model), name, limit, risk, confidence, control, allowed, refused, n)


def walks(losses: Tensor, risk: float, level: float, binary: bool = True) -> Tensor:
    """Which ranks 1 … n walks pass, boolean ``[*, n]``, for losses ``[*, n]`` in order, the surest row first.

    If rows are independent, they pass one of a selective risk above ``risk`` with a probability of at most ``level``.
    """
    n = losses.shape[-1]
    ranks, total = np.arange(1, n + 1), losses.cumsum(-1).numpy()
    number = min(max(1 + int(math.log2(n * math.log1p(-risk) / math.log(level))), 1), 4)
    level = level / number
    first = math.ceil(math.log(level) / math.log1p(-risk))
    p = bdtr(np.ceil(total), ranks, risk)
    if not binary:
        mean = np.minimum(total / ranks, risk)
        hoeffding = np.exp(-ranks * (rel_entr(mean, risk) + rel_entr(1 - mean, 1 - risk)))
        p = np.minimum(hoeffding, math.e * p)
    begun = np.isin(ranks, np.geomspace(first, max(n, first), number).round())
    failed = np.maximum.accumulate(np.where(p <= level, 0, ranks), -1)
    return torch.from_numpy((p <= level) & (np.maximum.accumulate(np.where(begun, ranks, 0)) > failed))


def _scores(prediction: Prediction, names: Sequence[str], control: str, tolerance: Any) -> Tensor:
    """How sure each row is by each score, ``[B, S]`` float64; infinite where it is never refused."""
    likelihood, mean, found = prediction.likelihood, prediction.mean, []
    for name in names:
        if name == "mutual_information":
            each = -prediction.mutual_information()
        elif likelihood.is_classifier:
            p = likelihood.class_probabilities(mean)
            each = p.amax(1) if name == "confidence" else -prediction.epistemic.sum(-1)
        else:
            std = prediction.std if name == "confidence" else prediction.epistemic.sqrt()
            each = -(std / tolerance.to(std)).amax(-1)
        found.append(each.detach().double().reshape(len(mean), -1).mean(1))
    if control != "error":
        found = [each.masked_fill(_is_one(prediction) == (control == "recall"), math.inf) for each in found]
    return torch.stack(found, 1)


def _is_one(prediction: Prediction) -> Tensor:
    """Whether each row's class is 1, boolean ``[B]``; UnsupportedError unless rows have one of two classes."""
    p = prediction.likelihood.class_probabilities(prediction.mean)
    if p.shape != (len(prediction.mean), 2):
        expected, got = "outputs [B, 1] of binary, or [B, 2]", f"outputs {list(prediction.mean.shape)}"
        raise UnsupportedError("Precision and recall are of one of two classes.", expected=expected, got=got)
    return p.argmax(1) == 1


def _losses(prediction: Prediction, rows: Any, control: str, tolerance: Any) -> tuple[Tensor, Tensor, bool]:
    """The loss of each row ``[B]``, whether it counts, and whether losses are 0 and 1; of targets and shares."""
    targets, share = rows
    if bool(((share != 0) & (share != 1)).any()):
        raise DataError("Rows with weights are no independent draws.", expected="weights of 0 and 1", got=str(share))
    mean, counts = prediction.mean, share > 0
    if prediction.likelihood.is_classifier:
        each = prediction.likelihood.class_probabilities(mean).argmax(1) != targets
        if control != "error":
            counts = counts & (_is_one(prediction) if control == "precision" else targets == 1)
    else:
        checks.shape("The tolerance", tolerance, [mean.shape[-1]] * tolerance.dim())
        each, counts = ((targets - mean.reshape(targets.shape)).abs() > tolerance.to(mean)).any(1), counts.all(1)
    each, counts = each.view(len(mean), -1), counts.view(len(mean), -1)
    return (each & counts).sum(1) / counts.sum(1).clamp_min(1), counts.any(1), each.shape[1] == 1
