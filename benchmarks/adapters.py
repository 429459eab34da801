"""Posteriors over low-rank adapters of a small transformer, beside a temperature and an ensemble.

    python benchmarks/adapters.py [--task digits] [--seeds 5] [--page benchmarks/results/adapters.md] [--keep folder]

``documentation``: which package is a documentation string from? The texts are those of installed packages. The
transformer is pre-trained by guessing masked words in all of them. It is then adapted by LoRA, without weight decay, to
a few labelled texts of eight packages. Unfamiliar texts are from packages without a label. Five seeds take about half
an hour on one core. ``digits``: the same with the pixels of scikit-learn's digits as 64 tokens, the digits 0 to 7 as
classes, and 8 and 9 as unfamiliar. ``--keep`` goes on with the networks and rows that a folder has; ``--rows`` takes
only rows whose names contain one of some words.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
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

INTRODUCTION = """# Posteriors over low-rank adapters{title}

`python benchmarks/adapters.py{arguments}` measured and wrote this page: {seeds} seeds. {task} Scores are on {test}
other examples. AUROC is that of telling them from {ood} unfamiliar ones, or from {random} of random tokens, by the
entropy of the prediction. The temperature is fitted to {held} held-out examples; rows that see these, too, say so.
Posteriors have their defaults; `lp.TrainingFreeLoRA` takes the training examples as anchors.
Means over seeds, ± the standard error of the difference to the adapted network.
"""

TASKS = {
    "documentation": """Other texts and weights in each. A small transformer of two layers and 64 units, pre-trained on
masked words of documentation strings, learns by LoRA from {train} labelled texts which of 8 packages a text is from:
rank 8 on all linear layers, and a classifier. Package names are masked. Unfamiliar texts are from six others.""",
    "digits": """Other images and weights in each. A small transformer of two layers and 32 units, pre-trained on masked
pixels of scikit-learn's digits (64 tokens, 17 grey levels), learns by LoRA from {train} labelled images which of the
digits 0 to 7 they show: rank 8 on all linear layers, and a classifier. Unfamiliar images show 8 and 9.""",
}
COLUMNS = ["accuracy", "NLL", "ECE", "AUROC, unfamiliar", "AUROC, random"]
KINDS, UNLIKE = ["entropy", "information", "epistemic"], ["unfamiliar", "random"]
DOUBTS = """Which doubt tells unfamiliar and random inputs apart: AUROC of the entropy of the prediction, of the mutual
information, and of the epistemic variance, less that of the temperature's entropy, paired by seed:"""
CURVE = """What a scale of `lp.TrainingFreeLoRA` does, whichever is found. The rise of NLL is that on the training
anchors by the network's own labels; accuracy is the difference to the network. Means over seeds:"""
SCALES = 0.01 * 2.0 ** torch.arange(5)
ADAPTED, WARMED = "adapted network", "temperature, held-out"


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


def inputs_of(ids: Tensor) -> dict[str, Tensor]:
    """Token numbers ``[N, T]`` (0 pads, 1 is unknown, 2 is masked) with their mask."""
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def encoded(texts: list[list[str]], vocabulary: dict[str, int]) -> Tensor:
    """Padded word numbers ``[N, T]``."""
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.long)
    for row, words in zip(ids, texts, strict=True):
        row[: len(words)] = torch.tensor([vocabulary.get(word, 1) for word in words])
    return ids


Parts = dict[str, tuple[dict[str, Tensor], Tensor]]
"""Inputs and labels for adapting (``train``), held out, for ``test``, unfamiliar (``ood``), and ``random`` tokens."""


def noise(words: int, length: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """200 texts of uniformly random tokens."""
    ids = torch.randint(3, words, (200, length), generator=torch.Generator().manual_seed(seed))
    return inputs_of(ids), torch.zeros(0)


def texts_of_packages(steps: int, kept: Path | None = None) -> tuple[nn.Module, Callable[[int], Parts]]:
    """The pre-trained network of ``"documentation"``, and the data of a seed."""
    known = [documentation(name, 700, random.Random(0)) for name in KNOWN]
    unknown = [documentation(name, 150, random.Random(0)) for name in UNKNOWN]
    counts = Counter(word for texts in known for text in texts for word in text)
    vocabulary = {word: number + 3 for number, (word, _) in enumerate(counts.most_common(WORDS - 3))}
    ids = encoded([text for texts in known for text in texts], vocabulary)
    base = pretrained(ids, steps, WORDS, units=64, share=0.15, dropout=0.1, kept=kept)

    def parts(seed: int) -> Parts:
        draw, data, start = random.Random(seed), {}, 0
        order = [draw.sample(texts, len(texts)) for texts in known]
        for part, size in (("train", 200), ("held", 200), ("test", 800)):
            each = size // len(KNOWN)
            texts = [text for own in order for text in own[start : start + each]]
            labels = torch.arange(len(KNOWN)).repeat_interleave(each)
            data[part], start = (inputs_of(encoded(texts, vocabulary)), labels), start + each
        texts = draw.sample([text for own in unknown for text in own], 400)
        data["ood"] = inputs_of(encoded(texts, vocabulary)), torch.zeros(0)
        return data | {"random": noise(WORDS, LENGTH, seed)}

    return base, parts


def pixels_of_digits(steps: int, kept: Path | None = None) -> tuple[nn.Module, Callable[[int], Parts]]:
    """The pre-trained network of ``"digits"``, and the data of a seed."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    ids = images.long() + 3
    base = pretrained(ids, steps, 20, units=32, share=0.3, dropout=0.0, kept=kept)

    def parts(seed: int) -> Parts:
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
        known, unknown = order[labels[order] < 8], order[labels[order] >= 8]
        rows = {"train": known[:200], "held": known[200:400], "test": known[400:800], "ood": unknown[:200]}
        data = {part: (inputs_of(ids[own]), labels[own]) for part, own in rows.items()}
        return data | {"random": noise(20, 64, seed)}

    return base, parts


def pretrained(
    ids: Tensor, steps: int, vocabulary: int, units: int, share: float, dropout: float, kept: Path | None
) -> transformers.BertForMaskedLM:
    """A small transformer that guesses masked ones of the tokens ``[N, T]``; a kept one is taken."""
    torch.manual_seed(0)
    sizes = {"hidden_size": units, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * units}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    shape = {"vocab_size": vocabulary, "max_position_embeddings": ids.shape[1], "pad_token_id": 0}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**shape, **sizes, **dropouts)).train()
    if kept is not None and kept.exists():
        model.load_state_dict(torch.load(kept))
        return model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        batch = ids[torch.randint(len(ids), (32,))]
        hidden = (torch.rand(batch.shape) < share) & (batch > 2)
        logits = model(batch.masked_fill(hidden, 2), (batch > 0).long()).logits
        optimizer.zero_grad()
        cross_entropy(logits[hidden], batch[hidden]).backward()
        optimizer.step()
        schedule.step()
    if kept is not None:
        torch.save(model.state_dict(), kept)
    return model.eval()


def adapted(
    base: nn.Module, texts: dict[str, Tensor], labels: Tensor, seed: int, kept: Path | None = None
) -> nn.Module:
    """A classifier of eight classes, adapted by LoRA without weight decay; a kept one is taken."""
    torch.manual_seed(seed)
    config = copy.deepcopy(base.config)
    config.num_labels = 8
    model = transformers.BertForSequenceClassification(config)
    model.bert.load_state_dict(base.bert.state_dict(), strict=False)
    options = {"r": 8, "lora_alpha": 16, "target_modules": ["query", "key", "value", "dense"], "task_type": "SEQ_CLS"}
    model = peft.get_peft_model(model, peft.LoraConfig(**options)).train()
    if kept is not None and kept.exists():
        model.load_state_dict(torch.load(kept))
        return model.eval()
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
    if kept is not None:
        torch.save(model.state_dict(), kept)
    return model.eval()


def scores(parts: list[Tensor], labels: Tensor, doubts: Doubts | None = None, seconds: float = math.nan) -> list[float]:
    """The columns of the page, of predictions ``[N, C]`` on test, unfamiliar and random inputs; NaN for none.

    ``doubts`` are the mutual information and the epistemic variance on each of the three.
    """
    test = parts[0]
    kinds = [[entropy(one) for one in parts], *(doubts or ())]
    found = [
        metrics.accuracy(test, labels),
        metrics.negative_log_likelihood(test, labels),
        metrics.expected_calibration_error(test, labels),
        *(metrics.ood_auroc(own[0], other) for own in kinds for other in own[1:]),
    ]
    return [*(float(value) for value in found), *[math.nan] * (9 - len(found)), seconds]


Doubts = tuple[list[Tensor], list[Tensor]]
Found = tuple[dict[str, list[float]], list[list[float]]]
Asks = Callable[[str], bool]


def entropy(probabilities: Tensor) -> Tensor:
    """In nats, ``[N]``."""
    return torch.special.entr(probabilities).sum(-1)


def measured(base: nn.Module, data: Parts, seed: int, found: Found, asks: Asks, kept: Path | None) -> None:
    """Scores and seconds of the rows that are asked for, for one seed, into ``found``.

    And what a scale of noise does, whichever is found. ``asks`` writes what there is, and says whether to go on with a
    row. Networks are kept in files that begin as ``kept``.
    """
    (train, labels), (held, held_labels), (test, test_labels) = (data[k] for k in ("train", "held", "test"))
    asked, (results, curve) = [test, data["ood"][0], data["random"][0]], found

    @cache
    def network(number: int) -> tuple[nn.Module, list[Tensor]]:
        file = None if kept is None else kept.with_name(f"{kept.name}-{number}.pt")
        model = adapted(base, train, labels, 100 * seed + number, file)
        with torch.no_grad():
            return model, [model(**one).logits for one in (held, *asked)]

    model, logits = network(0)
    results[ADAPTED] = scores([one.softmax(-1) for one in logits[1:]], test_labels)
    losses = torch.stack([cross_entropy(logits[0] / t, held_labels) for t in TEMPERATURES])
    results[WARMED] = scores([(one / TEMPERATURES[losses.argmin()]).softmax(-1) for one in logits[1:]], test_labels)
    batches, held_out = (
        [
            {**{name: values[i : i + 100] for name, values in inputs.items()}, "labels": own[i : i + 100]}
            for i in range(0, len(own), 100)
        ]
        for inputs, own in ((train, labels), (held, held_labels))
    )

    def rows(posterior: lp.Posterior, tunings: dict[str, dict[str, Any] | None]) -> None:
        """One fit, and each way of tuning after it; None is for none."""
        wanted = [name for name in tunings if asks(name)]
        start = time.process_time()
        if wanted:
            posterior.fit(batches, generator=torch.Generator().manual_seed(seed))
        fitting = time.process_time() - start
        n = {"n_samples": 10} if isinstance(posterior, lp.TrainingFreeLoRA) else {}
        for name in wanted:
            start, generator, tuning = time.process_time(), torch.Generator().manual_seed(seed), tunings[name]
            if tuning is not None:
                posterior.fit_prior_precision(generator=generator, **tuning)
            spent = fitting + time.process_time() - start
            parts = [posterior.predict([one], generator=generator, **n) for one in asked]
            doubts = [one.mutual_information() for one in parts], [one.epistemic.sum(-1) for one in parts]
            results[name] = scores([one.mean for one in parts], test_labels, doubts, spent)
            asks("")

    kind, lora, tuned = "classification", {"parameters": "lora"}, {"data": held_out}
    free = {
        "`lp.TrainingFreeLoRA`, its fit": None,
        "`lp.TrainingFreeLoRA`": {},
        "the same, tuned on the held-out data": tuned,
    }
    rows(lp.TrainingFreeLoRA(model, kind), free)
    rows(
        lp.KFAC(model, kind, **lora),
        {'`lp.KFAC(parameters="lora")`': {}, "`lp.KFAC`, tuned on the held-out data": tuned},
    )
    rows(lp.KFAC(model, kind, **lora, factor_rank=10), {"`lp.KFAC`, `factor_rank=10`": {}})
    rows(lp.KFAC(model, kind, parameters="last_layer"), {'`lp.KFAC(parameters="last_layer")`': {}})
    if asks(name := "ensemble of 3 adapters"):
        several = [torch.stack([network(n)[1][k].softmax(-1) for n in range(3)]) for k in (1, 2, 3)]
        information = [entropy(one.mean(0)) - entropy(one).mean(0) for one in several]
        doubts = information, [one.var(0, correction=0).sum(-1) for one in several]
        results[name] = scores([one.mean(0) for one in several], test_labels, doubts)
    if not curve and asks("scales"):
        noisy = lp.TrainingFreeLoRA(model, kind, halvings=1).fit(batches)
        known = {"train": (train, model(**train).logits.argmax(-1)), "test": (test, test_labels)}
        for noisy.noise_scale in SCALES.tolist():
            one = torch.Generator().manual_seed(seed)
            seen = {part: noisy.predict([x], generator=one, n_samples=10).mean for part, (x, _) in known.items()}
            losses = [float(metrics.negative_log_likelihood(seen[part], y)) for part, (_, y) in known.items()]
            accurate = float(metrics.accuracy(seen["test"], test_labels)) - results[ADAPTED][0]
            error = float(metrics.expected_calibration_error(seen["test"], test_labels))
            curve.append(
                [losses[0] / noisy.report.network - 1, accurate, losses[1], error, error / results[ADAPTED][2]]
            )
    asks("")


def page(found: list[dict[str, list[float]]], curve: list[list[list[float]]], task: str, data: Parts) -> str:
    """The page of results."""
    sizes = {part: len(inputs["input_ids"]) for part, (inputs, _) in data.items()}
    title = {"digits": ": digits as tokens"}.get(task, "")
    arguments = f" --task {task}" if title else ""
    text = INTRODUCTION.format(
        title=title, arguments=arguments, seeds=len(found), task=TASKS[task].format(**sizes), **sizes
    )
    lines = [text, *markdown_rule(["", *COLUMNS, "CPU s to fit and tune"])]
    names = [name for name in found[0] if all(name in one for one in found)]
    values = {name: torch.tensor([one[name] for one in found]) for name in names}
    for name, own in values.items():
        cells = [f"{m:.3f}" + ("" if name == ADAPTED else f" ± {e:.3f}") for m, e in _paired(own, values[ADAPTED], own)]
        cells = ["" if m.isnan() else cell for m, cell in zip(own.mean(0)[:5], cells, strict=False)]
        lines.append(markdown_line([name, *cells, "" if own[0, 9].isnan() else f"{own[:, 9].mean():.1f}"]))
    lines += ["", "Differences to the temperature, paired by seed:", "", *markdown_rule(["", *COLUMNS])]
    for name, own in values.items():
        if name not in (ADAPTED, WARMED):
            lines.append(markdown_line([name, *(f"{m:+.3f} ± {e:.3f}" for m, e in _paired(own, values[WARMED])[:5])]))
    lines += ["", DOUBTS, "", *markdown_rule(["", *(f"{kind}, {ood}" for kind in KINDS for ood in UNLIKE)])]
    for name, own in values.items():
        if not own[:, 5].isnan().any():
            reference = values[WARMED][:, [3, 4] * 3]
            lines.append(markdown_line([name, *(f"{m:+.3f} ± {e:.3f}" for m, e in _paired(own[:, 3:9], reference))]))
    if not all(curve):
        return "\n".join(lines) + "\n"
    lines += ["", CURVE, "", *markdown_rule(["scale", "rise of the anchors' NLL", *COLUMNS[:3], "ECE / the network's"])]
    for scale, one in zip(SCALES, torch.tensor(curve).mean(0), strict=True):
        cells = [f"{one[0]:+.1%}", f"{one[1]:+.3f}", f"{one[2]:.3f}", f"{one[3]:.3f}", f"{one[4]:.2f}"]
        lines.append(markdown_line([f"{scale:.2f}", *cells]))
    return "\n".join(lines) + "\n"


def _paired(own: Tensor, reference: Tensor, shown: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Mean over seeds (of the differences, or of what is shown) and standard error of the mean difference."""
    error = (own - reference).std(0) / len(own) ** 0.5
    return list(zip((own - reference if shown is None else shown).mean(0), error, strict=True))


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="documentation")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--steps", type=int, help="of pre-training: 1500, or 500 for digits")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for networks and what was measured, files for each seed")
    parser.add_argument("--rows", nargs="+", default=[""], help="words, one of which the names of wanted rows contain")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    make, steps = {"documentation": (texts_of_packages, 1500), "digits": (pixels_of_digits, 500)}[arguments.task]
    keep = arguments.keep and arguments.keep / arguments.task
    base, parts = make(arguments.steps or steps, keep and keep.with_name(f"{keep.name}-base.pt"))
    found: list[Any] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        kept = keep and keep.with_name(f"{keep.name}-{seed}.json")
        found.append(json.loads(kept.read_text()) if kept and kept.exists() else ({}, []))

        def asks(name: str, own: Any = found[-1], kept: Path | None = kept) -> bool:
            if kept:
                kept.write_text(json.dumps(own))
            return bool(name) and name not in own[0] and any(word in name for word in arguments.rows)

        measured(base, data := parts(seed), seed, found[-1], asks, kept and kept.with_suffix(""))
        text = page(*zip(*found, strict=True), arguments.task, data)
        if arguments.page is not None:
            arguments.page.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
