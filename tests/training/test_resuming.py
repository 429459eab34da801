"""A run that is interrupted and continued equals one that was not, to the last bit, and nothing is pickled."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from shutil import copytree

import pytest
import torch
from problems import Stopped
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset
from training.problems import TwoLayers, classes, classifier, linear_data, loader

import laplace_plus as lp
from laplace_plus import io
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.io.checkpoints import pack, unpack


def at_epoch(epoch):
    def callback(update):
        if update.epoch == epoch:
            raise Stopped

    return callback


def state_of(result):
    model = result.model.state_dict()
    hyper = [result.posterior.prior_precision, result.posterior.mean, *(u.prior_precision for u in result.updates)]
    return [*model.values(), *hyper, torch.tensor([*result.losses, *result.evidences, result.evidence, result.epoch])]


def run(path=None, *, resume=False, callback=None, task="classification", **options):
    torch.manual_seed(3)
    settings = {"epochs": 9, "frequency": 2, "hyper_steps": 5, "optimizer_options": {"lr": 1e-2}, **options}
    if task == "classification":
        net, data, likelihood = classifier(dropout=0.3, norm=True), loader(*classes(32)), "classification"
    else:
        net, data, likelihood = TwoLayers(), loader(*linear_data(32)), lp.Gaussian(0.7)
    return lp.train_marginal_likelihood(
        net, data, likelihood, checkpoint=path, resume=resume, callback=callback, **settings
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of two epochs; not to be changed."""
    path = tmp_path_factory.mktemp("runs") / "run"
    run(path, epochs=2)
    return path


CASES = {
    "Adam, dropout and batch normalisation": {},
    "regression": {"task": "regression"},
    "no shuffling generator of its own": {"curvature_loader": [classes()]},
    "last instead of best": {"early_stopping": False, "hyper_steps": None},
    "one precision": {"structure": "scalar", "posterior": "Diagonal"},
    "a precision for each entry": {"structure": "diagonal", "posterior": lp.Diagonal},
    "SGD": {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}},
    "cosine": {"scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 9)},
    "steps": {"scheduler": lambda optimizer: MultiStepLR(optimizer, [2, 5])},
    "plateau": {"scheduler": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1)},
    "a function": {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))},
    "batches": {"scheduler": lambda optimizer: OneCycleLR(optimizer, 0.02, 18), "schedule_by": "batch"},
    "two schedules": {
        "scheduler": lambda optimizer: SequentialLR(
            optimizer, [ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.9)], [3]
        )
    },
}


QUICK = {
    "Adam, dropout and batch normalisation",
    "regression",
    "a precision for each entry",
    "batches",
    "two schedules",
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # by torch 2.6's own SequentialLR
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_continued_equals_uninterrupted(tmp_path, case):
    path = tmp_path / "run"
    whole = run(**CASES[case])
    with pytest.raises(Stopped):
        run(path, callback=at_epoch(4), **CASES[case])
    torch.manual_seed(999)
    torch.randn(7)
    epochs = []
    continued = run(path, resume=True, callback=lambda update: epochs.append(update.epoch), **CASES[case])
    assert epochs == [6, 8, 9]
    for one, other in zip(state_of(whole), state_of(continued), strict=True):
        assert torch.equal(one, other)
    finished = run(path, resume=True, **CASES[case])  # there is nothing left to do but to fit the posterior
    for one, other in zip(state_of(whole), state_of(finished), strict=True):
        assert torch.equal(one, other)


def test_sampled_curvature_continues_with_the_same_labels(tmp_path):
    options = {"backend": lp.Native("ggn_mc", n_samples=1)}
    path = tmp_path / "run"
    whole = run(generator=torch.Generator().manual_seed(5), **options)
    with pytest.raises(Stopped):
        run(path, callback=at_epoch(4), generator=torch.Generator().manual_seed(5), **options)
    continued = run(path, resume=True, generator=torch.Generator().manual_seed(77), **options)
    assert whole.evidences == continued.evidences


def test_a_run_can_be_made_longer(tmp_path):
    path = tmp_path / "run"
    whole = run()
    run(path, epochs=4)
    longer = run(path, resume=True)
    for one, other in zip(state_of(whole), state_of(longer), strict=True):
        assert torch.equal(one, other)


def test_checkpoints_without_interruption_change_nothing(tmp_path):
    for one, other in zip(state_of(run()), state_of(run(tmp_path / "run")), strict=True):
        assert torch.equal(one, other)


def test_a_run_may_be_ended_before_its_first_update(tmp_path):
    path = tmp_path / "run"

    class Limited:
        """Batches that stop coming."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            if self.passes > 5:  # one for a rehearsal, one to count, three epochs
                raise Stopped
            return iter([classes()])

    settings = {"epochs": 20, "burn_in": 2, "frequency": 10}
    with pytest.raises(Stopped):
        lp.train_marginal_likelihood(classifier(), Limited(), checkpoint=path, **settings)
    settings["epochs"] = 3
    result = lp.train_marginal_likelihood(classifier(), [classes()], checkpoint=path, resume=True, **settings)
    assert len(result.losses) == 3 and [update.epoch for update in result.updates] == [3]
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-5)


def test_nothing_is_overwritten_unasked(begun):
    before = (begun / "posterior.json").read_bytes()
    with pytest.raises(CheckpointError, match="resume=True"):
        run(begun, epochs=2)
    assert (begun / "posterior.json").read_bytes() == before


def test_other_runs_are_refused(tmp_path):
    path = tmp_path / "run"
    result = run(path, epochs=2)
    with pytest.raises(CheckpointError, match="another hyper_lr"):
        run(path, epochs=2, resume=True, hyper_lr=0.3)
    with pytest.raises(CheckpointError, match="another network"):
        run(path, epochs=2, resume=True, task="regression")
    with pytest.raises(CheckpointError, match="longer run"):
        run(path, epochs=1, resume=True)
    with pytest.raises(CheckpointError, match="other generators"):
        run(path, epochs=2, resume=True, generator=torch.Generator())
    with pytest.raises(CheckpointError):
        lp.load(path, result.model)
    result.posterior.save(tmp_path / "posterior")
    with pytest.raises(CheckpointError, match="not a checkpoint of training"):
        run(tmp_path / "posterior", epochs=2, resume=True)
    with pytest.raises(ConfigurationError, match="checkpoint=path"):
        run(None, resume=True)


def test_older_checkpoints_are_compared_by_what_they_hold(begun, tmp_path):
    path = copytree(begun, tmp_path / "run")
    header, tensors = io.read(path)
    header["settings"] = {}
    io.write(path, header, tensors)
    with pytest.raises(CheckpointError, match="another network"):
        run(path, epochs=3, resume=True, task="regression")
    assert len(run(path, epochs=3, resume=True).losses) == 3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prior_mean", {"prior_mean": 3.0}),
        ("prior_precision", {"prior_precision": 50.0}),
        ("posterior", {"posterior": "Full"}),
        ("posterior", {"posterior": partial(lp.KFAC, weight_sharing="reduce")}),
        ("parameters", {"posterior": partial(lp.KFAC, parameters="last_layer")}),
        ("backend", {"backend": lp.Native("ggn_mc")}),
        ("optimizer", {"optimizer": torch.optim.SGD}),
        ("optimizer_options", {"optimizer_options": {"lr": 0.1}}),
        ("scheduler", {"scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 9)}),
    ],
)
def test_another_argument_is_refused_by_name(begun, name, options):
    with pytest.raises(CheckpointError, match=f"another {name}\\."):
        run(begun, epochs=3, resume=True, **options)


def with_data(path, inputs, targets, *, epochs=2, resume=False, shuffle=True):
    torch.manual_seed(3)
    data = DataLoader(TensorDataset(inputs, targets), 8, shuffle=shuffle, generator=torch.Generator().manual_seed(1))
    return lp.train_marginal_likelihood(classifier(), data, epochs=epochs, checkpoint=path, resume=resume)


def test_other_data_are_refused(tmp_path):
    path, (x, y) = tmp_path / "run", classes()
    with_data(path, x, y)
    for inputs, targets in ((x, y.roll(1)), (x + 0.1, y), (x[:-1], y[:-1])):
        with pytest.raises(CheckpointError, match="other data"):
            with_data(path, inputs, targets, epochs=3, resume=True)
    backwards = with_data(path, x.flip(0), y.flip(0), epochs=3, resume=True, shuffle=False)  # the same in another order
    assert backwards.epoch == 3


@pytest.mark.parametrize("source", ["torch", "python"])
def test_augmented_data_are_recognised_or_not_judged(tmp_path, source):
    inputs, targets = classes(32)
    own = random.Random(0)  # which training knows nothing of

    class Augmented:
        def __len__(self):
            return len(inputs)

        def __getitem__(self, number):
            shift = torch.randn(()).item() if source == "torch" else own.gauss(0, 1)
            return inputs[number] + 0.1 * shift, targets[number]

    def train(**options):
        torch.manual_seed(5)
        data = DataLoader(Augmented(), 8, shuffle=True)
        return lp.train_marginal_likelihood(classifier(), data, frequency=2, checkpoint=tmp_path / "run", **options)

    train(epochs=2)
    torch.randn(11)
    assert train(epochs=4, resume=True).updates[-1].epoch == 4


@pytest.mark.parametrize("posterior", [lp.Full, lp.KFAC, lp.Diagonal])
def test_the_evidence_of_a_continued_run_is_its_posteriors(tmp_path, posterior):
    options = {"posterior": posterior, "task": "regression", "prior_mean": 0.2, "prior_precision": 3.0}
    run(tmp_path / "run", epochs=4, **options)
    result = run(tmp_path / "run", resume=True, epochs=6, **options)
    assert len(result.updates) == 3
    assert result.evidence == pytest.approx(result.posterior.log_marginal_likelihood().item(), rel=1e-12)


def test_damage_is_noticed(begun, tmp_path):
    path = copytree(begun, tmp_path / "run")
    file = path / "posterior.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        run(path, epochs=2, resume=True)


def test_what_cannot_be_stored_is_named(tmp_path):
    class Remembering(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "hook": object()}

    with pytest.raises(CheckpointError, match="state.optimizer.hook"):
        run(tmp_path / "run", optimizer=Remembering)


def test_trees_come_back_as_they_were():
    tree = {
        "numbers": [1, 2.5, True, None, "text", float("inf"), float("-inf")],
        "tuple": (1, (2.0, torch.arange(3))),
        3: {"inner": torch.eye(2)},
        "3": {"inner": torch.zeros(1)},
        "counter": Counter({4: 2, 7: 1}),
        "kind of entry": "a key that this module uses",
    }
    tensors = {}
    text = json.dumps(pack(tree, tensors, "tree"), allow_nan=False)
    back = unpack(json.loads(text), tensors)
    assert list(back) == list(tree)
    assert back["numbers"] == tree["numbers"] and back["counter"] == tree["counter"]
    assert isinstance(back["counter"], Counter) and isinstance(back["tuple"], tuple)
    assert torch.equal(back["tuple"][1][1], torch.arange(3))
    assert torch.equal(back[3]["inner"], torch.eye(2)) and torch.equal(back["3"]["inner"], torch.zeros(1))
