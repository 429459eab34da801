"""The null-space step against solutions of the KKT system, dense projections and closed forms."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from laplace_plus.constraints import (
    NullSpaceOptimizer,
    Sparse,
    asymmetry,
    conservative,
    equivariant,
    null_space_gradient,
    periodic,
    project,
    value,
)
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    InputError,
    NonFiniteError,
    SelectionError,
    UnsupportedError,
)
from laplace_plus.linalg import Status


class Vector(nn.Module):
    """A network that is nothing but a vector of weights."""

    def __init__(self, n):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(n, dtype=torch.float64))

    def forward(self, x):
        return x * self.weights


class Quadratic:
    """``½ θᵀ Q θ − qᵀ θ`` subject to ``A θ = b``, with its solution."""

    def __init__(self, n=10, m=3, seed=0):
        torch.manual_seed(seed)
        root = torch.randn(n, n, dtype=torch.float64)
        self.Q, self.q = root @ root.T / n + torch.eye(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
        self.A, self.b = torch.randn(m, n, dtype=torch.float64), torch.randn(m, dtype=torch.float64)
        system = torch.cat(
            [torch.cat([self.Q, self.A.T], 1), torch.cat([self.A, torch.zeros(m, m, dtype=torch.float64)], 1)]
        )
        self.solution = torch.linalg.solve(system, torch.cat([self.q, self.b]))[:n]
        self.model = Vector(n)

    def constraint(self, model, _):
        return self.A @ model.parameters["weights"] - self.b

    def backward(self):
        weights = self.model.weights
        loss = weights @ self.Q @ weights / 2 - self.q @ weights
        loss.backward()
        return loss

    def run(self, make, steps, rate=1.0, **options):
        optimizer = NullSpaceOptimizer(make(self.model.parameters()), self.constraint, self.model, rate=rate, **options)
        for _ in range(steps):
            optimizer.zero_grad()
            self.backward()
            optimizer.step()
        return optimizer

    def error(self):
        return float((self.model.weights.detach() - self.solution).abs().max())


def mlp(sizes=(1, 8, 8, 1), seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def flat(model, of=lambda parameter: parameter):
    return torch.cat([of(parameter).detach().flatten().clone() for parameter in model.parameters()])


# -- the fixed point ---------------------------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.25)


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


def test_projection_without_violation():
    torch.manual_seed(0)
    theta, u = torch.randn(2, 12, dtype=torch.float64)
    jacobian = torch.func.jacrev(nonlinear)(theta)
    projected = null_space_gradient(nonlinear, theta, u, 0.0).detach()
    assert (jacobian @ projected).abs().max() <= 1e-8
    assert float(projected @ projected) == pytest.approx(float(u @ projected), abs=1e-8)
    torch.testing.assert_close(projected, u - torch.linalg.pinv(jacobian) @ jacobian @ u, rtol=0, atol=1e-8)


def test_corrected_gradient_moves_the_constraint_and_keeps_the_null_space():
    torch.manual_seed(1)
    theta, u = torch.randn(2, 12, dtype=torch.float64)
    jacobian, c = torch.func.jacrev(nonlinear)(theta), nonlinear(theta)
    corrected = null_space_gradient(nonlinear, theta, u, 0.3)
    torch.testing.assert_close(jacobian @ corrected, 0.3 * c, rtol=0, atol=1e-8)
    kernel = torch.eye(12, dtype=torch.float64) - torch.linalg.pinv(jacobian) @ jacobian
    torch.testing.assert_close(kernel @ corrected, kernel @ u, rtol=0, atol=1e-8)


def test_reparametrised_constraints_give_the_same_gradient():
    torch.manual_seed(2)
    theta, u = torch.randn(2, 12, dtype=torch.float64)
    mixed = torch.randn(3, 3, dtype=torch.float64)
    found = null_space_gradient(lambda t: mixed @ nonlinear(t), theta, u, 0.7)
    torch.testing.assert_close(found, null_space_gradient(nonlinear, theta, u, 0.7), rtol=0, atol=1e-8)


def test_gradients_through_the_step():
    torch.manual_seed(3)
    theta, u = (one.requires_grad_() for one in torch.randn(2, 6, dtype=torch.float64).unbind())
    rate = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t, g, r: null_space_gradient(nonlinear, t, g, r), (theta, u, rate))
    # the hypergradient: of a loss after a step, in the rate
    (slope,) = torch.autograd.grad((theta - 0.1 * null_space_gradient(nonlinear, theta, u, rate)).square().sum(), rate)
    after = [
        (theta - 0.1 * null_space_gradient(nonlinear, theta, u, 0.4 + shift)).square().sum().item()
        for shift in (-1e-5, 1e-5)
    ]
    assert float(slope) == pytest.approx((after[1] - after[0]) / 2e-5, rel=1e-6)


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


def test_redundant_and_inconsistent_constraints():
    problem = Quadratic()
    single, (A, b) = problem.constraint, (problem.A, problem.b)
    problem.constraint = lambda model, points: single(model, points).repeat(2)  # every row twice
    assert problem.run(sgd, 120).last.residual < 1e-10
    assert problem.error() <= 1e-12
    # Of rows that contradict each other, the mean is met, and the residual says so.
    problem = Quadratic()
    problem.constraint = lambda model, points: torch.cat([single(model, points) + 1, single(model, points) - 1])
    problem.constraint = lambda model, _: torch.cat([A @ model.parameters["weights"] - b + s for s in (1.0, -1.0)])
    optimizer = problem.run(sgd, 120)
    assert problem.error() <= 1e-12
    assert optimizer.last.residual == pytest.approx(math.sqrt(6), rel=1e-9)
    assert optimizer.last.violation == pytest.approx(1.0, rel=1e-9)


# -- closed forms of the constraints -----------------------------------------------------------------------------------


class Features(nn.Module):
    """Linear in ``1, sin x, cos x, x``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        return self.linear(torch.cat([torch.ones_like(x), x.sin(), x.cos(), x], 1))


def test_periodic_removes_just_the_trend():
    torch.manual_seed(0)
    net, x = Features().double(), torch.randn(6, 1, dtype=torch.float64)
    before = flat(net)
    found = project(net, periodic(2 * math.pi), x)
    expected = torch.cat([before[:3], before.new_zeros(1)])
    torch.testing.assert_close(found.state["linear.weight"][0], expected, rtol=0, atol=1e-12)
    assert found.converged and found.steps == 1 and found.violation < 1e-12 < found.before
    torch.testing.assert_close(flat(net), before, rtol=0, atol=0)  # the network stays


def test_equivariant_is_the_mean_over_the_group():
    torch.manual_seed(0)
    net, x = nn.Linear(4, 4, bias=False).double(), torch.randn(9, 4, dtype=torch.float64)
    shift = torch.roll(torch.eye(4, dtype=torch.float64), 1, 0)
    powers = [torch.linalg.matrix_power(shift, k) for k in range(4)]
    mean = sum(g.T @ net.weight.detach() @ g for g in powers) / 4
    found = project(net, equivariant(lambda x: x @ shift.T, lambda y: y @ shift.T), x)
    torch.testing.assert_close(found.state["weight"], mean, rtol=0, atol=1e-12)
    invariant = project(net, equivariant(lambda x: x @ shift.T), x).state["weight"]
    expected = sum(net.weight.detach() @ g for g in powers) / 4
    torch.testing.assert_close(invariant, expected, rtol=0, atol=1e-12)


def test_conservative_is_the_symmetric_part():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 3, bias=False).double(), torch.randn(5, 3, dtype=torch.float64)
    first = net.weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    found = project(net, conservative(2, generator), x)
    torch.testing.assert_close(found.state["weight"], (first + first.T) / 2, rtol=0, atol=1e-14)
    # one random direction at one point in each step, as in training
    constraint = conservative(1, generator)
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), constraint, net, x[:1], rate=1.0)
    for _ in range(110):
        optimizer.zero_grad()
        optimizer.step()
    torch.testing.assert_close(net.weight.detach(), (first + first.T) / 2, rtol=0, atol=1e-14)


def test_value_is_equality_constrained_least_squares():
    torch.manual_seed(0)
    net, (x, y) = nn.Linear(3, 1, bias=False).double(), (torch.randn(20, n, dtype=torch.float64) for n in (3, 1))
    fixed, wanted = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 1, dtype=torch.float64)
    system = torch.cat([torch.cat([x.T @ x, fixed.T], 1), torch.cat([fixed, fixed.new_zeros(2, 2)], 1)])
    expected = torch.linalg.solve(system, torch.cat([x.T @ y, wanted]))[:3, 0]
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), value(fixed, wanted), net, rate=2.0)
    for _ in range(110):
        optimizer.zero_grad()
        ((net(x) - y).square().sum() / 40).backward()
        optimizer.step()
    torch.testing.assert_close(net.weight.detach()[0], expected, rtol=0, atol=1e-12)


def test_asymmetry_is_the_dense_ratio_within_its_error():
    net, x = mlp((3, 16, 3)), torch.randn(40, 3, dtype=torch.float64)
    jacobians = torch.func.vmap(torch.func.jacrev(net))(x).detach()
    dense = ((jacobians - jacobians.mT).square().sum() / jacobians.square().sum()).sqrt()
    estimates = [asymmetry(net, x, n_probes=5, generator=torch.Generator().manual_seed(k)) for k in range(20)]
    scores = torch.stack([(one.value - dense) / one.sem for one in estimates])
    assert scores.mean().abs() < 3 / 20**0.5 and 0.5 < scores.std() < 1.7
    symmetric = asymmetry(lambda x: x @ (jacobians[0] + jacobians[0].T), x)
    assert symmetric.value < 1e-12 and symmetric.sem < 1e-12


# -- sparsity ----------------------------------------------------------------------------------------------------------


def test_closed_form_of_sparsity_equals_lsmr():
    torch.manual_seed(0)
    nets = [mlp((3, 6, 2)), mlp((3, 6, 2))]
    masks = {name: torch.rand(p.shape) < 0.6 for name, p in nets[0].named_parameters() if p.ndim > 1}
    closed = Sparse(masks)
    lsmr = lambda model, points: closed(model, points)  # noqa: E731  a plain function, which takes the solver
    x, gradients = torch.randn(7, 3, dtype=torch.float64), []
    for net, constraint in zip(nets, (closed, lsmr), strict=True):
        optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), constraint, net, rate=0.3)
        net(x).square().sum().backward()
        optimizer.step()
        gradients.append(flat(net, lambda p: p.grad))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)
    assert optimizer.last.iterations == 1
    torch.testing.assert_close(flat(nets[0]), flat(nets[1]), rtol=0, atol=1e-10)


def test_sparsity_follows_its_schedule():
    net = mlp((10, 20, 10))
    sparse = Sparse(0.9, steps=40, every=10)
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), sparse, net, rate=1.0, warm_up=5)
    x, shares = torch.randn(30, 10, dtype=torch.float64), []
    for _ in range(60):
        optimizer.zero_grad()
        (net(x) - x).square().mean().backward()
        optimizer.step()
        held = sum(int(mask.sum()) for mask in sparse.masks.values())
        shares.append(held / 400)
    assert shares[:15] == [0] * 15  # the warm-up, and 0 of the schedule
    for step, share in ((15, 10), (25, 20), (35, 30), (45, 40), (59, 40)):
        assert shares[step] == pytest.approx(0.9 * (1 - (1 - share / 40) ** 3), abs=1 / 400)
    assert optimizer.last.violation < 1e-3 and optimizer.last.iterations == 0
    found = project(net, sparse)
    assert sum(int((found.state[name] == 0).sum()) for name in sparse.masks) == 360
    assert all(bool((found.state[name] == 0)[mask].all()) for name, mask in sparse.masks.items())
    assert found.violation == 0 and found.converged and bool((flat(net) != 0).all())


def test_ties_and_saliency():
    net = nn.Linear(4, 4)
    nn.init.constant_(net.weight, 0.5)
    assert int((project(net, Sparse(0.25)).state["weight"] == 0).sum()) == 4  # all are equal
    scores = torch.arange(16.0).view(4, 4)
    found = project(net, Sparse(0.5, saliency=lambda parameters: {"weight": scores}))
    assert bool(((found.state["weight"] == 0) == (scores < 8)).all())
    whole = project(net, Sparse(1.0, eligible=lambda name, _: name == "bias"))
    assert bool((whole.state["bias"] == 0).all()) and bool((whole.state["weight"] == 0.5).all())
    with pytest.raises(ConfigurationError, match="scores"):
        project(net, Sparse(0.5, saliency=lambda parameters: {"weight": scores[0]}))
    with pytest.raises(ConfigurationError, match="masks"):
        project(nn.Linear(3, 3), Sparse({"weight": scores < 8}))


# -- in training -------------------------------------------------------------------------------------------------------


def periodic_problem(dtype=torch.float32):
    net, x = mlp(dtype=dtype), torch.linspace(-3, 3, 30, dtype=dtype)[:, None]
    points = torch.linspace(-6, 6, 20, dtype=dtype)[:, None]
    return net, x, points


def train(net, optimizer, x, steps, schedule=None):
    for _ in range(steps):
        optimizer.zero_grad()
        (net(x) - x.sin()).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return flat(net)


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


def test_masks_resume():
    def run(pause):
        net, x, _ = periodic_problem()
        sparse = Sparse(0.5, steps=4, every=3)
        optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), sparse, net, rate=1.0)
        train(net, optimizer, x, 4)
        if pause:
            state = copy.deepcopy(optimizer.state_dict())
            sparse = Sparse(0.5, steps=4, every=3)
            optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), sparse, net, rate=1.0)
            optimizer.load_state_dict(state)
        return train(net, optimizer, x, 4), sparse

    (straight, first), (paused, second) = run(False), run(True)
    assert bool((straight == paused).all())
    assert all(bool((first.masks[name] == mask).all()) for name, mask in second.masks.items())


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


@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_low_precision_solves_in_float32(dtype, within):
    net, x, _ = periodic_problem()
    wide = copy.deepcopy(net)
    net.to(dtype)
    gradients = []
    for one, kind in ((wide, torch.float32), (net, dtype)):
        one(x.to(kind)).square().mean().backward()
        hard = value(torch.tensor([[0.0], [2.0]], dtype=kind), torch.ones(2, 1, dtype=kind))
        optimizer = NullSpaceOptimizer(torch.optim.SGD(one.parameters(), lr=0.1), hard, one)
        optimizer.step()
        assert all(p.grad.dtype == kind for p in one.parameters())
        gradients.append(flat(one, lambda p: p.grad).float())
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < within


def test_autocast_and_no_grad():
    net, x, points = periodic_problem()
    net(x).square().mean().backward()
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), periodic(6.0), net, points[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        optimizer.step()
    assert optimizer.last.violation > 0 and bool(flat(net).isfinite().all())


def test_dictionaries_and_drawn_points():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, a, b):
            return self.net(a) + b

    net = Named()
    generator = torch.Generator().manual_seed(0)

    def points():
        return {name: torch.randn(4, 1, generator=generator, dtype=torch.float64) for name in "ab"}

    def constraint(model, batch):
        return model(batch) - model({**batch, "a": batch["a"] + 1})

    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), constraint, net, points, rate=1.0)
    seen = set()
    for _ in range(3):
        optimizer.step()
        seen.add(optimizer.last.violation)
    assert len(seen) == 3


def test_attention_is_differentiated_twice():
    torch.manual_seed(0)
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    found = project(net, equivariant(lambda x: x.flip(2)), x, steps=30)
    assert found.converged and found.violation < 1e-10


# -- projection --------------------------------------------------------------------------------------------------------


def test_projection_of_a_network():
    net, x, points = periodic_problem(torch.float64)
    found = project(net, value(x[:4], x[:4].cos()), steps=30)
    assert found.converged and found.violation < 4e-11 < found.before and found.steps > 1
    twin = mlp()
    twin.load_state_dict(found.state)
    torch.testing.assert_close(twin(x[:4]), x[:4].cos(), rtol=0, atol=1e-9)
    only = project(net, value(x[:4], x[:4].cos()), parameters="last_layer")
    assert all(torch.equal(only.state[n], p) for n, p in net.state_dict().items() if not n.startswith("4"))
    compiled = nn.DataParallel(net) if torch.cuda.is_available() else net
    assert set(project(compiled, periodic(6.0), points[:2]).state) == set(compiled.state_dict())


def test_projection_that_cannot_succeed_says_so():
    net, x, _ = periodic_problem(torch.float64)
    twice, contrary = torch.cat([x[:1], x[:1]]), torch.tensor([[1.0], [-1.0]]).double()
    with pytest.warns(ConvergenceWarning, match="not within"):
        found = project(net, value(twice, contrary))
    assert not found.converged and found.violation == pytest.approx(1.0, abs=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_bad_arguments():
    net, x, points = periodic_problem()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError):
        NullSpaceOptimizer(net, periodic(1.0), net, points)
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
    for sparsity in (0.0, 1.1, {}, {"0.weight": torch.ones(8, 1)}):
        with pytest.raises(ConfigurationError):
            Sparse(sparsity)
    for selection in (
        [torch.ones(97, dtype=torch.bool).logical_and(torch.arange(97) > 3)][0],
        {"0.bias": torch.arange(8) > 3},
    ):
        with pytest.raises(UnsupportedError):
            project(net, periodic(1.0), points, parameters=selection)


def test_bad_constraints_leave_everything_as_it_was():
    net, x, points = periodic_problem()
    net(x).square().mean().backward()
    before, gradients = flat(net), flat(net, lambda p: p.grad)
    cases = [
        (lambda model, _: 1.0, ConfigurationError),
        (lambda model, x: model(x).argmax(1), ConfigurationError),
        (lambda model, x: model(x)[:0], ConfigurationError),
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


def test_sparse_gradients_are_refused():
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    tokens = torch.tensor([0, 1])
    optimizer = NullSpaceOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), value(tokens, torch.zeros(2, 1)), net)
    net(tokens).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        optimizer.step()
