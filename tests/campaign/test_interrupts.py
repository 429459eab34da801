"""Exceptions and interrupts at random points of every public method leave model, process and posterior as they were."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import random
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaign.actions import Action, actions, vector_of
from campaign.cases import ADAPTED, CLASSES, DATA, Tally, adapted, answer, fitted, model_of
from campaign.cases import network as plain_network
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.errors import LaplacePlusError
from laplace_plus.network.network import turn
from laplace_plus.testing import assert_untouched, snapshot

pytestmark = pytest.mark.slow

PACKAGE = str(Path(lp.__file__).parent)
KINDS = (RuntimeError, MemoryError, KeyboardInterrupt)
CASES = 3
"""Of each action: points at which an exception is raised."""


# -- where exceptions are raised ---------------------------------------------------------------------------------------


class Bomb:
    """Counts what happens, and raises an exception at the n-th time."""

    def __init__(self) -> None:
        self.count, self.at, self.kind, self.armed, self.thrown = 0, 0, RuntimeError, False, False

    def arm(self, at: int = 0, kind: type[BaseException] = RuntimeError) -> None:
        self.count, self.at, self.kind, self.armed, self.thrown = 0, at, kind, True, False

    def tick(self) -> None:
        if self.armed:
            self.count += 1
            if self.count == self.at:
                self.thrown = True
                raise self.kind("injected")


FINALISED: list[Any] = []
"""Exceptions while Python closed a generator that nobody needs any more, which it reports and drops."""

CALLED: set[Any] = set()
"""Code of the package that ran."""

BOMBS = {way: Bomb() for way in ("line", "call", "forward", "batch", "file")}


class Fuse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        BOMBS["forward"].tick()
        return x


class Loader(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in list.__iter__(self):
            BOMBS["batch"].tick()
            yield batch


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if BOMBS["file"].armed and (event.startswith(("os.", "shutil.")) or event == "open"):
        BOMBS["file"].tick()


@cache
def between(file: str) -> frozenset[int]:
    """Lines of a file's ``try`` and ``with``, of which tracing tells where no instruction can fail, nor a signal come.

    Python tells of a ``with`` again just before the exit of its context, outside of what the exit covers.
    """
    found: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Try | ast.With):
            found.update(range(node.lineno, node.body[0].lineno))
    return frozenset(found)


def trace(frame: Any, event: str, _: Any) -> Any:
    """Told of the calls that the package makes or gets, where Python handles signals, and of its lines."""
    file, caller = frame.f_code.co_filename, frame.f_back
    if not file.startswith(PACKAGE):
        if event == "call" and caller is not None and caller.f_code.co_filename.startswith(PACKAGE):
            BOMBS["call"].tick()
        return None
    if event == "call":
        CALLED.add(frame.f_code)
        BOMBS["call"].tick()
    if event == "line" and frame.f_lineno not in between(file):
        BOMBS["line"].tick()
    return trace


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each way is come by."""
    found: dict[str, int] = {}
    for bomb in BOMBS.values():
        bomb.arm()
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(None)
        for way, bomb in BOMBS.items():
            found[way], bomb.armed = bomb.count, False


@contextmanager
def planted(way: str, at: int, kind: type[BaseException]) -> Iterator[Bomb]:
    bomb = BOMBS[way]
    bomb.arm(at, kind)
    if way in ("line", "call"):
        sys.settrace(trace)
    try:
        yield bomb
    finally:
        sys.settrace(None)
        bomb.armed = False


def network(name: str) -> nn.Module:
    net = plain_network()
    net = nn.Sequential(*net[:3], Fuse(), *net[3:])  # modes as they are
    return adapted(net) if name == ADAPTED else net


LOADER = Loader(DATA)


# -- what must not change ----------------------------------------------------------------------------------------------


def process() -> list[Any]:
    """What holds for the whole process."""
    sdp = torch.backends.cuda
    return [
        torch.get_rng_state().tolist(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],  # noqa: NPY002
        random.getstate(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        (sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()),
        (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),
        signal.getsignal(signal.SIGINT),
        torch.overrides._len_torch_function_stack(),
        threading.active_count(),
    ]


def is_free(model: nn.Module) -> bool:
    """Whether another thread gets the model's lock."""
    got = []

    def take() -> None:
        lock = turn(model)
        got.append(lock.acquire(timeout=1))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got[0]


# -- one case ----------------------------------------------------------------------------------------------------------


INTERNAL = """
    adopt apply_tuning at_last_token batches check_draws check_samples describe_groups description factors fit_batches
    functional_samples hyperparameter_digests laplace_model mask options owned_sums prior remember_weights require_fit
    require_vectors restore run_fit run_tuner sampled_outputs settings share_hyperparameters state write zero_curvature
"""
"""What classes override, or call among themselves; and ``at_last_token``, which is of language models."""


def code_of(cls: type, name: str) -> str:
    code = inspect.unwrap(getattr(cls, name)).__code__
    return f"{code.co_filename} {code.co_qualname}"


def public(cls: type) -> dict[str, str]:
    """The package's public methods of a class, with where their code is."""
    names = [n for n in dir(cls) if not n.startswith("_") and n not in INTERNAL.split()]
    own = {n: code_of(cls, n) for n in names if inspect.isfunction(inspect.unwrap(getattr(cls, n)))}
    return {name: code for name, code in own.items() if code.startswith(PACKAGE)}


def run(name: str, folder: str, seed: int) -> tuple[Tally, list[str], dict[str, str], set[str]]:
    """All actions of a class; which of them it has, its public methods, and the code that ran."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.addaudithook(audit)
    sys.unraisablehook = lambda what: FINALISED.append(type(what.exc_value))
    CALLED.clear()
    net = network(name)
    posterior = fitted(name, net, data=LOADER)
    found, tried = Tally(), list[str]()
    path = Path(folder) / name
    draw = random.Random(f"{seed} {name}")
    for title, action in actions(name, posterior, Path(folder) / f"{name}, saved", LOADER).items():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        state = random.getstate()
        try:
            with counted() as counts:
                result = action(copy.copy(posterior), path)
        except LaplacePlusError:  # not of this class
            continue
        tried.append(title)
        expected = vector_of(result)
        assert state == random.getstate()
        usable = [way for way in counts if counts[way]]
        for _ in range(CASES):
            way = draw.choice(("line", "call", draw.choice(usable)))
            kind, at = draw.choice(KINDS), draw.randint(1, counts[way])
            outcome = attempt(posterior, action, expected, path, way, at, kind)
            allowed = {"raised", "another way", "not reached"}
            found.note(f"{way}, {kind.__name__}", f"{name} {title} at {at}", outcome, allowed)
    return found, tried, public(type(posterior)), {f"{code.co_filename} {code.co_qualname}" for code in CALLED}


def attempt(
    posterior: Any, action: Action, expected: Tensor, path: Path, way: str, at: int, kind: type[BaseException]
) -> str:
    net, problems = model_of(posterior), []
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    mine = copy.copy(posterior)
    known = answer(posterior)
    before, globally = snapshot(net), process()
    caught: BaseException | None = None
    result = None
    FINALISED.clear()
    with planted(way, at, kind) as bomb:
        try:
            result = action(mine, path)
        except BaseException as error:
            caught = error
    thrown = bomb.thrown
    try:
        assert_untouched(net, before)
    except AssertionError as error:
        problems.append(f"MODEL {error}")
    if process() != globally:
        changed = [number for number, (a, b) in enumerate(zip(process(), globally, strict=True)) if a != b]
        problems.append(f"PROCESS {changed}")
    if not is_free(net):
        return "LOCKED"
    if thrown and caught is None and kind is not RuntimeError and not FINALISED:
        problems.append("SWALLOWED")
    # A RuntimeError may be what torch says of a wrong argument, and becomes a typed error.
    as_said = (kind, LaplacePlusError) if kind is RuntimeError else kind
    if caught is not None and not isinstance(caught, as_said):
        problems.append(f"TYPE {type(caught).__name__}: {caught}")
    text = type(caught).__name__
    caught = None
    try:
        if result is not None:
            now = vector_of(result)
            # Another way is rounded otherwise, and a search that stops at a slope of 1e-7 then ends elsewhere.
            close = 1e-5 if thrown else 1e-9
            if now.shape != expected.shape or float((now - expected).abs().max()) > close:
                problems.append(f"NUMBER of the call itself, off by {float((now - expected).abs().max()):.2g}")
        else:
            now = answer(mine)
            if float((now - known).abs().max()) > 1e-9:
                action(done := copy.copy(posterior), path)  # the exception may come after the last change
                if float((now - answer(done)).abs().max()) > 1e-9:
                    problems.append("POSTERIOR changed in part")
            now = vector_of(action(mine, path))
            if now.shape != expected.shape or float((now - expected).abs().max()) > 1e-9:
                problems.append(f"NUMBER of the next call, off by {float((now - expected).abs().max()):.2g}")
    except BaseException as error:
        problems.append(f"NEXT CALL {type(error).__name__}: {str(error)[:200]}")
    if problems:
        return f"{'; '.join(problems)} (raised {text})"
    return "raised" if result is None else "another way" if thrown else "not reached"


def test_interrupts(tmp_path: Path) -> None:
    found, seed = Tally(), int(os.environ.get("CAMPAIGN_SEED", "0"))
    names = os.environ["CAMPAIGN_CLASSES"].split(",") if "CAMPAIGN_CLASSES" in os.environ else [*CLASSES]
    methods, ran = dict[str, str](), set[str]()
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        parts = pool.map(run, names, [str(tmp_path)] * len(names), [seed] * len(names))
        for name, (part, tried, own, code) in zip(names, parts, strict=True):
            found += part
            methods |= {f"{name}.{method}": place for method, place in own.items()}
            ran |= code
            line = f"{name}: {len(tried)} actions, {found.counts.total()} interrupts so far"
            sys.stdout.write(f"\n{line}; {part.violations}\n")
            sys.stdout.flush()
    if len(names) == len(CLASSES):
        found.violations += [f"no action runs {method}" for method, place in methods.items() if place not in ran]
    found.report("interrupts", 2_000 if len(names) == len(CLASSES) else 1)
