"""A posterior over several GPUs: each rank fits its share of the data, and all of them get the same posterior.

torchrun --nproc-per-node 4 configs/distributed_example.py runs/distributed_example

On a machine without GPUs it runs on the CPU. Put your own network and data in place of `trained_network` and
`examples`; the network may also be wrapped in DistributedDataParallel. One that fully_shard (FSDP2) has sharded
stays so, within `with lp.distributed.together(posterior):` after the fit.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_plus as lp


def trained_network() -> nn.Module:
    """The same weights on every rank; load your own from a file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    x, y = examples(1000, seed=0)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def examples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two clouds of points."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    return torch.randn(n, 2, generator=generator) + 2 * labels[:, None], labels


def share(n: int, seed: int, batch_size: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    """This rank's share of the examples. Shares may differ in size: every example counts once.

    A DistributedSampler repeats some examples to make shares equal, which would count these twice.
    """
    x, y = examples(n, seed)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size)


def main() -> None:
    """Fit, tune, evaluate and save."""
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    # The timeout is the longest that a rank waits for one with a larger share.
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(hours=1))
    model = trained_network().to(device)

    posterior = lp.distributed.fit(lp.KFAC(model, "classification"), share(1001, seed=0))  # sums over all ranks
    posterior.fit_prior_precision("marginal_likelihood")  # the same on every rank, without communication

    totals = torch.zeros(3, device=device)
    for x, y in share(503, seed=1):  # each rank predicts its own inputs
        prediction = posterior.predictive(x.to(device))
        totals[0] += prediction.log_prob(y.to(device)).sum()
        totals[1] += (prediction.mean.argmax(-1) == y.to(device)).sum()
        totals[2] += len(y)
    dist.all_reduce(totals)

    if dist.get_rank() == 0:
        posterior.save(sys.argv[1])
        posterior = lp.load(sys.argv[1], model)
        log_likelihood, correct, n = totals.tolist()
        print(f"{posterior!r}: NLL {-log_likelihood / n:.4f}, accuracy {correct / n:.4f} on {n:.0f} examples")  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
