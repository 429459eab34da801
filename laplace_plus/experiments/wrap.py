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
from laplace_plus.experiments.objects import make, read_posteriors
from laplace_plus.experiments.report import Say
from laplace_plus.experiments.settings import WrapSettings
from laplace_plus.likelihoods import resolve_likelihood


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
        name = settings.likelihood
        likelihood = resolve_likelihood(make(name, {}) if ":" in name else name)
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
    report.save_posteriors(output, outcomes, posteriors, say=say)
    report.write(
        "wrap",
        [outcomes],
        [settings.seed],
        settings,
        started=started,
        say=say,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


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
        # torch would tell how to unpickle it all the same, which must not be offered.
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
