"""The Gaussian over outputs that a Gaussian over parameters induces in the linearised network, exact or from samples.

``f(x) ~ N(f(θ̂, x), J(x) Σ J(x)ᵀ)``, computed layer by layer from inputs and output gradients. The full Jacobian is only
built if one dense block covers all parameters.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances
from laplace_plus.network import batches
from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import Gradients, output_layer_gradients
from laplace_plus.network.linearization import Linearization
from laplace_plus.network.network import Network
from laplace_plus.structured import Factor
from laplace_plus.structured.gradients import MIB, slices
from laplace_plus.structured.layout import Layout

WHOLE = "all"
"""Key of a block that covers the whole parameter vector."""

_CENTRED = 64 * MIB
"""Bytes of the rows ``e_k − w`` of all outputs of a head, which are written out for a few examples at a time."""

MANY_OUTPUTS = 64
"""With more outputs than this, links that need only variances get only variances: covariances would take C times the
memory, and the links ignore them."""

MOST_EXACT = 512
"""Outputs of an example whose covariances are exact unless only the last layer is selected: each of them takes a
backward pass through the network."""

LARGE_COVARIANCE = 512 * MIB
"""Bytes that a covariance of outputs and its factor may take in float64 before outputs are sampled instead."""

LEAST_SAMPLES, MOST_SAMPLES = 5, 100
"""Samples unless a number is given: a variance then has a relative standard error ``(2/S)^½`` of 63 % to 14 %."""

_TOGETHER = 512 * MIB
"""Bytes of the samples and activations of those that are pushed together."""

Factors = Mapping[str, Factor]

Outputs = Literal["diagonal", "independent"] | Sequence[int] | Sequence[bool] | slice | Tensor | None

_OF_LINKS: dict[str, Outputs] = {"gumbel": "independent", "network": "independent", "probit": "diagonal"}


class FunctionalPosterior(NamedTuple):
    """Gaussian over the linearised network's outputs.

    Attributes:
        mean: ``[B, *, C]``; of K chosen outputs ``[B, *, K]``.
        covariance: ``[B, *, C, C]``; variances ``[B, *, C]`` if only the diagonal was asked for; with ``joint=True``
            ``[B, *, C, B, *, C]``; of K chosen outputs K in place of C.
    """

    mean: Tensor
    covariance: Tensor


class EstimatedPosterior(FunctionalPosterior):
    """A functional posterior with estimated variances; :attr:`without_each` gives those without each sample."""

    without_each: Callable[[], Tensor]


def functional_posteriors(
    network: Network,
    factor_sets: Sequence[Factors],
    inputs: Any,
    *,
    joint: bool = False,
    outputs: Outputs = None,
    differentiable: bool = False,
    expected_outputs: int | None = None,
    layouts: Sequence[Layout] = (),
    apart: bool = True,
) -> list[FunctionalPosterior]:
    """Functional posteriors under several covariances, e.g. for a grid of prior precisions, from one Jacobian pass.

    Each covariance is given by the factors of the posterior precision's blocks by layout key; ``layouts`` are these
    blocks, where they may be others than the layers. Of outputs ``[B, *, K]`` each example and position has its own K,
    such as its most probable classes; only chosen outputs are differentiated. ``apart`` allows to cut a batch where
    the gradients of all outputs of an example would take too much memory. ConfigurationError for outputs that the
    network does not have, DataError for inputs for which it takes another path than while fitting.
    """
    capture = Capture(network, inputs, differentiable=differentiable)
    shape = capture.output_shape
    require_outputs(shape, expected_outputs, inputs)
    mean = capture.outputs.to(torch.promote_types(capture.outputs.dtype, torch.float32))
    checks.finite("The network's output", mean)
    mode, chosen, centre, picked = "joint" if joint else "full", None, None, mean.view(shape).clone()
    if isinstance(outputs, str):
        wants_variances(outputs, joint)  # refuses other texts
        mode, centre = "diagonal", centring_weights(mean) if outputs == "independent" else None
    elif outputs is not None:
        chosen = output_indices(outputs, shape).to(mean.device)
        picked = picked.gather(-1, chosen.expand(*shape[:-1], -1))
    gradients = Gradients(network, capture)
    head = None
    if capture.pointwise and WHOLE not in factor_sets[0]:
        every = torch.arange(shape[-1], device=mean.device) if chosen is None else chosen
        head = output_layer_gradients(gradients, every if every.ndim == 1 else every.reshape(len(mean), -1))
    if not gradients.are_used:
        each = picked.numel() if joint else 1 if mode == "diagonal" else picked.shape[-1]
        covariances = [mean.new_zeros(picked.numel() * each)] * len(factor_sets)
    elif head is not None and head[0].key in factor_sets[0]:
        covariances = _of_head(head, factor_sets, mode, centre)
    else:
        n_outputs = picked.shape[-1]
        step = next(iter(gradients.cotangent_chunks(n_outputs))).stop
        if mode == "full" and step < n_outputs and apart and not capture.pointwise:
            again = {"differentiable": differentiable, "layouts": layouts, "outputs": outputs}
            found = _by_parts(network, factor_sets, capture.inputs, picked, -(-n_outputs // step), chosen, again)
            if found is not None:
                return found
        covariances = _of_cotangents(gradients, layouts, mean, chosen, centre, factor_sets, mode)
    final = (*picked.shape, *picked.shape) if joint else picked.shape if mode == "diagonal" else (*picked.shape, -1)
    results = []
    for covariance in covariances:
        own = covariance.reshape(final).to(mean.dtype)
        checks.finite("The functional covariance", own)
        own = own if centre is None else independent_variances(picked, own)
        results.append(FunctionalPosterior(picked, own))
    return results


def _by_parts(
    network: Network,
    factor_sets: Sequence[Factors],
    inputs: Any,
    picked: Tensor,
    parts: int,
    chosen: Tensor | None,
    options: dict[str, Any],
) -> list[FunctionalPosterior] | None:
    """The posteriors of a batch in parts; None where it has to stay whole, as examples depend on each other.

    Covariances of an example's outputs need the gradients of all of them at once, for as many examples as fit.
    """
    n = len(picked)
    if n < 2 or not batches.can_be_cut(inputs, n):  # noqa: PLR2004
        return None
    found = []
    for part in slices(n, 1, max(1, n // parts)):
        own = options if chosen is None or chosen.ndim == 1 else options | {"outputs": chosen[part]}
        found.append(functional_posteriors(network, factor_sets, batches.cut(inputs, part), apart=False, **own))
    joined = [FunctionalPosterior(*map(torch.cat, zip(*one, strict=True))) for one in zip(*found, strict=True)]
    tolerance = torch.finfo(picked.dtype).eps ** 0.5 * picked.detach().abs().max().clamp(min=1e-30)
    return joined if bool(((joined[0].mean - picked).abs() <= tolerance).all()) else None


def _of_head(
    head: tuple[Layout, Any], factor_sets: Sequence[Factors], mode: str, centre: Tensor | None
) -> list[Tensor]:
    """``J Σ Jᵀ`` of a linear output layer, whose gradients are known without one cotangent for each output."""
    layout, rows = head
    if centre is None:
        return _quadratic_forms([head], factor_sets, mode)
    parts = []
    each = rows.n_outputs**2 * rows.features.element_size()
    for part in slices(len(rows.features), each, _CENTRED, rows.device):
        own = replace(rows, features=rows.features[part], centre=centre.flatten(0, -2)[part].to(rows.dtype))
        parts.append(_quadratic_forms([(layout, own)], factor_sets, mode))
    return [torch.cat(some) for some in zip(*parts, strict=True)]


def _of_cotangents(
    gradients: Gradients,
    layouts: Sequence[Layout],
    outputs: Tensor,
    chosen: Tensor | None,
    centre: Tensor | None,
    factor_sets: Sequence[Factors],
    mode: str,
) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors by one-hot cotangents of outputs ``[B, *, C]``, a few at a time.

    Of M positions they have K outputs each: all, or those ``chosen``, ``[K]`` or ``[B, *, K]``. From each the mean by
    the weights ``centre [B, *, C]`` is taken. Shapes are ``[B, M, K, K]`` (full), ``[B, M·K]`` (diagonal) or
    ``[B, M·K, B, M·K]`` (joint).
    """
    n, n_positions, size = len(outputs), outputs.shape[1:-1].numel(), outputs.shape[-1]
    table = torch.arange(size) if chosen is None else chosen.cpu()
    each = table.shape[-1]
    table = table.expand(1, n_positions, -1) if table.ndim == 1 else table.reshape(n, n_positions, each)
    numbers = torch.arange(n_positions * each)
    step = len(numbers) if mode == "joint" else next(iter(gradients.cotangent_chunks(len(numbers)))).stop
    step = max(1, step // each) * each if mode == "full" else step  # whole positions
    chunks = []
    for which in numbers.split(step):
        rows, position = torch.arange(len(which)), which // each
        units = outputs.new_zeros(len(which), len(table), n_positions, size)
        units[rows[:, None], torch.arange(len(table)), position[:, None], table[:, position, which % each].T] = 1
        units = units.expand(-1, n, -1, -1)  # all examples share one memory
        if centre is not None:
            units = units.clone()
            units[rows, :, position] -= centre.reshape(n, n_positions, size)[:, position].transpose(0, 1)
        cotangents = units.reshape(len(which), *outputs.shape)
        stacks = [gradients.whole(cotangents)] if WHOLE in factor_sets[0] else gradients.blocks(cotangents, layouts)
        chunks.append(_quadratic_forms(stacks, factor_sets, mode, each if mode == "full" else None))
    return chunks[0] if len(chunks) == 1 else [torch.cat(part, 1) for part in zip(*chunks, strict=True)]


def _quadratic_forms(stacks: Any, factor_sets: Sequence[Factors], mode: str, block: int | None = None) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors, summed over the layouts' gradients; one change of basis for each basis.

    With ``block``, only products within each group of so many cotangents: ``[B, V/block, block, block]``.
    """
    totals: list[Any] = [0] * len(factor_sets)
    for layout, stack in stacks:
        coordinates: dict[int, Any] = {}
        for number, factors in enumerate(factor_sets):
            if layout.key not in factors:
                what = f"The network uses {layout.key!r} in another way than it did while fitting."
                expected = f"the blocks {', '.join(list(factors)[:4])} …"
                raise DataError(what, expected=expected, fix="Feed inputs of the same kind as the training data.")
            factor = factors[layout.key]
            own = coordinates.setdefault(id(factor.basis), None) or factor.basis.coordinates(stack)
            coordinates[id(factor.basis)] = own
            if block is None or own.n_cotangents == block:
                part = factor.quadratic_form(own, mode)
                part = part if block is None else part[:, None]
            else:
                groups = torch.arange(own.n_cotangents, device=own.device).split(block)
                part = torch.stack([factor.quadratic_form(own.select(group), mode) for group in groups], 1)
            totals[number] = totals[number] + part
    return totals


def is_sampled(network: Network, x: Any, *, variances: bool = False, joint: bool = False) -> bool:
    """Whether outputs for x are sampled rather than their covariance (or ``variances``) being computed.

    That is where an example has more than :data:`MOST_EXACT` outputs and more than the last layer is selected, or where
    the covariance is larger than :data:`LARGE_COVARIANCE`.
    """
    shape = network.forward(x).shape
    if len(network.layers) > 1 and shape[1:].numel() > MOST_EXACT:
        return True
    return not variances and 16 * shape.numel() * (shape.numel() if joint else shape[-1]) > LARGE_COVARIANCE


def n_samples_for(n_parameters: int) -> int:
    """How many samples estimate variances: as many as hold 2²⁶ numbers, from 5 to 100. Large networks take longer."""
    return max(LEAST_SAMPLES, min(MOST_SAMPLES, 2**26 // n_parameters))


def pushed(
    network: Network, deviations: Tensor | Iterable[Tensor], inputs: Any, *, n_outputs: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs ``f(θ̂, x)``, ``[B, *, C]``, and ``J(x) v``, ``[k, B, *, C]``, for deviations v, ``[k, P]`` or chunks.

    Each deviation takes one forward-mode derivative, about the cost of a forward pass. With many outputs that is far
    less than their covariance, and takes no ``[C, C]`` matrix (Immer et al., 2021). Raises :class:`DataError` for no
    examples, or another number of outputs than ``n_outputs``.
    """
    linear, outputs = Linearization(network, network.vector(), inputs), network.forward(inputs).to(network.dtype)
    require_outputs(outputs.shape, n_outputs, inputs)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    parts = []
    for chunk in [deviations] if isinstance(deviations, Tensor) else deviations:
        # Forward mode holds two or three activations of each sample at a time; 64 times the outputs are typical.
        each = 4 * chunk[0].numel() * chunk.element_size() + 64 * outputs.numel() * outputs.element_size()
        for some in slices(len(chunk), each, _TOGETHER):
            parts.append(linear.push(chunk[some].to(outputs)).to(wide))
    return outputs.to(wide), torch.cat(parts)


def moments(mean: Tensor, deviations: Tensor, *, joint: bool, outputs: Outputs) -> FunctionalPosterior:
    """Mean and covariance ``1/k Σ d dᵀ`` of deviations d ``[k, B, *, C]`` from a known mean ``[B, *, C]``.

    Options and errors as for :func:`functional_posteriors`.
    """
    checks.finite("The network's output", mean)
    checks.finite("A sample of the functional posterior", deviations)
    variances = wants_variances(outputs, joint)
    deviations = deviations if outputs is None or variances else torch.stack([pick(one, outputs) for one in deviations])
    mean, scaled = pick(mean, outputs), deviations / len(deviations) ** 0.5
    if variances:
        if outputs == "independent":
            scaled = scaled - (scaled * centring_weights(mean)).sum(-1, keepdim=True)
        squares, n = scaled.square(), len(scaled)

        def estimate(sums: Tensor) -> Tensor:
            return independent_variances(mean.expand_as(sums), sums) if outputs == "independent" else sums

        found = EstimatedPosterior(mean, estimate(squares.sum(0)))
        found.without_each = lambda: estimate((squares.sum(0) - squares) * (n / max(1, n - 1)))
        return found
    if joint:
        flat = scaled.flatten(1)
        return FunctionalPosterior(mean, (flat.mT @ flat).view(*mean.shape, *mean.shape))
    return FunctionalPosterior(mean, torch.einsum("s...c,s...d->...cd", scaled, scaled))


def outputs_for(link: str, n_outputs: int) -> Outputs:
    """What a link needs of so many outputs: variances where those do, or else all covariances."""
    return _OF_LINKS.get(link) if n_outputs > MANY_OUTPUTS else None


def require_outputs(shape: torch.Size, expected: int | None, inputs: Any) -> None:
    """Raise :class:`DataError` for no examples, or another number of outputs, as of an example without batch axis."""
    if not shape.numel() or expected not in (None, shape[-1]):
        raise DataError(
            "There is nothing to predict, or the network gives another number of outputs than while fitting.",
            expected=f"at least one example, with {expected or 'some'} outputs",
            got=f"outputs of shape {list(shape)} for inputs {checks.describe(inputs)}",
            fix="Pass a batch: x[None] for one input.",
        )


def wants_variances(outputs: Outputs, joint: bool) -> bool:
    """Whether a choice of outputs is of variances only; refuses other texts, and these with ``joint``."""
    if isinstance(outputs, str) and (outputs not in ("diagonal", "independent") or joint):
        expected = 'None, "diagonal", "independent" (neither with joint=True) or indices'
        raise ConfigurationError("Unknown choice of outputs.", expected=expected, got=f"{outputs!r}, joint={joint}")
    return isinstance(outputs, str)


def output_indices(outputs: Sequence[int] | Sequence[bool] | slice | Tensor, shape: torch.Size) -> Tensor:
    """A choice of outputs as indices from 0 to C−1: ``[K]``, or ``[B, *, K]`` where each example has its own.

    ConfigurationError for anything else: an index that is out of range would end a process on a GPU.
    """
    n_outputs = shape[-1]
    chosen = torch.as_tensor(range(n_outputs)[outputs] if isinstance(outputs, slice) else outputs)
    if chosen.dtype is torch.bool and chosen.shape == (n_outputs,):
        chosen = chosen.nonzero().squeeze(-1)
    integers = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype is torch.bool)
    fits = integers and chosen.numel() > 0 and (chosen.ndim == 1 or chosen.shape[:-1] == shape[:-1])
    if not fits or not -n_outputs <= int(chosen.min()) <= int(chosen.max()) < n_outputs:
        what = "The network does not have these outputs."
        expected = f"indices below {n_outputs}, a slice or a bool mask of length {n_outputs}, not empty; or integers "
        expected += f"{[*shape[:-1], 'K']} below {n_outputs}, for each example"
        raise ConfigurationError(what, expected=expected, got=reprlib.repr(outputs))
    return chosen.long() % n_outputs


def pick(values: Tensor, outputs: Outputs) -> Tensor:
    """The chosen ones of ``[B, *, C]`` values, ``[B, *, K]``; all of them where variances or everything is wanted."""
    if outputs is None or isinstance(outputs, str):
        return values
    chosen = output_indices(outputs, values.shape).to(values.device)
    return values.gather(-1, chosen.expand(*values.shape[:-1], chosen.shape[-1]))
