"""Objectives, estimators and updates behind the sampled posterior, beside dense linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, NonFiniteError
from laplace_plus.linalg import cg, draw_probes
from laplace_plus.network.network import Network
from laplace_plus.posteriors.sampled import systems
from laplace_plus.posteriors.sampled.systems import (
    SOLVERS,
    CGSolver,
    PriorUnits,
    SGDSolver,
    TangentCurvature,
    effective_dimension,
    group_sums,
    largest_eigenvalue,
)
from laplace_plus.posteriors.sampled.tuning import mackay_step
from laplace_plus.posteriors.storing import resolve_option
from laplace_plus.tuning.marginal_likelihood import updated_noise


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# -- iterations ---------------------------------------------------------------------------------------------------


def system(n=12, k=4):
    root = randn(n, n)
    return root @ root.T + torch.eye(n, dtype=torch.float64), randn(k, n, seed=1)


def descend(A, b, *, rate, epochs, start=None):
    start = torch.zeros_like(b) if start is None else start
    return systems.descend(lambda: [lambda v: v @ A], b, start, rate=rate, epochs=epochs, total=epochs)


def test_descent_finds_the_solution():
    A, b = system(5)
    step = 1 / largest_eigenvalue(lambda v: v @ A, randn(3, 5, seed=2), 50)
    x = descend(A, b, rate=step, epochs=2000)
    torch.testing.assert_close(x, torch.linalg.solve(A, b.T).T, rtol=1e-6, atol=1e-8)


def test_the_learning_rate_falls_linearly(monkeypatch):
    monkeypatch.setattr(systems, "MOMENTUM", 0.0)
    b = randn(2, 4)
    x = descend(torch.zeros(4, 4, dtype=torch.float64), b, rate=0.3, epochs=9)
    torch.testing.assert_close(x, 0.3 * 9 * (1 + 1 / 330) / 2 * b)


def test_descent_that_diverges_says_so():
    A, b = system(5)
    with pytest.raises(NonFiniteError, match="learning rate"):
        descend(A, b, rate=1e200, epochs=999)


def test_gradients_are_clipped_to_ten_times_their_length_at_zero(monkeypatch):
    monkeypatch.setattr(systems, "MOMENTUM", 0.0)
    b, start = randn(2, 4), randn(2, 4, seed=1)
    x = descend(1e6 * torch.eye(4, dtype=torch.float64), b, rate=1.0, epochs=1, start=start.clone())
    torch.testing.assert_close((x - start).norm(dim=-1), 10 * b.norm(dim=-1))


def test_largest_eigenvalue_is_approached_from_below():
    A, _ = system()
    exact = torch.linalg.eigvalsh(A)[-1].item()
    found = [largest_eigenvalue(lambda v: v @ A, randn(2, 12, seed=3), n) for n in (1, 4, 60)]
    assert found[0] < found[1] < found[2] <= exact * (1 + 1e-12)
    assert found[2] == pytest.approx(exact, rel=1e-6)


# -- objectives ---------------------------------------------------------------------------------------------------


def model_and_data(likelihood):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = randn(20, 2)
    y = (x[:, 0] > 0).long() if likelihood == "binary" else x.sum(1, keepdim=True).sin()
    return model, list(zip(x.split(6), y.split(6), strict=True)), x


def jacobian(network, x):
    vector = network.vector()
    return torch.func.jacrev(lambda v: network(x, network.substitute(v)).flatten())(vector)


@pytest.mark.parametrize("likelihood", ["regression", "binary"])
def test_both_objectives_have_the_same_minimiser(likelihood):
    """Autograd's Newton step on either, as both are quadratic; the second one needs no inverse of B."""
    model, data, x = model_and_data(likelihood)
    kind = lp.Gaussian(0.5) if likelihood == "regression" else lp.Bernoulli()
    network = Network(model, "all", kind.arrange)
    curvature = TangentCurvature(network, kind, data)
    precision = torch.linspace(0.5, 3.0, network.n_parameters, dtype=torch.float64)
    J = jacobian(network, x)
    if likelihood == "regression":
        unit, weight = torch.ones(len(x), dtype=torch.float64), 4.0
    else:
        p = network.forward(x).sigmoid().flatten()
        unit, weight = p * (1 - p), 1.0
    B = unit * weight
    xi = randn(3, network.n_parameters, seed=5)
    pulled = curvature.pulled_noise(3, generator(7))
    source = generator(7)
    eta = torch.cat([draw_probes("gaussian", 3, len(y), generator=source, dtype=torch.float64) for y, _ in data], 1)
    torch.testing.assert_close(pulled, (eta * unit.sqrt()) @ J)

    start = xi / precision.sqrt()
    residual_noise = eta / B.sqrt()

    def original(z):
        return ((residual_noise - z @ J.T).square() * B).sum() / 2 + ((z - start).square() * precision).sum() / 2

    shifted = start + (eta * B.sqrt()) @ J / precision

    def reduced(z):
        return ((z @ J.T).square() * B).sum() / 2 + ((z - shifted).square() * precision).sum() / 2

    def slope(objective, z):
        z = z.clone().requires_grad_()
        return torch.autograd.grad(objective(z), z)[0]

    def minimiser(objective):
        at_zero = slope(objective, torch.zeros_like(xi))
        # Columns of the quadratic's Hessian are differences of its gradient, one unit vector in each of the rows.
        columns = [
            (slope(objective, unit.expand(3, -1)) - at_zero)[0] for unit in torch.eye(xi.shape[1], dtype=torch.float64)
        ]
        return -torch.linalg.solve(torch.stack(columns, 1), at_zero.T).T

    first, second = minimiser(original), minimiser(reduced)
    assert (first - second).abs().max() < 1e-10
    units = PriorUnits(curvature, precision, weight)
    right = xi + weight**0.5 * pulled / precision.sqrt()
    solution = cg(units, right, rtol=1e-13).value
    assert (solution / precision.sqrt() - second).abs().max() < 1e-10


def test_batches_and_their_noise_add_up():
    model, data, x = model_and_data("regression")
    network = Network(model, "all", lp.Gaussian().arrange)
    curvature = TangentCurvature(network, lp.Gaussian(0.1), data)
    J = jacobian(network, x)
    vectors = randn(2, network.n_parameters)
    torch.testing.assert_close(curvature(vectors), vectors @ J.T @ J)  # at unit noise
    parts = [product(vectors) for product in curvature.minibatches()]
    torch.testing.assert_close(torch.stack(parts).mean(0), curvature(vectors))  # though the last batch is smaller
    assert (curvature.n_batches, curvature.n_classes, curvature.n_data) == (4, 1, 20)
    estimate = curvature.estimated_diagonal(300, generator())
    exact = J.square().sum(0)
    assert ((estimate - exact).abs() <= 4.5 * (2 / 300) ** 0.5 * exact).all()


# -- estimators ---------------------------------------------------------------------------------------------------


def posterior_samples(k, spectrum, precision=1.0, seed=0):
    """Samples and the two forms, in the eigenbasis."""
    spectrum = torch.as_tensor(spectrum, dtype=torch.float64)
    z = randn(k, len(spectrum), seed=seed) / (spectrum + precision).sqrt()
    return z, z * spectrum, precision * z


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_ratio_lies_between_zero_and_d(k, groups, seed):
    function = randn(k, groups, seed=seed)  # negative ones among them, as single groups can have
    weight = randn(k, groups, seed=seed + 1).square()
    size = torch.arange(1, groups + 1)
    value, sem = effective_dimension(function, weight, size)
    assert (value >= 0).all() and (value <= size).all()
    assert (sem >= 0).all()
    assert bool(torch.isinf(sem).all()) == (k == 1)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_ratio_is_unbiased_within_its_error(scale):
    spectrum = scale * torch.logspace(-3, 3, 60, dtype=torch.float64)
    z, image, prior = posterior_samples(400, spectrum)
    index = torch.zeros(60, dtype=torch.long)
    value, sem = effective_dimension(group_sums(z, image, index), group_sums(z, prior, index), torch.tensor([60]))
    p = spectrum / (spectrum + 1)
    stated = float((2 * (p - p.mean()).square().sum() / 400).sqrt())
    assert float(sem[0]) == pytest.approx(stated, rel=0.25)
    assert abs(float(value[0] - p.sum())) < 4 * stated + 0.02


def test_the_ratio_has_no_error_where_all_directions_are_determined_alike():
    spectrum = torch.full((50,), 3.0, dtype=torch.float64)
    z, image, prior = posterior_samples(300, spectrum)
    index = torch.zeros(50, dtype=torch.long)
    _, sem = effective_dimension(group_sums(z, image, index), group_sums(z, prior, index), torch.tensor([50]))
    assert float(sem) < 1e-10


def test_group_sums_leave_their_arguments_alone():
    a, b = randn(2, 6), randn(2, 6, seed=1)
    copies = a.clone(), b.clone()
    index = torch.tensor([0, 0, 1, 1, 1, 2])
    sums = group_sums(a, b, index)
    assert torch.equal(a, copies[0]) and torch.equal(b, copies[1])
    expected = torch.stack([(a * b)[:, index == g].sum(1) for g in range(3)], 1)
    torch.testing.assert_close(sums, expected)


# -- updates ------------------------------------------------------------------------------------------------------


def regression():
    """Three groups of features, of which the targets depend less and less."""
    x = randn(80, 9)
    truth = torch.tensor([9.0, -5.0, 7.0, 1.0, -2.0, 1.5, 0.3, -0.4, 0.2], dtype=torch.float64)
    y = x @ truth + 0.5 * randn(80, seed=3)
    return x, y, torch.arange(9) // 3


def fitted(x, y, index, precision, noise):
    """Posterior mean, effective dimensions and squared norms."""
    M = x.T @ x / noise**2
    covariance = torch.linalg.inv(M + torch.diag(precision[index]))
    mean = covariance @ x.T @ y / noise**2
    gamma = torch.zeros(3, dtype=torch.float64).index_add(0, index, (covariance @ M).diagonal())
    return mean, gamma, torch.zeros(3, dtype=torch.float64).index_add(0, index, mean.square())


def evidence(x, y, index, precision, noise):
    """``log N(y | 0, Φ A⁻¹ Φᵀ + σ²)`` without any of the parts of the above."""
    covariance = x / precision[index] @ x.T + noise**2 * torch.eye(len(y), dtype=torch.float64)
    return -(y @ torch.linalg.solve(covariance, y) + torch.logdet(covariance)) / 2


def test_updates_with_exact_traces_end_where_the_evidence_is_stationary():
    x, y, index = regression()
    precision, noise = torch.ones(3, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    sizes = torch.full((3,), 3.0, dtype=torch.float64)
    for _ in range(300):
        mean, gamma, squares = fitted(x, y, index, precision, noise)
        precision = precision * mackay_step(precision, gamma, sizes, squares).exp()
        statistics = torch.stack([(y - x @ mean).square().sum(), torch.tensor(80.0, dtype=torch.float64)])
        noise = updated_noise(statistics, float(gamma.sum()), 1.0)[0]
    logarithms = torch.cat([precision.log(), noise.log()[None]]).requires_grad_()
    value = evidence(x, y, index, logarithms[:3].exp(), logarithms[3].exp())
    (gradient,) = torch.autograd.grad(value, logarithms)
    assert gradient.abs().max() < 1e-8


def test_no_effective_parameter_at_all_still_has_a_logarithm():
    one = torch.ones(1, dtype=torch.float64)
    assert torch.isfinite(mackay_step(one, 0 * one, 5 * one, 0 * one)).all()


# -- solvers by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["adam", None, 3, {"name": "cg", "epochs": 3}, {}])
def test_other_solvers_are_refused(solver):
    with pytest.raises(ConfigurationError):
        resolve_option("solver", solver, SOLVERS)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CGSolver, {"tolerance": 0.0}),
        (CGSolver, {"tolerance": math.nan}),
        (CGSolver, {"max_iterations": 0}),
        (CGSolver, {"rank": 2.5}),
        (CGSolver, {"preconditioner": "jacobi"}),
        (SGDSolver, {"epochs": 0}),
        (SGDSolver, {"learning_rate": -1.0}),
        (SGDSolver, {"learning_rate": math.inf}),
        (SGDSolver, {"tolerance": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(kind, options):
    with pytest.raises(ConfigurationError):
        kind(**options)
