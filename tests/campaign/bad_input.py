"""Kinds of bad input: for each a name and a call that must be refused.

The call gets a :class:`Case`: a network, good data, a posterior class with cheap options, and fitted posteriors.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import laplace_plus as lp

NAN, INF = float("nan"), float("inf")
N, INPUTS, CLASSES = 12, 4, 3


def network(outputs: int = CLASSES, inputs: int = INPUTS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, outputs)).double()


def adapted(model: Any) -> Any:
    """The network with adapters of its linear layers, which look trained; what has none stays."""
    usable = isinstance(model, nn.Module) and not any(p.is_meta for p in model.parameters())
    layers = [name for name, own in model.named_modules() if type(own) is nn.Linear] if usable else []
    if not layers:
        return model
    trains = any(p.requires_grad for p in model.parameters())
    peft = importlib.import_module("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=layers)).to(next(model.parameters()).dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model if trains else model.requires_grad_(requires_grad=False)


def field(model: Any, likelihood: Any, **options: Any) -> Any:
    """Displaces the first three of the inputs."""

    def render(rays: Any, displace: Any) -> Any:
        return model(torch.cat([displace(rays[:, :3]), rays[:, 3:]], 1))

    box = torch.tensor([[-9.0] * 3, [9.0] * 3])
    return lp.SpatialField(model, likelihood, **{"box": box, "resolution": 2, "render": render, **options})


METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "KFAC": (lp.KFAC, {}),
    "EKFAC": (lp.KFAC, {"eigenvalue_corrected": True}),
    "limited rank": (lp.KFAC, {"factor_rank": 2}),
    "Full": (lp.Full, {}),
    "Diagonal": (lp.Diagonal, {}),
    "LowRank": (lp.LowRank, {"rank": 5}),
    "Subnetwork": (lp.Subnetwork, {"selector": lp.LargestMagnitude(10)}),
    "SampledLaplace": (lp.SampledLaplace, {"n_samples": 2}),
    "NullSpace": (lp.NullSpace, {"n_samples": 2, "rows": "loss"}),
    "VIKING": (lp.VIKING, {"n_samples": 2, "rows": "loss"}),
    "Riemannian": (lp.Riemannian, {"n_samples": 2}),
    "MetricBNN": (lp.MetricBNN, {"n_particles": 2, "n_steps": 2, "sampling": "exploration"}),
    "ABNN": (lp.ABNN, {"n_members": 2, "epochs": 1}),
    "SWAG": (lp.SWAG, {"n_snapshots": 2, "n_members": 2}),
    "VariationalLastLayer": (lp.VariationalLastLayer, {"max_iterations": 5}),
    "SpatialField": (field, {}),
}
ADAPTED = "TrainingFreeLoRA"
if importlib.util.find_spec("peft"):
    METHODS[ADAPTED] = (lp.TrainingFreeLoRA, {"n_samples": 2, "halvings": 2})


@dataclass
class Case:
    """What a call may use; ``make`` builds the posterior class that is tried."""

    method: str
    folder: Path
    fitted: Callable[[str], Any]

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.net = adapted(network()) if self.method == ADAPTED else network()
        self.x = torch.randn(N, INPUTS, generator=generator, dtype=torch.float64)
        self.y = torch.arange(N) % CLASSES
        self.t = torch.randn(N, CLASSES, generator=generator, dtype=torch.float64)

    def make(self, likelihood: Any = "classification", model: Any = None, **options: Any) -> Any:
        cls, own = METHODS[self.method]
        model = adapted(model) if self.method == ADAPTED and model is not None else model
        return cls(self.net if model is None else model, likelihood, **{**own, **options})

    def fit(self, *batches: Any, likelihood: Any = "classification", model: Any = None, **options: Any) -> Any:
        return self.make(likelihood, model, **options).fit(list(batches))

    @property
    def posterior(self) -> Any:
        return self.fitted(self.method)


def with_entry(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[1] = value
    return changed


def altered(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = value
    return model


class Returns(nn.Module):
    """A network whose output is something else than a tensor of outputs."""

    def __init__(self, change: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.inner, self.change = network(), change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self.inner(x))


class Fails(nn.Module):
    def __init__(self, error: type[Exception]):
        super().__init__()
        self.inner, self.error = network(), error

    def forward(self, x: torch.Tensor) -> Any:
        raise self.error("broken")


class Once:
    """Can be gone through once only."""

    def __init__(self, *batches: Any):
        self.iterator = iter(batches)

    def __iter__(self) -> Any:
        return self.iterator


class Shrinking:
    """Yields less each time."""

    def __init__(self, *batches: Any):
        self.batches = list(batches)

    def __iter__(self) -> Any:
        self.batches, now = self.batches[:-1], self.batches
        return iter(now)


class Documented(Exception):
    """Raised by a call where the documented behaviour is no error, once that behaviour was found."""


def finite_or_refused(*tensors: torch.Tensor) -> None:
    """Infinite inputs are fine where the network saturates, as then all results are finite."""
    if all(bool(t.isfinite().all()) for t in tensors):
        raise Documented


WITHOUT_GRADIENTS = {"SpatialField", "VariationalLastLayer", ADAPTED}


def but(c: Case, documented: set[str], found: Any) -> Any:
    """What may be right for some classes, which need no gradients, sample networks, or lack their renderer."""
    if c.method in documented:
        raise Documented
    return found


Kinds = dict[str, Callable[[Case], Any]]

# -- for each posterior class ------------------------------------------------------------------------------------------

CONSTRUCTION: Kinds = {
    "model: None": lambda c: METHODS[c.method][0](None, "classification", **METHODS[c.method][1]),
    "model: class": lambda c: c.make(model=nn.Linear),
    "model: function": lambda c: c.make(model=torch.tanh),
    "model: state dict": lambda c: c.make(model=c.net.state_dict()),
    "model: no parameters": lambda c: but(c, {"SpatialField"}, c.make(model=nn.Tanh())),
    "model: all frozen": lambda c: but(c, WITHOUT_GRADIENTS, c.make(model=network().requires_grad_(False))),
    "model: lazy": lambda c: c.make(model=nn.Sequential(nn.LazyLinear(3))),
    "model: meta": lambda c: c.make(model=network().to("meta")),
    "model: scripted": lambda c: c.make(model=torch.jit.trace(network(), c.x)),
    "model: batch statistics": lambda c: c.make(
        model=nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).double()
    ),
    "likelihood: unknown name": lambda c: c.make("classificaton"),
    "likelihood: None": lambda c: c.make(None),
    "likelihood: number": lambda c: c.make(3),
    "likelihood: class": lambda c: c.make(lp.Categorical),
    "likelihood: loss module": lambda c: c.fit((c.x, c.y), likelihood=nn.CrossEntropyLoss()),
    "parameters: unknown name": lambda c: c.make(parameters="layer4"),
    "parameters: unknown list": lambda c: c.make(parameters=["0.weight", "9.weight"]),
    "parameters: empty": lambda c: c.make(parameters=[]),
    "parameters: number": lambda c: c.make(parameters=5),
    "parameters: predicate of nothing": lambda c: c.make(parameters=lambda name, p: False),
    "parameters: mask of another shape": lambda c: c.make(parameters={"0.weight": torch.ones(2, dtype=torch.bool)}),
    "parameters: floating mask": lambda c: c.make(parameters={"0.weight": torch.ones(5, 4)}),
    "parameters: empty mask": lambda c: c.make(parameters={"0.weight": torch.zeros(5, 4, dtype=torch.bool)}),
    "prior precision: zero": lambda c: c.make(prior_precision=0.0),
    "prior precision: negative": lambda c: c.make(prior_precision=-1.0),
    "prior precision: NaN": lambda c: c.make(prior_precision=NAN),
    "prior precision: infinite": lambda c: c.make(prior_precision=INF),
    "prior precision: text": lambda c: c.make(prior_precision="1.0"),
    "prior precision: None": lambda c: but(c, {"SpatialField"}, c.make(prior_precision=None)),
    "prior precision: complex": lambda c: c.make(prior_precision=1j),
    "prior precision: two axes": lambda c: c.make(prior_precision=[[10.6]]),
    "prior precision: wrong number": lambda c: c.make(prior_precision=torch.ones(7)),
    "prior precision: none at all": lambda c: c.make(prior_precision=torch.ones(0)),
    "prior precision: one negative": lambda c: c.make(prior_precision=torch.tensor([1.0, -1.0])),
    "prior mean: NaN": lambda c: c.make(prior_mean=NAN),
    "prior mean: text": lambda c: c.make(prior_mean="zero"),
    "prior mean: wrong number": lambda c: c.fit((c.x, c.y), prior_mean=torch.zeros(7)),
    "temperature: zero": lambda c: c.make(temperature=0.0),
    "temperature: negative": lambda c: c.make(temperature=-1.0),
    "temperature: NaN": lambda c: c.make(temperature=NAN),
    "temperature: two": lambda c: c.make(temperature=torch.ones(2)),
    "temperature: text": lambda c: c.make(temperature="cold"),
    "backend: unknown": lambda c: c.make(backend="backpak"),
    "backend: number": lambda c: c.make(backend=3),
    "backend: unknown kind": lambda c: c.make(backend=lp.Native("ggnn")),
    "backend: no samples": lambda c: c.make(backend=lp.Native("ggn_mc", n_samples=0)),
    "memory budget: zero": lambda c: c.make(memory_budget=0),
    "memory budget: negative": lambda c: c.make(memory_budget=-5),
    "memory budget: unit": lambda c: c.make(memory_budget="2 gallons"),
    "memory budget: list": lambda c: c.make(memory_budget=[1]),
}

DATA: Kinds = {
    "data: None": lambda c: c.make().fit(None),
    "data: number": lambda c: c.make().fit(3),
    "data: text": lambda c: c.make().fit("train"),
    "data: empty": lambda c: c.make().fit([]),
    "data: one bare batch": lambda c: c.make().fit((c.x, c.y)),
    "data: a tensor": lambda c: c.make().fit(c.x),
    "data: a dictionary": lambda c: c.make().fit({"x": c.x, "labels": c.y}),
    "data: a dataset": lambda c: c.make().fit(TensorDataset(c.x, c.y)),
    "data: single examples": lambda c: c.make().fit([(c.x[0], c.y[0]), (c.x[1], c.y[1])]),
    "data: batches of no examples": lambda c: c.fit((c.x[:0], c.y[:0])),
    "data: inputs only": lambda c: c.fit(c.x),
    "data: inputs only, in a tuple": lambda c: c.fit((c.x,)),
    "data: None as target": lambda c: c.fit((c.x, None)),
    "data: list as target": lambda c: c.fit((c.x, c.y.tolist())),
    "data: arrays": lambda c: c.fit((c.x.numpy(), c.y.numpy())),
    "data: array as target": lambda c: c.fit((c.x, c.y.numpy())),
    "data: mapping without target": lambda c: c.fit({"input": c.x, "answer": c.y}),
    "data: mapping without inputs": lambda c: c.fit({"labels": c.y}),
    "data: unknown keyword": lambda c: c.fit({"pixels": c.x, "input": c.x, "labels": c.y}),
    "data: one input too many": lambda c: c.fit((c.x, c.x, c.y)),
    "data: swapped": lambda c: c.fit((c.y, c.x)),
    "data: more targets than inputs": lambda c: c.fit((c.x[:4], c.y)),
    "data: fewer targets than inputs": lambda c: c.fit((c.x, c.y[:4])),
    "data: targets without inputs": lambda c: c.fit((c.x[:0], c.y)),
    "data: structure changes": lambda c: c.fit((c.x, c.y), ({"input": c.x}, c.y)),
    "data: type changes": lambda c: c.fit((c.x, c.y), (c.x.float(), c.y)),
    "data: another number of features": lambda c: c.fit((c.x[:, :3], c.y)),
    "data: another number of axes": lambda c: c.fit((c.x[None, None], c.y[:1])),
    "data: batch axis last": lambda c: c.fit((c.x.T.contiguous(), c.y)),
    "data: single precision": lambda c: c.fit((c.x.float(), c.y)),
    "data: integers": lambda c: c.fit((c.x.long(), c.y)),
    "data: complex": lambda c: c.fit((c.x.to(torch.complex128), c.y)),
    "data: NaN": lambda c: c.fit((with_entry(c.x, NAN), c.y)),
    "data: infinite": lambda c: finite_or_refused(c.fit((with_entry(c.x, INF), c.y)).predictive(c.x).mean),
    "data: sparse": lambda c: c.fit((c.x.to_sparse(), c.y)),
    "data: meta": lambda c: c.fit((c.x.to("meta"), c.y)),
    "data: meta target": lambda c: c.fit((c.x, c.y.to("meta"))),
    "data: sparse target": lambda c: c.fit((c.x, c.y.to_sparse())),
    "data: an object": lambda c: c.fit(SimpleNamespace(x=c.x, y=c.y)),
    "data: an object as inputs": lambda c: c.fit((SimpleNamespace(x=c.x), c.y)),
    "data: nested lists": lambda c: c.fit((c.x.tolist(), c.y)),
    "data: strings": lambda c: c.fit((["a"] * N, c.y)),
    "data: wrong in the second batch": lambda c: c.fit((c.x, c.y), (c.x[:, :3], c.y)),
    "labels: too large": lambda c: c.fit((c.x, c.y + 1)),
    "labels: negative": lambda c: c.fit((c.x, c.y - 1)),
    "labels: floating": lambda c: c.fit((c.x, c.y.double())),
    "labels: boolean": lambda c: c.fit((c.x, c.y > 0)),
    "labels: one-hot": lambda c: c.fit((c.x, nn.functional.one_hot(c.y, CLASSES))),
    "labels: a column": lambda c: c.fit((c.x, c.y[:, None])),
    "labels: complex": lambda c: c.fit((c.x, c.y.to(torch.complex64))),
    "labels: all ignored": lambda c: but(c, {"SpatialField"}, c.fit((c.x, torch.full_like(c.y, -100)))),
    "targets: NaN": lambda c: c.fit((c.x, with_entry(c.t, NAN)), likelihood="regression"),
    "targets: infinite": lambda c: c.fit((c.x, with_entry(c.t, INF)), likelihood="regression"),
    "targets: integers": lambda c: c.fit((c.x, c.t.long()), likelihood="regression"),
    "targets: another width": lambda c: c.fit((c.x, c.t[:, :2]), likelihood="regression"),
    "targets: one axis": lambda c: c.fit((c.x, c.t[:, 0]), likelihood="regression"),
    "targets: one axis too many": lambda c: c.fit((c.x, c.t[..., None]), likelihood="regression"),
    "binary: two": lambda c: c.fit((c.x, c.t.round().abs() + 1), likelihood="binary"),
    "counts: negative": lambda c: c.fit((c.x, -c.t.abs().round() - 1), likelihood="poisson"),
    "counts: fractions": lambda c: c.fit((c.x, c.t.abs() + 0.5), likelihood="poisson"),
    "noise levels: another number": lambda c: c.fit((c.x, c.t), likelihood=lp.Gaussian(torch.ones(2))),
    "outputs: odd for mean and variance": lambda c: c.fit((c.x, c.t[:, :1]), likelihood=lp.HeteroscedasticGaussian()),
    "outputs: none": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: None)),
    "outputs: a tuple": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: (out, out))),
    "outputs: a mapping": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: {"scores": out})),
    "outputs: a number": lambda c: c.fit((c.x, c.y), model=Returns(torch.sum)),
    "outputs: integers": lambda c: c.fit((c.x, c.y), model=Returns(torch.Tensor.long)),
    "outputs: complex": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: out * 1j)),
    "outputs: probabilities": lambda c: c.fit((c.x, c.y), model=nn.Sequential(network(), nn.Softmax(-1))),
    "outputs: NaN": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: out * NAN)),
    "outputs: detached": lambda c: but(
        c, {"SpatialField", ADAPTED}, c.fit((c.x, c.y), model=Returns(torch.Tensor.detach))
    ),
    "outputs: constant": lambda c: but(
        c, {"SpatialField", ADAPTED}, c.fit((c.x, c.y), model=Returns(torch.zeros_like))
    ),
    "outputs: rounded": lambda c: but(
        c, {"SpatialField", "ABNN", ADAPTED}, c.fit((c.x, c.y), model=Returns(torch.round))
    ),
    "outputs: no axis of classes": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: out[:, 0])),
    "outputs: one class": lambda c: c.fit((c.x, c.y * 0), model=network(1)),
    "outputs: one row too few": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: out[1:])),
    "outputs: random": lambda c: c.fit((c.x, c.y), model=Returns(lambda out: nn.functional.dropout(out, 0.5, True))),
    "network: weights NaN": lambda c: c.fit((c.x, c.y), model=altered(network(), NAN)),
    "network: weights infinite": lambda c: c.fit((c.x, c.y), model=altered(network(), INF)),
    "network: RuntimeError": lambda c: c.fit((c.x, c.y), model=Fails(RuntimeError)),
    "network: ValueError": lambda c: c.fit((c.x, c.y), model=Fails(ValueError)),
    "network: TypeError": lambda c: c.fit((c.x, c.y), model=Fails(TypeError)),
    "network: IndexError": lambda c: c.fit((c.x, c.y), model=Fails(IndexError)),
    "fit: generator": lambda c: c.make().fit([(c.x, c.y)], generator=7),
    "fit: NumPy generator": lambda c: c.make().fit([(c.x, c.y)], generator=np.random.default_rng(0)),
    "update: other classes": lambda c: updated(c, (c.x, c.y + 1)),
    "update: other inputs": lambda c: updated(c, (c.x[:, :3], c.y)),
    "update: nothing": lambda c: updated(c),
}


def updated(c: Case, *batches: Any) -> Any:
    return c.posterior.update(list(batches))


USE: Kinds = {
    "before the fit: predictive": lambda c: c.make().predictive(c.x),
    "before the fit: functional_posterior": lambda c: c.make().functional_posterior(c.x),
    "before the fit: sample": lambda c: c.make().sample(2),
    "before the fit: save": lambda c: c.make().save(c.folder / "it"),
    "before the fit: tune": lambda c: c.make().fit_prior_precision(),
    "before the fit: summary": lambda c: c.make().summary(),
    "before the fit: mean": lambda c: c.make().mean,
    "predictive: no batch axis": lambda c: c.posterior.predictive(c.x[0]),
    "predictive: other features": lambda c: c.posterior.predictive(c.x[:, :3]),
    "predictive: empty": lambda c: c.posterior.predictive(c.x[:0]),
    "predictive: None": lambda c: c.posterior.predictive(None),
    "predictive: text": lambda c: c.posterior.predictive("x"),
    "predictive: array": lambda c: c.posterior.predictive(c.x.numpy()),
    "predictive: list": lambda c: c.posterior.predictive(c.x.tolist()),
    "predictive: batch with target": lambda c: c.posterior.predictive((c.x, c.y)),
    "predictive: single precision": lambda c: c.posterior.predictive(c.x.float()),
    "predictive: NaN": lambda c: c.posterior.predictive(with_entry(c.x, NAN)),
    "predictive: infinite": lambda c: finite_or_refused(c.posterior.predictive(with_entry(c.x, INF)).variance),
    "predictive: sparse": lambda c: c.posterior.predictive(c.x.to_sparse()),
    "predictive: meta": lambda c: c.posterior.predictive(c.x.to("meta")),
    "predictive: unknown method": lambda c: c.posterior.predictive(c.x, method="exact"),
    "predictive: unknown link": lambda c: c.posterior.predictive(c.x, method="linearized", link="logit"),
    "predictive: link of a regression": lambda c: c.posterior.predictive(c.x, method="linearized", link="exact"),
    "predictive: no samples": lambda c: c.posterior.predictive(c.x, method="sampled", n_samples=0),
    "predictive: negative samples": lambda c: c.posterior.predictive(c.x, method="sampled", n_samples=-3),
    "predictive: fraction of samples": lambda c: c.posterior.predictive(c.x, method="sampled", n_samples=1.5),
    "predictive: text of samples": lambda c: c.posterior.predictive(c.x, method="sampled", n_samples="5"),
    "predictive: a trillion samples": lambda c: c.posterior.predictive(c.x, method="sampled", n_samples=10**12),
    "predictive: generator": lambda c: c.posterior.predictive(c.x, generator=0),
    "predictive: sampled and differentiable": lambda c: c.posterior.predictive(
        c.x, method="sampled", differentiable=True
    ),
    "predictive: sampled with a link": lambda c: c.posterior.predictive(c.x, method="sampled", link="probit"),
    "functional_posterior: NaN": lambda c: c.posterior.functional_posterior(with_entry(c.x, NAN)),
    "functional_posterior: infinite": lambda c: finite_or_refused(
        c.posterior.functional_posterior(with_entry(c.x, INF)).covariance
    ),
    "functional_posterior: empty": lambda c: c.posterior.functional_posterior(c.x[:0]),
    "functional_posterior: no batch axis": lambda c: c.posterior.functional_posterior(c.x[0]),
    "functional_posterior: unknown outputs": lambda c: c.posterior.functional_posterior(c.x, outputs="some"),
    "functional_posterior: output 3": lambda c: c.posterior.functional_posterior(c.x, outputs=[3]),
    "functional_posterior: output .5": lambda c: c.posterior.functional_posterior(c.x, outputs=[0.5]),
    "functional_posterior: no outputs": lambda c: c.posterior.functional_posterior(c.x, outputs=[]),
    "functional_posterior: joint variances": lambda c: c.posterior.functional_posterior(
        c.x, outputs="diagonal", joint=True
    ),
    "functional_posterior: generator": lambda c: c.posterior.functional_posterior(c.x, generator="0"),
    "sample: none": lambda c: c.posterior.sample(0),
    "sample: negative": lambda c: c.posterior.sample(-1),
    "sample: fraction": lambda c: c.posterior.sample(2.5),
    "sample: True": lambda c: c.posterior.sample(True),
    "sample: a trillion": lambda c: c.posterior.sample(10**12),
    "sample: generator": lambda c: c.posterior.sample(2, generator=np.random.default_rng(0)),
    "tune: unknown": lambda c: c.posterior.fit_prior_precision("gridsearch"),
    "tune: number": lambda c: c.posterior.fit_prior_precision(3),
    "tune: unknown option": lambda c: c.posterior.fit_prior_precision(colour="red"),
    "tune: unknown structure": lambda c: c.posterior.fit_prior_precision(structure="blocks"),
    "tune: noise of classes": lambda c: c.posterior.fit_prior_precision(tune_noise=True),
    "set: prior precision negative": lambda c: setattr(c.posterior, "prior_precision", -1.0),
    "set: prior precision NaN": lambda c: setattr(c.posterior, "prior_precision", NAN),
    "set: prior precision of other layers": lambda c: setattr(c.posterior, "prior_precision", torch.ones(9)),
    "set: temperature zero": lambda c: setattr(c.posterior, "temperature", 0.0),
    "set: temperature text": lambda c: setattr(c.posterior, "temperature", "1"),
    "set: noise of classes": lambda c: setattr(c.posterior, "noise_std", 1.0),
    "set: memory budget": lambda c: setattr(c.posterior, "memory_budget", "much"),
    "save: onto a file": lambda c: c.posterior.save(written(c.folder / "file")),
    "save: into a full folder": lambda c: c.posterior.save(written(c.folder / "folder" / "notes.txt").parent),
    "load: other weights": lambda c: lp.load(saved(c), altered(network(), 3.0)),
    "load: another network": lambda c: lp.load(saved(c), network(CLASSES + 1)),
    "load: another activation": lambda c: but(
        c, {"SpatialField"}, lp.load(saved(c), nn.Sequential(*network()[:2], nn.ReLU(), network()[3]))
    ),
    "load: another likelihood": lambda c: lp.load(saved(c), network(), likelihood="regression"),
    "load: damaged tensors": lambda c: lp.load(damaged(saved(c), "posterior.safetensors"), network()),
    "load: damaged header": lambda c: lp.load(damaged(saved(c), "posterior.json"), network()),
    "load: tensors missing": lambda c: lp.load(without(saved(c), "posterior.safetensors"), network()),
    "load: header missing": lambda c: lp.load(without(saved(c), "posterior.json"), network()),
    "load: single precision": lambda c: lp.load(saved(c), network().float()),
    "freeze: unknown link": lambda c: c.posterior.freeze(c.x, link="cubic"),
}


def written(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    return path


def saved(c: Case) -> Path:
    c.posterior.save(c.folder / "saved")
    return c.folder / "saved"


def damaged(folder: Path, name: str) -> Path:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder
