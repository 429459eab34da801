"""Networks as people write them themselves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo.architecture import Architecture, named, normal, pair, tokens, weights

import laplace_plus as lp


def weight_normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.Tanh(),
        nn.Linear(4, 3),
    )


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 3)
        self.bilinear = nn.Bilinear(4, 3, 2)

    def forward(self, a, b):
        return self.bilinear(torch.tanh(self.left(a)), torch.tanh(self.right(b)))


class Functional(nn.Module):
    """Parameters without modules of their own: lists, functional calls, matrix products, one used twice."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 4))])
        self.biases = nn.ParameterDict({"b": nn.Parameter(torch.randn(4))})
        self.product = nn.Parameter(torch.randn(4, 4))
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.readout = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 3), nn.PReLU()])})

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.weights[0], self.biases["b"]))
        h = torch.tanh(F.linear(input=h, weight=self.weights[1], bias=self.biases["b"]))
        h = h + self.gate * torch.tanh(F.linear(h, self.weights[1])) @ self.product
        for module in self.readout["a"]:
            h = module(h)
        return h


class HeldTwice(nn.Module):
    """Module objects that the model holds under several names, and one parameter in two of them."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.body = nn.Sequential(block, nn.Tanh(), block, nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.body[4].weight = block[0].weight
        self.alias, self.head = self.body, nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.alias(x))


class TwoNames(nn.Module):
    """One module that holds a parameter, and a buffer that it writes to, under two names each."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4) / 2)
        self.second = self.first
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("alias", self.calls)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        self.alias.add_(1)
        return self.head(torch.tanh(x @ self.first) @ self.second.T)


class DeclaredOutOfOrder(nn.Module):
    """The head is defined first and used last."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(2, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Siamese(nn.Module):
    """One encoder for two inputs, which are compared."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 4)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, pair):
        left, right = self.encoder(pair["left"]), self.encoder(pair["right"])
        return self.head(torch.cat([(left - right).abs(), left * right], -1))


class SiameseStacked(Siamese):
    """Both inputs go through the encoder as one batch of twice the size."""

    def forward(self, pair):
        left, right = self.encoder(torch.cat([pair["left"], pair["right"]])).chunk(2)
        return self.head(torch.cat([(left - right).abs(), left * right], -1))


class DeepSet(nn.Module):
    """Sets ``[B, N, F]`` with a mask, pooled by sum."""

    def __init__(self):
        super().__init__()
        self.element = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x, mask):
        return self.whole((self.element(x) * mask[..., None]).sum(1))


class GraphNetwork(nn.Module):
    """Messages along one example's own edges, gathered by ``scatter_add``."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(6, 4)
        self.update = nn.Linear(7, 4)
        self.readout = nn.Linear(4, 2)

    def forward(self, nodes, edges):
        source, sink = edges.unbind(1)
        gather = lambda index: nodes.gather(1, index[..., None].expand(-1, -1, nodes.shape[-1]))  # noqa: E731
        message = torch.tanh(self.message(torch.cat([gather(source), gather(sink)], -1)))
        place = sink[..., None].expand(-1, -1, 4)
        received = torch.zeros(*nodes.shape[:2], 4, dtype=nodes.dtype).scatter_add(1, place, message)
        return self.readout(torch.tanh(self.update(torch.cat([nodes, received], -1))).mean(1))


class FrozenBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten())
        self.backbone.requires_grad_(False)
        self.neck = nn.Linear(12, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(torch.tanh(self.neck(features)))


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 3, 2),
            nn.BatchNorm1d(3),
            nn.Dropout1d(0.5),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(9, 3),
        )
        self.net[4].training = False  # modes differ from module to module

    def forward(self, x):
        return F.dropout(self.net(x), 0.5, self.training)


class Latent(nn.Module):
    """Learnt queries that are normalised and projected before any example comes in."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4))
        self.norm = nn.LayerNorm(4)
        self.project = nn.Linear(4, 3)
        self.values = nn.Linear(3, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        attention = (self.project(self.norm(self.queries)) @ x.transpose(1, 2)).softmax(-1)
        return self.head((attention @ self.values(x)).flatten(1))


class MixtureOfExperts(nn.Module):
    """Each example goes to one expert, chosen by the data; the others do not see it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(3, 2)
        self.experts = nn.ModuleList([nn.Linear(3, 4) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return self.head(out)


class EmbeddingBags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode="mean")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.bag(x)))


class Unused(nn.Module):
    """One branch is never taken."""

    def __init__(self):
        super().__init__()
        self.body, self.idle, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), backend="eager")


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    model.compile(backend="eager")
    return model


class CompiledPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.compile(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), backend="eager")
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


def edges(n: int) -> Tensor:
    return torch.randint(0, 3, (n, 2, 5))


def mask(n: int) -> Tensor:
    return (torch.rand(n, 4) > 0.3).double().index_fill(1, torch.tensor([0]), 1.0)


NETWORKS = [
    Architecture(
        "weight_normed", weight_normed, normal(3), 3, weights("6"), ("*.original0", "*.original1", "*.original")
    ),
    Architecture(
        "bilinear",
        Bilinear,
        pair(normal(3), normal(2)),
        2,
        weights("bilinear"),
        ("bilinear.*",),
        (),
        lp.Gaussian(0.5),
        flat=True,
    ),
    Architecture(
        "functional",
        Functional,
        normal(3),
        3,
        ("readout.a.1.weight",),
        ("weights.*", "biases.b", "gate", "readout.a.1.weight"),
    ),
    Architecture("held_twice", HeldTwice, normal(4), 3, weights("head"), ("body.0.0.*", "body.4.bias")),
    Architecture("two_names", TwoNames, normal(4), 3, weights("head"), ("first",)),
    Architecture("declared_out_of_order", DeclaredOutOfOrder, normal(2), 3, weights("head")),
    Architecture("siamese", Siamese, named(left=normal(2, 4), right=normal(2, 4)), 2, weights("head")),
    Architecture("siamese_stacked", SiameseStacked, named(left=normal(2, 4), right=normal(2, 4)), 2, weights("head")),
    Architecture("deep_set", DeepSet, pair(normal(4, 3), mask), 2, weights("whole.2"), likelihood=lp.Gaussian(0.3)),
    Architecture("graph", GraphNetwork, named(nodes=normal(3, 3), edges=edges), 2, weights("readout")),
    Architecture("frozen_backbone", FrozenBackbone, normal(1, 4, 4), 3, weights("head")),
    Architecture("dropouts", Dropouts, normal(1, 4), 3, weights("net.6")),
    Architecture("latent", Latent, normal(4, 3), 3, weights("head"), ("queries", "norm.*")),
    Architecture("mixture_of_experts", MixtureOfExperts, normal(3), 3, weights("head"), ("experts.*",)),
    Architecture("embedding_bag", EmbeddingBags, tokens(3), 3, weights("head"), ("bag.weight",)),
    Architecture("unused", Unused, normal(3), 3, weights("head"), ("idle.*",)),
    Architecture("compiled", compiled, normal(3), 3, weights("2")),
    Architecture("compiled_in_place", compiled_in_place, normal(3), 3, weights("2")),
    Architecture("compiled_part", CompiledPart, normal(3), 3, weights("head")),
]
