"""Partial eigen- and singular value decompositions beside SciPy's, to the same tolerance.

The k = 10 largest pairs in float64, with products that cost little: a diagonal matrix, and for singular values two
diagonal matrices on top of each other, ``2n × n``. "decaying" has eigenvalues ``1/i``; "crowded" has 1 % of n spread
evenly over [0.5, 1] and the rest below, so that the wanted ones are 1e-3 or less of the spectrum apart.

All are asked for residuals ``‖A u − λ u‖ ≤ tolerance · ‖A‖`` (``‖A v − σ u‖`` and ``‖Aᵀ u − σ v‖`` for singular values)
and may keep 30 vectors (LOBPCG keeps 3 blocks of 10, and ends after 300 iterations); "residual" is the largest of what
they gave. SciPy's ``svds`` takes the square root of that tolerance, as it compares its square. "products" are those
with single vectors, those with the transpose and those that check the result included; ours searches the complement of
what it found once more, so that multiple eigenvalues are not missed. "× product" is the time that passes for each
product in units of what the product alone takes, and "fewer products" the number of the other's in units of ours.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from measuring import Row, least_seconds
from torch import Tensor

from laplace_plus.linalg.partial_eigen import eigsh, svds

try:
    import scipy.sparse.linalg as scipy_linalg
except ImportError:  # the comparison is optional
    scipy_linalg = None

PAIRS, KEPT, CAP = 10, 30, 300
# values, left vectors as rows, right vectors as rows
Triplets = tuple[np.ndarray, np.ndarray, np.ndarray]
Solve = Callable[[], Triplets]


class Counted:
    """``v ↦ A v`` for a diagonal matrix, or two of them on top of each other, in torch and in NumPy; counts vectors."""

    def __init__(self, n: int, spectrum: str, stacked: bool):
        i = torch.arange(1, n + 1, dtype=torch.float64)
        few = n // 100
        crowded = torch.where(i <= few, 1 - 0.5 * (i - 1) / few, 0.5 * (n - i) / n)
        values = 1 / i if spectrum == "decaying" else crowded
        angles = torch.linspace(0.1, 1.4, n, dtype=torch.float64)
        self.parts = (values * angles.cos(), values * angles.sin()) if stacked else (values,)
        self.arrays = tuple(part.numpy() for part in self.parts)
        self.n, self.m, self.products = n, n * len(self.parts), 0

    def times(self, v: Tensor) -> Tensor:
        """``A v`` for row-stacked vectors."""
        self.products += v.shape[:-1].numel()
        return torch.cat([part * v for part in self.parts], dim=-1) if len(self.parts) > 1 else self.parts[0] * v

    def transposed(self, u: Tensor) -> Tensor:
        """``Aᵀ u`` for row-stacked vectors."""
        self.products += u.shape[:-1].numel()
        return sum(part * piece for part, piece in zip(self.parts, u.split(self.n, dim=-1), strict=True))

    def scipy(self) -> Any:
        """The same for SciPy, whose vectors are columns."""

        def times(v: np.ndarray) -> np.ndarray:
            self.products += v.size // self.n
            return np.concatenate([(part * v.T).T for part in self.arrays])

        def transposed(u: np.ndarray) -> np.ndarray:
            self.products += u.size // self.m
            pieces = np.split(u, len(self.arrays))
            return sum((part * piece.T).T for part, piece in zip(self.arrays, pieces, strict=True))

        return scipy_linalg.LinearOperator(
            (self.m, self.n), matvec=times, rmatvec=transposed, matmat=times, rmatmat=transposed, dtype=np.float64
        )


def solves(operator: Counted, task: str, tolerance: float) -> dict[str, Solve]:
    """What is compared for one operator."""
    random = np.random.default_rng(0)
    start, block = random.standard_normal(operator.n), random.standard_normal((operator.n, PAIRS))

    def ours() -> Triplets:
        options: dict[str, Any] = {"tolerance": tolerance, "subspace": KEPT, "v0": torch.from_numpy(start)}
        options["generator"] = torch.Generator().manual_seed(0)
        if task == "eigsh":
            pairs = eigsh(operator.times, operator.n, PAIRS, **options)
            return pairs.values.numpy(), pairs.vectors.numpy(), pairs.vectors.numpy()
        found = svds(operator.times, operator.n, PAIRS, m=operator.m, rmatvec=operator.transposed, **options)
        return found.values.numpy(), found.left.numpy(), found.right.numpy()

    def arpack() -> Triplets:
        if task == "eigsh":
            values, vectors = scipy_linalg.eigsh(theirs, PAIRS, which="LA", tol=tolerance, ncv=KEPT, v0=start)
            return values, vectors.T, vectors.T
        return turned(scipy_linalg.svds(theirs, PAIRS, tol=tolerance**0.5, ncv=KEPT, v0=start))

    def lobpcg() -> Triplets:
        if task == "eigsh":
            values, vectors = scipy_linalg.lobpcg(theirs, block, tol=tolerance, maxiter=CAP)
            return values, vectors.T, vectors.T
        return turned(scipy_linalg.svds(theirs, PAIRS, tol=tolerance**0.5, solver="lobpcg", maxiter=CAP, rng=0))

    compared: dict[str, Solve] = {"laplace_plus": ours}
    if scipy_linalg is not None:
        theirs = operator.scipy()
        compared |= {"scipy, arpack": arpack, "scipy, lobpcg": lobpcg}
    return compared


def turned(found: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Triplets:
    """SciPy's left vectors, values and right vectors in our order."""
    left, values, right = found
    return values, left.T, right


def residual(operator: Counted, triplets: Triplets) -> float:
    """The largest, relative to the largest value."""
    values, left, right = (torch.from_numpy(np.array(x)) for x in triplets)
    forwards = operator.times(right) - values[:, None] * left
    backwards = operator.transposed(left) - values[:, None] * right
    return (torch.cat([forwards.norm(dim=1), backwards.norm(dim=1)]).max() / values.max()).item()


def run(quick: bool) -> Iterator[Row]:
    """All rows."""
    n, rounds, tolerances = (5_000, 1, (1e-6,)) if quick else (50_000, 2, (1e-4, 1e-8))
    for task, spectrum in [(task, spectrum) for task in ("eigsh", "svds") for spectrum in ("decaying", "crowded")]:
        operator = Counted(n, spectrum, stacked=task == "svds")
        for tolerance in tolerances:
            compared = solves(operator, task, tolerance)
            products, found = {}, {}
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # LOBPCG says so where it does not converge
                for library, solve in compared.items():
                    operator.products = 0
                    found[library] = solve()
                    products[library] = operator.products
                one = torch.ones(n, dtype=torch.float64)
                alone = {"product": lambda operator=operator, one=one: operator.transposed(operator.times(one))}
                seconds = least_seconds(compared | alone, rounds)
            product = seconds["product"] / 2
            for library, triplets in found.items():
                row: Row = {"task": task, "spectrum": spectrum, "n": n, "tolerance": tolerance, "library": library}
                row |= {"pairs": len(triplets[0]), "residual": residual(operator, triplets)}
                row |= {"products": products[library], "seconds": seconds[library]}
                row["microseconds_per_product"] = seconds[library] / products[library] * 1e6
                row["x_product"] = seconds[library] / products[library] / product
                if library != "laplace_plus":
                    row["laplace_plus_fewer_products"] = products[library] / products["laplace_plus"]
                    row["laplace_plus_x_faster"] = seconds[library] / seconds["laplace_plus"]
                yield row
