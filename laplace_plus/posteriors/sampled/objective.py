"""Posterior samples of the tangent model as solutions of linear systems: the objective.

With features ``Φ = J``, output curvature B and prior precision A, the tangent model's posterior has the precision
``H = Φᵀ B Φ + A``. Noise ``ε ~ N(0, B⁻¹)``, ``θ⁰ ~ N(0, A⁻¹)`` makes the minimiser of

    L(z)  = ½ Σ ‖ε_i − φ_i z‖²_{B_i} + ½ ‖z − θ⁰‖²_A

a draw from ``N(0, H⁻¹)``. So does the objective with the same minimiser and a fraction of the gradient noise,

    L′(z) = ½ Σ ‖φ_i z‖²_{B_i} + ½ ‖z − θⁿ‖²_A,    θⁿ = θ⁰ + A⁻¹ Φᵀ B^½ η,    η ~ N(0, I),

in which the noise is one fixed vector: one backward pass over the data, and no inverse of B, which is singular for
classes (Antorán et al., "Sampling-based inference for large linear models, with application to linearised Laplace",
2023). Everything here is in units of the prior's standard deviation, ``u = A^½ z``, where the system reads

    (I + W) u = ξ + A^-½ Φᵀ B^½ η,    W = A^-½ Φᵀ B Φ A^-½,    ξ = A^½ θ⁰ ~ N(0, I),

whose smallest eigenvalue is at least 1: an error is never larger than its residual. The draws ξ and ``Φᵀ B^½ η`` do not
depend on the prior, and serve for any other one.

The samples also give the effective dimension ``γ = tr(H⁻¹ M)``, ``M = Φᵀ B Φ``: ``E zᵀ M z`` and ``d − E zᵀ A z`` are γ
(Antorán et al., 2023), with variances ``2 Σ p_i²`` and ``2 Σ (1 − p_i)²`` for the eigenvalues p of ``H^-½ M H^-½``. The
ratio ``d · zᵀMz / (zᵀMz + zᵀAz)``, which is taken here, has about ``2 Σ (p_i − p̄)²``, the smallest of the three
wherever γ lies between 0 and d, where it always stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.curvature import GGNOperator
from laplace_plus.curvature.streaming import CHUNK_SIZE
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.base import doubt_logits
from laplace_plus.linalg import Estimate, Operator
from laplace_plus.linalg.estimates import draw_probes, jackknife, standard_error
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.persistence import stored

stored(Estimate)

Rows = Callable[[Tensor], Tensor]
"""A linear function of row vectors ``[k, n]``."""


@stored
@dataclass(frozen=True)
class Draws:
    """The noise that makes a solution a sample, ``[k, P]`` each: drawn once, for any prior and any weight of the data.

    ``prior`` is ``ξ ~ N(0, I)``, ``data`` is ``Φᵀ B₁^½ η`` with the output curvature B₁ at unit noise and temperature.
    """

    prior: Tensor
    data: Tensor


class TangentCurvature(GGNOperator):
    """``M₁ = Σ_i φ_iᵀ B_i φ_i`` at unit observation noise, with the noise ``Φᵀ B₁^½ η`` and products by batches."""

    n_batches = 0
    n_classes = 0
    _doubt = 0.0

    def __init__(self, network: Network, likelihood: Likelihood, data: Iterable[Any], *, chunk_size: int = CHUNK_SIZE):
        noise = likelihood.noise_std
        unit = likelihood if noise is None else likelihood.with_noise(torch.ones_like(noise))
        super().__init__(network, unit, data, chunk_size=chunk_size)
        if self._doubt > 0:
            doubt_logits(likelihood, self._doubt)

    @override
    def _look_at(self, batch: Batch, outputs: Tensor, n_seen: int) -> None:
        super()._look_at(batch, outputs, n_seen)
        self._doubt += self.likelihood.evidence_for_probabilities(outputs, batch.target)
        self.n_batches += 1
        self.n_classes = outputs.shape[-1]

    @property
    def data_sum(self) -> float:
        """A number by which data are recognised, whatever batches they are cut into and in whatever order."""
        return self._stream.checksum

    def pulled_noise(self, count: int, generator: torch.Generator | None) -> Tensor:
        """``Φᵀ B₁^½ η`` for fresh ``η ~ N(0, I)``, ``[count, P]``: one pass of backward passes."""
        total = torch.zeros(count, self.shape[1], dtype=self.dtype, device=self.device)
        with exact_arithmetic(self.network), torch.no_grad():
            for line, noise in self._output_noise("sampling noise", count, generator):
                line.pull.add_to(total, noise)
        return total

    def estimated_diagonal(self, count: int, generator: torch.Generator) -> Tensor:
        """``diag M₁`` as the mean of squares of every batch's own ``Φ_bᵀ B₁^½ η``, ``[P]``: one pass.

        Its relative error is ``(2 / (count · batches))^½`` at most where all batches contribute alike.
        """
        total = torch.zeros(self.shape[1], dtype=self.dtype, device=self.device)
        with exact_arithmetic(self.network), torch.no_grad():
            for line, noise in self._output_noise("diagonal", count, generator):
                total += line.pull(noise).square().mean(0)
        return total

    def _output_noise(
        self, description: str, count: int, generator: torch.Generator | None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Each batch's linearisation with ``B₁^½ η``, ``[count, B, *, C]``, in one pass."""
        for batch, line in self._stream.linearizations(description, ordered=False):
            root = self.output_root(batch, line.outputs, 0)
            eta = draw_probes("gaussian", count, root.size, generator=generator, dtype=self.dtype, device=self.device)
            yield line, root.up(eta).to(self.dtype)

    def minibatches(self) -> Iterator[Rows]:
        """For each batch the product with its part of ``M₁``, times the number of batches.

        Their mean is ``M₁``; with a factor ``N / B`` a smaller last batch would count for too much.
        """
        for batch, line in self._stream.linearizations("minibatches", ordered=False):
            root = self.output_root(batch, line.outputs, 0)

            def product(vectors: Tensor, line: Any = line, root: Any = root) -> Tensor:
                result = torch.zeros_like(vectors)
                for some in self._stream.chunks(len(vectors)):
                    line.pull.add_to(result[some], root.up(root.down(line.push(vectors[some]))).to(result.dtype))
                return result.mul_(self.n_batches)

            yield product


@stored
@dataclass(frozen=True)
class SamplingReport:
    """How accurate the samples are.

    Attributes:
        residual: ``‖∇L′‖`` of each sample relative to that at zero, in units of the prior's standard deviation, [k].
        iterations: Passes over the data that the solve took.
        converged: Whether no residual exceeds the solver's tolerance.
        effective_dimension: γ of all parameters, with its standard error; infinite for a single sample.
        energy: ``E[zᵀ H z] / P``, which is 1 up to sampling for solved systems, and its standard error.
    """

    residual: Tensor
    iterations: int
    converged: bool
    effective_dimension: Estimate
    energy: tuple[float, float]


@dataclass(frozen=True)
class Solved:
    """Solutions ``u [k, P]`` of ``(I + W) u = b``, the samples ``z = A^-½ u`` that they are, and the image ``W u``."""

    z: Tensor
    u: Tensor
    image: Tensor
    report: SamplingReport

    def forms(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g`` of groups by an index ``[P]``, ``[k, G]`` float64 each."""
        return group_sums(self.u, self.image, index), group_sums(self.u, self.u, index)


class PriorUnits(Operator):
    """``I + W``, of the system ``(I + W) u = b`` at a prior precision ``[P]`` and the weight ``1/(σ² T)`` of ``M₁``."""

    symmetric = True

    def __init__(self, curvature: TangentCurvature, precision: Tensor, weight: float):
        self.curvature, self.weight = curvature, weight
        self.shape, self.dtype, self.device = curvature.shape, curvature.dtype, curvature.device
        self.root = precision.to(curvature.device).sqrt().to(curvature.dtype)

    def right_hand_side(self, draws: Draws) -> Tensor:
        """``b = ξ + A^-½ Φᵀ B^½ η``, ``[k, P]``."""
        return torch.addcdiv(draws.prior, draws.data, self.root, value=self.weight**0.5)

    def image(self, u: Tensor, product: Rows | None = None) -> Tensor:
        """``W u``; with the product of a minibatch its estimate."""
        result = (self.curvature if product is None else product)(u / self.root)
        return result.mul_(self.weight).div_(self.root)

    def system(self, u: Tensor, product: Rows | None = None) -> Tensor:
        """``(I + W) u``; arguments as for :meth:`image`."""
        return self.image(u, product).add_(u)

    @override
    def _apply(self, vectors: Tensor) -> Tensor:
        return self.system(vectors)

    def check(self, u: Tensor, draws: Draws, tolerance: float, iterations: int) -> Solved:
        """How near to the solution u is, from one product, and what it says."""
        with exact_arithmetic(self.curvature.network), torch.no_grad():
            b, image = self.right_hand_side(draws), self.image(u)
            size = b.norm(dim=-1)
            residual = (b.sub_(u).sub_(image).norm(dim=-1) / size).double()
        one, (k, n) = torch.zeros(u.shape[1], dtype=torch.long), u.shape
        data, prior = group_sums(u, image, one), group_sums(u, u, one)
        gamma, sem = effective_dimension(data, prior, torch.tensor([n]))
        energy, converged = (data + prior)[:, 0] / n, bool((residual <= tolerance).all())
        estimate = Estimate(gamma[0], sem[0], iterations, converged, k)
        mean, error = float(energy.mean()), float(standard_error(energy))
        return Solved(u / self.root, u, image, SamplingReport(residual, iterations, converged, estimate, (mean, error)))


# -- the effective dimension -------------------------------------------------------------------------------------------


def group_sums(left: Tensor, right: Tensor, index: Tensor) -> Tensor:
    """``Σ_{p in g} left_p right_p`` for ``[k, P]`` and groups by ``index [P]``, as ``[k, G]`` float64."""
    totals = torch.zeros(len(left), int(index.max()) + 1, dtype=torch.float64, device=left.device)
    parts = [index.to(left.device).split(2**20), left.split(2**20, 1), right.split(2**20, 1)]  # few as float64
    for where, a, b in zip(*parts, strict=True):
        totals.index_add_(1, where, a.double() * b.double())
    return totals


def effective_dimension(function_space: Tensor, weight_space: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """γ of groups ``[G]`` and its standard error, from ``z_gᵀ (M z)_g`` and ``z_gᵀ A_g z_g [k, G]`` and sizes ``[G]``.

    For a single sample ``z_gᵀ (M z)_g`` can be negative: both are averaged before one is divided by the other.
    """
    k, size = len(function_space), size.to(function_space)
    value = _ratio(function_space.mean(0), weight_space.mean(0), size)
    if k == 1:
        return value, torch.full_like(value, torch.inf)
    a, b = ((total.sum(0) - total) / (k - 1) for total in (function_space, weight_space))
    return value, jackknife(_ratio(a, b, size))


def _ratio(function_space: Tensor, weight_space: Tensor, size: Tensor) -> Tensor:
    """``d a / (a + b)`` within [0, d]; a may be negative, b is not."""
    a = function_space.clamp_min(0.0)
    total = a + weight_space
    return torch.where(total > 0, size * a / torch.where(total > 0, total, 1.0), 0.0).minimum(size)
