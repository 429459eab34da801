"""The posteriors, one method in one file."""

from laplace_plus.posteriors.abnn import ABNN
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.diagonal import Diagonal
from laplace_plus.posteriors.full import Full
from laplace_plus.posteriors.gaussian import GaussianPosterior
from laplace_plus.posteriors.kfac import KFAC
from laplace_plus.posteriors.low_rank import LowRank
from laplace_plus.posteriors.metric_bnn.latents import LatentModel
from laplace_plus.posteriors.metric_bnn.metric_bnn import MetricBNN
from laplace_plus.posteriors.null_space import LineSearch, NullSpace
from laplace_plus.posteriors.public import Summary
from laplace_plus.posteriors.riemannian import ExponentialMap, Riemannian
from laplace_plus.posteriors.sampled.sampled_laplace import SampledLaplace
from laplace_plus.posteriors.sampled.systems import CGSolver, SGDSolver
from laplace_plus.posteriors.sampled.tuning import SampledEvidence
from laplace_plus.posteriors.state import GaussianState, State
from laplace_plus.posteriors.storing import get_posterior, load, load_state_dict, register, state_dict
from laplace_plus.posteriors.subnetwork import LargestMagnitude, LargestVariance, Random, Selector, Subnetwork
from laplace_plus.posteriors.swag import SWAG, DiagonalSWAG
from laplace_plus.posteriors.training_free_lora import TrainingFreeLoRA
from laplace_plus.posteriors.variational_last_layer.variational_last_layer import VariationalLastLayer
from laplace_plus.posteriors.viking.elbo import ELBOTraining
from laplace_plus.posteriors.viking.viking import VIKING

_GAUSSIANS = (Full, KFAC, Diagonal, LowRank, Subnetwork)
_OTHERS = (ABNN, MetricBNN, NullSpace, Riemannian, SWAG, SampledLaplace, TrainingFreeLoRA, VIKING, VariationalLastLayer)
for _cls in (*_GAUSSIANS, *_OTHERS):
    register(_cls.__name__, _cls)

__all__ = [
    "ABNN",
    "CGSolver",
    "Diagonal",
    "DiagonalSWAG",
    "ELBOTraining",
    "ExponentialMap",
    "Full",
    "GaussianPosterior",
    "GaussianState",
    "KFAC",
    "LargestMagnitude",
    "LargestVariance",
    "LatentModel",
    "LineSearch",
    "LowRank",
    "MetricBNN",
    "NullSpace",
    "Posterior",
    "Random",
    "Riemannian",
    "SGDSolver",
    "SWAG",
    "SampledEvidence",
    "SampledLaplace",
    "Selector",
    "State",
    "Subnetwork",
    "Summary",
    "TrainingFreeLoRA",
    "VIKING",
    "VariationalLastLayer",
    "get_posterior",
    "load",
    "load_state_dict",
    "register",
    "state_dict",
]
