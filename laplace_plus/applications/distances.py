"""How far an input is from known data, by what enters the network's last layer: a score of what was never seen.

A posterior says how unsure the outputs are under the weights that data leave possible. Of kinds that nobody trained
for, the features h often lie where no data are, but where the last layer is sure of itself. The distance to the nearest
known features of unit length tells these: ``min_n ‖h(x)/‖h(x)‖ − h(x_n)/‖h(x_n)‖‖`` (Sun, Ming, Zhu and Li, ICML 2022).
It ranks inputs, changes no prediction, and does not rank errors on known kinds: use it beside a posterior.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from laplace_plus import checks
from laplace_plus.errors import EmptyDataError, UnsupportedError
from laplace_plus.network.batches import Batch, iterate
from laplace_plus.network.capture import capture_batch
from laplace_plus.network.gradients import Gradients, output_layer_inputs
from laplace_plus.network.network import Network
from laplace_plus.posteriors import Posterior


class FeatureDistance:
    """The distance of inputs to the nearest rows, between 0 and 2, on features of unit length.

    All features are kept, ``[N, D]`` in the network's type; some thousand rows of all kinds are enough. A call costs
    one pass of the network, and N·D multiplications for each input.

    Args:
        posterior: A posterior of the network, fitted or not; only its network is used.
        rows: Batches of known data, with or without targets as the posterior's ``fit`` takes them: of training, or of
            what the network is used for.
        neighbours: Which nearest row counts, 1 for the first. With unusual rows among the known ones, take more.
        progress: Whether to show a progress bar.

    Attributes:
        features: Of the rows, of unit length, ``[N, D]``.

    Raises:
        UnsupportedError: The last layer is not a linear one that makes each output by itself.
        EmptyDataError: Fewer rows than ``neighbours``.

    Example:
        >>> import laplace_plus as lp
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
        >>> x = torch.tensor([[1.0, 0.1], [1.0, -0.1], [0.9, 0.0]])
        >>> distance = lp.FeatureDistance(lp.KFAC(model, "classification"), [(x, torch.tensor([0, 1, 2]))])
        >>> near, far = distance(torch.tensor([[1.0, 0.05], [-1.0, 0.0]])).tolist()
        >>> near < far
        True
    """

    def __init__(self, posterior: Posterior, rows: Iterable[Any], *, neighbours: int = 1, progress: bool = False):
        self.neighbours = checks.count("neighbours", neighbours)
        self._layer = last_layer(posterior.network)
        batches = iterate(rows, device=self._layer.device, progress=progress, description="features")
        found = [self._unit(batch.inputs)[0] for batch in batches]
        if sum(map(len, found)) < neighbours:
            what, got = "Too few known rows.", f"{sum(map(len, found))}"
            raise EmptyDataError(what, expected=f"{neighbours} or more", got=got)
        self.features = torch.cat(found)

    def __call__(self, x: Any) -> Tensor:
        """The distances of a batch's inputs, ``[B, *]`` with the positions of outputs."""
        own, shape = self._unit(x)
        nearest = (own @ self.features.mT).topk(self.neighbours, dim=1).values[:, -1]
        return (2 - 2 * nearest).clamp_min(0).sqrt().view(shape[:-1])

    def _unit(self, x: Any) -> tuple[Tensor, torch.Size]:
        """Features of unit length, ``[B', D]``, and the shape of the outputs."""
        features, shape = last_layer_inputs(self._layer, x)
        if features is None:
            what = "Distances are taken between the inputs of the last layer."
            expected = "a network that ends with a linear layer, each of whose outputs is of one row of inputs"
            raise UnsupportedError(what, expected=expected, got=f"the last layer {self._layer.parameter_names[0]!r}")
        return normalize(features, dim=1), shape


def last_layer(network: Network) -> Network:
    """The network with its last layer selected."""
    layer = network.selecting("last_layer")
    layer.lists = network.lists
    return layer


def last_layer_inputs(layer: Network, x: Any) -> tuple[Tensor | None, torch.Size]:
    """What enters a linear last layer, ``[B', D]``, or None of other layers; and the outputs' shape ``[B, *, C]``."""
    capture = capture_batch(layer, Batch(layer.receive(x), None))
    found = output_layer_inputs(Gradients(layer, capture))
    if found is None:
        return None, capture.output_shape
    layout, inputs = found
    has_bias = len(layout.names) > 1  # whose entry, 1, is the last
    return inputs.detach()[:, : inputs.shape[1] - has_bias], capture.output_shape
