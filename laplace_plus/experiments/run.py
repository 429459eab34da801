"""The two commands: the digits demonstration, and the same steps for a network and data of one's own.

`laplace-plus run` trains a small network, wraps it, tunes the prior by marginal likelihood on the training data alone,
and scores everything on images that no step before has seen: test images of the classes that were learned, and all
images of those held out. It repeats this over seeds. `laplace-plus wrap` starts from a trained network.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from laplace_plus.errors import ConfigurationError
from laplace_plus.experiments import report
from laplace_plus.experiments.comparison import Data, Outcome, compare
from laplace_plus.experiments.digits import load_digits, train_network
from laplace_plus.experiments.objects import make, read_posteriors
from laplace_plus.experiments.report import Say
from laplace_plus.experiments.settings import RunSettings, WrapSettings
from laplace_plus.likelihoods import Categorical, resolve_likelihood


def run(settings: RunSettings, *, progress: bool = False, say: Say) -> None:
    """Run the demonstration and write its folder.

    Args:
        settings: What to run.
        progress: Whether to show progress bars.
        say: Takes each line for the user.

    Raises:
        ConfigurationError: A posterior that cannot be made.
        UnsupportedError: scikit-learn or matplotlib is missing.
    """
    posteriors, options = read_posteriors(settings.posteriors), {"device": settings.device, "progress": progress}
    started = time.perf_counter()
    repeats: list[dict[str, Outcome]] = []
    models: list[nn.Module] = []
    train_seconds: list[float] = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a network, more threads take longer
    try:
        for seed in range(settings.seeds):
            digits = load_digits(settings.data, seed=seed)
            before = time.perf_counter()
            models.append(train_network(digits, settings.training, seed=seed, **options))
            train_seconds.append(time.perf_counter() - before)
            data = Data(**{name: DataLoader(split, batch_size=256) for name, split in digits.items()})
            repeats.append(compare(models[-1], Categorical(), data, posteriors, seed=seed, **options))
            times = [
                f"{label}: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in outcome.seconds.items())
                for label, outcome in repeats[-1].items()
            ]
            say(f"seed {seed}: trained in {train_seconds[-1]:.1f} s; {'; '.join(times)}")
    finally:
        torch.set_num_threads(n_threads)
    facts = {
        "experiment": "digits",
        "seeds": list(range(settings.seeds)),
        "data": {"classes": 10 - len(settings.data.held_out_classes)}
        | {name: len(split) for name, split in digits.items()},
        "parameters": sum(parameter.numel() for parameter in models[0].parameters()),
        "train_seconds": train_seconds,
        "total_seconds": time.perf_counter() - started,
    }
    say(f"data: {facts['data']}; {facts['parameters']} weights\n")
    report.write(settings, repeats, facts, say=say)
    save_file(models[0].state_dict(), Path(settings.output) / "model.safetensors")


def wrap(settings: WrapSettings, *, progress: bool = False, say: Say) -> None:
    """Wrap the configured network, evaluate it and write the output folder.

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
        model = make(settings.model, settings.model_kwargs)
        if not isinstance(model, nn.Module):
            raise ConfigurationError(
                f"{settings.model} returned no network.", expected="a torch.nn.Module", got=type(model).__name__
            )
        if settings.checkpoint is not None:
            _load_weights(model, Path(settings.checkpoint))
        model.to(settings.device)
        keys = {"train": "train", "test": "test", "validation": "validation", "out_of_distribution": "ood"}
        names = {part: getattr(settings, f"{key}_data") for part, key in keys.items()}
        keywords = {part: getattr(settings, f"{key}_data_kwargs") for part, key in keys.items()}
        data = Data(**{part: make(name, keywords[part]) for part, name in names.items() if name is not None})
        options = {"seed": settings.seed, "device": settings.device, "progress": progress}
        outcomes = compare(model, likelihood, data, posteriors, **options)
    facts = {
        "experiment": "wrap",
        "seeds": [settings.seed],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "total_seconds": time.perf_counter() - started,
    }
    report.write(settings, [outcomes], facts, say=say)


def _load_weights(model: nn.Module, path: Path) -> None:
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        # torch's own message tells how to unpickle the file anyway, which must not be offered.
        raise ConfigurationError(
            "The checkpoint cannot be read as a file of weights.",
            expected="a state dict, as safetensors (*.safetensors) or as saved by torch.save",
            got=str(path) if path.is_file() else f"no file at {path}",
        ) from error
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        got = " ".join(f"{path}: {error}".split()).rstrip(" .")
        raise ConfigurationError("The checkpoint's weights are not this network's.", got=got) from error
