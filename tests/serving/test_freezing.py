"""Frozen posteriors give what predictive gives, also compiled, exported and traced, and leave the model alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, UnsupportedError


def fitted(cls, likelihood="classification", size=3, *, dtype=torch.float32, parameters="last_layer", **options):
    """A posterior with variances large enough for the links to matter, and inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, size)).to(dtype)
    x = torch.randn(12, 3, dtype=dtype)
    if likelihood == "classification":
        y = torch.randint(0, size, (12,))
    else:
        y = torch.randn(12, size).to(dtype) if likelihood == "regression" else torch.randint(0, 2, (12, size)).to(dtype)
    return cls(net, likelihood, parameters=parameters, prior_precision=0.3, **options).fit([(x, y)]), x


def check(found, posterior, x, tolerance=1e-5):
    wanted = posterior.predictive(x)
    variance = wanted.functional_covariance
    if variance.dim() > wanted.functional_mean.dim():
        variance = variance.diagonal(dim1=-2, dim2=-1)
    for own, other in zip(found, (wanted.mean, wanted.variance, wanted.functional_mean, variance), strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("cls", "likelihood", "size"),
    [
        (cls, likelihood, size)
        for cls in (lp.KFAC, lp.Full, lp.Diagonal, lp.LowRank)
        for likelihood, sizes in {"classification": (2, 10, 70), "binary": (1, 2), "regression": (1, 2)}.items()
        for size in sizes
        if size <= 64 or cls in (lp.KFAC, lp.Diagonal)
    ],
)
def test_frozen_posteriors_predict_as_the_originals(cls, likelihood, size):
    for dtype in (torch.float32, torch.float64) if cls is lp.KFAC else (torch.float32,):
        posterior, x = fitted(cls, likelihood, size, dtype=dtype)
        check(lp.freeze(posterior)(x), posterior, x, 1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("link", lp.Categorical.links[:2] + lp.Categorical.links[3:])
def test_links_of_classes(link):
    posterior, x = fitted(lp.KFAC, dtype=torch.float64)
    posterior.link, posterior.covariance_scale = link, 0.5
    check(lp.freeze(posterior)(x), posterior, x, 1e-10)


def test_weights_without_biases_and_biases_that_are_not_selected():
    for parameters in ("last_layer", ["3.weight"]):
        posterior, x = fitted(lp.KFAC, "regression", 2, parameters=parameters)
        check(lp.freeze(posterior, x)(x[0:1]), posterior, x[0:1])
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1, bias=False)).double()
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    likelihood = lp.Categorical(output_axis=1)
    posterior = lp.KFAC(net, likelihood, parameters="last_layer").fit([(x, torch.randint(0, 3, (5, 4, 4)))])
    check(lp.freeze(posterior)(x), posterior, x, 1e-10)


def test_weights_that_the_network_reads_itself_are_refused():
    class Reading(nn.Sequential):
        def forward(self, x):
            return nn.functional.linear(self[0](x).tanh(), self[1].weight, self[1].bias)

    x = torch.randn(12, 3)
    net = Reading(nn.Linear(3, 8), nn.Linear(8, 2))
    posterior = lp.KFAC(net, "regression", parameters="last_layer").fit([(x, torch.randn(12, 2))])
    with pytest.raises(UnsupportedError, match="its copy fails"):
        lp.freeze(posterior)


def test_factors_of_limited_rank():
    posterior, x = fitted(lp.KFAC, dtype=torch.float64, factor_rank=2)
    check(lp.freeze(posterior)(x), posterior, x, 1e-8)


def test_the_tangent_optimum_is_the_frozen_mean():
    posterior, x = fitted(lp.Full, "regression", 1, dtype=torch.float64)
    posterior.fit_prior_precision(lp.Tangent())
    posterior.predictive_mean = "tangent"
    check(lp.freeze(posterior, x)(x), posterior, x, 1e-8)


def test_the_model_stays_as_it_is_and_the_module_is_independent():
    posterior, x = fitted(lp.KFAC)
    model = posterior.network.model.train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    frozen = lp.freeze(posterior)
    assert model.training and model[3].weight.requires_grad and isinstance(model[3], nn.Linear)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(p.requires_grad for p in frozen.parameters()) and not frozen.train().training
    wanted = frozen(x)
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert all(map(torch.equal, frozen(x), wanted))
    own = {tensor.data_ptr() for factor in posterior.factors().values() for tensor in vars(factor.basis).values()}
    assert own.isdisjoint(value.data_ptr() for value in frozen.state_dict().values())
    other = copy.deepcopy(frozen)
    for value in other.state_dict().values():
        value.zero_()
    other.load_state_dict(frozen.state_dict())
    assert all(map(torch.equal, other(x), wanted))
    assert other.double()(x.double()).variance.dtype == torch.float64


def test_what_cannot_be_frozen_is_refused():
    posterior, x = fitted(lp.KFAC)
    posterior.link = "mc"
    with pytest.raises(UnsupportedError, match="draws samples"):
        lp.freeze(posterior)
    with pytest.raises(UnsupportedError, match=r"over 0.weight.*last_layer"):
        lp.freeze(fitted(lp.KFAC, parameters="all")[0])
    with pytest.raises(ConfigurationError, match="Unknown link"):
        lp.freeze(posterior, link="cubic")
    posterior, x = fitted(lp.KFAC)
    with pytest.raises(UnsupportedError, match="SampledLaplace"):
        lp.freeze(lp.SampledLaplace(posterior.network.model, "regression").fit([(x, torch.randn(12, 3))]))
    loaded = lp.KFAC(posterior.network.model, "classification", parameters="last_layer")
    with pytest.raises(ConfigurationError, match="Pass some"):
        lp.freeze(loaded.fit(iter([(x, torch.randint(0, 3, (12,)))])))
    assert lp.freeze(loaded, x)(x).mean.shape == (12, 3)


WAYS = ["compile", "export", "strict", "onnx"]


def served(frozen, way, x):
    """The module made by one of :data:`WAYS` from an example of its inputs, for any number of them."""
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "compile":
            torch._dynamo.reset()
            return torch.compile(frozen, backend="eager", fullgraph=True, dynamic=True)
        if way == "onnx":
            pytest.importorskip("onnxscript")
            pytest.importorskip("onnxruntime")
            return torch.onnx.export(frozen, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
        return torch.export.export(frozen, (x,), dynamic_shapes=shapes, strict=way == "strict").module()


def test_another_link_than_the_default():
    posterior, x = fitted(lp.KFAC)
    found, wanted = lp.freeze(posterior, link="probit")(x), posterior.predictive(x, link="probit")
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("likelihood", "size"), [("classification", 3), ("regression", 2)])
def test_traced_modules_take_other_batches(likelihood, size):
    posterior, x = fitted(lp.KFAC, likelihood, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of tracing
        traced = torch.jit.trace(lp.freeze(posterior), (x[:3],))
    check(traced(x), posterior, x)


class TwoInputs(nn.Module):
    """Of which the first one comes last in the alphabet, and is not the first called ``x``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.ours, self.theirs, self.last = nn.Linear(3, 8), nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, other, x=None, scale=1.0):
        return scale * self.last(torch.tanh(self.ours(other) + 2 * self.theirs(x)))


class OneDictionary(TwoInputs):
    def forward(self, batch):
        return super().forward(batch["other"], batch["x"])


def test_several_inputs_are_passed_as_to_the_network():
    _, x = fitted(lp.KFAC)
    other, y = torch.randn(12, 3), torch.randn(12, 2)
    for batch in ({"x": x, "other": other}, (other, x)):
        posterior = lp.KFAC(TwoInputs(), "regression", parameters="last_layer").fit([(batch, y)])
        frozen, wanted = lp.freeze(posterior), posterior.predictive(batch).variance
        calls = frozen(other, x), frozen(other, x=x), frozen(x=x, other=other), frozen(other=other, x=x)
        for found in calls:
            torch.testing.assert_close(found.variance, wanted, rtol=1e-5, atol=1e-5)
    posterior = lp.KFAC(OneDictionary(), "regression", parameters="last_layer").fit([({"other": other, "x": x}, y)])
    found = lp.freeze(posterior)({"x": x, "other": other}).mean
    torch.testing.assert_close(found, posterior.network.model({"other": other, "x": x}).detach())


def test_a_last_module_with_a_forward_of_its_own_is_refused():
    class Clamping(nn.Linear):
        def forward(self, x):
            return super().forward(x.clamp(max=0.5))

    torch.manual_seed(0)
    x = torch.randn(12, 3)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Clamping(8, 2))
    posterior = lp.KFAC(net, "regression", parameters="last_layer").fit([(x, torch.randn(12, 2))])
    with pytest.raises(UnsupportedError, match="over 2.weight"):
        lp.freeze(posterior, x / 100)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, lp.Full])
@pytest.mark.parametrize(
    ("likelihood", "size"),
    [("classification", 2), ("classification", 3), ("classification", 70), ("regression", 2)],
)
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_exported_modules_take_other_batches(cls, likelihood, size, way):
    posterior, x = fitted(cls, likelihood, size)
    with torch.no_grad():
        check(served(lp.freeze(posterior), way, x[:3])(x), posterior, x)
