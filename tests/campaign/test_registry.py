"""The campaign knows every public class and function: what is new fails here until the campaign has it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from campaign import bad_input, cases

import laplace_plus as lp

HERE = Path(__file__).parent
TYPES = {name: getattr(lp, name) for name in lp.__all__ if inspect.isclass(getattr(lp, name))}
CLASSES = {name for name, cls in TYPES.items() if issubclass(cls, lp.Posterior)} - {"Posterior", "GaussianPosterior"}
PUBLIC = {
    name: getattr(module, name)
    for module in (lp, lp.uses, lp.constraints, lp.reconstruction)
    for name in module.__all__
    if inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name))
}
RESULTS = {  # what calls return, and what a user derives a class from
    "AutoTuning", "Attribution", "Backend", "CalibratedPosterior", "Chosen", "ConformalPosterior", "Correction",
    "FunctionalModel", "GaussianPosterior", "LeftOut", "Likelihood", "Posterior", "Prediction", "Projection", "Pruned",
    "Selector", "Summary", "Tuner", "TuningResult",
}  # fmt: skip
PLAIN = {  # options and likelihoods, whose bad values are of the classes that take them
    "Bernoulli", "BackPack", "Categorical", "Curvlinops", "GivenNoise", "HeteroscedasticGaussian", "Poisson",
    "register", "get_posterior",
}  # fmt: skip


def named(*files: str) -> set[str]:
    """Names and attributes in files of the campaign."""
    nodes = [node for file in files for node in ast.walk(ast.parse((HERE / file).read_text()))]
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    return found | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def kinds(makers: dict[str, Any]) -> set[str]:
    return {type(make()).__name__ for make in makers.values()}


@pytest.mark.filterwarnings("ignore")
def test_files_kills_and_interrupts_have_every_posterior() -> None:
    made = {n: lambda n=n: cases.CLASSES[n](cases.network_of(n), "classification") for n in cases.CLASSES}
    missing = CLASSES - kinds(made)
    assert missing <= ({cases.ADAPTED} - cases.CLASSES.keys()), missing  # without peft


@pytest.mark.filterwarnings("ignore")
def test_bad_input_and_low_precision_have_every_posterior(tmp_path: Path) -> None:
    made = {n: lambda n=n: bad_input.Case(n, tmp_path, lambda name: None).make() for n in bad_input.METHODS}
    missing = CLASSES - kinds(made)
    assert missing <= ({bad_input.ADAPTED} - bad_input.METHODS.keys()), missing


@pytest.mark.filterwarnings("ignore")
def test_all_that_can_be_continued_is_forged() -> None:
    for name, make in cases.CLASSES.items():
        if make(cases.network_of(name), "classification").is_resumable:
            assert name in cases.RESUMED, name


def test_bad_input_has_every_public_name() -> None:
    missing = PUBLIC.keys() - named("bad_input.py", "bad_calls.py", "bad_uses.py") - RESULTS - PLAIN
    assert not missing, missing


def test_interrupts_have_every_public_function() -> None:
    functions = {name for name, own in PUBLIC.items() if inspect.isfunction(own)}
    missing = functions - named("actions.py", "cases.py") - {"register", "get_posterior"}
    # The methods of posteriors that are functions of uses, too, and shorthands.
    assert not missing - {"penalty", "continue_on", "from_variance"}, missing
