"""Changes of the weights are found without reading all of them, and what stays as it was is not refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ModelChangedError
from laplace_plus.network.network import Network


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
    "Adam, fused": stepped(lambda p: torch.optim.Adam(p, 1e-3, fused=True)),
    "load_state_dict": lambda m, x: m.load_state_dict({k: v * 1.001 for k, v in m.state_dict().items()}),
    "one entry": lambda m, x: m[0].weight.detach()[1, 1].add_(1e-3),
    "copy_": lambda m, x: m[0].weight.requires_grad_(False)[1].copy_(torch.zeros(70)),
    ".data assigned": assigned,
    ".data scaled": lambda m, x: m[0].weight.data.mul_(1.001),
    ".data of a small tensor": lambda m, x: m[3].weight.data[1, 1].add_(1e-3),
    "NumPy": lambda m, x: m[0].weight.detach().numpy().__imul__(1.001),
    "a buffer": lambda m, x: m[1].running_mean.data[4].add_(1e-3),
    "a new parameter": new_parameter,
    "a new module": lambda m, x: m.__setitem__(3, nn.Linear(90, 3)),
    "training": lambda m, x: m.train()(x),
    "an option": lambda m, x: setattr(m[1], "eps", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_found(change):
    model, x, posterior = problem()
    posterior.predictive(x)
    CHANGES[change](model, x)
    for _ in range(2):
        with pytest.raises(ModelChangedError):
            posterior.predictive(x)


@pytest.mark.parametrize("make", [lambda: nn.LeakyReLU(0.01), lambda: nn.Hardtanh(), lambda: nn.Softplus()])
def test_an_option_that_is_set_in_place_is_found(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), make(), nn.Linear(6, 3)).eval()
    x = torch.randn(40, 2)
    posterior = lp.KFAC(model, "classification").fit([(x, torch.arange(40) % 3)])
    posterior.predictive(x)
    name = next(name for name in ("negative_slope", "max_val", "beta") if hasattr(model[1], name))
    setattr(model[1], name, 0.9)
    for _ in range(2):
        with pytest.raises(ModelChangedError, match="other modules, options or tensors"):
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


class Strange(nn.Module):
    """Buffers of other layouts, types and orders, and with numbers that are not equal to themselves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("mask", torch.tensor([float("nan"), float("inf"), -0.0]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("turns", torch.tensor([1 + 2j]))
        self.register_buffer("eight", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("large", torch.randn(4, 40, 40).to(torch.bfloat16).permute(2, 0, 1))
        with torch.inference_mode():
            self.register_buffer("inference", torch.randn(3))

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("name", dict(Strange().named_buffers()))
def test_strange_buffers(name):
    model = Strange()
    network = Network(model, "all", lambda raw: raw)
    before = network.mark()
    assert before == network.mark()
    tensor = dict(model.named_buffers())[name]
    if tensor.layout != torch.strided:
        tensor.values().data[1] = 7.0
    else:
        with torch.inference_mode(tensor.is_inference()):
            tensor.data[-1] = 1 - tensor.data[-1].to(torch.float32 if tensor.itemsize < 4 else tensor.dtype)
    assert before != network.mark()
