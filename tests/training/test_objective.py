"""Training and Laplace look at one function: the same likelihood, temperature and prior, in the same proportion."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training.problems import classes, classifier

import laplace_plus as lp
from laplace_plus.applications.training.marginal_likelihood import TrainingObjective
from laplace_plus.network.batches import Batch


def regression(n=50, outputs=3):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x = torch.randn(n, 4, dtype=torch.float64)
    return net, x, torch.randn(n, outputs, dtype=torch.float64)


def classification(n=50):
    x, y = classes(n)
    return classifier().double(), x.double(), y


CASES = {
    "classification": (classification, lp.Categorical(), 1.0, 0.7),
    "tempered": (classification, lp.Categorical(), 0.25, 3.0),
    "hot": (classification, lp.Categorical(), 5.0, 3.0),
    "layer-wise": (classification, lp.Categorical(), 0.5, torch.tensor([0.3, 20.0], dtype=torch.float64)),
    "three outputs": (regression, lp.Gaussian(0.2), 1.0, 2.0),
    "three outputs, tempered": (regression, lp.Gaussian(0.2), 0.1, 2.0),
    "a noise for each": (regression, lp.Gaussian(torch.tensor([0.1, 0.5, 2.0])), 1.5, torch.tensor([1.0, 9.0])),
}


def objective_of(posterior, net, mean_batch_size, n_data):
    return TrainingObjective(net, posterior, n_data=n_data, mean_batch_size=mean_batch_size)


@pytest.mark.diagonal
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prior_mean", [0.0, 0.3])
def test_the_mean_over_batches_is_the_log_posterior_that_laplace_expands(case, prior_mean):
    make, likelihood, temperature, precision = CASES[case]
    net, x, y = make()
    batches = [Batch(*pair) for pair in zip(x.split(16), y.split(16), strict=True)]  # the last one has two examples
    options = {"prior_precision": precision, "prior_mean": prior_mean, "temperature": temperature}
    posterior = lp.Full(net, likelihood, **options).fit([(b.inputs, b.target) for b in batches])
    objective = objective_of(posterior, net, mean_batch_size=len(x) / len(batches), n_data=len(x))

    mean = sum(objective(batch) for batch in batches) / len(batches)
    model = posterior.laplace_model()
    prior = posterior.prior()
    quadratic = (prior.vector() * prior.deviation(posterior.mean).square()).sum()
    log_posterior = model.log_likelihood() / temperature - quadratic / 2  # the evidence but for its determinants
    assert -len(x) * mean.item() == pytest.approx(log_posterior.item(), rel=1e-10)

    # Determinants apart, this is the evidence itself.
    determinant = torch.linalg.slogdet(posterior.precision_matrix())[1]
    evidence = log_posterior - (determinant - prior.vector().log().sum()) / 2
    assert posterior.log_marginal_likelihood().item() == pytest.approx(evidence.item(), rel=1e-8)

    # And its gradient is that of the log posterior written out by hand.
    mean.backward()
    got = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    outputs = net(x)
    if isinstance(likelihood, lp.Categorical):
        log_likelihood = -nn.functional.cross_entropy(outputs, y, reduction="sum")
    else:
        log_likelihood = -(0.5 * (outputs - y).square() / likelihood.noise_std**2).sum()
    flat = torch.cat([parameter.flatten() for parameter in net.parameters()])
    by_hand = log_likelihood / temperature - 0.5 * (prior.vector() * (flat - prior_mean).square()).sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(by_hand, list(net.parameters()))])
    torch.testing.assert_close(-len(x) * got, expected, rtol=1e-9, atol=1e-9)


def test_ignored_rows_do_not_count():
    net, x, y = classification(12)
    ignored = y.clone()
    ignored[8:] = -100
    posterior = lp.Diagonal(net, "classification").fit([(x, y)])
    objective = objective_of(posterior, net, mean_batch_size=12.0, n_data=12)
    penalty = objective.penalty() / 12
    expected = nn.functional.cross_entropy(net(x[:8]), y[:8], reduction="sum") / 12
    assert (objective(Batch(x, ignored)) - penalty).item() == pytest.approx(expected.item(), rel=1e-12)


def test_the_penalty_covers_the_selected_entries_alone():
    net, x, y = classification(12)
    mask = torch.zeros(8, 4, dtype=torch.bool)
    mask[1, 2] = True
    posterior = lp.Diagonal(net, "classification", parameters={"0.weight": mask}, prior_precision=4.0).fit([(x, y)])
    objective_of(posterior, net, mean_batch_size=1.0, n_data=1).penalty().backward()
    expected = torch.zeros(8, 4, dtype=torch.float64)
    expected[1, 2] = 4.0 * net[0].weight[1, 2].detach()
    torch.testing.assert_close(net[0].weight.grad, expected)
    assert net[2].weight.grad is None


def test_one_precision_for_each_entry():
    net, x, y = classification(12)
    precision = torch.rand(67, dtype=torch.float64) + 0.1
    posterior = lp.Diagonal(net, "classification", prior_precision=precision).fit([(x, y)])
    expected = 0.5 * (precision * posterior.mean.square()).sum()
    penalty = objective_of(posterior, net, mean_batch_size=1.0, n_data=1).penalty()
    assert penalty.item() == pytest.approx(expected.item(), rel=1e-12)
