"""Normalisation layers: which parameters are theirs, and noise on each activation that they scale."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laplace_plus.likelihoods.sampling import standard_normal

LAYERS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Batch and instance normalisation of all kinds, and the others."""

_PLACES: dict[Any, int] = {
    **dict.fromkeys((F.batch_norm, F.instance_norm), 3),
    **dict.fromkeys((F.layer_norm, F.group_norm, F.rms_norm), 2),
    **dict.fromkeys((torch.layer_norm, torch.group_norm, torch.rms_norm), 2),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), 1),
}
"""The position of γ among the arguments of each function; that of β, if there is one, is the next."""

_TRAILING = (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm)
"""Functions of which γ and β belong to the last axes; of the others they belong to axis 1."""


def norm_parameters(model: nn.Module) -> dict[str, bool]:
    """The parameters of torch's normalisation layers by name, and whether each is a scale γ."""
    found: dict[str, bool] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, LAYERS):
            for name, _ in module.named_parameters(prefix, recurse=False):
                found[name] = name.endswith("weight")
    return found


class ElementNoise(TorchFunctionMode):
    """Makes ``γ ∘ ĥ + β`` to ``γ ∘ ĥ ∘ (1 + α ε) + β``, with a standard normal ε for each activation.

    A normalisation's result r becomes ``r + α ε ∘ (r − β)``. Normalisations without γ get noise as well; those with
    other scales than the ``scales`` get none. ``seen`` are the ids of the scales that were used.
    """

    def __init__(self, alpha: float, scales: Collection[Tensor], generator: torch.Generator | None):
        super().__init__()
        self.alpha, self.generator = alpha, generator
        self.scales, self.seen = {id(scale) for scale in scales}, set[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _PLACES:
            return result
        gamma, beta = _argument(args, kwargs, _PLACES[func], "weight"), None
        if gamma is not None and id(gamma) not in self.scales:
            return result
        self.seen.add(id(gamma))
        if func not in (F.rms_norm, torch.rms_norm):
            beta = _argument(args, kwargs, _PLACES[func] + 1, "bias")
        centre: Any = 0.0 if beta is None else beta
        if beta is not None and func not in _TRAILING:
            centre = beta.view(-1, *[1] * (result.ndim - 2))
        noise = standard_normal(result.shape, like=result, generator=self.generator)
        return result + self.alpha * noise * (result - centre)


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)
