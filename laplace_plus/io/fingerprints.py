"""Recognising a network by the names, shapes, types and values of its parameters and buffers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus.errors import NETWORK_ERRORS, CheckpointError
from laplace_plus.network.adapters import MERGED, adapter_state, adapter_tensors

_WHOLE, _SAMPLED = 4096, 512  # entries up to which all of a base's tensor is hashed, about how many of a larger one
_OF_RUNS = re.compile("_|output_|return_|architectures|dtype|torch_dtype|transformers_version|use_(cache|return)")
"""How names of a configuration start that do not say what a model computes."""
_OF_TRAINING = re.compile(r"(, )?(dropout|inplace|momentum)=[^,)]*|\w*Drop\w*\(.*")  # without effect in evaluation


def fingerprint(model: nn.Module, *, whole: bool = False) -> dict[str, Any]:
    """The names, shapes, dtypes and values of a network's parameters and buffers, persistent or not, as JSON.

    ``sha256`` is of everything, bit by bit; ``names_sha256`` of names, shapes and dtypes; ``n_parameters`` counts
    entries. ``tensors`` has ``name``, ``kind``, ``dtype``, ``shape`` and ``sha256`` of each tensor, tied ones once.
    ``modules`` has the name, class and options of each module, which do not enter the hashes. The device,
    ``requires_grad`` and the training mode do not count. CheckpointError for tensors without values.

    Of a network with adapters of PEFT these are the active ones; others may come and go. Of large tensors of the base
    some entries are hashed unless ``whole``, and ``config`` is the base's configuration.
    """
    modules: list[str] = []
    states: set[str] = set()
    for name, module in model.named_modules():
        with suppress(*NETWORK_ERRORS):  # a module's own extra_repr
            state = adapter_state(module) if MERGED in vars(module) else ""
            states.add(state.strip())
            modules.append(f"{name} {type(module).__name__}({module.extra_repr()}){state}".strip())
    adapters = adapter_tensors(model) if any(states) and not whole else {}
    architecture: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    n_parameters = 0
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if adapters.get(name):
                continue
            if tensor.is_meta or nn.parameter.is_lazy(tensor):
                what, got = f"The {kind} {name} has no values.", "the meta device, or a lazy module without data"
                raise CheckpointError(what, got=got, fix="Load the weights first; run a lazy network once.")
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            architecture.append({"name": name, "kind": kind, "dtype": dtype, "shape": shape})
            is_part = adapters and name not in adapters and tensor.numel() > _WHOLE and tensor.layout == torch.strided
            some = tensor.detach().flatten()[:: tensor.numel() // _SAMPLED | 1] if is_part else tensor
            tensors.append({**architecture[-1], "sha256": _sha256(some)})
            n_parameters += tensor.numel() if kind == "parameter" else 0
    hashes = {"sha256": _sha256(tensors), "names_sha256": _sha256(architecture)}
    found = {**hashes, "n_parameters": n_parameters, "tensors": tensors, "modules": modules}
    if adapters:
        idle, found["adapters"] = {*adapters.values()}, "; ".join(sorted(states - {""}))
        found["modules"] = [text for text in modules if text.split(" ")[0].rpartition(".")[2] not in idle - {""}]
        config: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
        known = {name: value for name, value in config.items() if not _OF_RUNS.match(name)}
        found["config"] = json.loads(json.dumps(known, default=str))
    return found


def compare_fingerprint(saved: Mapping[str, Any], model: nn.Module, *, modules: bool = False) -> None:
    """Raise :class:`CheckpointError` unless a network is that of a fingerprint, with ``modules`` down to their options.

    It names the first tensor that is missing, new, or of another shape, dtype or value, or else the first module.
    """
    fix = "Load the posterior onto the same network, with the same weights, that it was fitted on."
    try:
        current = fingerprint(model, whole="config" not in saved)
        if (now := current.get("adapters")) != (state := saved.get("adapters")):
            what = "The network uses another adapter than the checkpoint's, or uses it otherwise."
            raise CheckpointError(what, expected=f"layers {state}", got=f"layers {now}", fix=fix)
        for name, old in saved.get("config", {}).items():
            if (new := current.get("config", {}).get(name, old)) != old:
                what = "The checkpoint is of another base model: its configuration differs."
                raise CheckpointError(what, expected=f"{name} = {old!r}", got=repr(new), fix=fix)
        if saved["sha256"] == current["sha256"]:
            pairs = zip_longest(saved["modules"], current["modules"], fillvalue="none") if modules else ()
            for old, new in pairs:
                if _OF_TRAINING.sub("", old) != _OF_TRAINING.sub("", new):
                    raise CheckpointError("A module was replaced or changed.", expected=old, got=new, fix=fix)
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
