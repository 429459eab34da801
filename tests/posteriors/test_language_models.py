"""Causal language models of transformers with adapters of PEFT, against dense Jacobians and against other layouts."""

from __future__ import annotations

import pytest
import torch
from posteriors.four_bits import FourBits, Linear4bit
from problems import relative_error
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import laplace_plus as lp
from laplace_plus.errors import CheckpointError, ConfigurationError, DataError
from laplace_plus.persistence import fingerprint

transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `test`")
peft = pytest.importorskip("peft", reason="needs peft, of the extra `test`")
text_choices = pytest.importorskip("laplace_plus.integrations.transformers").text_choices

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
ROUNDING = {"gpt2": 1e-10, "llama": 1e-6}  # Llama normalises in single precision, whatever its weights are
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
    return stirred(model, model.parameters())


def stirred(model: nn.Module, parameters) -> nn.Module:
    """With noise on some parameters, as adapters begin with a factor of zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parameters:
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


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def jacobian(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the logits ``[B, T, V]`` of a batch in the adapters, ``[B, T, V, P]``."""
    model.eval()

    def outputs(chosen):
        return functional_call(model, chosen, (), inputs_of(batch)).logits

    with sdpa_kernel(SDPBackend.MATH):
        return torch.cat([part.flatten(3) for part in jacrev(outputs)(trained(model)).values()], -1)


class TestAnswersAtOnePosition:
    @pytest.mark.diagonal
    @each
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_they_are_those_of_each_text_by_itself(self, kind, side):
        model = adapted(kind)
        posterior = lp.Full(model, "classification").fit([padded(side)])
        choices = [7, 2, 3]
        found = lp.at_last_token(posterior, choices).functional_posterior(inputs_of(padded(side)))
        covariance = posterior.covariance_matrix()
        for n, one in enumerate(alone()):
            last = jacobian(model, one)[0, -1, choices]
            assert_close(found.mean[n], model(**inputs_of(one)).logits[0, -1, choices], rtol=1e-10, atol=1e-12)
            assert relative_error(found.covariance[n], last @ covariance @ last.T) < 100 * ROUNDING[kind]

    @each
    def test_one_forward_and_one_backward_pass_for_each_class(self, kind, monkeypatch):
        model, passes, backward = adapted(kind), [], []
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        view = lp.at_last_token(posterior, [7, 2, 3, 1])
        view.predictive(inputs_of(padded("left")))
        model.register_forward_pre_hook(lambda *_: passes.append(1))
        grad = torch.autograd.grad

        def counted(outputs, inputs, grad_outputs=None, **options):
            backward.append(len(grad_outputs))
            return grad(outputs, inputs, grad_outputs, **options)

        monkeypatch.setattr(torch.autograd, "grad", counted)
        prediction = view.predictive(inputs_of(padded("left")))
        assert len(passes) == 1 and backward[-1] == 4 and len(backward) <= 4  # three are for the invariant of rows
        assert_close(prediction.mean.sum(-1), torch.ones(4).double())

    def test_logits_of_other_positions_are_not_computed(self):
        model, shapes = adapted("llama"), []
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        model.get_base_model().lm_head.register_forward_hook(lambda m, x, out: shapes.append(tuple(out.shape)))
        lp.at_last_token(posterior).predictive(**padded("left"), link="mc", generator=torch.Generator().manual_seed(0))
        assert {shape[1:] for shape in shapes} == {(1, V)}
        shapes.clear()
        lp.at_last_token(posterior).predictive(**padded("right"))
        assert max(shapes) == (4, 4, V)  # of four lengths

    def test_the_default_is_all_classes(self):
        model, batch = adapted("gpt2"), inputs_of(padded("left"))
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        whole, own = (one.functional_posterior(batch) for one in (posterior, lp.at_last_token(posterior)))
        assert_close(own.mean, whole.mean[:, -1], rtol=1e-12, atol=1e-12)
        assert_close(own.covariance, whole.covariance[:, -1], rtol=1e-9, atol=1e-12)

    def test_what_does_not_say_where_is_refused(self):
        model, batch = adapted("gpt2"), inputs_of(padded("left"))
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        with pytest.raises(ConfigurationError, match="does not have these outputs"):
            lp.at_last_token(posterior, [V]).predictive(batch)
        mask = batch["attention_mask"]
        for other in (mask * torch.tensor([1, 0, 1, 1])[:, None], 2 * mask, mask[:, None, None]):
            with pytest.raises(DataError, match="does not say which token is the last"):
                lp.at_last_token(posterior).predictive({**batch, "attention_mask": other})
        plain = lp.KFAC(nn.Linear(3, 2), "classification").fit([(torch.ones(2, 3), torch.tensor([0, 1]))])
        with pytest.raises(ConfigurationError, match="another shape"):
            lp.at_last_token(plain).predictive(torch.ones(2, 3))

    def test_models_of_another_kind(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double()
        ids = torch.randint(0, 9, (5, 4), generator=torch.Generator().manual_seed(3))
        ahead = nn.Sequential(model, nn.Identity())
        posterior = lp.Full(ahead, lp.Categorical(weight=[1.0] * 8 + [2.0]), parameters="0.1").fit([(ids, ids.roll(1))])
        whole, own = posterior.functional_posterior(ids), lp.at_last_token(posterior, torch.tensor([4, 8]))
        assert_close(own.functional_posterior(ids).mean, whole.mean[:, -1, [4, 8]])
        assert_close(own.functional_posterior(ids).covariance, whole.covariance[:, -1][:, [4, 8]][..., [4, 8]])
        assert_close(own.predictive(ids).mean.sum(-1), torch.ones(5).double())


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # older PEFT asks a hub about the base model
class TestBesideTheAdapter:
    """``save_pretrained`` and ``posterior.save`` into one folder."""

    @staticmethod
    def saved(folder, kind="gpt2", **options):
        model = adapted(kind, **options)
        base = {name: p.clone() for name, p in model.get_base_model().named_parameters() if "lora" not in name}
        posterior = lp.KFAC(model, "classification", parameters="lora").fit([padded("left")])
        model.save_pretrained(folder)
        posterior.save(folder / "posterior")
        return base, posterior

    @staticmethod
    def base(values, kind="gpt2", **changes):
        config = CONFIGS[kind]()
        for name, value in changes.items():
            setattr(config, name, value)
        model = transformers.AutoModelForCausalLM.from_config(config).double()
        values = {name.replace("base_layer.", ""): value for name, value in values.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])
        return model

    @each
    @pytest.mark.parametrize(
        "options", [{}, pytest.param({"use_dora": True}, marks=pytest.mark.slow)], ids=["lora", "dora"]
    )
    def test_both_come_back(self, kind, options, tmp_path):
        values, posterior = self.saved(tmp_path, kind, **options)
        assert {p.name for p in tmp_path.iterdir()} >= {"adapter_model.safetensors", "posterior"}
        model = peft.PeftModel.from_pretrained(self.base(values, kind), tmp_path)
        found, batch = lp.load(tmp_path / "posterior", model), inputs_of(padded("left"))
        ours, theirs = (one.functional_posterior(batch).covariance for one in (found, posterior))
        assert torch.equal(ours, theirs)
        assert any("magnitude" in name for name in found.parameter_names) is bool(options)
        again = found.fit([padded("left")])  # its weights do not require gradients now
        assert_close(again.variance(), posterior.variance())

    def test_another_adapter_does_not_matter_until_it_is_active(self, tmp_path):
        values, posterior = self.saved(tmp_path)
        model = peft.PeftModel.from_pretrained(self.base(values), tmp_path)
        model.add_adapter("other", model.peft_config["default"])
        found, batch = lp.load(tmp_path / "posterior", model), inputs_of(padded("left"))
        assert torch.equal(found.predictive(batch).mean, posterior.predictive(batch).mean)
        model.set_adapter("other")
        with pytest.raises(CheckpointError, match="'adapters' first.*default.*other"):
            lp.load(tmp_path / "posterior", model)
        model.set_adapter("default")
        assert torch.equal(lp.load(tmp_path / "posterior", model)(batch).mean, posterior(batch).mean)
        with model.disable_adapter(), pytest.raises(CheckpointError, match="disabled"):
            lp.load(tmp_path / "posterior", model)
        model.merge_adapter()
        with pytest.raises(CheckpointError, match=r"merged \['default'\]"):
            lp.load(tmp_path / "posterior", model)

    def test_a_mismatch_is_named(self, tmp_path):
        values, _ = self.saved(tmp_path)
        changed = dict(values)
        changed["transformer.wte.weight"] = values["transformer.wte.weight"] * 1.001
        model = peft.PeftModel.from_pretrained(self.base(changed), tmp_path)
        with pytest.raises(CheckpointError, match=r"transformer\.wte\.weight' first"):
            lp.load(tmp_path / "posterior", model)
        model = peft.PeftModel.from_pretrained(self.base(values), tmp_path)
        lp.load(tmp_path / "posterior", model)  # which computes the same
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if "lora_B" in name)[0, 0] += 1e-3
        with pytest.raises(CheckpointError, match=r"lora_B\.default\.weight' first"):
            lp.load(tmp_path / "posterior", model)

    def test_of_large_tensors_of_the_base_some_entries_are_read(self):
        model = peft.get_peft_model(nn.Sequential(nn.Linear(70, 90), nn.Tanh()), peft.LoraConfig(target_modules=["0"]))
        before = fingerprint(model)
        weight = model.get_base_model()[0].base_layer.weight.detach()
        weight[1, 1] += 1
        assert fingerprint(model) == before
        weight *= 1.001
        assert fingerprint(model) != before
        a = model.get_base_model()[0].lora_A["default"].weight.detach()  # its own are read whole, however large
        now = fingerprint(model)
        a[3, 7] += 1e-3
        assert fingerprint(model) != now


class TestQuantisedBases:
    @staticmethod
    def pair(**options):
        """Adapters on a base of packed weights, and on one of the same weights in double precision."""
        models = []
        for quantised in (True, False):
            torch.manual_seed(0)
            base = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]()).double()
            for name, module in [*base.named_modules()]:
                if isinstance(module, nn.Linear) and name != "lm_head":
                    packed = Linear4bit(module)
                    if quantised:
                        base.set_submodule(name, packed)
                    else:
                        module.weight.data = FourBits.unpacked(packed.weight.data[:, 0], packed.weight.scale)
            options = {"r": 2, "target_modules": TARGETS["llama"], "task_type": "CAUSAL_LM"} | options
            model = peft.get_peft_model(base, peft.LoraConfig(**options)).double()
            models.append(stirred(model, [p for p in model.parameters() if p.requires_grad]))
        return models

    @pytest.mark.quick("KFAC", "Full")
    @pytest.mark.parametrize("cls", [lp.KFAC, lp.Full, lp.Diagonal])
    def test_they_are_those_of_the_dequantised_weights(self, cls):
        quantised, plain = self.pair(modules_to_save=["lm_head"])
        before = {name: p.clone() for name, p in quantised.named_parameters()}
        ours, theirs = (cls(m, "classification", parameters="lora").fit([padded("left")]) for m in (quantised, plain))
        assert {p.dtype for p in before.values()} == {torch.uint8, torch.float64}
        assert_close(ours.variance(), theirs.variance(), rtol=1e-9, atol=0)
        batch = inputs_of(padded("right"))
        ours, theirs = (lp.at_last_token(p, [1, 2]).functional_posterior(batch).covariance for p in (ours, theirs))
        assert_close(ours, theirs, rtol=1e-9, atol=1e-14)
        assert all(torch.equal(before[name], p) for name, p in quantised.named_parameters())

    def test_saved_and_refused_on_other_bytes(self, tmp_path):
        model, _ = self.pair()
        posterior = lp.KFAC(model, "classification").fit([padded("left")])
        posterior.save(tmp_path / "posterior")
        assert torch.equal(lp.load(tmp_path / "posterior", model).variance(), posterior.variance())
        weight = model.get_base_model().model.layers[0].mlp.down_proj.weight.data
        weight[3] ^= 1
        with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight' first"):
            lp.load(tmp_path / "posterior", model)


def dense_precision(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """``I + Σ Jᵀ (diag p − p pᵀ) J`` over the positions with a label, ``[P, P]``."""
    total = torch.eye(sum(p.numel() for p in model.parameters() if p.requires_grad)).double()
    for batch in batches:
        rows = jacobian(model, batch)[batch["labels"] != -100]
        p = model(**inputs_of(batch)).logits[batch["labels"] != -100].softmax(-1).detach()
        total = total + torch.einsum("ncp,ncd,ndq->pq", rows, torch.diag_embed(p) - p[:, :, None] * p[:, None], rows)
    return total


def precision(model, batches):
    return lp.Full(model, "classification").fit(batches).precision_matrix()


def kronecker(model, batches):
    return lp.KFAC(model, "classification").fit(batches).variance()


class TestCausalModels:
    @pytest.mark.quick("gpt2-left", "llama-right")
    @pytest.mark.parametrize(("kind", "side"), [("gpt2", "left"), ("llama", "left"), ("llama", "right")])
    def test_padding_on_either_side_is_no_data(self, kind, side):
        model = adapted(kind)
        expected = dense_precision(model, alone())
        assert relative_error(precision(model, [padded(side)]), expected) < ROUNDING[kind]
        assert_close(kronecker(model, [padded(side, total=9)]), kronecker(model, alone()), rtol=ROUNDING[kind], atol=0)

    def test_packed_sequences(self):
        """Two texts in one row are as two rows, where positions that begin anew tell them apart."""
        model, (first, second) = adapted("llama", changes={"use_cache": False}), alone()[:2]
        packed = {name: torch.cat([first[name], second[name]], 1) for name in ("input_ids", "position_ids", "labels")}
        logits = torch.cat([model(**inputs_of(one)).logits for one in (first, second)], 1)
        assert_close(model(**inputs_of(packed)).logits, logits, rtol=1e-6, atol=1e-6)  # without a cache
        assert relative_error(precision(model, [packed]), precision(model, [first, second])) < 1e-6
        assert_close(kronecker(model, [packed]), kronecker(model, [first, second]), rtol=1e-6, atol=0)
        posterior = lp.KFAC(model, "classification").fit([first, second])
        whole = posterior.functional_posterior(inputs_of(packed)).covariance[0]
        parts = [posterior.functional_posterior(inputs_of(one)).covariance[0] for one in (first, second)]
        assert_close(whole, torch.cat(parts), rtol=1e-6, atol=1e-8)

    @each
    def test_a_cache_changes_nothing(self, kind):
        found = []
        for use_cache in (True, False):
            model = adapted(kind, changes={"use_cache": use_cache})
            posterior = lp.KFAC(model, "classification").fit([padded("left")])
            assert (model(**inputs_of(padded("left"))).past_key_values is not None) is use_cache
            found.append(lp.at_last_token(posterior, [1, 2]).functional_posterior(inputs_of(padded("left"))).covariance)
        assert_close(*found, rtol=1e-12, atol=0)

    @each
    def test_gradient_checkpointing_is_off_as_in_evaluation_mode(self, kind):
        plain, checkpointed = adapted(kind), adapted(kind)
        checkpointed.gradient_checkpointing_enable()
        checkpointed.enable_input_require_grads()
        checkpointed.train()
        found = [kronecker(model, [padded("left")]) for model in (plain, checkpointed)]
        assert_close(*found, rtol=1e-12, atol=0)
        layers = [m for m in checkpointed.modules() if getattr(m, "gradient_checkpointing", False)]
        assert layers and checkpointed.training and all(layer.training for layer in layers)

    @each
    def test_tied_heads(self, kind):
        """The head of the tied model is the table of tokens; adapters do not change that."""
        tied = adapted(kind, changes={"tie_word_embeddings": True})
        inner = tied.get_base_model()
        assert inner.get_output_embeddings().weight is inner.get_input_embeddings().weight
        expected = dense_precision(tied, alone())
        assert relative_error(precision(tied, [padded("left")]), expected) < ROUNDING[kind]


class TestChoicesOfTexts:
    @staticmethod
    def questions(side: str) -> dict[str, torch.Tensor]:
        """Two questions of two texts each; but for the first one or two, tokens are of the answer."""
        batch = inputs_of(padded(side))
        begin = torch.tensor([2, 1, 1, 1])[:, None]
        batch["scored"] = (batch["attention_mask"] == 1) & (batch["position_ids"] >= begin)
        return {name: value.unflatten(0, (2, 2)) for name, value in batch.items()}

    @staticmethod
    def expected(model, posterior, *, average):
        """Scores and their covariances by the dense Jacobian of each text by itself."""

        def scores(chosen):
            found = []
            for one, first in zip(alone(), (2, 1, 1, 1), strict=True):
                logits = functional_call(model, chosen, (), inputs_of(one)).logits[0]
                ids = one["input_ids"][0]
                own = [logits[t - 1].log_softmax(-1)[ids[t]] for t in range(first, len(ids))]
                found.append(sum(own) / (len(own) if average else 1))
            return torch.stack(found).view(2, 2)

        with sdpa_kernel(SDPBackend.MATH):
            j = torch.cat([part.flatten(2) for part in jacrev(scores)(trained(model)).values()], -1)
        return scores(trained(model)), j @ posterior.covariance_matrix() @ j.mT

    @pytest.mark.diagonal
    @each
    @pytest.mark.parametrize("average", [False, True])
    def test_scores_are_sums_of_log_probabilities(self, kind, average):
        model = adapted(kind).eval()
        posterior = lp.Full(model, "classification").fit([padded("left")])
        mean, covariance = self.expected(model, posterior, average=average)
        for side in ("left", "right"):
            view = text_choices(posterior, average=average)
            found = view.functional_posterior(self.questions(side))
            assert_close(found.mean, mean, rtol=ROUNDING[kind], atol=ROUNDING[kind])
            assert relative_error(found.covariance, covariance) < 100 * ROUNDING[kind]
            prediction = view.predictive(**self.questions(side), link="mc", generator=torch.Generator().manual_seed(0))
            assert_close(prediction.mean.sum(-1), torch.ones(2).double())
            assert prediction.epistemic.min() > 0

    def test_what_cannot_be_scored_is_refused(self):
        posterior = lp.KFAC(adapted("gpt2"), "classification").fit([padded("left")])
        batch = self.questions("right")
        for scored in (torch.zeros_like(batch["scored"]), batch["scored"][:, :, 1:], batch["scored"][0]):
            with pytest.raises(DataError, match="cannot be scored"):
                text_choices(posterior).predictive({**batch, "scored": scored})


def test_top_tokens_with_error_bars():
    """Of sampled networks, a token's probability and its spread are those of the networks themselves."""
    model, batch = adapted("gpt2").eval(), inputs_of(padded("left"))
    posterior = lp.KFAC(model, "classification").fit([padded("left")])
    options = {"method": "sampled", "n_samples": 7}
    found = lp.at_last_token(posterior).predictive(batch, generator=torch.Generator().manual_seed(0), **options)
    drawn = []
    for vector in posterior.sample(7, generator=torch.Generator().manual_seed(0)):
        chosen = posterior.network.substitute(vector)
        drawn.append(functional_call(model, chosen, (), batch).logits[:, -1].softmax(-1))
    drawn = torch.stack(drawn)
    top = found.mean.topk(3)
    assert_close(top.values, drawn.mean(0).topk(3).values, rtol=1e-10, atol=0)
    spread = found.epistemic.sqrt().gather(-1, top.indices)
    assert_close(spread, drawn.std(0, correction=0).gather(-1, top.indices), rtol=1e-8, atol=0)


@pytest.mark.diagonal
@each
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_texts_information_is_that_of_its_own_tokens(kind, side):
    """Summed over them, of the same networks; padding has no part in it."""
    model = adapted(kind).eval()
    posterior = lp.KFAC(model, "classification").fit([padded("left")])

    def information(batch):
        drawn = torch.Generator().manual_seed(0)
        return posterior.predictive(batch, method="sampled", n_samples=5, generator=drawn).mutual_information()

    batch = inputs_of(padded(side))
    own = (information(batch) * batch["attention_mask"]).sum(1)
    vectors, expected = posterior.sample(5, generator=torch.Generator().manual_seed(0)), []
    for one in alone():
        networks = [(posterior.network.substitute(vector), (), inputs_of(one)) for vector in vectors]
        samples = torch.stack([functional_call(model, *own).logits[0].softmax(-1) for own in networks])  # [S, T, V]
        entropies = torch.special.entr(torch.cat([samples, samples.mean(0, keepdim=True)])).sum(-1)
        expected.append((entropies[-1] - entropies[:-1].mean(0)).sum())
    expected = torch.stack(expected)
    assert_close(own, expected, rtol=ROUNDING[kind], atol=ROUNDING[kind])
    assert expected.min() > 1e-4
