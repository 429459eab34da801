"""What a saved posterior holds: the constructor's arguments, the prior with its groups, and the method's own state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from laplace_plus import io
from laplace_plus.curvature import Curvature
from laplace_plus.curvature.structures import Layout, block_from_tensors
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.posteriors.registry import name_of
from laplace_plus.priors import Groups

if TYPE_CHECKING:
    from laplace_plus.posteriors.base import Posterior

GROUPS_INDEX = "groups.index"


def write(posterior: Posterior, path: str | Path) -> None:
    """Write a fitted posterior to a folder; see :meth:`Posterior.save`."""
    header, tensors = posterior._state()
    masks = {f"mask.{s.name}": s.mask for s in posterior.network.selected if s.mask is not None}
    common = {
        "class": name_of(type(posterior)),
        "options": posterior.options(),
        "likelihood": posterior.likelihood.config(),
        "backend": posterior.backend.config(),
        "parameters": list(posterior.parameter_names),
        "layer": posterior.layer_names[0] if posterior._is_last_layer() else None,
        "n_data": posterior.n_data,
        "n_outputs": posterior.n_outputs,
        "network": posterior._fingerprint,
        "state": header,
    }
    hyper = {
        "hyper.prior_precision": posterior._prior_precision.detach(),
        "hyper.prior_mean": posterior._prior_mean.detach(),
        "hyper.temperature": posterior._temperature.detach(),
    }
    groups = posterior._prior_groups
    if groups is not None:  # layers follow from the network, and older versions know no others
        common["groups"] = {"name": groups.name, "names": list(groups.names)}
        hyper[GROUPS_INDEX] = groups.index
    io.write(path, common, {**tensors, **masks, **hyper})


def read_groups(header: dict[str, Any], tensors: dict[str, Tensor]) -> Groups | None:
    """The groups of a saved posterior's prior; None for the layers.

    Raises:
        CheckpointError: They are damaged.
    """
    if "groups" not in header:
        return None
    try:
        entry = header["groups"]
        return Groups(entry["name"], tuple(entry["names"]), tensors[GROUPS_INDEX])
    except (KeyError, TypeError, ConfigurationError) as error:
        raise CheckpointError("The groups of the saved prior cannot be read.", got=str(error)) from error


def curvature_state(curvature: Curvature) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A curvature's blocks, in JSON's terms and as tensors."""
    tensors: dict[str, Tensor] = {}
    blocks = []
    for number, (layout, block) in enumerate(curvature):
        blocks.append(
            {
                "key": layout.key,
                "names": list(layout.names),
                "rule": layout.rule,
                "kind": block.storage,
                "shape": list(block.shape),
            }
        )
        tensors[f"block.{number}.index"] = layout.index
        tensors |= {f"block.{number}.{name}": value for name, value in block.tensors().items()}
    return blocks, tensors


def restored_curvature(entries: list[dict[str, Any]], tensors: dict[str, Tensor]) -> Curvature:
    """The curvature of :func:`curvature_state`."""
    blocks = []
    for number, entry in enumerate(entries):
        prefix = f"block.{number}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        layout = Layout(entry["key"], tuple(entry["names"]), entry["rule"], own.pop("index").cpu())
        blocks.append((layout, block_from_tensors(entry["kind"], tuple(entry["shape"]), own)))
    return Curvature(blocks)
