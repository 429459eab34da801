"""Changes of weights and modules are found as torch counts them; writes into ``.data`` are not."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ModelChangedError


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90), nn.Tanh(), nn.Linear(90, 3)).eval()
    x = torch.randn(8, 70)
    return model, x, lp.Diagonal(model, "classification", parameters="last_layer").fit([(x, torch.arange(8) % 3)])


def stepped(make):
    def change(model, x):
        optimizer = make(model.parameters())
        model(x).sum().backward()
        optimizer.step()

    return change


def assigned(model, x):
    model[0].weight.data = model[0].weight.data.clone() * 1.001


def new_parameter(model, x):
    model[3].bias = nn.Parameter(model[3].bias.detach() + 1e-3)


CHANGES = {
    "SGD": stepped(lambda p: torch.optim.SGD(p, 1e-3)),
    "Adam, one by one": stepped(lambda p: torch.optim.Adam(p, 1e-3, foreach=False)),
    "Adam, together": stepped(lambda p: torch.optim.Adam(p, 1e-3, foreach=True)),
    "load_state_dict": lambda m, x: m.load_state_dict({k: v * 1.001 for k, v in m.state_dict().items()}),
    "one entry": lambda m, x: m[0].weight.detach()[1, 1].add_(1e-3),
    "copy_": lambda m, x: m[0].weight.requires_grad_(False)[1].copy_(torch.zeros(70)),
    ".data assigned": assigned,
    "a buffer": lambda m, x: m[1].running_mean[4].add_(1e-3),
    "a new parameter": new_parameter,
    "a new module": lambda m, x: m.__setitem__(3, nn.Linear(90, 3)),
    "training": lambda m, x: m.train()(x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found(change):
    model, x, posterior = problem()
    posterior.predictive(x)
    CHANGES[change](model, x)
    for _ in range(2):
        with pytest.raises(ModelChangedError):
            posterior.predictive(x)


def test_modes_and_copies_are_accepted():
    model, x, posterior = problem()
    expected = posterior.predictive(x).mean
    for change in (model.train, lambda: model.requires_grad_(False)):
        change()
        assert torch.equal(posterior.predictive(x).mean, expected)
    for copied in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert torch.equal(copied.predictive(x).mean, expected)
    model.load_state_dict(model.state_dict())
    for changed in (posterior, copy.deepcopy(posterior)):
        with pytest.raises(ModelChangedError):
            changed.predictive(x)
