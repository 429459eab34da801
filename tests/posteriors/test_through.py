"""Other outputs of the same weights, against the posterior's own and against dense products ``J Σ Jᵀ``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, ModelChangedError, SelectionError
from laplace_plus.testing import assert_untouched, snapshot

CLASSES = {
    "Full": {},
    "KFAC": {},
    "Diagonal": {},
    "LowRank": {"rank": 10},
    "SampledLaplace": {},
    "Subnetwork": {"selector": lp.Random(10)},
    "NullSpace": {},
    "VIKING": {},
    "Riemannian": {"n_samples": 3, "method": lp.Diffusion(n_steps=1)},
    "MetricBNN": {"n_particles": 3, "n_steps": 5, "latent": {"hidden": (8,), "epochs": 5, "tolerance": 10.0}},
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double().train()


def data(n=10):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, x[:, :2].sin()


def seeded():
    return torch.Generator().manual_seed(2)


@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")
@pytest.mark.parametrize("name", CLASSES)
def test_the_model_itself_gives_the_posteriors_own_predictions(model, name):
    x, y = data()
    posterior = getattr(lp, name)(model, "regression", **CLASSES[name]).fit([(x, y)], generator=seeded())
    before = snapshot(model)
    options = {"generator": seeded()} if name in ("Riemannian", "MetricBNN") else {}
    own = posterior.functional_posterior(x, **options)
    options = {"generator": seeded()} if options else {}
    found = lp.through(posterior, lambda x: model(x)).functional_posterior(x, **options)
    assert torch.equal(own.mean, found.mean)
    assert_close(own.covariance, found.covariance, rtol=1e-12, atol=1e-14)
    view = lp.through(posterior, model, posterior.likelihood)
    ours, theirs = (one.predictive(x, generator=seeded()) for one in (posterior, view))
    assert torch.equal(ours.mean, theirs.mean)
    assert_close(ours.variance, theirs.variance, rtol=1e-12, atol=1e-14)
    assert torch.equal(view.sample(2, generator=seeded()), posterior.sample(2, generator=seeded()))
    assert lp.through(posterior, model[:3]).functional_posterior(x).covariance.shape == (10, 4, 4)
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["Full", "KFAC", "Diagonal", "LowRank"])
def test_a_module_within_has_the_covariance_of_its_jacobian(model, name):
    x, y = data()
    posterior = getattr(lp, name)(model, "regression", **CLASSES[name]).fit([(x, y)]).fit_prior_precision()
    network, part = posterior.network, model[:3]

    def features(vector):
        own = {name: value for name, value in network.substitute(vector).items() if name[0] in "02"}
        return torch.func.functional_call(part, own, x)

    jacobian = torch.func.jacrev(features)(network.vector())
    expected = torch.einsum("ncp,pq,mdq->ncmd", jacobian, posterior.covariance_matrix(), jacobian)
    view = lp.through(posterior, part)
    assert_close(view.functional_posterior(x, joint=True).covariance, expected, rtol=1e-8, atol=1e-10)
    variances = view.functional_posterior(x, outputs="diagonal").covariance
    assert_close(variances, torch.einsum("ncnc->nc", expected), rtol=1e-8, atol=1e-10)
    posterior.prior_precision = 50.0  # a view knows the hyperparameters of the present
    expected = torch.einsum("ncp,pq,ndq->ncd", jacobian, posterior.covariance_matrix(), jacobian)
    assert_close(view.functional_posterior(x).covariance, expected, rtol=1e-8, atol=1e-10)


def test_another_likelihood_of_a_difference_of_outputs(model):
    """Of two classes, the sigmoid of the difference of logits is the softmax."""
    x, _ = data()
    posterior = lp.KFAC(model, "classification").fit([(x, torch.arange(10) % 2)])
    margin = lp.through(posterior, lambda x: model(x)[:, 1:] - model(x)[:, :1], "binary")
    assert_close(margin.predictive(x).mean[:, 0], posterior.predictive(x).mean[:, 1], rtol=0, atol=1e-3)
    posterior.link = "network"  # as the default tuning sets it where no posterior gains
    assert torch.equal(lp.through(posterior, model, "classification").predictive(x).mean, posterior.predictive(x).mean)
    assert_close(margin.predictive(x).mean[:, 0], posterior.predictive(x).mean[:, 1], rtol=0, atol=1e-12)
    sampled = [one.predictive(x, method="sampled", generator=seeded(), n_samples=7).mean for one in (margin, posterior)]
    assert_close(sampled[0][:, 0], sampled[1][:, 1], rtol=0, atol=1e-12)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mixing, self.head = nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True), nn.Linear(6, 9)

    def forward(self, ids):
        return self.head(self.mixing(self.embedding(ids))[0])


def test_choices_at_the_last_token():
    torch.manual_seed(0)
    model, ids = Language().double(), torch.randint(0, 9, (5, 4), generator=seeded())
    posterior = lp.Full(model, "classification", parameters="head.*").fit([(ids, ids.roll(1, 1))])
    choices = torch.tensor([7, 2, 3])
    answer = lp.through(posterior, lambda ids: model(ids)[:, -1, choices], "classification")
    whole = posterior.functional_posterior(ids)
    found = answer.functional_posterior(ids)
    assert_close(found.mean, whole.mean[:, -1, choices])
    assert_close(found.covariance, whole.covariance[:, -1][:, choices][..., choices], rtol=1e-10, atol=1e-12)
    assert_close(answer.predictive(ids).mean.sum(-1), torch.ones(5).double())


def test_what_cannot_be_looked_through_is_named(model):
    x, y = data()
    other = nn.Linear(3, 2).double()
    posterior = lp.KFAC(model, "regression").fit([(x, y)])
    with pytest.raises(SelectionError, match="do not depend on the posterior's weights"):
        lp.through(posterior, lambda x: other(x)).functional_posterior(x)
    with pytest.raises(ConfigurationError, match="needs a likelihood"):
        lp.through(posterior, model).predictive(x)
    view = lp.through(posterior, model, "regression")
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(ModelChangedError):
        view.predictive(x)
    with torch.no_grad():
        model[0].weight -= 1
