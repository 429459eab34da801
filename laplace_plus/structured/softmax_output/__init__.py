"""The exact curvature of a softmax output layer with many classes, in terms of its data rows."""

from laplace_plus.structured.softmax_output.block import SoftmaxOutputBlock
from laplace_plus.structured.softmax_output.precision import SoftmaxOutputFactor, SoftmaxOutputRows

__all__ = ["SoftmaxOutputBlock", "SoftmaxOutputFactor", "SoftmaxOutputRows"]
