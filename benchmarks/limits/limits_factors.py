"""Curvature as plain torch would compute it for one network of linear and convolutional layers: what fits cannot beat.

Nothing here checks anything or knows more than these two kinds of layers. What is exact is exact: the same Kronecker
factors and diagonals as a fit's, from one forward pass and backward passes to the layers' outputs only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from models import Problem
from torch import Tensor, nn
from torch.nn.functional import unfold

LAYERS = (nn.Linear, nn.Conv2d)


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor, Tensor]]]:
    """A list that fills with each layer's input and output as the network runs."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((module, inputs[0].detach(), output))

    handles = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, LAYERS)]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def roots(problem: Problem, outputs: Tensor) -> Tensor:
    """Columns of the output Hessian's root, ``[V, B, C]``: those of ``diag(p) − p pᵀ``, or the identity's."""
    if problem.likelihood == "regression":
        return torch.eye(outputs.shape[1], dtype=outputs.dtype)[:, None].expand(-1, *outputs.shape)
    p = outputs.detach().softmax(-1)
    root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    return root.movedim(-1, 0)


def sampled(problem: Problem, outputs: Tensor) -> Tensor:
    """One gradient for each example with a label drawn from the model, ``[1, B, C]``."""
    p = outputs.detach().softmax(-1)
    labels = torch.multinomial(p, 1)[:, 0]
    return (p - nn.functional.one_hot(labels, p.shape[1]).to(p))[None]


def chunks(problem: Problem, outputs: Tensor, wanted: Sequence[Tensor], directions: Tensor) -> Iterator[list[Tensor]]:
    """Gradients of the outputs with respect to some tensors: ``[V, …]`` at once, or ``[1, …]`` V times."""
    if problem.batched and len(directions) > 1:
        yield list(torch.autograd.grad(outputs, wanted, directions, is_grads_batched=True))
        return
    last = len(directions) - 1
    for number, direction in enumerate(directions):
        found = torch.autograd.grad(outputs, wanted, direction, retain_graph=number < last)
        yield [gradient[None] for gradient in found]


def backward(problem: Problem, outputs: Tensor, wanted: Sequence[Tensor], directions: Tensor) -> list[Tensor]:
    """All of them together, ``[V, …]``."""
    return [torch.cat(parts) for parts in zip(*chunks(problem, outputs, wanted, directions), strict=True)]


def input_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """``[B, S, i]``: tokens or patches, with a column of ones for the bias."""
    if isinstance(module, nn.Conv2d):
        patches = unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
    else:
        patches = inputs.reshape(inputs.shape[0], -1, inputs.shape[-1])
    if module.bias is None:
        return patches
    return torch.cat([patches, patches.new_ones(*patches.shape[:2], 1)], -1)


def gradient_rows(module: nn.Module, gradient: Tensor) -> Tensor:
    """``[V, B, S, o]`` of ``[V, B, *, o]`` or ``[V, B, o, *]``."""
    if isinstance(module, nn.Conv2d):
        return gradient.flatten(3).mT
    return gradient.reshape(*gradient.shape[:2], -1, gradient.shape[-1])


@dataclass
class Factors:
    """Sums of ``g gᵀ`` and ``a aᵀ`` of one layer, and the number of rows in the latter."""

    left: Tensor
    right: Tensor
    count: int

    def eigen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values and vectors of either, the left values divided by the count."""
        left, u = decomposition(self.left)
        right, v = decomposition(self.right)
        return left.clamp(min=0) / self.count, u, right.clamp(min=0), v


def decomposition(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """An eigendecomposition. LAPACK may not converge on the zero rows that padding leaves: they are put aside."""
    used = matrix.diagonal() > 0
    if used.all():
        return _converged(matrix)
    values, vectors = matrix.new_zeros(len(matrix)), torch.eye(len(matrix), dtype=matrix.dtype)
    order = torch.cat([(~used).nonzero()[:, 0], used.nonzero()[:, 0]])  # eigenvalues of zero come first
    n = int(used.sum())
    values[-n:], block = _converged(matrix[used][:, used])
    inner = torch.zeros_like(vectors)
    inner[: len(matrix) - n, : len(matrix) - n].fill_diagonal_(1)
    inner[-n:, -n:] = block
    vectors[order] = inner
    return values, vectors


def _converged(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, and then with a small multiple of the identity added, where float32 does not converge."""
    try:
        return tuple(torch.linalg.eigh(matrix))  # type: ignore[return-value]
    except torch.linalg.LinAlgError:
        exact = matrix.double()
    try:
        values, vectors = torch.linalg.eigh(exact)
    except torch.linalg.LinAlgError:
        shift = exact.diagonal().mean()
        values, vectors = torch.linalg.eigh(exact + shift * torch.eye(len(exact), dtype=exact.dtype))
        values = values - shift
    return values.to(matrix), vectors.to(matrix)


def kronecker_factors(problem: Problem, *, monte_carlo: bool) -> list[Factors]:
    """Of every layer, in order: a forward pass, a (batched) backward pass and two products for each batch and layer."""
    factors: list[Factors] = []
    for inputs, _ in problem.batches:
        with recorded(problem.model) as calls:
            outputs = problem.model(inputs)
        directions = sampled(problem, outputs) if monte_carlo else roots(problem, outputs)
        for number, (module, given, _) in enumerate(calls):
            a = input_rows(module, given).flatten(0, 1)
            if number == len(factors):
                width = module.weight.shape[0]
                factors.append(Factors(a.new_zeros(width, width), a.T @ a, len(a)))
            else:
                factors[number].right.addmm_(a.T, a)
                factors[number].count += len(a)
        for gradients in chunks(problem, outputs, [output for *_, output in calls], directions):
            for own, (module, *_), gradient in zip(factors, calls, gradients, strict=True):
                g = gradient_rows(module, gradient).flatten(0, 2)
                own.left.addmm_(g.T, g)
        del outputs, calls, gradients
    return factors


def kronecker_fit(problem: Problem, *, monte_carlo: bool) -> list[Any]:
    """Factors and their eigendecompositions."""
    return [own.eigen() for own in kronecker_factors(problem, monte_carlo=monte_carlo)]


def streamed_factors(problem: Problem) -> list[Tensor]:
    """Monte Carlo factors with hooks: products as soon as a layer's input or output gradient is there, nothing kept."""
    factors: dict[tuple[nn.Module, str], Tensor] = {}

    def add(module: nn.Module, side: str, rows: Tensor) -> None:
        if (module, side) in factors:
            factors[module, side].addmm_(rows.T, rows)
        else:
            factors[module, side] = rows.T @ rows

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch.no_grad():
            add(module, "right", input_rows(module, inputs[0]).flatten(0, 1))
        output.register_hook(lambda g: add(module, "left", gradient_rows(module, g[None]).flatten(0, 2)))

    handles = [module.register_forward_hook(note) for module in problem.model.modules() if isinstance(module, LAYERS)]
    try:
        for inputs, _ in problem.batches:
            # Weights want no gradients; the inputs do, so that every layer has one for its output.
            outputs = problem.model(inputs.detach().requires_grad_())
            outputs.backward(sampled(problem, outputs)[0])
    finally:
        for handle in handles:
            handle.remove()
    return list(factors.values())


def deferred_factors(problem: Problem) -> list[list[Tensor]]:
    """The same for transformers, with tables and norms: rows are multiplied once they are as many as columns."""
    waiting: dict[tuple[nn.Module, str], list[Tensor]] = {}
    sums: dict[tuple[nn.Module, str], Tensor] = {}

    def add(key: tuple[nn.Module, str], rows: Tensor) -> None:
        own = waiting.setdefault(key, [])
        own.append(rows)
        if sum(map(len, own)) >= rows.shape[1]:
            together = torch.cat(own) if len(own) > 1 else rows
            own.clear()
            if key in sums:
                sums[key].addmm_(together.T, together)
            else:
                sums[key] = together.T @ together

    def count(key: tuple[nn.Module, str], values: Tensor) -> None:
        sums[key] = sums[key].add_(values) if key in sums else values

    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm)
    chosen = [module for module in problem.model.modules() if isinstance(module, kinds)]
    note = lambda module, inputs, output: calls.append((module, inputs[0].detach(), output))  # noqa: E731
    handles = [module.register_forward_hook(note) for module in chosen]
    try:
        for inputs, _ in problem.batches:
            outputs = problem.model(inputs)
            found = torch.autograd.grad(outputs, [output for *_, output in calls], sampled(problem, outputs)[0])
            for (module, given, _), gradient in zip(calls, found, strict=True):
                rows = gradient.flatten(0, -2)
                if isinstance(module, nn.LayerNorm):
                    x = nn.functional.layer_norm(given, module.normalized_shape, eps=module.eps)
                    each = torch.stack([(x * gradient).flatten(1, -2).sum(1), gradient.flatten(1, -2).sum(1)], -1)
                    count((module, "both"), torch.einsum("bci,bcj->cij", each, each))
                    continue
                add((module, "left"), rows)
                if isinstance(module, nn.Embedding):
                    count((module, "right"), torch.bincount(given.flatten(), minlength=module.num_embeddings).float())
                else:
                    add((module, "right"), input_rows(module, given).flatten(0, 1))
            calls.clear()
            del outputs, found
    finally:
        for handle in handles:
            handle.remove()
    return [list(sums.values()), *waiting.values()]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter wants a gradient."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def directions_to_outputs(problem: Problem, inputs: Tensor) -> None:
    """One forward pass and C backward passes to the layers' outputs."""
    with recorded(problem.model) as calls:
        outputs = problem.model(inputs)
    identity = torch.eye(problem.n_outputs)[:, None].expand(-1, *outputs.shape)
    for _ in chunks(problem, outputs, [output for *_, output in calls], identity):
        pass


def directions_to_weights(problem: Problem, inputs: Tensor) -> None:
    """One forward pass and C ordinary backward passes, with the gradients of all weights."""
    outputs = problem.model(inputs)
    parameters = list(problem.model.parameters())
    for output in range(problem.n_outputs):
        direction = torch.zeros_like(outputs)
        direction[:, output] = 1
        torch.autograd.grad(outputs, parameters, direction, retain_graph=output < problem.n_outputs - 1)
