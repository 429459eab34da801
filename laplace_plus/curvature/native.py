"""The native backend: every structure and every curvature, from captured inputs and output gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.batches import Batch
from laplace_plus.curvature.accumulation import ACCUMULATIONS
from laplace_plus.curvature.base import KINDS, Backend
from laplace_plus.curvature.capture import capture_batch
from laplace_plus.curvature.gradients import Gradients
from laplace_plus.curvature.last_layer import last_layer_curvature
from laplace_plus.curvature.layouts import Layout, whole_layout
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, HessianOperator
from laplace_plus.curvature.pieces import gradient_pieces
from laplace_plus.curvature.structures import Curvature, FullStructure, Structure
from laplace_plus.differentiability import differentiable_kernels
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import Operator
from laplace_plus.network import Network
from laplace_plus.structured import Block, DenseBlock, DiagonalBlock, KroneckerBlock


class Native(Backend):
    """Curvature from one forward and one batched backward pass to layer outputs; see :class:`Backend`.

    Kronecker factors follow Martens and Grosse (2015) and, for positions, Eschenhagen et al. (2023).
    """

    name: ClassVar[str] = "native"
    supported: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {(kind, name) for kind in KINDS for name in ("full", "diagonal", "KFAC", "low-rank")} - {("hessian", "KFAC")}
    )

    @override
    def curvature(
        self,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        structure: Structure,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[Curvature, Tensor]:
        return self.accumulate(None, network, likelihood, batch, structure, generator=generator)

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
        self.check(structure, likelihood)
        if self.kind == "hessian":
            curvature, outputs = _hessian(network, likelihood, batch, structure)
            return curvature if total is None else total.add_(curvature), outputs
        found = []
        for piece, gradients in gradient_pieces(network, batch):
            total = self._accumulate(total, likelihood, piece, gradients, structure, generator)
            found.append(gradients.capture.outputs.view(gradients.capture.output_shape))
        assert total is not None
        return total, found[0] if len(found) == 1 else torch.cat(found)

    def _accumulate(
        self,
        total: Curvature | None,
        likelihood: Likelihood,
        batch: Batch,
        gradients: Gradients,
        structure: Structure,
        generator: torch.Generator | None,
    ) -> Curvature:
        """Add the curvature of a captured batch to the sum."""
        outputs = gradients.capture.outputs.view(gradients.capture.output_shape)
        likelihood.validate(outputs, batch.target)
        rows, _, weight = likelihood.rows(outputs, batch.target)
        if self.kind == "ggn" and likelihood.n_noise == 1:
            short_cut = last_layer_curvature(gradients, structure, likelihood, rows, weight)
            if short_cut is not None:
                return short_cut if total is None else total.add_(short_cut)
        # An example with nothing but ignored targets does not count.
        used = weight.view(gradients.capture.n_examples, -1).bool().any(1)
        sums = ACCUMULATIONS[type(structure)](gradients, structure, likelihood.n_noise, used, total)
        for cotangents, components in self._cotangents(likelihood, batch, gradients, generator):
            sums.add(cotangents, components)
        return sums.finish()

    @override
    def correct(
        self,
        network: Network,
        likelihood: Likelihood,
        batch: Batch,
        curvature: Curvature,
        *,
        generator: torch.Generator | None = None,
    ) -> int:
        blocks, count = {layout.key: block for layout, block in curvature}, 0
        for piece, gradients in gradient_pieces(network, batch):
            for cotangents, components in self._cotangents(likelihood, piece, gradients, generator):
                for layout, stack in gradients.stacks(cotangents):
                    block = blocks[layout.key]
                    if isinstance(block, KroneckerBlock):
                        block.correct_(stack, components)
            count += gradients.capture.output_shape[0]
        return count

    @override
    def operator(
        self,
        network: Network,
        likelihood: Likelihood,
        data: Iterable[Any],
        *,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Operator:
        unit = likelihood if likelihood.noise_std is None else likelihood.with_noise(1.0)
        if self.kind == "ggn":
            return GGNOperator(network, unit, data, progress=progress)
        if self.kind == "hessian":
            return HessianOperator(network, unit, data, progress=progress)
        fisher: Literal["mc", "empirical"] = "mc" if self.kind == "ggn_mc" else "empirical"
        seed = draw_seed(torch.default_generator if generator is None else generator)
        return FisherOperator(network, unit, data, kind=fisher, n_samples=self.n_samples, seed=seed, progress=progress)

    def _cotangents(
        self, likelihood: Likelihood, batch: Batch, gradients: Gradients, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of cotangents ``[V, B, *, C]`` with the component ``[V]`` that each direction belongs to.

        Over all chunks, the cotangents' outer products sum to (for Monte Carlo: in expectation) the likelihood's
        Hessian at unit noise.
        """
        outputs = gradients.capture.outputs  # [B, *, C], pointwise [B', C]
        whole = outputs.view(gradients.capture.output_shape)
        rows, targets, weight = likelihood.rows(whole, batch.target)
        if self.kind == "ggn":
            root = likelihood.output_root(rows, targets) * weight[:, None, None].to(rows.dtype)
            yield from _exact_cotangents(root, outputs, likelihood, gradients)
            return
        if self.kind == "empirical_fisher":
            gradient = likelihood.gradient(rows, targets) * weight[:, None].to(rows.dtype)
            zero = torch.zeros(1, dtype=torch.long)
            if gradients.capture.pointwise and outputs.shape != whole.shape:
                raise UnsupportedError(
                    "The empirical Fisher of a last layer sums the positions of an example.",
                    expected="outputs [B, C]",
                    got=f"outputs {tuple(whole.shape)}",
                    fix='Use kind="ggn" or kind="ggn_mc" for token-level outputs.',
                )
            yield gradient.view_as(outputs)[None], zero
            return
        n_components = likelihood.n_noise
        for samples in gradients.direction_chunks(self.n_samples * n_components):
            drawn, component = [], []
            for direction in range(samples.start, samples.stop):
                labels = likelihood.sample_targets(rows, generator=generator)
                gradient = likelihood.gradient(rows, labels) * weight[:, None].to(rows.dtype)
                if n_components > 1:  # one noise level at a time
                    only = torch.zeros_like(gradient)
                    only[:, direction % n_components] = gradient[:, direction % n_components]
                    gradient = only
                drawn.append(gradient.view_as(outputs) / self.n_samples**0.5)
                component.append(direction % n_components)
            yield torch.stack(drawn), torch.tensor(component)


def _exact_cotangents(
    root: Tensor, outputs: Tensor, likelihood: Likelihood, gradients: Gradients
) -> Iterator[tuple[Tensor, Tensor]]:
    """Columns of the output Hessian's root, one position at a time: gradients of different positions must not mix."""
    n_directions = root.shape[-1]
    groups = likelihood.output_groups(n_directions).cpu()
    by_position = root.unflatten(0, (outputs.shape[0], -1))  # [B, M, C, V]
    n_positions = by_position.shape[1]
    for chunk in gradients.direction_chunks(n_positions * n_directions):
        picked = torch.arange(chunk.start, chunk.stop)
        position, direction = picked // n_directions, picked % n_directions
        if n_positions == 1:
            cotangents = by_position[:, 0].movedim(-1, 0)[direction]
        else:
            cotangents = root.new_zeros(len(picked), outputs.shape[0], n_positions, root.shape[1])
            values = by_position[:, position, :, direction]  # [V, B, C]: advanced indices come first
            cotangents[torch.arange(len(picked)), :, position] = values
        yield cotangents.reshape(len(picked), *outputs.shape), groups[direction]


# -- the Hessian -------------------------------------------------------------------------------------------------------


def _hessian(network: Network, likelihood: Likelihood, batch: Batch, structure: Structure) -> tuple[Curvature, Tensor]:
    """Rows of the summed loss's Hessian by differentiating twice; for small networks (P backward passes)."""
    unit = likelihood.with_noise(1.0) if likelihood.noise_std is not None else likelihood
    gradients = Gradients(network, capture_batch(network, batch))  # also settles which layer is the last one
    with torch.enable_grad(), differentiable_kernels(network.model):
        vector = network.vector().requires_grad_()
        outputs = network(batch.inputs, network.substitute(vector))
        likelihood.validate(outputs.detach(), batch.target)
        rows, targets, weight = unit.rows(outputs, batch.target)
        loss = -(unit.log_density(rows, targets) * weight).sum()
        (gradient,) = torch.autograd.grad(loss, vector, create_graph=True)
    total = network.n_parameters
    full = isinstance(structure, FullStructure)
    values = vector.new_zeros(total, total) if full else vector.new_zeros(total)
    for n in range(total if gradient.requires_grad else 0):
        (row,) = torch.autograd.grad(gradient[n], vector, retain_graph=True)
        values[n] = row.detach() if full else row[n].detach()
    values = values.detach()
    if full:
        layout = whole_layout(network)
        return Curvature([(layout, DenseBlock((values + values.T)[None, None] / 2, layout.shape))]), outputs.detach()
    blocks: list[tuple[Layout, Block]] = [
        (layout, DiagonalBlock(layout.gather(values)[None])) for layout in gradients.layouts
    ]
    return Curvature(blocks), outputs.detach()
