"""What a posterior is for: choosing data to label, attributing predictions to training data, pruning."""

from laplace_plus.uses.selection import Chosen, select

__all__ = ["Chosen", "select"]
