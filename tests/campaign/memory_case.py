"""Calls within a memory budget, in a process of their own; prints bytes as JSON, a line for each call.

Arguments: network, method, budget in bytes, calls with commas or "all", CPU seconds for each call. Peaks
are those of the process's resident memory above what it had before; what is left is what it has more afterwards.
Freed memory goes back to the system, so that nothing that was freed hides what was asked for.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laplace_plus as lp
from benchmarks.limits.measuring import keep_freed_memory, peak_memory
from benchmarks.limits.models import UNet, resnet18
from laplace_plus.errors import LaplacePlusError

Data = list[tuple[Tensor, Tensor]]


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


class Radiance(nn.Module):
    """A field of four numbers over the unit cube, 256 wide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def problem(name: str) -> tuple[nn.Module, Data, Any]:
    """A network, two batches, and the likelihood."""
    if name == "U-Net":
        batches = [(torch.randn(2, 3, 256, 256), torch.randint(3, (2, 256, 256))) for _ in range(2)]
        return UNet(3), batches, lp.Categorical(output_axis=-1)
    if name == "field":
        return Radiance(), [(torch.rand(20_000, 3), torch.randn(20_000, 4)) for _ in range(2)], lp.Gaussian(0.1)
    if name == "ResNet-18":
        return resnet18(10), [(torch.randn(8, 3, 64, 64), torch.arange(8) % 10) for _ in range(2)], "classification"
    return Transformer(), [(torch.randint(1000, (8, 128)), torch.arange(8) % 2) for _ in range(2)], "classification"


METHODS: dict[str, Callable[..., Any]] = {
    "Full": lp.Full,
    "Diagonal": lp.Diagonal,
    "KFAC": lp.KFAC,
    "EKFAC": lambda *args, **options: lp.KFAC(*args, eigenvalue_corrected=True, **options),
    "limited rank": lambda *args, **options: lp.KFAC(*args, factor_rank=8, **options),
    "last layer": lambda *args, **options: lp.Full(*args, parameters="last_layer", **options),
    "last-layer KFAC": lambda *args, **options: lp.KFAC(*args, parameters="last_layer", **options),
    "last-layer Diagonal": lambda *args, **options: lp.Diagonal(*args, parameters="last_layer", **options),
    "VariationalLastLayer": lambda *args, **o: lp.VariationalLastLayer(*args, max_iterations=5, **o),
    "ABNN": lambda *args, **options: lp.ABNN(*args, n_members=2, epochs=1, **options),
    "TrainingFreeLoRA": lambda *args, **o: lp.TrainingFreeLoRA(*args, n_samples=2, halvings=2, **o),
    "LowRank": lambda *args, **o: lp.LowRank(*args, rank=2, max_restarts=1, remainder_probes=1, remainder_depth=2, **o),
    "Subnetwork": lambda *args, **options: lp.Subnetwork(*args, lp.LargestMagnitude(50), **options),
    "SampledLaplace": lambda *args, **o: lp.SampledLaplace(
        *args, n_samples=2, solver={"name": "cg", "max_iterations": 2}, **o
    ),
    "NullSpace": lambda *args, **options: lp.NullSpace(*args, rows="loss", n_samples=2, **options),
    "VIKING": lambda *args, **options: lp.VIKING(*args, rows="loss", n_samples=2, **options),
    "Riemannian": lambda *args, **o: lp.Riemannian(*args, tangent="Diagonal", n_samples=1, **o),
    "MetricBNN": lambda *args, **o: lp.MetricBNN(
        *args,
        n_particles=2,
        n_steps=2,
        n_refinements=1,
        latent=lp.LatentModel(dimension=1, hidden=(4,), epochs=2, tolerance=1e9),
        **o,
    ),
    "SWAG": lambda *args, **o: lp.SWAG(*args, rank=2, n_snapshots=2, n_members=2, **o),
    "Mixture": lambda *args, **options: Mixed(*args, **options),
    "SpatialField": lambda *args, **o: lp.SpatialField(*args, box=[[0.0] * 3, [1.0] * 3], resolution=32, **o),
}
# One backward pass for each image, in place of one for each pixel and class.
for _name in ("Diagonal", "KFAC", "EKFAC", "limited rank", "Riemannian"):
    METHODS[f"{_name} of sampled labels"] = partial(METHODS[_name], backend=lp.Native("ggn_mc"))


class Mixed:
    """A mixture of two last layers, of the same network here, with a posterior's calls."""

    def __init__(self, *args: Any, **options: Any):
        self.members = [METHODS["last layer"](*args, **options) for _ in range(2)]

    def fit(self, data: Data, generator: torch.Generator) -> None:
        self.mixture = lp.Mixture([member.fit(data, generator=generator) for member in self.members])

    def predictive(self, x: Tensor, **options: Any) -> Any:
        return self.mixture.predictive(x, **options)


def adapted(model: nn.Module) -> nn.Module:
    """With adapters of linear layers, but for those of attention, which no call goes through, or else convolutions."""
    peft = importlib.import_module("peft")
    kinds = {type(own) for own in model.modules()}
    kind = nn.Linear if nn.Linear in kinds else nn.Conv2d
    layers = [name for name, own in model.named_modules() if type(own) is kind]
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def calls(posterior: Any, data: Data) -> dict[str, Callable[[], Any]]:
    """What is called, in turn."""
    x = data[0][0]

    def sampled() -> Any:
        if hasattr(posterior, "prior_precision"):
            # The tuned prior of an untrained network lets weights go so far that its outputs overflow.
            posterior.prior_precision = 1e4
        return posterior.predictive(x, method="sampled", n_samples=2)

    # For speed.
    brief = {"max_steps": 1, "optimum_tolerance": 100.0} if isinstance(posterior, lp.SampledLaplace) else {}
    some = {"n_samples": 20} if getattr(posterior, "default_method", None) == "sampled" else {}  # of 100: for speed
    return {
        "fit": lambda: posterior.fit(data, generator=torch.Generator().manual_seed(0)) and None,
        "tuning": lambda: posterior.fit_prior_precision(**brief) and None,
        "evidence": lambda: posterior.fit_prior_precision("marginal_likelihood") and None,
        "first prediction": lambda: posterior.predictive(x, **some),
        "prediction": lambda: posterior.predictive(x, **some),
        "joint": lambda: posterior.functional_posterior(x[:3], joint=True),  # any two of them meet
        "information": lambda: posterior.predictive(x, **some).mutual_information(),
        "sample": lambda: posterior.sample(2),
        "sampled": sampled,
    }


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so much CPU time."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def tell(call: str, **found: Any) -> None:
    sys.stdout.write(json.dumps({"call": call, **found}) + "\n")
    sys.stdout.flush()


def main(name: str, method: str, budget: int, wanted: str, seconds: float, tell: Any = tell) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Imports, and buffers that libraries keep.
    small: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    few = [(torch.rand(4, 3), torch.arange(4) % 2)]
    small = adapted(small) if method == "TrainingFreeLoRA" else small
    warm = METHODS[method](small, "classification") if method != "Subnetwork" else lp.Diagonal(small, "classification")
    for call, function in calls(warm, few).items():
        try:
            if wanted == "all" or call in wanted.split(","):
                function()
        except (LaplacePlusError, AttributeError):  # a mixture has few of the calls
            pass
    model, data, likelihood = problem(name)
    model = adapted(model).eval() if method == "TrainingFreeLoRA" else model.eval()
    with torch.no_grad():
        model(data[0][0][:1])
    keep_freed_memory(False)
    ctypes.CDLL(None).mallopt(-3, 2**15)  # arrays from this size on: those of one example would leave gaps in the heap

    def one_pass() -> None:
        model.zero_grad()
        model(data[0][0][:1]).square().sum().backward()
        model.zero_grad()

    one_pass()
    tell("network", peak=1e6 * peak_memory(one_pass), left=sum(p.nbytes for p in model.parameters()))
    posterior = METHODS[method](model, likelihood, memory_budget=budget)
    for call, function in calls(posterior, data).items():
        if wanted != "all" and call not in wanted.split(","):
            continue
        before, start = resident(), time.process_time()
        kept: list[Any] = []

        def run(function: Any = function, kept: list[Any] = kept) -> None:
            kept.append(function())

        try:
            with cpu_limit(seconds):
                peak = 1e6 * peak_memory(run)
        except TimeoutError:
            high = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
            tell(call, stopped=seconds, peak=high - before)
        except (LaplacePlusError, NotImplementedError, AttributeError) as error:
            tell(call, failed=f"{type(error).__name__}: {error}"[:300])
        else:
            tell(call, peak=peak, left=max(0, resident() - before), seconds=time.process_time() - start)
        if call == "fit" and not kept:
            break
        kept.clear()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
