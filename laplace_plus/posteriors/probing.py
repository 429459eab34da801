"""What a network computes: its outputs at random inputs of the shapes, types and rounded ranges of some others.

Others reach further, to where activations clip. No data are kept. Nothing is known of networks that fail on such
inputs, or take others than trees of tensors.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import NETWORK_ERRORS, ModelChangedError, UnsupportedError, tried
from laplace_plus.network import batches
from laplace_plus.network.network import Network

_KEPT, _TENSOR = 256, "random tensor"  # outputs that are kept, evenly spread; how a tensor's description starts
_FAR = 256.0, 16.0  # in ranges: how far inputs reach, or else the second
FAR_ROUNDING = 0.01  # how far rounding takes outputs there, where 1e-5 more of the range moves them by less


def probe(network: Network, inputs: Any) -> dict[str, Any]:
    """A network's outputs at inputs like these, in JSON's terms; empty where there are none."""
    leaves, rebuild = batches.flatten(inputs)
    try:
        form = json.loads(json.dumps(rebuild(map(_described, leaves))))
        found, rounding = outputs_at(network, random_inputs(form))
        json.dumps(found.tolist(), allow_nan=False)
    except NETWORK_ERRORS:
        return {}
    known = {"inputs": form, "outputs": found.tolist(), "rounding": rounding}
    for times in _FAR if any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves) else ():
        far, moved = (far_outputs(network, form, each) for each in (times, times * (1 + 1e-5)))
        if far is not None and moved is not None and difference(far, moved) < FAR_ROUNDING:  # not NaN, nor chaotic
            return {**known, "times": times, "far": far.tolist()}
    return known


def random_inputs(form: Any, times: float = 1.0) -> Any:
    """The inputs of a probe, the same each time; floating ones over so many times the range, about its middle."""
    leaves, rebuild = batches.flatten(form)
    return rebuild(_drawn(leaf, times) for leaf in leaves)


def outputs_at(network: Network, inputs: Any) -> tuple[Tensor, float]:
    """Some outputs, outside of autocast, and how far rounding takes them, relative to the largest (GPUs: ten bits)."""
    ambient, network.ambient_autocast = network.ambient_autocast, (False, torch.bfloat16)
    try:
        found = network.forward(network.receive(inputs)).flatten()
    finally:
        network.ambient_autocast = ambient
    rounding = max(torch.finfo(found.dtype).eps ** 0.5, FAR_ROUNDING * (found.device.type != "cpu"))
    return found[:: -(-len(found) // _KEPT)].double().cpu(), rounding


def far_outputs(network: Network, form: Any, times: float) -> Tensor | None:
    """Outputs beyond the range, or None; of the CPU alone: an index out of range breaks all that follows on a GPU."""
    if network.device.type != "cpu":
        return None
    return (tried(lambda: outputs_at(network, random_inputs(form, times)))[0] or [None])[0]


def difference(before: Tensor, now: Tensor) -> float:
    """The largest, relative to the largest entry."""
    return float((before - now).abs().max() / before.abs().max().clamp_min(1e-300))


def check_deterministic(network: Network, inputs: Any) -> None:
    """Raise :class:`UnsupportedError` if two passes differ, :class:`ModelChangedError` if as they write to weights."""
    network.kept.pop("mark", None)
    before = network.mark()
    (first, rounding), (second, _) = outputs_at(network, inputs), outputs_at(network, inputs)
    if (off := difference(first, second)) > rounding:
        network.kept.pop("mark", None)
        if (after := network.mark()) != before:
            names = [old[0] for old, new in zip(before, after, strict=False) if old != new and type(old) is tuple]
            what, fix = "The network's forward pass writes to its own weights.", "Write to copies of them."
            raise ModelChangedError(what, expected="no other weights after it", got=", ".join(names), fix=fix)
        what, got = "The network's outputs change from pass to pass.", f"a difference by {off:.2g} of the largest"
        fix = "Look in forward for F.dropout without training=self.training, other random numbers, and counters."
        raise UnsupportedError(what, expected="a network that is deterministic in eval()", got=got, fix=fix)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    low, high = (f"{end:.1e}" if leaf.is_floating_point() else str(int(end)) for end in leaf.aminmax())
    return " ".join([_TENSOR, str(leaf.dtype).removeprefix("torch."), low, high, *map(str, leaf.shape)])


def _drawn(leaf: Any, times: float) -> Any:
    if not isinstance(leaf, str) or not leaf.startswith(_TENSOR):
        return leaf
    kind, low, high, *shape = leaf.removeprefix(_TENSOR).split()
    start, dtype, source = float(low), getattr(torch, kind), torch.Generator().manual_seed(len(leaf))
    values = torch.rand([int(size) for size in shape], generator=source, dtype=torch.float64)
    whole = start + ((float(high) - start + 1) * values).floor()
    values += (times - 1) * (values - 0.5)
    return (start + (float(high) - start) * values if dtype.is_floating_point else whole).to(dtype)
