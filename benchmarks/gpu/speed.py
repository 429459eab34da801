"""Fits, tuning and predictions of KFAC beside forward and backward, and beside curvlinops where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import laplace_plus as lp
from benchmarks.gpu.measuring import Memory, Row, Settings, Step, clock, per_batch, seconds
from benchmarks.gpu.networks import Case, cases


class Timed:
    """A network on the device with its batches; an epoch is forward and backward through all of them."""

    def __init__(self, case: Case, settings: Settings):
        self.case, self.device = case, settings.device
        torch.manual_seed(0)
        model, x = case.build()
        self.model, x = model.to(self.device).eval(), x.to(self.device)
        shape = x.shape[:1] if x.is_floating_point() else x.shape
        y = torch.randint(0, case.classes, shape, device=self.device)
        self.batches = list(zip(x.split(case.batch), y.split(case.batch), strict=True))

    def train(self) -> None:
        """Forward and backward through all batches."""
        for x, y in self.batches:
            F.cross_entropy(self.model(x).flatten(0, -2), y.flatten()).backward()
        self.model.zero_grad()

    @cached_property
    def epoch(self) -> float:
        """Its seconds."""
        return seconds(self.train, self.device, 2)

    def fit(self, batches: list[tuple[Tensor, Tensor]] | None = None) -> lp.KFAC:
        """KFAC of all weights that train."""
        options: dict[str, Any] = {"backend": lp.Native("ggn_mc", n_samples=1)} if self.case.sampled else {}
        return lp.KFAC(self.model, "classification", **options).fit(self.batches if batches is None else batches)

    def fits(self) -> Row:
        """Seconds, memory and synchronisations of a fit."""
        with Memory(self.device) as plain:
            epoch = self.epoch
        with Memory(self.device) as ours:
            took = seconds(self.fit, self.device, 2)
        waits, places = per_batch(lambda n: self.fit(self.batches[:n]), self.device)
        row = {"network": self.case.name, "weights": sum(p.numel() for p in self.model.parameters() if p.requires_grad)}
        row |= {"rows": sum(len(x) for x, _ in self.batches), "labels": "sampled" if self.case.sampled else "all"}
        row |= {"epoch_s": epoch, "fit_s": took, "fit_epochs": took / epoch}
        row |= {f"epoch_{key}": value for key, value in plain.row.items()} | ours.row
        return row | {"syncs_per_batch": waits, "sync_places": places}

    def answers(self) -> Row:
        """Default tuning in epochs, predictions in forward passes."""
        posterior, x = self.fit(), self.batches[0][0]
        start = clock(self.device)
        posterior = posterior.fit_prior_precision()
        tuned = clock(self.device) - start
        row: Row = {"network": self.case.name, "tune_epochs": tuned / self.epoch}
        for count in (1, min(32, len(x))):
            with torch.no_grad():
                forward = seconds(lambda n=count: self.model(x[:n]), self.device, 5)
            took = seconds(lambda n=count: posterior.predictive(x[:n]), self.device, 3)
            row |= {f"predict{count}_ms": took * 1e3, f"predict{count}_forwards": took / forward}
        return row

    def curvlinops(self) -> Row:
        """The same factors by curvlinops; nothing where it is not installed or does not take the network."""
        if find_spec("curvlinops") is None:
            return {"network": self.case.name, "skipped": "curvlinops is not installed"}
        from curvlinops import FisherType, KFACLinearOperator  # noqa: PLC0415

        layers = [own for own in self.model.modules() if isinstance(own, (nn.Linear, nn.Conv2d))]
        chosen = [p for own in layers for p in own.parameters() if p.requires_grad]
        kind = FisherType.MC if self.case.sampled else FisherType.TYPE2
        data = [(x, y.flatten()) for x, y in self.batches]
        model = nn.Sequential(self.model, nn.Flatten(0, -2)) if self.batches[0][1].ndim > 1 else self.model

        def factors() -> None:
            loss = nn.CrossEntropyLoss(reduction="sum")
            options = {"fisher_type": kind, "check_deterministic": False, "separate_weight_and_bias": False}
            KFACLinearOperator(model, loss, chosen, data, **options).compute_kronecker_factors()

        with Memory(self.device) as theirs:
            took = seconds(factors, self.device, 2)
        return {"network": self.case.name, "curvlinops_epochs": took / self.epoch} | theirs.row


def steps(settings: Settings) -> Iterator[Step]:
    """Three rows of each network, whose memory is freed before the next."""
    for case in cases(settings.tiny):
        held: list[Timed] = []

        def measured(what: str, case: Case = case, held: list[Timed] = held) -> Row:
            if not held:
                held.append(Timed(case, settings))
            return getattr(held[0], what)()

        yield Step(f"{case.name}: fit", 3 * case.seconds, lambda m=measured: m("fits"))
        yield Step(f"{case.name}: tune and predict", 3 * case.seconds, lambda m=measured: m("answers"))
        yield Step(f"{case.name}: curvlinops", 3 * case.seconds, lambda m=measured: m("curvlinops"))
        held.clear()
