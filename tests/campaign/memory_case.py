"""One fit and one prediction within a memory budget, in a process of its own; prints bytes as JSON.

Peaks are those of the process's resident memory above what it had before the call. Freed memory goes back to the
system, so that nothing that was freed hides what was asked for.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import laplace_plus as lp
from benchmarks.limits.measuring import keep_freed_memory, peak_memory


class Transformer(nn.Module):
    """Twelve layers, 128 wide, and two classes for a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 128), nn.Embedding(128, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.layers(hidden).mean(1))


def resnet() -> nn.Module:
    from torchvision.models import resnet18  # noqa: PLC0415  -- only here

    return resnet18(num_classes=10)


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """A network, two batches' inputs and targets, and the likelihood."""
    if name == "ResNet-18":
        return resnet(), torch.randn(16, 3, 64, 64), torch.arange(16) % 10, "classification"
    return Transformer(), torch.randint(1000, (16, 128)), torch.arange(16) % 2, "classification"


METHODS: dict[str, Callable[..., Any]] = {
    "KFAC": lp.KFAC,
    "Diagonal": lp.Diagonal,
    "last layer": lambda *args, **options: lp.Full(*args, parameters="last_layer", **options),
}


def live() -> dict[int, int]:
    """Bytes of all tensors' memory that is alive, by address."""
    storages = [item.untyped_storage() for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def main(name: str, method: str, budget: int) -> dict[str, float]:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, x, y, likelihood = problem(name)
    small = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))  # imports, and buffers that libraries keep
    METHODS[method](small, "classification").fit([(torch.randn(4, 3), torch.arange(4) % 2)]).predictive(
        torch.ones(2, 3)
    )
    with torch.no_grad():
        model.eval()(x[:1])
    keep_freed_memory(False)
    posterior = METHODS[method](model, likelihood, memory_budget=budget)
    found: list[Any] = []
    half = len(x) // 2
    result = {"network": sum(p.nbytes for p in model.parameters())}
    result["fit"] = 1e6 * peak_memory(lambda: posterior.fit([(x[:half], y[:half]), (x[half:], y[half:])]))
    gc.collect()
    held = {id(t): t.nbytes for t in posterior.state()[1].values()}
    result["state"] = sum(held.values())
    before = live()
    result["predict"] = 1e6 * peak_memory(lambda: found.append(posterior.predictive(x[:half])))
    gc.collect()
    result["kept"] = sum(size for address, size in live().items() if before.get(address) != size)
    return result


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
