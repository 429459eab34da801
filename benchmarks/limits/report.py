"""Rows as lines of text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks import Row

METHOD = """\
Single-threaded CPU seconds: the least of several rounds in which laplace_plus and the limit take turns in one process;
"× limit" is the ratio of the two, "median" that of the rounds' ratios. The limit is plain torch written by hand for the
same exact result on that one network, or the passes that are named. "difference" is between the two results in
float64, relative in norm (of evidence: the largest; of samples: in standard errors). Peak memory is what the high-water
mark of the process rises by in one call. Times are with an allocator that keeps freed memory, so that nothing is mapped
anew in every call, which favours what needs much of it. Forward and epoch are a plain forward pass and one pass of
forward and backward over the same inputs. Networks are trained, but for GPT-2, DistilBERT (with its adapters, too),
ResNet-50 and mlp_1000, and prior precisions tuned before predictions, but for ResNet-50. Rows may come from several
runs: each replaces what it measures again. Where there is no number of rounds, they were as many as took 8 CPU seconds,
at least two, or one of 20 seconds."""

PEERS = """\
laplace-torch, curvlinops and BackPACK, as users would call them, in the same rounds: a figure below one says that
laplace_plus is that much faster. curvlinops has factors alone, of linear and convolutional layers; ours are of all
parameters, and decomposed in rows of fits. A row without figures says what a package fails with."""


# By how a quantity starts, and the network; empty for any.
FLOORS = {
    ("1000-class last layer, Full: fit and first predict 256", ""): (
        "1000 Cholesky decompositions and inverses of 256 × 256, and two products with each: .9 of the time that plain "
        "torch takes for them in float64, which condition numbers of thousands need"
    ),
    ("EKFAC Monte Carlo fit", ""): (
        "the decompositions of six matrices of up to 1025 columns: LAPACK alone takes 6 epochs for them, the factors "
        "1.3, and the second pass with its rotations the rest"
    ),
    ("KFAC Monte Carlo factors", "resnet18"): (
        "the products: .85 of the time by hand, in a quarter of the memory; a pass forward and backward is half of it"
    ),
    ("KFAC predictive, B=1", ""): (
        "about 200 operations of .8 to 2 µs: the recorded forward pass takes .15 ms, arguments and weights are "
        "checked; by hand, in regression, it is .14 ms"
    ),
    ("Full predictive, B=1", ""): "the same, and a product with a covariance of 1377² numbers, .3 ms",
    ("Diagonal predictive, B=1", ""): "as for KFAC",
    ("last layer predictive, B=1", ""): "as for KFAC, less the gradients",
    ("100 evidence steps, KFAC", "lenet"): (
        "Python, by a profile: .28 is the backward pass through seven operations, .21 a walk over the modules and the "
        "memory budget, .16 the look at whether the weights have changed"
    ),
}
"""What takes the time where a target is missed."""


def cell(value: Any, digits: int = 3) -> str:
    """A value for a table."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if value == float("inf"):
        return ""
    if isinstance(value, float):
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
    return "" if value is None else str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows])


def _seconds(measured: Row | None) -> Any:
    return (measured or {}).get("seconds", (measured or {}).get("failed"))


def line(row: Row) -> str:
    """For the terminal."""
    head = f"{row['case']} {row['model']} | {row['quantity']}"
    if "exponent" in row:
        return f"{head}: exponent {cell(row['exponent'])}, memory {cell(row['memory_exponent'])}"
    if "ours" not in row:
        words = [f"{row.get('peer', '')}: {cell(_seconds(row))} s"]
        if "ratio" in row:
            words.append(f"ours × this {cell(row['ratio'])} (median {cell(row['median_ratio'])})")
            words.append(f"peak {cell(row['peak_mb'])} MB")
        return f"{head} | " + ", ".join(words)
    words = [f"ours {cell(_seconds(row['ours']))} s", f"limit {cell(_seconds(row['limit']))} s"]
    if "ratio" in row:
        words.append(f"RATIO {cell(row['ratio'])} (median {cell(row['median_ratio'])})")
    if "target" in row:
        words.append(f"target {cell(row['target'])}: {'met' if row['met'] else 'NOT MET'}")
    words.append(f"peak MB ours {cell(row['ours'].get('peak_mb'))}, limit {cell(row['limit'].get('peak_mb'))}")
    if "peak_target_mb" in row:
        words.append(f"allowed {cell(row['peak_target_mb'])}")
    if row.get("difference") is not None:
        words.append(f"difference {cell(row['difference'], 2)}")
    for name, other in row["others"].items():
        words.append(f"[{name}: {cell(_seconds(other))} s, {cell(other.get('peak_mb'))} MB]")
    return f"{head} | " + ", ".join(words)


def _own(row: Row) -> list[Any]:
    others = row["others"]
    return [
        row["quantity"],
        row["model"],
        _seconds(row["ours"]),
        _seconds(row["limit"]),
        row.get("ratio"),
        row.get("median_ratio"),
        row["ours"].get("calls"),
        row.get("target"),
        row.get("met"),
        others.get("forward", {}).get("ours_ratio"),
        others.get("epoch", {}).get("ours_ratio"),
        row["ours"].get("wall_seconds"),
        row["ours"].get("peak_mb"),
        row["limit"].get("peak_mb"),
        row.get("peak_target_mb"),
        row.get("difference"),
    ]


def markdown(document: Row) -> str:
    """The whole report."""
    rows = document["rows"]
    named = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    parts = ["# laplace_plus beside its limits", f"{document['device']}; {named}.", METHOD]
    own = [row for row in rows if "ours" in row]
    columns = "quantity,model,ours s,limit s,× limit,median,rounds,target,met,× forward,× epoch,wall s,peak MB"
    columns += ",limit's peak MB,peak allowed MB,difference"
    parts.append(table(columns.split(","), [_own(row) for row in own]))
    meanings = dict.fromkeys((row["quantity"].split(",")[0], row["limit_is"]) for row in own)
    parts.append("## What the limits are\n\n" + table(["quantity", "limit"], [list(pair) for pair in meanings]))
    missed = [row for row in own if row.get("met") is False]
    reasons = [
        [row["quantity"], row["model"], why]
        for row in missed
        for (start, model), why in FLOORS.items()
        if row["quantity"].startswith(start) and model in ("", row["model"])
    ]
    if reasons:
        parts.append("## Why targets are missed\n\n" + table(["quantity", "model", "what takes the time"], reasons))
    beside = [
        [row["quantity"], row["model"], name, _seconds(other), other.get("ours_ratio"), other.get("peak_mb")]
        for row in own
        for name, other in row["others"].items()
        if name not in ("forward", "epoch")
    ]
    if beside:
        parts.append(
            "## Measured beside\n\n" + table(["quantity", "model", "what", "s", "ours × this", "peak MB"], beside)
        )
    theirs = [row for row in rows if "peer" in row]
    if theirs:
        listed = [
            [
                row["quantity"],
                row["model"],
                row["peer"],
                _seconds(row),
                row.get("ratio"),
                row.get("median_ratio"),
                row.get("calls"),
                row.get("ours_peak_mb"),
                row.get("peak_mb"),
            ]
            for row in theirs
        ]
        columns = "quantity,model,peer,s,ours × this,median,rounds,our peak MB,its peak MB"
        parts.append(f"## Peers\n\n{PEERS}\n\n" + table(columns.split(","), listed))
    growing = [row for row in rows if "exponent" in row]
    if growing:
        listed = [
            [row["quantity"], row["model"], row["along"], row["exponent"], row["memory_exponent"], row["expected"]]
            for row in growing
        ]
        words = "Slopes of logarithms over the upper half of the sizes: of CPU seconds and of peak memory."
        parts.append(
            f"## Growth\n\n{words}\n\n"
            + table(["quantity", "network", "along", "time ∝ n^", "memory ∝ n^", "mathematics"], listed)
        )
    lost = [
        row for row in rows if "ours" not in row and "peer" not in row and "exponent" not in row and "failed" in row
    ]
    if lost:
        parts.append(
            "## Lost\n\n" + table(["case", "model", "why"], [[r["case"], r["model"], r["failed"]] for r in lost])
        )
    return "\n\n".join(parts) + "\n"
