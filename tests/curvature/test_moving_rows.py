"""Networks that permute, drop, repeat, merge and mix the rows of a batch by their data, against dense algebra."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from problems import batch_jacobian, ekfac, relative_error
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

import laplace_plus as lp
from laplace_plus.network.batches import Batch
from laplace_plus.network.gradients import batch_gradients
from laplace_plus.network.moves import places

EXACT = 1e-10

pytestmark = pytest.mark.filterwarnings("ignore:Which rows belong")

Layer = Callable[[Tensor], Tensor]
MOVES: dict[str, Callable[[Tensor, Tensor, Layer], Tensor]] = {}


def move(function):
    """A way to run a layer on rows ``[B, d]`` that keys ``[B]`` move."""
    MOVES[function.__name__] = function
    return function


def sorted_by(key: Tensor) -> Tensor:
    return key.argsort(stable=True)


def matrix_of(key: Tensor, like: Tensor) -> Tensor:
    """The permutation matrix, by comparisons alone."""
    unique = key * len(key) + torch.arange(len(key))
    rank = (unique[:, None] > unique).sum(1)
    return (rank == torch.arange(len(key))[:, None]).to(like)


@move
def stay(h, key, layer):
    return layer(h)


# -- orders ------------------------------------------------------------------------------------------------------------


@move
def sort(h, key, layer):
    order = sorted_by(key)
    return layer(h[order])[order.argsort()]


@move
def not_put_back(h, key, layer):
    return layer(h[sorted_by(key)])


@move
def ends_stay(h, key, layer):
    inner = sorted_by(key[1:-1]) + 1
    order = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), len(h) - 1)])[: len(h)]
    return layer(h[order])[order.argsort()]


@move
def select_by_keywords(h, key, layer):
    order = sorted_by(key)
    moved = layer(torch.index_select(input=h, dim=0, index=order))
    return torch.gather(input=moved, dim=0, index=order.argsort()[:, None].expand_as(moved))


@move
def scatter(h, key, layer):
    order = torch.topk(key + torch.arange(len(h)) / len(h), len(h)).indices
    moved = layer(torch.take_along_dim(h, order[:, None], dim=0))
    return torch.zeros_like(moved).scatter(0, order[:, None].expand_as(moved), moved)


@move
def write(h, key, layer):
    order = sorted_by(key)
    moved = layer(h.T[:, order].T)
    result = torch.zeros_like(moved)
    result[order] = moved
    return result


@move
def lists(h, key, layer):
    order = sorted_by(key)
    return layer(h[order.tolist()])[order.argsort().tolist()]


@move
def numpy(h, key, layer):
    order = key.numpy().argsort(kind="stable")
    return layer(h[order])[order.argsort()]


@move
def loop(h, key, layer):
    order = sorted(range(len(h)), key=lambda n: (int(key[n]), n))
    moved = layer(torch.stack([h[n] for n in order]))
    return torch.stack([moved[order.index(n)] for n in range(len(h))])


@move
def loop_of_questions(h, key, layer):
    order = [n for n in range(len(h)) if key[n] % 2 == 0] + [n for n in range(len(h)) if key[n] % 2]
    moved = layer(torch.cat([h[n : n + 1] for n in order]))
    return torch.cat([moved[order.index(n)][None] for n in range(len(h))])


@move
def one_question(h, key, layer):
    return layer(h.flip(0)).flip(0) if key[0] > key[-1] else layer(h)


@move
def permutation_matrix(h, key, layer):
    matrix = F.one_hot(sorted_by(key), len(h)).to(h)
    return matrix.T @ layer(matrix @ h)


@move
def einsum(h, key, layer):
    matrix = matrix_of(key, h)
    return torch.einsum("ij,id->jd", matrix, layer(F.linear(matrix, h.T)))


@move
def product_and_sum(h, key, layer):
    matrix = matrix_of(key, h)
    return (matrix.T[:, :, None] * layer((matrix[:, :, None] * h).sum(1))).sum(1)


@move
def masked_flip(h, key, layer):
    swap = (key > key.flip(0))[:, None]
    swap = swap | swap.flip(0)
    moved = layer(torch.where(swap, h.flip(0), h))
    return torch.where(swap, moved.flip(0), moved)


@move
def masked_pairs(h, key, layer):
    n = len(h) // 2 * 2
    a, b, swap = h[0:n:2], h[1:n:2], (key[0:n:2] > key[1:n:2])[:, None]
    pairs = torch.stack([torch.where(swap, b, a), torch.where(swap, a, b)], 1)
    return layer(torch.cat([pairs.flatten(0, 1), h[n:]]))


@move
def always_flipped(h, key, layer):
    return layer(h.flip(0)) + layer(h[list(range(len(h)))[::-1]])


# -- rows that are dropped, repeated, merged and mixed -----------------------------------------------------------------


@move
def mask(h, key, layer):
    chosen = key > 1
    result = layer(h) / 2
    return result.index_put((chosen.nonzero()[:, 0],), layer(h[chosen]), accumulate=True) if chosen.any() else result


@move
def masked_select(h, key, layer):
    chosen = (key > 1)[:, None]
    moved = layer(torch.cat([h.masked_select(chosen).view(-1, h.shape[1]), h]))
    moved, rest = moved[: int(chosen.sum())], moved[int(chosen.sum()) :]
    return rest + torch.zeros_like(rest).masked_scatter(chosen.expand_as(rest), moved)


@move
def split(h, key, layer):
    even = key % 2 == 0
    moved = layer(torch.cat([h[even], h[~even]]))
    result = torch.empty_like(moved)
    result[even], result[~even] = moved.split([int(even.sum()), int((~even).sum())])
    return result


@move
def route(h, key, layer):
    result = 0.1 * layer(h)
    for expert in range(3):
        (rows,) = torch.where(condition=key % 3 == expert)
        if len(rows):
            result = result.index_add(dim=0, index=rows, source=layer((expert + 1) * h[rows]))
    return result


@move
def repeat(h, key, layer):
    times = key % 2 + 1
    return layer(h.repeat_interleave(times, 0))[times.cumsum(0) - 1]


@move
def merge(h, key, layer):
    kept, place = key.unique(return_inverse=True)
    first = torch.stack([(key == value).nonzero()[0, 0] for value in kept])
    return layer(h[first])[place]


@move
def pool(h, key, layer):
    return layer(h.new_zeros(6, h.shape[1]).index_add(0, key, h))[key]


@move
def cumulate(h, key, layer):
    moved = layer(h)
    return moved + ((key > 4).to(moved)[:, None] * moved).cumsum(0)


@move
def subtract_mean(h, key, layer):
    return layer(h - ((key > 4).to(h)[:, None] * h).mean(0))


@move
def attend(h, key, layer):
    scores = (h @ h.T).masked_fill(key[:, None] != key, -torch.inf)
    return layer(scores.softmax(-1) @ h)


@move
def sort_values(h, key, layer):
    return layer(h.sort(0).values)


# -- without any function that is about rows ---------------------------------------------------------------------------


class Taken(torch.autograd.Function):
    """Rows by an order, in an operation of the user's own."""

    @staticmethod
    def forward(ctx, h, order):
        ctx.save_for_backward(order)
        return h[order]

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.saved_tensors[0].argsort()], None


@move
def own_function(h, key, layer):
    order = sorted_by(key)
    return Taken.apply(layer(Taken.apply(h, order)), order.argsort())


@move
def look_up(h, key, layer):
    order = sorted_by(key)
    return F.embedding(order.argsort(), layer(F.embedding(order, h)))


@move
def batched_product(h, key, layer):
    matrix = torch.eye(len(h), dtype=h.dtype)[sorted_by(key)]
    return torch.bmm(matrix.mT[None], layer(torch.bmm(matrix[None], h[None])[0])[None])[0]


@move
def first_row(h, key, layer):
    h = torch.where((key < key[0])[:, None], h.select(0, 0), h)
    return layer(torch.where((key > 4)[:, None], h[-1], h))


@move
def unbound(h, key, layer):
    rows = layer(h)
    swapped = torch.stack(rows.unbind()[::-1])
    return torch.where((key != key.sort().values)[:, None], swapped, rows)


@move
def of_columns(h, key, layer):
    rows = layer(h).mT
    pooled = F.avg_pool1d(rows[None], 3, 1, 1)[0] + rows.kthvalue(1, -1, keepdim=True).values
    return torch.where(key != key.sort().values, pooled, rows).mT


@move
def distances(h, key, layer):
    rows = layer(h)
    return rows + ((key > 4).to(h) * torch.cdist(rows, rows)).sum(1, keepdim=True)


@move
def attend_together(h, key, layer):
    alone = torch.eye(len(h), dtype=h.dtype) * torch.where(key > 3, 0.0, 1e9)[:, None]
    rows = layer(h)[None]
    return F.scaled_dot_product_attention(rows, rows, rows, attn_mask=alone)[0]


# -- against dense algebra ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of several kinds, each run on moved rows."""

    def __init__(self, moves: tuple[str, ...], kinds: tuple[str, ...], seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.moves, self.kinds, self.table = moves, kinds, nn.Embedding(6, 3)
        widths = [3, *[4] * (len(moves) - 1), 2]
        self.inner, self.outer = nn.ModuleList(), nn.ModuleList()
        for kind, before, after in zip(kinds, widths, widths[1:], strict=False):
            made = {"conv": nn.Conv1d(1, 1, 3, padding=1), "norm": nn.LayerNorm(before)}
            made["transposed conv"] = nn.ConvTranspose1d(1, 1, 3, padding=1)
            self.inner.append(made.get(kind, nn.Linear(before, before)))
            self.outer.append(nn.Linear(before, after))
        self.double()

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        h = x + self.table(key)
        for number, name in enumerate(self.moves):
            h = MOVES[name](h, key if number % 2 == 0 else (5 * key + number) % 6, lambda h: self.layer(number, h))  # noqa: B023
            h = torch.tanh(h) if number < len(self.moves) - 1 else h
        return h

    def layer(self, number: int, h: Tensor) -> Tensor:
        kind, inner = self.kinds[number], self.inner[number]
        for _ in range({"linear": 0, "tied": 2}.get(kind, 1)):
            h = torch.tanh(inner(h[:, None])[:, 0] if "conv" in kind else inner(h))
        return self.outer[number](h)


def data(sizes: tuple[int, ...], seed: int = 3) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Batches of which the first is in order."""
    source, found = torch.Generator().manual_seed(seed), []
    for n in sizes:
        x = torch.randn(n, 3, dtype=torch.float64, generator=source)
        key, target = (torch.randint(0, top, (n,), generator=source) for top in (6, 2))
        found.append(((x, key if found else key.sort().values), target))
    return found


def wanted(model: nn.Module, batches: list, names: tuple[str, ...]) -> Tensor:
    """The dense precision at a unit prior."""
    total: Tensor | float = 0.0
    for inputs, _ in batches:
        rows, p = batch_jacobian(model, model(*inputs), names), model(*inputs).softmax(-1).detach()
        total = total + torch.einsum("bcp,bcd,bdq->pq", rows, torch.diag_embed(p) - p[:, :, None] * p[:, None], rows)
    return total + torch.eye(len(total)).to(total)


def check(model: nn.Module, batches: list, selection: str) -> None:
    """Curvatures, and covariances of all posteriors' predictions, for all batches."""
    kinds = lp.Full, lp.Diagonal, lp.KFAC
    options = {"prior_precision": 1.0, "parameters": selection}
    full, diagonal, kfac = (cls(model, "classification", **options).fit(batches) for cls in kinds)
    precision = wanted(model, batches, full.parameter_names)
    assert relative_error(full.precision_matrix(), precision) < EXACT
    assert relative_error(diagonal.precision_matrix().diagonal(), precision.diagonal()) < EXACT
    for inputs, _ in batches:
        rows = batch_jacobian(model, model(*inputs), full.parameter_names)
        for posterior in full, diagonal, kfac:
            covariance = rows @ posterior.covariance_matrix() @ rows.mT
            assert relative_error(posterior.functional_posterior(inputs).covariance, covariance) < EXACT


KINDS = ("linear", "tied", "conv", "norm")


@pytest.mark.parametrize("number", range(len(MOVES)))
def test_each_move_of_an_output_layer(number):
    name = [*MOVES][number]
    check(Net((name,), (KINDS[number % 2],)), data((5, 5)), ("all", "last_layer")[number // 2 % 2])


@pytest.mark.quick("0", "12")
@pytest.mark.parametrize("number", range(0, len(MOVES), 6))
def test_moves_of_two_layers(number):
    names = [*MOVES]
    moves, kinds = (names[number - 1], names[number]), (KINDS[number // 2 % 4], KINDS[number // 4 % 4])
    check(Net(moves, kinds), data((4, 4, 3, 1)), ("all", "last_layer")[number // 2 % 2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_any_moves(seed):
    draw = random.Random(seed)
    depth, n = draw.choice([1, 2, 3]), draw.choice([4, 5, 6])
    model = Net(tuple(draw.choices([*MOVES], k=depth)), tuple(draw.choices(KINDS, k=depth)), seed)
    batches = data((n, n, draw.choice([1, 2, 3, 7]), n), seed)
    check(model, batches, draw.choice(["all", "last_layer"]))


def follow(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> object:
    """Where the graph says that examples lie in the input of a function that makes outputs ``[B, …]``."""
    h = torch.randn(shape, requires_grad=True) + 0
    return places(function(h), [get_gradient_edge(h)])[0]


@pytest.mark.parametrize(
    ("function", "shape", "place"),
    [
        (lambda h: h.transpose(0, 1).flatten(1), (3, 4, 2), (1, 1, 1)),
        (lambda h: h.view(2, 4, 3).transpose(0, 1).reshape(4, 6), (8, 3), (0, 2, 1)),
        (lambda h: (h.view(4, 6, 2) @ h.view(4, 2, 6)).softmax(-1).sum(2), (4, 3, 4), (0, 1, 1)),
        (lambda h: F.conv1d(h.view(4, 1, 6), torch.ones(2, 1, 3)).amax(-1), (4, 6), (0, 1, 1)),
        (lambda h: h[torch.arange(4), torch.tensor([1, 0, 2, 2])], (4, 3, 2), (0, 1, 1)),
        (lambda h: torch.stack(h.unbind(0), 1)[:, -1], (3, 4, 2), (1, 1, 1)),
        (lambda h: F.instance_norm(h), (4, 2, 5), (0, 1, 1)),
        (lambda h: F.adaptive_avg_pool2d(h.to(memory_format=torch.channels_last), 1), (4, 5, 2, 2), (0, 1, 1)),
    ],
)
def test_operations_that_leave_examples_by_themselves_are_followed(function, shape, place):
    assert follow(function, shape) == [place]


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda h: h[torch.tensor([1, 0, 2, 3])], (4, 3)),
        (lambda h: h[torch.arange(4), torch.arange(4)[:, None]], (4, 4)),
        (lambda h: h.view(2, 2, 3)[[1, 0]].view(4, 3), (4, 3)),
        (lambda h: h.as_strided((4, 4), (1, 4)), (4, 4)),
        (lambda h: h + h.mean(0), (4, 3)),
        (lambda h: torch.eye(4) @ h, (4, 4)),
        (lambda h: h @ h, (4, 4)),
        (lambda h: F.conv1d(torch.ones(4, 2, 3), h), (4, 2, 3)),  # its weights are as many as examples
        (lambda h: F.layer_norm(torch.ones(4, 4), (4,), h), (4,)),
        (lambda h: F.batch_norm(torch.ones(4, 4), torch.zeros(4), torch.ones(4), h), (4,)),
        (lambda h: h[None] * h[:, None], (4, 4)),
        (lambda h: h[:, None, :].expand(4, 4, 4)[torch.arange(4), torch.arange(4)] + h.mT, (4, 4)),
    ],
)
def test_other_operations_may_move_rows(function, shape):
    assert follow(function, shape) is None


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["sort", "ends_stay", "route", "mask"])
@pytest.mark.parametrize("selection", ["all", "last_layer"])
def test_kronecker_factors_are_those_of_each_example_by_itself(selection, name):
    """Rows count once for each example that they belong to."""
    model, batches = Net((name, name), ("linear", "linear")), data((4, 4, 3))
    alone = [((x[n, None], key[n, None]), y[n, None]) for (x, key), y in batches for n in range(len(y))]
    together, apart = (lp.KFAC(model, "classification", parameters=selection).fit(some) for some in (batches, alone))
    assert relative_error(together.precision_matrix(), apart.precision_matrix()) < EXACT


@pytest.mark.parametrize("cls", [lp.Full, lp.Diagonal, lp.KFAC, ekfac])
def test_layers_may_run_on_no_rows(cls):
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))

        def forward(self, x, key):
            rows = (key > 2).nonzero()[:, 0]
            return x.new_zeros(len(x), 2).index_put((rows,), self.expert(x[rows]))

    torch.manual_seed(0)
    (((x, key), y),) = data((4,))
    some, none = ((x, key + 3), y), ((x, key * 0), y)
    wanted, *found = (cls(Expert().double(), "classification") for _ in range(3))
    for posterior, batches in zip(found, ([some, none], [none, some]), strict=True):
        posterior.network.model.load_state_dict(wanted.network.model.state_dict())
        precision = wanted.fit([some]).precision_matrix()
        assert relative_error(posterior.fit(batches).precision_matrix(), precision) < EXACT
        assert not posterior.functional_posterior(none[0]).covariance.any()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("time_first", [False, True])
def test_padding_moves_with_its_example(time_first, sharing):
    class ByLength(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.output = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x, attention_mask):
            order = attention_mask.sum(1).argsort()
            rows = x[order].transpose(0, int(time_first))
            moved = self.hidden(rows.flatten(0, 1)).tanh().view_as(rows).transpose(0, int(time_first))
            return self.output((moved[order.argsort()] * attention_mask[:, :, None]).sum(1))

    torch.manual_seed(0)
    model, x, lengths = ByLength().double(), torch.randn(5, 4, 3).double(), torch.tensor([4, 2, 3, 1, 2])
    inputs, target = {"x": x, "attention_mask": (torch.arange(4) < lengths[:, None]).long()}, torch.arange(5) % 2
    alone = [({name: own[n, None] for name, own in inputs.items()}, target[n, None]) for n in range(5)]
    batches = [[(inputs, target)], alone]
    together, apart = (lp.KFAC(model, "classification", weight_sharing=sharing).fit(some) for some in batches)
    assert relative_error(together.precision_matrix(), apart.precision_matrix()) < EXACT


def test_examples_that_share_rows_are_told_to_be_dear():
    model, batches = Net(("merge", "stay"), ("linear", "linear")), data((6,))
    with pytest.warns(UserWarning, match=r"Which rows belong.*outer.0.weight.*6 examples"):
        lp.KFAC(model, "classification").fit(batches)


def test_transposed_convolutions_may_share_rows():
    check(Net(("merge",), ("transposed conv",)), data((4, 3)), "all")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("layout", "selection"),
    [(torch.strided, "all"), pytest.param(torch.jagged, "last_layer", marks=pytest.mark.slow)],  # torch imports more
)
def test_layers_may_run_on_nested_tensors(layout, selection):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x, key):
            parts = [row.tanh().expand(int(n) + 1, -1) for row, n in zip(self.first(x), key, strict=True)]
            nested = torch.nested.as_nested_tensor(parts, layout=layout)
            return torch.nested.to_padded_tensor(self.second(nested), 0.0).sum(1)

    torch.manual_seed(0)
    check(Nested().double(), data((3,)), selection)


def test_weak_effects_on_other_examples_are_found_where_no_rule_describes_a_weight():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            f = torch.einsum("nd,od->no", x, self.layer.weight) + self.layer.bias
            return f + 2e-4 * f.tanh().mean(0)

    torch.manual_seed(0)
    model, x = Mixed().double(), torch.randn(6, 3, dtype=torch.float64)
    batches = [((x,), torch.zeros(6).long())]
    full = lp.Full(model, "classification", prior_precision=1.0).fit(batches)
    assert relative_error(full.precision_matrix(), wanted(model, batches, full.parameter_names)) < EXACT


def test_a_wrong_rule_does_not_reach_the_curvature():
    """The invariant is that of the sums, so that it finds rules that are wrong, too."""
    from laplace_plus.network.rules import RULES  # noqa: PLC0415

    right = RULES[nn.functional.linear]

    def wrong(*args, **options):
        call = right(*args, **options)
        if call is not None:
            call.value = 2 * call.value
        return call

    model, batches = Net(("stay", "stay"), ("linear", "linear")), data((6,))
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
