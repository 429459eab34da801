"""Checkpoints of unfinished work: finished stages, and passes over data that go on where they were."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import CheckpointError
from laplace_plus.io.files import is_there, read, write
from laplace_plus.io.fingerprints import fingerprint
from laplace_plus.network.batches import Batch, DataSums, same_sum

PAUSE = 30.0
"""Seconds between two saves of a pass; as many times the last save's duration, where that is more than a second."""

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


def count_of(header: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 of a checkpoint."""
    found = header[key]
    if type(found) is not int or found < 0:
        raise CheckpointError(f"The checkpoint has another {key}.", expected="a whole number from 0", got=repr(found))
    return found


@contextmanager
def taking_up() -> Iterator[None]:
    """Turns what comes of a checkpoint that somebody has edited into a :class:`CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError("The checkpoint's values cannot be read.", got=repr(error)) from error


class Checkpoint:
    """A folder with the finished stages of one computation; ``identity`` (JSON) is its network, data and settings.

    Without a folder nothing is written or found.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: Mapping[str, Any]):
        self.folder, self._identity = None if folder is None else Path(folder), dict(identity)
        if self.folder is not None and self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError("Checkpoints go to a folder.", expected="a folder", got=f"the file {folder}")

    def write(self, stage: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace a stage; an interruption leaves either the old or the new one."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / stage, {"identity": self._identity, "stage": dict(header)}, dict(tensors))

    def read(self, stage: str, device: Any = "cpu") -> Stage | None:
        """The header and tensors of a stage, or None; CheckpointError if damaged, or of another computation."""
        if self.folder is None or not is_there(self.folder / stage):
            return None
        header, tensors = map(Part, read(self.folder / stage, device))
        saved = Part(header["identity"])
        for name, own in self._identity.items():
            if saved.get(name) != own:
                what = f"The checkpoint {self.folder / stage} is of another computation: its {name} differs."
                fix = "Pass a new folder, or the network, data and settings that the checkpoint was written with."
                expected, got = (shorten(repr(value), 200) for value in (own, saved.get(name)))
                raise CheckpointError(what, expected=expected, got=got, fix=fix)
        return Part(header["stage"]), tensors

    def stage(self, name: str, compute: Callable[[], Stage], device: Any = "cpu") -> Stage:
        """A stage as :meth:`read` finds it, or computed and written."""
        found = self.read(name, device)
        if found is None:
            found = compute()
            self.write(name, *found)
        return found


def identity(posterior: Any, n_data: int | None = None) -> dict[str, Any]:
    """What identifies a posterior's computation on so many examples, where that is known, as JSON."""
    weights = fingerprint(posterior.network.model)["sha256"]
    return {**posterior.settings(), "network": weights, "number of data": n_data}


def kept(
    checkpoint: Checkpoint,
    stage: str,
    batches: Iterable[Batch],
    save: Callable[[], Stage],
    restore: Callable[[Stage], None],
    device: torch.device,
    *,
    again: bool = True,
) -> Iterator[Batch]:
    """A pass whose sums are saved as a stage, from time to time and at its end; a later pass goes on from there.

    Of the batches that are in the sums only the first comes ``again``, as it shapes what adds up; ``restore`` follows.
    CheckpointError if they are not the same, in the same order.
    """
    found = checkpoint.read(stage, device)
    count, known = (0, []) if found is None else (count_of(found[0], "batches"), found[0]["data"])
    sums, number, due = DataSums(device), 0, time.monotonic() + PAUSE

    def put() -> float:
        began, (header, tensors) = time.monotonic(), save()
        data = [repr(value) for value in sums.values()]
        checkpoint.write(stage, {**header, "batches": number, "data": data}, tensors)
        return time.monotonic() + PAUSE * max(1.0, time.monotonic() - began)

    for number, batch in enumerate(batches, 1):
        sums.add(batch, len(batch.target))
        if found is None or (number == 1 and again):
            yield batch
        if found is None and time.monotonic() >= due:
            due, count = put(), number
        elif found is not None and number == count:
            with taking_up():
                if not all(map(same_sum, map(float, known), sums.values())):
                    break
                restore(found)
            found = None
    if found is not None:
        what = f"The checkpoint {checkpoint.folder} is of another computation: its data differ."
        got = f"{number} batches" if number != count else "others, or in another order"
        fix = "Pass a new folder, or a loader that does not shuffle, or does so from the same seed."
        raise CheckpointError(what, expected=f"its {count} batches, in the same order", got=got, fix=fix)
    if number > count:
        put()


# -- trees ------------------------------------------------------------------------------------------------------------

TAG = "kind of entry"
"""The key of dictionaries that stand for something that JSON does not have."""


def packed(value: Any) -> Stage:
    """A tree as a stage; errors as of :func:`pack`."""
    tensors: dict[str, Tensor] = {}
    tree = pack(value, tensors, "value")
    return {"value": tree, "form": _form(tree, tensors)}, tensors


def unpacked(found: Stage, *classes: type) -> Any:
    """The inverse of :func:`packed`, with objects of some classes; CheckpointError for one that somebody has edited."""
    with taking_up():
        if found[0]["form"] != _form(found[0]["value"], found[1]):
            raise ValueError("values of other types or shapes than were written")
        return unpack(found[0]["value"], found[1], {cls.__name__: cls for cls in classes})


def _form(tree: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
    """The types of a tree's entries, and its tensors' types and shapes, as JSON."""

    def of(own: Any) -> Any:
        if isinstance(own, list):
            return [of(value) for value in own]
        return {key: of(value) for key, value in own.items()} if isinstance(own, dict) else type(own).__name__

    return [of(tree), {name: [str(own.dtype), list(own.shape)] for name, own in tensors.items()}]


def pack(tree: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A tree as JSON; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises CheckpointError for anything but numbers, texts, ``None``, tensors, lists, mappings and data classes of them.
    """
    if isinstance(tree, Tensor):
        unique = f"{name}#{len(tensors)}" if name in tensors else name
        tensors[unique] = tree
        return {TAG: "tensor", "name": unique, "on CPU": tree.is_cpu}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {TAG: "float", "value": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, (list, tuple)):
        values = [pack(value, tensors, f"{name}.{number}") for number, value in enumerate(tree)]
        return values if isinstance(tree, list) else {TAG: "tuple", "values": values}
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and key != TAG for key in tree) and not isinstance(tree, Counter):
            return {key: pack(value, tensors, f"{name}.{key}") for key, value in tree.items()}
        items = [
            [pack(key, tensors, f"{name}.key"), pack(value, tensors, f"{name}.{key}")] for key, value in tree.items()
        ]
        return {TAG: "counter" if isinstance(tree, Counter) else "items", "items": items}
    if is_dataclass(tree):
        return {TAG: "object", "class": type(tree).__name__, "entries": pack(vars(tree), tensors, name)}
    expected = "numbers, texts, tensors, and lists and dictionaries of them"
    fix = "Go without checkpoint=, or take an optimizer and a scheduler whose state_dict() holds only these."
    raise CheckpointError(f"{name} cannot be stored.", expected=expected, got=f"a {type(tree).__name__}", fix=fix)


def unpack(tree: Any, tensors: Mapping[str, Tensor], classes: Any = None) -> Any:
    """The inverse of :func:`pack`; objects are of these classes."""
    if isinstance(tree, list):
        return [unpack(value, tensors, classes) for value in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TAG)
    if kind is None:
        return {key: unpack(value, tensors, classes) for key, value in tree.items()}
    if kind == "tensor":
        return tensors[tree["name"]].cpu() if tree.get("on CPU") else tensors[tree["name"]]
    if kind == "float":
        return float(tree["value"])
    if kind == "tuple":
        return tuple(unpack(value, tensors, classes) for value in tree["values"])
    if kind == "object":
        return classes[tree["class"]](**unpack(tree["entries"], tensors, classes))
    items = {unpack(key, tensors): unpack(value, tensors) for key, value in tree["items"]}
    return Counter(items) if kind == "counter" else items
