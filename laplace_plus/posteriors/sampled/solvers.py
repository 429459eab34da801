"""Solvers of the linear systems of posterior samples: conjugate gradients and stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg import cg
from laplace_plus.linalg.nystrom import nystrom
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.persistence import stored
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Rows, Solved, TangentCurvature

Preconditioner = Literal["none", "nystrom"]

_PROBED_BATCHES, _POWER_ITERATIONS = 4, 8
"""Batches, and power iterations on each, that decide on a learning rate. They find most of the largest eigenvalue, and
:func:`learning_rate` adds a fifth."""

MOMENTUM, FINAL, CLIP = 0.9, 1 / 330, 10.0
"""Of gradient descent: Nesterov's momentum, the part of the learning rate that is left at the last step, and the length
of gradients at most, relative to the gradient at zero. A small one would bias the solution, as gradients of single
batches are clipped at the solution, too."""


@stored
@dataclass(frozen=True)
class CGSolver:
    """Conjugate gradients: a pass over the data for each iteration, and far fewer of them than gradient descent.

    Attributes:
        tolerance: Largest residual, relative to the right-hand side, in units of the prior's standard deviation.
        max_iterations: Where to give up.
        preconditioner: ``"none"`` (which already divides by the prior precision), or ``"nystrom"`` (a randomised
            Nyström approximation: ``rank`` products, once, and as many vectors of memory), which took a quarter of the
            iterations on a trained classifier with three layers.
        rank: Number of vectors of the Nyström approximation.
    """

    tolerance: float = 1e-3
    max_iterations: int = 500
    preconditioner: Preconditioner = "none"
    rank: int = 50

    def __post_init__(self) -> None:
        checks.number("tolerance", self.tolerance, above=0.0, most=0.999)
        checks.count("max_iterations", self.max_iterations)
        checks.count("rank", self.rank)
        checks.choice("preconditioner", self.preconditioner, ("none", "nystrom"))


@stored
@dataclass(frozen=True)
class SGDSolver:
    """Stochastic gradient descent with Nesterov's momentum of 0.9, one step for each batch of the loader.

    For data of which one pass is expensive. The learning rate falls linearly to 1/330, as that with which samples of a
    ResNet-18 were published; the loader may shuffle. It starts at the prior's draw, as steps hardly move what the data
    do not determine.

    Attributes:
        epochs: Number of passes over the data; None for 10, or as many as make 1000 steps.
        learning_rate: That of the first step; None to find it from the largest eigenvalue of some batches.
        tolerance: Largest relative residual at the end that counts as converged.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if self.epochs is not None:
            checks.count("epochs", self.epochs)
        if self.learning_rate is not None:
            checks.positive("learning_rate", self.learning_rate)
        checks.positive("tolerance", self.tolerance)


def learning_rate(system: PriorUnits, draws: Draws) -> float:
    """A stable learning rate of gradient descent, from the largest eigenvalue ``1 + λ`` of some batches' systems.

    A single batch is the system itself: ``1/(1 + λ)``. With several, momentum μ amplifies the gradient noise, and
    ``(1 − μ)/(1 + λ)`` keeps it from growing.
    """
    largest, few = 0.0, draws.prior[:2]
    for _, product in zip(range(_PROBED_BATCHES), system.curvature.minibatches()):  # noqa: B905
        largest = max(largest, largest_eigenvalue(partial(system.image, product=product), few, _POWER_ITERATIONS))
    return (1 if system.curvature.n_batches == 1 else 1 - MOMENTUM) / (1 + 1.2 * largest)


def largest_eigenvalue(product: Rows, start: Tensor, iterations: int) -> float:
    """A lower bound of the largest eigenvalue of a positive semi-definite matrix, by power iterations on a few rows."""
    vectors = start / start.norm(dim=-1, keepdim=True)
    found = torch.zeros(len(vectors), dtype=vectors.dtype, device=vectors.device)
    for _ in range(iterations):
        vectors = product(vectors)
        found = vectors.norm(dim=-1)
        vectors = vectors / found.clamp_min(1e-30)[:, None]
    return float(found.max())


def descend(
    products: Callable[[], Iterable[Rows]],
    b: Tensor,
    start: Tensor,
    *,
    rate: float,
    epochs: int,
    total: int,
    progress: bool = False,
) -> Tensor:
    """Descend for all rows together: ``v ← μ v + g``, ``x ← x − η (g + μ v)`` with gradients ``g = Â x − b``.

    Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013. Only the product is
    stochastic. ``total`` is the number of steps in all epochs. Returns the last iterate, which takes the start's place.
    """
    x, velocity, step, longest = start, torch.zeros_like(b), 0, CLIP * b.norm(dim=-1)
    for _ in progress_bar(range(epochs), enabled=progress, description="gradient descent"):
        for product in products():
            eta = rate * (1 - min(1.0, step / max(1, total - 1)) * (1 - FINAL))
            gradient = product(x).sub_(b)
            norm = gradient.norm(dim=-1)
            fix = f"Lower the learning rate, which is {eta:.3g}, or use conjugate gradients."
            checks.finite(f"The gradient after {step} steps of stochastic gradient descent", norm, fix)
            gradient.mul_((longest / norm.clamp_min(1e-30)).clamp_max(1.0)[:, None])
            velocity.mul_(MOMENTUM).add_(gradient)
            x.add_(gradient, alpha=-eta).add_(velocity, alpha=-eta * MOMENTUM)
            step += 1
    return x


Solver = CGSolver | SGDSolver
SOLVERS: Mapping[str, type[Solver]] = {"cg": CGSolver, "sgd": SGDSolver}


class TangentProblem:
    """The linear systems of some data: the curvature ``M₁``, the batches and the solver, with its preconditioner."""

    def __init__(
        self, network: Network, likelihood: Likelihood, data: Iterable[Any], solver: Solver, *, chunk_size: int
    ):
        self.curvature = TangentCurvature(network, likelihood, data, chunk_size=chunk_size)
        self.data, self.solver = data, solver
        # The residual that the recurrence of conjugate gradients has is rounded.
        self.largest_residual = solver.tolerance * (2 if isinstance(solver, CGSolver) else 1)
        self._sketch: tuple[Tensor, Tensor] | None = None

    def solve(self, system: PriorUnits, draws: Draws, start: Tensor | None, *, progress: bool = False) -> Solved:
        """Solve for all samples together, by conjugate gradients from samples ``start`` at another prior, if any."""
        solver, curvature = self.solver, self.curvature
        with exact_arithmetic(curvature.network), torch.no_grad():
            b = system.right_hand_side(draws)
            guess = draws.prior.clone()  # exact where the data determine nothing
            if isinstance(solver, CGSolver):
                found = cg(
                    system,
                    b,
                    preconditioner=self.preconditioner(system),
                    x0=guess if start is None else start * system.root,
                    rtol=solver.tolerance,
                    max_iterations=solver.max_iterations,
                    progress=progress,
                )
                u, n = found.value, int(found.iterations.max())
            else:
                n = solver.epochs or max(10, -(-1000 // curvature.n_batches))
                rate = solver.learning_rate or learning_rate(system, draws)

                def products() -> Iterator[Rows]:
                    return (partial(system.system, product=product) for product in curvature.minibatches())

                length: Any = {"epochs": n, "total": n * curvature.n_batches, "progress": progress}
                u = descend(products, b, guess, rate=rate, **length)
            return system.check(u, draws, self.largest_residual, n)

    def preconditioner(self, system: PriorUnits) -> Rows | None:
        """``(I + A^-½ Uᵀ Λ U A^-½)⁻¹`` with a randomised Nyström approximation ``Uᵀ Λ U`` of ``M₁``; None for none.

        The approximation is that of the curvature alone (Frangella, Tropp and Udell, 2023); the prior enters by
        Woodbury's identity, so that one sketch serves all priors.
        """
        if not isinstance(self.solver, CGSolver) or self.solver.preconditioner == "none":
            return None
        if self._sketch is None:
            self._sketch = self._sketched(self.solver.rank)
        values, vectors = self._sketch
        rows = vectors / system.root
        core = torch.diag(1 / (system.weight * values)) + (rows @ rows.mT).double()
        inverse = torch.linalg.inv(core).to(rows.dtype)
        inverse = (inverse + inverse.mT) / 2
        return lambda u: u - u @ rows.mT @ inverse @ rows

    def _sketched(self, rank: int) -> tuple[Tensor, Tensor]:
        """Λ ``[r]`` float64 and U ``[r, P]``."""
        curvature = self.curvature
        source = torch.Generator().manual_seed(0)  # changes the number of iterations, not their result
        own: Any = {"dtype": curvature.dtype, "device": curvature.device, "parameters": (), "generator": source}
        with exact_arithmetic(curvature.network), torch.no_grad():
            found = nystrom(curvature, curvature.shape[0], rank, **own)
        positive = found.values > torch.finfo(found.values.dtype).eps * found.values.max()
        return found.values[positive].double(), found.vectors[positive]
