"""The checks of sharded networks, beside those of worker.py; called as that."""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
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
def weights_of_half_precision(rank: int, folder: Path) -> None:
    """Factors have single precision, sums of ranks the same bits as those of one process over the same batches."""
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]
    alone, own = (nn.Sequential(*copy.deepcopy(layers)).bfloat16() for _ in range(2))
    torch.manual_seed(0)
    for network in (alone, own):
        for parameter in network.parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    for layer in (own[0], own[2]):
        fully_shard(layer)
    data = [(torch.randn(5, 4).bfloat16(), torch.randint(3, (5,))) for _ in range(torch.distributed.get_world_size())]
    ours = fit(lp.KFAC(fully_shard(own), "classification"), [data[rank]])
    expected = lp.KFAC(alone, "classification").fit(data)
    assert {block.dtype for _, block in ours.state.curvature} == {torch.float32}
    with together(ours):
        for posterior in (ours, expected):
            posterior.fit_prior_precision("marginal_likelihood")
        close(ours.prior_precision, expected.prior_precision, 1e-6)
        found = ours.predictive(data[rank][0]).mean
    close(found, expected.predictive(data[rank][0]).mean, 1e-6)


@wrapped
def files(rank: int, folder: Path) -> None:
    """Rank 0 saves alone; the file is loaded onto the whole network, and onto shards of any number of ranks."""
    ours = fit(
        lp.KFAC(sharded(), "classification", parameters=LAYERS), shares(rank, torch.distributed.get_world_size())
    )
    if rank == 0:
        ours.save(folder / "saved")
    torch.distributed.barrier()
    alone, again = lp.load(folder / "saved", Words()), lp.load(folder / "saved", sharded())
    close(alone.functional_posterior(inputs(batches()[0])).covariance, covariance(ours), 1e-10)
    close(covariance(again), covariance(ours), 1e-10)


def covariance(posterior: Any) -> Tensor:
    with together(posterior):
        return posterior.functional_posterior(inputs(batches()[0])).covariance


@wrapped
def adapters(rank: int, folder: Path) -> None:
    """Low-rank adapters of PEFT in a GPT with a tied head, padded batches with a label for each token."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    warnings.simplefilter("ignore")

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=12, n_layer=2, n_head=2, use_cache=False)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        options = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
        net = peft.get_peft_model(transformers.GPT2LMHeadModel(config), options).double()
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
        return net

    def split(net: nn.Module) -> nn.Module:
        for block in net.base_model.model.transformer.h:
            fully_shard(block)
        return fully_shard(net)

    source, every = torch.Generator().manual_seed(1), []
    for n, length in ((3, 8), (2, 6), (3, 5), (1, 4), (2, 7)):
        ids, mask = torch.randint(11, (n, length), generator=source), torch.ones(n, length, dtype=torch.long)
        mask[0, length - 2 :] = 0
        labels = torch.cat([ids[:, 1:], torch.full((n, 1), -100)], 1)
        labels[0, length - 3 :] = -100
        every.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    size = torch.distributed.get_world_size()
    mine = every[:4] if rank == 0 else every[4:] if rank == size - 1 else []
    for kind, parameters in ((lp.KFAC, "lora"), (lp.Diagonal, "lora"), (lp.KFAC, "last_layer")):
        alone = kind(make(), "classification", parameters=parameters).fit(every)
        ours = fit(kind(split(make()), "classification", parameters=parameters), mine)
        x = inputs(every[rank])
        with together(ours):
            for posterior in (ours, alone):
                posterior.fit_prior_precision("marginal_likelihood")
            found = ours.functional_posterior(x)
            close(ours.predictive(x, link="probit").mean, alone.predictive(x, link="probit").mean, 1e-10)
        close(found.covariance, alone.functional_posterior(x).covariance, 1e-10)
        terms = alone.log_marginal_likelihood().abs() + alone.n_parameters
        close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-10, terms)


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
    net, started = sharded(), time.monotonic()
    wrong = partial(fit, lp.KFAC(net, "classification", parameters=LAYERS), shares(rank, 2))
    if rank == 1:
        net.layers[1].down.forward = _raise
        assert raised(ValueError, wrong) == "an odd input"
    else:
        assert "Rank 1 failed. ValueError: an odd input" in raised(errors.DistributedError, wrong)
    assert time.monotonic() - started < 30


def _raise(x: Tensor) -> Tensor:
    raise ValueError("an odd input")


if __name__ == "__main__":
    worker.take_part(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
