"""The study itself: training, scores, cells that fail or are there already, tables and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.study import evaluation, methods, run, training
from benchmarks.study.cells import Results
from benchmarks.study.methods import Task, best_of, least
from benchmarks.study.sets import DataSet
from benchmarks.study.settings import Settings
from laplace_plus.errors import ConfigurationError


def clouds(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    return torch.randn(n, 2, generator=generator) + 2 * labels[:, None], labels


def data_set(number=0):
    return DataSet("clouds", number, clouds(), clouds(20, 1), clouds(30, 2), True, 2)


def test_networks_trained_together_are_those_trained_alone():
    data, network = data_set(3), {"hidden": [8], "activation": "tanh"}
    schedule = {"epochs": 5, "batch_size": 16, "learning_rate": 0.01, "weight_decay": 0.1}
    found = training.train(network, schedule, data, members=2)
    inputs, labels = data.train
    for member in range(2):
        torch.manual_seed(3000 + member)
        alone = training.build(network, data)
        optimizer = torch.optim.Adam(alone.parameters(), lr=0.01, weight_decay=0.1)
        generator = torch.Generator().manual_seed(3000 + member)
        for _ in range(5):
            for rows in torch.randperm(60, generator=generator).split(16):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(alone(inputs[rows]), labels[rows]).backward()
                optimizer.step()
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found.last[member][name], value, rtol=0, atol=1e-5)


def test_early_weights_are_those_of_least_validation_loss(tmp_path):
    data, network = data_set(), {"hidden": [8]}
    long = training.trained(tmp_path, network, {"epochs": 30, "learning_rate": 0.1}, data, 1, "stamp")
    short = training.train(network, {"epochs": long.epochs[0], "learning_rate": 0.1}, data, 1)
    losses = [
        torch.nn.functional.cross_entropy(
            training.restored(network, data, state)(data.validation[0]), data.validation[1]
        ).item()
        for state in (long.early[0], short.last[0], long.last[0])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] <= losses[2]
    again = training.trained(tmp_path, network, {"epochs": 99}, data, 1, "stamp")  # from the folder
    assert again.seconds == long.seconds


def test_risk_coverage_and_legacy_scores_by_hand():
    doubt = torch.tensor([0.3, 0.1, 0.2, 0.4])
    # in order of doubt the errors are 1, 0, 0, 1: running means 1, 1/2, 1/3, 1/2
    assert evaluation.area_under_risk_coverage(doubt, torch.tensor([0, 1, 0, 1])) == pytest.approx(7 / 12)
    assert evaluation.area_under_risk_coverage(torch.zeros(4), torch.tensor([0, 1, 0, 1])) == pytest.approx(0.5)
    # of two confidences, that of .995 is not counted
    probabilities = torch.tensor([[0.995, 0.005], [0.605, 0.395]], dtype=torch.float64)
    assert evaluation.legacy_ece(probabilities, torch.tensor([1, 0])) == pytest.approx(0.395 / 2)


def test_the_best_method_by_validation_is_that_of_least_loss_there():
    data = data_set()
    schedule = {"epochs": 30, "learning_rate": 0.05}
    task = Task(data, training.train({"hidden": [4]}, schedule, data, 1), {"hidden": [4]}, 0.0)
    candidates = {
        "narrow": {"method": "laplace", "tuned_by": "training", "posterior": "Diagonal"},
        "tuned": {"method": "laplace", "tuned_by": "validation"},
        "impossible": {"method": "laplace", "posterior": "Full", "tuned_by": "astrology"},
    }
    with pytest.raises(ConfigurationError, match="Unknown way of tuning"):
        best_of(task, candidates)
    del candidates["impossible"]
    found = best_of(task, {**candidates, "left out": None})
    losses = {
        label: evaluation.nll(methods.run(task, row).predict, task.validation) for label, row in candidates.items()
    }
    assert found.tuning["chosen"] == min(losses, key=losses.__getitem__)
    assert evaluation.nll(found.predict, task.validation) == pytest.approx(min(losses.values()))


class Answers:
    """Some answers of a classifier, and how good its probabilities are said to be."""

    def __init__(self, mean, log_density):
        self.mean, self.log_density = mean, log_density

    def log_prob(self, y):
        return torch.full((len(y),), self.log_density)


def test_the_best_candidate_that_loses_no_validation_accuracy_is_taken():
    data = data_set()
    task = Task(
        data, training.train({"hidden": [4]}, {"epochs": 30, "learning_rate": 0.05}, data, 1), {"hidden": [4]}, 0.0
    )

    def at(value):
        def predict(x):
            with torch.no_grad():
                logits = task.model(x)
            # the value of least loss turns all answers round
            return Answers((-logits if value == 1.0 else logits).softmax(-1), -value)

        return predict

    right = sum(int((task.model(x).argmax(-1) == y).sum()) for x, y in task.validation)
    wrong = len(data.validation[0]) - right
    assert right > wrong
    best, found = least(task, [1.0, 3.0, 2.0], at, name="factor", keep_accuracy=True)
    assert best == 2.0 and found["fewer_correct"] == {"1": right - wrong}
    assert least(task, [1.0], at, name="factor", keep_accuracy=True)[0] == 1.0
    assert least(task, [1.0, 2.0], at, name="factor")[0] == 1.0


CONFIGURATION = {
    "members": 1,
    "default": {"network": {"hidden": [4]}, "training": {"epochs": 2}},
    "methods": {
        "MAP": {"method": "network"},
        "MAP + temperature": {"method": "temperature"},
        "broken": {"method": "laplace", "posterior": "NoSuch"},
        "numbers": {"method": "network", "only": "regression"},
    },
    "quick": {"default": {"training": {"epochs": 1}}},
}


@pytest.mark.slow
def test_the_quick_form_runs_all_methods(tmp_path):
    generator = np.random.default_rng(0)
    angle, label = generator.uniform(0, np.pi, 300), generator.integers(2, size=300)
    points = np.stack([np.cos(angle) - 0.5, np.sin(angle) - 0.25], 1) * np.where(label, 1, -1)[:, None]
    np.savez(tmp_path / "moons.npz", x=points + 0.2 * generator.normal(size=(300, 2)), y=label)
    x = generator.uniform(-3, 3, 120)
    np.savez(tmp_path / "wave.npz", x=x[:, None], y=np.sin(x) + 0.1 * generator.normal(size=120))
    arguments = ["--quick", "--data", str(tmp_path), "--output", str(tmp_path / "out"), "--sets", "moons", "wave"]
    assert run.main([*arguments, "--workers", "2", "--no-progress"]) == 0
    methods = Settings.read(run.CONFIGURATION).content["methods"]
    for name, kind in (("moons", "classification"), ("wave", "regression")):
        rows = {row["method"]: row for row in Results(tmp_path / "out").rows(name)}
        assert set(rows) == {label for label, options in methods.items() if options.get("only", kind) == kind}
        failed = {label: row["error"] for label, row in rows.items() if row["status"] == "failed"}
        # Geodesics over a ReLU network's loss can be too rough to follow, and the cell must say so by name. For classes
        # that is so at the prior that the evidence prefers only. For numbers with little noise there are kinks all
        # around the weights, whatever the prior: the surface of training is as steep for a narrow one.
        rough = {"exponential map"} if kind == "classification" else {label for label in rows if "exponential" in label}
        # After so little training the weights of largest variance are those that no output depends on.
        dead = failed.pop("subnetwork, 20 % of the weights", "")
        assert not dead or "SelectionError: The curvature of all selected parameters is zero" in dead
        assert failed.keys() <= rough
        assert all("SamplingError: Not one sample could be drawn." in error for error in failed.values())
