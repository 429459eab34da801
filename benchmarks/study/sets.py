"""Data sets of the study, split by split: tables and MNIST-like images, ready to train on.

Everything is standardised by the training part of a split. What a reader of results has to know about a set (splits
that were made here, constant columns, subsets) is in its notes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.evidence.colour import cifar10, coloured
from benchmarks.evidence.data import batches, images
from benchmarks.study import tables
from benchmarks.study.tables import Table
from laplace_plus.errors import ConfigurationError, DataError, LabelError

Batches = list[tuple[Tensor, Tensor]]

COLOUR = "cifar10"
"""The images that are not of one grey."""

HELD_OUT = 0.15
"""Share of the training rows that validates where splits only name test rows."""


@dataclass(frozen=True)
class DataSet:
    """One split of a set.

    Attributes:
        name: Of the set.
        number: Of the split.
        train: Inputs ``[N, …]`` and targets: classes ``[N]`` or numbers ``[N, 1]``, standardised.
        validation: The same.
        test: The same.
        classification: Whether targets are classes.
        n_outputs: Outputs of a network for it.
        unit: Standard deviation of the targets before they were standardised; 1 for classes.
        ood: Inputs from elsewhere, by name.
        notes: What a reader has to know.
        checksum: Of the rows and of their parts.
    """

    name: str
    number: int
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classification: bool
    n_outputs: int
    unit: float = 1.0
    ood: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checksum: str = ""

    def loader(self, part: str, size: int = 500) -> Batches:
        """Batches of "train", "validation" or "test"."""
        inputs, targets = getattr(self, part)
        return batches(inputs, targets, size)


def load(name: str, number: int, folder: Path, settings: dict[str, Any]) -> DataSet:
    """Split ``number`` of a set.

    Args:
        name: Its name in the tables of results.
        number: Of the split.
        folder: Where data lie.
        settings: The set's own section of the configuration.

    Raises:
        DataError: Data that cannot be used, or are not there.
        ConfigurationError: Unknown settings.
    """
    known = {"data", "kind", "splits", "train_size", "validation_size", "test_size", "ood", "images"}
    if unknown := settings.keys() - known:
        raise ConfigurationError(
            f"{name}: unknown settings.", expected=", ".join(sorted(known)), got=", ".join(sorted(unknown))
        )
    if settings.get("images"):
        return _images(name, number, folder, settings)
    table = tables.read(find(settings.get("data", name), folder), settings.get("kind"))
    part, notes = _division(table, number, settings)
    return from_table(table, name, number, part, notes)


def find(source: str, folder: Path) -> Path:
    """The file of a table: a path, or a name in the folder of data.

    Raises:
        DataError: There is none.
    """
    places = [folder / source / "data.npz", folder / f"{source}.npz", folder / f"{source}.csv"]
    if Path(source).suffix in (".npz", ".csv"):
        places = [folder / source, Path(source)]
    for path in places:
        if path.is_file():
            return path
    raise DataError(f"There is no data set {source!r}.", expected=" or ".join(map(str, places)), got="no such file")


def _division(table: Table, number: int, settings: dict[str, Any]) -> tuple[np.ndarray, list[str]]:
    """Parts 0, 1, 2 of the rows (3 for those left out), and what to say about them."""
    name = settings.get("splits")
    notes = []
    if settings.get("train_size"):
        part = _drawn(table, number, settings)
        counts = [int((part == k).sum()) for k in range(3)]
        notes.append(f"rows drawn here for each split: {counts[0]} training, {counts[1]} validation, {counts[2]} test")
        return part, notes
    if name is None:
        name = next((key for key in ("split", "standard_test") if key in table.splits), None)
    if name is None:
        notes.append("the file has no splits; stratified 70/15/15 ones were made here, by seed")
        return tables.made_here(table, number), notes
    if name not in table.splits:
        raise DataError(
            f"{table.name}: no such splits.", expected=", ".join(table.splits) or "none at all", got=repr(name)
        )
    splits = table.splits[name]
    if number >= len(splits):
        raise DataError(
            f"{table.name}: there is no split {number}.", expected=f"0 … {len(splits) - 1}", got=str(number)
        )
    row = splits[number]
    if row.dtype == bool:
        notes.append(f"{name}: {HELD_OUT:.0%} of the training rows validate, drawn here by seed")
        part = np.where(row, 2, 0).astype(np.uint8)
        rows = np.flatnonzero(part == 0)
        part[np.random.default_rng(number).permutation(rows)[: round(HELD_OUT * len(rows))]] = 1
        return part, notes
    if not np.isin(row, (0, 1, 2)).all():
        raise DataError(f"{table.name}: split {number} is wrong.", expected="0, 1 and 2", got=str(np.unique(row)))
    return row, notes


def _drawn(table: Table, number: int, settings: dict[str, Any]) -> np.ndarray:
    """Sizes that the configuration asks for, at random."""
    train, validation = int(settings["train_size"]), int(settings.get("validation_size", 0))
    order = np.random.default_rng(number).permutation(len(table.y))
    test = int(settings.get("test_size", len(order) - train - validation))
    if train + validation + test > len(order) or min(train, validation, test) < 1:
        raise DataError(
            f"{table.name}: the sizes do not fit.",
            expected=f"positive numbers of at most {len(order)} rows together",
            got=f"{train}, {validation} and {test}",
        )
    part = np.full(len(order), 3, dtype=np.uint8)
    for k, rows in enumerate(np.split(order, [train, train + validation, train + validation + test])[:3]):
        part[rows] = k
    return part


def from_table(table: Table, name: str, number: int, part: np.ndarray, notes: list[str]) -> DataSet:
    """A split of a table, checked and standardised.

    Raises:
        DataError: An empty part.
        LabelError: A class that occurs outside of the training part only.
    """
    for k, title in enumerate(("training", "validation", "test")):
        if not (part == k).any():
            raise DataError(f"{name}: split {number} has no {title} rows.", expected="some", got="none")
    notes = [*table.notes, *notes]
    x, y = table.x, table.y
    if table.classification:
        for k, title in ((1, "validation"), (2, "test")):
            strange = np.setdiff1d(y[part == k], y[part == 0])
            if len(strange):
                raise LabelError(
                    f"{name}: split {number} leaves a class out of training.",
                    expected="all classes in the training part",
                    got=f"class {', '.join(map(str, strange))} in the {title} part only",
                    fix="Change the split, or leave those rows out.",
                )
    mean, std = x[part == 0].mean(0), x[part == 0].std(0)
    constant = np.flatnonzero(~(std > 1e-12 * np.maximum(1.0, np.abs(mean))))
    if len(constant) == x.shape[1]:
        raise DataError(f"{name}: all columns are constant.", expected="features that vary", got="none")
    if len(constant):
        notes.append(f"constant in training and therefore all zero: feature {', '.join(map(str, constant))}")
    std[constant] = 1.0
    x = (x - mean) / std
    x[:, constant] = 0.0
    inputs, unit = torch.from_numpy(x).float(), 1.0
    if table.classification:
        targets = torch.from_numpy(y)
    else:
        center, unit = y[part == 0].mean(), float(y[part == 0].std())
        if not unit > 0:
            raise LabelError(f"{name}: the training targets are all the same.", expected="numbers that vary")
        targets = torch.from_numpy((y - center) / unit).float()[:, None]
    train, validation, test = (
        (inputs[torch.from_numpy(part == k)], targets[torch.from_numpy(part == k)]) for k in range(3)
    )
    n_outputs = int(y.max()) + 1 if table.classification else 1
    known = tables.checksum(table.x, table.y, part)
    return DataSet(
        name, number, train, validation, test, table.classification, n_outputs, unit, notes=tuple(notes), checksum=known
    )


def _some_images(folder: Path, source: str, part: str, size: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Random images of part "train" or "t10k", as many as asked for, and their labels."""

    def choose(count: int) -> Tensor:
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: count if size is None else size]

    if source == COLOUR:
        return cifar10(folder, "train" if part == "train" else "test", choose)
    pixels, labels = images(folder, source, part)
    rows = choose(len(labels))
    return pixels[rows], labels[rows]


def _images(name: str, number: int, folder: Path, settings: dict[str, Any]) -> DataSet:
    """A random subset of the training images, others to validate, and a fixed subset of the test images.

    Images of CIFAR-10 have three colours; those from elsewhere are made like them.
    """
    source = settings.get("data", name)
    files = {"train": "train-images-idx3-ubyte.gz", "t10k": "t10k-images-idx3-ubyte.gz"}
    if source == COLOUR:
        files = {"train": "train_jpegq75.npz", "t10k": "test_jpegq75.npz"}
    for file in files.values():
        if not (folder / source / file).is_file():
            raise DataError(f"There are no images of {source!r}.", expected=f"{source}/{file}")
    sizes = int(settings.get("train_size", 5000)), int(settings.get("validation_size", 1000))
    n_test = None if "test_size" not in settings else int(settings["test_size"])
    pixels, labels = _some_images(folder, source, "train", sum(sizes), number)
    shown, digits = _some_images(folder, source, "t10k", n_test, 0)
    first, then = slice(sizes[0]), slice(sizes[0], None)
    mean, std = pixels[first].mean(), pixels[first].std()
    raw = [pixels[first], labels[first], pixels[then], labels[then], shown, digits]
    ood = {}
    for other in settings.get("ood", ()):
        strange, _ = _some_images(folder, other, "t10k", len(digits), 0)
        raw.append(strange)
        ood[other] = ((coloured(strange) if source == COLOUR else strange) - mean) / std
    note = f"{sizes[0]} training images drawn anew for each split, {sizes[1]} to validate, {len(digits)} test images"
    pixels, shown = (pixels - mean) / std, (shown - mean) / std
    parts = (pixels[first], labels[first]), (pixels[then], labels[then]), (shown, digits)
    known = tables.checksum(*(part.numpy() for part in raw))
    return DataSet(name, number, *parts, True, 10, ood=ood, notes=(note,), checksum=known)
