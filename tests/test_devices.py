"""Networks on a graphics card: the same numbers, on the same device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=generator)
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers).double().eval(), list(zip(x.split(7), y.split(7), strict=True))


@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
def test_same_numbers_as_on_the_cpu(cls, parameters, tmp_path):
    model, data = problem()
    here = cls(model, "classification", parameters=parameters).fit(data).fit_prior_precision(structure="layerwise")
    expected = here.predictive(data[0][0])
    evidence = here.log_marginal_likelihood()

    model.cuda()
    there = cls(model, "classification", parameters=parameters).fit(data).fit_prior_precision(structure="layerwise")
    prediction = there.predictive(data[0][0])  # batches are moved to the network
    assert prediction.mean.is_cuda
    torch.testing.assert_close(prediction.mean.cpu(), expected.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(there.log_marginal_likelihood().cpu(), evidence, rtol=1e-8, atol=1e-8)
    joint = there.functional_posterior(data[0][0], joint=True).covariance
    torch.testing.assert_close(
        torch.einsum("bcbd->bcd", joint), there.functional_posterior(data[0][0]).covariance, rtol=1e-8, atol=1e-10
    )

    for device in ("cpu", "cuda"):  # a generator may live anywhere
        samples = there.sample(3, generator=torch.Generator(device).manual_seed(0))
        assert samples.is_cuda
        assert torch.equal(samples, there.sample(3, generator=torch.Generator(device).manual_seed(0)))

    there.save(tmp_path / "posterior")
    loaded = lp.load(tmp_path / "posterior", model)
    assert torch.equal(loaded.predictive(data[0][0]).mean, prediction.mean)


def test_regression_noise_on_the_card():
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double().cuda()
    x = torch.randn(30, 2, dtype=torch.float64)
    posterior = lp.KFAC(model, lp.Gaussian(torch.tensor([0.5, 1.0]))).fit([(x, x.sin())])
    posterior.fit_prior_precision("marginal_likelihood")
    prediction = posterior.predictive(x, link="mc", generator=torch.Generator().manual_seed(0))
    assert prediction.variance.is_cuda
    assert (prediction.variance > prediction.epistemic).all()
