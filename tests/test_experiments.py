"""The parts of the experiments: data, evaluation, settings and reports."""

from __future__ import annotations

import json
import math

import pytest
import torch

from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments import run as report
from laplace_plus.experiments.digits import Digits, load_digits, train_network
from laplace_plus.experiments.settings import DataSettings, TrainingSettings, folder_of, read_posteriors

# -- the digits --------------------------------------------------------------------------------------------------------


def rows(digits: Digits) -> list[set[bytes]]:
    parts = (digits["train"], digits["test"], digits["ood"])
    return [{image.numpy().tobytes() for image in part.tensors[0]} for part in parts]


def test_the_digits_are_divided_without_overlap_or_loss():
    digits = load_digits(DataSettings(held_out_classes=[3, 8], train_fraction=0.25, noise_std=0.0), seed=4)
    train, test, unknown = rows(digits)
    assert not (train & test)
    assert not (train & unknown)
    assert not (test & unknown)
    assert len(digits["train"]) + len(digits["test"]) + len(digits["ood"]) == 1797
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
    values = [0.1, 0.4, 0.7, 0.2]
    outcomes = [report.Outcome({}, {"accuracy": value}) for value in values]
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
