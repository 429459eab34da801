"""The command `wrap`, end to end on small networks, and what it refuses."""

from __future__ import annotations

import math
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cli_problems import CLASSIFIER, refused, report_of, values, wrap_config
from safetensors.torch import save_file
from torch import nn

import laplace_plus as lp
from laplace_plus import metrics
from laplace_plus.cli import main

REGRESSOR = """
import torch
from torch import nn
import laplace_plus as lp

def data(seed=0, n=80):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    return [(x, 2 * x - 1 + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64))]

def model():
    network = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        network.weight.fill_(2.0)
        network.bias.fill_(-1.0)
    return network

def likelihood():
    return lp.Gaussian(noise_std=0.3)
"""


@pytest.mark.parametrize("suffix", ["safetensors", pytest.param("pt", marks=pytest.mark.slow)])
def test_wrap_a_classifier_with_a_checkpoint(write, tmp_path, suffix):
    name = f"wrapped_classifier_{suffix}"
    write(f"{name}.py", CLASSIFIER)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    checkpoint = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        save_file(model.state_dict(), checkpoint)
    else:
        torch.save(model.state_dict(), checkpoint)
    config = wrap_config(
        name,
        tmp_path / "out",
        model_kwargs={"hidden": 5},
        checkpoint=str(checkpoint),
        ood_data=f"{name}:data",
        ood_data_kwargs={"shift": 30.0},
        posteriors=[{"class": "KFAC"}, {"class": "Full", "predict": {"link": "mc", "n_samples": 20}}],
    )
    path, random_state = list(sys.path), torch.random.get_rng_state()
    assert main(["wrap", write("wrap.yaml", config)]) == 0
    assert sys.path == path
    assert torch.equal(torch.random.get_rng_state(), random_state)

    report = report_of(tmp_path / "out")
    module = runpy.run_path(str(tmp_path / f"{name}.py"))
    inputs, targets = (torch.cat(parts) for parts in zip(*module["data"](seed=1), strict=True))
    for label, predicted in (
        ("MAP", model(inputs).detach().double().softmax(1)),
        ("KFAC", lp.load(tmp_path / "out" / "posterior-kfac", model).predictive(inputs).mean.double()),
    ):
        found = values(report, label)
        assert found["accuracy"] == [pytest.approx(float(metrics.accuracy(predicted, targets)), abs=1e-6)]
        assert found["brier_score"] == [pytest.approx(float(metrics.brier_score(predicted, targets)), rel=1e-4)]
        assert 0 <= found["ood_auroc"][0] <= 1
    assert (tmp_path / "out" / "report.png").is_file()
    assert (tmp_path / "out" / "posterior-full").is_file()


def test_wrap_a_regression(write, tmp_path, capsys):
    write("wrapped_regressor.py", REGRESSOR)
    config = wrap_config("wrapped_regressor", tmp_path / "out", likelihood="wrapped_regressor:likelihood")
    assert main(["wrap", write("wrap.yaml", config)]) == 0
    printed = capsys.readouterr().out
    assert "RMSE" in printed
    assert "CRPS" in printed
    report = report_of(tmp_path / "out")
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    (tuned,) = report["methods"]["Full"]["tuned"]
    assert tuned["noise_std"] == pytest.approx(0.1, rel=0.3)  # what the data were made with; tuning started at 0.3

    ((x, y),) = runpy.run_path(str(tmp_path / "wrapped_regressor.py"))["data"](seed=1)
    found = values(report, "MAP")
    # The network's own prediction is scored with the noise level that tuning found.
    normal = torch.distributions.Normal(2 * x - 1, tuned["noise_std"])
    assert found["root_mean_squared_error"] == [pytest.approx(float((2 * x - 1 - y).square().mean().sqrt()))]
    assert found["negative_log_likelihood"] == [pytest.approx(float(-normal.log_prob(y).mean()))]
    # The posterior's variance is larger by what the weights' uncertainty adds.
    assert values(report, "Full")["root_mean_squared_error"] == pytest.approx(found["root_mean_squared_error"])
    assert values(report, "Full")["negative_log_likelihood"] != found["negative_log_likelihood"]


THIRD_PARTY = """
import torch
import laplace_plus as lp
from laplace_plus.posteriors.state import State

class Ball(lp.Posterior):
    default_method = "sampled"

    def __init__(self, *args, radius=0.1, **kwargs):
        self.radius = radius
        super().__init__(*args, **kwargs)

    def fit_batches(self, data, *, progress=False):
        size = sum(batch.size for batch in self.batches(data, progress=progress, description="ball"))
        return State(self.network.vector(), size, 0)

    def sample(self, n, *, generator=None):
        return self.mean + self.radius * torch.randn(n, self.n_parameters, generator=generator)
"""


def test_wrap_with_a_posterior_of_ones_own(write, tmp_path, capsys):
    write("wrapped_own.py", CLASSIFIER)
    write("own_posterior.py", THIRD_PARTY)

    def config(**keys):
        entry = {"class": "own_posterior:Ball", "predict": {"n_samples": 7}, **keys}
        return write("wrap.yaml", wrap_config("wrapped_own", tmp_path / "out", posteriors=[entry]))

    assert "has no prior to tune" in refused(["wrap", config()], capsys)
    assert "no option 'size'" in refused(["wrap", config(tune=False, size=3)], capsys)
    assert main(["wrap", config(tune=False, radius=0.2)]) == 0
    assert (tmp_path / "out" / "posterior-ball").is_file()
    report = report_of(tmp_path / "out")
    assert values(report, "Ball").keys() == values(report, "MAP").keys()
    assert values(report, "Ball") != values(report, "MAP")
    assert report["methods"]["Ball"]["tuned"] == [{"prior_precision": 1.0}]


@pytest.mark.slow  # its keys: test_wrap_a_regression
def test_the_example_configuration_works_as_it_is(tmp_path, monkeypatch):
    configuration = Path(__file__).parents[2] / "configs" / "wrap_example.yaml"
    monkeypatch.chdir(tmp_path)
    assert main(["wrap", str(configuration)]) == 0
    report = report_of(tmp_path / "runs" / "wrap_example")
    assert values(report, "MAP")["root_mean_squared_error"][0] < 0.25  # the noise alone is 0.2
    # The network's own noise level is the same everywhere; its posterior knows where there were no data.
    assert values(report, "MAP")["ood_auroc"] == [0.5]
    assert values(report, "KFAC")["ood_auroc"][0] > 0.9


@pytest.mark.parametrize("name", ["subnetwork", "metric_bnn", "null_space", "riemannian", "viking"])
@pytest.mark.slow
def test_the_other_configurations_work_with_smaller_numbers(name, tmp_path, monkeypatch):
    folder = Path(__file__).parents[2] / "configs"
    config = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    config["model_kwargs"] = {"hidden": 10 if name == "subnetwork" else 4, "n_steps": 100}
    config["train_data_kwargs"] = {"n_examples": 20, "seed": 0}
    for entry in config["posteriors"]:
        if entry["class"] in ("NullSpace", "Riemannian", "VIKING"):
            entry["n_samples"] = 3
        if entry["class"] == "MetricBNN":
            entry |= {"n_steps": 2, "predict": {"n_samples": 3}}
        for part in ("method", "mode"):
            for option in {"n_steps", "epochs", "scale_epochs"} & set(entry.get(part, ())):
                entry[part][option] = 1
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    shutil.copy(folder / "example_module.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["wrap", "small.yaml"]) == 0
    report = report_of(tmp_path / "runs" / name)
    labels = [entry["label"] for entry in config["posteriors"]]
    assert list(report["methods"]) == ["MAP", *labels]
    assert all(math.isfinite(values(report, label)["negative_log_likelihood"][0]) for label in labels)


@pytest.mark.filterwarnings("ignore:Tuning by validation ended")  # the network is not a trained one
def test_tuning_by_validation_uses_the_validation_data(write, tmp_path):
    write("wrapped_validation.py", CLASSIFIER)
    keys = {"posteriors": [{"class": "Full", "tune": {"method": "validation"}}]}
    without = wrap_config("wrapped_validation", tmp_path / "out", **keys)
    assert main(["wrap", write("without.yaml", without)]) == 2
    config = wrap_config(
        "wrapped_validation",
        tmp_path / "out",
        validation_data="wrapped_validation:data",
        validation_data_kwargs={"seed": 2},
        **keys,
    )
    assert main(["wrap", write("with.yaml", config)]) == 0
    report = report_of(tmp_path / "out")
    assert math.isfinite(report["methods"]["Full"]["tuned"][0]["prior_precision"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "nowhere_at_all:model"}, "No module named 'nowhere_at_all'"),
        ({"model": "wrapped_wrongly:nothing"}, "no attribute 'nothing'"),
        ({"model": "wrapped_wrongly:count", "model_kwargs": {"n": 3}}, "returned no network"),
        ({"model_kwargs": {"depth": 3}}, "no option 'depth'"),
        ({"checkpoint": "nowhere.safetensors"}, "nowhere.safetensors"),
        ({"likelihood": "guesswork"}, "guesswork"),
        ({"posteriors": [{"class": "Full", "tune": {"speed": 1}}]}, "speed"),
        ({"posteriors": [{"class": "Full", "predict": {"speed": 1}}]}, "no option 'speed'"),
    ],
)
def test_bad_configurations_of_wrap(keys, message, write, tmp_path, capsys):
    write("wrapped_wrongly.py", CLASSIFIER)
    config = wrap_config("wrapped_wrongly", tmp_path / "out", **keys)
    assert message in refused(["wrap", write("wrap.yaml", config)], capsys)


class Surprise:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("the checkpoint was unpickled",)


@pytest.mark.parametrize("kind", ["pickle", "garbage", "garbage as safetensors"])
def test_checkpoints_that_are_refused(kind, write, tmp_path, capsys):
    write("wrapped_checkpoint.py", CLASSIFIER)
    checkpoint = tmp_path / ("weights.safetensors" if kind.endswith("safetensors") else "weights.pt")
    if kind == "pickle":
        torch.save({"0.weight": Surprise()}, checkpoint)
    else:
        checkpoint.write_bytes(b"not weights at all")
    config = wrap_config("wrapped_checkpoint", tmp_path / "out", checkpoint=str(checkpoint))
    message = refused(["wrap", write("wrap.yaml", config)], capsys)
    assert str(checkpoint) in message
