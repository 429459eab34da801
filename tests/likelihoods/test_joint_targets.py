"""Several tensors as a target: a joint log-density takes them as they are, in every class, against dense matrices."""

from __future__ import annotations

import math
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import DataError, LabelError

Maps = namedtuple("Maps", ["depth", "normals"])


def class_and_box(f, y):
    """Log-density of a class out of three and a box with unit noise."""
    labels, box = y
    squares = (f[:, 3:] - box).square().sum(-1)
    return -cross_entropy(f[:, :3], labels, reduction="none") - squares / 2 - 2 * math.log(2 * math.pi)


def depth_and_normals(f, y):
    """Log-density of a depth with noise .5, and of three coordinates with unit noise, of each pixel."""
    return -2 * (f[:, 0] - y.depth).square() - (f[:, 1:] - y.normals).square().sum(-1) / 2


def detection(rows=14):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7)).double()
    return net, torch.randn(rows, 3).double(), (torch.randint(0, 3, (rows,)), torch.rand(rows, 4).double())


def exact(posterior, x, hessian):
    """``Σ Jᵀ Λ J`` for ``Λ [N, C, C]``, by one Jacobian of all outputs."""
    network = posterior.network
    jacobian = torch.func.jacrev(lambda v: network(x, network.substitute(v)).flatten(0, -2))(network.vector())
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian)


def detection_hessian(f):
    p = f[:, :3].softmax(-1)
    hessian = torch.eye(7).double().repeat(len(f), 1, 1)
    hessian[:, :3, :3] = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return hessian


@pytest.mark.diagonal
@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize("parameters", ["all", "last_layer"])
@pytest.mark.parametrize("cls", [lp.Full, lp.Diagonal, lp.KFAC])
def test_a_class_and_a_box(cls, parameters, as_mapping):
    net, x, (labels, box) = detection()
    likelihood = lp.LogDensity(class_and_box)
    data = [(x[:5], (labels[:5], box[:5])), (x[5:], (labels[5:], box[5:]))]
    if as_mapping:
        likelihood = lp.LogDensity(lambda f, y: class_and_box(f, (y["class"], y["box"])))
        data = [(inputs, {"class": own[0], "box": own[1]}) for inputs, own in data]
    posterior = cls(net, likelihood, parameters=parameters).fit(data)
    wanted = exact(posterior, x, detection_hessian(net(x).detach()))
    value = class_and_box(net(x), (labels, box)).sum()
    assert_close(posterior.laplace_model().log_likelihood(), value.detach())
    own = posterior.precision_matrix() - torch.eye(len(wanted)).double()
    assert_close(own.diagonal()[-7:], wanted.diagonal()[-7:])  # a bias's block of KFAC has the diagonal of Σ Λ
    if cls is lp.Full:
        assert_close(own, wanted)
        posterior.fit_prior_precision()
        assert posterior.tuning.chosen in ("marginal_likelihood", "new_data", "network")
    assert posterior.predictive(x[:5]).log_prob(data[0][1]).shape == (5,)


def test_pixels_of_depths_and_normals():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 1)).double()
    x, y = torch.randn(4, 2, 3, 5).double(), Maps(torch.rand(4, 3, 5).double(), torch.randn(4, 3, 5, 3).double())
    likelihood = lp.LogDensity(depth_and_normals, output_axis=1)
    posterior = lp.Full(net, likelihood).fit([(x, y)])
    hessian = torch.diag(torch.tensor([4.0, 1, 1, 1])).double().expand(60, 4, 4)
    own = posterior.precision_matrix() - torch.eye(posterior.n_parameters).double()
    assert_close(own, exact(posterior, x, hessian))
    flat = net(x).movedim(1, -1).reshape(60, 4)
    value = depth_and_normals(flat, Maps(y.depth.flatten(), y.normals.reshape(60, 3)))
    assert_close(posterior.laplace_model().log_likelihood(), value.sum().detach())
    assert posterior.predictive(x).log_prob(y).shape == (4, 3, 5)
    with pytest.raises(LabelError, match="leading shape"):
        lp.KFAC(net, likelihood).fit([(x, Maps(y.depth, y.normals.movedim(-1, 1)))])


@pytest.mark.quick("LowRank", "SWAG")
@pytest.mark.parametrize(
    "cls", [lp.LowRank, lp.SampledLaplace, pytest.param(lp.Riemannian, marks=pytest.mark.slow), lp.SWAG]
)
def test_methods_that_pass_over_the_data(cls):
    net, x, y = detection()
    options = {lp.SampledLaplace: {"n_samples": 4}, lp.SWAG: {"n_snapshots": 2}}.get(cls, {})
    posterior = cls(net, lp.LogDensity(class_and_box), **options).fit([(x, y)])
    assert posterior.sample(2).shape == (2, posterior.n_parameters)
    assert bool(posterior.predictive(x).log_prob(y).isfinite().all())


def test_tuners_that_pass_over_the_data():
    net, x, y = detection()
    data = [(x[:7], (y[0][:7], y[1][:7])), (x[7:], (y[0][7:], y[1][7:]))]
    posterior = lp.Full(net, lp.LogDensity(class_and_box)).fit(data)
    left_out = lp.leave_one_out(posterior)
    assert torch.equal(left_out.targets[0], y[0])
    hessian, alpha = detection_hessian(net(x).detach()), torch.eye(posterior.n_parameters).double()
    network = posterior.network
    jacobian = torch.func.jacrev(lambda v: network(x, network.substitute(v)))(network.vector())
    whole = alpha + torch.einsum("ncp,ncd,ndq->pq", jacobian, hessian, jacobian)
    without = torch.linalg.inv(whole - jacobian[3].mT @ hessian[3] @ jacobian[3])
    assert_close(left_out.covariance[3], jacobian[3] @ without @ jacobian[3].mT)
    gradient = torch.cat([net(x)[3, :3].softmax(-1) - one_hot(y[0][3], 3), net(x)[3, 3:] - y[1][3]])
    assert_close((left_out.mean - left_out.outputs)[3], (jacobian[3] @ without @ jacobian[3].mT @ gradient).detach())
    for tuner in ("tangent", "validation"):
        held_out = {"data": data} if tuner == "validation" else {}
        assert posterior.fit_prior_precision(tuner, **held_out).tuning.value < 0


def test_one_likelihood_has_one_target():
    net, x, y = detection()
    for likelihood in ("classification", "regression", "binary", lp.Poisson()):
        with pytest.raises(LabelError, match=r"one tensor as its target.*GivenNoise"):
            lp.KFAC(net, likelihood).fit([(x, y)])
    with pytest.raises(LabelError, match=r"one tensor as its target.*labels: int64"):
        lp.KFAC(net, "classification").fit([(x, {"labels": y[0]})])
    with pytest.raises(DataError, match="does not pair"):
        lp.KFAC(net, lp.LogDensity(class_and_box)).fit([(x, (y[0], y[1][:5]))])
    with pytest.raises(LabelError, match="noise does not pair"):
        lp.KFAC(net, lp.GivenNoise(0.1)).fit([(x, (net(x).detach(), torch.rand(14, 2)))])
