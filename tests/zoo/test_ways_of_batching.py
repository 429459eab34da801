"""Batches whose examples do not lie where one would look first, and networks that look at the batch as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import batch_jacobian
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import laplace_plus as lp
from laplace_plus.network.batches import call

pytestmark = pytest.mark.usefixtures("double")


def labels(n: int) -> Tensor:
    return torch.arange(n) % 2


def assert_exact(model: nn.Module, inputs: list[Any]) -> None:
    """Full and diagonal curvature and the functional covariance of three posteriors, batch after batch."""
    model.eval()
    curvature = torch.zeros(())
    loader = []
    for x in inputs:
        outputs = call(model, x)
        j, p = batch_jacobian(model, outputs), outputs.softmax(-1).detach()
        curvature = curvature + torch.einsum("ncp,ncd,ndq->pq", j, torch.diag_embed(p) - p[:, :, None] * p[:, None], j)
        loader.append((x, labels(len(outputs))))
    for cls in (lp.Full, lp.Diagonal, lp.KFAC):
        posterior = cls(model, "classification").fit(loader)
        precision = posterior.precision_matrix() - torch.eye(len(curvature))
        if cls is lp.Full:
            torch.testing.assert_close(precision, curvature, atol=1e-10, rtol=1e-8)
        if cls is lp.Diagonal:
            torch.testing.assert_close(precision.diagonal(), curvature.diagonal(), atol=1e-10, rtol=1e-8)
        covariance = posterior.covariance_matrix()
        for x in inputs:
            j = batch_jacobian(model, call(model, x))
            wanted = torch.einsum("ncp,pq,ndq->ncd", j, covariance, j)
            torch.testing.assert_close(posterior.functional_posterior(x).covariance, wanted, atol=1e-10, rtol=1e-8)


class Graphs(nn.Module):
    """The nodes of all graphs in one table, as graph libraries batch them."""

    def __init__(self):
        super().__init__()
        self.node, self.edge, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x, edges, graph):
        h = torch.tanh(self.node(x))
        h = h + torch.zeros_like(h).index_add(0, edges[1], torch.tanh(self.edge(h[edges[0]])))
        return self.head(torch.tanh(torch.zeros(int(graph.max()) + 1, 4).index_add(0, graph, h * self.gain)))


def graphs(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    start = torch.tensor([0, *sizes]).cumsum(0)
    edges = [torch.randint(0, size, (2, 2 * size)) + int(at) for size, at in zip(sizes, start, strict=False)]
    return torch.randn(sum(sizes), 3), torch.cat(edges, 1), torch.repeat_interleave(torch.tensor(sizes))


@pytest.mark.quick("sizes0", "sizes4")
@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.parametrize(
    "sizes",
    [
        [(3, 2, 4), (2, 5)],
        [(3, 3, 3), (2, 4, 3)],  # equal sizes first: divisible by chance
        [(2, 4, 3), (3, 3, 3)],
        [(3, 4), (2, 4)],  # as many graphs as an edge has ends
        [(2, 4), (4,)],  # one graph alone
    ],
)
def test_graphs_in_one_table(sizes):
    torch.manual_seed(0)
    assert_exact(Graphs(), [graphs(*of_batch) for of_batch in sizes])


class TimeFirst(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.recurrent = nn.LSTM(4, 4) if recurrent else None

    def forward(self, x):
        h = torch.relu(self.embed(x))
        h = h if self.recurrent is None else self.recurrent(h)[0]
        return self.head(torch.tanh(h.mean(0)))


SHAPES = [[(5, 3), (5, 2)], [(4, 4), (4, 2)], [(4, 1), (4, 2)], [(4, 2), (4, 1)], [(2, 4), (2, 2)]]


@pytest.mark.quick("shapes0-False", "shapes1-False", "shapes2-False", "shapes3-False", "shapes4-False", "shapes5-True")
@pytest.mark.parametrize(
    ("shapes", "recurrent"),
    [
        *((shapes, False) for shapes in SHAPES),
        *((shapes, True) for shapes in SHAPES[:2]),
        *(pytest.param(shapes, True, marks=pytest.mark.slow) for shapes in SHAPES[2:]),
    ],
)
def test_time_before_batch(shapes, recurrent):
    torch.manual_seed(0)
    assert_exact(TimeFirst(recurrent), [torch.randn(*shape, 3) for shape in shapes])


def test_time_before_batch_after_a_batch_that_reaches_no_unit():
    """A first batch without gradients says nothing about which axis the examples lie along."""
    torch.manual_seed(0)
    model = TimeFirst(False)
    with torch.no_grad():
        model.embed.weight.abs_()
        model.embed.bias.zero_()
    assert_exact(model, [-torch.rand(4, 2, 3), torch.rand(4, 2, 3) + 0.1, torch.rand(4, 3, 3) + 0.1])


class Squeezes(nn.Module):
    """A network that works for batches of two or more only."""

    def __init__(self):
        super().__init__()
        self.body, self.gain, self.head = nn.Conv2d(1, 4, 2), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).squeeze() * self.gain)


class LeakyGates(nn.Module):
    """PReLU, whose batching rule is wrong where the numbers of examples and of directions agree."""

    def __init__(self):
        super().__init__()
        self.body, self.slope, self.gain = nn.Linear(3, 4), nn.PReLU(4), nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.slope(self.body(x) * self.gain))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position, self.head = nn.Embedding(7, 4), nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.token(x) + self.position(torch.arange(x.shape[1]))).mean(1))


class Interleaved(nn.Module):
    """Examples vary fastest along the merged axis."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x.transpose(0, 1).reshape(-1, 3))).reshape(2, len(x), 3)
        return self.head(h.transpose(0, 1).flatten(1))


class Constants(nn.Module):
    """Layers that are applied to inputs which are the same for every example."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(3, 4), nn.Linear(1, 4), nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.one(x) + self.two(x.new_ones(1)) + self.three(x.new_ones(1, 3))))


class Centred(nn.Module):
    """An example's output depends on the others."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h - h.mean(0))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, lengths=None):
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(x)[1][0])


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


def images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def words(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, shape)


def sequences(*lengths: int) -> Callable[[], Any]:
    return lambda: pack_sequence([torch.randn(n, 3) for n in lengths], enforce_sorted=False)


CASES = {
    "a squeeze": (Squeezes, [images(3, 1, 2, 2), images(2, 1, 2, 2)]),
    "as many examples as outputs": (LeakyGates, [images(2, 3), images(3, 3)]),
    "positions": (Positions, [words(3, 3), words(1, 3), words(2, 3)]),
    "positions, one example first": (Positions, [words(1, 3), words(3, 3)]),
    "positions, lengths that differ": (Positions, [words(2, 2), words(3, 3)]),
    "interleaved": (Interleaved, [images(2, 2, 3), images(4, 2, 3)]),
    "constants": (Constants, [images(3, 3), images(1, 3)]),
    "constants, one example first": (Constants, [images(1, 3), images(3, 3)]),
    "centred": (Centred, [images(3, 3), images(4, 3)]),
    "packed in the network": (Packed, [lambda: (torch.randn(3, 5, 3), torch.tensor([5, 2, 3]))]),
    "packed inputs": (Packed, [sequences(2, 3, 1), sequences(4, 1)]),
    "resolutions that differ": (convolutional, [images(3, 1, 4, 4), images(2, 1, 5, 6)]),
}


@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.parametrize("case", CASES)
def test_unusual_batches(case):
    torch.manual_seed(0)
    build, inputs = CASES[case]
    model = build()
    assert_exact(model, [make() for make in inputs])


def test_units_that_are_dead_for_the_first_and_the_last_example():
    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(torch.relu(self.b(torch.tanh(self.a(x.transpose(0, 1))))).sum(0))

    torch.manual_seed(0)
    model = Dead()
    with torch.no_grad():
        for layer in (model.a, model.b):
            layer.bias.zero_()
        model.a.weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
        model.b.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.1]]))
    x = torch.randn(4, 4, 3)  # as many examples as time steps, so that either axis could be that of the examples
    x[:, :, 0] = x[:, :, 0].abs() * torch.tensor([-1.0, 1.0, 1.0, -1.0])[:, None]
    assert_exact(model, [x, torch.randn(4, 4, 3)])


@pytest.mark.parametrize("build", [lambda: TimeFirst(True), LeakyGates, Squeezes, lambda: Packed()])
@pytest.mark.slow
def test_variances_are_differentiable_in_the_inputs(build):
    """Also where the examples are looped over, or cannot be taken apart."""
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(3, 1, 2, 2) if isinstance(model, Squeezes) else torch.randn(3, 3, 3)
    x = x[0] if isinstance(model, LeakyGates) else x
    posterior = lp.Diagonal(model, "classification").fit([(x, labels(3))])

    def total(x: Tensor) -> Tensor:
        return posterior.functional_posterior(x, differentiable=True).covariance.sum()

    x.requires_grad_()
    assert torch.autograd.gradcheck(total, (x,), atol=1e-5)


def test_a_learnt_query_is_not_taken_for_data():
    class Query(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.norm, self.head = nn.Parameter(torch.randn(3)), nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(x * self.norm(self.query) + F.rms_norm(self.query, (3,)))

    torch.manual_seed(0)
    assert_exact(Query(), [torch.randn(3, 3), torch.randn(2, 3)])
