"""Solvers of the linear systems of posterior samples: conjugate gradients and stochastic gradient descent.

:func:`laplace_plus.linalg.cg` solves a system in one call. Where each product is a pass over a large data set, a solve
takes hours: these iterations hand out their whole state as tensors, from which another process continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from laplace_plus._progress import progress_bar
from laplace_plus.curvature import KroneckerStructure, Native
from laplace_plus.curvature.structures import Curvature
from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.arguments import require_choice, require_count
from laplace_plus.linalg.linear_maps import require_finite
from laplace_plus.linalg.nystrom import nystrom
from laplace_plus.network import batches
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.posteriors.sampled.objective import Draws, PriorUnits, Rows, Solved, TangentCurvature

State = Mapping[str, Tensor]
"""All that the next step of an iteration depends on."""

Keep = Callable[[dict[str, Tensor]], None]
"""Takes the state of an iteration, every so many steps."""

Preconditioner = Literal["none", "kfac", "nystrom"]


@dataclass(frozen=True)
class CGSolver:
    """Conjugate gradients: a pass over the data for each iteration, and far fewer of them than gradient descent.

    On a trained classifier with three layers, Nyström's preconditioner took a quarter of the iterations and that of
    Kronecker factors twice as many as none: it is exact for a single layer, and may be worse than nothing for several.

    Attributes:
        tolerance: Largest residual, relative to the right-hand side, in units of the prior's standard deviation.
        max_iterations: Where to give up.
        preconditioner: ``"none"`` (which already divides by the prior precision), ``"kfac"`` (the inverse of
            Kronecker factors plus the prior precision: one pass, once) or ``"nystrom"`` (a randomised Nyström
            approximation: ``rank`` products, once, and as many vectors of memory).
        rank: Number of vectors of the Nyström approximation.
        checkpoint_every: Iterations from one checkpoint to the next, where any are written.
    """

    tolerance: float = 1e-3
    max_iterations: int = 500
    preconditioner: Preconditioner = "none"
    rank: int = 50
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        _require_between("tolerance", self.tolerance, 0, 1)
        for name in ("max_iterations", "rank", "checkpoint_every"):
            require_count(name, getattr(self, name), 1)
        require_choice("preconditioner", self.preconditioner, Preconditioner)

    @property
    def largest_residual(self) -> float:
        """Up to which a solution has converged: twice the tolerance, since the recurrence's residual is rounded."""
        return 2 * self.tolerance

    def iterate(
        self,
        product: Rows,
        b: Tensor,
        *,
        start: Tensor | None = None,
        precondition: Rows | None = None,
        state: State | None = None,
        keep: Keep | None = None,
        progress: bool = False,
        description: str = "conjugate gradients",
    ) -> tuple[Tensor, int]:
        """Solve for all rows together, each with coefficients of its own; rows that have converged rest.

        Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems", 1952. The residual is that
        of the recurrence.

        Example:
            >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
            >>> CGSolver(tolerance=1e-5).iterate(lambda v: v @ A, torch.tensor([[3.0, 4.0]]))[0].round(decimals=4)
            tensor([[1., 1.]])
        """
        preconditioned: Rows = (lambda vectors: vectors) if precondition is None else precondition
        target = self.tolerance * b.norm(dim=-1)
        if state is None:
            x, residual = (torch.zeros_like(b), b.clone()) if start is None else (start, b - product(start))
            direction = preconditioned(residual).clone()
            energy, iteration = torch.einsum("kn,kn->k", residual, direction), 0
        else:
            x, residual, direction, energy = (state[n].clone() for n in ("x", "residual", "direction", "energy"))
            iteration = int(state["iteration"])
        active = residual.norm(dim=-1) > target
        for _ in progress_bar(range(iteration, self.max_iterations), enabled=progress, description=description):
            if not bool(active.any()):
                break
            direction.masked_fill_(~active[:, None], 0.0)
            image = product(direction)
            require_finite("conjugate gradients", image)
            curvature = torch.einsum("kn,kn->k", direction, image)
            moving = active & (curvature > 0) & (energy > 0)
            alpha = torch.where(moving, energy / torch.where(moving, curvature, 1.0), 0.0)
            x.addcmul_(alpha[:, None], direction)
            residual.addcmul_(-alpha[:, None], image)
            del image
            z = preconditioned(residual)
            before, energy = energy, torch.einsum("kn,kn->k", residual, z)
            beta = torch.where(moving, energy / torch.where(moving, before, 1.0), 0.0)
            direction.mul_(beta[:, None]).add_(z)
            iteration += 1
            active = residual.norm(dim=-1) > target
            if keep is not None and (iteration % self.checkpoint_every == 0 or not bool(active.any())):
                tensors = {"x": x, "residual": residual, "direction": direction, "energy": energy}
                keep({**tensors, "iteration": torch.tensor(iteration)})
        return x, iteration


@dataclass(frozen=True)
class SGDSolver:
    """Stochastic gradient descent with Nesterov's momentum, one step for each batch of the loader.

    For data of which one pass is expensive. The linear decay is that with which samples of a ResNet-18 were published;
    the loader may shuffle. It starts at the prior's draw, as steps hardly move what the data do not determine.

    Attributes:
        epochs: Number of passes over the data; None for 10, or as many as make 1000 steps. Few data then come as one
            batch, for exact gradients at a constant learning rate, until the tolerance is met.
        learning_rate: That of the first step; None to find it from the largest eigenvalue of some batches.
        momentum: Nesterov's.
        final_learning_rate: Part of the learning rate that is left at the last step.
        clip: Gradients are not longer than so many times the right-hand side, which is the gradient at zero; None for
            no limit. A small one biases the solution, as gradients of single batches are clipped at the solution, too.
        average: Part of the steps, at the end, of which the iterates are averaged; 0 for the last iterate.
        tolerance: Largest relative residual at the end that counts as converged. With 60 points, 25 weights and the
            default, the samples' mean ``zᵀHz`` was 0.2 % above that by conjugate gradients for noise 1, and 2 % for 0.1
            (442 steps); for 0.03, where 1000 steps did not meet the tolerance, which is warned of, it was 15 %.
        checkpoint_every: Epochs from one checkpoint to the next, where any are written.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.9
    final_learning_rate: float = 1 / 330
    clip: float | None = 10.0
    average: float = 0.0
    tolerance: float = 0.1
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        require_count("epochs", 1 if self.epochs is None else self.epochs, 1)
        require_count("checkpoint_every", self.checkpoint_every, 1)
        for name, low, high in (("momentum", -1e-30, 1), ("average", -1e-30, 1), ("final_learning_rate", 0, 1.0001)):
            _require_between(name, getattr(self, name), low, high)
        for name in ("learning_rate", "clip", "tolerance"):
            if getattr(self, name) is not None or name == "tolerance":
                _require_between(name, getattr(self, name), 0, float("inf"))

    @property
    def largest_residual(self) -> float:
        """Up to which a solution has converged."""
        return self.tolerance

    def iterate(
        self,
        products: Callable[[], Iterable[Rows]],
        n_batches: int,
        b: Tensor,
        *,
        rate: float,
        start: Tensor | None = None,
        state: State | None = None,
        keep: Keep | None = None,
        progress: bool = False,
        description: str = "gradient descent",
    ) -> tuple[Tensor, int]:
        """Descend for all rows together: ``v ← μ v + g``, ``x ← x − η (g + μ v)`` with gradients ``g = Â x − b``.

        Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013. Only the product
        is stochastic. The average is that of Polyak and Juditsky (1992).
        """
        last = self.epochs or max(10, -(-1000 // n_batches))
        exact, total = self.epochs is None and n_batches == 1, last * n_batches
        averaged_from = total - round(self.average * total)
        decay = 0.0 if exact else 1 - self.final_learning_rate
        if state is None:
            x, velocity, step = torch.zeros_like(b) if start is None else start, torch.zeros_like(b), 0
            mean = torch.zeros_like(b) if averaged_from < total else None
        else:
            x, velocity, step = state["x"].clone(), state["velocity"].clone(), int(state["iteration"])
            mean, rate = state["mean"].clone() if "mean" in state else None, float(state["rate"])
        longest = b.norm(dim=-1)
        epochs = range(step // n_batches + 1, last + 1)
        for epoch in progress_bar(epochs, enabled=progress, description=description):
            for product in products():
                eta = rate * (1 - min(1.0, step / max(1, total - 1)) * decay)
                gradient = product(x).sub_(b)
                norm = gradient.norm(dim=-1)
                if not bool(torch.isfinite(norm).all()):
                    what = f"Stochastic gradient descent diverged after {step} steps."
                    fix = f"Lower the learning rate, which is {eta:.3g}, or use conjugate gradients."
                    raise NonFiniteError(what, expected="finite gradients", fix=fix)
                if exact and bool((norm <= self.tolerance * longest).all()):
                    return x, epoch
                if self.clip is not None:
                    gradient.mul_((self.clip * longest / norm.clamp_min(1e-30)).clamp_max(1.0)[:, None])
                velocity.mul_(self.momentum).add_(gradient)
                x.add_(gradient, alpha=-eta).add_(velocity, alpha=-eta * self.momentum)
                step += 1
                if mean is not None and step > averaged_from:
                    mean.lerp_(x, 1 / (step - averaged_from))
            if keep is not None and (epoch % self.checkpoint_every == 0 or epoch == last):
                tensors = {"x": x, "velocity": velocity, "iteration": torch.tensor(step)}
                tensors["rate"] = torch.tensor(rate, dtype=torch.float64)
                keep(tensors if mean is None else {**tensors, "mean": mean})
        return x if mean is None else mean, last


Solver = CGSolver | SGDSolver
SOLVERS: Mapping[str, type[Solver]] = {"cg": CGSolver, "sgd": SGDSolver}


def _require_between(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
        expected = f"a number between {low:.3g} and {high:.3g}"
        raise ConfigurationError(f"{name} is out of range.", expected=expected, got=repr(value))


Inverse = Callable[[PriorUnits], Rows]
"""Gives the approximate inverse of a system."""


class TangentProblem:
    """The linear systems of some data: the curvature ``M₁``, the batches and the solver, with its preconditioner."""

    def __init__(
        self, network: Network, likelihood: Likelihood, data: Iterable[Any], solver: Solver, *, chunk_size: int
    ):
        self.curvature = TangentCurvature(network, likelihood, data, chunk_size=chunk_size)
        self.data, self.solver = data, solver
        self._made: Inverse | None = None

    def preconditioner(self, system: PriorUnits) -> Rows | None:
        """That of a system, in the prior's units; None for none."""
        solver = self.solver
        if not isinstance(solver, CGSolver) or solver.preconditioner == "none":
            return None
        if self._made is None:
            with exact_arithmetic(self.curvature.network), torch.no_grad():
                if solver.preconditioner == "kfac":
                    self._made = _kronecker_preconditioner(self.curvature, self.data)
                else:
                    self._made = _nystrom_preconditioner(self.curvature, solver.rank)
        return self._made(system)

    def solve(self, system: PriorUnits, draws: Draws, start: Tensor | None, **options: Any) -> Solved:
        """Solve for all samples together."""
        solver, curvature = self.solver, self.curvature
        with exact_arithmetic(curvature.network), torch.no_grad():
            b = system.right_hand_side(draws)
            guess = draws.prior.clone()  # exact where the data determine nothing
            if isinstance(solver, CGSolver):
                guess = guess if start is None else start * system.root
                precondition = self.preconditioner(system)
                u, n = solver.iterate(system.system, b, start=guess, precondition=precondition, **options)
            else:
                rate = solver.learning_rate or 0.0
                n_batches = 1 if solver.epochs is None and curvature.comes_together else curvature.n_batches
                if solver.learning_rate is None and options.get("state") is None:
                    rate = system.learning_rate(draws, solver.momentum, n_batches)

                def products() -> Iterator[Rows]:
                    return (partial(system.system, product=product) for product in curvature.minibatches(n_batches))

                u, n = solver.iterate(products, n_batches, b, rate=rate, start=guess, **options)
            return system.check(u, draws, solver.largest_residual, n)


def _kronecker_preconditioner(curvature: TangentCurvature, data: Iterable[Any]) -> Inverse:
    """``A^½ (K + A)⁻¹ A^½`` with Kronecker factors K of the curvature ``M₁``, from one pass over the data.

    A block whose entries have several prior precisions takes their geometric mean; a preconditioner may be inexact.
    """
    backend, network = Native(), curvature.network
    total: Curvature | None = None
    for batch in batches.iterate(data, device=network.device):
        total, _ = backend.accumulate(total, network, curvature.likelihood, batch, KroneckerStructure())
    assert total is not None
    blocks = list(total)

    def at(system: PriorUnits) -> Rows:
        weights = torch.tensor([system.weight], dtype=curvature.dtype, device=curvature.device)
        precision = system.root.square()
        means = [layout.gather(precision).log().mean().exp() for layout, _ in blocks]
        factors = [(layout, block.factor(weights, own)) for (layout, block), own in zip(blocks, means, strict=True)]

        def apply(vectors: Tensor) -> Tensor:
            scaled, result = vectors * system.root, torch.zeros_like(vectors)
            for layout, factor in factors:
                layout.scatter_(result, factor.solve(layout.gather(scaled)))
            return result.mul_(system.root)

        return apply

    return at


def _nystrom_preconditioner(curvature: TangentCurvature, rank: int) -> Inverse:
    """``(I + A^-½ Uᵀ Λ U A^-½)⁻¹`` with a randomised Nyström approximation ``Uᵀ Λ U`` of ``M₁``.

    The approximation is that of the curvature alone (Frangella, Tropp and Udell, 2023); the prior enters by Woodbury's
    identity, so that one sketch serves all priors.
    """
    own: Any = {"dtype": curvature.dtype, "device": curvature.device, "parameters": ()}
    source = torch.Generator().manual_seed(0)  # changes the number of iterations, not their result
    found = nystrom(curvature, curvature.shape[0], rank, generator=source, **own)
    positive = found.values > torch.finfo(found.values.dtype).eps * found.values.max()
    values, vectors = found.values[positive].double(), found.vectors[positive]

    def at(system: PriorUnits) -> Rows:
        rows = vectors / system.root
        core = torch.diag(1 / (system.weight * values)) + (rows @ rows.mT).double()
        inverse = torch.linalg.inv(core).to(rows.dtype)
        inverse = (inverse + inverse.mT) / 2
        return lambda u: u - u @ rows.mT @ inverse @ rows

    return at
