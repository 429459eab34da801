"""Products over a data loader: passes, splits, refusals, and the ways in which networks are differentiated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from problems import (
    N,
    assert_symmetric,
    batch_jacobian,
    close,
    dense_ggn,
    network,
    normal,
    operators,
    problem,
    split,
    whole,
)
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import laplace_plus as lp
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, HessianOperator, JacobianOperator
from laplace_plus.errors import (
    ConfigurationError,
    DataError,
    EmptyDataError,
    ModelChangedError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.linalg.linear_maps import LinearMap
from laplace_plus.linalg.operators import Identity
from laplace_plus.network.network import Network
from laplace_plus.testing import assert_untouched, snapshot

pytestmark = pytest.mark.usefixtures("double")


def student(outputs: Tensor, labels: Tensor) -> Tensor:
    """Concave only near the data, which the data here are far from."""
    return -2.5 * torch.log1p((outputs - labels).square() / 4).sum(-1)


def test_any_split_any_chunk_and_any_batch():
    model, data = problem(lp.Categorical(), 3)
    x, y = whole(data)
    vectors = {n: normal(5, n, seed=6) for n in (31, 36)}
    reference = [operator(vectors[operator.shape[1]]) for operator in operators(model, data)]
    for sizes, chunk in (((N,), 1), ((1,) * N, 16), ((2, 9, 1), 2)):
        cut = operators(model, split(x, y, *sizes), chunk_size=chunk)
        for operator, wanted in zip(cut, reference, strict=True):
            if getattr(operator, "kind", None) != "mc":  # whose labels are drawn batch by batch
                close(operator(vectors[operator.shape[1]]), wanted, 1e-12)
    for operator, wanted in zip(operators(model, data), reference, strict=True):
        v = vectors[operator.shape[1]]
        assert torch.equal(operator(v), wanted), "products must be the same every time"
        close(operator(v[2]), wanted[2], 1e-12)
        close(operator(v.view(5, 1, -1)), wanted.view(5, 1, -1), 1e-12)
        assert operator(v[:0]).shape == (0, operator.shape[0])


def test_seeds():
    model, data = problem(lp.Categorical(), 3)
    state = torch.get_rng_state()
    one, same, other = (FisherOperator(model, "classification", data, seed=seed).dense() for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


class Shuffled(RandomSampler):
    """A sampler of one's own."""


def of_rows(model, data):
    kinds = JacobianOperator(model, data), FisherOperator(model, "classification", data)
    return *kinds, GGNOperator(model, "classification", data).root()


def test_the_order_may_change_where_it_does_not_matter():
    model, data = problem(lp.Categorical(), 3)
    x, y = whole(data)
    examples, source, v = TensorDataset(x, y), torch.Generator().manual_seed(0), normal(2, 31)
    other = DataLoader(examples, 5, sampler=Shuffled(examples, generator=source))
    close(GGNOperator(model, "classification", other)(v), GGNOperator(model, "classification", data)(v), 1e-12)
    for operator in of_rows(model, other):
        with pytest.raises(DataError, match="another order"):
            operator(v)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_that_shuffles_is_read_in_the_order_of_its_dataset(drop_last):
    model, data = problem(lp.Categorical(), 3)
    examples = TensorDataset(*whole(data))
    plain, shuffled = (DataLoader(examples, 5, shuffle=shuffle, drop_last=drop_last) for shuffle in (False, True))
    v = normal(2, 31)
    for operator, expected in zip(of_rows(model, shuffled), of_rows(model, plain), strict=True):
        assert torch.equal(operator(v), expected(v))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop(),
        lambda data: data.append(data[0]),
        lambda data: data[1][0].add_(0.01),
        lambda data: data[1][1].copy_((data[1][1] + 1) % 3),
        lambda data: data[1][1].copy_(data[1][1].flip(0)),
        lambda data: data.clear(),
    ],
)
def test_other_data_are_refused(change):
    model, data = problem(lp.Categorical(), 3)
    made = operators(model, data)
    before = snapshot(model)
    change(data)
    for operator in made:
        with pytest.raises(DataError):
            operator(normal(2, operator.shape[1]))
    assert_untouched(model, before)


def test_another_network_is_refused():
    model, data = problem(lp.Categorical(), 3)
    model = nn.Sequential(model, nn.BatchNorm1d(3).double())
    posterior = lp.Diagonal(model, "classification").fit(data)
    for change in (lambda: model[0][0].weight.detach().add_(0.1), lambda: model[1].running_mean.add_(0.1)):
        operator = GGNOperator(posterior.network, "classification", data)
        operator(normal(operator.shape[0]))
        change()
        with pytest.raises(ModelChangedError, match="changed"):
            operator(normal(operator.shape[0]))
        GGNOperator(posterior.network, "classification", data)
        with pytest.raises(ModelChangedError):  # must still be noticed by whoever shares the network
            posterior.predictive(data[0][0])


@pytest.mark.parametrize("make", [JacobianOperator, lambda *a, **k: GGNOperator(a[0], "classification", *a[1:], **k)])
def test_bad_data(make):
    model, data = problem(lp.Categorical(), 3)
    before = snapshot(model)
    for once in (iter(data), (batch for batch in data), itertools.cycle(data)):
        with pytest.raises(DataError, match="only once"):
            make(model, once)
    with pytest.raises(EmptyDataError):
        make(model, [])
    with pytest.raises(DataError):
        make(model, data[0])
    spoilt = [data[0], (data[1][0].clone(), data[1][1])]
    spoilt[1][0][2, 1] = torch.nan
    with pytest.raises(NonFiniteError, match="output in batch 1"):
        make(model, spoilt)
    for chunk in (0, True, 2.0):
        with pytest.raises(ConfigurationError, match="chunk"):
            make(model, data, chunk_size=chunk)
    assert_untouched(model, before)
    with torch.no_grad():
        model[2].bias[1] = torch.inf
    with pytest.raises(NonFiniteError, match=r"2\.bias"):
        make(model, data)


def test_outputs_that_overflow_are_named():
    model, data = problem(lp.Categorical(), 3)
    with torch.no_grad():
        model[2].weight.fill_(1e308)
        model[0].bias.fill_(50.0)
    with pytest.raises(NonFiniteError, match="output in batch 0"):
        GGNOperator(model, "classification", data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(dtype):
    model, data = problem(lp.Categorical(), 3)
    wanted = dense_ggn(model, lp.Categorical(), data)
    half = network(3).to(dtype)
    operator = GGNOperator(half, "classification", [(x.to(dtype), y) for x, y in data])
    assert operator.dtype is torch.float32
    v = normal(2, 31).float()
    close(operator(v).double(), v.double() @ wanted, 1e-5 if dtype is torch.float32 else 0.05)


# -- as an operator among others ---------------------------------------------------------------------------------------


def test_differentiable_in_the_vectors_and_part_of_the_algebra():
    model, data = problem(lp.Categorical(), 3)
    for operator in operators(model, data):
        v = normal(2, operator.shape[1]).requires_grad_()
        assert gradcheck(operator, (v,), fast_mode=True)
        linear = LinearMap(operator, operator.shape[1], m=operator.shape[0], symmetric=operator.symmetric)
        u = normal(2, operator.shape[0], seed=2)
        close(linear.transposed(u), operator.T(u))
        assert linear.tensors == ()
    scale = torch.tensor(0.3, requires_grad=True)
    precision = operators(model, data)[0] / 2 + scale * Identity(31)
    assert precision.symmetric
    close(precision.dense().detach(), dense_ggn(model, lp.Categorical(), data) / 2 + 0.3 * torch.eye(31))
    (gradient,) = torch.autograd.grad(precision.dense().trace(), scale)
    assert float(gradient) == pytest.approx(31)


# -- ways of differentiating -------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    """A sine that can be differentiated once, and only backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class Wrong(torch.autograd.Function):
    """A sine whose forward derivative and batching rule are wrong."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0].sin()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, ...], x: Tensor) -> tuple[Tensor, int]:
        return 2 * x.sin(), in_dims[0]


class Sine(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.inner, self.outer, self.function = nn.Linear(3, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.function(self.inner(x)))


@pytest.mark.parametrize("function", [Once, Wrong])
def test_derivatives_that_are_missing_or_wrong(function):
    data = problem(lp.Categorical(), 3)[1]
    torch.manual_seed(0)
    model, plain = Sine(function.apply), Sine(torch.sin)
    plain.load_state_dict(model.state_dict())
    for operator, reference in zip(operators(plain, data), operators(model, data), strict=True):
        v = normal(3, operator.shape[1])
        if function is Once and isinstance(operator, HessianOperator):
            with pytest.raises(UnsupportedError, match="twice"):
                reference(v)
            continue
        close(reference(v), operator(v))
        close(reference(v[0]), operator(v[0]))


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm_of_torch_has_a_wrong_second_derivative(dim):
    torch.manual_seed(0)
    inner = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4), dim=dim)
    model = nn.Sequential(inner, nn.Tanh(), nn.Linear(4, 3))
    x, y = whole(problem(lp.Categorical(), 3)[1])
    net = Network(model, "all", lp.Categorical().arrange)
    operator = HessianOperator(net, "classification", [(x, y)])
    point = net.vector()

    def gradient(vector: Tensor) -> Tensor:
        leaf = vector.detach().requires_grad_()
        loss = nn.functional.cross_entropy(net(x, net.substitute(leaf)), y, reduction="sum")
        return torch.autograd.grad(loss, leaf)[0]

    step = 1e-5 * torch.eye(len(point))
    wanted = torch.stack([(gradient(point + e) - gradient(point - e)) / 2e-5 for e in step])
    close(operator.dense(), wanted, 1e-8)


def test_hard_activations_in_place_and_not():
    x, y = whole(problem(lp.Categorical(), 3)[1])
    for inplace in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 5), nn.Hardswish(inplace), nn.Linear(5, 5), nn.Hardsigmoid(inplace), nn.Linear(5, 3)]
        model = nn.Sequential(*layers)
        jacobian = JacobianOperator(model, [(x, y)]).dense()
        close(jacobian, batch_jacobian(model, model(x)).flatten(0, 1), 1e-7)
        hessian_operator = HessianOperator(model, "classification", [(x, y)])
        assert_symmetric(hessian_operator, normal(hessian_operator.shape[0]), normal(hessian_operator.shape[0], seed=1))


def test_a_wrong_second_derivative_is_refused():
    class Crooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.flip(-1) * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            x = ctx.saved_tensors[0]
            return g.flip(-1) * x.flip(-1).detach() + g * x.flip(-1) * (1 + x.detach()) / (1 + x.detach())

    torch.manual_seed(0)
    operator = HessianOperator(Sine(Crooked.apply), "classification", problem(lp.Categorical(), 3)[1])
    with pytest.raises(UnsupportedError, match="not symmetric"):
        operator(normal(31))
