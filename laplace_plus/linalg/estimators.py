"""The loop that the estimators of trace and diagonal share: batches of probes until a tolerance or a cap is met."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from laplace_plus.linalg.arguments import require_count, require_tolerance, working_type
from laplace_plus.linalg.linear_maps import LinearMap, attach_one, require_finite
from laplace_plus.linalg.probes import Probes, draw_probes
from laplace_plus.linalg.results import Estimate, standard_error


class Estimator(ABC):
    """An estimate that is refined by batches of products.

    Args:
        operator: A, n × n.
        kind: Distribution of the probes; the class's own by default.
        generator: Source of the randomness.
        dtype: Type in which the operator multiplies.
        device: Device of the vectors.

    Attributes:
        fewest: Smallest number of products.
        kind: Distribution of the probes.
        wide: Type of the recurrences, at least float32.
        probes: Those used so far, ``[m, n]``.
        samples: One value for each probe.
    """

    fewest = 2
    kind: Probes = "signs"

    def __init__(
        self,
        operator: LinearMap,
        kind: Probes | None,
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.operator, self.generator, self.dtype, self.device = operator, generator, dtype, device
        self.kind = kind or type(self).kind
        self.wide = working_type(dtype)
        self.probes = torch.empty(0, operator.n, dtype=self.wide, device=device)
        self.samples = torch.empty(0, device=device)

    def draw(self, count: int) -> Tensor:
        """Probes ``[count, n]`` in the type of the recurrences, rounded to that of the operator."""
        n, dtype, device = self.operator.n, self.dtype, self.device
        return draw_probes(self.kind, count, n, generator=self.generator, dtype=dtype, device=device).to(self.wide)

    def multiply(self, vectors: Tensor) -> Tensor:
        """``A v``, checked for NaN, which later decompositions might hide."""
        products = self.operator(vectors)
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


class Hutchinson(Estimator):
    """The mean of samples of independent probes."""

    @abstractmethod
    def sample(self, probes: Tensor, products: Tensor) -> Tensor:
        """One sample for each probe."""

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


def check_budget(
    name: str,
    n: int,
    matvecs: int,
    fewest: int,
    cap: int | None,
    tolerance: float | None,
    absolute_tolerance: float,
) -> int:
    """Check the arguments of an estimator; the cap, 20 ``matvecs`` by default.

    Raises:
        ConfigurationError: A bad size, tolerance or cap, or too few products for the method ``name``.
    """
    require_count("n", n, 1)
    require_count("matvecs", matvecs, min(fewest, n), f"{name} needs {fewest}, or n for the exact result.")
    require_tolerance(tolerance=tolerance, absolute_tolerance=absolute_tolerance)
    cap = 20 * matvecs if cap is None else cap
    require_count("cap", cap, matvecs)
    return cap


def run_estimator(
    estimator: Estimator,
    matvecs: int,
    cap: int,
    tolerance: float | None,
    absolute_tolerance: float,
    exact: Callable[[Tensor], Tensor],
) -> Estimate:
    """Add batches of products until the standard error meets the tolerance, or until n products give the exact result.

    Args:
        estimator: The estimator, without samples.
        matvecs: Products per batch.
        cap: Limit on the number of products.
        tolerance: Relative tolerance; None for one batch.
        absolute_tolerance: An error that is small enough in any case.
        exact: The exact result from the rows ``[n, n]`` of Aᵀ.

    Raises:
        NonFiniteError: A product is NaN or infinite.
    """
    operator, n = estimator.operator, estimator.operator.n
    if matvecs >= n:
        return _exact(estimator, exact)
    while True:
        estimator.add(matvecs)
        value, sem = estimator.estimate()
        require_finite("The estimator", value)
        # The only synchronisation with the device, once per batch and only with a tolerance.
        met = tolerance is None or bool(sem.norm() <= torch.clamp(tolerance * value.norm(), min=absolute_tolerance))
        spent = operator.matvecs
        if met or spent + min(matvecs, n) > cap:
            break
        # n products are exact: spend them once another batch costs as much, and before the cap forbids it
        if n <= cap - spent and (spent + matvecs >= n or cap - spent < n + matvecs):
            return _exact(estimator, exact)

    def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
        return operator.parameter_pullback(*estimator.frame(cotangent))

    matvecs = operator.matvecs
    value = attach_one(value.to(estimator.wide), operator.tensors, pullback)
    return Estimate(value, sem.to(estimator.wide), matvecs, met, probes=len(estimator.probes))


def _exact(estimator: Estimator, exact: Callable[[Tensor], Tensor]) -> Estimate:
    """The exact result from n products."""
    operator = estimator.operator
    identity = torch.eye(operator.n, dtype=estimator.dtype, device=estimator.device)
    value = exact(operator(identity)).to(estimator.wide, copy=True)
    require_finite("The estimator", value)

    def pullback(cotangent: Tensor) -> tuple[Tensor, ...]:
        return operator.parameter_pullback(identity, identity * cotangent)

    matvecs = operator.matvecs
    return Estimate(attach_one(value, operator.tensors, pullback), torch.zeros_like(value), matvecs, True)
