"""Look-ups that are the same for all examples, as of positions."""

from __future__ import annotations

import warnings

import pytest
import torch
from problems import batch_jacobian, categorical_hessian, ggn, jacobian, relative_error
from torch import Tensor, nn

import laplace_plus as lp

T, C = 4, 3
EXACT = 1e-11


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


with warnings.catch_warnings(action="ignore"):
    hidden_add = torch.jit.script(add)


class Tokens(nn.Module):
    """Words and positions, mixed, and a head on the mean; ``way`` says how positions are looked up and used."""

    def __init__(self, way: str):
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.words, self.positions = nn.Embedding(7, 4), nn.Embedding(T + 2, 4)
        self.mix, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, C)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        if self.way != "vector":
            index = index[None].expand(len(x) if self.way == "each" else 1, -1)
        table, h = self.positions(index), self.words(x)
        if self.way == "expand":
            table = table.expand(len(x), -1, -1)
        h = table + h if self.way == "first" else h + table
        if self.way == "twice":
            h = torch.tanh(h) + table
        if self.way == "product":
            h = h * table
        if self.way == "hidden":
            h = hidden_add(torch.tanh(h), table)
        h = self.norm(h + torch.tanh(self.mix(h)).cumsum(1))
        return self.head(h.mean(1))


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(7, (n, T), generator=generator), torch.randint(C, (n,), generator=generator)) for n in sizes]


pytestmark = pytest.mark.filterwarnings("ignore:Which rows belong")

COVERED, GENERAL = ["row", "vector", "expand", "first"], ["twice", "product", "hidden"]


@pytest.mark.parametrize("way", [*COVERED, *GENERAL])
def test_the_exact_curvature(way: str) -> None:
    model, (first, second) = Tokens(way), batches(5, 1)
    for data in ([first, second], [second, first]):
        posterior = lp.Full(model, "classification").fit(data)
        x = torch.cat([x for x, _ in data])
        rows = jacobian(model, x)
        wanted = ggn(rows, categorical_hessian(model(x).detach()))
        assert relative_error(posterior.precision_matrix() - torch.eye(len(wanted)), wanted) < EXACT
        diagonal = lp.Diagonal(model, "classification").fit(data).variance()
        assert relative_error(1 / diagonal - 1, wanted.diagonal()) < EXACT
        covariance = rows[:2] @ posterior.covariance_matrix() @ rows[:2].mT
        assert relative_error(posterior.functional_posterior(x[:2]).covariance, covariance) < EXACT


class TimeFirst(nn.Module):
    """Adds a row for each example to all its times, which come before the examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.kinds, self.head = nn.Linear(2, 4), nn.Embedding(5, 4), nn.Linear(4, C)
        self.double().eval()

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x) + self.kinds(kind)).mean(0))


@pytest.mark.parametrize("times", [(3, 4), (4, 3), (4, 4)])
def test_rows_of_examples_are_no_table_for_all(times: tuple[int, ...]) -> None:
    """Also where there are as many times as examples."""
    model, wanted, data = TimeFirst(), torch.tensor(0.0), []
    for n in times:
        inputs = torch.randn(n, 4, 2, dtype=torch.float64), torch.arange(4)
        data.append((inputs, torch.arange(4) % C))
        outputs = model(*inputs)
        wanted = wanted + ggn(batch_jacobian(model, outputs), categorical_hessian(outputs.detach()))
    got = lp.Full(model, "classification").fit(data).precision_matrix() - torch.eye(len(wanted))
    assert relative_error(got, wanted) < EXACT


@pytest.mark.diagonal
@pytest.mark.parametrize("way", COVERED)
@pytest.mark.parametrize("sizes", [(5, 8, 1), (1, 4), (4, 4)])  # T positions in T examples, too
def test_kronecker_factors_are_those_of_positions_for_each_example(way: str, sizes: tuple[int, ...]) -> None:
    fits = [lp.KFAC(Tokens(own), "classification").fit(batches(*sizes)) for own in (way, "each")]
    ours, wanted = (own.precision_matrix() for own in fits)
    assert relative_error(ours, wanted) < EXACT
    x, _ = batches(6)[0]
    ours, wanted = (own.functional_posterior(x).covariance for own in fits)
    assert relative_error(ours, wanted) < EXACT
