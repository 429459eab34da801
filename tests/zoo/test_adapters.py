"""Adapters on a frozen base: hand-made and PEFT's, on bases in full, half and integer precision."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import batch_jacobian, categorical_hessian, ggn, kronecker_factors, relative_error, whole_tensors
from torch import Tensor, nn
from zoo.architecture import imported
from zoo.test_untouched import Watch

import laplace_plus as lp
from laplace_plus.errors import UnsupportedError

POSTERIORS = pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, lp.Full])


class Quantised(nn.Module):
    """A linear map whose weights are eight-bit integers with one scale for each row; it has no parameters."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias.to(x.dtype))


class LoRA(nn.Module):
    """``y = base(x) + s B A x`` (Hu et al., 2022)."""

    def __init__(self, base: nn.Module, d_in: int, d_out: int, rank: int = 2, scaling: float = 1.5):
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), scaling
        self.a, self.b = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * self.b(self.a(self.dropout(x)))


class Adapted(nn.Module):
    """A frozen network over tokens with adapters in two places and a head that is trained."""

    def __init__(self, wrap):
        super().__init__()
        self.first = LoRA(wrap(nn.Linear(3, 6)), 3, 6)
        self.frozen = wrap(nn.Linear(6, 6)).requires_grad_(False)
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.second = LoRA(wrap(nn.Linear(6, 5)), 6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.norm(h + torch.tanh(self.frozen(h)))
        return self.head(torch.tanh(self.second(h)).mean(1))


BASES = {"frozen": lambda linear: linear, "quantised": Quantised}
ADAPTERS = [f"{layer}.{side}.weight" for layer in ("first", "second") for side in ("a", "b")]
each_base = pytest.mark.parametrize("base", list(BASES))


def adapted(base: str) -> Adapted:
    torch.manual_seed(0)
    return Adapted(BASES[base]).double()


def data(n: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 4, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=generator)


@each_base
def test_factors_of_adapters_are_the_dense_ones(base):
    model, (x, y) = adapted(base), data()
    posterior = lp.KFAC(model, "classification", parameters=ADAPTERS).fit([(x[:3], y[:3]), (x[3:], y[3:])])
    assert list(posterior.parameter_names) == ADAPTERS
    layers = [name.removesuffix(".weight") for name in ADAPTERS]
    wanted = kronecker_factors(copy.deepcopy(model).eval(), [{"x": one} for one in x.split(1)], layers)
    found = {
        layout.names[0].removesuffix(".weight"): whole_tensors(block) for layout, block in posterior.state.curvature
    }
    assert found.keys() == wanted.keys()
    for name, (left, right, count) in wanted.items():
        torch.testing.assert_close(found[name]["left"][0, 0], left, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[name]["right"][0], right, rtol=1e-10, atol=1e-12)
        assert found[name]["count"] == count


def assert_dense(model: nn.Module, inputs: dict[str, Tensor], y: Tensor) -> None:
    """Full and Diagonal have the variances of dense curvature over the parameters that require gradients."""
    evaluated = copy.deepcopy(model).eval()
    raw = evaluated(**inputs)
    logits = getattr(raw, "logits", raw)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    curvature = ggn(batch_jacobian(evaluated, logits, trained), categorical_hessian(logits.detach()))
    full = torch.linalg.inv(curvature + torch.eye(len(curvature), dtype=torch.float64)).diagonal()
    for cls, variance in ((lp.Full, full), (lp.Diagonal, 1 / (1 + curvature.diagonal()))):
        posterior = cls(model, "classification").fit([{**inputs, "labels": y}])
        assert relative_error(posterior.variance(), variance) < 1e-10


@each_base
def test_curvature_of_adapters_and_head_is_the_dense_one(base):
    model, (x, y) = adapted(base), data()
    assert_dense(model, {"x": x}, y)


@each_base
def test_samples_change_adapters_alone(base):
    """Sampled predictions are those of copies whose adapters alone were replaced by hand."""
    model, (x, y) = adapted(base).eval(), data()
    posterior = lp.KFAC(model, "classification", parameters=ADAPTERS).fit([(x, y)])
    generator = torch.Generator().manual_seed(2)
    predicted = posterior.predictive(x, method="sampled", n_samples=4, generator=generator).mean
    total = torch.zeros_like(predicted)
    for sample in posterior.sample(4, generator=generator.manual_seed(2)):
        changed = copy.deepcopy(model)
        nn.utils.vector_to_parameters(sample, [changed.get_parameter(name) for name in ADAPTERS])
        total += changed(x).softmax(-1).detach() / 4
    torch.testing.assert_close(predicted, total)


@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal])
def test_a_base_in_half_precision_under_adapters_in_single_precision(cls):
    """As with eight- and four-bit bases, whose maps give half precision; compared with a base of the same weights."""
    x, y = data()
    x = x.bfloat16().float()
    half = adapted("frozen").float()
    for module in (half.first.base, half.second.base, half.frozen):
        module.bfloat16().register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    single = adapted("frozen").float()
    for name, parameter in half.named_parameters():
        single.get_parameter(name).data.copy_(parameter.detach())
    ours, theirs = (cls(model, "classification").fit([(x, y)]) for model in (half, single))
    assert half.frozen.weight.dtype == torch.bfloat16
    assert ours.variance().dtype == torch.float32
    # A few layers that round to eight bits.
    torch.testing.assert_close(ours.variance(), theirs.variance(), rtol=6 * 2**-8, atol=0)


def bert(kind: str) -> nn.Module:
    """A small network of transformers with adapters of PEFT."""
    torch.manual_seed(0)
    transformers, peft = imported("transformers"), imported("peft")
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 8, "num_labels": 3, "max_position_embeddings": 8, "attn_implementation": "eager"}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **more))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between the two libraries
        config = getattr(peft, CONFIGS[kind][0])(task_type="SEQ_CLS", **CONFIGS[kind][1])
        model = peft.get_peft_model(model, config).double()
    generator = torch.Generator().manual_seed(3)  # adapters start with a zero factor
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(4)
    mask = (torch.arange(5) < torch.tensor([[5], [3], [2], [4]])).long()
    ids = torch.randint(1, 9, (4, 5), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1, 2, 0])


PLACES = {"target_modules": ["query", "value"]}
CONFIGS: dict[str, tuple[str, dict]] = {
    "lora": ("LoraConfig", {**PLACES, "r": 2, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {**PLACES, "r": 2, "use_dora": True}),
    "ia3": ("IA3Config", {**PLACES, "feedforward_modules": []}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 2}),
}


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore:Which rows belong")  # of learnt prompts
@pytest.mark.parametrize("kind", ["lora", *(pytest.param(k, marks=pytest.mark.slow) for k in CONFIGS if k != "lora")])
def test_adapters_of_peft(kind):
    model, (inputs, y) = bert(kind).train(), sentences()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    watch = Watch(model)
    posterior = lp.KFAC(model, "classification").fit([{**inputs, "labels": y}])
    assert list(posterior.parameter_names) == trained
    assert not any("base_layer" in name or "original_module" in name for name in trained)
    assert len(trained) < len(list(model.parameters()))
    posterior.predictive(inputs)
    posterior.predictive(inputs, method="sampled", n_samples=2, generator=torch.Generator().manual_seed(0))
    watch.assert_same()
    assert not any(getattr(module, "merged", False) for module in model.modules())
    assert_dense(model, inputs, y)


@pytest.mark.zoo
def test_factors_of_pefts_adapters_do_not_hold_padding():
    model, (inputs, y) = bert("lora").eval(), sentences()
    lengths = inputs["attention_mask"].sum(1).tolist()
    alone = [
        {**{name: value[n : n + 1, :length] for name, value in inputs.items()}, "labels": y[n : n + 1]}
        for n, length in enumerate(lengths)
    ]
    whole = lp.KFAC(model, "classification").fit([{**inputs, "labels": y}])
    torch.testing.assert_close(
        whole.variance(), lp.KFAC(model, "classification").fit(alone).variance(), rtol=1e-10, atol=0
    )


dynamic_quantisation = pytest.mark.skipif(
    not hasattr(torch.ao.quantization, "quantize_dynamic"), reason="this torch no longer has dynamic quantisation"
)


def dynamically_quantised() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is to move to another package
        return torch.ao.quantization.quantize_dynamic(model, {"2"}, dtype=torch.qint8)


@dynamic_quantisation
@POSTERIORS
def test_the_head_of_a_dynamically_quantised_network(cls):
    """The quantised layer comes without parameters; the head's posterior is that of a linear model on its features."""
    model, x, y = dynamically_quantised(), data()[0][:, 0].float(), data()[1]
    posterior = cls(model, "classification", parameters="last_layer").fit([(x, y)])
    features = model[:-1](x).detach()
    head = cls(copy.deepcopy(model[-1]), "classification").fit([(features, y)])
    torch.testing.assert_close(posterior.variance(), head.variance())
    torch.testing.assert_close(posterior.predictive(x).mean, head.predictive(features).mean)


@dynamic_quantisation
@POSTERIORS
def test_layers_before_a_map_without_derivative_are_refused(cls):
    model, x, y = dynamically_quantised(), data()[0][:, 0].float(), data()[1]
    with pytest.raises(UnsupportedError, match=r"quantized::linear_dynamic.*has no derivative"):
        cls(model, "classification").fit([(x, y)])
