"""Posterior samples of the tangent model by optimisation, without any factorisation.

With features ``Φ = J``, output curvature B and prior precision A, the tangent model's posterior has the precision
``H = Φᵀ B Φ + A``. Noise ``ε ~ N(0, B⁻¹)``, ``θ⁰ ~ N(0, A⁻¹)`` makes the minimiser of

    L(z)  = ½ Σ ‖ε_i − φ_i z‖²_{B_i} + ½ ‖z − θ⁰‖²_A

a draw from ``N(0, H⁻¹)``. So does the objective with the same minimiser and a fraction of the gradient noise,

    L′(z) = ½ Σ ‖φ_i z‖²_{B_i} + ½ ‖z − θⁿ‖²_A,    θⁿ = θ⁰ + A⁻¹ Φᵀ B^½ η,    η ~ N(0, I),

in which the noise is one fixed vector: one backward pass over the data, and no inverse of B, which is singular for
classes (Antorán et al., "Sampling-based inference for large linear models, with application to linearised Laplace",
2023). Everything here is in units of the prior's standard deviation, ``u = A^½ z``, where the system reads

    (I + W) u = ξ + A^-½ Φᵀ B^½ η,    W = A^-½ Φᵀ B Φ A^-½,    ξ = A^½ θ⁰ ~ N(0, I),

whose smallest eigenvalue is at least 1: an error is never larger than its residual. The draws ξ and ``Φᵀ B^½ η`` do not
depend on the prior, and serve for any other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus._progress import progress_bar
from laplace_plus.batches import Batch
from laplace_plus.curvature import GGNOperator
from laplace_plus.curvature.operators import CHUNK_SIZE
from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.linalg.arguments import require_count
from laplace_plus.linalg.probes import draw_probes
from laplace_plus.network import Network, exact_arithmetic
from laplace_plus.posteriors.sampled.iterations import (
    ConjugateGradientIteration,
    Iteration,
    NesterovIteration,
    Rows,
    largest_eigenvalue,
)

PRECONDITIONERS = ("none", "kfac", "nystrom")

_PROBED_BATCHES = 4
"""Batches whose largest eigenvalue decides on a learning rate."""

_POWER_ITERATIONS = 8


# -- solvers ----------------------------------------------------------------------------------------------------------


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
    preconditioner: Literal["none", "kfac", "nystrom"] = "none"
    rank: int = 50
    checkpoint_every: int = 10

    def __post_init__(self) -> None:
        _require_between("tolerance", self.tolerance, 0, 1)
        for name in ("max_iterations", "rank", "checkpoint_every"):
            require_count(name, getattr(self, name), 1)
        if self.preconditioner not in PRECONDITIONERS:
            raise ConfigurationError(
                "Unknown preconditioner.", expected=", ".join(PRECONDITIONERS), got=repr(self.preconditioner)
            )


@dataclass(frozen=True)
class SGDSolver:
    """Stochastic gradient descent with Nesterov's momentum, one step for each batch of the loader.

    For data of which one pass is expensive. The linear decay is that with which samples of a ResNet-18 were published;
    the loader may shuffle.

    Attributes:
        epochs: Number of passes over the data.
        learning_rate: That of the first step; None to find it from the largest eigenvalue of some batches.
        momentum: Nesterov's.
        final_learning_rate: Part of the learning rate that is left at the last step.
        clip: Gradients are not longer than so many times the right-hand side, which is the gradient at zero; None for
            no limit. A small one biases the solution, as gradients of single batches are clipped at the solution, too.
        average: Part of the steps, at the end, of which the iterates are averaged; 0 for the last iterate.
        tolerance: Largest relative residual at the end that counts as converged.
        checkpoint_every: Epochs from one checkpoint to the next, where any are written.
    """

    epochs: int = 10
    learning_rate: float | None = None
    momentum: float = 0.9
    final_learning_rate: float = 1 / 330
    clip: float | None = 10.0
    average: float = 0.0
    tolerance: float = 0.1
    checkpoint_every: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "checkpoint_every"):
            require_count(name, getattr(self, name), 1)
        for name, low, high in (("momentum", -1e-30, 1), ("average", -1e-30, 1), ("final_learning_rate", 0, 1.0001)):
            _require_between(name, getattr(self, name), low, high)
        for name in ("learning_rate", "clip"):
            if getattr(self, name) is not None:
                _require_between(name, getattr(self, name), 0, float("inf"))
        _require_between("tolerance", self.tolerance, 0, float("inf"))


Solver = CGSolver | SGDSolver
_SOLVERS: dict[str, type[CGSolver] | type[SGDSolver]] = {"cg": CGSolver, "sgd": SGDSolver}


def resolve_solver(solver: Any) -> Solver:
    """A solver from its name, from a mapping with ``"name"`` and options, or itself.

    Raises:
        ConfigurationError: Another name, or options that it does not have.
    """
    if isinstance(solver, (CGSolver, SGDSolver)):
        return solver
    options = dict(solver) if isinstance(solver, Mapping) else {"name": solver}
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in _SOLVERS:
        raise ConfigurationError(
            "Unknown solver.", expected='"cg", "sgd", a CGSolver or an SGDSolver', got=repr(solver)
        )
    try:
        return _SOLVERS[name](**options)
    except TypeError as error:
        raise ConfigurationError("The solver has no such option.", expected=name, got=str(error)) from error


def solver_config(solver: Solver) -> dict[str, Any]:
    """What :func:`resolve_solver` makes the solver from, in JSON's terms."""
    name = next(name for name, kind in _SOLVERS.items() if isinstance(solver, kind))
    return {"name": name, **asdict(solver)}


@dataclass(frozen=True)
class Solved:
    """Solutions of ``(I + W) u = b``.

    Attributes:
        u: ``[k, P]``.
        image: ``W u``, ``[k, P]``.
        residual: ``‖b − u − W u‖ / ‖b‖``, ``[k]``: the gradient of ``L′`` in the prior's units.
        iterations: Passes over the data.
        converged: Whether no residual exceeds the tolerance.
    """

    u: Tensor
    image: Tensor
    residual: Tensor
    iterations: int
    converged: bool


# -- the system -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """What makes a solution a sample: drawn once, and right for any prior and any weight of the data.

    Attributes:
        prior: ``ξ ~ N(0, I)``, ``[k, P]``, independent for every entry of every parameter.
        data: ``Φᵀ B₁^½ η`` with the output curvature B₁ at unit noise and temperature, ``[k, P]``.
    """

    prior: Tensor
    data: Tensor


class TangentCurvature(GGNOperator):
    """``M₁ = Σ_i φ_iᵀ B_i φ_i`` at unit observation noise, with the noise ``Φᵀ B₁^½ η`` and products by batches.

    Args:
        network: The network.
        likelihood: The likelihood, of one noise level at most.
        data: An iterable of batches that can be started again.
        chunk_size: Number of vectors that are pushed through the network at a time.

    Attributes:
        n_batches: Number of batches.
        n_classes: C, the number of outputs for each example or position.
    """

    n_batches = 0
    n_classes = 0

    def __init__(self, network: Network, likelihood: Likelihood, data: Iterable[Any], *, chunk_size: int = CHUNK_SIZE):
        noise = likelihood.noise_std
        unit = likelihood if noise is None else likelihood.with_noise(torch.ones_like(noise))
        super().__init__(network, unit, data, chunk_size=chunk_size)

    @override
    def _look_at(self, batch: Batch, outputs: Tensor, n_seen: int) -> None:
        super()._look_at(batch, outputs, n_seen)
        self.n_batches += 1
        self.n_classes = outputs.shape[-1]

    @property
    def data_sum(self) -> float:
        """A number by which data are recognised, whatever batches they are cut into and in whatever order."""
        sums = self._stream._sums
        assert sums is not None
        return sums[0]

    def pulled_noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """``Φᵀ B₁^½ η`` for fresh ``η ~ N(0, I)``, ``[count, P]``: one pass of backward passes."""
        total = torch.zeros(count, self.shape[1], dtype=self.dtype, device=self.device)
        with exact_arithmetic(self.network), torch.no_grad():
            for batch, line in self._stream.linearizations("sampling noise", ordered=False):
                root = self._output_root(batch, line.outputs, 0)
                eta = draw_probes(
                    "gaussian", count, root.size, generator=generator, dtype=self.dtype, device=self.device
                )
                line.pull.add_to(total, root.up(eta).to(self.dtype))
        return total

    def estimated_diagonal(self, count: int, generator: torch.Generator) -> Tensor:
        """``diag M₁`` as the mean of squares of every batch's own ``Φ_bᵀ B₁^½ η``, ``[P]``: one pass.

        Its relative error is ``(2 / (count · batches))^½`` at most where all batches contribute alike.

        Args:
            count: Number of random vectors for each batch.
            generator: Source of randomness.
        """
        total = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
        with exact_arithmetic(self.network), torch.no_grad():
            for batch, line in self._stream.linearizations("diagonal", ordered=False):
                root = self._output_root(batch, line.outputs, 0)
                eta = draw_probes(
                    "gaussian", count, root.size, generator=generator, dtype=self.dtype, device=self.device
                )
                for cotangent in root.up(eta).to(self.dtype):
                    total.addcmul_(pulled := line.pull.one(cotangent), pulled, value=1 / count)
        return total

    def minibatches(self) -> Iterator[tuple[float, Rows]]:
        """For each batch the factor that makes the mean over batches ``M₁``, and the products with its part of ``M₁``.

        That is the number of batches, and not ``N / B``, with which a smaller last batch would count for too much.
        """
        for batch, line in self._stream.linearizations("minibatches", ordered=False):
            root = self._output_root(batch, line.outputs, 0)

            def product(vectors: Tensor, line: Any = line, root: Any = root) -> Tensor:
                result = torch.zeros_like(vectors)
                for start in range(0, len(vectors), self._stream.chunk_size):
                    some = slice(start, start + self._stream.chunk_size)
                    line.pull.add_to(result[some], root.up(root.down(line.push(vectors[some]))).to(result.dtype))
                return result

            yield float(self.n_batches), product


class PriorUnits:
    """The system ``(I + W) u = b`` at one prior precision and one weight of the data.

    Args:
        curvature: ``M₁``.
        precision: A's diagonal, ``[P]``.
        weight: The factor on ``M₁`` that noise and temperature make, ``1/(σ² T)``.
    """

    def __init__(self, curvature: TangentCurvature, precision: Tensor, weight: float):
        self.curvature, self.weight = curvature, weight
        self.root = precision.to(curvature.device).sqrt().to(curvature.dtype)

    def right_hand_side(self, draws: Draws) -> Tensor:
        """``b = ξ + A^-½ Φᵀ B^½ η``, ``[k, P]``."""
        return torch.addcdiv(draws.prior, draws.data, self.root, value=self.weight**0.5)

    def image(self, u: Tensor, product: Rows | None = None, factor: float = 1.0) -> Tensor:
        """``W u``, or what a batch's product that stands for ``factor`` times itself makes of it."""
        result = (self.curvature if product is None else product)(u / self.root)
        return result.mul_(self.weight * factor).div_(self.root)

    def system(self, u: Tensor, product: Rows | None = None, factor: float = 1.0) -> Tensor:
        """``(I + W) u``; arguments as for :meth:`image`."""
        return self.image(u, product, factor).add_(u)

    def check(self, u: Tensor, draws: Draws, solver: Solver, iterations: int) -> Solved:
        """How near to the solution u is, from one product."""
        with exact_arithmetic(self.curvature.network), torch.no_grad():
            b, image = self.right_hand_side(draws), self.image(u)
            size = b.norm(dim=-1)
            residual = b.sub_(u).sub_(image).norm(dim=-1) / size
        # The recurrence's residual and the true one differ by rounding.
        limit = 2 * solver.tolerance if isinstance(solver, CGSolver) else solver.tolerance
        return Solved(u, image, residual.double(), iterations, bool((residual <= limit).all()))

    def learning_rate(self, draws: Draws, momentum: float) -> float:
        """A stable learning rate, from the largest eigenvalue ``1 + λ`` of some batches' systems.

        A single batch is the system itself: ``1/(1 + λ)``. Of several, gradient noise in proportion to the iterate
        is amplified by the momentum μ, and ``(1 − μ)/(1 + λ)`` keeps its growth below the contraction.
        """
        largest, few = 0.0, draws.prior[:2]
        with exact_arithmetic(self.curvature.network), torch.no_grad():
            for _, (factor, product) in zip(range(_PROBED_BATCHES), self.curvature.minibatches()):  # noqa: B905
                image = partial(self.image, product=product, factor=factor)
                largest = max(largest, largest_eigenvalue(image, few, _POWER_ITERATIONS))
        # The power iteration finds most of the eigenvalue, not all of it.
        return (1 if self.curvature.n_batches == 1 else 1 - momentum) / (1 + 1.2 * largest)


# -- solving ----------------------------------------------------------------------------------------------------------


Keep = Callable[[dict[str, Tensor]], None]


def solve(
    system: PriorUnits,
    draws: Draws,
    solver: Solver,
    *,
    start: Tensor | None = None,
    precondition: Rows | None = None,
    state: Mapping[str, Tensor] | None = None,
    keep: Keep | None = None,
    progress: bool = False,
    description: str = "samples",
) -> Solved:
    """Solve for all samples together.

    Args:
        system: The system.
        draws: The noise.
        solver: How.
        start: First guess ``u [k, P]``, overwritten.
        precondition: For conjugate gradients.
        state: Where an interrupted solve stopped, instead of a first guess.
        keep: Called with the state every so many iterations.
        progress: Whether to show a progress bar.
        description: The words before it.
    """
    with exact_arithmetic(system.curvature.network), torch.no_grad():
        b = system.right_hand_side(draws)
        if isinstance(solver, CGSolver):
            u, iterations = _by_conjugate_gradients(
                system, b, solver, start, precondition, state, keep, progress, description
            )
        else:
            u, iterations = _by_descent(system, b, draws, solver, start, state, keep, progress, description)
        return system.check(u, draws, solver, iterations)


def _by_conjugate_gradients(
    system: PriorUnits,
    b: Tensor,
    solver: CGSolver,
    start: Tensor | None,
    precondition: Rows | None,
    state: Mapping[str, Tensor] | None,
    keep: Keep | None,
    progress: bool,
    description: str,
) -> tuple[Tensor, int]:
    iteration = ConjugateGradientIteration(
        system.system, b, start, precondition=precondition, tolerance=solver.tolerance, state=state
    )
    steps = range(iteration.iteration, solver.max_iterations)
    for _ in progress_bar(steps, enabled=progress, description=description):
        if iteration.done:
            break
        iteration.step()
        _keep(iteration, keep, iteration.iteration % solver.checkpoint_every == 0 or iteration.done)
    return iteration.x, iteration.iteration


def _by_descent(
    system: PriorUnits,
    b: Tensor,
    draws: Draws,
    solver: SGDSolver,
    start: Tensor | None,
    state: Mapping[str, Tensor] | None,
    keep: Keep | None,
    progress: bool,
    description: str,
) -> tuple[Tensor, int]:
    n_batches = system.curvature.n_batches
    rate = solver.learning_rate
    if rate is None and state is None:
        rate = system.learning_rate(draws, solver.momentum)
    iteration = NesterovIteration(
        b,
        start,
        learning_rate=rate or 0.0,
        total=solver.epochs * n_batches,
        final=solver.final_learning_rate,
        momentum=solver.momentum,
        clip=solver.clip,
        average=solver.average,
        state=state,
    )
    epochs = range(iteration.iteration // n_batches, solver.epochs)
    for epoch in progress_bar(epochs, enabled=progress, description=description):
        for factor, product in system.curvature.minibatches():
            iteration.step(partial(system.system, product=product, factor=factor))
        _keep(iteration, keep, (epoch + 1) % solver.checkpoint_every == 0 or epoch + 1 == solver.epochs)
    return iteration.result, solver.epochs


def _keep(iteration: Iteration, keep: Keep | None, due: bool) -> None:
    if keep is not None and due:
        keep(iteration.state())


def _require_between(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value < high:
        raise ConfigurationError(
            f"{name} is out of range.", expected=f"a number between {low:.3g} and {high:.3g}", got=repr(value)
        )
