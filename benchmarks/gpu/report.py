"""The page of all rows: what was measured, on which card, beside what it should be."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.measuring import Row

COLUMNS: dict[str, dict[str, str]] = {
    "right": {"passed": "passed", "failed": "failed", "skipped": "skipped", "test_s": "s", "failing": "failing"},
    "quality": {
        "clean accuracy": "accuracy",
        "clean nll": "NLL",
        "clean ece": "ECE",
        "noisy nll": "NLL, noisy",
        "blurred nll": "NLL, blurred",
        "low contrast nll": "NLL, low contrast",
        "auroc patches": "AUROC patches",
        "auroc noise": "noise",
        "auroc letters": "letters",
        "fit_epochs": "fit, epochs",
        "tune_epochs": "tuning, epochs",
        "predict_forwards": "prediction, forwards",
        "gib": "GiB",
    },
    "speed": {
        "epoch_s": "epoch, s",
        "fit_epochs": "fit, epochs",
        "epoch_gib": "epoch, GiB",
        "gib": "GiB",
        "syncs_per_batch": "waits in a batch",
        "tune_epochs": "tuning, epochs",
        "predict1_forwards": "1 input, forwards",
        "predict32_forwards": "32 inputs, forwards",
        "curvlinops_epochs": "curvlinops, epochs",
    },
    "kernels": {
        "torch_ms": "torch, ms",
        "best_ms": "best, ms",
        "best": "which",
        "gain": "gain",
        "stays": "at least 1.5 ×",
        "relative_error": "relative error",
        "best_share_of_copy": "share of a copy",
    },
}
HEADS = {
    "right": "Are the numbers right?",
    "quality": "A WRN-16-4 on CIFAR-10",
    "speed": "Beside forward and backward",
    "kernels": "Kernels beside torch's own",
}
GOALS: list[tuple[str, str, str, str, float]] = [
    ("exact KFAC fit, epochs", "quality", "KFAC", "fit_epochs", 8.0),
    ("fit with one sampled label, epochs", "quality", "KFAC, one sampled label", "fit_epochs", 1.5),
    ("default tuning, epochs", "quality", "KFAC", "tune_epochs", 1.0),
    ("last layer fit, epochs", "quality", "last layer", "fit_epochs", 0.5),
    ("prediction with KFAC, forwards", "quality", "KFAC", "predict_forwards", 3.0),
    ("ResNet-50, sampled fit, epochs", "speed", "ResNet-50, 224²: fit", "fit_epochs", 1.3),
    ("ViT-B/16, sampled fit, epochs", "speed", "ViT-B/16: fit", "fit_epochs", 1.3),
    ("waits in a batch, ResNet-50", "speed", "ResNet-50, 224²: fit", "syncs_per_batch", 0.0),
]
NOTHING = "Nothing has been measured on a card yet."


def shown(value: Any) -> str:
    """A cell."""
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"{len(value)}: " + ", ".join(f"`{own}`" for own in value[:3])
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(rows: list[Row], columns: dict[str, str]) -> list[str]:
    """Those columns that some row has; rows that failed say why below."""
    used = {key: head for key, head in columns.items() if any(row.get(key) is not None for row in rows)}
    lines = ["| | " + " | ".join(used.values()) + " |", "|---" * (len(used) + 1) + "|"]
    for row in rows:
        if used.keys() & row.keys():
            lines.append(f"| {row['name']} | " + " | ".join(shown(row.get(key)) for key in used) + " |")
    failed = [row for row in rows if "error" in row or "skipped" in row and isinstance(row["skipped"], str)]
    told = [(row["name"], row.get("error", row.get("skipped")), row.get("place", "")) for row in failed]
    reasons = [f"- {name}: {why} {place}".rstrip() for name, why, place in told]
    return [*lines, "", *reasons, *[""] * bool(reasons)]


def page(rows: list[Row]) -> str:
    """The whole page; where no row is of a card, it says so."""
    measured = [row for row in rows if row["device"] != "CPU"]
    lines = ["# On a graphics card", ""]
    if not measured:
        lines += [NOTHING, ""]
        measured = rows
    devices = sorted({f"{row['device']}, torch {row['torch']}" for row in measured})
    lines += [f"Measured on {'; '.join(devices)}.", ""] if devices else []
    known = {(row["part"], row["name"]): row for row in measured}
    goals = [(what, known.get((part, name), {}).get(key), most) for what, part, name, key, most in GOALS]
    if any(value is not None for _, value, _ in goals):
        lines += ["## Goals", "", "| | measured | at most |", "|---|---|---|"]
        lines += [f"| {what} | {shown(value)} | {most:g} |" for what, value, most in goals if value is not None]
        lines.append("")
    for part, head in HEADS.items():
        if own := [row for row in measured if row["part"] == part]:
            lines += [f"## {head}", "", *table(own, COLUMNS[part])]
    return "\n".join(lines).rstrip() + "\n"
