"""Networks in half precision and under autocast: activations are rounded there, sums of their products are not."""

from __future__ import annotations

import copy

import pytest
import torch
from problems import whole_tensors
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.checks import PRODUCTS
from laplace_plus.curvature import KroneckerStructure, Native
from laplace_plus.likelihoods import Categorical
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


class Mixed(nn.Module):
    """Layers of every rule: two convolutions, an embedding, attention, a tied map, norms and a bare scale."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 2, groups=2)
        self.norm, self.after = nn.GroupNorm(2, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.twice, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.norm(self.second(torch.tanh(self.first(x)))).flatten(2).mT
        h = torch.cat([h, self.embedding(tokens).to(h.dtype)], 1)
        h = self.after(h + self.attention(h, h, h, need_weights=False)[0])
        h = torch.tanh(self.twice(torch.tanh(self.twice(h)))) * self.scale
        return self.head(h.mean(1))


def networks(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A network in half precision, and in float32 with the same weights."""
    torch.manual_seed(0)
    low = Mixed().to(dtype).eval()
    return low, copy.deepcopy(low).float()


def data(dtype: torch.dtype, n: int = 24) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, 4, 4, generator=generator).to(dtype)
    return (x, torch.randint(0, 7, (n, 3), generator=generator)), torch.randint(0, 5, (n,), generator=generator)


def blocks(model: nn.Module, inputs, target: Tensor, sharing: str) -> dict[str, dict[str, Tensor]]:
    likelihood = Categorical()
    selection = "all" if sharing == "expand" else lambda name, _: "embedding" not in name  # which reduce refuses
    network = Network(model, selection, likelihood.arrange)
    curvature, _ = Native().accumulate(None, network, likelihood, Batch(inputs, target), KroneckerStructure(sharing))
    return {layout.key: whole_tensors(block) for layout, block in curvature}


def assert_close(got: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]], tolerance: float) -> None:
    """Every tensor within a share of its largest entry, in float32 at least."""
    assert got.keys() == wanted.keys()
    for key, tensors in wanted.items():
        for name, tensor in tensors.items():
            ours = got[key][name]
            assert ours.dtype == (torch.float64 if name == "count" else torch.float32)
            assert bool(ours.isfinite().all())
            assert float((ours - tensor).abs().max()) <= tolerance * float(tensor.abs().max()), f"{key} {name}"


@pytest.mark.diagonal
@HALVES
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_those_of_float32_up_to_the_networks_own_rounding(dtype, sharing):
    low, high = networks(dtype)
    (x, tokens), target = data(dtype)
    wanted = blocks(high, (x.float(), tokens), target, sharing)
    # A dozen layers, each of which rounds to 8 or 11 bits.
    tolerance = 12 * torch.finfo(dtype).eps
    assert_close(blocks(low, (x, tokens), target, sharing), wanted, tolerance)


@pytest.mark.quick("dtype1")
@HALVES
def test_fits_and_predictions_under_autocast(dtype):
    low, high = networks(dtype)
    (x, tokens), target = data(dtype)
    inputs, tolerance = (x.float(), tokens), 12 * torch.finfo(dtype).eps
    for cls in (lp.KFAC, lp.Diagonal, lp.Full):
        wanted = cls(high, "classification").fit([(inputs, target)])
        halves = cls(low, "classification").fit([((x, tokens), target)])
        with torch.autocast("cpu", dtype=dtype):
            ambient = cls(high, "classification").fit([(inputs, target)])
            variance, predicted = ambient.variance(), ambient.predictive(inputs)
            assert torch.is_autocast_enabled("cpu")
        torch.testing.assert_close(variance, wanted.variance(), rtol=tolerance, atol=0)
        torch.testing.assert_close(halves.variance(), wanted.variance(), rtol=tolerance, atol=0)
        mean = wanted.predictive(inputs).mean
        for got in (predicted, halves.predictive((x, tokens))):
            assert got.mean.dtype == torch.float32
            torch.testing.assert_close(got.mean, mean, rtol=0, atol=tolerance)


def rounded_rows(model: nn.Module, inputs, layers: list[str]) -> dict[str, Tensor]:
    """What the layers take in, as the network rounded it."""
    seen: dict[str, Tensor] = {}

    def note(name: str):
        return lambda module, args, output: seen.__setitem__(name, args[0].detach())

    handles = [model.get_submodule(name).register_forward_hook(note(name)) for name in layers]
    model(*inputs)  # with derivatives: without them, attention runs in a kernel that rounds elsewhere
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.diagonal
@HALVES
@pytest.mark.parametrize("ambient", [False, True])
def test_products_are_summed_in_float32(dtype, ambient):
    low, high = networks(dtype)
    (x, tokens), target = data(dtype, 300)  # more rows than 8 bits can count
    model, inputs = (high, (x.float(), tokens)) if ambient else (low, (x, tokens))
    with torch.autocast("cpu", dtype=dtype, enabled=ambient):
        rows = rounded_rows(model, inputs, ["second", "head"])
        posterior = lp.KFAC(model, "classification").fit([(inputs, target)])
    found = {layout.key: whole_tensors(block) for layout, block in posterior.state.curvature}
    patches = torch.nn.functional.unfold(rows["second"].double(), 2).unflatten(1, (2, -1))  # [B, G, i, S]
    patches = torch.cat([patches, torch.ones_like(patches[:, :, :1])], 2)
    features = torch.cat([rows["head"].double(), torch.ones(300, 1)], 1)
    for key, want in [
        ("second.weight+second.bias (matrix)", torch.einsum("bgis,bgjs->gij", patches, patches)),
        ("head.weight+head.bias (matrix)", (features.T @ features)[None]),
    ]:
        # Sums in half precision would be off by 4e-3 (bfloat16) and 5e-4 at the least.
        torch.testing.assert_close(found[key]["right"].double(), want, rtol=3e-6, atol=3e-6 * float(want.max()))
        assert int(found[key]["right"][0, -1, -1]) == found[key]["count"]


@HALVES
def test_the_tolerance_of_half_precision_ends_with_the_call(dtype):
    """Else later products in single precision would be judged by it."""
    model, seen = nn.Linear(3, 2).to(dtype), []
    model.register_forward_hook(lambda *_: seen.append(PRODUCTS.get()))
    lp.Diagonal(model, "classification").fit([(torch.randn(6, 3).to(dtype), torch.arange(6) % 2)])
    assert {*seen} == {torch.finfo(dtype).eps}
    assert PRODUCTS.get() == 0
