"""One process that predicts, saves and loads from many threads: flat memory, and no wrong number."""

from __future__ import annotations

import gc
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from campaign.cases import answer, fitted, network, same

import laplace_plus as lp
from laplace_plus.testing import assert_untouched, snapshot

pytestmark = pytest.mark.slow

THREADS, PREDICTIONS, SAVES = 8, 2000, 500
GROWTH = 16 << 20
"""Bytes by which the process may grow over the last half of its work."""


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def test_service(tmp_path: Path) -> None:
    """All posteriors are of one network; one more thread saves and loads."""
    began, net = time.monotonic(), network()
    names = ["KFAC", "Full", "Diagonal", "last layer"]
    posteriors = {name: fitted(name, net) for name in names}
    known = {name: answer(posterior) for name, posterior in posteriors.items()}
    before, sizes = snapshot(net), list[int]()

    def serve(thread: int, count: int) -> int:
        wrong = 0
        for number in range(count):
            name = names[(thread + number) % len(names)]
            wrong += not same(answer(posteriors[name]), known[name], 1e-12)
        return wrong

    def keep(count: int) -> int:
        wrong = 0
        for number in range(count):
            name = names[number % len(names)]
            posteriors[name].save(tmp_path / name)
            wrong += not same(answer(lp.load(tmp_path / name, net)), known[name], 1e-9)
        return wrong

    wrong = 0
    with ThreadPoolExecutor(THREADS + 1) as pool:
        for _ in range(10):
            jobs = [pool.submit(serve, thread, PREDICTIONS // 10) for thread in range(THREADS)]
            jobs.append(pool.submit(keep, SAVES // 10))
            wrong += sum(job.result() for job in jobs)
            sizes.append(resident())
    assert_untouched(net, before)
    grown = (sizes[-1] - sizes[4]) / 2**20
    took = time.monotonic() - began
    sys.stdout.write(
        f"\nservice: {THREADS} threads x {PREDICTIONS} predictions, {SAVES} saves and loads in {took:.0f} s: "
    )
    sys.stdout.write(f"{wrong} wrong numbers, {grown:+.1f} MiB over the last half of {sizes[-1] / 2**20:.0f} MiB\n")
    assert wrong == 0
    assert sizes[-1] - sizes[4] < GROWTH
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(names)
