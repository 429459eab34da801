"""Two and four ranks (gloo): one raises, is killed, is slow, has data of another shape or none; and equal results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.likelihoods.sampling import draw_seed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LIMIT = 30.0
"""Seconds within which all ranks have stopped."""
DELAY = 3.0
KINDS = {
    "KFAC": lambda net: lp.KFAC(net, "classification"),
    "EKFAC": lambda net: lp.KFAC(net, "classification", eigenvalue_corrected=True),
    "Full": lambda net: lp.Full(net, "classification"),
    "Diagonal": lambda net: lp.Diagonal(net, "classification"),
    "LowRank": lambda net: lp.LowRank(net, "classification", rank=60, remainder_probes=0),
    "last layer": lambda net: lp.Full(net, "classification", parameters="last_layer"),
}
FURTHER = {
    "regression": lambda net: lp.KFAC(net, "regression"),
    "drawn labels": lambda net: lp.KFAC(
        net, "classification", eigenvalue_corrected=True, backend=lp.Native("ggn_mc", n_samples=2)
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(kind: str = "") -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sin() * torch.tensor([1.0, 2.0, 4.0]) if kind == "regression" else torch.arange(24) % 3


def shard(rank: int, size: int, kind: str = "", *, empty: int | None = None) -> list[tuple[Tensor, Tensor]]:
    x, y = data(kind)
    ranks = [r for r in range(size) if r != empty]
    if rank == empty:
        return []
    rows = torch.arange(24)[ranks.index(rank) :: len(ranks)]
    return list(zip(x[rows].split(3), y[rows].split(3), strict=True))


class Disturbed(list[Any]):
    """A loader that does something after its first batch."""

    def __init__(self, batches: list[Any], what: str):
        super().__init__(batches)
        self.what = what

    def __iter__(self) -> Any:
        for number, batch in enumerate(list.__iter__(self)):
            if number == 1:
                if self.what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.what == "slow":
                    time.sleep(DELAY)
                if self.what == "raises":
                    raise ValueError("the disk of this rank")
            yield batch


def numbers(posterior: Any) -> list[float]:
    found = posterior.functional_posterior(data()[0][:4])
    parts = [found.mean, found.covariance, posterior.log_marginal_likelihood()[None], posterior.variance()]
    parts += [posterior.noise_std] if isinstance(posterior.likelihood, lp.Gaussian) else []
    return torch.cat([part.flatten().double() for part in parts]).tolist()


def act(rank: int, size: int, scenario: str, kind: str) -> Any:
    """What one rank does, the last one in another way."""
    odd = rank == size - 1
    make = (KINDS | FURTHER)[kind]
    if scenario == "update":  # first of the data of the last rank alone, and then of those of all but the first
        x, y = data(kind)
        posterior = make(network()).fit([(x[:8], y[:8])] if odd else [])
        return numbers(
            posterior.update([] if rank == 0 else [(x[8:][rank - 1 :: size - 1], y[8:][rank - 1 :: size - 1])])
        )
    if scenario == "all on the first":
        return numbers(make(network()).fit([] if rank else [data(kind)], generator=torch.Generator()))
    if scenario in ("killed", "slow", "raises"):
        loader: Any = Disturbed(shard(rank, size), scenario) if odd else shard(rank, size)
        return numbers(make(network()).fit(loader, generator=torch.Generator()))
    if scenario == "other width":
        x, y = data()
        return numbers(make(network()).fit([(x[:, :2], y)] if odd else shard(rank, size)))
    if scenario == "other network":
        net = nn.Sequential(*network()[:2], nn.Linear(6, 4).double()) if odd else network()
        return numbers(make(net).fit(shard(rank, size)))
    if scenario == "other prior":
        return numbers(
            make(network()).__class__(network(), "classification", prior_precision=2.0 if odd else 1.0).fit([])
        )
    if scenario == "nothing anywhere":
        return numbers(make(network()).fit([]))
    empty = {"empty shard": size - 1, "empty first shard": 0}.get(scenario)
    return numbers(make(network()).fit(shard(rank, size, kind, empty=empty), generator=torch.Generator()))


def alone(scenario: str, kind: str) -> Tensor:
    """The same in one process."""
    (x, y), posterior, generator = data(kind), (KINDS | FURTHER)[kind](network()), torch.Generator()
    if kind == "drawn labels":
        generator.manual_seed(draw_seed(torch.Generator()))  # ranks draw from a seed that the first one drew
    if scenario == "update":
        posterior.fit([(x[:8], y[:8])]).update([(x[8:], y[8:])])
    else:
        posterior.fit([(x, y)], generator=generator)
    return torch.tensor(numbers(posterior), dtype=torch.float64)


def one_rank(rank: int, size: int, folder: Path, scenario: str, kind: str) -> None:
    torch.set_num_threads(1)
    method = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    dist.barrier()
    began = time.monotonic()
    try:
        outcome: Any = act(rank, size, scenario, kind)
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps([outcome, time.monotonic() - began]))
    if scenario != "killed":
        dist.destroy_process_group()


def together(size: int, folder: Path, scenario: str, kind: str) -> tuple[list[Any], float]:
    """What each rank found (None for one that was killed), and how long the slowest took."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-W", "ignore", __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(folder), scenario, kind], env=environment)
        for rank in range(size)
    ]
    try:
        for one in ranks:
            one.wait(timeout=240)
    finally:
        for one in ranks:
            one.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    found = [json.loads(file.read_text()) if file.exists() else [None, 0.0] for file in files]
    return [outcome for outcome, _ in found], max(seconds for _, seconds in found)


REASONS = {
    "killed": "rank|Rank|closed|reset",
    "raises": "the disk of this rank",
    "other width": "rank|shape|failed on a batch",
    "other network": "disagree|another|other",
    "other prior": "disagree|prior",
    "nothing anywhere": "No rank's loader",
}
SCENARIOS = [("equal", kind) for kind in KINDS] + [("empty shard", kind) for kind in ("KFAC", "LowRank")]
SCENARIOS += [("empty first shard", "regression"), ("all on the first", "drawn labels")]
SCENARIOS += [("update", "EKFAC"), ("update", "regression")]
SCENARIOS += [("empty first shard", "EKFAC"), ("slow", "KFAC"), *((scenario, "KFAC") for scenario in REASONS)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("scenario", "kind"), SCENARIOS)
def test_ranks(size: int, scenario: str, kind: str, tmp_path: Path) -> None:
    found, seconds = together(size, tmp_path, scenario, kind)
    line = f"ranks: {size}, {scenario}, {kind}: "
    if scenario in REASONS:
        survivors = [outcome for rank, outcome in enumerate(found) if scenario != "killed" or rank < size - 1]
        sys.stdout.write(f"\n{line}stopped after {seconds:.1f} s: {str(survivors[0])[:150]}\n")
        assert scenario != "killed" or found[-1] is None
        assert all(isinstance(outcome, str) for outcome in survivors), survivors
        assert all("DistributedError" in o or "ValueError" in o or "Error: " in o for o in survivors)
        reasons = REASONS[scenario].split("|")
        assert all(any(reason in outcome for reason in reasons) for outcome in survivors), survivors
    else:
        expected = alone(scenario, kind)
        assert all(isinstance(outcome, list) for outcome in found), found
        off = max(
            float((torch.tensor(outcome, dtype=torch.float64) - expected).abs().max() / expected.abs().max())
            for outcome in found
        )
        sys.stdout.write(f"\n{line}{seconds:.1f} s, differs by {off:.1g}\n")
        assert off < 1e-6
        assert scenario != "slow" or seconds > DELAY
    assert seconds < LIMIT


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
