"""Decompositions with their adjoints, and log-determinants, beside matfree on JAX.

matfree runs in a process of its own by ``--matfree-python``, for which only matfree, JAX and NumPy need to be
installed; it is given the same numbers and one core, right after ours. Its functions are compiled before they are
timed; "compile seconds" is what the first call took. All in float32 with full re-orthogonalisation.

* "lanczos": K = 40 steps with a diagonal matrix plus one of rank 4, n = 100 000; and the gradient of
  ``⟨W, Q⟩ + ⟨M, T⟩`` in the operator's entries and the start vector.
* "arnoldi": the same without symmetry.
* "logdet": value and gradient of a stochastic log-determinant with 4 probes and K = 20 for a squared-exponential kernel
  on 1500 points, in lengthscales, scale and noise. matfree differentiates its adjoint, like ours through ``lanczos``.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import Call, Row, least_seconds
from torch import Tensor

from laplace_plus.linalg import arnoldi, draw_probes, lanczos, slq_logdet

Arrays = dict[str, np.ndarray]


def numbers(n: int, depth: int, points: int) -> Arrays:
    """What both are given."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((4, n)) / n**0.5
    given = {
        "diagonal": np.logspace(-2, 0, n),
        "left": rows * np.logspace(1, 2.5, 4)[:, None],
        "right": rows,
        "start": random.standard_normal(n),
        "basis_weights": random.standard_normal((depth, n)) / n**0.5,
        "matrix_weights": random.standard_normal((depth, depth)),
        "points": random.standard_normal((points, 8)),
        "lengthscales": np.linspace(1.5, 3.0, 8),
        "probes": draw_probes("signs", 4, points, generator=torch.Generator().manual_seed(1)).numpy(),
    }
    return {name: x.astype(np.float32) for name, x in given.items()}


def ours(given: Arrays) -> dict[str, Call]:
    """The calls of this package; each gives a value, and gradients where it is differentiated."""
    x = {name: torch.from_numpy(array) for name, array in given.items()}
    depth = len(x["basis_weights"])
    differentiated = [x[name].requires_grad_() for name in ("diagonal", "left", "start")]
    kernel = [x["lengthscales"], torch.tensor(1.0), torch.tensor(0.1)]
    for tensor in kernel:
        tensor.requires_grad_()

    def symmetric(v: Tensor) -> Tensor:
        return x["diagonal"] * v + 0.5 * ((v @ x["right"].T) @ x["left"] + (v @ x["left"].T) @ x["right"])

    def general(v: Tensor) -> Tensor:
        return x["diagonal"] * v + (v @ x["right"].T) @ x["left"]

    def kernel_product(v: Tensor) -> Tensor:
        points = x["points"] / kernel[0]
        squares = points.square().sum(1)
        distances = squares[:, None] + squares - 2 * points @ points.T
        return kernel[1] * (v @ torch.exp(-0.5 * distances)) + kernel[2] * v

    def decompose(name: str) -> tuple[Tensor, Tensor]:
        if name == "lanczos":
            found = lanczos(symmetric, x["start"], depth)
            return found.vectors, found.tridiagonal()
        general_found = arnoldi(general, x["start"], depth)
        return general_found.vectors, general_found.hessenberg

    def forward(name: str) -> Tensor:
        with torch.no_grad():
            return decompose(name)[1].diagonal().sum()

    def gradient(name: str) -> tuple[Tensor, ...]:
        vectors, matrix = decompose(name)
        value = (vectors * x["basis_weights"]).sum() + (matrix * x["matrix_weights"]).sum()
        return value.detach(), *torch.autograd.grad(value, differentiated)

    def logdet(adjoint: bool) -> tuple[Tensor, ...]:
        n, generator = len(x["points"]), torch.Generator().manual_seed(1)
        if adjoint:
            probes = draw_probes("signs", 4, n, generator=generator)
            values, rotation = torch.linalg.eigh(lanczos(kernel_product, probes, 20).tridiagonal().double())
            value = n * (rotation[:, 0].square() * values.log()).sum(1).mean()
        else:
            value = slq_logdet(kernel_product, n, probes=4, depth=20, generator=generator).value
        return value.detach(), *torch.autograd.grad(value, kernel)

    calls: dict[str, Call] = {}
    for name in ("lanczos", "arnoldi"):
        calls[name] = lambda name=name: forward(name)
        calls[f"{name}, with gradient"] = lambda name=name: gradient(name)
    calls["logdet, with gradient"] = lambda: logdet(adjoint=True)
    calls["logdet, with gradient (krylov)"] = lambda: logdet(adjoint=False)
    return calls


def flat(result: Any) -> np.ndarray:
    """All numbers of a result, in float64."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])


def run(quick: bool, matfree_python: Path | None) -> Iterator[Row]:
    """All rows, or one that says why there are none."""
    n, depth, points, rounds = (2000, 10, 200, 1) if quick else (100_000, 40, 1500, 5)
    given = numbers(n, depth, points)
    calls = ours(given)
    seconds = least_seconds(calls, rounds)
    theirs, values = matfree(given, rounds, matfree_python)
    for name, time in seconds.items():
        row: Row = {"task": name, "n": points if "logdet" in name else n, "depth": 20 if "logdet" in name else depth}
        other = theirs.get(name.removesuffix(" (krylov)"))
        mine = row | {"library": "laplace_plus", "seconds": time}
        if other is not None:
            expected = values[name.removesuffix(" (krylov)")]
            mine["distance"] = float(np.linalg.norm(flat(calls[name]()) - expected) / np.linalg.norm(expected))
            mine["x_faster_than_matfree"] = other["seconds"] / time
        yield mine
        if name in theirs:
            yield row | {"library": theirs["library"], **theirs[name]}
    if "left_out" in theirs:
        yield {"library": "matfree", "left_out": theirs["left_out"]}


def matfree(given: Arrays, rounds: int, python: Path | None) -> tuple[dict[str, Any], Arrays]:
    """Rows of its times by task, and what its functions gave; or why it was not run."""
    if python is None:
        return {"left_out": "not run: no --matfree-python was given"}, {}
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "given.npz", **given)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        script = Path(__file__).with_name("matfree_process.py")
        command = [str(python), "-W", "ignore", str(script), folder, str(rounds)]
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})  # inherited: JAX makes one thread for each core
        try:
            environment |= {"JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        except OSError as error:
            return {"left_out": f"not run: {error.strerror}"}, {}
        finally:
            os.sched_setaffinity(0, cores)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"left_out": f"not run: {lines[-1][:200]}"}, {}
        with np.load(Path(folder) / "results.npz") as results:
            return json.loads(done.stdout.strip().splitlines()[-1]), dict(results)
