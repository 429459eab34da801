"""Random draws from a given generator, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def standard_normal(shape: Sequence[int], *, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers with the dtype and device of ``like``."""
    device = like.device if generator is None else generator.device
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=like.dtype).to(like.device)


def draw_by(sampler: Callable[..., Tensor], parameters: Tensor, generator: torch.Generator | None) -> Tensor:
    """Samples of ``torch.bernoulli``, ``torch.poisson`` or the like, drawn on the generator's device."""
    device = parameters.device if generator is None else generator.device
    return sampler(parameters.to(device), generator=generator).to(parameters.device)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed for another generator; advances the given one, or torch's own, by one draw."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (1,), generator=generator, device=device, dtype=torch.int64))


def stage_generator(seed: int, stage: int) -> torch.Generator:
    """The random numbers of one stage, which do not depend on how many the stages before have drawn.

    Consecutive seeds differ by 2⁶⁴ divided by the golden ratio, which spreads them over all 64 bits.
    """
    return torch.Generator().manual_seed((seed + stage * 0x9E3779B97F4A7C15) % 2**63)


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
