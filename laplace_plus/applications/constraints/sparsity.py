"""Sparsity as a constraint: the least salient weights are zero, along a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.constraints.correcting import Correction, FunctionalModel
from laplace_plus.linalg import Status


class Sparse:
    """The constraint ``θ[m] = 0``, where m are given entries, or the least salient ones on a schedule.

    The corrected gradient is γ θ on m and u off it. After t of T steps, the share ``s (1 − (1 − t/T)³)`` of weights is
    held, chosen anew every so many steps. With SGD they fall as ``(1 − lr γ)^t``; with Adam, γ of about 10 is needed.
    :func:`~laplace_plus.applications.constraints.project` makes them zero. An object belongs to one network.

    Args:
        sparsity: s, in (0, 1]; or bool tensors by parameter name, True where weights shall be zero.
        steps: T, counted from the end of the warm-up; 0 holds all at once.
        every: Steps between choices; the last is at T.
        eligible: Whether a parameter's entries count, by its name and value; by default those of two and more axes.
        saliency: Scores by name from parameters by name; the smallest are held. By default ``|θ|``.

    Attributes:
        masks: Bool tensors by parameter name, True where weights are held; ``held`` is the share they were chosen for.

    Sources: Roy, Hauberg and Krämer (2025), arXiv 2510.19634; Zhu and Gupta (2017), "To prune, or not to prune".
    """

    def __init__(
        self,
        sparsity: float | Mapping[str, Tensor],
        *,
        steps: int = 0,
        every: int = 100,
        eligible: Callable[[str, Tensor], bool] = lambda _, value: value.ndim > 1,
        saliency: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
    ):
        checks.count("steps", steps, 0)
        checks.count("every", every, 1)
        self.masks = dict(sparsity) if isinstance(sparsity, Mapping) else {}
        sizes = [(int(mask.sum()), mask.numel()) for mask in self.masks.values()] or [(0, 1)]
        share = sum(a for a, _ in sizes) / sum(b for _, b in sizes) if isinstance(sparsity, Mapping) else sparsity
        checks.number("sparsity", share, above=0.0, most=1.0)
        self.sparsity, self.steps, self.every = share, steps, every
        self._eligible, self._saliency = eligible, saliency
        self.held = share if self.masks else 0.0

    def share(self, number: int) -> float:
        """The share of weights that is held in a step."""
        left = 1 - number / self.steps if number < self.steps else 0.0
        return self.sparsity * (1 - left**3)

    def __call__(self, model: FunctionalModel, points: Any = None) -> Tensor:
        """The held weights, ``[m]``; ``points`` are not used."""
        return torch.cat([values[mask] for values, mask in self._pairs(model.parameters).values()])

    def correct(self, parameters: Mapping[str, Tensor], number: int, rate: float) -> Correction:
        """The gradients that LSMR would give, in place; chooses first, where the schedule says so."""
        if self.held < self.share(number) and (number % self.every == 0 or number >= self.steps):
            self.choose(parameters, self.share(number))
        lengths: list[Tensor] = []
        with torch.no_grad():
            for parameter, mask in self._pairs(parameters).values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                on = mask.to(parameter.dtype)
                held = on * parameter
                parameter.grad.addcmul_(on, parameter.grad, value=-1).add_(held, alpha=rate)
                lengths.append(torch.linalg.vector_norm(held, dtype=torch.promote_types(held.dtype, torch.float32)))
        size = self.held * sum(mask.numel() for mask in self.masks.values())
        violation = float(torch.stack(lengths).norm()) / size**0.5 if lengths else 0.0
        return Correction(violation, 0.0, 0, Status.CONVERGED)

    def choose(self, parameters: Mapping[str, Tensor], share: float) -> None:
        """Hold a share of the eligible entries, those with the smallest scores; of equal ones the first."""
        values = {name: p.detach() for name, p in parameters.items() if self._eligible(name, p)}
        given = {name: p.abs() for name, p in values.items()} if self._saliency is None else self._saliency(values)
        each = [checks.shape(f"The saliency of {name!r}", given.get(name), p.shape) for name, p in values.items()]
        scores = torch.cat([own.detach().flatten().float() for own in each])
        if count := round(share * len(scores)):
            limit = torch.kthvalue(scores, count).values
            held = scores < limit
            held[(scores == limit).nonzero()[: count - int(held.sum()), 0]] = True
            parts = held.split([p.numel() for p in values.values()])
            self.masks = {name: part.view_as(p) for (name, p), part in zip(values.items(), parts, strict=True)}
            self.held = share

    def _pairs(self, parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        for name, mask in self.masks.items():
            own = checks.shape(f"The trained parameter {name!r}", parameters.get(name), mask.shape)
            self.masks[name] = mask.to(own.device)
        return {name: (parameters[name], mask) for name, mask in self.masks.items()}
