"""Mistakes that Laplace libraries are known to have made, each with a test that it is not made here."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from problems import LargestTensor, ekfac, ggn, jacobian, relative_error
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ModelChangedError, OutputError

EXACT = 1e-11  # float64, small networks


CLASSES = {"Full": lp.Full, "KFAC": lp.KFAC, "EKFAC": ekfac, "Diagonal": lp.Diagonal}
each_class = pytest.mark.parametrize("name", CLASSES)


def perceptron(outputs=3, dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


def classes(n=12, dtype=torch.float64):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(n) % 3


def reals(n=12, outputs=3):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(n, 3, generator=generator, dtype=torch.float64),
        torch.randn(n, outputs, generator=generator, dtype=torch.float64),
    )


# -- samples and randomness --------------------------------------------------------------------------------------------


@pytest.mark.quick("KFAC", "Diagonal")
@each_class
def test_samples_at_unrelated_inputs_are_independent(name):
    """One noise vector for all inputs would make them perfectly correlated, which ruins batch acquisition."""
    net = nn.Linear(2, 1, bias=False).double()
    posterior = CLASSES[name](net, "regression").fit([(torch.eye(2).double().repeat(4, 1), torch.zeros(8, 1).double())])
    n, pair = 3000, torch.eye(2).double()
    for options in ({"joint": True, "link": "mc"}, {"link": "mc"}, {"method": "sampled"}):
        samples = posterior.predictive(
            pair, n_samples=n, generator=torch.Generator().manual_seed(0), **options
        ).functional_samples
        correlation = torch.corrcoef(samples[:, :, 0].T)[0, 1].item()
        assert abs(correlation) < 5 / n**0.5  # five standard errors


@each_class
def test_joint_samples_follow_the_covariance_across_inputs(name):
    """And at related inputs they must be correlated: the same input twice gives the same value twice."""
    x, y = reals()
    posterior = CLASSES[name](perceptron(), "regression").fit([(x, y)])
    twice = x[:1].repeat(2, 1)
    generator = torch.Generator().manual_seed(0)
    samples = posterior.predictive(twice, joint=True, link="mc", n_samples=50, generator=generator).functional_samples
    # The covariance of the two is singular; its root is right to the square root of float64's rounding.
    assert (samples[:, 0] - samples[:, 1]).abs().max() < 1e-6
    assert samples[:, 0].std(0).min() > 1e-3


# -- scales ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1.0, 0.5])
@each_class
def test_scale_of_the_empirical_fisher_of_a_regression(name, noise):
    """One datum: the gradient of −log N(y|f, σ²) is Jᵀr/σ². Half a squared loss has gradient r, not 2r."""
    net, (x, y) = perceptron(), reals(1)
    posterior = CLASSES[name](net, lp.Gaussian(noise), backend=lp.Native("empirical_fisher")).fit([(x, y)])
    gradient = torch.einsum("cp,c->p", jacobian(net, x)[0], (net(x) - y)[0].detach() / noise**2)
    got = posterior.precision_matrix().diagonal() - 1
    assert relative_error(got, gradient.square()) < EXACT


@each_class
def test_temperature_divides_likelihood_and_curvature_alike(name):
    """In the evidence as in the posterior."""
    net, (x, y) = perceptron(), classes()
    cold = CLASSES[name](net, "classification", temperature=0.25).fit([(x, y)])
    fourfold = CLASSES[name](net, "classification").fit([(x, y)] * 4)
    assert relative_error(cold.precision_matrix(), fourfold.precision_matrix()) < EXACT
    assert cold.log_marginal_likelihood().item() == pytest.approx(fourfold.log_marginal_likelihood().item(), rel=EXACT)


@each_class
def test_the_noise_is_in_every_variance_of_a_regression(name):
    """Whichever way it is predicted, with one shape; and epistemic plus aleatoric is all of it."""
    net, (x, y) = perceptron(), reals()
    posterior = CLASSES[name](net, lp.Gaussian(0.5)).fit([(x, y)])
    generator = torch.Generator().manual_seed(0)
    for options in ({}, {"link": "exact"}, {"link": "mc"}, {"method": "sampled"}, {"joint": True}):
        prediction = posterior.predictive(x[:5], generator=generator, **options)
        assert prediction.mean.shape == prediction.variance.shape == prediction.epistemic.shape == (5, 3)
        assert relative_error(prediction.variance, prediction.epistemic + 0.25) < EXACT
        assert relative_error(prediction.aleatoric, torch.full((5, 3), 0.25).double()) < EXACT


# -- what is never built, and what is built once -----------------------------------------------------------------------


def test_last_layer_with_many_classes_builds_no_jacobian():
    """[B, C, P] would be 4.1 GB here. The largest thing is a covariance of the classes or a factor's float64 copy."""
    n_classes, n_features = 1000, 256
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, n_features), nn.ReLU(), nn.Linear(n_features, n_classes))
    x, y = torch.randn(4, 5), torch.arange(4)
    for cls in (lp.KFAC, lp.Diagonal):
        with LargestTensor() as largest:
            posterior = cls(net, "classification", parameters="last_layer").fit([(x, y)])
            variance = posterior.functional_posterior(x, outputs="diagonal").covariance
            posterior.log_marginal_likelihood()
        assert variance.shape == (4, n_classes)
        assert (variance > 0).all()
        assert largest.bytes <= 4 * n_classes**2 * 4  # [B, C, C] in float32: the roots of the loss Hessians
    few = posterior.functional_posterior(x, outputs=[3, 500]).covariance
    assert relative_error(few.diagonal(dim1=-2, dim2=-1), variance[:, [3, 500]]) < 1e-5


def test_diagonal_curvature_of_plain_layers_builds_no_jacobian():
    """Of layers that are used once per example only products of squares are needed: [32, 50, P] would be 500 MB."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 400), nn.Tanh(), nn.Linear(400, 50))
    x, y = torch.randn(32, 100), torch.arange(32) % 50
    for cls in (lp.Diagonal, lp.KFAC):
        with LargestTensor() as largest:
            posterior = cls(net, "classification").fit([(x, y)])
            posterior.functional_posterior(x)
        # Output gradients of the widest layer, [C, B, 400], once more in the layer's eigenbasis.
        assert largest.bytes <= 50 * 32 * 401 * 4


@pytest.mark.filterwarnings("ignore:Tuning by validation ended")  # the network is not a trained one
@each_class
def test_one_forward_pass_for_all_examples_and_outputs(name):
    """And not one for each output, example or point of a grid."""
    net, (x, y) = perceptron(), classes()
    posterior = CLASSES[name](net, "classification").fit([(x, y)])
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    posterior.functional_posterior(x)
    assert len(calls) == 1
    posterior.functional_posterior(x, joint=True)
    assert len(calls) == 2
    posterior.fit_prior_precision("validation", data=[(x[:6], y[:6]), (x[6:], y[6:])])
    assert len(calls) == 4


# -- types and checkpoints ---------------------------------------------------------------------------------------------


@each_class
def test_posteriors_can_be_copied_and_pickled(name):
    """With their network, e.g. to send one to another process."""
    x, y = classes()
    posterior = CLASSES[name](perceptron(), "classification", parameters="last_layer").fit([(x, y)])
    want = posterior.predictive(x).mean
    for again in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert torch.equal(again.predictive(x).mean, want)
        assert again.network.model is not posterior.network.model


# -- layers ------------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Two modules that hold one parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_layer_wise_priors_of_shared_parameters():
    """A weight that two modules share belongs to the first; the second's bias keeps a precision of its own."""
    torch.manual_seed(0)
    net, (x, y) = Shared().double(), classes()
    for cls in CLASSES.values():
        posterior = cls(net, "classification").fit([(x, y)]).fit_prior_precision(structure="layerwise")
        assert posterior.layer_names == ("first", "second")
        assert posterior.prior_precision.shape == (2,)


# -- misuse ------------------------------------------------------------------------------------------------------------


@each_class
def test_one_logit_is_no_classifier(name):
    """A softmax over one output always says 1, and its curvature is zero."""
    x, y = classes()
    with pytest.raises(OutputError, match="Bernoulli|binary"):
        CLASSES[name](perceptron(1), "classification").fit([(x, y.clamp(max=1))])


# -- data and networks that were refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.Sequential], ids=["bare", "in a Sequential"])
@each_class
def test_the_last_layer_may_be_the_only_one(name, wrap):
    torch.manual_seed(0)
    net, (x, y) = wrap(nn.Linear(3, 3)).double(), classes()
    last = CLASSES[name](net, "classification", parameters="last_layer").fit([(x, y)])
    every = CLASSES[name](net, "classification").fit([(x, y)])
    assert last.n_parameters == 12
    assert relative_error(last.precision_matrix(), every.precision_matrix()) < EXACT


class Graph(nn.Module):
    """Mixes the inputs' entries by a sparse matrix."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        adjacency = (torch.eye(3) + torch.ones(3, 3) / 3).double()
        self.register_buffer("adjacency", adjacency if layout is None else adjacency.to_sparse(layout=layout))

    def forward(self, x):
        return self.layer((self.adjacency @ x.mT).mT)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@each_class
def test_networks_may_hold_sparse_tensors(name, layout):
    """They are looked at as they are, and their changes are seen."""
    (x, y), network = classes(), Graph(layout)
    posterior = CLASSES[name](network, "classification").fit([(x, y)])
    plain = CLASSES[name](Graph(None), "classification").fit([(x, y)])
    assert relative_error(posterior.predictive(x).mean, plain.predictive(x).mean) < EXACT
    network.adjacency = network.adjacency * 2
    with pytest.raises(ModelChangedError):
        posterior.predictive(x)


def test_one_output_behind_a_prelu():
    """torch 2.15's nested vmap gives gradients of another shape for its weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.PReLU(3), torch.nn.Linear(3, 1)).double()
    x, y = torch.randn(5, 2).double(), torch.randn(5, 1).double()
    curvature = ggn(jacobian(net, x), torch.ones(5, 1, 1).double()).diagonal() + 1
    posterior = lp.Diagonal(net, "regression").fit([(x, y)])
    torch.testing.assert_close(1 / posterior.variance(), curvature, rtol=1e-9, atol=1e-9)
