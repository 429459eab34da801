"""What each of two ranks does in the tests: every check, one after the other, each with its outcome written down.

Called as ``worker.py rank size folder [check …]``; the outcomes go to ``folder/rank.jsonl``.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laplace_plus as lp
from laplace_plus import errors
from laplace_plus.distributed import Group, Ranks, broadcast_, sum_

Batches = list[tuple[Tensor, Tensor]]

Check = Callable[[int, Path], None]

CHECKS: dict[str, Check] = {}

WRAPPED: list[str] = []
"""Checks of torch's parallel wrappers, whose import and set-up take longer than all other checks."""


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def wrapped(function: Check) -> Check:
    WRAPPED.append(function.__name__)
    return check(function)


# -- problems ----------------------------------------------------------------------------------------------------------


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A small network with a convolution, normalisations, an unruled parameter's worth of layers, and a head."""
    torch.manual_seed(seed)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.GroupNorm(1, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(48, 6),
        nn.LayerNorm(6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )
    return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(14, 1, 4, 4, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(3, (14,), generator=generator)


def shard(rank: int, n_first: int, dtype: torch.dtype = torch.float64) -> Batches:
    """The first ``n_first`` examples for rank 0, the others for rank 1, in batches of different sizes."""
    x, y = data(dtype)
    part = slice(0, n_first) if rank == 0 else slice(n_first, None)
    size = 3 if rank == 0 else 5
    return [batch for batch in zip(x[part].split(size), y[part].split(size), strict=True) if len(batch[0])]


def whole(dtype: torch.dtype = torch.float64) -> Batches:
    x, y = data(dtype)
    return list(zip(x.split(4), y.split(4), strict=True))


def close(actual: Tensor, expected: Tensor, tolerance: float, scale: Tensor | None = None) -> None:
    error = (actual - expected).abs().max() / (expected.abs().max() if scale is None else scale)
    assert actual.shape == expected.shape and error <= tolerance, f"relative error {float(error):.3g}"


def assert_same(ours: Any, alone: Any, dtype: torch.dtype = torch.float64) -> None:
    """Two posteriors with the same data, matrix, evidence and predictions."""
    tolerance = 1e-10 if dtype is torch.float64 else 1e-6
    assert (ours.n_data, ours.n_outputs) == (alone.n_data, alone.n_outputs)
    close(ours.precision_matrix(), alone.precision_matrix(), tolerance)
    evidence = alone.log_marginal_likelihood()
    # A difference of terms, each of which is rounded.
    terms = evidence.abs() + torch.linalg.slogdet(alone.precision_matrix().double())[1].abs()
    close(ours.log_marginal_likelihood(), evidence, tolerance, terms)
    x = data(dtype)[0]
    close(ours.functional_posterior(x).covariance, alone.functional_posterior(x).covariance, 10 * tolerance)
    close(ours.predictive(x[:1]).mean, alone.predictive(x[:1]).mean, 10 * tolerance)


def raised(kind: Any, function: Callable[[], Any]) -> str:
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda net: lp.KFAC(net, "classification", prior_precision=2.0),
    "ekfac": lambda net: lp.KFAC(net, "classification", eigenvalue_corrected=True),
    "diagonal": lambda net: lp.Diagonal(net, "classification"),
    "full": lambda net: lp.Full(net, "classification", temperature=0.5),
    "last layer": lambda net: lp.Full(net, "classification", parameters="last_layer"),
    "kfac last layer": lambda net: lp.KFAC(net, "classification", parameters="last_layer"),
    "masked": lambda net: lp.KFAC(net, "classification", parameters=torch.arange(count(net)) % 3 > 0),
    "diagonal output": lambda net: lp.KFAC(net, "classification", parameters="last_layer", output_factor="diagonal"),
    "empirical": lambda net: lp.Full(net, "classification", backend=lp.Native("empirical_fisher")),
}


@cache
def alone(kind: str) -> Any:
    """The posterior that one process fits to all examples; the checks do not change it."""
    return KINDS[kind](network()).fit(whole(), distributed=False)


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


# -- checks ------------------------------------------------------------------------------------------------------------


@check
def messages(rank: int, folder: Path) -> None:
    group = Group(dist.group.WORLD)
    tensors = [torch.eye(3) * (rank + 1), torch.full((2,), rank, dtype=torch.long), torch.empty(0), torch.ones(())]
    sum_(group, tensors)
    assert torch.equal(tensors[0], 3 * torch.eye(3)) and tensors[1].tolist() == [1, 1] and tensors[3] == 2
    broadcast_(group, tensors, 1)
    value = torch.full((2,), float(rank))
    broadcast_(group, [value], 1)
    assert value.tolist() == [1.0, 1.0]
    assert group.exchange("a test", rank * 10) == [0, 10]


def equal_to_one_process(kind: str, rank: int) -> None:
    for n_first in (9, 14, 0) if kind in ("kfac", "ekfac") else (9,):  # uneven shards, and empty ones on either rank
        assert_same(KINDS[kind](network()).fit(shard(rank, n_first)), alone(kind))


for kind in KINDS:
    CHECKS[f"{kind}, as in one process"] = lambda rank, folder, k=kind: equal_to_one_process(k, rank)


@check
def single_precision(rank: int, folder: Path) -> None:
    for kind in ("kfac", "diagonal"):
        net = network(torch.float32)
        ours = KINDS[kind](net).fit(shard(rank, 6, torch.float32))
        assert_same(ours, KINDS[kind](net).fit(whole(torch.float32), distributed=False), torch.float32)


@check
def updates(rank: int, folder: Path) -> None:
    for kind in ("kfac", "diagonal"):  # where the first data leave directions out, EKFAC's basis there is a choice
        net = network()
        x, y = data()
        ours, alone = KINDS[kind](net), KINDS[kind](net)
        ours.fit([(x[:3], y[:3])] if rank else [(x[3:8], y[3:8])]).update([(x[8:], y[8:])] if rank else [])
        alone.fit([(x[:8], y[:8])], distributed=False).update([(x[8:], y[8:])], distributed=False)
        assert_same(ours, alone)


@check
def regression_with_several_noise_levels(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)).double()
    x, _ = data()
    y = torch.randn(14, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    noise = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    ours = lp.KFAC(net, lp.Gaussian(noise_std=noise)).fit([(x[:5], y[:5])] if rank else [(x[5:], y[5:])])
    alone = lp.KFAC(net, lp.Gaussian(noise_std=noise)).fit([(x, y)], distributed=False)
    assert_same(ours, alone)
    ours.fit_prior_precision("marginal_likelihood")
    alone.fit_prior_precision("marginal_likelihood")
    close(ours.noise_std, alone.noise_std, 1e-6)


@check
def noise_levels_of_a_rank_without_data(rank: int, folder: Path) -> None:
    """One level an output, of which a rank learns from the others where it has no targets."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)).double()
    x, _ = data()
    y = torch.randn(14, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    alone = lp.KFAC(net, "regression").fit([(x, y)], distributed=False)
    for owner in (0, 1):
        ours = lp.KFAC(net, "regression").fit([(x, y)] if rank == owner else [])
        assert ours.noise_std.shape == alone.noise_std.shape == (3,)
        close(ours.noise_std, alone.noise_std, 1e-12)
        assert_same(ours, alone)


@check
def vectors_and_matrices_are_added_in_one_message(rank: int, folder: Path) -> None:
    sent: list[str] = []
    send, reduce = dist.broadcast, dist.all_reduce

    def count(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        sent.append(name)
        return function(*args, **options)

    dist.broadcast, dist.all_reduce = partial(count, "broadcast", send), partial(count, "all_reduce", reduce)
    try:
        lp.Diagonal(network(), "classification").fit(shard(rank, 9))
    finally:
        dist.broadcast, dist.all_reduce = send, reduce
    assert sent == ["all_reduce"], sent


@check
def ranks_have_the_same_bits(rank: int, folder: Path) -> None:
    ours = lp.KFAC(network(), "classification", eigenvalue_corrected=True).fit(shard(rank, 5))
    _, tensors = ours.state()
    for name, tensor in tensors.items():
        theirs = tensor.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, tensor), name


@check
def monte_carlo_labels_differ_between_ranks(rank: int, folder: Path) -> None:
    net = network()
    x, y = data()
    backend = lp.Native("ggn_mc", n_samples=1)
    ours = lp.Diagonal(net, "classification", backend=backend)
    ours.fit([(x, y)], generator=torch.Generator().manual_seed(rank))  # the same data on both: only labels differ
    again = lp.Diagonal(net, "classification", backend=backend)
    again.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.variance(), again.variance())  # the generator of rank 0 counts
    ((_, block),) = [pair for pair in ours.sums.curvature if pair[0].key.startswith("7.weight")]
    single = lp.Diagonal(net, "classification", backend=backend)
    single.fit([(x, y)], generator=torch.Generator().manual_seed(0), distributed=False)
    ((_, one),) = [pair for pair in single.sums.curvature if pair[0].key.startswith("7.weight")]
    assert not torch.allclose(block.values, 2 * one.values)
    many = lp.Native("ggn_mc", n_samples=500)
    estimate = lp.Diagonal(net, "classification", backend=many).fit(shard(rank, 4), generator=torch.Generator())
    exact = lp.Diagonal(net, "classification").fit(whole(), distributed=False)
    a = torch.cat([b.values.flatten() for _, b in estimate.sums.curvature])
    b = torch.cat([b.values.flatten() for _, b in exact.sums.curvature])
    assert abs(a.sum() / b.sum() - 1) < 0.1  # the standard error is about 0.02


def small_low_rank() -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    return lp.LowRank(net, "classification", rank=3, remainder_probes=2, remainder_depth=3)


@check
def low_rank(rank: int, folder: Path) -> None:
    alone = small_low_rank().fit([data()], generator=torch.Generator(), distributed=False)
    x = data()[0]
    for n_first in (9, 0):
        ours = small_low_rank().fit(shard(rank, n_first), generator=torch.Generator())
        close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-8)
        close(ours.functional_posterior(x).covariance, alone.functional_posterior(x).covariance, 1e-8)
        assert ours.n_data == 14


@wrapped
def data_parallel(rank: int, folder: Path) -> None:
    inner = network()
    wrapped = DistributedDataParallel(inner)
    assert_same(KINDS["kfac"](wrapped).fit(shard(rank, 9)), alone("kfac"))
    ours = lp.Full(wrapped, "classification", parameters=["module.7"]).fit(shard(rank, 9))
    assert ours.parameter_names == ("7.weight", "7.bias")


@wrapped
def fully_sharded(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        plain, sharded = network(), network()
        for layer in (0, 4):
            fully_shard(sharded[layer], mp_policy=policy)
        fully_shard(sharded, mp_policy=policy)
        names = {name: type(p) for name, p in sharded.named_parameters()}
        with torch.no_grad():
            sharded(data()[0])  # leaves the root's weights gathered, in the policy's type
        kinds = {"kfac": 9, "last layer": 14, "diagonal": 0} if policy.param_dtype is None else {"diagonal": 9}
        for kind, n_first in kinds.items():
            ours = KINDS[kind](sharded).fit(shard(rank, n_first))
            assert_same(ours, alone(kind))
        assert {name: type(p) for name, p in sharded.named_parameters()} == names
        if rank == 0:  # no rank has to wait for another one
            ours.predictive(data()[0])
        # Trained further, and fitted again.
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        sharded(data()[0]).square().sum().backward()
        optimizer.step()
        state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in sharded.state_dict().items()}
        plain.load_state_dict(state)
        ours.fit(shard(rank, 5))
        assert_same(ours, KINDS["diagonal"](plain).fit(whole(), distributed=False))
        ours.save(folder / "sharded")
        assert_same(lp.load(folder / "sharded", sharded), ours)
        assert_same(lp.load(folder / "sharded", plain), ours)
        dist.barrier()


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Texts as they come, of different lengths; nobody knows how many."""

    def __init__(self, texts: Sequence[Tensor]):
        self.texts = texts

    def __iter__(self) -> Any:
        for ids in self.texts:
            labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@wrapped
def adapters_on_a_sharded_base(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    if not (find_spec("transformers") and find_spec("peft")):
        return
    warnings.simplefilter("ignore", FutureWarning)  # between the two libraries
    transformers, peft = import_module("transformers"), import_module("peft")
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        base = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=11, max_position_embeddings=8, **sizes)
        )
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config).double()
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p += 0.2 * torch.randn_like(p)
        return model

    plain, sharded = adapted(), adapted()
    for layer in sharded.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(11, (n, length), generator=generator) for n, length in ((2, 5), (1, 3), (3, 6), (2, 4), (1, 5))
    ]
    ours, alone = (lp.KFAC(m, "classification", parameters="lora", memory_budget="64 MiB") for m in (sharded, plain))
    ours.fit(torch.utils.data.DataLoader(Stream(texts[:2] if rank == 0 else texts[2:]), batch_size=None))
    alone.fit(Stream(texts), distributed=False)
    assert ours.n_data == alone.n_data == 9
    close(ours.variance(), alone.variance(), 1e-6)
    close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-6)
    batch = {"input_ids": texts[2], "attention_mask": torch.ones_like(texts[2])}
    for one, other in ((ours, alone), (lp.at_last_token(ours, [1, 2, 3]), lp.at_last_token(alone, [1, 2, 3]))):
        found, expected = one.functional_posterior(batch), other.functional_posterior(batch)
        close(found.mean, expected.mean, 1e-6)
        close(found.covariance, expected.covariance, 1e-6)
        close(one.predictive(batch).mean, other.predictive(batch).mean, 1e-6)
    assert all(type(p).__name__ == "DTensor" for p in sharded.parameters())
    ours.save(folder / "adapters")
    close(lp.load(folder / "adapters", plain).variance(), alone.variance(), 1e-6)
    dist.barrier()


@wrapped
def tensor_parallel(rank: int, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    split = copy.deepcopy(plain)
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    parallelize_module(split, init_device_mesh("cpu", (2,)), plan)
    ours = KINDS["kfac"](split).fit(shard(rank, 9))
    assert_same(ours, KINDS["kfac"](plain).fit(whole(), distributed=False))


@wrapped
def the_first_fsdp_is_refused(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    old = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    assert "fully_shard" in raised(errors.UnsupportedError, lambda: lp.KFAC(old, "classification"))


@check
def sharded_factors(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    ranks = Ranks(shard_factors=True)
    for corrected in (False, True):
        x, y = data()
        ours, alone = (lp.KFAC(net, "classification", eigenvalue_corrected=corrected) for _ in range(2))
        ours.fit(shard(rank, 9), distributed=ranks)
        alone.fit(whole(), distributed=False)
        assert_same(ours, alone)
        bytes_here = torch.tensor(ours.sums.curvature.n_bytes())
        dist.all_reduce(bytes_here)
        assert bytes_here < 1.5 * alone.sums.curvature.n_bytes()  # not twice
        tuned = [each.fit_prior_precision("marginal_likelihood").prior_precision for each in (ours, alone)]
        close(*tuned, 1e-6)
        close(ours.variance(), alone.variance(), 1e-6)
        ours.sample(2)
        ours.update([(x[:4], y[:4])] if rank else [])
        alone.update([(x[:4], y[:4])], distributed=False)
        close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-8)
        ours.save(folder / "sharded factors")
        close(lp.load(folder / "sharded factors", net).variance(), ours.variance(), 1e-8)
        assert ours.owned_sums() and all(part.is_here == (part.owner == rank) for part in ours.owned_sums())
        missing = next(part for part in ours.owned_sums() if not part.is_here)
        assert f"rank {1 - rank}" in raised(errors.DistributedError, missing.matrix)
        one = [(x[:1], y[:1])]
        assert "several ranks" in raised(errors.DistributedError, partial(ours.update, one, distributed=False))


@check
def one_rank_alone(rank: int, folder: Path) -> None:
    if rank == 1:
        posterior = lp.KFAC(network(), "classification").fit(whole(), distributed=False)
        posterior.save(folder / "alone")
        assert lp.load(folder / "alone", posterior.network.model).n_data == 14
    single = dist.new_group([0])
    if rank == 0:
        assert lp.KFAC(network(), "classification").fit(whole(), distributed=single).n_data == 14
    else:
        assert "belongs to" in raised(
            errors.ConfigurationError, lambda: lp.KFAC(network(), "binary").fit([], distributed=single)
        )
    assert "group" in raised(errors.ConfigurationError, lambda: lp.KFAC(network(), "binary").fit([], distributed=3))


@check
def saved_by_rank_zero(rank: int, folder: Path) -> None:
    net = network()
    ours = lp.KFAC(net, "classification").fit(shard(rank, 9)).fit_prior_precision("marginal_likelihood")
    ours.save(str(folder / "saved"))
    loaded = lp.load(folder / "saved", net)
    assert_same(loaded, ours)
    ours.prior_precision = 1.0 + rank
    message = (
        raised(errors.DistributedError, lambda: ours.save(folder / "saved")) if rank else ours.save(folder / "saved")
    )
    assert rank == 0 or ("disagrees" in message and "prior_precision" in message)
    (folder / "a file").write_text("")
    kind = errors.DistributedError if rank else errors.CheckpointError
    assert "a file" in raised(kind, lambda: ours.save(folder / "a file"))
    if rank == 0:  # nobody else has to come
        ours.save(folder / "again")
    dist.barrier()


class Failing:
    """A loader that fails in one of its passes."""

    def __init__(self, batches: Batches, at: int):
        self.batches, self.at, self.passes = batches, at, 0

    def __iter__(self) -> Any:
        self.passes += 1
        yield self.batches[0]
        if self.passes == self.at:
            raise OSError("the disk is gone")
        yield from self.batches[1:]


@check
def a_rank_that_fails(rank: int, folder: Path) -> None:
    started = time.perf_counter()
    for kind, at in (("kfac", 1), ("ekfac", 1), ("ekfac", 2), ("full", 1)):
        for culprit in (0, 1):
            posterior = KINDS[kind](network())
            loader = Failing(shard(rank, 9), at if rank == culprit else 0)
            if rank == culprit:
                assert raised(OSError, partial(posterior.fit, loader)) == "the disk is gone"
            else:
                message = raised(errors.DistributedError, partial(posterior.fit, loader))
                assert f"Rank {culprit} failed." in message and "OSError: the disk is gone" in message
            assert "not fitted" in repr(posterior)
    x, y = data()
    wrong = [(x, y + rank)]
    assert (
        "Rank 1"
        in raised(
            errors.LabelError if rank else errors.DistributedError,
            lambda: lp.KFAC(network(), "classification").fit(wrong),
        )
        or rank
    )
    net = network()
    for culprit in (0, 1):
        loader = Failing(shard(rank, 9), 5 if rank == culprit else 0)
        kind = OSError if rank == culprit else errors.DistributedError
        message = raised(kind, partial(small_low_rank().fit, loader, generator=torch.Generator()))
        assert "the disk is gone" in message
    assert "no rank" in raised(errors.EmptyDataError, lambda: KINDS["kfac"](net).fit([])).lower()
    fitted = KINDS["kfac"](net).fit(shard(rank, 9))
    before = fitted.precision_matrix()
    raised(
        OSError if rank else errors.DistributedError, lambda: fitted.update(Failing(shard(rank, 9), 1 if rank else 0))
    )
    assert torch.equal(fitted.precision_matrix(), before) and fitted.n_data == 14
    assert time.perf_counter() - started < 20


@check
def ranks_that_go_different_ways(rank: int, folder: Path) -> None:
    group = Group(dist.group.WORLD)
    call = partial(KINDS["kfac"](network()).fit, shard(rank, 9)) if rank == 0 else partial(group.exchange, "a walk")
    message = raised(errors.DistributedError, call)
    assert "rank 1 at a walk" in message
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        call = partial(KINDS["kfac"](network()).fit, shard(rank, 9), distributed=impatient)
        assert "do not answer" in raised(errors.DistributedError, call)
    dist.barrier()


@wrapped
def copies(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = network()
    fully_shard(sharded)
    ours = KINDS["kfac"](sharded).fit(shard(rank, 9))
    twin = copy.deepcopy(ours)
    assert torch.equal(twin.variance(), ours.variance())
    twin.update(shard(rank, 9))
    assert twin.n_data == 28 and ours.n_data == 14
    assert pickle.loads(pickle.dumps(Group(dist.group.WORLD))) is None


@check
def ranks_that_disagree(rank: int, folder: Path) -> None:
    net = network()

    def refused(make: Callable[[], Any], *words: str) -> None:
        message = raised(errors.DistributedError, lambda: make().fit(shard(rank, 9)))
        assert all(word in message for word in (*words, "rank 0", "rank 1")), message

    refused(lambda: lp.KFAC(network(seed=rank), "classification"), "0.weight", "Rank 1")
    refused(lambda: lp.KFAC(net, "classification", prior_precision=1.0 + rank), "prior_precision", "2.0")
    refused(lambda: lp.KFAC(net, "classification", temperature=1.0 + rank), "temperature")
    refused(lambda: lp.KFAC(net, "classification", parameters=["0", "4"] if rank else "all"), "selected parameters")
    refused(lambda: (lp.KFAC if rank else lp.Diagonal)(net, "classification"), "class", "Diagonal")
    refused(lambda: lp.KFAC(net, "classification", eigenvalue_corrected=bool(rank)), "options")
    refused(lambda: lp.KFAC(net, "classification" if rank else "binary"), "likelihood")
    refused(lambda: lp.KFAC(net, lp.Gaussian(noise_std=1.0 + rank)), "noise_std")
    refused(lambda: lp.KFAC(net, "classification", backend=lp.Native("ggn_mc") if rank else "native"), "backend")
    mask = torch.arange(count(net)) % 2 == rank
    refused(lambda: lp.Diagonal(net, "classification", parameters=mask), "mask")
    with_buffers = nn.Sequential(nn.BatchNorm2d(1), network()).double()
    with_buffers[0].running_mean += rank
    refused(lambda: lp.KFAC(with_buffers, "classification"), "buffer", "running_mean")
    fitted = KINDS["kfac"](net).fit(shard(rank, 9))
    call = fitted.fit if rank else fitted.update
    assert "the call" in raised(errors.DistributedError, lambda: call(shard(rank, 9)))
    # A batch that uses the network in another way.

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, flag: Tensor) -> Tensor:
            return self.first(x) + self.second(x) if bool(flag[0]) else self.first(x)

    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 0, 1])
    batch = [(x, torch.full((4,), rank), y)]
    message = raised(errors.DataError, lambda: lp.KFAC(Cut(), "classification").fit(batch))
    assert "rank 1" in message and "second.weight" in message
    # The group works on.
    assert KINDS["kfac"](net).fit(shard(rank, 9)).n_data == 14


@check
def other_classes_are_refused(rank: int, folder: Path) -> None:
    class Own(lp.Posterior):
        def fit_batches(self, data: Any) -> None:
            for _ in self.batches(data, progress=False, description=""):
                pass
            self.n_data = 1

        def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
            return self.mean.expand(n, -1)

    assert "distributed=False" in raised(errors.UnsupportedError, lambda: Own(network(), "classification").fit(whole()))
    assert Own(network(), "classification").fit(whole(), distributed=False).n_data == 1


@check
def execution_order_tells_the_last_layer(rank: int, folder: Path) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head, self.body = nn.Linear(5, 3), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x.flatten(1)).tanh())

    net = Backwards().double()
    for make in (lp.KFAC, lp.Full):
        ours = make(net, "classification", parameters="last_layer").fit(shard(rank, 14))
        assert ours.parameter_names == ("head.weight", "head.bias")
        assert_same(ours, make(net, "classification", parameters="last_layer").fit(whole(), distributed=False))


def take_part(rank: int, size: int, folder: Path, names: Sequence[str]) -> None:
    """Run some checks up to the first that fails on this rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    method = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        with warnings.catch_warnings(), (folder / f"{rank}.jsonl").open("w", buffering=1) as file:
            warnings.simplefilter("error")
            for name in names:
                try:
                    CHECKS[name](rank, folder)
                    outcome = ""
                except Exception:
                    outcome = traceback.format_exc()
                file.write(json.dumps([name, outcome]) + "\n")
                if outcome:  # the ranks may be out of step
                    break
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    take_part(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or list(CHECKS))
