"""The Gaussian over outputs that a Gaussian over parameters induces in the linearised network.

``f(x) ~ N(f(θ̂, x), J(x) Σ J(x)ᵀ)``, computed layer by layer from inputs and output gradients. The Jacobian itself is
only built where one dense block covers all parameters.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from laplace_plus import batches
from laplace_plus.curvature.capture import Capture
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.errors import ConfigurationError, DataError
from laplace_plus.linalg import Factor
from laplace_plus.network import Network

WHOLE = "all"
"""Key of a block that covers the whole parameter vector."""

Outputs = Literal["diagonal"] | Sequence[int] | Sequence[bool] | slice | Tensor | None


class FunctionalPosterior(NamedTuple):
    """Gaussian over the linearised network's outputs.

    Attributes:
        mean: ``[B, *, C]``.
        covariance: ``[B, *, C, C]``; variances ``[B, *, C]`` if only the diagonal was asked for; with ``joint=True``
            ``[B, *, C, B, *, C]``.
    """

    mean: Tensor
    covariance: Tensor


def functional_posteriors(
    network: Network,
    factor_sets: Sequence[dict[str, Factor]],
    inputs: Any,
    *,
    joint: bool = False,
    outputs: Outputs = None,
    differentiable: bool = False,
    expected_outputs: int | None = None,
) -> list[FunctionalPosterior]:
    """Functional posteriors under several covariances, e.g. on a grid of prior precisions, from one Jacobian pass.

    Args:
        network: The network.
        factor_sets: For each covariance, the factors of the posterior precision's blocks by layout key.
        inputs: A batch's inputs.
        joint: Whether to give the covariance across inputs too.
        outputs: None for all outputs, ``"diagonal"`` for variances only, or some outputs: their indices, a slice, or a
            bool mask ``[C]``.
        differentiable: Whether gradients flow to the inputs.
        expected_outputs: C, where it is known.

    Raises:
        ConfigurationError: Outputs that the network does not have.
        DataError: Inputs on which the network takes another path than while fitting.
    """
    capture = Capture(network, inputs, differentiable=differentiable)
    if expected_outputs not in (None, capture.output_shape[-1]):
        raise DataError(
            "The network gives another number of outputs than it did while fitting.",
            expected=f"{expected_outputs} outputs for each example",
            got=f"outputs of shape {tuple(capture.output_shape)} for inputs {batches.describe(inputs)}",
            fix="Pass a batch of inputs: x[None] for a single one.",
        )
    gradients = Gradients(network, capture)
    mean = capture.outputs.to(torch.promote_types(capture.outputs.dtype, torch.float32))
    shape = capture.output_shape
    n_outputs = shape[-1]
    diagonal = isinstance(outputs, str)
    if diagonal and (outputs != "diagonal" or joint):
        raise ConfigurationError(
            "Unknown choice of outputs.",
            expected='None, "diagonal" (not with joint=True) or indices',
            got=f"{outputs!r} with joint={joint}",
        )
    chosen = torch.arange(n_outputs) if outputs is None or isinstance(outputs, str) else _indices(outputs, n_outputs)
    mode = "joint" if joint else "diagonal" if diagonal else "full"
    flat = mean.flatten(1, -2) if mean.ndim > 2 else mean[:, None]  # [B, M, C]
    if joint:
        pairs = [(m, int(c)) for m in range(flat.shape[1]) for c in chosen]
        covariances = _quadratics(gradients, factor_sets, _unit(flat, pairs).view(-1, *mean.shape), mode)
    else:
        by_position: list[list[Tensor]] = [[] for _ in factor_sets]
        for position in range(flat.shape[1]):
            pairs = [(position, int(c)) for c in chosen]
            cotangents = _unit(flat, pairs).view(-1, *mean.shape)
            # Variances need no two directions at once, covariances need all of a position's.
            chunks = list(gradients.direction_chunks(len(pairs))) if diagonal else [slice(0, len(pairs))]
            parts = [_quadratics(gradients, factor_sets, cotangents[chunk], mode) for chunk in chunks]
            for number in range(len(factor_sets)):
                by_position[number].append(torch.cat([part[number] for part in parts], -1))
        covariances = [torch.stack(blocks, 1) for blocks in by_position]  # [B, M, C(, C)]
    kept = (*shape[:-1], len(chosen))
    final = (*kept, *kept) if joint else kept if diagonal else (*kept, len(chosen))
    chosen = chosen.to(mean.device)
    return [FunctionalPosterior(mean.view(shape)[..., chosen], c.reshape(final).to(mean.dtype)) for c in covariances]


def _indices(outputs: Sequence[int] | Sequence[bool] | slice | Tensor, n_outputs: int) -> Tensor:
    """Indices, a slice or a mask as indices ``[K]`` from 0 to C−1."""
    try:
        chosen = torch.as_tensor(range(n_outputs)[outputs] if isinstance(outputs, slice) else outputs)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_outputs(outputs, n_outputs) from error
    if chosen.dtype is torch.bool and chosen.shape == (n_outputs,):
        chosen = chosen.nonzero().squeeze(-1)
    integers = not (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype is torch.bool)
    if chosen.ndim != 1 or not len(chosen) or not integers:
        raise _no_outputs(outputs, n_outputs)
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


def _unit(flat: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """One-hot cotangents ``[V, B, M, C]`` for pairs of a position and an output, one memory for all examples."""
    cotangents = torch.zeros(len(pairs), *flat.shape[1:], dtype=flat.dtype, device=flat.device)
    for direction, (position, output) in enumerate(pairs):
        cotangents[direction, position, output] = 1
    return cotangents[:, None].expand(-1, flat.shape[0], -1, -1)


def _quadratics(
    gradients: Gradients, factor_sets: Sequence[dict[str, Factor]], cotangents: Tensor, mode: str
) -> list[Tensor]:
    """``J Σ Jᵀ`` for each set of factors, summed over blocks; every block's gradients are rotated once."""
    totals: list[Tensor | None] = [None] * len(factor_sets)
    whole = WHOLE in factor_sets[0]
    for layout, stack in [gradients.whole(cotangents)] if whole else gradients.stacks(cotangents):
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
                rotated[id(factor.basis)] = factor.basis.rotate(stack)
            part = factor.weigh(rotated[id(factor.basis)], mode)
            total = totals[number]
            totals[number] = part if total is None else total + part
    return [total for total in totals if total is not None]
