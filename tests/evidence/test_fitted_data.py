"""Data that are as many as those of the fit, and others."""

from __future__ import annotations

import pytest
import torch
from leave_one_out_problems import LIKELIHOODS, chunks, problem
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import DataError


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_as_many_other_data_are_told_by_what_they_say(name, dtype):
    """Before leverages are looked at; while other batches of the same data, in another order, are welcome."""
    net, x, y = problem(name)
    x, y = x.to(dtype), y.to(dtype) if y.is_floating_point() else y
    posterior = lp.Full(net.to(dtype), LIKELIHOODS[name], prior_precision=10.0).fit([(x, y)])
    for data in ([(x, y.roll(1, 0))], [(x + 5, y)], [(torch.cat([x[:15], x[:1]]), torch.cat([y[:15], y[:1]]))]):
        with pytest.raises(DataError, match="not the data that the posterior was fitted to.*log-likelihood"):
            lp.leave_one_out(posterior, data)
        for options in ({"method": "leave_one_out", "training_prior_precision": 10.0}, {"evidence": "tangent"}):
            with pytest.raises(DataError, match="not the data that the posterior was fitted to.*log-likelihood"):
                posterior.fit_prior_precision(data=data, **options)
    assert float(posterior.prior_precision) == 10.0
    turned = chunks(x.flip(0), y.flip(0), 1, 5, 10)
    torch.testing.assert_close(lp.leave_one_out(posterior, turned).nll(), lp.leave_one_out(posterior).nll())


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_data_on_any_scale(dtype, scale):
    """Squared errors have the scale of the targets, and may be all but zero."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 2)).to(dtype)
    with torch.no_grad():
        net[2].weight *= scale
        net[2].bias *= scale
    x = torch.randn(64, 4, dtype=dtype)
    for error in (0.0, 1e-3, 1.0):
        y = net(x).detach() + error * scale * torch.randn(64, 2, dtype=dtype)
        posterior = lp.Full(net, lp.Gaussian(scale), parameters="last_layer").fit([(x, y)])
        lp.leave_one_out(posterior, chunks(x, y, 1, 30, 33))
        with pytest.raises(DataError, match="not the data"):
            lp.leave_one_out(posterior, [(x, y.roll(1, 0))])


def test_the_data_are_compared_before_leverages():
    """A leverage of one is not what is wrong with data that are not those of the fit."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(3, (30,))
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    posterior = lp.Full(net, "classification", prior_precision=1e-2).fit([(x, y)])
    assert float(lp.leave_one_out(posterior).leverages.max()) < 1
    with pytest.raises(DataError, match="not the data that the posterior was fitted to"):
        lp.leave_one_out(posterior, [(x + 5, y)])
