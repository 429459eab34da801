"""Time per iteration and memory of the iterative solvers, beside SciPy's and linear_operator's, in one process.

    pip install -e '.[peers]' && python benchmarks/linalg/solvers.py --output benchmarks/results/solvers.json

The operator is a diagonal matrix with condition number 1e4 in float32, so that what is measured is the solver rather
than the product; "products" is the time of the products alone, and "x product" the time of an iteration in units of it.
Tolerances are zero and all methods run the same number of iterations. Everything runs on one thread; times are CPU
seconds, the median of five interleaved rounds. Peak memory is what the high-water mark of the process rises by, in
vectors of length n (0 where the process had the memory already). Packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from laplace_plus.linalg.cg import cg
from laplace_plus.linalg.lsmr import lsmr
from laplace_plus.linalg.minres import minres

try:
    import scipy.sparse.linalg as scipy_linalg
except ImportError:  # the comparison is optional
    scipy_linalg = None
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from linear_operator.utils.linear_cg import linear_cg
        from linear_operator.utils.minres import minres as linear_operator_minres
except ImportError:
    linear_cg = None

Call = Callable[[], Any]


def calls(n: int, rows: int, iterations: int) -> dict[tuple[str, str], Call]:
    """What is compared, by method and library."""
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.logspace(0, 4, n)
    b = torch.randn(rows, n, generator=generator) if rows > 1 else torch.randn(n, generator=generator)
    vectors = {"max_iterations": iterations}
    compared: dict[tuple[str, str], Call] = {
        ("cg", "laplace_plus"): lambda: cg(lambda v: diagonal * v, b, rtol=0.0, **vectors),
        ("minres", "laplace_plus"): lambda: minres(lambda v: diagonal * v, b, rtol=0.0, **vectors),
        ("lsmr", "laplace_plus"): lambda: lsmr(
            lambda v: diagonal * v, lambda v: diagonal * v, b, n=n, atol=0.0, btol=0.0, conlim=0.0, **vectors
        ),
    }
    if linear_cg is not None:
        columns = b.reshape(rows, n).T.contiguous()

        def product(v: torch.Tensor) -> torch.Tensor:
            return diagonal[:, None] * v

        compared["cg", "linear_operator"] = lambda: linear_cg(
            product, columns, tolerance=1e-30, max_iter=iterations, stop_updating_after=1e-30
        )
        compared["minres", "linear_operator"] = lambda: linear_operator_minres(product, columns, max_iter=iterations)
    if scipy_linalg is not None and rows == 1:
        matrix, right = diagonal.numpy(), b.numpy()

        def times(v: np.ndarray) -> np.ndarray:
            return matrix * v

        operator = scipy_linalg.LinearOperator((n, n), matvec=times, rmatvec=times, dtype=np.float32)
        none = {"atol": 0.0, "btol": 0.0, "conlim": 0.0}
        compared["cg", "scipy"] = lambda: scipy_linalg.cg(operator, right, rtol=0.0, maxiter=iterations)
        compared["minres", "scipy"] = lambda: scipy_linalg.minres(operator, right, rtol=0.0, maxiter=iterations)
        compared["lsmr", "scipy"] = lambda: scipy_linalg.lsmr(operator, right, maxiter=iterations, **none)
    stack = b.clone()
    compared["products", "torch"] = lambda: [diagonal * stack for _ in range(iterations)]
    return compared


def high_water() -> int:
    """Peak resident memory since the last reset, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def resident() -> int:
    """Resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(n: int, rows: int, iterations: int) -> list[dict[str, Any]]:
    """All rows of one size."""
    compared = calls(n, rows, iterations)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in compared}
    peaks: dict[tuple[str, str], float] = {}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers overflow in float32
        for key, call in compared.items():
            call()
            before = resident()
            Path("/proc/self/clear_refs").write_text("5")
            call()
            peaks[key] = max(0, high_water() - before) / (4 * n * rows)
        for _ in range(5):
            for key, call in compared.items():
                start = time.process_time()
                call()
                times[key].append(time.process_time() - start)
    product = median(times["products", "torch"]) / iterations
    results = []
    for (method, library), measured in times.items():
        seconds = median(measured) / iterations
        row = {"n": n, "rows": rows, "method": method, "library": library, "microseconds": seconds * 1e6}
        ours = times.get((method, "laplace_plus"))
        row |= {"x_product": seconds / product, "peak_vectors": peaks[method, library]}
        if ours is not None and library != "laplace_plus":
            row["ratio"] = median(a / b for a, b in zip(ours, measured, strict=True))
        results.append(row)
        print(json.dumps(row), flush=True)  # noqa: T201
    return results


def main() -> None:
    """Run the benchmark and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8], help="numbers of right-hand sides")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for n in arguments.sizes for count in arguments.rows for row in run(n, count, arguments.iterations)]
    if arguments.output:
        versions = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
        document = {"machine": platform.processor() or platform.machine(), "versions": versions, "rows": rows}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
