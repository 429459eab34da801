"""Sample-then-optimise Laplace: posterior samples of the tangent model without any factorisation."""
