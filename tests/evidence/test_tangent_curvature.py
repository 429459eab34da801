"""The tangent evidence with its curvature at its own optimum, against dense closed forms."""

from __future__ import annotations

import pytest
import torch
from problems import categorical_hessian, ggn, jacobian
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.tuning import TangentModel
from laplace_plus.tuning.tangent_curvature import curvature_at


def problem(task="classification", n=80):
    """A small network whose training was stopped early, and its data in two batches."""
    torch.manual_seed(2)
    x = torch.randn(n, 2, dtype=torch.float64)
    y = (x.norm(dim=1) > 0.8).long() + (x.norm(dim=1) > 1.5).long()
    if task == "regression":
        y = torch.stack([x.norm(dim=1), x[:, 0].sin()], 1) + 0.1 * torch.randn(n, 2, dtype=torch.float64)
    torch.randn(n, dtype=torch.float64)  # weights for which the evidence determines both layers' precisions
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3 if task == "classification" else 2)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        (nn.CrossEntropyLoss() if task == "classification" else nn.MSELoss())(net(x), y).backward()
        optimizer.step()
    return net, x, y, [(x[:10], y[:10]), (x[10:], y[10:])]


def dense_optimum(outputs, jacobians, y, theta, precision):
    """θ* by Newton's method, the penalised loss there, and H from the likelihood at h(θ*)."""
    vector = theta
    for _ in range(60):
        h = outputs + jacobians @ (vector - theta)
        residual = h.softmax(-1) - nn.functional.one_hot(y, 3)
        gradient = torch.einsum("nc,ncp->p", residual, jacobians) + precision * vector
        curvature = ggn(jacobians, categorical_hessian(h))
        step = torch.linalg.solve(curvature + torch.diag(precision), gradient)
        change = (jacobians @ step).abs().max().item()
        vector = vector - step * min(1.0, 3.0 / change)
        if change < 1e-11:
            break
    loss = nn.functional.cross_entropy(h, y, reduction="sum") + (precision * vector**2).sum() / 2
    return vector, loss.item(), curvature


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_joint_fixed_point_of_a_classifier(structure):
    """That of an alternation by dense algebra: θ* for Λ, H at h(θ*), one step of MacKay's fixed point for Λ."""
    net, x, y, data = problem()
    outputs, jacobians = net(x).detach(), jacobian(net, x)
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])
    index = torch.zeros(len(theta), dtype=torch.long)
    index[6:] = int(structure == "layerwise")
    posterior = lp.Full(net, "classification").fit(data)
    posterior.fit_prior_precision(lp.Tangent(structure=structure, tolerance=1e-7, curvature_at="optimum"))
    found = posterior.tuning
    assert found.converged
    logarithms = found.group_precision.log() + 0.1  # from beside it
    for _ in range(200):
        precision = logarithms.exp()[index]
        vector, loss, curvature = dense_optimum(outputs, jacobians, y, theta, precision)
        gamma = 1 - precision * torch.linalg.inv(curvature + torch.diag(precision)).diagonal()
        sums = (torch.zeros_like(logarithms).index_add(0, index, values) for values in (gamma, vector.square()))
        new = torch.div(*sums).log()
        change, logarithms = (new - logarithms).abs().max().item(), new
        if change < 1e-9:
            break
    assert torch.allclose(found.group_precision.log(), logarithms, atol=1e-5)
    assert torch.allclose(found.vector, vector, atol=1e-5)
    scaled = curvature / precision.sqrt() / precision.sqrt()[:, None]
    evidence = -loss - torch.linalg.slogdet(torch.eye(len(theta)) + scaled).logabsdet.item() / 2
    assert found.value == pytest.approx(evidence, abs=1e-6)
    # The prior alone has changed: predictions keep the curvature of the fit.
    matrix = posterior.precision_matrix() - torch.diag(posterior.prior_precision.expand(2)[index])
    assert torch.allclose(matrix, ggn(jacobians, categorical_hessian(outputs)))
    at_weights = lp.Tangent(structure=structure, tolerance=1e-7).tune(posterior)
    assert (at_weights.group_precision / found.group_precision - 1).abs().max() > 0.01


@pytest.mark.parametrize("tune_noise", [True, False])
def test_gaussian_noise_makes_no_difference(tune_noise):
    net, _, _, data = problem("regression")
    posterior = lp.KFAC(net, lp.Gaussian(torch.tensor([0.3, 0.4]))).fit(data)
    options = {"structure": "layerwise", "tune_noise": tune_noise, "tolerance": 1e-6}
    simple, full = (lp.Tangent(curvature_at=at, **options).tune(posterior) for at in ("network", "optimum"))
    assert full.value == pytest.approx(simple.value, abs=1e-9)
    assert torch.allclose(full.prior_precision, simple.prior_precision, rtol=1e-6)
    assert torch.allclose(full.vector, simple.vector, atol=1e-6)
    assert full.n_passes > simple.n_passes == 2


CLASSES = {
    "Full": lp.Full,
    "Diagonal": lp.Diagonal,
    "KFAC": lp.KFAC,
    "EKFAC": lambda *given, **options: lp.KFAC(*given, eigenvalue_corrected=True, **options),
}


@pytest.mark.parametrize("selection", ["all", "last_layer"])
@pytest.mark.parametrize("name", CLASSES)
def test_curvature_at_other_outputs(name, selection):
    """At θ̃ it is that of the fit. Elsewhere it is what a fit to a network with these very outputs would have."""
    net, x, _, data = problem()
    posterior = CLASSES[name](net, "classification", parameters=selection).fit(data)
    tangent, one = TangentModel(posterior.network, posterior.likelihood, data), torch.ones(1, dtype=torch.float64)
    same = curvature_at(posterior, tangent, posterior.mean)
    assert torch.allclose(same.dense(one), posterior.sums.curvature.dense(one), atol=1e-12)
    vector = posterior.mean + 0.5 * torch.randn(posterior.mean.shape, dtype=torch.float64)
    matrix = curvature_at(posterior, tangent, vector).dense(one)
    whole = jacobian(net, x)[..., -posterior.n_parameters :]
    shifted = net(x).detach() + whole @ (vector - posterior.mean)
    exact = ggn(whole, categorical_hessian(shifted))
    if name == "Full":
        assert torch.allclose(matrix, exact, atol=1e-12)
    elif name != "KFAC":  # whose trace is exact where gradients and inputs are independent only
        assert torch.allclose(matrix.trace(), exact.trace(), rtol=1e-9)
    if name == "Diagonal":
        assert torch.allclose(matrix.diagonal(), exact.diagonal(), atol=1e-12)
    if name == "KFAC" and selection == "last_layer":  # Σ_n Λ_n ⊗ Σ_n φ_n φ_nᵀ / N
        hessian = categorical_hessian(shifted).sum(0)
        features = torch.cat([net[:2](x).detach(), torch.ones(len(x), 1, dtype=torch.float64)], 1)
        expected = torch.einsum("ab,ij->aibj", hessian, features.T @ features / len(x)).reshape(9, 9)
        order = torch.tensor([3 * o + i for o in range(3) for i in range(2)] + [2, 5, 8])
        assert torch.allclose(matrix, expected[order[:, None], order], atol=1e-12)


def test_ignored_labels_and_positions():
    """Tokens with labels that do not count; in micro-batches, the numbers of examples are cut with them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x, y = torch.randn(9, 4, 2, dtype=torch.float64), torch.randint(3, (9, 4))
    y[0], y[1, 2] = -100, -100
    posterior = lp.Full(net, "classification").fit([(x[:6], y[:6]), (x[6:], y[6:])])
    tangent = TangentModel(posterior.network, posterior.likelihood, [(x, y)])
    vector, kept = posterior.mean + 0.3, y.flatten() >= 0
    jacobians = jacobian(net, x.flatten(0, 1))[kept]
    shifted = net(x.flatten(0, 1)).detach()[kept] + jacobians @ (vector - posterior.mean)
    found = curvature_at(posterior, tangent, vector).dense(torch.ones(1, dtype=torch.float64))
    assert torch.allclose(found, ggn(jacobians, categorical_hessian(shifted)), atol=1e-12)


def test_what_has_no_such_curvature_is_refused():
    net, _, _, data = problem()
    for posterior in (
        lp.LowRank(net, "classification", rank=3, remainder_probes=0),
        lp.Full(net, "classification", backend=lp.Native("ggn_mc")),
        lp.Diagonal(net, "classification", backend=lp.Native("empirical_fisher")),
    ):
        posterior.fit(data, generator=torch.Generator().manual_seed(0))
        with pytest.raises(UnsupportedError, match="network's outputs only"):
            posterior.fit_prior_precision(lp.Tangent(curvature_at="optimum"))
        assert posterior.tuning is None
    with pytest.raises(ConfigurationError, match="curvature"):
        lp.Tangent(curvature_at="weights")
