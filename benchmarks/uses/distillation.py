"""Distilled posteriors beside exact ones and last layers: what they cost, how close they are, what exports.

    python benchmarks/uses/distillation.py [--kinds mlp cnn vit lstm lora table resnet18 bert] [--page page.md]

Networks of five kinds tell the digits 0 to 7 of scikit-learn's set; 8 and 9 are other data. ``table`` is a regression.
Ten corruptions of the test images, none of which is among those that are distilled, are shifted inputs. Of ``resnet18``
and ``bert``, networks of ordinary size without training, there are costs only.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.defaults.report import markdown_line, markdown_rule
from laplace_plus import metrics
from laplace_plus.likelihoods.categorical import centring_weights

INTRODUCTION = """# Distilled posteriors

`python benchmarks/uses/distillation.py` measured and wrote this page on one core. `lp.KFAC` over all weights (LoRA: of
the adapters), tuned by default, is distilled on the training inputs with the defaults of `lp.distill`; "last layer" is
`lp.freeze` of `lp.KFAC(parameters="last_layer")`. Costs are CPU times in units of the network's forward pass, of a
batch of 256 and of one input. R² is that of log-variances and ranks are Spearman's correlations of variances: of
outputs, and for classes of a logit's differences from others that may win. AUROC is that of other data, by the entropy
of the prediction, or the variance of real outputs. `resnet18` (images of 64 × 64) and `bert` (4 layers of 256 units, 64
tokens) are untrained and show what the module costs beside a network of ordinary size. "With more copies" has
`copies=24, width=64, steps=4000`: there are 720 inputs to fit to.

An LSTM misses R² of .95 and ranks of .9, as what its gates do at each step enters no layer. A network that takes
microseconds for an input pays for some twenty small operations of the head.
"""


class Block(nn.Module):
    """A layer of a transformer of d units, with four heads."""

    def __init__(self, d: int):
        super().__init__()
        self.one, self.two = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.wide, self.narrow = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[B, T, d]``."""
        q, k, v = (
            own(self.one(x)).unflatten(-1, (4, -1)).transpose(1, 2) for own in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.two(x))))


class Vit(nn.Module):
    """Patches of 2 × 2 pixels, two blocks of 32 units, a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Conv2d(1, 32, 2, 2), nn.Sequential(Block(32), Block(32))
        self.start, self.places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(0.02 * torch.randn(1, 17, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``[B, 1, 8, 8]``."""
        tokens = torch.cat([self.start.expand(len(x), -1, -1), self.embed(x).flatten(2).mT], 1)
        return self.head(self.norm(self.body(tokens + self.places))[:, 0])


class Lstm(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images ``[B, 1, 8, 8]``."""
        return self.head(self.rows(x[:, 0])[0][:, -1])


def mlp() -> nn.Module:
    """Of two hidden layers of 256 units."""
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)]
    return nn.Sequential(*layers)


def cnn() -> nn.Module:
    """LeNet's kind."""
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    body = [first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))


@dataclass
class Problem:
    """A trained network with its data; ``shifted`` are corrupted test inputs by name, ``other`` those of elsewhere."""

    model: nn.Module
    kind: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    shifted: dict[str, Tensor]
    other: Tensor
    parameters: str = "all"


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 60, rate: float = 3e-3) -> nn.Module:
    """By AdamW and one cycle."""
    torch.manual_seed(0)
    weights = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * math.ceil(len(x) / 64))
    loss = F.mse_loss if y.is_floating_point() else F.cross_entropy
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned about their centre."""
    a = math.radians(degrees)
    turn = torch.tensor([[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0]]).expand(len(x), 2, 3)
    grid = F.affine_grid(turn, list(x.shape), align_corners=False)
    return F.grid_sample(x - x.min(), grid, align_corners=False) + x.min()


def digits(name: str) -> Problem:
    """A network of one of five kinds, for the digits 0 to 7."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    x = (images.float().view(-1, 1, 8, 8) / 16 - 0.305) / 0.376
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    known, other = order[labels[order] < 8], order[labels[order] >= 8]
    train, test = known[:900], known[900:]
    model, parameters = trained({"mlp": mlp, "cnn": cnn, "lstm": Lstm}.get(name, Vit)(), x[train], labels[train]), "all"
    if name == "lora":
        import peft  # noqa: PLC0415

        base = trained(Vit(), x[train], (3 * labels[train] + 1) % 8, epochs=15)
        options = {"target_modules": ["query", "value", "wide", "narrow"], "modules_to_save": ["head"]}
        model, parameters = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, **options)), "lora"
        model = trained(model, x[train], labels[train], epochs=30, rate=5e-3)
    low, clean, source = x.min(), x[test[:200]], torch.Generator().manual_seed(5)
    noise = torch.randn(clean.shape, generator=source)
    covered = clean.clone()
    covered[:, :, 2:5, 2:5] = low
    shifted = {f"turned by {angle}°": rotated(clean, angle) for angle in (15, 30, 60)}
    shifted |= {f"noise {size}": clean + size * noise for size in (0.3, 0.6, 1.0)}
    shifted |= {"blurred": F.avg_pool2d(F.pad(clean - low, (1,) * 4), 3, 1) + low, "covered": covered}
    shifted |= {"moved": clean.roll(1, -1), "half the contrast": low + (clean - low) / 2}
    return Problem(
        model, "classification", (x[train], labels[train]), (x[test], labels[test]), shifted, x[other], parameters
    )


def table() -> Problem:
    """A network of 2 × 100 units for two functions of six numbers."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(1600, 6, generator=source)
    y = torch.stack([(2 * x[:, 0]).sin() * x[:, 1] + x[:, 2].square() / 2, x[:, 3] * x[:, 4]], 1)
    y = y + 0.1 * torch.randn(1600, 2, generator=source)
    layers = [nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 2)]
    model, clean = trained(nn.Sequential(*layers), x[:1000], y[:1000], epochs=100), x[1000:]
    shifted = {f"noise {s}": clean + s * torch.randn(clean.shape, generator=source) for s in (0.5, 1.0, 2.0)}
    shifted |= {f"times {scale}": scale * clean for scale in (0.5, 2.0, 3.0)} | {"plus 1": clean + 1}
    return Problem(model, "regression", (x[:1000], y[:1000]), (clean, y[1000:]), shifted, 2 * clean + 1)


def seconds(call: Callable[[], Any], least: float = 0.05) -> float:
    """CPU time of one call: the median of five measurements, or of one where a call takes long."""
    start = time.process_time()
    call()
    if (first := time.process_time() - start) > 2:  # noqa: PLR2004
        return first
    found = []
    for _ in range(5):
        start, count = time.process_time(), 0
        while time.process_time() - start < least:
            call()
            count += 1
        found.append((time.process_time() - start) / count)
    return sorted(found)[2]


def variances(posterior: lp.posteriors.Posterior, x: Tensor) -> Tensor:
    """Of the outputs, ``[N, C]``; of classes half those of differences, as distilled modules give them."""
    kind, heat = "independent" if posterior.likelihood.is_classifier else "diagonal", posterior.output_temperature
    parts = [posterior.functional_posterior(some, outputs=kind) for some in x.split(100)]
    mean, found = (torch.cat(own) for own in zip(*parts, strict=True))
    mean, found = mean / heat, found / heat**2
    if not posterior.likelihood.is_classifier:
        return found
    w = centring_weights(mean)
    return (found + ((w * found).sum(-1, keepdim=True) - w * found) / (1 - w)) / 2


def costs(model: nn.Module, call: Callable[[Any], Any], x: Any) -> list[float]:
    """Of a batch of 256 and of one input, in units of the network's forward passes."""
    with torch.no_grad():
        return [seconds(lambda n=n: call(x[:n])) / seconds(lambda n=n: model(x[:n])) for n in (256, 1)]


def ordinary(name: str) -> Iterator[tuple[str, list[float]]]:
    """Costs beside a ResNet-18 or a small BERT."""
    torch.manual_seed(0)
    if name == "bert":
        import transformers  # noqa: PLC0415

        shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        config = transformers.BertConfig(vocab_size=2000, num_labels=10, **shape)
        model, x = transformers.BertForSequenceClassification(config), torch.randint(0, 2000, (256, 64))
    else:
        import torchvision  # noqa: PLC0415

        model, x = torchvision.models.resnet18(num_classes=10), torch.randn(256, 3, 64, 64)
    posterior = lp.KFAC(model.eval(), "classification", parameters="last_layer")
    posterior.fit([(x[:20], torch.arange(20) % 10)])
    yield "distilled", costs(model, lp.distill(posterior, x[:40], copies=1, steps=20), x)


def measured(name: str) -> Iterator[tuple[str, list[float]]]:
    """The rows of one network."""
    torch.manual_seed(0)
    problem = table() if name == "table" else digits(name)
    (x, y), (clean, wanted), is_classifier = problem.train, problem.test, problem.kind == "classification"
    data = list(zip(x.split(100), y.split(100), strict=True))
    exact, last = (
        lp.KFAC(problem.model, problem.kind, parameters=own).fit(data).fit_prior_precision()
        for own in (problem.parameters, "last_layer")
    )
    sets = {"test": clean, "other": problem.other, "shifted": torch.cat([*problem.shifted.values()])}
    found = {part: variances(exact, own).log() for part, own in sets.items()}

    def row(call: Any, parts: dict[str, Tensor]) -> list[float]:
        predictions = [[call(some) for some in own.split(100)] for own in (clean, problem.other)]
        mean, other = (torch.cat([one.mean for one in own]) for own in predictions)
        if is_classifier:
            nll = -float(mean.gather(1, wanted[:, None]).log().mean())
            doubts = [torch.special.entr(p).sum(-1) for p in (mean, other)]
        else:
            normal = torch.distributions.Normal(mean, torch.cat([one.variance for one in predictions[0]]).sqrt())
            nll = -float(normal.log_prob(wanted).sum(-1).mean())
            doubts = [parts["test"].exp().mean(-1), parts["other"].exp().mean(-1)]
        aurocs = [float(metrics.ood_auroc(*doubts))]
        agreements = [agreed(parts[part], found[part]) for part in ("test", "shifted")]
        return [*costs(problem.model, call, clean), *agreements[0], *agreements[1], nll, *aurocs]

    with torch.no_grad():
        yield "exact", row(exact.predictive, found)
        if name != "lora":
            yield "last layer", row(lp.freeze(last), {part: variances(last, own).log() for part, own in sets.items()})
    for label, more in (("distilled", {}), ("with more copies", {"copies": 24, "width": 64, "steps": 4000})):
        start = time.process_time()
        module = lp.distill(exact, x, **more)
        sys.stderr.write(f"{name}: {module.quality}, {time.process_time() - start:.0f} s\n")
        with torch.no_grad():
            logs = {part: module(own).functional_variance.log() for part, own in sets.items()}
            yield label, row(module, logs)


def agreed(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """R² of ``[N, C]``, and Spearman's correlation, the mean over outputs."""
    spread = (wanted - wanted.mean(0)).square().sum()
    one, other = (own.argsort(0).argsort(0).double() for own in (found, wanted))
    one, other = ((own - own.mean(0)) / own.std(0, correction=0) for own in (one, other))
    return float(1 - (found - wanted).square().sum() / spread), float((one * other).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kinds", nargs="*", default=["mlp", "cnn", "vit", "lstm", "lora", "table", "resnet18", "bert"]
    )
    parser.add_argument("--page")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    columns = ["", "", "cost, 256", "cost, 1", "R², test", "ranks, test", "R², shifted", "ranks, shifted", "NLL"]
    columns += ["AUROC"]
    lines = [INTRODUCTION, *markdown_rule(columns)]
    for kind in arguments.kinds:
        for label, values in (ordinary if kind in ("resnet18", "bert") else measured)(kind):
            lines.append(
                markdown_line([kind, label, *(f"{v:.1f}" for v in values[:2]), *(f"{v:.3f}" for v in values[2:])])
            )
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    if arguments.page:
        Path(arguments.page).write_text("\n".join(lines) + "\n", encoding="utf-8")
