"""Uses of parameters, and how they give per-example gradients.

A *call* is of a function that the network calls with a parameter; :mod:`~laplace_plus.network.rules` finds it. It knows
which ``[G, o, i]`` array its parameters form, and how its input and its output gradient give the per-example gradients
of that array. The bias is the last column: its input is the constant one, so that weight and bias share a Kronecker
factor with their covariance kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.structured.gradients import DenseGradients, ExampleGradients, OuterGradients
from laplace_plus.structured.layout import CHANNELS, EMBEDDING, GENERAL, MATRIX
from laplace_plus.structured.one_hot import EmbeddingGradients


class ParameterRows(NamedTuple):
    """The parameter of that name, or ``count`` consecutive rows of it from ``start`` on; None for all."""

    name: str
    count: int | None  # type: ignore[assignment]
    start: int


class ExampleAxis(NamedTuple):
    """The axis of a call's output that runs over a batch's examples; its size is a multiple of B.

    If ``innermost``, examples vary fastest along it (``[T·B]``, as in attention), otherwise slowest (``[B·T]``).
    """

    axis: int
    innermost: bool


FIRST = ExampleAxis(0, False)
"""Where most networks have their examples."""


def by_example(values: Tensor, n_examples: int, where: ExampleAxis, lead: int = 0) -> Tensor:
    """Bring the examples to the front: ``[B, size/B, …]`` (behind ``lead`` leading axes)."""
    values = values.movedim(where.axis + lead, lead)
    if where.innermost:
        return values.unflatten(lead, (-1, n_examples)).transpose(lead, lead + 1)
    return values.unflatten(lead, (n_examples, -1))


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
        rule: How structures treat the gradients: ``"matrix"``, ``"embedding"``, ``"per channel"`` or ``"general"``.
    """

    weight: ParameterRows | None
    bias: ParameterRows | None
    value: Tensor
    feature_axis: int = -1
    example_axes: tuple[int, ...] = (0,)
    pointwise: bool = False
    packed: bool = False

    rule: ClassVar[str] = MATRIX
    groups = 1
    transposed = False

    # Set when the call is recorded: the position of the output in the autograd graph, its shape, type and device.
    edge: GradientEdge = field(init=False, repr=False)
    output_shape: torch.Size = field(init=False, repr=False)
    output_like: dict[str, Any] = field(init=False, repr=False)

    @property
    def rows(self) -> tuple[ParameterRows, ...]:
        """The parameters that the call uses, the weight first."""
        return tuple(filter(None, (self.weight, self.bias)))

    def index(self, positions: dict[str, Tensor]) -> Tensor:
        """Arrange per-parameter index tensors (shaped like the parameters) as the array ``[G, o, i]``.

        By default the weight's first axis (``transposed``: its last) are the rows, and the bias is the last column.
        """
        columns = []
        for rows in self.rows:
            own = positions[rows.name][rows.start :][: rows.count]
            own = own.reshape(len(own), -1)
            columns.append(own.T if self.transposed and rows is self.weight else own)
        return torch.cat(columns, 1).unflatten(0, (self.groups, -1))

    @abstractmethod
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        """Per-example gradients of the ``[G, o, i]`` array.

        Args:
            gradient: ``[V, *output shape]``.
            n_examples: B.
            where: Position of the examples in the output.
        """

    def reordered(self, gradient: Tensor, order: Tensor, n_examples: int) -> ExampleGradients:
        """As :meth:`gradients`, with rows along axis 0 that ``order`` brings into the order of the examples."""
        return replace(self, value=self.value[order]).gradients(gradient[:, order], n_examples, FIRST)

    def alone(self, gradient: Tensor) -> ExampleGradients:
        """As :meth:`gradients`, from gradients ``[V, B, *output shape]`` of each example's own outputs in all rows."""
        n_examples = gradient.shape[1]
        value = self.value.expand(n_examples, *self.value.shape)
        if 0 in self.example_axes:
            value, gradient = value.flatten(0, 1), gradient.flatten(1, 2)
        result = replace(self, value=value).gradients(gradient, n_examples, FIRST)
        result.shares_rows = True
        return result

    def by_example(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> tuple[Tensor, Tensor]:
        """The input ``[B, r, …]`` and the gradient ``[V, B, r, …]`` with the examples in front."""
        return by_example(self.value, n_examples, where), by_example(gradient, n_examples, where, lead=1)


@dataclass
class LinearCall(Call):
    """``y = x Wᵀ + b``; ``transposed`` if the weight is stored as ``[in, out]``, ``ragged`` if sequences are padded."""

    transposed: bool = False
    weight_shape: torch.Size = torch.Size()
    groups: int = 1
    ragged: bool = False

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        if self.value.ndim == 2 and self.value.shape[0] == n_examples:
            value, left = self.value.unsqueeze(1), gradient.unsqueeze(2)
        else:
            value, left = self.by_example(gradient, n_examples, where)
            value, left = value.flatten(1, -2), left.flatten(2, -2)  # [B, S, i], [V, B, S, O]
        width = 1 if self.weight is None else value.shape[2] + (self.bias is not None)
        left = left.unsqueeze(3) if self.groups == 1 else left.unflatten(-1, (self.groups, -1))
        result = OuterGradients(value, left, expand_right=self._expand, right_sizes=(value.shape[1], 1, width))
        result.shares_rows = self.ragged
        return result

    def _expand(self, value: Tensor) -> Tensor:
        """Inputs ``[b, S, i]`` as ``[b, S, 1, i]`` with the column of ones that is the bias's input."""
        if self.bias is not None:
            ones = value.new_ones(*value.shape[:-1], 1)
            value = ones if self.weight is None else torch.cat([value, ones], -1)
        return value.unsqueeze(2)


@dataclass
class ConvolutionCall(Call):
    """A convolution in 1, 2 or 3 dimensions, as a linear map of patches."""

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, left = self.by_example(gradient, n_examples, where)
        patch = value.shape[2] // self.groups * math.prod(self.kernel)
        width = 1 if self.weight is None else patch + (self.bias is not None)
        return OuterGradients(
            value,
            left,
            expand_right=self._patches,
            expand_left=self._positions,
            add_right_products=self._add_patch_products if self.weight is not None else None,
            right_sizes=(left.shape[2] * left.shape[4:].numel(), self.groups, width),
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
        sizes, dimensions = value.shape[:2], len(self.kernel)
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
        return rows.unflatten(0, sizes).flatten(1, 2)

    def _positions(self, gradient: Tensor) -> Tensor:
        """Output gradients ``[V, b, r, O, *out]`` as rows ``[V, b, r·S, G, O/G]``."""
        return gradient.flatten(4).movedim(3, 4).flatten(2, 3).unflatten(-1, (self.groups, -1))


@dataclass
class TransposedConvolutionCall(ConvolutionCall):
    """A transposed convolution: each input position meets the patch of the output gradient under its kernel.

    Rows of ``[G, o, i]`` are the entries of such a patch, columns a group's inputs. A bias is another call.
    """

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return positions[self.rows[0].name].flatten(1).unflatten(0, (self.groups, -1)).mT  # of [C, O/G, *k]

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, left = self.by_example(gradient, n_examples, where)
        return OuterGradients(
            value,
            left,
            expand_right=lambda some: self._positions(some[None])[0],  # [b, r·S, G, C/G]
            expand_left=lambda some: self._patches(some.flatten(0, 1)).unflatten(0, some.shape[:2]),
        )


@dataclass
class EmbeddingCall(Call):
    """A table look-up: the weight's rows are the columns of the ``[1, o, i]`` array, one for each token.

    Where the rows are the same for all examples, the output is that of the sum with what differs between examples.
    """

    n_rows: int = 0
    padding: int | None = None

    rule: ClassVar[str] = EMBEDDING
    transposed = True

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        index, left = self.by_example(gradient, n_examples, where)
        index, left = index.flatten(1), left.flatten(2, -2)
        if self.padding is not None:  # the padding row is never updated
            left = left * (index != self.padding)[None, :, :, None]
        return EmbeddingGradients(index, left, self.n_rows)


@dataclass
class NormalisationCall(Call):
    """Scale and shift after a normalisation, ``y = γ ∘ x̂ + β``: one 1 × 2 matrix for each channel.

    ``value`` is the normalised input x̂, taken before scale and shift (dividing the output by γ would fail at γ = 0).
    Channels are the last ``channels_last`` axes of the output; 0 where they are axis 1.
    """

    channels_last: int = 0

    rule: ClassVar[str] = CHANNELS

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return torch.stack([positions[rows.name].flatten() for rows in self.rows], -1)[:, None]

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        value, gradient = self.by_example(gradient, n_examples, where)
        if self.channels_last:
            value, gradient = value.flatten(-self.channels_last), gradient.flatten(-self.channels_last)
        else:
            value, gradient = value.movedim(2, -1), gradient.movedim(3, -1)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        value, gradient = value.flatten(1, -2).to(dtype), gradient.flatten(2, -2).to(dtype)  # [B, S, C], [V, B, S, C]
        sums = [(gradient * value).sum(2) if rows is self.weight else gradient.sum(2) for rows in self.rows]
        return DenseGradients(torch.stack(sums, -1)[:, :, :, None])


@dataclass
class BroadcastCall(Call):
    """A parameter that enters every example alike: added or multiplied to the input, or expanded over the batch.

    Class tokens, tables of positions and layer scales are used so. With ``scales`` the parameter, of that ``shape``,
    multiplies the value: an example's gradient is the output gradient times the value, summed over the broadcast.
    """

    scales: bool = False
    shape: torch.Size = torch.Size()

    rule: ClassVar[str] = GENERAL

    @override
    def index(self, positions: dict[str, Tensor]) -> Tensor:
        return positions[self.rows[0].name].flatten()[None, None]

    @override
    def gradients(self, gradient: Tensor, n_examples: int, where: ExampleAxis) -> ExampleGradients:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        gradient = gradient * self.value if self.scales else gradient
        values = by_example(gradient, n_examples, where, lead=1).sum(2)  # [V, B, …], without the examples' own axis
        values = values.unsqueeze(2 + where.axis)
        missing = (1,) * (values.ndim - 2 - len(self.shape))
        values = values.sum_to_size(*values.shape[:2], *missing, *self.shape)
        return DenseGradients(values.reshape(*values.shape[:2], 1, 1, -1))

    @override
    def reordered(self, gradient: Tensor, order: Tensor, n_examples: int) -> ExampleGradients:
        value = self.value.expand(gradient.shape[1:])[order] if self.scales else self.value
        return replace(self, value=value).gradients(gradient[:, order], n_examples, FIRST)

    @override
    def alone(self, gradient: Tensor) -> ExampleGradients:
        return self.gradients(gradient, gradient.shape[1], FIRST)
