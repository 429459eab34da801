"""The command `run`, end to end on few digits."""

from __future__ import annotations

import pytest
import torch
from cli_problems import report_of, values
from safetensors.torch import load_file

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
def run_digits(write, tmp_path):
    def run(*options, folder="out", config=RUN):
        output = tmp_path / folder
        code = main(["run", write("digits.yaml", config), "--output", str(output), *options])
        return code, report_of(output), output

    return run


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
