"""The study itself: training, scores, cells that fail or are there already, tables and ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import yaml

from benchmarks.study import evaluation, methods, report, run, training, uncertainty
from benchmarks.study.cells import Results
from benchmarks.study.methods import Task, best_of, least
from benchmarks.study.sets import DataSet
from benchmarks.study.settings import Settings
from laplace_plus.errors import ConfigurationError, NonFiniteError


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


def test_training_that_diverges_says_so():
    inputs, _ = clouds()
    broken = DataSet(
        "broken", 0, (inputs, inputs[:, :1] * 1e30), (inputs, inputs[:, :1]), (inputs, inputs[:, :1]), False, 1
    )
    with pytest.raises(NonFiniteError, match="broken: training diverged in epoch 1"):
        training.train({"hidden": [4]}, {"epochs": 3, "optimizer": "sgd", "learning_rate": 1e9}, broken, 1)


def test_risk_coverage_and_legacy_scores_by_hand():
    doubt = torch.tensor([0.3, 0.1, 0.2, 0.4])
    # in order of doubt the errors are 1, 0, 0, 1: running means 1, 1/2, 1/3, 1/2
    assert evaluation.area_under_risk_coverage(doubt, torch.tensor([0, 1, 0, 1])) == pytest.approx(7 / 12)
    assert evaluation.area_under_risk_coverage(torch.zeros(4), torch.tensor([0, 1, 0, 1])) == pytest.approx(0.5)
    # of two confidences, that of .995 is not counted
    probabilities = torch.tensor([[0.995, 0.005], [0.605, 0.395]], dtype=torch.float64)
    assert evaluation.legacy_ece(probabilities, torch.tensor([1, 0])) == pytest.approx(0.395 / 2)


def test_validation_takes_the_best_and_leaves_out_what_fails():
    data = data_set()
    task = Task(data, training.train({"hidden": [4]}, {"epochs": 1}, data, 1), {"hidden": [4]}, 0.0)

    def at(value):
        if value == 1.0:
            raise NonFiniteError("diverged")
        if value == 2.0:
            return lambda x: Constant(float("nan"))
        return lambda x: Constant(-value)

    class Constant:
        def __init__(self, value):
            self.value = value

        def log_prob(self, y):
            return torch.full((len(y),), self.value)

    best, found = least(task, [4.0, 1.0, 2.0, 3.0], at, name="factor")
    assert best == 3.0 and found["tried"] == {"4": 4.0, "1": "failed", "2": "failed", "3": 3.0}


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


def test_a_posterior_may_be_fitted_at_the_precision_of_training():
    data = data_set()
    schedule = {"epochs": 30, "learning_rate": 0.05}
    task = Task(data, training.train({"hidden": [4]}, schedule, data, 1), {"hidden": [4]}, 0.1)
    row = {"method": "laplace", "posterior": "SampledLaplace", "n_samples": 2}
    later, there = (
        methods.run(task, {**row, "tuned_by": "training", **start}) for start in ({}, {"start": "training"})
    )
    assert there.tuning == later.tuning == {"by": "training", "prior_precision": pytest.approx(task.training_precision)}
    assert evaluation.nll(there.predict, task.validation) == pytest.approx(
        evaluation.nll(later.predict, task.validation), rel=1e-3
    )
    with pytest.raises(ConfigurationError, match="Unknown start"):
        methods.run(task, {**row, "start": "astrology"})


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


def test_if_all_candidates_lose_validation_accuracy_the_one_that_loses_least_is_taken():
    data = data_set()
    task = Task(
        data, training.train({"hidden": [4]}, {"epochs": 30, "learning_rate": 0.05}, data, 1), {"hidden": [4]}, 0.0
    )
    targets = data.validation[1]
    wrong = sum(int((task.model(x).argmax(-1) != y).sum()) for x, y in task.validation)

    def at(more):
        """So many more answers that are wrong, and so much better probabilities."""
        answers = torch.nn.functional.one_hot(targets).double()
        answers[: wrong + int(more)] *= -1
        return lambda x: Answers(answers, more)

    best, found = least(task, [3.0, 1.0, 2.0], at, name="factor", keep_accuracy=True)
    assert best == 1.0 and found["fewer_correct"] == {"3": 3, "1": 1, "2": 2}
    assert least(task, [3.0, 1.0, 2.0], at, name="factor")[0] == 3.0


def rows_of(values, name="mine"):
    rows = []
    for label, numbers in values.items():
        for split, value in enumerate(numbers):
            row = {"set": name, "split": split, "method": label, "status": "done", "tuning": {}, "warnings": []}
            row["scores"] = {"accuracy": 0.5, "nll": value}
            if value is None:
                row = {"set": name, "split": split, "method": label, "status": "failed", "error": "SamplingError: none"}
            rows.append(row)
    return rows


def test_tables_show_differences_and_failures():
    values = {"MAP": [1.0, 2.0], "MAP + temperature": [0.5, 1.0], "other": [0.75, None], "inf": [float("inf"), 1.0]}
    table = report.Table(rows_of(values), ["MAP", "other"])
    assert table.labels == ["MAP", "other", "MAP + temperature", "inf"]
    assert table.scores("other", "nll", "MAP") == [-0.25]
    page = table.markdown("mine")
    assert "| MAP | 0.500 ± 0.000 | 1.500 ± 0.500 |  | +0.750 ± 0.250 |" in page
    assert "other (1 of 2 splits, 1 failed) | 0.500 | 0.750 | -0.250 | +0.250 |" in page
    table.rows[0]["tuning"] = table.rows[1]["tuning"] = {"failed_samples": 3}
    assert "| MAP (without 6 samples that failed) |" in table.markdown("mine")
    assert "- other, split 1: SamplingError: none" in page and "| inf | 0.500 ± 0.000 | inf" in page
    assert len(table.picture("mine").axes) == 2


def test_ranks_average_over_splits_and_sets():
    one = report.Table(rows_of({"MAP": [1.0, 1.0], "a": [0.5, 2.0], "b": [1.0, None], "c": [9.0, 9.0]}), [])
    two = report.Table(rows_of({"MAP": [3.0], "a": [1.0], "b": [3.0]}), [])
    entries = report.ranking({"one": one, "two": two}, n_bootstrap=200)
    found = {entry["method"]: entry for entry in entries}
    # c was not run on two; of one's splits MAP and b share 2 and 3, then MAP is 1, a 2 and b, which failed, 3
    assert found["MAP"]["rank"] == pytest.approx(((2.5 + 1) / 2 + 2.5) / 2)
    assert found["a"]["rank"] == pytest.approx(((1 + 2) / 2 + 1) / 2)
    assert found["b"]["rank"] == pytest.approx(((2.5 + 3) / 2 + 2.5) / 2)
    assert all(entry["low"] <= entry["rank"] <= entry["high"] for entry in entries[:3])
    assert entries[3]["method"] == "c" and np.isnan(entries[3]["rank"]) and entries[3]["MAP"] == [8.0]
    assert found["a"]["MAP"] == [pytest.approx(0.25), -2.0] and found["c"]["sets"] == 1
    page = report.overview({"one": one, "two": two}, entries)
    assert "| c |  |  | +8.000 |  | 1 |" in page and "| a | 1.2 |" in page
    better = {entry["method"]: entry["rank"] for entry in report.ranking({"one": one}, "accuracy", n_bootstrap=10)}
    assert better["MAP"] == better["a"] == pytest.approx(2.25)  # ties of four, then of three before the failed one


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


def written(tmp_path, **changes):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(CONFIGURATION | changes))
    x, y = clouds(80)
    lines = [f"{a:.5f},{b:.5f},{label}" for (a, b), label in zip(x.tolist(), y.tolist(), strict=True)]
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped_and_writes_failures_down(tmp_path, capsys):
    config, output = written(tmp_path), tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--output", str(output), "--config", str(config), "--workers", "2"]
    arguments += ["--sets", str(tmp_path / "mine.csv"), "--no-progress"]
    assert run.main(arguments) == 0
    path = output / "study-mine.jsonl"
    rows = {row["method"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert rows["MAP"]["status"] == rows["MAP + temperature"]["status"] == "done" and "numbers" not in rows
    assert rows["broken"]["status"] == "failed" and "NoSuch" in rows["broken"]["error"]
    page = (output / "study-mine.md").read_text()
    assert "broken (0 of 1 splits, 1 failed)" in page and "NoSuch" in page
    assert (output / "study-mine.png").exists() and "| MAP |" in (output / "study.md").read_text()

    # A second run has nothing to do; a third, with a line cut off and failures retried, just that.
    before = path.read_text()
    assert run.main(arguments) == 0 and path.read_text() == before
    lines = before.splitlines(keepends=True)
    at = next(k for k, line in enumerate(lines) if '"MAP + temperature"' in line)
    path.write_text("".join(lines[:at] + lines[at + 1 :]) + lines[at][:50])
    capsys.readouterr()
    assert run.main([*arguments, "--retry"]) == 0
    said = capsys.readouterr().err
    assert "MAP + temperature: NLL" in said and "broken: FAILED" in said and "mine 0 MAP: " not in said
    again = {row["method"]: row for row in Results(output).rows("mine")}
    assert again["MAP + temperature"]["scores"]["nll"] == rows["MAP + temperature"]["scores"]["nll"]


@pytest.mark.slow
def test_other_data_and_other_settings_are_run_anew_and_stay_out_of_tables(tmp_path, capsys):
    config, output = written(tmp_path), tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--output", str(output), "--config", str(config), "--workers", "2"]
    arguments += ["--sets", "mine", "--no-progress", "--methods", "MAP"]
    assert run.main(arguments) == 0
    before = Results(output).rows("mine")[0]
    text = (tmp_path / "mine.csv").read_text()
    (tmp_path / "mine.csv").write_text(text.replace(",1\n", ",a\n").replace(",0\n", ",1\n").replace(",a\n", ",0\n"))
    capsys.readouterr()
    assert run.main([*arguments, "--report"]) == 1
    assert "1 results of other settings or data" in capsys.readouterr().err
    assert run.main(arguments) == 0
    after = Results(output).rows("mine")[0]
    assert after["data"] != before["data"] and after["stamp"] == before["stamp"]
    assert after["scores"]["nll"] != before["scores"]["nll"]
    # trained anew, too: with the labels exchanged the old network would be far off
    assert after["scores"]["nll"] < 2 * before["scores"]["nll"]
    changed = written(tmp_path, default={**CONFIGURATION["default"], "training": {"epochs": 2}})
    (tmp_path / "mine.csv").write_text(text)
    assert run.main([*arguments[:5], str(changed), *arguments[6:], "--report"]) == 1


def test_bad_arguments_end_before_anything_runs(tmp_path, capsys):
    config = written(tmp_path)
    common = ["--data", str(tmp_path), "--output", str(tmp_path / "out"), "--config", str(config)]
    assert run.main([*common, "--sets", "nowhere"]) == 1 and "no data set 'nowhere'" in capsys.readouterr().err
    assert (
        run.main([*common, "--sets", "mine", "--methods", "nothing"]) == 1 and "no such rows" in capsys.readouterr().err
    )
    assert run.main([*common, "--sets", "mine", "--methods", "numbers"]) == 1
    assert "No row that was asked for" in capsys.readouterr().err
    assert run.main([*common, "--sets", "mine", str(tmp_path / "mine.csv")]) == 1
    assert "Two sets have the same name" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main([*common, "--sets", "mine", "--splits", "0"])
    assert not (tmp_path / "out").exists()
    (tmp_path / "bad.yaml").write_text("rows: 1")
    with pytest.raises(ConfigurationError, match="no configuration of the study"):
        Settings.read(tmp_path / "bad.yaml")


def test_sections_take_defaults_and_changes(tmp_path):
    own = {"mine": {"training": {"weight_decay": 0.5}, "methods": {"broken": None, "MAP": {"n": 1}}}}
    section = Settings.read(written(tmp_path, sets=own), quick=True).section("mine")
    assert section.training == {"epochs": 1, "weight_decay": 0.5} and section.network == {"hidden": [4]}
    assert "broken" not in section.methods and section.methods["MAP"] == {"method": "network", "n": 1}
    other = Settings.read(written(tmp_path)).section("folder/mine.csv")
    assert other.name == "mine" and other.source == {"data": "folder/mine.csv"} and other.stamp != section.stamp
    own["mine"]["tranining"] = {}
    with pytest.raises(ConfigurationError, match="unknown settings"):
        Settings.read(written(tmp_path, sets=own)).section("mine")


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


def test_the_page_on_uncertainty_takes_medians_over_gaps_and_marks_rows_of_some_splits(tmp_path):
    def cell(label, split, **scores):
        return {"method": label, "split": split, "status": "done", "scores": scores, "tuning": {}, "warnings": []}

    rows = [cell("MAP", k, nll=3.0 + 100 * (k == 2), crps=2.0) for k in range(3)]
    rows += [cell("ensemble", k, nll=2.0 - k, crps=1.0 + k) for k in range(3)]
    rows += [cell("SWAG", 0, nll=5.0, crps=3.0)]
    (tmp_path / "study-boston_gap.jsonl").write_text("\n".join(map(json.dumps, rows)))
    images = [
        cell("MAP", k, nll=1.0, aurc=0.002, ood_auroc_kmnist=0.8 + 0.1 * k, ood_auroc_notmnist=0.6) for k in (0, 1)
    ]
    (tmp_path / "study-mnist.jsonl").write_text("\n".join(map(json.dumps, images)))
    labels = ["MAP", "ensemble", "SWAG"]
    found = {column.title: column for column in uncertainty.columns(tmp_path, labels)}
    assert found["gaps: NLL less MAP ↓"].values == {"MAP": 0.0, "ensemble": -2.0, "SWAG": 2.0}
    assert found["gaps: CRPS by MAP's ↓"].values == {"MAP": 1.0, "ensemble": 1.0, "SWAG": 1.5}
    assert found["gaps: rank ↓"].values == {"MAP": 2.0, "ensemble": 1.0}
    assert found["elsewhere: AUROC, mnist ↑"].values == {"MAP": pytest.approx((0.85 + 0.6) / 2)}
    assert found["withheld: mnist ↓"].values == {"MAP": pytest.approx(2.0)}
    page = uncertainty.page(list(found.values()), labels)
    assert "| SWAG |  | (2.000) | (1.500) |" in page and "tables ↓" not in page
    panels = uncertainty.picture(list(found.values()), labels).axes
    assert [panel.get_title() for panel in panels] == ["gaps:\nrank ↓"]
