"""The side of matfree in ``beside_matfree``: run by an interpreter that has matfree and JAX, and nothing of ours.

    python matfree_process.py FOLDER ROUNDS

Reads ``given.npz`` in the folder, writes ``results.npz``, and prints the times as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matfree import decomp, funm


def tasks(given: dict) -> dict:
    """Compiled functions without arguments, by name."""
    x = {name: jnp.asarray(array) for name, array in given.items()}
    depth = len(given["basis_weights"])

    def symmetric(v, diagonal, left):
        return diagonal * v + 0.5 * ((v @ x["right"].T) @ left + (v @ left.T) @ x["right"])

    def general(v, diagonal, left):
        return diagonal * v + (v @ x["right"].T) @ left

    processes = {
        "lanczos": (decomp.tridiag_sym(depth, reortho="full", custom_vjp=True), symmetric),
        "arnoldi": (decomp.hessenberg(depth, reortho="full", custom_vjp=True), general),
    }
    found = {}
    for name, (process, matvec) in processes.items():

        def forward(diagonal, left, start, process=process, matvec=matvec):
            result = process(matvec, start, diagonal, left)
            return jnp.trace(result.J_small), result.Q_tall

        def value(diagonal, left, start, process=process, matvec=matvec):
            result = process(matvec, start, diagonal, left)
            return (result.Q_tall * x["basis_weights"]).sum() + (result.J_small * x["matrix_weights"]).sum()

        arguments = (x["diagonal"], x["left"], x["start"])
        found[name] = (jax.jit(forward), arguments)
        found[f"{name}, with gradient"] = (jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2))), arguments)

    integrand = funm.monte_carlo_funm_sym_logdet(decomp.tridiag_sym(20, reortho="full", custom_vjp=True))

    def kernel_product(v, lengthscales, scale, noise):
        points = x["points"] / lengthscales
        squares = jnp.square(points).sum(1)
        distances = squares[:, None] + squares - 2 * points @ points.T
        return scale * (v @ jnp.exp(-0.5 * distances)) + noise * v

    def logdet(lengthscales, scale, noise):
        one = jax.vmap(lambda v: integrand(kernel_product, v, lengthscales, scale, noise))
        return one(x["probes"]).mean()

    arguments = (x["lengthscales"], jnp.float32(1.0), jnp.float32(0.1))
    found["logdet, with gradient"] = (jax.jit(jax.value_and_grad(logdet, argnums=(0, 1, 2))), arguments)
    return found


def main(folder: Path, rounds: int) -> None:
    """Time the tasks."""
    with np.load(folder / "given.npz") as given:
        found = tasks({name: given[name] for name in given.files})
    timed, results = {}, {}
    for name, (call, arguments) in found.items():
        start = time.perf_counter()
        result = jax.block_until_ready(call(*arguments))
        row = {"compile_seconds": time.perf_counter() - start, "seconds": float("inf")}
        for _ in range(rounds):
            start = time.process_time()
            jax.block_until_ready(call(*arguments))
            row["seconds"] = min(row["seconds"], time.process_time() - start)
        timed[name] = row
        parts = jax.tree.leaves(result)
        if "gradient" not in name:  # the basis is computed, too, but not compared
            parts = parts[:1]
        results[name] = np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in parts])
    np.savez(folder / "results.npz", **results)
    library = ", ".join(f"{name} {metadata.version(name)}" for name in ("matfree", "jax"))
    print(json.dumps({"library": library, **timed}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
