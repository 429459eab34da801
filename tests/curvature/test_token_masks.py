"""Padding leaves Kronecker factors alone: padded batches give what their sequences give one by one.

The reference takes unpadded sequences, one at a time, and reads inputs and output gradients off with hooks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from problems import kronecker_factors, whole_tensors
from torch import Tensor, nn
from zoo.architecture import imported

import laplace_plus as lp
from laplace_plus.curvature import KroneckerStructure, Native
from laplace_plus.curvature.accumulation import token_mask
from laplace_plus.likelihoods import Categorical
from laplace_plus.network.batches import Batch
from laplace_plus.network.network import Network

LENGTHS = (5, 2, 3, 1, 5)
LONGEST = max(LENGTHS)
SHARINGS = pytest.mark.parametrize("sharing", ["expand", "reduce"])
SIDES = pytest.mark.parametrize("side", ["right", "left"])


class Attentive(nn.Module):
    """A masked attention block that is used twice, a convolution over single tokens, and a head on the mean token."""

    def __init__(self, token_level: bool = False):
        super().__init__()
        self.token_level = token_level
        self.embedding = nn.Embedding(9, 4)
        self.projection = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4, bias=False)
        self.pointwise = nn.Conv1d(4, 6, 1)
        self.norm = nn.LayerNorm(6)
        self.hidden, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def attend(self, h: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.projection(h).chunk(3, -1)
        scores = (q @ k.mT).masked_fill(mask[:, None] == 0, torch.finfo(h.dtype).min)
        return h + self.out(scores.softmax(-1) @ v)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.embedding(input_ids)
        for _ in range(2):
            h = self.attend(h, attention_mask)
        h = self.norm(self.pointwise(h.mT).mT)
        h = torch.tanh(self.hidden(h))
        if not self.token_level:
            h = (h * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return self.head(h)


def attentive(**options) -> nn.Module:
    torch.manual_seed(0)
    return Attentive(**options).double().eval()


def sequences(vocabulary: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (length,), generator=generator) for length in LENGTHS]


def padded(tokens: list[Tensor], side: str = "right", filling: int = 0) -> dict[str, Tensor]:
    """A batch of sequences, with some number in the place of tokens that are not there."""
    ids = torch.full((len(tokens), LONGEST), filling)
    mask = torch.zeros_like(ids)
    for row, own in enumerate(tokens):
        place = slice(0, len(own)) if side == "right" else slice(LONGEST - len(own), LONGEST)
        ids[row, place], mask[row, place] = own, 1
    return {"input_ids": ids, "attention_mask": mask}


def one_by_one(tokens: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"input_ids": own[None], "attention_mask": torch.ones(1, len(own), dtype=torch.long)} for own in tokens]


LABELS = torch.tensor([0, 2, 1, 1, 0])


def blocks(model: nn.Module, batches: list[tuple[dict[str, Tensor], Tensor]], sharing: str, kind: str = "ggn") -> dict:
    """The Kronecker blocks by their layouts' keys."""
    likelihood = Categorical()
    network = Network(model, "all", likelihood.arrange)
    backend, total = Native(kind), None
    for inputs, target in batches:
        batch = Batch(inputs, target)
        generator = torch.Generator().manual_seed(4)
        total, _ = backend.accumulate(
            total, network, likelihood, batch, KroneckerStructure(sharing), generator=generator
        )
    return {layout.key: block for layout, block in total}


def assert_equal_blocks(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for key, block in wanted.items():
        ours = whole_tensors(got[key])
        for name, tensor in whole_tensors(block).items():
            assert ours[name].dtype == torch.float64
            torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.diagonal
@SHARINGS
@SIDES
@pytest.mark.parametrize("token_level", [False, True])
def test_factors_of_padded_batches_are_those_of_the_sequences(sharing, side, token_level):
    model, tokens = attentive(token_level=token_level), sequences()
    model.embedding.requires_grad_(sharing == "expand")  # KFAC-reduce refuses embeddings of several tokens
    batch = padded(tokens, side)
    target = LABELS
    if token_level:
        target = torch.where(batch["attention_mask"] == 1, 1, -100)
    got = blocks(model, [(batch, target)], sharing)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    reference = kronecker_factors(model, one_by_one(tokens), layers, sharing)
    assert {key.split(".")[0] for key in got} >= set(reference)
    for name, (left, right, count) in reference.items():
        if token_level and sharing == "reduce" and name == "head":
            continue  # its positions are examples of their own only where it is the one layer
        block = whole_tensors(next(block for key, block in got.items() if key.split(".")[0] == name))
        torch.testing.assert_close(block["left"][0, 0], left, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(block["right"][0], right, rtol=1e-10, atol=1e-10)
        assert block["count"] == count
    alone = [(one, target[n : n + 1]) for n, one in enumerate(one_by_one(tokens))]
    if token_level:
        alone = [(one, torch.ones_like(one["input_ids"])) for one, _ in alone]
    assert_equal_blocks(got, blocks(model, alone, sharing))


@pytest.mark.parametrize("kind", ["ggn_mc", "empirical_fisher"])
def test_other_curvatures_leave_padding_out(kind):
    model, tokens = attentive(), sequences()
    alone = [(one, LABELS[n : n + 1]) for n, one in enumerate(one_by_one(tokens))]
    got, wanted = blocks(model, [(padded(tokens), LABELS)], "expand", kind), blocks(model, alone, "expand", kind)
    for key, block in wanted.items():
        ours, theirs = whole_tensors(got[key]), whole_tensors(block)
        if "right" in theirs:
            torch.testing.assert_close(ours["right"], theirs["right"], rtol=1e-10, atol=1e-10)
            assert ours["count"] == theirs["count"]


@pytest.mark.parametrize("options", [{"eigenvalue_corrected": True}, {"output_factor": "diagonal"}])
def test_other_forms_of_kfac(options):
    model, tokens = attentive(token_level=True), sequences()
    batch = padded(tokens)
    labels = torch.where(batch["attention_mask"] == 1, LABELS[:, None], -100)
    alone = [{**one, "labels": LABELS[n].expand(1, len(tokens[n]))} for n, one in enumerate(one_by_one(tokens))]
    got = lp.KFAC(model, "classification", **options).fit([{**batch, "labels": labels}])
    wanted = lp.KFAC(model, "classification", **options).fit(alone)
    torch.testing.assert_close(got.variance(), wanted.variance(), rtol=1e-10, atol=0)


def test_masks_of_other_types():
    model, tokens = attentive(), sequences()
    whole = blocks(model, [(padded(tokens), LABELS)], "expand")
    for dtype in (torch.bool, torch.float64):
        inputs = padded(tokens)
        inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
        assert_equal_blocks(blocks(model, [(inputs, LABELS)], "expand"), whole)


def test_what_is_no_mask_of_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(token_mask({"attention_mask": mask}, 2), mask.bool())
    no_masks = [mask, (mask,), {"mask": mask}, {"attention_mask": None}, {"attention_mask": torch.ones(2, 3)}]
    no_masks += [{"attention_mask": mask[:, None]}, {"attention_mask": (1.0 - mask) * -1e4}]
    for inputs in no_masks:
        assert token_mask(inputs, 2) is None
    assert token_mask({"attention_mask": mask}, 4) is None


class Heedless(nn.Module):
    """Hands its mask on to nothing, so that every position counts."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x, attention_mask):
        return self.head(torch.tanh(self.hidden(x)).mean(1) + 0 * attention_mask.sum())


@SHARINGS
def test_a_mask_that_the_network_ignores_hides_nothing(sharing):
    torch.manual_seed(0)
    model, x, y = Heedless().double(), torch.randn(4, 3, 2).double(), torch.tensor([0, 1, 2, 0])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    got = blocks(model, [({"x": x, "attention_mask": mask}, y)], sharing)
    assert_equal_blocks(got, blocks(model, [({"x": x, "attention_mask": torch.ones_like(mask)}, y)], sharing))


class Encoder(nn.Module):
    """torch's own encoder, whose attention keeps its projections in one weight."""

    def __init__(self, batch_first: bool):
        super().__init__()
        self.batch_first, self.embedding = batch_first, nn.Embedding(9, 4)
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.embedding(input_ids)
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        h = h if self.batch_first else h.transpose(0, 1)
        return self.head((h * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_projections(batch_first):
    torch.manual_seed(0)
    model, tokens = Encoder(batch_first).double().eval(), sequences()
    alone = [(one, LABELS[n : n + 1]) for n, one in enumerate(one_by_one(tokens))]
    got, wanted = blocks(model, [(padded(tokens), LABELS)], "expand"), blocks(model, alone, "expand")
    assert any("in_proj" in key for key in wanted)
    assert_equal_blocks(got, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Which rows belong")  # of its relative positions
def test_a_decoder_is_not_masked_as_its_encoder():
    torch.manual_seed(0)
    config = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    transformers = imported("transformers")
    config = transformers.T5Config(vocab_size=9, decoder_start_token_id=0, **config)
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    tokens, generator = sequences(), torch.Generator().manual_seed(2)
    decoded = torch.randint(1, 9, (len(tokens), LONGEST), generator=generator)  # as long as the encoder's longest
    target = torch.randint(1, 9, (len(tokens), LONGEST), generator=generator)
    whole = [({**padded(tokens), "decoder_input_ids": decoded}, target)]
    alone = [
        ({**one, "decoder_input_ids": decoded[n : n + 1]}, target[n : n + 1])
        for n, one in enumerate(one_by_one(tokens))
    ]
    got, wanted = blocks(model, whole, "expand"), blocks(model, alone, "expand")
    for found, side in itertools.product((got, wanted), ("encoder", "decoder")):  # but for tables: docs/limits.md
        del found[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight (embedding)"]
    assert_equal_blocks(got, wanted)
