"""Posteriors over low-rank adapters: which package is a documentation string from?

    python benchmarks/adapters.py [--seeds 5] [--page benchmarks/results/adapters.md]

The texts are documentation strings of installed packages. A small transformer is pre-trained by guessing masked words
in all of them. It is then adapted by LoRA, without weight decay, to a few labelled texts of eight packages.
Unfamiliar texts are from packages without a label. Five seeds take about half an hour on one core.
"""

from __future__ import annotations

import argparse
import ast
import copy
import math
import random
import re
import sys
import time
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import transformers

import laplace_plus as lp
from benchmarks.defaults.report import markdown_line, markdown_rule
from laplace_plus import metrics

KNOWN = ("torch", "scipy", "numpy", "sklearn", "matplotlib", "transformers", "sympy", "networkx")
UNKNOWN = ("hypothesis", "onnxscript", "timm", "jsonargparse", "fsspec", "jinja2")
LENGTH, WORDS = 48, 4000
TEMPERATURES = torch.logspace(-0.5, 1.5, 80)

INTRODUCTION = """# Posteriors over low-rank adapters

`python benchmarks/adapters.py` measured and wrote this page: {seeds} seeds, other texts and weights in each. A small
transformer of two layers and 64 units, pre-trained on masked words of documentation strings, learns by LoRA from
{train} labelled texts which of {classes} packages a text is from: rank 8 on all linear layers, and a classifier.
Package names are masked. Scores are on {test} other texts. OOD AUROC is against texts of six packages without a label,
by the entropy of the prediction, and by the mutual information. The temperature is fitted to {held} held-out texts,
which no other row sees. Posteriors have their defaults; `lp.TrainingFreeLoRA` takes the training texts as anchors.
Means over seeds, ± the standard error of the difference to the adapted network.
"""


def documentation(package: str, most: int, generator: random.Random) -> list[list[str]]:
    """Words of a package's documentation strings of at least 25 words, without the packages' names."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed: pip install -e '.[test]'")
    found: set[tuple[str, ...]] = set()
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    generator.shuffle(files)
    for file in files:
        if len(found) >= most:
            break
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue
        taken = 0
        for node in ast.walk(tree):
            if taken < 20 and isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                words = re.findall(r"[a-z]+|[^\sa-zA-Z]", text.lower())
                words = ["package" if word in (*KNOWN, *UNKNOWN, "np", "plt", "nx", "sp") else word for word in words]
                if len(words) >= 25:
                    found.add(tuple(words[:LENGTH]))
                    taken += 1
    texts = sorted(map(list, found))
    generator.shuffle(texts)
    return texts[:most]


def encoded(texts: list[list[str]], vocabulary: dict[str, int]) -> dict[str, Tensor]:
    """Padded word numbers ``[N, T]`` (0 pads, 1 is unknown, 2 is masked) and their mask."""
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, words in zip(ids, texts, strict=True):
        row[: len(words)] = torch.tensor([vocabulary.get(word, 1) for word in words])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def pretrained(texts: dict[str, Tensor], steps: int) -> transformers.BertForMaskedLM:
    """A small transformer that guesses masked words."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, pad_token_id=0, **sizes)
    model = transformers.BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(texts["input_ids"]), (32,))
        ids, mask = texts["input_ids"][rows], texts["attention_mask"][rows]
        hidden = (torch.rand(ids.shape) < 0.15) & (ids > 2)
        logits = model(ids.masked_fill(hidden, 2), mask).logits
        optimizer.zero_grad()
        cross_entropy(logits[hidden], ids[hidden]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def adapted(base: nn.Module, texts: dict[str, Tensor], labels: Tensor, seed: int) -> nn.Module:
    """A classifier, adapted by LoRA without weight decay."""
    torch.manual_seed(seed)
    config = copy.deepcopy(base.config)
    config.num_labels = len(KNOWN)
    model = transformers.BertForSequenceClassification(config)
    model.bert.load_state_dict(base.bert.state_dict(), strict=False)
    options = {"r": 8, "lora_alpha": 16, "target_modules": ["query", "key", "value", "dense"], "task_type": "SEQ_CLS"}
    model = peft.get_peft_model(model, peft.LoraConfig(**options)).train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, epochs = torch.optim.Adam(weights, lr=3e-3), 60
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(32):
            logits = model(**{name: values[rows] for name, values in texts.items()}).logits
            optimizer.zero_grad()
            cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def scores(
    test: Tensor, ood: Tensor, labels: Tensor, information: list[Tensor] | None = None, seconds: float = math.nan
) -> list[float]:
    """Accuracy, NLL, ECE, OOD AUROC by entropy and by mutual information, and seconds; NaN for what there is not."""
    found = (
        metrics.accuracy(test, labels),
        metrics.negative_log_likelihood(test, labels),
        metrics.expected_calibration_error(test, labels),
        metrics.ood_auroc(entropy(test), entropy(ood)),
        math.nan if information is None else metrics.ood_auroc(*information),
    )
    return [*(float(value) for value in found), seconds]


def entropy(probabilities: Tensor) -> Tensor:
    """In nats, ``[N]``."""
    return torch.special.entr(probabilities).sum(-1)


def measured(base: nn.Module, data: dict[str, tuple[dict[str, Tensor], Tensor]], seed: int) -> dict[str, list[float]]:
    """Scores and seconds of all rows for one seed."""
    (train, labels), (held, held_labels), (test, test_labels), (ood, _) = (
        data[k] for k in ("train", "held", "test", "ood")
    )
    results: dict[str, list[float]] = {}
    models = [adapted(base, train, labels, 100 * seed + number) for number in range(3)]
    with torch.no_grad():
        logits = [[model(**one).logits for one in (held, test, ood)] for model in models]
    own = [one.softmax(-1) for one in logits[0]]
    results["adapted network"] = scores(own[1], own[2], test_labels)
    losses = torch.stack([cross_entropy(logits[0][0] / t, held_labels) for t in TEMPERATURES])
    best = TEMPERATURES[losses.argmin()]
    warm = [(one / best).softmax(-1) for one in logits[0]]
    results["temperature, held-out"] = scores(warm[1], warm[2], test_labels)
    several = [torch.stack([own[k].softmax(-1) for own in logits]) for k in (1, 2)]
    means = [one.mean(0) for one in several]
    spread = [entropy(one.mean(0)) - entropy(one).mean(0) for one in several]
    results["ensemble of 3 adapters"] = scores(*means, test_labels, spread)

    batches = [
        {**{name: values[i : i + 32] for name, values in train.items()}, "labels": labels[i : i + 32]}
        for i in range(0, len(labels), 32)
    ]
    rows = {
        "`lp.TrainingFreeLoRA`": lambda model: lp.TrainingFreeLoRA(model, "classification"),
        '`lp.KFAC(parameters="lora")`': lambda model: lp.KFAC(model, "classification", parameters="lora"),
        '`lp.Diagonal(parameters="lora")`': lambda model: lp.Diagonal(model, "classification", parameters="lora"),
        '`lp.KFAC(parameters="last_layer")`': lambda model: lp.KFAC(model, "classification", parameters="last_layer"),
    }
    for name, make in rows.items():
        start, generator = time.process_time(), torch.Generator().manual_seed(seed)
        posterior = make(models[0]).fit(batches, generator=generator)
        if posterior.tuners:
            posterior.fit_prior_precision(generator=generator)
        spent = time.process_time() - start
        parts = [posterior.predict([one], generator=generator) for one in (test, ood)]
        information = [one.mutual_information() for one in parts]
        results[name] = scores(parts[0].mean, parts[1].mean, test_labels, information, spent)
    return results


def page(found: list[dict[str, list[float]]], **sizes: int) -> str:
    """The page of results."""
    lines = [INTRODUCTION.format(seeds=len(found), classes=len(KNOWN), **sizes)]
    heads = ["", "accuracy", "NLL", "ECE", "OOD AUROC, entropy", "OOD AUROC, information", "CPU s to fit and tune"]
    lines += markdown_rule(heads)
    reference = torch.tensor([one["adapted network"] for one in found])
    reference[:, 4] = reference[:, 3]  # the network has no mutual information
    for name in found[0]:
        values = torch.tensor([one[name] for one in found])
        mean, difference = values.mean(0), values - reference
        error = difference.std(0) / len(found) ** 0.5
        cells = [
            f"{m:.3f}" + ("" if name == "adapted network" else f" ± {e:.3f}") for m, e in zip(mean, error, strict=True)
        ]
        cells = ["" if m.isnan() else cell for m, cell in zip(mean, cells, strict=True)]
        lines.append(markdown_line([name, *cells[:5], "" if mean[5].isnan() else f"{mean[5]:.1f}"]))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500, help="of pre-training")
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    sizes = {"train": 200, "held": 200, "test": 800, "ood": 400}
    known = [documentation(name, 700, random.Random(0)) for name in KNOWN]
    unknown = [documentation(name, 150, random.Random(0)) for name in UNKNOWN]
    counts = Counter(word for texts in known for text in texts for word in text)
    vocabulary = {word: number + 3 for number, (word, _) in enumerate(counts.most_common(WORDS - 3))}
    base = pretrained(encoded([text for texts in known for text in texts], vocabulary), arguments.steps)
    found = []
    for seed in range(arguments.seeds):
        draw, data, start = random.Random(seed), {}, 0
        order = [draw.sample(texts, len(texts)) for texts in known]
        for part in ("train", "held", "test"):
            each = sizes[part] // len(KNOWN)
            texts = [text for own in order for text in own[start : start + each]]
            labels = torch.arange(len(KNOWN)).repeat_interleave(each)
            data[part], start = (encoded(texts, vocabulary), labels), start + each
        texts = draw.sample([text for own in unknown for text in own], sizes["ood"])
        data["ood"] = encoded(texts, vocabulary), torch.zeros(0)
        found.append(measured(base, data, seed))
        sys.stdout.write(page(found, **sizes))
        sys.stdout.flush()
    if arguments.page is not None:
        arguments.page.write_text(page(found, **sizes))


if __name__ == "__main__":
    main()
