"""Small twins of the networks that people have: the same operations in the same order, a few thousand parameters."""

import pytest
from zoo import handmade, sequences, vision
from zoo.architecture import Architecture, take

__all__ = ["ARCHITECTURES", "Architecture", "each", "each_typical", "named", "take"]

ARCHITECTURES = [*vision.NETWORKS, *sequences.NETWORKS, *handmade.NETWORKS]

TYPICAL = {
    "resnet", "vit", "unet", "lstm", "cells", "transformer_encoder", "tied_language_model", "bilinear", "siamese",
    "graph", "frozen_backbone", "embedding_bag", "unused", "mixture_of_experts", "dropouts", "weight_normed",
}  # fmt: skip
"""Between them they have every kind of layer and of use; the others are left to the slow checks."""

PECULIAR = {
    "volumes", "generator", "attention", "functional", "held_twice", "two_names", "declared_out_of_order",
    "deep_set", "latent", "compiled_part",
}  # fmt: skip
"""Those with something of their own that only a comparison of numbers tells."""


def one_by_one(quick: set[str]) -> pytest.MarkDecorator:
    """A test of each architecture, slow for all but some."""
    cells = [pytest.param(a, marks=[] if a.name in quick else pytest.mark.slow, id=a.name) for a in ARCHITECTURES]
    return pytest.mark.parametrize("architecture", cells)


each = one_by_one(TYPICAL | PECULIAR)
each_typical = one_by_one(TYPICAL)


def named(name: str) -> Architecture:
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)
