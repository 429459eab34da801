"""The variances of all outputs of a linear head, prepared so that a batch of inputs costs one matrix product.

In the notation of :mod:`laplace_plus.structured.softmax_output.precision`, with one precision δ for all weights,

    φᵀ [(H + δ)⁻¹]_cc φ = φᵀφ/δ − k_φᵀ M_c k_φ,   M_c = E_c − E_c K⁻¹ E_c,   k_φ = Φ φ / δ.

Features usually have much in common (a mean, a bias), which the data determine a thousand times as well as the prior
does. What is taken away is then nearly all there is, and the difference mostly rounding. So the leading eigenvectors U
of ``G = Φ Φᵀ/δ = U Λ Uᵀ + …`` are treated by themselves: ``φ = δ^½ V a + φ'`` with ``V = Φᵀ U (δ Λ)^-½`` and
``φ' ⟂ V``, for which ``k_φ = U Λ^½ a + k'``, and

    φᵀ [(H + δ)⁻¹]_cc φ = φ'ᵀφ'/δ + aᵀ (I − Λ^½ Uᵀ M_c U Λ^½) a − 2 (Λ^½ a)ᵀ (M_c U)ᵀ k' − k'ᵀ M_c k'.

``E_c U`` takes one step of iterative refinement (Golub and Van Loan, 2013, section 3.5.3) with residuals in float64, so
that the matrix in the middle, which is small, is computed to its own rounding. What is left of rounding comes from
``E_c``: at most about the type's ε times the condition number of ``I + P_c^½ G P_c^½``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from laplace_plus.linalg.symmetric import symmetric_eigen

STRONG = 16.0
"""Directions that the data of an output determine so many times as well as the prior are treated by themselves."""

MOST_STRONG = 8
"""But no more than so many."""

COLUMNS = 64
"""Products with a triangular matrix are taken so many columns at a time, without the zeros below; and the columns of
so many classes are multiplied at a time."""

GROUP_BYTES = 32 * 2**20
"""No more inverses than these are held for it."""


class SoftmaxOutputVariances:
    """``φᵀ [(w H + δ)⁻¹]_cc φ`` of all outputs c, after :meth:`fill`.

    Args:
        features: ``Φ [N, i]``.
        scales: ``p [N, C]``.
        weight: w, 0-d float64.
        precision: δ, 0-d float64.
        dtype: The type of what is prepared.

    Attributes:
        scales: ``w p [N, C]``, float64.
        gram: ``G [N, N]``, float64.
        values: Leading eigenvalues ``Λ [t]`` of G, ascending.
        vectors: Their eigenvectors ``U [N, t]``.
        forms: The quadratic forms.
    """

    def __init__(self, features: Tensor, scales: Tensor, weight: Tensor, precision: Tensor, dtype: torch.dtype):
        self._precision = precision
        features = features.double()
        self.scales = weight * scales.double()
        self.gram = features @ features.T / precision
        values, vectors = symmetric_eigen(self.gram)
        strong = int((values[-MOST_STRONG:] * self.scales.max() > STRONG).sum())
        rest = len(values) - strong
        self.values, self.vectors = values[rest:], vectors[:, rest:]
        self._directions = features.T @ self.vectors * (precision * self.values).rsqrt()  # V [i, t]
        self._features = self._without(features).to(dtype)
        self.forms = QuadraticForms(scales.shape[1], len(features), strong, self._features)

    def fill(self, inverses: Iterable[tuple[slice, Tensor]], white: Tensor | None) -> None:
        """Prepare the forms.

        Args:
            inverses: Slices of classes and their ``E_c [c, N, N]``.
            white: ``R [N, N]`` with ``R Rᵀ = K⁻¹``, float64; None without ``p pᵀ``.
        """
        triangular = white is not None and not bool(white.tril(-1).any())
        root = None if white is None else white.to(self._features)
        for group in grouped(inverses):
            several = slice(group[0][0].start, group[-1][0].stop)
            parts = [inverse for _, inverse in group]
            columns = refined(parts, self.gram, self.scales[:, several], self.vectors)  # E_c U, [N, c, t]
            leading, across = product(self.vectors.T, columns).transpose(0, 1), columns
            if white is not None:
                half = product(white.T, columns)
                leading = leading - torch.einsum("nct,ncs->cts", half, half)
                across = columns - self.inverse_times(parts, columns, product(white, half))  # from E_c K⁻¹ E_c U
            self.put_leading(several, leading, across)
            for classes, inverse in group:
                taken = None if root is None else _times(inverse, root, triangular=triangular)
                self.forms.put(classes, inverse, taken)

    def inverse_times(self, parts: list[Tensor], columns: Tensor, right: Tensor) -> Tensor:
        """``E_c X_c [N, c, t]`` for right sides X, where ``columns = E_c U`` are known better than E_c is."""
        known = product(self.vectors.T, right)  # [t, c, t]
        rest = right - product(self.vectors, known)
        return torch.einsum("ncs,sct->nct", columns, known) + each(parts, rest)

    def put_leading(self, which: slice, leading: Tensor, across: Tensor) -> None:
        """Set the forms' first rows from ``Uᵀ M_c U [c, t, t]`` and ``M_c U [N, c, t]``."""
        identity = torch.eye(len(self.values), dtype=self.values.dtype, device=self.values.device)
        leading = leading * self.values.sqrt() * self.values.sqrt()[:, None] - identity
        across = (across * self.values.sqrt()).transpose(0, 1)  # [c, N, t]
        self.forms.put_leading(which, leading.to(self._features), across.to(self._features))

    @staticmethod
    def n_bytes(n_outputs: int, n_rows: int, dtype: torch.dtype) -> int:
        """The most memory that is kept."""
        return n_outputs * QuadraticForms.width(n_rows, min(n_rows, MOST_STRONG)) * (torch.finfo(dtype).bits // 8)

    def _without(self, features: Tensor) -> Tensor:
        return features - (features @ self._directions) @ self._directions.T

    def __call__(self, features: Tensor) -> Tensor:
        """Variances at features ``[B, i]``, ``[B, C]``."""
        exact = features.double()
        leading = exact @ self._directions * self._precision.rsqrt()
        rest = self._without(exact)
        own = rest.square().sum(1) / self._precision
        weak = (rest / self._precision).to(self._features) @ self._features.T
        taken = self.forms(leading.to(weak), weak)
        return taken.neg_().add_(own.to(weak)[:, None]).clamp_(min=0)


def product(matrix: Tensor, columns: Tensor) -> Tensor:
    """``[m, n]`` times columns ``[n, c, t]`` of all classes in one product."""
    return (matrix @ columns.flatten(1)).unflatten(1, columns.shape[1:])


def each(parts: list[Tensor], columns: Tensor) -> Tensor:
    """Symmetric matrices ``[c, n, n]`` times columns ``[n, c, t]`` of their own, in the matrices' type; float64."""
    rows = columns.permute(1, 2, 0).to(parts[0], memory_format=torch.contiguous_format)  # from the left: twice as fast
    pieces = rows.split([len(matrices) for matrices in parts])
    products = [piece @ matrices for matrices, piece in zip(parts, pieces, strict=True)]
    return torch.cat(products).permute(2, 0, 1).double()


def grouped(inverses: Iterable[tuple[slice, Tensor]]) -> Iterator[list[tuple[slice, Tensor]]]:
    """Several slices at a time, since products with few columns are slow."""
    group: list[tuple[slice, Tensor]] = []
    for classes, matrices in inverses:
        group.append((classes, matrices))
        held = sum(part.numel() * part.element_size() for _, part in group)
        if classes.stop - group[0][0].start >= COLUMNS or held >= GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def refined(parts: list[Tensor], gram: Tensor, scales: Tensor, vectors: Tensor) -> Tensor:
    """``E_c U`` from ``E_c = (G + P_c⁻¹)⁻¹`` as computed, with one step of refinement; ``[N, c, t]``, float64.

    Of a residual ``r = P_c (U − G y) − y`` the correction is ``(G + P_c⁻¹)⁻¹ P_c⁻¹ r = (I − E_c G) r``, which needs no
    inverse of a probability that may be zero.
    """
    first = each(parts, vectors[:, None].expand(-1, scales.shape[1], -1))
    residual = scales[:, :, None] * (vectors[:, None] - product(gram, first)) - first
    return first + residual - each(parts, product(gram, residual))


def _times(matrices: Tensor, right: Tensor, *, triangular: bool) -> Tensor:
    """``[c, n, n] @ [n, n]``, where the right one may be upper triangular."""
    flat = matrices.flatten(0, 1)
    if not triangular:
        return (flat @ right).view_as(matrices)
    result = torch.empty_like(flat)
    for start in range(0, len(right), COLUMNS):
        stop = min(start + COLUMNS, len(right))
        torch.mm(flat[:, :stop], right[:stop, start:stop], out=result[:, start:stop])
    return result.view_as(matrices)


SMALLEST_SQUARE = 32
"""Squares on the diagonal are kept whole from this size on."""


def squares(n: int, start: int = 0) -> list[tuple[slice, slice]]:
    """Rows and columns of the rectangles that cover the lower triangle of an n × n matrix, by halves of halves."""
    if n <= SMALLEST_SQUARE:
        return [(slice(start, start + n), slice(start, start + n))]
    half = n // 2
    lower = (slice(start + half, start + n), slice(start, start + half))
    return [lower, *squares(half, start), *squares(n - half, start + half)]


class QuadraticForms:
    """``A_c = [[a_c, b_cᵀ], [b_c, M_c]]`` for many c: symmetric, with few rows above many.

    ``φᵀ A_c φ = ⟨A_c, φ φᵀ⟩``, so that the forms of all c in all vectors are one product of the matrices' entries and
    of the vectors' pairwise products; of the pairs (m, n) and (n, m) one is enough. It takes half the operations of
    ``A_c φ``, is one large product instead of many small ones, and keeps little more than half of the numbers.

    Args:
        n_matrices: How many.
        n: Side of ``M_c``.
        n_leading: Side t of ``a_c``.
        like: Type and device of the entries.
    """

    def __init__(self, n_matrices: int, n: int, n_leading: int, like: Tensor):
        self.squares = squares(n)
        self.leading = like.new_empty(n_matrices, n_leading * (n + n_leading))
        # One array for each square, so that the same squares of several matrices lie side by side: products are then
        # written where they are kept, by one call for all of these matrices.
        sides = [(rows.stop - rows.start, columns.stop - columns.start) for rows, columns in self.squares]
        self.blocks = [like.new_empty(n_matrices, *side) for side in sides]

    @staticmethod
    def width(n: int, n_leading: int) -> int:
        """How many entries of a matrix are kept."""
        area = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in squares(n))
        return area + n * n_leading + n_leading**2

    def put_leading(self, which: slice, leading: Tensor, across: Tensor) -> None:
        """Set ``a [c, t, t]`` and ``b [c, n, t]`` of some of the matrices."""
        self.leading[which] = torch.cat([leading, across], 1).flatten(1)

    def put(self, which: slice, matrices: Tensor, roots: Tensor | None) -> None:
        """Set M of some of the matrices.

        Args:
            which: Their places.
            matrices: ``[c, n, n]``, for M up to the roots.
            roots: ``Y [c, n, r]`` of what is taken away, ``M = matrices − Y Yᵀ``.
        """
        for (rows, columns), blocks in zip(self.squares, self.blocks, strict=True):
            if roots is None:
                blocks[which] = matrices[:, rows, columns]
            else:
                left, right, block = roots[:, rows], roots[:, columns].mT, matrices[:, rows, columns]
                torch.baddbmm(block, left, right, alpha=-1, out=blocks[which])

    def __call__(self, leading: Tensor, vectors: Tensor) -> Tensor:
        """``⟨A_c, φ φᵀ⟩`` of all matrices for ``φ = (leading [B, t], vectors [B, n])``, ``[B, c]``."""
        both = torch.cat([leading, 2 * vectors], 1)
        result = (both[:, :, None] * leading[:, None]).flatten(1) @ self.leading.T
        twice = both[:, leading.shape[1] :]
        for (rows, columns), blocks in zip(self.squares, self.blocks, strict=True):
            factors = vectors if rows == columns else twice
            products = factors[:, rows, None] * vectors[:, None, columns]
            result.addmm_(products.flatten(1), blocks.flatten(1).T)
        return result
