"""The demonstration's data and network: scikit-learn's 8x8 digits and a small convolutional network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_plus._progress import progress_bar
from laplace_plus.errors import UnsupportedError
from laplace_plus.experiments.settings import DataSettings, TrainingSettings

Digits = dict[str, TensorDataset]
"""One split of the digits.

``train`` and ``test``: images and labels 0 … C - 1 of the same classes, in the order of the digits; the test images are
never seen in training or tuning. ``ood``: images of the held-out classes; their labels are all zero.
"""


def load_digits(settings: DataSettings, *, seed: int) -> Digits:
    """Split the 1797 images ``[1, 8, 8]``, with grey values in [0, 1] plus noise; a seed always gives the same data.

    UnsupportedError if scikit-learn, which contains the data, is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise UnsupportedError("scikit-learn is not installed.", fix="pip install 'laplace_plus[demo]'") from error

    pixels, digits = datasets.load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(seed)
    images = torch.as_tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = images + settings.noise_std * torch.randn(images.shape, generator=generator)
    classes = torch.as_tensor(digits)
    kept = torch.tensor([digit for digit in range(10) if digit not in settings.held_out_classes])
    known = torch.isin(classes, kept)
    order = torch.nonzero(known).flatten()
    order = order[torch.randperm(len(order), generator=generator)]
    n_train = max(1, min(len(order) - 1, round(settings.train_fraction * len(order))))

    def take(rows: Tensor) -> TensorDataset:
        return TensorDataset(images[rows], torch.searchsorted(kept, classes[rows]))

    unknown = images[~known]
    labels = torch.zeros(len(unknown), dtype=torch.long)  # without meaning
    splits = {"train": take(order[:n_train]), "test": take(order[n_train:])}
    return {**splits, "ood": TensorDataset(unknown, labels)}


def convolutional_network(n_classes: int) -> nn.Sequential:
    """Two convolutions, one pooling, two linear layers: about 21 000 weights. ``[B, 1, 8, 8]`` to logits ``[B, C]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, n_classes),
    )


def train_network(
    digits: Digits, settings: TrainingSettings, *, seed: int, device: str = "cpu", progress: bool = False
) -> nn.Sequential:
    """Train a new network by minibatches, Adam with weight decay and cross-entropy, for a fixed number of epochs.

    Nothing is chosen by results: no early stopping, no validation data. The seed is that of the initial weights and the
    order of minibatches; the global random state does not change. The network returns in evaluation mode.
    """
    n_classes = 1 + max(int(split.tensors[1].max()) for split in digits.values())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = convolutional_network(n_classes).to(device)
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(digits["train"], batch_size=settings.batch_size, shuffle=True, generator=order)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    for _ in progress_bar(range(settings.epochs), enabled=progress, description=f"train (seed {seed})"):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
    return model.eval()
