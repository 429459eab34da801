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

import ctypes
import glob
import json
import os
import platform
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
from torch import Tensor

from laplace_plus._version import __version__
from laplace_plus.errors import CheckpointError
from laplace_plus.io.fingerprints import _sha256

FORMAT = "laplace_plus.posterior"
"""The name that every checkpoint states."""

FORMAT_VERSION = 1
"""The version of the format that this code writes, and the only one that it reads."""

TENSORS_FILE = "posterior.safetensors"
HEADER_FILE = "posterior.json"

_WRITING: set[str] = set()  # names of folders that this process has in hand
_DAY = 86_400 * 10**9


def write(path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint, all of it or nothing.

    It is written beside ``path`` (new, empty, or a checkpoint, which is replaced) and moved there when complete. Where
    the system can exchange two folders (Linux, macOS), the old or the new one is at ``path`` at any time, and elsewhere
    the old one may wait beside it for the next call. What killed processes have left there goes, that of other hosts
    after a day. The header holds nested dictionaries with string keys, lists (also for tuples),
    strings, finite numbers, booleans and None; tensors are dense, on any device.

    Raises:
        CheckpointError: Something else is at ``path``, or a header or tensor is of another kind.
        OSError: The file system refuses.
    """
    target = Path(path).resolve()
    _check_replaceable(target)
    partial = target.with_name(f".{target.name}.{platform.node()}-{os.getpid()}-{uuid.uuid4().hex}.partial")
    _WRITING.add(partial.stem)
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
        shutil.copymode(partial / HEADER_FILE, partial / TENSORS_FILE)  # which safetensors keeps to its owner
        for part in (partial / TENSORS_FILE, partial / HEADER_FILE, partial):
            _sync(part)  # the data has to be on the disk before its new name is
        _move(partial, target)
        _sync(target.parent)
        for folder in [*_left_behind(target)]:
            shutil.rmtree(folder, ignore_errors=True)
    except (ValueError, TypeError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        if "os error" in str(error):  # a full disk, say, in the words of safetensors
            raise OSError(str(error)) from error
        what = "The header or the tensors cannot be stored."
        expected = "a header of dictionaries, lists, strings, finite numbers, booleans and None; named dense tensors"
        fix = "Store tensors as tensors, and convert everything else"
        raise CheckpointError(what, expected=expected, got=f"{type(error).__name__}: {error}", fix=fix) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _WRITING.discard(partial.stem)


def _left_behind(target: Path) -> Iterator[Path]:
    """Folders beside a checkpoint by processes of this host that are gone; unfinished ones of others after a day."""
    start = f".{target.name}."
    for folder in target.parent.glob(f"{glob.escape(start)}*-[0-9]*-*.*"):
        host, owner, _ = folder.stem.removeprefix(start).rsplit("-", 2)
        if host != platform.node():
            _, changed = _identity(folder) or (0, time.time_ns())
            gone = folder.suffix == ".partial" and time.time_ns() - changed > _DAY
        elif owner == str(os.getpid()):  # or by one of the same number, as in containers
            gone = folder.stem not in _WRITING
        else:
            gone = owner.isdigit() and not psutil.pid_exists(int(owner))
        if gone:
            yield folder


def is_there(path: Path) -> bool:
    """Whether something is at a path; a checkpoint that a killed :func:`write` has put aside is moved back there."""
    target = path.resolve()
    if target.parent.is_dir() and not target.exists():
        for folder in [own for own in _left_behind(target) if own.suffix == ".replaced"][:1]:
            folder.rename(target)
    return target.exists()


def _sync(path: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    names = os.fsencode(partial), os.fsencode(target)
    with suppress(AttributeError, OSError, TypeError):  # exchanges of macOS and Linux, which some file systems refuse
        system = ctypes.CDLL(None)
        if sys.platform == "darwin" and system.renamex_np(*names, 2) == 0:
            return
        if system.renameat2(-100, names[0], -100, names[1], 2) == 0:
            return
    # A directory cannot be renamed onto a full one; the older one steps aside, and back again if that fails.
    aside = partial.with_suffix(".replaced")
    target.rename(aside)
    try:
        partial.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _check_replaceable(target: Path) -> None:
    if not is_there(target):
        return
    names = {entry.name for entry in target.iterdir()} if target.is_dir() else {"a file"}
    if names and not (names == {HEADER_FILE, TENSORS_FILE} and _parse((target / HEADER_FILE).read_bytes())):
        what = f"{target} is not a checkpoint, and is not overwritten."
        expected = f"a new path, or a directory of a valid {HEADER_FILE} and {TENSORS_FILE} alone"
        fix = "Choose another path, or remove what is there"
        raise CheckpointError(what, expected=expected, got=", ".join(sorted(names)[:5]), fix=fix)


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


def read(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a checkpoint, on a device; CheckpointError unless all is as it was written."""
    header = Path(path) / HEADER_FILE
    is_there(header.parent)
    while True:
        seen = _identity(header)
        try:
            return _read(header.parent, device)
        except (CheckpointError, OSError):
            if seen == _identity(header):
                raise  # else it was replaced meanwhile


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from what replaces it, and when it was changed, in ns."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _read(directory: Path, device: torch.device | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    files = directory / HEADER_FILE, directory / TENSORS_FILE
    for file in files:
        if not file.is_file():
            what, fix = f"There is no checkpoint at {directory}.", "Check the path, or copy the whole directory again."
            raise CheckpointError(what, expected=f"{HEADER_FILE} and {TENSORS_FILE}", got=f"no {file.name}", fix=fix)
    raw = files[0].read_bytes()
    document = _parse(raw)
    if document and document.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            "The checkpoint is of another version of the format.",
            expected=f"version {FORMAT_VERSION}",
            got=f"version {document.get('version')!r}, written by laplace_plus {document.get('package_version')}",
            fix="Load it with that version of laplace_plus, or save it again with this one",
        )
    seen = _identity(files[1])
    # The bytes are compared: JSON has several spellings of one value, and none but the written one was written.
    is_intact = _render(document) == raw, document.get("tensors_sha256") == _sha256(files[1])
    for file, intact in zip(files, is_intact, strict=True):
        if not intact:
            what, fix = f"{file} is damaged: it is not the file that was written.", "Copy or save the checkpoint again"
            raise CheckpointError(what, expected=f"the format {FORMAT!r}, and bytes with the SHA-256 written", fix=fix)
    tensors: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(files[1], framework="pt") as contents:
            if seen != _identity(files[1]):  # not the file whose hash is known
                raise CheckpointError(f"{directory} was replaced while it was read.", fix="Read it again.")
            for name in document["tensors"]:
                # The tensors of `safe_open` are views of the mapped file, and would follow what happens to it.
                tensors[name] = contents.get_tensor(name).to(device, copy=True)
        if not isinstance(document["header"], dict):
            raise TypeError("a header that is no dictionary")
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{files[1]} does not hold the tensors that are listed.", got=str(error)) from error
    return document["header"], tensors


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
