"""What a network computes: its outputs at random inputs of the shapes, types and rounded ranges of some others.

No data are kept. Nothing is known of networks that fail on such inputs, or take others than trees of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus.errors import NETWORK_ERRORS, UnsupportedError
from laplace_plus.network import Network

_KEPT, _TENSOR = 256, "random tensor"  # outputs that are kept, evenly spread; how a tensor's description starts


def probe(network: Network, inputs: Any) -> dict[str, Any]:
    """A network's outputs at inputs like these, in JSON's terms; empty where there are none."""
    leaves, rebuild = batches.flatten(inputs)
    try:
        form = json.loads(json.dumps(rebuild(map(_described, leaves))))
        found, rounding = outputs_at(network, random_inputs(form))
        json.dumps(found.tolist(), allow_nan=False)
    except NETWORK_ERRORS:
        return {}
    return {"inputs": form, "outputs": found.tolist(), "rounding": rounding}


def random_inputs(form: Any) -> Any:
    """The inputs of a probe, the same each time."""
    leaves, rebuild = batches.flatten(form)
    return rebuild(map(_drawn, leaves))


def outputs_at(network: Network, inputs: Any) -> tuple[Tensor, float]:
    """Some outputs, outside of autocast, and how far rounding takes them, relative to the largest (GPUs: ten bits)."""
    ambient, network.ambient_autocast = network.ambient_autocast, (False, torch.bfloat16)
    try:
        found = network.forward(network.receive(inputs)).flatten()
    finally:
        network.ambient_autocast = ambient
    rounding = max(torch.finfo(found.dtype).eps ** 0.5, 0.01 * (found.device.type != "cpu"))
    return found[:: -(-len(found) // _KEPT)].double().cpu(), rounding


def difference(before: Tensor, now: Tensor) -> float:
    """The largest, relative to the largest entry."""
    return float((before - now).abs().max() / before.abs().max().clamp_min(1e-300))


def check_deterministic(network: Network, inputs: Any, few: Any, random_state: Callable[[], Tensor]) -> None:
    """Raise :class:`UnsupportedError` if two passes over inputs differ; not where one over few draws no numbers."""
    before = random_state()
    with suppress(*NETWORK_ERRORS):  # of networks for batches of one size
        outputs_at(network, few)
        if torch.equal(before, random_state()):
            return
    (first, rounding), (second, _) = outputs_at(network, inputs), outputs_at(network, inputs)
    if (off := difference(first, second)) > rounding:
        what, got = "The network's outputs change from pass to pass.", f"a difference by {off:.2g} of the largest"
        fix = "Look in forward for F.dropout without training=self.training, and for other random numbers."
        raise UnsupportedError(what, expected="a network that is deterministic in eval()", got=got, fix=fix)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    low, high = (f"{end:.1e}" if leaf.is_floating_point() else str(int(end)) for end in leaf.aminmax())
    return " ".join([_TENSOR, str(leaf.dtype).removeprefix("torch."), low, high, *map(str, leaf.shape)])


def _drawn(leaf: Any) -> Any:
    if not isinstance(leaf, str) or not leaf.startswith(_TENSOR):
        return leaf
    kind, low, high, *shape = leaf.removeprefix(_TENSOR).split()
    start, dtype, source = float(low), getattr(torch, kind), torch.Generator().manual_seed(len(leaf))
    values = torch.rand([int(size) for size in shape], generator=source, dtype=torch.float64)
    whole = start + ((float(high) - start + 1) * values).floor()
    return (start + (float(high) - start) * values if dtype.is_floating_point else whole).to(dtype)
