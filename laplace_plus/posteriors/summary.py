"""Which parameter of a posterior is treated how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Which parameter is treated how; prints as a table.

    Attributes:
        title: One line about the posterior.
        rows: For each parameter its name, number of selected entries, layer and treatment.
    """

    title: str
    rows: tuple[tuple[str, int, str, str], ...]

    def __str__(self) -> str:
        table = [("parameter", "entries", "layer", "treatment")]
        table += [(name, f"{size:,}", layer or "(root)", treatment) for name, size, layer, treatment in self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in table]
        return "\n".join([self.title, *lines])
