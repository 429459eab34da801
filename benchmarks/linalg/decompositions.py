"""Lanczos with a cheap operator, beside linear_operator's.

Wanted: at least twice as fast as linear_operator at n = 10⁶, and no less orthogonal.

All run K steps on the same start vectors in float32. The operators are diagonal matrices, so that the products cost
little: "smooth" has nothing else; "outliers" adds a matrix of rank 4 with eigenvalues of 10 to 300, with which
orthogonality is lost within a few steps unless it is enforced. "orthogonality" is ``max |QQᵀ − I|``, evaluated in
float64. Re-orthogonalisation, by two passes of Gram–Schmidt, reads what there is of Q four times in each step,
``8 n K²`` bytes in all; "share of limit" is the time that a copy would need for reading and writing as many bytes, over
the time that the whole decomposition took; it can exceed one where Q fits into a cache. "bases" is the memory in units
of that of Q.

linear_operator's re-orthogonalisation makes temporary tensors of the size of Q. Where the C library returns "freed
memory" to the system, mapping it again takes longer than its arithmetic; large sizes are measured either way.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from measuring import Call, Row, copy_bandwidth, keep_freed_memory, least_seconds, memory_in_new_process
from torch import Tensor

from laplace_plus.linalg import lanczos

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from linear_operator.utils.lanczos import lanczos_tridiag
except ImportError:  # the comparison is optional
    lanczos_tridiag = None

# operator, n, number of start vectors
SIZES = (
    ("outliers", 10_000, 1),
    ("outliers", 100_000, 1),
    ("outliers", 100_000, 10),
    ("outliers", 1_000_000, 1),
    ("smooth", 1_000_000, 1),
)


class Problem:
    """An operator, and start vectors ``[n]`` or ``[probes, n]``."""

    def __init__(self, operator: str, n: int, probes: int):
        generator = torch.Generator().manual_seed(0)
        self.diagonal = torch.logspace(-2, 0, n)
        self.rows = None
        if operator == "outliers":
            rows = torch.nn.functional.normalize(torch.randn(4, n, generator=generator), dim=1)
            self.rows = rows * torch.logspace(1, 2.5, 4).sqrt()[:, None]
        self.start = torch.randn(probes, n, generator=generator) if probes > 1 else torch.randn(n, generator=generator)

    def __call__(self, v: Tensor) -> Tensor:
        """The product with ``[..., n]``."""
        product = self.diagonal * v
        return product if self.rows is None else product.add_((v @ self.rows.T) @ self.rows)

    def calls(self, depth: int) -> dict[str, Call]:
        """What is compared; each gives its basis."""
        n = self.start.shape[-1]

        compared: dict[str, Call] = {"laplace_plus": lambda: lanczos(self, self.start, depth).vectors}
        if lanczos_tridiag is not None:
            columns = self.start.reshape(-1, n).T

            def product(v: Tensor) -> Tensor:
                return self(v.T).T

            def theirs() -> Tensor:
                basis, _ = lanczos_tridiag(product, depth, torch.float32, columns.device, (n, n), init_vecs=columns)
                return basis.mT

            compared["linear_operator"] = theirs
        return compared


def check(basis: Tensor) -> Row:
    """What a decomposition is worth, for a basis ``[..., K, n]``."""
    worst = 0.0
    for one in basis.reshape(-1, *basis.shape[-2:]):
        gram = sum(part.double() @ part.double().T for part in one.split(100_000, dim=1))
        worst = max(worst, (gram - torch.eye(len(one), dtype=torch.float64)).abs().max().item())
    return {"orthogonality": worst}


def call(operator: str, n: int, probes: int, depth: int, name: str, small: bool = False) -> Call:
    """That of which memory is measured."""
    return torch.no_grad()(Problem(operator, 200_000 // probes if small else n, probes).calls(depth)[name])


def run(quick: bool) -> Iterator[Row]:
    """All rows."""
    depth, rounds = 40, 1 if quick else 3
    bandwidth = copy_bandwidth()
    yield {"table": "copy", "copy_bandwidth_GB_per_s": bandwidth}
    for operator, n, probes in SIZES[1:2] if quick else SIZES:
        problem = Problem(operator, n, probes)
        shape: Row = {"operator": operator, "n": n, "probes": probes, "depth": depth}
        with torch.no_grad():
            calls = problem.calls(depth)
            found = {name: check(compared()) for name, compared in calls.items()}
        if n >= 1_000_000 or probes > 1:
            for name, row in found.items():
                row["megabytes"] = memory_in_new_process("decompositions", **shape, name=name)
                row["bases"] = row["megabytes"] / (4e-6 * n * probes * depth)
        calls["products alone"] = lambda problem=problem: [problem(problem.start) for _ in range(depth)]
        for kept in (True, False) if n >= 1_000_000 else (True,):
            keep_freed_memory(kept)
            with torch.no_grad():
                seconds = least_seconds(calls, rounds)
            for name, time in seconds.items():
                row = {"table": "times"} | shape | {"freed_memory": "kept" if kept else "returned", "library": name}
                row["seconds"] = time
                if "linear_operator" in calls and name == "laplace_plus":
                    row["x_faster_than_linear_operator"] = seconds["linear_operator"] / time
                if name == "laplace_plus":
                    row["share_of_limit"] = 8e-9 * n * probes * depth**2 / bandwidth / time
                yield row | found.get(name, {})
    keep_freed_memory(True)
