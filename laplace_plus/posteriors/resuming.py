"""Checkpoints of unfinished computations: a folder with one checkpoint for each stage, for one and the same problem."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_plus import io
from laplace_plus.errors import CheckpointError
from laplace_plus.posteriors.ranks import digest

if TYPE_CHECKING:
    from laplace_plus.posteriors.base import Posterior


class Checkpoint:
    """Where the stages of a computation are written to and read from.

    Args:
        folder: The folder; each stage is one of :mod:`laplace_plus.io`'s checkpoints within it.
        identity: What makes the problem this one, in JSON's terms: its network, data and settings.

    Raises:
        CheckpointError: The folder is a file.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, Any]):
        self._folder, self._identity = Path(folder), dict(identity)
        if self._folder.exists() and not self._folder.is_dir():
            raise CheckpointError("Checkpoints go to a folder.", expected="a folder", got=f"the file {folder}")

    def write(self, stage: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write a stage, in place of what was written of it before; an interruption leaves either."""
        self._folder.mkdir(parents=True, exist_ok=True)
        io.write(self._folder / stage, {"identity": self._identity, "stage": dict(header)}, dict(tensors))

    def read(self, stage: str, device: Any = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """What was written of a stage; None if nothing was.

        Raises:
            CheckpointError: It is damaged, or of another problem, of which the message names the first difference.
        """
        if not (self._folder / stage).exists():
            return None
        header, tensors = io.read(self._folder / stage, device)
        saved = header.get("identity", {})
        for name, own in self._identity.items():
            if saved.get(name) != own:
                raise CheckpointError(
                    f"The checkpoint {self._folder / stage} is of another computation: its {name} differs.",
                    expected=_short(own),
                    got=_short(saved.get(name)),
                    fix="Pass a new folder, or the network, data and settings that the checkpoint was written with.",
                )
        return header["stage"], tensors


def identity(posterior: Posterior, n_data: int) -> dict[str, Any]:
    """What makes a posterior's computation this one, in JSON's terms.

    Args:
        posterior: The posterior.
        n_data: Number of examples.
    """
    network = posterior.network
    return {
        "network": io.fingerprint(network.model)["sha256"],
        "parameters": list(posterior.parameter_names),
        "masks": {s.name: digest(s.mask) for s in network.selected if s.mask is not None},
        "likelihood": posterior.likelihood.config(),
        "number of data": n_data,
        "options": posterior.options(),
        "prior precision": digest(posterior.prior_precision),
        "temperature": digest(posterior.temperature),
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
