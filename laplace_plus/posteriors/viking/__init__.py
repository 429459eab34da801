"""Variational inference with kernel- and image-informed Gaussians (VIKING)."""
