"""Priors with correlations inside convolution filters (Antorán et al., 2022, arXiv:2203.00479).

The covariance of a block's filters depends on the few distances δ between taps, so that ``J Λ⁻¹ Jᵀ`` is
``Σ_t c_t(ℓ, v) G_t``, with one matrix G for each block and distance. Hyperparameters enter by the coefficients c only:
what is computed from rows of J is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.errors import SelectionError
from laplace_plus.network.network import Network
from laplace_plus.priors import as_hyperparameter

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NUGGET = 1e-6  # the authors' addition to the diagonal, whose least eigenvalue falls with the length
_ENTRIES = 2**23
"""Of float64 rows of Jacobians that are multiplied at a time."""


@dataclass(frozen=True, eq=False)
class FilterCovariance:
    """A Gaussian prior of mean zero whose covariance within a filter falls with the distance of its taps.

    Two taps p, q of one k × k filter have the covariance ``v (exp(−‖p − q‖/ℓ) + 1e-6 [p = q])``; filters, one for each
    pair of channels, are independent. So are weights without neighbours (1 × 1 convolutions, biases, linear layers),
    with the same variance. ``ℓ = 0`` is a scalar prior for each block.

    Attributes:
        lengthscale: ℓ ≥ 0, in taps; 0-d or one for each block. ConfigurationError for others.
        variance: v > 0, in squared units of the weights; 0-d or one for each block.

    Example:
        >>> FilterCovariance(1.0, 4.0).coefficients(torch.zeros(2, dtype=torch.long), torch.tensor([0.0, 1.0]))
        tensor([4.0000, 1.4715], dtype=torch.float64)
    """

    lengthscale: float | Tensor = 1.0
    variance: float | Tensor = 1.0

    def __post_init__(self) -> None:
        for name, value, least in zip(("lengthscale", "variance"), self.values(), (0.0, 5e-324), strict=True):
            checks.count(f"The number of values of {name}", value.numel())
            for end in value.detach().aminmax():
                checks.number(name, float(end), least=least)

    def values(self) -> tuple[Tensor, Tensor]:
        """ℓ and v in float64; differentiable."""
        return as_hyperparameter(self.lengthscale).double(), as_hyperparameter(self.variance).double()

    def coefficients(self, blocks: Tensor, distances: Tensor) -> Tensor:
        """The covariances of taps of some blocks at some distances, in float64; differentiable."""
        on_device = (value.to(distances.device) for value in self.values())
        length, variance = (value[blocks] if value.ndim else value for value in on_device)
        apart = (distances > 0) & (length > 0)
        # Where the result is 0 or 1 anyway, no division by zero may enter derivatives.
        falling = torch.exp(-distances / torch.where(apart, length, 1.0))
        same = (distances == 0).double()
        return variance * (torch.where(apart, falling, same) + _NUGGET * same)


class Filters:
    """How a network's parameters fall into blocks, filters and T terms: pairs of a block and a distance.

    Attributes:
        names: Of the blocks, which ``blocks`` gives by the names of parameters; by default those of the layers.
        blocks, distances: Of each term, ``[T]``.
        correlated: Which blocks have filters of more than one tap, ``[n_blocks]``.

    SelectionError: some taps of a filter are left out.
    """

    def __init__(self, network: Network, blocks: Callable[[str], str] | None = None):
        chosen = {item.name: item.layer if blocks is None else blocks(item.name) for item in network.selected}
        self.names = tuple(dict.fromkeys(chosen.values()))
        convolutions = {name for name, module in network.model.named_modules() if isinstance(module, _CONVOLUTIONS)}
        known: dict[tuple[int, float], int] = {}
        self._pieces: list[tuple[int, int, Tensor]] = []  # of each parameter its entries, and the term of each two taps
        for item in network.selected:
            axes = [torch.arange(n, dtype=torch.float64) for n in item.shape[2:]] if item.layer in convolutions else []
            taps = torch.cartesian_prod(*axes).view(-1, len(axes)) if axes else torch.zeros(1, 1)
            if item.mask is not None and len(taps) > 1:
                fix = "Select whole parameters, or none of them."
                raise SelectionError(f"Some entries of the filters {item.name!r} are left out.", fix=fix)
            # Squares are integers: equal distances are equal numbers.
            distances = (taps[:, None] - taps).square().sum(-1).sqrt().tolist()
            block, start = self.names.index(chosen[item.name]), network.offsets[item.name]
            terms = [[known.setdefault((block, d), len(known)) for d in row] for row in distances]
            self._pieces.append((start, start + item.size, torch.tensor(terms, device=network.device)))
        self.blocks = torch.tensor([block for block, _ in known], device=network.device)
        self.distances = torch.tensor([d for _, d in known], dtype=torch.float64, device=network.device)
        self.correlated = self.by_block(self.distances) > 0

    def by_block(self, values: Tensor) -> Tensor:
        """Sums over the terms ``[*, T]`` of each block, ``[*, n_blocks]``."""
        return values @ nn.functional.one_hot(self.blocks, len(self.names)).to(values)

    def coefficients(self, prior: FilterCovariance) -> Tensor:
        """``c [T]``; differentiable. ConfigurationError for hyperparameters of another number of blocks."""
        for value in prior.values():
            fix = f"Pass one number, or one for each block: {', '.join(self.names)}."
            checks.shape("The prior", value, [len(self.names)] * value.ndim, fix)
        return prior.coefficients(self.blocks, self.distances)

    def product(self, left: Tensor, right: Tensor, coefficients: Tensor) -> Tensor:
        """``L Λ⁻¹ Rᵀ`` in float64, for rows ``[n, P]`` and ``[m, P]``."""
        found = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
        for terms, one, other in self._chunks(left, right):
            found.addmm_((one @ coefficients[terms]).flatten(1), other.flatten(1).mT)
        return found

    def grams(self, rows: Tensor, *, diagonal: bool = False) -> Tensor:
        """``G [T, n, n]``, or their diagonals ``[T, n]``, for rows ``[n, P]``."""
        size = (len(self.blocks), len(rows)) if diagonal else (len(self.blocks), len(rows), len(rows))
        found = torch.zeros(size, dtype=torch.float64, device=rows.device)
        for terms, own, _ in self._chunks(rows, rows[:0]):
            for term in terms.unique():
                mixed = own @ (terms == term).double()
                found[term] += (mixed * own).sum((1, 2)) if diagonal else mixed.flatten(1) @ own.flatten(1).mT
        return found

    def energy(self, vector: Tensor, coefficients: Tensor) -> Tensor:
        """``θᵀ Λ θ`` of ``[P]``, 0-d float64; differentiable by the coefficients."""
        found = torch.zeros((), dtype=torch.float64, device=vector.device)
        for start, stop, terms in self._pieces:
            own = vector[start:stop].double().view(-1, len(terms))
            found = found + (own.mT @ own * torch.linalg.inv(coefficients[terms])).sum()
        return found

    def _chunks(self, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Terms, and rows of some filters at a time, ``[n, F, k]`` float64."""
        for start, stop, terms in self._pieces:
            taps = len(terms)
            step = taps * max(1, _ENTRIES // (taps * (2 * len(left) + len(right))))
            for first in range(start, stop, step):
                inside = slice(first, min(stop, first + step))
                one, other = (rows[:, inside].double().unflatten(1, (-1, taps)) for rows in (left, right))
                yield terms, one, other
