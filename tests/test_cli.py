"""The command line, end to end on small problems."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import laplace_plus as lp
from laplace_plus import metrics
from laplace_plus.cli import main
from laplace_plus.experiments.digits import convolutional_network, load_digits
from laplace_plus.experiments.settings import DataSettings

RUN = """
seeds: 1
data: {train_fraction: 0.3, held_out_classes: [3, 4, 5, 6, 7, 8, 9]}
training: {epochs: 2, learning_rate: 0.01}
posteriors:
  - class: KFAC
  - class: Full
    label: last layer
    parameters: last_layer
"""


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write_file


@pytest.fixture
def run_digits(write, tmp_path):
    def run(*options, folder="out", config=RUN):
        output = tmp_path / folder
        code = main(["run", write("digits.yaml", config), "--output", str(output), *options])
        return code, report_of(output), output

    return run


def values(report, method):
    return {name: entry["values"] for name, entry in report["methods"][method]["metrics"].items()}


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_reports_what_its_own_files_give(run_digits, capsys):
    code, report, output = run_digits()
    assert code == 0
    printed = capsys.readouterr()
    for word in ("accuracy", "NLL", "Brier", "ECE", "OOD AUROC", "MAP", "KFAC", "last layer"):
        assert word in printed.out
    assert list(report["methods"]) == ["MAP", "KFAC", "last layer"]
    assert (output / "report.png").read_bytes().startswith(b"\x89PNG")

    digits = load_digits(DataSettings(train_fraction=0.3, held_out_classes=[3, 4, 5, 6, 7, 8, 9]), seed=0)
    assert report["data"]["test"] == len(digits["test"])
    model = convolutional_network(3)
    model.load_state_dict(load_file(output / "model.safetensors"))
    images, labels = digits["test"].tensors
    with torch.no_grad():
        point = model(images).double().softmax(1)
        unknown = model(digits["ood"].tensors[0]).double().softmax(1)
    expected = {"MAP": point}
    for label, folder in (("KFAC", "posterior-kfac"), ("last layer", "posterior-last-layer")):
        posterior = lp.load(output / folder, model)
        expected[label] = posterior.predictive(images).mean.double()
        (tuned,) = report["methods"][label]["tuned"]
        assert tuned["log_marginal_likelihood"] == pytest.approx(float(posterior.log_marginal_likelihood()), rel=1e-5)
        assert tuned["prior_precision"] == pytest.approx(float(posterior.prior_precision), rel=1e-5)
    for label, probabilities in expected.items():
        found = values(report, label)
        assert found["accuracy"] == [pytest.approx(float(metrics.accuracy(probabilities, labels)), abs=1e-6)]
        nll = float(metrics.negative_log_likelihood(probabilities, labels))
        assert found["negative_log_likelihood"] == [pytest.approx(nll, rel=1e-4)]
        assert report["methods"][label]["metrics"]["brier_score"]["standard_error"] is None

    def entropy(probabilities: torch.Tensor):
        return torch.distributions.Categorical(probabilities).entropy()

    auroc = float(metrics.ood_auroc(entropy(point), entropy(unknown)))
    assert values(report, "MAP")["ood_auroc"] == [pytest.approx(auroc, abs=1e-4)]


# -- wrap --------------------------------------------------------------------------------------------------------------

CLASSIFIER = """
import torch
from torch import nn

def data(seed=0, n=60, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    points = torch.randn(n, 2, generator=generator) + 2 * torch.eye(3)[labels, :2] + shift
    return [(points[:40], labels[:40]), (points[40:], labels[40:])]

def model(hidden=8):
    network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    return network

def count(n):
    return n
"""

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


def report_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


def wrap_config(module, output, **keys):
    config = {
        "model": f"{module}:model",
        "train_data": f"{module}:data",
        "test_data": f"{module}:data",
        "test_data_kwargs": {"seed": 1},
        "posteriors": [{"class": "Full"}],
        "output": str(output),
        **keys,
    }
    return json.dumps({key: value for key, value in config.items() if value is not None})  # JSON is YAML


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
    configuration = Path(__file__).parents[1] / "configs" / "wrap_example.yaml"
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
    folder = Path(__file__).parents[1] / "configs"
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


# -- evaluate ----------------------------------------------------------------------------------------------------------

PROBLEM = (
    CLASSIFIER
    + """
def problem(form="tuple"):
    parts = {"model": model(), "train": data(), "test": data(seed=1, n=90), "validation": data(seed=2)}
    forms = {"tuple": tuple(parts.values()), "mapping": {**parts, "ood": data(seed=3, shift=20.0)}}
    return {**forms, "nothing": parts["model"], "more": {**parts, "x": 1}}[form]
"""
)


@pytest.mark.filterwarnings("ignore:Tuning by validation ended")  # the network is not a trained one
def test_evaluate_says_how_good_it_is(write, tmp_path, capsys, monkeypatch):
    write("evaluated.py", PROBLEM)
    monkeypatch.chdir(tmp_path)
    tuned = []
    tune = lp.KFAC.fit_prior_precision
    monkeypatch.setattr(lp.KFAC, "fit_prior_precision", lambda self, **own: tuned.append(own) or tune(self, **own))
    assert main(["evaluate", "evaluated:problem", "--output", "out"]) == 0
    assert [[*own] for own in tuned] == [["data"]]  # the validation data
    printed = capsys.readouterr().out
    sys.path.insert(0, str(tmp_path))
    torch.manual_seed(0)
    module = runpy.run_path("evaluated.py")
    report = lp.evaluate(lp.load("out/posterior-kfac", module["model"]()), module["data"](seed=1, n=90))
    assert report.verdict in " ".join(printed.split())
    assert report.verdict in (tmp_path / "out" / "report-kfac.html").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert values(report_of(tmp_path / "out"), "KFAC")["accuracy"] == [report["accuracy"].value]
    options = ["--function_kwargs", "{form: mapping}", "--posteriors", "[{class: Diagonal}]", "--output", "more"]
    assert main(["evaluate", "evaluated:problem", *options]) == 0
    assert "OOD FPR95" in capsys.readouterr().out


@pytest.mark.parametrize(("form", "message"), [("nothing", "There is no train"), ("more", "no entry 'x'")])
def test_evaluate_says_what_is_missing(form, message, write, tmp_path, monkeypatch, capsys):
    write("evaluated_wrongly.py", PROBLEM)
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "evaluated_wrongly:problem", "--function_kwargs", f"{{form: {form}}}", "--output", "out"]
    assert message in refused(command, capsys)


# -- predict -----------------------------------------------------------------------------------------------------------

SAVED = """
import torch
from torch import nn

def network(outputs=3, size=2):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(size, outputs))

def halved(batch):
    return batch / 2
"""


@pytest.fixture
def saved(write, tmp_path):
    """A saved posterior, and what to call with."""

    def make(likelihood="classification", outputs=3, size=2):
        write("saved_network.py", SAVED)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(size, outputs))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(20, size, generator=generator)
        y = x[:, :outputs] if likelihood == "regression" else torch.randint(0, outputs, (20,), generator=generator)
        posterior = lp.KFAC(model, likelihood).fit([(x, y)])
        posterior.save(tmp_path / "posterior")
        settings = {
            "model": "saved_network:network",
            "model_kwargs": {"outputs": outputs, "size": size},
            "posterior": str(tmp_path / "posterior"),
            "batch_size": 2,
        }
        return posterior, ["predict", write("predict.yaml", yaml.safe_dump(settings))]

    return make


def test_predictions_of_a_table(saved, write, tmp_path):
    posterior, command = saved()
    x = torch.tensor([[0.5, -1.0], [2.0, 1e-3], [3.0, 4.0]])
    text = "\n".join(",".join(map(repr, row)) for row in x.tolist())
    prediction = posterior(x)
    wanted = torch.cat([prediction.mean, prediction.epistemic, prediction.entropy()[:, None]], 1)
    for name, content in (("plain.csv", text), ("named.csv", f"length,e\n{text}\n")):
        output = tmp_path / "new" / "found.csv"
        assert main([*command, "--inputs", write(name, content), "--output", str(output)]) == 0
        first, *lines = output.read_text(encoding="utf-8").splitlines()
        assert first == "mean_0,mean_1,mean_2,epistemic_0,epistemic_1,epistemic_2,entropy"
        found = torch.tensor([[float(number) for number in line.split(",")] for line in lines])
        torch.testing.assert_close(found[:, [0, 1, 2, 6]], wanted[:, [0, 1, 2, 6]])
        torch.testing.assert_close(found[:, 3:6], wanted[:, 3:6], rtol=1, atol=0.05)  # by Monte Carlo


def test_predictions_of_arrays(saved, tmp_path):
    posterior, command = saved("regression", outputs=1)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    np.savez(tmp_path / "in.npz", x=x.double().numpy())
    options = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
    assert main([*command, *options, "--transform", "saved_network:halved"]) == 0
    prediction = posterior(x / 2)
    with np.load(tmp_path / "out.npz") as archive:
        found = dict(archive)
    for name in ("mean", "std"):
        torch.testing.assert_close(torch.from_numpy(found[name]), getattr(prediction, name))
    torch.testing.assert_close(torch.from_numpy(found["entropy"]), prediction.entropy())


def test_predictions_of_a_folder_of_images(saved, tmp_path):
    image = pytest.importorskip("PIL.Image")
    posterior, command = saved(size=4 * 5)
    pixels = torch.randint(0, 256, (3, 4, 5), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    (tmp_path / "images").mkdir()
    for name, one in zip("bca", pixels, strict=True):
        image.fromarray(one.numpy()).save(tmp_path / "images" / f"{name}.png")
    (tmp_path / "images" / "notes.txt").write_text("no image", encoding="utf-8")
    output = tmp_path / "found.csv"
    assert main([*command, "--inputs", str(tmp_path / "images"), "--output", str(output)]) == 0
    rows = [line.split(",") for line in output.read_text(encoding="utf-8").splitlines()[1:]]
    assert [row[0] for row in rows] == ["a.png", "b.png", "c.png"]
    wanted = posterior(pixels[[2, 0, 1], None] / 255).mean
    torch.testing.assert_close(torch.tensor([[float(n) for n in row[1:4]] for row in rows]), wanted)


def test_inputs_that_cannot_be_read_are_refused(saved, write, tmp_path, capsys):
    _, command = saved()
    for inputs in (str(tmp_path / "none.csv"), write("words.csv", "a,b\nc,d\n"), write("empty.csv", ""), str(tmp_path)):
        message = refused([*command, "--inputs", inputs, "--output", str(tmp_path / "o.csv")], capsys)
        assert "inputs cannot be read" in message
    message = refused([*command, "--inputs", write("fine.csv", "1,2\n"), "--output", str(tmp_path / "o.txt")], capsys)
    assert "'.csv', '.npz'" in message


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(arguments, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("laplace-plus: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "command"),
        (["warp"], "wrap"),
        (["run", "nowhere.yaml"], "nowhere.yaml"),
        (["run", "--seeds", "0"], "seeds"),
        (["run", "--training.epoch", "3"], "training.epoch"),
        (["run", "--data.train_fraction", "1.0"], "data.train_fraction"),
        (["run", "--data.held_out_classes", "[10]"], "held_out_classes"),
        (["run", "--posteriors", "[]"], "number of posteriors"),
        (["wrap"], "model"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert message in refused(arguments, capsys)


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
