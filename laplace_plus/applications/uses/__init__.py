"""What a posterior is for: choosing data, attribution, pruning, learning on; one from variances; leaving data out."""

from laplace_plus.applications.uses.continual import continue_on, penalty
from laplace_plus.applications.uses.influence import Attribution, influence, self_influence
from laplace_plus.applications.uses.pruning import Pruned, prune, saliency
from laplace_plus.applications.uses.ridge import LeftOut, ridge_left_out
from laplace_plus.applications.uses.selection import Chosen, select
from laplace_plus.applications.uses.variances import from_variance

__all__ = [
    "Attribution",
    "Chosen",
    "LeftOut",
    "Pruned",
    "continue_on",
    "from_variance",
    "influence",
    "penalty",
    "prune",
    "ridge_left_out",
    "saliency",
    "select",
    "self_influence",
]
