"""What each of two ranks does in the tests: every check, one after the other, each with its outcome written down.

Called as ``worker.py rank size folder [check …]``; the outcomes go to ``folder/rank.jsonl``.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laplace_plus as lp
from laplace_plus import errors
from laplace_plus.distributed import fit, gathered, update

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
    "masked": lambda net: lp.KFAC(net, "classification", parameters=torch.arange(count(net)) % 3 > 0),
    "diagonal output": lambda net: lp.KFAC(net, "classification", parameters="last_layer", output_factor="diagonal"),
    "empirical": lambda net: lp.Full(net, "classification", backend=lp.Native("empirical_fisher")),
}


@cache
def alone(kind: str) -> Any:
    """The posterior that one process fits to all examples; the checks do not change it."""
    return KINDS[kind](network()).fit(whole())


def count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


# -- checks ------------------------------------------------------------------------------------------------------------


def equal_to_one_process(kind: str, rank: int) -> None:
    for n_first in (9, 14, 0) if kind == "kfac" else (9,):  # uneven shards, and empty ones on either rank
        assert_same(fit(KINDS[kind](network()), shard(rank, n_first)), alone(kind))


for kind in KINDS:
    CHECKS[f"{kind}, as in one process"] = lambda rank, folder, k=kind: equal_to_one_process(k, rank)


@check
def single_precision(rank: int, folder: Path) -> None:
    for kind in ("kfac", "diagonal"):
        net = network(torch.float32)
        ours = fit(KINDS[kind](net), shard(rank, 6, torch.float32))
        assert_same(ours, KINDS[kind](net).fit(whole(torch.float32)), torch.float32)


@check
def updates(rank: int, folder: Path) -> None:
    for kind in ("kfac", "diagonal"):  # where the first data leave directions out, EKFAC's basis there is a choice
        net = network()
        x, y = data()
        ours, alone = KINDS[kind](net), KINDS[kind](net)
        update(fit(ours, [(x[:3], y[:3])] if rank else [(x[3:8], y[3:8])]), [(x[8:], y[8:])] if rank else [])
        alone.fit([(x[:8], y[:8])]).update([(x[8:], y[8:])])
        assert_same(ours, alone)


def regression() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)).double()
    return net, data()[0], torch.randn(14, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@check
def regression_with_several_noise_levels(rank: int, folder: Path) -> None:
    net, x, y = regression()
    noise = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    ours = fit(lp.KFAC(net, lp.Gaussian(noise_std=noise)), [(x[:5], y[:5])] if rank else [(x[5:], y[5:])])
    alone = lp.KFAC(net, lp.Gaussian(noise_std=noise)).fit([(x, y)])
    assert_same(ours, alone)
    ours.fit_prior_precision("marginal_likelihood")
    alone.fit_prior_precision("marginal_likelihood")
    close(ours.noise_std, alone.noise_std, 1e-6)


@check
def noise_levels_of_a_rank_without_data(rank: int, folder: Path) -> None:
    """One level an output, of which a rank learns from the others where it has no targets."""
    net, x, y = regression()
    alone = lp.KFAC(net, "regression").fit([(x, y)])
    for owner in (0, 1):
        ours = fit(lp.KFAC(net, "regression"), [(x, y)] if rank == owner else [])
        assert ours.noise_std.shape == alone.noise_std.shape == (3,)
        close(ours.noise_std, alone.noise_std, 1e-12)
        assert_same(ours, alone)


@check
def ranks_have_the_same_bits(rank: int, folder: Path) -> None:
    ours = fit(lp.KFAC(network(), "classification", eigenvalue_corrected=True), shard(rank, 5))
    for name, tensor in lp.state_dict(ours)["tensors"].items():
        theirs = tensor.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(theirs, tensor), name


@check
def monte_carlo_labels_differ_between_ranks(rank: int, folder: Path) -> None:
    net = network()
    x, y = data()
    backend = lp.Native("ggn_mc", n_samples=1)
    ours = lp.Diagonal(net, "classification", backend=backend)
    fit(ours, [(x, y)], generator=torch.Generator().manual_seed(rank))  # the same data on both: only labels differ
    again = lp.Diagonal(net, "classification", backend=backend)
    fit(again, [(x, y)], generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.variance(), again.variance())  # the generator of rank 0 counts
    ((_, block),) = [pair for pair in ours.state.curvature if pair[0].key.startswith("7.weight")]
    single = lp.Diagonal(net, "classification", backend=backend)
    single.fit([(x, y)], generator=torch.Generator().manual_seed(0))
    ((_, one),) = [pair for pair in single.state.curvature if pair[0].key.startswith("7.weight")]
    assert not torch.allclose(block.values, 2 * one.values)
    many = lp.Native("ggn_mc", n_samples=200)
    estimate = fit(lp.Diagonal(net, "classification", backend=many), shard(rank, 4), generator=torch.Generator())
    exact = lp.Diagonal(net, "classification").fit(whole())
    found, wanted = (sum(b.values.sum() for _, b in one.state.curvature) for one in (estimate, exact))
    assert abs(found / wanted - 1) < 0.1  # the standard error is about 0.03


def small_low_rank(**options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    return lp.LowRank(net, "classification", **{"rank": 3, "remainder_probes": 0} | options)


@check
def low_rank(rank: int, folder: Path) -> None:
    x = data()[0]
    for options, n_first in (({}, 9), ({}, 0), (nystrom := {"basis": "nystrom", "rank": 100}, 9), (nystrom, 0)):
        alone = small_low_rank(**options).fit([data()], generator=torch.Generator())
        ours = fit(small_low_rank(**options), shard(rank, n_first), generator=torch.Generator())
        close(ours.log_marginal_likelihood(), alone.log_marginal_likelihood(), 1e-8)
        close(ours.functional_posterior(x).covariance, alone.functional_posterior(x).covariance, 1e-8)
        assert ours.n_data == 14


@wrapped
def data_parallel(rank: int, folder: Path) -> None:
    inner = network()
    wrapped = DistributedDataParallel(inner)
    assert_same(fit(KINDS["kfac"](wrapped), shard(rank, 9)), alone("kfac"))
    ours = fit(lp.Full(wrapped, "classification", parameters=["module.7"]), shard(rank, 9))
    assert ours.parameter_names == ("7.weight", "7.bias")


@wrapped
def sharded_models_are_gathered(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    sharded = network()
    for layer in (0, 4):
        fully_shard(sharded[layer])
    fully_shard(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(data()[0]).square().sum().backward()
    optimizer.step()
    plain = gathered(sharded, network(seed=1))
    ours = fit(KINDS["diagonal"](plain), shard(rank, 9))
    assert all(type(parameter).__name__ == "DTensor" for parameter in sharded.parameters())
    assert_same(ours, KINDS["diagonal"](plain).fit(whole()))
    close(plain(data()[0]), sharded(data()[0]), 1e-12)


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
    for kind, at in (("kfac", 1), ("ekfac", 2)):
        for culprit in (0, 1):
            posterior = KINDS[kind](network())
            loader = Failing(shard(rank, 9), at if rank == culprit else 0)
            if rank == culprit:
                assert raised(OSError, partial(fit, posterior, loader)) == "the disk is gone"
            else:
                message = raised(errors.DistributedError, partial(fit, posterior, loader))
                assert f"Rank {culprit} failed." in message and "OSError: the disk is gone" in message
            assert "not fitted" in repr(posterior)
    x, y = data()
    kind = errors.LabelError if rank else errors.DistributedError
    message = raised(kind, lambda: fit(lp.KFAC(network(), "classification"), [(x, y + rank)]))
    assert rank or "Rank 1" in message
    net = network()
    for culprit in (0, 1):
        loader = Failing(shard(rank, 9), 2 if rank == culprit else 0)
        kind = OSError if rank == culprit else errors.DistributedError
        message = raised(kind, partial(fit, small_low_rank(), loader, generator=torch.Generator()))
        assert "the disk is gone" in message
    assert "no rank" in raised(errors.EmptyDataError, lambda: fit(KINDS["kfac"](net), [])).lower()
    fitted = fit(KINDS["kfac"](net), shard(rank, 9))
    before = fitted.precision_matrix()
    raised(
        OSError if rank else errors.DistributedError, lambda: update(fitted, Failing(shard(rank, 9), 1 if rank else 0))
    )
    assert torch.equal(fitted.precision_matrix(), before) and fitted.n_data == 14
    assert time.perf_counter() - started < 20


@check
def ranks_that_disagree(rank: int, folder: Path) -> None:
    net = network()

    def refused(make: Callable[[], Any], *words: str) -> None:
        message = raised(errors.DistributedError, lambda: fit(make(), shard(rank, 9)))
        assert all(word in message for word in words), message

    refused(lambda: lp.KFAC(network(seed=rank), "classification"), "0.weight", "Rank 1")
    refused(lambda: lp.KFAC(net, "classification", prior_precision=1.0 + rank), "prior_precision", "2.0")
    refused(lambda: lp.KFAC(net, "classification", temperature=1.0 + rank), "temperature")
    refused(lambda: lp.KFAC(net, "classification", parameters=["0", "4"] if rank else "all"), "selected parameters")
    refused(lambda: (lp.KFAC if rank else lp.Diagonal)(net, "classification"), "class", "Diagonal")
    refused(lambda: lp.KFAC(net, "classification", eigenvalue_corrected=bool(rank)), "options")
    refused(lambda: lp.KFAC(net, "classification" if rank else "binary"), "likelihood")
    refused(lambda: lp.KFAC(net, lp.Gaussian(noise_std=1.0 + rank)), "likelihood", "2.0")
    refused(lambda: lp.KFAC(net, "classification", backend=lp.Native("ggn_mc") if rank else "native"), "backend")
    mask = torch.arange(count(net)) % 2 == rank
    refused(lambda: lp.Diagonal(net, "classification", parameters=mask), "selected parameters")
    with_buffers = nn.Sequential(nn.BatchNorm2d(1), network()).double()
    with_buffers[0].running_mean += rank
    refused(lambda: lp.KFAC(with_buffers, "classification"), "running_mean")
    fitted = fit(KINDS["kfac"](net), shard(rank, 9))
    call = fit if rank else update
    assert "the call" in raised(errors.DistributedError, lambda: call(fitted, shard(rank, 9)))
    # A batch that uses the network in another way.

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, flag: Tensor) -> Tensor:
            return self.first(x) + (self.second(x) if bool(flag[0]) else x @ (2 * self.second.weight).mT)

    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 0, 1])
    batch = [(x, torch.full((4,), rank), y)]
    message = raised(errors.DataError, lambda: fit(lp.KFAC(Cut(), "classification"), batch))
    assert "second.weight" in message
    # The group works on.
    assert fit(KINDS["kfac"](net), shard(rank, 9)).n_data == 14


@check
def other_classes_are_refused(rank: int, folder: Path) -> None:
    class Own(lp.Posterior):
        def fit_batches(self, data: Any) -> lp.State:
            return lp.State(self.network.vector(), 1, 0)

        def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
            return self.mean.expand(n, -1)

    message = raised(errors.UnsupportedError, lambda: fit(Own(network(), "classification"), whole()))
    assert "over several ranks" in message


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
        ours = fit(make(net, "classification", parameters="last_layer"), shard(rank, 14))
        assert ours.parameter_names == ("head.weight", "head.bias")
        assert_same(ours, make(net, "classification", parameters="last_layer").fit(whole()))


def take_part(rank: int, size: int, folder: Path, names: Sequence[str]) -> None:
    """Run some checks up to the first that fails on this rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    method = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(seconds=180))
    try:
        with warnings.catch_warnings(), (folder / f"{rank}.jsonl").open("w", buffering=1) as file:
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*torch.jit.script.*is deprecated")  # by torch itself, of forward mode
            warnings.filterwarnings("ignore", "The prior precision of this")
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
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)


if __name__ == "__main__":
    take_part(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or list(CHECKS))
