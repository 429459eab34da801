"""Any optimiser of torch under equality constraints, and trained networks moved onto one.

With the loss gradient u, the constraint ``c(θ)``, its Jacobian J and a rate γ, gradients become
``u' = u − J⁺ (J u − γ c(θ))``. Where the constraint can be met, ``J u' = γ c``. What u has in the null space of J
stays, and ``u' = 0`` is the condition of Karush, Kuhn and Tucker. J is only multiplied with.

Source: Roy, Hauberg and Krämer (2025), "Matrix-free least squares solvers: values, gradients, and what to do with
them", arXiv 2510.19634.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from laplace_plus import checks
from laplace_plus._progress import progress_bar
from laplace_plus.applications.constraints.constraints import Constraint, Correction, FunctionalModel, Sparse
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, UnsupportedError, warn
from laplace_plus.linalg import lsmr
from laplace_plus.network.differentiability import differentiable_kernels
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.network.selection import Selection, select

_Map = Callable[[Tensor], Tensor]


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
            ConfigurationError: The constraint does not depend on the weights, or does not fit them.
        """

        def corrected() -> Any:
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            number = self.count - self.warm_up
            is_due = number >= 0 and number % self.every == 0
            self.last = self._corrected(self.trained(), number) if is_due else None
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
            return self.constraint(FunctionalModel(self._network, self.trained()), points)

    def _corrected(self, named: dict[str, Tensor], number: int) -> Correction:
        """Write ``u − J⁺ (J u − γ c)`` into the gradients."""
        if isinstance(self.constraint, Sparse):
            return self.constraint.correct(named, number, self.rate)
        parameters = [*named.values()]
        with exact_arithmetic(self._network), torch.no_grad():
            dtype = self._network.dtype
            gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
            gradient = torch.cat([one.flatten().to(dtype) for one in gradients])
            value, push, pull = _linearized(self.values(), parameters, dtype)
            right = push(gradient).sub_(value, alpha=self.rate)
            limits: Any = {"atol": self.tolerance, "btol": self.tolerance, "max_iterations": self.max_iterations}
            found = lsmr(push, pull, right, n=len(gradient), **limits)
            checks.finite("A correction", found.value, "Look for NaN and infinity in c, J and the loss's gradient.")
            parts = gradient.sub_(found.value).split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.grad is None and bool(part.any()):
                    parameter.grad = torch.empty_like(parameter)
                if parameter.grad is not None:
                    parameter.grad.copy_(part.view_as(parameter))
        return Correction(_rms(value), float(found.misfit), int(found.iterations), found.status)

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


@torch.enable_grad()
def _linearized(values: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, _Map, _Map]:
    """``c [m]``, and products with its Jacobian from one graph: ``J v`` is the derivative of ``Jᵀ w`` in w."""
    values, sizes = values.flatten(), [parameter.numel() for parameter in parameters]
    cotangent, pulled = torch.zeros_like(values).requires_grad_(values.requires_grad), list[Tensor]()
    if values.requires_grad:
        options: dict[str, bool] = {"create_graph": True, "materialize_grads": True}
        pulled = [*torch.autograd.grad(values, parameters, cotangent, **options)]
    depends = [one.requires_grad for one in pulled]
    if not any(depends):
        what, fix = "The constraint does not depend on the weights.", "Use the model that the constraint is given."
        raise ConfigurationError(what, expected="a function of the weights that are trained", fix=fix)

    def push(tangent: Tensor) -> Tensor:
        parts = zip(pulled, tangent.split(sizes), depends, strict=True)
        pairs = [(one, part.view_as(one).to(one.dtype)) for one, part, used in parts if used]
        outputs, tangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, cotangent, tangents, retain_graph=True)[0].to(dtype)

    def pull(weights: Tensor) -> Tensor:
        options = {"retain_graph": True, "materialize_grads": True}
        found = torch.autograd.grad(values, parameters, weights.to(values.dtype), **options)
        return torch.cat([part.flatten().to(dtype) for part in found])

    return values.detach().to(dtype), push, pull


def _rms(values: Tensor) -> float:
    """The root mean square."""
    return float(values.detach().square().mean().sqrt())


class Projection(NamedTuple):
    """A state on a constraint, for ``load_state_dict``; the root mean squares of c there and before; steps taken."""

    state: dict[str, Any]
    violation: float
    before: float
    steps: int
    converged: bool


def project(
    model: nn.Module,
    constraint: Constraint,
    points: Any = None,
    *,
    steps: int = 20,
    parameters: Selection = "all",
    tolerance: float | None = None,
    progress: bool = False,
) -> Projection:
    """Weights near a trained network's that meet a constraint; the network itself stays as it is.

    The steps of Gauss and Newton, ``θ ← θ − J⁺ c``, are halved until c falls. Where c is affine, one step gives the
    nearest weights of all. For :class:`Sparse` the held weights become zero.

    Args:
        model: The trained network; a copy of it is moved.
        constraint: ``c(model, points)``; what it draws at random is drawn once.
        points: A batch, or a function that returns one, called once.
        steps: At most so many.
        parameters: Which may move, as whole tensors; see :mod:`laplace_plus.network.selection`.
        tolerance: For the root mean square of c; by default 2e-5 in float32 and 4e-11 in float64, ``ε^⅔``.
        progress: Whether to show a progress bar.

    Warns:
        ConvergenceWarning: The tolerance is not met: no step makes c smaller, or the steps are used up.

    Raises:
        LaplacePlusError: As :class:`NullSpaceOptimizer` and its steps.
    """
    checks.count("steps", steps, 1)
    twin = copy.deepcopy(model)
    named, selected = dict(twin.named_parameters()), select(twin, parameters)
    if any(item.mask is not None or item.name not in named for item in selected):
        what, expected = "Parts of parameters, or single uses of tied ones, cannot move alone.", "whole tensors"
        raise UnsupportedError(what, expected=expected, fix="Freeze entries by a constraint on them.")
    moving = [named[item.name] for item in selected]
    for parameter in named.values():
        parameter.grad = None
        parameter.requires_grad_(any(parameter is one for one in moving))
    points = points() if callable(points) else points
    points = constraint.draw(points) if hasattr(constraint, "draw") else points
    inside = torch.optim.SGD(moving, lr=1.0)
    optimizer = NullSpaceOptimizer(inside, constraint, twin, points, rate=1.0, max_iterations=10_000)
    if isinstance(constraint, Sparse) and constraint.held < constraint.sparsity:
        constraint.choose(optimizer.trained(), constraint.sparsity)
    if tolerance is None:
        tolerance = 0.0 if isinstance(constraint, Sparse) else max(torch.finfo(p.dtype).eps for p in moving) ** (2 / 3)
    before = violation = _rms(optimizer.values())
    taken = 0
    for _ in progress_bar(range(steps), enabled=progress, description="project"):
        if violation <= tolerance:
            break
        old = [p.detach().clone() for p in moving]
        optimizer.zero_grad()
        optimizer.step()
        with torch.no_grad():
            for left in reversed(range(10)):
                if (now := _rms(optimizer.values())) < violation:
                    break
                for parameter, origin in zip(moving, old, strict=True):
                    parameter.lerp_(origin, 0.5 if left else 1.0)
        if not now < violation:
            break
        violation, taken = now, taken + 1
    if violation > tolerance:
        what = f"The constraint is {violation:.2g} after {taken} steps, not within {tolerance:.2g}."
        warn(f"{what} It may not be possible to meet it.", ConvergenceWarning)
    return Projection(twin.state_dict(), violation, before, taken, converged=violation <= tolerance)
