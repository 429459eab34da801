"""What posteriors are compared with: temperatures, early stopping, ensembles, SWAG; and how methods are told apart."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from benchmarks.study import methods, training, yardsticks
from benchmarks.study.evaluation import nll, scores
from benchmarks.study.methods import Task
from benchmarks.study.sets import DataSet

NETWORK = {"hidden": [4], "activation": "tanh"}


def task(classification=True, members=2, network=NETWORK):
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in (60, 40, 30):
        x = torch.randn(n, 2, generator=generator)
        y = x.sum(1) + 0.5 * torch.randn(n, generator=generator)
        parts.append((x, (y > 0).long() if classification else y[:, None]))
    data = DataSet("small", 0, *parts, classification, 2 if classification else 1, unit=2.0)
    schedule = {"epochs": 20, "learning_rate": 0.05, "weight_decay": 0.01}
    return Task(data, training.train(network, schedule, data, members), network, 0.01)


def test_a_temperature_is_the_best_of_its_grid_on_validation_data():
    own = task()
    fitted = methods.run(own, {"method": "temperature"})
    x, y = own.data.validation
    logits = own.model(x).detach()
    losses = [float(torch.nn.functional.cross_entropy(logits / t, y)) for t in yardsticks.TEMPERATURES]
    best = yardsticks.TEMPERATURES[int(torch.tensor(losses).argmin())]
    assert fitted.tuning["temperature"] == best
    torch.testing.assert_close(fitted.predict(x).mean, (logits / best).softmax(-1))


def test_for_numbers_it_is_the_noise_that_is_scaled():
    own = task(classification=False)
    fitted = methods.run(own, {"method": "temperature"})
    prediction = fitted.predict(own.data.test[0])
    noise = float(own.trained.noise[0]) * fitted.tuning["times_noise"]
    torch.testing.assert_close(prediction.variance, torch.full((30, 1), noise**2))
    # RMSE and NLL in the targets' own unit, which is twice the standardised one
    plain = scores(fitted.predict, own.data)
    errors = own.model(own.data.test[0]).detach() - own.data.test[1]
    assert plain["rmse"] == pytest.approx(2 * float(errors.square().mean().sqrt()), rel=1e-5)
    assert plain["nll"] == pytest.approx(nll(fitted.predict, own.data.loader("test")) + torch.tensor(2.0).log().item())


def test_an_ensemble_averages_probabilities():
    own = task()
    x = own.data.test[0]
    each = [own.member(k, early=False)(x).detach().softmax(-1) for k in range(2)]
    prediction = methods.run(own, {"method": "ensemble"}).predict(x)
    torch.testing.assert_close(prediction.mean, (each[0] + each[1]) / 2)
    early = methods.run(own, {"method": "early_stopping"}).predict(x)
    torch.testing.assert_close(early.mean, own.member(0, early=True)(x).detach().softmax(-1))


@pytest.mark.slow
def test_swag_draws_have_half_of_each_covariance():
    own = task()
    generator = torch.Generator().manual_seed(1)
    size = len(parameters_to_vector(own.model.parameters()))
    path = torch.randn(20, size, generator=generator) * torch.linspace(0.1, 1, size)
    networks = yardsticks.draws(own, path, 4000)
    draws = torch.stack([parameters_to_vector(one.parameters()).detach() for one in networks]).double()
    path = path.double()
    deviations = path - path.mean(0)
    expected = deviations.square().mean(0).diag() / 2 + deviations.T @ deviations / (2 * 19)
    variances = expected.diagonal()
    error = ((variances[:, None] * variances + expected.square()) / 4000).sqrt()
    assert bool(((draws.T.cov() - expected).abs() < 5 * error).all())
    assert bool(((draws.mean(0) - path.mean(0)).abs() < 5 * (variances / 4000).sqrt()).all())


def test_a_posterior_is_tuned_on_validation_data_alone():
    own = task()
    row = {"method": "laplace_sampled", "tuned_by": "validation", "n_samples": 10}
    found = methods.run(own, row)
    x, y = own.data.test
    other = Task(DataSet(**{**vars(own.data), "test": (x.flip(0), 1 - y)}), own.trained, NETWORK, 0.01)
    assert methods.run(other, row).tuning == found.tuning
    assert len(found.tuning["tried"]) == len(methods.GRID)
