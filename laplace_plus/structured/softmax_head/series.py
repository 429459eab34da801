r"""The variances of a softmax head's outputs by a series, where probabilities differ little from row to row.

In the notation of ``precision``, with one precision δ for all weights and ``G = Φ Φᵀ/δ = V Λ Vᵀ``,

    v_c = φᵀφ/δ − kᵀ M_c k,   M_c = E_c − E_c K⁻¹ E_c = (G + P_c⁻¹ + (K − E_c)⁻¹)⁻¹,   k = Φ φ / δ,

where the latter is a parallel sum (Anderson and Duffin, 1969). Let U be the leading eigenvectors, of directions that
the data of all outputs have in common, and R the others. ``N = (K − E_c)⁻¹`` is nearly diagonal in V, and nearly
``n I`` on R; so ``p̄ = p / (1 + n p)`` takes that part of it in, and ``L_R = Λ_R + N_R − n`` is what remains. With

    Z_c = (V_R L_R V_Rᵀ + P̄_c⁻¹)⁻¹,   z = Uᵀ Z_c U,   L = Λ_U + N_U − n,
    k' = V_R V_Rᵀ k,   y = Uᵀ Z_c k',   a = Λ_U^-½ Uᵀ k,

elimination of U gives, with ``φ'`` the part of φ without the leading directions,

    v_c = φ'ᵀφ'/δ − k'ᵀ Z_c k' + aᵀ (I + Λ_U^½ (N_U − n + z⁻¹)⁻¹ Λ_U^½)⁻¹ a
          − 2 aᵀ Λ_U^½ (I + z L)⁻¹ y + yᵀ L (I + z L)⁻¹ y.

``Z_c U`` takes a few iterations. Where ``P̄_c = α_c I + d_c`` with a small d, and ``T = (1 + α_c L_R)⁻¹``,

    k'ᵀ Z_c k' = α_c bᵀ T b + uᵀ d_c u − (d_c u)ᵀ H (d_c u) + …,   b = V_Rᵀ k,   u = V_R T b,   H = V_R L_R T V_Rᵀ,

and no class needs a matrix of its own: the first two terms are products with all classes at once (T is interpolated in
α), and the third one, for which few eigenvectors matter and a few digits do, takes ``r N`` operations for a class and
an input.

*Error.* What is left out of the series is at most ``ρ_c / (1 − ρ_c)`` times its third term, ``ρ_c ≥ ‖H^½ d_c H^½‖``.
Of the eigenvectors from r on, the third term has between none and ``H_r Σ_n (d_n u_n)²``, of which half is taken; and
it takes u at a similar α, which changes it about twice as much, relative to itself, as u. That K is not quite what it
is taken for changes ``I + Λ^½ Vᵀ (P_c⁻¹ + N)⁻¹ V Λ^½``, and so a variance, by at most a factor that :func:`_coupling`
bounds to first order. All of it is computed for each input and output, and nothing is used unless it is below
:data:`ROUNDINGS` roundings of the type.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_plus.linalg.symmetric import symmetric_eigen
from laplace_plus.structured.softmax_head.variances import product

ROUNDINGS = 64
"""By so many roundings of the type a variance may change."""

LEADING = 0.5
"""Directions that some output's data determine so many times as well as the prior are eliminated."""

MOST_LEADING = 8
"""There may be no more of them."""

WORST_RATIO = 0.25
"""The largest ρ."""

NODES = 8
"""Chebyshev nodes in α; with ``α L_R`` below :data:`LEADING`, T is then known to 1e-7."""

WIDTH = 0.1
"""The third term takes the same u for values of α that differ by no more than this, relative to them."""

ITERATIONS = 16
"""There may be no more of them."""

ROWS = 8
"""r is a multiple of this."""

GROUP_BYTES = 4 * 2**20
"""The third term is computed for so many classes at a time that their part of it takes no more."""


@dataclass(frozen=True)
class _Nodes:
    """Interpolation in α.

    Attributes:
        points: ``α_j [J]``.
        weights: Of the nodes for each class, ``[J, C]``.
    """

    points: Tensor
    weights: Tensor

    @classmethod
    def of(cls, values: Tensor) -> _Nodes:
        """For functions between the least and the largest of ``values [C]``."""
        low, high = values.min(), values.max()
        steps = torch.arange(NODES, dtype=values.dtype, device=values.device)
        angles = (2 * steps + 1) * (torch.pi / (2 * NODES))
        unit = angles.cos()
        place = (2 * values - low - high) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)
        orders = torch.arange(NODES, dtype=values.dtype, device=values.device)[:, None]
        basis = torch.cos(orders * place.clamp(-1, 1).arccos())  # [J, C]
        transform = torch.cos(orders * angles) * (2 / NODES)
        transform[0] /= 2
        return cls((low + high) / 2 + (high - low) / 2 * unit, transform.T @ basis)


class HeadSeries:
    """``φᵀ [(w H + δ)⁻¹]_cc φ`` of all outputs c of a softmax head; :meth:`create` makes one.

    Args:
        back: The places ``[C]`` of the classes among those in order of α.
    """

    def __init__(self, back: Tensor):
        self._back = back

    @classmethod
    def create(
        cls, features: Tensor, scales: Tensor, weight: Tensor, precision: Tensor, dtype: torch.dtype
    ) -> HeadSeries | None:
        """The series, or None where it would not be as good as ordinary rounding.

        Args:
            features: ``Φ [N, i]``.
            scales: Probabilities ``p [N, C]``, whose rows sum to one.
            weight: w, 0-d float64.
            precision: δ, 0-d float64.
            dtype: The type that decides what is good enough, and in which the third term is computed.
        """
        scales = weight * scales.double()
        order = scales.mean(0).argsort()  # of p̄ it is nearly the same, so that similar α are side by side
        result = cls(order.argsort())
        return result if result._prepare(features.double(), scales[:, order], precision, dtype) else None

    @staticmethod
    def n_bytes(n_outputs: int, n_rows: int) -> int:
        """The most memory that preparations take."""
        return 8 * n_outputs * n_rows * (6 + 3 * MOST_LEADING)

    def _prepare(self, features: Tensor, scales: Tensor, precision: Tensor, dtype: torch.dtype) -> bool:
        self._limit, tolerance = ROUNDINGS * torch.finfo(dtype).eps, max(torch.finfo(dtype).eps, 1e-12)
        values, vectors = symmetric_eigen(features @ features.T / precision)
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        means = scales.mean(0)
        count = int((values * means.max() > LEADING).sum())
        if count > min(MOST_LEADING, len(values) - 1) or not bool((means > 0).all()):
            return False
        self._strong, self._vectors = count, vectors
        self._precision, self._features = precision, features
        leading = vectors[:, :count]
        self._directions = features.T @ leading * (precision * values[:count]).rsqrt()  # [i, t]

        # Without the coupling of outputs: E_c U, so that K U is known.
        others = values.clone()
        others[:count] = 0
        away = scales - means
        ratios = _ratios(others, vectors, means, away, leading)
        if bool((ratios > WORST_RATIO).any()):
            return False
        solved = _solved(others, vectors, means, scales, leading, tolerance)
        if solved is None:
            return False
        z = product(leading.T, solved).transpose(0, 1)  # [C, t, t]
        identity = torch.eye(count, dtype=z.dtype, device=z.device)
        mix = torch.linalg.inv(identity + values[:count, None] * z)
        columns = product(vectors.T, torch.einsum("nct,cts->ncs", solved, mix))  # Vᵀ E_c U, [N, C, t]
        coupling = _coupling(values, vectors, count, means, away, columns, ratios)
        if coupling is None or bool((coupling.changes > self._limit).any()):
            return False
        self._changes = coupling.changes

        # With it.
        scales = scales / (1 + coupling.level * scales)
        self._means = scales.mean(0)
        self._away = scales - self._means
        self._remaining = others + coupling.others  # L_R, and zeros
        self._ratios = _ratios(self._remaining, vectors, self._means, self._away, leading[:, :0])
        if bool((self._ratios > WORST_RATIO).any()):
            return False
        solved = _solved(self._remaining, vectors, self._means, scales, leading, tolerance, solved)
        if solved is None:
            return False
        z = product(leading.T, solved).transpose(0, 1)
        roots = values[:count].sqrt()
        within = torch.linalg.inv(coupling.leading + torch.linalg.inv(z))
        self._first = torch.linalg.inv(identity + roots[:, None] * within * roots)
        total = coupling.leading + torch.diag(values[:count])  # L
        inner = torch.linalg.inv(identity + z @ total)
        self._second, self._third = roots[:, None] * inner, total @ inner
        self._upper = inner, inner @ z * roots
        self._solved = solved  # Z_c U, [N, C, t]
        damped = self._means / (1 + self._remaining[:, None] * self._means)
        self._joint = damped[:, :, None] * coupling.across
        self._type, self._basis, self._small = dtype, vectors.to(dtype), self._away.to(dtype)
        self._nodes = _Nodes.of(self._means)
        sizes = (self._means / self._means[0]).log().div(math.log1p(WIDTH)).long()
        self._groups = _runs(sizes)
        return True

    def __call__(self, features: Tensor) -> Tensor | None:
        """Variances at features ``[B, i]``, ``[B, C]``; None where the error may be too large."""
        exact = features.double()
        count, vectors = self._strong, self._vectors
        leading = exact @ self._directions * self._precision.rsqrt()  # a, [B, t]
        rest = exact - (exact @ self._directions) @ self._directions.T
        weak = (rest / self._precision) @ self._features.T @ vectors  # b, [B, N]
        weak[:, :count] = 0
        result = rest.square().sum(1)[:, None] / self._precision
        damping = 1 / (1 + self._remaining[:, None] * self._means)  # T, [N, C]
        result = result - weak.square() @ (damping * self._means)
        few = weak.to(self._type)  # for what is small
        for point, weights in zip(self._nodes.points, self._nodes.weights, strict=True):
            inner = self._turned(few, point)
            result -= inner.square_() @ (self._small * weights.to(self._type))
        if count:
            across = (weak @ vectors.T @ self._solved.flatten(1)).unflatten(1, self._solved.shape[1:])  # y, [B, C, t]
            result += torch.einsum("bt,cts,bs->bc", leading, self._first, leading)
            result -= 2 * torch.einsum("bt,cts,bcs->bc", leading, self._second, across)
            result += torch.einsum("bct,cts,bcs->bc", across, self._third, across)
            upper = torch.einsum("cts,bcs->bct", self._upper[0], across)
            upper += torch.einsum("cts,bs->bct", self._upper[1], leading)  # Uᵀ M k
            joint = (weak @ self._joint.flatten(1)).unflatten(1, self._joint.shape[1:])
            result += 2 * (upper * joint).sum(-1)
        if not bool((result > 0).all()):
            return None
        for some in self._groups:
            more, unsure = self._last(few, some, result[:, some])
            result[:, some] += more
            if not bool((unsure + self._changes[some] * result[:, some] <= self._limit * result[:, some]).all()):
                return None
        return result.to(features.dtype)[:, self._back]

    def _turned(self, weak: Tensor, mean: Tensor) -> Tensor:
        """The vectors u for one α, ``[B, N]``."""
        return (weak / (1 + mean * self._remaining).to(weak)) @ self._basis.T

    def _last(self, weak: Tensor, some: slice, variances: Tensor) -> tuple[Tensor, Tensor]:
        """The third term ``[B, c]`` for some classes of similar α, and by how much the series may then be wrong."""
        means, remaining, largest = self._means[some], self._remaining, self._remaining.max()
        middle = (means.min() + means.max()) / 2
        # (1 + m L) / (1 + α L) is between 1 and the ratio of the two α, and nearer to 1.
        off = (means - middle).abs() * largest / (1 + torch.minimum(means, middle) * largest)
        inner = self._turned(weak, middle)
        away = self._small[:, some].T.contiguous()  # [c, N]
        squares = inner.square() @ away.square().T  # Σ (d u)², [B, c]
        gains = remaining[:, None] / (1 + remaining[:, None] * means)  # H, [N, c]
        order = gains.amax(1).argsort(descending=True)
        gains = torch.cat([gains[order], torch.zeros_like(means)[None]])
        ratios = self._ratios[some] / (1 - self._ratios[some]) + 3 * off  # u occurs twice; the rest is a margin
        room = self._limit - self._changes[some]
        term, seen = torch.zeros_like(squares, dtype=means.dtype), torch.zeros_like(squares)
        # At first so many eigenvectors that half of what they leave out takes three fifths of the room.
        worst = (squares.double() / variances).amax(0)
        done, rows = 0, ROWS * (1 + int((gains[:-1] * worst > 1.2 * room).any(1).sum()) // ROWS)
        while True:
            rows = min(rows, len(order))
            more, energy = self._squares(inner, away, order[done:rows], gains[done:rows])
            term, seen = term + more, seen + energy
            tail = (squares - seen).clamp_(min=0) * gains[rows]
            unsure = (term + tail) * ratios + tail / 2
            if rows == len(order) or bool((unsure <= room * variances).all()):
                return term + tail / 2, unsure
            done, rows = rows, 2 * rows

    def _squares(self, inner: Tensor, away: Tensor, chosen: Tensor, gains: Tensor) -> tuple[Tensor, Tensor]:
        """``Σ_k H_k (V_kᵀ d u)²`` and ``Σ_k (V_kᵀ d u)²`` over some eigenvectors, ``[B, c]``."""
        vectors = self._basis[:, chosen].T  # [r, N]
        weights = torch.stack([gains.T, torch.ones_like(gains.T)], 1).to(away)  # [c, 2, r]
        result = inner.new_empty(len(away), 2, len(inner))
        step = max(1, GROUP_BYTES // (4 * len(chosen) * len(inner)))
        for start in range(0, len(away), step):
            part = slice(start, start + step)
            products = (away[part, None] * vectors).flatten(0, 1) @ inner.T  # [c·r, B]
            torch.bmm(weights[part], products.square_().view(-1, len(chosen), len(inner)), out=result[part])
        return result[:, 0].T, result[:, 1].T


def _runs(values: Tensor) -> list[slice]:
    """Where values ``[C]`` are the same as the one before."""
    lengths = torch.unique_consecutive(values, return_counts=True)[1].tolist()
    ends = list(itertools.accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _ratios(remaining: Tensor, vectors: Tensor, means: Tensor, away: Tensor, leading: Tensor) -> Tensor:
    """Bounds ``‖H^½ d_c H^½‖_F [C]``: ``d_cᵀ (H ∘ H) d_c`` is the square, and H is largest at the smallest α.

    In the leading directions that are given H is ``1 / α_c``, its limit.
    """
    gains = remaining / (1 + remaining * means.min())
    matrix, more = (vectors * gains) @ vectors.T, leading @ leading.T
    single = away.float()

    def form(kernel: Tensor) -> Tensor:
        return (single * (kernel.float() @ single)).sum(0).to(means)

    total = form(matrix.square())
    if leading.shape[1]:
        total = total + 2 * form(matrix * more) / means + form(more.square()) / means**2
    return total.clamp(min=0).sqrt()


def _solved(
    remaining: Tensor,
    vectors: Tensor,
    means: Tensor,
    scales: Tensor,
    leading: Tensor,
    tolerance: float,
    start: Tensor | None = None,
) -> Tensor | None:
    """``(V L Vᵀ + P_c⁻¹)⁻¹ U [N, C, t]`` by iterations; None where they do not settle."""
    wanted = scales[:, :, None] * leading[:, None]
    if not wanted.numel():
        return wanted
    damping = 1 / (1 + remaining[:, None] * means)
    solution = product(vectors.T, wanted if start is None else start)  # in the basis V
    if start is None:
        solution *= damping[:, :, None]
    size = wanted.abs().amax((0, 2), keepdim=True)
    for _ in range(ITERATIONS):
        bent = product(vectors, remaining[:, None, None] * solution)
        residual = product(vectors.T, wanted - scales[:, :, None] * bent) - solution
        solution += damping[:, :, None] * residual
        if bool((residual.abs() <= tolerance * size).all()):
            return product(vectors, solution)
    return None


@dataclass(frozen=True)
class _Coupling:
    """``N_c = (K − E_c)⁻¹`` in the basis V, about.

    Attributes:
        level: ``n_c [C]``.
        leading: ``N_U − n [C, t, t]``.
        others: ``N_R − n [N]``, zeros for the leading directions; of the mean class.
        across: ``N_RU [N, C, t]``, zeros for the leading directions.
        changes: By what factor less one variances may be wrong because of it, ``[C]``.
    """

    level: Tensor
    leading: Tensor
    others: Tensor
    across: Tensor
    changes: Tensor


def _coupling(
    values: Tensor,
    vectors: Tensor,
    count: int,
    means: Tensor,
    away: Tensor,
    columns: Tensor,
    ratios: Tensor,
) -> _Coupling | None:
    """``(K − E_c)⁻¹`` from ``Vᵀ E_c U [N, C, t]``, which are exact, as is their sum, and from ``K_R ≈ Σ_c α_c T_c``.

    With ``x = α N``, relative errors η of K's parts change ``I + Λ^½ Vᵀ P̃ V Λ^½``, ``P̃ = (P⁻¹ + N)⁻¹``, relative to
    itself by at most ``x_U η_UR² + 2 (x_U x_R)^½ η_UR (η_UR + ρ / (1 − ρ)) + x_R (η_R + θ ρ) + α ΔN``: the inverse of
    K's part U for that part of its inverse; what of N_UR is not of first order; and by what ``K_R``, ``E_c`` and N_R
    differ from the diagonals that they are taken for.
    """
    rest = values[count:]
    parts = means / (1 + rest[:, None] * means)  # E_c's, [N − t, C]
    diagonal = parts.sum(1)
    inverse = 1 / (diagonal[:, None] - parts)
    level = inverse.min(0).values
    others = 1 / diagonal - 1 / diagonal.max()
    image = columns.sum(1)
    within, own = image[:count], columns[:count].transpose(0, 1)
    within, own = (within + within.mT) / 2, (own + own.mT) / 2
    lower, failed = torch.linalg.cholesky_ex(within - own)
    if bool(failed.any()):
        return None
    strong = torch.cholesky_inverse(lower)  # N_U, [C, t, t]
    beside = image[count:]  # K_RU
    across = -inverse[:, :, None] * torch.einsum("rct,cts->rcs", beside[:, None] - columns[count:], strong)
    off = torch.zeros_like(diagonal[0])
    if count:
        root = torch.linalg.cholesky(within)
        off = torch.linalg.solve_triangular(root, (beside * diagonal[:, None].rsqrt()).T, upper=False).norm()
    theta = (parts / diagonal[:, None]).amax(0)
    x_strong = means * strong.diagonal(dim1=1, dim2=2).sum(1)
    weighted = rest[:, None] * parts  # α Λ T
    x_weak = (means * inverse * weighted).amax(0)
    spread = ((inverse - level - others[:, None]).abs() * means * weighted).amax(0)
    mixed = 2 * (x_strong * x_weak).sqrt() * off * (off + ratios / (1 - ratios))
    error = _deviation(values, vectors, count, means, away, diagonal)
    changes = x_strong * off**2 + mixed + x_weak * (error + theta * ratios) + spread
    nothing = values.new_zeros(count)
    return _Coupling(
        level,
        strong - level[:, None, None] * torch.eye(count, dtype=values.dtype, device=values.device),
        torch.cat([nothing, others]),
        torch.cat([nothing[:, None, None].expand(-1, len(means), count), across]),
        changes,
    )


def _deviation(values: Tensor, vectors: Tensor, count: int, means: Tensor, away: Tensor, diagonal: Tensor) -> Tensor:
    """A bound on ``‖κ^-½ (K_R − κ) κ^-½‖`` for the diagonal κ of ``Σ_c α_c T_c``.

    To the second order in d, ``E_c = α T + T d T − T d H d T`` with ``H = Λ T``; the sums over classes need no product
    for each of them, as ``Σ_c d_c X d_c = (Σ_c d_c d_cᵀ) ∘ X`` for the diagonals d_c as vectors. The orders beyond are
    smaller than the second one by ``max |d| / α``.
    """
    nodes = _Nodes.of(means)
    basis, rest = vectors[:, count:].float(), values[count:]
    total = torch.zeros(len(rest), len(rest), device=values.device)
    second = torch.zeros_like(total)
    for point, weights in zip(nodes.points, nodes.weights, strict=True):
        turned = (1 / (1 + point * rest)).float()
        single = away.float()
        once = basis.T @ ((single @ weights.float())[:, None] * basis)
        gains = (vectors * (values / (1 + point * values))).float() @ vectors.float().T
        twice = basis.T @ (((single * weights.float()) @ single.T) * gains) @ basis
        total += turned[:, None] * (once - twice) * turned
        second += turned[:, None] * twice * turned
    scale = diagonal.rsqrt().float()
    ratio = (away.abs().amax(0) / means).max().clamp(max=0.9)
    size, beyond = (torch.linalg.eigvalsh(scale[:, None] * one * scale).abs().amax() for one in (total, second))
    return (size + beyond * ratio / (1 - ratio)).double()
