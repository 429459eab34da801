"""The curvature of a linear output layer from output Hessians instead of their roots.

If the selected layer's output is the network's own, the gradient of output c is the layer's input φ in row c. The
Kronecker factor of the output side is then ``Σ_n Λ_n``, the diagonal ``Σ_n Λ_n,cc φ_ni²``, and the whole matrix
``Σ_n Λ_n ⊗ φ_n φ_nᵀ``. None of them needs a cotangent for each output, of which a classifier may have many.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.structures import (
    MATRIX,
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Layout,
    Structure,
)
from laplace_plus.likelihoods import Likelihood
from laplace_plus.structured import Block, DiagonalBlock, KroneckerBlock, OuterGradients
from laplace_plus.structured.eigen import DiagonalOutputBlock
from laplace_plus.structured.gradients.one_hot import OutputLayerGradients
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock, SoftmaxOutputRows, require_dense


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

    Args:
        gradients: The batch's gradients.
        outputs: Chosen outputs ``[V]``, or ``[B', V]`` where each example (with positions: each position) has its own.
    """
    found = output_layer_inputs(gradients)
    if found is None:
        return None
    layout, inputs = found
    return layout, OutputLayerGradients(inputs, outputs.to(inputs.device), layout.shape[1])


def last_layer_curvature(
    gradients: Gradients, structure: Structure, likelihood: Likelihood, rows: Tensor, weight: Tensor
) -> Curvature | None:
    """The exact Gauss-Newton curvature of a linear output layer, or None where this short cut does not apply.

    Args:
        gradients: The batch's gradients.
        structure: The structure of the result.
        likelihood: One that knows the form of its Hessians.
        rows: Flattened outputs ``[N, C]``.
        weight: ``[N]``, 0 for ignored observations.

    Raises:
        ConfigurationError: A full curvature that does not fit into memory.
    """
    network = gradients.network
    hessian = likelihood.output_curvature(rows, weight) if gradients.capture.pointwise else None
    found = None if hessian is None else output_layer_inputs(gradients)
    if hessian is None or found is None:
        if isinstance(structure, FullStructure):
            require_dense(network.n_parameters, network.dtype, network.device)
        return None
    layout, inputs = found
    kept = weight.bool()
    if not bool(kept.all()):
        inputs = inputs[kept]
        hessian = replace(hessian, scales=hessian.scales[kept], diagonal=hessian.diagonal[kept])
    dtype = network.dtype
    if isinstance(structure, FullStructure):
        output_rows = SoftmaxOutputRows(inputs.detach().to(dtype), hessian.scales.to(dtype), hessian.coupled)
        block: Block = SoftmaxOutputBlock(output_rows, layout.shape)
    elif isinstance(structure, DiagonalStructure):
        squares = hessian.diagonal.to(inputs.dtype).T @ inputs.square()
        block = DiagonalBlock(squares[None, None].to(dtype))
    elif isinstance(structure, KroneckerStructure):
        right = (inputs.T @ inputs)[None].to(dtype)
        count = torch.tensor(float(len(inputs)), dtype=torch.float64)
        if layout.shape[1] > structure.dense_outputs:
            block = DiagonalOutputBlock(hessian.diagonal.sum(0)[None, None].to(dtype), right, count)
        else:
            block = KroneckerBlock(hessian.sum()[None, None].to(dtype), right, count)
    else:
        return None
    return Curvature([(layout, block)])
