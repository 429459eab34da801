"""References to modules and weights, of whatever kind, lead to the shadow; the user's model stays as it is."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from types import MethodType

import pytest
import torch
from problems import relative_error
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import UnsupportedError
from laplace_plus.testing import assert_untouched, snapshot

EXACT = 1e-11

X, Y = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2


class Holder:
    """An object of a class of its own."""

    def __init__(self, module):
        self.module = module


class Net(nn.Module):
    """Two layers, of which the first is reached in some way."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how
        self.double()
        first = self.first
        self.listed, self.named, self.kept = [first], {"a": (first,)}, None
        self.weights = [first.weight, first.bias]
        self.method, self.part = first.forward, partial(nn.Module.__call__, first)
        self.closure, self.default, self.holder = lambda x: first(x), lambda x, m=first: m(x), Holder(first)

    def forward(self, x):
        hidden = {
            "child": lambda: self.first(x),
            "list": lambda: self.listed[0](x),
            "dict": lambda: self.named["a"][0](x),
            "weights": lambda: nn.functional.linear(x, *self.weights),
            "method": lambda: self.method(x),
            "partial": lambda: self.part(x),
            "closure": lambda: self.closure(x),
            "default": lambda: self.default(x),
            "object": lambda: self.holder.module(x),
        }[self.how]()
        self.kept = hidden  # gone with the shadow
        self.listed.append(hidden)
        return self.last(hidden.tanh())


WAYS = ["list", "dict", "weights", "method", "partial", "closure", "default", "object"]


@pytest.mark.parametrize("how", WAYS)
def test_references_are_followed(how):
    model, plain = Net(how), Net("child")
    before = snapshot(model)
    ours, theirs = (lp.Full(own, "classification").fit([(X, Y)]) for own in (model, plain))
    assert relative_error(ours.precision_matrix(), theirs.precision_matrix()) < EXACT
    draws = [own.predictive(X, method="sampled", generator=torch.Generator().manual_seed(1)) for own in (ours, theirs)]
    assert relative_error(draws[0].mean, draws[1].mean) < EXACT
    assert_untouched(model, before)
    assert model.kept is None
    assert len(model.listed) == 1


def test_a_patched_forward_is_followed():
    """As accelerate puts it into a module."""
    model, plain = Net("child"), Net("child")
    old = model.first.forward
    model.first.forward = MethodType(lambda module, x: old(x) + 0 * module.weight.sum(), model.first)
    ours, theirs = (lp.Full(own, "classification").fit([(X, Y)]) for own in (model, plain))
    assert relative_error(ours.precision_matrix(), theirs.precision_matrix()) < EXACT


def test_copies_and_pickles_predict_the_same():
    posterior = lp.KFAC(Net("child").requires_grad_(), "classification")
    posterior.model.closure = posterior.model.default = posterior.model.part = None
    posterior.fit([(X, Y)])
    network = posterior.network
    for again in (copy.copy(network), copy.deepcopy(network), pickle.loads(pickle.dumps(network.model))):  # noqa: S301
        outputs = again.eval()(X) if isinstance(again, nn.Module) else again.forward(X)
        torch.testing.assert_close(outputs, network.forward(X))


MODEL = Net("child")


class Stray(nn.Module):
    """Reaches its weights through an object that cannot be copied, so that neither way follows it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 2).double()
        self.reach = Fixed(self.first)

    def forward(self, x):
        return self.reach.module(x)


class Fixed(Holder):
    """An object whose copies are itself."""

    def __deepcopy__(self, _):
        return self


def test_what_cannot_be_followed_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"cannot be followed.*first\.(weight|bias)"):
        lp.KFAC(Stray(), "classification").fit([(X, Y)])


def test_functions_reach_the_model_through_closures_globals_and_objects():
    model = MODEL
    posterior = lp.Full(model, "classification").fit([(X, Y)])
    wanted = posterior.functional_posterior(X).covariance
    for function in (lambda x: model(x), lambda x: MODEL(x), partial(nn.Module.__call__, model), model.forward):
        found = lp.through(posterior, function).functional_posterior(X).covariance
        assert relative_error(found, wanted) < EXACT
