"""Stochastic Lanczos quadrature: traces of functions of a symmetric operator, above all its log-determinant.

``tr f(A) = E[vᵀ f(A) v]`` over random v with ``E[v vᵀ] = I``, each quadratic form by Gauss quadrature on a Krylov space
(S. Ubaru, J. Chen and Y. Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", 2017). Known eigenpairs
are deflated: their share is exact, and the probes are projected onto their complement. The gradient is
``tr(f′(A) ∂A/∂θ)``, by the Daleckii–Krein formula on the same Krylov spaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError, NotPositiveDefiniteError
from laplace_plus.kernels import inner_products, vector_norm
from laplace_plus.linalg.arguments import (
    require_choice,
    require_count,
    require_tolerance,
    without_autocast,
    working_type,
)
from laplace_plus.linalg.krylov import require_symmetric
from laplace_plus.linalg.linear_maps import (
    LinearMap,
    Matvec,
    add_gradients,
    attach_one,
    number_type,
    require_finite,
)
from laplace_plus.linalg.matrix_functions import KrylovGradient
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.probes import Probes, draw_probes
from laplace_plus.linalg.quadrature import BlockKrylovSpace, KrylovSpace, SpectralFunction, derivative, evaluate
from laplace_plus.linalg.results import Estimate, standard_error


@without_autocast
def slq_logdet(
    matvec: Matvec,
    n: int,
    *,
    probes: int = 10,
    depth: int = 30,
    shift: float | Tensor = 0.0,
    tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    cap: int = 100,
    depth_cap: int = 100,
    batch: int | None = None,
    distribution: Probes = "signs",
    deflation: tuple[Tensor, Tensor] | None = None,
    deflation_depth: int = 0,
    block: bool = False,
    gradient: KrylovGradient = "krylov",
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Estimate:
    """Estimate ``log det(A + shift · I)`` of a positive definite operator; negative where the determinant is below one.

    With a shift the value is ``n log(shift) + tr log(I + A/shift)``. The first term is exact, so that the null space of
    A does not contribute to the error; ``log det(I + A/shift)`` is the value less ``n log(shift)``. The value is
    differentiable in the shift.

    ``shift`` is the multiple of the identity that is added, a number or a 0-d tensor; eigenpairs in ``deflation`` are
    those of A without the shift. The other arguments are those of :func:`slq_trace`, here with ``f = log``. Without a
    shift the gradient G in A satisfies ``⟨G, A⟩ = n`` at every depth (for signs; the mean of ‖v‖² for other probes), as
    ``tr(A⁻¹ A) = n``.

    Raises:
        NotPositiveDefiniteError: A Ritz value of ``A + shift`` is zero or negative.
        ConfigurationError: Bad arguments.
        OperatorError: The operator is not square or not symmetric.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(torch.tensor([0.1, 0.2, 0.5]))
        >>> round(slq_logdet(lambda v: v @ matrix, 3).value.item(), 4)  # exact: the budget covers the dimension
        -4.6052
    """
    size = shift.detach().item() if isinstance(shift, Tensor) else float(shift)
    if not 0 <= size < math.inf:
        raise ConfigurationError("The shift is out of range.", expected="a finite number ≥ 0", got=str(size))

    def logarithm(values: Tensor) -> Tensor:
        smallest = values.detach().min().item()
        if smallest + size <= 0:
            raise NotPositiveDefiniteError(
                "The operator is not positive definite.",
                expected="vᵀ (A + shift) v > 0 for all vectors, as a real log-determinant needs",
                got=f"a Ritz value of {smallest + size:.6g}",
                fix="Pass a (larger) shift= if A is semi-definite; an indefinite operator has no log-determinant.",
            )
        if size == 0:
            return values.log()
        return torch.log1p(values / (shift.double() if isinstance(shift, Tensor) else size))

    estimate = slq_trace(
        matvec,
        logarithm,
        n,
        probes=probes,
        depth=depth,
        tolerance=tolerance,
        absolute_tolerance=absolute_tolerance,
        cap=cap,
        depth_cap=depth_cap,
        batch=batch,
        distribution=distribution,
        deflation=deflation,
        deflation_depth=deflation_depth,
        block=block,
        gradient=gradient,
        generator=generator,
        dtype=dtype,
        device=device,
        parameters=parameters,
    )
    if size == 0:
        return estimate
    exact = n * shift.log() if isinstance(shift, Tensor) else n * math.log(size)
    return replace(estimate, value=(estimate.value + exact).to(estimate.value.dtype))


@without_autocast
def slq_trace(
    matvec: Matvec,
    f: SpectralFunction,
    n: int,
    *,
    probes: int = 10,
    depth: int = 30,
    tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    cap: int = 100,
    depth_cap: int = 100,
    batch: int | None = None,
    distribution: Probes = "signs",
    deflation: tuple[Tensor, Tensor] | None = None,
    deflation_depth: int = 0,
    block: bool = False,
    gradient: KrylovGradient = "krylov",
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Estimate:
    """Estimate ``tr f(A)`` for a symmetric operator.

    Costs ``probes · depth`` products and memory for ``batch · depth`` vectors. Where that budget covers the dimension,
    ``probes · depth ≥ n``, the result is exact: n products with the unit vectors, and an eigendecomposition.

    The value is differentiable in the tensors that A depends on, and in those that f depends on. If there are any and
    gradients are enabled, the gradient in A's tensors is computed with the value, batch by batch. ``"krylov"`` costs
    one vector–Jacobian product of ``batch · depth`` vectors, and estimates ``tr(f′(A) ∂A/∂θ)`` with no bias except that
    of the depth. ``"adjoint"`` costs as many products again, and is the exact gradient of the computed value. Both
    agree once the depth is large enough; before, the adjoint is more accurate in double precision.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        f: Elementwise function of eigenvalues, made of torch operations, defined on the whole spectrum.
        n: Its size.
        probes: Number of random vectors; two at least for a standard error.
        depth: K, the number of Lanczos steps.
        tolerance: Add steps and batches of ``probes`` probes until the standard error, and the change over the last
            quarter of the steps, are below this fraction of the value. None uses the given numbers.
        absolute_tolerance: With ``tolerance``, an error that is small enough in any case, for values near zero.
        cap: Limit on the number of probes with a tolerance.
        depth_cap: Limit on the depth with a tolerance.
        batch: Number of probes multiplied together; all by default.
        distribution: Distribution of the probes; signs have no variance on the diagonal part of f(A).
        deflation: Eigenpairs ``(values [l], orthonormal vectors [l, n])`` of A, whose share is computed exactly; the
            variance is that of the rest of the spectrum. They are checked with l products.
        deflation_depth: Deflate the eigenpairs that converge in this number of Lanczos steps from one random vector.
        block: Whether the probes of a batch share one Krylov space, by block Lanczos. The same products then resolve
            more of the spectrum, but all ``batch · depth`` vectors are orthogonalised against each other. When a
            tolerance adds steps, the process starts again.
        gradient: ``"krylov"`` or ``"adjoint"``.
        generator: Source of the randomness; torch's global generator by default.
        dtype: Type of the vectors; that of the operator's tensors by default.
        device: Device of the vectors; that of the operator's tensors by default.
        parameters: The tensors A depends on, where they cannot be found from its autograd graph.

    Returns:
        ``value`` and ``sem``, 0-d of the vectors' type (float32 for half precision); ``converged`` without a tolerance
        means that the change over the last quarter of the steps is below the standard error, or is rounding.

    Raises:
        ConfigurationError: Bad arguments, an f that is not elementwise, or pairs that are not eigenpairs of A.
        OperatorError: The operator is not square or not symmetric.
        NonFiniteError: A product is NaN or infinite, or f is so on the spectrum.

    Example:
        >>> matrix = torch.diag(torch.tensor([1.0, 4.0, 9.0]))
        >>> round(slq_trace(lambda v: v @ matrix, torch.sqrt, 3).value.item(), 4)
        6.0
    """
    counts = {"n": n, "probes": probes, "depth": depth, "cap": cap, "depth_cap": depth_cap}
    for name, count in (counts if batch is None else counts | {"batch": batch}).items():
        require_count(name, count, 1)
    require_count("deflation_depth", deflation_depth, 0)
    require_tolerance(tolerance=tolerance, absolute_tolerance=absolute_tolerance)
    require_choice("gradient", gradient, KrylovGradient)
    require_choice("probes", distribution, Probes)
    dtype, device = number_type(matvec, dtype, device)
    parameters = None if parameters is None else tuple(parameters)
    options = _Options(f, block, gradient, generator, distribution, dtype, device, parameters)
    if probes * depth >= n:
        return _exact(matvec, n, options, 0)
    run = _Quadrature(matvec, n, options)
    if deflation is not None:
        run.deflate(*_checked_pairs(run, *deflation))
    if deflation_depth:
        run.deflate(*_converged_pairs(run, min(deflation_depth, n)))
    batch = probes if batch is None else min(batch, probes)
    wanted = probes if tolerance is None else max(probes, cap)
    met = False
    while len(run.samples) < wanted and len(run.vectors) < n:
        target = probes * (len(run.samples) // probes + 1)
        limit = None if tolerance is None else (tolerance, absolute_tolerance)
        steps = max(depth, run.depth)
        count = min(batch, target - len(run.samples), wanted - len(run.samples))
        if tolerance is not None and run.matvecs + count * steps >= n and n <= cap * depth_cap:
            return _exact(matvec, n, options, run.matvecs)
        run.add(count, steps, limit, depth_cap)
        if limit is not None and len(run.samples) >= min(target, wanted):
            goal = run.goal(run.mean(), limit)
            met = bool(run.error() <= goal) and bool(run.bias <= goal)
            if met:
                break
    return run.result(met if tolerance is not None else None)


@dataclass(frozen=True)
class _Options:
    """The arguments of :func:`slq_trace` that do not change during a run."""

    f: SpectralFunction
    block: bool
    gradient: KrylovGradient
    generator: torch.Generator | None
    distribution: Probes
    dtype: torch.dtype
    device: torch.device
    parameters: tuple[Tensor, ...] | None


def _exact(matvec: Matvec, n: int, options: _Options, spent: int) -> Estimate:
    """The trace from the eigendecomposition of the dense matrix."""
    f, dtype, wide = options.f, options.dtype, working_type(options.dtype)
    operator = LinearMap(matvec, n, symmetric=True, parameters=options.parameters, dtype=dtype)
    identity = torch.eye(n, dtype=dtype, device=options.device)
    rows = operator(identity)
    require_finite("The operator", rows)
    matrix = rows.double()
    if dtype == wide:  # half precision is too coarse for the check
        require_symmetric(matrix.to(dtype))
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    with_graph = evaluate(f, values).sum()
    total, matvecs = with_graph.detach(), operator.matvecs + spent
    weights = (vectors * derivative(f, values)) @ vectors.mT if operator.tensors else None

    def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
        assert weights is not None
        return operator.parameter_pullback(identity, cotangent * weights)

    value = attach_one(total.to(wide), operator.tensors, pullback)
    if with_graph.requires_grad:  # f depends on tensors of its own
        value = value + (with_graph - total).to(wide)
    return Estimate(value, torch.zeros_like(value.detach()), matvecs, True)


class _Quadrature:
    """A sum over probes, with its gradient, to which batches are added."""

    def __init__(self, matvec: Matvec, n: int, options: _Options):
        self.matvec, self.n, self.options, self.f = matvec, n, options, options.f
        self.map = LinearMap(matvec, n, symmetric=True, parameters=options.parameters, dtype=options.dtype)
        self.dtype, self.wide, device = options.dtype, working_type(options.dtype), options.device
        self.vectors = torch.empty(0, n, dtype=self.wide, device=device)
        self.captured = torch.zeros((), dtype=torch.float64, device=device)
        self.samples = torch.empty(0, dtype=torch.float64, device=device)
        self.bias = self.captured
        self.level: Tensor | None = None
        self.spent, self.depth = 0, 0
        self.tensors: tuple[Tensor, ...] = ()
        self.captured_gradients: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor, ...] = ()

    @property
    def matvecs(self) -> int:
        """Number of products."""
        return self.spent + self.map.matvecs

    def draw(self, count: int) -> Tensor:
        """Probes in the type of the operator, projected onto the complement of the deflated vectors."""
        o = self.options
        probes = draw_probes(o.distribution, count, self.n, generator=o.generator, dtype=o.dtype, device=o.device)
        if not len(self.vectors):
            return probes
        return _outside(self.vectors, _outside(self.vectors, probes.to(self.wide))).to(self.dtype)

    def projected(self, matvec: Matvec, probes: Tensor) -> Matvec:
        """The operator on the complement of the deflated vectors, and a multiple of the identity on their span.

        The multiple is a Rayleigh quotient of a probe. It lies within the spectrum, where f is defined, and where
        Lanczos' process amplifies the rounding errors along the deflated vectors least.
        """
        vectors = self.vectors.to(self.dtype)
        if not len(vectors):
            return matvec
        if self.level is None:
            wide = probes[:1].to(self.wide)
            self.level = ((wide * self.map(wide)).sum() / wide.square().sum()).to(self.dtype)
        level = self.level

        def complement(x: Tensor) -> Tensor:
            inside = inner_products(x, vectors) @ vectors
            return _outside(vectors, matvec(x - inside)) + level * inside

        return complement

    def deflate(self, values: Tensor, vectors: Tensor) -> None:
        """Add eigenpairs to the deflated ones, with their exact share of the trace and its gradient."""
        if not len(values):
            return
        captured = evaluate(self.f, values)
        self.captured = self.captured + captured.sum()
        if self.map.tensors:  # known, because the pairs were found or checked by products
            weights = derivative(self.f, values).to(self.wide)[:, None]
            new = self.map.parameter_pullback(vectors, weights * vectors)
            self.captured_gradients = add_gradients(self.captured_gradients, new)
            self.tensors = self.map.tensors
        self.vectors = torch.cat([self.vectors, vectors.to(self.wide)])

    def add(self, count: int, depth: int, limit: tuple[float, float] | None, depth_cap: int) -> None:
        """Add probes; with a tolerance, add steps until the quadrature meets it."""
        parameters = self.options.parameters
        if parameters is None and isinstance(self.matvec, Operator):
            parameters = self.matvec.tensors()
        kind = BlockKrylovSpace if self.options.block else KrylovSpace
        probes = self.draw(count)
        space = kind(self.projected(self.matvec, probes), probes, parameters=parameters)
        while True:
            space.extend(depth)
            samples = space.quadrature(self.f)
            now = samples.detach()
            change = torch.zeros_like(now)
            if not space.complete:
                earlier = space.earlier()
                before = torch.inf if earlier is None else space.quadrature(self.f, earlier).detach()
                change = (now - before).abs()
            if limit is None or space.complete or depth >= depth_cap:
                break
            if bool(change.mean() <= self.goal(self.captured.detach() + now.mean(), limit)):
                break
            depth = min(depth_cap, depth + max(4, depth // 4))
        done = len(self.samples)
        self.samples = torch.cat([self.samples, samples])
        self.bias = (done * self.bias + change.sum()) / (done + count)
        self.depth = max(self.depth, space.depth)
        self.tensors = space.tensors
        new = space.quadrature_gradients(self.f, adjoint=self.options.gradient == "adjoint")
        self.gradients = add_gradients(self.gradients, new)
        self.spent += space.matvecs

    @staticmethod
    def goal(value: Tensor, limit: tuple[float, float]) -> Tensor:
        """The error that a relative and an absolute tolerance allow."""
        return torch.clamp(limit[0] * value.abs(), min=limit[1])

    def mean(self) -> Tensor:
        """The estimate, without a graph."""
        if not len(self.samples):
            return self.captured.detach()
        return self.captured.detach() + self.samples.detach().mean()

    def error(self) -> Tensor:
        """Its standard error."""
        return standard_error(self.samples.detach()) if len(self.samples) else torch.zeros_like(self.captured)

    def result(self, met: bool | None) -> Estimate:
        """The estimate; without a tolerance, ``converged`` compares the bias of the depth with the other errors.

        The bias is taken as the change over the last quarter of the steps.
        """
        mean, sem, count = self.mean(), self.error(), len(self.samples)
        if met is None:
            rounding = torch.finfo(self.wide).eps ** 0.5 * mean.abs()
            met = bool(self.bias <= (torch.maximum(sem, rounding) if count > 1 else rounding))
        elif not count:
            met = True
        totals = add_gradients(self.captured_gradients, tuple(x / count for x in self.gradients))

        def pullback(cotangent: Tensor) -> list[Tensor]:
            return [(cotangent * x).to(x.dtype) for x in totals]

        value = attach_one(mean.to(self.wide), self.tensors, pullback)
        if self.samples.requires_grad or self.captured.requires_grad:  # f depends on tensors of its own
            own = self.captured + self.samples.sum() / max(count, 1)
            value = value + (own - mean).to(self.wide)
        return Estimate(value, sem.to(self.wide), self.matvecs, met, count, self.depth)


def _outside(basis: Tensor, vectors: Tensor) -> Tensor:
    """The component of row-stacked vectors orthogonal to orthonormal rows."""
    return vectors - inner_products(vectors, basis) @ basis


def _checked_pairs(run: _Quadrature, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The caller's eigenpairs, checked by one product with each."""
    values, vectors = values.detach().double(), vectors.detach().to(run.wide)
    if values.ndim != 1 or vectors.shape != (len(values), run.n) or len(values) > run.n:
        raise ConfigurationError(
            "deflation must hold eigenpairs.",
            expected=f"values [l] and vectors [l, {run.n}] by rows",
            got=f"{tuple(values.shape)} and {tuple(vectors.shape)}",
        )
    if not len(values):
        return values, vectors
    products = run.map(vectors).double()
    wide = vectors.double()
    skew = (wide @ wide.mT - torch.eye(len(values), dtype=torch.float64, device=wide.device)).abs().max()
    residual = vector_norm(products - values[:, None] * wide).max()
    limit = torch.finfo(run.dtype).eps ** 0.5
    if not (bool(skew <= limit) and bool(residual <= limit * products.norm(dim=-1).max().clamp_min(1e-300))):
        raise ConfigurationError(
            "deflation holds pairs that are not eigenpairs of the operator.",
            expected=f"orthonormal vectors with A u = λ u to a relative {limit:.0e}",
            got=f"inner products wrong by {skew.item():.1e} and a residual of {residual.item():.1e}",
            fix="Pass only pairs that have converged, with vectors as rows.",
        )
    return values, vectors


def _converged_pairs(run: _Quadrature, depth: int) -> tuple[Tensor, Tensor]:
    """The Ritz pairs from one random vector whose residuals are of the size of rounding."""
    start = run.draw(1)
    space = KrylovSpace(run.projected(run.map, start), start, parameters=())
    space.extend(depth)
    values, vectors = space.spectrum()
    residual = space.residual_norm[:, None] * vectors[:, -1].abs()
    limit = torch.finfo(run.dtype).eps ** 0.5 * values.abs().amax()
    found = (residual <= limit)[0]
    return values[0][found], (vectors[0].mT[found].to(run.wide) @ space.vectors[0])
