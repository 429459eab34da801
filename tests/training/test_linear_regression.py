"""On models that are linear in their weights training ends at the evidence's optimum, which dense algebra knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from training.problems import LinearOracle, TwoLayers, linear_data, loader

import laplace_plus as lp

ONE, TWO = [0] * 7, [0, 0, 0, 1, 1, 1, 1]


def train(net, data, likelihood, **options):
    settings = {
        "posterior": lp.Full,
        "structure": "scalar",
        "optimizer": torch.optim.SGD,
        "optimizer_options": {"lr": 0.1, "momentum": 0.5},
        "epochs": 100,
        "burn_in": 10,
        "frequency": 10,
        "hyper_steps": None,
        "early_stopping": False,
    }
    return lp.train_marginal_likelihood(net, data, likelihood, **{**settings, **options})


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).numpy()


@pytest.mark.quick("0.4-layerwise-tuned", "3.0-scalar-known")
@pytest.mark.parametrize(
    ("temperature", "structure", "noise"),
    [
        pytest.param(1.0, "scalar", "tuned", marks=pytest.mark.slow),
        (1.0, "layerwise", "known"),
        (0.4, "layerwise", "tuned"),
        pytest.param(3.0, "layerwise", "tuned", marks=pytest.mark.slow),
        (3.0, "scalar", "known"),
    ],
)
def test_weights_precisions_and_noise_are_those_of_the_evidence_optimum(temperature, structure, noise):
    torch.manual_seed(0)
    x, y = linear_data()
    oracle = LinearOracle(x, y, ONE if structure == "scalar" else TWO, temperature)
    precisions, level, mean, evidence = oracle.optimum(None if noise == "tuned" else 0.5)
    net = TwoLayers()
    rate = 0.1 * min(1.0, temperature)  # the objective's curvature is that of the tempered likelihood
    result = train(
        net,
        [(x, y)],
        lp.Gaussian(1.0 if noise == "tuned" else 0.5),
        structure=structure,
        temperature=temperature,
        tune_noise=noise == "tuned",
        epochs=300 if temperature > 1 and noise == "tuned" else 100,
        optimizer_options={"lr": rate, "momentum": 0.5},
    )
    assert result.evidence == pytest.approx(evidence, abs=1e-5)
    np.testing.assert_allclose(weights(net), mean, atol=1e-5)
    np.testing.assert_allclose(result.posterior.prior_precision.reshape(-1).numpy(), precisions, rtol=1e-3)
    assert result.posterior.noise_std.item() == pytest.approx(level, rel=1e-4)
    torch.testing.assert_close(result.posterior.mean, torch.from_numpy(weights(net)))


def test_the_posterior_is_the_exact_one():
    x, y = linear_data()
    net = TwoLayers()
    result = train(net, [(x, y)], "regression", structure="layerwise", epochs=20)
    oracle = LinearOracle(x, y, TWO)
    _, total = oracle.posterior(result.posterior.prior_precision.numpy(), result.posterior.noise_std.item())
    np.testing.assert_allclose(result.posterior.covariance_matrix().numpy(), np.linalg.inv(total), rtol=1e-8)


def test_minibatches_of_unequal_size_are_unbiased():
    # Full-batch gradient descent and one epoch of tiny steps over unequal batches go the same way.
    x, y = linear_data(50)
    nets = [TwoLayers(), TwoLayers()]
    nets[1].load_state_dict(nets[0].state_dict())
    pieces = list(zip(x.split(16), y.split(16), strict=True))  # 16, 16, 16 and 2
    before = weights(nets[0])
    rate = 1e-7
    for net, data, lr in ((nets[0], [(x, y)], rate), (nets[1], pieces, rate / 4)):
        train(net, data, lp.Gaussian(0.5), prior_precision=20.0, epochs=1, burn_in=0, optimizer_options={"lr": lr})
    first, second = weights(nets[0]) - before, weights(nets[1]) - before
    assert np.abs(first).max() > 1e-8
    np.testing.assert_allclose(second, first, rtol=1e-5)


@pytest.mark.slow
def test_adam_steps_on_the_evidence_find_the_same_optimum():
    torch.manual_seed(0)
    x, y = linear_data()
    precisions, level, mean, evidence = LinearOracle(x, y, TWO).optimum()
    net = TwoLayers()
    result = train(net, [(x, y)], "regression", structure="layerwise", hyper_steps=40, hyper_lr=0.05, epochs=200)
    assert result.evidence == pytest.approx(evidence, abs=1e-3)
    np.testing.assert_allclose(weights(net), mean, atol=1e-3)
    np.testing.assert_allclose(result.posterior.prior_precision.numpy(), precisions, rtol=2e-2)
    assert result.posterior.noise_std.item() == pytest.approx(level, rel=2e-3)


def test_the_number_of_examples_is_what_was_seen():
    # 50 of 60 examples by a sampler, of which the last incomplete batch is dropped: 48.
    x, y = linear_data(60)
    dataset = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.SubsetRandomSampler(range(50), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    result = train(TwoLayers(), data, "regression", epochs=20, burn_in=0)
    assert result.n_data == result.posterior.n_data == 48


@pytest.mark.slow
def test_the_prior_counts_as_much_as_the_curvature_data_say():
    # Every example twice in training, as after augmentation, and once for the curvature: N is that of the curvature.
    torch.manual_seed(0)
    x, y = linear_data(30)
    oracle = LinearOracle(x, y, TWO)
    net = TwoLayers()
    data = [(x, y), (x, y)]
    result = train(net, data, "regression", structure="layerwise", curvature_loader=[(x, y)], epochs=150)
    precisions, level, mean, evidence = oracle.optimum()
    assert result.n_data == 30
    assert result.evidence == pytest.approx(evidence, abs=1e-5)
    np.testing.assert_allclose(weights(net), mean, atol=1e-5)


@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, pytest.param(lp.LowRank, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_other_structures_climb_their_own_evidence(cls):
    torch.manual_seed(0)
    x, y = linear_data()
    result = train(TwoLayers(), loader(x, y), "regression", posterior=cls, epochs=100, frequency=35)
    own = result.posterior.log_marginal_likelihood().item()
    assert own == pytest.approx(result.evidence, abs=1e-6)
    assert own > result.posterior.log_marginal_likelihood(1.0, 1.0).item() + 10
    again = result.posterior.fit_prior_precision("marginal_likelihood")
    assert again.log_marginal_likelihood().item() == pytest.approx(own, abs=0.05)


@pytest.mark.slow
def test_kfac_is_exact_on_a_single_layer():
    torch.manual_seed(0)
    x, y = linear_data()
    net = nn.Linear(7, 1, bias=False, dtype=torch.float64)
    train(net, [(x, y)], "regression", posterior="KFAC")
    np.testing.assert_allclose(weights(net), LinearOracle(x, y, ONE).optimum()[2], atol=1e-5)
