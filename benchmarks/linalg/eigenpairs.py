"""Partial eigendecompositions beside SciPy's, to the same tolerance.

The k = 10 largest pairs in float64, with products that cost little: a diagonal matrix. "decaying" has eigenvalues
``1/i``; "crowded" has 1 % of n spread evenly over [0.5, 1] and the rest below, so that the wanted ones are 1e-3 or less
of the spectrum apart.

All are asked for residuals ``‖A u − λ u‖ ≤ tolerance · ‖A‖`` and may keep 30 vectors (LOBPCG keeps 3 blocks of 10, and
ends after 300 iterations); "residual" is the largest of what they gave. "products" are those with single vectors, those
that check the result included; ours searches the complement of what it found once more, so that multiple eigenvalues
are not missed. "× product" is the time that passes for each product in units of what the product alone takes, and
"fewer products" the number of the other's in units of ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from measuring import Row, least_seconds
from torch import Tensor

from laplace_plus.linalg.partial_eigen import eigsh

try:
    import scipy.sparse.linalg as scipy_linalg
except ImportError:  # the comparison is optional
    scipy_linalg = None

PAIRS, KEPT, CAP = 10, 30, 300
Pairs = tuple[np.ndarray, np.ndarray]  # values, and vectors as rows
Solve = Callable[[], Pairs]


class Counted:
    """``v ↦ A v`` for a diagonal matrix, in torch and in NumPy; counts vectors."""

    def __init__(self, n: int, spectrum: str):
        i = torch.arange(1, n + 1, dtype=torch.float64)
        few = n // 100
        crowded = torch.where(i <= few, 1 - 0.5 * (i - 1) / few, 0.5 * (n - i) / n)
        self.values = 1 / i if spectrum == "decaying" else crowded
        self.n, self.products = n, 0

    def times(self, v: Tensor) -> Tensor:
        """``A v`` for row-stacked vectors."""
        self.products += v.shape[:-1].numel()
        return self.values * v

    def scipy(self) -> Any:
        """The same for SciPy, whose vectors are columns."""
        values = self.values.numpy()

        def times(v: np.ndarray) -> np.ndarray:
            self.products += v.size // self.n
            return (values * v.T).T

        return scipy_linalg.LinearOperator((self.n, self.n), matvec=times, matmat=times, dtype=np.float64)


def solves(operator: Counted, tolerance: float) -> dict[str, Solve]:
    """What is compared for one operator."""
    random = np.random.default_rng(0)
    start, block = random.standard_normal(operator.n), random.standard_normal((operator.n, PAIRS))

    def ours() -> Pairs:
        options: dict[str, Any] = {"tolerance": tolerance, "subspace": KEPT}
        options["generator"] = torch.Generator().manual_seed(0)
        pairs = eigsh(operator.times, operator.n, PAIRS, **options)
        return pairs.values.numpy(), pairs.vectors.numpy()

    def arpack() -> Pairs:
        values, vectors = scipy_linalg.eigsh(theirs, PAIRS, which="LA", tol=tolerance, ncv=KEPT, v0=start)
        return values, vectors.T

    def lobpcg() -> Pairs:
        values, vectors = scipy_linalg.lobpcg(theirs, block, tol=tolerance, maxiter=CAP)
        return values, vectors.T

    compared: dict[str, Solve] = {"laplace_plus": ours}
    if scipy_linalg is not None:
        theirs = operator.scipy()
        compared |= {"scipy, arpack": arpack, "scipy, lobpcg": lobpcg}
    return compared


def residual(operator: Counted, pairs: Pairs) -> float:
    """The largest, relative to the largest value."""
    values, vectors = (torch.from_numpy(np.array(x)) for x in pairs)
    rest = operator.times(vectors) - values[:, None] * vectors
    return (rest.norm(dim=1).max() / values.max()).item()


def run(quick: bool) -> Iterator[Row]:
    """All rows."""
    n, rounds, tolerances = (5_000, 1, (1e-6,)) if quick else (50_000, 2, (1e-4, 1e-8))
    for spectrum in ("decaying", "crowded"):
        operator = Counted(n, spectrum)
        for tolerance in tolerances:
            compared = solves(operator, tolerance)
            products, found = {}, {}
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # LOBPCG says so where it does not converge
                for library, solve in compared.items():
                    operator.products = 0
                    found[library] = solve()
                    products[library] = operator.products
                one = torch.ones(n, dtype=torch.float64)
                alone = {"product": lambda operator=operator, one=one: operator.times(one)}
                seconds = least_seconds(compared | alone, rounds)
            for library, pairs in found.items():
                row: Row = {"task": "eigsh", "spectrum": spectrum, "n": n, "tolerance": tolerance, "library": library}
                row |= {"pairs": len(pairs[0]), "residual": residual(operator, pairs)}
                row |= {"products": products[library], "seconds": seconds[library]}
                row["microseconds_per_product"] = seconds[library] / products[library] * 1e6
                row["x_product"] = seconds[library] / products[library] / seconds["product"]
                if library != "laplace_plus":
                    row["laplace_plus_fewer_products"] = products[library] / products["laplace_plus"]
                    row["laplace_plus_x_faster"] = seconds[library] / seconds["laplace_plus"]
                yield row
