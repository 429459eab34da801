"""Distances to known features, against brute force, and what they tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import EmptyDataError, UnsupportedError


def network(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def brute_force(features, known, k):
    own, rows = (f / f.norm(dim=-1, keepdim=True) for f in (features, known))
    return (own[:, None] - rows).norm(dim=-1).sort(1).values[:, k - 1]


@pytest.mark.parametrize("neighbours", [1, 3])
def test_distances_are_those_of_each_pair(neighbours):
    model = network(3, 7, 5, 2)
    rows, x = torch.randn(20, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    data = [(part, torch.zeros(len(part), dtype=torch.long)) for part in rows.split(8)]
    distance = lp.FeatureDistance(lp.Diagonal(model, "classification"), data, neighbours=neighbours)
    exact = brute_force(model[:-1](x), model[:-1](rows), neighbours)
    torch.testing.assert_close(distance(x), exact.detach())
    assert distance(rows).max() < 1e-6 or neighbours > 1


class Sorted(nn.Module):
    """Sorts its rows before the last layer, and puts them back."""

    def __init__(self):
        super().__init__()
        self.body, self.head = network(3, 6, seed=1), nn.Linear(6, 2).double()

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.head(self.body(x[order]))[order.argsort()]


def test_rows_that_a_network_sorts_keep_their_distances():
    model, x = Sorted(), torch.randn(9, 3, dtype=torch.float64)
    rows = torch.randn(12, 3, dtype=torch.float64)
    distance = lp.FeatureDistance(lp.KFAC(model, "regression"), [(rows, torch.zeros(12, 2).double())])
    torch.testing.assert_close(distance(x), brute_force(model.body(x), model.body(rows), 1).detach())


def test_each_position_of_a_sequence_has_its_own():
    model = network(4, 6, 3).train()
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    distance = lp.FeatureDistance(lp.KFAC(model, "classification"), [(x, torch.zeros(5, 7, dtype=torch.long))])
    found = distance(torch.randn(2, 7, 4, dtype=torch.float64))
    assert found.shape == (2, 7) and (found > 0).all() and model.training


def test_kinds_that_nobody_trained_for_are_far():
    generator = torch.Generator().manual_seed(0)
    centres = 4 * torch.eye(6)[:4]  # three classes and a fourth kind, along axes of their own
    kinds = [centre + torch.randn(60, 6, generator=generator) for centre in centres]
    x, y = torch.cat(kinds[:3]), torch.arange(3).repeat_interleave(60)
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = lp.KFAC(model, "classification")
    distance = lp.FeatureDistance(posterior, [(x[::2], y[::2])])
    assert lp.metrics.ood_auroc(distance(x[1::2]), distance(kinds[3])) > 0.95


def test_what_cannot_be_measured_is_said():
    model = network(3, 4, 2)
    posterior = lp.KFAC(model, "regression")
    with pytest.raises(EmptyDataError, match=r"Too few known rows.*(?s:.*)2 or more"):
        lp.FeatureDistance(posterior, [(torch.randn(1, 3).double(), torch.zeros(1, 2).double())], neighbours=2)
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with pytest.raises(UnsupportedError, match="last layer"):
        lp.FeatureDistance(lp.KFAC(image, "regression"), [(torch.randn(4, 1, 4, 4), torch.zeros(4, 8))])
