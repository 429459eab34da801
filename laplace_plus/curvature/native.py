"""The native backend: every structure and every curvature, from captured inputs and output gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.curvature.accumulation import Accumulation
from laplace_plus.curvature.base import KINDS, Backend
from laplace_plus.curvature.structures import Curvature, DiagonalStructure, FullStructure, KroneckerStructure, Structure
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.elementwise import like_observed
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import Gradients, batch_gradients, loss_gradient, output_layer_inputs, whole_layout
from laplace_plus.network.network import Network
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from laplace_plus.structured.gram_sum import gram_sum
from laplace_plus.structured.softmax_output import SoftmaxOutputBlock, SoftmaxOutputRows

Observed = tuple[Tensor, Tensor, Tensor]
"""What :meth:`Likelihood.rows` returns."""

_STRUCTURES = ("full", "diagonal", "KFAC", "low-rank")


class Native(Backend):
    """Curvature from one forward and one batched backward pass to layer outputs; see :class:`Backend`.

    Kronecker factors follow Martens and Grosse (2015) and, for positions, Eschenhagen et al. (2023).
    """

    name: ClassVar[str] = "native"
    supported: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {(kind, name) for kind in KINDS for name in _STRUCTURES} - {("hessian", "KFAC")}
    )

    @override
    def check(self, structure: Structure, likelihood: Likelihood) -> None:
        """Refuse by name what the backend cannot do."""
        if structure.name not in _STRUCTURES and self.kind != "hessian":
            structure = FullStructure()  # what it can do for one block, it can do for any
        unusual = likelihood.couples_rows or self.kind in ("empirical_fisher", "hessian")
        if (self.kind, structure.name) not in self.supported or unusual:
            Backend.check(self, structure, likelihood)

    @override
    def accumulate(
        self,
        total: Curvature | None,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        structure: Structure,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Curvature, Tensor]:
        if self.kind == "hessian":
            curvature, outputs = _hessian(network, likelihood, batch, structure)
            return curvature if total is None else total.add_(curvature), outputs
        gradients = batch_gradients(network, batch)
        capture = gradients.capture
        outputs = capture.outputs.view(capture.output_shape)
        likelihood.validate(outputs, batch.target)
        observed = rows, targets, weight = likelihood.rows(outputs, batch.target)
        # An example with nothing but ignored targets does not count.
        share = weight.view(capture.n_examples, -1).amax(1)
        if total is not None and not capture.pointwise and any(isinstance(own, SoftmaxOutputBlock) for _, own in total):
            # Gradients cannot be added to a block of the output layer's own outputs.
            layout, matrix = whole_layout(network), total.dense(torch.ones(1, dtype=network.dtype))
            total = Curvature([(layout, DenseBlock(matrix[None, None], layout.shape))])
        sums = Accumulation(gradients, structure, likelihood.n_noise, share, total)
        sums.together = likelihood.couples_rows
        if self.kind == "ggn" and likelihood.n_noise == 1 and capture.pointwise and not sums.corrects:
            direct = last_layer_curvature(gradients, structure, likelihood, observed)
            if direct is not None and (total is None or not total.differences(direct)):
                return direct if total is None else total.add_(direct), outputs
        for cotangents, components in self._cotangents(likelihood, observed, gradients, generator):
            sums.add(cotangents, components)
        return sums.finish(), outputs

    def _cotangents(
        self, likelihood: Likelihood, observed: Observed, gradients: Gradients, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of cotangents ``[V, B, *, C]`` with the component ``[V]`` that each belongs to.

        Over all chunks, the cotangents' outer products sum to (for Monte Carlo: in expectation) the likelihood's
        Hessian at unit noise.
        """
        capture, (rows, targets, weight) = gradients.capture, observed
        shape = capture.outputs.shape  # [B, *, C], pointwise [B', C]
        if likelihood.couples_rows:  # cotangents of all rows
            root = likelihood.batch_root(*observed)
            for chunk in gradients.cotangent_chunks(root.shape[1]):
                columns = root.mT[chunk].reshape(-1, *shape)
                yield columns, torch.zeros(len(columns), dtype=torch.long)
        elif self.kind == "ggn":
            root = likelihood.output_root(rows, targets) * weight.sqrt()[:, None, None]
            n_columns = root.shape[-1]
            groups = likelihood.output_groups(n_columns).cpu()
            by_position = root.unflatten(0, (shape[0], -1))  # [B, M, C, V]
            n_positions = by_position.shape[1]
            for chunk in gradients.cotangent_chunks(n_positions * n_columns):
                picked = torch.arange(chunk.start, chunk.stop)
                position, column = picked // n_columns, picked % n_columns
                if n_positions == 1:
                    cotangents = by_position[:, 0].movedim(-1, 0)[column]
                else:  # one position at a time: gradients of different positions must not mix
                    cotangents = root.new_zeros(len(picked), shape[0], n_positions, root.shape[1])
                    values = by_position[:, position, :, column]  # [V, B, C]: advanced indices come first
                    cotangents[torch.arange(len(picked)), :, position] = values
                yield cotangents.reshape(len(picked), *shape), groups[column]
        elif self.kind == "empirical_fisher":
            if capture.pointwise and shape != capture.output_shape:
                what = "The empirical Fisher of a last layer sums the positions of an example."
                expected, fix = "outputs [B, C]", 'Use kind="ggn" or kind="ggn_mc" for token-level outputs.'
                raise UnsupportedError(what, expected=expected, got=f"outputs {tuple(capture.output_shape)}", fix=fix)
            gradient = likelihood.gradient(rows, targets) * weight.sqrt()[:, None]
            capture.frees = True
            yield gradient.view(1, *shape), torch.zeros(1, dtype=torch.long)
        else:
            n_components = likelihood.n_noise
            for chunk in gradients.cotangent_chunks(self.n_samples * n_components):
                component, drawn = torch.arange(chunk.start, chunk.stop) % n_components, []
                capture.frees = chunk.stop == self.n_samples * n_components
                for own in component:
                    labels = like_observed(likelihood.sample_targets(rows, generator=generator), targets)
                    gradient = likelihood.gradient(rows, labels) * weight.sqrt()[:, None]
                    if n_components > 1:  # one noise level at a time
                        gradient = gradient * (torch.arange(gradient.shape[1], device=gradient.device) == int(own))
                    drawn.append(gradient.view(shape) / self.n_samples**0.5)
                yield torch.stack(drawn), component


# -- the Hessian -------------------------------------------------------------------------------------------------------


def _hessian(network: Network, likelihood: Likelihood, batch: Batch, structure: Structure) -> tuple[Curvature, Tensor]:
    """Rows of the summed loss's Hessian by differentiating twice; for small networks (P backward passes)."""
    unit = likelihood.with_noise(1.0) if likelihood.noise_std is not None else likelihood
    gradients = batch_gradients(network, batch)  # also settles which layer is the last one
    capture, total = gradients.capture, network.n_parameters
    outputs = capture.outputs.view(capture.output_shape)
    likelihood.validate(outputs, batch.target)
    gradient, point = loss_gradient(network, unit, batch, network.vector())
    full = isinstance(structure, FullStructure)
    values = point.new_zeros(total, total) if full else point.new_zeros(total)
    for n in range(total if gradient.requires_grad else 0):
        (row,) = torch.autograd.grad(gradient[n], point, retain_graph=True)
        values[n] = row if full else row[n]
    if full:
        layout = whole_layout(network)
        return Curvature([(layout, DenseBlock((values + values.T)[None, None] / 2, layout.shape))]), outputs
    return Curvature([(layout, DiagonalBlock(layout.gather(values)[None])) for layout in gradients.layouts]), outputs


# -- linear output layers ----------------------------------------------------------------------------------------------
#
# If the selected layer's output is the network's own, the gradient of output c is the layer's input φ in row c. The
# Kronecker factor of the output side is then Σ_n Λ_n, the diagonal Σ_n Λ_n,cc φ_ni², and the whole matrix
# Σ_n Λ_n ⊗ φ_n φ_nᵀ. None of them needs a cotangent for each output, of which a classifier may have many.


def last_layer_curvature(
    gradients: Gradients, structure: Structure, likelihood: Likelihood, observed: Observed
) -> Curvature | None:
    """The exact Gauss-Newton curvature of a linear output layer, or None where this short cut does not apply.

    It is that of the observations, of which ignored ones have weight 0.
    """
    network, weight = gradients.network, observed[2]
    hessian = likelihood.output_curvature(*observed)
    found = None if hessian is None else output_layer_inputs(gradients)
    if hessian is None or found is None:
        return None
    layout, inputs = found
    kept = weight.bool()
    if not bool(kept.all()):
        inputs, weight = inputs[kept], weight[kept]
        hessian = replace(hessian, scales=hessian.scales[kept], diagonal=hessian.diagonal[kept])
    dtype = network.dtype
    if isinstance(structure, FullStructure):
        output_rows = SoftmaxOutputRows(inputs.detach().to(dtype), hessian.scales.to(dtype), hessian.coupled)
        block: Block = SoftmaxOutputBlock(output_rows, layout.shape)
    elif isinstance(structure, DiagonalStructure):
        squares = hessian.diagonal.to(inputs.dtype).T @ inputs.square()
        block = DiagonalBlock(squares[None, None].to(dtype))
    elif isinstance(structure, KroneckerStructure):
        right = gram_sum(1, layout.shape[2], structure.factor_rank, dtype=dtype, device=inputs.device)
        right.add_rows((inputs * weight.sqrt()[:, None].to(inputs))[None])
        count = weight.sum(dtype=torch.float64).cpu()
        left = hessian.diagonal.sum(0) if layout.shape[1] > structure.dense_outputs else hessian.sum()
        block = KroneckerBlock(left[None, None].to(dtype), right, count)
    else:
        return None
    return Curvature([(layout, block)])
