"""What a row of the table is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from measuring import Call, Timing, measure, ratio, reason, time_limit
from models import Problem

Row = dict[str, Any]
UNIT = "limit"


@dataclass(frozen=True)
class Target:
    """What a row should reach.

    Attributes:
        ratio: Our CPU time by the other call's.
        peak_ratio: Our peak memory by that of the call ``peak_of``.
        peak_mb: Our peak memory in MB.
        peak_of: See there.
    """

    ratio: float
    peak_ratio: float | None = None
    peak_mb: float | None = None
    peak_of: str = UNIT


@dataclass
class Task:
    """One quantity on one network.

    Attributes:
        case: Name of the group.
        quantity: What is computed, in words.
        problem: The network.
        ours: laplace_plus' way.
        limit: What it is compared with: plain torch for the same result, or a number of plain passes.
        limit_is: The latter in words.
        target: What the ratio of the two should be.
        others: More calls to time beside, such as other ways to get the same; ratios to them are given too.
        peers: For each other library what sets up a call (not timed), and by what its time is multiplied.
        check: The largest relative difference between our result and the limit's.
        passes: Whether to time plain passes over the data beside.
    """

    case: str
    quantity: str
    problem: Problem
    ours: Call
    limit: Call
    limit_is: str
    target: Target | None = None
    others: dict[str, Call] = field(default_factory=dict)
    peers: dict[str, tuple[Callable[[], Call], float]] = field(default_factory=dict)
    check: Callable[[], float] | None = None
    passes: bool = True


def run(task: Task, *, seconds: float, with_peers: bool, peer_seconds: float) -> Iterator[Row]:
    """The task's row, and then one more for each peer, whose calls take turns with the others."""
    head: Row = {"case": task.case, "model": task.problem.name, "quantity": task.quantity}
    calls = {UNIT: task.limit, "ours": task.ours, **task.others}
    if task.passes:
        calls |= {"forward": task.problem.forward, "epoch": task.problem.epoch}
    try:
        difference = task.check() if task.check else None
    except Exception as error:  # the row says so
        difference = reason(error)
    lost: dict[str, str] = {}
    for name, (set_up, _) in task.peers.items() if with_peers else ():
        try:
            with time_limit(peer_seconds):
                calls[name] = set_up()
        except Exception as error:  # whatever a library fails with is a result
            lost[name] = reason(error)
    timings = measure(calls, seconds, limits=dict.fromkeys(task.peers, peer_seconds))
    ours, limit = timings["ours"], timings[UNIT]
    row = head | {"limit_is": task.limit_is, "difference": difference}
    row |= {"ours": ours.row(), "limit": limit.row()} | ratio(ours, limit)
    row["others"] = {
        name: timings[name].row() | {f"ours_{key}": value for key, value in ratio(ours, timings[name]).items()}
        for name in calls
        if name not in ("ours", UNIT, *task.peers)
    }
    row |= _judged(row, task.target)
    yield row
    for name, (_, factor) in task.peers.items() if with_peers else ():
        theirs = Timing(failed=lost[name]) if name in lost else timings[name]
        found = theirs.row() | ratio(ours, theirs)
        scaled = {key: found[key] * factor for key in ("seconds",) if key in found}
        scaled |= {key: found[key] / factor for key in ("ratio", "median_ratio") if key in found}
        yield head | {"peer": name, "ours_peak_mb": ours.peak_mb} | found | scaled


def _judged(row: Row, target: Target | None) -> Row:
    """The target, and whether it is met."""
    if target is None:
        return {}
    result: Row = {"target": target.ratio}
    met = row.get("ratio", float("inf")) <= target.ratio
    peak = row["ours"].get("peak_mb", float("inf"))
    allowed = target.peak_mb
    if target.peak_ratio is not None:
        reference = row["limit"] if target.peak_of == UNIT else row["others"][target.peak_of]
        allowed = target.peak_ratio * reference.get("peak_mb", 0.0)
    if allowed is not None:
        result["peak_target_mb"] = allowed
        met = met and peak <= allowed
    return result | {"met": met}
