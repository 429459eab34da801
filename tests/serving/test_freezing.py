"""Frozen posteriors give what predictive gives, also compiled, exported and traced, and leave the model alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError


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
        check(posterior.freeze()(x), posterior, x, 1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("link", lp.Categorical.links[:2] + lp.Categorical.links[3:])
def test_links_of_classes(link):
    posterior, x = fitted(lp.KFAC, dtype=torch.float64)
    posterior.link, posterior.covariance_scale = link, 0.5
    check(posterior.freeze()(x), posterior, x, 1e-10)


def test_weights_without_biases_and_biases_that_are_not_selected():
    for parameters in ("last_layer", ["3.weight"]):
        posterior, x = fitted(lp.KFAC, "regression", 2, parameters=parameters)
        check(posterior.freeze(x)(x[0:1]), posterior, x[0:1])
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1, bias=False)).double()
    x = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    likelihood = lp.Categorical(output_axis=1)
    posterior = lp.KFAC(net, likelihood, parameters="last_layer").fit([(x, torch.randint(0, 3, (5, 4, 4)))])
    check(posterior.freeze()(x), posterior, x, 1e-10)


def test_weights_that_the_network_reads_itself_are_refused():
    class Reading(nn.Sequential):
        def forward(self, x):
            return nn.functional.linear(self[0](x).tanh(), self[1].weight, self[1].bias)

    x = torch.randn(12, 3)
    net = Reading(nn.Linear(3, 8), nn.Linear(8, 2))
    posterior = lp.KFAC(net, "regression", parameters="last_layer").fit([(x, torch.randn(12, 2))])
    with pytest.raises(UnsupportedError, match="its copy fails"):
        posterior.freeze()


def test_factors_of_limited_rank():
    for parameters in ("last_layer", "all"):
        posterior, x = fitted(lp.KFAC, dtype=torch.float64, parameters=parameters, factor_rank=2)
        check(posterior.freeze()(x), posterior, x, 1e-8)


def test_the_tangent_optimum_is_the_frozen_mean():
    posterior, x = fitted(lp.Full, "regression", 1, dtype=torch.float64)
    posterior.fit_prior_precision(lp.Tangent())
    posterior.predictive_mean = "tangent"
    check(posterior.freeze(x)(x), posterior, x, 1e-8)


def test_the_model_stays_as_it_is_and_the_module_is_independent():
    posterior, x = fitted(lp.KFAC)
    model = posterior.network.model.train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    frozen = posterior.freeze()
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
        posterior.freeze()
    with pytest.raises(UnsupportedError, match=r"another structure.*last_layer"):
        fitted(lp.Full, parameters="all")[0].freeze()
    with pytest.raises(ConfigurationError, match="no such link"):
        posterior.freeze(link="cubic")
    posterior, x = fitted(lp.KFAC)
    with pytest.raises(UnsupportedError, match="SampledLaplace"):
        lp.SampledLaplace(posterior.network.model, "regression").fit([(x, torch.randn(12, 3))]).freeze()
    loaded = lp.KFAC(posterior.network.model, "classification", parameters="last_layer")
    with pytest.raises(ConfigurationError, match="freeze\\(x\\)"):
        loaded.fit(iter([(x, torch.randint(0, 3, (12,)))])).freeze()
    assert loaded.freeze(x)(x).mean.shape == (12, 3)


@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal])
@pytest.mark.parametrize(("likelihood", "size"), [("classification", 3), ("classification", 2), ("regression", 1)])
def test_all_weights(cls, likelihood, size):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        posterior, x = fitted(cls, likelihood, size, dtype=dtype, parameters="all")
        frozen = posterior.freeze()
        for n in (12, 5, 1):
            check(frozen(x[:n]), posterior, x[:n], tolerance)
    own = {parameter.data_ptr() for parameter in posterior.network.model.parameters()}
    assert own.isdisjoint(value.data_ptr() for value in frozen.state_dict().values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of tracing
        check(torch.jit.trace(frozen, (x[:3],))(x), posterior, x, 1e-8)


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


class Residual(nn.Module):
    """Convolutions, also grouped and strided, norms of batches and of groups, pooling and an addition."""

    def __init__(self):
        super().__init__()
        self.start = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.Tanh())
        self.end = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 6, 2, stride=2), nn.GELU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.start(x)
        return self.head(self.end(x + self.branch(x)).flatten(1))


def convolutional(cls):
    torch.manual_seed(0)
    net, x = Residual().train(), torch.randn(12, 1, 8, 8)
    net(x)  # running statistics
    return cls(net.eval(), "classification", prior_precision=0.3).fit([(x, torch.randint(0, 2, (12,)))]), x


@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal])
def test_convolutional_networks(cls):
    posterior, x = convolutional(cls)
    frozen = posterior.freeze()
    for n in (12, 5, 1):
        check(frozen(x[:n]), posterior, x[:n])


def test_another_link_than_the_default():
    for parameters in ("last_layer", "all"):
        posterior, x = fitted(lp.KFAC, parameters=parameters)
        found, wanted = posterior.freeze(link="probit")(x), posterior.predictive(x, link="probit")
        torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("likelihood", "size"), [("classification", 3), ("regression", 2)])
def test_traced_modules_take_other_batches(likelihood, size):
    posterior, x = fitted(lp.KFAC, likelihood, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of tracing
        traced = torch.jit.trace(posterior.freeze(), (x[:3],))
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


@pytest.mark.parametrize("parameters", ["last_layer", "all"])
def test_several_inputs_are_passed_as_to_the_network(parameters):
    _, x = fitted(lp.KFAC)
    other, y = torch.randn(12, 3), torch.randn(12, 2)
    for batch in ({"x": x, "other": other}, (other, x)):
        posterior = lp.KFAC(TwoInputs(), "regression", parameters=parameters).fit([(batch, y)])
        frozen, wanted = posterior.freeze(), posterior.predictive(batch).variance
        calls = frozen(other, x), frozen(other, x=x), frozen(x=x, other=other), frozen(other=other, x=x)
        for found in calls:
            torch.testing.assert_close(found.variance, wanted, rtol=1e-5, atol=1e-5)
    posterior = lp.KFAC(OneDictionary(), "regression", parameters=parameters).fit([({"other": other, "x": x}, y)])
    found = posterior.freeze()({"x": x, "other": other}).mean
    torch.testing.assert_close(found, posterior.network.model({"other": other, "x": x}).detach())


def test_other_inputs_than_recorded_are_refused():
    _, x = fitted(lp.KFAC)
    frozen = lp.KFAC(TwoInputs(), "regression").fit([((x, x), torch.randn(12, 2))]).freeze()
    for args, keywords in (((x, x), {"scale": 3.0}), ((x,), {}), ((x, x[:, :2]), {}), ((x, None), {})):
        with pytest.raises(DataError, match="of one form"):
            frozen(*args, **keywords)


def test_recorded_tensors_and_slices_follow_the_batch():
    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x)[: len(x)] + torch.arange(2, device=x.device)

    torch.manual_seed(0)
    x, more = torch.randn(12, 3), torch.randn(30, 3)
    net = Net(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior = lp.KFAC(net, "regression").fit([(x, torch.randn(12, 2))])
    frozen = posterior.freeze()
    check(frozen(more), posterior, more)
    assert frozen.to("meta")(x.to("meta")).variance.shape == (12, 2)


def test_a_last_module_with_a_forward_of_its_own_keeps_it():
    class Clamping(nn.Linear):
        def forward(self, x):
            return super().forward(x.clamp(max=0.5))

    torch.manual_seed(0)
    x = torch.randn(12, 3)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Clamping(8, 2))
    posterior = lp.KFAC(net, "regression", parameters="last_layer").fit([(x, torch.randn(12, 2))])
    check(posterior.freeze(x / 100)(10 * x), posterior, 10 * x)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, lp.Full])
@pytest.mark.parametrize(
    ("likelihood", "size"),
    [("classification", 2), ("classification", 3), ("classification", 70), ("regression", 2)],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parameters", ["last_layer", "all"])
def test_compiled_and_exported_modules_take_other_batches(cls, likelihood, size, way, parameters):
    posterior, x = fitted(cls, likelihood, size, parameters=parameters)
    if parameters == "all" and (cls is lp.Full or size > 64):
        with pytest.raises(UnsupportedError, match="cannot be frozen"):
            posterior.freeze()
        return
    with torch.no_grad():
        check(served(posterior.freeze(), way, x[:3])(x), posterior, x)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_and_exported_convolutions(cls, way):
    posterior, x = convolutional(cls)
    with torch.no_grad():
        check(served(posterior.freeze(), way, x[:3])(x), posterior, x)
