"""Loading a saved posterior onto its network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import io
from laplace_plus.curvature import backend_from_config
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.likelihoods import Likelihood, likelihood_from_config, resolve_likelihood
from laplace_plus.network import turn, unwrap
from laplace_plus.posteriors.base import Posterior
from laplace_plus.posteriors.registry import get_posterior
from laplace_plus.posteriors.resuming import with_prefix
from laplace_plus.priors import Groups
from laplace_plus.selection import uses


def load(path: str | Path, model: nn.Module, *, likelihood: Any = None) -> Posterior:
    """Load a posterior that :meth:`Posterior.save` wrote. Nothing is unpickled.

    Args:
        path: The folder.
        model: The network that the posterior was fitted on, with the same weights.
        likelihood: The likelihood, where it is one of your own; built-in ones are stored, and only the value of their
            noise may differ here.

    Raises:
        CheckpointError: The folder is missing, damaged or of another format version; the network or a built-in
            likelihood differs; or the folder holds a kind of curvature block that is not registered.
        ConfigurationError: The arguments are not a path and a module, or the posterior's class is not registered.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError("The path is not a path.", expected="a str or a pathlib.Path", got=type(path).__name__)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            "The model is not a module.",
            expected="the torch.nn.Module that the posterior was fitted on",
            got=type(model).__name__,
            fix="Build the network, load its weights, then call laplace_plus.load(path, model).",
        )
    header, tensors = io.read(path)
    with turn(unwrap(model)):
        return _restored(header, tensors, model, likelihood)


def _restored(header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, likelihood: Any) -> Posterior:
    inner = unwrap(model)
    io.compare_fingerprint(header["network"], inner)
    masks, hyper = with_prefix(tensors, "mask."), with_prefix(tensors, "hyper.")
    parameters: Any = header["parameters"]
    if masks:
        shapes = {name: parameter.shape for name, parameter in uses(inner).items()}
        whole = {name: torch.ones(shapes[name], dtype=torch.bool) for name in parameters}
        parameters = {name: masks[name].view(mask.shape) if name in masks else mask for name, mask in whole.items()}
    precision = hyper["prior_precision"]
    if "groups" in header:
        hyper["prior_precision"] = torch.ones(())  # set below: the class starts with the layers as groups
    posterior: Posterior = get_posterior(header["class"])(
        model,
        _likelihood(header["likelihood"], likelihood),
        parameters=parameters,
        backend=backend_from_config(header["backend"]),
        **hyper,
        **header["options"],
    )
    if "groups" in header:
        try:
            entry = header["groups"]
            posterior.prior_groups = Groups(entry["name"], tuple(entry["names"]), tensors["groups.index"])
        except (KeyError, TypeError, ConfigurationError) as error:
            raise CheckpointError("The groups of the saved prior cannot be read.", got=str(error)) from error
        posterior.prior_precision = precision
    posterior.n_data, posterior.n_outputs = header["n_data"], header["n_outputs"]
    common, device = ("mask.", "hyper.", "groups.index"), posterior.network.device
    state = {name: value.to(device) for name, value in tensors.items() if not name.startswith(common)}
    if "vector" in state:
        posterior.mean = state["vector"]
    posterior.restore(header["state"], state)
    posterior.remember_weights()
    return posterior


def _likelihood(stored: Mapping[str, Any], given: Any) -> Likelihood:
    """The stored likelihood, or the caller's if it is the one that was fitted, up to the value of its noise."""
    if given is None:
        if stored.get("name") == "custom":
            raise CheckpointError(
                "The posterior was saved with a likelihood of your own, which is not stored.",
                expected="load(path, model, likelihood=…)",
                got="no likelihood",
            )
        return likelihood_from_config(stored)
    likelihood = resolve_likelihood(given)
    own, noise = stored.get("noise_std"), likelihood.noise_std
    if isinstance(given, str) and isinstance(own, list) and noise is not None:  # "regression" with several outputs
        likelihood = likelihood.with_noise(noise.expand(len(own)))
    if stored.get("name") != "custom" and _without_noise(likelihood.config()) != _without_noise(stored):
        raise CheckpointError(
            "The posterior was fitted with another likelihood.",
            expected=repr(likelihood_from_config(stored)),
            got=repr(likelihood),
            fix="Leave likelihood out, or fit a posterior with this one.",
        )
    return likelihood


def _without_noise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A likelihood's description with the form of its noise levels in place of their values."""
    noise = config.get("noise_std")
    return {**config, "noise_std": [len(noise)] if isinstance(noise, list) else noise is not None}
