"""Bayesian linear regression, where Laplace is exact, against its closed forms (Bishop, 2006, section 3.3-3.5)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from problems import ekfac, gaussian_evidence, relative_error
from scipy.optimize import minimize_scalar
from torch import nn
from torch.distributions import MultivariateNormal

import laplace_plus as lp
from laplace_plus.errors import UnsupportedError

# Everything below is float64 and of well-conditioned P < 30 problems: rounding is about 1e-14 relative.
EXACT = 1e-10

N, D = 17, 3


class LinearRegression:
    """A linear network at the posterior mean of a conjugate problem, and everything known about it.

    The design matrix Φ ``[N·C, P]`` is in the order of the parameter vector: weight ``[C, D]`` row by row, then bias.
    """

    def __init__(self, *, outputs=2, bias=True, precision=0.7, mean=0.0, noise=0.4, temperature=1.0, x=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.outputs, self.bias = outputs, bias
        self.x = torch.randn(N, D, generator=generator, dtype=torch.float64) if x is None else x
        self.y = torch.randn(len(self.x), outputs, generator=generator, dtype=torch.float64) + self.x[:, :1]
        self.net = nn.Linear(D, outputs, bias=bias, dtype=torch.float64)
        self.n_parameters = outputs * (D + bias)
        self.precision = torch.as_tensor(precision, dtype=torch.float64)
        self.mean = torch.as_tensor(mean, dtype=torch.float64)
        self.noise = torch.as_tensor(noise, dtype=torch.float64)
        self.temperature = torch.as_tensor(temperature, dtype=torch.float64)
        phi, prior = self.design(self.x), self.precision_vector()
        weight = 1 / (temperature * self.noise.expand(outputs).square()).repeat(len(self.x))
        self.posterior_precision = phi.T @ (weight[:, None] * phi) + torch.diag(prior)
        right = phi.T @ (weight * self.y.flatten()) + prior * self.mean
        self.posterior_mean = torch.linalg.solve(self.posterior_precision, right)
        with torch.no_grad():
            self.net.weight.copy_(self.posterior_mean[: outputs * D].view(outputs, D))
            if bias:
                self.net.bias.copy_(self.posterior_mean[outputs * D :])

    def design(self, x):
        eye = torch.eye(self.outputs, dtype=torch.float64)
        parts = [torch.einsum("nd,ce->nced", x, eye).flatten(2)]
        if self.bias:
            parts.append(eye.expand(len(x), -1, -1))
        return torch.cat(parts, 2).flatten(0, 1)

    def precision_vector(self):
        return self.precision.expand(self.n_parameters)

    def log_evidence(self):
        """log ∫ p(y|θ)^(1/T) p(θ) dθ: the marginal of y at noise T σ², times the tempered normal's normalisation."""
        phi, noise = self.design(self.x), self.noise.expand(self.outputs).square().repeat(len(self.x))
        covariance = torch.diag(self.temperature * noise) + phi @ torch.diag(1 / self.precision_vector()) @ phi.T
        marginal = MultivariateNormal(phi @ self.mean.expand(self.n_parameters), covariance)
        tau = 2 * math.pi * noise
        scale = 0.5 * (self.temperature * tau).log().sum() - 0.5 / self.temperature * tau.log().sum()
        return marginal.log_prob(self.y.flatten()) + scale

    def fit(self, cls=lp.Full):
        posterior = cls(
            self.net,
            lp.Gaussian(self.noise),
            prior_precision=self.precision,
            prior_mean=self.mean,
            temperature=self.temperature,
        )
        return posterior.fit([(self.x[:5], self.y[:5]), (self.x[5:], self.y[5:])])


PRIOR_MEAN = torch.linspace(-1.0, 1.5, 2 * (D + 1), dtype=torch.float64)
DIAGONAL = torch.logspace(-1.0, 1.0, 2 * (D + 1), dtype=torch.float64)

SCALAR_PRIOR = {
    "plain": {},
    "no bias": {"bias": False},
    "one output": {"outputs": 1},
    "four outputs": {"outputs": 4},
    "prior mean": {"mean": PRIOR_MEAN},
    "scalar prior mean": {"mean": 0.8},
    "temperature": {"temperature": 0.3},
    "noise per output": {"noise": [0.2, 1.3]},
    "noise per output, no bias, temperature, mean": {
        "noise": [0.2, 1.3],
        "bias": False,
        "temperature": 2.5,
        "mean": -0.4,
    },
}
DIAGONAL_PRIOR = {
    "diagonal": {"precision": DIAGONAL},
    "diagonal, mean, temperature": {"precision": DIAGONAL, "mean": PRIOR_MEAN, "temperature": 1.7},
    "diagonal, noise per output": {"precision": DIAGONAL, "noise": [0.2, 1.3]},
}
CASES = [
    pytest.param(cls, options, id=f"{name}: {label}")
    for name, cls in {"Full": lp.Full, "KFAC": lp.KFAC, "EKFAC": ekfac}.items()
    for label, options in SCALAR_PRIOR.items()
] + [pytest.param(lp.Full, options, id=f"Full: {label}") for label, options in DIAGONAL_PRIOR.items()]
# A Kronecker factorisation of one linear layer with Gaussian noise is exact, so it must meet the same closed forms.


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_posterior_is_the_conjugate_one(cls, options):
    problem = LinearRegression(**options)
    posterior = problem.fit(cls)
    assert relative_error(posterior.mean, problem.posterior_mean) < EXACT
    assert relative_error(posterior.precision_matrix(), problem.posterior_precision) < EXACT
    covariance = torch.linalg.inv(problem.posterior_precision)
    assert relative_error(posterior.covariance_matrix(), covariance) < EXACT
    assert relative_error(posterior.variance(), covariance.diagonal()) < EXACT


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_evidence_is_the_marginal_likelihood(cls, options):
    problem = LinearRegression(**options)
    assert problem.fit(cls).log_marginal_likelihood().item() == pytest.approx(problem.log_evidence().item(), rel=EXACT)


@pytest.mark.parametrize(("cls", "options"), CASES)
def test_joint_predictive(cls, options):
    problem = LinearRegression(**options)
    posterior = problem.fit(cls)
    x = torch.linspace(-2, 2, 4 * D, dtype=torch.float64).view(4, D).sin()
    phi = problem.design(x)
    want = phi @ torch.linalg.inv(problem.posterior_precision) @ phi.T
    mean, covariance = posterior.functional_posterior(x, joint=True)
    assert relative_error(mean.flatten(), phi @ problem.posterior_mean) < EXACT
    assert relative_error(covariance.reshape(want.shape), want) < EXACT
    noise = problem.noise.expand(problem.outputs).square().repeat(len(x))
    distribution = posterior.predictive(x, joint=True).distribution
    assert relative_error(distribution.covariance_matrix, want + torch.diag(noise)) < EXACT
    assert relative_error(distribution.mean, phi @ problem.posterior_mean) < EXACT
    single = posterior.predictive(x)
    assert relative_error(single.epistemic.flatten(), want.diagonal()) < EXACT
    assert relative_error(single.variance.flatten(), want.diagonal() + noise) < EXACT


def test_orthogonal_inputs_are_uncorrelated():
    x = torch.cat([torch.eye(D, dtype=torch.float64)] * 4)  # XᵀX is a multiple of the identity
    posterior = LinearRegression(bias=False, x=x).fit()
    pair = torch.tensor([[1.0, 2.0, 0.0], [2.0, -1.0, 3.0]], dtype=torch.float64)
    covariance = posterior.functional_posterior(pair, joint=True).covariance
    assert covariance[0, :, 1].abs().max() < 1e-14
    assert covariance[0, 0, 0, 0] > 0.01


@pytest.mark.parametrize("selection", [["weight"], ["bias"]])
def test_conditional_on_the_parameters_left_out(selection):
    """Selecting some parameters gives the posterior of those given the others."""
    problem = LinearRegression()
    posterior = lp.Full(
        problem.net, lp.Gaussian(problem.noise), parameters=selection, prior_precision=problem.precision
    )
    posterior.fit([(problem.x, problem.y)])
    chosen = slice(0, 2 * D) if selection == ["weight"] else slice(2 * D, None)
    assert relative_error(posterior.precision_matrix(), problem.posterior_precision[chosen, chosen]) < EXACT


def test_plain_numbers_are_as_exact_as_tensors():
    """A Python float is a float64; rounding it to float32 would cost eight digits."""
    problem = LinearRegression(precision=0.7, mean=0.8, noise=0.4, temperature=0.3)
    posterior = lp.Full(problem.net, lp.Gaussian(0.4), prior_precision=0.7, prior_mean=0.8, temperature=0.3)
    posterior.fit([(problem.x, problem.y)])
    want = problem.log_evidence().item()
    assert posterior.log_marginal_likelihood().item() == pytest.approx(want, rel=EXACT)
    assert posterior.log_marginal_likelihood(0.7, 0.4, temperature=0.3).item() == pytest.approx(want, rel=EXACT)
    assert relative_error(posterior.precision_matrix(), problem.posterior_precision) < EXACT


def test_layerwise_prior():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(D, 2), nn.Linear(2, 2)).double()
    x, y = torch.randn(9, D, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    layerwise = torch.tensor([0.3, 4.0], dtype=torch.float64)
    vector = layerwise.repeat_interleave(torch.tensor([8, 6]))
    posterior = lp.Full(net, lp.Gaussian(0.5), prior_precision=layerwise).fit([(x, y)])
    assert posterior.layer_names == ("0", "1")
    again = lp.Full(net, lp.Gaussian(0.5), prior_precision=vector).fit([(x, y)])
    assert relative_error(posterior.precision_matrix(), again.precision_matrix()) < EXACT
    curvature = 0.25 * (posterior.precision_matrix() - torch.diag(vector))
    want = gaussian_evidence(curvature, posterior.mean, (net(x) - y).square().sum().item(), y.numel(), vector, 0.5)
    assert posterior.log_marginal_likelihood().item() == pytest.approx(want, rel=EXACT)
    assert again.log_marginal_likelihood().item() == pytest.approx(want, rel=EXACT)


# -- the optimum -------------------------------------------------------------------------------------------------------


def evidence_at(posterior, problem, precision, noise):
    """The dense evidence with the weights where they are."""
    phi = problem.design(problem.x)
    sse = (problem.net(problem.x) - problem.y).square().sum().item()
    vector = torch.full((problem.n_parameters,), precision, dtype=torch.float64)
    return gaussian_evidence(phi.T @ phi, posterior.mean - problem.mean, sse, problem.y.numel(), vector, noise)


def brute_force_optimum(posterior, problem):
    """Best (precision, noise): for each noise level of a refined grid the best precision, by bounded line search."""

    def profile(log_noise):
        found = minimize_scalar(
            lambda u: -evidence_at(posterior, problem, math.exp(u), math.exp(log_noise)),
            bounds=(-14, 14),
            method="bounded",
            options={"xatol": 1e-9},
        )
        return found.fun, found.x

    best = minimize_scalar(lambda s: profile(s)[0], bounds=(-5, 3), method="bounded", options={"xatol": 1e-9})
    return -best.fun, math.exp(profile(best.x)[1]), math.exp(best.x)


@pytest.fixture(scope="module", params=[{}, {"mean": 0.8, "outputs": 3}], ids=["plain", "mean"])
def options_and_optimum(request):
    problem = LinearRegression(**request.param)
    return request.param, brute_force_optimum(problem.fit(lp.Full), problem)


@pytest.mark.diagonal
@pytest.mark.parametrize("method", ["marginal_likelihood", "mackay", "em"])
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, ekfac], ids=["Full", "KFAC", "EKFAC"])
def test_every_method_finds_the_optimum(method, cls, options_and_optimum):
    """The weights stay where they are, so all methods climb the same evidence."""
    options, (value, precision, noise) = options_and_optimum
    posterior = LinearRegression(**options).fit(cls)
    before = posterior.mean.clone()
    posterior.fit_prior_precision(method)
    assert posterior.tuning.converged
    # A derivative below the tolerance of 1e-3 nats leaves the evidence within about its square, and the logarithms of
    # the hyperparameters within 1e-3 over the curvature (which is of order N).
    assert posterior.log_marginal_likelihood().item() == pytest.approx(value, abs=1e-5)
    assert posterior.prior_precision.item() == pytest.approx(precision, rel=1e-3)
    assert posterior.noise_std.item() == pytest.approx(noise, rel=1e-3)
    assert torch.equal(posterior.mean, before)


@pytest.mark.filterwarnings("ignore:Tuning by validation ended")  # the data do not determine it
def test_validation_takes_the_best_point_of_its_grid():
    problem = LinearRegression(outputs=1)
    posterior = problem.fit()
    generator = torch.Generator().manual_seed(9)
    held = torch.randn(6, D, generator=generator, dtype=torch.float64)
    target = held[:, :1] + 0.3 * torch.randn(6, 1, generator=generator, dtype=torch.float64)
    levels = [0.013, 0.13, 1.3, 13.1, 131.3]  # none of them a float32
    phi, train = problem.design(held), problem.design(problem.x)
    sse = (problem.net(problem.x) - problem.y).square().mean()
    factors = [math.exp(shift) for shift in (-0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)]

    def loss(level, factor):
        noise = sse * factor**2
        covariance = torch.linalg.inv(train.T @ train / noise + level * torch.eye(4, dtype=torch.float64))
        variance = (phi @ covariance * phi).sum(1) + noise
        normal = torch.distributions.Normal(problem.net(held)[:, 0], variance.sqrt())
        return -normal.log_prob(target[:, 0]).mean().item()

    best = min(itertools.product(levels, factors), key=lambda point: loss(*point))
    posterior.fit_prior_precision("validation", data=[(held[:4], target[:4]), (held[4:], target[4:])], grid=levels)
    assert posterior.prior_precision.item() == pytest.approx(best[0], rel=1e-12)
    assert posterior.noise_std.item() == pytest.approx(sse.sqrt().item() * best[1], rel=1e-12)
    assert posterior.tuning.value == pytest.approx(-loss(*best), rel=1e-10)


# -- derivatives of the evidence ---------------------------------------------------------------------------------------


LIKELIHOODS = {
    "categorical": (lambda: lp.Categorical(), lambda n: torch.arange(n) % 3),
    "bernoulli": (lambda: lp.Bernoulli(), lambda n: (torch.arange(3 * n) % 2).view(n, 3)),
    "poisson": (lambda: lp.Poisson(), lambda n: (torch.arange(3 * n) % 4).view(n, 3)),
    "heteroscedastic": (
        lambda: lp.HeteroscedasticGaussian(),
        lambda n: torch.linspace(-1, 1, 2 * n).double().view(n, 2),
    ),
    "gaussian": (lambda: lp.Gaussian(0.6), lambda n: torch.linspace(-1, 1, 3 * n).double().view(n, 3)),
    "gaussian per output": (
        lambda: lp.Gaussian(torch.tensor([0.4, 0.8, 1.1])),
        lambda n: torch.linspace(-1, 1, 3 * n).double().view(n, 3),
    ),
}
POSTERIORS = {"Full": lp.Full, "KFAC": lp.KFAC, "EKFAC": ekfac, "Diagonal": lp.Diagonal}


def small_posterior(name, likelihood):
    torch.manual_seed(3)
    make, targets = LIKELIHOODS[likelihood]
    outputs = 4 if likelihood == "heteroscedastic" else 3
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    x = torch.randn(7, 2, dtype=torch.float64)
    return POSTERIORS[name](net, make()).fit([(x, targets(7))])


@pytest.mark.diagonal
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", POSTERIORS)
def test_evidence_gradients(name, likelihood):
    """Against finite differences: gradcheck's default tolerances (1e-5 absolute, 1e-3 relative) and step."""
    posterior = small_posterior(name, likelihood)
    generator = torch.Generator().manual_seed(4)

    def positive(*shape):
        return (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    shapes = [(), (2,)] + ([(posterior.n_parameters,)] if name in ("Full", "Diagonal") else [])
    noises = [None]
    if posterior.noise_std is not None:
        noises = [positive()] + ([positive(3)] if posterior.noise_std.ndim else [])
    for shape, noise in itertools.product(shapes, noises):
        precision, temperature = positive(*shape), positive()

        def evidence(precision, temperature, *noise):
            return posterior.log_marginal_likelihood(precision, *noise, temperature=temperature)

        arguments = (precision, temperature) if noise is None else (precision, temperature, noise)
        assert torch.autograd.gradcheck(evidence, arguments)


@pytest.mark.parametrize("name", ["KFAC", "EKFAC"])
def test_kronecker_blocks_take_no_diagonal_prior(name):
    posterior = small_posterior(name, "categorical")
    with pytest.raises(UnsupportedError, match="layerwise"):
        posterior.log_marginal_likelihood(torch.ones(posterior.n_parameters, dtype=torch.float64))
