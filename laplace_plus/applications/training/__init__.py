"""Training: weights and hyperparameters together, by the marginal likelihood or the data-emphasised bound."""

from laplace_plus.applications.training.data_emphasized import (
    DataEmphasized,
    DataEmphasizedTraining,
    train_data_emphasized,
)
from laplace_plus.applications.training.marginal_likelihood import (
    MarginalLikelihoodTraining,
    Update,
    train_marginal_likelihood,
)

__all__ = [
    "DataEmphasized",
    "DataEmphasizedTraining",
    "MarginalLikelihoodTraining",
    "Update",
    "train_data_emphasized",
    "train_marginal_likelihood",
]
