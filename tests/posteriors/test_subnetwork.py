"""A posterior over a chosen part of the weights, against the posterior over all of them and closed forms."""

import copy

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    NonFiniteError,
    SelectionError,
    UnsupportedError,
)
from laplace_plus.posteriors.subnetwork import Selector
from laplace_plus.testing import GaussianConformance, assert_untouched, snapshot


class TestSubnetwork(GaussianConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.Subnetwork(model, likelihood, lp.LargestVariance(15), **options)


@pytest.mark.slow
class TestSubnetworkKFAC(GaussianConformance):
    def make(self, model, likelihood, **options):
        return lp.Subnetwork(model, likelihood, lp.LargestMagnitude(0.4), lp.KFAC, **options)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    y = torch.randint(0, 3, (40,))
    return net, [(x[:25], y[:25]), (x[25:], y[25:])]


def test_everything_chosen_is_the_full_posterior(problem):
    net, data = problem
    full = lp.Full(net, "classification").fit(data)
    whole = lp.Subnetwork(net, "classification", lp.LargestVariance(1.0)).fit(data)
    torch.testing.assert_close(whole.precision_matrix(), full.precision_matrix(), rtol=1e-12, atol=1e-12)
    assert whole.squared_wasserstein() == 0


def test_the_last_layer_chosen_is_the_last_layer_posterior(problem):
    net, data = problem
    last = lp.Full(net, "classification", parameters="last_layer").fit(data)
    by_name = lp.Subnetwork(net, "classification", "2").fit(data)
    among = lp.Subnetwork(net, "classification", lp.LargestMagnitude(1.0), parameters="last_layer").fit(data)
    for other in (by_name, among):
        assert other.parameter_names == last.parameter_names
        torch.testing.assert_close(other.precision_matrix(), last.precision_matrix(), rtol=1e-12, atol=1e-12)


def test_precision_is_that_part_of_the_whole_one(problem):
    net, data = problem
    whole = lp.Full(net, "classification", prior_precision=2.0).fit(data)
    part = lp.Subnetwork(net, "classification", lp.Random(12, seed=3), prior_precision=2.0).fit(data)
    index = torch.cat([item.mask for item in part.network.selected]).nonzero().squeeze(-1)
    assert len(index) == 12
    expected = whole.precision_matrix()[index[:, None], index]
    torch.testing.assert_close(part.precision_matrix(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.mean, whole.mean[index])


def test_largest_variance_leaves_the_least_variance_out(problem):
    net, data = problem
    variances = lp.Diagonal(net, "classification", prior_precision=0.5).fit(data).variance()
    posterior = lp.Subnetwork(net, "classification", lp.LargestVariance(20), prior_precision=0.5).fit(data)
    order = variances.sort().values
    torch.testing.assert_close(posterior.squared_wasserstein(), order[:-20].sum(), rtol=1e-12, atol=1e-12)
    for seed in range(3):
        other = lp.Subnetwork(net, "classification", lp.Random(20, seed=seed), prior_precision=0.5).fit(data)
        assert other.squared_wasserstein(variances) > posterior.squared_wasserstein()


def test_largest_magnitude(problem):
    net, data = problem
    posterior = lp.Subnetwork(net, "classification", lp.LargestMagnitude(7)).fit(data)
    everything = torch.cat([p.detach().flatten() for p in net.parameters()]).abs().sort().values
    torch.testing.assert_close(posterior.mean.abs().sort().values, everything[-7:], rtol=0, atol=0)


def test_the_other_weights_stay_where_they_are(problem):
    net, data = problem
    posterior = lp.Subnetwork(net, "classification", lp.LargestVariance(9)).fit(data)
    parameters = dict(net.named_parameters())
    n_changed = 0
    for name, value in posterior.network.substitute(posterior.sample(1, generator=generator(1))[0]).items():
        n_changed += int((value != parameters[name]).sum())
    assert n_changed == 9


def test_swag_variances_are_those_of_plain_sgd(problem):
    net, data = problem
    swag = lp.DiagonalSWAG(learning_rate=0.1, n_snapshots=6, momentum=0.5, weight_decay=0.01)
    before = snapshot(net)
    posterior = lp.Subnetwork(net, "classification", lp.LargestVariance(10, swag)).fit(data)
    assert_untouched(net, before)
    moving = copy.deepcopy(net)
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    snapshots = []
    for _ in range(6):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(moving(x), y).backward()
            optimizer.step()
        snapshots.append(torch.cat([p.detach().flatten() for p in moving.parameters()]))
    variances = torch.stack(snapshots).var(0, correction=0)
    left_out = variances.sort().values[:-10].sum()
    torch.testing.assert_close(posterior.squared_wasserstein(), left_out, rtol=1e-8, atol=1e-14)


def test_swag_trains_the_selected_entries_alone(problem):
    net, data = problem
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[2, 1] = mask[5, 0] = True
    swag = lp.DiagonalSWAG(learning_rate=0.5, n_snapshots=5, momentum=0.5, weight_decay=0.1)
    selector = lp.LargestVariance(1, swag)
    posterior = lp.Subnetwork(net, "classification", selector, parameters={"0.weight": mask}).fit(data)
    weight = net[0].weight.detach()
    entries = weight[mask].clone().requires_grad_()
    optimizer = torch.optim.SGD([entries], lr=0.5, momentum=0.5, weight_decay=0.1)
    snapshots = []
    for _ in range(5):
        for x, y in data:
            optimizer.zero_grad()
            hidden = torch.tanh(nn.functional.linear(x, weight.masked_scatter(mask, entries), net[0].bias.detach()))
            outputs = nn.functional.linear(hidden, net[2].weight.detach(), net[2].bias.detach())
            nn.functional.cross_entropy(outputs, y).backward()
            optimizer.step()
        snapshots.append(entries.detach().clone())
    variances = torch.stack(snapshots).var(0, correction=0)
    torch.testing.assert_close(posterior.squared_wasserstein(), variances.min(), rtol=1e-8, atol=1e-14)


def test_updating_keeps_the_choice(problem):
    net, data = problem
    posterior = lp.Subnetwork(net, "classification", lp.LargestVariance(10)).fit(data[:1])
    names, masks = posterior.parameter_names, [item.mask for item in posterior.network.selected]
    posterior.update(iter(data[1:]))
    assert posterior.parameter_names == names
    assert all(torch.equal(a, item.mask) for a, item in zip(masks, posterior.network.selected, strict=True))
    whole = lp.Full(net, "classification").fit(data).precision_matrix()
    flat = torch.cat(
        [
            torch.zeros(p.numel(), dtype=torch.bool)
            if name not in names
            else next(s.mask for s in posterior.network.selected if s.name == name)
            for name, p in net.named_parameters()
        ]
    ).nonzero()[:, 0]
    torch.testing.assert_close(posterior.precision_matrix(), whole[flat[:, None], flat], rtol=1e-12, atol=1e-12)


def test_a_second_fit_chooses_anew_among_all_candidates(problem):
    net, data = problem
    posterior = lp.Subnetwork(net, "classification", lp.Random(10)).fit(data, generator=generator(0))
    first = posterior.mean.clone()
    assert not torch.equal(posterior.fit(data, generator=generator(1)).mean, first)
    assert torch.equal(posterior.fit(data, generator=generator(0)).mean, first)


def test_a_selector_of_ones_own(problem):
    net, data = problem

    class EveryOther(Selector):
        def choose(self, candidates, data, **options):
            return torch.arange(candidates.n_parameters) % 2 == 0, None

    posterior = lp.Subnetwork(net, "classification", EveryOther(), lp.Diagonal).fit(data)
    total = sum(p.numel() for p in net.parameters())
    assert posterior.n_parameters == (total + 1) // 2


def test_tuned_layer_by_layer_and_loaded(problem, tmp_path):
    net, data = problem
    posterior = lp.Subnetwork(net, "classification", lp.LargestVariance(20)).fit(data)
    posterior.fit_prior_precision(structure="layerwise")
    posterior.save(tmp_path / "posterior")
    loaded = lp.load(tmp_path / "posterior", net)
    assert loaded.selector == posterior.selector
    assert torch.equal(loaded.prior_precision, posterior.prior_precision)
    assert torch.equal(loaded.variance(), posterior.variance())
    with pytest.raises(UnsupportedError, match="variances"):
        loaded.squared_wasserstein()


def test_a_second_fit_asks_for_a_prior_of_one_number(problem):
    net, data = problem
    posterior = lp.Subnetwork(net, "classification", lp.LargestVariance(40)).fit(data)
    before, posterior.prior_precision = posterior.mean, torch.tensor([2.0, 3.0], dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="one number"):
        posterior.fit(data)
    assert torch.equal(posterior.mean, before) and posterior.prior_precision.tolist() == [2.0, 3.0]
    posterior.selector, posterior.prior_precision = lp.LargestVariance(20), 2.0
    assert posterior.fit(data).n_parameters == 20


def test_selectors_as_configurations_have_them(problem):
    net, data = problem
    swag = {"name": "LargestVariance", "size": 5, "variances": {"n_snapshots": 3}}
    for given, expected in (
        ({"name": "Random", "size": 5, "seed": 0}, lp.Random(5, seed=0)),
        (swag, lp.LargestVariance(5, lp.DiagonalSWAG(n_snapshots=3))),
    ):
        posterior = lp.Subnetwork(net, "classification", given).fit(data)
        assert posterior.selector == expected and posterior.n_parameters == 5


BAD = {
    "class": (ConfigurationError, "Gaussian posterior", lp.Random(3), {"posterior": lp.Posterior}),
    "structure": (ConfigurationError, "Gaussian posterior", lp.Random(3), {"posterior": lp.LowRank}),
    "selector": (ConfigurationError, "Unknown selector", {"name": "Largest", "size": 3}, {}),
    "prior": (ConfigurationError, "one number", lp.Random(3), {"prior_precision": torch.ones(2)}),
    "too many": (ConfigurationError, "among its candidates", lp.Random(10_000), {}),
    "none": (SelectionError, "no parameters", "0", {"parameters": "2.*"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_are_named(problem, case):
    net, data = problem
    error, said, selector, options = BAD[case]
    with pytest.raises(error, match=said):
        lp.Subnetwork(net, "classification", selector, **options).fit(data)


def test_bad_sizes_data_and_weights(problem):
    net, data = problem
    for size in (0, -1, 1.5, True, "10"):
        with pytest.raises(ConfigurationError):
            lp.LargestMagnitude(size)
    for wrong in ({"n_snapshots": 1}, {"learning_rate": 0.0}):
        with pytest.raises(ConfigurationError, match="out of range"):
            lp.DiagonalSWAG(**wrong)
    with pytest.raises(DataError, match="before the fit"):
        lp.Subnetwork(net, "classification", lp.LargestVariance(3)).fit(iter(data))
    with torch.no_grad():
        net[0].weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        lp.Subnetwork(net, "classification", lp.LargestMagnitude(3)).fit(data)
