"""Sample-then-optimise Laplace for a ResNet-18 on CIFAR-100, at full size for one GPU.

    python configs/sampled_laplace_resnet18.py --data FOLDER --weights resnet18.pt \
        --output runs/resnet18.json

The settings are those published for this network (Antorán et al., "Sampling-based inference for large linear models,
with application to linearised Laplace", 2023): six samples, ten steps for the prior precision, Nesterov descent of ten
epochs in batches of 100 for the samples, with a learning rate that falls to 1/330, a g-prior from 1e3 (or ``--prior
isotropic`` from 1e4), and the scales and shifts of batch normalisation left out. Two settings differ, as they belong to
another scaling of the same problem: the learning rate is found from the data's curvature rather than 1e-2 for a loss
divided by 200, and the tangent model's optimum is searched for by L-BFGS on all data rather than by descent.
``--solver cg`` takes preconditioned conjugate gradients instead.

``FOLDER`` holds ``cifar-100-python``, as unpacked from the archive. ``--tiny`` runs on a few random images with an
untrained network, on any machine.
"""

from __future__ import annotations

import argparse
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import laplace_plus as lp

CLASSES = 100


def network(classes: int = CLASSES, width: int = 64) -> nn.Module:
    """A ResNet-18 for images of 32 × 32: a first convolution of 3 × 3 and no pooling after it.

    Args:
        classes: Number of classes.
        width: Number of channels after the first convolution; 64 is the ResNet-18.
    """
    model = torchvision.models.resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    if width < 64:  # one stage is enough to see that everything runs
        model = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            torchvision.models.resnet.BasicBlock(width, width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )
    return model.eval()


def is_weight(name: str, parameter: nn.Parameter) -> bool:
    """Everything but the scales and shifts of normalisations: weights of layers, and the head's bias."""
    return parameter.ndim > 1 or name in ("fc.bias", "6.bias")


def cifar(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images ``[N, 3, 32, 32]``, standardised, and labels."""
    with open(folder / "cifar-100-python" / part, "rb") as file:
        content: Any = pickle.load(file, encoding="bytes")
    x = torch.from_numpy(content[b"data"]).view(-1, 3, 32, 32).float() / 255
    mean = torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)
    std = torch.tensor([0.2673, 0.2564, 0.2762]).view(3, 1, 1)
    return (x - mean) / std, torch.tensor(content[b"fine_labels"])


def loaders(options: argparse.Namespace) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Training and test batches, in a fixed order."""
    if options.tiny:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 3, 8, 8, generator=generator)
        y = torch.randint(5, (24,), generator=generator)
        parts = [(x[:16], y[:16]), (x[16:], y[16:])]
    else:
        parts = [cifar(options.data, part) for part in ("train", "test")]
        # Examples of a class lie scattered in the files; a permutation makes sure of it.
        order = torch.randperm(len(parts[0][0]), generator=torch.Generator().manual_seed(0))
        parts[0] = parts[0][0][order], parts[0][1][order]
    size = 8 if options.tiny else options.batch
    train, test = (list(zip(x.split(size), y.split(size), strict=True)) for x, y in parts)
    return train, test


def score(posterior: lp.Posterior, batches: list[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, float]:
    """Mean negative log-likelihood and accuracy on held-out images, of the posterior and of the network alone."""
    model = posterior.network
    total = dict.fromkeys(("nll", "accuracy", "nll_network"), 0.0)
    count = 0
    for x, y in batches:
        x, y = x.to(device), y.to(device)
        prediction = posterior.predictive(x)
        total["nll"] -= float(prediction.log_prob(y).sum())
        total["accuracy"] += float((prediction.mean.argmax(-1) == y).sum())
        total["nll_network"] += float(nn.functional.cross_entropy(model.forward(x), y, reduction="sum"))
        count += len(y)
    return {name: value / count for name, value in total.items()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Fit, tune and score."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = network(5, 4) if options.tiny else network()
    if options.weights is not None:
        model.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True))
    model.to(device)
    train, test = loaders(options)
    solver: Any = lp.SGDSolver(epochs=10, tolerance=1.0)
    if options.solver == "cg":
        solver = lp.CGSolver(tolerance=1e-2, max_iterations=200, preconditioner="nystrom", rank=30)
    posterior = lp.SampledLaplace(
        model,
        "classification",
        parameters=is_weight,
        prior_precision=1e3 if options.prior == "g_prior" else 1e4,
        n_samples=options.samples,
        solver=solver,
    )
    posterior.fit(train, progress=not options.tiny, generator=torch.Generator().manual_seed(1))
    posterior.fit_prior_precision(
        scaling="g_prior" if options.prior == "g_prior" else None,
        max_steps=options.steps,
        optimum_tolerance=1.0,
        progress=not options.tiny,
    )
    report, tuning = posterior.report, posterior.tuning
    result: dict[str, Any] = {
        "parameters": posterior.n_parameters,
        "images": posterior.n_data,
        "samples": options.samples,
        "prior": options.prior,
        "log_precision": [float(step.prior_precision[0].log()) for step in tuning.steps],
        "effective_dimension": [float(step.effective_dimension[0]) for step in tuning.steps],
        "converged": tuning.converged,
        "residual": float(report.residual.max()),
        "energy": report.energy[0],
        "test": score(posterior, test, device),
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
        posterior.save(options.output.with_suffix(".posterior"))
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--solver", choices=("sgd", "cg"), default="sgd")
    parser.add_argument("--prior", choices=("g_prior", "isotropic"), default="g_prior")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if options.data is None and not options.tiny:
        parser.error("--data is needed, or --tiny")
    return run(options)


if __name__ == "__main__":
    main()
