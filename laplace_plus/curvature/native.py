"""The native backend: every structure and every curvature, from captured inputs and output gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import kernels
from laplace_plus.batches import Batch
from laplace_plus.curvature.base import KINDS, Backend
from laplace_plus.curvature.capture import capture_batch
from laplace_plus.curvature.gradients import CHANNELS, EMBEDDING, MATRIX, Gradients, Layout, whole_layout
from laplace_plus.curvature.last_layer import last_layer_curvature
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, HessianOperator
from laplace_plus.curvature.structures import (
    Curvature,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    Structure,
)
from laplace_plus.differentiability import differentiable_kernels
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.linalg import (
    Block,
    DenseBlock,
    DiagonalBlock,
    KroneckerBlock,
    OneHotStack,
    Operator,
    OuterStack,
    Stack,
)
from laplace_plus.linalg.stacks import slices
from laplace_plus.network import Network


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
        self.check(structure, likelihood)
        if self.kind == "hessian":
            return _hessian(network, likelihood, batch, structure)
        capture = capture_batch(network, batch)
        outputs = capture.outputs.view(capture.output_shape)
        likelihood.validate(outputs, batch.target)
        gradients = Gradients(network, capture)
        rows, _, weight = likelihood.rows(outputs, batch.target)
        if self.kind == "ggn" and likelihood.n_noise == 1:
            short_cut = last_layer_curvature(gradients, structure, likelihood, rows, weight)
            if short_cut is not None:
                return short_cut, outputs
        # An example with nothing but ignored targets does not count.
        used = weight.view(gradients.capture.n_examples, -1).bool().any(1)
        sums = _SUMS[type(structure)](gradients, structure, likelihood.n_noise, used)
        for cotangents, components in self._cotangents(likelihood, batch, gradients, generator):
            sums.add(cotangents, components)
        return sums.curvature, outputs

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
        gradients = Gradients(network, capture_batch(network, batch))
        blocks = {layout.key: block for layout, block in curvature}
        for cotangents, components in self._cotangents(likelihood, batch, gradients, generator):
            for layout, stack in gradients.stacks(cotangents):
                block = blocks[layout.key]
                if isinstance(block, KroneckerBlock):
                    rotated = block.kronecker_basis().rotate(stack)
                    block.add_corrected_(_by_component(rotated, components, block.n_components, lambda s: s.squares()))
        return gradients.capture.output_shape[0]

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


# -- accumulation, one class for each structure ------------------------------------------------------------------------


@dataclass
class _Sums(ABC):
    """Adds up one batch's curvature, a chunk of directions at a time.

    Attributes:
        gradients: The batch's per-example gradients.
        structure: What to add up.
        n_components: K.
        used: ``[B]``: whether an example has any target that is not ignored.
        curvature: The sum so far.
    """

    gradients: Gradients
    structure: Structure
    n_components: int
    used: Tensor
    curvature: Curvature = field(default_factory=lambda: Curvature([]))

    @abstractmethod
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        """Add the directions ``[V, B, *, C]``, which belong to components ``[V]``."""

    def by_component(self, stack: Stack, components: Tensor, reduce: Callable[[Stack], Tensor]) -> Tensor:
        """Apply a reduction to the directions of each component, ``[K, …]``."""
        return _by_component(stack, components, self.n_components, reduce).to(self.gradients.network.dtype)


class _DiagonalSums(_Sums):
    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        for layout, stack in self.gradients.stacks(cotangents):
            squares = self.by_component(stack, components, lambda s: s.squares())
            self.curvature.add_block_(layout, DiagonalBlock(squares))


class _FullSums(_Sums):
    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        layout, stack = self.gradients.whole(cotangents)
        matrix = self.by_component(stack, components, _outer_sum)
        self.curvature.add_block_(layout, DenseBlock(matrix, layout.shape))


class _KroneckerSums(_Sums):
    @override
    def add(self, cotangents: Tensor, components: Tensor) -> None:
        assert isinstance(self.structure, KroneckerStructure)
        for layout, stack in self.gradients.stacks(cotangents):
            if layout.rule in (MATRIX, EMBEDDING) and isinstance(stack, (OuterStack, OneHotStack)):
                self._add_kronecker(layout, stack, components, self.structure.weight_sharing)
            elif layout.rule == CHANNELS or layout.index.numel() <= self.structure.dense_limit:
                matrix = self.by_component(stack, components, _outer_sum)
                self.curvature.add_block_(layout, DenseBlock(matrix, layout.shape))
            else:
                squares = self.by_component(stack, components, lambda s: s.squares())
                self.curvature.add_block_(layout, DiagonalBlock(squares))

    def _add_kronecker(
        self, layout: Layout, stack: OuterStack | OneHotStack, components: Tensor, weight_sharing: str
    ) -> None:
        left = self.by_component(stack, components, lambda s: _left_factor(s, weight_sharing))
        begun = self.curvature.get(layout.key)
        if isinstance(begun, KroneckerBlock):  # the inputs are the same for every chunk of directions
            begun.left += left
            return
        right, count = _right_factor(stack, weight_sharing, layout, self.used)
        self.curvature.add_block_(layout, KroneckerBlock(left, right.to(left.dtype), count))


def _by_component(stack: Stack, components: Tensor, n_components: int, reduce: Callable[[Stack], Tensor]) -> Tensor:
    if n_components == 1:
        return reduce(stack)[None]
    parts = [reduce(stack.select((components == k).nonzero().squeeze(-1))) for k in range(n_components)]
    return torch.stack(parts)


def _outer_sum(stack: Stack) -> Tensor:
    """``Σ_vn vec(P) vec(P)ᵀ`` for each group, ``[G, n, n]``."""
    groups, rows, columns = stack.shape
    total = torch.zeros(groups, rows * columns, rows * columns, dtype=stack.dtype, device=stack.device)
    for _, values in stack.chunks():
        flat = values.flatten(3).flatten(0, 1)  # [Vb, G, n]
        total += torch.einsum("kgn,kgm->gnm", flat, flat)
    return total


def _left_factor(stack: Stack, weight_sharing: str) -> Tensor:
    """Sum of ``g gᵀ``, ``[G, o, o]``."""
    total = torch.zeros(stack.shape[0], stack.shape[1], stack.shape[1], dtype=stack.dtype, device=stack.device)
    if isinstance(stack, OneHotStack):
        return kernels.symmetrize_(kernels.symmetric_update(total, stack.left.flatten(0, 2)[None]))
    assert isinstance(stack, OuterStack)
    for examples in stack.side_chunks():
        left = stack.expand_left(stack.raw_left[:, examples]).flatten(0, 1).movedim(2, 0)  # [G, Vb, S, o]
        kernels.symmetric_update(total, left, positions="each" if weight_sharing == "expand" else "sum")
    return kernels.symmetrize_(total)


def _right_factor(stack: Stack, weight_sharing: str, layout: Layout, used: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of ``a aᵀ`` over the rows of used examples, ``[G, i, i]`` (or its diagonal), and the number of rows."""
    if isinstance(stack, OneHotStack):
        if weight_sharing == "reduce" and stack.index.shape[1] > 1:
            raise UnsupportedError(
                f"KFAC-reduce makes the input factor of {layout.names[0]!r} dense over its whole vocabulary.",
                expected='weight_sharing="expand" where embeddings are selected',
                got='weight_sharing="reduce"',
                fix='Use weight_sharing="expand", or leave the embedding out of the selection.',
            )
        index = stack.index[used]
        counts = torch.bincount(index.flatten(), minlength=stack.n_columns).to(stack.dtype)
        return counts[None], torch.tensor(float(index.numel()), dtype=torch.float64)
    assert isinstance(stack, OuterStack)
    groups, width = stack.right_shape
    total = torch.zeros(groups, width, width, dtype=stack.dtype, device=stack.device)
    count = int(used.sum()) * (stack.n_positions if weight_sharing == "expand" else 1)
    every = bool(used.all())
    for examples in slices(stack.n_examples, stack.n_positions * groups * width * 4):
        raw = stack.raw_right[examples] if every else stack.raw_right[examples][used[examples]]
        if weight_sharing == "expand" and stack.add_right_products is not None:
            stack.add_right_products(raw, total)
            continue
        right = stack.expand_right(raw).movedim(2, 0)  # [G, b, S, i]
        kernels.symmetric_update(total, right, positions="each" if weight_sharing == "expand" else "mean")
    return kernels.symmetrize_(total), torch.tensor(float(count), dtype=torch.float64)


_SUMS: dict[type, type[_Sums]] = {
    DiagonalStructure: _DiagonalSums,
    FullStructure: _FullSums,
    KroneckerStructure: _KroneckerSums,
}


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
