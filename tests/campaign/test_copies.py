"""Copies of every class go their own ways, hyperparameters are copied, and loading draws no random numbers."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaign.cases import CLASSES, DATA, FURTHER, answer, fitted, model_of, network_of, same, seeded

import laplace_plus as lp
from laplace_plus.errors import LaplacePlusError

pytestmark = pytest.mark.slow
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": lambda posterior: pickle.loads(pickle.dumps(posterior)),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def altered(posterior: Any) -> None:
    """Other data, and another prior where the class takes one after the fit."""
    posterior.fit(DATA[1:], generator=seeded(3))
    try:
        posterior.prior_precision = 7.0
    except LaplacePlusError:
        return


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*CLASSES, *FURTHER])
def test_copies_are_independent(name: str, way: str) -> None:
    net = network_of(name)
    posterior = fitted(name, net)
    if name == "Riemannian":  # a copy knows no data to draw by
        posterior.draw(generator=seeded(2))
    other, known = WAYS[way](posterior), answer(posterior)
    assert same(answer(other), known, 1e-12)
    altered(other)
    assert same(answer(posterior), known, 1e-12)
    changed = answer(other)
    assert not same(changed, known, 1e-9)
    altered(posterior)
    posterior.fit(DATA[:1], generator=seeded(4))
    assert same(answer(other), changed, 1e-12)


@pytest.mark.parametrize("name", CLASSES)
def test_hyperparameters_are_copied(name: str) -> None:
    net = network_of(name)
    given = {"prior_precision": torch.tensor(10.0).double(), "temperature": torch.tensor(1.5).double()}
    given |= {} if name == "SpatialField" else {"prior_mean": torch.tensor(0.1).double()}
    taken = {}
    for key, value in given.items():
        try:
            CLASSES[name](net, "classification", **{key: value.clone()})
        except (LaplacePlusError, TypeError):  # the case has its own, or the class takes none
            continue
        taken[key] = value
    assert taken
    posterior = CLASSES[name](net, "classification", **taken)
    for key, value in taken.items():
        before = getattr(posterior, key).clone()
        value.mul_(5)
        assert torch.equal(getattr(posterior, key), before), key


@pytest.mark.parametrize("name", [*CLASSES, *FURTHER])
def test_loading_draws_no_random_numbers(name: str, tmp_path: Path) -> None:
    posterior = fitted(name)
    posterior.save(tmp_path / "it")
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    lp.load(tmp_path / "it", model_of(posterior))
    now = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], now[0]) and (before[1] == now[1]).all() and before[2] == now[2]
