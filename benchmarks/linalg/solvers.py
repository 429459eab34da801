"""Iterative solvers beside SciPy's and linear_operator's, and what a Nyström preconditioner saves.

Wanted: no slower than the others per product.

The operator of the first table is a diagonal matrix with condition number 1e4 in float32, so that what is measured is
the solver rather than the product; n, and b right-hand sides at once. Tolerances are zero, so that all make about 30
iterations; "products" is the number that was counted (those with the transpose included), and "× product" the time of
an iteration – one product, two for LSMR – in units of that of one product. Peak memory is in vectors of length n, for
each right-hand side. SciPy solves for one right-hand side only.

The second table counts the iterations of conjugate gradients to a residual of 1e-10 on a system ``A + 0.1`` with
n = 2000 in float64, preconditioned by Nyström approximations of A of growing rank; "products" includes those that made
the approximation. With eigenvalues 1e4/i² they are well spent; with ``1e4 / (1 + i/20)``, which decays slowly, they
cost more than they save.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measuring import Call, Row, least_seconds, memory_in_new_process
from torch import Tensor

from laplace_plus.linalg.cg import cg
from laplace_plus.linalg.lsmr import lsmr
from laplace_plus.linalg.nystrom import nystrom

try:
    import scipy.sparse.linalg as scipy_linalg
except ImportError:  # the comparison is optional
    scipy_linalg = None
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from linear_operator.utils.linear_cg import linear_cg
except ImportError:
    linear_cg = None

ITERATIONS = 30
SHIFT = 0.1


class Product:
    """A diagonal matrix times vectors by rows, and how often that was asked for."""

    def __init__(self, diagonal: Tensor | np.ndarray):
        self.diagonal, self.count = diagonal, 0

    def __call__(self, v: Any) -> Any:
        """The product with ``[..., n]``."""
        self.count += 1
        return self.diagonal * v


def calls(n: int, sides: int) -> dict[str, tuple[Call, Product]]:
    """What is compared, by method and library, with the product that it uses."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(sides, n, generator=generator) if sides > 1 else torch.randn(n, generator=generator)
    diagonal = torch.logspace(0, 4, n)
    cap: dict[str, Any] = {"max_iterations": ITERATIONS}
    none = {"atol": 0.0, "btol": 0.0, "conlim": 0.0}
    ours = Product(diagonal)
    compared: dict[str, tuple[Call, Product]] = {
        "cg, laplace_plus": (lambda: cg(ours, b, rtol=0.0, **cap), ours),
        "lsmr, laplace_plus": (lambda: lsmr(ours, ours, b, n=n, **none, **cap), ours),
    }
    if linear_cg is not None:
        columns, by_columns = b.reshape(sides, n).T.contiguous(), Product(diagonal[:, None])
        never = {"tolerance": 1e-30, "stop_updating_after": 1e-30, "max_iter": ITERATIONS}
        compared["cg, linear_operator"] = (lambda: linear_cg(by_columns, columns, **never), by_columns)
    if scipy_linalg is not None and sides == 1:
        right, theirs = b.numpy(), Product(diagonal.numpy())
        operator = scipy_linalg.LinearOperator((n, n), matvec=theirs, rmatvec=theirs, dtype=np.float32)
        compared["cg, scipy"] = (lambda: scipy_linalg.cg(operator, right, rtol=0.0, maxiter=ITERATIONS), theirs)
        compared["lsmr, scipy"] = (lambda: scipy_linalg.lsmr(operator, right, maxiter=ITERATIONS, **none), theirs)
    alone = Product(diagonal)
    compared["products alone"] = (lambda: [alone(b) for _ in range(ITERATIONS)], alone)
    return dict(sorted(compared.items()))


def call(n: int, sides: int, solver: str, small: bool = False) -> Call:
    """That of which memory is measured."""
    return torch.no_grad()(calls(200_000 if small else n, sides)[solver][0])


def iterations(quick: bool) -> Iterator[Row]:
    """The first table."""
    sizes, rounds = ((10_000,), 3) if quick else ((10_000, 100_000, 1_000_000), 7)
    for n, sides in [(n, sides) for n in sizes for sides in (1, 8)]:
        compared = calls(n, sides)
        products: dict[str, int] = {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the others overflow in float32
            for name, (solve, product) in compared.items():
                product.count = 0
                solve()
                products[name] = product.count
            seconds = least_seconds({name: solve for name, (solve, _) in compared.items()}, rounds)
        one = seconds["products alone"] / ITERATIONS
        for name, time in seconds.items():
            method, _, library = name.partition(", ")
            each = time / products[name] * (2 if method == "lsmr" else 1)
            row: Row = {"table": "iterations", "n": n, "b": sides, "method": method, "library": library or "torch"}
            row |= {"products": products[name], "microseconds": each * 1e6, "x_product": each / one}
            if library not in ("", "laplace_plus"):
                mine = f"{method}, laplace_plus"
                row["laplace_plus_x_faster"] = time / products[name] / (seconds[mine] / products[mine])
            if n == 1_000_000 and library:
                row["vectors"] = memory_in_new_process("solvers", n=n, sides=sides, solver=name) / (4e-6 * n * sides)
            yield row


def preconditioning(quick: bool) -> Iterator[Row]:
    """The second table."""
    n, ranks = 2000, (0, 50) if quick else (0, 50, 100, 150)
    i = torch.arange(1, n + 1, dtype=torch.float64)
    b = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for spectrum, values in {"1e4/i²": 1e4 / i**2, "1e4/(1 + i/20)": 1e4 / (1 + i / 20)}.items():
        plain, shifted = Product(values), Product(values + SHIFT)
        for rank in ranks:

            def solve(rank: int = rank, plain: Product = plain, shifted: Product = shifted) -> Any:
                preconditioner = None
                if rank:
                    generator = torch.Generator().manual_seed(1)
                    approximation = nystrom(plain, n, rank, generator=generator, dtype=torch.float64)
                    preconditioner = approximation.preconditioner(SHIFT)
                return cg(shifted, b, rtol=1e-10, preconditioner=preconditioner)

            with torch.no_grad():
                solution = solve()
                seconds = least_seconds({"cg": solve}, 1 if quick else 3)["cg"]
                residual = (b - shifted(solution.value)).norm() / b.norm()
            yield {
                "table": "preconditioning",
                "eigenvalues": spectrum,
                "rank": rank,
                "iterations": int(solution.iterations.max()),
                "products": solution.matvecs + rank,
                "residual": residual.item(),
                "seconds": seconds,
            }


def run(quick: bool) -> Iterator[Row]:
    """All rows."""
    yield from iterations(quick)
    yield from preconditioning(quick)
