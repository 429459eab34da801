"""Stochastic Lanczos quadrature: traces of functions of a symmetric operator, above all its log-determinant.

``tr f(A) = E[vᵀ f(A) v]`` over random v with ``E[v vᵀ] = I``, each quadratic form by Gauss quadrature on a Krylov space
(S. Ubaru, J. Chen and Y. Saad, "Fast Estimation of tr(f(A)) via Stochastic Lanczos Quadrature", 2017). Eigenpairs that
are known are taken out exactly and the probes are projected to what remains. The gradient is ``tr(f′(A) ∂A/∂θ)``, by
the Daleckii–Krein formula on the same Krylov spaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, number_type, require_finite
from laplace_plus.linalg.matrix_functions import KrylovGradient
from laplace_plus.linalg.operators import Operator
from laplace_plus.linalg.probes import Probes, dense, draw_probes, parameter_gradients, standard_error
from laplace_plus.linalg.quadrature import BlockKrylovSpace, KrylovSpace, SpectralFunction, derivative, evaluate
from laplace_plus.linalg.results import Estimate


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

    With a shift the value is ``n log(shift) + tr log(I + A/shift)``, whose first term is exact: so the null space of A
    has no part in the error, and ``log det(I + A/shift)`` is the value less ``n log(shift)``. A shift that requires
    gradients gets one.

    All else is as in :func:`slq_trace` with ``f = log``. Without a shift the gradient G in A fulfils ``⟨G, A⟩ = n`` at
    every depth (for signs; the mean of ‖v‖² for other probes), as ``tr(A⁻¹ A) = n`` does.

    Args:
        matvec: A, symmetric, a callable on row-stacked vectors or an operator.
        n: Its size.
        probes: See :func:`slq_trace`, as for all that follows.
        depth: K.
        shift: Multiple of the identity that is added.
        tolerance: Relative tolerance for standard error and depth.
        absolute_tolerance: What is good enough in any case.
        cap: Limit on the number of probes.
        depth_cap: Limit on the depth.
        batch: Number of probes at a time.
        distribution: Of the probes.
        deflation: Eigenpairs of A (without the shift).
        deflation_depth: Lanczos steps to find eigenpairs to be taken out.
        block: Whether probes share a Krylov space.
        gradient: ``"krylov"`` or ``"adjoint"``.
        generator: Where the randomness comes from.
        dtype: Type of the vectors.
        device: Device of the vectors.
        parameters: The tensors A depends on, if they are not to be found.

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
                fix="Pass a (larger) shift= if A is only semi-definite; an indefinite operator has no log-determinant.",
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
    return Estimate(
        (estimate.value + exact).to(estimate.value.dtype),
        estimate.sem,
        estimate.matvecs,
        estimate.converged,
        estimate.probes,
        estimate.depth,
    )


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

    The value is differentiable in the tensors that A depends on, and in those that f depends on. The gradient in A's
    tensors is computed together with the value, batch by batch, where there are any and gradients are enabled:
    ``"krylov"`` costs one vector–Jacobian product of ``batch · depth`` vectors, and estimates ``tr(f′(A) ∂A/∂θ)``
    without bias but for the depth; ``"adjoint"`` costs as many products again, and is the exact gradient of the
    computed value. Both agree once the depth suffices; before, the adjoint's is the more accurate in double precision.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        f: Elementwise function of eigenvalues, made of torch operations, defined on the whole spectrum.
        n: Its size.
        probes: Number of random vectors; two at least for a standard error.
        depth: K, the number of Lanczos steps.
        tolerance: Add steps and batches of ``probes`` probes until the standard error, and the change over the last
            quarter of the steps, are below this part of the value. None uses what was given and no more.
        absolute_tolerance: With ``tolerance``, an error that is good enough in any case, for values near zero.
        cap: Limit on the number of probes with a tolerance.
        depth_cap: Limit on the depth with a tolerance.
        batch: Number of probes multiplied together; all by default.
        distribution: Of the probes; signs have no variance on the diagonal part of f(A).
        deflation: Eigenpairs ``(values [l], orthonormal vectors [l, n])`` of A, to be taken out exactly: the variance
            that remains is that of the rest of the spectrum. They are checked, with l products.
        deflation_depth: Take out the eigenpairs that converge in so many Lanczos steps from one random vector.
        block: Whether the probes of a batch share one Krylov space, by block Lanczos: the same products see more
            of the spectrum, at the price of ``batch · depth`` vectors to be orthogonalised against each other. Steps
            that a tolerance adds start over.
        gradient: ``"krylov"`` or ``"adjoint"``.
        generator: Where the randomness comes from; torch's global generator by default.
        dtype: Type of the vectors; that of the operator's tensors by default.
        device: Device of the vectors; that of the operator's tensors by default.
        parameters: The tensors A depends on, if they are not to be found from its autograd graph.

    Returns:
        ``value`` and ``sem``, 0-d of the vectors' type (float32 for half precision); ``converged`` without a tolerance
        says that the change over the last quarter of the steps is below the standard error, or is rounding.

    Raises:
        ConfigurationError: Bad arguments, an f that is not elementwise, or deflation pairs that are none of A's.
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
    if probes * depth >= n:
        return _exact(matvec, f, n, dtype, device, parameters, 0)
    run = _Quadrature(matvec, f, n, block, gradient, generator, distribution, dtype, device, parameters)
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
            return _exact(matvec, f, n, dtype, device, parameters, run.matvecs)
        run.add(count, steps, limit, depth_cap)
        if limit is not None and len(run.samples) >= min(target, wanted):
            goal = run.goal(run.mean(), limit)
            met = bool(run.error() <= goal) and bool(run.bias <= goal)
            if met:
                break
    return run.result(met if tolerance is not None else None)


def _exact(
    matvec: Matvec,
    f: SpectralFunction,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    parameters: Iterable[Tensor] | None,
    spent: int,
) -> Estimate:
    """The trace from the whole matrix."""
    operator = LinearMap(matvec, n, symmetric=True, parameters=parameters)
    identity, rows = dense(operator, dtype, device)
    require_finite("The operator", rows)
    matrix = rows.double()
    if dtype == working_type(dtype):  # half precision is too coarse to tell
        require_symmetric(matrix.to(dtype))
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    with_graph = evaluate(f, values).sum()
    total, wide = with_graph.detach(), working_type(dtype)
    weights = (vectors * derivative(f, values)) @ vectors.mT if operator.tensors else None

    def pullback(_: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        if cotangents[0] is None or weights is None:
            return [None] * len(operator.tensors)
        return parameter_gradients(operator, identity, cotangents[0] * weights, dtype)

    matvecs = operator.matvecs + spent
    (value,) = attach([total.to(wide)], operator.tensors, pullback)
    if with_graph.requires_grad:
        value = value + (with_graph - total).to(wide)
    return Estimate(value, torch.zeros_like(value.detach()), matvecs, True)


class _Quadrature:
    """A sum over probes that is added to, batch by batch, with its gradient."""

    def __init__(
        self,
        matvec: Matvec,
        f: SpectralFunction,
        n: int,
        block: bool,
        gradient: KrylovGradient,
        generator: torch.Generator | None,
        distribution: Probes,
        dtype: torch.dtype,
        device: torch.device,
        parameters: Iterable[Tensor] | None,
    ):
        self.matvec, self.f, self.n, self.block, self.gradient = matvec, f, n, block, gradient
        self.generator, self.distribution, self.dtype, self.device = generator, distribution, dtype, device
        self.parameters = None if parameters is None else tuple(parameters)
        self.map = LinearMap(matvec, n, symmetric=True, parameters=self.parameters)
        self.wide = working_type(dtype)
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
        probes = draw_probes(
            self.distribution, count, self.n, generator=self.generator, dtype=self.dtype, device=self.device
        )
        if not len(self.vectors):
            return probes
        return _outside(self.vectors, _outside(self.vectors, probes.to(self.wide))).to(self.dtype)

    def projected(self, matvec: Matvec, probes: Tensor) -> Matvec:
        """An operator that is as given on the complement of what is deflated.

        There its eigenvalue is a Rayleigh quotient of a probe: Lanczos' process amplifies what rounding leaves of the
        deflated vectors, the slower the more its eigenvalue lies within the others, and f is defined there.
        """
        vectors = self.vectors.to(self.dtype)
        if not len(vectors):
            return matvec
        if self.level is None:
            wide = probes[:1].to(self.wide)
            self.level = ((wide * self.map(probes[:1]).to(self.wide)).sum() / wide.square().sum()).to(self.dtype)
        level = self.level

        def complement(x: Tensor) -> Tensor:
            inside = inner_products(x, vectors) @ vectors
            return _outside(vectors, matvec(x - inside)) + level * inside

        return complement

    def deflate(self, values: Tensor, vectors: Tensor) -> None:
        """Take eigenpairs out: their part of the trace, and of its gradient, is exact."""
        if not len(values):
            return
        captured = evaluate(self.f, values)
        self.captured = self.captured + captured.sum()
        if self.map.tensors:  # known by now, because the pairs were found or checked by products
            weights = derivative(self.f, values).to(self.wide)[:, None]
            new = parameter_gradients(self.map, vectors, weights * vectors, self.dtype)
            self.captured_gradients = _added(self.captured_gradients, new)
            self.tensors = self.map.tensors
        self.vectors = torch.cat([self.vectors, vectors.to(self.wide)])

    def add(self, count: int, depth: int, limit: tuple[float, float] | None, depth_cap: int) -> None:
        """Add probes, and steps until the quadrature is settled where there is a tolerance."""
        parameters = self.parameters
        if parameters is None and isinstance(self.matvec, Operator):
            parameters = self.matvec.tensors()
        kind = BlockKrylovSpace if self.block else KrylovSpace
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
        new = space.quadrature_gradients(self.f, adjoint=self.gradient == "adjoint")
        self.gradients = _added(self.gradients, new)
        self.spent += space.matvecs

    @staticmethod
    def goal(value: Tensor, limit: tuple[float, float]) -> Tensor:
        return torch.clamp(limit[0] * value.abs(), min=limit[1])

    def mean(self) -> Tensor:
        if not len(self.samples):
            return self.captured.detach()
        return self.captured.detach() + self.samples.detach().mean()

    def error(self) -> Tensor:
        return standard_error(self.samples.detach()) if len(self.samples) else torch.zeros_like(self.captured)

    def result(self, met: bool | None) -> Estimate:
        """The estimate; without a tolerance, ``converged`` compares the bias of the depth with the other errors."""
        mean, sem, count = self.mean(), self.error(), len(self.samples)
        if met is None:
            rounding = torch.finfo(self.wide).eps ** 0.5 * mean.abs()
            met = bool(self.bias <= (torch.maximum(sem, rounding) if count > 1 else rounding))
        elif not count:
            met = True
        totals = [x / count for x in self.gradients]
        totals = list(_added(self.captured_gradients, tuple(totals)))

        def pullback(_: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
            (cotangent,) = cotangents
            return [None if cotangent is None else (cotangent * x).to(x.dtype) for x in totals]

        (value,) = attach([mean.to(self.wide)], self.tensors, pullback)
        if self.samples.requires_grad or self.captured.requires_grad:  # f depends on tensors of its own
            own = self.captured + self.samples.sum() / max(count, 1)
            value = value + (own - mean).to(self.wide)
        return Estimate(value, sem.to(self.wide), self.matvecs, met, count, self.depth)


def _outside(basis: Tensor, vectors: Tensor) -> Tensor:
    """The part of row-stacked vectors that is orthogonal to orthonormal rows."""
    return vectors - inner_products(vectors, basis) @ basis


def _added(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sums of gradients, none of which counts as zero."""
    if not left or not right:
        return left or right
    return tuple(x + y for x, y in zip(left, right, strict=True))


def _checked_pairs(run: _Quadrature, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenpairs that a caller says are the operator's, after one product with each."""
    values, vectors = values.detach().double(), vectors.detach().to(run.wide)
    if values.ndim != 1 or vectors.shape != (len(values), run.n) or len(values) > run.n:
        raise ConfigurationError(
            "These are no eigenpairs to deflate.",
            expected=f"values [l] and vectors [l, {run.n}] by rows",
            got=f"{tuple(values.shape)} and {tuple(vectors.shape)}",
        )
    if not len(values):
        return values, vectors
    products = run.map(vectors.to(run.dtype)).double()
    wide = vectors.double()
    skew = (wide @ wide.mT - torch.eye(len(values), dtype=torch.float64, device=run.device)).abs().max()
    residual = vector_norm(products - values[:, None] * wide).max()
    limit = torch.finfo(run.dtype).eps ** 0.5
    if not (bool(skew <= limit) and bool(residual <= limit * products.norm(dim=-1).max().clamp_min(1e-300))):
        raise ConfigurationError(
            "These are not the operator's eigenpairs.",
            expected=f"orthonormal vectors with A u = λ u to a relative {limit:.0e}",
            got=f"inner products wrong by {skew.item():.1e} and a residual of {residual.item():.1e}",
            fix="Pass only pairs that have converged, with vectors as rows.",
        )
    return values, vectors


def _converged_pairs(run: _Quadrature, depth: int) -> tuple[Tensor, Tensor]:
    """The Ritz pairs from one random vector whose residuals are rounding."""
    start = run.draw(1)
    space = KrylovSpace(run.projected(run.map, start), start, parameters=())
    space.extend(depth)
    values, vectors = space.spectrum()
    residual = space.residual_norm()[:, None] * vectors[:, -1].abs()
    limit = torch.finfo(run.dtype).eps ** 0.5 * values.abs().amax()
    found = (residual <= limit)[0]
    return values[0][found], (vectors[0].mT[found].to(run.wide) @ space.vectors[0])
