"""`laplace-plus wrap`: the demonstration's steps for a network and data of one's own."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments import report
from laplace_plus.experiments.comparison import Data, compare
from laplace_plus.experiments.output import Say, reliability, save_posteriors
from laplace_plus.experiments.settings import WrapSettings, as_json, make, read_posteriors
from laplace_plus.likelihoods import Likelihood, resolve_likelihood


def wrap(settings: WrapSettings, *, progress: bool = False, say: Say) -> None:
    """Wraps the configured network, evaluates it and writes the output folder.

    Args:
        settings: What to wrap.
        progress: Whether to show progress bars.
        say: Takes each line for the user.

    Raises:
        ConfigurationError: Something that the configuration names is missing, or is not what it should be.
        UnsupportedError: matplotlib is missing.
    """
    posteriors = read_posteriors(settings.posteriors)
    started = time.perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        likelihood = _likelihood(settings.likelihood)
        model = _model(settings)
        data = Data(
            train=make(settings.train_data, settings.train_data_kwargs),
            test=make(settings.test_data, settings.test_data_kwargs),
            validation=_optional(settings.validation_data, settings.validation_data_kwargs),
            out_of_distribution=_optional(settings.ood_data, settings.ood_data_kwargs),
        )
        outcomes = compare(
            model, likelihood, data, posteriors, seed=settings.seed, device=settings.device, progress=progress
        )
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    save_posteriors(output, outcomes, posteriors, say=say)
    reliability(output, [outcomes])
    report.write_json(
        output / "metrics.json",
        {
            "experiment": "wrap",
            **report.summary([outcomes], [settings.seed]),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "total_seconds": time.perf_counter() - started,
            "configuration": as_json(settings),
            "versions": report.versions(),
        },
    )
    say(report.table([outcomes]))
    say("")
    say(f"{time.perf_counter() - started:.0f} s in all; written to {output}/")


def _likelihood(name: str) -> Likelihood:
    return resolve_likelihood(make(name, {}) if ":" in name else name)


def _optional(name: str | None, keywords: dict[str, Any]) -> Any:
    return None if name is None else make(name, keywords)


def _model(settings: WrapSettings) -> nn.Module:
    model = make(settings.model, settings.model_kwargs)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{settings.model} returned no network.", expected="a torch.nn.Module", got=type(model).__name__
        )
    if settings.checkpoint is not None:
        _load_weights(model, Path(settings.checkpoint))
    return model.to(settings.device)


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise ConfigurationError("The checkpoint is not there.", got=str(path), fix="Check the path.")
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        # What torch says of a pickle is how to run it all the same; that is not offered here.
        raise ConfigurationError(
            "The checkpoint cannot be read as a file of weights.",
            expected="a state dict, as safetensors (*.safetensors) or as saved by torch.save",
            got=str(path),
        ) from error
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            "The checkpoint's weights are not this network's.", got=" ".join(f"{path}: {error}".split()).rstrip(" .")
        ) from error
