"""Posterior samples of the tangent model as solutions of linear systems, and the solvers of these.

With features ``Φ = J``, output curvature B and prior precision A, the tangent model's posterior has the precision
``H = Φᵀ B Φ + A``. Noise ``ε ~ N(0, B⁻¹)``, ``θ⁰ ~ N(0, A⁻¹)`` makes the minimiser of

    L(z)  = ½ Σ ‖ε_i − φ_i z‖²_{B_i} + ½ ‖z − θ⁰‖²_A

a draw from ``N(0, H⁻¹)``. So does the objective with the same minimiser and a fraction of the gradient noise,

    L′(z) = ½ Σ ‖φ_i z‖²_{B_i} + ½ ‖z − θⁿ‖²_A,    θⁿ = θ⁰ + A⁻¹ Φᵀ B^½ η,    η ~ N(0, I),

in which the noise is one fixed vector: one backward pass over the data, and no inverse of B, which is singular for
classes (Antorán et al., "Sampling-based inference for large linear models, with application to linearised Laplace",
2023). Everything here is in units of the prior's standard deviation, ``u = A^½ z``, where the system reads

    (I + W) u = ξ + A^-½ Φᵀ B^½ η,    W = A^-½ Φᵀ B Φ A^-½,    ξ = A^½ θ⁰ ~ N(0, I),

whose smallest eigenvalue is at least 1: ``(u − u★)ᵀ (I + W) (u − u★)`` is at most the squared residual. What counts is
the error beside ``uᵀ W u``, which is γ in expectation: beside P, of which the prior's draw brings most, two iterations
or none would do. The draws ξ and ``Φᵀ B^½ η`` do not depend on the prior, and serve for any other one.

The samples also give the effective dimension ``γ = tr(H⁻¹ M)``, ``M = Φᵀ B Φ``: ``E zᵀ M z`` and ``d − E zᵀ A z`` are γ
(Antorán et al., 2023), with variances ``2 Σ p_i²`` and ``2 Σ (1 − p_i)²`` for the eigenvalues p of ``H^-½ M H^-½``. The
ratio ``d · zᵀMz / (zᵀMz + zᵀAz)``, which is taken here, has about ``2 Σ (p_i − p̄)²``, the smallest of the three
wherever γ lies between 0 and d, where it always stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.curvature import Curvature, GGNOperator
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.doubts import Doubts
from laplace_plus.linalg import Estimate, Operator, cg
from laplace_plus.linalg.estimates import draw_probes, jackknife, standard_error
from laplace_plus.linalg.nystrom import nystrom
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import whole_layout
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.persistence import stored
from laplace_plus.structured.low_rank import LowRankBlock

stored(Estimate)

Rows = Callable[[Tensor], Tensor]
"""A linear function of row vectors ``[k, n]``."""


@stored
@dataclass(frozen=True)
class Draws:
    """The noise that makes a solution a sample, ``[k, P]`` each: drawn once, for any prior and any weight of the data.

    ``prior`` is ``ξ ~ N(0, I)``, ``data`` is ``Φᵀ B₁^½ η`` with the output curvature B₁ at unit noise and temperature.
    """

    prior: Tensor
    data: Tensor


class TangentCurvature(GGNOperator):
    """``M₁ = Σ_i φ_iᵀ B_i φ_i`` at unit observation noise, with the noise ``Φᵀ B₁^½ η`` and products by batches."""

    n_batches = 0
    n_classes = 0
    statistics = torch.zeros(())
    """The likelihood's additive statistics at the network's outputs."""

    def __init__(self, network: Network, likelihood: Likelihood, data: Iterable[Any], *, chunk_size: int = CHUNK_SIZE):
        noise = likelihood.noise_std
        unit = likelihood if noise is None else likelihood.with_noise(torch.ones_like(noise))
        self._doubts = Doubts(likelihood)
        super().__init__(network, unit, data, chunk_size=chunk_size)
        self._doubts.settle()

    @override
    def _look_at(self, batch: Batch, outputs: Tensor) -> None:
        super()._look_at(batch, outputs)
        self._doubts.add(outputs, batch.target)
        self.statistics = self.statistics + self.likelihood.statistics(outputs, batch.target).cpu()
        self.n_batches += 1
        self.n_classes = outputs.shape[-1]

    @property
    def data_sum(self) -> float:
        """A number by which data are recognised, whatever batches they are cut into and in whatever order."""
        return self._stream.checksum

    def evidence_curvature(self) -> Curvature:
        """All eigenpairs up to 1000 parameters; above, 50 of them, and 32 random vectors for the rest of determinants.

        These cost about 150 products and 640, and memory for 130 vectors. Each evaluation of a determinant under
        several precisions takes 640 products again.
        """
        block = LowRankBlock.of(self, None, 32, generator=torch.Generator().manual_seed(0))
        return Curvature([(whole_layout(self.network), replace(block, operator=self))])

    def pulled_noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """``Φᵀ B₁^½ η`` for fresh ``η ~ N(0, I)``, ``[count, P]``: one pass of backward passes."""
        total = torch.zeros(count, self.shape[1], dtype=self.dtype, device=self.device)
        with exact_arithmetic(self.network), torch.no_grad():
            for line, noise in self._output_noise("sampling noise", count, generator):
                line.pull.add_to(total, noise)
        return total

    def estimated_diagonal(self, count: int, generator: torch.Generator) -> Tensor:
        """``diag M₁`` as the mean of squares of every batch's own ``Φ_bᵀ B₁^½ η``, ``[P]``: one pass.

        Its relative error is ``(2 / (count · batches))^½`` at most where all batches contribute alike.
        """
        total = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
        with exact_arithmetic(self.network), torch.no_grad():
            for line, noise in self._output_noise("diagonal", count, generator):
                total += line.pull(noise).square().mean(0)
        return total

    def _output_noise(
        self, description: str, count: int, generator: torch.Generator | None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Each batch's linearisation with ``B₁^½ η``, ``[count, B, *, C]``, in one pass."""
        for batch, line in self._stream.linearizations(description, ordered=False):
            root = self.output_root(batch, line.outputs, 0)
            eta = draw_probes("gaussian", count, root.size, generator=generator, dtype=self.dtype, device=self.device)
            yield line, root.up(eta).to(self.dtype)

    def minibatches(self) -> Iterator[Rows]:
        """For each batch the product with its part of ``M₁``, times the number of batches.

        Their mean is ``M₁``; with a factor ``N / B`` a smaller last batch would count for too much.
        """
        for batch, line in self._stream.linearizations("minibatches", ordered=False):
            root = self.output_root(batch, line.outputs, 0)

            def product(vectors: Tensor, line: Any = line, root: Any = root) -> Tensor:
                result = torch.zeros_like(vectors)
                for some in self._stream.chunks(len(vectors)):
                    line.pull.add_to(result[some], root.up(root.down(line.push(vectors[some]))).to(result.dtype))
                return result.mul_(self.n_batches)

            yield product


@stored
@dataclass(frozen=True)
class SamplingReport:
    """How accurate the samples are.

    Attributes:
        residual: ``‖∇L′‖`` of each sample in units of the prior's standard deviation, over the samples' root mean
            square of ``(zᵀ M z)^½``, at least 1, [k]: a bound of the relative error of the outputs at the data.
        iterations: Passes over the data that the solve took.
        converged: Whether no residual exceeds the solver's tolerance.
        effective_dimension: γ of all parameters, with its standard error; infinite for a single sample.
        energy: ``E[zᵀ H z] / P``, which is 1 up to sampling for solved systems, and its standard error.
    """

    residual: Tensor
    iterations: int
    converged: bool
    effective_dimension: Estimate
    energy: tuple[float, float]


@dataclass(frozen=True)
class Solved:
    """Solutions ``u [k, P]`` of ``(I + W) u = b``, the samples ``z = A^-½ u`` that they are, and the image ``W u``."""

    z: Tensor
    u: Tensor
    image: Tensor
    report: SamplingReport


class PriorUnits(Operator):
    """``I + W``, of the system ``(I + W) u = b`` at a prior precision ``[P]`` and the weight ``1/(σ² T)`` of ``M₁``."""

    symmetric = True

    def __init__(self, curvature: TangentCurvature, precision: Tensor, weight: float):
        self.curvature, self.weight = curvature, weight
        self.shape, self.dtype, self.device = curvature.shape, curvature.dtype, curvature.device
        self.root = precision.to(curvature.device).sqrt().to(curvature.dtype)

    def right_hand_side(self, draws: Draws) -> Tensor:
        """``b = ξ + A^-½ Φᵀ B^½ η``, ``[k, P]``."""
        return torch.addcdiv(draws.prior, draws.data, self.root, value=self.weight**0.5)

    def image(self, u: Tensor, product: Rows | None = None) -> Tensor:
        """``W u``; with the product of a minibatch its estimate."""
        result = (self.curvature if product is None else product)(u / self.root)
        return result.mul_(self.weight).div_(self.root)

    @override
    def _apply(self, vectors: Tensor, product: Rows | None = None) -> Tensor:
        return self.image(vectors, product).add_(vectors)

    def minibatches(self) -> Iterator[Rows]:
        """Estimates of ``(I + W) u``, one from each minibatch."""
        for product in self.curvature.minibatches():
            yield partial(self._apply, product=product)

    def check(self, u: Tensor, draws: Draws, tolerance: float, iterations: int) -> Solved:
        """How near to the solution u is, from one product, and what it says."""
        with exact_arithmetic(self.curvature.network), torch.no_grad():
            b, image = self.right_hand_side(draws), self.image(u)
            residual = b.sub_(u).sub_(image).norm(dim=-1).double()
        one, (k, n) = torch.zeros(u.shape[1], dtype=torch.long), u.shape
        data, prior = group_sums(u, image, one), group_sums(u, u, one)
        residual /= data.mean().clamp_min(1.0).sqrt()  # where all eigenvalues of W are below 1, errors are less still
        gamma, sem = effective_dimension(data, prior, torch.tensor([n]))
        energy, converged = (data + prior)[:, 0] / n, bool((residual <= tolerance).all())
        estimate = Estimate(gamma[0], sem[0], iterations, converged, k)
        mean, error = float(energy.mean()), float(standard_error(energy))
        return Solved(u / self.root, u, image, SamplingReport(residual, iterations, converged, estimate, (mean, error)))


# -- the effective dimension -------------------------------------------------------------------------------------------


def group_sums(left: Tensor, right: Tensor, index: Tensor) -> Tensor:
    """``Σ_{p in g} left_p right_p`` for ``[k, P]`` and groups by ``index [P]``, as ``[k, G]`` float64."""
    totals = torch.zeros(len(left), int(index.max()) + 1, dtype=torch.float64, device=left.device)
    parts = [index.to(left.device).split(2**20), left.split(2**20, 1), right.split(2**20, 1)]  # few as float64
    for where, a, b in zip(*parts, strict=True):
        totals.index_add_(1, where, a.double() * b.double())
    return totals


def effective_dimension(function_space: Tensor, weight_space: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """γ of groups ``[G]`` and its standard error, from ``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g [k, G]`` and sizes ``[G]``.

    For a single sample ``z_gᵀ (M z)_g`` can be negative: both are averaged before one is divided by the other.
    """
    k, size = len(function_space), size.to(function_space)
    value = _ratio(function_space.mean(0), weight_space.mean(0), size)
    if k == 1:
        return value, torch.full_like(value, torch.inf)
    a, b = ((total.sum(0) - total) / (k - 1) for total in (function_space, weight_space))
    return value, jackknife(_ratio(a, b, size))


def _ratio(function_space: Tensor, weight_space: Tensor, size: Tensor) -> Tensor:
    """``d a / (a + b)`` within [0, d]; a may be negative, b is not."""
    a = function_space.clamp_min(0.0)
    total = a + weight_space
    return torch.where(total > 0, size * a / torch.where(total > 0, total, 1.0), 0.0).minimum(size)


# -- solvers -----------------------------------------------------------------------------------------------------------


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
        tolerance: Largest ``residual`` of a :class:`SamplingReport`.
        max_iterations: Where to give up.
        preconditioner: ``"none"`` (which already divides by the prior precision), or ``"nystrom"`` (a randomised
            Nyström approximation: ``rank`` products, once, and as many vectors of memory), which took a quarter of the
            iterations on a trained classifier with three layers.
        rank: Number of vectors of the Nyström approximation.
    """

    tolerance: float = 0.01
    max_iterations: int = 500
    preconditioner: Literal["none", "nystrom"] = "none"
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
        tolerance: As for :class:`CGSolver`: above it, the steps at the end count as too few.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    tolerance: float = 0.01

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
            u = draws.prior.clone() if start is None else start * system.root  # exact where the data determine nothing
            if isinstance(solver, SGDSolver):
                n = solver.epochs or max(10, -(-1000 // curvature.n_batches))
                rate = solver.learning_rate or learning_rate(system, draws)
                length: Any = {"epochs": n, "total": n * curvature.n_batches, "progress": progress}
                u = descend(system.minibatches, b, draws.prior.clone(), rate=rate, **length)
                return system.check(u, draws, self.largest_residual, n)
            n, atol, own = 0, solver.tolerance * b.shape[1] ** 0.5, self.preconditioner(system)
            for _ in range(3):  # the first takes γ for P; the next ones know it, and start without rounded residuals
                options: Any = {"preconditioner": own, "atol": atol, "max_iterations": solver.max_iterations - n}
                found = cg(system, b, x0=u, rtol=0.0, progress=progress, **options)
                u, n = found.value, n + int(found.iterations.max())
                solved = system.check(u, draws, self.largest_residual, n)
                worst = float(solved.report.residual.max())
                if not worst > self.largest_residual or n == solver.max_iterations:
                    break
                atol *= solver.tolerance / worst
            return solved

    def preconditioner(self, system: PriorUnits) -> Rows | None:
        """``(I + A^-½ Uᵀ Λ U A^-½)⁻¹`` with a randomised Nyström approximation ``Uᵀ Λ U`` of ``M₁``; None for none.

        The approximation is that of the curvature alone (Frangella, Tropp and Udell, 2023); the prior enters by
        Woodbury's identity, so that one sketch serves all priors.
        """
        if not isinstance(self.solver, CGSolver) or self.solver.preconditioner == "none":
            return None
        if self._sketch is None:
            own: Any = {"dtype": self.curvature.dtype, "device": self.curvature.device, "parameters": ()}
            own["generator"] = torch.Generator().manual_seed(0)  # changes the number of iterations, not their result
            with exact_arithmetic(self.curvature.network), torch.no_grad():
                found = nystrom(self.curvature, self.curvature.shape[0], self.solver.rank, **own)
            positive = found.values > torch.finfo(found.values.dtype).eps * found.values.max()
            self._sketch = found.values[positive].double(), found.vectors[positive]
        values, vectors = self._sketch  # Λ [r] float64 and U [r, P]
        rows = vectors / system.root
        core = torch.diag(1 / (system.weight * values)) + (rows @ rows.mT).double()
        inverse = torch.linalg.inv(core).to(rows.dtype)
        inverse = (inverse + inverse.mT) / 2
        return lambda u: u - u @ rows.mT @ inverse @ rows
