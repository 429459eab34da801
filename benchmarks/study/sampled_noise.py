"""Samples of a posterior by optimisation: the gradient noise of two objectives, and γ from a single sample.

    python benchmarks/study/sampled_noise.py --data DATA --output FOLDER --pages PAGES

``L`` regresses on noise targets, ``L′`` has all noise in its prior term (Antorán et al., 2023); a minibatch estimates
the sum over data of either. The network is so small that Jacobians, curvature and spectrum are dense here: samples and
γ are exact. Writes study-sampled.md; goes on where it was interrupted.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.study.methods import Task
from benchmarks.study.rows import Row, Rows, said, script, section_of, table, task_of

BATCHES = (1, 4, 16, 64, 256)
ESTIMATORS = ("function", "weight", "ratio")
SAMPLES = 200
DRAWS = 200
STEPS = 100
DESCENTS = (1, 4, 16, 64)
TIMES = (0.1, 1.0, 10.0)
"""Multiples of MacKay's prior precision."""


@dataclass(frozen=True)
class Tangent:
    """A tangent model of N data with P weights.

    Attributes:
        rows: ``S_iᵀ J_i`` with ``S_i S_iᵀ = B_i``, ``[N, C, P]``.
        curvature: ``M = Σ J_iᵀ B_i J_i``, ``[P, P]``.
        spectrum: Its eigenvalues.
        scatter: ``‖θ̂‖²``.
    """

    rows: Tensor
    curvature: Tensor
    spectrum: Tensor
    scatter: float

    @classmethod
    def of(cls, task: Task) -> Tangent:
        """That of a classifier."""
        model, inputs = task.model, task.data.train[0]
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def outputs(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(model, parameters, (x[None],))[0]

        jacobian = vmap(jacrev(outputs), (None, 0), chunk_size=50)(weights, inputs)
        flat = torch.cat([part.flatten(2) for part in jacobian.values()], 2).detach()  # [N, C, P]
        with torch.no_grad():
            p = model(inputs).softmax(-1)
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]  # S Sᵀ = diag p − p pᵀ
        rows = root.mT @ flat
        curvature = rows.flatten(0, 1).T @ rows.flatten(0, 1)
        spectrum = torch.linalg.eigvalsh(curvature).double().clamp_min(0)
        scatter = sum(float(weight.double().square().sum()) for weight in weights.values())
        return cls(rows, curvature, spectrum, scatter)

    def share(self, precision: float) -> Tensor:
        """``λ/(λ + α)`` of each eigenvalue, whose sum is γ."""
        return self.spectrum / (self.spectrum + precision)

    def mackay(self) -> float:
        """The fixed point of ``α = γ(α) / ‖θ̂‖²``."""
        precision = 1.0
        for _ in range(500):
            precision = float(self.share(precision).sum()) / self.scatter
        return precision


def measured(task: Task, tangents: list[Tangent], times: float) -> Row:
    """Noise of the gradients, what it does to descent, and γ, at a multiple of MacKay's precision."""
    if not tangents:
        tangents.append(Tangent.of(task))
    own = tangents[0]
    generator, (n, c, size) = torch.Generator().manual_seed(0), own.rows.shape
    precision = times * own.mackay()
    flat = own.rows.flatten(0, 1)
    eta, xi = torch.randn(n * c, SAMPLES, generator=generator), torch.randn(size, SAMPLES, generator=generator)
    factor = torch.linalg.cholesky(own.curvature + precision * torch.eye(size))
    z = torch.cholesky_solve(flat.T @ eta + precision**0.5 * xi, factor)  # [P, k]: samples of the posterior
    pushed = flat @ z
    found: Row = {"precision": precision, "gamma": float(own.share(precision).sum()), "size": size}
    found["noise"] = _noise(own.rows, pushed, eta, generator)
    if times == 1.0:
        found["descent"] = _descent(own.rows, z[:, :2], eta[:, :2], precision, generator)
    function, weight = pushed.square().sum(0), precision * z.square().sum(0)
    share = own.share(precision)
    predicted = {"function": share, "weight": 1 - share, "ratio": share - share.mean()}
    estimates = {"function": function, "weight": size - weight, "ratio": size * function / (function + weight)}
    for name, values in ((name, estimates[name].double().clamp(0, size)) for name in ESTIMATORS):
        found[name] = [float(values.mean()), float(values.std()), float((2 * predicted[name].square().sum()).sqrt())]
    single = lp.SampledLaplace(task.model, "classification", n_samples=1, prior_precision=precision)
    single.fit(task.train, generator=torch.Generator().manual_seed(1))
    return found | {"package": float(single.effective_dimension().value), "passes": single.report.iterations}


def _noise(rows: Tensor, pushed: Tensor, eta: Tensor, generator: torch.Generator) -> dict[str, list[float]]:
    """Traces of the covariances of both gradients at the solutions, and their ratios, by the size of the batches."""
    n, c, _ = rows.shape
    found: dict[str, list[float]] = {str(b): [0.0, 0.0] for b in BATCHES}
    for k in range(4):
        seen = [(pushed[:, k] - eta[:, k]).view(n, 1, c), pushed[:, k].view(n, 1, c)]
        gradients = torch.cat([(one @ rows)[:, 0] for one in seen], 1)  # [N, 2 P]: of L, and of L′
        gradients -= gradients.mean(0)
        for b in BATCHES:
            chosen = torch.rand(DRAWS, n, generator=generator).argsort(1)[:, :b]
            weights = torch.zeros(DRAWS, n).scatter_(1, chosen, n / b)
            squares = (weights @ gradients).square().view(DRAWS, 2, -1).sum(2).mean(0)
            found[str(b)] = [old + float(new) / 4 for old, new in zip(found[str(b)], squares, strict=True)]
    return found


def _descent(
    rows: Tensor, z: Tensor, eta: Tensor, precision: float, generator: torch.Generator
) -> dict[str, list[float]]:
    """``‖u − z‖²_H / P`` after steps of SGD that start at the solutions z, where only the noise moves it."""
    n, c, size = rows.shape
    largest = float(torch.linalg.eigvalsh(rows @ rows.mT).max()) * n
    rate = 0.5 / (largest + precision)  # bounded for any batch
    noise = eta.view(n, c, -1)
    whole = torch.einsum("ncp,nck->pk", rows, noise)
    right = rows.flatten(0, 1).T @ (rows.flatten(0, 1) @ z) + precision * z  # A θⁿ
    found: dict[str, list[float]] = {}
    for b in DESCENTS:
        found[str(b)] = []
        for reduced in (False, True):
            u = z.clone()
            for _ in range(STEPS):
                some = torch.randperm(n, generator=generator)[:b]
                part = rows[some].flatten(0, 1)
                seen = part @ u
                fixed = right
                if not reduced:
                    seen = seen - noise[some].flatten(0, 1)
                    fixed = right - whole  # A θ⁰
                u = u - rate * ((n / b) * (part.T @ seen) + precision * u - fixed)
            gap = u - z
            energy = (rows.flatten(0, 1) @ gap).square().sum() + precision * gap.square().sum()
            found[str(b)].append(float(energy) / (size * z.shape[1]))
    return found


INTRODUCTION = """
# Samples of a posterior by optimisation: noise of the gradients, and γ from one sample

A LeNet of {size} weights on 1000 images of Fashion-MNIST, {seeds} splits, mean ± standard error. The prior precision is
a multiple of MacKay's, which is {precision}. `python benchmarks/study/sampled_noise.py` measures it.

## Gradients

Both objectives have the same minimiser. The table has the variance of the minibatch gradient of L divided by that of L′
at the minimiser (traces of covariances over {draws} batches, four samples): so many times smaller may a batch of L′ be.
"""


def page(rows: Rows) -> str:
    """The tables."""
    seeds = len({row["seed"] for row in rows.all})
    precision = said([row["precision"] for row in rows.where(times=1.0)], 1)
    about = {"size": rows.all[0]["size"], "seeds": seeds, "precision": precision, "draws": DRAWS}
    lines = [INTRODUCTION.strip().format(**about), ""]
    head = ["batch", *(f"{times:g} × MacKay's" for times in TIMES)]

    def ratio(kind: str, times: float, b: int) -> str:
        both = [row[kind][str(b)] for row in rows.where(times=times)]
        return said([first / second for first, second in both], 1)

    lines += table(head, ([str(b), *(ratio("noise", times, b) for times in TIMES)] for b in BATCHES))
    lines += [
        f"Error `‖u − z‖²_H / P` of {STEPS} steps of SGD that start at the minimiser z, at MacKay's precision:",
        "",
    ]
    some = rows.where(times=1.0)
    both = ([*(said([1e6 * row["descent"][str(b)][k] for row in some], 1) for k in range(2))] for b in DESCENTS)
    cells = ([str(b), *pair, ratio("descent", 1.0, b)] for b, pair in zip(DESCENTS, both, strict=True))
    lines += table(["batch", "L, 1e-6", "L′, 1e-6", "L / L′"], cells)
    lines += ["## γ from one sample", ""]
    lines += [
        f"γ exactly, and the mean and standard deviation of {SAMPLES} estimates from one exact sample each. In brackets"
    ]
    lines += [
        "the standard deviation by the formula. Last, the estimate of `lp.SampledLaplace(n_samples=1)` and its passes.",
        "",
    ]
    head = ["precision", "split", "γ", *(f"by {name}" for name in ESTIMATORS), "`SampledLaplace`", "passes"]
    lines += table(head, (_dimension(row) for row in sorted(rows.all, key=lambda row: (row["times"], row["seed"]))))
    return "\n".join(lines).rstrip() + "\n"


def _dimension(row: Row) -> list[str]:
    estimates = ("{:.1f}, sd {:.1f} ({:.1f})".format(*row[name]) for name in ESTIMATORS)
    first = [f"{row['precision']:.2g}", str(row["seed"]), f"{row['gamma']:.1f}"]
    return [*first, *estimates, f"{row['package']:.1f}", str(row["passes"])]


def measure(rows: Rows, arguments: Namespace) -> None:
    """All that is missing."""
    for seed in range(arguments.seeds):
        tangents: list[Tangent] = []
        task = task_of(section_of("fashion_mnist"), seed, arguments)
        for times in TIMES:
            rows.of(partial(measured, task, tangents, times), times=times, seed=seed)


def main() -> None:
    """Measure what is missing, and write the page."""
    script(__doc__ or "", "sampled", measure, page)


if __name__ == "__main__":
    main()
