"""Which parameter of a posterior is treated how."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laplace_plus.priors import Groups


@dataclass(frozen=True)
class Summary:
    """Which parameter is treated how; prints as a table.

    Attributes:
        title: One line about the posterior.
        rows: For each parameter its name, number of selected entries, layer and treatment.
        prior: A line about the prior's groups; empty where they are the layers.
    """

    title: str
    rows: tuple[tuple[str, int, str, str], ...]
    prior: str = ""

    def __str__(self) -> str:
        table = [("parameter", "entries", "layer", "treatment")]
        table += [(name, f"{size:,}", layer or "(root)", treatment) for name, size, layer, treatment in self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in table]
        return "\n".join([self.title, *([self.prior] if self.prior else []), *lines])


def prior_line(groups: Groups | None, precision: Tensor) -> str:
    """What a summary says of groups other than the layers."""
    if groups is None:
        return ""
    if precision.ndim == 0 or len(precision) != len(groups.names):
        return f"prior groups {groups.name}: {', '.join(name or '(root)' for name in groups.names)}"
    each = zip(groups.names, precision.tolist(), strict=True)
    return f"prior precisions of {groups.name}: " + ", ".join(f"{name or '(root)'} {value:.3g}" for name, value in each)
