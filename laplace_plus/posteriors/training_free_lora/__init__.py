"""Bayesian low-rank adapters without training."""

from laplace_plus.posteriors.training_free_lora.training_free_lora import TrainingFreeLoRA

__all__ = ["TrainingFreeLoRA"]
