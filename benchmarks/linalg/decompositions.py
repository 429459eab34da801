"""Lanczos with a cheap operator, beside linear_operator's.

The operator is a diagonal matrix plus one of rank 4 with eigenvalues of 10 to 300, so that the products cost little and
orthogonality is lost unless it is enforced. All run K steps on the same start vectors in float32. "orthogonality" is
``max |QQᵀ − I|``, evaluated in float64. Full re-orthogonalisation by classical Gram–Schmidt twice reads Q four times:
``8 n K²`` bytes in all, which limit it; "share of copy" is that number per second over the measured bandwidth of a
copy.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from measuring import Call, Row, copy_bandwidth, extra_memory, memory_in_new_process, report, timings
from torch import Tensor

from laplace_plus.linalg.lanczos import lanczos

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from linear_operator.utils.lanczos import lanczos_tridiag
except ImportError:  # the comparison is optional
    lanczos_tridiag = None

WAYS = ("full", "selective", "none")
TARGET = "full re-orthogonalisation at least 2 × linear_operator's speed, no less orthogonal"


class Problem:
    """An operator, and start vectors ``[n]`` or ``[probes, n]``."""

    def __init__(self, n: int, probes: int):
        generator = torch.Generator().manual_seed(0)
        self.diagonal = torch.logspace(-2, 0, n)
        rows = torch.randn(4, n, generator=generator)
        self.rows = rows / rows.norm(dim=1, keepdim=True) * torch.logspace(1, 2.5, 4).sqrt()[:, None]
        self.start = torch.randn(probes, n, generator=generator) if probes > 1 else torch.randn(n, generator=generator)

    def __call__(self, v: Tensor) -> Tensor:
        """The product with ``[..., n]``."""
        return (self.diagonal * v).add_((v @ self.rows.T) @ self.rows)

    def calls(self, depth: int) -> dict[str, Call]:
        """What is compared; each gives its basis."""
        n = self.start.shape[-1]
        compared: dict[str, Call] = {
            f"laplace_plus, {way}": lambda way=way: lanczos(self, self.start, depth, reorthogonalize=way).vectors
            for way in WAYS
        }
        if lanczos_tridiag is not None:
            columns = self.start.reshape(-1, n).T

            def product(v: Tensor) -> Tensor:
                return self(v.T).T

            def theirs() -> Tensor:
                basis, _ = lanczos_tridiag(product, depth, torch.float32, columns.device, (n, n), init_vecs=columns)
                return basis.mT

            compared["linear_operator"] = theirs
        compared["products alone"] = lambda: [self(self.start) for _ in range(depth)]
        return compared


def orthogonality(basis: Tensor) -> float:
    """``max |QQᵀ − I|`` of ``[..., K, n]``."""
    basis = basis.reshape(-1, *basis.shape[-2:])
    worst = 0.0
    for one in basis:
        gram = sum(part.double() @ part.double().T for part in one.split(100_000, dim=1))
        worst = max(worst, (gram - torch.eye(len(one), dtype=torch.float64)).abs().max().item())
    return worst


def memory(n: int, probes: int, depth: int, name: str) -> Row:
    """Peak memory of one call, in this process."""
    with torch.no_grad():
        Problem(1000, probes).calls(depth)[name]()
        call = Problem(n, probes).calls(depth)[name]
        return {"peak_megabytes": extra_memory(call)}


def run(quick: bool, script: Path, **_: Any) -> list[Row]:
    """All rows."""
    depth, rounds = (20, 1) if quick else (40, 5)
    bandwidth = copy_bandwidth()
    rows = [report({"case": "lanczos", "library": "torch", "task": "copy", "gigabytes_per_second": bandwidth})]
    for n, probes in ((100_000, 1),) if quick else ((10_000, 1), (100_000, 1), (100_000, 10), (1_000_000, 1)):
        problem = Problem(n, probes)
        with torch.no_grad():
            calls = problem.calls(depth)
            bases = {name: call() for name, call in calls.items() if name != "products alone"}
            errors = {name: orthogonality(basis) for name, basis in bases.items()}
            del bases
            measured = timings(calls, rounds)
        for name, timing in measured.items():
            row: Row = {"case": "lanczos", "n": n, "probes": probes, "depth": depth, "library": name, **timing.row()}
            if name in errors:
                row["orthogonality"] = errors[name]
                row |= memory_in_new_process(script, case="lanczos", n=n, probes=probes, depth=depth, name=name)
                row["peak_bases"] = row["peak_megabytes"] / (4e-6 * n * probes * depth)
            if "linear_operator" in measured and name.startswith("laplace_plus"):
                row["x_faster"] = timing.ratio(measured["linear_operator"])
            if name == "laplace_plus, full":
                row["gigabytes_per_second"] = 8e-9 * n * probes * depth**2 / row["cpu_seconds"]
                row["share_of_copy"] = row["gigabytes_per_second"] / bandwidth
            rows.append(report(row))
    return rows
