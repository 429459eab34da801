"""What posteriors over the adapters of causal language models take, in time and in memory.

    python benchmarks/adapters_speed.py gpt2
    python benchmarks/adapters_speed.py peaks [10]
    nice python benchmarks/adapters_speed.py billion

``gpt2``: GPT-2 small with LoRA of rank 8 on the attention's inputs, a batch of 4 × 128 tokens. Calls take turns on one
core; of each the least CPU time counts. ``peaks``: what one process takes for the same fit and answers, perhaps with a
rank of the factors. ``billion``: a
Llama of 1.1 billion weights in bfloat16, adapters of rank 8 on queries and values, one fit to two sequences, and its
peak memory. Weights and texts are random.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "limits"))

import peft
import transformers
from measuring import measure, ratio

import laplace_plus as lp

CHOICES = [11, 12, 13, 14]


def adapted(base: nn.Module, **options: object) -> nn.Module:
    """A model whose adapters do something: ``lora_B`` starts at zero."""
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model.eval()


def texts(n: int, length: int, words: int) -> dict[str, Tensor]:
    """Random tokens, with the next ones as labels."""
    ids = torch.randint(words, (n, length + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(n, length, dtype=torch.long)
    return {"input_ids": ids[:, :-1], "attention_mask": mask, "labels": ids[:, 1:]}


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 small with adapters, and a batch of 4 × 128 tokens."""
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return adapted(base, target_modules=["c_attn"], fan_in_fan_out=True), texts(4, 128, 50257)


def peaks(factor_rank: str | None = None) -> dict[str, object]:
    """What the process takes at most until after each step, in GB, all included; nothing else runs in it."""
    found: dict[str, object] = {"GB, libraries": peak()}
    model, data = small()
    found["GB, network"] = peak()
    rank = None if factor_rank is None else int(factor_rank)
    posterior = lp.KFAC(model, "classification", parameters="lora", backend=lp.Native("ggn_mc"), factor_rank=rank)
    posterior.fit([data], generator=torch.Generator().manual_seed(0))
    found["GB, fit"] = peak()
    labels = data.pop("labels")
    view = lp.at_last_token(posterior, CHOICES)
    for _ in range(3):
        view.predictive(data)
    found["GB, answers"] = peak()
    logits = model(**data).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return found | {"GB, after a step of training": peak()}


def gpt2() -> dict[str, object]:
    """Fits and answers beside forward and backward passes."""
    model, data = small()
    inputs = {name: value for name, value in data.items() if name != "labels"}

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    def epoch() -> None:
        logits = model(**inputs).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), reduction="sum").backward()
        model.zero_grad()

    def fit(n: int = 1) -> lp.KFAC:
        posterior = lp.KFAC(model, "classification", parameters="lora", backend=lp.Native("ggn_mc"))
        return posterior.fit([data] * n, generator=torch.Generator().manual_seed(0))

    answers = lp.at_last_token(fit(), CHOICES)
    answers.predictive(inputs)
    calls: dict[str, Callable[[], object]] = {
        "forward": forward,
        "forward + backward": epoch,
        "fit, one batch": fit,
        "fit, three": lambda: fit(3),
    }
    calls["answers"] = lambda: answers.predictive(inputs)
    timings = measure(calls, 0)
    for _ in range(2):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            timings[name].cpu.append(time.process_time() - cpu)
            timings[name].wall.append(time.perf_counter() - wall)
    found: dict[str, object] = {name: own.row() for name, own in timings.items()}
    found["fit of one batch / (forward + backward)"] = ratio(timings["fit, one batch"], timings["forward + backward"])
    found["answers / forward"] = ratio(timings["answers"], timings["forward"])
    more = min(timings["fit, three"].cpu) - min(timings["fit, one batch"].cpu)
    found["each further batch / (forward + backward)"] = more / 2 / min(timings["forward + backward"].cpu)
    return found


def billion(length: int = 32) -> dict[str, object]:
    """The peak of a fit and of answers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    config = transformers.LlamaConfig(vocab_size=32000, num_key_value_heads=4, **sizes)
    torch.set_default_dtype(torch.bfloat16)
    base = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model = adapted(base, target_modules=["q_proj", "v_proj"])
    data = texts(2, length, 32000)
    found: dict[str, object] = {"weights": sum(p.numel() for p in model.parameters()), "GB before": peak()}
    start = time.process_time()
    posterior = lp.KFAC(model, "classification", parameters="lora", backend=lp.Native("ggn_mc"))
    posterior.fit([data], generator=torch.Generator().manual_seed(0))
    found |= {"P": posterior.n_parameters, "fit, CPU seconds": time.process_time() - start, "GB after the fit": peak()}
    del data["labels"]
    answers = lp.at_last_token(posterior, CHOICES).predictive(data)
    return found | {"epistemic": float(answers.epistemic.max()), "GB after answers": peak()}


def peak() -> float:
    """The process's largest resident memory so far, in GB, where the system counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # between the two libraries
    result = {"gpt2": gpt2, "peaks": peaks, "billion": billion}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps({**result, "load": os.getloadavg()}, indent=1) + "\n")
