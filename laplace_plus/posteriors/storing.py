"""Posteriors by name and in files: the registry of classes, and saving and loading."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_plus import checks
from laplace_plus.curvature import Curvature, backend_class, backend_from_config
from laplace_plus.errors import CheckpointError, ConfigurationError
from laplace_plus.likelihoods import Likelihood, likelihood_from_config, resolve_likelihood
from laplace_plus.network.selection import refine
from laplace_plus.network.shadow import unwrap
from laplace_plus.persistence import decode, encode, fingerprint, read, read_folder, require_same_weights, write
from laplace_plus.posteriors.state import GaussianState
from laplace_plus.priors import Groups
from laplace_plus.structured.blocks import block_from_tensors
from laplace_plus.structured.layout import Layout

# -- classes and options by name ---------------------------------------------------------------------------------------


ENTRY_POINTS = "laplace_plus.posteriors"
METHODS = ("fit", "predictive", "sample")
"""What tells a posterior class from others: ``Posterior`` itself is defined above this module."""

_registered: dict[str, type[Any]] = {}


def register(name: str, cls: type[Any]) -> None:
    """Make a posterior class known by name, to :func:`laplace_plus.load` and to configurations.

    Packages may instead declare an entry point of the group ``laplace_plus.posteriors``.

    Args:
        name: The name; by convention the class's own.
        cls: A subclass of :class:`laplace_plus.Posterior`.

    Raises:
        ConfigurationError: The name is no string or belongs to another class already, or ``cls`` is not a posterior
            class.
    """
    is_one = isinstance(cls, type) and all(callable(getattr(cls, method, None)) for method in METHODS)
    if not is_one or not isinstance(name, str) or not name or _registered.setdefault(name, cls) is not cls:
        what = f"{cls!r} cannot be registered as {name!r}."
        expected = f"a class with {', '.join(METHODS)}, and a str that is not the name of another"
        fix = "Derive the class from laplace_plus.Posterior, and register the class itself, not an instance."
        raise ConfigurationError(what, expected=expected, got=f"{cls!r} and {name!r}", fix=fix)


def get_posterior(name: str) -> type[Any]:
    """The class of that name; :class:`ConfigurationError` if no class has it."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)} if name not in _registered else {}
    if name in points:
        register(name, points[name].load())
    fix = "Register it with laplace_plus.register(name, cls), or install the package that brings it."
    return _registered[checks.choice("posterior", name, sorted({*_registered, *points}), fix)]


def name_of(cls: type[Any]) -> str:
    """The name under which a class is registered; :class:`ConfigurationError` if it is not."""
    names = [name for name, known in _registered.items() if known is cls]
    names = names or [point.name for point in entry_points(group=ENTRY_POINTS) if point.load() is cls]
    if not names:
        what = f"{cls.__qualname__} is not registered."
        raise ConfigurationError(what, fix=f"Call laplace_plus.register({cls.__name__!r}, {cls.__name__}) first.")
    return names[0]


def resolve_option(what: str, value: Any, known: Mapping[str, type[Any]]) -> Any:
    """One of the known classes: from its name, from a mapping with ``"name"`` and its options, or as it is.

    ConfigurationError for another name, or options that the class does not have.
    """
    if isinstance(value, tuple(known.values())):
        return value
    options = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = checks.choice(what, options.pop("name", None), known)
    own = {} if known[name] is type(None) else signature(known[name]).parameters
    checks.options(f"The {what} {name!r}", options, own)
    return known[name](**options)


# -- files -------------------------------------------------------------------------------------------------------------


SCALES = ("link", "covariance_scale", "output_temperature")
HYPERPARAMETERS = ("_prior_groups", "_prior_precision", "is_guess", *SCALES, "tangent_mean", "earlier")
"""Attributes that are set after the constructor; the other hyperparameters are its arguments."""


def save(found: Any, path: str | os.PathLike[str]) -> None:
    """Write what :func:`state_dict` says to a file; see :meth:`Posterior.save`."""
    state = state_dict(found)
    write(path, state["header"], state["tensors"])


def state_dict(found: Any) -> dict[str, Any]:
    """What ``save`` writes, as a JSON-able header and tensors that share the posterior's memory, for ``torch.save``.

    Args:
        found: A fitted posterior; perhaps within stored dataclasses, such as a calibration, whose field ``posterior``
            is what is inside.

    Raises:
        NotFittedError: Before ``fit``.
        ConfigurationError: An option or a part of the state that cannot be stored.
    """
    around: list[Any] = []
    while is_dataclass(found) and not isinstance(found, type):
        outer: Any = found
        around, found = [replace(outer, posterior=None), *around], outer.posterior
    if not hasattr(found, "require_fit"):
        what, expected = f"{type(found).__name__} is not saved.", "a posterior of one network, perhaps calibrated"
        raise ConfigurationError(what, expected=expected, fix="Save the networks, and build it on them again.")
    found.require_fit()
    posterior, backend = found, found.backend
    if backend_class(backend.name) is not type(backend):
        what, own = f"A backend {backend.name!r} would not be loaded as what it is.", type(backend).__name__
        fix = f"Give {own} a `name` of its own, and register it: lp.curvature.register_backend({own}.name, {own})."
        raise ConfigurationError(what, expected=backend_class(backend.name).__name__, got=own, fix=fix)
    selected = posterior.network.selected
    header = {"likelihood": posterior.likelihood.config(), "backend": backend.config()}
    return _encoded(
        header
        | {"class": name_of(type(posterior)), "network": posterior.network.weights or fingerprint(posterior.model)},
        options=posterior.options,
        parameters=[x.name for x in selected] if all(x.mask is None for x in selected) else refine(selected),
        prior_mean=posterior.prior_mean,
        temperature=posterior.temperature,
        hyperparameters={name: getattr(posterior, name) for name in HYPERPARAMETERS},
        state=posterior.state,
        around=around,
        lists=posterior.network.lists,
    )


def _encoded(header: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    return {"header": {**header, **{k: encode(own, tensors, k) for k, own in values.items()}}, "tensors": tensors}


def load(path: str | os.PathLike[str], model: nn.Module, *, likelihood: Any = None) -> Any:
    """Load a posterior, or a calibrated one, that its ``save`` wrote. Nothing is unpickled.

    Args:
        path: The file; or a folder of a Gaussian posterior that version 0.2.0 wrote.
        model: The network that the posterior was fitted on, with the same weights.
        likelihood: The likelihood, where it is one of your own that is not registered; others are stored.

    Raises:
        CheckpointError: The file is missing, damaged or of another format version; the network's weights differ; a
            likelihood is missing, or was stored; or the file holds something that is not registered.
        ConfigurationError: The arguments are not a path and a module, or the posterior's class is not registered.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(model, nn.Module):
        what, expected = "A posterior is loaded from a path, onto its network.", "load(path, model)"
        got, fix = f"a {type(path).__name__} and a {type(model).__name__}", "Build the network, load its weights first."
        raise ConfigurationError(what, expected=expected, got=got, fix=fix)
    if Path(path).is_dir():
        state = _of_folder(*read_folder(Path(path)))
    else:
        header, tensors = read(path)
        state = {"header": header, "tensors": tensors}
    return load_state_dict(state, model, likelihood=likelihood)


def load_state_dict(state: Mapping[str, Any], model: nn.Module, *, likelihood: Any = None) -> Any:
    """The posterior of a :func:`state_dict`, on its network; arguments and errors as of :func:`load`."""
    if not isinstance(state, Mapping) or not state.keys() >= {"header", "tensors"}:
        what, fix = "This is no state of a posterior.", "Fit a posterior again to what another version saved."
        raise CheckpointError(what, expected="what lp.state_dict(posterior) gave", got=type(state).__name__, fix=fix)
    header, tensors = state["header"], state["tensors"]
    require_same_weights(header["network"], unwrap(model))
    given = {name: decode(header[name], tensors) for name in ("parameters", "prior_mean", "temperature")}
    given |= {"backend": backend_from_config(header["backend"]), **decode(header["options"], tensors)}
    with torch.random.fork_rng([]):  # constructors may draw random numbers
        cls, known = get_posterior(str(header["class"])), _likelihood(header["likelihood"], likelihood)
        posterior: Any = cls(model, known, **given)
        posterior.network.lists, device = header.get("lists"), posterior.network.device
        hyperparameters = decode(header["hyperparameters"], tensors, device)
        vars(posterior).update(hyperparameters)
        posterior.set_state(decode(header["state"], tensors, device))
        vars(posterior).update(hyperparameters)  # some of which are others' before a new state
    for value in decode(header["around"], tensors):
        posterior = replace(value, posterior=posterior)
    return posterior


def _likelihood(known: Mapping[str, Any], given: Any) -> Likelihood:
    """The stored likelihood, or the caller's in place of one that is not stored."""
    custom = known.get("name") == "custom"
    if custom != (given is not None):
        what = "A likelihood of your own is not stored." if custom else "The likelihood is stored."
        expected = "load(path, model, likelihood=…)" if custom else f"load(path, model), of {known}"
        fix = None if custom else "Set another noise afterwards: posterior.noise_std = …"
        raise CheckpointError(what, expected=expected, got=f"likelihood={given!r}", fix=fix)
    return resolve_likelihood(given) if custom else likelihood_from_config(known)


# -- version 0.2.0 -----------------------------------------------------------------------------------------------------


def _of_folder(header: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The :func:`state_dict` of the Gaussian posterior that a folder describes; CheckpointError for other classes."""
    own, known, groups = header["state"], header["network"], header.get("groups")
    if "blocks" not in own:
        what, fix = f"A {header['class']} of version 0.2.0 is not read.", "Fit it again."
        raise CheckpointError(what, expected="lp.Full, lp.KFAC, lp.Diagonal or lp.LowRank", fix=fix)
    weights = {one["name"]: f"{one['dtype']} {one['shape']} {one['sha256']}" for one in known["tensors"]}
    selected, shapes = header["parameters"], {one["name"]: one["shape"] for one in known["tensors"]}
    if any(name.startswith("mask.") for name in tensors):
        masks = {name: tensors.get(f"mask.{name}", torch.ones(shapes[name], dtype=torch.bool)) for name in selected}
        selected = {name: mask.view(shapes[name]) for name, mask in masks.items()}
    blocks = []
    for number, entry in enumerate(own["blocks"]):
        prefix = f"block.{number}."
        parts = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        layout = Layout(entry["key"], tuple(entry["names"]), entry["rule"], parts.pop("index"))
        kind = entry["kind"].removeprefix("diagonal-output ")
        blocks.append((layout, block_from_tensors(kind, layout.shape, _renamed(parts))))
    mean, travelled = tensors["vector"], tensors.get("travelled")
    hyperparameters = {
        "_prior_groups": groups and Groups(groups["name"], tuple(groups["names"]), tensors["groups.index"]),
        "_prior_precision": tensors["hyper.prior_precision"],
        "is_guess": False,
        "link": own.get("link"),
        "covariance_scale": own.get("covariance_scale", 1.0),
        "tangent_mean": tensors.get("tangent_mean"),
    }
    sums = Curvature(blocks), tensors["statistics"], None if travelled is None else travelled.view_as(mean)
    return _encoded(
        {name: header[name] for name in ("class", "likelihood", "backend")}
        | {"network": weights | {key: known[key] for key in ("adapters",) if key in known}},
        options=header["options"],
        parameters=selected,
        prior_mean=tensors["hyper.prior_mean"],
        temperature=tensors["hyper.temperature"],
        hyperparameters=hyperparameters,
        state=GaussianState(mean, header["n_data"], header["n_outputs"], *sums),
        around=[],
    )


def _renamed(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums of outer products as they are called now: one matrix for each component, or the rows of limited ones."""
    found = {}
    for name, own in parts.items():
        match = re.fullmatch(r"(left|right|matrix)(_rows|_limit)?(\.\d+)?", name)
        stem, kind, number = match.groups("") if match else (name, "", "")
        if kind and f"{stem}_limit{number}" in parts:
            found[f"{stem}{number}.{kind[1:]}"] = own
        elif kind:
            found[stem + number] = own.mT @ own
        elif stem in ("left", "matrix"):
            found |= {f"{stem}.{component}": one for component, one in enumerate(own)}
        else:
            found[name] = own
    return found
