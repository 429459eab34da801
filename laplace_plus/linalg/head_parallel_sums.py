"""The variances of a softmax head's outputs from one inverse for each class, where probabilities differ little.

In the notation of :mod:`laplace_plus.linalg.head_variances`, ``M_c = E_c − E_c K⁻¹ E_c`` is the parallel sum of ``E_c``
and ``K − E_c`` (Anderson and Duffin, 1969),

    M_c = (E_c⁻¹ + (K − E_c)⁻¹)⁻¹ = (G + (w P_c)⁻¹ + (K − E_c)⁻¹)⁻¹,

one inverse for each class in place of an inverse and two products, if K is known beforehand. It is, nearly, where a
class's probabilities differ little from row to row. With ``w P_c = α_c I + d_c``, α_c the mean, ``T = (I + α_c G)⁻¹``,

    E_c = α_c T + T d_c T − T d_c G T d_c T + O(d³),

and the sums over classes of similar α need no product for each of them: ``Σ_c d_c X d_c = (Σ_c d_c d_cᵀ) ∘ X`` for the
diagonals d_c as vectors. And E_c is small beside K, about ``θ_c K``, so that ``(K − E_c)⁻¹ ≈ (1 + θ_c) K⁻¹``.

*Error.* As ``Σ_c p_nc = 1``, ``E_c`` lies between ``min(p_c, 1/C) K`` and ``max(p_c, 1/C) K / ν``, where ``K ≥ ν C Ē``
for the Ē of equal probabilities (E is monotone and concave in P_c). Let θ_c be the middle and h_c half of that range,
and let ``K ≈ Σ_c (1 + θ_c) M_c``, known from the inverses afterwards, differ from what was taken for it by at most
``τ K``. Then ``M_c`` is wrong by at most ``(h_c + τ) θ_c M_c``, and, for features without the leading directions, of
which no output's data determine any more than χ_c times as well as the prior, a variance by a factor of at most
``1 ± (h_c + τ) θ_c χ_c``, to first order. The leading directions' columns ``M_c U`` come from ``E_c U``, which is
refined to the rounding of float64, and their own block from ``K U = Σ_c E_c U``. All of it is computed, and nothing is
used unless it is below :data:`ROUNDINGS` roundings of the type for every class; otherwise K is computed first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.kernels import symmetrize_
from laplace_plus.linalg.head_inverses import SMALLEST_BLOCK, Quarters, inverse_in_quarters, raised
from laplace_plus.linalg.head_variances import COLUMNS, HeadVariances, product

ROUNDINGS = 64
"""By so many roundings of the type a variance may change."""

BINS = 8
"""So many means of probabilities are told apart in what is small."""

SMALL = 1 / 64
"""Neither τ nor the ratios θ may be any larger."""

MARGIN = (1 + SMALL) ** 3
"""So many times as large as to first order are bounds with factors of ``1 + τ`` and ``1 + θ`` in them."""


@dataclass(frozen=True)
class _Expected:
    """What is known before any class is inverted.

    Attributes:
        total: K ``[N, N]``, about; float64.
        lower: Its Cholesky factor.
        error: By what multiple of itself it may be wrong, as a guess.
        ratios: ``θ_c [C]``: ``E_c ≈ θ_c K``.
        spread: ``h_c [C]``, by which that may be wrong.
        data: ``χ_c [C]``.
    """

    total: Tensor
    lower: Tensor
    error: float
    ratios: Tensor
    spread: Tensor
    data: Tensor

    def relative(self, difference: Tensor) -> Tensor:
        """A symmetric matrix in units of K, ``L⁻¹ X L⁻ᵀ``."""
        half = torch.linalg.solve_triangular(self.lower, difference, upper=False)
        return torch.linalg.solve_triangular(self.lower, half.mT, upper=False)

    def changes(self, error: float | Tensor) -> Tensor:
        """By what factor less one variances may be wrong, ``[C]``, if K is by ``error`` times itself."""
        largest = self.ratios + self.spread
        return MARGIN * (self.spread + error) * largest * self.data


def fill(variances: HeadVariances, slices: Iterable[slice], dtype: torch.dtype) -> bool:
    """Prepare the forms of all classes; whether they are as good as ordinary rounding allows.

    Args:
        variances: Of a head whose scales sum to one in each row.
        slices: Of classes that are worked on together.
        dtype: The type that inverses are computed in.
    """
    limit = ROUNDINGS * torch.finfo(dtype).eps
    expected = _expected(variances)
    if expected is None or bool((expected.changes(expected.error) > limit).any()):
        return False
    n, classes, strong = *variances.scales.shape, len(variances.values)
    reciprocal = torch.cholesky_inverse(expected.lower)
    addends = torch.stack([variances.gram, reciprocal]).flatten(1).to(dtype)
    ones = torch.ones_like(expected.ratios)
    weights = torch.stack([ones, 1 + expected.ratios, expected.spread]).to(dtype)
    sums = reciprocal.new_zeros(2, n, n)
    columns = reciprocal.new_empty(n, classes, strong)  # E_c U
    across = torch.empty_like(columns)  # M_c U
    memory: Tensor | None = None
    group: list[Quarters] = []
    start = 0
    for some in slices:
        # A product, which is quicker than broadcasting, into memory that is there already.
        mixture = weights[:2, some].T
        if memory is None or len(memory) != len(mixture):
            memory = addends.new_empty(len(mixture), n * n)
        matrices = torch.mm(mixture, addends, out=memory).view(-1, n, n)
        diagonal = raised(variances.scales[:, some], variances.gram[None], dtype).reciprocal_()
        matrices.diagonal(dim1=-2, dim2=-1).add_(diagonal)
        inverse = inverse_in_quarters(matrices)
        if inverse is None:
            return False
        sums.add_(inverse.weighted(weights[1:, some]))
        variances.forms.put_quarters(some, inverse)
        group.append(inverse)
        if some.stop - start < COLUMNS and some.stop < classes:
            continue
        if strong:  # products with few columns are slow
            several = slice(start, some.stop)
            products = _Products(group, 1 + expected.ratios[several])
            found = _columns(variances, products, variances.scales[:, several], reciprocal)
            columns[:, several], across[:, several] = found
        group, start = [], some.stop
    sum_found, uncertain = (symmetrize_(total) for total in sums)
    error = _norm(expected.relative(sum_found - expected.total)) + _norm(expected.relative(uncertain))
    changes = expected.changes(error)
    if strong:
        leading, more = _leading(variances, expected, sum_found, columns, error)
        changes = changes + more
        variances.put_leading(slice(0, classes), leading, across)
    return bool((error <= SMALL) & (changes <= limit).all())


def _norm(symmetric: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(symmetric).abs().amax()


def _expected(variances: HeadVariances) -> _Expected | None:
    scales, strong = variances.scales, len(variances.values)
    n, classes = scales.shape
    if n <= 2 * SMALLEST_BLOCK:  # there is nothing to save
        return None
    values = torch.cat([variances.other_values, variances.values]).clamp(min=0)
    vectors = torch.cat([variances.other_vectors, variances.vectors], 1)
    means = scales.mean(0)
    zeroth = (means / (1 + values[:, None] * means)).sum(1)
    total, last = torch.diag(zeroth), zeroth.new_zeros(n, n)
    # What is added is small; its own rounding is nothing beside the terms that are left out.
    single, of_single = vectors.float(), (scales - means).float()
    for some in means.argsort().chunk(BINS):
        turned = (1 / (1 + values * means[some].mean())).float()
        away = of_single[:, some]
        second = (away @ away.T).mul_((single * (values.float() * turned)) @ single.T)
        second, first = single.T @ second @ single, single.T @ (away.sum(1)[:, None] * single)
        total += turned[:, None] * (first - second) * turned
        last += turned[:, None] * second * turned
    whole = scales[0].sum()  # w
    equal = whole / (1 + values * whole / classes)  # C Ē
    least = torch.linalg.eigvalsh(total * (equal.rsqrt() * equal.rsqrt()[:, None]))[0]
    total = vectors @ total @ vectors.T
    lower, failed = torch.linalg.cholesky_ex(total)
    if failed or not least > 0.5:
        return None
    # The terms left out are smaller than the last one.
    error = _norm(last * (zeroth.rsqrt() * zeroth.rsqrt()[:, None])).item()
    highest = scales.amax(0) / whole
    largest = highest.clamp(min=1 / classes) / least
    smallest = (scales.amin(0) / whole).clamp(max=1 / classes)
    if error > SMALL or bool((largest > SMALL).any()):
        return None
    data = highest * whole * (values[n - strong - 1] if strong < n else 0.0)
    # E_c (K − E_c)⁻¹ is between θ / (1 − θ) of the least and of the largest ratio.
    return _Expected(total, lower, error, (largest + smallest) / 2, (largest - smallest) / 2 + largest**2, data)


@dataclass(frozen=True)
class _Products:
    """Products with ``(1 + θ_c) M_c``, about ``E_c``, of some classes."""

    parts: list[Quarters]
    factors: Tensor

    def __call__(self, columns: Tensor) -> Tensor:
        """``[N, c, t] -> [N, c, t]``, float64."""
        rows = columns.permute(1, 2, 0).to(self.parts[0].first, memory_format=torch.contiguous_format)
        pieces = rows.split([len(part.first) for part in self.parts])
        products = [part.times(piece) for part, piece in zip(self.parts, pieces, strict=True)]
        return torch.cat(products).permute(2, 0, 1).double() * self.factors[:, None]


def _columns(
    variances: HeadVariances, products: _Products, scales: Tensor, reciprocal: Tensor
) -> tuple[Tensor, Tensor]:
    """``E_c U`` and ``M_c U [N, c, t]`` of some classes, refined from ``w P_c U``.

    See :func:`~.head_variances.refined`. In the leading directions ``E_c − M_c`` is not small beside
    ``(I − E_c G) P_c``. So columns are first mixed such that residuals are orthogonal to U; then those directions play
    no part in the correction.
    """
    vectors = variances.vectors
    right = scales[:, :, None] * vectors[:, None]
    wanted = product(vectors.T, right).transpose(0, 1)  # [c, t, t]

    def mixed(columns: Tensor) -> tuple[Tensor, Tensor]:
        image = scales[:, :, None] * product(variances.gram, columns) + columns
        mix = torch.linalg.solve(product(vectors.T, image).transpose(0, 1), wanted)
        return torch.einsum("ncs,cst->nct", columns, mix), right - torch.einsum("ncs,cst->nct", image, mix)

    first, residual = mixed(right)
    first, residual = mixed(first + residual - products(product(variances.gram, residual)))
    solved = product(reciprocal, first)  # K⁻¹ E_c U
    known = product(vectors.T, solved)  # [t, c, t]
    rest = solved - product(vectors, known)
    both = torch.cat([product(variances.gram, residual), rest], -1)  # matrices are read once for two products
    correction, taken = products(both).chunk(2, -1)
    columns, _ = mixed(first + residual - correction)
    return columns, columns - torch.einsum("ncs,sct->nct", columns, known) - taken


def _leading(
    variances: HeadVariances, expected: _Expected, found: Tensor, columns: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """``Uᵀ M_c U [C, t, t]``, and by what factor less one the leading rows let variances be wrong, ``[C]``."""
    vectors, roots = variances.vectors, variances.values.sqrt()
    image = columns.sum(1)  # K U
    missing = image - found @ vectors
    total = found + missing @ vectors.T + vectors @ missing.T - vectors @ (vectors.T @ missing) @ vectors.T
    solved = torch.linalg.solve(total, columns.flatten(1)).view_as(columns)  # K⁻¹ E_c U
    leading = product(vectors.T, columns).transpose(0, 1) - torch.einsum("nct,ncs->cts", columns, solved)
    # (M_c U)ᵀ k, where K U was taken for what it is expected to be, and the rest of K⁻¹ E_c U times K as well.
    known = product(vectors.T, solved)
    off = product(torch.linalg.solve_triangular(expected.lower, image - expected.total @ vectors, upper=False), known)
    rest = product(expected.lower.T, solved - product(vectors, known))
    size = (off * roots).square().sum((0, 2)).sqrt()
    size = size + (error + expected.spread) * (rest * roots).square().sum((0, 2)).sqrt()
    pairs = vectors[:, :, None] * vectors[:, None]  # [N, t, t]
    precision = (variances.scales.T @ pairs.flatten(1)).view_as(leading) * roots * roots[:, None]
    trace = precision.diagonal(dim1=1, dim2=2).sum(1) + len(roots)
    largest = expected.ratios + expected.spread
    return leading, MARGIN * 2 * size * (trace * largest * expected.data).sqrt()
