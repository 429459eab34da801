"""Checks of outputs and targets that all likelihoods share."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.errors import LabelError, NonFiniteError, OutputError


def widen(values: Tensor) -> Tensor:
    """Half precision to ``float32``; every other dtype as it is.

    Probabilities and squared errors lose most of their digits in ``bfloat16`` and ``float16``.
    """
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def shape_text(shape: tuple[int, ...] | torch.Size) -> str:
    """A shape as text for error messages, e.g. ``[8, 3]``."""
    return str(list(shape))


def check_outputs(outputs: Tensor) -> None:
    """Refuse arranged outputs that are not a ``[B, *, C]`` floating tensor of finite numbers.

    Raises:
        OutputError: If the shape or the dtype is wrong.
        NonFiniteError: If an entry is NaN or infinite.
    """
    if outputs.dim() < 2 or outputs.shape[-1] == 0 or not outputs.is_floating_point():
        raise OutputError(
            "The network's outputs cannot be used.",
            expected="a floating tensor [B, *, C] with C >= 1",
            got=f"{outputs.dtype} of shape {shape_text(outputs.shape)}",
            fix="Return one row of outputs for every example.",
        )
    if not bool(torch.isfinite(outputs).all()):
        check_finite(outputs, "The network's outputs")


def check_finite(values: Tensor, what: str) -> None:
    """Refuse NaN and infinity; ``what`` starts the message of the :class:`NonFiniteError`."""
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        raise NonFiniteError(
            f"{what} hold NaN or infinity.",
            expected="finite numbers",
            got=f"{int((~finite).sum())} of {values.numel()} entries that are not",
            fix="Check the inputs and the trained weights; half precision may have overflowed.",
        )


def check_batch(outputs: Tensor, targets: object) -> None:
    """Refuse invalid outputs (see :func:`check_outputs`) and targets that are not a tensor (``LabelError``)."""
    check_outputs(outputs)
    if not isinstance(targets, Tensor):
        raise LabelError(
            "The targets are not a tensor.",
            expected="a torch.Tensor",
            got=type(targets).__name__,
            fix="Let the loader collate the targets into one tensor.",
        )


def refuse_targets(wrong: Tensor, targets: Tensor, message: str, *, expected: str, fix: str) -> None:
    """Raise a ``LabelError`` if any target is wrong; it names the first one and counts them."""
    if bool(wrong.any()):
        got = f"{targets[wrong][0].item()} ({int(wrong.sum())} of {targets.numel()} targets)"
        raise LabelError(message, expected=expected, got=got, fix=fix)


def flattened(outputs: Tensor, targets: Tensor, output_axis: int, size: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``Likelihood.rows`` for ``size`` real numbers (by default C) per observation, none of them ignored."""
    size = size or outputs.shape[-1]
    flat = widen(outputs).reshape(-1, outputs.shape[-1])
    aligned = align_targets(outputs, targets, size=size, output_axis=output_axis)
    return flat, aligned.reshape(-1, size).to(flat.dtype), torch.ones_like(flat[:, 0])


def align_targets(outputs: Tensor, targets: Tensor, *, output_axis: int, size: int = 0) -> Tensor:
    """Bring targets with ``size`` numbers (by default C) per observation to ``[B, *, size]``.

    Nothing is broadcast: ``[B]`` only means ``[B, 1]``, and only if ``size`` is 1.

    Args:
        outputs: Arranged outputs ``[B, *, C]``.
        targets: ``[B, *, size]``, with the last axis at ``output_axis`` if that is not ``-1``, or ``[B, *]`` if
            ``size`` is 1.
        output_axis: The axis of the network's outputs.
        size: Numbers per observation.

    Raises:
        LabelError: If the shapes do not fit.
    """
    size = size or outputs.shape[-1]
    observations = outputs.shape[:-1]
    if size == 1 and targets.shape == observations:
        return targets.unsqueeze(-1)
    if targets.dim() == outputs.dim():
        moved = targets.movedim(output_axis, -1)
        if moved.shape == (*observations, size):
            return moved
    wanted = shape_text(torch.empty(*observations, size, device="meta").movedim(-1, output_axis).shape)
    raise LabelError(
        "The targets do not have the shape of the outputs.",
        expected=wanted + (f" or {shape_text(observations)}" if size == 1 else ""),
        got=shape_text(targets.shape),
        fix="Reshape the targets; nothing is broadcast, because that silently pairs every target with every output",
    )
