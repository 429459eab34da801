"""Trees of values as JSON and tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from laplace_plus.errors import CheckpointError

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
    """What is left of resumable work until nobody asks it: nothing is found, and nothing is written."""

    def __init__(self, folder: Any = None, identity: Any = None):
        self.folder = None

    def write(self, stage: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Nothing."""

    def read(self, stage: str, device: Any = "cpu") -> Stage | None:
        """None."""
        return None

    def stage(self, name: str, compute: Callable[[], Stage], device: Any = "cpu") -> Stage:
        """What a computation gives."""
        return compute()


def identity(posterior: Any, n_data: int | None = None) -> dict[str, Any]:
    """Nothing."""
    return {}


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
