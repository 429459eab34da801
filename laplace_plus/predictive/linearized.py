"""The Gaussian over outputs that a Gaussian over parameters induces in the linearised network.

``f(x) ~ N(f(θ̂, x), J(x) Σ J(x)ᵀ)``, computed layer by layer from inputs and output gradients. The Jacobian itself is
only built where one dense block covers all parameters.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus._memory import budget
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.gradients import Gradients, same_outputs
from laplace_plus.curvature.last_layer import output_layer_gradients
from laplace_plus.curvature.linearization import Linearization, Ways
from laplace_plus.curvature.structures import GENERAL, Layout
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.network import Network
from laplace_plus.structured import ExampleGradients, Factor
from laplace_plus.structured.chunks import require_room, slices

_LARGE_COVARIANCE = 512 * 2**20
"""Bytes that a covariance of outputs and its factor may take in float64 before functions are sampled instead."""

MANY_OUTPUTS = 64
"""With more outputs than this, links that need only variances get only variances."""

WHOLE = "all"
"""Key of a block that covers the whole parameter vector."""

Outputs = Literal["diagonal"] | Sequence[int] | Sequence[bool] | slice | Tensor | None

_LEAST_EXAMPLES = 8
"""Variances of many outputs are computed a few outputs at a time rather than for fewer examples than this."""

_QUICK_BYTES = 512 * 2**20
"""On a CPU, more output gradients at a time than this only cost new pages of memory."""


class FunctionalPosterior(NamedTuple):
    """Gaussian over the linearised network's outputs.

    Attributes:
        mean: ``[B, *, C]``; of K chosen outputs ``[B, *, K]``.
        covariance: ``[B, *, C, C]``; variances ``[B, *, C]`` if only the diagonal was asked for; with ``joint=True``
            ``[B, *, C, B, *, C]``; of K chosen outputs K in place of C.
    """

    mean: Tensor
    covariance: Tensor


def functional_posteriors(
    network: Network,
    factor_sets: Sequence[Mapping[str, Factor]],
    inputs: Any,
    *,
    joint: bool = False,
    outputs: Outputs = None,
    differentiable: bool = False,
    expected_outputs: int | None = None,
    apart: bool = True,
) -> list[FunctionalPosterior]:
    """Functional posteriors under several covariances, e.g. on a grid of prior precisions, from one Jacobian pass.

    Args:
        network: The network.
        factor_sets: For each covariance, the factors of the posterior precision's blocks by layout key.
        inputs: A batch's inputs.
        joint: Whether to give the covariance across inputs too.
        outputs: None for all outputs, ``"diagonal"`` for variances only, or some outputs: their indices, a slice, a
            bool mask ``[C]``, or integers ``[B, *, K]`` that choose K outputs for each example and position by itself,
            such as its most probable classes. Only chosen outputs are differentiated.
        differentiable: Whether gradients flow to the inputs.
        expected_outputs: C, where it is known.
        apart: Whether examples may be run apart from each other, where that takes less memory.

    Raises:
        ConfigurationError: Outputs that the network does not have, or a memory budget that does not hold the gradients
            of one output.
        DataError: Inputs on which the network takes another path than while fitting.
    """
    form = _form(inputs, outputs, WHOLE in factor_sets[0]) if apart and not joint else None
    pieces = _known_pieces(network, inputs, form)
    if pieces:  # this saves a forward pass of them all
        options: dict[str, Any] = {"differentiable": differentiable, "expected_outputs": expected_outputs}
        return _joined(
            functional_posteriors(network, factor_sets, batches.cut(inputs, piece), outputs=outputs, **options)
            for piece in pieces
        )
    capture = Capture(network, inputs, differentiable=differentiable)
    if not capture.output_shape.numel():
        raise DataError("There is nothing to predict.", expected="at least one example", got=batches.describe(inputs))
    if expected_outputs is not None:
        require_outputs(capture.output_shape, expected_outputs, inputs)
    gradients = Gradients(network, capture)
    mean = capture.outputs.to(torch.promote_types(capture.outputs.dtype, torch.float32))
    shape = capture.output_shape
    diagonal = isinstance(outputs, str)
    if diagonal and (outputs != "diagonal" or joint):
        raise ConfigurationError(
            "Unknown choice of outputs.",
            expected='None, "diagonal" (not with joint=True) or indices',
            got=f"{outputs!r} with joint={joint}",
        )
    selection = slice(None) if outputs is None or isinstance(outputs, str) else outputs
    chosen = output_indices(selection, shape).to(mean.device)
    mode = "joint" if joint else "diagonal" if diagonal else "full"
    n_chosen = chosen.shape[-1]
    flat = mean.flatten(1, -2) if mean.ndim > 2 else mean[:, None]  # [B, M, C]
    own = chosen.ndim > 1
    # Of a linear head the outputs' gradients are known, without a unit vector for each of them.
    head = None
    if capture.pointwise and WHOLE not in factor_sets[0]:
        head = output_layer_gradients(gradients, chosen.reshape(len(mean), -1) if own else chosen)
    if head is not None:
        covariances = _weighed([head], factor_sets, mode)
    else:
        directions = _Directions(gradients, flat, chosen.view(*flat.shape[:2], n_chosen) if own else chosen)
        pieces = directions.pieces(diagonal) if apart and not joint else []
        if len(pieces) > 1:
            del capture, gradients, directions
            selections = [chosen[piece] if own else outputs for piece in pieces]
            found = _joined(
                functional_posteriors(
                    network, factor_sets, batches.cut(inputs, piece), outputs=some, differentiable=differentiable
                )
                for piece, some in zip(pieces, selections, strict=True)
            )
            picked = mean.view(shape).gather(-1, chosen) if own else mean.view(shape)[..., chosen]
            if same_outputs(found[0].mean, picked):
                if form is not None:
                    network.apart[form] = pieces[0].stop, _room(mean.device)
                return found
            # An example's output depends on the others': they must not be run apart.
            return functional_posteriors(
                network, factor_sets, inputs, outputs=outputs, differentiable=differentiable, apart=False
            )
        covariances = directions.quadratics(factor_sets, mode)
    kept = (*shape[:-1], n_chosen)
    final = (*kept, *kept) if joint else kept if diagonal else (*kept, n_chosen)
    picked = mean.view(shape).gather(-1, chosen) if own else mean.view(shape)[..., chosen]
    return [FunctionalPosterior(picked, covariance.reshape(final).to(mean.dtype)) for covariance in covariances]


def require_outputs(shape: torch.Size, expected: int, inputs: Any) -> None:
    """Refuse inputs on which the network gives another number of outputs, such as an example without a batch axis.

    Args:
        shape: That of the outputs, ``[..., C]``.
        expected: C, as it was while fitting.
        inputs: What the network was run on.

    Raises:
        DataError: Another C.
    """
    if shape[-1] != expected:
        raise DataError(
            "The network gives another number of outputs than it did while fitting.",
            expected=f"{expected} outputs for each example",
            got=f"outputs of shape {tuple(shape)} for inputs {batches.describe(inputs)}",
            fix="Pass a batch of inputs: x[None] for a single one.",
        )


def _joined(parts: Iterable[list[FunctionalPosterior]]) -> list[FunctionalPosterior]:
    """Those of all examples from those of some, for each set of factors."""
    return [FunctionalPosterior(*map(torch.cat, zip(*part, strict=True))) for part in zip(*parts, strict=True)]


def _form(inputs: Any, outputs: Outputs, whole: bool) -> tuple[Any, ...] | None:
    """What decides, beside the number of examples, into how many a batch is cut; None for chosen outputs."""
    if not (outputs is None or isinstance(outputs, str)):
        return None
    leaves, _ = batches.flatten(inputs)
    forms = [(leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return (*forms, outputs, whole)


def _known_pieces(network: Network, inputs: Any, form: tuple[Any, ...] | None) -> list[slice]:
    """The pieces of a batch whose like has given the same outputs in pieces before; none where nothing is known."""
    step, room = network.apart.get(form, (0, 0))
    if not step or _room(network.device) < room:
        return []
    size = next(len(leaf) for leaf in batches.flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.ndim)
    return list(slices(size, 1, step)) if size > step and batches.can_be_cut(inputs, size) else []


def _room(device: torch.device) -> int:
    """Bytes that the output gradients of a batch may take."""
    quick = _QUICK_BYTES if device.type == "cpu" else budget(device)
    return min(quick, budget(device) // 2)


def functional_samples(
    network: Network, deviations: Iterable[Tensor], inputs: Any, *, ways: Ways | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs of the linearised network at sampled parameters, ``f(θ̂, x) + J(x) (θ − θ̂)``.

    With many outputs this takes far less than their covariance: a derivative in forward mode for each sample, about the
    cost of a forward pass, and no ``[C, C]`` matrix (Immer et al., 2021; numbers of samples do not depend on C).

    Args:
        network: The network.
        deviations: Chunks ``[n, P]`` of ``θ − θ̂`` for sampled θ.
        inputs: A batch's inputs.
        ways: What is known so far about the network's derivatives.

    Returns:
        Mean ``[B, *, C]`` and samples ``[S, B, *, C]``, which for Gaussian deviations are draws from the functional
        posterior over all inputs jointly.
    """
    linear = Linearization(network, network.vector(), inputs, Ways() if ways is None else ways)
    mean = linear.outputs.to(torch.promote_types(linear.outputs.dtype, torch.float32))
    parts = []
    for chunk in deviations:
        # Forward mode holds two or three activations of each sample at a time; outputs say how large those may be.
        each = 4 * len(chunk[0]) * chunk.element_size() + 64 * mean.numel() * mean.element_size()
        for some in slices(len(chunk), each, min(_QUICK_BYTES, budget(mean.device) // 2)):
            parts.append(linear.push(chunk[some].to(linear.outputs)).to(mean.dtype))
    return mean, mean + torch.cat(parts)


def samples_rather(mean_shape: Sequence[int], *, joint: bool = False) -> bool:
    """Whether outputs ``[B, *, C]`` are better sampled as functions, their covariance being too large.

    The sizes alone decide, so that the same seed gives the same samples whatever memory is free.
    """
    size = torch.Size(mean_shape).numel()
    return 2 * 8 * size * (size if joint else mean_shape[-1]) > _LARGE_COVARIANCE


def output_indices(outputs: Sequence[int] | Sequence[bool] | slice | Tensor, shape: torch.Size) -> Tensor:
    """Indices, a slice or a mask as indices ``[K]`` from 0 to C−1; those of each example as they are, ``[B, *, K]``."""
    n_outputs = shape[-1]
    try:
        chosen = torch.as_tensor(range(n_outputs)[outputs] if isinstance(outputs, slice) else outputs)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_outputs(outputs, n_outputs) from error
    if chosen.dtype is torch.bool and chosen.shape == (n_outputs,):
        chosen = chosen.nonzero().squeeze(-1)
    if isinstance(outputs, (list, tuple)) and len({isinstance(entry, bool) for entry in outputs}) > 1:
        raise _no_outputs(outputs, n_outputs)
    integers = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype is torch.bool)
    if not chosen.ndim or not chosen.numel() or not integers:
        raise _no_outputs(outputs, n_outputs)
    if chosen.ndim > 1 and chosen.shape[:-1] != shape[:-1]:
        raise ConfigurationError(
            "The choice of outputs for each example does not fit the network's outputs.",
            expected=f"integers {[*shape[:-1], 'K']} below {n_outputs}",
            got=f"integers {list(chosen.shape)}",
        )
    chosen = chosen.long()
    if int(chosen.min()) < -n_outputs or int(chosen.max()) >= n_outputs:
        raise _no_outputs(outputs, n_outputs)
    return chosen % n_outputs


def _no_outputs(outputs: Any, n_outputs: int) -> ConfigurationError:
    return ConfigurationError(
        "Outputs that the network does not have.",
        expected=f"indices below {n_outputs}, a slice or a bool mask of length {n_outputs}, not none of them",
        got=reprlib.repr(outputs),
    )


@dataclass
class _Directions:
    """One-hot cotangents for the chosen outputs of each position, and the quadratic forms of their gradients.

    Direction ``m K + k`` is the k-th chosen output of position m.

    Attributes:
        gradients: The batch's gradients.
        flat: Outputs ``[B, M, C]``.
        chosen: ``[K]``, or ``[B, M, K]`` where each example has its own.
    """

    gradients: Gradients
    flat: Tensor
    chosen: Tensor

    def cotangents(self, which: Tensor) -> Tensor:
        """``[V, *outputs.shape]`` for directions ``which [V]``; one memory for all examples where they share them."""
        n, positions, n_outputs = self.flat.shape
        position, number = which // self.chosen.shape[-1], which % self.chosen.shape[-1]
        row = torch.arange(len(which), device=which.device)
        if self.chosen.ndim == 1:
            units = self.flat.new_zeros(len(which), positions, n_outputs)
            units[row, position, self.chosen[number]] = 1
            units = units[:, None].expand(-1, n, -1, -1)
        else:
            units = self.flat.new_zeros(len(which), n, positions, n_outputs)
            example = torch.arange(n, device=which.device)[:, None]
            units[row, example, position, self.chosen[example, position, number]] = 1
        return units.reshape(len(which), *self.gradients.capture.outputs.shape)

    def quadratics(self, factor_sets: Sequence[Mapping[str, Factor]], mode: str) -> list[Tensor]:
        """For each set of factors ``[B, M, K, K]``, ``[B, M·K]`` (diagonal) or ``[B, M·K, B, M·K]`` (joint)."""
        each, total = self.chosen.shape[-1], self.flat.shape[1] * self.chosen.shape[-1]
        capacity = self._capacity()
        if mode == "joint":
            return self._of(torch.arange(total), factor_sets, mode)
        if mode == "diagonal":
            parts = [self._of(which, factor_sets, mode) for which in torch.arange(total).split(capacity)]
            return [torch.cat(part, 1) for part in zip(*parts, strict=True)]
        blocks = []
        if each <= capacity:
            # Several positions' outputs go backwards together and are weighed by themselves.
            for which in torch.arange(total).split(capacity // each * each):
                blocks.append(self._of(which, factor_sets, mode, each))
        else:
            for which in torch.arange(total).split(each):
                blocks.append(self._by_pairs(which, factor_sets, capacity))
        return [torch.cat(part, 1) for part in zip(*blocks, strict=True)]

    def _of(
        self, which: Tensor, factor_sets: Sequence[Mapping[str, Factor]], mode: str, block: int | None = None
    ) -> list[Tensor]:
        cotangents = self.cotangents(which.to(self.flat.device))
        whole = WHOLE in factor_sets[0]
        stacks = [self.gradients.whole(cotangents)] if whole else self.gradients.blocks(cotangents)
        return _weighed(stacks, factor_sets, mode, block)

    def _by_pairs(self, which: Tensor, factor_sets: Sequence[Mapping[str, Factor]], capacity: int) -> list[Tensor]:
        """One position's ``[B, 1, K, K]`` where the gradients of its outputs do not fit: any two chunks meet once."""
        cuts = which.split(max(1, capacity // 2))
        n, size = self.flat.shape[0], len(which)
        results = [self.flat.new_zeros(n, size, size) for _ in factor_sets]
        for first in range(len(cuts)):
            for second in range(first):
                both = torch.cat([cuts[second], cuts[first]])
                place = both - which[0]
                for result, part in zip(results, self._of(both, factor_sets, "full"), strict=True):
                    result[:, place[:, None], place] = part.to(result.dtype)
        return [result[:, None] for result in results]

    def pieces(self, diagonal: bool) -> list[slice]:
        """Slices of the examples that are better looked at one after the other; one or none where all go together."""
        needed, n = self.chosen.shape[-1], self.flat.shape[0]
        capture = self.gradients.capture
        if capture.pointwise or not batches.can_be_cut(capture.inputs, n):
            return []
        room, each = _room(self.flat.device), self._bytes_each()
        count = -(-needed // max(1, room // max(1, each)))
        if diagonal:
            count = min(count, n // _LEAST_EXAMPLES)
        count = max(count, -(-each // max(1, room)))  # one direction must fit
        return list(slices(n, 1, -(-n // max(1, min(count, n)))))

    def _capacity(self) -> int:
        """How many directions' gradients may be alive at a time."""
        each = self._bytes_each()
        require_room(each, f"the gradients of one output for {self.flat.shape[0]} examples", self.flat.device)
        return max(1, _room(self.flat.device) // max(1, each))

    def _bytes_each(self) -> int:
        """What one direction's gradients take, over all examples."""
        general = sum(layout.n_entries for layout in self.gradients.layouts if layout.rule == GENERAL)
        size = self.gradients.capture.activation_elements + self.flat.shape[0] * general
        return size * self.flat.element_size()


def _weighed(
    stacks: Iterable[tuple[Layout, ExampleGradients]],
    factor_sets: Sequence[Mapping[str, Factor]],
    mode: str,
    block: int | None = None,
) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors, summed over blocks; every block's gradients are rotated once.

    With ``block``, the directions are taken so many at a time, each with their own: ``[B, V/block, block, block]``.
    """
    totals: list[Tensor | None] = [None] * len(factor_sets)
    for layout, stack in stacks:
        rotated: dict[int, Any] = {}
        for number, factors in enumerate(factor_sets):
            if layout.key not in factors:
                raise DataError(
                    f"The network uses {layout.key!r} in another way than it did while fitting.",
                    expected=f"the blocks {', '.join(list(factors)[:4])} …",
                    got=layout.key,
                    fix="Feed inputs of the same kind as the training data.",
                )
            factor = factors[layout.key]
            if id(factor.basis) not in rotated:
                rotated[id(factor.basis)] = factor.basis.coordinates(stack)
            part = _by_block(factor, rotated[id(factor.basis)], mode, block)
            total = totals[number]
            totals[number] = part if total is None else total + part
    return [total for total in totals if total is not None]


def _by_block(factor: Factor, rotated: ExampleGradients, mode: str, block: int | None) -> Tensor:
    if block is None:
        return factor.quadratic_form(rotated, mode)
    if rotated.n_cotangents == block:
        return factor.quadratic_form(rotated, mode)[:, None]
    directions = torch.arange(rotated.n_cotangents, device=rotated.device)
    return torch.stack([factor.quadratic_form(rotated.select(own), mode) for own in directions.split(block)], 1)
