"""The randomised Nyström approximation of a positive semi-definite matrix, and the preconditioner it gives.

Frangella, Tropp and Udell, "Randomized Nyström Preconditioning", 2023; the shift that makes it stable is that of Tropp,
Yurtsever, Udell and Cevher, "Fixed-Rank Approximation of a Positive-Semidefinite Matrix from Streaming Data", 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace_plus.errors import ConfigurationError
from laplace_plus.linalg.arguments import require_count, require_tolerance, without_autocast, working_type
from laplace_plus.linalg.linear_maps import LinearMap, Matvec, attach, number_type, require_finite
from laplace_plus.linalg.probes import draw_probes, multiply, parameter_gradients
from laplace_plus.linalg.sketches import frobenius_norm
from laplace_plus.linalg.traces import symmetric_core

Pullback = Callable[[Tensor, Tensor], Sequence[Tensor | None]]


@dataclass(frozen=True)
class NystromApproximation:
    """``A ≈ Uᵀ diag(values) U`` with orthonormal rows U; calling it on ``[..., n]`` multiplies.

    Attributes:
        values: ``[l]`` eigenvalues, not negative, in descending order; none exceeds that of A by more than rounding.
            Differentiable.
        vectors: U, ``[l, n]``; without gradients, which eigenvectors have not where values are equal.
        matvecs: Number of operator-vector products.
        converged: Whether the smallest value is below the tolerance; true if none was asked for.
    """

    values: Tensor
    vectors: Tensor
    matvecs: int
    converged: bool
    _tensors: tuple[Tensor, ...] = field(default=(), repr=False)
    _pullback: Pullback | None = field(default=None, repr=False)

    def __call__(self, vectors: Tensor) -> Tensor:
        """The approximation times row-stacked vectors ``[..., n]``, differentiable in them and in A's tensors."""
        values, basis, outer = self.values.detach(), self.vectors, self._pullback

        def product(x: Tensor) -> Tensor:
            return (x @ basis.mT * values) @ basis

        given = vectors.detach()

        def pullback(_: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
            if cotangents[0] is None or outer is None:
                return [None if cotangents[0] is None else product(cotangents[0]), *[None] * len(self._tensors)]
            n = basis.shape[-1]
            return [product(cotangents[0]), *outer(cotangents[0].reshape(-1, n), given.reshape(-1, n))]

        (result,) = attach([product(given)], [vectors, *self._tensors], pullback)
        return result

    def preconditioner(self, shift: float | Tensor) -> Callable[[Tensor], Tensor]:
        """An approximate inverse of ``A + shift``, for the solvers.

        ``P⁻¹ r = (λ_l + μ) Uᵀ (Λ + μ)⁻¹ U r + (r − Uᵀ U r)`` with the shift μ: it takes A's large eigenvalues to the
        smallest of those found, and leaves the rest as it is. It is a preconditioner only, up to a scalar factor, and
        carries no gradients.

        Args:
            shift: μ > 0, or 0 where no value is zero.

        Raises:
            ConfigurationError: A negative shift, or zero beside a value of zero.
        """
        values, basis, shift = self.values.detach(), self.vectors.detach(), float(shift)
        if not shift >= 0 or not bool(values[-1] + shift > 0):
            raise ConfigurationError(
                "This shift does not make the approximation invertible.",
                expected="a positive shift",
                got=f"{shift:.3g} beside a smallest value of {values[-1].item():.3g}",
                fix="Pass the multiple of the identity that the system to be solved has, or something small.",
            )
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
    tolerance: float | None = None,
    cap: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    parameters: Iterable[Tensor] | None = None,
) -> NystromApproximation:
    """The randomised Nyström approximation of a symmetric positive semi-definite operator.

    ``A ≈ Y (Ωᵀ Y)⁻¹ Yᵀ`` with ``Y = A Ω`` for a random orthonormal Ω ``[n, rank]``: never larger than A in the order of
    symmetric matrices, and near the best approximation of that rank where the spectrum decays. Exact where the rank
    covers that of A. A is multiplied with ``rank`` vectors in one stack; memory is that of 2–3 ``rank`` vectors.

    The values, and the products of the approximation with vectors, are differentiable in the tensors that the operator
    depends on: the gradient of what was computed, from one vector-Jacobian product batched over ``rank`` vectors.

    Args:
        matvec: A, a callable on row-stacked vectors or an operator.
        n: Its size.
        rank: Number of vectors; at most n is used.
        tolerance: Double the rank until the smallest value is below this part of the largest.
        cap: Limit on the rank with a tolerance; 8 ``rank`` by default.
        generator: Where the randomness comes from; torch's global generator by default.
        dtype: Type of the vectors; that of the operator's tensors by default.
        device: Device of the vectors; that of the operator's tensors by default.
        parameters: The tensors A depends on, if they are not to be found from its autograd graph.

    Raises:
        ConfigurationError: A rank below one.
        OperatorError: The operator is not square, or was found not to be symmetric.
        NotPositiveDefiniteError: It was found not to be positive semi-definite.
        NonFiniteError: A product is NaN or infinite.

    Example:
        >>> matrix = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0]))
        >>> nystrom(lambda v: v @ matrix, 4, 2).values.round(decimals=4)
        tensor([3., 2.])
    """
    require_count("n", n, 1)
    require_count("rank", rank, 1)
    require_tolerance(tolerance=tolerance)
    cap = 8 * rank if cap is None else cap
    require_count("cap", cap, rank)
    cap, rank = min(cap, n), min(rank, n)
    dtype, device = number_type(matvec, dtype, device)
    operator = LinearMap(matvec, n, symmetric=True, parameters=parameters)
    wide = working_type(dtype)
    probes = torch.empty(0, n, dtype=wide, device=device)
    sketch = probes
    while True:
        new = draw_probes("gaussian", rank - len(probes), n, generator=generator, dtype=wide, device=device)
        for _ in range(2):
            new = new - (new @ probes.mT) @ probes
            new = torch.linalg.qr(new.mT)[0].mT
        # Rounded to the operator's type first, so that probes and products fit together.
        probes = torch.cat([probes, new.to(dtype).to(wide)])
        products = multiply(operator, probes[len(sketch) :], dtype)
        require_finite("nystrom", products)
        sketch = torch.cat([sketch, products])
        values, vectors, coordinates = _factor(probes, sketch, torch.finfo(dtype).eps)
        met = tolerance is None or len(probes) == n or bool(values[-1] <= tolerance * values[0])
        if met or rank == cap:
            break
        rank = min(2 * rank, cap)

    def outer(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        """The derivative of ``Σ leftᵢᵀ Â rightᵢ``."""
        # For rows Y, M = Ω Yᵀ and X = M⁻¹ Y: dÂ = Xᵀ dY + dYᵀ X − Xᵀ dM X, of which the symmetric part counts.
        x_left, x_right = left @ coordinates.mT, right @ coordinates.mT
        core = x_left.mT @ x_right
        gradient = x_left.mT @ right + x_right.mT @ left - (core + core.mT) / 2 @ probes
        return parameter_gradients(operator, probes, gradient, dtype)

    def pullback(_: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
        if cotangents[0] is None:
            return [None] * len(operator.tensors)
        # Values that are zero are at their bound, where they do not move.
        return outer((cotangents[0] * positive)[:, None] * vectors, vectors)

    positive = values > 0
    matvecs = operator.matvecs
    (values,) = attach([values], operator.tensors, pullback)
    return NystromApproximation(values, vectors, matvecs, met, operator.tensors, outer)


def _factor(probes: Tensor, sketch: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Values ``[l]``, vectors ``[l, n]`` and ``X = M⁻¹ Y`` ``[l, n]`` from row-stacked Ω and ``Y = A Ω``.

    The core M = Ωᵀ Y is decomposed in float64. A shift by what rounding leaves undetermined keeps it positive definite
    where A's rank is smaller; where rounding of the products exceeds even that, its smallest eigenvalues are raised.
    """
    norm = frobenius_norm(sketch)
    if norm == 0:
        return sketch.new_zeros(len(sketch)), probes.clone(), torch.zeros_like(sketch)
    shift = eps * norm
    shifted = sketch + shift * probes
    core = (probes @ shifted.mT).double()
    eigenvalues, eigenvectors = symmetric_core(core, 1, norm, eps)
    eigenvalues = eigenvalues.clamp_min(0.1 * shift)
    root = (eigenvectors / eigenvalues.sqrt()).mT.to(sketch.dtype) @ shifted
    _, singular, right = torch.linalg.svd(root, full_matrices=False)
    # Directions that are rounding have no derivative: the rank is taken to stay what it is.
    inverse = torch.where(eigenvalues > 10 * shift, 1 / eigenvalues, 0.0)
    coordinates = ((eigenvectors * inverse) @ eigenvectors.mT).to(sketch.dtype) @ shifted
    return (singular.square() - shift).clamp_min(0), right, coordinates
