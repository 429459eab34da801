"""The checks of sharded networks, beside those of worker.py; called as that."""

from __future__ import annotations

import importlib.util
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import laplace_plus as lp
from laplace_plus import errors
from laplace_plus.distributed import fit, together, update

specification = importlib.util.spec_from_file_location("ranks_worker", Path(__file__).with_name("worker.py"))
assert specification is not None and specification.loader is not None
worker: Any = importlib.util.module_from_spec(specification)
specification.loader.exec_module(worker)
check, close, raised, wrapped = worker.check, worker.close, worker.raised, worker.wrapped


class Layer(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Means over tokens that a mask keeps, with a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layers = nn.Embedding(6, 5), nn.ModuleList([Layer(5), Layer(5)])
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.table.weight
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        kept = attention_mask[:, :, None]
        return self.head((x * kept).sum(1) / kept.sum(1))


def sharded() -> nn.Module:
    net = Words()
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def batches() -> list[dict[str, Tensor]]:
    source, found = torch.Generator().manual_seed(1), []
    for n, length in ((3, 4), (2, 3), (4, 2), (1, 4), (2, 5)):
        mask = torch.ones(n, length, dtype=torch.long)
        mask[0, length - 1 :] = 0
        found.append({"input_ids": torch.randint(6, (n, length), generator=source), "attention_mask": mask})
        found[-1]["labels"] = torch.randint(6, (n,), generator=source)
    return found


def shares(rank: int, size: int) -> list[dict[str, Tensor]]:
    """Four batches for rank 0, one for the last rank; none for the others."""
    return batches()[:4] if rank == 0 else batches()[4:] if rank == size - 1 else []


def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def compare(kind: Any, rank: int, size: int, **options: Any) -> Any:
    alone = kind(Words(), "classification", **options).fit(batches())
    ours = fit(kind(sharded(), "classification", **options), shares(rank, size))
    assert "together" in raised(errors.UnsupportedError, lambda: ours.predictive(inputs(batches()[0])))
    with together(ours):
        for posterior in (ours, alone):
            posterior.fit_prior_precision("marginal_likelihood")
        close(ours.prior_precision, alone.prior_precision, 1e-10)
        terms = alone.log_marginal_likelihood().abs() + alone.n_parameters
        close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-10, terms)
        own = shares(rank, size)[: 2 + rank] or batches()[:1]
        found, expected = ours.predict(own), alone.predict(own)
        close(found.mean, expected.mean, 1e-10)
        x = inputs(own[0])
        close(ours.functional_posterior(x).covariance, alone.functional_posterior(x).covariance, 1e-10)
    return ours


LAYERS = ["layers.*"]


@check
def kronecker_factors(rank: int, folder: Path) -> None:
    ours = compare(lp.KFAC, rank, torch.distributed.get_world_size(), parameters=LAYERS)
    assert all(type(parameter).__name__ == "DTensor" for parameter in ours.model.parameters())
    ours.model.train()
    assert ours.model.layers[0].norm.weight.requires_grad and all(p.grad is None for p in ours.model.parameters())


@wrapped
def last_layers(rank: int, folder: Path) -> None:
    """The head is tied to the embedding, which is not in the selection."""
    ours = compare(lp.KFAC, rank, torch.distributed.get_world_size(), parameters="last_layer")
    assert ours.parameter_names == ("head.weight",)


@wrapped
def diagonals(rank: int, folder: Path) -> None:
    compare(lp.Diagonal, rank, torch.distributed.get_world_size(), parameters=LAYERS)


@wrapped
def corrected_eigenvalues_and_updates(rank: int, folder: Path) -> None:
    size = torch.distributed.get_world_size()
    compare(lp.KFAC, rank, size, parameters=LAYERS, eigenvalue_corrected=True)
    alone = lp.KFAC(Words(), "classification", parameters=LAYERS).fit(batches()).update(batches()[1:3])
    ours = fit(lp.KFAC(sharded(), "classification", parameters=LAYERS), shares(rank, size))
    update(ours, batches()[1:3] if rank == 1 else [])
    close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-10)
    assert ours.n_data == alone.n_data


@wrapped
def what_a_rank_cannot_do(rank: int, folder: Path) -> None:
    ours = lp.KFAC(sharded(), "classification", parameters=LAYERS)
    assert "lp.distributed.fit" in raised(errors.UnsupportedError, lambda: ours.fit(batches()))
    tied = lp.KFAC(sharded(), "classification")
    assert "No rule" in raised(errors.UnsupportedError, lambda: fit(tied, batches()))
    fit(ours, shares(rank, torch.distributed.get_world_size()))
    with together(ours):
        message = raised(errors.UnsupportedError, lambda: ours.predictive(inputs(batches()[0]), method="sampled"))
    assert "cannot be replaced" in message
    with torch.no_grad():
        ours.model.layers[0].norm.bias.add_(1)
    assert "no longer" in raised(errors.ModelChangedError, ours.summary)


@check
def a_rank_that_fails_within_a_pass(rank: int, folder: Path) -> None:
    """The others wait within the layers. The group is gone afterwards: this check is the last one."""
    net, started = sharded(), time.perf_counter()
    wrong = partial(fit, lp.KFAC(net, "classification", parameters=LAYERS), shares(rank, 2))
    if rank == 1:
        net.layers[1].down.forward = _raise
        assert raised(ValueError, wrong) == "an odd input"
    else:
        assert "Rank 1 failed. ValueError: an odd input" in raised(errors.DistributedError, wrong)
    assert time.perf_counter() - started < 30


def _raise(x: Tensor) -> Tensor:
    raise ValueError("an odd input")


if __name__ == "__main__":
    worker.take_part(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
