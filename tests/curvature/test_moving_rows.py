"""Networks that permute, drop, repeat, merge and mix the rows of a batch by their data, against dense algebra."""

from __future__ import annotations

import itertools

import pytest
import torch
from problems import batch_jacobian, relative_error
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import batch_gradients

EXACT = 1e-10

pytestmark = pytest.mark.filterwarnings("ignore:Which rows belong")


def sort(h: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of the keys."""
    order = key.argsort(stable=True)
    return h[order], order.argsort()


def ends_stay(h: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of the keys, but for the first and the last row."""
    inner = key[1:-1].argsort(stable=True) + 1
    order = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), len(h) - 1)])[: len(h)]
    return h[order], order.argsort()


def merge(h: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """One row for each key: that of the first example with it, as an embedding that is looked up once would be."""
    kept, place = key.unique(return_inverse=True)
    first = torch.stack([(key == value).nonzero()[0, 0] for value in kept])
    return h[first], place


def repeat(h: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as often as its key says."""
    times = key % 2 + 1
    return h.repeat_interleave(times, 0), times.cumsum(0) - 1


def stay(h: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return h, torch.arange(len(h))


MOVES = {move.__name__: move for move in (stay, sort, ends_stay, merge, repeat)}


class Net(nn.Module):
    """Two hidden layers and a head, with moves after each of the first two that are put back at the end."""

    def __init__(self, moves: tuple[str, str], how: str, *, mixes: bool = False, drops: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.moves, self.how, self.mixes, self.drops = moves, how, mixes, drops
        self.a, self.b, self.head, self.extra = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(3, 2)
        self.norm, self.table, self.gain = nn.LayerNorm(4), nn.Embedding(6, 3), nn.Parameter(torch.ones(4))
        self.double()

    def back(self, h: Tensor, place: Tensor) -> Tensor:
        if self.how == "index_select":
            return h.index_select(0, place)
        return h.gather(0, place[:, None].expand(-1, h.shape[1])) if self.how == "gather" else h[place]

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        h, first = MOVES[self.moves[0]](x + self.table(key), key)
        h = self.back(self.norm(torch.tanh(self.a(h))) * self.gain, first)
        h, second = MOVES[self.moves[1]](h, -key)
        outputs = self.back(self.head(torch.tanh(self.b(h))), second)
        if self.mixes:
            outputs = outputs + 0.1 * h.sum() * outputs
        if self.drops:
            chosen = key > 2
            outputs = outputs.index_put((chosen.nonzero()[:, 0],), self.extra(x[chosen]), accumulate=True)
        return outputs


def data(sizes: tuple[int, ...]) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    source, found = torch.Generator().manual_seed(3), []
    for n in sizes:
        x = torch.randn(n, 3, dtype=torch.float64, generator=source)
        key, target = (torch.randint(0, top, (n,), generator=source) for top in (6, 2))
        found.append(((x, key), target))
    return found


def wanted(model: nn.Module, batches: list, names: tuple[str, ...]) -> Tensor:
    """The dense precision at a unit prior."""
    total: Tensor | float = 0.0
    for inputs, _ in batches:
        rows, p = batch_jacobian(model, model(*inputs), names), model(*inputs).softmax(-1).detach()
        total = total + torch.einsum("bcp,bcd,bdq->pq", rows, torch.diag_embed(p) - p[:, :, None] * p[:, None], rows)
    return total + torch.eye(len(total)).to(total)


CASES = [*itertools.product(MOVES, MOVES), *[("sort", "merge")] * 2]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_curvature_and_covariances(number):
    how = ("index", "index_select", "gather")[number % 3]
    model = Net(CASES[number], how, mixes=number % 5 == 4, drops=number % 2 == 1)
    batches = data((6, 1, 5, 6))
    posteriors = [cls(model, "classification", prior_precision=1.0) for cls in (lp.Full, lp.Diagonal)]
    full, diagonal = (posterior.fit(batches) for posterior in posteriors)
    names = full.parameter_names
    precision = wanted(model, batches, names)
    assert relative_error(full.precision_matrix(), precision) < EXACT
    assert relative_error(diagonal.precision_matrix().diagonal(), precision.diagonal()) < EXACT
    inputs = batches[0][0]
    rows = batch_jacobian(model, model(*inputs), names)
    covariance = rows @ torch.linalg.inv(precision) @ rows.mT
    assert relative_error(full.functional_posterior(inputs).covariance, covariance) < EXACT


@pytest.mark.parametrize("selection", ["all", "last_layer"])
@pytest.mark.parametrize("move", ["sort", "ends_stay"])
def test_kronecker_factors_do_not_depend_on_the_order_of_rows(selection, move):
    """Where each example has its own rows, whatever their order."""
    batches = data((6, 6, 5))
    ours, plain = (
        lp.KFAC(Net(moves, "index"), "classification", parameters=selection).fit(batches)
        for moves in ((move, move), ("stay", "stay"))
    )
    assert relative_error(ours.precision_matrix(), plain.precision_matrix()) < EXACT


def test_examples_that_share_rows_are_told_to_be_dear():
    model, batches = Net(("merge", "stay"), "index"), data((6,))
    with pytest.warns(UserWarning, match=r"Which rows belong.*'a\.weight'.*6 examples"):
        lp.KFAC(model, "classification").fit(batches)


def test_a_wrong_rule_does_not_reach_the_curvature():
    """The invariant is that of the sums, so that it finds rules that are wrong, too."""
    from laplace_plus.network.calls import RULES  # noqa: PLC0415

    right = RULES[nn.functional.linear]

    def wrong(*args, **options):
        call = right(*args, **options)
        if call is not None:
            call.value = 2 * call.value
        return call

    model, batches = Net(("stay", "stay"), "index"), data((6,))
    RULES[nn.functional.linear] = wrong
    try:
        posterior = lp.Full(model, "classification", prior_precision=1.0).fit(batches)
    finally:
        RULES[nn.functional.linear] = right
    assert relative_error(posterior.precision_matrix(), wanted(model, batches, posterior.parameter_names)) < EXACT


def test_only_the_first_batch_of_a_shape_is_examined(monkeypatch):
    calls, backward = [], torch.autograd.grad
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    posterior = lp.KFAC(model, "classification").fit([(inputs[0], target) for inputs, target in data((6,))])
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **options: calls.append(1) or backward(*args, **options))
    gradients = batch_gradients(posterior.network, Batch(data((6,))[0][0][0], None))
    assert not calls
    list(gradients.blocks(torch.ones(1, 6, 2, dtype=torch.float64)))
    assert len(calls) == 1
