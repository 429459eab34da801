"""Exceptions and interrupts at random points of every public method leave model, process and posterior as they were."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from campaign.cases import ADAPTED, CLASSES, DATA, GAUSSIAN, Tally, X, adapted, answer, fitted, model_of, seeded
from campaign.cases import network as plain_network
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.errors import LaplacePlusError
from laplace_plus.network import turn
from laplace_plus.testing import assert_untouched, snapshot

pytestmark = pytest.mark.slow

PACKAGE = str(Path(lp.__file__).parent)
KINDS = (RuntimeError, MemoryError, KeyboardInterrupt)
CASES = 7
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
        BOMBS["call"].tick()
    if event == "line" and frame.f_lineno not in between(file):
        BOMBS["line"].tick()
    return trace


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


# -- actions -----------------------------------------------------------------------------------------------------------

Action = Callable[[Any, Path], Any]


def value(found: Any) -> Tensor:
    """What an action found, as one vector."""
    if isinstance(found, lp.Prediction):
        return torch.cat([found.mean.flatten(), found.variance.flatten()]).detach()
    if isinstance(found, (tuple, list)):
        return torch.cat([value(part) for part in found])
    if isinstance(found, Tensor):
        return found.detach().flatten().double()
    return answer(found).flatten()


def save(posterior: Any, path: Path) -> Any:
    posterior.save(path / "saved")
    return lp.load(path / "saved", model_of(posterior))


def training(net: nn.Module) -> Action:
    """Trains a copy of a network, which ends with what it had after some whole epoch, and its own modes and hooks."""
    net = copy.deepcopy(net)
    net[4] = nn.Identity()  # in place of the dropout, which draws from torch's global generator
    options = {"posterior": lp.KFAC, "frequency": 1, "hyper_steps": 2, "early_stopping": False}
    good = [copy.deepcopy(net) for _ in range(3)]
    for epochs, one in enumerate(good):
        if epochs:
            lp.train_marginal_likelihood(one, LOADER, epochs=epochs, **options)

    def vector(one: nn.Module) -> Tensor:
        return torch.cat([x.detach().double().flatten() for x in one.state_dict().values()])

    def train(_: Any, path: Path) -> Tensor:
        mine = copy.deepcopy(net)
        try:
            lp.train_marginal_likelihood(mine, LOADER, epochs=2, checkpoint=path / "training", resume=True, **options)
        finally:
            assert any(torch.equal(vector(mine), vector(one)) for one in good), "weights in the middle of an epoch"
            assert [m.training for m in mine.modules()] == [m.training for m in net.modules()], "modes"
            assert all(
                x.grad is None and x.requires_grad == y.requires_grad
                for x, y in zip(mine.parameters(), net.parameters(), strict=True)
            ), "gradients"
            hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
            assert not any(vars(module)[kind] for module in mine.modules() for kind in hooks), "hooks"
        return vector(mine)

    return train


def actions(name: str, posterior: Any, saved: Path) -> dict[str, Action]:
    drawn = (
        {"generator": seeded} if name in ("MetricBNN", "Riemannian", "ABNN", "VariationalLastLayer", ADAPTED) else {}
    )  # others have their samples

    def functional(p: Any, **options: Any) -> Any:
        return p.functional_posterior(X[:3], **options, **{key: make() for key, make in drawn.items()})

    found: dict[str, Action] = {
        "construct": lambda p, _: CLASSES[name](model_of(p), "classification").n_parameters * torch.ones(1),
        "construct and fit": lambda p, _: fitted(name, model_of(p), data=LOADER),
        "fit": lambda p, _: p.fit(LOADER, generator=seeded()),
        "sample": lambda p, _: p.sample(3, generator=seeded()),
        "functional": lambda p, _: functional(p),
        "functional, joint": lambda p, _: functional(p, joint=True),
        "functional, diagonal": lambda p, _: functional(p, outputs="diagonal"),
        "sampled": lambda p, _: p.predictive(X[:3], method="sampled", n_samples=3, generator=seeded()),
        "mutual information": lambda p, _: p.predictive(X[:3], generator=seeded()).mutual_information(),
        "save and load": save,
        "copy": lambda p, _: copy.copy(p),
        "deep copy": lambda p, _: copy.deepcopy(p),
        "pickle": lambda p, _: pickle.loads(pickle.dumps(p)),
        "load": lambda p, _: lp.load(saved, model_of(p)),
        "state": lambda p, _: p.load_state_dict(p.state_dict()),
        "through": lambda p, _: functional(p.through(lambda x: model_of(p)(x)[:, :2])),
        "conformal": lambda p, _: lp.conformalize(p, LOADER, generator=seeded()).predict_set(X[:3], generator=seeded()),
    }
    posterior.save(saved)
    for method in ("temperature", "vector", "matrix"):
        found[f"scaling, {method}"] = lambda p, _, method=method: lp.calibrate(
            p, LOADER, method, generator=seeded()
        ).predictive(X[:3], generator=seeded())
    if name == "KFAC":
        found["training"] = training(posterior.network.model)
    for link in posterior.likelihood.links:
        found[f"link {link}"] = lambda p, _, link=link: p.predictive(X[:3], link=link, generator=seeded())
    for tuner in posterior.tuners:
        options = {"validation": {"data": LOADER}, "leave_one_out": {"weight_decay": 0.05, "leverages": "full"}}.get(
            tuner, {}
        )
        found[f"tune {tuner}"] = lambda p, _, tuner=tuner, options=options: p.fit_prior_precision(
            tuner, generator=seeded(), **options
        )
    if name in GAUSSIAN:
        found["evidence"] = lambda p, _: p.log_marginal_likelihood(torch.tensor(2.0))
        found["variance"] = lambda p, _: p.variance()
        found["calibrate"] = lambda p, _: lp.calibrate(
            p, LOADER, weight_decay=0.05, leverages="full", generator=seeded()
        )
        if name not in ("EKFAC", "LowRank"):
            found["update"] = lambda p, _: p.update(LOADER)
    if name in ("NullSpace", "VIKING", "MetricBNN", "SampledLaplace", "ABNN"):
        found["fit with a checkpoint"] = lambda p, path: p.fit(LOADER, generator=seeded(), checkpoint=path / "fit")
    if name == "Riemannian":
        found["draw"] = lambda p, path: p.draw(generator=seeded(), checkpoint=path / "draw")
    if name in ("KFAC", "last layer"):
        other = fitted("Diagonal", posterior.network.model)
        found["mixture"] = lambda p, _: lp.Mixture([p, other]).predictive(X[:3], generator=seeded())
        found["mixture's weights"] = lambda p, _: lp.Mixture([p, other]).fit_weights(LOADER).weights
        found["ensemble"] = lambda p, _: lp.Ensemble([p.network.model] * 2, "classification").predictive(X[:3])
    if name == "last layer":
        found["freeze"] = lambda p, _: p.freeze(X[:3])(X[:3])[0]
    return found


# -- one case ----------------------------------------------------------------------------------------------------------


def run(name: str, folder: str, seed: int) -> Tally:
    """All actions of a class."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.addaudithook(audit)
    sys.unraisablehook = lambda what: FINALISED.append(type(what.exc_value))
    net = network(name)
    posterior = fitted(name, net, data=LOADER)
    found = Tally()
    path = Path(folder) / name
    draw = random.Random(f"{seed} {name}")
    for title, action in actions(name, posterior, Path(folder) / f"{name}, saved").items():
        counts = {}
        for way in BOMBS:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
            state = random.getstate()
            with planted(way, 0, RuntimeError) as bomb:
                try:
                    expected = value(action(copy.copy(posterior), path))
                except LaplacePlusError:  # not of this class
                    break
            assert state == random.getstate()
            counts[way] = bomb.count
        else:
            usable = [way for way in counts if counts[way]]
            for number in range(CASES):
                way = ("line", "call", draw.choice(usable))[number % 3]
                kind, at = draw.choice(KINDS), draw.randint(1, counts[way])
                outcome = attempt(posterior, action, expected, path, way, at, kind)
                allowed = {"raised", "another way", "not reached"}
                found.note(f"{way}, {kind.__name__}", f"{name} {title} at {at}", outcome, allowed)
    return found


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
            now = value(result)
            if now.shape != expected.shape or float((now - expected).abs().max()) > 1e-9:
                problems.append("NUMBER of the call itself")
        else:
            now = answer(mine)
            if float((now - known).abs().max()) > 1e-9:
                action(done := copy.copy(posterior), path)  # the exception may come after the last change
                if float((now - answer(done)).abs().max()) > 1e-9:
                    problems.append("POSTERIOR changed in part")
            now = value(action(mine, path))
            if now.shape != expected.shape or float((now - expected).abs().max()) > 1e-9:
                problems.append(f"NUMBER of the next call, off by {float((now - expected).abs().max()):.2g}")
    except BaseException as error:
        problems.append(f"NEXT CALL {type(error).__name__}: {str(error)[:200]}")
    if problems:
        return f"{'; '.join(problems)} (raised {text})"
    return "raised" if result is None else "another way" if thrown else "not reached"


def test_interrupts(tmp_path: Path) -> None:
    found, seed = Tally(), int(os.environ.get("CAMPAIGN_SEED", "0"))
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        for part in pool.map(run, CLASSES, [str(tmp_path)] * len(CLASSES), [seed] * len(CLASSES)):
            found += part
            sys.stdout.write(f"\ninterrupts: {found.counts.total()} so far; {part.violations}\n")
            sys.stdout.flush()
    found.report("interrupts", 2_000)
