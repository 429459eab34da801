"""The null-space step against solutions of the KKT system and dense projections, and in training."""

import copy
import math
import warnings

import pytest
import torch
from constraints.networks import Quadratic, Vector, flat, mlp, periodic_problem, sgd, train
from torch import nn

from laplace_plus.applications.constraints import (
    NullSpaceOptimizer,
    Sparse,
    conservative,
    periodic,
    project,
    value,
)
from laplace_plus.errors import ConfigurationError, InputError, NonFiniteError, SelectionError, UnsupportedError
from laplace_plus.linalg import Status

# -- the fixed point ---------------------------------------------------------------------------------------------------


@pytest.mark.quick("nesterov")
@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (sgd, 120),
        (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.4, nesterov=True), 120),
        pytest.param(lambda p: torch.optim.Adam(p, lr=0.01), 3000, marks=pytest.mark.slow),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), 2000, marks=pytest.mark.slow),
    ],
    ids=["sgd", "nesterov", "adam", "sgd 2000"],
)
def test_training_ends_at_the_kkt_point(make, steps):
    problem = Quadratic()
    optimizer = problem.run(make, steps)
    assert problem.error() <= 1e-12
    assert optimizer.last.violation <= 1e-12 and optimizer.last.residual <= 1e-12
    assert optimizer.last.status is Status.CONVERGED and optimizer.last.iterations <= 3


@pytest.mark.slow
def test_adam_comes_after_the_correction():
    # The other way round the constraint is met, and the optimum of the constrained problem is not.
    problem = Quadratic()
    optimizer = problem.run(lambda p: torch.optim.Adam(p, lr=0.03), 250)
    assert optimizer.last.violation < 1e-4 and problem.error() < 1e-3


def test_constraint_falls_by_its_rate():
    problem = Quadratic()
    optimizer = problem.run(lambda p: torch.optim.SGD(p, lr=0.1), 1, rate=2.0)
    before = optimizer.last.violation
    optimizer.zero_grad()
    problem.backward()
    optimizer.step()
    assert optimizer.last.violation == pytest.approx(0.8 * before, rel=1e-10)
    newton = Quadratic()
    assert newton.run(lambda p: torch.optim.SGD(p, lr=0.1), 2, rate=10.0).last.violation < 1e-13


# -- the corrected gradient --------------------------------------------------------------------------------------------


def nonlinear(weights):
    return torch.stack([weights.square().sum() - 1, weights[0] * weights[1] + weights[2].sin(), weights.exp().sum()])


def corrected(function, theta, gradient, rate):
    """The gradient of weights θ after a correction towards ``function(θ) = 0``."""
    net = Vector(len(theta))
    net.load_state_dict({"weights": theta})
    net.weights.grad = gradient.clone()
    constraint = lambda model, _: function(model.parameters["weights"])  # noqa: E731
    NullSpaceOptimizer(sgd(net.parameters()), constraint, net, rate=rate).step()
    return net.weights.grad


def test_corrected_gradient_moves_the_constraint_and_keeps_the_null_space():
    torch.manual_seed(1)
    theta, u = torch.randn(2, 12, dtype=torch.float64)
    jacobian, c = torch.func.jacrev(nonlinear)(theta), nonlinear(theta)
    kernel = torch.eye(12, dtype=torch.float64) - torch.linalg.pinv(jacobian) @ jacobian
    for rate in (0.0, 0.3):
        found = corrected(nonlinear, theta, u, rate)
        torch.testing.assert_close(jacobian @ found, rate * c, rtol=0, atol=1e-8)
        torch.testing.assert_close(kernel @ found, kernel @ u, rtol=0, atol=1e-8)
    mixed = torch.randn(3, 3, dtype=torch.float64)  # the same constraint in other words
    torch.testing.assert_close(corrected(lambda t: mixed @ nonlinear(t), theta, u, 0.3), found, rtol=0, atol=1e-8)


def test_optimizer_writes_the_dense_correction():
    net, x = mlp(), torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    net(x).square().sum().backward()
    u, names = flat(net, lambda p: p.grad), [name for name, _ in net.named_parameters()]

    def outputs(*tensors):
        moved = torch.func.functional_call(net, dict(zip(names, tensors, strict=True)), (torch.cat([x + 2, x]),))
        return moved[:5] - moved[5:]

    parts = torch.func.jacrev(outputs, tuple(range(len(names))))(*net.parameters())
    jacobian = torch.cat([part.reshape(5, -1) for part in parts], 1).detach()
    c = outputs(*net.parameters()).detach().flatten()
    expected = u - torch.linalg.pinv(jacobian) @ (jacobian @ u - 0.3 * c)
    optimizer = NullSpaceOptimizer(sgd(net.parameters()), periodic(2.0), net, x, rate=0.3, tolerance=1e-13)
    before = flat(net)
    optimizer.step()
    torch.testing.assert_close(flat(net, lambda p: p.grad), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(flat(net), before - 0.25 * expected, rtol=0, atol=1e-9)
    assert optimizer.last.violation == pytest.approx(float(c.square().mean().sqrt()), rel=1e-12)


# -- in training -------------------------------------------------------------------------------------------------------


def test_warm_up_and_every():
    reference, x, points = periodic_problem()
    net = copy.deepcopy(reference)
    plain = torch.optim.Adam(reference.parameters(), lr=1e-2)
    inner = torch.optim.Adam(net.parameters(), lr=1e-2)
    optimizer = NullSpaceOptimizer(inner, periodic(6.0), net, points, warm_up=3, every=2)
    corrected = []
    for step in range(7):
        weights = train(net, optimizer, x, 1)
        expected = train(reference, plain, x, 1)
        corrected.append(optimizer.last is not None)
        assert bool((weights == expected).all()) == (step < 3)
    assert corrected == [False, False, False, True, False, True, False]


def test_closures_schedules_and_either_optimizer():
    runs = []
    for scheduled, closed in ((False, False), (True, False), (False, True)):
        net, x, points = periodic_problem()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = NullSpaceOptimizer(inner, periodic(6.0), net, points, rate=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer if scheduled else inner, 2)
        if not closed:
            runs.append(train(net, optimizer, x, 5, schedule))
            continue

        def closure(net=net, x=x, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (net(x) - x.sin()).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            assert float(optimizer.step(closure).detach()) > 0
            schedule.step()
        runs.append(flat(net))
        assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert bool((runs[0] == runs[1]).all()) and bool((runs[0] == runs[2]).all())


def test_training_resumes_to_the_bit():
    def build(state=None):
        net, x, points = periodic_problem()
        inner = torch.optim.Adam(net.parameters(), lr=1e-2)
        optimizer = NullSpaceOptimizer(inner, periodic(6.0), net, points, warm_up=4)
        if state is not None:
            net.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        return net, optimizer, x

    net, optimizer, x = build()
    train(net, optimizer, x, 3)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    expected = train(net, optimizer, x, 4)
    net, optimizer, x = build(saved)
    assert bool((train(net, optimizer, x, 4) == expected).all()) and optimizer.last is not None
    assert optimizer.optimizer.param_groups is optimizer.param_groups
    # from a plain optimiser's state the warm-up starts anew
    plain = torch.optim.Adam(net.parameters(), lr=1e-2)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.count == 0
    twin = copy.deepcopy(optimizer)
    assert twin.rate == optimizer.rate and twin.param_groups is twin.optimizer.param_groups


def test_frozen_parameters_groups_and_missing_gradients():
    net, x, points = periodic_problem(torch.float64)
    net[0].requires_grad_(False)
    other = nn.Parameter(torch.zeros(3))  # not the model's
    groups = [{"params": net[2].parameters(), "lr": 0.1}, {"params": [*net[4].parameters(), net[0].weight, other]}]
    optimizer = NullSpaceOptimizer(torch.optim.SGD(groups, lr=0.2), periodic(6.0), net, points, rate=5.0, tolerance=0.0)
    first, before = flat(net[0]), optimizer.values().detach()
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()  # without any gradient of a loss, only towards the constraint
    assert bool((flat(net[0]) == first).all()) and net[0].weight.grad is None and other.grad is None
    assert net[4].weight.grad is not None
    assert float(optimizer.values().detach().norm()) < float(before.norm())
    assert set(optimizer.trained()) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    optimizer.add_param_group({"params": [net[0].bias.requires_grad_()], "lr": 0.3})
    assert "0.bias" in optimizer.trained() and len(optimizer.optimizer.param_groups) == 3


def test_model_stays_in_training_mode_with_its_statistics():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    x = torch.randn(20, 1)
    net(x).square().mean().backward()
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), periodic(1.0), net, x)
    violations = []
    for _ in range(2):
        violations.append(float(optimizer.values().detach().norm()))
    optimizer.step()
    assert violations[0] == violations[1]  # no dropout, no batch statistics
    assert all(module.training for module in net.modules())
    assert all(bool((buffers[name] == buffer).all()) for name, buffer in net.named_buffers())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_bad_arguments():
    net, x, points = periodic_problem()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    for options in ({"rate": -1.0}, {"rate": math.nan}, {"every": 0}, {"warm_up": -1}, {"max_iterations": 0}):
        with pytest.raises(ConfigurationError):
            NullSpaceOptimizer(inner, periodic(1.0), net, points, **options)
    with pytest.raises(SelectionError):
        NullSpaceOptimizer(inner, periodic(1.0), mlp(seed=1), points)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        NullSpaceOptimizer(torch.optim.LBFGS(net.parameters()), periodic(1.0), net, points)
    with pytest.warns(UserWarning, match="weight decay"):
        NullSpaceOptimizer(torch.optim.AdamW(net.parameters()), periodic(1.0), net, points)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NullSpaceOptimizer(torch.optim.AdamW(net.parameters()), Sparse(0.5), net)
    for sparsity in (0.0, 1.1, {}):
        with pytest.raises(ConfigurationError):
            Sparse(sparsity)
    for selection in (torch.arange(97) > 3, {"0.bias": torch.arange(8) > 3}):
        with pytest.raises(UnsupportedError):
            project(net, periodic(1.0), points, parameters=selection)


def test_bad_constraints_leave_everything_as_it_was():
    net, x, points = periodic_problem()
    net(x).square().mean().backward()
    before, gradients = flat(net), flat(net, lambda p: p.grad)
    cases = [
        (lambda model, x: model(x).argmax(1), ConfigurationError),
        (lambda model, x: model(x).detach(), ConfigurationError),
        (lambda model, x: net(x).detach(), ConfigurationError),
        (lambda model, x: model(x) / 0, NonFiniteError),
        (lambda model, x: model(x.repeat(1, 2)), InputError),
        (value(x, x[:, 0]), ConfigurationError),
        (conservative(), ConfigurationError),
    ]
    for constraint, error in cases:
        given = points[:, 0] if isinstance(constraint, conservative) else points
        optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), constraint, net, given)
        with pytest.raises(error):
            optimizer.step()
        assert bool((flat(net) == before).all()) and bool((flat(net, lambda p: p.grad) == gradients).all())
    net[0].weight.grad[0] = math.nan
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), periodic(1.0), net, points)
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert bool((flat(net) == before).all())
