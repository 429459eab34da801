"""The cells of the battery: a problem, a network and a way of training, each with splits by seed.

Some of the cells chose the defaults (``development``); the others were only looked at when they were settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.study import sets, tables
from benchmarks.study.sets import DataSet
from benchmarks.study.tables import Table

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Cell:
    """A problem and how a network is trained on it.

    Attributes:
        name: Of the cell.
        data: Maps a seed and the folder of data to a split.
        network: Maps a split to a network with initial weights.
        development: Whether the defaults were chosen on it.
        epochs: Passes over the training data.
        weight_decay: Of Adam.
        learning_rate: Of Adam.
        batch_size: Examples of a step.
        early: Whether the weights of least validation loss are kept, in place of the last.
        annealed: Whether AdamW with a learning rate that falls as a cosine takes Adam's place.
    """

    name: str
    data: Callable[[int, Path], DataSet]
    network: Callable[[DataSet], nn.Module]
    development: bool = False
    epochs: int = 100
    weight_decay: float = 0.0
    learning_rate: float = 3e-3
    batch_size: int = 64
    early: bool = False
    annealed: bool = False


def loss_of(data: DataSet, outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy, or mean squared error."""
    if data.classification:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return functional.mse_loss(outputs, targets)


def train(cell: Cell, data: DataSet) -> nn.Module:
    """Train the network of a cell on a split; in evaluation mode. Initial weights and order belong to the split."""
    torch.manual_seed(data.number)
    network = cell.network(data)
    kind = torch.optim.AdamW if cell.annealed else torch.optim.Adam
    optimizer = kind(network.parameters(), lr=cell.learning_rate, weight_decay=cell.weight_decay)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cell.epochs) if cell.annealed else None
    inputs, targets = data.train
    best, kept = math.inf, {}
    for _ in range(cell.epochs):
        network.train()
        for rows in torch.randperm(len(inputs)).split(cell.batch_size):
            if len(rows) > 1:  # batch normalisation needs two
                optimizer.zero_grad()
                loss_of(data, network(inputs[rows]), targets[rows]).backward()
                optimizer.step()
        if rates is not None:
            rates.step()
        if cell.early:
            network.eval()
            with torch.no_grad():
                now = float(loss_of(data, network(data.validation[0]), data.validation[1]))
            if now < best:
                best, kept = now, {key: value.clone() for key, value in network.state_dict().items()}
    if cell.early:
        network.load_state_dict(kept)
    return network.eval()


Norm = Callable[[int], nn.Module]


def _mlp(
    data: DataSet, hidden: tuple[int, ...] = (50, 50), activation: type[nn.Module] = nn.ReLU, norm: Norm | None = None
) -> nn.Module:
    layers: list[nn.Module] = []
    width = math.prod(data.train[0].shape[1:])
    if data.train[0].ndim > 2:
        layers.append(nn.Flatten())
    for size in hidden:
        layers += [nn.Linear(width, size)]
        if norm:
            layers += [norm(size)]
        layers += [activation()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, data.n_outputs))


def _convolutions(data: DataSet, channels: tuple[int, int] = (8, 16), norm: Norm = nn.Identity) -> nn.Module:
    first, second = channels
    size = data.train[0].shape[-1]
    return nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1, stride=2 if size > 16 else 1),
        norm(first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        norm(second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (7 if size > 16 else 4) ** 2, 32),
        nn.ReLU(),
        nn.Linear(32, data.n_outputs),
    )


class _Recurrent(nn.Module):
    """An LSTM whose last state is read out."""

    def __init__(self, n_features: int, width: int, n_outputs: int):
        super().__init__()
        self.lstm, self.head = nn.LSTM(n_features, width, batch_first=True), nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class _Transformer(nn.Module):
    """One layer of attention, averaged over positions; or one output for each position, of what came before."""

    def __init__(self, width: int, n_outputs: int, n_features: int = 0, causal: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(n_outputs, width) if causal else nn.Linear(n_features, width)
        self.positions = nn.Parameter(0.1 * torch.randn(64, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head, self.causal = nn.Linear(width, n_outputs), causal

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.positions[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        h = self.layer(h, src_mask=mask)
        return self.head(h if self.causal else h.mean(1))


def _parts(name: str, seed: int, x: Tensor, y: Tensor, sizes: tuple[int, int], n_outputs: int, **more: Any) -> DataSet:
    """Rows in their order: training, validation, the rest to test."""
    train, validation = sizes[0], sum(sizes)
    parts = (x[:train], y[:train]), (x[train:validation], y[train:validation]), (x[validation:], y[validation:])
    return DataSet(name, seed, *parts, classification=not y.is_floating_point(), n_outputs=n_outputs, **more)


def _by_name(name: str, seed: int, folder: Path, **settings: Any) -> DataSet:
    """A table of the folder; the gap splits are run through anew, with other networks, where seeds are more."""
    if settings.get("splits") != "gap_test":
        return sets.load(name, seed, folder, settings)
    n_splits = len(tables.read(sets.find(settings["data"], folder), None).splits["gap_test"])
    return replace(sets.load(name, seed % n_splits, folder, settings), number=seed)


def _of_sklearn(name: str, seed: int, folder: Path) -> DataSet:
    """A table that scikit-learn ships."""
    found = getattr(datasets, f"load_{name}")()
    x, y = np.asarray(found.data, dtype=np.float64), found.target
    table = Table(name, x, y.astype(np.float64 if name == "diabetes" else np.int64), name != "diabetes")
    return sets.from_table(table, name, seed, tables.made_here(table, seed), [])


def _moons(seed: int, folder: Path) -> DataSet:
    """Two half circles with noise."""
    points, labels = datasets.make_moons(1700, noise=0.3, random_state=seed)
    x, y = torch.from_numpy(points).float(), torch.from_numpy(labels)
    return _parts("moons", seed, x, y, (200, 100), 2, ood={"wide": 4 * x[:500]})


def _images(name: str, seed: int, folder: Path, size: int) -> DataSet:
    other = "fashion_mnist" if name == "mnist" else "mnist"
    settings = {"images": True, "train_size": size, "validation_size": 500, "test_size": 2000, "ood": [other]}
    return sets.load(name, seed, folder, settings)


def _digits(seed: int, folder: Path, noise: float) -> DataSet:
    """scikit-learn's digits 0–7; 8 and 9 are from elsewhere."""
    pixels, labels = (torch.as_tensor(part) for part in datasets.load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    x = pixels.float().reshape(-1, 1, 8, 8) / 16
    x = x + noise * torch.randn(x.shape, generator=generator)
    known = (labels < 8).nonzero().flatten()  # noqa: PLR2004
    known = known[torch.randperm(len(known), generator=generator)]
    return _parts("digits", seed, x[known], labels[known], (600, 200), 8, ood={"8 and 9": x[labels >= 8]})  # noqa: PLR2004


def _series(seed: int, folder: Path, classification: bool, n: int = 400) -> DataSet:
    """Series of 12 steps; the target is an interaction of their means, with noise, or its sign."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 1200, 12, 2, generator=generator)
    signal = 3 * torch.sin(1.5 * x[:, -6:, 0].mean(1)) + 2 * x[:, -1, 1] * x[:, -2, 0]
    noisy = signal + 0.5 * torch.randn(len(x), generator=generator)
    y = noisy[:, None] if not classification else (noisy > 0).long() + (noisy > 2).long()  # noqa: PLR2004
    return _parts("series", seed, x, y, (n, 200), 3 if classification else 1, ood={"wide": 4 * x[:500]})


def _tokens(seed: int, folder: Path, noise: float, n_tokens: int = 70, length: int = 12) -> DataSet:
    """Sequences of tokens, each determined by the one before it, but for a share of random ones."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(n_tokens, generator=generator)
    x = torch.randint(n_tokens, (172, 1), generator=generator)
    for _ in range(length):
        fresh = torch.randint(n_tokens, (len(x),), generator=generator)
        strays = torch.rand(len(x), generator=generator) < noise
        x = torch.cat([x, torch.where(strays, fresh, following[x[:, -1]])[:, None]], 1)
    return _parts("tokens", seed, x[:, :-1], x[:, 1:], (32, 100), n_tokens)


def _many_classes(seed: int, folder: Path) -> DataSet:
    """A hundred normal clusters in 16 dimensions, which overlap."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.2 * torch.randn(100, 16, generator=generator)
    y = torch.randint(100, (5000,), generator=generator)
    x = centres[y] + torch.randn(len(y), 16, generator=generator)
    return _parts(
        "clusters", seed, x, y, (2000, 1000), 100, ood={"wide": 3 * torch.randn(1000, 16, generator=generator)}
    )


def _standardised(name: str, seed: int, x: np.ndarray, y: np.ndarray, n: int) -> DataSet:
    """A made table, of which n rows are for training; inputs and real targets are standardised by them."""
    x = (x - x[:n].mean(0)) / x[:n].std(0)
    targets = torch.from_numpy(y)
    if y.dtype.kind == "f":
        targets = torch.from_numpy((y - y[:n].mean()) / y[:n].std()).float()[:, None]
    n_outputs = 1 if y.dtype.kind == "f" else int(y.max()) + 1
    return _parts(name, seed, torch.from_numpy(x).float(), targets, (n, n // 7), n_outputs)


def _wrong_labels(seed: int, folder: Path, n: int, share: float) -> DataSet:
    """Three classes of two clusters each; a share of all labels is drawn at random."""
    shape = {"n_informative": 8, "n_redundant": 4, "n_classes": 3, "n_clusters_per_class": 2, "class_sep": 1.2}
    x, y = datasets.make_classification(n + n // 7 + 2000, 21, **shape, flip_y=share, random_state=100 + seed)
    return _standardised("wrong labels", seed, x, y, n)


def _friedman(seed: int, folder: Path, number: int, n: int, noise: float) -> DataSet:
    """One of Friedman's regressions."""
    size = n + n // 7 + 2000
    if number == 1:
        x, y = datasets.make_friedman1(size, 8, noise=noise, random_state=100 + seed)
    else:
        make = datasets.make_friedman2 if number == 2 else datasets.make_friedman3  # noqa: PLR2004
        x, y = make(size, noise=noise, random_state=100 + seed)
    return _standardised(f"friedman{number}", seed, x, y, n)


def _made() -> list[Cell]:
    """Label noise, normalisation and made regressions, each in families of cells."""
    cells, epochs = [], lambda n: max(60, min(400, 200000 // n))
    for label, activation, decay in (("ReLU", nn.ReLU, 0.0), ("Tanh", nn.Tanh, 1e-2)):
        network = partial(_mlp, activation=activation)
        options = {"weight_decay": decay, "learning_rate": 1e-2, "annealed": True}
        for n, share in ((n, share) for n in (600, 3500) for share in (0.0, 0.1, 0.2)):
            data, few = partial(_wrong_labels, n=n, share=share), n < 1000  # noqa: PLR2004
            cells.append(Cell(f"{share:.0%} wrong labels, {n}, {label}", data, network, few, epochs(n), **options))
        for number, n, noise in ((1, 600, 1.5), (1, 6400, 1.5), (2, 2000, 100.0), (3, 2000, 0.1)):
            data = partial(_friedman, number=number, n=n, noise=noise)
            cells.append(Cell(f"friedman{number}, {n}, {label}", data, network, epochs=epochs(n), **options))
    norms: dict[str, Norm] = {
        "batch": nn.BatchNorm2d,
        "group": partial(nn.GroupNorm, 4),
        "layer": partial(nn.GroupNorm, 1),
    }
    for name, norm in norms.items():
        network = partial(_convolutions, channels=(16, 32), norm=norm)
        for noise, length in ((0.4, 5), (0.4, 30), (0.4, 100), (0.0, 30)):
            title, data = f"digits, {name}-normalised, noise {noise:g}, {length} epochs", partial(_digits, noise=noise)
            cells.append(Cell(title, data, network, name == "batch", length, learning_rate=1e-3))
    for name, length in (("glass", 5), ("glass", 200), ("australian", 200)):
        title, network = f"{name}, layer-normalised, {length} epochs", partial(_mlp, norm=nn.LayerNorm)
        cells.append(Cell(title, partial(_by_name, name), network, epochs=length))
    return cells


def _cells() -> list[Cell]:
    decay = {"weight_decay": 1e-2}
    cells = []
    for name, known, known_plain in (
        ("australian", True, True),
        ("glass", True, True),
        ("breast_wisconsin_original", True, False),
        ("ionosphere", True, True),
        ("breast_wisconsin_diagnostic", False, False),
    ):
        data = partial(_by_name, name)
        cells += [
            Cell(f"{name}, decay", data, _mlp, known, epochs=200, **decay),
            Cell(f"{name}, no decay", data, _mlp, known_plain, epochs=200),
        ]
    banana = partial(_by_name, "banana", train_size=1000, validation_size=500)
    cells += [
        Cell(
            "banana, decay",
            banana,
            partial(_mlp, hidden=(16, 16), activation=nn.Tanh),
            True,
            epochs=200,
            weight_decay=1e-3,
        )
    ]
    cells += [Cell("banana, no decay", banana, partial(_mlp, hidden=(16, 16), activation=nn.Tanh), False, epochs=200)]
    small = partial(_mlp, hidden=(50,))
    for name, known in (
        ("boston", True),
        ("concrete", False),
        ("energy", True),
        ("boston_gap", False),
        ("concrete_gap", True),
        ("energy_gap", False),
    ):
        options = {"splits": "gap_test"} if name.endswith("_gap") else {}
        data = partial(_by_name, name, data=name.removesuffix("_gap"), **options)
        cells.append(Cell(name, data, small, known, epochs=200, weight_decay=1e-4))
    for name, known in (("power", True), ("naval", False), ("protein", False)):
        data = partial(_by_name, name, train_size=2000, validation_size=500, test_size=3000)
        cells.append(Cell(name, data, small, known, epochs=60, weight_decay=1e-5))
    for name, epochs in (("power", 30), ("naval", 30), ("protein", 10)):
        data = partial(_by_name, f"{name}_gap", data=name, splits="gap_test")
        cells.append(Cell(f"{name}_gap", data, small, epochs=epochs, weight_decay=1e-5))
    cells += [
        Cell("diabetes", partial(_of_sklearn, "diabetes"), small, epochs=200, weight_decay=1e-4),
        Cell("snelson", partial(_by_name, "snelson"), small, epochs=500, weight_decay=1e-4),
        Cell("concrete, early stopping", partial(_by_name, "concrete"), small, epochs=200, early=True),
        Cell(
            "power, under-trained",
            partial(_by_name, "power", train_size=2000, validation_size=500, test_size=3000),
            small,
            epochs=3,
        ),
    ]
    for name, size, known in (
        ("mnist", 1000, True),
        ("fashion_mnist", 5000, True),
        ("fashion_mnist", 1000, False),
        ("mnist", 5000, False),
        ("mnist", 20000, False),
        ("fashion_mnist", 20000, False),
    ):
        data = partial(_images, name, size=size)
        epochs = {1000: 40, 5000: 12, 20000: 4}[size]
        cells.append(
            Cell(f"{name} {size}", data, _convolutions, known, epochs=epochs, weight_decay=1e-4, learning_rate=2e-3)
        )
    sequence = {"epochs": 60, "batch_size": 32}
    lstm = lambda data: _Recurrent(2, 24, data.n_outputs)  # noqa: E731
    attention = lambda data: _Transformer(16, data.n_outputs, 2)  # noqa: E731
    language = lambda data: _Transformer(16, data.n_outputs, causal=True)  # noqa: E731
    regression, classes = partial(_series, classification=False), partial(_series, classification=True)
    cells += [
        Cell("lstm, regression", regression, lstm, True, **sequence),
        Cell("lstm, classes", classes, lstm, **sequence),
        Cell("transformer, regression", regression, attention, **sequence),
        Cell("transformer, classes", classes, attention, True, **sequence),
        Cell(
            "language model, certain",
            partial(_tokens, noise=0.0),
            language,
            True,
            **{**sequence, "epochs": 80, "batch_size": 8},
        ),
        Cell(
            "language model, noisy",
            partial(_tokens, noise=0.2),
            language,
            **{**sequence, "epochs": 80, "batch_size": 8},
        ),
        Cell("100 classes", _many_classes, partial(_mlp, hidden=(64,)), True, epochs=30),
        Cell("digits, noisy", partial(_digits, noise=0.5), _convolutions, True, epochs=30),
        Cell("digits, clean", partial(_digits, noise=0.0), _convolutions, True, epochs=30),
        Cell("glass, early stopping", partial(_by_name, "glass"), _mlp, True, epochs=200, early=True),
        Cell("ionosphere, early stopping", partial(_by_name, "ionosphere"), _mlp, True, epochs=200, early=True),
        Cell("mnist, under-trained", partial(_images, "mnist", size=1000), _convolutions, True, epochs=3),
        Cell("australian, under-trained", partial(_by_name, "australian"), _mlp, True, epochs=3),
        Cell(
            "fashion_mnist, batch-normalised",
            partial(_images, "fashion_mnist", size=1000),
            partial(_convolutions, norm=nn.BatchNorm2d),
            epochs=30,
            **decay,
        ),
        Cell(
            "glass, batch-normalised", partial(_by_name, "glass"), partial(_mlp, norm=nn.BatchNorm1d), True, epochs=200
        ),
        Cell("wine", partial(_of_sklearn, "wine"), _mlp, epochs=100),
        Cell("moons", _moons, partial(_mlp, activation=nn.Tanh), epochs=200),
    ]
    return cells + _made()


CELLS = {cell.name: cell for cell in _cells()}
