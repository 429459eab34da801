"""Small twins of networks for images and volumes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from zoo.architecture import Architecture, imported, mapping, normal, weights

import laplace_plus as lp


class SmallResNet(nn.Module):
    """Stem, a basic block that downsamples, and a bottleneck of torchvision, as ResNet puts them together."""

    def __init__(self):
        super().__init__()
        resnet = imported("torchvision.models.resnet")
        self.conv1 = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        downsample = nn.Sequential(nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8))
        self.layer1 = resnet.BasicBlock(4, 8, stride=2, downsample=downsample)
        self.layer2 = resnet.Bottleneck(8, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.layer2(self.layer1(x))).flatten(1))


def mobilenet() -> nn.Module:
    library = imported("torchvision.models.mobilenetv3")
    blocks = [
        library.InvertedResidualConfig(4, 3, 8, 4, True, "RE", 1, 1, 1.0),
        library.InvertedResidualConfig(4, 3, 8, 6, False, "HS", 2, 1, 1.0),
    ]
    return library.MobileNetV3(blocks, last_channel=8, num_classes=3)


def efficientnet() -> nn.Module:
    library, norm = imported("torchvision.models.efficientnet"), partial(nn.BatchNorm2d, eps=1e-3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        library.MBConv(library.MBConvConfig(2, 3, 1, 8, 8, 1), 0.2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8, 3),
    )


def densenet() -> nn.Module:
    return imported("torchvision.models").DenseNet(
        growth_rate=2, block_config=(2, 1), num_init_features=4, bn_size=2, num_classes=3, drop_rate=0.1
    )


def vit() -> nn.Module:
    return imported("torchvision.models").VisionTransformer(
        image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=3, dropout=0.1
    )


def timm_vit() -> nn.Module:
    return imported("timm.models.vision_transformer").VisionTransformer(
        img_size=8,
        patch_size=4,
        in_chans=1,
        embed_dim=8,
        depth=1,
        num_heads=2,
        num_classes=3,
        init_values=1e-4,
        mlp_ratio=1,
        drop_rate=0.1,
        drop_path_rate=0.1,
    )


def timm_convnext() -> nn.Module:
    return imported("timm.models.convnext").ConvNeXt(
        in_chans=3, depths=(1, 1, 1, 1), dims=(3, 4, 4, 6), num_classes=3, patch_size=2, drop_path_rate=0.1
    )


def timm_swin() -> nn.Module:
    return imported("timm.models.swin_transformer").SwinTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        embed_dim=4,
        depths=(2, 1),
        num_heads=(1, 2),
        window_size=2,
        num_classes=3,
        mlp_ratio=1,
    )


def timm_mixer() -> nn.Module:
    return imported("timm.models.mlp_mixer").MlpMixer(
        img_size=8, patch_size=4, in_chans=1, num_blocks=1, embed_dim=8, num_classes=3
    )


def huggingface_vit() -> nn.Module:
    transformers = imported("transformers")
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            image_size=8,
            patch_size=4,
            num_channels=1,
            num_labels=3,
        )
    )


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
        deep = self.up(deep)
        if self.interpolate:
            deep = F.interpolate(deep, scale_factor=2, mode="bilinear")
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


NETWORKS = [
    Architecture("resnet", SmallResNet, normal(3, 16, 16), 3, weights("fc")),
    Architecture("mobilenet_v3", mobilenet, normal(3, 16, 16), 3, weights("classifier.3")),
    Architecture("efficientnet", efficientnet, normal(3, 8, 8), 3, weights("5")),
    Architecture("densenet", densenet, normal(3, 32, 32), 3, weights("classifier")),
    Architecture("vit", vit, normal(3, 8, 8), 3, weights("heads.head"), ("class_token", "encoder.pos_embedding")),
    Architecture("timm_vit", timm_vit, normal(1, 8, 8), 3, weights("head"), ("cls_token", "pos_embed", "*.gamma")),
    Architecture("timm_convnext", timm_convnext, normal(3, 32, 32), 3, weights("head.fc"), ("*.gamma",)),
    Architecture("timm_swin", timm_swin, normal(1, 8, 8), 3, weights("head.fc"), ("*.relative_position_bias_table",)),
    Architecture("timm_mixer", timm_mixer, normal(1, 8, 8), 3, weights("head")),
    Architecture(
        "huggingface_vit",
        huggingface_vit,
        mapping(normal(1, 8, 8), "pixel_values"),
        3,
        weights("classifier"),
        ("*.cls_token", "*.position_embeddings"),
        as_mapping=True,
    ),
    Architecture("unet", UNet, normal(1, 4, 4), 2, weights("out"), ("up.bias",), (4, 4), lp.Categorical(output_axis=1)),
    Architecture("unet_channels_last", partial(UNet, True, True), normal(1, 4, 4), 2, weights("out"), (), (4, 4)),
    Architecture("generator", generator, normal(4, 2, 2), 2, weights("8"), ("0.bias", "5.bias"), (), lp.Gaussian(0.7)),
    Architecture("volumes", volumes, normal(1, 4, 4, 4), 3, weights("8"), ("1.*", "5.*", "6.*")),
]
