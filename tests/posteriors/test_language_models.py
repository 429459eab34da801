"""Causal language models of transformers with adapters of PEFT, against dense Jacobians and against other layouts."""

from __future__ import annotations

import pytest
import torch
from problems import relative_error
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, DataError

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `test`")
peft = pytest.importorskip("peft", reason="needs peft, of the extra `test`")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # between the two libraries
V, LENGTHS = 11, (5, 2, 4, 3)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=V, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    ),
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False,
    ),
}  # fmt: skip
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
each = pytest.mark.parametrize("kind", CONFIGS)


def adapted(kind: str, *, changes=None, **options) -> nn.Module:
    """A tiny model in double precision whose adapters do something."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for name, value in (changes or {}).items():
        setattr(config, name, value)
    base = transformers.AutoModelForCausalLM.from_config(config)
    options = {"r": 2, "lora_alpha": 4, "target_modules": TARGETS[kind], "task_type": "CAUSAL_LM"} | options
    options |= {"fan_in_fan_out": kind == "gpt2"}
    model = peft.get_peft_model(base, peft.LoraConfig(**options)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, V, (length,), generator=generator) for length in LENGTHS]


def padded(side: str, *, total: int = max(LENGTHS)) -> dict[str, torch.Tensor]:
    """The texts as one batch with the next tokens as labels; absolute positions begin at the first token."""
    rows = []
    for ids in texts():
        n = total - len(ids)
        own = torch.stack([ids, torch.ones_like(ids), torch.cat([ids[1:], ids[:1] * 0 - 100]), torch.arange(len(ids))])
        gap = torch.tensor([0, 0, -100, 0])[:, None].expand(-1, n)
        rows.append(torch.cat([gap, own] if side == "left" else [own, gap], 1))
    names = ("input_ids", "attention_mask", "labels", "position_ids")
    return dict(zip(names, torch.stack(rows).unbind(1), strict=True))


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def alone() -> list[dict[str, torch.Tensor]]:
    whole = padded("right")
    return [{k: v[n : n + 1, :length] for k, v in whole.items()} for n, length in enumerate(LENGTHS)]


def jacobian(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the logits ``[B, T, V]`` of a batch in the adapters, ``[B, T, V, P]``."""
    model.eval()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    trained = {name: model.get_parameter(name).detach() for name in names}

    def outputs(chosen):
        return functional_call(model, chosen, (), inputs_of(batch)).logits

    with sdpa_kernel(SDPBackend.MATH):
        return torch.cat([part.flatten(3) for part in jacrev(outputs)(trained).values()], -1)


class TestAnswersAtOnePosition:
    @each
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_they_are_those_of_each_text_by_itself(self, kind, side):
        model = adapted(kind)
        posterior = lp.Full(model, "classification").fit([padded(side)])
        choices = [7, 2, 3]
        found = posterior.at_tokens("last", classes=choices).functional_posterior(inputs_of(padded(side)))
        covariance = posterior.covariance_matrix()
        for n, one in enumerate(alone()):
            last = jacobian(model, one)[0, -1, choices]
            assert_close(found.mean[n], model(**inputs_of(one)).logits[0, -1, choices], rtol=1e-10, atol=1e-12)
            assert relative_error(found.covariance[n], last @ covariance @ last.T) < 1e-8

    @each
    def test_one_forward_and_one_backward_pass_for_each_class(self, kind, monkeypatch):
        model, passes, backward = adapted(kind), [], []
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        view = posterior.at_tokens(classes=[7, 2, 3, 1])
        view.predictive(inputs_of(padded("left")))
        model.register_forward_pre_hook(lambda *_: passes.append(1))
        grad = torch.autograd.grad

        def counted(outputs, inputs, grad_outputs=None, **options):
            backward.append(len(grad_outputs))
            return grad(outputs, inputs, grad_outputs, **options)

        monkeypatch.setattr(torch.autograd, "grad", counted)
        prediction = view.predictive(inputs_of(padded("left")))
        assert len(passes) == 1 and backward == [4]
        assert_close(prediction.mean.sum(-1), torch.ones(4).double())

    def test_logits_of_other_positions_are_not_computed(self):
        model, shapes = adapted("llama"), []
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        model.get_base_model().lm_head.register_forward_hook(lambda m, x, out: shapes.append(tuple(out.shape)))
        posterior.at_tokens().predictive(**padded("left"), link="mc", generator=torch.Generator().manual_seed(0))
        assert set(shapes) == {(4, 1, V)}
        shapes.clear()
        posterior.at_tokens().predictive(**padded("right"))
        assert set(shapes) == {(4, 4, V)}  # of four lengths

    def test_the_default_is_all_classes_and_a_position_may_have_a_number(self):
        model, batch = adapted("gpt2"), inputs_of(padded("left"))
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        whole = posterior.functional_posterior(batch)
        for position in (-1, 4, "last"):
            own = posterior.at_tokens(position).functional_posterior(batch)
            assert_close(own.mean, whole.mean[:, -1], rtol=1e-12, atol=1e-12)
            assert_close(own.covariance, whole.covariance[:, -1], rtol=1e-9, atol=1e-12)
        own = posterior.at_tokens(-2).predictive(batch, link="probit")
        assert_close(own.mean, posterior.predictive(batch, link="probit").mean[:, -2], rtol=1e-9, atol=1e-12)

    def test_what_does_not_say_where_is_refused(self):
        model, batch = adapted("gpt2"), inputs_of(padded("left"))
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        with pytest.raises(ConfigurationError, match="Unknown position"):
            posterior.at_tokens("first")
        with pytest.raises(DataError, match="no such position"):
            posterior.at_tokens(5).predictive(batch)
        with pytest.raises(ConfigurationError, match="does not have these outputs"):
            posterior.at_tokens(classes=[V]).predictive(batch)
        empty = {**batch, "attention_mask": batch["attention_mask"] * torch.tensor([1, 0, 1, 1])[:, None]}
        for mask in (empty["attention_mask"], 2 * batch["attention_mask"], batch["attention_mask"][:, None, None]):
            with pytest.raises(DataError, match="does not say which token is the last"):
                posterior.at_tokens().predictive({**batch, "attention_mask": mask})
        classifier = nn.Linear(3, 2)
        plain = lp.KFAC(classifier, "classification").fit([(torch.ones(2, 3), torch.tensor([0, 1]))])
        with pytest.raises(DataError, match="no outputs at positions"):
            plain.at_tokens().predictive(torch.ones(2, 3))

    def test_models_of_another_kind(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double()
        ids = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(3))
        ahead = nn.Sequential(model, nn.Identity())
        posterior = lp.Full(ahead, lp.Categorical(weight=[1.0] * 8 + [2.0]), parameters="0.1").fit([(ids, ids.roll(1))])
        whole, own = posterior.functional_posterior(ids), posterior.at_tokens(classes=torch.tensor([4, 8]))
        assert_close(own.functional_posterior(ids).mean, whole.mean[:, -1, [4, 8]])
        assert_close(own.functional_posterior(ids).covariance, whole.covariance[:, -1][:, [4, 8]][..., [4, 8]])
        assert_close(own.predictive(ids).mean.sum(-1), torch.ones(5).double())
