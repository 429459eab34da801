"""Networks on a graphics card, or where ``--device`` says: the same numbers, on the same device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.testing import PosteriorConformance

DEVICE = "cuda" if PosteriorConformance.device == "cpu" else PosteriorConformance.device
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=generator)
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).double().eval(), list(zip(x.split(7), y.split(7), strict=True))


def seeded():
    return torch.Generator().manual_seed(0)


def mean_of(made):
    return lambda posterior, data: made(posterior, data).predictive(data[0][0], generator=seeded()).mean


DOORS = {
    "update": mean_of(lambda p, data: p.update(data[:1])),
    "MacKay": mean_of(lambda p, data: p.fit_prior_precision("mackay")),
    "tangent": mean_of(lambda p, data: p.fit_prior_precision("tangent", generator=seeded())),
    "validation": mean_of(lambda p, data: p.fit_prior_precision("validation", data=data, generator=seeded())),
    "left out": lambda p, data: lp.leave_one_out(
        lp.Full(p.model, p.likelihood, prior_precision=300.0).fit(data)
    ).log_prob(),
    "temperature": mean_of(lambda p, data: lp.calibrate(p, data, "temperature")),
    "conformal": lambda p, data: lp.conformalize(p, data, level=0.7).predict_set(data[0][0]),
    "abstention": lambda p, data: lp.abstain(p, data, risk=0.9, confidence=0.6).predictive(data[0][0]).accepted,
    "evaluation": lambda p, data: torch.tensor([float(own.value) for own in lp.evaluate(p, data, other=data).values()]),
    "distances": lambda p, data: lp.FeatureDistance(p, data)(data[0][0]),
    "influence": lambda p, data: lp.uses.influence(p, data[:1]).mean,
    "selection": lambda p, data: lp.uses.select(p, data[0][0], 3, generator=seeded()).scores,
    "pruned": lambda p, data: lp.uses.prune(p, sparsity=0.5).log_evidence_change,
    "mixture": mean_of(lambda p, data: lp.Mixture([p, p], "evidence")),
    "penalty": lambda p, data: lp.penalty(p, p.model),
    "next task": mean_of(lambda p, data: lp.continue_on(p, p.model).fit(data)),
    "log density": lambda p, data: p.predictive(data[0][0]).log_prob(data[0][1]),
    "metrics": lambda p, data: lp.metrics.negative_log_likelihood(p.predictive(data[0][0]), data[0][1]),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_takes_data_from_the_cpu(door):
    found = []
    for device in ("cpu", DEVICE):
        model, data = problem()
        posterior = lp.KFAC(model.to(device), "classification", prior_precision=2.0).fit(data)
        found.append(torch.as_tensor(DOORS[door](posterior, data)).detach().cpu().double())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8, equal_nan=True)


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
def test_same_numbers_as_on_the_cpu(cls, parameters, tmp_path):
    model, data = problem()
    here = cls(model, "classification", parameters=parameters).fit(data).fit_prior_precision(structure="layerwise")
    expected = here.predictive(data[0][0])
    evidence = here.log_marginal_likelihood()

    model.to(DEVICE)
    there = cls(model, "classification", parameters=parameters).fit(data).fit_prior_precision(structure="layerwise")
    prediction = there.predictive(data[0][0])  # batches are moved to the network
    assert prediction.mean.device.type == DEVICE
    torch.testing.assert_close(prediction.mean.cpu(), expected.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there.log_marginal_likelihood().cpu(), evidence, rtol=1e-8, atol=1e-8)
    joint = there.functional_posterior(data[0][0], joint=True).covariance
    torch.testing.assert_close(
        torch.einsum("bcbd->bcd", joint), there.functional_posterior(data[0][0]).covariance, rtol=1e-8, atol=1e-10
    )

    for device in ("cpu", DEVICE):  # a generator may live anywhere
        samples = there.sample(3, generator=torch.Generator(device).manual_seed(0))
        assert samples.device.type == DEVICE
        assert torch.equal(samples, there.sample(3, generator=torch.Generator(device).manual_seed(0)))

    there.save(tmp_path / "posterior")
    loaded = lp.load(tmp_path / "posterior", model)
    torch.testing.assert_close(loaded.predictive(data[0][0]).mean, prediction.mean, rtol=1e-12, atol=0)


def test_regression_noise_on_the_card():
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double().to(DEVICE)
    x = torch.randn(30, 2, dtype=torch.float64)
    posterior = lp.KFAC(model, lp.Gaussian(torch.tensor([0.5, 1.0]))).fit([(x, x.sin())])
    posterior.fit_prior_precision("marginal_likelihood")
    prediction = posterior.predictive(x, link="mc", generator=torch.Generator().manual_seed(0))
    assert prediction.variance.device.type == DEVICE
    assert (prediction.variance > prediction.epistemic).all()
