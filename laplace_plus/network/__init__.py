"""All that looks at a model: selection, batches, recorded calls, per-example gradients, products with Jacobians."""
