"""Small twins of networks for sequences: recurrent, attentive, and those of Hugging Face."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from zoo.architecture import Architecture, imported, mapping, normal, padded, pair, tokens, weights


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(11, 3, padding_idx=0)
        self.recurrent = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(4 * (1 + self.recurrent.bidirectional), 3)

    def forward(self, x):
        return self.head(self.recurrent(self.embedding(x))[0][:, -1])


class Cells(nn.Module):
    """A recurrent cell in a loop, and another one that starts from a learnt state."""

    def __init__(self):
        super().__init__()
        self.first = nn.LSTMCell(3, 4)
        self.second = nn.RNNCell(4, 4)
        self.start = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        state, hidden = None, self.start.expand(len(x), -1)
        for step in x.unbind(1):
            state = self.first(step, state)
            hidden = self.second(state[0], hidden)
        return self.head(hidden)


class TransformerClassifier(nn.Module):
    """``nn.TransformerEncoder`` over tokens, with a padding mask and learnt positions."""

    def __init__(self, batch_first=True, norm_first=False):
        super().__init__()
        self.batch_first = batch_first
        self.embedding = nn.Embedding(11, 4, padding_idx=0)
        self.position = nn.Parameter(torch.randn(5, 4))
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=batch_first, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(4), enable_nested_tensor=False)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask):
        h = self.embedding(input_ids) + self.position
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        h = h if self.batch_first else h.transpose(0, 1)
        weight = attention_mask[..., None].to(h.dtype)
        return self.head((h * weight).sum(1) / weight.sum(1))


class Seq2Seq(nn.Module):
    """``nn.Transformer`` with an encoder, a decoder and cross-attention."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 6, batch_first=True, dropout=0.1)
        self.head = nn.Linear(4, 2)

    def forward(self, source, target):
        return self.head(self.transformer(source, target))


class Attention(nn.Module):
    """Attention with keys and values of other widths and learnt extra ones."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, 4))
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True, add_bias_kv=True)
        self.head = nn.Linear(8, 3)

    def forward(self, keys, values):
        query = self.query.expand(len(keys), -1, -1)
        return self.head(self.attention(query, keys, values, need_weights=False)[0].flatten(1))


class TiedLanguageModel(nn.Module):
    """The decoder's weight is the embedding's, with an output for every token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Conv1d(4, 4, 2)
        self.norm = nn.RMSNorm(4)
        self.decoder = nn.Linear(4, 7, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        h = self.embedding(x)
        h = h + self.mix(F.pad(h.transpose(1, 2), (1, 0))).transpose(1, 2)  # causal
        return self.decoder(self.norm(h))


def bert() -> nn.Module:
    transformers = imported("transformers")
    return transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))


def bert_tokens() -> nn.Module:
    transformers = imported("transformers")
    return transformers.BertForTokenClassification(transformers.BertConfig(**BERT))


BERT = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 6,
    "num_labels": 3,
}


def distilbert() -> nn.Module:
    transformers = imported("transformers")
    return transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(
            vocab_size=11, dim=8, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=6, num_labels=3
        )
    )


GPT2 = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 8, "n_positions": 6}


def gpt2() -> nn.Module:
    transformers = imported("transformers")
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**GPT2, pad_token_id=0, num_labels=3))


def gpt2_language_model() -> nn.Module:
    transformers = imported("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


def llama() -> nn.Module:
    transformers = imported("transformers")
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8,
            num_labels=3,
            pad_token_id=0,
        )
    )


NETWORKS = [
    Architecture("lstm", partial(Recurrent, nn.LSTM), tokens(4), 3, weights("head")),
    Architecture(
        "lstm_two_layers",
        partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2, proj_size=0),
        tokens(3),
        3,
        weights("head"),
    ),
    Architecture("gru", partial(Recurrent, nn.GRU, bidirectional=True), tokens(4), 3, weights("head")),
    Architecture("rnn", partial(Recurrent, nn.RNN), tokens(4), 3, weights("head")),
    Architecture("cells", Cells, normal(3, 3), 2, weights("head"), ("start",)),
    Architecture("transformer_encoder", TransformerClassifier, padded(5), 3, weights("head"), ("position",)),
    Architecture(
        "transformer_encoder_time_first",
        partial(TransformerClassifier, False, True),
        padded(5),
        3,
        weights("head"),
        ("position",),
    ),
    Architecture("seq2seq", Seq2Seq, pair(normal(2, 4), normal(3, 4)), 2, weights("head"), positions=(3,), flat=True),
    Architecture(
        "attention",
        Attention,
        pair(normal(3, 3), normal(3, 5)),
        3,
        weights("head"),
        ("query", "attention.bias_k", "attention.bias_v"),
    ),
    Architecture(
        "tied_language_model", TiedLanguageModel, tokens(4, 7), 7, ("decoder.weight",), ("embedding.weight",), (4,)
    ),
    Architecture("bert", bert, padded(5), 3, weights("classifier"), as_mapping=True),
    Architecture("bert_tokens", bert_tokens, padded(5), 3, weights("classifier"), positions=(5,), as_mapping=True),
    Architecture("distilbert", distilbert, padded(5), 3, weights("classifier"), as_mapping=True),
    Architecture("gpt2", gpt2, padded(5), 3, ("score.weight",), as_mapping=True),
    Architecture(
        "gpt2_language_model",
        gpt2_language_model,
        mapping(tokens(3), "input_ids"),
        11,
        ("lm_head.weight",),
        ("transformer.wte.weight",),
        (3,),
        as_mapping=True,
    ),
    Architecture(  # normalises and rotates in float32, whatever its weights are in
        "llama",
        llama,
        padded(5),
        3,
        ("score.weight",),
        ("*norm.weight", "*layernorm.weight"),
        as_mapping=True,
        tolerance=1e-6,
    ),
]
