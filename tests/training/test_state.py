"""A run that goes on from a state equals one that was not interrupted, to the last bit."""

from __future__ import annotations

import io

import pytest
import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from training.problems import TwoLayers, classes, classifier, linear_data, loader

import laplace_plus as lp
from laplace_plus.errors import CheckpointError


def numbers_of(result):
    hyper = [result.posterior.prior_precision, result.posterior.mean, *(u.prior_precision for u in result.updates)]
    values = torch.tensor([*result.losses, *result.evidences, result.evidence, result.epoch])
    return [*result.model.state_dict().values(), *hyper, values]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def run(state=None, *, task="classification", **options):
    torch.manual_seed(3)
    settings = {"epochs": 9, "frequency": 2, "hyper_steps": 5, "optimizer_options": {"lr": 1e-2}, **options}
    if task == "classification":
        net, data, likelihood = classifier(dropout=0.3, norm=True), loader(*classes(32)), "classification"
    else:
        net, data, likelihood = TwoLayers(), loader(*linear_data(32)), lp.Gaussian(0.7)
    return lp.train_marginal_likelihood(net, data, likelihood, state=state, **settings)


CASES = {
    "Adam, dropout and batch normalisation": {},
    "regression": {"task": "regression"},
    "no shuffling generator of its own": {"curvature_loader": [classes()]},
    "last instead of best": {"early_stopping": False, "hyper_steps": None},
    "one precision": {"structure": "scalar", "posterior": "Diagonal"},
    "a precision for each entry": {"structure": "diagonal", "posterior": lp.Diagonal},
    "SGD": {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}},
    "cosine": {"scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 9)},
    "plateau": {"scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1)},
    "a function": {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))},
    "two schedules": {
        "scheduler": lambda optimizer: SequentialLR(
            optimizer, [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.9)], [3]
        )
    },
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # by torch 2.6's own SequentialLR
@pytest.mark.quick("Adam, dropout and batch normalisation", "regression", "two schedules")
@pytest.mark.parametrize("case", CASES)
def test_continued_equals_uninterrupted(case):
    whole, begun = run(**CASES[case]), run(epochs=4, **CASES[case])
    torch.manual_seed(999)
    torch.randn(7)
    epochs = []
    continued = run(through_a_file(begun.state), callback=lambda update: epochs.append(update.epoch), **CASES[case])
    assert epochs == [6, 8, 9]
    finished = run(continued.state, **CASES[case])  # there is nothing left to do but to fit the posterior
    for result in (continued, finished):
        for one, other in zip(numbers_of(whole), numbers_of(result), strict=True):
            assert torch.equal(one, other)


def test_sampled_curvature_continues_with_the_same_labels():
    options = {"backend": lp.Native("ggn_mc", n_samples=1)}
    whole = run(epochs=4, generator=torch.Generator().manual_seed(5), **options)
    begun = run(epochs=2, generator=torch.Generator().manual_seed(5), **options)
    continued = run(begun.state, epochs=4, generator=torch.Generator().manual_seed(77), **options)
    assert whole.evidences == continued.evidences


def test_states_are_copies():
    begun = run(epochs=2)
    before = begun.state["weights"]["0.weight"].clone()
    first, second = run(begun.state, epochs=4), run(begun.state, epochs=4)
    assert torch.equal(begun.state["weights"]["0.weight"], before)
    assert first.evidences == second.evidences


def test_states_of_other_runs_are_refused():
    begun = run(epochs=2)
    with pytest.raises(CheckpointError, match="not one of this training"):
        run(begun.state, task="regression")
    with pytest.raises(CheckpointError, match="not one of this training"):
        run(begun.state, generator=torch.Generator())
    with pytest.raises(CheckpointError, match="not one of this training"):
        run({"epoch": 3})
