"""What a posterior is for: choosing data to label, attributing predictions to training data, and pruning."""

from laplace_plus.uses.influence import Attribution, influence, self_influence
from laplace_plus.uses.pruning import Pruned, prune, saliency
from laplace_plus.uses.selection import Chosen, select

__all__ = ["Attribution", "Chosen", "Pruned", "influence", "prune", "saliency", "select", "self_influence"]
