"""The callback with Lightning's own trainer and checkpoints."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import laplace_plus as lp
from laplace_plus.errors import CheckpointError, NotFittedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


class Parts:
    """Lightning takes seconds to import, which the worker alone spends that runs these tests."""

    def __getattr__(self, name):
        if name.startswith("_"):  # what pytest asks every object of a module
            raise AttributeError(name)
        return getattr(import_module("integrations.lightning_parts"), name)


parts = Parts()


@pytest.fixture(scope="module", autouse=True)
def _installed():
    pytest.importorskip("lightning", reason="needs the extra `lightning`")


def loader(**options):
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(60, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, (x[:, 0] + noise > 0).long()), batch_size=20, **options)


def trainer(tmp_path, *callbacks, **options):
    options = {"max_epochs": 5, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"} | options
    silent = {"enable_model_summary": False, "default_root_dir": tmp_path, "enable_checkpointing": False}
    return parts.lightning.Trainer(callbacks=list(callbacks), **(silent | options))


@pytest.fixture
def trained(tmp_path):
    torch.manual_seed(0)
    module, callback = parts.Module(), parts.LaplaceCallback("classification")
    runner = trainer(tmp_path, callback)
    runner.fit(module, loader(shuffle=True))
    return module, callback, runner


def test_the_posterior_is_that_of_the_library(trained):
    module, callback, _ = trained
    assert module.training and module.net[1].training
    module.zero_grad()
    expected = lp.KFAC(module, "classification").fit(loader()).fit_prior_precision()
    x = loader().dataset.tensors[0]
    assert callback.posterior.n_data == 60
    torch.testing.assert_close(callback.posterior.prior_precision, expected.prior_precision, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(callback.posterior.predictive(x).mean, expected.predictive(x).mean)


def test_training_and_random_state_are_as_without_the_callback(tmp_path):
    states = []
    for callbacks in ([], [parts.LaplaceCallback("classification", "Diagonal")]):
        torch.manual_seed(0)
        module, runner = parts.Module(), trainer(tmp_path, *callbacks)
        runner.fit(module, loader(shuffle=True))
        hooks = [len(vars(m)["_forward_hooks"]) + len(vars(m)["_forward_pre_hooks"]) for m in module.modules()]
        states.append((torch.get_rng_state(), *module.state_dict().values(), torch.tensor(hooks)))
        assert runner.state.finished and module.training and runner.global_step == 15
    assert all(map(torch.equal, *states))


def test_a_checkpoint_keeps_the_posterior_and_pickles_nothing(trained, tmp_path):
    module, callback, runner = trained
    runner.save_checkpoint(tmp_path / "model.ckpt")
    again = parts.Module.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    x = loader().dataset.tensors[0]
    expected = callback.posterior.predictive(x).mean
    assert torch.equal(parts.load_posterior(tmp_path / "model.ckpt", again).predictive(x).mean, expected)
    with pytest.raises(CheckpointError, match="another one"):
        parts.load_posterior(tmp_path / "model.ckpt", parts.Module())
    later = parts.LaplaceCallback("classification")
    trainer(tmp_path, later).validate(parts.Validated(), loader(), ckpt_path=tmp_path / "model.ckpt", verbose=False)
    assert torch.equal(later.posterior.predictive(x).mean, expected)
    trainer(tmp_path, later, max_epochs=6).fit(parts.Module(), loader(), ckpt_path=tmp_path / "model.ckpt")
    assert not torch.equal(later.posterior.predictive(x).mean, expected)  # of the weights six epochs gave


def test_checkpoints_of_later_training_hold_no_stale_posterior(trained, tmp_path):
    module, callback, _ = trained
    seen = []

    class Watch(parts.lightning.Callback):
        def on_train_epoch_end(self, runner, module):
            seen.append(callback.posterior)

    trainer(tmp_path, callback, Watch(), max_epochs=1).fit(module, loader())
    assert seen == [None] and callback.posterior is not None


def test_the_trainer_predicts_with_it(trained, tmp_path):
    _, callback, _ = trained
    found = trainer(tmp_path).predict(callback.predictor(), loader())
    x = loader().dataset.tensors[0]
    expected = callback.posterior.predictive(x).mean
    torch.testing.assert_close(torch.cat([one.mean for one in found]), expected)
    assert all(isinstance(one, lp.Prediction) for one in found)
    bare = DataLoader(TensorDataset(x), batch_size=60)
    (only,) = trainer(tmp_path).predict(parts.LaplacePredictor(callback.posterior, link="probit"), bare)
    torch.testing.assert_close(only.mean, callback.posterior.predictive(x, link="probit").mean)


def test_a_submodule_and_other_data(tmp_path):
    data = [next(iter(loader()))]
    callback = parts.LaplaceCallback("classification", lp.Full, data=data, network="net", parameters="last_layer")
    module = parts.Module()
    runner = trainer(tmp_path, callback, max_epochs=1)
    runner.fit(module, loader())
    assert callback.posterior.n_data == 20 and callback.posterior.n_parameters == 18
    assert callback.posterior.network.model is module.net
    runner.save_checkpoint(tmp_path / "net.ckpt")
    again = parts.Module.load_from_checkpoint(tmp_path / "net.ckpt", weights_only=True)
    assert parts.load_posterior(tmp_path / "net.ckpt", again).network.model is again.net


def test_what_cannot_be_fitted_is_refused(tmp_path):
    with pytest.raises(NotFittedError):
        parts.LaplaceCallback("classification").predictor()


def test_weights_and_smoothing_of_the_loss_are_those_of_the_likelihood(tmp_path):
    callback = parts.LaplaceCallback("classification", "Diagonal")
    trainer(tmp_path, callback, max_epochs=1).fit(parts.Weighted(), loader())
    assert callback.posterior.likelihood == lp.Categorical(weight=(1.0, 2.0), label_smoothing=0.1)
    given = parts.LaplaceCallback(lp.Categorical(weight=(1.0, 2.0)), "Diagonal")
    with pytest.warns(UserWarning, match=r"was that of .*label_smoothing=0\.1"):
        trainer(tmp_path, given, max_epochs=1).fit(parts.Weighted(), loader())
