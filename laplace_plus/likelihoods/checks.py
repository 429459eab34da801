"""What every likelihood asks of a network's outputs and of the targets, before any mathematics."""

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
    """A shape as it is written in an error message, e.g. ``[8, 3]``."""
    return str(list(shape))


def check_outputs(outputs: Tensor) -> None:
    """Refuse arranged outputs that are no ``[B, *, C]`` floating tensor of finite numbers.

    Args:
        outputs: What ``Likelihood.arrange`` returned.

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
    check_finite(outputs, "The network's outputs")


def check_finite(values: Tensor, what: str) -> None:
    """Refuse NaN and infinity.

    Args:
        values: Any floating tensor.
        what: The name of it, which starts the message.

    Raises:
        NonFiniteError: If an entry is NaN or infinite.
    """
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        raise NonFiniteError(
            f"{what} hold NaN or infinity.",
            expected="finite numbers",
            got=f"{int((~finite).sum())} of {values.numel()} entries that are not",
            fix="Check the inputs and the trained weights; half precision may have overflowed",
        )


def check_tensor(targets: object) -> None:
    """Refuse targets that are no tensor.

    Raises:
        LabelError: If ``targets`` is anything but a tensor.
    """
    if not isinstance(targets, Tensor):
        raise LabelError(
            "The targets are not a tensor.",
            expected="a torch.Tensor",
            got=type(targets).__name__,
            fix="Let the loader collate the targets into one tensor",
        )


def align_targets(outputs: Tensor, targets: Tensor, *, size: int, output_axis: int) -> Tensor:
    """Bring targets that hold ``size`` numbers per row to ``[B, *, size]``.

    Nothing is broadcast: ``[B]`` is only understood as ``[B, 1]``, and only if one number per row is wanted.

    Args:
        outputs: Arranged outputs ``[B, *, C]``.
        targets: ``[B, *, size]``, with the last axis at ``output_axis`` if that is not ``-1``, or ``[B, *]`` if
            ``size`` is 1.
        size: How many numbers there are to a row.
        output_axis: Where the network keeps its outputs.

    Raises:
        LabelError: If the shapes do not fit.
    """
    rows = outputs.shape[:-1]
    if size == 1 and targets.shape == rows:
        return targets.unsqueeze(-1)
    if targets.dim() == outputs.dim():
        moved = targets.movedim(output_axis, -1)
        if moved.shape == (*rows, size):
            return moved
    wanted = shape_text(torch.empty(*rows, size, device="meta").movedim(-1, output_axis).shape)
    raise LabelError(
        "The targets do not have the shape of the outputs.",
        expected=wanted + (f" or {shape_text(rows)}" if size == 1 else ""),
        got=shape_text(targets.shape),
        fix="Reshape the targets; nothing is broadcast, because that silently pairs every target with every output",
    )
