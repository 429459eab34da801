"""Constraints against closed forms and dense numbers, and networks that are projected onto them."""

import math

import pytest
import torch
from constraints.networks import flat, mlp, periodic_problem
from torch import nn

from laplace_plus.applications.constraints import (
    NullSpaceOptimizer,
    Sparse,
    asymmetry,
    conservative,
    equivariant,
    periodic,
    project,
    value,
)
from laplace_plus.errors import ConfigurationError, ConvergenceWarning

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


def test_attention_is_differentiated_twice():
    torch.manual_seed(0)
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 2)).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    found = project(net, equivariant(lambda x: x.flip(2)), x, steps=30)
    assert found.converged and found.violation < 1e-10


# -- sparsity ---------------------------------------------------------------------------------------------------------


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


def test_ties_and_masks():
    net = nn.Linear(4, 4)
    nn.init.constant_(net.weight, 0.5)
    assert int((project(net, Sparse(0.25)).state["weight"] == 0).sum()) == 4  # all are equal
    mask = torch.arange(16).view(4, 4) < 8
    assert torch.equal(project(net, Sparse({"weight": mask})).state["weight"] == 0, mask)
    with pytest.raises(ConfigurationError, match="trained parameter"):
        project(nn.Linear(3, 3), Sparse({"weight": mask}))
