"""The linear last layer of a network: its inputs are features, of which the outputs are a linear function."""

from __future__ import annotations

from torch import Tensor

from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.network.batches import Batch
from laplace_plus.network.capture import Capture, capture_batch
from laplace_plus.network.gradients import Gradients
from laplace_plus.network.network import Network
from laplace_plus.network.output_layer import output_layer_inputs
from laplace_plus.network.selection import layer_of, tied_names, uses


def head_features(network: Network, capture: Capture) -> tuple[Tensor, Tensor]:
    """Where each weight is in the parameter vector, ``[C, D]``, and features ``[N, D]`` float64, the bias's one last.

    UnsupportedError unless the selection is one linear layer whose outputs are the network's, with weights of its own.
    """
    found, names = output_layer_inputs(Gradients(network, capture)), set(network.parameter_names)
    tied = {name for first, others in tied_names(network.model).items() for name in (first, *others)} & names
    whole = {name for name in uses(network.model) if layer_of(name) == network.layers[0]} == names
    if found is None or tied or not whole or found[0].index.numel() != network.n_parameters:
        what = f"These parameters are {'tied to others' if tied else 'not those of one linear last layer'}."
        expected = 'parameters="last_layer" of a network that ends with an nn.Linear of its own weights'
        got, fix = ", ".join(sorted(tied or names)[:4]), 'Use lp.Full(model, likelihood, parameters="last_layer").'
        raise UnsupportedError(what, expected=expected, got=f"{got} of {type(network.model).__name__}", fix=fix)
    return found[0].index[0].to(found[1].device), found[1].double()


def head_rows(network: Network, likelihood: Likelihood, batch: Batch) -> tuple[Tensor, ...]:
    """The index, features ``[n, D]``, targets and outputs ``[n, C]`` of a batch, without rows that are ignored."""
    capture = capture_batch(network, batch)
    outputs = capture.outputs.view(capture.output_shape)
    likelihood.validate(outputs, batch.target)
    index, features = head_features(network, capture)
    rows, targets, weights = likelihood.rows(outputs, batch.target)
    targets = targets.double() if targets.is_floating_point() else targets
    used = weights > 0
    return index, features.detach()[used], targets[used], rows.detach().double()[used]
