"""Distilled posteriors give the network's outputs, variances close to the exact ones, and say how close."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from serving.test_freezing import WAYS, TwoInputs, served
from torch import nn

import laplace_plus as lp
from laplace_plus.applications import distillation
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.likelihoods.categorical import centring_weights, independent_variances

QUICK = {"copies": 1, "width": 8, "steps": 20}


def fitted(size=1, kind="regression", *, parameters="all", dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, size)).to(dtype)
    x = torch.randn(60, 3, dtype=dtype)
    y = torch.randn(60, size, dtype=dtype) if kind == "regression" else torch.randint(0, size, (60,))
    return lp.KFAC(net, kind, parameters=parameters).fit([(x, y)]), x


@pytest.fixture(autouse=True)
def no_warnings_of_quick_heads():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Distilled variances differ")
        yield


def test_the_form_of_a_last_layer_is_learnt_and_holds_far_out():
    torch.manual_seed(1)
    x, net = torch.randn(300, 2, dtype=torch.float64), nn.Linear(2, 1).double()
    posterior = lp.Full(net, lp.Gaussian(0.5)).fit([(x, x[:, :1])])
    module = lp.distill(posterior, x, copies=2, width=4, steps=150)
    assert min(own.r2 for own in module.quality) > 0.9 < min(own.ranks for own in module.quality)
    far = 30 * torch.randn(50, 2, dtype=torch.float64)
    exact = posterior.functional_posterior(far, outputs="diagonal").covariance
    assert (module(far).functional_variance.log() - exact.log()).abs().max() < 0.7  # of V up to 900 times that of data


def test_quality_is_that_of_new_inputs():
    posterior, x = fitted(2)
    module = lp.distill(posterior, torch.randn(300, 3), copies=1, width=8, steps=150)
    found, exact = module(x).functional_variance, posterior.functional_posterior(x, outputs="diagonal").covariance
    spread = (exact.log() - exact.log().mean(0)).square().sum()
    r2 = 1 - (found.log() - exact.log()).square().sum() / spread
    assert module.quality.held.r2 > 0.9 and abs(r2 - module.quality.held.r2) < 0.1
    poor = lp.distill(posterior, x, **QUICK).quality
    assert poor.held.r2 < module.quality.held.r2


@pytest.mark.parametrize(("size", "link"), [(3, "gumbel"), (2, "gumbel"), (3, "probit"), (66, "network"), (2, "exact")])
def test_with_exact_variances_the_prediction_is_the_posteriors(size, link, monkeypatch):
    """With the right logarithms in the place of the head's nothing differs, but for the closed form."""
    posterior, x = fitted(size, "regression" if link == "exact" else "classification", dtype=torch.float64)
    posterior.output_temperature = 1.5 if link in ("gumbel", "probit") else 1.0
    module = lp.distill(posterior, x, link=link, **QUICK)
    logs = distillation.exact_logs(posterior, module, x)[1]
    monkeypatch.setattr(distillation.DistilledPosterior, "log_variance", lambda *_: logs)
    found, wanted = module(x), posterior.predictive(x, link=link)
    approximate = {"rtol": 0, "atol": 0.02} if (size, link) == (3, "gumbel") else {"rtol": 1e-6, "atol": 1e-9}
    for name in ("mean", "variance", "functional_mean"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), **approximate)


def test_variances_of_classes_are_those_of_pairs():
    posterior, x = fitted(3, "classification", dtype=torch.float64)
    module = lp.distill(posterior, x, **QUICK)
    found = distillation.exact_logs(posterior, module, x)[1].exp()
    mean, covariance = posterior.functional_posterior(x)
    w, variance = centring_weights(mean), covariance.diagonal(dim1=1, dim2=2)
    pairs = variance[:, :, None] + variance[:, None] - 2 * covariance
    wanted = torch.stack([(w * pairs[:, k]).sum(-1) / (1 - w[:, k]) / 2 for k in range(3)], -1)
    whole = independent_variances(mean, covariance).amin(-1) > 0  # three variances then make all three pairs
    assert whole.sum() > 20
    torch.testing.assert_close(found[whole], wanted[whole])


@pytest.mark.parametrize("size", [3, 10])
def test_the_closed_form_is_close_to_the_integral(size):
    posterior, x = fitted(3, "classification", dtype=torch.float64)
    module = lp.distill(posterior, x, **QUICK)
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(200, size, dtype=torch.float64, generator=generator)
    for level, most in ((0.0, 1e-12), (0.01, 2e-4), (0.1, 0.002), (1.0, 0.04), (10.0, 0.15)):
        variance = torch.full_like(mean, level)
        wanted = lp.Categorical().predict(mean, variance, link="gumbel").mean
        assert (module.predicted(mean, variance)[0] - wanted).abs().max() <= most
    rare = module.predicted(torch.tensor([[0.0, -30.0, -40.0]]).double(), torch.full((1, 3), 2.0).double())[0]
    torch.testing.assert_close(rare[0, 1:].log(), torch.tensor([-28.0, -38.0]).double())  # E exp of a difference


def test_divergence_is_that_of_the_probabilities():
    posterior, x = fitted(3, "classification", dtype=torch.float64)
    held = torch.randn(100, 3, dtype=torch.float64)
    module = lp.distill(posterior, held, **QUICK)
    p, q = posterior.predictive(held[4::5]).mean, module(held[4::5]).mean
    assert module.quality.held.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-6)
    assert lp.distill(posterior, held, link="network", **QUICK).quality.held.kl == 0


class Summary(nn.Module):
    """Reads one token of what a layer makes of each, or all of them."""

    def __init__(self, token):
        super().__init__()
        self.token, self.each, self.mixed, self.head = token, nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        hidden = self.mixed(self.each(x).tanh()).tanh()
        return self.head(hidden.mean(1) if self.token is None else hidden[:, self.token])


@pytest.mark.parametrize("token", [0, -1, 2, None])
def test_the_token_that_outputs_depend_on_is_found(token):
    torch.manual_seed(0)
    x = torch.randn(40, 6, 4)
    posterior = lp.KFAC(Summary(token), "regression").fit([(x, torch.randn(40, 2))])
    module = lp.distill(posterior, x, **QUICK)
    hidden = posterior.model.each(x).tanh().detach()
    wanted = hidden.mean(1) if token in (2, None) else hidden[:, token]
    torch.testing.assert_close(module.features(x)[1][:, 6:11], wanted)
    assert not any(own.requires_grad for own in module.parameters())


def test_the_model_and_the_random_numbers_stay_as_they_are():
    posterior, x = fitted()
    model = posterior.model.train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    module = lp.distill(posterior, [(x[:30], None), (x[30:], None)], **QUICK)
    assert torch.equal(torch.get_rng_state(), state) and model.training and not module.train().training
    assert all(torch.equal(before[name], own) for name, own in model.state_dict().items())
    assert not any(vars(own)["_forward_pre_hooks"] for own in model.modules())
    again = lp.distill(posterior, [x[:30], x[30:]], **QUICK)
    assert all(map(torch.equal, module(x), again(x)))
    other = copy.deepcopy(module)
    for own in other.state_dict().values():
        own.zero_()
    other.load_state_dict(module.state_dict())
    assert all(map(torch.equal, module(x), other(x)))


def test_threads_do_not_mix_their_features():
    posterior, x = fitted()
    module = lp.distill(posterior, x, **QUICK)
    wanted, found = [module(x[n : n + 1]).variance for n in range(8)], dict[int, list[bool]]()

    def ask(n):
        found[n] = [torch.equal(module(x[n : n + 1]).variance, wanted[n]) for _ in range(20)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(all, found.values())) and len(found) == 8


class Tokens(nn.Module):
    """Embeds tokens; an LSTM and a convolution; logits at each of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.read = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True)
        self.mix, self.head = nn.Conv1d(5, 6, 3, padding=1), nn.Linear(6, 2)

    def forward(self, ids, mask):
        return self.head(self.mix(self.read(self.embed(ids))[0].mT).mT.tanh() * mask[..., None])


def test_tokens_masks_and_outputs_at_positions():
    torch.manual_seed(0)
    ids, mask = torch.randint(0, 9, (40, 7)), (torch.arange(7) < torch.randint(3, 8, (40, 1))).long()
    posterior = lp.KFAC(Tokens(), "classification", parameters=["head", "mix"])
    posterior.fit([(ids, mask, torch.randint(0, 2, (40, 7)))])
    module = lp.distill(posterior, [(ids, mask, None)], **QUICK)
    assert module(ids, mask).variance.shape == (40, 7, 2) and set(module.taps) == {"read", "mix", "head"}
    torch.testing.assert_close(module(ids[:3], mask[:3]).mean, module(ids, mask).mean[:3])


def test_several_inputs_are_passed_as_to_the_network():
    posterior, x = fitted()
    other = torch.randn(60, 3)
    posterior = lp.KFAC(TwoInputs(), "regression").fit([({"x": x, "other": other}, torch.randn(60, 2))])
    module = lp.distill(posterior, {"x": x, "other": other}, **QUICK)
    wanted = module(other, x).variance
    for found in (module(other, x=x), module(x=x, other=other)):
        assert torch.equal(found.variance, wanted)


def test_what_cannot_be_distilled_is_refused():
    posterior, x = fitted(3, "classification")
    for link in ("mc", "bridge", "cubic"):
        with pytest.raises(ConfigurationError, match="Unknown link"):
            lp.distill(posterior, x, link=link)
    with pytest.raises(ConfigurationError, match="number of inputs"):
        lp.distill(posterior, x[:19], **QUICK)
    with pytest.raises(ConfigurationError, match="steps"):
        lp.distill(posterior, x, steps=0)
    with pytest.raises(UnsupportedError, match="more than variances"):
        lp.distill(lp.KFAC(posterior.model, lp.Poisson()), x)
    with pytest.raises(UnsupportedError, match="cut into examples"):
        lp.distill(posterior, {"x": x, "scale": torch.ones(3)})
    posterior, x = fitted()
    posterior.tangent_mean = posterior.network.vector() + 1
    with pytest.raises(UnsupportedError, match="mean is not"):
        lp.distill(posterior, x, **QUICK)


def test_a_poor_head_says_so():
    posterior, x = fitted()
    with pytest.warns(UserWarning, match="Distilled variances differ"):
        lp.distill(posterior, x, **QUICK | {"steps": 1})


def test_a_head_that_fails_on_altered_inputs_alone_says_so(monkeypatch):
    posterior, x = fitted(2)
    alterations = iter([lambda own: own, lambda own: 4 + 3 * own])  # of those fitted to, and of those held back
    monkeypatch.setattr(distillation, "_altered", lambda own, _: next(alterations)(own))
    with pytest.warns(UserWarning, match="only altered copies differ"):
        module = lp.distill(posterior, torch.randn(300, 3), copies=1, width=8, steps=150)
    assert module.quality.held.r2 > 0.9 > module.quality.altered.r2


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "kind"), [(1, "regression"), (2, "classification"), (3, "classification")])
def test_compiled_and_exported_modules_take_other_batches(size, kind, way):
    posterior, x = fitted(size, kind)
    with torch.no_grad():
        module = lp.distill(posterior, x, **QUICK)
        for own, wanted in zip(served(module, way, x[:3])(x), module(x), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    """An LSTM's last hidden state."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.read(x)[0][:, -1])


class Attentive(nn.Module):
    """Attention over a sequence with a token of the class before it."""

    def __init__(self):
        super().__init__()
        self.start, self.each, self.head = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x):
        q, k, v = self.each(torch.cat([self.start.expand(x.shape[0], -1, -1), x], 1))[:, None].chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["export", "onnx"])
@pytest.mark.parametrize("kind", ["convolutions", "recurrent", "attention", "lora"])
def test_networks_of_several_kinds_export(kind, way):
    torch.manual_seed(0)
    x, parameters = torch.randn(40, 6, 4), "all"
    if kind == "convolutions":
        x = torch.randn(40, 1, 8, 8)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3), nn.ReLU())
        model = model.append(nn.Flatten()).append(nn.Linear(5, 3))
    else:
        model = Recurrent() if kind == "recurrent" else Attentive()
    if kind == "lora":
        peft, parameters = pytest.importorskip("peft"), "lora"
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["each"], init_lora_weights=False))
    posterior = lp.KFAC(model.eval(), "classification", parameters=parameters).fit([(x, torch.arange(40) % 3)])
    with torch.no_grad():
        module = lp.distill(posterior, x, **QUICK)
        for own, wanted in zip(served(module, way, x[:3])(x), module(x), strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-5)
