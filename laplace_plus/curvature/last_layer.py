"""The curvature of a linear head, whose outputs are the network's own, from output Hessians instead of their roots.

Where a layer's output is the network's own, the gradient of output c is its input in row c. The Kronecker factor of the
output side is then ``Σ_n Λ_n``, the diagonal ``Σ_n Λ_n,cc φ_ni²``, and the whole matrix ``Σ_n Λ_n ⊗ φ_n φ_nᵀ``. None of
them needs a direction for each output, of which a classifier with many classes has too many.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.layouts import MATRIX, Layout
from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Structure,
)
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import OutputCurvature
from laplace_plus.structured import DiagonalBlock, KroneckerBlock, OuterGradients
from laplace_plus.structured.blocks import Block
from laplace_plus.structured.gradients.one_hot import OutputLayerGradients
from laplace_plus.structured.kronecker import DiagonalOutputBlock
from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock, SoftmaxOutputRows, require_dense


def head_features(gradients: Gradients) -> tuple[Layout, Tensor] | None:
    """The layout of a linear head and its inputs ``[B', i]``, where it holds every selected parameter; else None."""
    capture = gradients.capture
    if not capture.pointwise:
        return None
    nothing = capture.outputs.new_zeros(1, 1, 1).expand(1, *capture.outputs.shape)
    blocks = list(gradients.stacks(nothing))
    if len(blocks) != 1:
        return None
    layout, stack = blocks[0]
    if layout.rule != MATRIX or not isinstance(stack, OuterGradients) or layout.shape[0] != 1 or stack.n_positions != 1:
        return None
    return layout, stack.right(slice(0, stack.n_examples))[:, 0, 0]


def head_stack(gradients: Gradients, outputs: Tensor) -> tuple[Layout, OutputLayerGradients] | None:
    """The gradients of chosen outputs of a linear head, without any cotangents; None for other selections.

    Args:
        gradients: The batch's gradients.
        outputs: Chosen outputs ``[V]``, or ``[B', V]`` where each example (with positions: each position) has its own.
    """
    head = head_features(gradients)
    if head is None:
        return None
    layout, features = head
    return layout, OutputLayerGradients(features, outputs.to(features.device), layout.shape[1])


def last_layer_curvature(
    gradients: Gradients, structure: Structure, likelihood: Likelihood, rows: Tensor, weight: Tensor
) -> Curvature | None:
    """The exact Gauss-Newton curvature of a linear head, or None where this short cut does not apply.

    Args:
        gradients: The batch's gradients.
        structure: Which part of the curvature is wanted.
        likelihood: One that knows its Hessians' form.
        rows: Outputs ``[N, C]``.
        weight: ``[N]``, 0 for ignored rows.

    Raises:
        ConfigurationError: A full curvature that does not fit into memory.
    """
    hessian = likelihood.output_curvature(rows, weight)
    head = None if hessian is None else head_features(gradients)
    if hessian is None or head is None:
        if isinstance(structure, FullStructure):
            network = gradients.network
            require_dense(network.n_parameters, network.dtype, network.device)
        return None
    layout, features = head
    kept = weight.bool()
    if not bool(kept.all()):
        features, scales, diagonal = features[kept], hessian.scales[kept], hessian.diagonal[kept]
        hessian = replace(hessian, scales=scales, diagonal=diagonal)
    block = _block(structure, hessian, features, layout, gradients.network.dtype)
    return None if block is None else Curvature([(layout, block)])


def _block(
    structure: Structure, hessian: OutputCurvature, features: Tensor, layout: Layout, dtype: torch.dtype
) -> Block | None:
    if isinstance(structure, FullStructure):
        return SoftmaxOutputBlock(
            SoftmaxOutputRows(features.detach().to(dtype), hessian.scales.to(dtype), hessian.coupled), layout.shape
        )
    if isinstance(structure, DiagonalStructure):
        squares = hessian.diagonal.to(features.dtype).T @ features.square()
        return DiagonalBlock(squares[None, None].to(dtype))
    if not isinstance(structure, KroneckerStructure):
        return None
    right = (features.T @ features)[None].to(dtype)
    count = torch.tensor(float(len(features)), dtype=torch.float64)
    if structure.keeps_diagonal(layout.shape[1]):
        return DiagonalOutputBlock(hessian.diagonal.sum(0)[None, None].to(dtype), right, count)
    return KroneckerBlock(hessian.sum()[None, None].to(dtype), right, count)
