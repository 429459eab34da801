"""The checkpoint format: a directory of tensors (safetensors) and a description (JSON), checked against damage.

A checkpoint is the directory ``path`` with two files and nothing else:

* ``posterior.safetensors``: the tensors;
* ``posterior.json``: ``format``, ``version``, ``package_version``, the caller's ``header``, the dtype and shape of
  every tensor, ``tensors_sha256`` (of the other file, byte by byte) and ``checksum`` (SHA-256 of the canonical JSON
  without that key: keys sorted, no white space, ASCII).

Nothing is ever unpickled. This module knows nothing of posteriors: what the header means is its owner's business. A
network is recognised by its :func:`fingerprint`, which a header can carry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from laplace_plus._version import __version__
from laplace_plus.errors import CheckpointError

FORMAT = "laplace_plus.posterior"
"""The name that every checkpoint states."""

FORMAT_VERSION = 1
"""The version of the format that this code writes, and the only one that it reads."""

TENSORS_FILE = "posterior.safetensors"
HEADER_FILE = "posterior.json"


# -- recognising a network --------------------------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """The fingerprint of a network: of the names, shapes, dtypes and values of its parameters and buffers.

    Tied tensors count once, under their first name. Buffers count whether persistent or not, as both enter the function
    that the network computes. The device, ``requires_grad`` and the training mode do not count. Values are compared bit
    by bit, in the dtype that they have. CheckpointError for a tensor without values (lazy modules, the meta device).

    The JSON-able dictionary has ``sha256``, of everything; ``names_sha256``, of names, shapes and dtypes alone, so of
    the architecture; ``n_parameters``, the number of parameter entries; and ``tensors``, for each in the network's
    order its ``name``, ``kind`` (``"parameter"`` or ``"buffer"``), ``dtype``, ``shape`` and the ``sha256`` of its
    values.
    """
    architecture: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    n_parameters = 0
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta or nn.parameter.is_lazy(tensor):
                what, got = f"The {kind} {name} has no values.", "the meta device, or a lazy module without data"
                raise CheckpointError(what, got=got, fix="Load the weights first; run a lazy network once.")
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            architecture.append({"name": name, "kind": kind, "dtype": dtype, "shape": shape})
            tensors.append({**architecture[-1], "sha256": _sha256(tensor)})
            n_parameters += tensor.numel() if kind == "parameter" else 0
    hashes = {"sha256": _sha256(tensors), "names_sha256": _sha256(architecture)}
    return {**hashes, "n_parameters": n_parameters, "tensors": tensors}


def compare_fingerprint(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Check that a network is the one that a fingerprint was taken of; else CheckpointError.

    It names the first parameter or buffer that is missing, new, or of another shape, dtype or value.
    """
    current = fingerprint(model)
    fix = "Load the posterior onto the same network, with the same weights, that it was fitted on."
    try:
        if saved["sha256"] == current["sha256"]:
            return
        for what, entry_text in (
            ("The checkpoint is of another network: this tensor differs.", "{kind} {name} {dtype} {shape}"),
            ("The network has other values than the checkpoint's.", "{kind} {name} with SHA-256 {sha256}"),
        ):
            before = [entry_text.format_map(entry) for entry in saved["tensors"]]
            after = [entry_text.format_map(entry) for entry in current["tensors"]]
            for old, new in zip_longest(before, after, fillvalue="no such tensor"):
                if old != new:
                    raise CheckpointError(what, expected=old, got=new, fix=fix)
        raise TypeError("its hashes contradict each other")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("The saved fingerprint of the network cannot be read.", got=repr(error)) from error


def _sha256(value: Any) -> str:
    """SHA-256 of a tensor's or a file's bytes, or of the canonical JSON of anything else."""
    if isinstance(value, Path):
        with open(value, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not isinstance(value, Tensor):
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()
    parts = [value.detach()]
    if value.layout != torch.strided:  # such as the adjacency matrix of a graph network; dense it might not fit
        sparse = value.detach().to_sparse_coo().coalesce()
        parts = [sparse.indices(), sparse.values()]
    sha = hashlib.sha256()
    for part in parts:
        flat = part.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def digest(tensor: Tensor) -> str:
    """A single number as text; of more numbers, the shape and a hash of their bytes."""
    if tensor.numel() == 1 and tensor.is_floating_point():
        return repr(float(tensor.detach()))
    return f"{list(tensor.shape)} of SHA-256 {_sha256(tensor)[:16]}"


# -- writing ----------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint to the directory ``path``, new, empty or a checkpoint that is replaced: all of it or nothing.

    It is written beside ``path`` and moved there when complete, so that a failure half-way leaves an older checkpoint
    as it was. Tensors are copied where they share memory or are not contiguous; tuples in the header come back as
    lists. CheckpointError if ``path`` is a file or another directory, or if the format cannot hold a value; OSError if
    the file system refuses.

    Args:
        path: The directory.
        header: What :func:`read` is to give back: nested dictionaries with string keys, lists, strings, finite numbers,
            booleans and ``None``.
        tensors: Named dense tensors, on any device.
    """
    target = Path(path).resolve()
    _check_replaceable(target)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        text = json.dumps(dict(header), allow_nan=False)  # names a header that contains itself
        _check_keys(header)
        header = json.loads(text)
        stored = _storable(tensors)
        partial.mkdir(parents=True)
        safetensors.torch.save_file(stored, partial / TENSORS_FILE)
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "package_version": __version__,
            "header": header,
            "tensors": {
                name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in stored.items()
            },
            "tensors_sha256": _sha256(partial / TENSORS_FILE),
        }
        (partial / HEADER_FILE).write_bytes(_render(document))
        for name in (TENSORS_FILE, HEADER_FILE):
            with open(partial / name, "rb+") as file:
                os.fsync(file.fileno())  # the data has to be on the disk before its new name is
        _move(partial, target)
    except (ValueError, TypeError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            "The header or the tensors cannot be stored.",
            expected="a header of dictionaries, lists, strings, finite numbers, booleans and None; named dense tensors",
            got=f"{type(error).__name__}: {error}",
            fix="Store tensors as tensors, and convert everything else",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    # A directory cannot be renamed onto a full one; the older one steps aside, and back again if that fails.
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.replaced")
    target.rename(aside)
    try:
        partial.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _check_replaceable(target: Path) -> None:
    if not target.exists():
        return
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else {"a file"}
    if names and not (names == {HEADER_FILE, TENSORS_FILE} and _parse((target / HEADER_FILE).read_bytes())):
        raise CheckpointError(
            f"{target} is not a checkpoint, and is not overwritten.",
            expected=f"a new path, or a directory of a valid {HEADER_FILE} and {TENSORS_FILE} alone",
            got=", ".join(sorted(names)[:5]),
            fix="Choose another path, or remove what is there",
        )


def _check_keys(value: Any) -> None:
    """Refuse keys that are no strings, which JSON would turn into strings."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"keys must be str, not {key!r}")
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for child in children:
        _check_keys(child)


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies where tensors share memory or are not contiguous, which safetensors refuses."""
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or name == "__metadata__":
            raise TypeError(f"{name!r} is {type(tensor).__name__}, not a dense tensor under a free name")
        copy = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != copy.numel() * copy.element_size():
            copy = copy.clone()
        storages.add(copy.untyped_storage().data_ptr())
        stored[name] = copy
    return stored


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of the checkpoint in directory ``path``, after checking that it is as it was written.

    Tensors come on ``device``, in memory of their own. CheckpointError if the checkpoint or one of its files is
    missing, is of another format or format version, or has been altered or cut off in any byte.
    """
    directory = Path(path)
    files = directory / HEADER_FILE, directory / TENSORS_FILE
    for file in files:
        if not file.is_file():
            raise CheckpointError(
                f"There is no checkpoint at {directory}.",
                expected=f"a directory with {HEADER_FILE} and {TENSORS_FILE}",
                got=f"no {file.name}",
                fix="Check the path, or copy the whole directory again",
            )
    raw = files[0].read_bytes()
    document = _parse(raw)
    if document and document.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            "The checkpoint is of another version of the format.",
            expected=f"version {FORMAT_VERSION}",
            got=f"version {document.get('version')!r}, written by laplace_plus {document.get('package_version')}",
            fix="Load it with that version of laplace_plus, or save it again with this one",
        )
    # The bytes are compared: JSON has several spellings of one value, and none but the written one was written.
    is_intact = _render(document) == raw, document.get("tensors_sha256") == _sha256(files[1])
    for file, intact in zip(files, is_intact, strict=True):
        if not intact:
            raise CheckpointError(
                f"{file} is damaged: it is not the file that was written.",
                expected=f"the format {FORMAT!r}, and bytes with the SHA-256 that was written",
                fix="Copy or save the checkpoint again; it is not to be edited by hand",
            )
    tensors: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(files[1], framework="pt") as contents:
            for name in document["tensors"]:
                # The tensors of `safe_open` are views of the mapped file, and would follow what happens to it.
                tensors[name] = contents.get_tensor(name).to(device, copy=True)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{files[1]} does not hold the tensors that are listed.", got=str(error)) from error
    return document["header"], tensors


# -- details ----------------------------------------------------------------------------------------------------------


def _parse(raw: bytes) -> dict[str, Any]:
    """The description of a checkpoint; empty if the bytes are something else."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) and document.get("format") == FORMAT else {}


def _render(document: Mapping[str, Any]) -> bytes:
    """The description as the file holds it, with its checksum."""
    body = {key: value for key, value in document.items() if key != "checksum"}
    return (json.dumps({**body, "checksum": _sha256(body)}, indent=2) + "\n").encode("ascii")
