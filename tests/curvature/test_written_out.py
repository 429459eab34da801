"""Recurrent layers, transposed convolutions and products with bare parameters, by derivatives one at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from problems import batch_jacobian
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import laplace_plus as lp
from laplace_plus.structured import kronecker

pytestmark = pytest.mark.usefixtures("double")
D, H, T, C = 2, 3, 4, 2
LENGTHS = torch.tensor([2, 4, 1])


class Reader(nn.Module):
    """The states of a recurrent layer at a step, the last ones of packed sequences, or those of a cell in a loop."""

    def __init__(self, kind, *, packed=False, step=-2, **options):
        super().__init__()
        self.is_cell, self.packed, self.step = kind.endswith("Cell"), packed, step
        self.layer = getattr(nn, kind)(D, H, **options, **({} if self.is_cell else {"batch_first": True}))
        self.head = nn.Linear((1 + options.get("bidirectional", False)) * (options.get("proj_size") or H), C)

    def forward(self, x):
        state = None
        for own in x.unbind(1) if self.is_cell else ():
            state = self.layer(own, state)
        if self.packed:
            sequences = pack_padded_sequence(x, LENGTHS[: len(x)], batch_first=True, enforce_sorted=False)
            state = self.layer(sequences)[1]
        if state is None:
            return self.head(self.layer(x)[0][:, self.step])
        state = state[0] if isinstance(state, tuple) else state
        return self.head(state if self.is_cell else torch.cat([*state], 1)[:, -self.head.in_features :])


READERS = {
    "LSTM": Reader("LSTM"),
    "LSTM, two ways": Reader("LSTM", bidirectional=True),
    "LSTM, packed": Reader("LSTM", bidirectional=True, packed=True),
    "GRU": Reader("GRU"),
    "GRU, packed": Reader("GRU", bidirectional=True, bias=False, packed=True),
    "RNN": Reader("RNN", nonlinearity="relu"),
    "LSTMCell": Reader("LSTMCell"),
    "GRUCell": Reader("GRUCell", bias=False),
    "RNNCell": Reader("RNNCell"),
}


def oracle(net, x, length):
    """By weight: gradients ``[C, T, o]`` of the outputs in its bias at each step, and what it meets, ``[T, i]``."""
    layer, is_cell, name = net.layer, net.is_cell, type(net.layer).__name__.removesuffix("Cell").lower()
    cell = getattr(torch, {"rnn": f"rnn_{getattr(layer, 'nonlinearity', 'tanh')}"}.get(name, name) + "_cell")
    suffixes = [""] if is_cell else ["_l0", "_l0_reverse"][: 1 + layer.bidirectional]
    found, ends, leaves = {}, [], []
    for suffix in suffixes:
        weights = [getattr(layer, f"weight_{side}{suffix}") for side in ("ih", "hh")]
        biases = [getattr(layer, f"bias_{side}{suffix}") if layer.bias else 0 for side in ("ih", "hh")]
        added = torch.zeros(2, length, len(weights[0]), requires_grad=True)
        h = c = torch.zeros(1, H)
        states = [None] * length
        for t in range(length)[:: -1 if suffix.endswith("reverse") else 1]:
            before, own = h, [bias + added[side, t] for side, bias in enumerate(biases)]
            found.setdefault(f"ih{suffix}", [None] * length)[t] = x[t]
            found.setdefault(f"hh{suffix}", [None] * length)[t] = before[0].detach()
            h = cell(x[None, t], (h, c) if name == "lstm" else h, *weights, *own)
            h, c = h if name == "lstm" else (h, c)
            states[t] = h
        ends.append(h if is_cell or net.packed else states[net.step])
        leaves.append(added)
    rows = [torch.autograd.grad(v, leaves, retain_graph=True) for v in net.head(torch.cat(ends, 1))[0]]
    for number, (key, a) in enumerate(found.items()):
        g = torch.stack([row[number // 2][number % 2] for row in rows])  # [C, T, o]
        a = torch.stack(a)
        found[key] = g, torch.cat([a, torch.ones(length, 1)], 1) if layer.bias else a
    return found


def blocks(posterior):
    return {layout.names[0]: block.dense(torch.ones(1)) for layout, block in posterior.laplace_model().curvature}


def kronecker_product(pairs, sharing):
    """From pairs of ``[C, S, o]`` and ``[S, i]`` for each example."""
    left, right, count = 0.0, 0.0, 0
    for g, a in pairs:
        g, a = (g, a) if sharing == "expand" else (g.sum(1, keepdim=True), a.mean(0, keepdim=True))
        g = g.flatten(0, 1)
        left, right, count = left + g.mT @ g, right + a.mT @ a, count + len(a)
    return torch.kron(left.contiguous(), right / count)[None]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", READERS)
def test_factors_of_recurrent_layers_are_those_of_single_steps(name, sharing):
    net = READERS[name].double()
    x, y = torch.randn(3, T, D), torch.zeros(3, C)
    lengths = LENGTHS.tolist() if net.packed else [T] * 3
    found = blocks(lp.KFAC(net, lp.Gaussian(), weight_sharing=sharing).fit([(x, y)]))
    each = [oracle(net, own[:length], length) for own, length in zip(x, lengths, strict=True)]
    for key in each[0]:
        wanted = kronecker_product([own[key] for own in each], sharing)
        torch.testing.assert_close(found[f"layer.weight_{key}"], wanted)
    assert len(found) == len(each[0]) + 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"proj_size": 2, "bidirectional": True}),
        ("LSTM", {"num_layers": 2, "dropout": 0.5, "bias": False, "proj_size": 1}),
        ("GRU", {"num_layers": 2, "bidirectional": True, "dropout": 0.5}),
        ("RNN", {"num_layers": 2, "nonlinearity": "relu", "bias": False}),
    ],
)
def test_curvature_is_that_of_layers_as_they_are(kind, options, packed):
    net, x = Reader(kind, packed=packed, **options).eval(), torch.randn(3, T, D)
    posterior = lp.Full(net, lp.Gaussian(), prior_precision=1e-9).fit([(x, torch.zeros(3, C))])
    jacobian = batch_jacobian(net, net(x))
    torch.testing.assert_close(posterior.precision_matrix(), torch.einsum("bcp,bcq->pq", jacobian, jacobian))
    torch.testing.assert_close(posterior.functional_posterior(x).mean, net(x))


CONVOLUTIONS = {
    "strided": (1, {"stride": 2, "padding": 1, "output_padding": 1}),
    "dilated": (1, {"dilation": 3, "output_padding": 2, "padding": 2}),
    "grouped": (2, {"stride": (2, 1), "groups": 2, "padding": (0, 1), "bias": False}),
    "all": (2, {"stride": 2, "padding": 1, "output_padding": (1, 0), "dilation": (1, 2), "groups": 2}),
    "volume": (3, {"stride": 2}),
}


def upsampling(name):
    dimensions, options = CONVOLUTIONS[name]
    layer = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1](2, 4, 2, **options)
    x = torch.randn(2, 2, *(4, 2, 2)[:dimensions])
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(layer(x)[0].numel(), C)), x


def transposed_pairs(net, x):
    """Pairs of patches ``[C, S, o]`` and inputs ``[S, i]`` of one example, for each group."""
    layer, convolution = net[0], partial(type(net[0]).forward, net[0])
    middle = convolution(x[None]).detach().requires_grad_()
    gradients = [torch.autograd.grad(v, middle, retain_graph=True)[0] for v in net[1:](middle)[0]]
    pairs, width = [], layer.in_channels // layer.groups
    for group in range(layer.groups):
        patches = []
        for gradient in gradients:
            rows = []
            for position in range(x[0].numel()):  # a one in one channel at that position is multiplied by its patch
                one = torch.zeros_like(x).flatten(1)
                one[group * width, position] = 1
                products = (convolution(one.view_as(x)[None]) * gradient).sum()
                (own,) = torch.autograd.grad(products, layer.weight)
                rows.append(own[group * width].flatten())
            patches.append(torch.stack(rows))
        pairs.append((torch.stack(patches), x.flatten(1)[group * width :][:width].mT))
    return pairs


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_factors_of_transposed_convolutions_are_those_of_single_positions(name, sharing, monkeypatch):
    net, x = upsampling(name)
    data = [(x, torch.zeros(2, C))]
    fitted = partial(lp.KFAC, net, lp.Gaussian(), weight_sharing=sharing)
    found = blocks(fitted().fit(data))
    each = [transposed_pairs(net, own) for own in x]
    wanted = torch.cat([kronecker_product(pairs, sharing) for pairs in zip(*each, strict=True)])
    torch.testing.assert_close(found["0.weight"], wanted)
    jacobian = batch_jacobian(net, net(x), ["0.weight"] + ["0.bias"] * (net[0].bias is not None))
    exact = torch.einsum("bcp,bcq->pq", jacobian, jacobian)
    full = lp.Full(net, lp.Gaussian(), parameters=["0.*"], prior_precision=1e-9).fit(data)
    torch.testing.assert_close(full.precision_matrix(), exact, rtol=1e-7, atol=1e-7)
    if net[0].bias is not None:
        torch.testing.assert_close(found["0.bias"][0], exact[-4:, -4:])
    monkeypatch.setattr(kronecker, "MIB", 0)  # one example at a time
    torch.testing.assert_close(blocks(fitted().fit(data))["0.weight"], wanted)


SINGLE = {
    **{name: (READERS[name], torch.randn(1, 1, D)) for name in ("LSTMCell", "GRUCell", "RNNCell")},
    **{kind: (Reader(kind, step=-1, bidirectional=True), torch.randn(1, 1, D)) for kind in ("LSTM", "GRU")},
    "projected": (Reader("LSTM", step=-1, proj_size=2), torch.randn(1, 1, D)),
    "up": (
        nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.Flatten(), nn.Linear(27, C)),
        torch.randn(1, 2, 1, 1),
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_one_example_at_one_position_gives_the_exact_blocks(name):
    net, x = SINGLE[name][0].double(), SINGLE[name][1].double()
    data = [(x, torch.zeros(1, C))]
    exact = lp.Full(net, lp.Gaussian(), prior_precision=1e-9).fit(data).precision_matrix()
    posterior = lp.KFAC(net, lp.Gaussian(), prior_precision=1e-9).fit(data)
    for layout, block in posterior.laplace_model().curvature:
        for place, own in zip(layout.index.flatten(1), block.dense(torch.ones(1)), strict=True):
            torch.testing.assert_close(own, exact[place[:, None], place], rtol=1e-7, atol=1e-7)


class Bare(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.second, self.way = nn.Parameter(torch.randn(4, D)), nn.Parameter(torch.randn(C, 4)), way
        if way == "as stored":
            self.first, self.second = nn.Parameter(self.first.data.mT), nn.Parameter(self.second.data.mT)

    def forward(self, x):
        if self.way == "linear":
            return F.linear(F.linear(x, self.first).tanh().mean(1), self.second)
        if self.way == "transposed":
            return torch.matmul((x @ self.first.T).tanh().mean(1), torch.t(self.second))
        if self.way == "copied":
            return (x @ self.first.T.contiguous()).tanh().mean(1).matmul(self.second.transpose(0, 1))
        return torch.mm((x.matmul(self.first)).tanh().mean(1), self.second)


def test_products_with_bare_parameters_are_linear_layers():
    data, results = [(torch.randn(5, 3, D), torch.zeros(5, C))], []
    for way in ("linear", "transposed", "as stored", "copied"):
        torch.manual_seed(0)
        net = Bare(way).double()
        jacobian = batch_jacobian(net, net(data[0][0]))
        full = lp.Full(net, lp.Gaussian(), prior_precision=1e-9).fit(data)
        torch.testing.assert_close(full.precision_matrix(), torch.einsum("bcp,bcq->pq", jacobian, jacobian))
        posterior = lp.KFAC(net, lp.Gaussian()).fit(data)
        results.append((posterior.log_marginal_likelihood(), posterior.functional_posterior(data[0][0]).covariance))
        treatments = [row[-1].split(",")[0] for row in posterior.summary().rows]
        assert treatments == ["dense" if way == "copied" else "Kronecker", "Kronecker"]
    for result in results[1:3]:
        torch.testing.assert_close(result, results[0])


class Started(nn.GRU):
    """A recurrent layer with a learnt first state, the same tensor for a batch of one."""

    def __init__(self):
        super().__init__(D, C, batch_first=True)
        self.start = nn.Parameter(torch.randn(1, 1, C))

    def forward(self, x):
        return super().forward(x, self.start)[0][:, -1]


def test_a_learnt_first_state_keeps_the_exact_curvature():
    net, data = Started().double(), [(torch.randn(1, T, D), torch.zeros(1, C)) for _ in range(2)]
    rows = torch.cat([batch_jacobian(net, net(x))[0] for x, _ in data])
    posterior = lp.Full(net, lp.Gaussian(), prior_precision=1e-9).fit(data)
    torch.testing.assert_close(posterior.precision_matrix(), rows.mT @ rows)
    assert [row[0] for row in lp.KFAC(net, lp.Gaussian()).fit(data).summary().rows if "Kron" not in row[-1]] == [
        "start"
    ]


def test_variances_have_derivatives_through_all_steps():
    net, x = READERS["GRU"].double(), torch.randn(1, T, D, requires_grad=True)
    posterior = lp.KFAC(net, lp.Gaussian()).fit([(x.detach(), torch.zeros(1, C))])
    assert torch.autograd.gradcheck(lambda own: posterior.functional_posterior(own, differentiable=True).covariance, x)
