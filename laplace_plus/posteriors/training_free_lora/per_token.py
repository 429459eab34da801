"""Noise of its own for each token of a sequence, as the authors' code has it (flipout; Wen et al., 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from laplace_plus.likelihoods.sampling import standard_normal


class TokenNoise(TorchFunctionMode):
    """Adds ``M (r ∘ E (x ∘ s))`` to each token's ``A x``, with fresh random signs r and s for each token x.

    Uses of a weight are told by the tensor itself, so that the network is left as it is and other threads are, too.

    Args:
        noise: By the identity of a weight A ``[r, d_in]``, the pair of M ``[r, q]`` and E ``[q, d_in]``.
        generator: The source of the signs.
    """

    def __init__(self, noise: Mapping[int, tuple[Tensor, Tensor]], generator: torch.Generator):
        super().__init__()
        self.noise, self.generator, self.used = noise, generator, 0

    def signs(self, *shape: int, like: Tensor) -> Tensor:
        """Random signs."""
        return standard_normal(shape, like=like, generator=self.generator).sign()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not linear or len(args) < 2 or id(args[1]) not in self.noise:
            return result
        m, e = self.noise[id(args[1])]
        self.used += 1
        x = args[0].to(e)
        rows = (x * self.signs(*x.shape, like=e)) @ e.mT
        return result + ((rows * self.signs(*rows.shape, like=e)) @ m.mT).to(result)
