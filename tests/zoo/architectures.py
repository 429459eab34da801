"""Small twins of the networks that people have: the same operations in the same order, a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from timm.models.convnext import ConvNeXt
from timm.models.mlp_mixer import MlpMixer
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchvision.models.efficientnet import MBConv, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.resnet import BasicBlock, Bottleneck
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import laplace_plus as lp


@dataclass(frozen=True)
class Architecture:
    """A network, and data that it takes.

    Attributes:
        name: Its name among the tests.
        build: Makes the module.
        inputs: Makes the inputs of n examples.
        n_outputs: C.
        positions: Trailing shape of the targets (tokens, pixels).
        likelihood: The likelihood.
        last_layer: The parameters that ``"last_layer"`` must find.
        general: The parameters that may take the general path; every other one must follow a rule.
        as_mapping: Whether the target is yielded inside a mapping, as Hugging Face data sets do.
        flat: Whether the loader yields ``(x1, x2, y)``.
        tolerance: Relative error that the network's own rounding makes inevitable.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    n_outputs: int
    last_layer: tuple[str, ...]
    general: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    likelihood: Any = "classification"
    as_mapping: bool = False
    flat: bool = False
    tolerance: float = 1e-9

    def model(self) -> nn.Module:
        """A module in float64 with weights that leave nothing at a special value such as zero."""
        torch.manual_seed(0)
        model = self.build().double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter += noise * (0.3 if parameter.ndim < 2 else max(1, parameter[0].numel()) ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer += 0.2 * torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
                elif name.endswith("running_var"):
                    buffer *= 0.5 + torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
        return model.eval()

    def data(self, n: int) -> tuple[Any, Tensor]:
        """Inputs and targets of n examples."""
        torch.manual_seed(2)
        inputs = self.inputs(n)
        if isinstance(self.likelihood, lp.Gaussian):
            return inputs, torch.randn(n, *self.positions, self.n_outputs, dtype=torch.float64)
        return inputs, torch.randint(0, self.n_outputs, (n, *self.positions))

    def loader(self, n: int, first: int) -> list[Any]:
        """Two batches, the first with ``first`` of the n examples."""
        inputs, target = self.data(n)
        parts = [(take(inputs, slice(0, first)), target[:first]), (take(inputs, slice(first, n)), target[first:])]
        if self.as_mapping:
            return [{**x, "labels": y} for x, y in parts]
        return [(*x, y) for x, y in parts] if self.flat else parts


def take(inputs: Any, examples: slice) -> Any:
    """Some of the examples of a batch."""
    if isinstance(inputs, Tensor):
        return inputs[examples]
    if isinstance(inputs, dict):
        return {key: take(value, examples) for key, value in inputs.items()}
    return tuple(take(value, examples) for value in inputs)


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


def tokens(length: int, vocabulary: int = 11) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(1, vocabulary, (n, length))


def padded(length: int) -> Callable[[int], dict[str, Tensor]]:
    """Token sequences of different lengths with their attention masks, padded on the right."""

    def make(n: int) -> dict[str, Tensor]:
        lengths = torch.randint(2, length + 1, (n, 1))
        mask = (torch.arange(length) < lengths).long()
        return {"input_ids": torch.randint(1, 11, (n, length)) * mask, "attention_mask": mask}

    return make


def pair(left: Callable[[int], Any], right: Callable[[int], Any]) -> Callable[[int], tuple[Any, Any]]:
    return lambda n: (left(n), right(n))


# -- vision ----------------------------------------------------------------------------------------------------------------


class SmallResNet(nn.Module):
    """Stem, a basic block that downsamples, and a bottleneck of torchvision, as ResNet puts them together."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        downsample = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
        self.layer1 = BasicBlock(4, 8, stride=2, downsample=downsample)
        self.layer2 = Bottleneck(8, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))


def mobilenet() -> nn.Module:
    blocks = [
        InvertedResidualConfig(4, 3, 8, 4, True, "RE", 1, 1, 1.0),
        InvertedResidualConfig(4, 3, 8, 6, False, "HS", 2, 1, 1.0),
    ]
    return MobileNetV3(blocks, last_channel=8, num_classes=3)


def efficientnet() -> nn.Module:
    norm = partial(nn.BatchNorm2d, eps=1e-3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        MBConv(MBConvConfig(2, 3, 1, 8, 8, 1), 0.2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 3),
    )


def densenet() -> nn.Module:
    return torchvision.models.DenseNet(
        growth_rate=2, block_config=(2, 1), num_init_features=4, bn_size=2, num_classes=3, drop_rate=0.1
    )


def vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=3, dropout=0.1
    )


def timm_vit() -> nn.Module:
    return VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, embed_dim=8, depth=1, num_heads=2, num_classes=3, init_values=1e-4,
        mlp_ratio=1, drop_rate=0.1, drop_path_rate=0.1,
    )  # fmt: skip


def timm_convnext() -> nn.Module:
    return ConvNeXt(in_chans=3, depths=(1, 1, 1, 1), dims=(3, 4, 4, 6), num_classes=3, patch_size=2, drop_path_rate=0.1)


def timm_swin() -> nn.Module:
    return SwinTransformer(
        img_size=8, patch_size=2, in_chans=1, embed_dim=4, depths=(2, 1), num_heads=(1, 2), window_size=2,
        num_classes=3, mlp_ratio=1,
    )  # fmt: skip


def timm_mixer() -> nn.Module:
    return MlpMixer(img_size=8, patch_size=4, in_chans=1, num_blocks=1, embed_dim=8, num_classes=3)


class UNet(nn.Module):
    """Two levels with skip connections, a transposed convolution, and an output for every pixel."""

    def __init__(self, channels_last=False, interpolate=False):
        super().__init__()
        self.channels_last = channels_last
        self.interpolate = interpolate
        self.down1 = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.down2 = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.up = nn.Conv2d(4, 3, 1) if interpolate else nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.merge = nn.Sequential(nn.Conv2d(6, 3, 3, padding=1), nn.ReLU(inplace=True))
        self.out = nn.Conv2d(3, 2, 1)

    def forward(self, x):
        skip = self.down1(x)
        deep = self.down2(F.max_pool2d(skip, 2))
        if self.interpolate:
            deep = F.interpolate(self.up(deep), scale_factor=2, mode="bilinear")
        else:
            deep = self.up(deep)
        out = self.out(self.merge(torch.cat([skip, deep], 1)))
        return {"out": out.movedim(1, -1) if self.channels_last else out}


def generator() -> nn.Module:
    """Transposed convolutions of every kind: strided, padded, grouped, dilated, without a bias."""
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(6, 4, 2, dilation=2, bias=False),
        nn.Tanh(),
        nn.Flatten(2),
        nn.ConvTranspose1d(4, 2, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(146, 2),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 3, 2, stride=2),
        nn.InstanceNorm3d(3, affine=True),
        nn.Softplus(),
        nn.Flatten(2),
        nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        nn.PReLU(4),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


# -- sequences -------------------------------------------------------------------------------------------------------------


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
    return BertForSequenceClassification(BertConfig(**BERT))


def bert_tokens() -> nn.Module:
    return BertForTokenClassification(BertConfig(**BERT))


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
    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2, hidden_dim=8, max_position_embeddings=6, num_labels=3)
    )


GPT2 = {"vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 8, "n_positions": 6}


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(GPT2Config(**GPT2, pad_token_id=0, num_labels=3))


def gpt2_language_model() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(**GPT2))


def llama() -> nn.Module:
    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=8, num_labels=3, pad_token_id=0,
        )  # fmt: skip
    )


def huggingface_vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4,
            num_channels=1, num_labels=3,
        )  # fmt: skip
    )


# -- networks of one's own -------------------------------------------------------------------------------------------------


def weight_normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        nn.Tanh(),
        nn.Linear(4, 3),
    )


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 3)
        self.bilinear = nn.Bilinear(4, 3, 2)

    def forward(self, a, b):
        return self.bilinear(torch.tanh(self.left(a)), torch.tanh(self.right(b)))


class Functional(nn.Module):
    """Parameters without modules of their own: lists, functional calls, matrix products, one used twice."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 4))])
        self.biases = nn.ParameterDict({"b": nn.Parameter(torch.randn(4))})
        self.product = nn.Parameter(torch.randn(4, 4))
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.readout = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(4, 3), nn.PReLU()])})

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.weights[0], self.biases["b"]))
        h = torch.tanh(F.linear(input=h, weight=self.weights[1], bias=self.biases["b"]))
        h = h + self.gate * torch.tanh(F.linear(h, self.weights[1])) @ self.product
        for module in self.readout["a"]:
            h = module(h)
        return h


class DeclaredOutOfOrder(nn.Module):
    """The head is defined first and used last."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(2, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


class Siamese(nn.Module):
    """One encoder for two inputs, which are compared."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 4))
        self.head = nn.Linear(8, 2)

    def forward(self, pair):
        left, right = self.encoder(pair["left"]), self.encoder(pair["right"])
        return self.head(torch.cat([(left - right).abs(), left * right], -1))


class SiameseStacked(Siamese):
    """Both inputs go through the encoder as one batch of twice the size."""

    def forward(self, pair):
        left, right = self.encoder(torch.cat([pair["left"], pair["right"]])).chunk(2)
        return self.head(torch.cat([(left - right).abs(), left * right], -1))


class DeepSet(nn.Module):
    """Sets ``[B, N, F]`` with a mask, pooled by sum."""

    def __init__(self):
        super().__init__()
        self.element = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x, mask):
        return self.whole((self.element(x) * mask[..., None]).sum(1))


class GraphNetwork(nn.Module):
    """Messages along one example's own edges, gathered by ``scatter_add``."""

    def __init__(self):
        super().__init__()
        self.message = nn.Linear(6, 4)
        self.update = nn.Linear(7, 4)
        self.readout = nn.Linear(4, 2)

    def forward(self, nodes, edges):
        source, sink = edges.unbind(1)
        gather = lambda index: nodes.gather(1, index[..., None].expand(-1, -1, nodes.shape[-1]))  # noqa: E731
        message = torch.tanh(self.message(torch.cat([gather(source), gather(sink)], -1)))
        place = sink[..., None].expand(-1, -1, 4)
        received = torch.zeros(*nodes.shape[:2], 4, dtype=nodes.dtype).scatter_add(1, place, message)
        return self.readout(torch.tanh(self.update(torch.cat([nodes, received], -1))).mean(1))


class FrozenBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten())
        self.backbone.requires_grad_(False)
        self.neck = nn.Linear(12, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(torch.tanh(self.neck(features)))


class Dropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Dropout1d(0.5), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(9, 3)
        )
        self.net[4].training = False  # modes differ from module to module

    def forward(self, x):
        return F.dropout(self.net(x), 0.5, self.training)


class Latent(nn.Module):
    """Learnt queries that are normalised and projected before any example comes in."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4))
        self.norm = nn.LayerNorm(4)
        self.project = nn.Linear(4, 3)
        self.values = nn.Linear(3, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        attention = (self.project(self.norm(self.queries)) @ x.transpose(1, 2)).softmax(-1)
        return self.head((attention @ self.values(x)).flatten(1))


class MixtureOfExperts(nn.Module):
    """Each example goes to one expert, chosen by the data; the others do not see it."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(3, 2)
        self.experts = nn.ModuleList([nn.Linear(3, 4) for _ in range(2)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return self.head(out)


class EmbeddingBags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 4, mode="mean")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.bag(x)))


class Unused(nn.Module):
    """One branch is never taken."""

    def __init__(self):
        super().__init__()
        self.body, self.idle, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), backend="eager")


def compiled_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    model.compile(backend="eager")
    return model


class CompiledPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.compile(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), backend="eager")
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x))


def mapping(make: Callable[[int], Tensor], name: str) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {name: make(n)}


def named(**make: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda n: {name: one(n) for name, one in make.items()}


def nested(**make: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return named(**make)


def edges(n: int) -> Tensor:
    return torch.randint(0, 3, (n, 2, 5))


def mask(n: int) -> Tensor:
    return (torch.rand(n, 4) > 0.3).double().index_fill(1, torch.tensor([0]), 1.0)


def _weights(layer: str) -> tuple[str, ...]:
    return (f"{layer}.weight", f"{layer}.bias")


_RECURRENT = ("recurrent.*",)

ARCHITECTURES = [
    # vision
    Architecture("resnet", SmallResNet, normal(3, 16, 16), 3, _weights("fc")),
    Architecture("mobilenet_v3", mobilenet, normal(3, 16, 16), 3, _weights("classifier.3")),
    Architecture("efficientnet", efficientnet, normal(3, 8, 8), 3, _weights("5")),
    Architecture("densenet", densenet, normal(3, 32, 32), 3, _weights("classifier")),
    Architecture("vit", vit, normal(3, 8, 8), 3, _weights("heads.head"), ("class_token", "encoder.pos_embedding")),
    Architecture("timm_vit", timm_vit, normal(1, 8, 8), 3, _weights("head"), ("cls_token", "pos_embed", "*.gamma")),
    Architecture("timm_convnext", timm_convnext, normal(3, 32, 32), 3, _weights("head.fc"), ("*.gamma",)),
    Architecture("timm_swin", timm_swin, normal(1, 8, 8), 3, _weights("head.fc"), ("*.relative_position_bias_table",)),
    Architecture("timm_mixer", timm_mixer, normal(1, 8, 8), 3, _weights("head")),
    Architecture(
        "huggingface_vit",
        huggingface_vit,
        mapping(normal(1, 8, 8), "pixel_values"),
        3,
        _weights("classifier"),
        ("*.cls_token", "*.position_embeddings"),
        as_mapping=True,
    ),
    Architecture(
        "unet", UNet, normal(1, 4, 4), 2, _weights("out"), ("up.*",), (4, 4), lp.Categorical(output_axis=1)
    ),
    Architecture(
        "unet_channels_last", partial(UNet, True, True), normal(1, 4, 4), 2, _weights("out"), (), (4, 4)
    ),
    Architecture("generator", generator, normal(4, 2, 2), 2, _weights("8"), ("0.*", "2.*", "5.*"), (), lp.Gaussian(0.7)),
    Architecture("volumes", volumes, normal(1, 4, 4, 4), 3, _weights("8"), ("1.*", "5.*", "6.*")),
    # sequences
    Architecture("lstm", partial(Recurrent, nn.LSTM), tokens(4), 3, _weights("head"), _RECURRENT),
    Architecture(
        "lstm_two_layers",
        partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2, proj_size=0),
        tokens(3),
        3,
        _weights("head"),
        _RECURRENT,
    ),
    Architecture("gru", partial(Recurrent, nn.GRU, bidirectional=True), tokens(4), 3, _weights("head"), _RECURRENT),
    Architecture("rnn", partial(Recurrent, nn.RNN), tokens(4), 3, _weights("head"), _RECURRENT),
    Architecture("cells", Cells, normal(3, 3), 2, _weights("head"), ("first.*", "second.*", "start")),
    Architecture("transformer_encoder", TransformerClassifier, padded(5), 3, _weights("head"), ("position",)),
    Architecture(
        "transformer_encoder_time_first",
        partial(TransformerClassifier, False, True),
        padded(5),
        3,
        _weights("head"),
        ("position",),
    ),
    Architecture(
        "seq2seq", Seq2Seq, pair(normal(3, 4), normal(2, 4)), 2, _weights("head"), positions=(2,), flat=True
    ),
    Architecture(
        "attention",
        Attention,
        pair(normal(3, 3), normal(3, 5)),
        3,
        _weights("head"),
        ("query", "attention.bias_k", "attention.bias_v"),
    ),
    Architecture(
        "tied_language_model", TiedLanguageModel, tokens(4, 7), 7, ("embedding.weight",), ("embedding.weight",), (4,)
    ),
    Architecture("bert", bert, padded(5), 3, _weights("classifier"), ("*position_embeddings*",), as_mapping=True),
    Architecture(
        "bert_tokens", bert_tokens, padded(5), 3, _weights("classifier"), ("*position_embeddings*",), (5,), as_mapping=True
    ),
    Architecture(
        "distilbert", distilbert, padded(5), 3, _weights("classifier"), ("*position_embeddings*",), as_mapping=True
    ),
    Architecture("gpt2", gpt2, padded(5), 3, ("score.weight",), ("transformer.wpe.weight",), as_mapping=True),
    Architecture(
        "gpt2_language_model",
        gpt2_language_model,
        mapping(tokens(3), "input_ids"),
        11,
        ("transformer.wte.weight",),
        ("transformer.wpe.weight", "transformer.wte.weight"),
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
    # one's own
    Architecture(
        "weight_normed", weight_normed, normal(3), 3, _weights("6"), ("*.original0", "*.original1", "*.original")
    ),
    Architecture(
        "bilinear", Bilinear, pair(normal(3), normal(2)), 2, _weights("bilinear"), ("bilinear.*",), (), lp.Gaussian(0.5), flat=True
    ),
    Architecture(
        "functional",
        Functional,
        normal(3),
        3,
        ("readout.a.1.weight",),
        ("weights.*", "biases.b", "product", "gate", "readout.a.1.weight"),
    ),
    Architecture("declared_out_of_order", DeclaredOutOfOrder, normal(2), 3, _weights("head")),
    Architecture(
        "siamese", Siamese, nested(left=normal(2, 4), right=normal(2, 4)), 2, _weights("head")
    ),
    Architecture(
        "siamese_stacked", SiameseStacked, nested(left=normal(2, 4), right=normal(2, 4)), 2, _weights("head")
    ),
    Architecture("deep_set", DeepSet, pair(normal(4, 3), mask), 2, _weights("whole.2"), likelihood=lp.Gaussian(0.3)),
    Architecture("graph", GraphNetwork, named(nodes=normal(3, 3), edges=edges), 2, _weights("readout")),
    Architecture("frozen_backbone", FrozenBackbone, normal(1, 4, 4), 3, _weights("head")),
    Architecture("dropouts", Dropouts, normal(1, 4), 3, _weights("net.6")),
    Architecture(
        "latent", Latent, normal(4, 3), 3, _weights("head"), ("queries", "norm.*", "project.*")
    ),
    Architecture("mixture_of_experts", MixtureOfExperts, normal(3), 3, _weights("head"), ("experts.*",)),
    Architecture("embedding_bag", EmbeddingBags, tokens(3), 3, _weights("head"), ("bag.weight",)),
    Architecture("unused", Unused, normal(3), 3, _weights("head"), ("idle.*",)),
    Architecture("compiled", compiled, normal(3), 3, _weights("2")),
    Architecture("compiled_in_place", compiled_in_place, normal(3), 3, _weights("2")),
    Architecture("compiled_part", CompiledPart, normal(3), 3, _weights("head")),
]
