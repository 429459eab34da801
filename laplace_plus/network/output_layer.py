"""A linear output layer: the gradient of an output is the layer's input in that output's row, without any cotangent."""

from __future__ import annotations

from torch import Tensor

from laplace_plus.network.gradients import Gradients
from laplace_plus.structured.gradients import OuterGradients, OutputLayerGradients
from laplace_plus.structured.layout import MATRIX, Layout


def output_layer_inputs(gradients: Gradients) -> tuple[Layout, Tensor] | None:
    """The layout of a linear output layer and its inputs ``[B', i]``, if it holds every selected parameter."""
    capture = gradients.capture
    if not capture.pointwise:
        return None
    nothing = capture.outputs.new_zeros(1, 1, 1).expand(1, *capture.outputs.shape)
    blocks = list(gradients.blocks(nothing))
    if len(blocks) != 1:
        return None
    layout, own = blocks[0]
    if layout.rule != MATRIX or not isinstance(own, OuterGradients) or layout.shape[0] != 1 or own.n_positions != 1:
        return None
    return layout, own.right(slice(0, own.n_examples))[:, 0, 0]


def output_layer_gradients(gradients: Gradients, outputs: Tensor) -> tuple[Layout, OutputLayerGradients] | None:
    """The gradients of chosen outputs of a linear output layer, without cotangents; None for other selections.

    ``outputs`` are ``[V]``, or ``[B', V]`` where each example (with positions: each position) has its own.
    """
    found = output_layer_inputs(gradients)
    if found is None:
        return None
    layout, inputs = found
    return layout, OutputLayerGradients(inputs, outputs.to(inputs.device), layout.shape[1])
