"""Fits that continue from a checkpoint after an interruption: passes that add up, and stages of many passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import io
from laplace_plus.curvature import Curvature
from laplace_plus.errors import CheckpointError
from laplace_plus.io.checkpoints import Checkpoint, Part, Stage, count_of, identity, kept, packed, taking_up, unpacked
from laplace_plus.io.passes import resumable
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import Operator
from laplace_plus.network.batches import Batch, DataSums
from laplace_plus.network.gradients import forward_parts
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.moments import Moments
from laplace_plus.posteriors.registry import ADDED
from laplace_plus.posteriors.storing import curvature_state, restored_curvature
from laplace_plus.posteriors.sums import FitSums
from laplace_plus.posteriors.training_data import require_restartable
from laplace_plus.priors import Groups
from laplace_plus.structured import Block
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.layout import Layout
from laplace_plus.tuning.base import TuningResult
from laplace_plus.tuning.tangent_model import TangentOptimum


class FitStart(NamedTuple):
    """What :meth:`ResumableFit._start` found and decided before the first stage of a fit."""

    n_data: int
    n_outputs: int
    sums: list[str]
    checkpoint: Checkpoint
    seed: int


class ResumableFit(Posterior):
    """A posterior whose fit passes over the data many times."""

    is_resumable = True

    def _start(self, data: Iterable[Any], generator: torch.Generator | None, why: str, **settings: Tensor) -> FitStart:
        """Survey the data, open the checkpoint (identified by the settings, too) and choose the seed."""
        require_restartable(data, why)
        n_data, n_outputs, sums = survey(self, data)
        own: dict[str, Any] = {}
        if self._checkpoint_folder is not None:
            own = {**identity(self, n_data), "data": sums, **{name: io.digest(x) for name, x in settings.items()}}
        checkpoint = Checkpoint(self._checkpoint_folder, own)
        seed = count_of(checkpoint.stage("draws", lambda: ({"seed": draw_seed(generator)}, {}))[0], "seed")
        return FitStart(n_data, n_outputs, sums, checkpoint, seed)


class KeptPasses:
    """The passes of a fit that adds up, kept in a checkpoint together with the state of the random numbers."""

    def __init__(self, posterior: Any, folder: Any, generator: torch.Generator | None, before: FitSums | None = None):
        own, self._device, group = identity(posterior), posterior.network.device, posterior.group
        if before is not None:
            parts = [repr(float(part.sum())) for _, block in before.curvature for part in block.parts()]
            own["fit before"] = [before.n_data, io.digest(before.statistics), *parts]
        own["processes"] = None if group is None else group.size
        folder = Path(folder) if group is None or group.rank == 0 else Path(folder) / f"rank-{group.rank}"
        self._own, self._checkpoint = own, Checkpoint(folder, own)
        self.generator = torch.Generator().manual_seed(draw_seed(None)) if generator is None else generator

    def curvature(
        self, batches: Iterable[Batch], now: Callable[[], Any], take: Callable[[FitSums], None]
    ) -> Iterator[Batch]:
        """The first pass; ``now`` gives its sums, ``take`` sets them."""

        def save() -> Stage:
            sums = now()
            aside = {name: (one, one.set_aside()) for name, (one, formed) in _sums(sums.curvature).items() if formed}
            blocks, tensors = curvature_state(sums.curvature)
            for name, (one, rows) in aside.items():
                for part in rows:
                    one.add_rows(part)
                tensors |= {name: torch.cat(rows, 1)} if rows else {}
            tensors |= {"statistics": sums.statistics, "random": self.generator.get_state()}
            return {"blocks": blocks, "n_data": sums.n_data, "n_outputs": sums.n_outputs}, tensors

        def restore(found: Stage) -> None:
            header, tensors = found[0], Part(found[1])
            if any(own.is_complex() for own in found[1].values()):
                raise CheckpointError("The sums are complex.", expected="real numbers", got=f"{sorted(tensors)}")
            curvature = restored_curvature(header["blocks"], tensors)
            first, stored = ([_place(layout) for layout, _ in own] for own in (now().curvature, curvature))
            if first != stored:
                raise CheckpointError("The blocks are of other parameters.", expected=f"{first}", got=f"{stored}")
            for name, (one, _) in _sums(curvature).items():
                if name in tensors:
                    one.add_rows(tensors[name])
            self.generator.set_state(tensors["random"].cpu())
            take(FitSums(curvature, tensors["statistics"].cpu(), int(header["n_data"]), int(header["n_outputs"])))

        yield from kept(self._checkpoint, "curvature", batches, save, restore, self._device)
        # A first pass may go on to more data, for which nothing that came after it holds.
        self._checkpoint = Checkpoint(self._checkpoint.folder, {**self._own, "number of data": now().n_data})

    def eigenvalues(self, batches: Iterable[Batch], sums: list[Tensor]) -> Iterator[Batch]:
        """The second pass, which adds to tensors in place."""

        def save() -> Stage:
            return packed([sums, self.generator.get_state()])

        def restore(found: Stage) -> None:
            values, random = unpacked(found)
            for own, value in zip(sums, values, strict=True):
                own.copy_(value)
            self.generator.set_state(random)

        return kept(self._checkpoint, "eigenvalues", batches, save, restore, self._device)

    def whole(self, stage: str, compute: Callable[[], Curvature]) -> Curvature:
        """A curvature that is kept when it is complete."""

        def computed() -> Stage:
            blocks, tensors = curvature_state(compute())
            return packed([blocks, tensors, self.generator.get_state()])

        found = self._checkpoint.stage(stage, computed, self._device)
        with taking_up():
            blocks, tensors, random = unpacked(found)
            self.generator.set_state(random)
            return restored_curvature(blocks, tensors)

    def products(self, operator: Operator) -> Operator:
        """A symmetric operator each of whose products is kept; they come in the same order each time."""
        return _KeptProducts(operator, self._checkpoint)


class _KeptProducts(Operator):
    symmetric = True

    def __init__(self, own: Operator, checkpoint: Checkpoint):
        self.shape, self.dtype, self.device = own.shape, own.dtype, own.device
        self._own, self._checkpoint, self._count = own, checkpoint, 0

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        self._count += 1
        name = f"product-{self._count:05d}"
        product: Tensor = unpacked(self._checkpoint.stage(name, lambda: packed(self._own(vectors)), self.device))
        return product


ADDED["passes"] = KeptPasses
Moments.resumed = partial(resumable, results=(TuningResult, TangentOptimum, Groups))


def _place(layout: Layout) -> tuple[Any, ...]:
    return layout.key, layout.names, layout.rule, layout.shape


def _sums(curvature: Curvature) -> dict[str, tuple[GramSum, bool]]:
    """Each sum of outer products, and whether it is stored as a matrix: as soon as one of those beside it is formed."""
    found: dict[str, tuple[GramSum, bool]] = {}
    for place, block in enumerate(block for _, block in curvature):
        inner = [block, *(own for own in vars(block).values() if isinstance(own, Block))]
        for value in (value for one in inner for value in vars(one).values()):
            group = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, GramSum)]
            formed = any(one.is_formed for one in group)
            found |= {f"waiting.{place}.{len(found) + number}": (one, formed) for number, one in enumerate(group)}
    return found


def survey(posterior: Posterior, data: Iterable[Any]) -> tuple[int, int, list[str]]:
    """Number of examples, of outputs, and sums that differ for other data or order; SelectionError without a target."""
    sums, n_outputs, doubt, counts = DataSums(posterior.network.device), 0, 0.0, False
    for batch in posterior.batches(data):
        forward_parts(posterior.network, batch.inputs)
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
