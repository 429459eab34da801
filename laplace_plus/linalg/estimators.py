"""The loop that the estimators of trace and diagonal share: batches of probes until a tolerance or a cap is met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.checks import count
from laplace_plus.linalg.arguments import check_tolerances, working_type
from laplace_plus.linalg.linear_maps import LinearMap, attach_one, require_finite
from laplace_plus.linalg.probes import Probes, draw_probes
from laplace_plus.linalg.results import Estimate, standard_error
from laplace_plus.linalg.sketches import Sketch


class Estimator(ABC):
    """An estimate that is refined by batches of products.

    The ``sample`` of each probe follows from probes and products ``[m, n]``; over the unit vectors samples sum to the
    exact result. ``operator`` is A, n × n; ``dtype`` the type in which it multiplies.

    Attributes:
        fewest: Smallest number of products.
        kind: Distribution of the probes; by default the class's own.
        wide: Type of the recurrences, at least float32.
        probes: Those used so far, ``[m, n]``.
    """

    fewest = 2
    kind: Probes = "signs"

    def __init__(
        self,
        sample: Callable[[Tensor, Tensor], Tensor],
        operator: LinearMap,
        kind: Probes | None,
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        count("n", operator.n)
        self.sample, self.operator, self.generator, self.dtype, self.device = sample, operator, generator, dtype, device
        self.kind = kind or type(self).kind
        self.wide = working_type(dtype)
        self.probes = torch.empty(0, operator.n, dtype=self.wide, device=device)

    def draw(self, m: int) -> Tensor:
        """Probes ``[m, n]`` in the type of the recurrences, rounded to that of the operator."""
        n, dtype, device = self.operator.n, self.dtype, self.device
        return draw_probes(self.kind, m, n, generator=self.generator, dtype=dtype, device=device).to(self.wide)

    def multiply(self, vectors: Tensor, *, transposed: bool = False) -> Tensor:
        """``A v`` or ``Aᵀ v``, checked for NaN, which later decompositions might hide."""
        products = self.operator.transposed(vectors) if transposed else self.operator(vectors)
        require_finite("The estimator", products)
        return products

    @abstractmethod
    def add(self, matvecs: int) -> None:
        """Spend this number of products."""

    @abstractmethod
    def estimate(self) -> tuple[Tensor, Tensor]:
        """The estimate and its standard error."""

    @abstractmethod
    def frame(self, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors v, u for which ``Σ ⟨u, A v⟩`` is the product of cotangent and estimate, with the bases held fixed."""

    def run(
        self, name: str, matvecs: int, cap: int | None, tolerance: float | None, absolute_tolerance: float
    ) -> Estimate:
        """Add batches of ``matvecs`` products until the standard error meets the tolerance, or n products are exact.

        Without a tolerance there is one batch; ``cap`` limits the products, to 20 batches by default.
        ConfigurationError for a bad tolerance or cap, or too few products; NonFiniteError for NaN in a product.
        """
        operator, n = self.operator, self.operator.n
        fix = f"{name} needs {self.fewest}, or n for the exact result."
        count("matvecs", matvecs, min(self.fewest, n), fix)
        check_tolerances(tolerance=tolerance, absolute_tolerance=absolute_tolerance)
        cap = 20 * matvecs if cap is None else cap
        count("cap", cap, matvecs)
        exact, ended = matvecs >= n, False
        while not (exact or ended):
            self.add(matvecs)
            value, sem = self.estimate()
            require_finite("The estimator", value)
            # The only synchronisation with the device, once per batch and only with a tolerance.
            met = tolerance is None or bool(sem.norm() <= torch.clamp(tolerance * value.norm(), min=absolute_tolerance))
            rest = cap - operator.matvecs
            ended = met or rest < matvecs
            # n products are exact: spend them once another batch costs as much, and before the cap forbids it
            exact = not ended and n <= rest and (operator.matvecs + matvecs >= n or rest < n + matvecs)
        if exact:
            identity = torch.eye(n, dtype=self.wide, device=self.device)
            value = self.sample(identity, self.multiply(identity)).sum(0)
            sem, met = torch.zeros_like(value), True

        def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
            return operator.parameter_pullback(*((identity, identity * cotangent) if exact else self.frame(cotangent)))

        spent = operator.matvecs
        differentiable = attach_one(value.to(self.wide), operator.tensors, pullback)
        return Estimate(differentiable, sem.to(self.wide), spent, met, probes=0 if exact else len(self.probes))


class Hutchinson(Estimator):
    """The mean of samples of independent probes."""

    samples: Tensor

    @override
    def add(self, matvecs: int) -> None:
        probes = self.draw(matvecs)
        new = self.sample(probes, self.multiply(probes))
        self.samples = torch.cat([self.samples, new]) if len(self.probes) else new
        self.probes = torch.cat([self.probes, probes])

    @override
    def estimate(self) -> tuple[Tensor, Tensor]:
        return self.samples.mean(0), standard_error(self.samples)

    @override
    def frame(self, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        return self.probes, cotangent * self.probes / len(self.probes)


class SketchEstimator(Estimator):
    """Half of the products make a sketch of the range; the others multiply its basis with A, or with its transpose."""

    fewest = 4
    transposed = False
    range: Sketch
    products: Tensor

    @override
    def add(self, matvecs: int) -> None:
        probes = self.draw(matvecs // 2)
        columns = self.multiply(probes)
        if not len(self.probes):
            self.range, self.products = Sketch(columns), columns[:0]
            new = self.range.basis
        else:
            new = self.range.extend(columns)
        self.products = torch.cat([self.products, self.multiply(new, transposed=self.transposed)])
        self.probes = torch.cat([self.probes, probes])
