"""Calls that continue after an interruption: their passes over data, and what else takes long.

A function that is :func:`resumable` takes a ``checkpoint``, a folder. However deep below, loops over data iterate by
:func:`summed`, and what has no batches is done :func:`once`; without a folder neither does anything. Stages are told
apart by name and number: a call must come to those of one name in the same order each time.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from types import SimpleNamespace as Sums
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import UnsupportedError
from laplace_plus.io.checkpoints import Checkpoint, Stage, identity, kept, packed, taking_up, unpacked
from laplace_plus.io.fingerprints import _sha256, digest
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import Batch, DataSums, iterate

__all__ = ["Sums", "once", "resumable", "summed"]


class _Work:
    """One call's checkpoint, random numbers, and the classes of results; values are trees, see :func:`pack`."""

    def __init__(self, checkpoint: Checkpoint, generator: torch.Generator, device: torch.device, results: Any):
        self.checkpoint, self.generator, self.device, self.numbers = checkpoint, generator, device, Counter[str]()
        self.classes = [cls for one in results for cls in (one, *one.__subclasses__())]

    def stage(self, name: str) -> str:
        self.numbers[name] += 1
        return f"{name}-{self.numbers[name]}"

    def packed(self, value: Any) -> Stage:
        return packed([value, self.generator.get_state()])

    def unpacked(self, found: Stage) -> Any:
        with taking_up():
            value, random = unpacked(found, *self.classes)
            self.generator.set_state(random)
            return value


_WORK: ContextVar[_Work | None] = ContextVar("work", default=None)


def resumable(call: Any, results: Iterable[type] = ()) -> Any:
    """A function of a fitted posterior that takes a ``checkpoint`` besides, by name like its ``generator``.

    The checkpoint is of this posterior, its data and the other arguments. A result of some classes is kept, too.
    """
    signature = inspect.signature(call)

    @wraps(call)
    def wrapped(posterior: Any, *args: Any, checkpoint: Any = None, **options: Any) -> Any:
        given = signature.bind(posterior, *args, **options).arguments
        tuner = given.get("tuner")
        if checkpoint is None or not getattr(tuner, "passes_over_data", True):  # which is quick
            return call(posterior, *args, **options)
        if posterior.group is not None and posterior.group.size > 1:
            what, got = "This call continues in one process only.", f"{posterior.group.size} processes"
            raise UnsupportedError(what, expected="checkpoint=None", got=got)
        settings = {name: own for name, own in given.items() if name not in ("data", "generator", "progress")}
        data = given.get("data", getattr(tuner, "data", None))
        sums, device = DataSums(posterior.network.device), posterior.network.device
        for batch in iterate(posterior.training_data.again(data, "A checkpoint belongs to data."), device=device):
            sums.add(batch, len(batch.target))
        own = {
            **identity(posterior, posterior.n_data),
            "fit": _sha256(_told([posterior.state(), posterior.tuning])),
            "call": {name: _told(own) for name, own in [*settings.items()][1:]},
            "data": [f"{value:.6e}" for value in sums.values()],
        }
        options["generator"] = options.get("generator") or torch.Generator().manual_seed(draw_seed(None))
        token = _WORK.set(_Work(Checkpoint(checkpoint, own), options["generator"], device, results))
        try:
            once("start", list)
            run = partial(call, posterior, *args, **options)
            return once("result", run) if results else run()
        finally:
            _WORK.reset(token)

    return wrapped


def summed(name: str, batches: Iterable[Batch], *sums: Any) -> Iterator[Batch]:
    """A pass over data; kept are the numbers, the tensors and the lists of them among the attributes of ``sums``.

    Batches that are in them do not come again. CheckpointError if they are others, or in another order.
    """
    work = _WORK.get()
    if work is None:
        yield from batches
        return

    def save() -> Stage:
        kinds = Tensor, int, float, list
        return work.packed([{key: own for key, own in vars(one).items() if isinstance(own, kinds)} for one in sums])

    def restore(found: Stage) -> None:
        for one, own in zip(sums, work.unpacked(found), strict=True):
            vars(one).update(own)

    yield from kept(work.checkpoint, work.stage(name), batches, save, restore, work.device, again=False)


def once(name: str, compute: Callable[[], Any]) -> Any:
    """What a computation gives, which is kept as a whole."""
    work = _WORK.get()
    if work is None:
        return compute()
    return work.unpacked(work.checkpoint.stage(work.stage(name), lambda: work.packed(compute()), work.device))


def _told(value: Any) -> str:
    """Settings as text: tensors by their digests, data classes by what they show, others by their names."""

    def other(own: Any) -> Any:
        if isinstance(own, Tensor):
            return digest(own)
        if is_dataclass(own) and not isinstance(own, type):
            return [type(own).__name__, {item.name: getattr(own, item.name) for item in fields(own) if item.repr}]
        return own.tolist() if hasattr(own, "tolist") else getattr(own, "__qualname__", type(own).__name__)

    return json.dumps(value, default=other)
