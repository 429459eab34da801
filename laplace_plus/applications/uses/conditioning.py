"""Gaussian posteriors given that some weights are zero, block by block.

With the Cholesky factor of the covariance in the order in which entries S become zero, ``Σ_SS = L Lᵀ``, densities and
means of every prefix follow from ``z = L⁻¹ θ̂_S`` and ``L⁻¹ Σ_S·``. A Kronecker block whose units are rows needs no
matrix over all of its entries: in the eigenbasis of the other side it is one small covariance for each eigenvector. The
same holds for columns. Where single entries of a large block become zero, the others' mean comes by conjugate
gradients, and the density is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laplace_plus.errors import ConvergenceWarning, UnsupportedError, warn
from laplace_plus.linalg import cg
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.structured import DenseBlock, EigenFactor, IdentityBasis, KroneckerBasis

_MOST = 2**28 // 24
"""Entries of a block's covariance, of which three are held at a time in float64; larger blocks are :class:`Large`."""


class Entries(NamedTuple):
    """Some entries of the parameter vector, all tensors of one shape, in which units have numbers, and −1 is none.

    The prior is ``N(mean − away, precision⁻¹)`` around a mean of zero: ``away`` are minus the prior's means.
    """

    at: Tensor
    unit: Tensor
    mean: Tensor
    away: Tensor
    precision: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> Entries:
        """The same of all of these tensors."""
        return Entries(*map(function, self))

    def density(self) -> Tensor:
        """Logarithm of the prior's density at zero."""
        return ((self.precision / (2 * math.pi)).log() - self.precision * self.away.square()) / 2


class Independent:
    """Entries ``[n]`` with variances."""

    def __init__(self, entries: Entries, variance: Tensor):
        self.index, self.unit = entries.at, entries.unit
        squares = entries.mean.square() / variance + (2 * math.pi * variance).log()
        self.change = -squares / 2 - entries.density()

    def changes(self, number: int) -> Tensor:
        """What the log evidence changes by where a unit becomes zero, ``[number + 1]``; the last stands for none."""
        return self.change.new_zeros(number + 1).index_add_(0, self.unit % (number + 1), self.change)

    def eliminate(self, units: Tensor) -> bool:
        """Condition on some units ``[number]`` (bool) that are zero; whether this matters to others."""
        return False

    def arrange(self, rank: Tensor, count: int) -> Tensor:
        """As :meth:`changes`, for each unit of a rank ``[number]`` below ``count``, given those of lower ranks."""
        return self.changes(len(rank))

    def move_(self, vector: Tensor, n: int) -> None:
        """After :meth:`arrange`, write the mean of other entries given that units of ranks below n are zero."""


class Large(Independent):
    """Entries ``[n]`` of a block too large for its covariance; their own variances are known."""

    def changes(self, number: int) -> Tensor:
        """As of :class:`Independent`, of single entries; UnsupportedError for others."""
        if bool((self.unit[self.unit >= 0].bincount() > 1).any()):
            what, fix = "The covariance of a unit is too large.", "Take single weights, or lp.Diagonal."
            raise UnsupportedError(what, expected="smaller layers, or single weights", got=f"{len(self.unit)}", fix=fix)
        return super().changes(number)

    def arrange(self, rank: Tensor, count: int) -> Tensor:
        """NaN for units that are here."""
        found = self.change.new_zeros(len(rank) + 1)
        found[self.unit] = math.nan
        return found


class Joint:
    """Entries ``[b, n]`` as b independent Gaussians of n coordinates, of which a unit has the same in each.

    Args:
        entries: Means are those of coordinates.
        covariance: ``[b, n, n]``.
        turn: ``[b, b]``, orthogonal, from Gaussians to entries; None for the identity.
    """

    def __init__(self, entries: Entries, covariance: Tensor, turn: Tensor | None = None):
        self.index, self.unit, self.density = entries.at, entries.unit[0], entries.density()
        self.mean, self.covariance, self.turn = entries.mean, covariance, turn
        self.given, self.gone = (entries.mean, covariance), self.unit < 0

    def changes(self, number: int) -> Tensor:
        """As of :class:`Independent`, given what was eliminated."""
        mean, matrix = self.given
        found, left = mean.new_zeros(number + 1), (~self.gone).nonzero()[:, 0]
        order = left[self.unit[left].argsort(stable=True)]
        units, counts = self.unit[order].unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        for size in counts.unique().tolist():
            same = counts == size
            at = order[starts[same][:, None] + torch.arange(size, device=order.device)]  # [units, size]
            root, white = _whiten(matrix[:, at[:, :, None], at[:, None]], mean[:, at, None])
            found[units[same]] = (_log_densities(root, white[..., 0]) - self.density[:, at]).sum((0, 2))
        return found

    def eliminate(self, units: Tensor) -> bool:
        """As of :class:`Independent`."""
        at = (units[self.unit] & ~self.gone).nonzero()[:, 0]
        if len(at):
            mean, matrix = self.given
            both = torch.cat([matrix[:, at], mean[:, at, None]], 2)
            white = _whiten(matrix[:, at[:, None], at], both)[1]
            matrix = matrix.clone() if matrix is self.covariance else matrix
            rows = white[..., :-1]
            self.given = mean - (rows.mT @ white[..., -1:])[..., 0], matrix.baddbmm_(rows.mT, rows, alpha=-1)
            self.gone = self.gone | units[self.unit]
        return len(at) > 0

    def arrange(self, rank: Tensor, count: int) -> Tensor:
        """As of :class:`Independent`."""
        self.given = self.mean, self.covariance
        place = rank[self.unit].masked_fill(self.unit < 0, count)
        at = place.argsort(stable=True)[: int((place < count).sum())]
        both = torch.cat([self.covariance[:, at], self.mean[:, at, None]], 2)
        root, white = _whiten(self.covariance[:, at[:, None], at], both)
        self.places, self.rows, self.white = place[at], white[..., :-1], white[..., -1]
        own = _log_densities(root, self.white) - self.density[:, at]
        return own.new_zeros(len(rank) + 1).index_add_(0, self.unit[at], own.sum(0))

    def move_(self, vector: Tensor, n: int) -> None:
        """As of :class:`Independent`."""
        first = int((self.places < n).sum())
        moved = self.mean - torch.einsum("bs,bsn->bn", self.white[:, :first], self.rows[:, :first])
        vector[self.index] = (moved if self.turn is None else self.turn @ moved).to(vector.dtype)


def _whiten(matrix: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor L of a covariance, and ``L⁻¹`` times vectors."""
    root = torch.linalg.cholesky(matrix)
    return root, torch.linalg.solve_triangular(root, vectors, upper=False)


def _log_densities(root: Tensor, white: Tensor) -> Tensor:
    """At zero, of each coordinate given those before it."""
    return -(white.square() + math.log(2 * math.pi)) / 2 - root.diagonal(0, -2, -1).log()


def parts(posterior: GaussianPosterior, unit: Tensor) -> tuple[list[Independent | Joint], Tensor]:
    """The posterior's parts, for the unit ``[P]`` of each entry, and its precision's diagonal ``[P]``, NaN if unknown.

    A covariance's scale does not count: it belongs to predictions, and not to the evidence.
    """
    model, temperature = posterior.laplace_model(), posterior.temperature.detach()
    mean, prior = model.vector.double(), model.prior(posterior.prior_precision.detach())
    weights = (model.weights() / temperature.to(model.vector.device)).to(model.vector)
    factors, precision = model.factors(prior.precision, temperature), prior.vector().to(mean)
    everywhere = unit.to(mean.device), mean, prior.deviation(torch.zeros_like(mean)), precision
    diagonal, found = torch.full_like(mean, math.nan), []
    for layout, block in model.curvature:
        factor, index = factors[layout.key], layout.index.to(mean.device)
        basis = factor.basis if isinstance(factor, EigenFactor) else None
        variance = factor.variances().double()
        if isinstance(factor, EigenFactor) and isinstance(basis, KroneckerBasis | IdentityBasis):  # orthogonal ones
            diagonal[index] = basis.diagonal(factor.values).double()
        for group, at in enumerate(index):
            entries = Entries(at, *(own[at] for own in everywhere))
            flat, size = entries.each(Tensor.flatten), at.numel()
            part: Independent | Joint = Large(flat, variance[group].flatten())
            if isinstance(basis, IdentityBasis):
                part = Independent(flat, variance[group].flatten())
            elif isinstance(factor, EigenFactor) and isinstance(basis, KroneckerBasis):
                sides = [_side(own, group, mean, n) for own, n in zip((basis.left, basis.right), at.shape, strict=True)]
                part = _of_sides(entries, sides, factor.values[group].double()) or part
            elif size**2 <= _MOST or isinstance(block, DenseBlock):
                matrix = block.dense(weights)[group].double() + flat.precision.diag()
                diagonal[at] = matrix.diagonal().view_as(at)
                if size**2 <= _MOST:
                    inverse = torch.cholesky_inverse(_whiten(matrix, matrix[:, :0])[0])
                    part = Joint(flat.each(lambda own: own[None]), inverse[None])
            found.append(part)
    return found, diagonal


def _side(side: Any, group: int, like: Tensor, n: int) -> Tensor:
    """One side ``[n, n]`` of a Kronecker basis, which is the identity, a matrix, or reflections."""
    eye = torch.eye(n, dtype=like.dtype, device=like.device)
    return eye if side is None else side[group % len(side)].to(eye.dtype) @ eye


def _of_sides(entries: Entries, sides: Sequence[Tensor], values: Tensor) -> Joint | None:
    """Units that are rows, columns, or anything in a small block; None for others."""
    left, right = sides
    rows = entries.each(lambda own: own.T), left, right, values.T
    for own, side, turn, spectrum in (rows, (entries, right, left, values)):
        if bool((own.unit == own.unit[:1]).all()) and side.numel() * len(turn) <= _MOST:
            turned = own._replace(mean=turn.T @ own.mean, away=turn.T @ own.away)
            return Joint(turned, side / spectrum[:, None] @ side.T, turn)
    if values.numel() ** 2 > _MOST:
        return None
    vectors = torch.kron(left, right)
    return Joint(entries.each(lambda own: own.reshape(1, -1)), (vectors / values.flatten() @ vectors.T)[None])


def iterate_(vector: Tensor, posterior: GaussianPosterior, moving: Tensor, diagonal: Tensor) -> None:
    """Write the mean of the ``moving`` entries ``[P]`` (bool) given all others into a parameter vector."""
    model = posterior.laplace_model()
    weights = (model.weights() / posterior.temperature.detach().to(vector.device)).to(vector)
    prior = model.prior(posterior.prior_precision.detach()).vector().to(vector)

    def product(vectors: Tensor) -> Tensor:
        with torch.enable_grad():
            point = vectors.detach().requires_grad_()
            blocks = [block.quadratic(weights, layout.gather(point)).sum() for layout, block in model.curvature]
            (found,) = torch.autograd.grad(torch.stack(blocks).sum() / 2, point)
        return found + prior * vectors

    def among_moving(vectors: Tensor) -> Tensor:
        return torch.where(moving, product(vectors * moving), vectors)

    pull = -product((vector - model.vector)[None] * ~moving) * moving
    scale = torch.where(moving, diagonal.nan_to_num(1.0), 1.0).to(vector)
    tolerance = torch.finfo(vector.dtype).eps ** 0.5
    solved = cg(among_moving, pull, preconditioner=lambda vectors: vectors / scale, rtol=tolerance)
    if not solved.converged:
        warn(f"The compensation ended with a residual of {float(solved.residual.max()):.1e}.", ConvergenceWarning)
    vector += solved.value[0] * moving
