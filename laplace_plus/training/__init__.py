"""Training: weights and hyperparameters together, by the marginal likelihood."""

from laplace_plus.training.marginal_likelihood import train_marginal_likelihood
from laplace_plus.training.run import MarginalLikelihoodTraining, Update

__all__ = ["MarginalLikelihoodTraining", "Update", "train_marginal_likelihood"]
