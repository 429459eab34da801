"""What a posterior is for: choosing data to label, and attributing predictions to training data."""

from laplace_plus.uses.influence import Attribution, influence, self_influence
from laplace_plus.uses.selection import Chosen, select

__all__ = ["Attribution", "Chosen", "influence", "select", "self_influence"]
