"""What training does to the network, what it refuses, and what is left when it fails."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from training.problems import TwoLayers, classes, classifier, linear_data, loader

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    EmptyDataError,
    LabelError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.priors import Groups

QUICK = {"epochs": 4, "frequency": 2, "hyper_steps": 5, "optimizer_options": {"lr": 1e-2}}


def train(net, data, likelihood="classification", **options):
    return lp.train_marginal_likelihood(net, data, likelihood, **{**QUICK, **options})


def snapshot(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_the_model_itself_is_trained():
    net = classifier()
    before = snapshot(net)
    result = train(net, loader(*classes()))
    assert result.model is net
    assert not torch.equal(net[0].weight, before["0.weight"])
    assert all(parameter.grad is None for parameter in net.parameters())
    prediction = result.posterior.predictive(classes()[0])  # the posterior is of the network as it is now
    assert (prediction.mean.argmax(-1) == classes()[1]).double().mean() > 0.5


def test_histories():
    seen = []
    result = train(classifier(), loader(*classes()), burn_in=1, epochs=8, frequency=3, callback=seen.append)
    assert [update.epoch for update in result.updates] == [4, 7, 8]
    assert list(result.updates) == seen
    assert len(result.losses) == 8 and result.losses[3] == result.updates[0].loss
    assert result.evidences == tuple(update.evidence for update in seen)
    assert result.prior_precisions.shape == (3, 2) and result.updates[0].noise_std is None
    assert result.evidence == max(result.evidences) and result.n_data == 60
    noisy = train(TwoLayers(), loader(*linear_data()), lp.Gaussian(0.3), structure="scalar")
    assert noisy.prior_precisions.shape == (2,) and noisy.updates[1].noise_std != 0.3
    known = train(TwoLayers(), loader(*linear_data()), lp.Gaussian(0.3), tune_noise=False)
    assert [float(update.noise_std) for update in known.updates] == [pytest.approx(0.3)] * 2


@pytest.mark.quick("5")
@pytest.mark.parametrize("steps", [5, None])
def test_groups_of_layers(steps):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    result = train(net, loader(*classes()), structure="normalized_groups", hyper_steps=steps)
    assert result.posterior.prior_groups.names == ("0", "5", "rest")
    assert result.prior_precisions.shape == (2, 3) == (2, len(result.posterior.prior_precision))
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-4)
    halves = Groups("halves", ("first", "second"), (torch.arange(result.posterior.n_parameters) > 50).long())
    start = torch.tensor([2.0, 5.0])
    result = train(net, loader(*classes()), structure=halves, prior_precision=start, hyper_steps=steps)
    assert result.posterior.prior_groups is halves


@pytest.mark.parametrize("early_stopping", [True, False])
def test_the_greatest_evidence_is_kept(early_stopping):
    # The learning rate explodes after the sixth epoch, and the evidence falls.
    def explode(optimizer):
        return LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 6 else 100.0)

    weights, hyper, net = [], [], classifier()

    def note(update):
        weights.append(snapshot(net))
        hyper.append(update.prior_precision)

    result = train(net, loader(*classes()), epochs=10, scheduler=explode, early_stopping=early_stopping, callback=note)
    best = max(range(5), key=result.evidences.__getitem__)
    assert best < 4 and result.evidences[best] > result.evidences[-1] + 1
    kept = best if early_stopping else 4
    assert result.epoch == result.updates[kept].epoch and result.evidence == result.evidences[kept]
    for name, value in net.state_dict().items():
        assert torch.equal(value, weights[kept][name])
    assert torch.equal(result.posterior.prior_precision, hyper[kept])
    assert result.posterior.log_marginal_likelihood().item() == pytest.approx(result.evidence, rel=1e-5)


def test_burn_in_trains_at_the_initial_precision():
    x, y = linear_data()
    nets = [TwoLayers(), TwoLayers()]
    nets[1].load_state_dict(nets[0].state_dict())
    sgd = {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.05}, "early_stopping": False}
    precision = torch.tensor([2.0, 300.0])
    train(nets[0], [(x, y)], lp.Gaussian(1.0), burn_in=29, epochs=30, prior_precision=precision, **sgd)
    for _ in range(30):
        for parameter in nets[1].parameters():
            parameter.grad = None
        penalty = (2 * nets[1].a.weight.square().sum() + 300 * nets[1].b.weight.square().sum()) / 2
        ((0.5 * (nets[1](x) - y).square().sum() + penalty) / len(x)).backward()
        with torch.no_grad():
            for parameter in nets[1].parameters():
                parameter -= 0.05 * parameter.grad
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one, other)


# -- what happens to the network on the way ----------------------------------------------------------------------------


def test_modes_are_those_of_training_and_then_those_of_before():
    modes = {"training": [], "curvature": []}

    class Watched(nn.Linear):
        def forward(self, x):
            modes["training" if self is net[0] else "curvature"].append(self.training)  # a shadow is another object
            return super().forward(x)

    torch.manual_seed(0)
    net = nn.Sequential(Watched(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    net.eval()
    net[1].train()
    train(net, loader(*classes()))
    assert all(modes["training"]) and len(modes["training"]) == 4 * 4
    assert not any(modes["curvature"])
    assert [module.training for module in net] == [False, True, False, False]
    assert net[1].num_batches_tracked == 16


def test_dropout_is_active_in_training_and_not_in_the_curvature():
    net = classifier(dropout=0.9)
    before = snapshot(net)
    data = [classes()]
    result = train(net, data, epochs=1, optimizer_options={"lr": 0.0}, prior_precision=1e-6)
    assert torch.equal(net[0].weight, before["0.weight"])
    sure = nn.functional.cross_entropy(net.eval()(data[0][0]), data[0][1]).item()
    assert result.updates[0].log_likelihood == pytest.approx(-60 * sure, rel=1e-5)
    assert abs(result.losses[0] - sure) > 0.01


def test_frozen_parameters_stay():
    net = classifier()
    net[0].weight.requires_grad_(False)
    before = snapshot(net)
    result = train(net, loader(*classes()))
    assert torch.equal(net[0].weight, before["0.weight"])
    assert not torch.equal(net[0].bias, before["0.bias"])
    assert not net[0].weight.requires_grad
    assert result.posterior.parameter_names == ("0.bias", "2.weight", "2.bias")


def test_a_posterior_over_some_layers_leaves_the_others_without_a_prior():
    net = classifier()
    factory = functools.partial(lp.Full, parameters="last_layer")
    result = train(net, [classes()], posterior=factory, prior_precision=1e8, burn_in=149, epochs=150)
    assert net[2].weight.abs().max() < 0.05 < 0.1 < net[0].weight.abs().max()
    assert result.posterior.parameter_names == ("2.weight", "2.bias")


def test_schedulers_step_by_epochs():
    seen = []

    def schedule(step):
        seen.append(step)
        return 1.0

    train(classifier(), loader(*classes()), scheduler=lambda optimizer: LambdaLR(optimizer, schedule))
    assert seen == list(range(5))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.0}, "epochs"),
        ({"burn_in": -1}, "burn_in"),
        ({"frequency": 0}, "frequency"),
        ({"hyper_steps": 0}, "hyper_steps"),
        ({"hyper_lr": 0.0}, "hyper_lr"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_gradient_norm": float("nan")}, "max_gradient_norm"),
        ({"tune_noise": True}, "no noise"),
        ({"structure": "blockwise"}, "blockwise"),
        ({"structure": "blockwise", "hyper_steps": None}, "blockwise"),
        ({"posterior": "Nothing"}, "Nothing"),
        ({"posterior": lambda *args, **kwargs: "text"}, "no Gaussian posterior"),
        ({"optimizer": torch.optim.AdamW}, "weight decay"),
        ({"prior_precision": torch.ones(3)}, "[Pp]rior.precision"),
        ({"prior_precision": torch.ones(2), "structure": "scalar"}, "prior_precision has another shape"),
    ],
)
def test_arguments_that_cannot_be(options, message):
    net = classifier()
    before = snapshot(net)
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        train(net, loader(*classes()), **options)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_structure_that_the_posterior_does_not_take_is_refused_at_once():
    for steps in (5, None):
        with pytest.raises(UnsupportedError):
            train(classifier(), loader(*classes()), structure="diagonal", epochs=10**6, hyper_steps=steps)


def test_data_that_cannot_be():
    x, y = classes()
    with pytest.raises(DataError, match="only be used once"):
        train(classifier(), iter([(x, y)]))
    with pytest.raises(DataError, match="only be used once"):
        train(classifier(), [(x, y)], curvature_loader=(pair for pair in [(x, y)]))
    with pytest.raises(EmptyDataError):
        train(classifier(), [])
    with pytest.raises(EmptyDataError):
        train(classifier(), DataLoader(TensorDataset(x[:3], y[:3]), 8, drop_last=True), curvature_loader=[(x, y)])
    with pytest.raises(DataError, match="not an iterable of batches.*one batch"):
        train(classifier(), (x, y))
    with pytest.raises(LabelError, match="not class indices"):
        train(classifier(), [(x, y.float())])


# -- what is left when it fails ----------------------------------------------------------------------------------------


class Poisoned:
    """Batches one of which is not finite, in one pass."""

    def __init__(self, batches, *, at):
        self.batches, self.at, self.passes = list(batches), at, 0

    def __iter__(self):
        self.passes += 1
        for number, (x, y) in enumerate(self.batches):
            yield (x + math.nan if (self.passes, number) == self.at else x), y


def test_a_loss_that_is_not_finite_is_named():
    x, y = classes()
    # Pass 1 counts, pass 4 is the third epoch; the updates come from other batches.
    poisoned = Poisoned(zip(x.split(20), y.split(20), strict=True), at=(4, 1))
    net = classifier(norm=True)
    with pytest.raises(NonFiniteError, match="epoch 3, by batch 2"):
        train(net, poisoned, curvature_loader=[(x, y)])
    assert net.training and all(parameter.grad is None for parameter in net.parameters())


def test_evidence_that_is_not_finite(monkeypatch):
    evidence = lp.KFAC.log_marginal_likelihood
    calls = []

    def broken(self, *args, **kwargs):
        calls.append(1)
        value = evidence(self, *args, **kwargs)
        return value * math.nan if len(calls) > 10 else value  # one rehearsal, and 6 in each update

    monkeypatch.setattr(lp.KFAC, "log_marginal_likelihood", broken)
    with pytest.raises(NonFiniteError, match="evidence is not finite"):
        train(classifier(), [classes()], frequency=1)
