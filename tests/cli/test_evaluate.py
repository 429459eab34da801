"""The command `evaluate`, on models and loaders of one's own."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch
from cli_problems import CLASSIFIER, refused, report_of, values

import laplace_plus as lp
from laplace_plus.cli import main

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
