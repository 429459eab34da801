"""Stochastic estimates of the trace and of the diagonal of an operator.

* Hutchinson: the mean of ``ωᵀ A ω``, or of ``ω ∘ A ω``, over random ω with ``E[ω ωᵀ] = I`` (Bekas, Kokiopoulou and
  Saad, "An Estimator for the Diagonal of a Matrix", 2007).
* XTrace, XDiag and XNysTrace: every probe is used for the sketch and, left out of it, for the correction; the third
  replaces the projection by the Nyström approximation of a positive semi-definite matrix (Epperly, Tropp and Webber,
  "XTrace: Making the Most of Every Sample in Stochastic Trace Estimation", 2024).

All are unbiased. The derivative of each in the operator's tensors θ is the same estimate for ``∂A/∂θ`` with probes and
bases held fixed. It is unbiased as well, and takes one batched vector–Jacobian product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from laplace_plus.checks import choice, count
from laplace_plus.linalg.estimates import Estimate, Probes, draw_probes, jackknife, standard_error, working_type
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach_one, number_type, require_finite, without_autocast
from laplace_plus.linalg.nystrom import frobenius_norm, symmetric_core

TraceMethod = Literal["xtrace", "xnystrace", "hutchinson"]
"""Names of the estimators of :func:`trace`."""
DiagonalMethod = Literal["xdiag", "hutchinson"]
"""Names of the estimators of :func:`diagonal`."""


@without_autocast
def trace(
    matvec: Matvec,
    n: int,
    *,
    matvecs: int = 60,
    method: TraceMethod = "xtrace",
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Estimate:
    """Estimate ``tr A``.

    ============== ============================  =============================================
    method         right for                     error after m products
    ============== ============================  =============================================
    ``xtrace``     every square operator         that of Hutchinson on A less its m/2 largest
    ``xnystrace``  positive semi-definite ones   that of Hutchinson on A less its m largest
    ``hutchinson`` every square operator         at most √(2/m) ‖A‖_F
    ============== ============================  =============================================

    All are unbiased. Hutchinson's probes are signs, which have no variance on the diagonal part of A; those of the
    others are on the sphere, for which the length of a projected probe can be corrected. Where the budget covers the
    dimension, ``matvecs ≥ n``, the exact diagonal is computed with n products. The memory is that of ``matvecs``
    vectors (twice that for the gradient).

    The value is differentiable in the tensors that the operator depends on. Its gradient is the same estimator applied
    to ``∂A/∂θ`` with probes and bases held fixed: unbiased, and exact where the value is. With ``"hutchinson"`` it is
    also the gradient of the computed value. It costs one vector–Jacobian product, batched over ``matvecs`` vectors (2
    ``matvecs`` for XNysTrace).

    Args:
        matvec: A, a callable on row-stacked vectors or an operator; symmetric or definite only where the method
            requires it.
        n: Its size.
        matvecs: Number of products with A; at least 4 for XTrace and 2 for the others, or at least n.
        method: The estimator.
        generator: Source of the randomness.
        dtype: Type of the vectors.
        device: Device of the vectors.
        parameters: The tensors to differentiate in.

    Returns:
        ``value`` and ``sem``, 0-d of the vectors' type (float32 for half precision). For XTrace and XNysTrace ``sem``
        is the geometric mean of two estimates: the spread of the leave-one-out samples, which is too small on steep
        spectra, and the jackknife, which is too large there.

    Raises:
        ConfigurationError: An unknown method, or a budget that is too small for it.
        OperatorError: The operator is not square, or ``"xnystrace"`` found that it is not symmetric.
        NotPositiveDefiniteError: ``"xnystrace"`` found it not positive semi-definite.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(0.5 ** torch.arange(100.0))
        >>> estimate = trace(lambda v: v @ matrix, 100, generator=torch.Generator().manual_seed(0))
        >>> abs(estimate.value.item() - 2) < 1e-4
        True
    """
    choice("trace method", method, get_args(TraceMethod))
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, parameters=parameters, dtype=dtype)
    kind: Probes = "signs" if method == "hutchinson" else "sphere"
    draw = partial(draw_probes, kind, n=n, generator=generator, dtype=dtype, device=device)
    ways: dict[str, _Way] = {"xtrace": _xtrace, "xnystrace": partial(_xnystrace, dtype)}
    ways["hutchinson"] = partial(_hutchinson, _dots)
    return _estimate(method, ways[method], _dots, operator, draw, matvecs)


@without_autocast
def diagonal(
    matvec: Matvec,
    n: int,
    *,
    matvecs: int = 60,
    method: DiagonalMethod = "xdiag",
    rmatvec: Matvec | None = None,
    symmetric: bool = False,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> Estimate:
    """Estimate the diagonal of A.

    Both estimators are unbiased, entry by entry. With m products, Hutchinson's error in entry i is the norm of the
    off-diagonal entries of row i over √m. XDiag's error is about that of A less its best approximation of rank m/2.
    Where the budget covers the dimension, ``matvecs ≥ n``, the diagonal is exact, from n products. XDiag stores 2
    ``matvecs`` vectors.

    The value is differentiable in the tensors that the operator depends on. Its gradient is the same estimator applied
    to ``∂A/∂θ`` with probes and bases held fixed: unbiased, exact where the value is, and with ``"hutchinson"`` also
    the gradient of the computed value.

    The arguments are those of :func:`trace`. A need be neither symmetric nor definite. ``rmatvec`` is its transpose,
    where it is not symmetric and torch cannot differentiate through it; with ``symmetric`` XDiag need not differentiate
    at all. XDiag takes half of ``matvecs`` with A and half with its transpose, at least 4; Hutchinson at least 2.

    Returns:
        ``value [n]`` and ``sem [n]``, of the vectors' type (float32 for half precision).

    Raises:
        ConfigurationError: An unknown method, or a budget that is too small for it.
        OperatorError: The operator is not square, or has no transpose where it is needed.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(0.5 ** torch.arange(100.0))
        >>> estimate = diagonal(lambda v: v @ matrix, 100, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(estimate.value, matrix.diagonal(), atol=1e-5)
        True
    """
    choice("diagonal method", method, get_args(DiagonalMethod))
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, rmatvec=rmatvec, symmetric=symmetric, parameters=parameters, dtype=dtype)
    draw = partial(draw_probes, "signs", n=n, generator=generator, dtype=dtype, device=device)
    way = _xdiag if method == "xdiag" else partial(_hutchinson, torch.mul)
    return _estimate(method, way, torch.mul, operator, draw, matvecs)


_Frame = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Vectors v, u for which ``Σ ⟨u, A v⟩`` is the product of a cotangent and the estimate, with the bases held fixed."""

_Way = Callable[[LinearMap, Tensor, Tensor], tuple[Tensor, Tensor, _Frame]]
"""From probes and their products: the estimate, its standard error, and the frame of the derivative."""

_TWICE = ("xtrace", "xdiag")
"""Estimators that take two products for each probe; all need two probes at least."""


def _estimate(
    name: str,
    way: _Way,
    sample: Callable[[Tensor, Tensor], Tensor],
    operator: LinearMap,
    draw: Callable[[int], Tensor],
    matvecs: int,
) -> Estimate:
    """An estimate from ``matvecs`` products, or the exact result from n: the sum of samples of the unit vectors.

    ``draw(m)`` gives probes ``[m, n]`` in the operator's type; all that follows is of at least single precision.
    """
    n = count("n", operator.n)
    each = 2 if name in _TWICE else 1
    count("matvecs", matvecs, min(2 * each, n), f"{name} needs {2 * each}, or n for the exact result.")
    exact = matvecs >= n
    drawn = draw(0 if exact else matvecs // each)
    wide = working_type(drawn.dtype)
    probes = torch.eye(n, dtype=wide, device=drawn.device) if exact else drawn.to(wide)
    products = _finite(operator(probes))
    if exact:
        value = sample(probes, products).sum(0)
        sem, frame = torch.zeros_like(value), lambda x: (probes, probes * x)
    else:
        value, sem, frame = way(operator, probes, products)
    spent, value = operator.matvecs, _finite(value).to(wide)
    value = attach_one(value, operator.tensors, lambda x: operator.parameter_pullback(*frame(x)))
    return Estimate(value, sem.to(wide), spent, True, probes=len(drawn))


def _finite(values: Tensor) -> Tensor:
    """Products and estimates, checked for NaN, which later decompositions might hide."""
    require_finite("The estimator", values)
    return values


def _hutchinson(
    sample: Callable[[Tensor, Tensor], Tensor], operator: LinearMap, probes: Tensor, products: Tensor
) -> tuple[Tensor, Tensor, _Frame]:
    """The mean of samples of independent probes."""
    samples = sample(probes, products)
    return samples.mean(0), standard_error(samples), lambda x: (probes, x * probes / len(probes))


def _xtrace(operator: LinearMap, probes: Tensor, products: Tensor) -> tuple[Tensor, Tensor, _Frame]:
    """Half of the products make a sketch of the range; the others multiply its basis."""
    sketch = Sketch(products)
    products = _finite(operator(sketch.basis))
    m, n = probes.shape
    basis, columns, lost = sketch.leave_one_out()
    core = basis.mT @ (sketch.basis @ products.mT).double() @ basis  # H = Qᵀ A Q
    inside = basis.mT @ (sketch.basis @ probes.mT).double()  # W = Qᵀ Ω
    across = basis.mT @ (products @ probes.mT).double()  # T = (A Q)ᵀ Ω
    # The components of wᵢ, tᵢ and rᵢ along sᵢ and s_j; [i, j]: the sample of probe i without the probes i and j,
    # whose range lacks span(sᵢ, s_j), and without probe i alone on the diagonal.
    others = 1 - torch.eye(m, dtype=torch.float64, device=core.device)
    form, lengths = lost.mT @ core @ lost, inside.square().sum(0)
    along = inside.mT @ lost  # wᵢᵀ s_j
    pushed = across.mT @ lost - inside.mT @ (core + core.mT) @ lost  # tᵢᵀ s_j − wᵢᵀ H s_j − s_jᵀ H wᵢ
    constant = (inside * (core @ inside)).sum(0) - (across * inside).sum(0)
    diagonal, own, single = form.diagonal(), (lost * columns).sum(0), along.diagonal()[:, None]
    cosine = others * (lost.mT @ lost)
    apart = (1 - cosine.square()).clamp_min(1e-12)
    alpha, beta = (single - cosine * along) / apart, others * (along - cosine * single) / apart
    correction = constant[:, None] + alpha * pushed.diagonal()[:, None] + beta * pushed
    correction = correction + alpha.square() * diagonal[:, None] + beta.square() * diagonal
    correction = correction + alpha * beta * (form + form.mT) + alpha * own[:, None]
    gone = (diagonal[:, None] + others * diagonal - cosine * (form + form.mT)) / apart
    # Scale each projected probe to its expected length; unbiased on the sphere.
    sizes = probes.square().sum(1, dtype=torch.float64)[:, None]
    kept, removed = lengths[:, None] - alpha * single - beta * along, (lost != 0).any(0)[:, None] + others
    correction = correction * (n - len(lost) + removed) / (sizes - kept)
    samples = core.trace() - gone + correction
    own_samples = samples.diagonal()
    nearly_exact = len(lost) < m or m < 3  # noqa: PLR2004  # each sample is, where the rank is smaller
    error = standard_error(own_samples) if nearly_exact else _error(own_samples, samples)
    return own_samples.mean(), error, partial(_frame, probes, sketch)


def _xnystrace(
    dtype: torch.dtype, operator: LinearMap, probes: Tensor, sketch: Tensor
) -> tuple[Tensor, Tensor, _Frame]:
    m, n = probes.shape
    eps, norm = torch.finfo(dtype).eps, frobenius_norm(sketch)
    if norm == 0:
        zero = torch.zeros((), dtype=torch.float64, device=probes.device)
        return zero, zero, lambda x: _frame(probes, Sketch(sketch), x)
    # A shift of the size of rounding makes the core positive definite also for a singular operator.
    shift = eps * norm / n**0.5
    shifted = sketch + shift * probes
    core = (probes @ shifted.mT).double()  # Ωᵀ (A + ν) Ω
    values, vectors = symmetric_core(core, n, norm, dtype)
    values = values.clamp_min(0.1 * shift * n)
    inverse = (vectors / values) @ vectors.mT
    root = ((vectors / values.sqrt()).mT.to(probes.dtype) @ shifted).square().sum(dtype=torch.float64) - shift * n
    reduced = inverse.to(probes.dtype) @ shifted
    gram = (reduced @ reduced.mT).double()
    own = inverse.diagonal()
    # Without probe i: the last column of a Cholesky factor, and the Schur complement ωᵢᵀ (A − Âᵢ) ωᵢ =
    # 1/(core⁻¹)ᵢᵢ. A − Âᵢ annihilates the other probes, so that only the component of ωᵢ orthogonal to them counts.
    apart = torch.linalg.inv((probes @ probes.mT).double())
    length = apart.diagonal()
    samples = root + ((n - m + 1) * length - gram.diagonal()) / own
    # The same without the probes i and j.
    determinant = torch.maximum(own[:, None] * own - inverse.square(), 1e-12 * own[:, None] * own)
    gone = own * gram.diagonal()[:, None] - 2 * inverse * gram + own[:, None] * gram.diagonal()
    factors = (n - m + 2) * (length[:, None] - apart.square() / length)
    error = _error(samples, root + (factors * own - gone) / determinant)
    return samples.mean(), error, lambda x: _frame(probes, Sketch(sketch), x)


def _xdiag(operator: LinearMap, probes: Tensor, products: Tensor) -> tuple[Tensor, Tensor, _Frame]:
    """Half of the products make a sketch of the range; the others multiply its basis with the transpose."""
    sketch = Sketch(products)
    products = _finite(operator.transposed(sketch.basis))
    basis, (change, columns, lost) = sketch.basis, sketch.leave_one_out()
    to_range = change.mT.to(basis.dtype)
    captured = (to_range @ basis * (to_range @ products)).sum(0)  # diag(Q Qᵀ A)
    components = (change @ lost).mT.to(basis.dtype)
    parts, images = components @ basis, components @ products  # sᵢ and Aᵀ sᵢ as vectors of length n
    scaled = (lost * columns).sum(0)[:, None].to(basis.dtype) * probes
    # Without probe i the range lacks the direction sᵢ. Its share of the captured diagonal is subtracted, and the
    # component of the product with probe i along sᵢ is added.
    samples = parts * (scaled - images)
    spread, m = standard_error(samples), len(probes)
    if len(lost) == m > 2:  # with a smaller rank each sample is nearly exact
        spread = (spread * jackknife(_without_each(lost, parts, images, scaled, samples))).sqrt()

    def frame(cotangent: Tensor) -> tuple[Tensor, Tensor]:
        kept, weighted = to_range @ basis, cotangent * probes
        average = torch.eye(len(lost), dtype=lost.dtype, device=lost.device) - lost @ lost.mT / m
        inside = (kept @ weighted.mT).double()
        inside = (inside - lost * (lost * inside).sum(0)).mT.to(basis.dtype)
        cotangents = torch.cat([average.to(basis.dtype) @ kept, (weighted - inside @ kept) / m])
        return torch.cat([cotangent * kept, probes]), cotangents

    return captured + samples.mean(0), spread, frame


class Sketch:
    """A QR decomposition ``Y = Q R`` of columns ``[m, n]``.

    Attributes:
        basis: Q by rows, ``[m, n]``.
        triangle: R, ``[m, m]`` in float64.
    """

    def __init__(self, products: Tensor):
        basis, triangle = torch.linalg.qr(products.mT)
        self.basis, self.triangle = basis.mT.contiguous(), triangle.double()

    def leave_one_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """The direction that the range loses without each column.

        The projection onto the span of all columns but the i-th is ``Q (B Bᵀ − sᵢ sᵢᵀ) Qᵀ``, where the columns of B
        span the range of R. If yᵢ lies in the span of the others, sᵢ is zero. This holds for every i where the rank of
        the operator is smaller than the number of probes.

        Returns:
            B ``[m, r]``, ``Bᵀ R`` ``[r, m]`` and ``Bᵀ sᵢ`` as columns ``[r, m]``; r is the numerical rank.
        """
        left, values, right = torch.linalg.svd(self.triangle)  # R = left · diag(values) · right
        rank = int((values > 4 * torch.finfo(values.dtype).eps * values[:1]).sum())
        left, values, right = left[:, :rank], values[:rank], right[:rank]
        # A column is needed for the range if and only if its leverage is one.
        needed = (1 - right.square().sum(0)) <= 1e-8
        lost = right / values[:, None]
        lost = torch.where(needed, lost / torch.linalg.vector_norm(lost, dim=0).clamp_min(1e-300), 0.0)
        return left, values[:, None] * right, lost


def _dots(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1, dtype=torch.float64)


def _error(samples: Tensor, pairs: Tensor) -> Tensor:
    """The standard error of a mean of leave-one-out samples ``[m]``: the geometric mean of two estimates.

    The samples share their probes. Their spread is therefore too small, by up to three times on steep spectra. The
    jackknife, of ``pairs [m, m]`` with sample i without probe j in row i and column j, is too large, by up to six times
    on steep spectra. Measured on flat, algebraic, exponential and stepped spectra of 1000 eigenvalues, the geometric
    mean is 0.9 to 2.5 times the actual error.
    """
    m = len(pairs)
    means = pairs.masked_fill(torch.eye(m, dtype=torch.bool, device=pairs.device), 0.0).sum(0) / (m - 1)
    return (standard_error(samples) * jackknife(means)).sqrt()


def _frame(probes: Tensor, sketch: Sketch, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors and cotangents of XTrace with the bases held fixed.

    The estimate is the mean over i of ``tr(Qᵢᵀ A Qᵢ) + κᵢ μᵢᵀ A μᵢ``, where Qᵢ spans the sketch without probe i and
    ``μᵢ = (I − Qᵢ Qᵢᵀ) ωᵢ``.
    """
    m, n = probes.shape
    change, _, lost = sketch.leave_one_out()
    inside = change.mT @ (sketch.basis @ probes.mT).double()
    kept = inside - lost * (lost * inside).sum(0)
    dimensions, sizes = n - len(kept) + (lost != 0).any(0), probes.square().sum(1, dtype=torch.float64)
    scale = dimensions / (sizes - kept.square().sum(0)) / m  # as in the estimate
    basis = change.mT.to(probes.dtype) @ sketch.basis
    outside = probes - kept.mT.to(basis.dtype) @ basis
    weights = torch.eye(len(lost), dtype=lost.dtype, device=lost.device) - lost @ lost.mT / m
    weighted = torch.cat([weights.to(basis.dtype) @ basis, scale[:, None].to(basis.dtype) * outside])
    return torch.cat([basis, outside]), cotangent * weighted


def _without_each(lost: Tensor, parts: Tensor, images: Tensor, scaled: Tensor, samples: Tensor) -> Tensor:
    """XDiag's estimates without each of its probes, less the captured diagonal, ``[m, n]``.

    Without the probes i and j the range lacks span(sᵢ, s_j). The product with probe i keeps its component along the
    vector of that span that is orthogonal to s_j. Row j of each product is the sum over i.
    """
    m = len(parts)
    cosine = (lost.mT @ lost).fill_diagonal_(0.0)
    apart = (1 - cosine.square()).clamp_min(1e-12).reciprocal().fill_diagonal_(0.0)
    weights, mixed = apart.to(parts.dtype), (apart * cosine).to(parts.dtype)
    twice = (apart * cosine.square()).sum(1)[:, None].to(parts.dtype)
    sums = weights @ samples + (mixed @ parts) * images + (mixed @ (images - scaled) - twice * images) * parts
    return sums / (m - 1) - parts * images
