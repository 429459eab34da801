"""What a parametric call computes.

A :class:`Call` knows in which ``[G, o, i]`` array the weights lie and how input and output gradient make the stack of
per-example gradients of that array. The bias is the last column: its input is the constant one, so that weight and bias
share a Kronecker factor with their covariance kept. Calls are made by :mod:`laplace_plus.curvature.rules`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.structured.gradients import DenseGradients, EmbeddingGradients, ExampleGradients, OuterGradients


@dataclass(frozen=True)
class ParameterRows:
    """A parameter, or some consecutive rows of one.

    Attributes:
        name: The parameter's name.
        count: Number of rows, or None for all.
        start: The first row.
    """

    name: str
    count: int | None
    start: int

    def slice_of(self, index: Tensor) -> Tensor:
        """The rows of a tensor that is shaped like the parameter."""
        return index if self.count is None else index[self.start : self.start + self.count]


@dataclass
class Call(ABC):
    """One use of a weight and/or a bias.

    Attributes:
        weight: The weight, or None where it is not among the tracked parameters.
        bias: The bias, likewise.
        value: The input that multiplies the weight.
        feature_axis: Axis of the output along which the features lie.
        example_axes: Axes of the output that may run over examples.
        pointwise: Whether each position of the output depends on the input at one position only, so that every position
            may be an example of its own.
        packed: Whether several projections lie stacked in the weight (attention).
        version: How often the input had been written to when the call was made.
    """

    weight: ParameterRows | None
    bias: ParameterRows | None
    value: Tensor
    feature_axis: int = -1
    example_axes: tuple[int, ...] = (0,)
    pointwise: bool = False
    packed: bool = False
    version: int = 0

    @property
    def rows(self) -> tuple[ParameterRows, ...]:
        """The parameters that the call uses, the weight first."""
        return tuple(rows for rows in (self.weight, self.bias) if rows is not None)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What :meth:`index` depends on, besides the network."""
        return (type(self).__name__, self.rows, self.packed)

    def restrict(self, wanted: frozenset[str]) -> None:
        """Forget the parameters that are not wanted."""
        if self.weight is not None and self.weight.name not in wanted:
            self.weight = None
        if self.bias is not None and self.bias.name not in wanted:
            self.bias = None

    @abstractmethod
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        """Arrange per-parameter index tensors (shaped like the parameters) as the array ``[G, o, i]``."""

    @abstractmethod
    def stack(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        """Per-example gradients of the ``[G, o, i]`` array.

        Args:
            gradient: ``[V, *output shape]``.
            n_examples: B.
            where: Where the examples lie in the output.
        """

    def _width(self, inputs: int) -> int:
        """Number of columns that :meth:`_columns` makes of so many inputs."""
        return 1 if self.weight is None else inputs + (self.bias is not None)

    def _columns(self, rows: Tensor) -> Tensor:
        """Inputs ``[..., i]`` with the column of ones that is the bias's input."""
        ones = rows.new_ones(*rows.shape[:-1], 1)
        if self.weight is None:
            return ones
        return rows if self.bias is None else torch.cat([rows, ones], -1)


class ExampleAxis(NamedTuple):
    """Where the examples of a batch lie in a call's output.

    Attributes:
        axis: The axis; its size is a multiple of B.
        innermost: Whether examples vary fastest along it (``[T·B]``, as in attention) or slowest (``[B·T]``).
    """

    axis: int
    innermost: bool


def by_example(values: Tensor, n_examples: int, where: ExampleAxis, lead: int = 0) -> Tensor:
    """Bring the examples to the front: ``[B, size/B, …]`` (behind ``lead`` leading axes)."""
    values = values.movedim(where.axis + lead, lead)
    if where.innermost:
        return values.unflatten(lead, (-1, n_examples)).transpose(lead, lead + 1)
    return values.unflatten(lead, (n_examples, -1))


@dataclass
class LinearCall(Call):
    """``y = x Wᵀ + b``, with ``transposed`` for weights stored as ``[in, out]``."""

    transposed: bool = False
    weight_shape: torch.Size = torch.Size()

    @property
    def groups(self) -> int:
        """Number of projections that are packed in the weight: 3 for attention's query, key and value."""
        return max(1, self.weight_shape[0] // self.weight_shape[1]) if self.packed else 1

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        parts = []
        if self.weight is not None:
            weight = self.weight.slice_of(positions[self.weight.name])
            parts.append(weight.T if self.transposed else weight)
        if self.bias is not None:
            parts.append(self.bias.slice_of(positions[self.bias.name])[:, None])
        return torch.cat(parts, 1).unflatten(0, (self.groups, -1))

    @override
    def stack(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value = by_example(self.value, n_examples, where).flatten(1, -2)  # [B, S, i]
        left = by_example(gradient, n_examples, where, lead=1).flatten(2, -2)  # [V, B, S, O]
        return OuterGradients(
            value,
            left.unflatten(-1, (self.groups, -1)),
            expand_right=lambda x: self._columns(x)[:, :, None],
            right_sizes=(value.shape[1], 1, self._width(value.shape[2])),
        )


@dataclass
class ConvolutionCall(Call):
    """A convolution in 1, 2 or 3 dimensions, as a linear map of patches."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        parts = []
        if self.weight is not None:
            parts.append(positions[self.weight.name].flatten(1).unflatten(0, (self.groups, -1)))
        if self.bias is not None:
            parts.append(positions[self.bias.name][:, None].unflatten(0, (self.groups, -1)))
        return torch.cat(parts, 2)

    @override
    def stack(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, left = by_example(self.value, n_examples, where), by_example(gradient, n_examples, where, lead=1)
        patch = value.shape[2] // self.groups * math.prod(self.kernel)
        return OuterGradients(
            value,
            left,
            expand_right=self._patches,
            expand_left=self._positions,
            add_right_products=self._add_patch_products if self.weight is not None else None,
            right_sizes=(left.shape[2] * left.shape[4:].numel(), self.groups, self._width(patch)),
        )

    def _add_patch_products(self, value: Tensor, total: Tensor) -> None:
        kernels.convolution_factor(
            value.flatten(0, 1),
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias is not None,
            total=total,
        )

    def _patches(self, value: Tensor) -> Tensor:
        """Inputs ``[b, r, C, *space]`` as rows ``[b, r·S, G, C/G·k]``, plus the bias's column."""
        n, dimensions = value.shape[0], len(self.kernel)
        value = F.pad(value.flatten(0, 1), [amount for both in reversed(self.padding) for amount in both])
        for d in range(dimensions):
            extent = (self.kernel[d] - 1) * self.dilation[d] + 1
            value = value.unfold(2 + d, extent, self.stride[d])[..., :: self.dilation[d]]
        value = value.unflatten(1, (self.groups, -1))  # [br, G, C/G, *out, *k]
        kernel_axes = tuple(range(3 + dimensions, 3 + 2 * dimensions))
        value = value.movedim(kernel_axes, tuple(range(3, 3 + dimensions)))  # [br, G, C/G, *k, *out]
        lead, width, out = value.shape[:2], value.shape[2 : 3 + dimensions].numel(), value.shape[3 + dimensions :]
        if self.weight is None:
            columns = value.new_ones(*lead, 1, *out)
        else:
            # Position by position in memory, as the input has them: rows would be gathered entry by entry.
            columns = value.new_empty(*lead, width + (self.bias is not None), *out)
            columns[:, :, :width].unflatten(2, value.shape[2 : 3 + dimensions]).copy_(value)
            columns[:, :, width:] = 1  # the bias's input
        rows = columns.flatten(3).movedim(3, 1)  # [br, S, G, i]
        return rows.unflatten(0, (n, -1)).flatten(1, 2)

    def _positions(self, gradient: Tensor) -> Tensor:
        """Output gradients ``[V, b, r, O, *out]`` as rows ``[V, b, r·S, G, O/G]``."""
        return gradient.flatten(4).movedim(3, 4).flatten(2, 3).unflatten(-1, (self.groups, -1))


@dataclass
class EmbeddingCall(Call):
    """A table look-up: the weight's rows are the columns of the ``[1, o, i]`` array, one for each token."""

    n_rows: int = 0
    padding: int | None = None

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        assert self.weight is not None
        return positions[self.weight.name].T[None]

    @override
    def stack(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        index = by_example(self.value, n_examples, where).flatten(1)
        left = by_example(gradient, n_examples, where, lead=1).flatten(2, -2)
        if self.padding is not None:  # the padding row is never updated
            left = left * (index != self.padding)[None, :, :, None]
        return EmbeddingGradients(index, left, self.n_rows)


@dataclass
class NormalisationCall(Call):
    """Scale and shift after a normalisation, ``y = γ ∘ x̂ + β``: one 1 × 2 matrix for each channel.

    ``value`` is the normalised input x̂, taken before scale and shift (dividing the output by γ would fail at γ = 0).

    Attributes:
        channels_last: How many trailing axes of the output run over channels; 0 where it is axis 1.
    """

    channels_last: int = 0

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return torch.stack([positions[rows.name].flatten() for rows in self.rows], -1)[:, None]

    @override
    def stack(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value = by_example(self.value, n_examples, where)  # [B, r, …]
        gradient = by_example(gradient, n_examples, where, lead=1)
        if self.channels_last:
            value, gradient = value.flatten(-self.channels_last), gradient.flatten(-self.channels_last)
        else:
            value, gradient = value.movedim(2, -1), gradient.movedim(3, -1)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        value, gradient = value.flatten(1, -2).to(dtype), gradient.flatten(2, -2).to(dtype)  # [B, S, C], [V, B, S, C]
        parts = []
        if self.weight is not None:
            parts.append((gradient * value).sum(2))
        if self.bias is not None:
            parts.append(gradient.sum(2))
        return DenseGradients(torch.stack(parts, -1)[:, :, :, None])


@dataclass
class BroadcastCall(Call):
    """A parameter that enters every example alike: added or multiplied to the input, or expanded over the batch.

    Class tokens, tables of positions and layer scales are used so. With ``value`` the parameter multiplies it, so that
    an example's gradient is the output gradient times the value, summed over the axes along which it was broadcast.

    Attributes:
        scales: Whether the parameter multiplies ``value``.
        shape: The parameter's shape.
    """

    scales: bool = False
    shape: torch.Size = torch.Size()

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        assert self.weight is not None
        return positions[self.weight.name].flatten()[None, None]

    @override
    def stack(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        gradient = gradient.to(dtype) * self.value if self.scales else gradient.to(dtype)
        values = by_example(gradient, n_examples, where, lead=1).sum(2)  # [V, B, …], without the examples' own axis
        values = values.unsqueeze(2 + where.axis)
        missing = values.ndim - 2 - len(self.shape)
        values = values.sum(tuple(range(2, 2 + missing))) if missing else values
        spread = [2 + d for d, size in enumerate(self.shape) if size == 1 and values.shape[2 + d] != 1]
        values = values.sum(spread, keepdim=True) if spread else values
        return DenseGradients(values.reshape(*values.shape[:2], 1, 1, -1))
