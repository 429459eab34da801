"""Batches pass in parts that a memory budget holds, where posteriors know nothing but forward passes or samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus._memory import memory_budget
from laplace_plus.errors import ConfigurationError
from laplace_plus.structured.gradients import DenseGradients

N, WIDTH = 24, 40


class Watched(nn.Sequential):
    """Notes the number of examples of each call."""

    def forward(self, x):
        self.seen.append(len(x))
        return super().forward(x)


def network(norm=nn.BatchNorm1d):
    torch.manual_seed(0)
    net = Watched(nn.Linear(4, WIDTH), norm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    net.seen = []
    net.double().train()(torch.randn(50, 4, dtype=torch.float64))  # statistics of its own
    return net.eval()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return [(x, torch.arange(N) % 3)]


def most(net, call):
    """The largest batch that the network saw in a call, and what that gave."""
    net.seen.clear()
    result = call()
    return max(net.seen), result


def seeded():
    return torch.Generator().manual_seed(3)


BUDGET = 16_000
"""Bytes that hold some examples of this network, and not all."""


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_members_are_fine_tuned_in_parts_to_the_same_weights(norm):
    net = network(norm)
    options = {"n_members": 2, "epochs": 2, "learning_rate": 0.05}
    whole = lp.ABNN(net, "classification", **options).fit(data(), generator=seeded())
    posterior = lp.ABNN(net, "classification", memory_budget=BUDGET, **options)
    largest, _ = most(net, lambda: posterior.fit(data(), generator=seeded()))
    assert 1 < largest < N
    assert (posterior.members - whole.members).abs().max() < 1e-12 * whole.members.abs().max()
    assert (whole.members[0] - whole.members[1]).abs().max() > 1e-5
    x = data()[0][0]
    options = {"n_samples": 6}
    largest, parts = most(net, lambda: posterior.predictive(x, generator=seeded(), **options))
    assert largest < N
    assert torch.allclose(parts.mean, whole.predictive(x, generator=seeded(), **options).mean, atol=1e-12)


def test_class_weights_are_normalised_over_the_whole_batch():
    net = network()
    options = {"n_members": 2, "epochs": 1, "prior_weight": 5.0}
    whole = lp.ABNN(net, "classification", **options).fit(data(), generator=seeded())
    parts = lp.ABNN(net, "classification", memory_budget=BUDGET, **options).fit(data(), generator=seeded())
    assert torch.allclose(parts.members, whole.members, rtol=0, atol=1e-12)


def test_noise_of_elements_passes_in_parts_under_a_given_budget_alone():
    net = network()
    make = {"noise": "element", "n_members": 2, "epochs": 1}
    largest, _ = most(net, lambda: lp.ABNN(net, "classification", **make).fit(data(), generator=seeded()))
    assert largest == N
    posterior = lp.ABNN(net, "classification", memory_budget=BUDGET, **make)
    largest, _ = most(net, lambda: posterior.fit(data(), generator=seeded()))
    assert largest < N
    largest, prediction = most(net, lambda: posterior.predictive(data()[0][0], n_samples=4, generator=seeded()))
    assert largest < N
    assert torch.equal(prediction.mean, posterior.predictive(data()[0][0], n_samples=4, generator=seeded()).mean)


@pytest.mark.parametrize("per_token", [False, True])
def test_adapters_are_searched_in_parts(per_token):
    peft = pytest.importorskip("peft")
    inner = network(nn.LayerNorm)
    net = peft.get_peft_model(inner, peft.LoraConfig(r=2, target_modules=["0", "3"])).double().eval()
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    options = {"n_samples": 2, "halvings": 3, "per_token": per_token}
    whole = lp.TrainingFreeLoRA(net, "classification", **options).fit(data(), generator=seeded())
    posterior = lp.TrainingFreeLoRA(net, "classification", memory_budget=BUDGET, **options)
    largest, _ = most(inner, lambda: posterior.fit(data(), generator=seeded()))
    assert largest < N
    x = data()[0][0]
    largest, parts = most(inner, lambda: posterior.predictive(x, n_samples=3, generator=seeded()))
    assert largest < N
    if not per_token:  # whose random signs depend on the parts
        assert posterior.noise_scale == whole.noise_scale
        assert torch.allclose(parts.mean, whole.predictive(x, n_samples=3, generator=seeded()).mean, atol=1e-12)


def test_a_loaded_posterior_cuts_batches_that_no_fit_has_seen(tmp_path):
    net = network()
    whole = lp.KFAC(net, "classification").fit(data())
    whole.save(tmp_path / "saved")
    loaded, x = lp.load(tmp_path / "saved", net), data()[0][0]
    loaded.memory_budget = BUDGET
    largest, parts = most(net, lambda: loaded.predictive(x, method="sampled", n_samples=3, generator=seeded()))
    assert largest < N
    expected = whole.predictive(x, method="sampled", n_samples=3, generator=seeded())
    assert torch.allclose(parts.mean, expected.mean, atol=1e-12)


def test_swag_predicts_in_parts_and_does_not_cut_steps_of_training():
    net = network()
    with pytest.raises(ConfigurationError, match="memory_budget of at least"):
        lp.SWAG(net, "classification", n_snapshots=2, n_members=2, rank=0, memory_budget=BUDGET).fit(data())
    posterior = lp.SWAG(net, "classification", n_snapshots=2, n_members=2).fit(data(), generator=seeded())
    x = data()[0][0]
    whole = posterior.predictive(x, n_samples=2, generator=seeded())
    posterior.memory_budget = BUDGET
    largest, parts = most(net, lambda: posterior.predictive(x, n_samples=2, generator=seeded()))
    assert largest < N
    assert torch.allclose(parts.mean, whole.mean, atol=1e-12)


@pytest.mark.parametrize("cls", [lp.Full, lp.Diagonal, lp.KFAC])
def test_joint_covariances_are_the_same_within_any_budget(cls):
    net = network()
    posterior, x = cls(net, "classification").fit(data()), data()[0][0][:4]
    whole = posterior.functional_posterior(x, joint=True)
    posterior.memory_budget = 80_000  # less than the gradients of all outputs of an example, written out
    parts = posterior.functional_posterior(x, joint=True)
    assert torch.allclose(parts.covariance, whole.covariance, atol=1e-12 * float(whole.covariance.abs().max()))


@pytest.mark.parametrize("vectors", [0.5, 1, 2, 3, 7, 100])
def test_joint_products_are_cut_between_examples_and_cotangents(vectors):
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(3, 4, 1, 5, 6, generator=generator, dtype=torch.float64)  # [V, B, G, o, i]
    weights = torch.rand(1, 5, 6, generator=generator, dtype=torch.float64)
    with memory_budget(int(16 * vectors * weights.nbytes)):
        found = DenseGradients(values).quadratic(weights, "joint")
    expected = torch.einsum("vbgoi,goi,wcgoi->bvcw", values, weights, values)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [{"noise": "channel"}, {"noise": "element"}])
def test_a_budget_for_less_than_an_example_is_refused(make):
    with pytest.raises(ConfigurationError, match="memory_budget of at least"):
        lp.ABNN(network(), "classification", n_members=1, epochs=1, memory_budget=400, **make).fit(data())
