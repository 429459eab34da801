"""The tangent model's evidence, against dense closed forms and brute force."""

from __future__ import annotations

import copy
import math
from functools import cache

import numpy as np
import pytest
import torch
from problems import categorical_hessian, ggn, jacobian
from scipy.optimize import minimize
from torch import nn
from torch.distributions import MultivariateNormal

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    EmptyDataError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.integrations.training import train
from laplace_plus.network.linearization import jvp
from laplace_plus.priors import Groups
from laplace_plus.tuning import TangentModel, tangent_model, tangent_optimum

LOG_2PI = math.log(2 * math.pi)


class ThreeGroups(nn.Module):
    """Linear in its parameters, with three layers that each read some of the inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False), nn.Linear(2, 1)

    def forward(self, x):
        return self.a(x[:, :2]) + self.b(x[:, 2:5]) + self.c(x[:, 5:])


def linear_problem():
    torch.manual_seed(3)
    net = ThreeGroups().double()
    x = torch.randn(40, 7, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 0.3])
    truth = torch.tensor([[1.5, -2.0, 0.2, 0.1, -0.3, 0.05, 0.8]], dtype=torch.float64)
    y = x @ truth.T + 0.3 + 0.4 * torch.randn(40, 1, dtype=torch.float64)
    return net, x, y, [(x[:25], y[:25]), (x[25:], y[25:])]


def linear_oracle(phi, y, index, n_groups):
    """MacKay's fixed point by dense linear algebra: precisions, noise, weights, effective parameters, evidence."""
    precision, noise, change = np.ones(n_groups), 1.0, math.inf
    while change > 1e-13:
        before = precision
        matrix = phi.T @ phi / noise + np.diag(precision[index])
        mean = np.linalg.solve(matrix, phi.T @ y / noise)
        variance = np.diag(np.linalg.inv(matrix))
        gamma = np.array([(index == g).sum() - precision[g] * variance[index == g].sum() for g in range(n_groups)])
        precision = np.array([gamma[g] / (mean[index == g] ** 2).sum() for g in range(n_groups)])
        noise = ((y - phi @ mean) ** 2).sum() / (len(y) - gamma.sum())
        change = np.abs(precision / before - 1).max()
    covariance = noise * np.eye(len(y)) + (phi / precision[index]) @ phi.T
    normal = MultivariateNormal(torch.zeros(len(y), dtype=torch.float64), torch.from_numpy(covariance))
    return precision, noise**0.5, mean, gamma, normal.log_prob(torch.from_numpy(y)).item()


@pytest.mark.quick("0")
@pytest.mark.parametrize("kept", [2**31, 0])
def test_linear_regression_with_three_groups_is_exact(kept, monkeypatch):
    monkeypatch.setattr(tangent_model, "_KEPT_BYTES", kept)  # Jacobians are kept, or products taken anew
    net, x, y, data = linear_problem()
    phi = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1).numpy()
    index = np.array([0, 0, 1, 1, 1, 2, 2, 2])
    precision, noise, mean, gamma, evidence = linear_oracle(phi, y[:, 0].numpy(), index, 3)
    posterior = lp.Full(net, "regression").fit(data)
    posterior.fit_prior_precision(lp.Tangent(structure="layerwise", tolerance=1e-10, max_iterations=400))
    found = posterior.tuning
    assert found.converged
    assert found.value == pytest.approx(evidence, abs=1e-8)
    assert found.noise_std.item() == pytest.approx(noise, rel=1e-8)
    for got, want in [
        (posterior.prior_precision, precision),
        (found.vector, mean),
        (found.effective_parameters, gamma),
    ]:
        assert np.abs(got.numpy() / want - 1).max() < 1e-8
    # MacKay's fixed point is met, so the evidence is stationary.
    squares = np.array([(found.vector.numpy()[index == g] ** 2).sum() for g in range(3)])
    assert np.abs(gamma / squares / precision - 1).max() < 1e-8
    assert found.gradient_norm < 1e-9
    # At the network's own, untrained weights it is another number.
    assert found.network_value < evidence - 10
    assert posterior.predictive_mean == "network"
    assert torch.allclose(posterior.functional_posterior(x).mean, net(x).detach())
    posterior.predictive_mean = "tangent"
    assert np.abs(posterior.functional_posterior(x).mean[:, 0].numpy() - phi @ mean).max() < 1e-8


def mlp_problem(task="classification", **options):
    """A small network whose training was stopped early, and its data."""
    net, x, y = trained(task, **options)
    return copy.deepcopy(net), x, y


@cache
def trained(task, *, n=24, steps=15, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(n, 2, dtype=torch.float64)
    score = 2 * x[:, 0] - x[:, 1] + 0.5 * torch.randn(n, dtype=torch.float64)
    y = {
        "classification": (score > -1).long() + (score > 1).long(),
        "rings": (x.norm(dim=1) > 0.8).long() + (x.norm(dim=1) > 1.5).long(),
        "binary": (score[:, None] > 0).double(),
        "regression": torch.stack([score, score.sin()], 1) + 0.1 * torch.randn(n, 2, dtype=torch.float64),
        "poisson": torch.poisson(score.clamp(max=2)[:, None].exp()),
    }[task]
    outputs, width = {"classification": 3, "rings": 3, "regression": 2}.get(task, 1), 2 if task == "rings" else 5
    net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    loss = {
        "classification": nn.CrossEntropyLoss(),
        "rings": nn.CrossEntropyLoss(),
        "regression": nn.MSELoss(),
        "poisson": nn.PoissonNLLLoss(),
    }
    for _ in range(steps):
        optimizer.zero_grad()
        loss.get(task, nn.BCEWithLogitsLoss())(net(x), y).backward()
        optimizer.step()
    return net, x, y


def dense_tangent(net, x, y):
    """The joint function F(θ, log Λ) of a classifier with one precision for each of two layers, by dense algebra."""
    jacobians, outputs = jacobian(net, x), net(x).detach()
    curvature = ggn(jacobians, categorical_hessian(outputs))
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    sizes = [sum(p.numel() for p in net[i].parameters()) for i in (0, 2)]
    index = torch.tensor([0] * sizes[0] + [1] * sizes[1])

    def optimum(precision):
        """θ* by Newton's method, and the penalised loss there."""
        vector = torch.zeros_like(theta)
        for _ in range(60):
            h = outputs + jacobians @ (vector - theta)
            residual = h.softmax(-1) - nn.functional.one_hot(y, 3)
            gradient = torch.einsum("nc,ncp->p", residual, jacobians) + precision * vector
            step = torch.linalg.solve(ggn(jacobians, categorical_hessian(h)) + torch.diag(precision), gradient)
            change = (jacobians @ step).abs().max().item()
            vector = vector - step * min(1.0, 3.0 / change)
            if change < 1e-12:
                break
        value = nn.functional.cross_entropy(h, y, reduction="sum") + (precision * vector**2).sum() / 2
        return vector, value.item()

    def evidence(logarithms):
        """Value and gradient, in which θ* counts as fixed."""
        precision = torch.as_tensor(logarithms, dtype=torch.float64).exp()[index]
        best, penalised = optimum(precision)
        scaled = curvature / precision.sqrt() / precision.sqrt()[:, None]
        value = -penalised - torch.linalg.slogdet(torch.eye(len(theta)) + scaled).logabsdet.item() / 2
        gamma = 1 - precision * torch.linalg.inv(curvature + torch.diag(precision)).diagonal()
        each = (gamma - precision * best.square()) / 2
        return value, np.array([each[index == g].sum().item() for g in range(2)])

    return evidence, optimum, index, curvature


def test_joint_optimum_of_a_classifier():
    net, x, y = mlp_problem("rings", n=80, steps=60, seed=2)
    evidence, optimum, index, curvature = dense_tangent(net, x, y)
    posterior = lp.Full(net, "classification").fit([(x[:10], y[:10]), (x[10:], y[10:])])
    posterior.fit_prior_precision(structure="layerwise", evidence="tangent", tolerance=1e-6)
    found = posterior.tuning
    assert found.converged
    # Brute force from beside it, with a derivative that is that of the whole evidence, ends there.
    start = found.prior_precision.log().numpy() + np.array([0.7, -0.5])
    for step in 1e-4 * np.eye(2):
        slope = (evidence(start + step)[0] - evidence(start - step)[0]) / 2e-4
        assert evidence(start)[1] @ step * 1e4 == pytest.approx(slope, abs=1e-6)
    best = minimize(lambda u: tuple(-part for part in evidence(u)), start, jac=True, method="L-BFGS-B")
    assert found.value == pytest.approx(-best.fun, abs=1e-6)
    assert np.abs(found.prior_precision.log().numpy() - best.x).max() < 1e-3
    # The value is the evidence there, and θ* the optimum, to many digits.
    assert found.value == pytest.approx(evidence(found.prior_precision.log())[0], abs=1e-8)
    assert torch.allclose(found.vector, optimum(found.prior_precision[index])[0], atol=1e-6)
    inverse = torch.linalg.inv(curvature + torch.diag(found.prior_precision[index]))
    gamma = 1 - found.prior_precision[index] * inverse.diagonal()
    for g in range(2):
        own = gamma[index == g].sum()
        assert found.effective_parameters[g].item() == pytest.approx(own.item(), abs=1e-6)
        assert (own / found.vector[index == g].square().sum()).item() == pytest.approx(found.prior_precision[g].item())
    assert all(later >= earlier - 0.2 for earlier, later in zip(found.trace, found.trace[1:], strict=False))
    assert found.trace[-1] == found.value


CLASSES = {"Full": lp.Full, "KFAC": lp.KFAC, "Diagonal": lp.Diagonal, "LowRank": lp.LowRank}
LIKELIHOODS = {
    "classification": lambda: lp.Categorical(),
    "binary": lambda: lp.Bernoulli(),
    "regression": lambda: lp.Gaussian(torch.tensor([0.5, 0.7])),
    "poisson": lambda: lp.Poisson(),
}


POSTERIORS = [*CLASSES, "EKFAC", "last layer", "KFAC last layer", "masked", "Subnetwork"]
# The curvature's structure enters the determinant alone, in which likelihoods differ by whether there is noise.
CASES = [*(("Full", task) for task in LIKELIHOODS), ("KFAC", "regression"), ("LowRank", "regression")]
CASES += [(name, "classification") for name in POSTERIORS if name != "Full"]


@pytest.mark.quick(
    "Full-regression",
    "Full-poisson",
    "Full-binary",
    "LowRank-regression",
    "KFAC-classification",
    "Diagonal-classification",
    "LowRank-classification",
    "EKFAC-classification",
    "last layer-classification",
    "masked-classification",
    "Subnetwork-classification",
)
@pytest.mark.parametrize(("name", "task"), CASES)
def test_every_posterior_reaches_a_joint_stationary_point(name, task):
    net, x, y = mlp_problem(task)
    likelihood = LIKELIHOODS[task]()
    n = sum(p.numel() for p in net.parameters())
    options = {
        "EKFAC": {"eigenvalue_corrected": True},
        "last layer": {"parameters": "last_layer"},
        "KFAC last layer": {"parameters": "last_layer"},
        "masked": {"parameters": torch.arange(n) % 3 > 0},
        "Subnetwork": {"selector": lp.LargestMagnitude(10)},
        "LowRank": {"rank": 8},
    }.get(name, {})
    cls = CLASSES.get(
        name, {"EKFAC": lp.KFAC, "KFAC last layer": lp.KFAC, "Subnetwork": lp.Subnetwork}.get(name, lp.Full)
    )
    posterior = cls(net, likelihood, temperature=0.8, **options)
    if name == "LowRank" and task == "regression":
        with pytest.raises(UnsupportedError):
            posterior.fit([(x, y)])
        return
    posterior.fit([(x, y)])
    posterior.fit_prior_precision(evidence="tangent", predictive_mean="tangent", tolerance=1e-4)
    found = posterior.tuning
    assert found.converged, found
    # Stationary in θ: the gradient by autograd, of the likelihood's own density, vanishes.
    network = posterior.network
    h = (network(x).detach() + jvp(network, x, found.vector - network.vector())).requires_grad_()
    current = likelihood if found.noise_std is None else likelihood.with_noise(found.noise_std)
    fit = current.log_density(*current.rows(h, y)[:2]).sum() / 0.8
    (by_outputs,) = torch.autograd.grad(fit, h)
    point = network.vector().requires_grad_()
    (gradient,) = torch.autograd.grad(network(x, network.substitute(point)), point, by_outputs)
    energy = (found.prior_precision * found.vector.square()).sum()
    assert (gradient - found.prior_precision * found.vector).norm() < 1e-4 * (1 + gradient.norm())
    # The value has all its constants.
    precision, noise = found.prior_precision, found.noise_std
    own = posterior.log_marginal_likelihood(precision, noise).item()
    at_network = current.log_density(*current.rows(net(x).detach(), y)[:2]).sum() / 0.8
    at_network = at_network - (precision * network.vector().square()).sum() / 2
    assert found.value == pytest.approx((own - at_network + fit - energy / 2).item(), abs=1e-8)
    assert found.network_value == pytest.approx(own, abs=1e-8)
    # Stationary in Λ and the noise, by differences of the posterior's own evidence.
    assert found.effective_parameters.sum() == pytest.approx(energy.item(), abs=1e-3)
    assert torch.allclose(posterior.functional_posterior(x).mean, h.detach(), atol=1e-9)


def test_prior_mean_is_that_of_the_posterior():
    """A prior around the network's weights makes a trained network its own tangent optimum, nearly."""
    net, x, y = mlp_problem("classification", steps=200)
    mean = torch.cat([p.detach().flatten() for p in net.parameters()])
    posterior = lp.Full(net, "classification", prior_mean=mean, prior_precision=1e4).fit([(x, y)])
    model = TangentModel(net, "classification", [(x, y)])
    near = tangent_optimum(model, posterior.prior())
    far = tangent_optimum(model, 1e4)
    assert near.converged and far.converged
    assert (near.vector - mean).norm() < 1e-3 * (far.vector - mean).norm()


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused_by_name():
    net, x, y = mlp_problem()
    posterior = lp.Full(net, "classification").fit([(x, y)])
    for options, word in [
        ({"evidence": "naive"}, "laplace.*tangent"),
        ({"evidence": "tangent", "structure": "rowwise"}, "normalized_groups"),
        ({"evidence": "tangent", "method": "validation", "data": [(x, y)]}, "evidence"),
        ({"evidence": "tangent", "predictive_mean": "best"}, "network"),
        ({"predictive_mean": "tangent"}, "predictive_mean"),
        ({"scaling": "g_prior"}, "scaling"),
        ({"evidence": "tangent", "max_iterations": 0}, "max_iterations"),
        ({"evidence": "tangent", "max_steps": 0}, "max_steps"),
        ({"structure": Groups("own", ("all",), torch.zeros(3, dtype=torch.long))}, "another shape"),
    ]:
        with pytest.raises(ConfigurationError, match=word):
            posterior.fit_prior_precision(**options)
    with pytest.raises(ConfigurationError, match='evidence="tangent"'):
        posterior.predictive_mean = "tangent"
    assert posterior.prior_precision.item() == 1.0


def test_data_are_needed_again():
    net, x, y = mlp_problem()
    posterior = lp.Full(net, "classification").fit(iter([(x, y)]))
    with pytest.raises(DataError, match="train_loader"):
        posterior.fit_prior_precision(evidence="tangent")
    with pytest.raises(DataError, match="only be used once"):
        posterior.fit_prior_precision(evidence="tangent", data=iter([(x, y)]))
    with pytest.raises(DataError, match="24 examples"):
        posterior.fit_prior_precision(evidence="tangent", data=[(x[:5], y[:5])])
    assert posterior.fit_prior_precision(evidence="tangent", data=[(x, y)]).tuning.converged


def test_an_unfinished_optimisation_says_so():
    net, x, y = mlp_problem()
    posterior = lp.Diagonal(net, "classification").fit([(x, y)])
    for few in ({"max_iterations": 1}, {"max_steps": 1, "max_iterations": 3}):
        with pytest.warns(ConvergenceWarning, match="raise max_iterations or max_steps"):
            posterior.fit_prior_precision(evidence="tangent", **few)
        assert not posterior.tuning.converged
    torch.manual_seed(1)
    x, net = torch.randn(50, 4).double() * torch.tensor([30, 1, 0.1, 0.01]), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net = net.append(nn.Linear(4, 2)).double()
    data = [(x, torch.stack([x[:, 0] / 30, x[:, 1]], 1) + 0.3 * torch.randn(50, 2))]
    train(net, *data[0], nn.MSELoss(), epochs=60, lr=1e-2, weight_decay=0.0, batch_size=50)
    with pytest.warns(ConvergenceWarning, match="max_iterations"):  # a step of the noise gains little, but γ is 5.6
        found = lp.Full(net, "regression").fit(data).fit_prior_precision(lp.Tangent("layerwise", max_iterations=5))
    assert not found.tuning.converged and found.tuning.gradient_norm > 0.01


def test_a_loss_that_is_not_finite_is_named():
    net = nn.Linear(1, 1).double()
    x = torch.full((4, 1), 900.0, dtype=torch.float64)
    model = TangentModel(net, lp.Poisson(), [(x, torch.ones_like(x))])
    far = torch.full((2,), 1e6, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="not finite at the start"):
        tangent_optimum(model, 1.0, far)


def test_sampled_networks_have_another_mean():
    net, x, y = mlp_problem()
    posterior = lp.Full(net, "classification").fit([(x, y)])
    posterior.fit_prior_precision(evidence="tangent", predictive_mean="tangent")
    with pytest.raises(ConfigurationError, match="predictive_mean"):
        posterior.predictive(x, method="sampled")
    posterior.predictive_mean = "network"
    posterior.predictive(x, method="sampled")
    posterior.predictive_mean = "tangent"
    posterior.update([(x, y)])  # then it is the optimum of other data
    assert posterior.predictive_mean == "network"


def test_a_new_fit_forgets_the_tuning_of_the_earlier_one():
    """Its optimum is that of other weights."""
    net, x, y = mlp_problem()
    posterior = lp.Full(net, "classification").fit([(x, y)]).fit_prior_precision(evidence="tangent")
    tuning = posterior.tuning
    with pytest.raises(EmptyDataError):
        posterior.fit([])
    assert posterior.tuning is tuning  # what fails changes nothing
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    posterior.fit([(x, y)])
    with pytest.raises(ConfigurationError, match="since the fit"):
        posterior.predictive_mean = "tangent"
    assert posterior.tuning is None
