"""Posteriors in any context: inference mode, autocast, writes to the network, malformed inputs, bare plugins."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.testing import assert_untouched, snapshot

UNTRAINED = pytest.mark.filterwarnings("ignore::laplace_plus.errors.NoGainWarning")
"""No posterior of an untrained network is better than the network, which the default tuning says."""

EVERY_CLASS = pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=generator).to(dtype)
    y = torch.randint(0, 3, (20,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype).eval()
    return model, list(zip(x.split(7), y.split(7), strict=True))


@EVERY_CLASS
@pytest.mark.parametrize("parameters", ["all", pytest.param("last_layer", marks=pytest.mark.slow)])
@UNTRAINED
def test_inference_mode(cls, parameters):
    model, data = problem()
    outside = cls(model, "classification", parameters=parameters).fit(data).fit_prior_precision()
    expected = outside.predictive(data[0][0]).mean
    with torch.inference_mode():
        loaded = [(x + 0, y + 0) for x, y in data]  # as a loader under inference mode would make them
        inside = cls(model, "classification", parameters=parameters).fit(loaded).fit_prior_precision()
        torch.testing.assert_close(inside.predictive(loaded[0][0]).mean, expected)
        torch.testing.assert_close(outside.predictive(loaded[0][0]).mean, expected)
        assert inside.sample(2).shape == (2, inside.n_parameters)


def test_noise_from_inference_mode_can_be_differentiated():
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    data = [(torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64))]
    with torch.inference_mode():
        bent = lp.Riemannian(model, "regression", n_samples=2)
        walked = lp.MetricBNN(
            model, lp.Gaussian(noise_std=torch.tensor(0.5, dtype=torch.float64)), n_steps=2, sampling="exploration"
        )
        late = lp.Riemannian(model, "regression", n_samples=2).fit(data)
        late.noise_std = 0.7
    assert bent.fit(data).samples.shape == late.samples.shape == (2, 10)
    assert walked.fit(data).sample(2).shape == (2, 10)


@pytest.mark.quick("KFAC", "Full")
@EVERY_CLASS
@UNTRAINED
def test_autocast_is_for_the_network_alone(cls):
    model, data = problem()
    exact = cls(model, "classification").fit(data)
    with torch.autocast("cpu", torch.bfloat16):
        rough = cls(model, "classification").fit(data).fit_prior_precision()
        inside = exact.predictive(data[0][0]).mean
        functional = exact.functional_posterior(data[0][0])
    assert functional.covariance.dtype is torch.float32
    torch.testing.assert_close(inside, exact.predictive(data[0][0]).mean, rtol=0, atol=0.02)  # the forward pass rounds
    assert not torch.equal(inside, exact.predictive(data[0][0]).mean)
    assert rough.precision_matrix().dtype is torch.float32
    assert torch.isfinite(rough.log_marginal_likelihood())


def swap(model):
    model[3] = copy.deepcopy(model[3])
    with torch.no_grad():
        model[3].weight[0] += 1


WRITES = {
    "in place": lambda model: model[0].weight.detach().mul_(2),
    "new data": lambda model: setattr(model[3].weight, "data", model[3].weight.data + 1),
    "another module": swap,
    "a buffer": lambda model: model[1].running_mean.add_(1),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
def test_a_changed_network_is_noticed(write, parameters, tmp_path):
    model, data = problem()
    posterior = lp.KFAC(model, "classification", parameters=parameters).fit(data)
    write(model)
    for action in (
        lambda: posterior.predictive(data[0][0]),
        lambda: posterior.update(data),
        lambda: posterior.save(tmp_path / "posterior"),
    ):
        with pytest.raises(lp.errors.ModelChangedError, match="no longer the one"):
            action()
    posterior.fit(data).predictive(data[0][0])


@pytest.mark.diagonal
@pytest.mark.filterwarnings("ignore:Which rows belong")  # of what is no batch
@EVERY_CLASS
@pytest.mark.parametrize("bias", [True, False])
def test_a_malformed_input_leaves_no_trace(cls, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))
    _, data = problem()
    posterior = cls(model, "classification").fit(data)
    expected, treatment = posterior.predictive(data[0][0]).mean, posterior.summary().rows
    with pytest.raises(lp.errors.DataError, match=r"x\[None\]"):
        posterior.predictive(data[0][0][0])  # one example without its batch axis
    with pytest.raises(lp.errors.InputError, match="The network failed on a batch"):
        posterior.predictive(data[0][0][:, :2])
    assert torch.equal(posterior.predictive(data[0][0]).mean, expected)
    with pytest.raises(lp.errors.LaplacePlusError):
        posterior.fit([(data[0][0][0], data[0][1][:3])])
    assert torch.equal(posterior.predictive(data[0][0]).mean, expected)
    assert posterior.fit(data).summary().rows == treatment


def test_noise_levels_keep_their_number():
    model, data = nn.Linear(4, 2), [(torch.randn(9, 4), torch.randn(9, 2))]
    posterior = lp.Full(model, lp.Gaussian()).fit(data)
    with pytest.raises(lp.errors.ConfigurationError, match="noise levels"):
        posterior.noise_std = torch.tensor([0.1, 0.2])
    posterior.noise_std = 0.3
    assert posterior.predictive(data[0][0]).aleatoric.max().item() == pytest.approx(0.09)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.hidden, self.calls = nn.Linear(4, 3), None, 0

    def forward(self, x):
        self.calls += 1
        self.hidden = self.layer(x)
        self.extra = self.hidden * 2
        return self.hidden


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("make", [Remembers, lambda: nn.utils.weight_norm(nn.Linear(4, 3))], ids=["notes", "norm"])
def test_no_tensor_of_a_call_stays_behind(make):
    torch.manual_seed(0)
    model, (_, data) = make(), problem()
    before = snapshot(model)
    posterior = lp.KFAC(model, "classification").fit(data)
    posterior.predictive(data[0][0])
    posterior.predictive(data[0][0], method="sampled", n_samples=2)
    vars(model).pop("calls", None)
    assert_untouched(model, before)


def test_a_plugin_may_take_only_the_data():
    class Bare(lp.Posterior):
        def fit_batches(self, data):
            return lp.State(self.network.vector(), sum(len(y) for _, y in data), 0)

        def sample(self, n, *, generator=None):
            return self.mean + 0.1 * torch.randn(n, self.n_parameters, generator=generator)

    model, data = problem()
    posterior = Bare(model, "classification").fit(data)
    assert posterior.n_data == 20
    assert "Bare" in str(posterior.summary())
    mean, covariance = posterior.functional_posterior(data[0][0])  # samples pushed through the tangent
    torch.testing.assert_close(mean, model(data[0][0]))
    jacobian = torch.func.jacrev(lambda v: posterior.network(data[0][0], posterior.network.substitute(v)))(
        posterior.network.vector()
    )
    exact = 0.01 * torch.einsum("ncp,ndp->ncd", jacobian, jacobian)
    # Each entry of a covariance from 100 samples has a standard error of at most √(2/100) of its diagonal's.
    scale = exact.diagonal(dim1=-2, dim2=-1).amax((-1), keepdim=True)[..., None]
    assert ((covariance - exact).abs() / scale).max() < 5 * (2 / 100) ** 0.5
    assert posterior.functional_posterior(data[0][0], joint=True).covariance.shape == (7, 3, 7, 3)
    with pytest.raises(lp.errors.UnsupportedError, match="cannot be updated"):
        posterior.update(data)


def test_a_plugin_has_the_mean_of_its_last_fit():
    class Bare(lp.Posterior):
        def fit_batches(self, data):
            return lp.State(self.network.vector(), sum(len(y) for _, y in data), 0)

        def sample(self, n, *, generator=None):
            return self.mean.expand(n, -1)

    model, data = problem()
    posterior = Bare(model, "classification").fit(data)
    before = posterior.mean.clone()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(TypeError):
        posterior.fit(None)
    assert torch.equal(posterior.mean, before)
    assert not torch.equal(posterior.fit(data).mean, before)
    assert torch.equal(posterior.mean, posterior.network.vector())


@pytest.mark.quick("plugin")
@pytest.mark.parametrize("name", ["MetricBNN", "plugin"])
def test_the_generator_decides_linearised_predictions_by_monte_carlo(name):
    class Bare(lp.Posterior):
        def fit_batches(self, data):
            return lp.State(self.network.vector(), sum(len(y) for _, y in data), 0)

        def sample(self, n, *, generator=None):
            return self.mean + 0.1 * torch.randn(n, self.n_parameters, generator=generator)

    def predict(seed):
        generator = torch.Generator().manual_seed(seed)
        return posterior.predictive(data[0][0], method="linearized", generator=generator).mean

    def short_walks(model, likelihood):
        return lp.MetricBNN(model, likelihood, n_particles=3, n_steps=5, latent={"epochs": 5, "tolerance": 10.0})

    model, data = problem()
    make = short_walks if name == "MetricBNN" else Bare
    posterior = make(model, "classification").fit(data, generator=torch.Generator().manual_seed(0))
    first = predict(1)
    assert torch.equal(predict(1), first)
    assert not torch.equal(predict(2), first)
    one, other = (
        posterior.functional_posterior(data[0][0], generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert torch.equal(one.covariance, other.covariance)


def test_hooks_of_the_user_are_no_news():
    model, data = problem()
    seen = []
    model[0].register_full_backward_hook(lambda *_: seen.append(1))
    posterior = lp.KFAC(model, "classification").fit(data)  # warnings are errors here
    assert posterior.predictive(data[0][0]).mean.isfinite().all()


def test_a_bad_prior_of_a_last_layer_is_refused_at_once():
    model, _ = problem()
    with pytest.raises(lp.errors.ConfigurationError, match="prior"):
        lp.Full(model, "classification", parameters="last_layer", prior_precision=-1.0)
