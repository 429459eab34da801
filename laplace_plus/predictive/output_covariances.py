"""Covariances ``J Σ Jᵀ`` of a captured batch's outputs, from one-hot cotangents or the features of a linear head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from laplace_plus._memory import budget, chunk_bytes, slices
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.native import output_layer_gradients
from laplace_plus.curvature.structures import GENERAL
from laplace_plus.errors import DataError
from laplace_plus.structured import Factor

WHOLE = "all"
"""Key of a block that covers the whole parameter vector."""

QUICK_BYTES = 512 * 2**20
"""On a CPU, more output gradients at a time than this only cost new pages of memory."""

_LEAST_EXAMPLES = 8
"""Variances are computed for a few outputs at a time before a micro-batch gets smaller than this: products with fewer
rows take as long."""

_Forms = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Wanted:
    """Of which outputs the covariance is wanted.

    Attributes:
        outputs: All of them, ``[B, *, C]``, or ``[B', C]`` where positions are examples of their own.
        mean: The K wanted ones, ``[B, *, K]``.
        chosen: Their indices ``[K]``, or ``[B, *, K]`` of each example; None for all.
        kind: ``"full"`` for ``[B, *, K, K]``, ``"diagonal"`` for variances, ``"joint"`` for ``[B, *, K, B, *, K]``.
        centre: Weights like ``outputs``, whose mean of the outputs is taken from each; or None.
    """

    outputs: Tensor
    mean: Tensor
    chosen: Tensor | None
    kind: str
    centre: Tensor | None

    @property
    def individual(self) -> bool:
        """Whether each example has its own."""
        return self.chosen is not None and self.chosen.ndim > 1

    @property
    def covariance_shape(self) -> tuple[int, ...]:
        """See ``kind``."""
        shape = tuple(self.mean.shape)
        return {"joint": (*shape, *shape), "diagonal": shape, "full": (*shape, shape[-1])}[self.kind]


def covariances_of_head(
    gradients: Gradients, factor_sets: Sequence[Mapping[str, Factor]], wanted: Wanted
) -> list[Tensor] | None:
    """Those of a linear output layer, whose gradients are known without cotangents; None for other selections."""
    if not gradients.capture.pointwise or WHOLE in factor_sets[0]:
        return None
    outputs, chosen = wanted.outputs, wanted.chosen
    positions = torch.arange(outputs.shape[-1], device=outputs.device) if chosen is None else chosen
    head = output_layer_gradients(gradients, positions.reshape(len(outputs), -1) if wanted.individual else positions)
    if head is None or head[0].key not in factor_sets[0]:
        return None
    if wanted.centre is None:
        return _quadratic_forms([head], factor_sets, wanted.kind)
    # The rows (e_k − w) of all outputs are written out, if at all, for a few examples at a time.
    rows, centre, found = head[1].features, wanted.centre.flatten(0, -2), []
    limit = chunk_bytes(outputs.device, of_caches=64)
    for part in slices(len(rows), outputs.shape[-1] ** 2 * rows.element_size(), limit):
        own = replace(head[1], features=rows[part], centre=centre[part].to(rows.dtype))
        found.append(_quadratic_forms([(head[0], own)], factor_sets, wanted.kind))
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def room_for_cotangents(gradients: Gradients, wanted: Wanted) -> tuple[int, int, int]:
    """Bytes of one cotangent's gradients, how many to take at a time, and into how many parts a batch would be cut."""
    capture, outputs, size, general = gradients.capture, wanted.outputs, wanted.mean.shape[-1], 0
    for layout in gradients.layouts:
        general += layout.n_entries if layout.rule == GENERAL else 0
    each = max(1, capture.cotangent_bytes // 2 + len(outputs) * general * outputs.element_size())
    allowed = budget(outputs.device)
    room = max(1, min(QUICK_BYTES if outputs.device.type == "cpu" else allowed, allowed // 2))
    n_parts = -(-size // max(1, room // each))
    n_parts = min(n_parts, len(outputs) // _LEAST_EXAMPLES) if wanted.kind == "diagonal" else n_parts
    n_parts = min(len(outputs), max(n_parts, -(-each // room)))  # one cotangent must fit
    return each, max(1, room // each), n_parts


def covariances_by_cotangents(
    gradients: Gradients, factor_sets: Sequence[Mapping[str, Factor]], wanted: Wanted, capacity: int
) -> list[Tensor]:
    """By one-hot cotangents of K outputs at each of M positions, at most ``capacity`` at a time.

    For each set of factors ``[B, M, K, K]`` (full), ``[B, M·K]`` (diagonal) or ``[B, M·K, B, M·K]`` (joint).
    """
    forms = partial(_one_hot_forms, gradients, factor_sets, wanted)
    each, kind = wanted.mean.shape[-1], wanted.kind
    numbers = torch.arange(wanted.outputs[0, ..., 0].numel() * each)
    if len(numbers) <= min(each, capacity):
        return forms(numbers)
    if kind == "full" and each > capacity:
        chunks = [_by_pairs(forms, position, capacity) for position in numbers.split(each)]
    else:
        size = {"joint": len(numbers), "diagonal": capacity, "full": capacity // each * each}[kind]
        chunks = []
        for which in numbers.split(size):
            chunks.append(forms(which, each if kind == "full" else None))
    return chunks[0] if len(chunks) == 1 else [torch.cat(part, 1) for part in zip(*chunks, strict=True)]


def _by_pairs(forms: _Forms, position: Tensor, capacity: int) -> list[Tensor]:
    """One position's ``[B, 1, K, K]`` if its cotangents do not fit in memory: any two chunks of them meet once."""
    results: list[Tensor] = []
    for pair in combinations(position.split(max(1, capacity // 2)), 2):
        both = torch.cat(pair)
        parts, index = forms(both), both - position[0]
        results = results or [part.new_zeros(len(part), 1, len(position), len(position)) for part in parts]
        for result, part in zip(results, parts, strict=True):
            result[:, 0, index[:, None], index] = part
    return results


def _one_hot_forms(
    gradients: Gradients,
    factor_sets: Sequence[Mapping[str, Factor]],
    wanted: Wanted,
    which: Tensor,
    block: int | None = None,
) -> list[Tensor]:
    """Quadratic forms of the cotangents ``which``: number ``m K + k`` is the k-th wanted output of position m."""
    outputs, size, chosen = wanted.outputs, wanted.mean.shape[-1], wanted.chosen
    flat = outputs.flatten(1, -2) if outputs.ndim > 2 else outputs[:, None]  # [B, M, C]
    n, positions, n_outputs = flat.shape
    if chosen is None or chosen.ndim == 1:
        columns = which if chosen is None else which // size * n_outputs + chosen.cpu()[which % size]
        units = flat.new_zeros(len(which), positions * n_outputs).scatter_(1, columns.to(flat.device).unsqueeze(1), 1.0)
        units = units.view(-1, 1, positions, n_outputs).expand(-1, n, -1, -1)  # all examples share one memory
        if wanted.centre is not None:
            position, units = which // size, units.clone()
            centre = wanted.centre.reshape(flat.shape)
            units[torch.arange(len(which)), :, position] -= centre[:, position].transpose(0, 1)
    else:
        number, position = which % size, which // size
        units = flat.new_zeros(len(which), n, positions, n_outputs)
        example, own = torch.arange(n)[:, None], chosen.view(n, positions, -1).cpu()
        units[torch.arange(len(which)), example, position, own[example, position, number]] = 1
    cotangents = units.reshape(len(which), *gradients.capture.outputs.shape)
    stacks = [gradients.whole(cotangents)] if WHOLE in factor_sets[0] else gradients.blocks(cotangents)
    return _quadratic_forms(stacks, factor_sets, wanted.kind, block)


def _quadratic_forms(
    stacks: Any, factor_sets: Sequence[Mapping[str, Factor]], mode: str, block: int | None = None
) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors, summed over the layouts' gradients; one change of basis for each basis.

    With ``block``, only products within each group of so many cotangents: ``[B, V/block, block, block]``.
    """
    totals: list[Tensor] = []
    for layout, stack in stacks:
        coordinates: dict[int, Any] = {}
        for number, factors in enumerate(factor_sets):
            if layout.key not in factors:
                what = f"The network uses {layout.key!r} in another way than it did while fitting."
                expected = f"the blocks {', '.join(list(factors)[:4])} …"
                raise DataError(what, expected=expected, fix="Feed inputs of the same kind as the training data.")
            factor = factors[layout.key]
            if id(factor.basis) not in coordinates:
                coordinates[id(factor.basis)] = factor.basis.coordinates(stack)
            own = coordinates[id(factor.basis)]
            if block is None or own.n_cotangents == block:
                part = factor.quadratic_form(own, mode)
                part = part if block is None else part[:, None]
            else:
                groups = torch.arange(own.n_cotangents, device=own.device).split(block)
                part = torch.stack([factor.quadratic_form(own.select(group), mode) for group in groups], 1)
            if number == len(totals):
                totals.append(part)
            else:
                totals[number] = totals[number] + part
    return totals
