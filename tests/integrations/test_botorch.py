"""The surrogate against dense Gaussians of the linearised network, and inside BoTorch's own loop."""

from __future__ import annotations

import warnings

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp

pytest.importorskip("botorch", reason="needs the extra `botorch`")
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient, qLogExpectedImprovement
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models.transforms import Log, Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler

from laplace_plus.integrations.botorch import LaplaceSurrogate

pytestmark = [
    pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.BotorchWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]
BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).double()


def data(n=12, m=1):
    x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0)).double()
    return x, torch.stack([(3 * x).sin().sum(-1), 5 * x.square().sum(-1) + 2][:m], -1)


def small(d, m):
    return nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, m)).double()


def surrogate(m=1, **options):
    options = {
        "epochs": 50,
        "module": small,
        "parameters": "all",
        "generator": torch.Generator().manual_seed(0),
    } | options
    return LaplaceSurrogate(*data(m=m), **options)


def jacobian(model, x):
    """The outputs ``[q·m]`` and their derivatives by all weights, ``[q·m, P]``."""
    network = model.laplace.network
    vector = network.vector()
    rows = torch.func.jacrev(lambda v: network(x, network.substitute(v)).flatten())(vector)
    return network.forward(x).flatten(), rows


@pytest.mark.quick("2-3")
@pytest.mark.parametrize(("m", "q"), [(1, 1), (2, 3)])
def test_each_batch_is_jointly_gaussian_over_its_points(m, q):
    model = surrogate(m, input_transform=Normalize(2), outcome_transform=None)
    x = torch.rand(2, 33, q, 2).double()  # more batches than are computed together
    found = model.posterior(x)
    noisy = model.posterior(x, observation_noise=True)
    assert found.mean.shape == found.variance.shape == (2, 33, q, m) and model.num_outputs == m
    covariance = model.laplace.covariance_matrix()
    for place in [(0, 0), (1, 32)]:
        mean, rows = jacobian(model, model.input_transform(x)[place])
        expected = rows @ covariance @ rows.T
        torch.testing.assert_close(found.mean[place].flatten(), mean)
        torch.testing.assert_close(found.distribution.covariance_matrix[place], expected)
        noise = torch.diag(model.laplace.noise_std.square().expand(q, m).flatten())
        torch.testing.assert_close(noisy.distribution.covariance_matrix[place], expected + noise)
    assert found.rsample(torch.Size([5])).shape == (5, 2, 33, q, m)


def test_chosen_outcomes_are_those_of_all():
    model, x = surrogate(2), torch.rand(4, 3, 2).double()
    whole, second, turned = model.posterior(x), model.posterior(x, [1]), model.posterior(x, [1, 0])
    torch.testing.assert_close(second.mean, whole.mean[..., 1:])
    torch.testing.assert_close(second.variance, whole.variance[..., 1:])
    torch.testing.assert_close(turned.variance, whole.variance[..., [1, 0]])
    weights = torch.tensor([0.5, 2.0]).double()
    scalar = model.posterior(x, posterior_transform=ScalarizedPosteriorTransform(weights))
    torch.testing.assert_close(scalar.mean[..., 0], whole.mean @ weights)


def test_gradients_reach_the_points():
    model, x = surrogate(input_transform=Normalize(2)), torch.rand(2, 2, 2).double().requires_grad_()

    def moments(points):
        found = model.posterior(points).distribution
        return found.mean, found.covariance_matrix

    assert torch.autograd.gradcheck(moments, x)
    seen = model.condition_on_observations(torch.rand(3, 2).double(), torch.rand(3, 1).double())
    assert torch.autograd.gradcheck(lambda points: seen.posterior(points).variance, x)


def test_outcomes_come_back_in_their_units():
    x, y = data()
    plain, scaled = (LaplaceSurrogate(x, own, module=small, epochs=50, generator=generator()) for own in (y, 1000 * y))
    torch.testing.assert_close(scaled.posterior(x).mean, 1000 * plain.posterior(x).mean, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(scaled.posterior(x).variance, 1e6 * plain.posterior(x).variance, rtol=1e-4, atol=1e-3)
    logs = LaplaceSurrogate(x, y.exp(), module=small, epochs=50, generator=generator(), outcome_transform=Log())
    bare = LaplaceSurrogate(x, y, module=small, epochs=50, generator=generator(), outcome_transform=None)
    samples = logs.posterior(x).rsample(torch.Size([4000])).log()
    error = bare.posterior(x).variance.sqrt() / 4000**0.5
    assert ((samples.mean(0) - bare.posterior(x).mean).abs() < 5 * error).all()


def test_conditioning_is_bayes_rule_in_the_linearised_network():
    model, (x, y) = surrogate(2), data(4, 2)
    model.laplace.noise_std = torch.tensor([0.1, 0.2]).double()
    x, y = x + 0.1, y + 0.3
    new, test = model.condition_on_observations(x[:3], y[:3]), torch.rand(5, 2).double()
    new = new.condition_on_observations(x[3:], y[3:])
    _, rows = jacobian(model, x)
    noise = model.laplace.noise_std.square().expand(4, 2).flatten()
    precision = model.laplace.precision_matrix() + rows.T @ (rows / noise[:, None])
    mean, test_rows = jacobian(model, test)
    scaled = model.outcome_transform(y)[0].flatten() - jacobian(model, x)[0]
    shift = torch.linalg.solve(precision, rows.T @ (scaled / noise))
    found = new.posterior(test).distribution
    scale = model.outcome_transform.stdvs.expand(5, 2).flatten()
    center = model.outcome_transform.means.expand(5, 2).flatten()
    torch.testing.assert_close(found.mean.flatten(), (mean + test_rows @ shift) * scale + center, rtol=1e-6, atol=1e-8)
    expected = test_rows @ torch.linalg.solve(precision, test_rows.T)
    torch.testing.assert_close(found.covariance_matrix, expected * scale[:, None] * scale, rtol=1e-6, atol=1e-8)
    assert model.batch_shape == new.batch_shape == torch.Size()


def test_fantasies_have_batches_of_models():
    model = surrogate()
    fantasies = model.fantasize(torch.rand(3, 1, 2).double(), SobolQMCNormalSampler(torch.Size([4])))
    assert fantasies.batch_shape == (4, 3)
    found = fantasies.posterior(torch.rand(3, 2, 2).double())
    assert found.mean.shape == (4, 3, 2, 1)
    value = qKnowledgeGradient(model, num_fantasies=4)(torch.rand(2, 5, 2).double().requires_grad_())
    assert value.shape == (2,) and value.requires_grad


def test_acquisition_functions_are_optimised():
    model, (_, y) = surrogate(input_transform=Normalize(2)), data()
    for acquisition, q in ((qLogExpectedImprovement(model, y.max()), 2), (LogExpectedImprovement(model, y.max()), 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            points, value = optimize_acqf(acquisition, BOUNDS, q=q, num_restarts=2, raw_samples=16)
        assert points.shape == (q, 2) and ((points >= 0) & (points <= 1)).all()
        random = acquisition(torch.rand(64, q, 2).double())
        assert value >= random.max() - 1e-3


def test_a_fitted_posterior_is_taken_as_it_is():
    (x, y), transform = data(), Standardize(1)
    outcomes = transform(y)[0]
    posterior = lp.KFAC(small(2, 1), "regression").fit([(x, outcomes)]).fit_prior_precision("marginal_likelihood")
    model = LaplaceSurrogate.from_posterior(posterior, outcome_transform=transform)
    expected = posterior.functional_posterior(x, joint=True).covariance.reshape(12, 12) * y.var()
    torch.testing.assert_close(model.posterior(x).distribution.covariance_matrix, expected)
    float_model = LaplaceSurrogate(x.float(), y.float(), epochs=5)
    assert float_model.posterior(x.float()).mean.dtype == torch.float32
