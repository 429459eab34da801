"""Batches that are lists with an entry for each example, against the dense curvature of one example after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader

import laplace_plus as lp
from laplace_plus.errors import DataError
from laplace_plus.geometry import LossLandscape
from laplace_plus.network import batches
from laplace_plus.network.data_sums import DataSums, same_sum

D = torch.float64
pytestmark = [
    pytest.mark.filterwarnings("ignore:Which rows belong"),
    pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning"),
    pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning"),
]


class Sets(nn.Module):
    """Point clouds of several sizes; ``scale`` makes a list of two tensors look like two arguments."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, clouds, scale=None, shift=None):
        scale = 1.0 if scale is None else scale
        return self.outer(torch.stack([torch.tanh(self.inner(cloud)).mean(0) for cloud in clouds])) * scale


class Images(nn.Module):
    """Images of several sizes, as detection networks take them."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, images, targets=None):
        return self.head(torch.cat([torch.tanh(self.conv(image[None])).amax((2, 3)) for image in images]))


class Graphs(nn.Module):
    """Graphs as mappings, or as objects of a class of one's own."""

    def __init__(self):
        super().__init__()
        self.node, self.out = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, graphs, cutoff=1.0):
        fields = [vars(graph) if isinstance(graph, Crystal) else graph for graph in graphs]
        return self.out(torch.stack([torch.tanh(g["edges"] @ self.node(g["x"])).sum(0) for g in fields]))


class Crystal:
    def __init__(self, x, edges):
        self.x, self.edges = x, edges


def clouds(sizes):
    return [torch.randn(size, 3, dtype=D) for size in sizes]


def problem(kind, n=9):
    torch.manual_seed(0)
    y = torch.arange(n) % 3
    if kind == "clouds":
        return Sets().double(), clouds((2, 5, 3, 3, 4, 2, 5, 1, 3)), y
    if kind == "images":  # with as many channels as a batch of three has images
        return Images().double(), [torch.randn(3, 4 + k % 3, 5 + k % 2, dtype=D) for k in range(n)], y
    fields = [(torch.randn(2 + k % 3, 2, dtype=D), torch.rand(2 + k % 3, 2 + k % 3, dtype=D)) for k in range(n)]
    if kind == "objects":
        return Graphs().double(), [Crystal(*own) for own in fields], y
    return Graphs().double(), [{"x": x, "edges": edges} for x, edges in fields], y


def dense(model, examples):
    """Outputs and Jacobians of examples one by one."""
    parameters = dict(model.named_parameters())
    jacobians = []
    for one in examples:
        found = torch.func.jacrev(lambda p, one=one: functional_call(model, p, ([one],))[0])(parameters)
        jacobians.append(torch.cat([own.flatten(1) for own in found.values()], 1))
    return model(examples).detach(), torch.stack(jacobians).detach()


def ggn(model, examples):
    outputs, jacobians = dense(model, examples)
    p = outputs.softmax(-1)
    return torch.einsum("ncp,nck,nkq->pq", jacobians, p.diag_embed() - p[:, :, None] * p[:, None], jacobians)


def cut(items, y, cuts):
    return [(items[a:b], y[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]


CUTS = [(0, 4, 9), (0, 4, 8, 9), (0, 2, 4, 6, 9), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [*(("clouds", cuts) for cuts in CUTS), ("images", CUTS[1]), ("mappings", CUTS[2]), ("objects", CUTS[3])],
)
def test_lists_of_any_length_are_one_argument(kind, cuts):
    model, items, y = problem(kind)
    posterior = lp.Full(model, "classification", prior_precision=0.7).fit(cut(items, y, cuts))
    precision = ggn(model, items) + 0.7 * torch.eye(posterior.n_parameters, dtype=D)
    torch.testing.assert_close(posterior.precision_matrix(), precision, rtol=1e-9, atol=1e-9)
    outputs, jacobians = dense(model, items[:2])
    for given in (items[:2], tuple(items[:2])):
        mean, covariance = posterior.functional_posterior(given)
        torch.testing.assert_close(mean, outputs)
        torch.testing.assert_close(covariance, jacobians @ precision.inverse() @ jacobians.mT)
    diagonal = lp.Diagonal(model, "classification", prior_precision=0.7).fit(cut(items, y, cuts))
    torch.testing.assert_close(diagonal.variance(), 1 / precision.diagonal())


def of_two(items, y):
    """A loader of batches of two."""

    def collate(rows):
        return [x for x, _ in rows], torch.stack([label for _, label in rows])

    return DataLoader(list(zip(items, y, strict=True)), 2, collate_fn=collate)


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
def test_lists_pass_through_tuning_prediction_and_files(cls, tmp_path):
    model, items, y = problem("clouds")
    posterior = cls(model, "classification").fit(of_two(items, y)).fit_prior_precision("marginal_likelihood")
    pair = [items[2], items[3]]  # two clouds of three points, which might be two arguments
    expected = posterior.predictive(pair).mean
    torch.testing.assert_close(posterior.functional_posterior(pair).mean, model(pair).detach())
    torch.testing.assert_close(posterior.predict([pair, [items[0]]]).mean[:2], expected)
    torch.testing.assert_close(posterior.predict([(pair, y[2:4])]).mean, expected)
    posterior.save(tmp_path / "posterior")
    torch.testing.assert_close(lp.load(tmp_path / "posterior", model).predictive(pair).mean, expected)


def test_lists_are_tuned_by_default():
    model, items, y = problem("images")
    posterior = lp.Full(model, "classification", parameters="last_layer").fit(of_two(items, y)).fit_prior_precision()
    assert posterior.tuning is not None
    torch.testing.assert_close(posterior.functional_posterior(items[:3]).mean, model(items[:3]).detach())


def test_lists_may_stand_beside_other_inputs():
    model, items, y = problem("clouds")
    want = lp.Full(model, "classification").fit([(items, y)]).precision_matrix()
    scale = torch.ones(9, 1, dtype=D)
    for data in (
        [({"clouds": items, "scale": scale}, y)],
        [{"clouds": items[:4], "labels": y[:4]}, {"clouds": items[4:], "labels": y[4:]}],
        [(items[:4], scale[:4], y[:4]), (items[4:], scale[4:], y[4:])],
        [((items[:3],), y[:3]), ((items[3:],), y[3:])],
    ):
        posterior = lp.Full(model, "classification").fit(data)
        torch.testing.assert_close(posterior.precision_matrix(), want)


def test_shuffled_lists_are_the_same_data():
    model, items, y = problem("clouds")
    posterior = lp.SampledLaplace(model, "classification", n_samples=2).fit([(items[:4], y[:4]), (items[4:], y[4:])])
    order = [8, 3, 5, 1, 0, 2, 7, 4, 6]
    shuffled = [([items[n] for n in order[:6]], y[order[:6]]), ([items[n] for n in order[6:]], y[order[6:]])]
    sums = []
    for data in ([(items, y)], shuffled):
        found = DataSums("cpu")
        for batch in batches.iterate(data, device="cpu"):
            found.add(batch, len(batch.target))
        sums.append(found.values()[0])
    assert same_sum(*sums)
    assert posterior.is_fitted


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, a, b=None):
        return self.first(a) if b is None else self.first(a) + self.second(b)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_lists_of_arguments_stay_arguments(size):
    model, n = Pairs().double(), 6
    a, b, y = torch.randn(n, 3, dtype=D), torch.randn(n, 2, dtype=D), torch.arange(n) % 3
    cuts = [slice(k, k + size) for k in range(0, n, size)]
    nested = lp.Full(model, "classification").fit([([a[c], b[c]], y[c]) for c in cuts])
    flat = lp.Full(model, "classification").fit([(a[c], b[c], y[c]) for c in cuts])
    torch.testing.assert_close(nested.precision_matrix(), flat.precision_matrix())
    torch.testing.assert_close(nested.predictive([a[:2], b[:2]]).mean, flat.predictive((a[:2], b[:2])).mean)


def test_a_list_that_means_two_things_is_refused():
    model = Sets().double()
    two = [torch.randn(2, 3, dtype=D) for _ in range(2)]  # two clouds of two points, or two arguments
    model.forward = lambda clouds, scale=None: model.outer(  # type: ignore[method-assign]
        torch.tanh(model.inner(torch.stack([own.mean(0) for own in clouds]) if isinstance(clouds, list) else clouds))
    )
    with pytest.raises(DataError, match="one argument of the network in one batch, and several .*labels"):
        lp.Full(model, "classification").fit([(two, torch.tensor([0, 1])), (clouds((3, 4)), torch.tensor([0, 1]))])


def test_examples_are_cut_by_their_entries():
    entries = clouds((2, 2))
    marked = batches.Examples(entries)
    assert batches.batch_size(marked) == batches.batch_size({"x": marked, "n": torch.zeros(2)}) == 2
    assert batches.can_be_cut(marked, 2) and not batches.can_be_cut(marked, 3)
    assert not batches.can_be_cut(entries, 2)  # they may be two arguments
    part = batches.cut({"x": marked, "n": torch.arange(2)}, [1])
    both = batches.joined([part, {"x": marked, "n": torch.arange(2)}])
    assert len(both["x"]) == 3 and both["n"].tolist() == [1, 0, 1]
    assert part["x"][0] is entries[1] and part["n"].tolist() == [1] and type(part["x"]) is batches.Examples


def test_landscapes_of_some_examples_of_lists():
    model, items, y = problem("clouds")
    landscape = LossLandscape(model, "classification", cut(items, y, CUTS[0]))
    (part,) = landscape.subsets([torch.tensor([1, 4, 7])])
    chosen = [items[n] for n in (1, 4, 7)]
    want = 3 * nn.functional.cross_entropy(model(chosen), y[[1, 4, 7]], reduction="sum")
    prior = 0.5 * sum(p.square().sum() for p in model.parameters())
    torch.testing.assert_close(part.value(part.vector[None])[0], (want + prior).detach())
