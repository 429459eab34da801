"""Sparsity on a schedule against the solver, and its masks."""

import pytest
import torch
from constraints.networks import flat, mlp
from torch import nn

from laplace_plus.applications.constraints import NullSpaceOptimizer, Sparse, project
from laplace_plus.errors import ConfigurationError


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
    with pytest.raises(ConfigurationError, match="saliency"):
        project(net, Sparse(0.5, saliency=lambda parameters: {"weight": scores[0]}))
    with pytest.raises(ConfigurationError, match="trained parameter"):
        project(nn.Linear(3, 3), Sparse({"weight": scores < 8}))
