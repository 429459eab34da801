"""Each kind of bad input gets an error that says what is wrong and what is right, in time, and changes nothing."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.bad_calls import KINDS as CALLS
from campaign.bad_input import CONSTRUCTION, DATA, METHODS, USE, Case, Documented, network
from campaign.bad_uses import KINDS_OF_USES

import laplace_plus as lp
from laplace_plus.errors import LaplacePlusError

pytestmark = pytest.mark.slow

SECONDS = 30
"""Much more than any refusal takes, also on a machine that does other things."""


class TooLong(BaseException):
    pass


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@cache
def original(method: str) -> Any:
    case = Case(method, Path(), lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.make().fit([(case.x, case.y)], generator=torch.Generator().manual_seed(0))


def fitted(method: str) -> Any:
    return copy.copy(original(method))


def noted(model: torch.nn.Module) -> Any:
    values = {name: (id(value), value.detach().clone()) for name, value in model.named_parameters()}
    values |= {name: (id(value), value.detach().clone()) for name, value in model.named_buffers()}
    hooks = [[len(vars(m)[name]) for name in ("_forward_hooks", "_forward_pre_hooks")] for m in model.modules()]
    flags = [p.requires_grad for p in model.parameters()] + [m.training for m in model.modules()]
    return values, hooks, flags, [p.grad is None for p in model.parameters()]


def same(before: Any, now: Any) -> bool:
    values, others = before[0], now[0]
    kept = values.keys() == others.keys()
    kept = kept and all(values[n][0] == others[n][0] and torch.equal(values[n][1], others[n][1]) for n in values)
    return kept and before[1:] == now[1:]


def violation(case: Case, call: Callable[[Case], Any]) -> str:
    """What is wrong with how a call ends; empty if it ends as it should."""
    case.net.train()
    models = [case.net, original(case.method).network.model]
    before, data = list(map(noted, models)), [t.clone() for t in (case.x, case.y, case.t)]
    message = ""
    try:
        with time_limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(case)
        message = f"accepted: {type(result).__name__}"
    except LaplacePlusError as error:
        text = str(error)
        if not ("Expected: " in text or "Fix: " in text):
            message = f"says too little: {type(error).__name__}: {text}"
    except Documented:
        pass
    except TooLong:
        message = "hangs"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    if not all(map(same, before, map(noted, models))):
        message += " changes the model"
    if not all(map(torch.equal, data, (case.x, case.y, case.t))):
        message += " changes the data"
    return message


OF_EACH_CLASS = {**CONSTRUCTION, **DATA, **USE}
KINDS = {**CALLS, **KINDS_OF_USES}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", OF_EACH_CLASS)
def test_bad_input_of_each_class(kind: str, method: str, tmp_path: Path) -> None:
    assert violation(Case(method, tmp_path, fitted), OF_EACH_CLASS[kind]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_bad_calls(kind: str, tmp_path: Path) -> None:
    assert violation(Case("KFAC", tmp_path, fitted), KINDS[kind]) == ""


def test_there_are_many_kinds() -> None:
    assert len(OF_EACH_CLASS) + len(KINDS) >= 250
    assert not OF_EACH_CLASS.keys() & KINDS.keys() and len(KINDS) == len(CALLS) + len(KINDS_OF_USES)


def accepts(case: Case) -> Any:
    return case.make()


def spoils(case: Case) -> Any:
    with torch.no_grad():
        case.net[0].weight[0, 0] += 1
    raise lp.errors.DataError("It is bad.", expected="good")


def waits(case: Case) -> Any:
    while True:
        pass


def forgets(case: Case) -> Any:
    case.net.eval()
    raise lp.errors.DataError("It is bad.", expected="good")


def mumbles(case: Case) -> Any:
    raise lp.errors.DataError("It is bad.")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (accepts, "accepted"),
        (spoils, "changes the model"),
        (forgets, "changes the model"),
        (mumbles, "says too little"),
        (waits, "hangs"),
        (lambda case: case.net[7], "IndexError"),
    ],
)
def test_violations_are_found(call: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SECONDS", 1)
    assert said in violation(Case("KFAC", tmp_path, fitted), call)


@pytest.mark.parametrize("method", ["KFAC", "Full", "Diagonal"])
def test_a_loader_without_an_end_is_seen_by_its_progress(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No length is known before it ends; the bar counts batches, and an interrupt leaves all as it was."""
    case = Case(method, Path(), fitted)
    posterior, before = case.make(model=network()), []

    def endless() -> Iterator[Any]:
        while True:
            yield case.x, case.y

    before = noted(posterior.network.model)
    with pytest.raises(TooLong), time_limit(2):
        posterior.fit(endless(), progress=True)
    shown = capsys.readouterr().err
    assert "curvature" in shown and "it [" in shown
    assert not posterior.is_fitted
    assert same(before, noted(posterior.network.model))
