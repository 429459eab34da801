"""Training-free Bayesian adapters against the covariance and the scale that the paper's formulas give."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from problems import FittedOnce, relative_error
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConvergenceWarning,
    ModelChangedError,
    SelectionError,
)

peft = pytest.importorskip("peft", reason="adapters are those of peft")


def adapted(base, *targets, rank=2, alpha=6, seed=0):
    """A network with an adapter that looks trained, in double precision."""
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets))).double()
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return model


def linear(inputs=4, outputs=5, **options):
    torch.manual_seed(0)
    return adapted(nn.Sequential(nn.Linear(inputs, outputs)), "0", **options)


class TestTrainingFreeLoRA(FittedOnce):
    one_pass = False

    def make(self, model, likelihood, **options):
        return lp.TrainingFreeLoRA(model, likelihood, n_samples=4, halvings=3, **options)

    def network(self, outputs):
        return adapted(super().network(outputs), "0", "4").train()


def layer_of(model):
    return model.base_model.model[0]


def test_updates_have_the_covariance_of_the_paper():
    model, x = linear(), torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    posterior = lp.TrainingFreeLoRA(model, "classification").fit([(x, torch.zeros(1).long())])
    posterior.noise_scale, n, moments, sums = 0.7, 200_000, torch.zeros(5, 5).double(), torch.zeros(5).double()
    b, a = layer_of(model).lora_B["default"].weight.detach(), layer_of(model).lora_A["default"].weight.detach()
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        drawn = posterior.sample(n // 4, generator=generator).view(-1, 2, 4)
        updates = 3 * ((drawn - a) @ x[0]) @ b.mT  # lora_alpha / r = 3
        moments, sums = moments + updates.mT @ updates, sums + updates.sum(0)
    u = torch.linalg.svd(b, full_matrices=False)[0]
    expected = (3 * 0.7) ** 2 * x.square().sum() * u @ u.mT
    variances = expected.diagonal()
    error = ((variances[:, None] * variances + expected.square()) / n).sqrt()  # of a Gaussian's empirical covariance
    assert ((moments / n - expected).abs() < 4.5 * error).all()
    assert relative_error(moments / n, expected) < 0.01  # of which the standard error is (3 / n)^½ = .004
    assert ((sums / n).abs() < 4.5 * (variances / n).sqrt()).all()


def test_any_factors_of_an_update_give_the_same_law():
    model, x = linear(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data, products = [(x, torch.tensor([0, 1, 2]))], []
    for refactored in (False, True):
        lora = layer_of(model)
        if refactored:
            mix = torch.tensor([[2.0, 0.3], [-1.0, 0.1]], dtype=torch.float64)
            lora.lora_B["default"].weight.data @= mix
            lora.lora_A["default"].weight.data = torch.linalg.solve(mix, lora.lora_A["default"].weight.data)
        posterior = lp.TrainingFreeLoRA(model, "classification").fit(data)
        root = lora.lora_B["default"].weight.detach() @ posterior.state.maps[0]
        products.append(root @ root.mT)
    torch.testing.assert_close(*products, rtol=0, atol=1e-12)


def test_directions_that_the_adapter_does_not_use_get_no_noise():
    model = linear(rank=3)
    layer_of(model).lora_B["default"].weight.data[:, 2] = 0
    posterior = lp.TrainingFreeLoRA(model, "classification").fit([(torch.ones(1, 4).double(), torch.zeros(1).long())])
    moved = (posterior.sample(5) - posterior.mean).view(5, 3, 4)
    assert moved[:, 2].abs().max() < 1e-15 < moved[:, :2].abs().max()


def test_without_noise_predictions_are_the_networks_bit_by_bit():
    model, x = linear(), torch.randn(6, 4).double()
    posterior = lp.TrainingFreeLoRA(model, "classification").fit([(x, torch.zeros(6).long())])
    posterior.noise_scale = 0.0
    for outputs in posterior.sampled_outputs(x, 3, None):
        assert torch.equal(outputs, model(x))


@pytest.mark.parametrize("tolerance", [pytest.param(0.05, marks=pytest.mark.slow), 0.4])
def test_the_scale_is_that_of_the_closed_form(tolerance):
    """At the network's own output m the averaged density is N(m; m, ν² I + s² σ² ‖x‖² U Uᵀ)."""
    model, x, n, noise = linear(inputs=2, outputs=3), torch.tensor([[0.4, -0.8]], dtype=torch.float64), 60, 0.8
    likelihood = lp.Gaussian(noise_std=noise)
    posterior = lp.TrainingFreeLoRA(model, likelihood, tolerance=tolerance, n_samples=n)
    posterior.fit([(x, torch.zeros(1, 3).double())], generator=torch.Generator().manual_seed(0))
    base = 1.5 * math.log(2 * math.pi * noise**2)
    assert posterior.report.network == pytest.approx(base, rel=1e-12)
    ratio = math.expm1(2 * tolerance * base / 2)  # ½ r log(1 + s²σ²‖x‖²/ν²) = ε L₀, r = 2
    expected = noise * math.sqrt(ratio / (9 * float(x.square().sum())))
    # The density of one sample over its mean is exp(−z/2) for z = (s σ ‖x‖/ν)² χ²₂; then dL/dσ = 2 c σ/(1 + c σ²).
    second = (1 + 2 * ratio) ** -1 / (1 + ratio) ** -2
    error = math.sqrt((second - 1) / n) * expected * (1 + ratio) / (2 * ratio)
    assert abs(posterior.noise_scale - expected) < 4 * error + expected * 2**-9


def test_the_search_is_by_common_random_numbers_and_keeps_the_largest_accepted_scale():
    model, x = linear(), torch.randn(40, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    make = lambda: lp.TrainingFreeLoRA(model, "classification", tolerance=0.01)  # noqa: E731
    data = [(x, torch.zeros(40).long())]
    one, two = (make().fit(data, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.report == two.report
    assert one.noise_scale == max(scale for scale, _, accepted in one.report.steps if accepted)
    bound = 1.01 * one.report.network
    assert all(accepted == (score <= bound) for _, score, accepted in one.report.steps)
    rejected = min(scale for scale, _, accepted in one.report.steps if not accepted)
    assert one.noise_scale < rejected <= one.noise_scale * (1 + 2**-9)


def test_scores_by_labels_are_those_of_wrong_ones_too():
    model, x = linear(), torch.randn(200, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = (model(x).argmax(-1) + (torch.arange(200) % 10 == 0)) % 5  # every tenth is wrong
    posterior = lp.TrainingFreeLoRA(model, "classification", labels=True, halvings=3).fit([(x, labels)])
    assert posterior.report.network == pytest.approx(float(nn.functional.cross_entropy(model(x).detach(), labels)))


def test_noise_without_effect_is_told():
    model = linear()
    data = [(torch.zeros(2, 4).double(), torch.zeros(2).long())]
    with pytest.warns(ConvergenceWarning, match="Every scale was accepted"):
        lp.TrainingFreeLoRA(model, "classification", halvings=1, n_samples=1).fit(data)


def test_adapters_that_are_not_in_use_are_refused():
    model, x = linear(), torch.ones(2, 4).double()
    data = [(x, torch.zeros(2).long())]
    model.add_adapter("other", model.peft_config["default"])
    posterior = lp.TrainingFreeLoRA(model, "classification").fit(data)
    gaussian = lp.KFAC(model, "classification", parameters="lora").fit(data)
    model.set_adapter("other")
    for one in (posterior, gaussian):
        with pytest.raises(ModelChangedError, match="'other'"):
            one.predictive(x)
    with pytest.raises(SelectionError, match="The adapter does nothing"):
        lp.TrainingFreeLoRA(model, "classification").fit(data)
    model.set_adapter("default")
    with model.disable_adapter(), pytest.raises(ModelChangedError, match="disabled"):
        gaussian.predictive(x)
    assert posterior.predictive(x).mean.shape == gaussian.predictive(x).mean.shape == (2, 5)
    with pytest.raises(SelectionError, match="Only whole matrices A"):
        lp.TrainingFreeLoRA(model, "classification", parameters=["*lora_B.default*"])
    with model.disable_adapter(), pytest.raises(SelectionError, match="disable_adapters"):
        lp.TrainingFreeLoRA(model, "classification")
    model.merge_adapter()
    with pytest.raises(SelectionError, match="merged"):
        lp.TrainingFreeLoRA(model, "classification")
    with pytest.raises(SelectionError, match="no active low-rank adapter"):
        lp.TrainingFreeLoRA(nn.Linear(2, 2), "classification")


def test_bfloat16_networks_take_the_noise_of_float32():
    model = linear().to(torch.bfloat16)
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(2)).bfloat16()
    scales = []
    for network, inputs in ((model, x), (copy.deepcopy(model).float(), x.float())):
        posterior = lp.TrainingFreeLoRA(network, "classification", tolerance=0.05)
        posterior.fit([(inputs, torch.zeros(30).long())], generator=torch.Generator().manual_seed(0))
        scales.append(posterior.noise_scale)
        assert posterior.state.maps[0].dtype == torch.float32
        assert posterior.predictive(inputs).mean.shape == (30, 5)
    assert scales[0] == pytest.approx(scales[1], rel=0.1)  # an NLL in bfloat16 is known within .4 %


class TestSelection:
    def test_lora_is_the_active_adapter_with_its_magnitudes_and_saved_modules(self):
        base = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        options = {"r": 2, "target_modules": ["0"]}
        model = peft.get_peft_model(base, peft.LoraConfig(**options, use_dora=True, modules_to_save=["2"]))
        model.add_adapter("other", peft.LoraConfig(**options))
        start = "base_model.model"
        names = {f"{start}.0.{kind}.default.weight" for kind in ("lora_A", "lora_B", "lora_magnitude_vector")}
        names |= {f"{start}.2.modules_to_save.default.{kind}" for kind in ("weight", "bias")}
        assert set(lp.Diagonal(model, "classification", parameters="lora").parameter_names) == names
        model.set_adapter("other")
        names = {f"{start}.0.{kind}.other.weight" for kind in ("lora_A", "lora_B")}
        assert set(lp.Diagonal(model, "classification", parameters="lora").parameter_names) == names


@pytest.mark.slow
def test_held_out_labels_choose_the_scale_of_the_closed_form():
    """The density N(y; m, v) within U's two dimensions, v = ν² + s²σ²‖x‖², is largest at v = |Uᵀ(y − m)|²/2."""
    model, x, noise = linear(inputs=2, outputs=3), torch.tensor([[0.4, -0.8]], dtype=torch.float64), 0.8
    u = torch.linalg.svd(layer_of(model).lora_B["default"].weight.detach(), full_matrices=False)[0]
    y = model(x).detach() + 2 * noise * u[:, 0]  # v = 2 ν²
    posterior = lp.TrainingFreeLoRA(model, lp.Gaussian(noise_std=noise), halvings=2).fit([(x, y)])
    expected = math.sqrt(noise**2 / (9 * float(x.square().sum())))
    options = {"data": [(x, y)], "grid": [expected * 2.0**k for k in range(-2, 3)], "tune_noise": False}
    posterior.fit_prior_precision("validation", n_samples=4000, generator=torch.Generator().manual_seed(0), **options)
    assert posterior.noise_scale == pytest.approx(expected)


def test_a_scale_that_was_tuned_is_saved(tmp_path):
    model, x = linear(), torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    posterior = lp.TrainingFreeLoRA(model, lp.Gaussian(), halvings=2).fit([(x, model(x).detach())])
    posterior.fit_prior_precision(data=[(x, model(x).detach())], tune_noise=False)  # by which no noise is best
    posterior.save(tmp_path / "it")
    for one in (posterior, lp.load(tmp_path / "it", model)):
        assert one.noise_scale == 0
        for outputs in one.sampled_outputs(x, 3, None):
            assert torch.equal(outputs, model(x))


@pytest.mark.parametrize("rank", [2, 3])
def test_the_bound_is_that_of_dense_gaussians(rank):
    model, x = linear(rank=rank), torch.randn(30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.arange(30) % 5
    posterior = lp.TrainingFreeLoRA(model, "classification", prior_mean=0.1, temperature=2.0, n_samples=7, halvings=2)
    posterior.fit([(x[:20], y[:20]), (x[20:], y[20:])])
    scale, m = 0.2, posterior.mean
    value, precision, noise = posterior.bound([(x, y)], scale, 3, False)
    posterior.noise_scale = scale
    drawn = posterior.sampled_outputs(x, 7, torch.Generator().manual_seed(3))
    losses = [nn.functional.cross_entropy(outputs, y, reduction="sum") for outputs in drawn]
    root = torch.kron(posterior.state.maps[0], torch.eye(4).double())
    q = torch.distributions.MultivariateNormal(m, scale**2 * root @ root.mT)

    def divergence(alpha):
        p = torch.distributions.MultivariateNormal(torch.full_like(m, 0.1), torch.eye(len(m)).double() / alpha)
        return torch.distributions.kl_divergence(q, p)

    assert value == pytest.approx(float(-sum(losses) / 7 / 2 - divergence(precision)), rel=1e-10) and noise is None
    assert divergence(precision) < min(divergence(0.99 * precision), divergence(1.01 * precision))


def test_the_scale_of_the_largest_bound_is_taken():
    model, x = linear(), torch.randn(40, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = model(x).detach() + 0.3 * torch.randn(40, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    posterior = lp.TrainingFreeLoRA(model, "regression", halvings=2).fit([(x, y)])
    posterior.fit_prior_precision(generator=torch.Generator().manual_seed(0))
    seed = int(lp.likelihoods.sampling.draw_seed(torch.Generator().manual_seed(0)))
    bounds = {scale: posterior.bound([(x, y)], scale, seed, True) for scale in posterior.tunables()["noise_scale"][1:]}
    best = max(bounds, key=lambda scale: bounds[scale][0])
    assert posterior.noise_scale == best and posterior.tuning.converged and posterior.tuning.value == bounds[best][0]
    assert torch.equal(posterior.noise_std, bounds[best][2]) and torch.equal(posterior.prior_precision, bounds[best][1])
    data = posterior.predictive(x, generator=torch.Generator().manual_seed(1))
    assert 0.2 < float(posterior.noise_std.mean()) < 0.6 and (data.epistemic > 0).all()


def test_convolutions_have_noise_too():
    model = adapted(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten()), "0")
    data = [(torch.randn(4, 2, 3).double(), torch.zeros(4).long())]
    assert lp.TrainingFreeLoRA(model, "classification", halvings=1).fit(data).noise_scale > 0
