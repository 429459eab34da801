"""The curvature of a last linear layer with many outputs, from sums of output Hessians instead of their roots.

Where a layer's output is the network's own, the gradient of output c is its input in row c: the Kronecker factor of the
output side is ``Σ_n Λ_n`` and the diagonal ``Σ_n Λ_n,cc a_ni²``. Neither needs a direction for each output, of which a
classifier with many classes has too many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace_plus.curvature.gradients import MATRIX, Gradients
from laplace_plus.curvature.structures import Curvature, DiagonalStructure, KroneckerStructure, Structure
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import DiagonalBlock, KroneckerBlock, OuterStack


def last_layer_curvature(
    gradients: Gradients, structure: Structure, likelihood: Likelihood, rows: Tensor, weight: Tensor
) -> Curvature | None:
    """The exact Gauss-Newton curvature of a pointwise last layer, or None where this short cut does not apply.

    Args:
        gradients: The batch's gradients.
        structure: Kronecker or diagonal.
        likelihood: One that knows the sum of its Hessians.
        rows: Outputs ``[N, C]``.
        weight: ``[N]``, 0 for ignored rows.
    """
    if not gradients.capture.pointwise or not isinstance(structure, (DiagonalStructure, KroneckerStructure)):
        return None
    sums = likelihood.hessian_sums(rows, weight)
    nothing = gradients.capture.outputs.new_zeros(1, 1, 1).expand(1, *gradients.capture.outputs.shape)
    blocks = list(gradients.stacks(nothing))
    if sums is None or len(blocks) != 1:
        return None
    layout, stack = blocks[0]
    if layout.rule != MATRIX or not isinstance(stack, OuterStack) or layout.shape[0] != 1:
        return None
    dtype = gradients.network.dtype
    total, diagonal = sums
    inputs = stack.right(slice(0, stack.n_examples))[:, 0, 0]  # [N, i]
    if isinstance(structure, DiagonalStructure):
        squares = diagonal.to(inputs.dtype).T @ inputs.square()
        return Curvature([(layout, DiagonalBlock(squares[None, None].to(dtype)))])
    inputs = inputs[weight.bool()]
    right = (inputs.T @ inputs)[None].to(dtype)
    count = torch.tensor(float(len(inputs)), dtype=torch.float64)
    return Curvature([(layout, KroneckerBlock(total[None, None].to(dtype), right, count))])
