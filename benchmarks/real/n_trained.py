"""A posterior of 3000 of 60 000 images that count as all of them, beside the posterior of all.

    python benchmarks/real/n_trained.py --data FOLDER [--sets mnist fashion_mnist]

``FOLDER/<set>`` holds the four files of the set. A convolutional network of 42 000 weights is trained on all images
for four epochs; the prior precision is that of the greatest evidence. Printed are that of all images and, for three
draws of 3000, the logarithm of the ratio of precisions and the difference of NLL on 4000 test images.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp

Batches = list[tuple[Tensor, Tensor]]
CLASSES = (
    ("KFAC", lp.KFAC, {}),
    ("KFAC, last layer", lp.KFAC, {"parameters": "last_layer"}),
    ("Diagonal", lp.Diagonal, {}),
)


def images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images ``[N, 1, 28, 28]`` and labels."""
    files = sorted(folder.glob(f"{part}-*.gz"))
    pixels, labels = (gzip.decompress(file.read_bytes()) for file in files)
    x = torch.frombuffer(bytearray(pixels[16:]), dtype=torch.uint8).reshape(-1, 1, 28, 28)
    return x.float() / 255, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """The network after four epochs of Adam."""
    torch.manual_seed(0)
    body = nn.Conv2d(1, 12, 5, 2), nn.ReLU(), nn.Conv2d(12, 24, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(600, 64)
    model = nn.Sequential(*body, nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    for _ in range(4):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def cut(x: Tensor, y: Tensor, rows: Tensor) -> Batches:
    """Batches of some rows."""
    return [(x[some], y[some]) for some in rows.split(500)]


def nll(posterior: lp.posteriors.Posterior, data: Batches) -> float:
    """The mean negative log-likelihood."""
    losses = torch.cat([-posterior.predictive(x).log_prob(y) for x, y in data])
    return float(losses.mean())


def say(text: str) -> None:
    """Print a line now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["mnist", "fashion_mnist"])
    options = parser.parse_args()
    for name in options.sets:
        x, y = images(options.data / name, "train")
        test = cut(*images(options.data / name, "t10k"), torch.arange(4000))
        model = trained(x, y)
        for label, cls, keywords in CLASSES:
            whole = cls(model, "classification", **keywords).fit(cut(x, y, torch.arange(len(x))))
            whole.fit_prior_precision("marginal_likelihood")
            precision, loss = float(whole.prior_precision.mean()), nll(whole, test)
            say(f"{name}, {label}: {len(x)} images have precision {precision:.1f}, NLL {loss:.4f}")
            for seed in range(3):
                rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:3000]
                part = cls(model, "classification", **keywords).fit(cut(x, y, rows), n_trained=len(x))
                part.fit_prior_precision("marginal_likelihood")
                ratio = math.log(float(part.prior_precision.mean()) / precision)
                say(f"    3000: log ratio {ratio:+.3f}, NLL {nll(part, test) - loss:+.4f}")


if __name__ == "__main__":
    main()
