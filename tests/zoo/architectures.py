"""Small twins of the networks that people have: the same operations in the same order, a few thousand parameters."""

import pytest
from zoo import handmade, sequences, vision
from zoo.architecture import Architecture, take

__all__ = ["ARCHITECTURES", "Architecture", "each", "each_typical", "take"]

ARCHITECTURES = [*vision.NETWORKS, *sequences.NETWORKS, *handmade.NETWORKS]

TYPICAL = {
    "resnet", "vit", "unet", "lstm", "cells", "transformer_encoder", "tied_language_model", "bilinear", "siamese",
    "graph", "frozen_backbone", "embedding_bag", "unused", "mixture_of_experts", "dropouts", "weight_normed",
}  # fmt: skip
"""Between them they have every kind of layer and of use; the others are left to the slow checks."""

each = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
each_typical = pytest.mark.parametrize(
    "architecture",
    [pytest.param(a, marks=[] if a.name in TYPICAL else pytest.mark.slow, id=a.name) for a in ARCHITECTURES],
)
