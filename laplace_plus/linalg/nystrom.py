"""The randomised Nyström approximation of a positive semi-definite operator, and its preconditioner.

Frangella, Tropp and Udell, "Randomized Nyström Preconditioning", 2023; the stabilising shift is that of Tropp,
Yurtsever, Udell and Cevher, "Fixed-Rank Approximation of a Positive-Semidefinite Matrix from Streaming Data", 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.checks import count, shape
from laplace_plus.errors import ConfigurationError, NotPositiveDefiniteError
from laplace_plus.linalg.estimates import draw_probes, working_type
from laplace_plus.linalg.krylov import product_length
from laplace_plus.linalg.linear_maps import (
    LinearMap,
    Matvec,
    agreement,
    attach_one,
    epsilon,
    number_type,
    require_adjoint,
    require_finite,
    without_autocast,
)


@dataclass(frozen=True)
class NystromApproximation:
    """``A ≈ Uᵀ diag(values) U`` with orthonormal rows U.

    Attributes:
        values: ``[l]`` eigenvalues, not negative, in descending order; each is at most that of A, up to rounding.
            Differentiable.
        vectors: U, ``[l, n]``; without gradients, which do not exist where values are equal.
        matvecs: Number of operator–vector products.
    """

    values: Tensor
    vectors: Tensor
    matvecs: int

    def preconditioner(self, shift: float | Tensor) -> Callable[[Tensor], Tensor]:
        """An approximate inverse of ``A + shift``, for the solvers.

        ``P⁻¹ r = (λ_l + μ) Uᵀ (Λ + μ)⁻¹ U r + (r − Uᵀ U r)`` with the shift μ: it maps the eigenvalues found to the
        smallest of them, and leaves the complement unchanged. It approximates the inverse only up to a scalar factor,
        and has no gradients.

        Args:
            shift: μ > 0, or 0 where no value is zero.

        Raises:
            ConfigurationError: A negative shift, or a shift of zero with a value of zero.
        """
        values, basis, shift = self.values.detach(), self.vectors.detach(), float(shift)
        if not shift >= 0 or not bool(values[-1] + shift > 0):
            what = "The shift does not make the approximation invertible."
            got = f"{shift:.3g} with a smallest value of {values[-1].item():.3g}"
            fix = "Pass the multiple of the identity in the system to be solved, or a small number."
            raise ConfigurationError(what, expected="a positive shift", got=got, fix=fix)
        gain = (values[-1] + shift) / (values + shift) - 1

        def apply(vectors: Tensor) -> Tensor:
            wide = vectors.to(basis.dtype)
            return (wide + (wide @ basis.mT * gain) @ basis).to(vectors.dtype)

        return apply


@without_autocast
def nystrom(
    matvec: Matvec,
    n: int,
    rank: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
    start: Tensor | None = None,
) -> NystromApproximation:
    """The randomised Nyström approximation of a symmetric positive semi-definite operator.

    ``A ≈ Y (Ωᵀ Y)⁻¹ Yᵀ`` with ``Y = A Ω`` for a random orthonormal Ω ``[n, rank]``. It is at most A in the order of
    symmetric matrices, and exact where the rank of A is at most ``rank``. Where the spectrum decays it is close to the
    best approximation of that rank. A is multiplied with ``rank`` vectors in one stack; memory is that of 2–3 ``rank``
    vectors.

    The values are differentiable in the tensors that the operator depends on: the gradient of the computed result, from
    one vector–Jacobian product batched over ``rank`` vectors.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        n: Its size.
        rank: Number of vectors; at most n is used.
        generator: Source of the randomness.
        dtype: Type of the vectors.
        device: Device of the vectors.
        parameters: The tensors to differentiate in.
        start: ``[rank, n]`` vectors whose span takes the place of a random one.

    Raises:
        ConfigurationError: A rank below one, or a start of another shape.
        OperatorError: The operator is not square, or not symmetric on the probes.
        NotPositiveDefiniteError: It is not positive semi-definite on the probes.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))
        >>> nystrom(lambda v: v @ matrix, 4, 2, generator=torch.Generator().manual_seed(0)).values.round(decimals=3)
        tensor([3., 2.])
    """
    count("n", n)
    count("rank", rank)
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, symmetric=True, parameters=parameters, dtype=dtype)
    wide = working_type(dtype)
    if start is None:
        drawn = draw_probes("gaussian", min(rank, n), n, generator=generator, dtype=wide, device=device)
    else:
        drawn = shape("start", start, [rank, n]).detach().to(device, wide)
    # Rounded to the operator's type, in which they are multiplied.
    probes = torch.linalg.qr(drawn.mT)[0].mT.to(dtype).to(wide)
    sketch = operator(probes)
    require_finite("nystrom", sketch)
    values, vectors, coordinates = _factor(probes, sketch, dtype)

    def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
        # For rows Y, M = Ω Yᵀ and X = M⁻¹ Y: dÂ = Xᵀ dY + dYᵀ X − Xᵀ dM X, symmetrised, between each vector and itself.
        left = (cotangent * positive)[:, None] * vectors  # values of zero are at their bound and have no derivative
        x_left, x_right = left @ coordinates.mT, vectors @ coordinates.mT
        core = x_left.mT @ x_right
        gradient = x_left.mT @ vectors + x_right.mT @ left - (core + core.mT) / 2 @ probes
        return operator.parameter_pullback(probes, gradient)

    positive, matvecs = values > 0, operator.matvecs
    return NystromApproximation(attach_one(values, operator.tensors, pullback), vectors, matvecs)


def _factor(probes: Tensor, sketch: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values ``[l]``, vectors ``[l, n]`` and ``X = M⁻¹ Y`` ``[l, n]`` from row-stacked Ω and ``Y = A Ω``.

    The core M = Ωᵀ Y is decomposed in float64. A shift of the size of rounding keeps it positive definite where the
    rank of A is smaller. Where the products have larger rounding errors, the smallest eigenvalues are raised.
    """
    norm = frobenius_norm(sketch)
    if norm == 0:
        return sketch.new_zeros(len(sketch)), probes.clone(), torch.zeros_like(sketch)
    shift = epsilon(dtype) * norm
    shifted = sketch + shift * probes
    core = (probes @ shifted.mT).double()
    eigenvalues, eigenvectors = symmetric_core(core, 1, norm, dtype)
    eigenvalues = eigenvalues.clamp_min(0.1 * shift)
    root = (eigenvectors / eigenvalues.sqrt()).mT.to(sketch.dtype) @ shifted
    _, singular, right = torch.linalg.svd(root, full_matrices=False)
    # Eigenvalues of the size of rounding get no derivative: the rank is taken as constant.
    inverse = torch.where(eigenvalues > 10 * shift, 1 / eigenvalues, 0.0)
    coordinates = ((eigenvectors * inverse) @ eigenvectors.mT).to(sketch.dtype) @ shifted
    return (singular.square() - shift).clamp_min(0), right, coordinates


def frobenius_norm(products: Tensor) -> float:
    """The Frobenius norm of row-stacked products ``[k, n]``; :class:`NonFiniteError` if squares under- or overflow."""
    lengths = product_length(products)
    require_finite("The product with random vectors", lengths)
    return float(lengths.double().norm())


def symmetric_core(core: Tensor, n: int, norm: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Eigenvalues and vectors of ``Ωᵀ A Ω [m, m]`` in float64, for a positive semi-definite A of size n.

    Columns of Ω have norm √n, ``A Ω`` has the Frobenius norm ``norm``, and A multiplies in ``dtype``.
    Raises NonFiniteError; OperatorError and NotPositiveDefiniteError beyond what rounding explains.
    """
    require_finite("The product with random vectors", core)
    largest, rounding = core.abs().max(), 10 * epsilon(dtype) * norm * n**0.5
    require_adjoint(core, core.mT, largest + rounding / agreement(dtype), dtype)
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    if values[0] < -rounding:
        what = "The operator is not positive semi-definite."
        got = f"a quadratic form of {values[0].item():.3g} beside one of {values[-1].item():.3g}"
        fix = 'Use method="xtrace", which is right for every square operator, if this is an estimate of a trace.'
        raise NotPositiveDefiniteError(what, expected="vᵀ A v ≥ 0 for all vectors", got=got, fix=fix)
    return values, vectors
