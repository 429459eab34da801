"""MetricBNN: particles explore around the trained weights, and an autoencoder learns where they went."""

from laplace_plus.posteriors.metric_bnn.latents import LatentModel
from laplace_plus.posteriors.metric_bnn.metric_bnn import MetricBNN

__all__ = ["LatentModel", "MetricBNN"]
