"""What is pruned: weights, channels or neurons as numbered units, their saliency, and the order in which they go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.applications.uses.conditioning import Joint, Large, iterate_, parts
from laplace_plus.errors import ConfigurationError, SelectionError, UnsupportedError
from laplace_plus.network.network import Network
from laplace_plus.network.selection import Selected, select
from laplace_plus.posteriors import GaussianPosterior

Criterion = Literal["precision", "evidence", "magnitude"]
Unit = Literal["weight", "channel", "neuron"] | Sequence[str]

_AT_A_TIME = 32
"""Weights that are chosen by the evidence before it is looked at again; at most one in 64."""


class Units:
    """The units of a network's parameters, numbered, and the posterior's parts in terms of them."""

    def __init__(self, posterior: GaussianPosterior, unit: Unit):
        self.posterior, self.number = posterior, 0
        self.shapes: dict[str, torch.Size] = {}
        network, self.is_weights = posterior.network, unit == "weight"
        self.index = torch.full((network.n_parameters,), -1)
        if isinstance(unit, str):
            checks.choice("unit", unit, ("weight", "channel", "neuron"))
            self._by_layer(network, unit)
        else:
            self._by_name(network, unit)
        self.vector = posterior.laplace_model().vector
        self.index = self.index.to(self.vector.device)
        self.present = self.index[self.index >= 0].unique()
        if not len(self.present):
            expected, got = "selected weights of two axes or more, or names", ", ".join(network.parameter_names[:6])
            raise SelectionError("There is nothing to prune.", expected=expected, got=got)
        self.parts, self.precision = parts(posterior, self.index)

    def _place(self, network: Network, item: Selected, numbers: Tensor) -> None:
        own = numbers.expand(item.shape).flatten()
        start = network.offsets[item.name]
        self.index[start : start + item.size] = own if item.mask is None else own[item.mask.cpu()]

    def _by_layer(self, network: Network, unit: str) -> None:
        modules, named = dict(network.model.named_modules()), {item.name: item for item in network.selected}
        for item in network.selected:
            shape = item.shape
            if len(shape) < 2:  # noqa: PLR2004
                continue
            module = modules.get(item.layer)
            swapped = isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d | nn.Embedding)
            inner = [1] * (len(shape) - 2)
            if unit == "weight":
                numbers, count = torch.arange(shape.numel()).view(shape), shape.numel()
            elif (unit == "channel") != swapped:
                numbers, count = torch.arange(shape[0]).view(-1, 1, *inner), shape[0]
            else:  # each group of a convolution has inputs of its own
                groups = int(getattr(module, "groups", 1))
                first, count = torch.arange(shape[0]) // (shape[0] // groups) * shape[1], groups * shape[1]
                numbers = (first[:, None] + torch.arange(shape[1])).view(*shape[:2], *inner)
            self._place(network, item, self.number + numbers)
            prefix, _, own = item.name.rpartition(".")
            bias = named.get(f"{prefix}." * bool(prefix) + own.replace("weight", "bias"))
            if unit == "channel" and bias is not None and bias.shape == (count,):
                self._place(network, bias, self.number + torch.arange(count))
            self.shapes[item.name] = shape if unit == "weight" else torch.Size([count])
            self.number += count

    def _by_name(self, network: Network, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            names, covered = {item.name for item in select(network.model, [pattern])}, self.index >= 0
            own = [item for item in network.selected if item.name in names]
            if not own:
                expected, got = f"some of {', '.join(network.parameter_names[:6])}", repr(pattern)
                raise SelectionError("The posterior has no such parameters.", expected=expected, got=got)
            for item in own:
                start = network.offsets[item.name]
                if bool(covered[start : start + item.size].any()):
                    raise ConfigurationError("Units overlap.", expected="each parameter once", got=repr(pattern))
                self.index[start : start + item.size] = self.number
            self.shapes[pattern] = torch.Size()
            self.number += 1

    def saliency(self, criterion: Criterion) -> Tensor:
        """``[number]`` float64; NaN where there is nothing."""
        if criterion == "evidence":
            found = -torch.stack([part.changes(self.number) for part in self.parts]).sum(0)
        else:
            if criterion == "precision" and bool(self.precision.isnan().any()):
                what = "The diagonal of a precision is not known in a block so large."
                raise UnsupportedError(what, fix='Take criterion="evidence".')
            scale = self.precision if criterion == "precision" else 1.0
            squares = self.vector.double().square() * scale
            found = squares.new_zeros(self.number + 1).index_add_(0, self.index % (self.number + 1), squares)
            found = found.sqrt() if criterion == "magnitude" else found
        result = torch.full_like(found[:-1], math.nan)
        result[self.present] = found[self.present]
        return result

    def order(self, criterion: Criterion, share: float) -> tuple[Tensor, Tensor, Tensor]:
        """Units to prune, ``[K]``, the ranks of all ``[number]``, K for others, and changes of evidence ``[K]``."""
        count, scores = round(share * len(self.present)), self.saliency(criterion)
        if criterion == "evidence" and any(isinstance(part, Joint) for part in self.parts):
            chosen: list[Tensor] = []
            at_a_time = max(1, min(_AT_A_TIME, len(self.present) // 64)) if self.is_weights else 1
            each = torch.stack([part.changes(self.number) for part in self.parts])
            free = ~scores.isnan()
            while (left := count - sum(len(one) for one in chosen)) > 0:
                total = each.sum(0)[:-1].masked_fill(~free, -math.inf)
                chosen.append(total.topk(min(at_a_time, left)).indices)
                now = torch.zeros_like(free).index_fill_(0, chosen[-1], True)
                free &= ~now
                for place, part in enumerate(self.parts):
                    if part.eliminate(now):
                        each[place] = part.changes(self.number)
            order = torch.cat(chosen) if chosen else self.present[:0]
        else:
            order = scores.nan_to_num(math.inf).argsort(stable=True)[:count]
        rank = torch.full_like(scores, count, dtype=torch.long)
        rank[order] = torch.arange(count, device=rank.device)
        change = torch.stack([part.arrange(rank, count) for part in self.parts]).sum(0)
        return order, rank, change[order]

    def gone(self, rank: Tensor, n: int) -> Tensor:
        """Which entries ``[P]`` belong to the first n units."""
        return (rank[self.index] < n) & (self.index >= 0)

    def pruned(self, rank: Tensor, n: int, *, compensate: bool) -> Tensor:
        """The parameter vector without the first n units."""
        vector, gone = self.vector.clone(), self.gone(rank, n)
        if compensate and bool(gone.any()):
            large = torch.zeros_like(gone)
            for part in self.parts:
                part.move_(vector, n)
                if isinstance(part, Large):
                    large[part.index] = True
            vector[gone] = 0
            if bool((large & gone).any()):
                iterate_(vector, self.posterior, large & ~gone, self.precision)
        return vector.masked_fill_(gone, 0)
