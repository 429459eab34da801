"""Tuning finds the best evidence that its prior structure allows, cheaply, or says that it did not.

With the weights fixed and a positive semi-definite curvature H, the evidence is a concave function of the logarithms of
all its hyperparameters together: ``det(e^b H + diag(e^u))`` is a sum of exponentials of linear functions of (b, u) with
non-negative coefficients (principal minors of H), so its logarithm is convex; every other term is concave or linear.
There is one optimum, which brute force from anywhere must agree with.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import ekfac, occam
from scipy.optimize import minimize
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    EmptyDataError,
    NonFiniteError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from laplace_plus.predictive import from_samples
from laplace_plus.tuning.marginal_likelihood import Objective

CLASSES = {"Full": lp.Full, "KFAC": lp.KFAC, "Diagonal": lp.Diagonal}
METHODS = ["marginal_likelihood", "mackay", "em"]
PROMISED = 0.05  # nats
LOG_2PI = math.log(2 * math.pi)


def problem(task):
    """A small trained network and its data."""
    net, x, y = trained(task)
    return copy.deepcopy(net), x.clone(), y.clone()


@cache
def trained(task, *, n=20, width=4, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(n, 2, dtype=torch.float64)
    if task == "classification":
        y = (x[:, 0] + 0.5 * torch.randn(n, dtype=torch.float64) > 0).long() + (x[:, 1] > 1).long()
        net, loss = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3)), nn.CrossEntropyLoss()
    else:
        y = torch.sin(2 * x[:, :1]) + torch.tensor([[0.1, 0.5]]) * torch.randn(n, 2, dtype=torch.float64)
        net, loss = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)), nn.MSELoss()
    net = net.double()
    optimizer = torch.optim.Adam(net.parameters(), 0.05, weight_decay=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net, x, y


def likelihood_of(task):
    return {
        "classification": lambda: lp.Categorical(),
        "regression": lambda: lp.Gaussian(0.5),
        "regression per output": lambda: lp.Gaussian(torch.tensor([0.5, 0.7])),
    }[task]()


def fitted(cls, task, **options):
    net, x, y = problem(task)
    return cls(net, likelihood_of(task), **options).fit([(x[:12], y[:12]), (x[12:], y[12:])]), net, x, y


@cache
def once_fitted(name, task):
    """For tests that only read the posterior."""
    return fitted(CLASSES[name], task)[0]


def dense_evidence(posterior, net, x, y, structure):
    """The evidence as a function of ``[log precisions…, log noise…]`` by dense linear algebra, and its dimensions."""
    model = posterior.laplace_model()
    components = model.weights().numel()
    parts = [model.curvature.dense(torch.eye(components, dtype=torch.float64)[k]) for k in range(components)]
    layers = posterior.network.layer_index()
    group = {"scalar": torch.zeros_like(layers), "layerwise": layers, "diagonal": torch.arange(len(layers))}[structure]
    n_precisions = int(group.max()) + 1
    f = net(x).detach()
    likelihood = posterior.likelihood
    n_noise = likelihood.n_noise if likelihood.noise_std is not None else 0
    errors = None if n_noise == 0 else (f - y).square().sum(0).view(-1, f.shape[1] // n_noise if n_noise == 1 else 1)
    if n_noise == 1:
        errors = (f - y).square().sum()[None]
    count = f.numel() // max(1, n_noise)

    def evidence(point):
        precision = point[:n_precisions].exp()[group]
        if n_noise == 0:
            fit = f.log_softmax(-1).gather(1, y[:, None]).sum()
            return fit + occam(parts[0], posterior.mean, precision)
        noise = point[n_precisions:].exp()
        fit = sum(-0.5 * e / s**2 - count * (s.log() + 0.5 * LOG_2PI) for e, s in zip(errors, noise, strict=True))
        curvature = sum(part / s**2 for part, s in zip(parts, noise, strict=True))
        return fit + occam(curvature, posterior.mean, precision)

    return evidence, n_precisions, n_noise


def brute_force(evidence, n_precisions, n_noise):
    """The best of local searches from random points."""
    bounds = [(-12.0, 20.0)] * n_precisions + [(-5.0, 3.0)] * n_noise

    def loss(point):
        point = torch.tensor(point, dtype=torch.float64, requires_grad=True)
        value = -evidence(point)
        value.backward()
        return value.item(), point.grad.numpy()

    starts = np.random.default_rng(0).uniform(*np.array(bounds).T, size=(2, len(bounds))) / 3
    return max(-minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).fun for start in starts)


@pytest.mark.quick(
    "Full-scalar-classification",
    "Full-layerwise-regression",
    "KFAC-layerwise-regression per output",
    "KFAC-diagonal-regression",
    "Diagonal-diagonal-regression per output",
    "Diagonal-scalar-regression",
)
@pytest.mark.parametrize("task", ["classification", "regression", "regression per output"])
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diagonal"])
@pytest.mark.parametrize("name", CLASSES)
def test_within_the_promised_nats_of_the_best(name, structure, task):
    posterior, net, x, y = fitted(CLASSES[name], task)
    if name == "KFAC" and structure == "diagonal":
        with pytest.raises(UnsupportedError, match="layerwise"):
            posterior.fit_prior_precision(structure=structure)
        return
    evidence, n_precisions, n_noise = dense_evidence(posterior, net, x, y, structure)
    posterior.fit_prior_precision(structure=structure)
    reached = posterior.log_marginal_likelihood().item()
    parts = [posterior.prior_precision] + ([posterior.noise_std] if n_noise else [])
    point = torch.cat([part.reshape(-1).log() for part in parts])
    assert reached == pytest.approx(evidence(point).item(), abs=1e-8)  # the two evidences are one function
    assert posterior.tuning.converged
    assert posterior.tuning.value == pytest.approx(reached, abs=1e-8)
    assert reached > brute_force(evidence, n_precisions, n_noise) - PROMISED


@pytest.mark.parametrize("task", ["classification", "regression", "regression per output"])
def test_a_precision_for_each_entry_in_closed_form(task):
    """Each is the best on a fine grid; without curvature it is the common one, with a weight of zero it is large."""
    net, x, y = problem(task)
    with torch.no_grad():
        net[0].weight[0, 0] = 0.0
        net[2].weight[:, 1] = net[0].bias[1] = 0.0
        net[0].weight[1] = torch.tensor([0.3, -0.2])  # of a hidden unit that nothing depends on
    posterior = lp.Diagonal(net, likelihood_of(task), temperature=0.7).fit([(x, y)])
    posterior.fit_prior_precision("marginal_likelihood", structure="diagonal")
    assert posterior.tuning.converged
    assert posterior.tuning.gradient_norm < 1e-3
    model, found, mean = posterior.laplace_model(), posterior.prior_precision, posterior.mean
    h = model.curvature.dense(model.weights(posterior.noise_std) / 0.7).diagonal()
    dead = torch.zeros_like(mean, dtype=torch.bool)
    dead[[2, 3, 2 * net[0].out_features + 1]] = True
    assert torch.equal(h == 0, dead)
    common = found[dead].unique()
    assert len(common) == 1
    grid = (common.log() + torch.linspace(-15, 15, 30_001).double()).exp()
    value = grid.log() - (h[:, None] + grid).log() - grid * mean.square()[:, None]
    best = grid[value.argmax(1)].clamp(min=1e-4 * common)
    inside = ~dead & (mean != 0)
    torch.testing.assert_close(found[inside], best[inside], rtol=2e-3, atol=0)
    assert (found[~dead & (mean == 0)] > 1e6 * common).all()
    if "regression" in task:  # and the noise is the best for these

        def evidence(noise):
            return posterior.log_marginal_likelihood(found, noise).item()

        assert all(evidence(posterior.noise_std) >= evidence(posterior.noise_std * f) for f in (0.98, 1.02))


@pytest.mark.quick(
    "em-scalar-regression per output",
    "em-layerwise-regression",
    "mackay-scalar-classification",
    "em-layerwise-classification",
)
@pytest.mark.parametrize(
    ("method", "structure", "task"),
    [
        ("mackay", "scalar", "classification"),
        ("mackay", "layerwise", "regression per output"),
        ("em", "scalar", "regression per output"),
        ("em", "layerwise", "classification"),
        ("em", "layerwise", "regression"),
    ],
)
def test_the_methods_agree(method, structure, task):
    posterior = fitted(lp.KFAC, task)[0]
    want = posterior.fit_prior_precision(structure=structure).tuning.value
    posterior.fit_prior_precision(method, structure)
    assert posterior.tuning.converged
    # Both ends have derivatives below 1e-3 nats, so by concavity they are closer than 1e-3 times their log distance.
    assert posterior.tuning.value == pytest.approx(want, abs=1e-3)


@pytest.mark.quick("0.4")
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_expectation_maximisation_never_falls(temperature):
    """Each EM step maximises a lower bound that touches the evidence, the noise included (Dempster et al., 1977)."""
    point = torch.tensor([-3.0, 4.0, 1.5, -4.0], dtype=torch.float64)
    posterior = fitted(lp.Full, "regression per output", temperature=temperature)[0]
    objective = Objective.create(posterior, "layerwise")
    values = []
    for _ in range(30):
        now = objective.at(point)
        values.append(now.value)
        point = now.fixed_point_step("em")
    steps = np.diff(values)
    assert steps.min() > -1e-9  # rounding
    assert values[-1] - values[0] > 0.1  # it does move


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_evidence_is_concave_in_the_logarithms(data):
    """So no tuning can be caught in a second local optimum."""
    name = data.draw(st.sampled_from(["Full", "KFAC", "Diagonal"]))
    task = data.draw(st.sampled_from(["classification", "regression per output"]))
    posterior = once_fitted(name, task)
    structure = data.draw(st.sampled_from(["scalar", "layerwise"] + (["diagonal"] if name != "KFAC" else [])))
    size = {"scalar": 1, "layerwise": 2, "diagonal": posterior.n_parameters}[structure]
    n_noise = 0 if task == "classification" else 2
    numbers = st.floats(-6, 6)
    a, b = (torch.tensor(data.draw(st.lists(numbers, min_size=size + n_noise, max_size=size + n_noise))) for _ in "ab")

    def value(point):
        point = point.double()
        precision = point[:size].exp()
        noise = (point[size:] / 3).exp() if n_noise else None
        return posterior.log_marginal_likelihood(precision[0] if size == 1 else precision, noise).item()

    ends, middle = (value(a) + value(b)) / 2, value((a + b) / 2)
    assert middle >= ends - 1e-9 * (1 + abs(ends))  # rounding


@pytest.mark.diagonal
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_weights_at_the_prior_mean(method, structure):
    """Then the prior may be as narrow as can be: the evidence rises to the likelihood as the precision grows."""
    net, x, y = problem("classification")
    mean = torch.cat([p.detach().flatten() for p in net.parameters()])
    posterior = lp.KFAC(net, "classification", prior_mean=mean).fit([(x, y)])
    posterior.fit_prior_precision(method, structure)
    supremum = net(x).log_softmax(-1).gather(1, y[:, None]).sum().item()
    assert posterior.tuning.converged
    assert supremum - PROMISED < posterior.tuning.value <= supremum + 1e-9
    assert posterior.prior_precision.min() > 1e3 and posterior.predictive(x).mean.isfinite().all()


@pytest.mark.quick("marginal_likelihood", "em")
@pytest.mark.parametrize("method", METHODS)
def test_an_unfinished_tuning_says_so(method):
    posterior = fitted(lp.Full, "regression")[0]
    with pytest.warns(ConvergenceWarning, match="max_iterations"):
        posterior.fit_prior_precision(method, "diagonal", max_iterations=1)
    assert not posterior.tuning.converged and posterior.tuning.gradient_norm > 1e-3


def test_a_small_gain_far_from_the_optimum_is_no_convergence():
    torch.manual_seed(0)
    x, net = torch.randn(20, 4).double() * torch.tensor([30, 1, 0.1, 0.01]), nn.Linear(4, 2).double()
    posterior = lp.Full(net, "classification").fit([(x, (x[:, 0] > 10 * torch.randn(20)).long())])
    with pytest.warns(ConvergenceWarning, match="max_iterations"):
        posterior.fit_prior_precision("em", max_iterations=3)
    assert not posterior.tuning.converged  # a thousandth of a nat is missing, and the precision 3.6 % off


def test_perfect_fit_has_a_bounded_noise():
    """Residuals of exactly zero must not end in an infinite evidence or a NaN."""
    net = nn.Linear(2, 1, dtype=torch.float64)
    x = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    posterior = lp.Full(net, "regression").fit([(x, net(x).detach())])
    with pytest.warns(lp.errors.ConvergenceWarning, match="limits of the search"):
        posterior.fit_prior_precision("marginal_likelihood")
    assert not posterior.tuning.converged and math.isfinite(posterior.tuning.value)
    assert 0 < posterior.noise_std < 1e-6


def test_indefinite_hessian_is_refused():
    """log det(H + P₀) has no lower bound where H has negative eigenvalues, so there is no best precision."""
    net, x, y = problem("classification")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3).add_(0.5)
    posterior = lp.Full(net, "classification", backend=lp.Native("hessian"), prior_precision=100.0).fit([(x, y)])
    assert torch.linalg.eigvalsh(posterior.precision_matrix() - 100 * torch.eye(posterior.n_parameters)).min() < -0.1
    assert torch.isfinite(posterior.log_marginal_likelihood())
    with pytest.raises(NotPositiveDefiniteError, match="GGN"):
        posterior.fit_prior_precision("marginal_likelihood")


# -- what is computed once ---------------------------------------------------------------------------------------------


def counted(monkeypatch):
    """Counts decompositions from here on."""
    counts, eigh = [0], torch.linalg.eigh

    def counted_eigh(*args, **kwargs):
        counts[0] += 1
        return eigh(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", counted_eigh)
    return counts


# Decompositions by class: one of the whole matrix, two sides of two layers, none.
ONCE = {"Full": 1, "KFAC": 4, "EKFAC": 4, "Diagonal": 0}


@pytest.mark.diagonal
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("name", ONCE)
def test_each_factor_is_decomposed_once(monkeypatch, name, task):
    net, x, y = problem(task)
    posterior = {**CLASSES, "EKFAC": ekfac}[name](net, lp.Gaussian() if task == "regression" else task)
    counts = counted(monkeypatch)
    posterior.fit([(x[:12], y[:12]), (x[12:], y[12:])])
    for method in METHODS:
        posterior.fit_prior_precision(method)
    for precision in torch.logspace(-3, 3, 100, dtype=torch.float64):
        posterior.log_marginal_likelihood(precision, temperature=precision)
    posterior.prior_precision, posterior.temperature = 3.0, 0.5
    posterior.sample(2)
    posterior.fit_prior_precision("validation", data=[(x, y)], grid=[1.0, 1e6, 1e7])
    assert counts == [ONCE[name]]
    assert posterior.tuning.n_evaluations == (3 * 7 if task == "regression" else 3)


# -- asking and refusing -----------------------------------------------------------------------------------------------


def test_tuning_takes_effect_everywhere():
    posterior, _, x, _ = fitted(lp.KFAC, "regression")
    before = posterior.predictive(x)
    posterior.sample(1)
    posterior.fit_prior_precision(structure="layerwise")
    fresh = fitted(lp.KFAC, "regression", prior_precision=posterior.prior_precision)[0]
    fresh.noise_std = posterior.noise_std
    assert torch.equal(posterior.predictive(x).variance, fresh.predictive(x).variance)
    assert not torch.allclose(posterior.predictive(x).variance, before.variance)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("gradient descent",), {}),
        (("marginal_likelihood", "blockwise"), {}),
        (("validation",), {}),
        (("validation",), {"data": [], "grid": []}),
        (("validation",), {"data": [], "grid": [0.0, 1.0]}),
        (("marginal_likelihood",), {"data": []}),
        (("mackay",), {"grid": [1.0]}),
    ],
)
def test_refusals(arguments, options):
    posterior = fitted(lp.Full, "regression")[0]
    with pytest.raises(ConfigurationError):
        posterior.fit_prior_precision(*arguments, **options)


class Tunable(lp.KFAC):
    """A posterior that names what Validation is to tune."""

    grids: dict = {}

    def tunables(self):
        return self.grids


class Scaled(Tunable):
    """Networks around the trained one, at a distance of their own, whatever the noise."""

    sharpness = distance = 1.0

    def predictive(self, x, n_samples=100, generator=None, **_):
        outputs = self.sharpness * self.network.forward(x)
        draws = torch.randn(n_samples, *outputs.shape, generator=torch.Generator().manual_seed(0), dtype=outputs.dtype)
        return from_samples(self.likelihood, outputs + self.distance * draws)


@pytest.mark.filterwarnings("ignore:Tuning by validation ended:laplace_plus.errors.ConvergenceWarning")
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_validation_of_any_posterior_agrees_with_that_of_gaussian_ones(task):
    gaussian, net, x, y = fitted(lp.KFAC, task)
    grid = [0.1, 1.0, 10.0, 100.0]
    own = Tunable(net, gaussian.likelihood).fit([(x, y)])
    own.grids = {"prior_precision": grid}
    for posterior in (gaussian, own):
        posterior.fit_prior_precision(lp.Validation([(x[:9], y[:9]), (x[9:], y[9:])], grid=grid, tune_noise=False))
    assert own.tuning.value == pytest.approx(gaussian.tuning.value, rel=1e-9)
    assert own.prior_precision == gaussian.prior_precision


def test_validation_tunes_any_attributes_and_the_noise():
    gaussian, net, x, y = fitted(lp.KFAC, "regression")
    own = Scaled(net, gaussian.likelihood).fit([(x, y)])
    own.grids = {"distance": [0.1, 0.2], "sharpness": [1.0]}
    own.fit_prior_precision(lp.Validation([(x, y)], grid=[1.0, 0.7, 0.0]))
    assert own.tuning.n_evaluations == 2 * 3 * 9
    assert own.tuning.settings == {"distance": own.distance, "sharpness": own.sharpness}
    assert own.sharpness == 1.0 and not own.tuning.converged  # more may be better
    value = float(own.predictive(x).log_prob(y).mean())
    assert value == pytest.approx(own.tuning.value)
    for name, wrong in (("sharpness", 0.4), ("distance", 3.0), ("noise_std", 2.0 * own.noise_std)):
        other = copy.copy(own)
        setattr(other, name, wrong)
        assert float(other.predictive(x).log_prob(y).mean()) < value


def test_validation_needs_data():
    with pytest.raises(EmptyDataError):
        fitted(lp.Full, "regression")[0].fit_prior_precision("validation", data=[])


@pytest.mark.parametrize(("grid", "at_end"), [([1e2, 1e3, 1e4], True), ([1e4, 1e2, 1e3], True), (None, False)])
def test_validation_says_where_its_grid_ends(grid, at_end):
    """In whichever order it was given."""
    posterior, _, x, y = fitted(lp.Full, "regression")
    with pytest.warns(ConvergenceWarning, match="ended at") if at_end else nullcontext():
        posterior.fit_prior_precision("validation", data=[(x, y)], grid=grid, tune_noise=False)
    assert posterior.tuning.converged is not at_end
    if at_end:
        assert posterior.prior_precision == 1e4


@pytest.mark.quick("inf")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_validation_refuses_losses_that_are_never_finite(value):
    posterior, _, x, y = fitted(lp.Full, "regression")
    before = posterior.prior_precision, posterior.noise_std
    with pytest.raises(NonFiniteError, match="held-out"):
        posterior.fit_prior_precision("validation", data=[(x, y)], loss=lambda p, t: p.log_prob(t) * value)
    assert (posterior.prior_precision, posterior.noise_std) == before


def test_validation_refuses_ignored_targets():
    posterior, _, x, y = fitted(lp.Full, "classification")
    before = posterior.prior_precision
    with pytest.raises(NonFiniteError, match="held-out"):
        posterior.fit_prior_precision("validation", data=[(x, torch.full_like(y, -100))])
    assert posterior.prior_precision == before


def test_no_noise_to_tune():
    with pytest.raises(ConfigurationError, match="noise"):
        fitted(lp.Full, "classification")[0].fit_prior_precision(tune_noise=True)


@pytest.mark.quick("10000000.0")
@pytest.mark.parametrize("size", [1e-7, 1e7])
def test_weights_of_any_size(size):
    """The search is as wide as the weights' size asks for."""
    net, x, y = problem("regression")
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(size)
    posterior = lp.Full(net, "regression").fit([(x, y)]).fit_prior_precision("marginal_likelihood")
    assert posterior.tuning.converged
    for factor in (0.5, 2.0):
        assert posterior.log_marginal_likelihood(posterior.prior_precision * factor) < posterior.tuning.value + 1e-6
        assert posterior.log_marginal_likelihood(noise_std=posterior.noise_std * factor) < posterior.tuning.value + 1e-6
