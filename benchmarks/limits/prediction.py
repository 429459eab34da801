"""Predictions of KFAC beside the operations that they are made of.

    python benchmarks/limits/prediction.py --rows FILE --weights FOLDER [--networks NAME ...] [--page PAGE]

Each row is measured once and kept in the file of rows, from which the page is written. IM2Deep needs ``pip install
im2deep==2.0.2`` and, in the folder of weights, the ``peptides.pt`` that ``benchmarks/real/run.py`` keeps.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models import build, multilayer, train

import laplace_plus as lp
from laplace_plus.network.capture import Capture
from laplace_plus.network.gradients import Gradients

PAGE = """# What an exact prediction costs

`python benchmarks/limits/prediction.py` measured and wrote this page: CPU time on one thread of a busy machine ({0}),
the least of several calls, in units of the network's own forward pass over the same inputs. Networks are trained, that
of BERT's size apart. The curvature is that of some hundred rows; its prior precision is 100. Where less is asked for
than the limit, other mathematics would be needed; a few microseconds of network are outweighed by Python's calls.

With C outputs a prediction takes a forward pass, C backward passes to the outputs of layers, and products with the
factors. In a layer with i inputs (a bias is one), o outputs and S positions (tokens, pixels, steps) these are, in
multiply-adds for each example:

| | one position | S positions |
|---|---|---|
| inputs in the eigenbasis | i² | i² × the lesser of S and C o |
| gradients in the eigenbasis | C o² | C o² × the lesser of S and i |
| sums over positions | | C S o i |
| weighting by variances | o i + C² o | C² o i |

Attention is four linear layers with T positions; a convolution one with C k² inputs; a recurrent layer has its steps as
positions. *Limit* is the time that plain calls of torch take for a forward pass, these backward passes, and matrix
products of these shapes. *Now* is `posterior.functional_posterior(x)`, and *distribution* what `predictive` adds to it.

| network | inputs | C | forward, ms | limit | now | now / limit | distribution | asked for |
|---|---|---|---|---|---|---|---|---|
{1}
"""

Case = tuple[nn.Module, str, list[Any], Any, dict[str, Any], dict[str, Any]]
"""Model, likelihood, data to fit to, inputs, options of KFAC and of the functional posterior."""


class Forecaster(nn.Module):
    """The sum of a sequence's last values, by an LSTM of 64 units."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 30, 1]`` to ``[B, 1]``."""
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """Outputs of each token, or of their mean."""

    def __init__(self, width: int, depth: int, heads: int, n_outputs: int, pooled: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True)
        self.table, self.pooled = nn.Embedding(1000, width), pooled
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens ``[B, T]`` to ``[B, C]`` or ``[B, T, C]``."""
        found = self.body(self.table(x))
        return self.head(found.mean(1) if self.pooled else found)


def learnt(model: nn.Module, x: Tensor, y: Tensor, steps: int = 100) -> nn.Module:
    """The model after so many steps of Adam."""
    loss = nn.functional.mse_loss if y.is_floating_point() else nn.functional.cross_entropy
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model.eval()


def simple(
    model: nn.Module, x: Tensor, y: Tensor, n: int = 256, outputs: Any = None, steps: int = 100, **options: Any
) -> Case:
    """A small network of a function of its inputs."""
    kind = "regression" if y.is_floating_point() else "classification"
    data = [*zip(x[:256].split(64), y[:256].split(64), strict=True)]
    model = learnt(model, x, y, steps) if steps else model.eval()
    return model, kind, data, x[:n], options, {} if outputs is None else {"outputs": outputs}


def case(name: str, weights: Path) -> Case:
    """Of that name."""
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    if name == "peptides":
        from benchmarks.real.peptides import network  # noqa: PLC0415  -- an extra

        own = torch.load(weights / "peptides.pt")
        batches = [slice(n, n + 100) for n in (0, 100, 200)]
        data = [(tuple(column[rows] for column in own["inputs"]), own["targets"][rows]) for rows in batches]
        return network(), "regression", data, tuple(column[1000:1256] for column in own["inputs"]), {}, {}
    if name in ("lenet", "mlp1024", "resnet18"):
        train(name, weights)
        made = build(name, weights)
        last: dict[str, Any] = {"parameters": "last_layer"} if name == "resnet18" else {}
        inputs = made.test_inputs[: 1 if last else 256]
        return made.model, made.likelihood, made.batches[:8], inputs, last, {}
    if name == "lstm":
        steps = torch.randn(512, 30, 1)
        return simple(Forecaster(), steps, steps[:, -3:].sum(1))
    if name == "mlp5":
        return simple(multilayer(50, 100, 100, 5), x[:, :50], x[:, :5].argmax(1))
    if name in ("one value", "one of ten"):
        y = x[:, :1].sin() if name == "one value" else x[:, :10].argmax(1)
        return simple(multilayer(64, 32, 32, 1 if name == "one value" else 10), x, y, 1)
    if name.startswith("300"):
        model = simple(multilayer(64, 256, 256, 300), x, (x[:, :10].argmax(1) * 30))[0]
        chosen = "diagonal" if name.endswith("variances") else model(x[:64]).topk(5).indices
        return simple(model, x, (x[:, :10].argmax(1) * 30), 64, chosen, 0)
    tokens = torch.randint(1000, (512, 32))
    if name == "transformer":
        return simple(Transformer(128, 4, 4, 2, True), tokens, (tokens < 500).sum(1).gt(16).long(), 64, steps=30)
    labels = (tokens < 500).long()
    return simple(Transformer(768, 12, 12, 9, False), tokens[:16], labels[:16], 4, steps=0, parameters="last_layer")


NETWORKS = {
    "peptides": ("IM2Deep: 10 Conv1d, 9 Linear", 4),
    "lenet": ("LeNet", 13),
    "mlp1024": ("784-1024-1024-10", 13),
    "lstm": ("LSTM of 64 units, 30 steps", 10),
    "mlp5": ("50-100-100-5", 12),
    "transformer": ("transformer, 4 layers of 128, 32 tokens", None),
    "tokens": ("BERT's size, 9 outputs for each of 32 tokens, last layer", None),
    "300, variances": ('300 classes, 64-256-256, `outputs="diagonal"`', None),
    "300, top five": ("300 classes, 64-256-256, `outputs=` the five most probable", None),
    "one value": ("64-32-32-1", 0.5),
    "one of ten": ("64-32-32-10", 0.6),
    "resnet18": ("ResNet-18, last layer", 2),
}
"""What they are, and what was asked for: forward passes; milliseconds of small networks with one input."""


def least(call: Callable[[], Any], seconds: float = 0.4) -> float:
    """CPU seconds of the quickest call."""
    call()
    found, started = [], time.process_time()
    while len(found) < 2 or time.process_time() - started < seconds:  # noqa: PLR2004
        before = time.process_time()
        call()
        found.append(time.process_time() - before)
    return min(found)


def products(o: int, i: int, s: int, c: int, n: int, each: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Matrices whose products a layer takes for n examples, in the cheapest order; each output meets so many others."""

    def pair(*shape: int) -> tuple[Tensor, Tensor]:
        *lead, rows, inner, columns = shape
        return torch.randn(*lead, rows, inner), torch.randn(*lead, inner, columns)

    yield pair(n * min(s, c * o), i, i)
    yield pair(n * c * min(s, i), o, o)
    if s == 1:
        yield pair(n, i, o)
        yield pair(n, c, o, each)
    else:
        yield pair(n, c * o, s, i)
        yield pair(n, c, o * i, each) if c > 1 else pair(n, o * i, 1)


def backward(model: nn.Module, x: Any, c: int) -> float:
    """Seconds of a forward pass with a graph and of c backward passes to the outputs of layers."""
    found: list[Tensor] = []
    hooks = []
    for layer in model.modules():
        if not [*layer.children()] and [*layer.parameters(recurse=False)]:
            inner = isinstance(layer, nn.LSTM)  # which has no outputs of steps; a pass through it reaches its input
            hooks.append(
                layer.register_forward_hook(lambda _, given, own, inner=inner: found.append(given[0] if inner else own))
            )
    inputs = x if isinstance(x, tuple) else (x,)
    inputs = tuple(own.clone().requires_grad_(own.is_floating_point()) for own in inputs)

    def passes() -> None:
        found.clear()
        outputs = model(*inputs).flatten(1)
        units = torch.eye(outputs.shape[1])[:c].unsqueeze(1).expand(c, *outputs.shape).contiguous()
        places = [own for own in found if own.requires_grad]
        if units.nbytes * len(places) < 2**20:  # of small networks, together
            torch.autograd.grad(outputs, places, units, is_grads_batched=True, allow_unused=True)
        else:
            for unit in units:
                torch.autograd.grad(outputs, places, unit, retain_graph=True, allow_unused=True)

    seconds = least(passes)
    for hook in hooks:
        hook.remove()
    return seconds


def measured(name: str, weights: Path) -> dict[str, Any]:
    """A row of the table."""
    model, likelihood, data, x, options, asked = case(name, weights)
    posterior = lp.KFAC(model, likelihood, prior_precision=100.0, **options).fit(data)
    inputs = x if isinstance(x, tuple) else (x,)
    n, network = len(inputs[0]), posterior.network
    with torch.no_grad():
        forward, shape = least(lambda: model(*inputs)), model(*inputs).shape
    c = 5 if "top" in name else shape[-1]
    now = least(lambda: posterior.functional_posterior(x, **asked), 0.8)
    whole = now if asked else least(lambda: posterior.predictive(x).mean, 0.8)
    capture = Capture(network, x)
    limit = forward if capture.pointwise else backward(model, x, c)
    blocks = [own for _, own in Gradients(network, capture).blocks(torch.zeros(1, *capture.outputs.shape))]
    for own in blocks:
        (g, o, i), s = own.shape, getattr(own, "n_positions", 1)
        rows = len(capture.outputs)
        few = max(1, min(rows, 2**24 // (g * c * (o * i if s > 1 else o) + s * (i + c * o))))
        units = 1 if capture.pointwise else c
        each = 1 if name.endswith("variances") else units
        for left, right in products(o, i, s, units, g * few, each):
            limit += least(lambda left=left, right=right: left @ right, 0.05) * rows / few
    with torch.no_grad():
        forward = min(forward, least(lambda: model(*inputs)))
    found = {"network": name, "inputs": n, "outputs": c, "forward": forward, "limit": limit}
    return found | {"now": now, "distribution": max(0.0, whole - now), "torch": torch.__version__}


def line(row: dict[str, Any]) -> str:
    """Of the page."""
    text, bar = NETWORKS[row["network"]]
    unit, singles = row["forward"], row["network"].startswith("one ")
    cells = [text, str(row["inputs"]), str(row["outputs"]), f"{1e3 * unit:.3g}", f"{row['limit'] / unit:.1f}"]
    cells += [f"{row['now'] / unit:.1f}", f"{row['now'] / row['limit']:.2f}", f"{row['distribution'] / unit:.1f}"]
    asked = "" if bar is None else f"{bar:g}"
    asked = f"{bar:g} ms; {1e3 * (row['now'] + row['distribution']):.2f} ms now" if singles else asked
    return "| " + " | ".join([*cells, asked]) + " |"


def main() -> None:
    """Measure what is not in the file of rows, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--networks", nargs="*", default=[*NETWORKS])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = [json.loads(own) for own in options.rows.read_text().splitlines()] if options.rows.exists() else []
    for name in options.networks:
        if name in [row["network"] for row in rows] or (name == "peptides" and find_spec("im2deep") is None):
            continue
        rows.append(measured(name, options.weights))
        with options.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    rows.sort(key=lambda row: [*NETWORKS].index(row["network"]))
    if options.page is not None and rows:
        where = f"Python {platform.python_version()}, torch {rows[0]['torch']}"
        options.page.write_text(PAGE.format(where, "\n".join(map(line, rows))))


if __name__ == "__main__":
    main()
