"""Posteriors as modules of plain tensor operations, for ``torch.compile``, ``torch.export``, ONNX and tracing."""

from laplace_plus.applications.serving.freezing import FrozenPosterior, FrozenPrediction, freeze

__all__ = ["FrozenPosterior", "FrozenPrediction", "freeze"]
