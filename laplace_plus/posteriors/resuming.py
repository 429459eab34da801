"""Fits that pass over the data many times, and continue from a checkpoint after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import io
from laplace_plus.batches import DataSums
from laplace_plus.distributed import Distributed
from laplace_plus.errors import CheckpointError
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.storing import with_prefix
from laplace_plus.posteriors.training_data import require_restartable

Stage = tuple[dict[str, Any], dict[str, Tensor]]
"""A JSON-able header, and tensors."""


class Part(dict[str, Any]):
    """A part of a checkpoint, which may be one that somebody has edited."""

    def __init__(self, content: Any):
        if not isinstance(content, Mapping):
            raise CheckpointError("The checkpoint is of another kind.", expected="a dictionary", got=repr(content))
        super().__init__(content)

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"The checkpoint has no {key!r}.", expected=key, got=", ".join(self))


class Checkpoint:
    """A folder with the finished stages of one computation; ``identity`` (JSON) is its network, data and settings.

    Without a folder nothing is written or found.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: Mapping[str, Any]):
        self._folder, self._identity = None if folder is None else Path(folder), dict(identity)
        if self._folder is not None and self._folder.exists() and not self._folder.is_dir():
            raise CheckpointError("Checkpoints go to a folder.", expected="a folder", got=f"the file {folder}")

    def write(self, stage: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace a stage; an interruption leaves either the old or the new one."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        io.write(self._folder / stage, {"identity": self._identity, "stage": dict(header)}, dict(tensors))

    def read(self, stage: str, device: Any = "cpu") -> Stage | None:
        """The header and tensors of a stage, or None; CheckpointError if damaged, or of another computation."""
        if self._folder is None or not (self._folder / stage).exists():
            return None
        header, tensors = map(Part, io.read(self._folder / stage, device))
        saved = Part(header["identity"])
        for name, own in self._identity.items():
            if saved.get(name) != own:
                raise CheckpointError(
                    f"The checkpoint {self._folder / stage} is of another computation: its {name} differs.",
                    expected=shorten(repr(own), 200),
                    got=shorten(repr(saved.get(name)), 200),
                    fix="Pass a new folder, or the network, data and settings that the checkpoint was written with.",
                )
        return Part(header["stage"]), tensors

    def stage(self, name: str, compute: Callable[[], Stage], device: Any = "cpu") -> Stage:
        """A stage as :meth:`read` finds it, or computed and written."""
        found = self.read(name, device)
        if found is None:
            found = compute()
            self.write(name, *found)
        return found


class FitStart(NamedTuple):
    """What :meth:`ResumableFit._start` found and decided before the first stage of a fit."""

    n_data: int
    n_outputs: int
    sums: list[str]
    checkpoint: Checkpoint
    seed: int


class ResumableFit(Posterior):
    """A posterior whose fit passes over the data many times."""

    _checkpoint_folder: str | os.PathLike[str] | None = None

    @override
    def fit(
        self,
        data: Iterable[Any],
        *,
        progress: bool = False,
        generator: torch.Generator | None = None,
        distributed: Distributed = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Fit to data, forgetting any earlier fit; the class says what raises and warns besides.

        Args:
            data: An iterable of the same batches, in the same order, each time.
            progress: Whether to show progress bars.
            generator: Source of randomness.
            distributed: As for :class:`Posterior`; this class is fitted by one process.
            checkpoint: A folder to which finished stages of the fit are written. A fit that finds some there continues
                from them, to the posterior that an uninterrupted one would have given.

        Raises:
            CheckpointError: The checkpoint is of another network, other data or settings.
            DataError: Data that can be run over only once, besides what :class:`Posterior` raises.
        """
        self._checkpoint_folder = checkpoint
        try:
            return super().fit(data, progress=progress, generator=generator, distributed=distributed)
        finally:
            self._checkpoint_folder = None

    def _start(self, data: Iterable[Any], generator: torch.Generator | None, why: str, **settings: Tensor) -> FitStart:
        """Survey the data, open the checkpoint (identified by the settings, too) and choose the seed."""
        require_restartable(data, why)
        n_data, n_outputs, sums = survey(self, data)
        own: dict[str, Any] = {}
        if self._checkpoint_folder is not None:
            own = {**identity(self, n_data), "data": sums, **{name: io.digest(x) for name, x in settings.items()}}
        checkpoint = Checkpoint(self._checkpoint_folder, own)
        seed = checkpoint.stage("draws", lambda: ({"seed": draw_seed(generator)}, {}))[0]["seed"]
        return FitStart(n_data, n_outputs, sums, checkpoint, int(seed))


def identity(posterior: Posterior, n_data: int) -> dict[str, Any]:
    """What identifies a posterior's computation on so many examples, as JSON."""
    weights = io.fingerprint(posterior.network.model)["sha256"]
    return {**posterior.settings(), "network": weights, "number of data": n_data}


def survey(posterior: Posterior, data: Iterable[Any]) -> tuple[int, int, list[str]]:
    """Number of examples, of outputs, and sums that differ for other data or order; SelectionError without a target."""
    sums, n_outputs, doubt, counts = DataSums(posterior.network.device), 0, 0.0, False
    for batch in posterior.batches(data):
        outputs = posterior.network.forward(batch.inputs)
        posterior.likelihood.validate(outputs, batch.target)
        doubt += posterior.likelihood.evidence_for_probabilities(outputs, batch.target)
        sums.add(batch, len(outputs))
        counts = counts or bool(posterior.likelihood.rows(outputs, batch.target)[2].any())
        n_outputs = outputs.shape[-1]
    if not counts:
        raise posterior.zero_curvature()
    if doubt > 0:
        doubt_logits(posterior.likelihood, doubt)
    return sums.count, n_outputs, [f"{value:.6e}" for value in sums.values()]


def stage_generator(seed: int, stage: int) -> torch.Generator:
    """The random numbers of one stage, which do not depend on how many the stages before have drawn.

    Consecutive seeds differ by 2⁶⁴ divided by the golden ratio, which spreads them over all 64 bits.
    """
    return torch.Generator().manual_seed((seed + stage * 0x9E3779B97F4A7C15) % 2**63)


def optimizer_tensors(optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Tensor]:
    """An optimizer's state by parameter, as named tensors for a checkpoint."""
    state = optimizer.state_dict()["state"]
    return {f"{prefix}{number}.{name}": x.detach() for number, own in state.items() for name, x in own.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Take up what :func:`optimizer_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in with_prefix(tensors, prefix).items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = value.cpu() if name == "step" else value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
