"""Curvature as operators over a data loader, against Jacobians and Hessians that are written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from problems import (
    N,
    assert_adjoint,
    assert_symmetric,
    close,
    dense_ggn,
    function_of,
    hessian,
    jacobian_of,
    noisy_hessian,
    normal,
    problem,
    split,
    targets,
    vector_of,
    whole,
)
from torch import Tensor, nn
from torch.func import jacrev
from zoo import test_small_twins as twins
from zoo.architectures import Architecture, each_typical, named

import laplace_plus as lp
from laplace_plus.curvature.operators import (
    CurvatureOperator,
    FisherOperator,
    GGNOperator,
    HessianOperator,
    JacobianOperator,
)
from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood, resolve_likelihood
from laplace_plus.linalg import eigsh
from laplace_plus.network.network import Network
from laplace_plus.testing import assert_untouched, snapshot

pytestmark = pytest.mark.usefixtures("double")


def logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    """The logistic density: concave, and known to nobody but this test."""
    z = outputs - labels
    return (-z - 2 * nn.functional.softplus(-z)).sum(-1)


LIKELIHOODS: list[tuple[str, Likelihood, int]] = [
    ("classes", lp.Categorical(), 3),
    ("one logit", lp.Bernoulli(), 1),
    ("logits", lp.Bernoulli(), 2),
    ("noise", lp.Gaussian(0.3), 2),
    ("noise levels", lp.Gaussian(torch.tensor([0.3, 2.0])), 2),
    ("variances", lp.HeteroscedasticGaussian(), 4),
    ("counts", lp.Poisson(), 2),
    ("own", resolve_likelihood(logistic), 2),
]
each_likelihood = pytest.mark.parametrize(
    ("likelihood", "outputs"), [entry[1:] for entry in LIKELIHOODS], ids=[entry[0] for entry in LIKELIHOODS]
)


# -- the matrices ------------------------------------------------------------------------------------------------------


@pytest.mark.quick(
    "transformer_encoder",
    "lstm",
    "tied_language_model",
    "siamese",
    "embedding_bag",
    "mixture_of_experts",
    "weight_normed",
)
@each_typical
@pytest.mark.filterwarnings("ignore:Which rows belong")
def test_architectures(architecture: Architecture):
    jacobian, ggn, _ = twins.oracle(architecture)
    flat = jacobian.flatten(0, 1)
    model, loader = architecture.model(), architecture.loader(5, 3)
    before = snapshot(model)
    likelihood = resolve_likelihood(architecture.likelihood)
    net = Network(model, "all", likelihood.arrange)
    operator = JacobianOperator(net, loader)
    assert operator.shape == flat.shape and operator.n_data == 5
    v, u = normal(3, flat.shape[1], seed=3), normal(3, len(flat), seed=4)
    tolerance = max(10 * architecture.tolerance, 1e-8)
    close(operator(v), v @ flat.mT, tolerance)
    close(operator(v[0]), flat @ v[0], tolerance)
    close(operator.T(u), u @ flat, tolerance)
    close(operator.T(u[0]), u[0] @ flat, tolerance)
    rounding = 1e-10 if architecture.tolerance < 1e-8 else 1e-6
    assert_adjoint(operator, v[0], u[0], rounding)
    close(operator.dense(), flat, tolerance)
    curvature = GGNOperator(net, likelihood, loader)
    close(curvature(v), v @ ggn, tolerance)
    root = curvature.root()
    close(root.T(root(v)), v @ ggn, tolerance)
    close(root.dense().mT @ root.dense(), ggn, tolerance)
    fisher = FisherOperator(net, likelihood, loader, n_samples=2)
    for operator in (curvature, fisher):
        assert_symmetric(operator, v[0], v[1], rounding)
    if architecture.name == "embedding_bag":
        with pytest.raises(UnsupportedError, match="embedding_bag"):
            HessianOperator(net, likelihood, loader)(v)
    else:
        assert_symmetric(HessianOperator(net, likelihood, loader), v[0], v[1], rounding)
    assert_untouched(model, before)


@each_likelihood
def test_ggn(likelihood, outputs):
    model, data = problem(likelihood, outputs)
    wanted = dense_ggn(model, likelihood, data)
    operator = GGNOperator(model, likelihood, data)
    assert operator.symmetric and operator.T is operator and operator.n_data == N
    close(operator.dense(), wanted)
    root = operator.root()
    assert root.shape == (N * outputs, len(wanted))
    matrix = root.dense()
    close(matrix.mT @ matrix, wanted)
    close((root.T @ root).dense(), wanted)
    assert (root.T @ root).symmetric


@each_likelihood
def test_hessian(likelihood, outputs):
    model, data = problem(likelihood, outputs)
    x, y = whole(data)
    wanted = hessian(lambda v: -likelihood.log_density(function_of(model, x)(v), y).sum())(vector_of(model))
    close(HessianOperator(model, likelihood, data).dense(), wanted)


@each_likelihood
def test_empirical_fisher(likelihood, outputs):
    model, data = problem(likelihood, outputs)
    x, y = whole(data)
    gradients = jacrev(lambda v: -likelihood.log_density(function_of(model, x)(v), y))(vector_of(model))
    operator = FisherOperator(model, likelihood, data, kind="empirical")
    close(operator.dense(), gradients.mT @ gradients)
    rows = operator.root().dense()
    close(rows.abs(), gradients.abs(), 1e-9)


@pytest.mark.quick("variances")
@pytest.mark.parametrize(
    ("likelihood", "outputs"),
    [
        pytest.param(*entry[1:], id=entry[0], marks=[] if entry[0] in ("classes", "variances") else pytest.mark.slow)
        for entry in LIKELIHOODS
    ],
)
def test_sampled_fisher_expects_the_ggn(likelihood, outputs):
    model, data = problem(likelihood, outputs)
    if likelihood is LIKELIHOODS[-1][1]:
        with pytest.raises(UnsupportedError, match="log-density"):
            FisherOperator(model, likelihood, data)
        return
    x, y = whole(data)
    jacobian = jacobian_of(model, x)
    wanted = torch.einsum(
        "ncp,ncd,ndq->npq",
        jacobian,
        noisy_hessian(likelihood, model(x).detach(), y),
        jacobian,
    ).sum(0)
    v = normal(4, len(wanted), seed=5)
    n_samples = 30
    draws = torch.stack(
        [FisherOperator(model, likelihood, [(x, y)], n_samples=n_samples, seed=seed)(v) for seed in range(30)]
    )
    error = draws.mean(0) - v @ wanted
    standard = draws.std(0) / len(draws) ** 0.5
    assert float((error.abs() / standard).max()) < 5, "of a hundred correlated numbers"
    assert float(standard.norm() / (v @ wanted).norm()) < 0.08, "enough samples to tell"


def test_sampled_fisher_of_positions_leaves_out_cross_terms():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = normal(4, 5, 3), torch.randint(0, 2, (4, 5), generator=torch.Generator().manual_seed(0))
    together = FisherOperator(model, "classification", [(x, y)], n_samples=3)
    assert together.root().shape == (4 * 5 * 3, 8)
    draws = torch.stack(
        [FisherOperator(model, "classification", [(x, y)], n_samples=50, seed=s).dense() for s in range(20)]
    )
    wanted = GGNOperator(model, "classification", [(x, y)]).dense()
    assert float(((draws.mean(0) - wanted).abs() / (draws.std(0) / 20**0.5 + 1e-12)).max()) < 5


def test_ggn_is_the_hessian_of_a_linear_model():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    for likelihood in (lp.Categorical(), lp.Gaussian(0.7), lp.Poisson()):
        data = split(normal(N, 3), targets(likelihood, 2), 7, 5)
        ggn = GGNOperator(model, likelihood, data).dense()
        close(HessianOperator(model, likelihood, data).dense(), ggn)


@pytest.mark.quick("ggn-likelihood0", "hessian-likelihood1", "empirical_fisher-likelihood3")
@pytest.mark.parametrize(
    ("kind", "likelihood"),
    [
        ("ggn", lp.Gaussian(0.4)),
        ("hessian", lp.Categorical()),
        ("hessian", lp.Gaussian(0.4)),
        ("empirical_fisher", lp.Categorical()),
    ],
)
def test_is_the_curvature_of_a_full_posterior(kind, likelihood):
    model, data = problem(likelihood, 3)
    data = [whole(data)]
    posterior = lp.Full(model, likelihood, backend=lp.Native(kind=kind), prior_precision=50.0).fit(data)
    wanted = posterior.precision_matrix() - 50 * torch.eye(posterior.n_parameters)
    make: Callable[..., CurvatureOperator] = {
        "ggn": GGNOperator,
        "hessian": HessianOperator,
        "empirical_fisher": lambda *a: FisherOperator(*a, kind="empirical"),
    }[kind]
    operator = make(posterior.network, posterior.likelihood, data)
    close(operator.dense(), wanted)
    largest = eigsh(operator, len(wanted), 3, which="magnitude", generator=torch.Generator().manual_seed(0)).values
    exact = torch.linalg.eigvalsh(wanted)
    np.testing.assert_allclose(sorted(largest.abs()), sorted(exact.abs().numpy())[-3:], rtol=1e-9)


def test_noise_is_the_current_one():
    model, data = problem(lp.Gaussian(1.0), 2)
    posterior = lp.Full(model, lp.Gaussian(1.0)).fit(data)
    unit = GGNOperator(posterior.network, posterior.likelihood, data).dense()
    posterior.noise_std = 0.5
    close(GGNOperator(posterior.network, posterior.likelihood, data).dense(), 4 * unit)


def test_dual_form_has_the_spectrum():
    model, data = problem(lp.Categorical(), 3)
    few = data[2:]  # 3 examples of 3 classes and 31 parameters
    root = GGNOperator(model, "classification", few).root()
    small = (root @ root.T).dense()
    assert small.shape == (9, 9)
    wanted = torch.linalg.eigvalsh(dense_ggn(model, lp.Categorical(), few))[-6:]
    close(torch.linalg.eigvalsh(small)[-6:], wanted, 1e-10)


def test_certain_classes_keep_their_digits():
    """Where a class has all but the whole probability, ``1 − p`` must not be a difference of numbers close to one."""
    model = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[45.0], [0.0], [1.0]]))
    operator = GGNOperator(model, "classification", [(torch.ones(1, 1), torch.zeros(1, dtype=torch.long))])
    small = torch.tensor([np.exp(-45.0), np.exp(-44.0)])
    total = 1 + small.sum()
    p = torch.cat([1 / total[None], small / total])
    wanted = torch.diag(p) - p[:, None] * p
    wanted[0, 0] = p[0] * (p[1] + p[2])
    for matrix in (operator.dense(), operator.root().dense().mT @ operator.root().dense()):
        torch.testing.assert_close(matrix, wanted, rtol=1e-12, atol=0)


def test_many_classes_need_no_square_matrices():
    model = nn.Linear(2, 40_000)  # a Hessian of 12 GB for every row
    operator = GGNOperator(model, "classification", [(normal(2, 2), torch.tensor([0, 7]))])
    v = normal(operator.shape[1])
    x = normal(2, 2)
    p = model(x).detach().softmax(-1)
    u = x @ v[:80_000].view(-1, 2).T + v[80_000:]
    cotangent = p * (u - (p * u).sum(-1, keepdim=True))
    close(operator(v), torch.cat([(cotangent.T @ x).flatten(), cotangent.sum(0)]))


# -- selections, targets and modes -------------------------------------------------------------------------------------


def test_selections():
    model, data = problem(lp.Categorical(), 3)
    full = dense_ggn(model, lp.Categorical(), data)
    mask = {"0.weight": normal(4, 3) > 0}
    for selection, index in (
        ("last_layer", torch.arange(16, 31)),
        ("0.*", torch.arange(16)),
        (mask, mask["0.weight"].flatten().nonzero().squeeze(-1)),
    ):
        net = Network(model, selection, lp.Categorical().arrange)  # type: ignore[arg-type]
        close(GGNOperator(net, "classification", data).dense(), full[index[:, None], index])
    model[0].weight.requires_grad_(False)
    close(GGNOperator(model, "classification", data).dense(), full[12:, 12:])


def test_the_last_layer_is_the_one_that_runs_last():
    architecture = named("declared_out_of_order")
    net = Network(architecture.model(), "last_layer", resolve_likelihood(architecture.likelihood).arrange)
    operator = GGNOperator(net, architecture.likelihood, architecture.loader(5, 3))
    assert net.parameter_names == architecture.last_layer
    assert operator.shape[0] == net.n_parameters and operator(normal(net.n_parameters)).isfinite().all()


def test_ignored_targets_count_for_nothing():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    x, y = normal(6, 5, 3), torch.randint(0, 4, (6, 5), generator=torch.Generator().manual_seed(1))
    keep = normal(6, 5) > 0
    marked = torch.where(keep, y, torch.full_like(y, -100))
    kept = [(x[keep][:, None], y[keep][:, None])]
    for make in (GGNOperator, HessianOperator):
        close(make(model, "classification", [(x, marked)]).dense(), make(model, "classification", kept).dense())
    for kind in ("mc", "empirical"):
        noise = FisherOperator(model, "classification", [(x, torch.full_like(y, -100))], kind=kind)
        assert not noise.dense().any()
    gradients = jacrev(lambda w: nn.functional.cross_entropy((x @ w.T).mT, marked, reduction="none").sum(1))(
        model.weight.detach()
    )
    bare = nn.Linear(3, 4, bias=False)
    bare.weight = model.weight
    flat = gradients.flatten(1)
    close(FisherOperator(bare, "classification", [(x, marked)], kind="empirical").dense(), flat.mT @ flat)
