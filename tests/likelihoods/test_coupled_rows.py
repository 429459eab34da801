"""Log-densities of a whole batch (Cox, Plackett–Luce, a softmax over a list) against dense float64 algebra."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, NoGainWarning, UnsupportedError


def listwise(f, y):
    """A softmax over the list, with the terms of its rows."""
    return y * f.squeeze(-1).log_softmax(0)


def cox(f, y):
    """Cox's partial likelihood with censoring, and Breslow's terms for ties: one number."""
    risk, (time, event) = f[:, 0], y.unbind(1)
    at_risk = time[None] >= time[:, None]
    return (event * (risk - torch.where(at_risk, risk[None], -torch.inf).logsumexp(1))).sum()


def plackett_luce(f, y):
    """The probability of a ranking: each place is a softmax over what is left."""
    ordered = f[:, 0][y.argsort()]
    return ordered - ordered.flip(0).logcumsumexp(0).flip(0)


def differences(f, y):
    """Pairs of neighbouring rows and of their two outputs: which of the two is larger."""
    gaps = f.unflatten(0, (-1, 2)).diff(dim=1)[:, 0]
    return nn.functional.logsigmoid(y[::2, None] * gaps).sum(-1).repeat_interleave(2) / 2


def data_of(kind, n):
    if kind is cox:
        return torch.stack([torch.randint(1, 6, (n,)).double(), (torch.rand(n) < 0.7).double()], 1)
    chosen = (torch.rand(n) < 0.6).double()
    return torch.randperm(n) if kind is plackett_luce else 2 * chosen - 1 if kind is differences else chosen


def problem(kind, n_outputs=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, n_outputs)).double()
    return net, [(torch.randn(n, 3).double(), data_of(kind, n)) for n in (8, 6)]


def dense(net, names, density, data):
    """``Σ_batches Jᵀ Λ J`` with the whole Hessian of each batch by all its outputs, and the log-likelihood."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    total, value = 0.0, 0.0
    for x, y in data:
        f = net(x).detach()
        hessian = torch.func.hessian(lambda flat, f=f, y=y: -density(flat.view(f.shape), y).sum())(f.flatten())
        chosen = {name: parameters[name] for name in names}
        rows = torch.func.jacrev(lambda p, x=x: torch.func.functional_call(net, {**parameters, **p}, (x,)).flatten())
        jacobian = torch.cat([own.flatten(1) for own in rows(chosen).values()], 1)
        total, value = total + jacobian.mT @ hessian @ jacobian, value + density(f, y).sum()
    return total, value


KINDS = [(listwise, 1), (cox, 1), (plackett_luce, 1), (differences, 2)]


@pytest.mark.quick("listwise-1-all", "plackett_luce-1-all", "cox-1-all", "differences-2-all")
@pytest.mark.parametrize(
    ("density", "n_outputs", "parameters"), [*((*kind, "all") for kind in KINDS), (*KINDS[-1], "last_layer")]
)
def test_the_curvature_is_the_whole_batchs(density, n_outputs, parameters):
    net, data = problem(density, n_outputs)
    likelihood = lp.LogDensity(density, couples_rows=True)
    full = lp.Full(net, likelihood, parameters=parameters).fit(data)
    wanted, value = dense(net, full.parameter_names, density, data)
    eye = torch.eye(len(wanted)).double()
    assert_close(full.precision_matrix() - eye, wanted)
    assert_close(full.log_marginal_likelihood(), value - torch.logdet(eye + wanted) / 2 - full.mean.square().sum() / 2)
    diagonal = lp.Diagonal(net, likelihood, parameters=parameters).fit(data)
    assert_close(diagonal.precision_matrix() - eye, torch.diag(wanted.diagonal()))
    low = lp.LowRank(net, likelihood, parameters=parameters, rank=len(wanted)).fit(data)
    assert_close(low.precision_matrix() - eye, wanted, rtol=1e-6, atol=1e-8)
    hessian = lp.Full(net, likelihood, parameters="last_layer", backend=lp.Native("hessian")).fit(data)
    if parameters == "last_layer":  # which is linear in its parameters
        assert_close(hessian.precision_matrix() - eye, wanted)
    operator = lp.curvature.GGNOperator(full.network, likelihood, data)
    assert_close(operator(eye), wanted)
    root = operator.root()
    assert_close(root.dense().mT @ root.dense(), wanted)
    assert_close(root(eye).mT, root.dense())


@pytest.mark.parametrize(("density", "n_outputs"), KINDS)
def test_kronecker_factors_are_of_the_single_rows_curvatures(density, n_outputs):
    net, data = problem(density, n_outputs)
    posterior = lp.KFAC(net, lp.LogDensity(density, couples_rows=True), parameters="last_layer").fit(data)
    right = left = 0.0
    for x, y in data:
        f, a = net(x).detach(), torch.cat([net[:-1](x), torch.ones(len(x), 1).double()], 1)
        hessian = torch.func.hessian(lambda own, y=y: -density(own, y).sum())(f)
        left, right = left + torch.einsum("ncnd->cd", hessian), right + a.mT @ a / 14
    own = posterior.precision_matrix().diagonal() - 1
    wanted = torch.outer(left.diagonal(), right.diagonal())
    assert_close(own, torch.cat([wanted[:, :-1].flatten(), wanted[:, -1]]).detach())


def test_corrected_eigenvalues_are_of_whole_batches():
    """In a basis of its own, EKFAC's diagonal is that of the exact matrix."""
    net, data = problem(listwise)
    likelihood = lp.LogDensity(listwise, couples_rows=True)
    posterior = lp.KFAC(net, likelihood, parameters="last_layer", eigenvalue_corrected=True).fit(data)
    wanted, _ = dense(net, posterior.parameter_names, listwise, data)
    own = posterior.precision_matrix() - torch.eye(5).double()
    assert_close(own.trace(), wanted.trace())


@pytest.mark.quick("KFAC", "Full")
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
def test_tuning_and_predictions(cls):
    net, data = problem(cox)
    posterior = cls(net, lp.LogDensity(cox, couples_rows=True)).fit(data)
    with pytest.warns(NoGainWarning, match="rows of a batch depend on each other"):
        posterior.fit_prior_precision()
    assert posterior.tuning.chosen == "marginal_likelihood"
    (x, y), _ = data
    prediction = posterior.predictive(x, joint=True, generator=torch.Generator().manual_seed(0))
    each = torch.stack([cox(f, y) for f in prediction.functional_samples])
    assert_close(prediction.log_prob(y), each.logsumexp(0) - torch.tensor(float(len(each))).log())
    with pytest.raises(UnsupportedError, match="joint=True"):
        posterior.predictive(x).log_prob(y)
    with pytest.raises(UnsupportedError, match="no curvature of their own"):
        lp.leave_one_out(posterior)
    seeded = torch.Generator().manual_seed(0)
    with pytest.warns(ConvergenceWarning, match="ended at 2"):
        found = posterior.fit_prior_precision("validation", data=data[:1], grid=[2.0], n_samples=50, generator=seeded)
    options = {"joint": True, "n_samples": 50, "generator": torch.Generator().manual_seed(1)}
    again = float(posterior.predictive(x, **options).log_prob(y)) / 8
    assert found.tuning.value == pytest.approx(again, abs=0.5)  # of other samples
    posterior.fit_prior_precision("tangent")
    assert posterior.predictive(x).mean.shape == (8, 1)


def test_samples_have_the_exact_covariance():
    net, data = problem(plackett_luce)
    likelihood = lp.LogDensity(plackett_luce, couples_rows=True)
    posterior = lp.SampledLaplace(net, likelihood, n_samples=100).fit(data, generator=torch.Generator().manual_seed(0))
    wanted, _ = dense(net, posterior.parameter_names, plackett_luce, data)
    covariance = torch.linalg.inv(wanted + torch.eye(len(wanted)).double())
    z = posterior.samples - posterior.mean
    error = (z.mT @ z / len(z) - covariance).diagonal() / covariance.diagonal()
    assert float(error.abs().max()) < 5 * (2 / 100) ** 0.5


@pytest.mark.parametrize(("density", "n_outputs"), [kind for kind in KINDS if kind[0] is not cox])
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal, lp.LowRank, lp.SampledLaplace, lp.SWAG])
def test_rows_that_depend_on_each_other_are_found(cls, density, n_outputs):
    net, data = problem(density, n_outputs)
    with pytest.raises(UnsupportedError, match=r"depend on the outputs of other rows.*couples_rows=True"):
        cls(net, density).fit(data)


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("pair", [(0, 1), (1, -1), (0, -1)])
def test_any_pair_of_rows_is_found(n, pair):
    """Also where all others are independent, and have far more curvature."""

    def density(f, y):
        first, second = pair
        coupled = 1e-3 * f[first, 0] * f[second, 1]
        return -50 * (f - y).square().sum(-1) + torch.zeros(len(f)).double().index_fill(0, torch.tensor(0), 1) * coupled

    net = nn.Linear(2, 2).double()
    x = torch.randn(n, 2).double()
    if pair[0] % n == pair[1] % n:
        lp.Full(net, density).fit([(x, x)])
        return
    with pytest.raises(UnsupportedError, match="other rows"):
        lp.Full(net, density).fit([(x, x)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_independent_rows_are_never_refused(dtype, scale):
    """Nor those that are stabilised by the batch's largest output, which cancels up to rounding."""

    def stabilised(f, y):
        f = f - f.max()
        return f.gather(1, y[:, None])[:, 0] - f.exp().sum(-1).log()

    torch.manual_seed(0)
    x, y = torch.randn(40, 3).to(dtype) * scale, torch.randint(0, 3, (40,))
    densities = [lambda f, y: -nn.functional.cross_entropy(f, y, reduction="none"), lambda f, y: -f.square().sum(-1)]
    for density in (*densities, stabilised if scale < 100 else densities[0]):
        lp.LogDensity(density).validate(x, y)


def test_what_coupled_rows_do_not_have():
    net, data = problem(cox)
    with pytest.raises(ConfigurationError, match=r"another shape.*couples_rows=True"):
        lp.Full(net, cox).fit(data)
    likelihood = lp.LogDensity(cox, couples_rows=True)
    for kind in ("empirical_fisher", "ggn_mc"):
        with pytest.raises(UnsupportedError, match="single rows"):
            lp.Full(net, likelihood, backend=lp.Native(kind)).fit(data)
    with pytest.raises(UnsupportedError, match="single rows"):
        lp.curvature.FisherOperator(net, likelihood, data, kind="empirical")(torch.ones(21).double())
    with pytest.raises(ConfigurationError, match="distribution"):
        lp.LogDensity(cox, torch.distributions.Normal, couples_rows=True)
