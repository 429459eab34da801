"""The gradient of a differential equation's solution in a coefficient field: Arnoldi's adjoint beside Runge and Kutta.

OMP_NUM_THREADS=1 python benchmarks/linalg/pde.py --output benchmarks/results/pde-cpu
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from functools import cache
from pathlib import Path

import torch
from measuring import Call, extra_memory, keep_freed_memory, least_seconds
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from laplace_plus.linalg import arnoldi_function

END, WIND = 0.1, 1.0
WAYS = ("Arnoldi", "RK4", "RK4, checkpointed")
HEAD = "| cells | way | size | products | error of u(T) | of the gradient | CPU s | MB |\n|" + " --- |" * 8

METHOD = """\
# Gradients of a differential equation in a coefficient field

Heat spreads with a coefficient c that varies in space, and wind carries it: u' = ∇·(c ∇u) − w ∂u on n × n cells, for
four start fields at once, in float64. Each way gives the squared distance of u(T) from that of another coefficient, and
its gradient in all of c. "Arnoldi" is `lp.linalg.arnoldi_function`, "RK4" the classical method of Runge and Kutta in
plain torch, through which autograd goes back, with and without checkpoints at each step. Its steps are the fewest (of
every n/16th number) with a gradient within 1e-4, relative to a Krylov space of 3n vectors; it is unstable with fewer.
The depth of Arnoldi's space is the least, likewise, whose gradient is as accurate. CPU time of the gradient is the
least of {rounds} rounds in turn, on one thread of a machine with other work. Memory is the rise of the high-water mark
of a process of its own. Checkpoints saved memory on the smaller grid only; why was not looked into."""

LATER = """\
## The gradient converges later than the value

The gradient is that of the computed value. While the space is too small, it also holds the derivative of the error,
which is rough: in single cells it is large where the error itself is small. On {n}² cells:"""


def product(coefficient: Tensor, rows: Tensor) -> Tensor:
    """``∇·(c ∇u) − w ∂u`` by finite volumes, with upwind differences; c ``[n, n]``, rows ``[..., n²]``."""
    n = len(coefficient)
    u, total = rows.view(-1, n, n), 0.0
    for axis in (0, 1):
        (c_low, c_high), (low, high) = (
            (x.narrow(at, 0, n - 1), x.narrow(at, 1, n - 1)) for x, at in ((coefficient, axis), (u, axis + 1))
        )
        flux = n * n * (c_low + c_high) / 2 * (high - low) - WIND * n * low
        shape = [0, 0, 0, 0, 0, 0]
        shape[3 - 2 * axis] = 1  # after the last cell
        total = total + torch.nn.functional.pad(flux, shape[:4])
        shape = shape[1::-1] + shape[3:1:-1]
        total = total - torch.nn.functional.pad(flux, shape)
    return total.reshape(rows.shape)


@cache
def observed(n: int) -> Tensor:
    """u(T) with another coefficient, 0.02 everywhere."""
    uniform = torch.full((n, n), 0.02, dtype=torch.float64)
    return solution("Arnoldi", uniform, problem(n)[1], 2 * n)


def problem(n: int) -> tuple[Tensor, Tensor]:
    """The coefficient ``[n, n]`` and start fields ``[4, n²]``."""
    x, y = torch.meshgrid(*[(torch.arange(n, dtype=torch.float64) + 0.5) / n] * 2, indexing="ij")
    centres = ((0.25, 0.25), (0.25, 0.7), (0.6, 0.3), (0.65, 0.65))
    start = torch.stack([(-((x - a) ** 2 + (y - b) ** 2) / 0.02).exp().flatten() for a, b in centres])
    return 0.02 * (1.2 * torch.sin(2 * math.pi * x) * torch.cos(math.pi * y)).exp(), start


def solution(way: str, coefficient: Tensor, start: Tensor, size: int) -> Tensor:
    """u(T) by ``size`` Krylov vectors or steps."""
    if way == "Arnoldi":
        options = {"depth": size, "parameters": [coefficient]}
        return arnoldi_function(
            lambda v: product(coefficient, v), lambda h: torch.linalg.matrix_exp(END * h), start, **options
        ).value
    length = END / size

    def step(u: Tensor, c: Tensor) -> Tensor:
        first = product(c, u)
        second = product(c, u + length / 2 * first)
        third = product(c, u + length / 2 * second)
        return u + length / 6 * (first + 2 * second + 2 * third + product(c, u + length * third))

    for _ in range(size):
        start = (
            checkpoint(step, start, coefficient, use_reentrant=False) if "point" in way else step(start, coefficient)
        )
    return start


def gradient(way: str, n: int, size: int) -> Call:
    """The gradient of the loss."""
    coefficient, start = problem(n)
    target = observed(n)
    coefficient.requires_grad_()

    def call() -> Tensor:
        loss = (solution(way, coefficient, start, size) - target).square().sum()
        return torch.autograd.grad(loss, coefficient)[0]

    return call


def memory(way: str, n: int, size: int) -> float:
    """Megabytes, after a small call that loads what is needed."""
    torch.set_num_threads(1)
    keep_freed_memory(False)
    gradient(way, 8, 8)()
    return extra_memory(gradient(way, n, size))


def page(sides: list[int], rounds: int) -> str:
    """Both tables."""
    lines, depths = [METHOD.format(rounds=rounds), "", HEAD], []
    for n in sides:
        best = gradient("Arnoldi", n, 3 * n)()
        coefficient, start = problem(n)
        end = solution("Arnoldi", coefficient, start, 3 * n)

        def errors(way: str, size: int) -> tuple[float, float]:
            value = solution(way, coefficient, start, size) - end  # noqa: B023
            slope = gradient(way, n, size)() - best  # noqa: B023
            return float(value.norm() / end.norm()), float(slope.norm() / best.norm())  # noqa: B023

        def found(way: str, limit: float, size: int, step: int) -> int:
            while not errors(way, size)[1] <= limit:  # noqa: B023
                size += step
            return size

        steps = found("RK4", 1e-4, n * n // 64, max(1, n // 16))
        depth = found("Arnoldi", errors("RK4", steps)[1], n // 2, max(1, n // 16))
        sizes = dict(zip(WAYS, (depth, steps, steps), strict=True))
        seconds = least_seconds({way: gradient(way, n, size) for way, size in sizes.items()}, rounds)
        for way, size in sizes.items():
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                megabytes = pool.apply(memory, (way, n, size))
            value, slope = errors(way, size)
            cells = f"{value:.1e} | {slope:.1e} | {seconds[way]:.3f} | {megabytes:.0f}"
            lines.append(f"| {n}² | {way} | {size} | {size if way == 'Arnoldi' else 4 * size} | {cells} |")
        if n == sides[-1]:
            depths = [(size, *errors("Arnoldi", size)) for size in range(n // 2 - 4, n + n // 4, 4)]
    lines += ["", LATER.format(n=sides[-1]), "", "| depth | error of u(T) | of the gradient |", "| --- | --- | --- |"]
    lines += [f"| {size} | {value:.1e} | {slope:.1e} |" for size, value, slope in depths]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="where to write, without .md")
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    arguments.output.with_suffix(".md").write_text(page(arguments.sides, arguments.rounds))


if __name__ == "__main__":
    main()
