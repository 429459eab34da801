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
import math
import os
import shutil
import uuid
from collections.abc import Mapping
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
    by bit, in the dtype that they have.

    Args:
        model: The network.

    Returns:
        A JSON-able dictionary:

        * ``sha256``: of everything;
        * ``names_sha256``: of names, shapes and dtypes alone, so of the architecture;
        * ``n_parameters``: the number of parameter entries;
        * ``tensors``: for each tensor, in the network's order, ``name``, ``kind`` (``"parameter"`` or ``"buffer"``),
          ``dtype``, ``shape`` and the ``sha256`` of its values.

    Raises:
        CheckpointError: If a tensor has no values to read (lazy modules, the meta device).
    """
    architecture: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    n_parameters = 0
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta or nn.parameter.is_lazy(tensor):
                raise CheckpointError(
                    f"The {kind} {name} has no values.",
                    expected="an initialised tensor",
                    got="the meta device" if tensor.is_meta else "a lazy module that has not seen data",
                    fix="Load the weights first; run a lazy network once.",
                )
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            entry = {"name": name, "kind": kind, "dtype": dtype, "shape": shape}
            architecture.append(entry)
            tensors.append({**entry, "sha256": _sha256(tensor)})
            n_parameters += tensor.numel() if kind == "parameter" else 0
    return {
        "sha256": _sha256(tensors),
        "names_sha256": _sha256(architecture),
        "n_parameters": n_parameters,
        "tensors": tensors,
    }


def compare_fingerprint(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Check that a network is the one that a fingerprint was taken of.

    Args:
        saved: What :func:`fingerprint` returned.
        model: The network.

    Raises:
        CheckpointError: If the network has other parameters or buffers (names the first that is missing, new, or of
            another shape or dtype), or other values (names the first tensor that differs), or if ``saved`` is no
            fingerprint.
    """
    current = fingerprint(model)
    try:
        if saved["sha256"] == current["sha256"]:
            return
        before = {entry["name"]: (_line(entry), entry["sha256"]) for entry in saved["tensors"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("The saved fingerprint of the network cannot be read.", got=repr(error)) from error
    after = {entry["name"]: (_line(entry), entry["sha256"]) for entry in current["tensors"]}
    fix = "Load the posterior onto the same network, with the same weights, that it was fitted on."
    nothing = ("no such tensor", "")
    for name in {**before, **after}:
        old, new = before.get(name, nothing)[0], after.get(name, nothing)[0]
        if old != new:
            raise CheckpointError(
                f"The checkpoint is of another network: {name} differs.", expected=old, got=new, fix=fix
            )
    if list(before) != list(after):
        raise CheckpointError(
            "The checkpoint is of another network: its tensors come in another order.",
            expected=", ".join(before),
            got=", ".join(after),
            fix=fix,
        )
    different = [name for name in after if after[name] != before[name]]
    if not different:
        raise CheckpointError("The saved fingerprint of the network contradicts itself.", fix="Save it again.")
    first = different[0]
    raise CheckpointError(
        f"The network has other values than the checkpoint's: {first} is the first tensor that differs.",
        expected=f"values with SHA-256 {before[first][1][:16]}...",
        got=f"{after[first][1][:16]}... ({len(different)} of {len(after)} tensors differ)",
        fix=fix,
    )


def _line(entry: Mapping[str, Any]) -> str:
    return f"{entry['kind']} {entry['name']} {entry['dtype']} {list(entry['shape'])}"


def _sha256(value: Any) -> str:
    """SHA-256 of a tensor's bytes, or of the canonical JSON of anything else."""
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
    """Write a checkpoint, all of it or nothing.

    It is written beside ``path`` and moved there when complete, so that a failure half-way leaves an older checkpoint
    as it was. Tensors are copied where they share memory or are not contiguous; tuples in the header come back as
    lists.

    Args:
        path: The directory. It may be new, empty, or a checkpoint, which is replaced.
        header: What :func:`read` is to give back: nested dictionaries with string keys, lists, strings, finite numbers,
            booleans and ``None``.
        tensors: Named dense tensors, on any device.

    Raises:
        CheckpointError: If ``path`` is a file or a directory that is not a checkpoint, or if the header or a tensor is
            of a kind that the format cannot hold (named).
        OSError: If the file system refuses.
    """
    target = Path(path).resolve()
    _check_replaceable(target)
    try:
        header = _jsonable(dict(header), "header")
    except RecursionError:
        raise CheckpointError("The header cannot be stored as JSON.", got="a header that contains itself") from None
    stored = _storable(tensors)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    partial.mkdir(parents=True)
    try:
        safetensors.torch.save_file(stored, partial / TENSORS_FILE)
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "package_version": __version__,
            "header": header,
            "tensors": {
                name: {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in stored.items()
            },
            "tensors_sha256": _sha256_of_file(partial / TENSORS_FILE),
        }
        document["checksum"] = _sha256(document)
        (partial / HEADER_FILE).write_bytes(_render(document))
        for name in (TENSORS_FILE, HEADER_FILE):
            with open(partial / name, "rb+") as file:
                os.fsync(file.fileno())  # the data has to be on the disk before its new name is
        _move(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
    fix = "Choose another path, or remove what is there"
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError("A checkpoint is a directory.", expected="a new path", got=f"the file {target}", fix=fix)
    names = {entry.name for entry in target.iterdir()}
    if not names:
        return
    others = sorted(names - {TENSORS_FILE, HEADER_FILE})
    if not others and HEADER_FILE in names:
        try:
            document = json.loads((target / HEADER_FILE).read_bytes())
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict) and document.get("format") == FORMAT:
            return
    raise CheckpointError(
        f"{target} is not a checkpoint, and is not overwritten.",
        expected=f"a new path, or a directory of {HEADER_FILE} and {TENSORS_FILE} alone",
        got=f"a directory with {', '.join(others[:5])}" if others else f"a directory without a valid {HEADER_FILE}",
        fix=fix,
    )


def _jsonable(value: Any, where: str) -> Any:
    """Copy what JSON can hold; refuse by name what it cannot, or what it would silently turn into something else."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"A key of {where} is not a string.", expected="strings", got=repr(key))
        return {key: _jsonable(child, f"{where}.{key}") for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(child, f"{where}[{index}]") for index, child in enumerate(value)]
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise CheckpointError(
        f"{where} cannot be stored as JSON.",
        expected="a dictionary, list, string, finite number, boolean or None",
        got=repr(value) if isinstance(value, float) else f"a {type(value).__name__}",
        fix="Store tensors as tensors, and convert everything else",
    )


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == "__metadata__" or not name.isprintable():
            raise CheckpointError("A tensor has a name that cannot be stored.", expected="a string", got=repr(name))
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is not a tensor.", expected="a tensor", got=f"a {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES or tensor.is_meta:
            raise CheckpointError(
                f"The tensor {name} cannot be stored.",
                expected=f"a dense tensor of {', '.join(_DTYPES.values())}",
                got=f"{tensor.dtype}, {tensor.layout}, on {tensor.device}",
            )
        copy = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != copy.numel() * copy.element_size():
            copy = copy.clone()
        storages.add(copy.untyped_storage().data_ptr())
        stored[name] = copy
    return stored


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a checkpoint, after checking that it is as it was written.

    Args:
        path: The directory.
        device: Where the tensors are wanted.

    Returns:
        The header and the tensors, in memory of their own.

    Raises:
        CheckpointError: If the checkpoint or one of its files is missing, is of another format or format version, or
            has been altered or cut off in any byte.
    """
    directory = Path(path)
    document = _read_document(directory)
    file = directory / TENSORS_FILE
    digest = _sha256_of_file(file)
    if digest != document["tensors_sha256"]:
        raise CheckpointError(
            f"{file} is damaged: it is not the file that was written.",
            expected=f"SHA-256 {document['tensors_sha256']}",
            got=digest,
            fix="Copy or save the checkpoint again",
        )
    tensors: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(file, framework="pt") as contents:
            for name in document["tensors"]:
                # The tensors of `safe_open` are views of the mapped file, and would follow what happens to it.
                tensors[name] = contents.get_tensor(name).to(device, copy=True)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} does not hold the tensors that are listed.", got=str(error)) from error
    return document["header"], tensors


def _read_document(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise CheckpointError(
            f"There is no checkpoint at {directory}.",
            expected=f"a directory with {HEADER_FILE} and {TENSORS_FILE}",
            got="a file" if directory.exists() else "nothing",
            fix="Check the path",
        )
    for name in (HEADER_FILE, TENSORS_FILE):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"The checkpoint {directory} is incomplete.",
                expected=f"{HEADER_FILE} and {TENSORS_FILE}",
                got=f"no {name}",
                fix="Copy or save the whole directory again",
            )
    file = directory / HEADER_FILE
    raw = file.read_bytes()
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is not JSON.", got=str(error), fix="Save it again") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        got = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise CheckpointError(f"{file} is not of a checkpoint.", expected=f"the format {FORMAT!r}", got=repr(got))
    if document.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            "The checkpoint is of another version of the format.",
            expected=f"version {FORMAT_VERSION}",
            got=f"version {document.get('version')!r}, written by laplace_plus {document.get('package_version')}",
            fix="Load it with that version of laplace_plus, or save it again with this one",
        )
    checksum = document.pop("checksum", None)
    # The bytes are compared too: JSON has several spellings of one value, and none but the written one was written.
    if _sha256(document) != checksum or _render({**document, "checksum": checksum}) != raw:
        raise CheckpointError(
            f"{file} is damaged: it is not the file that was written.",
            expected=f"the checksum {checksum}",
            got="other contents",
            fix="Copy or save the checkpoint again; it is not to be edited by hand",
        )
    return document


# -- details ----------------------------------------------------------------------------------------------------------

# What both torch and safetensors can hold, by the names that the JSON file uses.
_DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        *("float64", "float32", "float16", "bfloat16", "bool", "complex64"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    )
}


def _render(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode("ascii")


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
