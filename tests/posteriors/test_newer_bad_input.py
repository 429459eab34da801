"""Bad input to the classes beside the Gaussian ones gets an error that says what is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import LaplacePlusError

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3
NOTHING = [(X, torch.full_like(Y, -100))]
BOX = [[-9.0] * 3, [9.0] * 3]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Any) -> Any:
        return self.inner(x).detach()


def field(model: nn.Module, **options: Any) -> lp.SpatialField:
    return lp.SpatialField(model, "classification", box=BOX, **{"resolution": 1, **options})


def last_layer(**options: Any) -> lp.VariationalLastLayer:
    return lp.VariationalLastLayer(net(), "classification", max_iterations=5, **options)


def pair(**options: Any) -> lp.Mixture:
    return lp.Mixture([lp.Full(net(), "classification").fit([(X, Y)])] * 2, **options)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "ABNN, detached": (lambda: lp.ABNN(Detached(), "classification").fit([(X, Y)]), "is zero"),
    "field, lazy": (lambda: field(nn.LazyLinear(3)), "not initialised"),
    "field, a trillion cells": (lambda: field(net(), resolution=10**12), "would not fit"),
    "last layer, no labels": (lambda: last_layer().fit(NOTHING), "is zero"),
    "last layer, prior mean": (lambda: last_layer(prior_mean=torch.zeros(7)).fit([(X, Y)]), "prior mean"),
    "last layer, odd samples": (lambda: last_layer(n_samples=3), "Expected"),
    "last layer, no input": (lambda: last_layer().fit([(X, Y)]).predictive(X[:0]), "at least one example"),
    "mixture of numbers": (lambda: lp.Mixture([1, 2]), "cannot be mixed"),
    "mixture of one": (lambda: lp.Mixture(last_layer()), "cannot be mixed"),
    "mixture, text": (lambda: pair(weights=["a", "b"]), "numbers"),
    "ensemble of one": (lambda: lp.Ensemble(net(), "classification"), "one or more models"),
    "ensemble, no input": (lambda: lp.Ensemble([net()], "classification").predictive(X[:0]), "at least one example"),
    "ensemble, generator": (
        lambda: lp.Ensemble([net()], "classification").predictive(X, generator=3),
        "no torch.Generator",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str) -> None:
    call, said = CASES[case]
    with pytest.raises(LaplacePlusError, match=said):
        call()
