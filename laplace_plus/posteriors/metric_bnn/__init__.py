"""MetricBNN: particles explore around the trained weights, and an autoencoder learns where they went."""
