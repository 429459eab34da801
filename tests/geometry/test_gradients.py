"""Gradients at many points together are those of each point alone, whatever the network can do."""

from functools import partial

import pytest
import torch
from torch import nn

from laplace_plus.geometry import LossLandscape
from laplace_plus.geometry.landscape import gradients


class Keyed(nn.Module):
    """Takes a mapping, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, words, number):
        self.calls += 1
        return self.head(torch.tanh(self.norm(torch.cat([self.embed(words).mean(1), number], 1))))


class Branching(nn.Linear):
    """Looks at its values, which nothing that is mapped can do."""

    def forward(self, x):
        y = super().forward(x)
        return y if float(y.detach().sum()) > 0 else 2 * y


class Misleading(nn.Linear):
    """Gives other outputs under a map than without."""

    def forward(self, x):
        y = super().forward(x)
        return 2 * y if torch._C._functorch.maybe_get_level(self.weight) > 0 else y


def data(keyed=False, n=20):
    source = torch.Generator().manual_seed(0)
    y = torch.arange(n) % 3
    x = torch.randn(n, 5, generator=source, dtype=torch.float64)
    if keyed:
        words = torch.randint(0, 7, (n, 4), generator=source)
        return [{"words": words[s], "number": x[s, :1], "labels": y[s]} for s in (slice(0, 12), slice(12, n))]
    return [(x[:12], y[:12]), (x[12:], y[12:])]


class OneByOne(LossLandscape):
    """Plain backward passes, point by point."""

    def gradient(self, points):
        parts = [gradients(partial(self._batch_loss, batch), points) for batch in self._batches()]
        return self.prior_gradient(points) + sum(parts)


def both(net, batches):
    torch.manual_seed(0)
    options = {"prior_precision": 0.3, "temperature": 0.5}
    one, other = (cls(net, "classification", batches, **options) for cls in (LossLandscape, OneByOne))
    return one, other, one.vector + 0.3 * torch.randn(6, len(one.vector), dtype=torch.float64)


@pytest.mark.parametrize(
    ("net", "keyed", "way"),
    [
        (nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)), False, "recorded"),
        (nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 3)), False, "recorded"),
        (Keyed(), True, "recorded"),
        (Branching(5, 3), False, "one by one"),
        (Misleading(5, 3), False, "one by one"),
    ],
    ids=["perceptron", "convolution", "keyed", "branching", "misleading"],
)
def test_gradients_are_those_of_each_point(net, keyed, way):
    one, other, points = both(net.double().eval(), data(keyed))
    for step in range(5):
        here = points + 0.1 * step
        torch.testing.assert_close(one.gradient(here), other.gradient(here), rtol=1e-10, atol=1e-10)
        if step == 1:
            assert one.first_order.way == ("mapped" if way == "recorded" else way)
            one.first_order.expect(1000)
    assert one.first_order.way == way


def test_subsets_share_what_was_learnt():
    one, other, points = both(nn.Linear(5, 3).double(), data())
    one.first_order.expect(1000)
    orders = [torch.randperm(20, generator=torch.Generator().manual_seed(k))[:6] for k in range(5)]
    for mine, theirs in zip(one.subsets(orders), other.subsets(orders), strict=True):
        torch.testing.assert_close(mine.gradient(points), theirs.gradient(points), rtol=1e-10, atol=1e-10)
    assert one.first_order.way == "recorded"


def test_the_largest_curvature():
    x, y = (torch.cat(part) for part in zip(*data(), strict=True))
    landscape = LossLandscape(nn.Linear(5, 3).double(), "classification", [(x, y)], prior_precision=0.3)
    probabilities = landscape.network.forward(x).softmax(-1)
    middle = probabilities.diag_embed() - probabilities[:, :, None] * probabilities[:, None]
    ones = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    dense = torch.einsum("ni,ncd,nj->cidj", ones, middle, ones).reshape(18, 18)
    expected = float(torch.linalg.eigvalsh(dense)[-1])
    assert landscape.largest_curvature(landscape.vector) == pytest.approx(expected + 0.3, rel=1e-3)


def test_the_largest_curvature_where_a_log_density_is_not_concave():
    """``log(1 + r²)`` at ``r = 3`` has the second derivative ``2 (1 − r²) / (1 + r²)² = −0.16``."""
    x, y = torch.eye(3, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    net = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[3.0, 0.0, 0.5]]))
    landscape = LossLandscape(net, lambda f, t: -(1 + (f - t).square().sum(-1)).log(), [(x, y)])
    assert landscape.largest_curvature(landscape.vector) == pytest.approx(3.0)
