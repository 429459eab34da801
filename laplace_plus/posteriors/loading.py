"""Loading a saved posterior onto its network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import io
from laplace_plus.curvature import backend_from_config
from laplace_plus.errors import NETWORK_ERRORS, CheckpointError, ConfigurationError, UnsupportedError
from laplace_plus.likelihoods import Likelihood, likelihood_from_config, resolve_likelihood
from laplace_plus.network.calls import ExampleAxis
from laplace_plus.network.network import Network, turn, unwrap
from laplace_plus.network.selection import uses
from laplace_plus.posteriors.probing import FAR_ROUNDING, difference, far_outputs, outputs_at, random_inputs
from laplace_plus.posteriors.registry import get_posterior
from laplace_plus.posteriors.storing import with_prefix
from laplace_plus.priors import Groups

WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {}  # by the entry of the description that they are made from


def load(path: str | os.PathLike[str], model: nn.Module, *, likelihood: Any = None, check_function: bool = True) -> Any:
    """Load a posterior, or a calibrated one, that its ``save`` wrote. Nothing is unpickled.

    Args:
        path: The folder.
        model: The network that the posterior was fitted on, with the same weights.
        likelihood: The likelihood, where it is one of your own; built-in ones are stored, and only the value of their
            noise may differ here.
        check_function: Whether to compare the network's outputs with those at the time of saving, at two random inputs
            of the shapes, types and ranges of the fit's, and two far beyond, which finds another activation or ``eps``.
            Without such inputs, as for given variances, modules and their options are compared.

    Raises:
        CheckpointError: The folder is missing, damaged, contradictory or of another format version; the network or a
            built-in likelihood differs; or the folder holds a kind of curvature block that is not registered.
        ConfigurationError: The arguments are not a path and a module, or the posterior's class is not registered.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigurationError("The path is not a path.", expected="a str or a pathlib.Path", got=type(path).__name__)
    if not isinstance(model, nn.Module):
        expected = "the torch.nn.Module that the posterior was fitted on"
        fix = "Build the network, load its weights, then call laplace_plus.load(path, model)."
        raise ConfigurationError("The model is not a module.", expected=expected, got=type(model).__name__, fix=fix)
    header, tensors = io.read(path)
    posterior = rebuilt(header, tensors, model, likelihood, check_function)
    for name in filter(header.__contains__, WRAPPERS):  # in their order
        posterior = WRAPPERS[name](posterior, header[name])
    return posterior


def rebuilt(
    header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, likelihood: Any, check_function: bool = True
) -> Any:
    """The posterior of a description; arguments and errors as for :func:`load`."""
    _ = likelihood is None or resolve_likelihood(likelihood)  # refuses what is none
    with turn(unwrap(model)), torch.random.fork_rng([]):  # constructors may draw random numbers
        by_modules = check_function and not header.get("function", True)  # now, while no forward pass has other weights
        io.compare_fingerprint(header.get("network", {}), unwrap(model), modules=by_modules)
        cls = get_posterior(str(header.get("class")))
        try:
            posterior: Any = _restored(cls, header, tensors, model, likelihood)
            if check_function and posterior._function:
                _compare(posterior.network, posterior._function, header["network"].get("modules", ()))
        except (CheckpointError, UnsupportedError, torch.OutOfMemoryError):
            raise
        except (*NETWORK_ERRORS, ArithmeticError) as error:
            raise CheckpointError("The parts of the checkpoint do not fit together.", got=repr(error)) from error
        return posterior


def _restored(cls: Any, header: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, likelihood: Any) -> Any:
    inner = unwrap(model)
    masks, hyper = with_prefix(tensors, "mask."), with_prefix(tensors, "hyper.")
    parameters: Any = header["parameters"]
    if masks:
        shapes = {name: parameter.shape for name, parameter in uses(inner).items()}
        whole = {name: torch.ones(shapes[name], dtype=torch.bool) for name in parameters}
        parameters = {name: masks[name].view(mask.shape) if name in masks else mask for name, mask in whole.items()}
    precision = hyper["prior_precision"]
    if "groups" in header:
        hyper["prior_precision"] = torch.ones(())  # set below: the class starts with the layers as groups
    posterior = cls(
        model,
        _likelihood(header["likelihood"], likelihood),
        parameters=parameters,
        backend=backend_from_config(header["backend"]),
        **hyper,
        **header["options"],
    )
    if "groups" in header:
        entry = header["groups"]
        posterior.prior_groups = Groups(entry["name"], tuple(entry["names"]), tensors["groups.index"])
        posterior.prior_precision = precision
    network, posterior._function = posterior.network, header.get("function")
    for name, known in header.get("example_axes", {}).items():
        network.example_axes[name] = None if known is None else ExampleAxis(int(known[0]), bool(known[1]))
    posterior.n_data, posterior.n_outputs = int(header["n_data"]), int(header["n_outputs"])
    common, device = ("mask.", "hyper.", "groups.index"), posterior.network.device
    state = {name: value.to(device) for name, value in tensors.items() if not name.startswith(common)}
    if any(value.is_complex() for value in tensors.values()):
        raise TypeError("complex tensors")
    if "vector" in state:
        posterior.mean = state["vector"]
    posterior.restore(header["state"], state)
    size = None if posterior._vector is None else tuple(posterior._vector.shape)
    if size != (posterior.n_parameters,) or posterior.n_data < 1 or posterior.n_outputs < 0:
        raise ValueError(f"a mean {size} of {posterior.n_data} examples and {posterior.n_outputs} outputs")
    posterior.remember_weights()
    return posterior


def _compare(network: Network, known: Mapping[str, Any], modules: Iterable[str]) -> None:
    """Raise :class:`CheckpointError` if a network computes something else than a probe of it found at the fit."""
    form = known["inputs"]
    now, rounding = outputs_at(network, random_inputs(form))
    far = far_outputs(network, form, float(known["times"])) if "far" in known else None  # for one device alone, say
    for name, found, least in (("outputs", now, float(known["rounding"])), ("far", far, FAR_ROUNDING)):
        if found is None:
            continue
        before = torch.tensor(known[name], dtype=torch.float64)
        off = difference(before, found) if before.shape == found.shape else float("inf")
        if off <= max(rounding, least):  # not of NaN
            continue
        old, new = set(modules), set(io.fingerprint(network.model)["modules"])
        expected, got = "; ".join(sorted(old - new)) or "outputs as at the fit", "; ".join(sorted(new - old))
        what, fix = "The network has the same weights, but computes another function.", "Restore it, or fit again."
        got += f" outputs that differ by {off:.2g} of the largest"
        raise CheckpointError(what, expected=expected, got=got, fix=fix)


def _likelihood(stored: Mapping[str, Any], given: Any) -> Likelihood:
    """The stored likelihood, or the caller's if it is the one that was fitted, up to the value of its noise."""
    if given is None:
        if stored.get("name") == "custom":
            what, expected = "A likelihood of your own is not stored.", "load(path, model, likelihood=…)"
            raise CheckpointError(what, expected=expected, got="no likelihood")
        return likelihood_from_config(stored)
    likelihood = resolve_likelihood(given)
    own, noise = stored.get("noise_std"), likelihood.noise_std
    if isinstance(given, str) and isinstance(own, list) and noise is not None:  # "regression" with several outputs
        likelihood = likelihood.with_noise(noise.expand(len(own)))
    if stored.get("name") != "custom" and _without_noise(likelihood.config()) != _without_noise(stored):
        what = "The posterior was fitted with another likelihood."
        fix = "Leave likelihood out, or fit a posterior with this one."
        raise CheckpointError(what, expected=repr(likelihood_from_config(stored)), got=repr(likelihood), fix=fix)
    return likelihood


def _without_noise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A likelihood's description with the form of its noise levels in place of their values."""
    noise = config.get("noise_std")
    return {**config, "noise_std": [len(noise)] if isinstance(noise, list) else noise is not None}
