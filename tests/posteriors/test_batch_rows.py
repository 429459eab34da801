"""Projections onto the null space of a batch's rows, and their gradients, against dense solves."""

import pytest
import torch
from posteriors.dense_rows import dense_rows, projector_of
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network
from laplace_plus.posteriors.projection import BatchRows

D = torch.float64


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return net, [(torch.randn(3, 2, dtype=D), torch.arange(3))]


@pytest.mark.parametrize("kind", ["logit", "ggn", "loss"])
def test_gradients_pass_through_projections_as_through_the_dense_solve(problem, kind):
    net, data = problem
    likelihood = lp.Categorical()
    network = Network(net, "all", likelihood.arrange)
    v = torch.randn(2, network.n_parameters, generator=generator(), dtype=D)
    cotangent = torch.randn(v.shape, generator=generator(1), dtype=D)

    def gradients(project):
        theta, vectors = network.vector().requires_grad_(), v.clone().requires_grad_()
        value = project(theta, vectors)
        return value.detach(), *torch.autograd.grad((value * cotangent).sum(), (theta, vectors))

    def dense(theta, vectors):
        rows = dense_rows(network, data[:1], kind, theta)
        if kind == "ggn":  # independent rows, which pinv can be differentiated for
            rows = rows.reshape(3, 3, -1)[:, :2].flatten(0, 1)
        return vectors - vectors @ rows.T @ torch.linalg.solve(rows @ rows.T, rows)

    batch = Batch(*data[0])
    found = gradients(lambda theta, u: BatchRows(network, likelihood, batch, kind, theta).project(u).value)
    expected = gradients(dense)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8 * float(other.abs().max()))
    assert expected[1].abs().max() > 1e-3
    assert not BatchRows(network, likelihood, batch, kind, network.vector()).project(v).value.requires_grad


def test_a_linear_networks_projection_does_not_depend_on_its_parameters():
    net = nn.Linear(4, 1, bias=False).double()
    likelihood = lp.Gaussian()
    network = Network(net, "all", likelihood.arrange)
    x = torch.randn(2, 4, generator=generator(), dtype=D)
    theta = network.vector().requires_grad_()
    rows = BatchRows(network, likelihood, Batch(x, x[:, :1]), "logit", theta)
    v = torch.randn(3, 4, generator=generator(), dtype=D)
    projected = rows.project(v).value
    torch.testing.assert_close(projected.detach(), v @ projector_of(x), rtol=0, atol=1e-10)
    (gradient,) = torch.autograd.grad(projected.sum(), theta)
    assert not gradient.any()


def test_equal_scales_pass_nothing_through_the_projection(problem):
    net, data = problem
    likelihood = lp.Categorical()
    network = Network(net, "all", likelihood.arrange)
    theta = network.vector().requires_grad_()
    u = torch.randn(2, len(theta), generator=generator(), dtype=D)
    kernel = BatchRows(network, likelihood, Batch(*data[0]), "loss", theta).project(u).value
    x, y = data[0]

    def slope(kernel_std, image_std):
        deviations = kernel_std * kernel + image_std * (u - kernel)
        still = theta.detach()  # only through the projection
        outputs = torch.stack([network(x, network.substitute(still + one)) for one in deviations])
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y.repeat(2))
        return torch.autograd.grad(loss, theta, retain_graph=True)[0].norm()

    assert slope(0.3, 0.3) < 1e-10
    assert slope(0.3, 0.1) > 1e-4


@pytest.mark.parametrize("kind", ["logit", "ggn", "loss"])
def test_positions_are_rows_of_their_own_but_for_losses(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    likelihood = lp.Categorical()
    network = Network(net, "all", likelihood.arrange)
    x, y = torch.randn(2, 4, 2, dtype=D), torch.randint(0, 3, (2, 4))
    theta = network.vector()
    rows = BatchRows(network, likelihood, Batch(x, y), kind, theta)
    flat = [(x.flatten(0, 1), y.flatten())]
    dense = dense_rows(network, flat, kind, theta)
    dense = dense.reshape(2, 4, -1).sum(1) if kind == "loss" else dense
    assert rows.shape == tuple(dense.shape)
    v = torch.randn(2, len(theta), generator=generator(), dtype=D)
    torch.testing.assert_close(rows.project(v).value, v @ projector_of(dense), rtol=0, atol=1e-7)
    found = rows.matvec(v)
    scale = dense.norm(dim=-1) if kind == "loss" else 1.0
    torch.testing.assert_close(found, (v @ dense.T) / scale, rtol=1e-9, atol=1e-9)
    u = torch.randn(2, rows.shape[0], generator=generator(), dtype=D)
    torch.testing.assert_close((rows.rmatvec(u) * v).sum(), (u * found).sum())
