"""What is stored is what was fitted, in the form that it was in."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.curvature import register_backend
from laplace_plus.errors import CheckpointError, ConfigurationError, NonFiniteError

KINDS = {
    "KFAC": (lp.KFAC, {}),
    "EKFAC": (lp.KFAC, {"eigenvalue_corrected": True}),
    "Full": (lp.Full, {}),
    "Diagonal": (lp.Diagonal, {}),
    "head": (lp.Full, {"parameters": "last_layer"}),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 3)).double()


def data(n: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, dtype=torch.float64, generator=generator)
    return [(x, torch.randint(3, (n,), generator=generator))]


def assert_same(one: lp.GaussianPosterior, other: lp.GaussianPosterior) -> None:
    torch.testing.assert_close(one.precision_matrix(), other.precision_matrix(), rtol=0, atol=1e-12)
    x = data(5, seed=9)[0][0]
    ours, theirs = one.functional_posterior(x), other.functional_posterior(x)
    torch.testing.assert_close(ours.covariance, theirs.covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(one.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-10, atol=1e-10)


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 60])
def test_a_stored_posterior_is_the_same_one(kind: str, n: int, tmp_path: Path) -> None:
    cls, options = KINDS[kind]
    net = network()
    posterior = cls(net, "classification", **options).fit(data(n))
    untouched = copy.deepcopy(posterior)
    posterior.save(tmp_path / "first")
    loaded = lp.load(tmp_path / "first", net)
    assert_same(loaded, posterior)
    for each in (posterior, loaded, untouched):
        each.update(data(60 if n == 2 else 2, seed=5))
    assert_same(posterior, untouched)
    assert_same(loaded, untouched)
    posterior.save(tmp_path / "second")
    assert_same(lp.load(tmp_path / "second", net), untouched)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [4, 60])
def test_a_loaded_posterior_predicts_the_same_bits(kind: str, n: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint holds matrices row by row; products of matrices that lie otherwise in memory are rounded otherwise.

    With four examples the first factors are thin.
    """
    cls, options = KINDS[kind]
    net, ((x, y),) = network().to(dtype), data(n)
    posterior = cls(net, "classification", **options).fit([(x.to(dtype), y)])
    posterior.save(tmp_path / "it")
    loaded, at = lp.load(tmp_path / "it", net), data(7, seed=9)[0][0].to(dtype)
    results = []
    for each in (posterior, loaded):
        made = each.predictive(at, generator=torch.Generator().manual_seed(1))
        draws = each.sample(3, generator=torch.Generator().manual_seed(2))
        results.append((made.mean, made.variance, draws, *each.functional_posterior(at)))
    assert all(map(torch.equal, *results))


class Scaled(lp.Native):
    """Another backend under the built-in one's name."""


class Named(lp.Native):
    name = "named like nothing else"


def test_a_backend_that_would_not_be_loaded_as_what_it_is_is_not_saved(tmp_path: Path) -> None:
    net = network()
    posterior = lp.KFAC(net, "classification", backend=Scaled()).fit(data(5))
    with pytest.raises(ConfigurationError, match="Scaled"):
        posterior.save(tmp_path / "it")
    posterior = lp.KFAC(net, "classification", backend=Named()).fit(data(5))
    with pytest.raises(ConfigurationError, match="register_backend"):
        posterior.save(tmp_path / "it")
    assert not (tmp_path / "it").exists()
    register_backend(Named.name, Named)
    posterior.save(tmp_path / "it")
    loaded = lp.load(tmp_path / "it", net)
    assert type(loaded.backend) is Named
    assert_same(loaded, posterior)


@pytest.mark.quick("nan")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_malformed_input_teaches_nothing_about_the_network(value: float, tmp_path: Path) -> None:
    """The first inputs of all show which axes run over examples, where the fit needs not know."""
    net, ((x, y),) = network(), data(12)
    posterior = lp.LowRank(net, "classification", rank=5).fit([(x, y)])
    want = copy.deepcopy(posterior).functional_posterior(x)
    odd = x.clone()
    odd[0, 1] = value
    with pytest.raises(NonFiniteError):
        posterior.functional_posterior(odd)
    posterior.save(tmp_path / "it")
    for each in (posterior, lp.load(tmp_path / "it", net)):
        torch.testing.assert_close(each.functional_posterior(x), want, rtol=1e-10, atol=1e-12)


def own_density(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -(outputs - targets).square().sum(-1)


def test_something_else_is_no_state_of_a_posterior() -> None:
    model = network()
    with pytest.raises(CheckpointError, match="no state of a posterior"):
        lp.load_state_dict(model.state_dict(), model)


def test_a_likelihood_is_given_where_it_is_not_stored(tmp_path: Path) -> None:
    net, ((x, _),) = network(), data(5)
    targets = torch.ones(5, 3, dtype=torch.float64)
    for fitted, given in ((lp.Gaussian(torch.ones(3)), lp.Gaussian(torch.ones(3))), (own_density, None)):
        posterior = lp.Full(net, fitted).fit([(x, targets)])
        posterior.save(tmp_path / "it")
        with pytest.raises(CheckpointError, match="stored"):
            lp.load(tmp_path / "it", net, likelihood=given)
        assert_same(lp.load(tmp_path / "it", net, likelihood=None if given else fitted), posterior)
