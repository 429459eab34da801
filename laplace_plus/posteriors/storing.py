"""Saving: the arguments, prior and state of a posterior, and checkpoints of unfinished fits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from laplace_plus import io
from laplace_plus.curvature import Curvature, backend_class
from laplace_plus.distributed import Distributed, OwnedSum, gathered, resolve_group
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.posteriors.configuration import Configured, full_precision
from laplace_plus.posteriors.probing import probe
from laplace_plus.posteriors.registry import name_of
from laplace_plus.posteriors.training_data import TrainingData
from laplace_plus.structured.blocks import block_from_tensors
from laplace_plus.structured.layout import Layout


class Stored(Configured):
    """How a posterior is saved, copied and pickled."""

    data_attributes: tuple[str, ...] = ()
    """Names of attributes that hold training data; pickles and deep copies have None in their place."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What :meth:`save` stores besides the arguments, the prior and the mean: a JSON-able header and tensors."""
        raise ConfigurationError(f"{type(self).__name__} cannot be saved.", fix="Give it state() and restore().")

    def restore(self, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take up what :meth:`state` returned; ``n_data``, ``n_outputs`` and :attr:`mean` are already restored."""
        raise ConfigurationError(f"{type(self).__name__} cannot be loaded.", fix="Give it state() and restore().")

    def owned_sums(self) -> list[OwnedSum]:
        """Matrices that only one rank holds, in the same order on every rank."""
        return []

    def save(self, path: str | Path, *, distributed: Distributed = None, **entries: Any) -> None:
        """Write the posterior to a folder: tensors as safetensors, the rest as JSON, nothing pickled.

        Of a posterior that was fitted over several ranks, rank 0 writes the folder and the others wait until it is
        there. Rank 0 waits for nobody, so that it may also be the only one that ever saves to a path.

        Args:
            path: The folder.
            distributed: Which ranks save together: None for those of the fit, otherwise as for :meth:`fit`.
            **entries: Further entries of the description, for a class that wraps posteriors.

        Raises:
            NotFittedError: Before :meth:`fit`.
            CheckpointError: The folder holds something else.
            DistributedError: Rank 0 failed to write it, or has other hyperparameters than this rank.
        """
        group = self.group if distributed is None else resolve_group(distributed)
        if group is None or not group.is_alive():
            self.write(path, **entries)
            return
        if group.rank > 0:  # rank 0 checks while it writes, so that the others hear of its error
            self.require_fit()
        own = {**self.hyperparameter_digests(), "number of data": str(self.n_data)}
        with gathered(group, self.owned_sums()):
            group.lead(f"save to {path}", lambda: self.write(path, **entries), own)

    @full_precision
    def write(self, path: str | Path, **entries: Any) -> None:
        """What :meth:`save` does on the one process that writes."""
        header, tensors = self.description()
        io.write(path, {**entries, **header}, tensors)

    def description(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is stored: a JSON-able header, and tensors that may share the posterior's memory."""
        self.require_fit(thorough=True)
        if self._function is None and self._example is not None:
            self._function = probe(self.network, self._example)
        backend = self.backend
        if backend_class(backend.name) is not type(backend):
            what, own = f"A backend {backend.name!r} would not be loaded as what it is.", type(backend).__name__
            fix = f"Give {own} a `name` of its own, and register it: lp.curvature.register_backend({own}.name, {own})."
            raise ConfigurationError(what, expected=backend_class(backend.name).__name__, got=own, fix=fix)
        state, tensors = self.state()
        tensors = {"vector": self.mean, **tensors}
        header = {
            "class": name_of(type(self)),
            "options": self.options(),
            "likelihood": self.likelihood.config(),
            "backend": backend.config(),
            "parameters": list(self.parameter_names),
            "layer": self.layer_names[0] if self.is_last_layer else None,
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "network": self._fingerprint,
            "function": self._function,
            "example_axes": dict(self.network.example_axes),
            "state": state,
        }
        tensors |= {f"mask.{s.name}": s.mask for s in self.network.selected if s.mask is not None}
        for name in ("prior_precision", "prior_mean", "temperature"):
            tensors[f"hyper.{name}"] = getattr(self, f"_{name}").detach()
        groups = self._prior_groups
        if groups is not None:  # layers follow from the network
            header["groups"] = {"name": groups.name, "names": list(groups.names)}
            tensors["groups.index"] = groups.index
        return header, tensors

    def __copy__(self) -> Self:
        result = object.__new__(type(self))
        for name, own in vars(self).items():  # with the training data, which pickles leave out
            vars(result)[name] = copy.copy(own) if isinstance(own, Stored) else own
        return result

    def __getstate__(self) -> dict[str, Any]:
        kept = vars(self) | dict.fromkeys(("_example", *self.data_attributes)) | {"training_data": TrainingData()}
        for name, own in kept.items():
            if name.endswith("_cache"):
                kept[name] = None
            elif isinstance(own, Tensor) and own.grad_fn is not None:  # torch copies leaves only
                kept[name] = own.detach()
        return kept


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def curvature_state(curvature: Curvature) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A curvature's blocks, in JSON's terms and as tensors."""
    tensors: dict[str, Tensor] = {}
    blocks = []
    for number, (layout, block) in enumerate(curvature):
        names, shape = list(layout.names), list(block.shape)
        blocks.append({"key": layout.key, "names": names, "rule": layout.rule, "kind": block.storage, "shape": shape})
        tensors[f"block.{number}.index"] = layout.index
        tensors |= {f"block.{number}.{name}": value for name, value in block.tensors().items()}
    return blocks, tensors


def restored_curvature(entries: list[dict[str, Any]], tensors: dict[str, Tensor]) -> Curvature:
    """The curvature of :func:`curvature_state`; :class:`CheckpointError` unless its blocks cover each entry once."""
    if not entries:
        return Curvature([])
    blocks, places = [], []
    for number, entry in enumerate(entries):
        prefix = f"block.{number}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        layout = Layout(str(entry["key"]), tuple(entry["names"]), str(entry["rule"]), own.pop("index").cpu())
        if entry["shape"] != list(layout.shape):
            raise CheckpointError("A block has another shape.", expected=str(layout.shape), got=str(entry["shape"]))
        blocks.append((layout, block_from_tensors(entry["kind"], layout.shape, own)))
        places.append(layout.index.flatten())
    found = torch.cat(places)
    if found.min() < 0 or found.max() >= len(found) or found.bincount(minlength=len(found)).max() > 1:
        raise CheckpointError("The blocks do not cover each parameter once.", got=f"{len(found)} entries")
    return Curvature(blocks)
