"""Structures, blocks and layer rules of other packages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function

import laplace_plus as lp
from laplace_plus.curvature import Layout, LinearCall, Structure, register_block, register_rule
from laplace_plus.errors import CheckpointError, ConfigurationError, InputError
from laplace_plus.structured import DenseBlock


@dataclass(frozen=True)
class NeuronStructure(Structure):
    """A dense block for each neuron's weights and bias."""

    name: str = "neuron"

    def layouts(self, network, layers):
        return [Layout(f"{own.key} by neuron", own.names, own.rule, own.index.transpose(0, 1)) for own in layers]

    def create(self, layout, gradients, n_components, dtype, **options):
        n = layout.shape[1] * layout.shape[2]
        return NeuronBlock(torch.zeros(n_components, layout.shape[0], n, n, dtype=dtype), layout.shape)


@dataclass(frozen=True)
class PairStructure(Structure):
    """One dense block over the last two layers, and the other layers' own."""

    name: str = "pair"

    def layouts(self, network, layers):
        *others, first, second = layers
        index = torch.cat([first.index.flatten(), second.index.flatten()])[None, None]
        return [*others, Layout("pair", first.names + second.names, "general", index)]


class NeuronBlock(DenseBlock):
    storage = "dense by neuron"


register_block(NeuronBlock)


class Neuron(lp.GaussianPosterior):
    structure = NeuronStructure()


class Pair(lp.GaussianPosterior):
    structure = PairStructure()


lp.register("Neuron", Neuron)
lp.register("Pair", Pair)


def problem():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double(), torch.randn(9, 3).double(), torch.arange(9) % 2


def kept_entries(curvature, n):
    mask = torch.zeros(n, n, dtype=torch.bool)
    for layout in curvature.layouts:
        for own in layout.index.flatten(1):
            mask[own[:, None], own] = True
    return mask


@pytest.mark.parametrize("cls", [Neuron, Pair])
def test_structures_of_other_packages(cls, tmp_path):
    model, x, y = problem()
    posterior = cls(model, "classification").fit([(x[:5], y[:5])]).update([(x[5:], y[5:])])
    exact = lp.Full(model, "classification").fit([(x, y)]).precision_matrix()
    mask = kept_entries(posterior.laplace_model().curvature, len(exact))
    assert not mask.all()
    torch.testing.assert_close(posterior.precision_matrix(), exact * mask, rtol=1e-10, atol=1e-12)
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows_of(model, x)]).unflatten(0, (9, 2))
    expected = jacobian @ torch.linalg.inv(exact * mask) @ jacobian.mT
    torch.testing.assert_close(posterior.functional_posterior(x).covariance, expected, rtol=1e-8, atol=1e-10)
    assert posterior.sample(3).shape == (3, len(exact))
    evidence = posterior.log_marginal_likelihood()
    posterior.save(tmp_path / "saved")
    again = lp.load(tmp_path / "saved", model)
    torch.testing.assert_close(again.log_marginal_likelihood(), evidence)
    torch.testing.assert_close(again.functional_posterior(x).covariance, expected, rtol=1e-8, atol=1e-10)
    again.update([(x, y)])
    assert [type(block) for _, block in again.laplace_model().curvature] == [
        type(block) for _, block in posterior.laplace_model().curvature
    ]
    posterior.fit_prior_precision("marginal_likelihood")
    assert posterior.log_marginal_likelihood() >= evidence


def rows_of(model, x):
    for value in model(x).flatten():
        yield torch.autograd.grad(value, list(model.parameters()), retain_graph=True)


def test_a_block_of_an_unknown_kind_is_named(tmp_path, monkeypatch):
    model, x, y = problem()

    class Passing(NeuronBlock):
        storage = "never registered"

    posterior = Neuron(model, "classification").fit([(x, y)])
    for _, block in posterior.laplace_model().curvature:
        block.storage = Passing.storage
    posterior.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="never registered"):
        lp.load(tmp_path / "saved", model)


# -- rules -------------------------------------------------------------------------------------------------------------


def doubled_linear(x, weight, bias=None):
    if has_torch_function((x, weight)):
        return handle_torch_function(doubled_linear, (x, weight), x, weight, bias=bias)
    return torch.einsum("...i,oi->...o", 2 * x, weight) + (0 if bias is None else bias)


class Doubled(nn.Linear):
    def forward(self, x):
        return doubled_linear(x, self.weight, self.bias)


class Reference(nn.Linear):
    def forward(self, x):
        return F.linear(2 * x, self.weight, self.bias)


def test_a_rule_gives_a_function_of_ones_own_its_kronecker_factors():
    def rule(find, x, weight, bias=None):
        return LinearCall(find(weight), find(bias), 2 * x, example_axes=tuple(range(x.ndim - 1)))

    _, x, y = problem()
    torch.manual_seed(1)
    own = nn.Sequential(Doubled(3, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    plain = nn.Sequential(Reference(3, 30), nn.Tanh(), nn.Linear(30, 2)).double()
    plain.load_state_dict(own.state_dict())
    expected = lp.KFAC(plain, "classification").fit([(x, y)])
    without = lp.KFAC(own, "classification").fit([(x, y)])
    exact = lp.Diagonal(plain, "classification").fit([(x, y)]).variance()
    torch.testing.assert_close(lp.Diagonal(own, "classification").fit([(x, y)]).variance(), exact)
    assert not torch.allclose(without.precision_matrix(), expected.precision_matrix())
    register_rule(doubled_linear, rule)
    posterior = lp.KFAC(own, "classification").fit([(x, y)])
    torch.testing.assert_close(posterior.precision_matrix(), expected.precision_matrix())
    torch.testing.assert_close(posterior.predictive(x).mean, expected.predictive(x).mean)
    with pytest.raises(ConfigurationError, match="rule already"):
        register_rule(doubled_linear, lambda find, *args: None)


def halved_linear(x, weight):
    if has_torch_function((x, weight)):
        return handle_torch_function(halved_linear, (x, weight), x, weight)
    return x / 2 @ weight.T


class Halved(nn.Linear):
    def forward(self, x):
        return halved_linear(x, self.weight)


class Timeout(Exception):
    """What a signal's handler may raise."""


def test_an_error_in_a_rule_names_the_rule():
    results = iter([ZeroDivisionError("not by zero"), 3, "no call", Timeout("meanwhile")])

    def rule(find, x, weight):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    register_rule(halved_linear, rule)
    _, x, y = problem()
    posterior = lp.KFAC(nn.Sequential(Halved(3, 4, bias=False), nn.Linear(4, 2)).double(), "classification")
    for text in ("not by zero", "'int' object", "'str' object"):
        with pytest.raises(ConfigurationError, match=f"The rule of halved_linear failed: {text}"):
            posterior.fit([(x[:1], y[:1])])
    with pytest.raises(Timeout, match="meanwhile"):
        posterior.fit([(x[:1], y[:1])])
    with pytest.raises(InputError, match="failed on a batch"):  # the function itself fails: the batch is to blame
        lp.KFAC(nn.LayerNorm(3).double(), "regression").fit([(x[:, :2], x[:, :2])])
