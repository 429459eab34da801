"""Peak memory of each rank while a network that ``fully_shard`` has sharded is fitted, tuned and predicts; on the CPU.

    python -m benchmarks.sharded.memory --ranks 2 4 [--plain]

The bar is ``(network + factors) / ranks + the largest layer``, and 10 %. Memory is the resident set at its largest,
less what the process had before the network. One process without shards tells the working memory of a pass
(activations, buffers of matrix products), which is taken off. ``--plain`` runs the network forward and backward alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import laplace_plus as lp

MIB = 2**20
CLASSES, LENGTH = 4, 16


class Classifier(nn.Module):
    """A GPT with adapters, whose last token tells a few classes."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=512, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=8, use_cache=False)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.bos_token_id = config.eos_token_id = None
        adapters = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        self.body = get_peft_model(GPT2LMHeadModel(config), adapters)
        for name, parameter in self.body.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits ``[B, C]``."""
        return self.body(input_ids=input_ids).logits[:, -1, :CLASSES]


def resident(name: str) -> float:
    """A line of the kernel's account of this process, in MiB: VmRSS now, VmHWM at its largest."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def bytes_of(tensors: Any) -> float:
    """Their memory in MiB."""
    return sum(tensor.nbytes for tensor in tensors) / MIB


def used(width: int, layers: int, rank: int, size: int, plain: bool) -> dict[str, float]:
    """The sizes of a network and its factors, and the memory of this process before and at its largest, in MiB."""
    before = resident("VmRSS")
    net = Classifier(width, layers)
    blocks = net.body.base_model.model.transformer.h
    found = {"network": bytes_of({id(own): own for own in net.parameters()}.values())}
    found["largest layer"] = max(bytes_of(block.parameters()) for block in blocks)
    if size > 1:
        for block in blocks:
            for part in (block.attn, block.mlp, block):  # FSDP2 holds a part twice while it gathers it
                fully_shard(part)
                part.set_modules_to_backward_prefetch([part])  # itself: no other part is gathered ahead of its turn
        fully_shard(net)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the largest is what it is now
    source = torch.Generator().manual_seed(rank)
    x, y = torch.randint(512, (4, LENGTH), generator=source), torch.randint(CLASSES, (4,), generator=source)
    if plain:
        nn.functional.cross_entropy(net(x), y).backward()
        return found | {"peak": resident("VmHWM") - before, "factors": 0.0}
    posterior = lp.KFAC(net, "classification", parameters="lora", factor_rank=10)
    lp.distributed.fit(posterior, [(x, y)])
    with lp.distributed.together(posterior):
        posterior.fit_prior_precision("marginal_likelihood")
        posterior.predictive(x)
    found["peak"] = resident("VmHWM") - before
    found["factors"] = sum(block.n_bytes() for _, block in posterior.state.curvature) / MIB
    return found


def run(rank: int, size: int, folder: str, width: int, layers: int, plain: bool) -> None:
    """What one rank does, after the same with a tiny network, which loads what is loaded once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{size}", rank=rank, world_size=size)
    used(32, 2, rank, size, plain)
    gc.collect()
    found = used(width, layers, rank, size, plain)
    place = Path(folder) / f"{size}.json"
    if rank == 0:
        place.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--plain", action="store_true")
    chosen = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed tensors leave the process
    working = 0.0
    with tempfile.TemporaryDirectory() as parts:
        for n in (1, *chosen.ranks):
            torch.multiprocessing.spawn(run, (n, parts, chosen.width, chosen.layers, chosen.plain), nprocs=n)
            own = json.loads((Path(parts) / f"{n}.json").read_text())
            bar = (own["network"] + own["factors"]) / n + own["largest layer"] * (n > 1)
            working = working or own["peak"] - bar
            sizes = ", ".join(f"{name} {value:.1f}" for name, value in own.items())
            sys.stdout.write(
                f"{n} ranks, MiB: {sizes}; without working memory {own['peak'] - working:.1f}; {bar:.1f}\n"
            )
            sys.stdout.flush()
