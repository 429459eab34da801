"""Per-example gradients by automatic differentiation, for parameters whose use in the network no rule describes.

The network is mapped over the examples where its operations allow it, and called in a loop otherwise (recurrent
layers). Batching rules can be wrong, and some batches cannot be cut into examples (graphs that share one table of
nodes, time as the leading axis, a ``squeeze`` in the network). Both results must therefore reproduce a fixed
combination of the gradients from one backward pass of the whole batch; otherwise each example's output is
differentiated within the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import NETWORK_ERRORS
from laplace_plus.network import batches


def per_example_gradients(
    network: Callable[..., Tensor], inputs: Any, chosen: dict[str, Tensor], cotangents: Tensor, differentiable: bool
) -> dict[str, Tensor]:
    """Vector-Jacobian products of each example on its own, ``[V, B, *shape]`` for each chosen parameter.

    ``cotangents`` are ``[V, B, *, C]``, and ``network`` maps a batch's inputs and some parameters to ``[B, *, C]``.
    Inputs may require gradients for the network's own use: they flow there only if ``differentiable``.
    """
    leaves, rebuild = batches.flatten(inputs)
    size = cotangents.shape[1]
    is_mapped = [isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == size for leaf in leaves]
    examples = [leaf for leaf, use in zip(leaves, is_mapped, strict=True) if use]

    def single(parameters: dict[str, Tensor], example: list[Tensor]) -> Tensor:
        rows = iter(example)
        full = [next(rows)[None] if use else leaf for leaf, use in zip(leaves, is_mapped, strict=True)]
        return network(rebuild(full), parameters)[0]

    def pullback(parameters: dict[str, Tensor], example: list[Tensor], cotangent: Tensor) -> dict[str, Tensor]:
        value, vjp = torch.func.vjp(lambda p: single(p, example), parameters)  # type: ignore[misc]
        return torch.func.vmap(lambda c: vjp(c.to(value.dtype))[0])(cotangent)

    def mapped() -> dict[str, Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")
            return torch.func.vmap(pullback, in_dims=(None, 0, 1), out_dims=1)(chosen, examples, cotangents)

    def looped() -> dict[str, Tensor]:
        each = (_values(partial(single, example=[one[n] for one in examples]), chosen) for n in range(size))
        return _one_by_one(each, chosen, cotangents, differentiable=differentiable)

    together, parameters = _values(lambda p: network(inputs, p), chosen)
    # Fixed, and different for every cotangent and example.
    weights = [torch.linspace(0.5, 1.5, n, device=cotangents.device) for n in cotangents.shape[:2]]
    combination = torch.outer(*weights).to(cotangents.dtype)  # [V, B]
    combined = torch.einsum("vb,vb...->b...", combination, cotangents)
    expected = _gradients(together, parameters, combined, retain_graph=True)
    for attempt in (mapped, looped):
        try:
            result = attempt()
        except NETWORK_ERRORS:  # whatever goes wrong with single examples, the batch went through
            continue
        if _agree(result, combination, expected):
            kept = differentiable or cotangents.requires_grad
            # A network that differentiates itself may leave a graph that nobody asked for (torch 2.6).
            return result if kept else {name: gradient.detach() for name, gradient in result.items()}
    with torch.enable_grad():
        pairs = [(value, parameters) for value in together.unbind()]
    return _one_by_one(pairs, chosen, cotangents, differentiable=differentiable)


def _values(
    outputs: Callable[[dict[str, Tensor]], Tensor], chosen: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs with a graph, and the copies of the parameters that the graph leads to."""
    with torch.enable_grad():
        copies = {name: p.clone().requires_grad_() for name, p in chosen.items()}
        return outputs(copies), copies


def _gradients(value: Tensor, leaves: dict[str, Tensor], cotangent: Tensor, **options: bool) -> dict[str, Tensor]:
    """One vector-Jacobian product; zeros where the value does not depend on a leaf."""
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    gradients = torch.autograd.grad(
        value, list(leaves.values()), cotangent.to(value.dtype), allow_unused=True, materialize_grads=True, **options
    )
    return dict(zip(leaves, gradients, strict=True))


def _one_by_one(
    values: Iterable[tuple[Tensor, dict[str, Tensor]]],
    chosen: dict[str, Tensor],
    cotangents: Tensor,
    *,
    differentiable: bool,
) -> dict[str, Tensor]:
    """Gradients ``[V, B, *shape]`` of each example's outputs in its leaves, one backward pass each."""
    create_graph = differentiable and torch.is_grad_enabled()
    result = {name: p.new_zeros(*cotangents.shape[:2], *p.shape) for name, p in chosen.items()}
    for n, (value, leaves) in enumerate(values):
        for v, cotangent in enumerate(cotangents[:, n]):
            gradients = _gradients(value, leaves, cotangent, retain_graph=True, create_graph=create_graph)
            for name, gradient in gradients.items():
                result[name][v, n] = gradient
    return result


def _agree(result: dict[str, Tensor], combination: Tensor, expected: dict[str, Tensor]) -> bool:
    """Whether per-example gradients ``[V, B, *shape]`` combine to the expected ones, up to rounding.

    The tolerance is that of the lower precision of parameters and outputs.
    """
    for name, wanted in expected.items():
        if result[name].shape != (*combination.shape, *wanted.shape):  # nested vmap of PReLU in torch 2.15
            return False
        terms = result[name].detach().reshape(*combination.shape, -1) * combination[..., None].to(result[name].dtype)
        scale = terms.abs().sum((0, 1)).max()
        error = (terms.sum((0, 1)) - wanted.flatten()).abs().max()
        eps = max(torch.finfo(dtype).eps for dtype in (wanted.dtype, combination.dtype))
        if not bool(error <= max(1e-5, 3 * eps**0.5) * scale):
            return False
    return True
