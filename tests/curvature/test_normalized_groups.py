"""Groups of weights whose scale a normalisation takes away are found from the network's own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laplace_plus.likelihoods import Categorical
from laplace_plus.network.linearization import jvp
from laplace_plus.network.network import Network
from laplace_plus.priors import Groups
from laplace_plus.tuning.groups import NAME, REST, normalized_groups

IMAGES = torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
POINTS = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(10, (4, 5), generator=torch.Generator().manual_seed(2))


def groups_of(net, inputs, parameters="all"):
    torch.manual_seed(0)
    return normalized_groups(Network(net.double(), parameters, Categorical().arrange), inputs)


def names(net, inputs):
    return groups_of(net, inputs).names


class Residual(nn.Module):
    """A block whose last normalisation comes before the sum, with a projected shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.second, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut, self.norm3 = nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x):
        out = self.norm2(self.second(F.relu(self.norm1(self.first(x)), inplace=True)))
        out += self.norm3(self.shortcut(x))
        return F.relu(out, inplace=True)


class PreActivation(nn.Module):
    """A block that normalises its input and adds what it computes to it."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.first = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)
        self.norm2, self.second = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.second(F.relu(self.norm2(self.first(F.relu(self.norm1(x))))))


class Transformer(nn.Module):
    def __init__(self, *, norm_first):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(10, 8), nn.Parameter(torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.norm(self.layer(self.tokens(x) + self.positions)).mean(1))


def test_layers_before_each_kind_of_normalisation():
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4)),
        *(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5)),
        *(nn.Tanh(), nn.Linear(5, 4), nn.RMSNorm(4), nn.GELU(), nn.Linear(4, 3)),
    )
    found = groups_of(net, IMAGES)
    assert found.name == NAME
    assert found.names == ("0", "4", "7", "10", "13", "16", REST)
    assert found.sizes().tolist() == [36, 148, 20, 185, 24, 15, 8 + 8 + 8 + 10 + 4]


def test_residual_network():
    net = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), Residual(3, 4), Residual(4, 4)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
    )
    blocks = [f"{block}.{part}" for block in (3, 4) for part in ("first", "second", "shortcut")]
    assert names(net, IMAGES) == ("0", *blocks, "7", REST)


def test_a_residual_stream_that_only_normalisations_read_is_normalised_together():
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    net = nn.Sequential(nn.Conv2d(1, 3, 3), PreActivation(3), PreActivation(3), nn.BatchNorm2d(3), nn.ReLU(), *ends)
    assert names(net, IMAGES) == ("0", "1.first", "1.second", "2.first", "2.second", "7", REST)
    # Without the last norm the head reads the stream, whose scale therefore matters; what stays inside does not.
    net = nn.Sequential(nn.Conv2d(1, 3, 3), PreActivation(3), PreActivation(3), nn.ReLU(), *ends)
    assert names(net, IMAGES) == ("1.first", "2.first", "6", REST)


def test_transformers():
    stream = ("tokens", "layer.self_attn.out_proj", "layer.linear2")
    assert names(Transformer(norm_first=True), TOKENS) == ("", *stream, "head", REST)
    # With norms after the sums, attention and the MLP read the sums; the last norm but one goes straight into the last.
    assert names(Transformer(norm_first=False), TOKENS) == ("layer.norm2", "head", REST)


def test_no_normalisation():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    assert names(net, POINTS) == ("2", REST)
    assert names(nn.Linear(3, 3), POINTS) == ("",)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)


@pytest.mark.parametrize("use", ["skip", "output", "squared", "item", "written"])
def test_a_second_use_says_that_the_scale_matters(use):
    class Net(Normalised):
        def forward(self, x):
            h = self.first(x)
            y = self.norm(h)
            if use == "skip":
                y = y + h
            if use == "squared":
                y = y + (h * h).mean(-1, keepdim=True)
            if use == "item":
                y = y * h.norm().item()
            if use == "written":
                z = torch.zeros_like(h)
                z[:, 0] = h[:, 0]
                y = y + z
            out = self.last(y)
            return out + h[:, :3] if use == "output" else out

    assert names(Net(), POINTS) == ("last", REST)


def test_what_keeps_the_scale():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(8, 3)
            self.layer_scale = nn.Parameter(torch.rand(8))

        def forward(self, x):
            h = torch.cat([self.first(x).relu_(), 0.5 * self.second(x)], 1) * torch.ones(8)
            h = (h * self.layer_scale).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8) / 3
            return self.last(F.layer_norm(h, (8,)))

    assert names(Net(), POINTS) == ("first", "second", "last", REST)


def test_an_operation_that_is_hidden_is_found_out():
    """The custom function's result is a tensor of nobody's, as far as the operations tell; trying it out tells more."""

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() ** 2)

    class Net(Normalised):
        def forward(self, x):
            h = self.first(x)
            return self.last(self.norm(h) + Hidden.apply(h))

    assert names(Net(), POINTS) == ("last", REST)


def test_only_selected_parameters_are_grouped():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    assert groups_of(net, POINTS, ["0", "1"]).names == ("0", REST)
    assert groups_of(net, POINTS, "last_layer").names == ("2",)
    mask = torch.zeros(16 + 8 + 15, dtype=torch.bool)
    mask[[0, 5, 20, 30]] = True
    assert groups_of(net, POINTS, mask).index.tolist() == [0, 0, 2, 1]


@pytest.mark.parametrize("norm", ["layer", "group", "instance"])
def test_the_jacobian_does_not_see_the_scale(norm):
    """``J θ_group = 0`` up to ε, by Euler's theorem for homogeneous functions of degree zero."""
    kind = {
        "layer": nn.LayerNorm([4, 6, 6], eps=1e-12),
        "group": nn.GroupNorm(2, 4, eps=1e-12),
        "instance": nn.InstanceNorm2d(4, eps=1e-12),
    }[norm]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), kind, nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)).double()
    network = Network(net, "all", Categorical().arrange)
    groups = normalized_groups(network, IMAGES)
    vector = network.vector()
    scaled = jvp(network, IMAGES, torch.where(groups.index == groups.names.index("0"), vector, 0.0))
    assert scaled.abs().max() < 1e-9
    other = jvp(network, IMAGES, torch.where(groups.index == groups.names.index("4"), vector, 0.0))
    assert torch.allclose(other, net(IMAGES).detach(), atol=1e-12)  # the last layer's is the network itself


@pytest.mark.parametrize("index", [[0, 2], [0, 0], [-1, 0], [0.0, 1.0], [[0, 1]], []])
def test_groups_cover_the_parameters(index):
    with pytest.raises(ValueError, match="cover"):
        Groups("own", ("a", "b"), torch.tensor(index))
