"""Posteriors know what their network computed, and are refused to one that computes something else."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError, ModelChangedError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).eval()


def to_relu(model):
    model[2] = nn.ReLU()


def to_another_eps(model):
    model[1].eps = 0.5


def to_another_forward(model):
    forward = model[2].forward
    model[2].forward = lambda x: forward(2 * x)


CHANGES = [
    (to_relu, r"2 Tanh\(\).*2 ReLU\(\)"),
    (to_another_eps, "eps=1e-05.*eps=0.5"),
    (to_another_forward, "differ by"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_another_function_of_the_same_weights_is_refused(change, message, tmp_path):
    model = net()
    posterior = lp.KFAC(model, "classification").fit([(X, Y)])
    posterior.save(tmp_path / "p")
    lp.load(tmp_path / "p", model).save(tmp_path / "again")
    other = copy.deepcopy(model)
    change(other)
    for folder in ("p", "again"):
        with pytest.raises(CheckpointError, match=f"another function.*{message}"):
            lp.load(tmp_path / folder, other)
    assert lp.load(tmp_path / "p", other, check_function=False).n_data == 12


def test_a_module_that_is_replaced_after_the_fit_is_noticed(tmp_path):
    for change, _ in CHANGES[:2]:
        model = net()
        posterior = lp.KFAC(model, "classification").fit([(X, Y)])
        change(model)
        with pytest.raises(ModelChangedError, match="A module was replaced or changed"):
            posterior.save(tmp_path / "p")
        if change is to_relu:
            with pytest.raises(ModelChangedError, match="A module was replaced or changed"):
                posterior.predictive(X)


def clipped(activation, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 6), activation, nn.Linear(6, 3)).eval()
    return model, [(torch.randn(20, 2), torch.randint(3, (20,))) for _ in range(2)]


CLIPS = [(nn.Hardtanh(), nn.Hardtanh(-10, 10)), (nn.ReLU(), nn.ReLU6())]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("before", "after"), CLIPS)
def test_another_activation_that_the_data_hardly_reach_is_refused(before, after, seed, tmp_path):
    model, data = clipped(before, seed)
    lp.KFAC(model, "classification").fit(data).save(tmp_path / "p")
    other = nn.Sequential(model[0], after, model[2])
    with pytest.raises(CheckpointError, match="another function"):
        lp.load(tmp_path / "p", other)
    header, tensors = io.read(tmp_path / "p")
    assert sum(len(json.dumps(header["function"][name])) for name in ("outputs", "far")) < 1000
    del header["function"]["far"]  # as earlier versions wrote it
    io.write(tmp_path / "old", header, tensors)
    assert lp.load(tmp_path / "old", model).n_data == 40


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (nn.ReLU(), nn.ReLU(inplace=True)),
        (nn.Dropout(0.1), nn.Identity()),
        (nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.5)),
    ],
)
def test_modules_that_differ_in_training_alone_load(before, after, tmp_path):
    model, data = clipped(before, 0)
    lp.KFAC(model, "classification").fit(data).save(tmp_path / "p")
    assert lp.load(tmp_path / "p", nn.Sequential(model[0], after.eval(), model[2])).n_data == 40


class Narrow(nn.Module):
    """Defined near its data alone, or chaotic further out."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.table, self.how = nn.Linear(3, 3), nn.Embedding(3, 3), how

    def forward(self, x):
        if self.how == "overflows":
            return self.head((x.square() * 30).exp().clamp(max=1e30) / 1e30 if x.abs().max() < 4 else x * float("inf"))
        if self.how == "looks up":
            return self.head(x) + self.table((x[:, 0].abs() > 4).long() * 3)
        if self.how == "asserts":
            assert x.abs().max() < 4, "out of range"
        return self.head(x.clamp(-1, 1) + (1e4 * x).sin() * (x.abs() > 4))


@pytest.mark.parametrize("how", ["overflows", "looks up", "asserts", "oscillates"])
def test_networks_that_are_defined_near_their_data_alone_are_saved(how, tmp_path):
    model = Narrow(how)
    lp.KFAC(model, "classification", parameters=["head.weight", "head.bias"]).fit([(X, Y)]).save(tmp_path / "p")
    known = io.read(tmp_path / "p")[0]["function"]
    assert known["outputs"] and "far" not in known
    assert lp.load(tmp_path / "p", model).n_data == 12


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, 4), nn.Linear(4, 3)
        self.activation = nn.Tanh()

    def forward(self, ids, mask=None, scale=1.0):
        hidden = self.table(ids) if mask is None else self.table(ids) * mask[..., None]
        return self.head(self.activation(scale * hidden.sum(1)))


IDS = torch.randint(11, (12, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "inputs", [IDS, (IDS, torch.ones(12, 5)), {"ids": IDS, "mask": torch.ones(12, 5).bool(), "scale": 0.5}]
)
def test_functions_of_all_kinds_of_inputs_are_compared(inputs, tmp_path):
    model = Tokens()
    lp.KFAC(model, "classification").fit([(inputs, Y)]).save(tmp_path / "p")
    lp.load(tmp_path / "p", model)
    model.activation = nn.ReLU()
    with pytest.raises(CheckpointError, match="another function"):
        lp.load(tmp_path / "p", model)


def test_the_function_is_not_known_where_the_network_fails_on_random_inputs(tmp_path):
    class Picky(nn.Sequential):
        def forward(self, x):
            assert len(x) == 12
            return super().forward(x)

    model = Picky(nn.Linear(3, 3))
    lp.KFAC(model, "classification").fit([(X, Y)]).save(tmp_path / "p")
    assert lp.load(tmp_path / "p", model).n_data == 12
