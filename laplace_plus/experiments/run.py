"""`laplace-plus run`: the digits demonstration, repeated over seeds.

Train a small network, wrap it, tune the prior by marginal likelihood on the training data alone, and score everything
on images that no step before has seen: test images of the classes that were learned, and all images of those held out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

from laplace_plus.experiments import report
from laplace_plus.experiments.comparison import Data, Outcome, compare
from laplace_plus.experiments.digits import load_digits, train_network
from laplace_plus.experiments.output import Say, reliability, save_posteriors
from laplace_plus.experiments.settings import RunSettings, as_json, read_posteriors
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
    with _one_thread():
        _run(settings, progress=progress, say=say)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch to one thread: for so small a network, sharing out the work costs more time than it saves."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
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
            save_posteriors(output, outcomes, posteriors, say=say)
        say(f"seed {seed}: trained in {train_seconds[-1]:.1f} s; {_times(outcomes)}")
    reliability(output, repeats)
    report.write_json(
        output / "metrics.json",
        {
            "experiment": "digits",
            **report.summary(repeats, range(settings.seeds)),
            "data": {
                "classes": digits.n_classes,
                "train": len(digits.train),
                "test": len(digits.test),
                "out_of_distribution": len(digits.out_of_distribution),
            },
            "parameters": n_parameters,
            "train_seconds": train_seconds,
            "total_seconds": time.perf_counter() - started,
            "configuration": as_json(settings),
            "versions": report.versions(),
        },
    )
    say("")
    say(report.table(repeats))
    say("")
    repeated = f"mean ± standard error over {settings.seeds} seeds; " if settings.seeds > 1 else ""
    say(f"{repeated}{time.perf_counter() - started:.0f} s in all; written to {output}/")


def _batches(dataset: TensorDataset) -> DataLoader[tuple]:
    return DataLoader(dataset, batch_size=256)


def _times(outcomes: dict[str, Outcome]) -> str:
    return "; ".join(
        f"{label}: " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in outcome.seconds.items())
        for label, outcome in outcomes.items()
    )
