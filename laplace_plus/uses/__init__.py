"""What a posterior is for: choosing data, attributing predictions, pruning, learning on; and one from variances."""

from laplace_plus.uses.continual import continue_on, penalty
from laplace_plus.uses.influence import Attribution, influence, self_influence
from laplace_plus.uses.pruning import Pruned, prune, saliency
from laplace_plus.uses.selection import Chosen, select
from laplace_plus.uses.variances import from_variance

__all__ = [
    "Attribution",
    "Chosen",
    "Pruned",
    "continue_on",
    "from_variance",
    "influence",
    "penalty",
    "prune",
    "saliency",
    "select",
    "self_influence",
]
