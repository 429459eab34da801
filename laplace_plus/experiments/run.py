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
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a network, more threads take longer
    try:
        _run(settings, progress=progress, say=say)
    finally:
        torch.set_num_threads(n_threads)


def _run(settings: RunSettings, *, progress: bool, say: Say) -> None:
    posteriors = read_posteriors(settings.posteriors)
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    repeats: list[dict[str, Outcome]] = []
    train_seconds: list[float] = []
    for seed in range(settings.seeds):
        digits = load_digits(settings.data, seed=seed)
        before = time.perf_counter()
        model = train_network(digits, settings.training, seed=seed, device=settings.device, progress=progress)
        train_seconds.append(time.perf_counter() - before)
        splits = {"train": digits.train, "test": digits.test, "out_of_distribution": digits.out_of_distribution}
        sizes = {name: len(split) for name, split in splits.items()}
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        if seed == 0:
            say(
                f"digits: {digits.n_classes} classes, {sizes['train']} training, {sizes['test']} test and "
                f"{sizes['out_of_distribution']} out-of-distribution images; {n_parameters} weights"
            )
        data = Data(**{name: DataLoader(split, batch_size=256) for name, split in splits.items()})
        outcomes = compare(model, Categorical(), data, posteriors, seed=seed, device=settings.device, progress=progress)
        repeats.append(outcomes)
        if seed == 0:
            save_file(model.state_dict(), output / "model.safetensors")
            report.save_posteriors(output, outcomes, posteriors, say=say)
        times = "; ".join(
            f"{label}: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in outcome.seconds.items())
            for label, outcome in outcomes.items()
        )
        say(f"seed {seed}: trained in {train_seconds[-1]:.1f} s; {times}")
    say("")
    facts = {"data": {"classes": digits.n_classes, **sizes}, "parameters": n_parameters, "train_seconds": train_seconds}
    report.write("digits", repeats, range(settings.seeds), settings, started=started, say=say, facts=facts)


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
        held_out, shifted = settings.validation_data, settings.ood_data
        data = Data(
            train=make(settings.train_data, settings.train_data_kwargs),
            test=make(settings.test_data, settings.test_data_kwargs),
            validation=None if held_out is None else make(held_out, settings.validation_data_kwargs),
            out_of_distribution=None if shifted is None else make(shifted, settings.ood_data_kwargs),
        )
        outcomes = compare(
            model, likelihood, data, posteriors, seed=settings.seed, device=settings.device, progress=progress
        )
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    report.save_posteriors(output, outcomes, posteriors, say=say)
    facts = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    report.write("wrap", [outcomes], [settings.seed], settings, started=started, say=say, facts=facts)


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise ConfigurationError("The checkpoint is not there.", got=str(path), fix="Check the path.")
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
            got=str(path),
        ) from error
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            "The checkpoint's weights are not this network's.", got=" ".join(f"{path}: {error}".split()).rstrip(" .")
        ) from error
