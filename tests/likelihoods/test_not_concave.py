"""Log-densities that are not concave: the positive part of the Hessian, against dense float64 matrices."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributions as td
from torch import nn
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import NoGainWarning, UnsupportedError


def student_t(f, y):
    return td.StudentT(3.0, f, 0.5).log_prob(y).sum(-1)


def mixture_density(f, y):
    """A mixture of two normals with weights, means and deviations."""
    logits, mean, log_std = f.chunk(3, -1)
    return (logits.log_softmax(-1) + td.Normal(mean, log_std.exp()).log_prob(y)).logsumexp(-1)


def negative_binomial(f, y):
    return td.NegativeBinomial(f[:, :1].exp(), logits=f[:, 1:]).log_prob(y).sum(-1)


def weibull(f, y):
    z = y[:, 0].log() + f[:, 1]
    return y[:, 1] * (f[:, 0] + f[:, 1] + (f[:, 0].exp() - 1) * z) - (f[:, 0].exp() * z).exp()


def coupled(f, y):
    """Pairs of rows with heavy tails of their differences: not concave, and the rows depend on each other."""
    return td.StudentT(2.0).log_prob(3 * (f.diff(dim=0) - y.diff(dim=0))).sum()


KINDS = {student_t: 1, mixture_density: 6, negative_binomial: 2, weibull: 2, coupled: 1}


def problem(density, n=14):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, KINDS[density])).double()
    x, y = torch.randn(n, 3).double(), 2 * torch.randn(n, 1).double()
    if density is negative_binomial:
        y = torch.randint(0, 9, (n, 1)).double()
    if density is weibull:
        y = torch.stack([torch.rand(n) * 3 + 0.1, (torch.rand(n) < 0.7).float()], 1).double()
    return net, x, y, lp.LogDensity(density, positive_part=True, couples_rows=density is coupled)


@pytest.mark.parametrize("density", KINDS)
def test_the_curvature_is_the_positive_part(density):
    net, x, y, likelihood = problem(density)
    data = [(x[:8], y[:8]), (x[8:], y[8:])]
    full = lp.Full(net, likelihood).fit(data)
    wanted = negative = 0.0
    for inputs, targets in data:
        f = net(inputs).detach()
        whole = torch.func.hessian(lambda v, f=f, t=targets: -density(v.view(f.shape), t).sum())(f.flatten())
        values, vectors = torch.linalg.eigh(whole)  # without coupling the positive part is that of each block
        negative = min(negative, float(values.min()))
        network = full.network
        jacobian = torch.func.jacrev(lambda v, x=inputs, n=network: n(x, n.substitute(v)).flatten())(network.vector())
        wanted = wanted + jacobian.mT @ (vectors * values.clamp_min(0)) @ vectors.mT @ jacobian
    assert negative < -0.01
    eye = torch.eye(len(wanted)).double()
    assert_close(full.precision_matrix() - eye, wanted)
    diagonal = lp.Diagonal(net, likelihood).fit(data)
    assert_close(diagonal.precision_matrix() - eye, torch.diag(wanted.diagonal()))
    low = lp.LowRank(net, likelihood, rank=len(wanted)).fit(data)
    assert_close(low.precision_matrix() - eye, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.quick("Full-mixture_density", "KFAC-student_t")
@pytest.mark.parametrize(
    ("cls", "density"),
    [(lp.Full, mixture_density), (lp.Full, weibull), (lp.KFAC, student_t), (lp.KFAC, negative_binomial)],
)
def test_the_default_tuning_and_predictions(cls, density):
    net, x, y, likelihood = problem(density)
    posterior = cls(net, likelihood).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior.fit_prior_precision()
    assert len(posterior.tuning.losses) > 1  # data were left out
    assert bool(posterior.predictive(x).log_prob(y).isfinite().all())


@pytest.mark.quick("student_t")
@pytest.mark.parametrize("density", [student_t, weibull])
def test_the_error_says_what_works(density):
    net, x, y, _ = problem(density)
    with pytest.raises(UnsupportedError, match=r"not concave.*positive_part=True.*empirical_fisher"):
        lp.Full(net, density).fit([(x, y)])
    posterior = lp.Full(net, density, backend=lp.Native("empirical_fisher")).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGainWarning)
        posterior.fit_prior_precision()
    assert not posterior.tuning.losses.isnan().any()
    assert bool(posterior.predictive(x).mean.isfinite().all())


def test_a_class_of_ones_own():
    class Heavy(lp.Likelihood):
        positive_part = True

        def log_density(self, outputs, targets):
            return student_t(outputs, targets)

    net, x, y, likelihood = problem(student_t)
    own, other = (lp.KFAC(net, one).fit([(x, y)]).precision_matrix() for one in (Heavy(), likelihood))
    assert_close(own, other)
