"""The landscape of a network's loss against dense derivatives, however the data come."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError, UnsupportedError
from laplace_plus.geometry import FunctionLandscape, LossLandscape, kinks
from laplace_plus.geometry.loss import MovedNetwork
from laplace_plus.network.network import Network

DTYPE = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def small_network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


def dense(net, loss):
    """The sum loss as a function of the vector of all parameters."""
    names = [name for name, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]

    def function(vector):
        pieces = vector.split([shape.numel() for shape in shapes])
        values = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}
        return loss(lambda x: torch.func.functional_call(net, values, (x,)))

    return function


def assert_derivatives(landscape, function, points):
    directions = random(*points.shape, seed=9)
    found = landscape.derivatives(points, directions)
    for row, point in enumerate(points):
        torch.testing.assert_close(found.gradients[row], torch.func.grad(function)(point))
        hessian = torch.func.jacrev(torch.func.grad(function))(point)
        torch.testing.assert_close(found.products[row], hessian @ directions[row], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(landscape.gradient(points), found.gradients)


def test_negative_log_posterior_of_regression():
    net, x, y = small_network(), random(9, 3), random(9, 2, seed=1)
    precision, noise, temperature = random(20, seed=2).exp(), 0.7, 1.9
    landscape = LossLandscape(
        net,
        lp.Gaussian(noise_std=noise),
        [(x[:4], y[:4]), (x[4:], y[4:])],
        prior_precision=precision,
        prior_mean=0.3,
        temperature=temperature,
    )

    def loss(model):
        density = torch.distributions.Normal(model(x), noise).log_prob(y).sum()
        return -density / temperature

    data_loss = dense(net, loss)

    def function(vector):
        return data_loss(vector) + (precision * (vector - 0.3).square()).sum() / 2

    points = landscape.vector + random(3, 20, seed=3)
    torch.testing.assert_close(landscape.value(points), torch.stack([function(point) for point in points]))
    assert_derivatives(landscape, function, points)


@pytest.mark.parametrize("linearized", [False, True])
def test_data_may_come_anyhow(linearized, monkeypatch):
    net, x, y = small_network(3), random(10, 3), torch.arange(10) % 3
    options = {"linearized": linearized, "prior_precision": 2.0}
    whole = LossLandscape(net, "classification", [(x, y)], **options)
    points = whole.vector + random(3, len(whole.vector), seed=3)
    directions = random(*points.shape, seed=4)
    expected = (*whole.derivatives(points, directions), whole.value(points), whole.gradient(points))
    pieces = list(zip(x.split(4), y.split(4), strict=True))
    kept = LossLandscape(net, "classification", pieces, chunk_size=2, **options)
    assert len(kept.data()) == 3
    monkeypatch.setattr("laplace_plus.geometry.loss._KEPT_BYTES", 100)
    streamed = LossLandscape(net, "classification", pieces, chunk_size=2, **options)
    assert streamed.data() is pieces
    for other in (kept, streamed):
        found = (*other.derivatives(points, directions), other.value(points), other.gradient(points))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_linearized_is_the_loss_of_the_tangent():
    net, x, y = small_network(3), random(6, 3), torch.arange(6) % 3
    landscape = LossLandscape(net, "classification", [(x, y)], linearized=True)
    centre = landscape.vector
    outputs = dense(net, lambda model: model(x))
    jacobian, at = torch.func.jacrev(outputs)(centre), outputs(centre).detach()

    def function(vector):
        tangent = at + jacobian @ (vector - centre)
        return nn.functional.cross_entropy(tangent, y, reduction="sum") + vector.square().sum() / 2

    assert_derivatives(landscape, function, centre + random(3, len(centre), seed=3))


@pytest.mark.parametrize("linearized", [False, True])
def test_a_precision_of_zero_leaves_the_plain_loss(linearized):
    net, x, y = small_network(3), random(6, 3), torch.arange(6) % 3
    landscape = LossLandscape(net, "classification", [(x, y)], prior_precision=0.0, linearized=linearized)
    function = dense(net, lambda model: nn.functional.cross_entropy(model(x), y, reduction="sum"))
    points = landscape.vector + (0 if linearized else random(3, len(landscape.vector), seed=3))
    points = points.view(-1, len(landscape.vector))
    torch.testing.assert_close(landscape.value(points), torch.stack([function(point) for point in points]))
    torch.testing.assert_close(landscape.gradient(points), torch.stack([torch.func.grad(function)(p) for p in points]))
    part = torch.tensor([0.0, 2.0])  # by layers
    partly = LossLandscape(net, "classification", [(x, y)], prior_precision=part, linearized=linearized)
    expected = landscape.value(points) + points[:, 12:].square().sum(1)
    torch.testing.assert_close(partly.value(points), expected)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="prior precision is out of range"):
            LossLandscape(net, "classification", [(x, y)], prior_precision=wrong)


def test_ignored_targets_and_chosen_parameters():
    net, x = small_network(3), random(6, 3)
    y = torch.tensor([0, 1, -100, 2, -100, 0])
    network = Network(net, ["2.weight"], lp.Categorical().arrange)
    landscape = LossLandscape(network, lp.Categorical(ignore_index=-100), [(x, y)])
    hidden = net[:2](x).detach()
    bias = net[2].bias.detach()

    def function(vector):
        loss = nn.functional.cross_entropy(hidden @ vector.view(3, 3).T + bias, y, ignore_index=-100, reduction="sum")
        return loss + vector.square().sum() / 2

    assert_derivatives(landscape, function, random(2, 9))


def test_subsets_sum_to_the_whole():
    net, x, y = small_network(), random(9, 3), random(9, 2, seed=1)
    landscape = LossLandscape(net, "regression", [(x[:5], y[:5]), (x[5:], y[5:])], prior_precision=0.1)
    points = landscape.vector + random(2, len(landscape.vector), seed=3)
    parts = landscape.subsets(list(torch.randperm(9, generator=torch.Generator().manual_seed(0)).split(3)))
    torch.testing.assert_close(
        torch.stack([part.gradient(points) for part in parts]).mean(0), landscape.gradient(points)
    )
    directions = random(*points.shape, seed=5)
    products = torch.stack([part.derivatives(points, directions).products for part in parts]).mean(0)
    torch.testing.assert_close(products, landscape.derivatives(points, directions).products)
    one, other = landscape.subsets([torch.arange(4), torch.arange(4, 8)])
    assert not torch.equal(one.gradient(points), other.gradient(points))
    (whole,) = landscape.subsets([torch.randperm(9)])
    assert whole.scale == 1
    torch.testing.assert_close(whole.value(points), landscape.value(points))


@pytest.mark.parametrize("linearized", [False, True])
def test_subsets_of_subsets(linearized):
    net, x, y = small_network(), random(9, 3), random(9, 2, seed=1)
    data = [(x[:5], y[:5]), (x[5:], y[5:])]
    landscape = LossLandscape(net, "regression", data, linearized=linearized)
    points = landscape.vector + random(2, len(landscape.vector), seed=3)
    part = landscape.subsets([torch.tensor([1, 2, 4, 5, 7, 8])])[0]
    assert (part.n_data, part.scale) == (6, 1.5)
    again = part.subsets([torch.arange(6)])[0]
    assert (again.n_data, again.scale) == (6, 1.5)
    torch.testing.assert_close(again.value(points), part.value(points))
    one, directly = part.subsets([torch.tensor([1, 3])])[0], landscape.subsets([torch.tensor([2, 5])])[0]
    assert one.scale == directly.scale == 4.5
    torch.testing.assert_close(one.gradient(points), directly.gradient(points))
    own = LossLandscape(net, "regression", part.data())
    assert own.n_data == 6
    assert own.checksum != pytest.approx(landscape.checksum)


class Attention(nn.Module):
    """Fused attention, whose second derivatives torch has no formula for, or a wrong one."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(4, 12)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        q, k, v = self.key(x).chunk(3, dim=-1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.cells(x)[0][:, -1])


@pytest.mark.parametrize("kind", [Attention, Recurrent])
def test_networks_without_forward_derivatives(kind):
    torch.manual_seed(0)
    landscape = LossLandscape(kind().double(), "regression", [(random(5, 3, 4), random(5, 2, seed=1))])
    points = landscape.vector + 0.1 * random(2, len(landscape.vector), seed=2)
    directions = random(*points.shape, seed=3)
    products = landscape.derivatives(points, directions).products
    step = 1e-5
    ahead, behind = (landscape.gradient(points + sign * step * directions) for sign in (1, -1))
    torch.testing.assert_close(products, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)


class _WrongTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        # The derivative of this is not symmetric across entries.
        return gradient * (3 * x.detach() ** 2 + x.roll(1) - x.roll(1).detach())


def test_wrong_second_derivatives_are_refused():
    point = random(1, 4)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        FunctionLandscape(lambda p: _WrongTwice.apply(p).sum()).derivatives(point, point)


def test_functions_without_batching_rules():
    def awkward(p):
        return p.square().sum() * (1 if float(p.detach().sum()) > -1e9 else 2) + p.prod()

    points, directions = random(3, 4), random(3, 4, seed=1)
    assert_derivatives(FunctionLandscape(awkward), awkward, points)
    flat = FunctionLandscape(lambda p: torch.zeros((), dtype=DTYPE)).derivatives(points, directions)
    assert not flat.gradients.any() and not flat.products.any()


def test_bad_data_are_refused():
    net, x, y = small_network(3), random(6, 3), torch.arange(6) % 3
    with pytest.raises(DataError, match="only once"):
        LossLandscape(net, "classification", iter([(x, y)]))
    with pytest.raises(lp.errors.LabelError):
        LossLandscape(net, "classification", [(x, y + 5)])
    with pytest.raises(ConfigurationError, match="prior precision"):
        LossLandscape(net, "classification", [(x, y)], prior_precision=torch.ones(5))


def test_kinks_are_named():
    def found(*modules):
        model = nn.Sequential(nn.Linear(4, 4), *modules)
        return kinks(Network(model, "all", lambda raw: raw), torch.randn(2, 4))

    assert found(nn.Tanh(), nn.GELU(), nn.SiLU(), nn.Softplus(), nn.LayerNorm(4)) == ()
    assert found(nn.ReLU(inplace=True)) == ("relu",)
    assert found(nn.LeakyReLU(), nn.MaxPool1d(2)) == ("leaky_relu", "max_pool1d")
    assert found(nn.Hardtanh(), nn.ELU()) == ("elu", "hardtanh")


def test_moved_networks_have_the_weights_they_were_given():
    x = random(5, 3)
    network = Network(small_network(), ["0.weight", "2.bias"], lambda raw: raw)
    vector, outputs = network.vector(), network.forward(x)
    moved = MovedNetwork(network, vector + 1)
    assert torch.equal(moved.vector(), vector + 1)
    assert torch.equal(moved.forward(x), network(x, network.substitute(vector + 1)))
    assert torch.equal(network.vector(), vector) and torch.equal(network.forward(x), outputs)


@pytest.mark.parametrize("kept", [2**28, 2000])
def test_small_tangents_take_no_more_passes_through_the_network(kept, monkeypatch):
    monkeypatch.setattr("laplace_plus.geometry.loss._KEPT_BYTES", kept)
    calls = []

    class Counted(nn.Sequential):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    net = Counted(*small_network())
    data = [(random(6, 3, seed=i), random(6, 2, seed=i + 5)) for i in range(5)]
    landscape = LossLandscape(net, "regression", data, linearized=True, prior_precision=0.5)
    part = landscape.subsets([torch.arange(3, 20)])[0]
    points = landscape.vector + 0.1 * random(6, len(landscape.vector))
    directions = random(*points.shape, seed=7)
    calls.clear()
    for surface in (landscape, part):
        found = surface.derivatives(points, directions)
        torch.testing.assert_close(surface.gradient(points), found.gradients)
        ahead = surface.gradient(points + 1e-5 * directions) - surface.gradient(points - 1e-5 * directions)
        torch.testing.assert_close(ahead / 2e-5, found.products, rtol=1e-6, atol=1e-6)
        assert surface.value(points).shape == (6,)
    assert (len(calls) == 0) == (kept > 2000)
