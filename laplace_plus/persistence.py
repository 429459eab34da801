"""Files: whatever is a tree of stored values, as one safetensors file with JSON in its metadata.

A value can be saved if it is None, a bool, a number, a string, a tensor, a list, tuple or dict of such values, a
curvature's block, or a dataclass that is :func:`stored` and whose fields are such values. :func:`encode` turns it into
JSON and named tensors, :func:`decode` back; no class needs code of its own, and nothing is ever unpickled.

The metadata of a file hold the format's version, the JSON, and a SHA-256 of it and of all tensors. A file of another
version, or with a flipped bit, is refused. It is written beside its place and moved there in one step. What a file
says of a network's weights is its :func:`fingerprint`, so that a posterior is only loaded onto the weights that it was
fitted on. Folders that version 0.2.0 wrote are read by :func:`read_folder`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from laplace_plus._version import __version__
from laplace_plus.curvature import Curvature
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.network.selection import MERGED, adapter_state, adapter_tensors
from laplace_plus.network.shadow import whole
from laplace_plus.priors import Groups
from laplace_plus.structured import Block
from laplace_plus.structured.blocks import block_from_tensors
from laplace_plus.structured.layout import Layout

FORMAT_VERSION = "2"
"""The version of the format that this code writes, and the only one that it reads (folders are version 1)."""

SAMPLED = 512
"""About how many entries of a large tensor beneath adapters are hashed: a base of billions would take minutes."""

C = TypeVar("C", bound=type[Any])
_STORED: dict[str, type[Any]] = {}

# -- trees -------------------------------------------------------------------------------------------------------------


def stored(cls: C) -> C:
    """Make a dataclass known to :func:`encode` and :func:`decode` by its name; a decorator.

    All fields that its constructor takes are saved. Raises :class:`ConfigurationError` if the name is taken.
    """
    known = _STORED.setdefault(cls.__name__, cls)
    if not is_dataclass(cls) or (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        what, expected = f"{cls.__qualname__} cannot be stored.", "a dataclass with a name of its own"
        raise ConfigurationError(what, expected=expected, got=f"a class beside {known.__module__}.{known.__qualname__}")
    _STORED[cls.__name__] = cls
    return cls


stored(Curvature)
stored(Groups)


def encode(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises:
        ConfigurationError: Something in it is of a kind that cannot be stored.
    """
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, float):
        return {"float": repr(value)}
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if type(value) in (list, tuple, torch.Size):
        items = [encode(own, tensors, f"{name}.{number}") for number, own in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        pairs = [[encode(k, tensors, f"{name}.key"), encode(v, tensors, f"{name}.{k}")] for k, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, Layout):
        tensors[f"{name}.index"] = value.index
        return {"layout": [value.key, list(value.names), value.rule], "index": f"{name}.index"}
    if isinstance(value, Block):
        return {"block": value.storage, "shape": list(value.shape), "parts": encode(value.tensors(), tensors, name)}
    cls = type(value)
    if _STORED.get(cls.__name__) is cls:
        own = {f.name: encode(getattr(value, f.name), tensors, f"{name}.{f.name}") for f in fields(value) if f.init}
        return {"class": cls.__name__, "fields": own}
    expected = "tensors, numbers, strings, None, lists, tuples, dicts and stored dataclasses"
    fix = f"If {cls.__name__} is a dataclass of such values, decorate it with laplace_plus.persistence.stored."
    raise ConfigurationError(f"{name} cannot be saved.", expected=expected, got=f"a {cls.__qualname__}", fix=fix)


def decode(tree: Any, tensors: Mapping[str, Tensor], device: torch.device | str | None = None) -> Any:
    """The inverse of :func:`encode`, with tensors on a device (None: where they are)."""
    if isinstance(tree, list):
        return [decode(own, tensors, device) for own in tree]
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        tensor = tensors[tree["tensor"]]
        return tensor if device is None else tensor.to(device)
    if "float" in tree:
        return float(tree["float"])
    if "tuple" in tree:
        return tuple(decode(own, tensors, device) for own in tree["tuple"])
    if "dict" in tree:
        return {decode(k, tensors, device): decode(v, tensors, device) for k, v in tree["dict"]}
    if "layout" in tree:
        key, names, rule = tree["layout"]
        return Layout(key, tuple(names), rule, tensors[tree["index"]].cpu())
    if "block" in tree:
        return block_from_tensors(tree["block"], tuple(tree["shape"]), decode(tree["parts"], tensors, device))
    if tree["class"] not in _STORED:
        what, fix = f"The file holds a {tree['class']}, which is not known.", "Import the package that brings it."
        raise CheckpointError(what, expected=", ".join(sorted(_STORED)), fix=fix)
    return _STORED[tree["class"]](**{name: decode(own, tensors, device) for name, own in tree["fields"].items()})


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file of a JSON-able header and named tensors, all of it or nothing; one that it wrote is replaced.

    Raises:
        CheckpointError: Something else is at ``path``.
        OSError: The file system refuses.
    """
    target = Path(path)
    if target.exists() and not (target.is_file() and _metadata(target)):
        fix = "Choose another path, or remove what is there."
        raise CheckpointError(f"{target} is not a saved posterior, and is not overwritten.", fix=fix)
    text = json.dumps(header)
    parts = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in parts.values()]
    for (name, tensor), place in zip([*parts.items()], places, strict=True):
        if places.count(place) > 1 or tensor.untyped_storage().nbytes() != tensor.nbytes:
            parts[name] = tensor.clone()  # safetensors refuses shared memory
    known = {"format": "laplace_plus", "version": FORMAT_VERSION, "package": __version__, "header": text}
    known["sha256"] = _digest(known, parts)
    with replacing(target) as beside:
        safetensors.torch.save_file(parts, beside, known)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A file to write beside a target, which it then replaces at once; folders above are made."""
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())  # the data have to be on the disk before the name is
        os.umask(umask := os.umask(0))
        beside.chmod(0o666 & ~umask)  # safetensors keeps files to their owner
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file; CheckpointError unless all is as :func:`write` wrote it."""
    file = Path(path)
    if not file.is_file():
        raise CheckpointError(f"There is no saved posterior at {file}.", fix="Check the path.")
    known = _metadata(file)
    if known.get("version", FORMAT_VERSION) != FORMAT_VERSION:
        what, fix = "The file is of another version of the format.", "Load it with that version, or save it again."
        got = f"version {known['version']}, written by laplace_plus {known.get('package')}"
        raise CheckpointError(what, expected=f"version {FORMAT_VERSION}", got=got, fix=fix)
    try:
        with safetensors.safe_open(file, framework="pt") as contents:
            tensors = {name: contents.get_tensor(name).clone() for name in contents.keys()}  # noqa: SIM118
        if _digest(known, tensors) == known["sha256"]:
            return json.loads(known["header"]), tensors
    except (safetensors.SafetensorError, KeyError, ValueError):
        pass
    what, expected = f"{file} is damaged: it is not the file that was written.", "what posterior.save wrote"
    raise CheckpointError(what, expected=expected, fix="Copy or save it again.")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors of a folder of version 0.2.0 or earlier: two files, JSON and safetensors."""
    try:
        document = json.loads((folder / "posterior.json").read_text())
        raw = (folder / "posterior.safetensors").read_bytes()
        if hashlib.sha256(raw).hexdigest() == document["tensors_sha256"] and document["version"] == 1:
            return document["header"], safetensors.torch.load(raw)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    expected = "a file that posterior.save wrote, or a whole folder of version 0.2.0"
    raise CheckpointError(f"{folder} is no saved posterior, or damaged.", expected=expected, fix="Check the path.")


def _metadata(file: Path) -> dict[str, str]:
    """The metadata of a file of ours; empty for any other."""
    try:
        with safetensors.safe_open(file, framework="pt") as contents:
            found = contents.metadata() or {}
    except (OSError, safetensors.SafetensorError):
        return {}
    return found if found.get("format") == "laplace_plus" else {}


def _digest(known: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256((known["version"] + known["package"] + known["header"]).encode())
    for name in sorted(tensors):
        sha.update(f"{name} {digest(tensors[name])}".encode())
    return sha.hexdigest()


# -- weights -----------------------------------------------------------------------------------------------------------


def digest(tensor: Tensor) -> str:
    """Type, shape and SHA-256 of a tensor's bytes, as text."""
    dense = whole(tensor.detach())
    if dense.layout != torch.strided:  # such as the adjacency matrix of a graph network
        dense = torch.view_as_real(dense.to_dense()) if dense.is_complex() else dense.to_dense()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    sha = hashlib.sha256(flat.view(torch.uint8).numpy().data)
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {sha.hexdigest()}"


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Each parameter and buffer of a network by name, as :func:`digest` tells it; tied ones once.

    Of a network with adapters of PEFT, idle adapters do not count, and of large tensors beneath some entries stand for
    all.
    """
    adapters = adapter_tensors(model)
    states = {adapter_state(module).strip() for module in model.modules() if MERGED in vars(module)}
    found = {"adapters": "; ".join(sorted(states))} if states else {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if adapters.get(name):
            continue
        beneath = states and name not in adapters and tensor.numel() > 8 * SAMPLED and tensor.layout == torch.strided
        found[name] = digest(whole(tensor.detach()).flatten()[:: tensor.numel() // SAMPLED | 1] if beneath else tensor)
    return found


def require_same_weights(saved: Mapping[str, str], model: nn.Module) -> None:
    """Raise :class:`CheckpointError` unless a network is that of a :func:`fingerprint`; it names what differs."""
    now = fingerprint(model)
    different = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    if different:
        name, fix = different[0], "Load the weights that it was fitted on first, by model.load_state_dict(...)."
        before, found = (re.sub(" [0-9a-f]{64}$", "", values.get(name, "none")) for values in (saved, now))
        what = f"The network is another one: {len(different)} of {len(now)} tensors differ, {name!r} first."
        found += " with other values" * (before == found)
        raise CheckpointError(what, expected=f"{before} as at the fit", got=found, fix=fix)
