"""`laplace-plus run`: the digits demonstration, repeated over seeds.

Train a small network, wrap it, tune the prior by marginal likelihood on the training data alone, and score everything
on images that no step before has seen: test images of the classes that were learned, and all images of those held out.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

from laplace_plus.experiments import report
from laplace_plus.experiments.comparison import Data, Outcome, compare
from laplace_plus.experiments.digits import load_digits, train_network
from laplace_plus.experiments.objects import read_posteriors
from laplace_plus.experiments.report import Say
from laplace_plus.experiments.settings import RunSettings
from laplace_plus.likelihoods import Categorical


def run(settings: RunSettings, *, progress: bool = False, say: Say) -> None:
    """Runs the demonstration and writes its folder.

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
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        if seed == 0:
            say(
                f"digits: {digits.n_classes} classes, {len(digits.train)} training, {len(digits.test)} test and "
                f"{len(digits.out_of_distribution)} out-of-distribution images; {n_parameters} weights"
            )
        data = Data(
            train=_batches(digits.train),
            test=_batches(digits.test),
            out_of_distribution=_batches(digits.out_of_distribution),
        )
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
    sizes = {name: len(getattr(digits, name)) for name in ("train", "test", "out_of_distribution")}
    say("")
    report.write(
        "digits",
        repeats,
        range(settings.seeds),
        settings,
        started=started,
        say=say,
        data={"classes": digits.n_classes, **sizes},
        parameters=n_parameters,
        train_seconds=train_seconds,
    )


def _batches(dataset: TensorDataset) -> DataLoader[tuple]:
    return DataLoader(dataset, batch_size=256)
