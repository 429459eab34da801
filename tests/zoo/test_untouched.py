"""The user's module after any call is what it was before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.architectures import Architecture, each_typical

import laplace_plus as lp

N, FIRST = 4, 2


def picture(value: Any) -> Any:
    """Something that compares equal only to the picture of the same objects with the same content."""
    if isinstance(value, Tensor):
        return ("tensor", id(value), value.data_ptr(), value.requires_grad, value.grad is None, value.detach().clone())
    if isinstance(value, dict):
        return (type(value), [(key, picture(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple, set)):
        return (type(value), [picture(entry) for entry in value])
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return (type(value), id(value))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Watch:
    """A module's every attribute, version and mode, to be compared later."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.before = self._look()

    def _look(self) -> list[Any]:
        # Names that begin with an underscore are looked at too: parameters, buffers, hooks, RNN weight lists.
        return [(name, id(module), picture(module.__dict__)) for name, module in self.model.named_modules()]

    def assert_same(self) -> None:
        after = self._look()
        assert [entry[:2] for entry in after] == [entry[:2] for entry in self.before]
        for (name, _, old), (_, _, new) in zip(self.before, after, strict=True):
            for (key, was), (other, now) in zip(old[1], new[1], strict=True):
                assert key == other, f"{name}: attributes {key} and {other}"
                assert same(was, now), f"{name}.{key} has changed"


def in_mixed_modes(architecture: Architecture) -> nn.Module:
    """The network as it is left by training, but for one frozen part."""
    model = architecture.model().train()
    for number, module in enumerate(model.modules()):
        if number % 3 == 2:
            module.training = False
    return model


@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.quick(
    "lstm-KFAC", "unet-KFAC", "transformer_encoder-KFAC", "tied_language_model-KFAC", "mixture_of_experts-KFAC"
)
@pytest.mark.filterwarnings("ignore:The tuned noise")  # of eight targets
@pytest.mark.parametrize("cls", [lp.KFAC, pytest.param(lp.Diagonal, marks=pytest.mark.slow)])
@each_typical
def test_fitting_and_predicting_leave_the_model_alone(architecture, cls):
    model = in_mixed_modes(architecture)
    watch = Watch(model)
    loader = architecture.loader(N, FIRST)
    inputs, _ = architecture.data(N)
    random_state = torch.get_rng_state()
    posterior = cls(model, architecture.likelihood)
    posterior.fit(loader)
    watch.assert_same()
    posterior.functional_posterior(inputs)
    watch.assert_same()
    generator = torch.Generator().manual_seed(0)
    posterior.predictive(inputs, method="sampled", n_samples=2, generator=generator)
    watch.assert_same()
    posterior.fit_prior_precision(structure="layerwise")
    posterior.log_marginal_likelihood()
    posterior.sample(2, generator=generator)
    watch.assert_same()
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.quick("lstm-Diagonal", "unet-Diagonal", "transformer_encoder-Diagonal")
@pytest.mark.parametrize("cls", [pytest.param(lp.KFAC, marks=pytest.mark.slow), lp.Diagonal])
@each_typical
def test_a_network_in_training_mode_is_evaluated(architecture, cls):
    loader = architecture.loader(N, FIRST)
    torch.manual_seed(3)
    trained = cls(in_mixed_modes(architecture), architecture.likelihood).fit(loader)
    evaluated = cls(architecture.model(), architecture.likelihood).fit(loader)
    torch.testing.assert_close(trained.variance(), evaluated.variance())
    inputs, _ = architecture.data(N)
    torch.testing.assert_close(trained.predictive(inputs).mean, evaluated.predictive(inputs).mean)


def test_hooks_stay_and_fire():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    watch = Watch(model)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    lp.KFAC(model, "classification").fit([(x, y)])
    watch.assert_same()
    assert seen
