"""Likelihoods against torch.distributions, automatic differentiation and sampled Fisher information."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributions as td
from hypothesis import given, settings
from hypothesis import strategies as st
from likelihoods.own import StudentT
from problems import generator, normal

from laplace_plus.errors import (
    ConfigurationError,
    LabelError,
    NonFiniteError,
    OutputError,
    UnsupportedError,
)
from laplace_plus.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LogDensity,
    Poisson,
    likelihood_from_config,
    resolve_likelihood,
)

N, C = 6, 4


def case(name):
    """A likelihood, outputs ``[N, C]``, targets and the reference log-density."""
    outputs = normal(N, C, scale=1.5)
    noise = torch.tensor([0.3, 0.7, 1.0, 2.5], dtype=torch.float64)
    if name == "categorical":
        targets = torch.tensor([0, 3, 1, 1, 2, 0])
        return Categorical(), outputs, targets, td.Categorical(logits=outputs).log_prob(targets)
    if name == "bernoulli":
        targets = (normal(N, C, seed=1) > 0).double()
        return Bernoulli(), outputs, targets, td.Bernoulli(logits=outputs).log_prob(targets).sum(-1)
    if name == "gaussian":
        targets = normal(N, C, seed=1)
        return Gaussian(0.4), outputs, targets, td.Normal(outputs, 0.4).log_prob(targets).sum(-1)
    if name == "gaussian-per-output":
        targets = normal(N, C, seed=1)
        return Gaussian(noise), outputs, targets, td.Normal(outputs, noise).log_prob(targets).sum(-1)
    if name == "heteroscedastic":
        targets = normal(N, C // 2, seed=1)
        reference = td.Normal(outputs[:, :2], (outputs[:, 2:] / 2).exp()).log_prob(targets).sum(-1)
        return HeteroscedasticGaussian(), outputs, targets, reference
    targets = torch.poisson(outputs.exp(), generator=generator(1))
    return Poisson(), outputs, targets, td.Poisson(outputs.exp()).log_prob(targets).sum(-1)


NAMES = ["categorical", "bernoulli", "gaussian", "gaussian-per-output", "heteroscedastic", "poisson"]


def per_direction_weights(likelihood, n_directions):
    return likelihood.curvature_weights()[likelihood.output_groups(n_directions)]


# Densities, gradients, curvature --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_log_density_is_that_of_torch_distributions(name):
    likelihood, outputs, targets, reference = case(name)
    torch.testing.assert_close(likelihood.log_density(outputs, targets), reference, rtol=1e-12, atol=1e-12)
    statistics = likelihood.statistics(outputs, targets)
    assert statistics.dtype == torch.float64
    torch.testing.assert_close(likelihood.log_likelihood(statistics), reference.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_autodiff_up_to_the_noise(name):
    likelihood, outputs, targets, _ = case(name)
    f = outputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(-likelihood.log_density(f, targets).sum(), f)
    weights = per_direction_weights(likelihood, C)
    torch.testing.assert_close(likelihood.gradient(outputs, targets) * weights, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "heteroscedastic"])
def test_root_is_that_of_autodiff(name):
    likelihood, outputs, targets, _ = case(name)
    expected = torch.stack(
        [
            torch.autograd.functional.hessian(lambda f, y=y: -likelihood.log_density(f[None], y[None]).sum(), f)
            for f, y in zip(outputs, targets, strict=True)
        ]
    )
    root = likelihood.output_root(outputs, targets)
    weights = per_direction_weights(likelihood, root.shape[-1])
    torch.testing.assert_close((root * weights) @ root.mT, expected, rtol=1e-10, atol=1e-10)


def test_heteroscedastic_curvature_is_the_expected_hessian():
    likelihood = HeteroscedasticGaussian()
    m, log_variance = 0.3, -0.8
    outputs = torch.tensor([[m, log_variance]], dtype=torch.float64)

    def hessian(y):
        target = torch.tensor([[y]], dtype=torch.float64)
        return torch.autograd.functional.hessian(lambda f: -likelihood.log_density(f, target).sum(), outputs)[0, :, 0]

    # The Hessian is a quadratic in y, so two nodes of Gauss-Hermite integrate it exactly.
    deviation = math.exp(log_variance / 2)
    expected = (hessian(m - deviation) + hessian(m + deviation)) / 2
    root = likelihood.output_root(outputs, torch.zeros(1, 1))
    torch.testing.assert_close((root @ root.mT)[0], expected, rtol=1e-10, atol=1e-10)
    assert torch.linalg.eigvalsh(hessian(m + 0.1)).min() < -1e-3  # why the expectation is taken


@pytest.mark.parametrize("name", NAMES)
def test_sampled_targets_have_the_fisher_information(name):
    likelihood, outputs, _, _ = case(name)
    n = 40_000
    repeated = outputs[:1].expand(n, C)
    targets = likelihood.sample_targets(repeated, generator=generator(3))
    gradient = likelihood.gradient(repeated, targets)
    products = gradient.unsqueeze(-1) * gradient.unsqueeze(-2)
    root = likelihood.output_root(outputs[:1], targets[:1])
    error = products.mean(0) - (root @ root.mT)[0]
    assert (error.abs() <= 4 * products.std(0) / math.sqrt(n) + 1e-12).all()
    assert (gradient.mean(0).abs() <= 4 * gradient.std(0) / math.sqrt(n) + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_moments(name):
    likelihood, outputs, _, _ = case(name)
    n = 40_000
    repeated = outputs[:1].expand(n, C)
    y = likelihood.sample(repeated, generator=generator(4))
    y = torch.nn.functional.one_hot(y, C).double() if name == "categorical" else y
    mean, variance = likelihood.moments(outputs[:1])
    assert ((y.mean(0) - mean[0]).abs() <= 4 * y.std(0) / math.sqrt(n)).all()
    squares = (y - mean).square()
    assert ((squares.mean(0) - variance[0]).abs() <= 4 * squares.std(0) / math.sqrt(n) + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_sampling_honours_the_generator(name):
    likelihood, outputs, _, _ = case(name)
    state = torch.random.get_rng_state()
    first, again = (likelihood.sample_targets(outputs, generator=generator(5)) for _ in range(2))
    g = generator(5)
    likelihood.sample_targets(outputs, generator=g)
    assert torch.equal(first, again)
    assert not torch.equal(g.get_state(), generator(5).get_state())  # it advances
    assert torch.equal(state, torch.random.get_rng_state())


def test_categorical_root_keeps_its_digits_where_the_network_is_certain():
    outputs = torch.tensor([[30.0, 0.0, -3.0], [200.0, 0.0, 1.0]])
    p = outputs.double().softmax(-1)
    rest = torch.stack([p[:, [1, 2]].sum(-1), p[:, [0, 2]].sum(-1), p[:, [0, 1]].sum(-1)], -1)  # 1 − p
    exact = torch.diagonal_scatter(-p[..., None] * p[:, None], p * rest, dim1=1, dim2=2)
    root = Categorical().output_root(outputs, torch.zeros(2, dtype=torch.long))
    assert root.isfinite().all()
    torch.testing.assert_close((root @ root.mT)[0].double(), exact[0], rtol=1e-5, atol=0.0)
    gradient = Categorical().gradient(outputs, torch.zeros(2, dtype=torch.long))
    p = outputs[0].double().softmax(-1)
    torch.testing.assert_close(gradient[0, 0].double(), -(p[1] + p[2]), rtol=1e-5, atol=0.0)


def test_bernoulli_keeps_its_digits_where_the_network_is_certain():
    outputs = torch.tensor([[40.0, -40.0]])
    expected = torch.tensor([math.exp(-20.0)] * 2)
    torch.testing.assert_close(Bernoulli().output_root(outputs, outputs)[0].diagonal(), expected)
    gradient = Bernoulli().gradient(outputs, torch.tensor([[1.0, 0.0]]))[0]
    torch.testing.assert_close(gradient, torch.tensor([-math.exp(-40.0), math.exp(-40.0)]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_half_precision_is_computed_in_single(name, dtype):
    likelihood, outputs, targets, _ = case(name)
    flat, labels, weight = likelihood.rows(outputs.to(dtype), targets)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    results = [
        flat,
        weight,
        likelihood.log_density(flat, labels),
        likelihood.gradient(flat, labels),
        likelihood.output_root(flat, labels),
        *likelihood.moments(flat),
    ]
    assert {result.dtype for result in results} == {wanted}
    assert likelihood.statistics(outputs.to(dtype), targets).dtype == torch.float64


# Rows, shapes ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from(["categorical", "bernoulli", "gaussian", "heteroscedastic", "poisson"]),
    st.booleans(),
)
def test_tokens_and_pixels_are_rows(lead, name, channels_first):
    likelihood = {
        "categorical": Categorical,
        "bernoulli": Bernoulli,
        "gaussian": lambda output_axis: Gaussian(0.5, output_axis=output_axis),
        "heteroscedastic": HeteroscedasticGaussian,
        "poisson": Poisson,
    }[name](output_axis=1 if channels_first else -1)
    outputs = normal(*lead, C)
    targets = likelihood.sample(outputs, generator=generator(2))
    raw = outputs.movedim(-1, likelihood.output_axis)
    given_targets = targets if name == "categorical" else targets.movedim(-1, likelihood.output_axis)
    arranged = likelihood.arrange(raw)
    assert torch.equal(arranged, outputs)
    likelihood.validate(arranged, given_targets)
    flat, labels, weight = likelihood.rows(arranged, given_targets)
    assert flat.shape == (math.prod(lead), C) and weight.shape == (math.prod(lead),)
    total = likelihood.distribution(outputs).log_prob(targets).sum()
    torch.testing.assert_close(likelihood.log_density(flat, labels).sum(), total)
    torch.testing.assert_close(likelihood.log_likelihood(likelihood.statistics(arranged, given_targets)), total)


def test_ignored_rows_have_no_weight():
    likelihood = Categorical(ignore_index=255)
    outputs, targets = normal(2, 3, C), torch.tensor([[0, 255, 3], [255, 1, 255]])
    likelihood.validate(outputs, targets)
    _, labels, weight = likelihood.rows(outputs, targets)
    assert weight.tolist() == [1, 0, 1, 0, 1, 0] and labels.tolist() == [0, 0, 3, 0, 1, 0]
    log_p = outputs.log_softmax(-1)
    expected = log_p[0, 0, 0] + log_p[0, 2, 3] + log_p[1, 1, 1]
    torch.testing.assert_close(likelihood.log_likelihood(likelihood.statistics(outputs, targets)), expected)


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli(), Poisson()])
def test_one_output_pairs_with_a_vector_of_targets_and_never_broadcasts(likelihood):
    outputs, targets = likelihood.arrange(normal(5)), torch.ones(5, dtype=torch.float64)
    assert outputs.shape == (5, 1)
    likelihood.validate(outputs, targets)
    assert likelihood.rows(outputs, targets)[1].shape == (5, 1)
    expected = likelihood.log_density(outputs, targets[:, None]).sum()
    torch.testing.assert_close(likelihood.log_likelihood(likelihood.statistics(outputs, targets)), expected)


@pytest.mark.parametrize(
    ("likelihood", "raw", "part"),
    [
        (Gaussian(), torch.tensor(1.0), "no axis"),
        (Gaussian(), torch.ones(2, 3, dtype=torch.long), "floating tensor"),
        (Gaussian(), (torch.ones(2),), r"Got: \(float32"),
        (Categorical(output_axis=3), torch.ones(2, 3), "axis 3"),
        (Categorical(output_axis=0), torch.ones(2, 3), "after the batch"),
    ],
)
def test_outputs_that_cannot_be_arranged(likelihood, raw, part):
    with pytest.raises(OutputError, match=part):
        likelihood.arrange(raw)


LABEL_ERRORS = {
    "floats": (Categorical(), (4, 3), torch.zeros(4), "not class indices"),
    "booleans": (Categorical(), (4, 3), torch.zeros(4, dtype=torch.bool), "not class indices"),
    "no soft labels": (Categorical(), (4, 3), 2 * torch.eye(3)[[0, 1, 2, 0]], "no distributions"),
    "integer one-hot": (Categorical(), (4, 3), torch.eye(3).long()[[0, 1, 2, 0]], "one-hot"),
    "one-hot pixels": (Categorical(output_axis=1), (4, 5, 3), torch.zeros(4, 3, 5), "no distributions"),
    "too high": (Categorical(), (2, 3), torch.tensor([0, 3]), "Got: 3"),
    "negative": (Categorical(), (2, 3), torch.tensor([0, -1]), "Got: -1"),
    "column": (Categorical(), (4, 3), torch.zeros(4, 1, dtype=torch.long), "squeeze"),
    "pixels": (Categorical(), (4, 3, 5, 5), torch.zeros(4, 5, 5, dtype=torch.long), "output_axis=1"),
    "several binary": (Bernoulli(), (4, 3), torch.zeros(4), "classification"),
    "half": (Bernoulli(), (2, 1), torch.tensor([0.5, 1.0]), "0.5"),
    "two": (Bernoulli(), (2, 1), torch.tensor([2, 1]), "exactly 0 or 1"),
    "not a number": (Bernoulli(), (1, 1), torch.tensor([math.inf]), "exactly 0 or 1"),
    "integers": (Gaussian(), (4, 1), torch.zeros(4, dtype=torch.long), "floating targets"),
    "broadcast": (Gaussian(), (4, 3), torch.zeros(4), "nothing is broadcast"),
    "row": (Gaussian(), (4, 1), torch.zeros(1, 4), "nothing is broadcast"),
    "infinite": (Gaussian(), (2, 1), torch.tensor([math.inf, 0.0]), "1 of 2"),
    "both halves": (HeteroscedasticGaussian(), (4, 2), torch.zeros(4, 2), r"\[4, 1\]"),
    "negative count": (Poisson(), (1, 1), torch.tensor([-1]), "not counts"),
    "fraction": (Poisson(), (1, 1), torch.tensor([0.5]), "not counts"),
    "infinite count": (Poisson(), (1, 1), torch.tensor([math.inf]), "not counts"),
    "other batch": (StudentT(), (4, 3), torch.zeros(3, 3), "do not pair"),
}


@pytest.mark.parametrize("name", LABEL_ERRORS)
def test_wrong_labels_are_refused_by_name(name):
    likelihood, shape, targets, part = LABEL_ERRORS[name]
    with pytest.raises(LabelError, match=part):
        likelihood.validate(torch.zeros(shape), targets)


@pytest.mark.parametrize(
    ("likelihood", "shape", "part"),
    [
        (Categorical(), (2, 1), 'likelihood="binary"'),
        (HeteroscedasticGaussian(), (2, 3), "even number"),
        (Gaussian(torch.ones(3)), (2, 2), "3 outputs"),
        (Categorical(weight=(1.0, 2.0)), (2, 3), "2 outputs, or one weight"),
    ],
)
def test_outputs_that_do_not_fit(likelihood, shape, part):
    with pytest.raises(OutputError, match=part):
        likelihood.validate(torch.zeros(shape), torch.zeros(2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "likelihood", [Categorical(), Bernoulli(), Gaussian(), HeteroscedasticGaussian(), Poisson(), StudentT()]
)
def test_outputs_that_are_not_finite(likelihood, value):
    with pytest.raises(NonFiniteError, match="1 of 4"):
        likelihood.validate(torch.tensor([[0.0, value], [0.0, 0.0]]), torch.zeros(2, 2))


# Noise ----------------------------------------------------------------------------------------------------------------


def test_the_noise_can_be_tuned_by_gradient():
    outputs, targets = normal(50, 2), normal(50, 2, seed=1)
    for noise in (torch.tensor(0.7, dtype=torch.float64), torch.tensor([0.7, 1.3], dtype=torch.float64)):
        likelihood = Gaussian(torch.ones_like(noise))
        statistics = likelihood.statistics(outputs, targets)
        assert statistics.shape == (2 * likelihood.n_noise,)
        noise = noise.clone().requires_grad_()
        value = likelihood.log_likelihood(statistics, noise)
        torch.testing.assert_close(value, td.Normal(outputs, noise).log_prob(targets).sum())
        assert torch.autograd.gradcheck(lambda s, a=statistics, b=likelihood: b.log_likelihood(a, s), noise)
        assert torch.autograd.gradcheck(likelihood.curvature_weights, noise)
        torch.testing.assert_close(likelihood.with_noise(noise).noise_std, noise.detach())


def test_noise_groups():
    assert Gaussian(0.5).output_groups(3).tolist() == [0, 0, 0]
    assert Gaussian(torch.tensor([0.5, 1.0, 2.0])).output_groups(3).tolist() == [0, 1, 2]
    assert Gaussian(torch.tensor([0.5, 2.0])).curvature_weights().tolist() == [4.0, 0.25]
    assert Gaussian(torch.tensor([0.5, 2.0])).curvature_weights(0.1).tolist() == pytest.approx([100.0, 100.0])
    for likelihood in (Categorical(), Bernoulli(), HeteroscedasticGaussian(), Poisson(), StudentT()):
        assert likelihood.noise_std is None and likelihood.n_noise == 1
        assert likelihood.curvature_weights().tolist() == [1.0]
        assert likelihood.curvature_weights().dtype == torch.float64
        assert likelihood.output_groups(2).tolist() == [0, 0]
        with pytest.raises(UnsupportedError, match="no observation noise"):
            likelihood.with_noise(0.1)
        with pytest.raises(UnsupportedError, match="no observation noise"):
            likelihood.curvature_weights(0.1)
        with pytest.raises(UnsupportedError, match="no observation noise"):
            likelihood.log_likelihood(torch.zeros(1), 0.1)


# Names ----------------------------------------------------------------------------------------------------------------


def test_names_stand_for_likelihoods():
    assert resolve_likelihood("classification") == Categorical()
    assert resolve_likelihood("binary") == Bernoulli()
    assert isinstance(resolve_likelihood("regression"), Gaussian)
    instance = Poisson()
    assert resolve_likelihood(instance) is instance
    assert isinstance(resolve_likelihood(lambda f, y: f.sum(-1)), LogDensity)


@pytest.mark.parametrize(
    ("likelihood", "part"),
    [
        ("clasification", "'classification'"),
        (Categorical, r"Pass Categorical\(\)"),
        (torch.nn.CrossEntropyLoss(), "loss module"),
        (3, "Unknown likelihood"),
    ],
)
def test_names_that_stand_for_nothing(likelihood, part):
    with pytest.raises(ConfigurationError, match=part):
        resolve_likelihood(likelihood)


@pytest.mark.parametrize(
    "likelihood",
    [
        Categorical(ignore_index=3, output_axis=1),
        Bernoulli(output_axis=1),
        Gaussian(1 / 3),
        Gaussian(torch.tensor([0.1, 0.7], dtype=torch.float64), output_axis=1),
        HeteroscedasticGaussian(),
        Poisson(),
    ],
    ids=repr,
)
def test_descriptions_survive_json(likelihood):
    config = json.loads(json.dumps(likelihood.config()))
    rebuilt = likelihood_from_config(config)
    assert type(rebuilt) is type(likelihood) and rebuilt.config() == config and repr(rebuilt) == repr(likelihood)


def test_descriptions_that_cannot_be_rebuilt():
    assert StudentT().config()["class"].endswith("StudentT")
    assert LogDensity(torch.sub).config()["name"] == "custom"
    with pytest.raises(ConfigurationError, match="StudentT"):
        likelihood_from_config(StudentT().config())
    with pytest.raises(ConfigurationError, match="'weibull'"):
        likelihood_from_config({"name": "weibull"})


def test_confident_and_extreme_log_densities_keep_their_digits():
    """float32: a confident Bernoulli's density close to 1, and log-variances whose exponential overflows."""
    logits = torch.tensor([[10.0], [20.0], [40.0]])
    expected = -torch.log1p((-logits[:, 0].double()).exp())
    for sign, target in ((1, 1.0), (-1, 0.0)):
        found = Bernoulli().log_density(sign * logits, torch.full((3, 1), target))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0.0)
    found = HeteroscedasticGaussian().log_density(torch.tensor([[0.0, 180.0]]), torch.zeros(1, 1))
    assert found.item() == pytest.approx(-90 - 0.5 * math.log(2 * math.pi))
