"""Networks whose weights reach the outputs by ways that a backward pass to the outputs of calls does not see."""

from __future__ import annotations

import warnings

import pytest
import torch
from problems import batch_jacobian, relative_error
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import laplace_plus as lp
from laplace_plus.errors import UnsupportedError

EXACT = 1e-11  # float64, small networks
CLASSES = [lp.Full, lp.Diagonal, lp.KFAC, lp.LowRank]


def perceptron(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def reals(n=8, outputs=3):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, generator=generator, dtype=torch.float64),
        torch.randn(n, outputs, generator=generator, dtype=torch.float64),
    )


def assert_exact(model, posterior_class, x, y):
    """Diagonal of the curvature, and the functional variance that follows from the posterior's own covariance."""
    posterior = posterior_class(model, "regression").fit([(x, y)])
    rows = batch_jacobian(model, model(x))
    expected = rows.square().sum((0, 1))
    assert relative_error(posterior.precision_matrix().diagonal() - 1, expected) < EXACT
    variance = rows[:2] @ posterior.covariance_matrix() @ rows[:2].mT
    assert relative_error(posterior.functional_posterior(x[:2]).covariance, variance) < EXACT


# -- networks that are derivatives themselves --------------------------------------------------------------------------


def by_grad(energy, x):
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def by_backward(energy, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a reference cycle
        energy(x).sum().backward(create_graph=True)
    return x.grad


def by_jvp(energy, x):
    return torch.func.jvp(energy, (x,), (torch.ones_like(x),))[1].expand(-1, 3)


def by_dual_numbers(energy, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(energy(dual)).tangent.expand(-1, 3)


def by_func(energy, x):
    return torch.func.vmap(torch.func.grad(lambda z: energy(z)[0]))(x)


class Force(nn.Module):
    """Minus the derivative of an energy by the positions, and a layer behind it."""

    def __init__(self, derivative):
        super().__init__()
        self.energy, self.derivative, self.head = perceptron(1), derivative, nn.Linear(3, 3).double()

    def forward(self, x):
        with torch.enable_grad():
            return self.head(-self.derivative(self.energy, x.detach().requires_grad_()))


@pytest.mark.diagonal
@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own decompositions for forward mode
@pytest.mark.parametrize(
    "derivative", [by_grad, by_backward, pytest.param(by_jvp, marks=pytest.mark.slow), by_dual_numbers, by_func]
)
@pytest.mark.parametrize("posterior_class", CLASSES)
def test_networks_that_differentiate_themselves(posterior_class, derivative):
    """Their weights reach the outputs by the derivative, past the outputs of the layers."""
    assert_exact(Force(derivative), posterior_class, *reals())


# -- uses that are hidden ----------------------------------------------------------------------------------------------


def scripted(what):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that scripting is deprecated
        return torch.jit.script(what)


def gate(x, weight):
    return x * weight.tanh()


class ScriptedBody(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = scripted(nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(self.body(x))


class ScriptedHead(ScriptedBody):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).double(), scripted(self.head)


class ScriptedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale, self.gate = perceptron(), nn.Parameter(torch.ones(3).double()), scripted(gate)

    def forward(self, x):
        return self.gate(self.body(x), self.scale)


@pytest.mark.diagonal
@pytest.mark.parametrize("posterior_class", [lp.Full, lp.Diagonal, lp.LowRank])
@pytest.mark.parametrize("network", [ScriptedBody, ScriptedHead, ScriptedFunction])
def test_scripted_parts(network, posterior_class):
    """Their weights are used without any call that could be watched; they are not unused for that."""
    assert_exact(network(), posterior_class, *reals())


def test_a_scripted_head_is_the_last_layer():
    """Also though the last use that is seen is that of the layer before it."""
    posterior = lp.Full(ScriptedHead(), "regression", parameters="last_layer").fit([reals()])
    assert posterior.parameter_names == ("head.weight", "head.bias")


# -- gradients that are cut off ----------------------------------------------------------------------------------------


class Cut(nn.Module):
    """Gradients are cut off in evaluation mode, behind the body or behind everything."""

    def __init__(self, how, *, behind_everything):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 3).double()
        self.scale = nn.Parameter(torch.ones(3).double())
        self.how, self.behind_everything = how, behind_everything

    def forward(self, x):
        if self.behind_everything:
            return self.cut(lambda z: self.scale * self.head(self.body(z).tanh()), x)
        return self.scale * self.head(self.cut(lambda z: self.body(z).tanh(), x))

    def cut(self, function, x):
        if self.how == "detach":
            return function(x).detach()
        if self.how == "data":
            return function(x).data
        with torch.inference_mode() if self.how == "inference_mode" else torch.set_grad_enabled(self.training):
            return function(x)


class DetachedScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = perceptron(), nn.Parameter(torch.ones(3).double())

    def forward(self, x):
        return self.body(x) * self.scale.detach()


each_cut = pytest.mark.parametrize("how", ["detach", "data", "inference_mode", "set_grad_enabled"])


@each_cut
@pytest.mark.parametrize("parameters", ["all", "last_layer", ["scale"], ["head"]], ids=str)
@pytest.mark.parametrize("posterior_class", [*CLASSES, lp.SampledLaplace])
def test_a_network_without_derivatives_is_refused(posterior_class, parameters, how):
    """It would seem to be certain of its outputs."""
    posterior = posterior_class(Cut(how, behind_everything=True), "regression", parameters=parameters)
    with pytest.raises(UnsupportedError, match="No gradient of the outputs reaches"):
        posterior.fit([reals()])


@pytest.mark.diagonal
@pytest.mark.parametrize("how", ["detach", "data", "set_grad_enabled"])
@pytest.mark.parametrize("posterior_class", [*CLASSES, lp.SampledLaplace])
def test_parameters_that_are_cut_off_are_named(posterior_class, how):
    """Once for each fit; they keep the prior, and the others have their curvature."""
    x, y = reals()
    posterior = posterior_class(Cut(how, behind_everything=False), "regression")
    for _ in range(2):
        with pytest.warns(UserWarning, match="reaches 'body.weight', 'body.bias', which the network uses") as caught:
            posterior.fit([(x, y), (x, y)])
        assert len(caught) == 1
    posterior.functional_posterior(x)
    if posterior_class in CLASSES:
        curvature = posterior.precision_matrix().diagonal() - 1  # of the scale, the body and the head
        assert curvature[3:19].abs().max() < EXACT
        assert curvature[:3].min() > 1e-3
        assert curvature[19:].min() > 1e-3


def test_parameters_that_are_used_detached_are_named():
    posterior = lp.Full(DetachedScale(), "regression")
    with pytest.warns(UserWarning, match="reaches 'scale', which the network uses"):
        posterior.fit([reals()])
    assert (posterior.variance()[:3] - 1).abs().max() < EXACT


@pytest.mark.parametrize("how", ["detach", "data", "set_grad_enabled"])
@pytest.mark.parametrize("parameters", ["last_layer", ["scale"], ["head"]], ids=str)
def test_what_is_cut_off_before_the_selected_parameters_does_not_matter(parameters, how):
    posterior = lp.Full(Cut(how, behind_everything=False), "regression", parameters=parameters).fit([reals()])
    assert posterior.n_data == len(reals()[0])


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant, *, only_in_training):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.head = nn.Linear(3, 4), perceptron(), nn.Linear(3, 3)
        self.block[0] = nn.Linear(4, 4)
        self.double()
        self.use_reentrant, self.only_in_training = use_reentrant, only_in_training

    def forward(self, x):
        hidden = self.first(x).tanh()
        if self.only_in_training and not self.training:
            return self.head(self.block(hidden))
        return self.head(checkpoint(self.block, hidden, use_reentrant=self.use_reentrant))


@pytest.mark.parametrize("posterior_class", [lp.Full, lp.Diagonal, lp.KFAC, lp.LowRank])
def test_checkpointed_activations(posterior_class):
    """The second forward pass of checkpointing finds the substituted weights still in their places."""
    (x, y), ways = reals(), (False, True)
    models = [Checkpointed(False, only_in_training=only).eval() for only in ways]
    posteriors = [posterior_class(model, "regression").fit([(x, y)]) for model in models]
    first, second = (posterior.functional_posterior(x).covariance for posterior in posteriors)
    assert relative_error(first, second) < EXACT
    assert relative_error(*(posterior.precision_matrix() for posterior in posteriors)) < EXACT


def test_what_is_checkpointed_before_the_selected_parameters_does_not_matter():
    posterior = lp.Full(Checkpointed(False, only_in_training=False), "regression", parameters="last_layer")
    assert posterior.fit([reals()]).n_data == len(reals()[0])
