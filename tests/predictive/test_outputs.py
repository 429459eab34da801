"""Functional posteriors of all or some outputs against dense ``J Σ Jᵀ``, on every kind of layer, in any chunking."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from problems import jacobian, relative_error
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError
from laplace_plus.likelihoods.categorical import independent_variances
from laplace_plus.predictive import linearized
from laplace_plus.predictive.linearized import pushed

EXACT = 1e-10
CLASSES = 3


class Sentences(nn.Module):
    """Embedding, attention, layer normalisation and a projection that is used twice; outputs for each token."""

    def __init__(self, *, pool: bool | str, width: int = 4):
        super().__init__()
        self.pool = pool
        self.embedding = nn.Embedding(7, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.shared = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.shared(torch.tanh(self.shared(x)))
        if self.pool == "first":
            return self.head(x[:, 0])
        return self.head(x.mean(1) if self.pool else x)


def perceptron():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)), torch.randn(5, 4)


def convolutions():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=4),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )
    return net, torch.randn(4, 2, 5, 5)


def pooled():
    return Sentences(pool=True), torch.randint(0, 7, (4, 5))


def first_token():
    return Sentences(pool="first"), torch.randint(0, 7, (4, 5))


def tokens():
    return Sentences(pool=False), torch.randint(0, 7, (3, 4))


PROBLEMS = {problem.__name__: problem for problem in (perceptron, convolutions, pooled, first_token, tokens)}
POSTERIORS = {
    "KFAC": lp.KFAC,
    "EKFAC": lambda *args, **kwargs: lp.KFAC(*args, eigenvalue_corrected=True, **kwargs),
    "Diagonal": lp.Diagonal,
}


@pytest.fixture(scope="module", params=[(p, k) for p in PROBLEMS for k in POSTERIORS], ids=lambda pair: "-".join(pair))
def case(request):
    """A fitted posterior, inputs, and the mean and dense covariance ``[B·M·C, B·M·C]`` of all outputs."""
    name, kind = request.param
    torch.manual_seed(0)
    net, x = PROBLEMS[name]()
    net = net.double().eval()
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        shape = net(x).shape
    posterior = POSTERIORS[kind](net, "classification").fit([(x, torch.randint(0, CLASSES, shape[:-1]))])
    with sdpa_kernel(SDPBackend.MATH):  # the one that has a batching rule
        jacobians = jacobian(net, x, list(posterior.parameter_names)).flatten(0, 1)
    return posterior, x, net(x).detach(), jacobians @ posterior.covariance_matrix() @ jacobians.T


def blocks(dense, shape):
    """The covariance of each position, ``[B, *, C, C]``."""
    size = shape[-1]
    n = dense.shape[0] // size
    return dense.view(n, size, n, size).diagonal(dim1=0, dim2=2).movedim(-1, 0).reshape(*shape, size)


def check_all(posterior, x, mean, dense):
    own = blocks(dense, mean.shape)
    full = posterior.functional_posterior(x)
    assert relative_error(full.mean, mean) < EXACT
    assert relative_error(full.covariance, own) < EXACT
    variances = posterior.functional_posterior(x, outputs="diagonal").covariance
    assert relative_error(variances, own.diagonal(dim1=-2, dim2=-1)) < EXACT
    standing = posterior.functional_posterior(x, outputs="independent").covariance
    assert relative_error(standing, independent_variances(mean, own)) < EXACT
    joint = posterior.functional_posterior(x, joint=True).covariance
    assert relative_error(joint, dense.view(*mean.shape, *mean.shape)) < EXACT
    some = posterior.functional_posterior(x, outputs=[2, 0]).covariance
    assert relative_error(some, own[..., [2, 0], :][..., [2, 0]]) < EXACT
    check_chosen(posterior, x, mean, own)


def check_chosen(posterior, x, mean, covariance):
    """The two largest outputs of each position."""
    best = mean.topk(2).indices
    chosen = posterior.functional_posterior(x, outputs=best)
    torch.testing.assert_close(chosen.mean, mean.gather(-1, best), rtol=1e-14, atol=1e-14)
    rows = covariance.gather(-2, best[..., None].expand(*best.shape, CLASSES))
    assert relative_error(chosen.covariance, rows.gather(-1, best[..., None, :].expand(*best.shape, 2))) < EXACT


def test_structured_covariances_are_the_dense_ones(case):
    check_all(*case)


def test_chosen_outputs_of_each_example_across_inputs(case):
    posterior, x, mean, dense = case
    best = mean.topk(2).indices
    index = (torch.arange(mean[..., 0].numel())[:, None] * CLASSES + best.reshape(-1, 2)).flatten()
    joint = posterior.functional_posterior(x, joint=True, outputs=best).covariance
    assert relative_error(joint, dense[index][:, index].view(*best.shape, *best.shape)) < EXACT


def test_less_is_differentiated_when_less_is_asked_for(case, monkeypatch):
    posterior, x, mean, _ = case
    counts = []
    before = linearized.Gradients.blocks

    def counted(self, cotangents, *options):
        counts.append(len(cotangents))
        return before(self, cotangents, *options)

    monkeypatch.setattr(linearized.Gradients, "blocks", counted)
    posterior.functional_posterior(x, outputs=mean.argmax(-1, keepdim=True))
    assert sum(counts) == mean[0, ..., 0].numel()  # one direction for each position, not one for each output


def perceptron_posterior(**options):
    torch.manual_seed(1)
    net, x = perceptron()
    net, x = net.double(), x.double()
    return lp.KFAC(net, "classification", **options).fit([(x, torch.randint(0, CLASSES, (len(x),)))]), x


@pytest.mark.parametrize("kind", ["KFAC", "Diagonal"])
@pytest.mark.parametrize("problem", [perceptron, tokens])
def test_outputs_of_a_linear_head_are_chosen_for_each_example(kind, problem):
    torch.manual_seed(2)
    net, x = problem()
    net, x = net.double().eval(), x.double() if x.is_floating_point() else x
    mean = net(x).detach()
    posterior = POSTERIORS[kind](net, "classification", parameters="last_layer")
    posterior.fit([(x, torch.randint(0, CLASSES, mean.shape[:-1]))])
    check_chosen(posterior, x, mean, posterior.functional_posterior(x).covariance)


HEADS = {
    "Full": lp.Full,
    "KFAC": lp.KFAC,
    "KFAC, diagonal": partial(lp.KFAC, output_factor="diagonal"),
    "EKFAC": partial(lp.KFAC, eigenvalue_corrected=True),
    "Diagonal": lp.Diagonal,
    "LowRank": partial(lp.LowRank, rank=5),
    "SampledLaplace": partial(lp.SampledLaplace, n_samples=4),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", list(HEADS))
@pytest.mark.parametrize("parameters", ["last_layer", "all"])
def test_many_outputs_are_predicted_as_few(kind, parameters, monkeypatch):
    torch.manual_seed(3)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7)).double(), torch.randn(9, 3).double()
    posterior = HEADS[kind](net, "classification", parameters=parameters).fit([(x, torch.randint(0, 7, (9,)))])
    full = posterior.predictive(x)
    assert full.functional_covariance.shape == (9, 7, 7)
    for module in (linearized, sys.modules[lp.KFAC.predictive.__module__]):
        monkeypatch.setattr(module, "MANY_OUTPUTS", 6)
    many = posterior.predictive(x)
    assert many.functional_covariance.shape == (9, 7)
    torch.testing.assert_close(many.mean, full.mean)


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(4, 1, dtype=torch.long),
        torch.zeros(5, 2, 1, dtype=torch.long),
        torch.full((5, 1), 3),
        torch.full((5, 1), -4),
        torch.zeros(5, 0, dtype=torch.long),
        torch.zeros(5, 1),
        torch.ones(5, 3, dtype=torch.bool),
        True,
    ],
)
def test_choices_that_do_not_fit_are_refused(outputs):
    posterior, x = perceptron_posterior()
    with pytest.raises(ConfigurationError, match="utputs") as error:
        posterior.functional_posterior(x, outputs=outputs)
    assert "below 3" in str(error.value)


def test_negative_choices_count_from_the_end():
    posterior, x = perceptron_posterior()
    third = posterior.functional_posterior(x, outputs=[2]).covariance
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        last = posterior.functional_posterior(x, outputs=torch.full((5, 1), -1, dtype=dtype))
        torch.testing.assert_close(last.covariance, third, rtol=1e-12, atol=0)


def counted_examples(net):
    """How many examples go through a network at a time, from now on."""
    seen: list[int] = []
    net.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    return seen


def one_cotangent_at_a_time(monkeypatch):
    monkeypatch.setattr(
        linearized.Gradients, "cotangent_chunks", lambda self, n: iter([slice(k, k + 1) for k in range(n)])
    )


@pytest.mark.parametrize("options", [{}, {"outputs": "diagonal"}, {"outputs": "independent"}, {"joint": True}])
def test_a_large_batch_runs_in_parts(options, monkeypatch):
    torch.manual_seed(1)
    net, x = perceptron()[0].double(), torch.randn(17, 4, dtype=torch.float64)
    posterior = lp.KFAC(net, "classification").fit([(x, torch.randint(0, CLASSES, (17,)))])
    best = net(x).detach().topk(2).indices
    for own in (options, options | {"outputs": best}) if not options.get("outputs") else (options,):
        want = posterior.functional_posterior(x, **own)
        with monkeypatch.context() as patch:
            one_cotangent_at_a_time(patch)
            seen = counted_examples(net)
            found = posterior.functional_posterior(x, **own)
        assert relative_error(found.mean, want.mean) < EXACT
        assert relative_error(found.covariance, want.covariance) < EXACT
        assert options or max(seen[1:]) < 17


class Centred(nn.Linear):
    """A linear map of the inputs less their mean over the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


def test_examples_that_depend_on_each_other_are_never_cut(monkeypatch):
    torch.manual_seed(1)
    net, x = nn.Sequential(Centred(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double(), torch.randn(17, 4).double()
    posterior = lp.KFAC(net, "classification").fit([(x, torch.randint(0, CLASSES, (17,)))])
    want = posterior.functional_posterior(x)
    one_cotangent_at_a_time(monkeypatch)
    found = posterior.functional_posterior(x)
    assert relative_error(found.mean, want.mean) < EXACT
    assert relative_error(found.covariance, want.covariance) < EXACT


def test_samples_in_function_space_have_the_functional_posterior():
    posterior, x = perceptron_posterior()
    generator = torch.Generator().manual_seed(0)
    n = 1500
    deviations = posterior.sample(n, generator=generator) - posterior.mean
    mean, moved = pushed(posterior.network, deviations.split(700), x, n_outputs=CLASSES)
    assert moved.shape == (n, 5, CLASSES)
    expected = posterior.functional_posterior(x, joint=True)
    assert relative_error(mean, expected.mean) < EXACT
    jacobians = jacobian(posterior.network.model, x).flatten(0, 1)
    assert relative_error(moved, (deviations @ jacobians.T).view_as(moved)) < EXACT
    flat = moved.flatten(1)
    products = flat[:, :, None] * flat[:, None]
    error = (products.mean(0) - expected.covariance.view(15, 15)).abs()
    assert bool((error < 5 * products.std(0) / n**0.5).all())


def test_nothing_to_predict_is_named() -> None:
    posterior = lp.Diagonal(nn.Linear(3, 2), "classification").fit([(torch.randn(4, 3), torch.arange(4) % 2)])
    with pytest.raises(lp.errors.DataError, match="nothing to predict"):
        posterior.functional_posterior(torch.zeros(0, 3))
