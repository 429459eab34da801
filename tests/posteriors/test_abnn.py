"""Bayesian normalisation layers: noise in closed form, fine-tuning against torch's loop, and what it falls back to."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from problems import generator as seeded
from torch import nn
from torch.func import functional_call, vmap

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, NoGainWarning, SelectionError, UnsupportedError
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.testing import PosteriorConformance, assert_untouched, snapshot

DRAWS = 100_000


class TestABNN(PosteriorConformance):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.ABNN(model, likelihood, n_members=2, epochs=2, **options)


def classified(n=60, classes=4, seed=0):
    """A small batch-normalised network in double precision, left in training mode, and noisy labels in two batches."""
    generator = seeded(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(3, classes, generator=generator, dtype=torch.float64)).argmax(-1)
    y[:5] = (y[:5] + 1) % classes
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)).double()
    model(x)  # running statistics
    return model, list(zip(x.split(n // 2), y.split(n // 2), strict=True))


def trained(n=200):
    """The same, trained."""
    model, data = classified(n)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model, data


def perturbed(norm):
    """γ and β that are not ones and zeros, and running statistics."""
    for number, tensor in enumerate((*norm.parameters(), *norm.buffers())):
        if tensor.is_floating_point():
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=seeded(number), dtype=torch.float64)
    return norm.double().eval()


NORMS = {
    "batch": lambda: nn.BatchNorm1d(4),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True),
    "tracked instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "layer": lambda: nn.LayerNorm(3),
    "layer without shift": lambda: nn.LayerNorm((4, 3), bias=False),
    "rms": lambda: nn.RMSNorm(3),
}


def within(values, mean, variance):
    """Whether draws ``[n]`` have this mean and, as Gaussians do, this variance, within 4 standard errors."""
    n = len(values)
    assert abs(float(values.mean() - mean)) < 4 * float(variance / n) ** 0.5
    assert abs(float(values.var() - variance)) < 4 * float(variance) * (2 / n) ** 0.5


@pytest.mark.quick("batch", "group", "tracked instance", "rms")
@pytest.mark.parametrize("kind", NORMS)
def test_both_noises_have_the_variance_of_the_formula(kind):
    """Of a linear layer's output, whose inputs are normalised; norms share γ along different axes."""
    norm, alpha, x = perturbed(NORMS[kind]()), 0.3, torch.randn(1, 4, 3, generator=seeded(5), dtype=torch.float64)
    weight = torch.randn(12, generator=seeded(6), dtype=torch.float64)
    head = nn.Linear(12, 1).double()
    head.weight.data = weight[None].clone()
    model = nn.Sequential(norm, nn.Flatten(), head)
    options = {"scale": alpha, "n_members": 1, "epochs": 0}
    data = [(x.expand(2, -1, -1), torch.zeros(2, 1).double())]
    with torch.no_grad():
        mean, shifted = model(x)[0, 0], getattr(norm, "bias", None)
        scaled = norm(x)[0]
        if shifted is not None:
            scaled = scaled - (shifted if kind == "layer" else shifted[:, None])
        parts = weight.view(4, 3) * scaled  # [C, L], what each activation adds to the output

    element = lp.ABNN(model, "regression", noise="element", **options).fit(data)
    many = x.expand(DRAWS, -1, -1)
    drawn = element.predictive(many, n_samples=1, generator=seeded(1)).functional_samples[0, :, 0]
    within(drawn, mean, alpha**2 * parts.square().sum())

    channel = lp.ABNN(model, "regression", **options).fit(data)
    vectors = channel.sample(DRAWS, generator=seeded(2))
    names = channel.parameter_names
    with torch.no_grad():
        drawn = vmap(lambda v: functional_call(model, dict(zip(names, split(channel, v), strict=True)), (x,)))(vectors)
    axes = {"layer": 0, "rms": 0, "layer without shift": ()}.get(kind, 1)  # along which activations share γ
    shared = parts if axes == () else parts.sum(axes)
    within(drawn.flatten(), mean, alpha**2 * shared.square().sum())


def split(posterior, vector):
    """A parameter vector as the tensors that it stands for."""
    shapes = [dict(posterior.network.model.named_parameters())[name].shape for name in posterior.parameter_names]
    parts = vector.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def test_pooling_averages_the_noise_of_elements_but_not_of_channels():
    """Where ĥ is the same at L positions, channel noise has L times the variance after average pooling."""
    norm, alpha, length = perturbed(nn.BatchNorm1d(2)), 0.2, 5
    model = nn.Sequential(norm, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 1)).double().eval()
    x = torch.tensor([1.5, -0.7], dtype=torch.float64)[None, :, None].expand(1, 2, length)
    data, options = [(x, torch.zeros(1, 1).double())], {"scale": alpha, "n_members": 1, "epochs": 0}
    with torch.no_grad():
        scaled = (norm(x)[0, :, 0] - norm.bias) * model[3].weight[0]
        mean, variance = model(x)[0, 0], alpha**2 * scaled.square().sum()
    element = lp.ABNN(model, "regression", noise="element", **options).fit(data)
    drawn = element.predictive(x.expand(DRAWS, -1, -1), n_samples=1, generator=seeded()).functional_samples
    within(drawn.flatten(), mean, variance / length)
    vectors = lp.ABNN(model, "regression", **options).fit(data).sample(DRAWS, generator=seeded())
    within(mean + (vectors[:, :2] / norm.weight.detach() - 1) @ scaled, mean, variance)


@pytest.mark.parametrize("noise", ["channel", "element"])
def test_without_noise_and_tuning_it_is_the_network_bit_for_bit(noise):
    model, data = classified()
    posterior = lp.ABNN(model, "classification", noise=noise, scale=0.0, n_members=1, epochs=0).fit(data)
    outputs = posterior.predictive(data[0][0], n_samples=3).functional_samples
    assert torch.equal(outputs, model.eval()(data[0][0]).detach().expand(3, -1, -1))


def test_without_fine_tuning_the_members_are_the_network():
    model, data = classified()
    posterior = lp.ABNN(model, "classification", epochs=0).fit(data)
    assert torch.equal(posterior.members, torch.cat([model[1].weight, model[1].bias]).detach().expand(4, -1))


def test_samples_of_weights_are_the_networks_that_predict():
    model, data = classified()
    posterior, x = lp.ABNN(model, "classification", epochs=2).fit(data, generator=seeded()), data[0][0]
    vectors = posterior.sample(8, generator=seeded(3))
    found = posterior.predictive(x, n_samples=8, joint=True, generator=seeded(3))
    model.eval()
    for vector, outputs in zip(vectors, found.functional_samples, strict=True):
        own = dict(zip(posterior.parameter_names, split(posterior, vector), strict=True))
        torch.testing.assert_close(outputs, functional_call(model, own, (x,)))
    logs = found.functional_samples.log_softmax(-1)[:, torch.arange(len(x)), data[0][1]].sum(-1)
    torch.testing.assert_close(found.log_prob(data[0][1]), logs.logsumexp(0) - torch.tensor(8.0).log().double())
    # Members in turn, each as often as the others; β has no noise.
    beta = posterior.members[:, 8:]
    which = (vectors[:, None, 8:] - beta).abs().amax(-1).argmin(1)
    torch.testing.assert_close(vectors[:, 8:], beta[which], rtol=0, atol=0)
    assert which.bincount().tolist() == [2, 2, 2, 2]
    firsts = [posterior.sample(1, generator=seeded(seed))[0, 8:] for seed in range(20)]
    assert len({tuple(first.tolist()) for first in firsts}) == 4  # singly drawn ones are of any member


def test_fine_tuning_is_torchs_loop():
    """Without noise."""
    model, data = classified()
    options = {"scale": 0.0, "epochs": 6, "n_members": 2, "learning_rate": 0.05}
    posterior = lp.ABNN(model, "classification", **options).fit(data, generator=seeded(1))
    own = copy.deepcopy(model).eval()
    learnt = [own[1].weight, own[1].bias]
    optimizer = torch.optim.SGD(learnt, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4])
    for _ in range(6):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(own(x), y).backward()
            optimizer.step()
        schedule.step()
    expected = torch.cat([p.detach() for p in learnt])
    torch.testing.assert_close(posterior.members, expected.expand(2, -1), rtol=0, atol=1e-10)
    torch.testing.assert_close(posterior.mean, posterior.members.mean(0))


@pytest.mark.parametrize("likelihood", ["regression", "binary", "soft", "ignored"])
def test_losses_of_other_targets(likelihood):
    """One step of SGD without noise, from the gradient of torch's own loss."""
    model, data = classified(classes=3)
    (x, y), cross_entropy = data[0], nn.functional.cross_entropy
    targets, loss, name = {
        "regression": (x, lambda f: ((f - x).square().sum(-1) / 2).mean(), "regression"),
        "binary": (
            x.gt(0).double(),
            lambda f: 3 * nn.functional.binary_cross_entropy_with_logits(f, x.gt(0).double()),
            "binary",
        ),
        "soft": (x.softmax(-1), lambda f: cross_entropy(f, x.softmax(-1)), "classification"),
        "ignored": (
            torch.where(x[:, 0] > 0, y, -100),
            lambda f: cross_entropy(f, torch.where(x[:, 0] > 0, y, -100)),
            "classification",
        ),
    }[likelihood]
    posterior = lp.ABNN(model, name, scale=0.0, n_members=1, epochs=1).fit([(x, targets)])
    own = copy.deepcopy(model).eval()
    loss(own(x)).backward()
    before = torch.cat([own[1].weight, own[1].bias]).detach()
    step = torch.cat([own[1].weight.grad, own[1].bias.grad]) + 1e-4 * before
    torch.testing.assert_close(posterior.members[0], before - 5e-3 * 1.9 * step)  # Nesterov's first step


def test_tuning_takes_the_best_of_all_candidates():
    """An over-confident network gains by noise; the value is the log-probability of the same predictions."""
    model, data = classified(n=300)
    model[3].weight.data *= 8
    posterior = lp.ABNN(model, "classification", epochs=1).fit(data[:1], generator=seeded())
    held_out, seed = data[1:], draw_seed(seeded(7))
    values = {}
    for fine_tuned in (True, False):
        for scale in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5):
            one = lp.ABNN(model, "classification", epochs=1 if fine_tuned else 0).fit(data[:1], generator=seeded())
            one.noise_scale = scale
            found = one.predictive(held_out[0][0], n_samples=20, generator=seeded(seed))
            values[scale, fine_tuned] = float(found.log_prob(held_out[0][1]).mean())
    before = snapshot(model)
    posterior.fit_prior_precision(data=held_out, n_samples=20, generator=seeded(7))
    best = max(values, key=values.get)
    assert (posterior.noise_scale, posterior.fine_tuned) == best
    assert best[0] > 0
    assert posterior.tuning.value == pytest.approx(values[best], abs=1e-3 if best[1] else 0.02)
    assert posterior.scale == 0.2  # that of the next fit
    assert_untouched(model, before)
    assert posterior.fit(data).noise_scale == 0.2


def test_tuning_falls_back_to_the_network_and_says_so(tmp_path):
    """The network is the truth, so that noise and other weights can only hurt."""
    model, data = classified(n=2000)
    model[3].weight.data *= 6
    x, model = torch.cat([x for x, _ in data]), model.eval()
    y = torch.multinomial(model(x).softmax(-1), 1, generator=seeded()).squeeze(-1)
    posterior = lp.ABNN(model, "classification", learning_rate=0.5).fit([(x[:20], y[:20])], generator=seeded())
    with pytest.warns(NoGainWarning, match="which is what the posterior now is") as caught:
        posterior.fit_prior_precision(data=[(x[20:], y[20:])], grid=[0.0, 1.0, 2.0], n_samples=20, generator=seeded())
    assert caught[0].filename == __file__
    found = posterior.predictive(x, n_samples=2)
    assert torch.equal(found.functional_samples, model(x).detach().expand(2, -1, -1))
    assert not found.epistemic.any()
    posterior.save(tmp_path / "it")
    again = lp.load(tmp_path / "it", model)
    assert (again.noise_scale, again.fine_tuned) == (0.0, False)
    assert torch.equal(again.members, posterior.members)
    assert torch.equal(again.predictive(x, n_samples=2).functional_samples, found.functional_samples)


def test_the_noise_of_targets_is_tuned_with_the_scale():
    model, data = classified(n=200)
    x = torch.cat([x for x, _ in data])
    y = model.eval()(x).detach() + 0.3 * torch.randn(200, 4, generator=seeded(), dtype=torch.float64)
    posterior = lp.ABNN(model, lp.Gaussian(0.5), epochs=0).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGainWarning)
        posterior.fit_prior_precision(data=[(x, y)], n_samples=20, generator=seeded())
    assert float(posterior.noise_std) == pytest.approx(0.5 * 2**-0.75)  # of the steps of 2^¼ the nearest to .3
    with pytest.raises(ConfigurationError, match="no noise to tune"):
        lp.ABNN(model, "classification").fit(data).fit_prior_precision(data=data, tune_noise=True)


def test_too_much_noise_is_halved_and_said_at_the_line_that_fits():
    model, data = trained()
    with pytest.warns(NoGainWarning, match="of scale 3 costs .* of the accuracy") as caught:
        posterior = lp.ABNN(model, "classification", scale=3.0, epochs=0).fit(data, generator=seeded())
    assert caught[0].filename == __file__
    assert posterior.noise_scale in [3 / 2**k for k in range(1, 5)]
    assert f"it is {posterior.noise_scale:.3g} now" in str(caught[0].message)
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    right = float((model.eval()(x).argmax(-1) == y).double().mean())
    losses = []
    for scale in (posterior.noise_scale, 3.0):
        posterior.noise_scale = scale
        found = posterior.predictive(x, n_samples=100, generator=seeded()).mean.argmax(-1)
        losses.append(right - float((found == y).double().mean()))
    assert losses[0] < 0.02 < losses[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lp.ABNN(model, "classification", scale=0.01).fit(data, generator=seeded()).noise_scale == 0.01


def test_fine_tuning_that_harms_leaves_the_network():
    model, data = trained()
    with pytest.warns(NoGainWarning, match="the posterior now is the network"):
        posterior = lp.ABNN(model, "classification", scale=0.0, learning_rate=30.0).fit(data, generator=seeded())
    assert not posterior.fine_tuned
    assert torch.equal(posterior.mean, posterior.network.vector())


class Own(nn.LayerNorm):
    """A normalisation that calls no function of torch's."""

    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * self.weight + self.bias


def refused(error, match, make):
    with pytest.raises(error, match=match):
        make()


def test_what_has_no_noise_is_refused():
    model, data = classified()
    plain, frozen = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)).double(), copy.deepcopy(model)
    frozen[1].requires_grad_(False)
    refused(UnsupportedError, "lp.KFAC", lambda: lp.ABNN(plain, "classification"))
    refused(SelectionError, "frozen", lambda: lp.ABNN(frozen, "classification"))
    assert lp.ABNN(frozen, "classification", parameters=["1.*"]).n_parameters == 16
    refused(SelectionError, "Noise belongs", lambda: lp.ABNN(model, "classification", parameters=["3"]))
    masks = {"1.weight": torch.arange(8) < 3}
    refused(SelectionError, "whole γ", lambda: lp.ABNN(model, "classification", parameters=masks))
    refused(SelectionError, "whole γ", lambda: lp.ABNN(model, "classification", parameters=["1.bias"]))
    for wrong in ({"scale": -0.1}, {"scale": float("nan")}, {"noise": "pixel"}, {"epochs": -1}, {"n_members": 0}):
        refused(ConfigurationError, None, lambda wrong=wrong: lp.ABNN(model, "classification", **wrong))
    refused(ConfigurationError, "not a module", lambda: lp.ABNN("model", "classification"))
    element = lp.ABNN(model, "classification", noise="element").fit(data)
    refused(UnsupportedError, "no distribution over weights", lambda: element.sample(2))
    assert lp.ABNN(nn.Sequential(nn.Linear(3, 4), Own(4)).double(), "classification").fit(data).is_fitted


def test_frozen_layers_keep_still_and_those_without_scale_get_element_noise():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)]
    model, (x, y) = nn.Sequential(*layers).double(), classified()[1][0]
    model[1].requires_grad_(False)
    targets = nn.functional.one_hot(y, 4).double()
    posterior = lp.ABNN(model, "regression", noise="element", scale=0.2).fit([(x, targets)], generator=seeded())
    assert posterior.parameter_names == ("2.weight", "2.bias")
    before = model[:2](x).detach()
    first = nn.functional.layer_norm(before, (4,), eps=1e-5)
    posterior.noise_scale, source = 0.3, seeded(4)
    outputs = posterior.predictive(x, n_samples=1, generator=seeded(4)).functional_samples[0]
    member = posterior.members[int(torch.randint(4, (), generator=source))]
    noises = [torch.randn(first.shape, generator=source, dtype=torch.float64) for _ in range(2)]
    inner = member[:4] * first * (1 + 0.3 * noises[0]) + member[4:]
    torch.testing.assert_close(outputs, nn.functional.layer_norm(inner, (4,)) * (1 + 0.3 * noises[1]))


class Words(nn.Module):
    """A transformer's layer, whose fused kernels would hide its normalisations, on dictionaries."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.layer(self.table(tokens)).mean(1))


@pytest.mark.parametrize("noise", ["channel", "element"])
def test_dictionaries_fused_layers_and_progress(noise, capsys):
    torch.manual_seed(0)
    model, tokens = Words(), torch.randint(9, (12, 5), generator=seeded())
    data = [{"tokens": tokens, "labels": torch.arange(12) % 3}]
    posterior = lp.ABNN(nn.DataParallel(model), "classification", noise=noise, n_members=2, epochs=1)
    posterior.fit(data, progress=True, generator=seeded())
    assert "ABNN: epoch 1" in capsys.readouterr().err
    assert set(posterior.parameter_names) == {f"layer.norm{k}.{p}" for k in (1, 2) for p in ("weight", "bias")}
    found = posterior.predictive(tokens=tokens, n_samples=10, generator=seeded())
    assert (found.functional_samples.std(0) > 1e-4).all()
    again = posterior.predictive(tokens=tokens, n_samples=10, generator=seeded())
    assert torch.equal(found.functional_samples, again.functional_samples)
