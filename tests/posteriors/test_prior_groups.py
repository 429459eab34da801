"""Priors with a precision for each group: predictions that no rescaling changes, storing, and error bars that hold."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError
from laplace_plus.network.linearization import jvp
from laplace_plus.priors import Groups

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(30, 1, 6, 6, dtype=torch.float64, generator=GENERATOR)
Y = (X.mean((1, 2, 3)) > 0).long() + (X[:, 0, 0, 0] > 1).long()
NEW = torch.randn(5, 1, 6, 6, dtype=torch.float64, generator=GENERATOR)
NORMS = {
    "batch": lambda c: nn.BatchNorm2d(c, eps=1e-13),
    "layer": lambda c: nn.LayerNorm([c, 4, 4] if c == 3 else [c, 2, 2], eps=1e-13),
    "group": lambda c: nn.GroupNorm(c // 2 or 1, c, eps=1e-13),
}


def network(norm):
    torch.manual_seed(1)
    net = nn.Sequential(
        *(nn.Conv2d(1, 3, 3), NORMS[norm](3), nn.Tanh(), nn.Conv2d(3, 4, 3), NORMS[norm](4), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(16, 3)),
    ).double()  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
    return net.eval()


def rescaled(net, factor):
    """The same function with the first convolution's weights multiplied; of batch norms, the statistics, too."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        net[0].weight *= factor
        net[0].bias *= factor
        if isinstance(net[1], nn.BatchNorm2d):
            net[1].running_mean *= factor
            net[1].running_var *= factor**2
    return net


@pytest.mark.slow
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Full])
@pytest.mark.parametrize("norm", NORMS)
def test_rescaling_a_normalised_group_changes_no_prediction(norm, cls):
    net = network(norm)
    other = rescaled(net, 3.0)
    assert torch.allclose(net(NEW), other(NEW), atol=1e-9)
    differences = {}
    for structure in ("normalized_groups", "scalar"):
        predictions = []
        for model in (net, other):
            posterior = cls(model, "classification").fit([(X[:20], Y[:20]), (X[20:], Y[20:])])
            options = {"evidence": "tangent", "predictive_mean": "tangent", "max_iterations": 300}
            if structure == "normalized_groups":
                options["tolerance"] = 1e-6
            predictions.append(posterior.fit_prior_precision(structure=structure, **options).predictive(NEW))
            if structure == "normalized_groups":
                assert posterior.prior_groups.names == ("0", "3", "7", "rest")
        first, second = predictions
        differences[structure] = (first.mean - second.mean).abs().max() + (first.variance - second.variance).abs().max()
    assert differences["normalized_groups"] < 1e-6
    assert differences["scalar"] > 1e-4


@pytest.mark.slow
def test_groups_go_with_every_method_of_tuning():
    net = network("layer")
    for cls, method in [(lp.KFAC, "marginal_likelihood"), (lp.Diagonal, "mackay"), (lp.Full, "em")]:
        posterior = cls(net, "classification").fit([(X, Y)])
        posterior.fit_prior_precision(method, "normalized_groups")
        assert posterior.prior_groups.names == ("0", "3", "7", "rest")
        assert posterior.prior_precision.shape == (4,)
        assert posterior.tuning.converged
        # The evidence is that of the precision of each entry, written out.
        each = posterior.prior_precision[posterior.prior_groups.index]
        if cls is not lp.KFAC:
            assert posterior.log_marginal_likelihood(each).item() == pytest.approx(posterior.tuning.value, abs=1e-8)
        assert torch.allclose(posterior.prior().vector(), each)
        posterior.fit_prior_precision(method, "layerwise")
        assert posterior.prior_groups.name == "layerwise"
        assert posterior.prior_precision.shape == (5,)


def test_groups_of_ones_own():
    net = network("batch")
    posterior = lp.Diagonal(net, "classification").fit([(X, Y)])
    halves = Groups("halves", ("first", "second"), (torch.arange(posterior.n_parameters) % 2).long())
    posterior.fit_prior_precision(structure=halves)
    assert posterior.prior_groups is halves
    assert posterior.prior_precision.shape == (2,)
    with pytest.raises(ConfigurationError, match="groups"):
        posterior.prior_precision = torch.ones(3)
    with pytest.raises(ConfigurationError, match="groups"):
        posterior.prior_groups = Groups("three", ("a", "b", "c"), (torch.arange(posterior.n_parameters) % 3).long())
    posterior.prior_precision = 2.0
    posterior.prior_groups = Groups("all", ("all",), torch.zeros(posterior.n_parameters, dtype=torch.long))
    with pytest.raises(ConfigurationError, match="another shape"):
        posterior.prior_groups = Groups("all", ("all",), torch.zeros(4, dtype=torch.long))


def test_groups_scaling_and_mean_are_stored(tmp_path):
    net = network("group")
    posterior = lp.Diagonal(net, "classification").fit([(X, Y)])
    posterior.fit_prior_precision(
        structure="normalized_groups", evidence="tangent", predictive_mean="tangent", tolerance=0.1
    )
    posterior.save(tmp_path / "groups")
    loaded = lp.load(tmp_path / "groups", net)
    assert loaded.prior_groups.names == posterior.prior_groups.names
    assert torch.equal(loaded.prior_groups.index, posterior.prior_groups.index)
    assert torch.equal(loaded.prior_precision, posterior.prior_precision)
    assert loaded.predictive_mean == "tangent"
    assert torch.equal(loaded.predictive(NEW).mean, posterior.predictive(NEW).mean)
    assert "normalized_groups" in str(loaded.summary())
    with pytest.raises(DataError, match="train_loader"):  # the data are not stored
        loaded.fit_prior_precision(evidence="tangent")
    loaded.fit_prior_precision(structure="normalized_groups")  # the groups are


def test_groups_are_saved(tmp_path):
    net = network("group")
    posterior = lp.KFAC(net, "classification").fit([(X, Y)]).fit_prior_precision(structure="normalized_groups")
    posterior.save(tmp_path / "groups")
    assert lp.load(tmp_path / "groups", net).prior_groups.names == posterior.prior_groups.names
    posterior.fit_prior_precision(structure="layerwise").save(tmp_path / "layers")
    assert lp.load(tmp_path / "layers", net).prior_groups.name == "layerwise"


def test_the_tangent_mean_in_every_prediction():
    net = network("layer")
    posterior = lp.KFAC(net, "classification").fit([(X, Y)])
    posterior.fit_prior_precision(evidence="tangent", predictive_mean="tangent", tolerance=0.1)
    shift = jvp(posterior.network, NEW, posterior.tuning.vector - posterior.mean)
    want = net(NEW).detach() + shift
    assert torch.allclose(posterior.functional_posterior(NEW).mean, want)
    assert torch.allclose(posterior.functional_posterior(NEW, outputs="diagonal").mean, want)
    assert torch.allclose(posterior.functional_posterior(NEW, outputs=[2, 0]).mean, want[:, [2, 0]])
    chosen = want.topk(2).indices
    assert torch.allclose(posterior.functional_posterior(NEW, outputs=chosen).mean, want.gather(-1, chosen))
    assert torch.allclose(posterior.functional_posterior(NEW, joint=True).mean, want)
    with pytest.raises(UnsupportedError, match="no gradients"):
        posterior.functional_posterior(NEW.clone().requires_grad_(), differentiable=True)


def toy(n, seed):
    """Noisy observations of a function, with a gap."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([torch.rand(n // 2, 1, generator=generator) - 2, torch.rand(n - n // 2, 1, generator=generator) + 1])
    return x, torch.sin(2 * x) + 0.3 * x + 0.1 * torch.randn(n, 1, generator=generator)


def batch_normalised(x, y, *, steps=150):
    """Two hidden layers of 49 units, 2 695 parameters, trained with batch normalisation and stopped."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(1, 49), nn.BatchNorm1d(49), nn.ReLU(), nn.Linear(49, 49), nn.BatchNorm1d(49), nn.ReLU()),
        nn.Linear(49, 1),
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net.eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tuned noise")  # of the network's own weights
def test_error_bars_of_a_batch_normalised_network():
    """The network's own weights ask for a precision under which error bars blow up; the tangent's optimum does not."""
    x, y = toy(60, 0)
    held_out, targets = toy(200, 1)
    net = batch_normalised(x, y).double()
    assert 2500 < sum(p.numel() for p in net.parameters()) < 2800
    residual = (net(x.double()) - y).square().mean().sqrt().item()
    assert residual < 0.11  # about the noise: the network itself is right
    nll, error_bar = {}, {}
    for evidence, structure in [("laplace", "scalar"), ("tangent", "scalar"), ("tangent", "normalized_groups")]:
        posterior = lp.KFAC(net, "regression").fit([(x.double(), y.double())])
        posterior.fit_prior_precision(structure=structure, evidence=evidence)
        prediction = posterior.predictive(held_out.double())
        nll[evidence, structure] = -prediction.log_prob(targets.double()).mean().item()
        error_bar[evidence, structure] = prediction.epistemic.sqrt().mean().item()
    assert error_bar["laplace", "scalar"] > 10 * residual
    assert error_bar["tangent", "scalar"] < error_bar["laplace", "scalar"] / 3
    assert error_bar["tangent", "normalized_groups"] < 1.5 * residual
    assert nll["tangent", "scalar"] < nll["laplace", "scalar"] - 1
    assert nll["tangent", "normalized_groups"] < nll["tangent", "scalar"] - 1
    assert nll["tangent", "normalized_groups"] < -0.7  # with the true noise and mean it is −0.88


def test_other_groups_are_another_posterior():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    x = torch.randn(15, 2, dtype=torch.float64)
    posterior = lp.Full(net, "classification", prior_precision=torch.tensor([0.1, 100.0])).fit(
        [(x, torch.arange(15) % 3)]
    )
    before = posterior.variance()
    posterior.prior_groups = lp.Groups("swapped", ("a", "b"), 1 - posterior.prior_groups.index)
    after = posterior.variance()
    torch.testing.assert_close(after, posterior.precision_matrix().inverse().diagonal(), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(before, after)
