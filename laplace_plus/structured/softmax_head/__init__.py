"""The exact curvature of a softmax output layer with many classes."""
