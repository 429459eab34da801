"""Diffusions in parameter space under the Gauss-Newton pseudo-metric.

The Laplace approximation ``N(θ̂, (G + P₀)⁻¹)``, G the generalised Gauss-Newton matrix at θ̂, is where
``dθ = (G + P₀)^-½ dW`` ends at time 1. Here G is that of the present θ, and the noise is confined to

* the range of G (``"image"``), in which the loss changes, with the posterior's standard deviations;
* the null space of G (``"kernel"``), in which it does not, with the prior's standard deviation;
* or neither (``"full"``): the sum of both.

Roy, Miani, Ek, Hennig, Pförtner, Tatzel and Hauberg, "Reparameterization invariance in approximate Bayesian inference",
2024. A step of length h in units of the prior's standard deviations, where ``G = V Λ Vᵀ`` and P₀ is the identity:

    image:  h^½ V (Λ + 1)^-½ Vᵀ ε        kernel:  h^½ (ε − V Vᵀ ε)        full:  their sum, with one ε

The equation has no drift term. In Itô's sense, that of Euler and Maruyama's explicit scheme, it therefore leaves the
set of parameters with the same outputs. It does so at second order, even with steps in the null space. Heun's scheme,
which solves it in Stratonovich's sense, stays on that set as steps become small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from laplace_plus import checks, linalg
from laplace_plus.errors import NonFiniteError
from laplace_plus.geometry.geodesic import PathStatus
from laplace_plus.geometry.loss import LossLandscape
from laplace_plus.linalg.linear_maps import require_finite
from laplace_plus.linalg.null_space import row_space
from laplace_plus.linalg.operators import Operator

Kind = Literal["image", "kernel", "full"]
Scheme = Literal["euler_ito", "heun"]
Backend = Literal["auto", "lanczos", "svd", "lsmr"]

_WRITTEN_OUT = 2**24
"""Entries up to which a root of G is written out and decomposed: 128 MiB in float64."""


@dataclass(frozen=True)
class Diffusion:
    """Options of a diffusion.

    Args:
        kind: ``"image"``, ``"kernel"`` or ``"full"``.
        scheme: ``"euler_ito"``, or ``"heun"``, which evaluates twice per step.
        n_steps: T; a step's length is 1/T.
        rank: Largest number of directions in which G is resolved by Lanczos' method. What it leaves out gets no noise
            from ``"image"``, and the full noise of the prior from the other two kinds.
        backend: How G is decomposed: ``"lanczos"``; ``"svd"`` of its root, exact, for small problems; ``"auto"``, the
            one of these two that suits the size; or, for ``"kernel"`` only, ``"lsmr"``, which leaves nothing out.
        rtol: Eigenvalues of at most this fraction of the largest count as zero; 1e-10 in float64 and 1e-5 in float32
            by default.

    Raises:
        ConfigurationError: Unknown names, numbers out of range, or a projection where eigenvalues are needed.
    """

    kind: Kind = "image"
    scheme: Scheme = "euler_ito"
    n_steps: int = 20
    rank: int = 100
    backend: Backend = "auto"
    rtol: float | None = None

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, get_args(Kind))
        checks.choice("scheme", self.scheme, get_args(Scheme))
        # A projection by LSMR gives no eigenvalues, which the image's noise is made of.
        checks.choice("backend", self.backend, get_args(Backend)[: 4 if self.kind == "kernel" else 3])
        checks.count("n_steps", self.n_steps, 1)
        checks.count("rank", self.rank, 1)
        if self.rtol is not None:
            checks.number("rtol", self.rtol, least=0.0, most=1.0)


class NoiseField:
    """The root of a diffusion's covariance at any point, from eigenpairs of G in units of the prior's deviations.

    Args:
        landscape: The loss with its prior.
        options: Kind and backend.
        generator: Source of Lanczos' start vectors, which have to be independent of the noise.

    Raises:
        ConfigurationError: A prior precision of zero, under which noise in the null space has no scale.
    """

    def __init__(self, landscape: LossLandscape, options: Diffusion, *, generator: torch.Generator | None = None):
        checks.positive("The least prior precision of a diffusion", float(landscape.prior_precision.min()))
        self._landscape, self._options, self._generator = landscape, options, generator
        self._unit = landscape.prior_precision.rsqrt()

    def displacement(self, point: Tensor, noise: Tensor) -> Tensor:
        """The displacement in unit time for standard normal ``noise [..., P]`` at ``point [P]``, ``[..., P]``."""
        if self._options.backend == "lsmr":
            root = self._landscape.ggn(point).root() @ linalg.Diagonal(self._unit)
            projector = linalg.LSMRProjection().prepare(root, list)
            return projector.project(noise.view(-1, len(point))).value.view(noise.shape) * self._unit
        values, vectors = self.spectrum(point)
        parts = noise @ vectors.mT
        result = torch.zeros_like(noise) if self._options.kind == "image" else noise - parts @ vectors
        if self._options.kind != "kernel":
            result = result + (parts * (1 + values).rsqrt()) @ vectors
        return result * self._unit

    def spectrum(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[r]`` above the cutoff, and orthonormal eigenvectors by rows ``[r, P]``."""
        ggn = self._landscape.ggn(point)
        root = ggn.root()
        small = root.shape[0] * root.shape[1] <= _WRITTEN_OUT
        default = 1e-10 if point.dtype == torch.float64 else 1e-5
        cutoff = default if self._options.rtol is None else self._options.rtol
        if self._options.backend == "svd" or (self._options.backend == "auto" and small):
            rows = root.dense().double() * self._unit.double()
            require_finite("the curvature's product", rows)
            singular, vectors, by_rows = row_space(rows, cutoff**0.5)
            vectors = vectors @ rows if by_rows else vectors
            values = singular.square() * self._landscape.likelihood_weight
        else:
            values, vectors = self._lanczos(ggn, point)
        kept = values > cutoff * values.amax().clamp(min=0) if len(values) else values > 0
        return values[kept].to(point), vectors[kept].to(point)

    def _lanczos(self, ggn: Operator, point: Tensor) -> tuple[Tensor, Tensor]:
        """Ritz pairs of up to ``rank`` steps.

        One start vector finds one copy of a multiple eigenvalue. Where its Krylov space ends early, the search
        continues in the complement.
        """
        n = len(point)
        values, vectors = point.new_zeros(0), point.new_zeros(0, n)

        def product(v: Tensor) -> Tensor:
            result = self._unit * ggn(self._unit * v) * self._landscape.likelihood_weight
            require_finite("the curvature's product", result)
            return result

        def complement() -> Tensor:
            """A random vector orthogonal to those found."""
            v = linalg.draw_probes("gaussian", 1, n, generator=self._generator, dtype=point.dtype, device=point.device)
            return v[0] - (v[0] @ vectors.mT) @ vectors

        most = min(self._options.rank, n)
        while len(values) < most:
            start = complement()
            if len(values):
                largest = values.amax().clamp(min=0)
                if bool(product(start[None])[0].norm() <= 1e-7 * largest * start.norm()):
                    return values, vectors  # only the null space is left
            found = linalg.lanczos(product, start, most - len(values), check_symmetry=False)
            rank = int(found.rank)
            ritz, basis = torch.linalg.eigh(found.tridiagonal()[:rank, :rank])
            values, vectors = torch.cat([values, ritz]), torch.cat([vectors, basis.mT @ found.vectors[:rank]])
            if not found.converged:
                break
        return values, vectors


@dataclass(frozen=True)
class DiffusionResult:
    """Ends of diffusions.

    Attributes:
        endpoint: ``[k, P]``; NaN for one that failed.
        statuses: ``[k]`` integers, :class:`PathStatus`.
        path: The points after each step, ``[k, T, P]``; NaN behind a failure.
    """

    endpoint: Tensor
    statuses: Tensor
    path: Tensor


def diffuse(field: NoiseField, start: Tensor, noise: Tensor, *, scheme: Scheme = "euler_ito") -> DiffusionResult:
    """Follow ``dθ = field(θ) dW`` for unit time.

    Args:
        field: The covariance's square root.
        start: ``[P]``.
        noise: Standard normal numbers, ``[k, T, P]``, for T steps of k samples.
        scheme: ``"euler_ito"`` or ``"heun"``.

    Raises:
        ConfigurationError: Another scheme.
    """
    checks.choice("scheme", scheme, get_args(Scheme))
    path = torch.full_like(noise, torch.nan)
    for sample, steps in enumerate(noise / noise.shape[1] ** 0.5):
        point = start
        for number, scaled in enumerate(steps):
            try:
                step = field.displacement(point, scaled)
                if scheme == "heun":
                    step = (step + field.displacement(point + step, scaled)) / 2
            except NonFiniteError:
                break
            point = point + step
            if not bool(torch.isfinite(point).all()):
                break
            path[sample, number] = point
    statuses = torch.where(path[:, -1].isfinite().all(1), 0, int(PathStatus.NOT_FINITE))
    return DiffusionResult(path[:, -1], statuses, path)
