"""The parts of the experiments: data, evaluation, settings and reports."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus import likelihoods
from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments import run as report
from laplace_plus.experiments.comparison import (
    Classified,
    Outcome,
    Regressed,
    gather,
    gather_uncertainties,
)
from laplace_plus.experiments.digits import Digits, load_digits, train_network
from laplace_plus.experiments.settings import DataSettings, TrainingSettings, folder_of, read_posteriors
from laplace_plus.network import batches

# -- the digits --------------------------------------------------------------------------------------------------------


def rows(digits: Digits) -> list[set[bytes]]:
    parts = (digits["train"], digits["test"], digits["out_of_distribution"])
    return [{image.numpy().tobytes() for image in part.tensors[0]} for part in parts]


def test_the_digits_are_divided_without_overlap_or_loss():
    digits = load_digits(DataSettings(held_out_classes=[3, 8], train_fraction=0.25, noise_std=0.0), seed=4)
    train, test, unknown = rows(digits)
    assert not (train & test)
    assert not (train & unknown)
    assert not (test & unknown)
    assert len(digits["train"]) + len(digits["test"]) + len(digits["out_of_distribution"]) == 1797
    assert len(digits["train"]) == round(0.25 * (len(digits["train"]) + len(digits["test"])))
    for part in (digits["train"], digits["test"]):
        images, labels = part.tensors
        assert images.shape[1:] == (1, 8, 8)
        assert images.min() >= 0
        assert images.max() == 1
        assert set(labels.tolist()) == set(range(8))


def test_training_learns_repeats_and_leaves_the_global_random_state():
    digits = load_digits(DataSettings(train_fraction=0.3, noise_std=0.0), seed=0)
    before = torch.random.get_rng_state()
    model = train_network(digits, TrainingSettings(epochs=8), seed=0)
    again = train_network(digits, TrainingSettings(epochs=8), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not model.training
    images, labels = digits["train"].tensors
    with torch.no_grad():
        assert torch.equal(model(images), again(images))
        assert (model(images).argmax(1) == labels).float().mean() > 0.8  # chance is 1/8


# -- evaluation --------------------------------------------------------------------------------------------------------


def gathered(model: nn.Module, likelihood: likelihoods.Likelihood, data: list) -> Classified | Regressed:
    predict = lp.Ensemble([model], likelihood).predictive
    return gather(predict, likelihood, batches.iterate(data, device="cpu"))


def identity(n: int) -> nn.Module:
    model = nn.Linear(n, n, bias=False, dtype=torch.float64)
    nn.init.eye_(model.weight)
    return model


def test_the_point_prediction_of_a_classifier_is_its_softmax():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)).double()
    x, y = torch.randn(10, 3).double(), torch.randint(4, (10,))
    found = gathered(model, likelihoods.Categorical(), [(x[:6], y[:6]), (x[6:], y[6:])])
    assert model.training  # dropout was off all the same, and is on again
    assert isinstance(found, Classified)
    probabilities = model[0](x).detach().softmax(1)
    torch.testing.assert_close(found.probabilities, probabilities)
    assert torch.equal(found.targets, y)
    scores = found.scores()
    assert scores["negative_log_likelihood"] == pytest.approx(float(nn.functional.nll_loss(probabilities.log(), y)))
    entropy = torch.distributions.Categorical(probabilities).entropy()
    torch.testing.assert_close(found.uncertainty(), entropy)
    data = [(x, torch.full((10,), -100))]  # targets that mean nothing
    likelihood = likelihoods.Categorical()
    unknown = gather_uncertainties(
        lp.Ensemble([model], likelihood).predictive, likelihood, batches.iterate(data, device="cpu")
    )
    torch.testing.assert_close(unknown, entropy)


def test_tokens_are_flattened_and_ignored_ones_left_out():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, -100, 4], [-100, 2, 1]])
    found = gathered(identity(5), likelihoods.Categorical(), [(logits, targets)])
    assert isinstance(found, Classified)
    assert found.targets.tolist() == [0, 4, 2, 1]
    torch.testing.assert_close(found.probabilities, logits.softmax(-1)[targets >= 0])


def test_yes_or_no_has_two_columns():
    logits = torch.tensor([[-1.0], [2.0]], dtype=torch.float64)
    found = gathered(identity(1), likelihoods.Bernoulli(), [(logits, torch.tensor([0, 1]))])
    assert isinstance(found, Classified)
    yes = logits[:, 0].sigmoid()
    torch.testing.assert_close(found.probabilities, torch.stack([1 - yes, yes], 1))
    assert found.scores()["accuracy"] == 1


def test_the_scores_of_regression():
    torch.manual_seed(0)
    mean, targets = torch.randn(50, 2, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    found = gathered(identity(2), likelihoods.Gaussian(noise_std=0.7), [(mean, targets)])
    assert isinstance(found, Regressed)
    normal = torch.distributions.Normal(mean, 0.7)
    scores = found.scores()
    assert scores["root_mean_squared_error"] == pytest.approx(float((mean - targets).square().mean().sqrt()))
    assert scores["negative_log_likelihood"] == pytest.approx(float(-normal.log_prob(targets).sum(1).mean()))
    # CRPS = E|X - y| - E|X - X'| / 2, here on a fine grid of quantiles
    grid = normal.icdf(((torch.arange(4001, dtype=torch.float64) + 0.5) / 4001)[:, None, None])
    spread = 0.7 / math.sqrt(math.pi)  # E|X - X'| / 2 of a normal distribution
    assert scores["crps"] == pytest.approx(float((grid - targets).abs().mean() - spread), rel=1e-3)
    torch.testing.assert_close(found.uncertainty(), torch.full((50,), 2 * 0.49, dtype=torch.float64))


# -- settings ----------------------------------------------------------------------------------------------------------


def test_posteriors_are_read():
    first, second = read_posteriors(
        [
            {"class": "KFAC", "label": "KFAC, layer by layer", "tune": {"structure": "layerwise"}},
            {"class": "Full", "parameters": "last_layer", "tune": False, "predict": {"link": "mc"}},
        ]
    )
    assert first.posterior_class.__name__ == "KFAC"
    assert folder_of(first.label) == "posterior-kfac-layer-by-layer"
    assert first.tune == {"structure": "layerwise"}
    assert (second.label, second.options, second.tune) == ("Full", {"parameters": "last_layer"}, None)
    assert second.predict == {"link": "mc"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "number of posteriors"),
        ([{"parameters": "all"}], "has no class"),
        ([{"class": "KFOC"}], "KFOC"),
        ([{"class": "KFAC", "colour": "red"}], "no option 'colour'"),
        ([{"class": "KFAC", "likelihood": "binary"}], "no option 'likelihood'"),
        ([{"class": "KFAC"}, {"class": "KFAC"}], "'KFAC' is taken"),
        ([{"class": "KFAC", "label": "MAP"}], "'MAP' is taken"),
        ([{"class": "math:sqrt"}], "cannot be registered"),
        ([{"class": "laplace_plus.nowhere:KFAC"}], "No module"),
    ],
)
def test_posteriors_that_cannot_be_read(entries, message):
    with pytest.raises(ConfigurationError, match=message):
        read_posteriors(entries)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_mean_and_standard_error():
    predictions = Classified(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))
    values = [0.1, 0.4, 0.7, 0.2]
    outcomes = [Outcome(predictions, {"accuracy": value}, {"predict": 1.0}) for value in values]
    found = report.summary(outcomes)["metrics"]["accuracy"]
    sample = torch.tensor(values, dtype=torch.float64)
    assert found["mean"] == pytest.approx(float(sample.mean()))
    assert found["standard_error"] == pytest.approx(float(sample.std(correction=1) / 2))
    single = {"mean": 0.1, "standard_error": None, "values": [0.1]}
    assert report.summary(outcomes[:1])["metrics"]["accuracy"] == single


def test_json_is_valid_whatever_the_numbers(tmp_path):
    report.write_json(tmp_path / "x.json", {"a": math.inf, "b": [math.nan, 1.5], "c": {"d": "é"}})
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5], "c": {"d": "é"}}
