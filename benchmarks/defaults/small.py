"""The default tuning on networks of few weights: random problems of overlapping Gaussian classes.

    python benchmarks/defaults/small.py [--problems 96] [--page benchmarks/results/defaults-small.md]

The battery has larger networks. Here sizes, activations, classes, their distances, weight decay and the length of
training are drawn at random. Posteriors are ``lp.KFAC``, by their default tuning and by the marginal likelihood.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.defaults.report import ROOT, markdown_line, markdown_rule

TEMPERATURES = torch.logspace(-1, 1.5, 60)

INTRODUCTION = """# The default tuning on networks of few weights

`python benchmarks/defaults/small.py` measured and wrote this page: {n} random problems of 2 or 4 overlapping Gaussian
classes in 2 to 8 dimensions, with 100 to 1000 examples. Networks have one or two hidden layers of 16 or 32 units, up to
1500 weights, and are trained for 50 to 1000 steps of Adam or AdamW. Test NLL on 3000 examples, less the network's, of
`lp.KFAC`. The best temperature is chosen on the test data, so that it is a bound. Networks from which it gains more
than .01 nats are called over-confident.
"""


def problem(number: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A trained network, its training data and test data."""
    draw, generator = random.Random(number), torch.Generator().manual_seed(number)
    torch.manual_seed(number)
    size, dim, width, classes = (draw.choice(c) for c in ((100, 300, 1000), (2, 4, 8), (16, 32), (2, 4)))
    centres = torch.randn(classes, dim, generator=generator) * draw.choice((0.3, 0.8, 2.0))

    def examples(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(0, classes, (count,), generator=generator)
        return centres[y] + torch.randn(count, dim, generator=generator), y

    activation, more = draw.choice((nn.Tanh, nn.ReLU)), draw.random() < 0.5
    hidden = [nn.Linear(width, width), activation()] if more else []
    network = nn.Sequential(nn.Linear(dim, width), activation(), *hidden, nn.Linear(width, classes))
    optimizer = draw.choice((torch.optim.Adam, torch.optim.AdamW))
    steps = optimizer(network.parameters(), lr=1e-2, weight_decay=draw.choice((0.0, 1e-3, 1e-2)))
    train, test = examples(size), examples(3000)
    for _ in range(draw.choice((50, 200, 1000))):
        steps.zero_grad()
        cross_entropy(network(train[0]), train[1]).backward()
        steps.step()
    return network, train, test


def gains(number: int) -> list[float]:
    """Test NLL less the network's: of the best temperature, the default and the marginal likelihood."""
    network, train, (x, y) = problem(number)
    with torch.no_grad():
        outputs = network(x)
    losses = [min(float(cross_entropy(outputs / temperature, y)) for temperature in TEMPERATURES)]
    posterior = lp.KFAC(network, "classification").fit([train])
    for tuner in ("auto", "marginal_likelihood"):
        posterior.fit_prior_precision(tuner)
        losses.append(-float(posterior.predictive(x).log_prob(y).mean()))
    return [loss - float(cross_entropy(outputs, y)) for loss in losses]


def main() -> None:
    """Measure, print each problem, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=96)
    parser.add_argument("--page", type=Path, default=ROOT / "benchmarks" / "results" / "defaults-small.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for number in range(arguments.problems):
        rows.append(gains(number))
        sys.stdout.write(f"{number:3} " + "  ".join(f"{gain:+.3f}" for gain in rows[-1]) + "\n")
    table = torch.tensor(rows)
    lines = [INTRODUCTION.format(n=len(rows))]
    lines += markdown_rule(["", "best temperature", "default", "marginal likelihood"])
    over = table[:, 0] < -0.01
    for title, part in (
        (f"mean of {int(over.sum())} over-confident networks", table[over]),
        ("of the others", table[~over]),
    ):
        lines.append(markdown_line([title, *(f"{value:+.3f}" for value in part.mean(0).tolist())]))
    lines.append(markdown_line(["largest", *(f"{value:+.3f}" for value in table.amax(0).tolist())]))
    losing = (table > 0.005).double().mean(0).tolist()
    lines.append(markdown_line(["share that loses more than .005", *(f"{value:.0%}" for value in losing)]))
    arguments.page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
