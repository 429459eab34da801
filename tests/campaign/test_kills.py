"""Processes killed while they save, and in the middle of work that can be continued.

What is found afterwards is the old or the new state, and work goes on from the last stage that was finished, to the
result of an uninterrupted run. Nothing that is finished is done again, and nothing starts anew without a word.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.cases import (
    CLASSES,
    DATA,
    FITS,
    RESUMED,
    Tally,
    answer,
    calibrated,
    fitted,
    network,
    network_of,
    same,
    seeded,
)
from torch import Tensor

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError
from laplace_plus.io import checkpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, and exchanges folders in one step"),
    pytest.mark.filterwarnings("ignore"),  # threads of torch, which children do not use; convergence
]

EVENTS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.scandir", "os.listdir", "os.chmod")
EVENTS += ("shutil.rmtree", "shutil.copymode", "ctypes.dlopen", "ctypes.dlsym")


def die_at(number: int, folder: Path, log: int) -> None:
    """Let this process die at its n-th file operation, in a folder or without a path; each is told of by one byte."""
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in EVENTS and (event.startswith("ctypes") or str(folder) in str(arguments)):
            seen += 1
            os.write(log, b"o")
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(action: Callable[[int], None], *, kill_after: float | None = None) -> tuple[bytes, bool]:
    """What a process writes to its pipe while it acts, and whether it was killed; other ends are errors."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            action(writing)
            os.kill(os.getpid(), signal.SIGTERM)  # done, without what pytest does at the end
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os.kill(os.getpid(), signal.SIGABRT)
    os.close(writing)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    assert status in (-signal.SIGTERM, -signal.SIGKILL), f"ended with {status}"
    return told, status == -signal.SIGKILL


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children of a process with several threads have none of them; passes are saved after each batch."""
    monkeypatch.setattr(checkpoints, "PAUSE", 0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- saving ------------------------------------------------------------------------------------------------------------


def test_saves(tmp_path: Path) -> None:
    draw, found = random.Random(0), Tally()
    for name in [*CLASSES, "calibrated Full"]:
        net = network() if name.startswith("calibrated") else network_of(name)
        old = calibrated("Full", net) if name.startswith("calibrated") else fitted(name, net)
        new = copy.copy(old) if name.startswith("calibrated") else fitted(name, net, data=DATA[1:])
        if name.startswith("calibrated"):
            new.temperature = 2.0
        known, path = {"old": answer(old), "new": answer(new)}, tmp_path / name
        assert not same(known["old"], known["new"], 1e-6)

        def judge(path: Path = path, net: Any = net, known: dict[str, Tensor] = known) -> str:
            try:
                posterior = lp.load(path, net)
            except BaseException as error:
                return f"LOST: {type(error).__name__}: {error}"
            return next((which for which, value in known.items() if same(answer(posterior), value, 1e-12)), "DAMAGE")

        number, killed = 1, True
        while killed:
            old.save(path)

            def action(log: int, number: int = number, path: Path = path, new: Any = new) -> None:
                die_at(number, path.parent, log)
                new.save(path)

            _, killed = in_child(action)
            if killed:
                found.note("saves, at a file operation", f"{name} {number}", judge())
            number += 1
        assert judge() == "new" and number > 8
        began = time.monotonic()
        new.save(path)
        each = time.monotonic() - began
        for repetition in range(8):
            old.save(path)

            def both(_: int, path: Path = path, old: Any = old, new: Any = new) -> None:
                while True:
                    new.save(path)
                    old.save(path)

            in_child(both, kill_after=draw.uniform(0, 6 * each))
            found.note("saves, at any time", f"{name} {repetition}", judge())
        old.save(path)
        assert [entry.name for entry in path.parent.iterdir()] == [name]
        shutil.rmtree(path)
    found.report("kills of saves", 100)


# -- work that can be continued ----------------------------------------------------------------------------------------


def null_space(path: Path | None) -> Tensor:
    posterior = lp.NullSpace(network(), "classification", rows="loss", n_samples=30)
    return posterior.fit(DATA, generator=seeded(), checkpoint=path).samples


def viking(path: Path | None) -> Tensor:
    training = lp.ELBOTraining(epochs=3, scale_epochs=2)
    posterior = lp.VIKING(network(), "classification", rows="loss", n_samples=10, mode=training)
    return posterior.fit(DATA, generator=seeded(), checkpoint=path).samples


BATCHES = [pair for x, y in DATA for pair in zip(x.split(4), y.split(4), strict=True)]
"""The same data in more batches, each of which is saved."""


def figures(posterior: Any) -> Tensor:
    """Predictions, the log evidence, for which all statistics of the fit are needed, and the number of data."""
    parts = [answer(posterior), posterior.log_marginal_likelihood(), torch.tensor(float(posterior.n_data))]
    return torch.cat([part.flatten().double() for part in parts])


def one_pass(path: Path | None) -> Tensor:
    posterior = lp.KFAC(network(), "classification", backend=lp.Native("ggn_mc"))
    return figures(posterior.fit(BATCHES, generator=seeded(), checkpoint=path))


def two_passes(path: Path | None) -> Tensor:
    posterior = lp.KFAC(network(), "classification", eigenvalue_corrected=True, backend=lp.Native("ggn_mc"))
    return figures(posterior.fit(BATCHES, generator=seeded(), checkpoint=path))


def dense(path: Path | None) -> Tensor:
    return figures(lp.Full(network(), "classification").fit(BATCHES, checkpoint=path))


def updating(path: Path | None) -> Tensor:
    posterior = lp.KFAC(network(), "classification", eigenvalue_corrected=True).fit(DATA[:1])
    return figures(posterior.update(BATCHES, checkpoint=path))


def eigenpairs(path: Path | None) -> Tensor:
    posterior = lp.LowRank(network(), "classification", rank=2, max_restarts=1, tolerance=0.9, remainder_probes=1)
    return figures(posterior.fit(DATA, generator=seeded(), checkpoint=path))


def leaving_out(path: Path | None) -> Tensor:
    posterior = lp.Full(network(), "classification").fit(DATA)
    tuner = lp.LeaveOneOut(10.0, grid=(1.0, 10.0, 100.0), data=BATCHES)
    tuning = posterior.fit_prior_precision(tuner, checkpoint=path).tuning
    return torch.cat([tuning.prior_precision.flatten(), tuning.losses])


def validating(path: Path | None) -> Tensor:
    posterior = lp.Diagonal(network(), "classification").fit(DATA)
    tuner = lp.Validation(BATCHES, grid=(0.1, 1.0), link="mc", n_samples=5)
    tuning = posterior.fit_prior_precision(tuner, generator=seeded(), checkpoint=path).tuning
    return torch.tensor([float(tuning.prior_precision), tuning.value])


def tuning_by_default(path: Path | None) -> Tensor:
    posterior = lp.KFAC(network(), "classification").fit(BATCHES)
    tuning = posterior.fit_prior_precision(generator=seeded(), checkpoint=path).tuning
    return torch.cat([tuning.prior_precision.flatten(), torch.tensor([tuning.value])])


def tangent(path: Path | None) -> Tensor:
    posterior = lp.Full(network(), "classification").fit(BATCHES)
    tuner = lp.Tangent(max_iterations=4, predictive_mean="tangent", keep_jacobian=False)
    return answer(posterior.fit_prior_precision(tuner, checkpoint=path))


def tangent_at_its_optimum(path: Path | None) -> Tensor:
    posterior = lp.KFAC(network(), "classification").fit(BATCHES)
    tuner = lp.Tangent(max_iterations=3, curvature_at="optimum")
    tuning = posterior.fit_prior_precision(tuner, checkpoint=path).tuning
    return torch.cat([tuning.prior_precision.flatten(), tuning.vector])


def scaling(path: Path | None) -> Tensor:
    posterior = lp.Full(network(), "classification").fit(DATA)
    return answer(lp.calibrate(posterior, BATCHES, "vector", generator=seeded(), checkpoint=path))


def calibrating(path: Path | None) -> Tensor:
    posterior = lp.Full(network(), "classification").fit(DATA)
    options = {"weight_decay": 1.0, "interpolation": 0.0}
    found = lp.calibrate(posterior, BATCHES, checkpoint=path, **options)
    return torch.tensor([found.temperature, found.covariance_scale, found.report.leave_one_out_nll])


def metric_bnn(path: Path | None) -> Tensor:
    latent = lp.LatentModel(dimension=2, hidden=(4,), epochs=25, tolerance=10.0)
    options = {"n_particles": 2, "n_steps": 6, "n_refinements": 1}
    posterior = lp.MetricBNN(network(), "classification", latent=latent, **options)
    return posterior.fit(DATA, generator=seeded(), checkpoint=path).sample(5, generator=seeded(1))


def members(path: Path | None) -> Tensor:
    posterior = lp.ABNN(network(), "classification", n_members=2, epochs=3)
    return answer(posterior.fit(DATA, generator=seeded(), checkpoint=path))


def chosen_weights(path: Path | None) -> Tensor:
    posterior = lp.Subnetwork(network(), "classification", lp.LargestVariance(6))
    return figures(posterior.fit(BATCHES, generator=seeded(), checkpoint=path))


def conjugate_gradients(path: Path | None) -> Tensor:
    solver = lp.CGSolver(checkpoint_every=2)
    posterior = lp.SampledLaplace(network(), "classification", n_samples=2, solver=solver)
    return posterior.fit(DATA, generator=seeded(), checkpoint=path).samples


def descent(path: Path | None) -> Tensor:
    solver = lp.SGDSolver(epochs=4, tolerance=9.0, checkpoint_every=1)
    posterior = lp.SampledLaplace(network(), "classification", n_samples=2, solver=solver)
    return posterior.fit(DATA, generator=seeded(), checkpoint=path).samples


def tuning(path: Path | None) -> Tensor:
    posterior = lp.SampledLaplace(network(), "classification", n_samples=2).fit(DATA, generator=seeded())
    posterior.fit_prior_precision(lp.SampledEvidence(max_steps=4, checkpoint=path))
    return torch.cat([posterior.prior_precision.flatten(), posterior.samples.flatten()])


def drawing(path: Path | None) -> Tensor:
    posterior = lp.Riemannian(network(), "classification", n_samples=33, prior_precision=10.0)
    return posterior.fit(DATA, generator=seeded()).draw(generator=seeded(2), checkpoint=path).samples


def diffusion(path: Path | None) -> Tensor:
    method = lp.Diffusion(n_steps=2)
    posterior = lp.Riemannian(network(), "classification", method=method, n_samples=5, prior_precision=10.0)
    return posterior.fit(DATA, generator=seeded()).draw(generator=seeded(2), checkpoint=path).samples


def training(path: Path | None) -> Tensor:
    torch.manual_seed(3)
    options = {"epochs": 4, "frequency": 2, "hyper_steps": 3, "optimizer_options": {"lr": 1e-2}}
    result = lp.train_marginal_likelihood(
        network(), DATA, "classification", checkpoint=path, resume=path is not None, **options
    )
    return torch.cat([answer(result.posterior).flatten(), torch.tensor(result.losses)])


def emphasised(path: Path | None) -> Tensor:
    options = {"epochs": 4, "checkpoint": path, "resume": path is not None, "generator": seeded()}
    result = lp.train_data_emphasized(network(), DATA, "classification", **options)
    return torch.cat([answer(result.posterior).flatten(), torch.tensor(result.losses)])


WORK = [
    one_pass,
    two_passes,
    dense,
    updating,
    eigenpairs,
    leaving_out,
    validating,
    tuning_by_default,
    tangent,
    tangent_at_its_optimum,
    calibrating,
    scaling,
    null_space,
    viking,
    metric_bnn,
    members,
    chosen_weights,
    conjugate_gradients,
    descent,
    tuning,
    drawing,
    diffusion,
    training,
    emphasised,
]


@contextmanager
def writes(told: Callable[[str], None]) -> Iterator[None]:
    """Tells of every checkpoint that is written, after it is."""
    write, kept = io.write, checkpoints.write

    def telling(path: Any, header: Any, tensors: Any) -> None:
        write(path, header, tensors)
        told(f"{Path(path).name} {len(tensors)}")

    io.write = checkpoints.write = telling
    try:
        yield
    finally:
        io.write, checkpoints.write = write, kept


def continued(
    work: Callable[[Path | None], Tensor], path: Path, expected: Tensor, whole: list[str], before: int
) -> str:
    """What a run finds and does that goes on where another was killed, after it wrote so many checkpoints."""
    rest: list[str] = []
    try:
        with writes(rest.append):
            result = work(path)
    except BaseException as error:
        return f"LOST: {type(error).__name__}: {error}"
    if not torch.equal(result, expected):
        return f"DIFFERENT: by {float((result - expected).abs().max()):.2g}"
    # Killed between the exchange of two folders and the line that tells of it, one more is finished.
    return "equal" if rest in (whole[before:], whole[before + 1 :]) else f"RESTARTED: after {before}, {len(rest)} more"


@pytest.mark.parametrize("work", WORK, ids=[work.__name__ for work in WORK])
def test_work(work: Callable[[Path | None], Tensor], tmp_path: Path) -> None:
    whole: list[str] = []
    expected, draw, found, path = work(None), random.Random(0), Tally(), tmp_path / "work" / "it"
    began = time.monotonic()
    with writes(whole.append):
        assert torch.equal(work(path), expected)
    took = time.monotonic() - began
    assert len(whole) > 2 and torch.equal(work(path), expected)  # that is finished, too

    def action(log: int, number: int = 0) -> None:
        if number:
            die_at(number, path.parent, log)
        with writes(lambda _: os.write(log, b"w")):
            work(path)

    def restart() -> None:
        shutil.rmtree(path.parent)
        path.parent.mkdir()

    restart()
    told, _ = in_child(lambda log: action(log, 10**9))
    operations = told.count(b"o")
    for number in sorted({round(1 + k * (operations - 1) / 19) for k in range(20)}):
        restart()
        told, killed = in_child(lambda log, number=number: action(log, number))
        assert killed
        found.note(work.__name__, f"operation {number}", continued(work, path, expected, whole, told.count(b"w")))
    for repetition in range(10):
        restart()
        after = draw.uniform(0, 1.2 * took)
        told, _ = in_child(action, kill_after=after)
        outcome = continued(work, path, expected, whole, told.count(b"w"))
        found.note(work.__name__, f"time {repetition}, {after:.3f} s", outcome)
    restart()
    killed, times, done = True, 0, 0
    while killed and times < 200:  # again and again, until nothing is left to do
        told, killed = in_child(lambda log: action(log, max(60, operations // 3)))
        done, times = done + told.count(b"w"), times + 1
    outcome = continued(work, path, expected, whole, len(whole))
    found.note(work.__name__, f"{times} times in a row, {done} written", outcome if not killed else "NO PROGRESS")
    found.report(f"kills of {work.__name__}", 25)


# -- work that is not the one that was interrupted ---------------------------------------------------------------------

OTHER_NETWORKS = {"other weights": network(1), "another width": network(0, 5)}
OTHER_DATA = {
    "other inputs": [(x + 0.1, y) for x, y in DATA],
    "other labels": [(x, (y + 1) % 3) for x, y in DATA],
    "another order": DATA[::-1],
    "fewer data": DATA[:1],
    "more data": [*DATA, DATA[0]],
}


@pytest.mark.parametrize("name", RESUMED)
def test_other_work(name: str, tmp_path: Path) -> None:
    """What a killed process left is refused to another network, and, by fits, to other data and another order.

    Some go on by right: data that begin with those that were seen, to their own result; and to the first one's result
    training, whose state has the weights, and solvers, which add up all data in any order.
    """
    found, path, expected = Tally(), tmp_path / "work" / "it", answer(RESUMED[name](network(), None))

    def action(log: int, number: int) -> None:
        die_at(number, path.parent, log)
        RESUMED[name](network(), path)

    def stop(share: float) -> bool:
        """Whether a process that dies so far leaves a stage."""
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        assert in_child(lambda log: action(log, round(share * operations)))[1]
        return any(not file.parent.name.endswith(".partial") for file in path.rglob(io.HEADER_FILE))

    path.parent.mkdir()
    operations = in_child(lambda log: action(log, 10**9))[0].count(b"o")
    assert any(map(stop, (0.5, 0.7, 0.9, 1.0)))
    works: dict[str, Callable[[Path], Any]] = {
        title: lambda folder, net=net: RESUMED[name](net, folder) for title, net in OTHER_NETWORKS.items()
    }
    if name in FITS:
        works |= {
            title: lambda folder, data=data: fitted(name, network(), data, checkpoint=folder)
            for title, data in OTHER_DATA.items()
        }
    for title, other in works.items():
        copied = tmp_path / "other" / "it"
        shutil.rmtree(copied.parent, ignore_errors=True)
        shutil.copytree(path, copied)
        allowed = {"refused"}
        if title in ("fewer data", "more data"):
            allowed.add("its own")
        if (title == "other weights" and "training" in name) or (title, name) == ("another order", "SampledLaplace"):
            allowed.add("the first one's")
        try:
            result = answer(other(copied))
        except CheckpointError:
            found.note(name, title, "refused")
        except BaseException as error:
            found.note(name, title, f"UNTYPED: {type(error).__name__}: {error}")
        else:
            wanted = {"the first one's": expected}
            if title not in OTHER_NETWORKS:
                wanted["its own"] = answer(fitted(name, network(), OTHER_DATA[title]))
            outcome = next((which for which, value in wanted.items() if same(result, value)), "ANOTHER")
            found.note(name, title, outcome, allowed)
    found.note(name, "the same", "equal" if same(answer(RESUMED[name](network(), path)), expected) else "DIFFERENT")
    found.report(f"other work than {name}", len(works) + 1)


# -- in processes of their own -----------------------------------------------------------------------------------------

SCRIPT = """
import sys, warnings
from pathlib import Path
import torch
from campaign import test_kills
from laplace_plus.io import checkpoints
name, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
checkpoints.PAUSE = 0.0
torch.set_num_threads(1)
warnings.simplefilter("ignore")
test_kills.die_at(number, folder, 1)
result = getattr(test_kills, name)(folder / "it")
torch.save(result, folder.parent / "result.pt")
"""


def in_process(name: str, folder: Path, number: int) -> tuple[int, bool]:
    """File operations of a new process, and whether it died at the n-th."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, name, str(folder), str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-2000:]
    return done.stdout.count(b"o"), done.returncode != 0


@pytest.mark.parametrize("work", [leaving_out, validating, tangent], ids=["leaving_out", "validating", "tangent"])
def test_fresh_processes(work: Callable[[Path | None], Tensor], tmp_path: Path) -> None:
    """Each process dies, and a new one, which knows nothing, goes on in the same folder."""
    folder, found = tmp_path / "work", Tally()
    folder.mkdir()
    operations, killed = in_process(work.__name__, folder, 10**9)
    expected = torch.load(tmp_path / "result.pt")
    assert not killed and torch.equal(expected, work(None))
    for share in (0.2, 0.5, 0.9):
        (tmp_path / "result.pt").unlink()
        shutil.rmtree(folder)
        folder.mkdir()
        assert in_process(work.__name__, folder, round(share * operations))[1]
        in_process(work.__name__, folder, 10**9)
        equal = torch.equal(torch.load(tmp_path / "result.pt"), expected)
        found.note(work.__name__, f"at {share}", "equal" if equal else "DIFFERENT")
    found.report(f"kills of processes, {work.__name__}", 3)
