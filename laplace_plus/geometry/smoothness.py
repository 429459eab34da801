"""Whether a network is smooth enough for methods that differentiate its loss twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus.network import Network

_KINKED = frozenset(
    {
        "relu",
        "relu6",
        "leaky_relu",
        "prelu",
        "rrelu",
        "threshold",
        "hardtanh",
        "hardsigmoid",
        "hardswish",
        "hardshrink",
        "softshrink",
        "elu",
        "selu",
        "celu",
        "abs",
        "absolute",
        "sign",
        "floor",
        "ceil",
        "round",
        "trunc",
        "clamp",
        "clamp_min",
        "clamp_max",
        "clip",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "max",
        "min",
        "amax",
        "amin",
        "cummax",
        "cummin",
        "topk",
        "kthvalue",
        "median",
        "sort",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "max_pool1d_with_indices",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
    }
)
"""Functions whose first or second derivative jumps somewhere, by name."""


def kinks(network: Network, inputs: Any) -> tuple[str, ...]:
    """Names of the operations that make a network's outputs other than twice continuously differentiable.

    Seen in one forward pass. It finds functions of torch that are known for it, wherever they are called; whether the
    selected parameters are before or after them it does not tell.

    Args:
        network: The network.
        inputs: One batch's inputs.
    """
    look = _Look()
    with torch.no_grad(), look:
        network.raw(network.receive(inputs))
    return tuple(sorted(look.found))


class _Look(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").rstrip("_")
        if name in _KINKED and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self.found.add(name)
        return func(*args, **(kwargs or {}))
