"""Recordings give what the functions give that they are made of, with fewer operations."""

import pytest
import torch
from torch import Tensor, nn

from laplace_plus.geometry.recording import record

aten = torch.ops.aten


def operations(recording) -> list:
    return [node.target for node in recording.__self__.graph.nodes if node.op == "call_function"]


def gradients(net: nn.Module, loss):
    """The mapped gradient of a network's loss as a function of points, inputs and targets."""
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}

    def of_one(point: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = point.split([shape.numel() for shape in shapes.values()])
        own = {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
        return loss(torch.func.functional_call(net, own, (x,)), y)

    return torch.func.vmap(torch.func.grad(of_one), (0, None, None))


@pytest.mark.parametrize("outputs", [2, 3, 15, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_classifier_are_those_of_torch(outputs, dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 18), nn.Tanh(), nn.Linear(18, outputs)).to(dtype)
    size = sum(parameter.numel() for parameter in net.parameters())
    function = gradients(net, lambda f, y: nn.functional.cross_entropy(f, y, reduction="sum"))
    points = torch.randn(4, size, dtype=dtype)
    x, y = torch.randn(40, 5, dtype=dtype), torch.randint(outputs, (40,))
    recording = record(function, points, x, y)
    for seed in range(3):  # other numbers than those of the recording, too
        torch.manual_seed(seed)
        points, x, y = torch.randn_like(points), torch.randn_like(x), torch.randint(outputs, (40,))
        torch.testing.assert_close(recording(points, x, y), function(points, x, y))


def test_sequences_of_classes_and_convolutions():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(2, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(120, 12), nn.Unflatten(1, (4, 3))
    ).double()
    size = sum(parameter.numel() for parameter in net.parameters())
    function = gradients(net, lambda f, y: nn.functional.cross_entropy(f.mT, y, reduction="sum"))
    points, x, y = torch.randn(3, size).double(), torch.randn(17, 2, 8).double(), torch.randint(3, (17, 4))
    torch.testing.assert_close(record(function, points, x, y)(points, x, y), function(points, x, y))


def test_what_depends_on_no_argument_is_computed_once():
    def function(a):
        return (a * torch.ones(3).cumsum(0) + torch.zeros_like(a)) * 1

    recording = record(function, torch.randn(4, 3))
    assert {aten.ones.default, aten.cumsum.default, aten.zeros_like.default, aten.mul.Scalar}.isdisjoint(
        operations(recording)
    )
    a = torch.randn(4, 3)
    torch.testing.assert_close(recording(a), function(a), rtol=0, atol=0)


def test_long_constants_are_filled_anew():
    recording = record(lambda a: a + torch.ones(2000, 2000).mul(2), torch.zeros(()))
    assert aten.ones.default in operations(recording)
    assert not list(recording.__self__.buffers())
    torch.testing.assert_close(recording(torch.tensor(1.0)), torch.full((2000, 2000), 3.0))


def test_random_numbers_are_drawn_anew():
    recording = record(lambda a: a + torch.rand(5), torch.zeros(5))
    assert not torch.equal(recording(torch.zeros(5)), recording(torch.zeros(5)))


def test_a_function_that_writes_keeps_its_operations():
    def function(a):
        total = torch.zeros_like(a)
        total.add_(a).mul_(2)
        other = a * 1
        return total + other.mul_(3) + a

    recording = record(function, torch.randn(4))
    a = torch.randn(4)
    for _ in range(2):  # a constant that is written into would be another at the second call
        torch.testing.assert_close(recording(a.clone()), 6 * a)


def test_the_value_of_the_loss_is_left_out_of_its_gradient():
    net = nn.Linear(3, 2)
    function = gradients(net, lambda f, y: nn.functional.cross_entropy(f, y, reduction="sum"))
    recording = record(function, torch.randn(4, 8), torch.randn(30, 3), torch.randint(2, (30,)))
    found = operations(recording)
    assert aten.gather.default not in found  # picks the label's log-probability
    assert aten.baddbmm.default in found or any(getattr(one, "__name__", "") == "_narrow_product" for one in found)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(40, 20, 3), (40, 20, 17), (3, 20, 3), (16, 1, 15)])
def test_products_with_few_columns(rows, inner, columns):
    torch.manual_seed(0)
    a, b, c = (
        torch.randn(2, rows, inner).double(),
        torch.randn(2, inner, columns).double(),
        torch.randn(columns).double(),
    )
    recording = record(lambda a, b, c: (torch.bmm(a, b) + c).view(2, -1), a, b, c)
    torch.testing.assert_close(recording(a, b, c), (a @ b + c).view(2, -1))
    turned = columns < 16 <= rows
    assert (aten.baddbmm.default in operations(recording)) is not turned


def test_a_product_that_is_used_twice_stays():
    a, b = torch.randn(2, 3, 20), torch.randn(2, 20, 20)

    def function(a, b):
        product = torch.bmm(a, b)
        return (product + b[:, :1]) * product

    torch.testing.assert_close(record(function, a, b)(a, b), function(a, b))


def test_a_multiple_of_one_along_other_strides():
    def function(a):
        return (a.narrow(1, 2, 4) * 1).view(-1)  # a copy, of which a view is possible, where none of the piece is

    recording = record(function, torch.randn(3, 9))
    a = torch.randn(3, 9)
    torch.testing.assert_close(recording(a), function(a), rtol=0, atol=0)
