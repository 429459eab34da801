"""Random draws from a given generator, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributions import Distribution


def standard_normal(shape: Sequence[int], *, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers with the dtype and device of ``like``."""
    device = like.device if generator is None else generator.device
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=like.dtype).to(like.device)


def bernoulli(probabilities: Tensor, *, generator: torch.Generator | None) -> Tensor:
    """Zeros and ones of the given probabilities."""
    device = probabilities.device if generator is None else generator.device
    return torch.bernoulli(probabilities.to(device), generator=generator).to(probabilities.device)


def poisson(rates: Tensor, *, generator: torch.Generator | None) -> Tensor:
    """Counts of the given rates."""
    device = rates.device if generator is None else generator.device
    return torch.poisson(rates.to(device), generator=generator).to(rates.device)


def categorical(probabilities: Tensor, *, generator: torch.Generator | None) -> Tensor:
    """Class indices ``[...]`` of probabilities ``[..., C]``."""
    device = probabilities.device if generator is None else generator.device
    table = probabilities.reshape(-1, probabilities.shape[-1]).to(device)
    if not len(table):
        return torch.zeros(probabilities.shape[:-1], dtype=torch.long, device=probabilities.device)
    labels = torch.multinomial(table, 1, generator=generator)
    return labels.reshape(probabilities.shape[:-1]).to(probabilities.device)


def draw_seed(generator: torch.Generator) -> int:
    """A seed for another generator; advances the given one by one draw."""
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=generator.device, dtype=torch.int64))


def from_distribution(distribution: Distribution, *, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """One sample of a ``torch.distributions`` object, which itself only uses the global generators.

    Args:
        distribution: Any distribution whose parameters are on ``device``.
        device: Where the sample is drawn.
        generator: Source of randomness; the global generators are left as they were if one is given.
    """
    with global_randomness(device, generator):
        return distribution.sample()


@contextmanager
def global_randomness(device: torch.device, generator: torch.Generator | None) -> Iterator[None]:
    """Seed the global generators of the CPU and of ``device`` from ``generator``, and restore them afterwards."""
    if generator is None:
        yield
        return
    seed = draw_seed(generator)
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would also reseed the devices that are not forked.
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
