"""Short calls: they give what the long ones give, or say what to write."""

from __future__ import annotations

import inspect
import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, EmptyDataError, UnsupportedError


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def problem(rows=20):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, generator=generator).double()
    y = torch.randint(0, 3, (rows,), generator=generator)
    return x, y, list(zip(x.split(7), y.split(7), strict=True))


class Named(nn.Module):
    """Takes its inputs by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, left, right):
        return self.layer(left.float() - right.float())


def test_a_posterior_is_called_as_a_network_is():
    x, y, data = problem()
    posterior = lp.KFAC(network(), "classification").fit(data)
    assert torch.equal(posterior(x).mean, posterior.predictive(x).mean)
    assert torch.equal(posterior.predict_proba(x), posterior(x).mean)
    binary = lp.KFAC(network(1), "binary").fit([(x, y.clamp(max=1))])
    p = binary(x).mean[:, 0]
    assert_close(binary.predict_proba(x), torch.stack([1 - p, p], 1))
    with pytest.raises(UnsupportedError, match="no classes"):
        lp.KFAC(network(1), "regression").fit([(x, x[:, :1])]).predict_proba(x)


def test_mappings_come_as_keywords():
    x, y, _ = problem()
    posterior = lp.Full(Named(), "classification").fit([{"left": x, "right": -x, "labels": y}])
    wanted = posterior.predictive({"left": x, "right": -x})
    for found in (
        posterior.predictive(left=x, right=-x),
        posterior(left=x, right=-x, labels=y),
        posterior.predict([{"left": x, "right": -x}]),
    ):
        assert_close(found.mean, wanted.mean)
    with pytest.raises(ConfigurationError, match="no option 'lnik'.*'link'"):
        posterior.predictive(x, lnik="probit")


@pytest.mark.parametrize("options", [{}, {"link": "mc"}, {"link": "probit"}, {"method": "sampled", "n_samples": 6}])
def test_a_loader_gives_one_prediction(options):
    x, y, data = problem()
    posterior = lp.KFAC(network(), "classification").fit(data)
    for batches in (data, x.split(7), [[part] for part in x.split(7)]):
        found = posterior.predict(batches, generator=torch.Generator().manual_seed(3), **options)
        assert found.mean.shape == (20, 3)
        assert found.log_prob(y).shape == found.entropy().shape == (20,)
        if "link" not in options or options["link"] == "probit":
            # sampled networks are the same in all batches, so that they are those of one batch
            source = torch.Generator().manual_seed(3)
            again = torch.Generator().manual_seed(lp.likelihoods.sampling.draw_seed(source))
            whole = posterior.predictive(x, generator=again, **options)
            assert_close(found.mean, whole.mean)
            assert_close(found.functional_mean, whole.functional_mean)
    exact = posterior.predict(data)
    assert_close(exact.functional_covariance, posterior(x).functional_covariance)


def test_estimated_variances_keep_their_standard_errors(monkeypatch):
    x = torch.randn(9, 3).double()
    posterior = lp.KFAC(network(70), "classification").fit([(x, torch.randint(0, 70, (9,)))])
    monkeypatch.setattr(lp.posteriors.predicting, "is_sampled", lambda *_, **__: True)
    monkeypatch.setattr(lp.posteriors.predicting, "n_samples_for", lambda n: 5)
    found = posterior.predict(x.split(4), generator=torch.Generator().manual_seed(0))
    assert found.standard_error.shape == (9, 70)
    assert (found.standard_error > 0).all()


def test_loaders_that_make_no_prediction_are_refused():
    x, _, data = problem()
    posterior = lp.KFAC(network(), "classification").fit(data)
    with pytest.raises(DataError, match="posterior\\(x\\)"):
        posterior.predict(x)
    with pytest.raises(DataError, match="joint=True"):
        posterior.predict(data, joint=True)
    with pytest.raises(EmptyDataError):
        posterior.predict([])
    tokens = lp.KFAC(nn.Linear(3, 2), "classification").fit([(torch.randn(2, 4, 3), torch.zeros(2, 4).long())])
    with pytest.raises(DataError, match="shapes"):
        tokens.predict([torch.randn(2, 4, 3), torch.randn(2, 5, 3)])


@pytest.mark.quick("KFAC", "Full", "Diagonal", "NullSpace")
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal, lp.LowRank, lp.NullSpace])
def test_a_state_goes_through_torch_save(cls):
    x, _, data = problem()
    model = network()
    options = {"rows": "loss"} if cls is lp.NullSpace else {}
    posterior = cls(model, "classification", prior_precision=3.0, **options).fit(data)
    if cls is lp.KFAC:
        posterior.fit_prior_precision("marginal_likelihood", structure="layerwise")
    file = io.BytesIO()
    torch.save(lp.state_dict(posterior), file)
    file.seek(0)
    other = lp.load_state_dict(torch.load(file, weights_only=True), model)
    source = torch.Generator().manual_seed
    assert torch.equal(other(x, generator=source(0)).mean, posterior(x, generator=source(0)).mean)
    assert torch.equal(other.prior_precision, posterior.prior_precision)
    assert other.n_data == 20


def test_a_posterior_stays_with_its_model():
    _, _, data = problem()
    posterior = lp.KFAC(network(), "classification").fit(data)
    assert posterior.to("cpu") is posterior.to(torch.float64) is posterior.to("cpu", torch.float64) is posterior
    with pytest.raises(ConfigurationError, match=r"model\.to\(torch\.float32\), and fit again"):
        posterior.to(torch.float32)
    with pytest.raises(ConfigurationError, match=r'model\.to\("meta"\) first'):
        posterior.to("meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_posterior_follows_its_model():
    x, _, data = problem()
    model = network()
    posterior = lp.KFAC(model, "classification").fit(data).fit_prior_precision("marginal_likelihood")
    wanted, tuning = posterior(x).mean, posterior.tuning
    model.to("cuda")
    assert posterior.to("cuda")(x).mean.is_cuda
    assert_close(posterior(x).mean.cpu(), wanted)
    assert posterior.tuning is tuning


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p, x: lp.KFAC(p.network.model, "classification", subset_of_weights="all"), "parameters="),
        (lambda p, x: lp.Full(p.network.model, "classification", hessian_structure="full"), r"lp\.KFAC"),
        (lambda p, x: lp.KFAC(p.network.model, "classification", weight_share="reduce"), "'weight_sharing'"),
        (lambda p, x: p.predictive(x, pred_type="glm"), "linearized"),
        (lambda p, x: p(x, link_approx="probit"), 'link="probit"'),
        (lambda p, x: p.fit_prior_precision("marglik"), "marginal_likelihood"),
        (lambda p, x: p.fit_prior_precision(method="gridsearch"), r'"validation", data='),
        (lambda p, x: p.fit_prior_precision("CV"), r'"validation", data='),
        (lambda p, x: p.fit_prior_precision(val_loader=[]), "data=held_out"),
    ],
)
def test_words_of_laplace_torch_are_understood(call, words):
    x, _, data = problem()
    posterior = lp.KFAC(network(), "classification").fit(data)
    with pytest.raises(ConfigurationError, match=words):
        call(posterior, x)


def test_there_is_no_laplace():
    with pytest.raises(AttributeError, match=r"lp\.KFAC"):
        _ = lp.Laplace
    assert "weight_sharing" in inspect.signature(lp.KFAC).parameters  # editors show options
