"""The files that both commands write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from laplace_plus import plotting
from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments.comparison import Outcome
from laplace_plus.experiments.evaluation import Classified
from laplace_plus.experiments.report import Repeats
from laplace_plus.experiments.settings import PosteriorSettings

Say = Callable[[str], None]
"""Takes a line for the user."""


def save_posteriors(
    output: Path, outcomes: Mapping[str, Outcome], posteriors: list[PosteriorSettings], *, say: Say
) -> None:
    """Saves each posterior to its own folder, in place of what an earlier run left there.

    A method that cannot be saved is named and passed over: its numbers are no worse for that.
    """
    for settings in posteriors:
        posterior = outcomes[settings.label].posterior
        if posterior is not None:
            try:
                posterior.save(output / settings.folder)
            except ConfigurationError as error:
                say(f"{settings.label} is not saved: {error}")


def reliability(output: Path, repeats: Repeats) -> bool:
    """Draws reliability.png from the test predictions of all repeats together, for classification.

    Returns:
        Whether there was anything to draw.
    """
    pooled = {}
    for label in repeats[0]:
        parts = [outcomes[label].predictions for outcomes in repeats]
        classified = [part for part in parts if isinstance(part, Classified)]
        if not classified:
            return False
        pooled[label] = (
            torch.cat([part.probabilities for part in classified]),
            torch.cat([part.targets for part in classified]),
        )
    # As many bins as the calibration error of the table has.
    plotting.reliability_diagram(pooled, n_bins=15).savefig(output / "reliability.png", dpi=150)
    return True
