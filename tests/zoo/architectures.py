"""Small twins of the networks that people have: the same operations in the same order, a few thousand parameters."""

from zoo import handmade, sequences, vision
from zoo.architecture import Architecture, take

__all__ = ["ARCHITECTURES", "Architecture", "take"]

ARCHITECTURES = [*vision.NETWORKS, *sequences.NETWORKS, *handmade.NETWORKS]
