"""Side by side with laplace-torch (Daxberger et al., 2021) on the same networks: equal where the definitions are.

Its conventions: the functional variance of a regression is without noise, as ours is; ``kron`` keeps a weight and its
bias in separate blocks, where ours keeps their covariance, so the two are only alike on layers without bias. Where the
definitions part, ours is held against a dense reference instead.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from problems import categorical_hessian, gaussian_evidence, ggn, jacobian, occam, relative_error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_plus as lp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies' deprecations at import
    laplace = pytest.importorskip("laplace")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

PARITY = 1e-4
"""The two agree to 1e-7; the peer computes parts of it in float32, and other machines may round differently."""

PRECISION, NOISE = 0.3, 0.7
STRUCTURES = {"full": lp.Full, "kron": lp.KFAC, "diag": lp.Diagonal}


def perceptron(bias):
    return nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))


def convolution(bias):
    return nn.Sequential(
        nn.Conv2d(1, 3, 2, bias=bias),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, bias=bias),
        nn.Flatten(),
        nn.Linear(8, 3, bias=bias),
    )


NETWORKS = {"perceptron": (perceptron, (3,)), "convolution": (convolution, (1, 4, 4))}


def trained(task, network="perceptron", bias=True):
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    net = make(bias).double()
    x = torch.randn(20, *shape, dtype=torch.float64)
    y = torch.randint(0, 3, (20,)) if task == "classification" else torch.randn(20, 3, dtype=torch.float64)
    loss = nn.CrossEntropyLoss() if task == "classification" else nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(50):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net, x, y


def theirs(net, x, y, task, structure, subset, **options):
    noise = {} if task == "classification" else {"sigma_noise": NOISE}
    peer = laplace.Laplace(
        net, task, subset_of_weights=subset, hessian_structure=structure, prior_precision=PRECISION, **noise, **options
    )
    peer.fit(DataLoader(TensorDataset(x, y), batch_size=8))
    return peer


def ours(net, x, y, task, structure, subset, **options):
    likelihood = task if task == "classification" else lp.Gaussian(NOISE)
    posterior = STRUCTURES[structure](net, likelihood, parameters=subset, prior_precision=PRECISION, **options)
    return posterior.fit([(x[:8], y[:8]), (x[8:], y[8:])])


def both(task, structure, subset, network="perceptron"):
    net, x, y = trained(task, network, bias=structure != "kron")
    return theirs(net, x, y, task, structure, subset), ours(net, x, y, task, structure, subset), x[:6] + 0.5


CASES = pytest.mark.parametrize(
    ("task", "structure", "subset", "network"),
    [
        pytest.param(task, structure, subset, network, id=f"{task}-{structure}-{subset}-{network}")
        for task in ("classification", "regression")
        for structure in STRUCTURES
        for subset in ("all", "last_layer")
        for network in NETWORKS
    ],
)


@CASES
def test_log_marginal_likelihood(task, structure, subset, network):
    peer, posterior, _ = both(task, structure, subset, network)
    for precision in (1e-2, PRECISION, 30.0):
        want = peer.log_marginal_likelihood(torch.tensor(precision)).item()
        assert posterior.log_marginal_likelihood(precision).item() == pytest.approx(want, rel=PARITY)
    if task == "regression":
        want = peer.log_marginal_likelihood(torch.tensor(2.0), torch.tensor(0.4)).item()
        assert posterior.log_marginal_likelihood(2.0, 0.4).item() == pytest.approx(want, rel=PARITY)


@CASES
def test_functional_variance(task, structure, subset, network):
    peer, posterior, x = both(task, structure, subset, network)
    jacobians = peer.backend.last_layer_jacobians if subset == "last_layer" else peer.backend.jacobians
    jacobian, mean = jacobians(x)
    covariance = peer.functional_variance(jacobian)
    functional = posterior.functional_posterior(x)
    assert relative_error(functional.mean, mean) < PARITY
    assert relative_error(functional.covariance, covariance) < PARITY


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("link", ["probit", "bridge"])
def test_classification_links(link, structure, subset):
    peer, posterior, x = both("classification", structure, subset)
    want = peer(x, pred_type="glm", link_approx=link)
    assert relative_error(posterior.predictive(x, link=link).mean, want) < PARITY


@pytest.mark.parametrize("structure", STRUCTURES)
def test_regression_variance_has_the_noise_on_top(structure):
    peer, posterior, x = both("regression", structure, "all")
    mean, covariance = peer(x)
    prediction = posterior.predictive(x)
    assert relative_error(prediction.mean, mean) < PARITY
    assert relative_error(prediction.epistemic, covariance.diagonal(dim1=-2, dim2=-1)) < PARITY
    assert relative_error(prediction.variance, covariance.diagonal(dim1=-2, dim2=-1) + NOISE**2) < PARITY


def test_joint_covariance():
    peer, posterior, x = both("regression", "full", "all")
    _, covariance = peer(x, joint=True)
    joint = posterior.functional_posterior(x, joint=True).covariance
    assert relative_error(joint.reshape(covariance.shape), covariance) < PARITY


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_tuned_precision(structure):
    """Ours reaches at least the evidence that the peer's gradient ascent does."""
    peer, posterior, _ = both("classification", structure, "all")
    peer.optimize_prior_precision(method="marglik", n_steps=300, lr=0.1)
    posterior.fit_prior_precision("marginal_likelihood")
    assert posterior.log_marginal_likelihood().item() >= peer.log_marginal_likelihood().item() - PARITY * 100


# -- where the definitions part: against dense references --------------------------------------------------------------


def dense(net, x, y, task, names=None):
    jac, f = jacobian(net, x, names), net(x).detach()
    if task == "classification":
        fit = f.log_softmax(-1).gather(1, y[:, None]).sum().item()
        return ggn(jac, categorical_hessian(f)), fit
    return ggn(jac, torch.eye(3, dtype=torch.float64).expand(len(x), 3, 3)), (f - y).square().sum().item()


def test_kron_keeps_the_covariance_of_weight_and_bias():
    """A last layer's Kronecker factors are exact in regression, so the evidence must be that of the dense curvature."""
    net, x, y = trained("regression")
    names = ["2.weight", "2.bias"]
    curvature, sse = dense(net, x, y, "regression", names)
    vector = torch.cat([net[2].weight.detach().flatten(), net[2].bias.detach()])
    precision = torch.full_like(vector, PRECISION)
    want = gaussian_evidence(curvature, vector, sse, y.numel(), precision, NOISE)
    posterior = ours(net, x, y, "regression", "kron", "last_layer")
    assert posterior.log_marginal_likelihood().item() == pytest.approx(want, rel=PARITY)
    peer = theirs(net, x, y, "regression", "kron", "last_layer")
    assert abs(peer.log_marginal_likelihood().item() - want) > abs(posterior.log_marginal_likelihood().item() - want)


def test_evidence_of_classification_against_the_dense_curvature():
    """Holds the peer itself to the reference, so that parity above means something."""
    net, x, y = trained("classification")
    curvature, fit = dense(net, x, y, "classification")
    vector = torch.cat([p.detach().flatten() for p in net.parameters()])
    want = fit + occam(curvature, vector, torch.full_like(vector, PRECISION)).item()
    for evidence in (
        theirs(net, x, y, "classification", "full", "all").log_marginal_likelihood(),
        ours(net, x, y, "classification", "full", "all").log_marginal_likelihood(),
    ):
        assert evidence.item() == pytest.approx(want, rel=PARITY)


def test_a_nystrom_basis_is_ella_with_the_prior_beside_it():
    """Theirs is ``J Vᵀ (V H Vᵀ + α)⁻¹ V Jᵀ``; where V spans all gradients, ours adds what the prior has beside V."""
    net, x, y = trained("regression")
    net, new = nn.Sequential(net, nn.Linear(3, 1).double()), x[:4] + 3
    kind = {"hessian_structure": "gp", "subset_of_weights": "all", "functional_approximation": "nystrom"}
    options = {"subsample_size": 20, "n_eigenvalues": 20, "prior_precision": PRECISION, "sigma_noise": NOISE}
    peer = laplace.Laplace(net, "regression", **kind, **options)
    peer.fit(DataLoader(TensorDataset(x, y[:, :1]), batch_size=8))
    rows, basis = jacobian(net, new), peer.dual_directions
    beside = (rows - rows @ basis @ basis.T) @ rows.mT / PRECISION
    posterior = lp.LowRank(net, lp.Gaussian(NOISE), rank=20, basis="nystrom", prior_precision=PRECISION)
    found = posterior.fit([(x, y[:, :1])]).functional_posterior(new).covariance
    assert relative_error(found, peer.functional_variance(rows) + beside) < PARITY
    assert float(beside.mean()) > 100 * PARITY * float(found.mean()), "the prior beside V must matter here"
