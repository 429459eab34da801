"""Loading a saved posterior onto its network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from laplace_plus import io
from laplace_plus.curvature import backend_from_config
from laplace_plus.errors import CheckpointError
from laplace_plus.likelihoods import likelihood_from_config
from laplace_plus.network import unwrap
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.registry import get_posterior


def load(path: str | Path, model: nn.Module, *, likelihood: Any = None) -> Posterior:
    """Load a posterior that :meth:`Posterior.save` wrote. Nothing is unpickled.

    Args:
        path: The folder.
        model: The network that the posterior was fitted on, with the same weights.
        likelihood: The likelihood, where it is one of your own; built-in ones are stored.

    Raises:
        CheckpointError: The folder is missing, damaged or of another format version, or the network differs.
        ConfigurationError: The posterior's class is not known; register it first.
    """
    header, tensors = io.read(path)
    io.compare_fingerprint(header["network"], unwrap(model))
    masks = {name.removeprefix("mask."): value for name, value in tensors.items() if name.startswith("mask.")}
    hyper = {name.removeprefix("hyper."): value for name, value in tensors.items() if name.startswith("hyper.")}
    parameters: Any = header["parameters"]
    if masks:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        everything = {name: torch.ones(shapes[name], dtype=torch.bool) for name in parameters}
        parameters = everything | {name: mask.view(shapes[name]) for name, mask in masks.items()}
    if likelihood is None:
        if header["likelihood"].get("name") == "custom":
            raise CheckpointError(
                "The posterior was saved with a likelihood of your own, which is not stored.",
                expected="load(path, model, likelihood=…)",
                got="no likelihood",
            )
        likelihood = likelihood_from_config(header["likelihood"])
    posterior = get_posterior(header["class"])(
        model,
        likelihood,
        parameters=parameters,
        backend=backend_from_config(header["backend"]),
        **hyper,
        **header["options"],
    )
    posterior.n_data, posterior.n_outputs = header["n_data"], header["n_outputs"]
    device = posterior.network.device
    state = {name: value.to(device) for name, value in tensors.items() if not name.startswith(("mask.", "hyper."))}
    posterior._restore(header["state"], state)
    posterior.network.remember()
    return posterior
