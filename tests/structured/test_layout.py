"""Places reach the entries of a list of positions."""

from __future__ import annotations

import torch

from laplace_plus.structured.layout import Places


def test_gather_scatter_and_add():
    index = torch.randperm(30, generator=torch.Generator().manual_seed(0)).view(2, 3, 5)
    places = Places(index)
    assert places.shape == (2, 3, 5)
    for lead in ((), (2,), (2, 3)):
        vector = torch.randn(*lead, 33, requires_grad=True)
        found = places.gather(vector)
        assert torch.equal(found, vector[..., index])
        weights = torch.randn(found.shape)
        (gradient,) = torch.autograd.grad((found * weights).sum(), vector)
        (want,) = torch.autograd.grad((vector[..., index] * weights).sum(), vector)
        assert torch.equal(gradient, want)
    vectors, values = torch.zeros(66, 2).T[:, ::2], torch.randn(2, *index.shape)  # need not be contiguous
    places.scatter_(vectors, values)
    assert torch.equal(places.gather(vectors), values)
    places.add_(vectors, values)
    assert torch.equal(places.gather(vectors), 2 * values)
