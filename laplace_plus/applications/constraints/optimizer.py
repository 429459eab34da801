"""Any optimiser of torch, under equality constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus.applications.constraints.correcting import (
    Constraint,
    Correction,
    FunctionalModel,
    Linearized,
    checked,
    rms,
)
from laplace_plus.applications.constraints.sparsity import Sparse
from laplace_plus.errors import UnsupportedError, warn
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.network import Network, exact_arithmetic


class NullSpaceOptimizer(torch.optim.Optimizer):
    """Training under ``c(θ) = 0``: gradients become ``u' = u − J⁺ (J u − γ c)`` before each step of an optimiser.

    The correction comes before the optimiser's own scaling, so that fixed points of Adam are those of the constrained
    problem. A step of plain gradient descent multiplies c by ``1 − lr γ``, to first order: lr γ = 1 is Newton's method
    on c, above 2 it diverges. Other optimisers meet c at convergence only.

    Groups and state are those of the optimiser inside: schedules, gradient scalers and closures work with either. For c
    the network runs in evaluation mode. LSMR runs in float32 at least, with seven vectors of the trained weights; an
    iteration costs about two backward passes over the points.

    Args:
        optimizer: Whose parameters the constraint moves, if the model has them and they require gradients. Its own
            weight decay would move weights off the constraint, and gives a warning; put it into the loss.
        constraint: A function ``c(model, points)``, or :class:`Sparse`, which needs no solver.
        model: The network in training.
        points: A batch for c, or a function that returns one for each step; the same in all processes.
        rate: γ: up to 1/lr for SGD; for Adam about 0.01, 1 where points are new in each step, 10 for sparsity.
        warm_up: Steps of the plain optimiser before the first correction.
        every: Correct one in so many of the steps after these.
        max_iterations: Those of LSMR in a step.
        tolerance: That of LSMR, by default 1e-6 in float32 and 1e-10 in float64. ``last`` has what it left.

    Raises:
        ConfigurationError: Numbers out of range, or no common parameters.
        UnsupportedError: LBFGS, which takes differences of gradients for curvature.

    Source: Roy, Hauberg and Krämer (2025), arXiv 2510.19634.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        constraint: Constraint,
        model: nn.Module,
        points: Any = None,
        *,
        rate: float = 0.1,
        warm_up: int = 0,
        every: int = 1,
        max_iterations: int = 50,
        tolerance: float | None = None,
    ):
        checks.number("rate", rate, least=0.0)
        for name, number, least in ("warm_up", warm_up, 0), ("every", every, 1), ("max_iterations", max_iterations, 1):
            checks.count(name, number, least)
        if isinstance(optimizer, torch.optim.LBFGS):
            what = "A corrected gradient is not that of any loss, which LBFGS takes it for."
            raise UnsupportedError(what, expected="such as SGD or Adam", got="LBFGS")
        if any(group.get("weight_decay") for group in optimizer.param_groups) and not isinstance(constraint, Sparse):
            warn("The optimiser's weight decay moves weights off the constraint. Put it into the loss.")
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._network = Network(model, lambda _, parameter: id(parameter) in trained, lambda outputs: outputs)
        self.optimizer, self.constraint, self.points = optimizer, constraint, points
        self.rate, self.warm_up, self.every = rate, warm_up, every
        self.max_iterations, self.tolerance, self.count = max_iterations, tolerance, 0
        self.last: Correction | None = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state  # no copies: schedules change them

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Correct the gradients in place, after the closure if there is one, and let the optimiser take its step.

        Raises:
            NonFiniteError: The constraint, its Jacobian or a gradient is not finite.
            ConfigurationError: The constraint has no values, does not depend on the weights, or does not fit them.
        """

        def corrected() -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            self._correct()
            return loss

        found = self.optimizer.step(corrected)
        self.count += 1
        return found

    def trained(self) -> dict[str, Tensor]:
        """The parameters that the constraint moves, by their names in the model."""
        known = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        return {name: p for name, p in self._network.model.named_parameters() if id(p) in known}

    def values(self) -> Tensor:
        """The constraint at the present weights, with derivatives."""
        points = self.points() if callable(self.points) else self.points
        with exact_arithmetic(self._network), torch.enable_grad(), differentiable_kernels(self._network.model):
            return checked(self.constraint(FunctionalModel(self._network, self.trained()), points))

    def _correct(self) -> None:
        self.last, number = None, self.count - self.warm_up
        if number < 0 or number % self.every:
            return
        parameters = self.trained()
        if any(p.grad is not None and p.grad.layout != torch.strided for p in parameters.values()):
            what, fix = "A gradient is sparse, and its correction is not.", "Make embeddings with sparse=False."
            raise UnsupportedError(what, expected="dense gradients", fix=fix)
        if isinstance(self.constraint, Sparse):
            self.last = self.constraint.correct(parameters, number, self.rate)
            return
        with exact_arithmetic(self._network):
            linearized = Linearized(self.values(), [*parameters.values()], self._network.dtype)
            self.last = self._solve(linearized, [*parameters.values()])

    @torch.no_grad()
    def _solve(self, linearized: Linearized, parameters: list[Tensor]) -> Correction:
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
        gradient = torch.cat([one.flatten().to(self._network.dtype) for one in gradients])
        right = linearized.push(gradient).sub_(linearized.value, alpha=self.rate)
        found = linearized.solve(right, self.max_iterations, self.tolerance)
        parts = gradient.sub_(found.value).split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if parameter.grad is None and bool(part.any()):
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))
        return Correction(rms(linearized.value), float(found.misfit), int(found.iterations), found.status)

    @override
    def state_dict(self) -> dict[str, Any]:
        """That of the optimiser inside, with the count of steps, and the masks of :class:`Sparse`."""
        own: dict[str, Any] = {"count": self.count}
        if isinstance(self.constraint, Sparse):
            own |= {"masks": self.constraint.masks, "held": self.constraint.held}
        return {**self.optimizer.state_dict(), "null_space": own}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; that of a plain optimiser counts as no step yet."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        own = state_dict.get("null_space", {"count": 0})
        self.count, self.last = own["count"], None
        if isinstance(self.constraint, Sparse) and "masks" in own:
            self.constraint.masks, self.constraint.held = dict(own["masks"]), own["held"]

    @override
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # torch's own keeps three entries
