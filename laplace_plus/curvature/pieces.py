"""Batches cut into pieces whose forward graph and gradients fit the memory that they may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from laplace_plus import _memory, batches
from laplace_plus.batches import Batch
from laplace_plus.curvature.capture import Capture, capture_batch
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.errors import ConfigurationError
from laplace_plus.network import Network

_FEW = 2
"""Number of examples that tell what one of them takes, and where examples lie in each call."""

_QUICK_BYTES = 128 * 2**20
"""On a CPU, larger graphs are not quicker: they only leave the caches for longer."""


def gradient_pieces(network: Network, batch: Batch) -> Iterator[tuple[Batch, Gradients]]:
    """A batch's gradients, piece by piece where the whole would take more memory than it should.

    Two examples of a network's first batch are run by themselves, to see what one example takes and whether examples
    may be run apart. Inputs that do not have their examples along the first axes stay together, and so do those of a
    linear last layer, of which nothing is differentiated.

    Raises:
        ConfigurationError: The memory budget does not hold one example and one output direction.
    """
    size = batches.batch_size(batch.target) if isinstance(batch.target, Tensor) and batch.target.ndim else 0
    if size <= _FEW or not batches.can_be_cut(batch.inputs, size):
        yield batch, _captured(network, batch)
        return
    if network.can_cut is None:
        if isinstance(network.selection, str) and network.selection == "last_layer":
            # What lies before the last layer leaves no graph, so that nothing speaks against the whole batch as a rule.
            whole = _captured(network, batch)
            if whole.capture.pointwise:
                yield batch, whole
                return
            del whole
        network.can_cut = _survey(network, batch)
    step = examples_together(network) if network.can_cut else size
    for start in range(0, size, step):
        piece = batch if step >= size else _some(batch, slice(start, min(size, start + step)))
        yield piece, _captured(network, piece)


def _some(batch: Batch, examples: slice | list[int]) -> Batch:
    return Batch(batches.cut(batch.inputs, examples), batch.target[examples])


def _survey(network: Network, batch: Batch) -> bool | None:
    """Look at what one example takes, and whether examples may be run apart; None where these examples do not tell."""
    other = _another(batch.inputs)
    if other is None:
        return None
    try:
        pair = _captured(network, _some(batch, [0, other])).capture
        alone = network.forward(batches.cut(batch.inputs, [0]))
    except Exception:  # noqa: BLE001  -- a network for batches of one size, or a batch that is refused as a whole
        return False
    return same_outputs(alone, pair.outputs.view(pair.output_shape)[:1])


def _another(inputs: Any) -> int | None:
    """The last example that differs from the first one."""
    leaves, _ = batches.flatten(inputs)
    rows = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    for example in reversed(range(1, rows[0].shape[0])):
        if any(bool((leaf[example] != leaf[0]).any()) for leaf in rows):
            return example
    return None


def same_outputs(piece: Tensor, whole: Tensor) -> bool:
    """Whether outputs of some examples are, up to rounding, what they are among others."""
    if piece.shape != whole.shape:
        return False
    rounding = min(1e3 * torch.finfo(whole.dtype).eps, 0.05)
    return bool((piece - whole).abs().max() <= rounding * whole.abs().max())


def examples_together(network: Network) -> int:
    """How many examples go through the network together.

    Raises:
        ConfigurationError: The memory budget does not hold one example and one output direction.
    """
    each = network.bytes_per_example
    if not each:
        return 2**62
    allowed = _memory.budget(network.device)
    if each > allowed:
        raise ConfigurationError(
            "The memory budget does not hold one example and one output direction.",
            expected=f"at least {_memory.in_words(each)}, which they take",
            got=f"{_memory.in_words(allowed)}",
            fix="Raise memory_budget, or select fewer parameters.",
        )
    quick = _QUICK_BYTES if network.device.type == "cpu" else allowed
    return max(1, min(quick, allowed // 2) // each)


def _captured(network: Network, batch: Batch) -> Gradients:
    capture = capture_batch(network, batch)
    note_bytes(network, capture)
    return Gradients(network, capture)


def note_bytes(network: Network, capture: Capture) -> None:
    """Remember what an example takes: its share of the graph, and of one direction's gradients."""
    own = 0 if capture.pointwise else capture.n_bytes + capture.direction_bytes()
    each = -(-own // max(1, capture.output_shape[0]))
    network.bytes_per_example = max(each, network.bytes_per_example or 0)
