"""Tuning and calibration that are interrupted go on to the bits of an uninterrupted call."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from problems import Stopped, Until
from torch import nn

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError, ConfigurationError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("saved_after_each_batch")]


def network(scale=1.0):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        net[0].weight *= scale
    return net


def batches(seed=1, sizes=(9, 2, 7, 5), regression=False):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(n, 4, generator=generator) for n in sizes]
    return [(x, x[:, :3] * x[:, 1:] if regression else (x.sum(1) > 0).long() + (x[:, 0] > 1).long()) for x in inputs]


def seeded():
    return torch.Generator().manual_seed(7)


HELD_OUT = batches(seed=2)


def tuned(tuner, made=lp.KFAC, likelihood="classification", held_out=False):
    """A call that tunes a new posterior, by data that are held out or those of the fit."""

    def call(data, folder=None, net=None, generator=None):
        posterior = made(network() if net is None else net, likelihood)
        posterior.fit(batches(regression=likelihood == "regression"))
        own = dataclasses.replace(tuner, data=data) if held_out else tuner
        if not held_out:
            posterior.training_data = dataclasses.replace(posterior.training_data, first=data)
        return posterior.fit_prior_precision(own, generator=generator or seeded(), checkpoint=folder).tuning

    return call


def calibrated(method="leave_one_out", **options):
    def call(data, folder=None, net=None, generator=None):
        posterior = lp.Full(network() if net is None else net, "classification").fit(batches())
        generator = generator or seeded()
        found = lp.calibrate(posterior, data, method, generator=generator, checkpoint=folder, **options)
        return found.temperature, found.covariance_scale, found.weight, found.bias, found.report

    return call


def retrained(data):
    net = network(0.5)
    for _ in range(2):
        for x, y in data:
            nn.functional.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    return net


CALLS = {
    "default": tuned(lp.Auto()),
    "default, dense": tuned(lp.Auto(weight_decay=1e-3, link="mc", n_samples=5), lp.Full),
    "default, regression": tuned(lp.Auto(), likelihood="regression"),
    "default, last layer": tuned(lp.Auto(), lambda *a: lp.Full(*a, parameters="last_layer")),
    "default, held out": tuned(lp.Auto(), held_out=True),
    "leave-one-out": tuned(lp.LeaveOneOut(weight_decay=1e-2, link="mc", n_samples=5), lp.Full),
    "leave-one-out, exact": tuned(lp.LeaveOneOut(1.0, leverages="full")),
    "leave-one-out, regression": tuned(lp.LeaveOneOut(1.0), lp.Full, "regression"),
    "validation": tuned(lp.Validation(HELD_OUT), held_out=True),
    "validation, drawn": tuned(lp.Validation(HELD_OUT, link="mc", n_samples=5), held_out=True),
    "validation, regression": tuned(lp.Validation(HELD_OUT, grid=(0.1, 1.0, 10.0)), lp.Diagonal, "regression", True),
    "tangent": tuned(lp.Tangent(), lp.Full),
    "tangent, streamed": tuned(lp.Tangent(keep_jacobian=False, max_iterations=4, predictive_mean="tangent")),
    "calibration": calibrated(weight_decay=1e-2),
    "calibration, exact": calibrated(weight_decay=1e-2, leverages="full", link="mc", n_samples=5),
    "calibration, retrained": calibrated(refit=retrained),
    "scaling": calibrated("temperature"),
    "scaling, drawn": calibrated("vector", link="mc", n_samples=5),
}


def data_of(name):
    return batches(seed=2 if "held" in name or "valid" in name else 1, regression="regression" in name)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if dataclasses.is_dataclass(one):
        own = {name: value for name, value in vars(one).items() if name != "n_passes"}  # of the process
        return type(one) is type(other) and all(same(value, vars(other)[name]) for name, value in own.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one and other != other


@pytest.fixture
def forwards(monkeypatch):
    """The number of examples of each forward pass."""
    seen, forward = [], nn.Sequential.forward

    def counted(self, x):
        seen.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(nn.Sequential, "forward", counted)
    return seen


SLOW = {*CALLS} - {"default", "validation, drawn", "tangent", "calibration"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CALLS])
def test_an_interrupted_call_goes_on_to_the_same_bits(name, tmp_path):
    data, call, generator, loader = data_of(name), CALLS[name], seeded(), Until(data_of(name))
    whole = call(loader, generator=generator)
    read = 10**9 - loader.left
    assert same(whole, call(data, tmp_path / "whole"))
    for stop in {1, read // 2, read - 1}:
        folder, other = tmp_path / str(stop), seeded()
        with pytest.raises(Stopped):
            call(Until(data, stop), folder)
        assert same(whole, call(data, folder, generator=other)), stop
        assert torch.equal(other.get_state(), generator.get_state())


@pytest.mark.parametrize("name", ["default", "leave-one-out, exact", "tangent", "calibration"])
def test_what_is_finished_takes_no_pass_of_the_network(name, tmp_path, forwards):
    data, call, loader = data_of(name), CALLS[name], Until(data_of(name))
    whole = call(data, tmp_path)
    forwards.clear()
    (lp.Full if name[:4] in ("tang", "cali", "scal") else lp.KFAC)(network(), "classification").fit(batches())
    fit = len(forwards)
    forwards.clear()
    assert same(whole, call(loader, tmp_path))
    assert len(forwards) == fit
    passes = (10**9 - loader.left) / len(data)
    assert passes == {"calibration": 3, "scaling": 2}.get(name, 1)  # that compare the data


OTHERS = {
    "weights": (tuned(lp.LeaveOneOut(1.0), lp.Full), batches(), network(1.5)),
    "options": (tuned(lp.LeaveOneOut(1.0, kappa=1.0), lp.Full), batches(), None),
    "tuner": (tuned(lp.Auto(), lp.Full), batches(), None),
    "class": (tuned(lp.LeaveOneOut(1.0)), batches(), None),
    "data": (tuned(lp.LeaveOneOut(1.0), lp.Full), batches(seed=3), None),
    "order": (tuned(lp.LeaveOneOut(1.0), lp.Full), batches()[::-1], None),
}


@pytest.mark.parametrize(("name", "ended"), [*((name, False) for name in OTHERS), ("data", True), ("order", True)])
def test_another_call_is_refused(name, ended, tmp_path):
    own = tuned(lp.LeaveOneOut(1.0), lp.Full)
    if ended:
        own(batches(), tmp_path)
    else:
        with pytest.raises(Stopped):
            own(Until(batches(), 6), tmp_path)
    call, data, net = OTHERS[name]
    with pytest.raises(CheckpointError, match="another computation") as caught:
        call(data, tmp_path, net=net)
    expected = {"weights": "network", "options": "call", "tuner": "call", "class": "class"}
    assert caught.match(f"its ({expected.get(name, 'data')}) differ")
    assert same(own(batches(), tmp_path), own(batches()))  # it is as it was


def test_the_fit_is_told_apart(tmp_path):
    """The same data and settings, but a posterior whose curvature or last tuning is another."""
    lp.Full(network(), "classification").fit(batches()).fit_prior_precision(lp.LeaveOneOut(1.0), checkpoint=tmp_path)
    other = lp.Full(network(), "classification").fit(batches())
    other.sums.curvature.blocks[0][1].parts()[0].mul_(1.0001)
    with pytest.raises(CheckpointError, match="its fit differs"):
        other.fit_prior_precision(lp.LeaveOneOut(1.0), checkpoint=tmp_path)
    tuned_before = lp.Full(network(), "classification").fit(batches()).fit_prior_precision(lp.LeaveOneOut(1.0))
    tuned_before._prior_precision = torch.tensor(1.0)
    with pytest.raises(CheckpointError, match="its fit differs"):
        tuned_before.fit_prior_precision(lp.LeaveOneOut(1.0), checkpoint=tmp_path)


class Reordered:
    """Batches of which each pass from the second on has another order."""

    def __init__(self, batches, most=10**9):
        self.loader, self.passes = Until(batches, most), 0

    def __iter__(self):
        self.passes += 1
        self.loader.batches = self.loader.batches[:: -1 if self.passes == 2 else 1]
        return iter(self.loader)


def test_a_loader_that_shuffles_from_pass_to_pass_is_refused(tmp_path):
    call = tuned(lp.LeaveOneOut(1.0), lp.Full)
    with pytest.raises(Stopped):
        call(Until(batches(), 4 + 2), tmp_path)
    with pytest.raises(CheckpointError, match="its data differ"):
        call(Reordered(batches()), tmp_path)


def test_what_cannot_continue_says_so(tmp_path):
    posterior = lp.NullSpace(network(), "classification", rows="loss", n_samples=2).fit(batches(), generator=seeded())
    with pytest.raises(ConfigurationError, match="checkpoint"):
        posterior.fit_prior_precision(checkpoint=tmp_path / "tuning")
    assert not (tmp_path / "tuning").exists()


def test_a_tuner_with_a_checkpoint_of_its_own_takes_it(tmp_path):
    posterior = lp.SampledLaplace(network(), "classification", n_samples=2).fit(batches(), generator=seeded())
    posterior.fit_prior_precision(max_steps=1, checkpoint=tmp_path / "tuning")
    assert (tmp_path / "tuning" / "tuning").is_dir()


@pytest.mark.parametrize(
    "entry", [[], [[{"totals": 3}], []], 5, {"kind of entry": "object", "class": "os", "entries": {}}]
)
def test_forged_sums_are_refused(entry, tmp_path):
    call = tuned(lp.LeaveOneOut(1.0), lp.Full)
    with pytest.raises(Stopped):
        call(Until(batches(), 7), tmp_path)
    header, tensors = io.read(tmp_path / "leave-one-out-1")
    header["stage"]["value"] = entry
    io.write(tmp_path / "leave-one-out-1", header, tensors)
    with pytest.raises(CheckpointError, match="cannot be read"):
        call(batches(), tmp_path)


SCRIPT = """
import os, sys, torch, laplace_plus as lp
from laplace_plus.io import checkpoints
from posteriors.test_tuning_resuming import CALLS, data_of
checkpoints.PAUSE = 0.0
name, folder, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
class Killing(list):
    left = most
    def __iter__(self):
        for batch in list.__iter__(self):
            if not Killing.left:
                os.kill(os.getpid(), 9)
            Killing.left -= 1
            yield batch
torch.set_num_threads(1)
CALLS[name](Killing(data_of(name)), folder)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="kills")
@pytest.mark.parametrize(
    "name", ["default", "leave-one-out", "validation", "tangent, streamed", "calibration", "scaling"]
)
def test_killed_processes(name, tmp_path):
    """Each process gets some batches further than the one before; the last one finishes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ended, killed = None, 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path])}
    for most in (3, 5, 9, 14):
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), name, str(tmp_path), str(most)]
        ended = subprocess.run(command, env=environment, check=False).returncode
        killed += ended == -signal.SIGKILL
    assert killed >= 1 and ended in (0, -signal.SIGKILL)
    assert same(CALLS[name](data_of(name), tmp_path), CALLS[name](data_of(name)))
    torch.set_num_threads(threads)
