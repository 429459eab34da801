"""Does it help at full size? A WRN-16-4 on CIFAR-10, trained here, then posteriors beside the network itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import laplace_plus as lp
from benchmarks.gpu.images import Cifar, entropy, scores, standard
from benchmarks.gpu.measuring import Memory, Row, Settings, Step, clock, seconds
from benchmarks.gpu.networks import WideResNet

TRAINING, EPOCHS = 100.0, 24
"""Seconds that training may take, and epochs at most."""

SAMPLED = {"backend": lp.Native("ggn_mc", n_samples=1)}
OURS: dict[str, tuple[type, dict[str, Any], tuple[str, ...], float]] = {
    "last layer": (lp.Full, {"parameters": "last_layer"}, (), 15.0),
    "KFAC": (lp.KFAC, {}, (), 60.0),
    "KFAC, one sampled label": (lp.KFAC, SAMPLED, (), 30.0),
    "Diagonal": (lp.Diagonal, {}, (), 60.0),
    "EKFAC": (lp.KFAC, {"eigenvalue_corrected": True}, (), 100.0),
    "KFAC, by the evidence": (lp.KFAC, {}, ("marginal_likelihood",), 60.0),
}
"""Class, options, tuner (the default where none is named), and about how many seconds a row takes."""

PEERS: dict[str, dict[str, str]] = {
    "laplace-torch, last layer": {"subset_of_weights": "last_layer", "hessian_structure": "full"},
    "laplace-torch, KFAC": {"subset_of_weights": "all", "hessian_structure": "kron"},
}


def network(settings: Settings) -> nn.Module:
    """WRN-16-4, or a small one of 8 × 8 pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool2d(4), WideResNet(1, 1, 4)) if settings.tiny else WideResNet()
    return model.to(settings.device)


def train(settings: Settings, data: Cifar, path: Path) -> Row:
    """SGD with crops and mirror images made on the device, in bfloat16; as many epochs as the time allows."""
    (x, y), device, size = data.train, settings.device, settings.sized(10, 500)
    model = network(settings).to(memory_format=torch.channels_last).train()
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer, per_epoch = torch.optim.SGD(model.parameters(), **options), len(x) // size
    g = torch.Generator(device).manual_seed(0)

    def step(rows: Tensor) -> None:
        images = F.pad(standard(x[rows]), (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,), generator=shifts).tolist()
        images = images[:, :, top : top + 32, left : left + 32]
        mirrored = torch.rand(len(rows), 1, 1, 1, device=device, generator=g) < 0.5  # noqa: PLR2004
        images = images.flip(3).where(mirrored, images).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device, torch.bfloat16, enabled=settings.on_card):
            loss = F.cross_entropy(model(images), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    shifts, begun = torch.Generator().manual_seed(0), clock(device)

    def order() -> list[Tensor]:
        return list(torch.randperm(len(x), device=device, generator=g).split(size))[:per_epoch]

    trial = order()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    few = min(10, per_epoch)
    for rows in trial[:few]:  # kernels are compiled and chosen
        step(rows)
    start = clock(device)
    for rows in trial[-few:]:
        step(rows)
    each = (clock(device) - start) / few
    epochs = settings.sized(2, max(1, min(EPOCHS, int((TRAINING - (start - begun)) / (each * per_epoch)))))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=epochs * per_epoch, pct_start=0.25)
    for _ in range(epochs):
        for rows in order():
            step(rows)
            schedule.step()
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, path)
    return {"epochs": epochs, "epoch_s": each * per_epoch, "training_s": clock(device) - begun}


class Judged:
    """The trained network with its data: what a way to predict is worth, and what it takes."""

    def __init__(self, settings: Settings, data: Cifar, path: Path):
        self.settings, self.data, self.device = settings, data, settings.device
        self.model, self.size = network(settings).eval(), settings.sized(10, 500)
        self.model.load_state_dict(load_file(path, device=settings.device))
        x, y = data.train
        self.batches = [(standard(a), b) for a, b in zip(x.split(self.size), y.split(self.size), strict=True)]
        self.shifted, self.others = data.shifted(), data.others()
        some = self.batches[: settings.sized(2, 20)]

        def forward_backward() -> None:
            for a, b in some:
                F.cross_entropy(self.model(a), b).backward()
            self.model.zero_grad()

        self.epoch = seconds(forward_backward, self.device) * len(self.batches) / len(some)
        with torch.no_grad():
            self.forward = seconds(lambda: self.model(self.shifted["clean"][: self.size]), self.device, 5)

    def probabilities(self, predict: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Of all rows, batch by batch."""
        return torch.cat([predict(part).detach() for part in x.split(self.size)])

    def judge(self, predict: Callable[[Tensor], Tensor]) -> Row:
        """Scores on each set, AUROC of the entropy for other images, and forwards for each prediction."""
        row: Row = {}
        found = {name: self.probabilities(predict, x) for name, x in self.shifted.items()}
        for name, own in found.items():
            row |= {f"{name} {key}": value for key, value in scores(own, self.data.test[1]).items()}
        for name, x in self.others.items():
            strange = entropy(self.probabilities(predict, x))
            row[f"auroc {name}"] = round(float(lp.metrics.ood_auroc(entropy(found["clean"]), strange)), 4)
        took = seconds(lambda: predict(self.shifted["clean"][: self.size]), self.device)
        return row | {"predict_forwards": took / self.forward, "epoch_s": self.epoch}

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """The network's own."""
        return self.model(x)

    def map(self) -> Row:
        """The network alone."""
        return self.judge(lambda x: self.logits(x).softmax(-1))

    def temperature(self) -> Row:
        """With the temperature of least NLL on the validation images."""
        x, y = self.data.validation
        logits = torch.cat([self.logits(standard(part)) for part in x.split(self.size)])
        grid = torch.logspace(-1, 1, 201).tolist()
        best = min(grid, key=lambda t: float(F.cross_entropy(logits / t, y)))
        return self.judge(lambda x: (self.logits(x) / best).softmax(-1)) | {"temperature": best}

    def ours(self, name: str) -> Row:
        """The two lines."""
        cls, options, tuner, _ = OURS[name]
        with Memory(self.device) as memory:
            start = clock(self.device)
            posterior = cls(self.model, "classification", **options).fit(self.batches)
            fitted = clock(self.device)
            posterior = posterior.fit_prior_precision(*tuner)
            tuned = clock(self.device)
            posterior.predictive(self.shifted["clean"][: self.size])
            first = clock(self.device)
        row = {"fit_epochs": (fitted - start) / self.epoch, "tune_epochs": (tuned - fitted) / self.epoch}
        row |= {"fit_s": fitted - start, "tune_s": tuned - fitted, "first_prediction_s": first - tuned}
        return self.judge(lambda x: posterior.predictive(x).mean) | row | memory.row

    def peer(self, name: str) -> Row:
        """laplace-torch, tuned by its marginal likelihood."""
        if find_spec("laplace") is None:
            return {"skipped": "laplace-torch is not installed"}
        from laplace import Laplace  # noqa: PLC0415

        rows = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*self.batches, strict=True)))
        with Memory(self.device) as memory:
            start = clock(self.device)
            found = Laplace(copy.deepcopy(self.model), "classification", **PEERS[name])
            found.fit(torch.utils.data.DataLoader(rows, self.size))
            fitted = clock(self.device)
            found.optimize_prior_precision(method="marglik")
            tuned = clock(self.device)
        row = {"fit_epochs": (fitted - start) / self.epoch, "tune_epochs": (tuned - fitted) / self.epoch}
        return self.judge(lambda x: found(x, link_approx="probit")) | row | memory.row


def steps(settings: Settings) -> Iterator[Step]:
    """Training, then a row for each way to predict."""
    path, held = settings.output / "wide_resnet.safetensors", {}

    def data() -> Cifar:
        if "data" not in held:
            held["data"] = Cifar(settings)
        return held["data"]

    def judged() -> Judged:
        if "judged" not in held:
            held["judged"] = Judged(settings, data(), path)
        return held["judged"]

    yield Step("training", TRAINING + 20, lambda: train(settings, data(), path))
    yield Step("network", 10.0, lambda: judged().map())
    yield Step("validated temperature", 10.0, lambda: judged().temperature())
    for name, (*_, about) in OURS.items():
        yield Step(name, about, lambda name=name: judged().ours(name))
    for name in PEERS:
        yield Step(name, 60.0, lambda name=name: judged().peer(name))
