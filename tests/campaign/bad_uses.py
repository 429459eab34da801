"""Kinds of bad input to what a posterior is used for, and to what is not a posterior; see :mod:`bad_input`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from campaign.bad_calls import regression
from campaign.bad_input import INF, NAN, Case, Documented, Kinds, network, with_entry
from torch import nn

import laplace_plus as lp
from laplace_plus.applications import constraints, uses
from laplace_plus.applications.constraints import NullSpaceOptimizer, Sparse
from laplace_plus.applications.reconstruction import FilterCovariance, ImagePosterior, differences, expected_absolute


def gaussian(c: Case) -> Any:
    return c.fitted("KFAC")


def broken(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        net[0].weight[0, 0] = NAN
    return net


def loaded(c: Case) -> Any:
    """Knows nothing of its data."""
    gaussian(c).save(c.folder / "it")
    return lp.load(c.folder / "it", gaussian(c).network.model)


def swag(c: Case, **options: Any) -> Any:
    return lp.SWAG(c.net, "classification", **options)


def after(c: Case, *batches: Any) -> Any:
    return gaussian(c).continue_on(network()).fit(list(batches))


OF_SWAG: Kinds = {
    "SWAG: rank": lambda c: swag(c, rank=-1),
    "SWAG: rank 1.5": lambda c: swag(c, rank=1.5),
    "SWAG: scale": lambda c: swag(c, scale=0.0),
    "SWAG: scale NaN": lambda c: swag(c, scale=NAN),
    "SWAG: members": lambda c: swag(c, n_members=0),
    "SWAG: one snapshot": lambda c: swag(c, n_snapshots=1).fit([(c.x, c.y)]),
    "SWAG: snapshots": lambda c: swag(c, n_snapshots=0),
    "SWAG: learning rate": lambda c: swag(c, learning_rate=-0.1),
    "SWAG: momentum": lambda c: swag(c, momentum=1.5),
    "SWAG: weight decay": lambda c: swag(c, weight_decay=-1.0),
    "SWAG: diverges": lambda c: swag(c, learning_rate=1e200, n_snapshots=4).fit([(c.x, c.y)]),
    "SWAG: one collected": lambda c: swag(c).collect().fit([(c.x, c.y)]),
    "SWAG: collect another network": lambda c: swag(c).collect(network(2)),
    "SWAG: collect a wider network": lambda c: swag(c).collect(network(3, 5)),
    "SWAG: collect no network": lambda c: swag(c).collect(3),
    "SWAG: collect a state dict": lambda c: swag(c).collect(c.net.state_dict()),
    "SWAG: collect NaN": lambda c: swag(c).collect(broken(network())),
    "SWAG: an iterator": lambda c: swag(c).fit(iter([(c.x, c.y)])),
    "SWAG: update": lambda c: c.fitted("SWAG").update([(c.x, c.y)]),
    "SWAG: tune": lambda c: c.fitted("SWAG").fit_prior_precision(),
    "SWAG: checkpoint": lambda c: swag(c).fit([(c.x, c.y)], checkpoint=c.folder / "fit"),
    "SWAG: link": lambda c: c.fitted("SWAG").predictive(c.x, method="linearized", link="logit"),
}


CONTINUED: Kinds = {
    "penalty: no parameters": lambda c: gaussian(c).penalty(None),
    "penalty: number": lambda c: gaussian(c).penalty(3.0),
    "penalty: text": lambda c: gaussian(c).penalty("theta"),
    "penalty: too few": lambda c: gaussian(c).penalty(torch.zeros(7)),
    "penalty: integers": lambda c: gaussian(c).penalty(torch.zeros(53, dtype=torch.long)),
    "penalty: two vectors": lambda c: gaussian(c).penalty(torch.zeros(2, 53)),
    "penalty: another network": lambda c: gaussian(c).penalty(network(2)),
    "penalty: names missing": lambda c: gaussian(c).penalty({"0.weight": c.net[0].weight}),
    "penalty: other shapes": lambda c: gaussian(c).penalty(
        {name: p.detach()[:1] for name, p in c.net.named_parameters()}
    ),
    "penalty: before the fit": lambda c: lp.KFAC(c.net, "classification").penalty(c.net),
    "penalty: no Gaussian": lambda c: uses.penalty(c.fitted("MetricBNN"), c.net),
    "penalty: no posterior": lambda c: uses.penalty(3, c.net),
    "continue_on: None": lambda c: gaussian(c).continue_on(None),
    "continue_on: state dict": lambda c: gaussian(c).continue_on(c.net.state_dict()),
    "continue_on: another network": lambda c: gaussian(c).continue_on(network(2)),
    "continue_on: fewer layers": lambda c: gaussian(c).continue_on(network()[:2]),
    "continue_on: before the fit": lambda c: lp.KFAC(c.net, "classification").continue_on(c.net),
    "continue_on: no Gaussian": lambda c: uses.continue_on(c.fitted("MetricBNN"), c.net),
    "continue_on: no posterior": lambda c: uses.continue_on("KFAC", c.net),
    "continue_on: parameters": lambda c: gaussian(c).continue_on(network(), parameters=["9.weight"]),
    "continue_on: weights NaN": lambda c: gaussian(c).continue_on(broken(network())).fit([(c.x, c.y)]),
    "continue_on: nothing": lambda c: after(c),
    "continue_on: labels": lambda c: after(c, (c.x, c.y + 1)),
    "continue_on: other inputs": lambda c: after(c, (c.x[:, :3], c.y)),
    "continue_on: NaN": lambda c: after(c, (with_entry(c.x, NAN), c.y)),
    "continue_on: predicts before its fit": lambda c: gaussian(c).continue_on(network()).predictive(c.x),
    "continue_on: saved before its fit": lambda c: gaussian(c).continue_on(network()).save(c.folder / "it"),
    "continue_on: leave-one-out of all tasks": lambda c: lp.leave_one_out(after(c, (c.x, c.y))),
    "continue_on: other data to tune by": lambda c: after(c, (c.x, c.y)).fit_prior_precision(
        lp.Tangent(data=[(c.x + 1, c.y)])
    ),
    "from_variance: negative": lambda c: lp.Diagonal.from_variance(c.net, -torch.ones(53), "classification"),
    "from_variance: zero": lambda c: lp.Diagonal.from_variance(c.net, torch.zeros(53), "classification"),
    "from_variance: NaN": lambda c: lp.Diagonal.from_variance(c.net, torch.full((53,), NAN), "classification"),
    "from_variance: infinite": lambda c: lp.Diagonal.from_variance(c.net, torch.full((53,), INF), "classification"),
    "from_variance: too few": lambda c: lp.Diagonal.from_variance(c.net, torch.ones(7), "classification"),
    "from_variance: integers": lambda c: lp.Diagonal.from_variance(c.net, torch.ones(53).long(), "classification"),
    "from_variance: number": lambda c: lp.Diagonal.from_variance(c.net, 0.1, "classification"),
    "from_variance: no names": lambda c: lp.Diagonal.from_variance(c.net, {}, "classification"),
    "from_variance: other names": lambda c: lp.Diagonal.from_variance(c.net, {"x": torch.ones(3)}, "classification"),
    "from_variance: names of numbers": lambda c: lp.Diagonal.from_variance(c.net, {"0.bias": 3.0}, "classification"),
    "from_variance: other shapes": lambda c: lp.Diagonal.from_variance(
        c.net, {"0.bias": torch.ones(2)}, "classification"
    ),
    "from_variance: above the prior's": lambda c: lp.Diagonal.from_variance(
        c.net, torch.ones(53), "classification", prior_precision=10.0
    ),
    "from_variance: prior": lambda c: lp.Diagonal.from_variance(
        c.net, torch.ones(53), "classification", prior_precision=-1.0
    ),
    "from_variance: number of data": lambda c: lp.Diagonal.from_variance(
        c.net, torch.ones(53), "classification", n_data=0
    ),
    "from_variance: no network": lambda c: lp.Diagonal.from_variance(3, torch.ones(53), "classification"),
    "from_variance: likelihood": lambda c: lp.Diagonal.from_variance(c.net, torch.ones(53), "classes"),
    "from_variance: weights NaN": lambda c: lp.Diagonal.from_variance(
        broken(network()), torch.ones(53), "classification"
    ),
}

CHOICES: Kinds = {
    "select: none": lambda c: uses.select(gaussian(c), c.x, 0),
    "select: more than there are": lambda c: uses.select(gaussian(c), c.x, 13),
    "select: fraction": lambda c: uses.select(gaussian(c), c.x, 1.5),
    "select: text": lambda c: uses.select(gaussian(c), c.x, "3"),
    "select: method": lambda c: uses.select(gaussian(c), c.x, 2, method="entropy"),
    "select: features": lambda c: uses.select(gaussian(c), c.x, 2, n_features=0),
    "select: scale": lambda c: uses.select(gaussian(c), c.x, 2, method="lcmd", scale="width"),
    "select: no pool": lambda c: uses.select(gaussian(c), None, 2),
    "select: empty pool": lambda c: uses.select(gaussian(c), c.x[:0], 1),
    "select: pool NaN": lambda c: uses.select(gaussian(c), with_entry(c.x, NAN), 2),
    "select: other features": lambda c: uses.select(gaussian(c), c.x[:, :3], 2),
    "select: list": lambda c: uses.select(gaussian(c), c.x.tolist(), 2),
    "select: targets": lambda c: uses.select(gaussian(c), c.x, 2, method="targets", targets=c.x[:, :3]),
    "select: generator": lambda c: uses.select(gaussian(c), c.x, 2, method="kmeans++", generator=3),
    "select: before the fit": lambda c: uses.select(lp.KFAC(c.net, "classification"), c.x, 2),
    "select: no posterior": lambda c: uses.select(c.net, c.x, 2),
    "select: distances from unknown data": lambda c: uses.select(loaded(c), c.x, 2, method="max_distance"),
    "influence: no query": lambda c: uses.influence(gaussian(c), []),
    "influence: query None": lambda c: uses.influence(gaussian(c), None),
    "influence: labels": lambda c: uses.influence(gaussian(c), [(c.x, c.y + 1)]),
    "influence: inputs only": lambda c: uses.influence(gaussian(c), c.x),
    "influence: method": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], method="hessian"),
    "influence: scalar": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], of="margin"),
    "influence: scalar of all": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], of=lambda out, y: out.sum()),
    "influence: scalar NaN": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], of=lambda out, y: out[:, 0] * NAN),
    "influence: top": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], top=0),
    "influence: top 1.5": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], top=1.5),
    "influence: one sample": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], method="covariance", n_samples=1),
    "influence: generator": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], method="covariance", generator=3),
    "influence: no posteriors": lambda c: uses.influence([], [(c.x, c.y)]),
    "influence: no Gaussian": lambda c: uses.influence(c.fitted("MetricBNN"), [(c.x, c.y)]),
    "influence: before the fit": lambda c: uses.influence(lp.KFAC(c.net, "classification"), [(c.x, c.y)]),
    "influence: unknown data": lambda c: uses.influence(loaded(c), [(c.x, c.y)]),
    "influence: no data": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], data=[]),
    "influence: data NaN": lambda c: uses.influence(gaussian(c), [(c.x, c.y)], data=[(with_entry(c.x, NAN), c.y)]),
    "self_influence: no Gaussian": lambda c: uses.self_influence(c.fitted("VIKING")),
    "self_influence: unknown data": lambda c: uses.self_influence(loaded(c)),
    "self_influence: no data": lambda c: uses.self_influence(gaussian(c), []),
    "self_influence: labels": lambda c: uses.self_influence(gaussian(c), [(c.x, c.y + 1)]),
    "saliency: criterion": lambda c: uses.saliency(gaussian(c), "hessian"),
    "saliency: unit": lambda c: uses.saliency(gaussian(c), unit=3),
    "saliency: unit of nothing": lambda c: uses.saliency(gaussian(c), unit=["9.weight"]),
    "saliency: units that overlap": lambda c: uses.saliency(gaussian(c), unit=["0.weight", "0"]),
    "saliency: no units": lambda c: uses.saliency(gaussian(c), unit=[]),
    "saliency: no Gaussian": lambda c: uses.saliency(c.fitted("NullSpace")),
    "saliency: before the fit": lambda c: uses.saliency(lp.KFAC(c.net, "classification")),
    "prune: no limit": lambda c: uses.prune(gaussian(c)),
    "prune: sparsity": lambda c: uses.prune(gaussian(c), sparsity=1.5),
    "prune: sparsity NaN": lambda c: uses.prune(gaussian(c), sparsity=NAN),
    "prune: sparsity text": lambda c: uses.prune(gaussian(c), sparsity="half"),
    "prune: stop": lambda c: uses.prune(gaussian(c), stop="loss"),
    "prune: loss": lambda c: uses.prune(gaussian(c), max_loss_increase=-1.0),
    "prune: loss NaN": lambda c: uses.prune(gaussian(c), max_loss_increase=NAN),
    "prune: loss of unknown data": lambda c: uses.prune(loaded(c), max_loss_increase=0.1),
    "prune: no data": lambda c: uses.prune(gaussian(c), max_loss_increase=0.1, data=[]),
    "prune: labels": lambda c: uses.prune(gaussian(c), max_loss_increase=0.1, data=[(c.x, c.y + 1)]),
    "prune: criterion": lambda c: uses.prune(gaussian(c), sparsity=0.5, criterion="random"),
    "prune: unit": lambda c: uses.prune(gaussian(c), sparsity=0.5, unit="layer"),
    "prune: no posterior": lambda c: uses.prune(c.net, sparsity=0.5),
    "ridge: vector": lambda c: uses.ridge_left_out(c.x[:, 0], c.t[:, 0], 0.1),
    "ridge: list": lambda c: uses.ridge_left_out([[1.0]], c.t[:, 0], 0.1),
    "ridge: targets": lambda c: uses.ridge_left_out(c.x, c.t, 0.1),
    "ridge: fewer targets": lambda c: uses.ridge_left_out(c.x, c.t[:5, 0], 0.1),
    "ridge: integers": lambda c: uses.ridge_left_out(c.x, c.y, 0.1),
    "ridge: damping": lambda c: uses.ridge_left_out(c.x, c.t[:, 0], -1.0),
    "ridge: damping NaN": lambda c: uses.ridge_left_out(c.x, c.t[:, 0], NAN),
    "ridge: damping zero": lambda c: uses.ridge_left_out(c.x, c.t[:, 0], 0.0),
    "ridge: features NaN": lambda c: uses.ridge_left_out(with_entry(c.x, NAN), c.t[:, 0], 0.1),
    "ridge: targets NaN": lambda c: uses.ridge_left_out(c.x, with_entry(c.t[:, 0], NAN), 0.1),
    "ridge: rows": lambda c: uses.ridge_left_out(c.x, c.t[:, 0], 0.1, rows=torch.tensor([12])),
    "ridge: rows of floats": lambda c: uses.ridge_left_out(c.x, c.t[:, 0], 0.1, rows=torch.tensor([0.5])),
    "ridge: rows below zero": lambda c: uses.ridge_left_out(c.x, c.t[:, 0], 0.1, rows=torch.tensor([-1])),
}


PERIODIC = constraints.periodic(1.0)


def optimizer(c: Case, constraint: Any = PERIODIC, points: Any = None, **options: Any) -> Any:
    inner = torch.optim.SGD(c.net.parameters(), lr=0.1)
    return NullSpaceOptimizer(inner, constraint, c.net, c.x if points is None else points, **options)


def step(c: Case, constraint: Any, points: Any = None) -> Any:
    return optimizer(c, constraint, points).step()


CONSTRAINED: Kinds = {
    "constraint: no optimiser": lambda c: NullSpaceOptimizer(c.net, PERIODIC, c.net, c.x),
    "constraint: LBFGS": lambda c: NullSpaceOptimizer(torch.optim.LBFGS(c.net.parameters()), PERIODIC, c.net, c.x),
    "constraint: another network's": lambda c: NullSpaceOptimizer(
        torch.optim.SGD(network().parameters(), lr=0.1), PERIODIC, c.net, c.x
    ),
    "constraint: no network": lambda c: NullSpaceOptimizer(
        torch.optim.SGD(c.net.parameters(), lr=0.1), PERIODIC, None, c.x
    ),
    "constraint: no function": lambda c: optimizer(c, "periodic"),
    "constraint: rate": lambda c: optimizer(c, rate=-1.0),
    "constraint: rate NaN": lambda c: optimizer(c, rate=NAN),
    "constraint: rate text": lambda c: optimizer(c, rate="fast"),
    "constraint: warm-up": lambda c: optimizer(c, warm_up=-1),
    "constraint: every": lambda c: optimizer(c, every=0),
    "constraint: iterations": lambda c: optimizer(c, max_iterations=0),
    "constraint: tolerance": lambda c: optimizer(c, tolerance=-1.0).step(),
    "constraint: number": lambda c: step(c, lambda model, x: 1.0),
    "constraint: integers": lambda c: step(c, lambda model, x: model(x).argmax(1)),
    "constraint: empty": lambda c: step(c, lambda model, x: model(x)[:0]),
    "constraint: detached": lambda c: step(c, lambda model, x: model(x).detach()),
    "constraint: not finite": lambda c: step(c, lambda model, x: model(x) / 0),
    "constraint: complex": lambda c: step(c, lambda model, x: model(x) * 1j),
    "constraint: other features": lambda c: step(c, lambda model, x: model(x[:, :3])),
    "constraint: other points": lambda c: step(c, PERIODIC, c.x[:, :3]),
    "constraint: points NaN": lambda c: step(c, PERIODIC, with_entry(c.x, NAN)),
    "constraint: points text": lambda c: step(c, PERIODIC, "grid"),
    "constraint: no points": lambda c: optimizer(c, points=lambda: None).step(),
    "constraint: period": lambda c: step(c, constraints.periodic(torch.ones(7))),
    "constraint: period text": lambda c: step(c, constraints.periodic("year")),
    "constraint: values": lambda c: step(c, constraints.value(c.x, c.t[:, :1])),
    "constraint: values NaN": lambda c: step(c, constraints.value(c.x, with_entry(c.t, NAN))),
    "constraint: equivariant, other points": lambda c: step(c, constraints.equivariant(lambda x: x[:, :2])),
    "constraint: equivariant, other outputs": lambda c: step(
        c, constraints.equivariant(lambda x: -x, lambda y: y[:, :2])
    ),
    "constraint: equivariant, no function": lambda c: step(c, constraints.equivariant(3)),
    "constraint: conservative probes": lambda c: constraints.conservative(0),
    "constraint: conservative, no field": lambda c: step(c, constraints.conservative()),
    "constraint: conservative, points": lambda c: step(c, constraints.conservative(), c.x[0]),
    "constraint: asymmetry of no field": lambda c: constraints.asymmetry(c.net, c.x),
    "constraint: asymmetry probes": lambda c: constraints.asymmetry(c.net[0], c.x, n_probes=0),
    "constraint: asymmetry generator": lambda c: constraints.asymmetry(network(4), c.x, generator=3),
    "sparsity: zero": lambda c: Sparse(0.0),
    "sparsity: above one": lambda c: Sparse(1.5),
    "sparsity: NaN": lambda c: Sparse(NAN),
    "sparsity: text": lambda c: Sparse("half"),
    "sparsity: no masks": lambda c: Sparse({}),
    "sparsity: floating masks": lambda c: Sparse({"0.weight": torch.ones(5, 4)}),
    "sparsity: other masks": lambda c: step(c, Sparse({"0.weight": torch.ones(2, 4, dtype=torch.bool)})),
    "sparsity: masks of nothing": lambda c: step(c, Sparse({"9.weight": torch.ones(2, 4, dtype=torch.bool)})),
    "sparsity: steps": lambda c: Sparse(0.5, steps=-1),
    "sparsity: every": lambda c: Sparse(0.5, every=0),
    "sparsity: saliency": lambda c: step(c, Sparse(0.5, saliency=lambda parameters: {})),
    "sparsity: nothing eligible": lambda c: step(c, Sparse(0.5, eligible=lambda name, p: False)),
    "project: steps": lambda c: constraints.project(c.net, PERIODIC, c.x, steps=0),
    "project: no network": lambda c: constraints.project(3, PERIODIC, c.x),
    "project: parameters": lambda c: constraints.project(c.net, PERIODIC, c.x, parameters=["9.bias"]),
    "project: masks": lambda c: constraints.project(c.net, PERIODIC, c.x, parameters={"0.bias": torch.arange(5) > 2}),
    "project: not finite": lambda c: constraints.project(c.net, lambda model, x: model(x) / 0, c.x),
    "project: detached": lambda c: constraints.project(c.net, lambda model, x: model(x).detach(), c.x),
    "project: number": lambda c: constraints.project(c.net, lambda model, x: 1.0, c.x),
    "project: weights NaN": lambda c: constraints.project(broken(network()), PERIODIC, c.x),
    "null_space_gradient: sizes": lambda c: constraints.null_space_gradient(
        lambda v: v[:2], c.x.flatten(), c.x.flatten()[:3]
    ),
    "null_space_gradient: number": lambda c: constraints.null_space_gradient(
        lambda v: 1.0, c.x.flatten(), c.x.flatten()
    ),
    "null_space_gradient: gradient NaN": lambda c: constraints.null_space_gradient(
        lambda v: v[:2], c.x.flatten(), with_entry(c.x.flatten(), NAN)
    ),
    "optimiser: state of another": lambda c: optimizer(c).load_state_dict({"x": 3}),
}

MATRIX = torch.randn(5, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
CODE, SEEN = torch.ones(1, 1, 4, 4, dtype=torch.float64), torch.ones(5, dtype=torch.float64)


def images(channels: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sigmoid(), nn.Conv2d(2, channels, 1)).double()


def image(c: Case, operator: Any = MATRIX, code: Any = CODE, seen: Any = SEEN, net: Any = None, **options: Any) -> Any:
    posterior = ImagePosterior(images() if net is None else net, operator, **{"noise_std": 0.1, **options})
    return posterior.fit(code, seen)


IMAGES: Kinds = {
    "image: no network": lambda c: ImagePosterior(3, MATRIX),
    "image: several": lambda c: image(c, code=CODE.repeat(2, 1, 1, 1)),
    "image: no image": lambda c: image(c, net=nn.Sequential(images(), nn.Flatten(), nn.Linear(16, 1).double())),
    "image: other input": lambda c: image(c, code=torch.ones(1, 3, 4, 4, dtype=torch.float64)),
    "image: input NaN": lambda c: image(c, code=CODE * NAN),
    "image: input None": lambda c: image(c, code=None),
    "image: input text": lambda c: image(c, code="z"),
    "image: weights NaN": lambda c: image(c, net=broken(images())),
    "image: operator None": lambda c: image(c, operator=None),
    "image: operator text": lambda c: image(c, operator="radon"),
    "image: operator of another size": lambda c: image(c, operator=MATRIX[:, :9]),
    "image: operator is a vector": lambda c: image(c, operator=MATRIX[0]),
    "image: operator NaN": lambda c: image(c, operator=with_entry(MATRIX, NAN)),
    "image: operator is not linear": lambda c: image(c, operator=lambda images: images.flatten(1).square()[:, :5]),
    "image: operator gives numbers": lambda c: image(c, operator=lambda images: 3.0),
    "image: other measurements": lambda c: image(c, seen=SEEN[:3]),
    "image: measurements NaN": lambda c: image(c, seen=with_entry(SEEN, NAN)),
    "image: measurements text": lambda c: image(c, seen="y"),
    "image: noise": lambda c: image(c, noise_std=-1.0).variance(),
    "image: noise zero": lambda c: image(c, noise_std=0.0).variance(),
    "image: noise text": lambda c: image(c, noise_std="loud").variance(),
    "image: noise of each": lambda c: image(c, noise_std=torch.ones(3)).variance(),
    "image: prior": lambda c: image(c, prior=3.0).variance(),
    "image: prior of other blocks": lambda c: image(c, prior=FilterCovariance(torch.ones(7))).variance(),
    "image: blocks": lambda c: image(c, blocks=lambda name: 3),
    "image: optimum": lambda c: image(c, optimum="map"),
    "image: parameters": lambda c: image(c, parameters=["9.weight"]),
    "image: taps": lambda c: image(c, parameters={"0.weight": torch.arange(18).view(2, 1, 3, 3) > 4}),
    "image: before the fit": lambda c: ImagePosterior(images(), MATRIX).variance(),
    "image: evidence before the fit": lambda c: ImagePosterior(images(), MATRIX).log_marginal_likelihood(),
    "image: sample before the fit": lambda c: ImagePosterior(images(), MATRIX).sample(2),
    "image: another one's density": lambda c: image(c).log_prob(torch.ones(3, 3)),
    "image: density of NaN": lambda c: image(c).log_prob(torch.full((1, 4, 4), NAN)),
    "image: density of text": lambda c: image(c).log_prob("image"),
    "image: patch": lambda c: image(c).log_prob(torch.ones(1, 4, 4), patch=0),
    "image: variance that is added": lambda c: image(c).log_prob(torch.ones(1, 4, 4), extra_variance=-1.0),
    "image: rank of the noise": lambda c: image(c).image_noise(0),
    "image: no samples": lambda c: image(c).sample(0),
    "image: samples 1.5": lambda c: image(c).sample(1.5),
    "image: generator": lambda c: image(c).sample(2, generator=3),
    "image: rate of the hyperprior": lambda c: image(c).log_hyperprior(-1.0),
    "image: hyperprior without filters": lambda c: image(c, parameters=["2.weight"]).log_hyperprior(1.0),
    "image: tune": lambda c: image(c).fit_prior(total_variation=-1.0),
    "FilterCovariance: length": lambda c: FilterCovariance(-1.0),
    "FilterCovariance: variance": lambda c: FilterCovariance(1.0, 0.0),
    "FilterCovariance: NaN": lambda c: FilterCovariance(NAN),
    "FilterCovariance: text": lambda c: FilterCovariance("long"),
    "FilterCovariance: none": lambda c: FilterCovariance(torch.ones(0)),
    "differences: one axis": lambda c: differences(torch.ones(4)),
    "expected_absolute: shapes": lambda c: expected_absolute(torch.ones(3), torch.ones(4)),
}


def nan(found: torch.Tensor) -> None:
    """The density of NaN is NaN, as documented."""
    if bool(found.isnan().all()):
        raise Documented


def emphasised(c: Case, **options: Any) -> Any:
    data = options.pop("data", [(c.x, c.y)])
    return lp.train_data_emphasized(copy.deepcopy(c.net), data, **{"epochs": 1, **options})


def conformal(c: Case, *batches: Any, **options: Any) -> Any:
    return lp.conformalize(gaussian(c), list(batches) or [(c.x, c.y)], **options)


OTHERS: Kinds = {
    "emphasis: zero": lambda c: emphasised(c, emphasis=0.0),
    "emphasis: NaN": lambda c: emphasised(c, emphasis=NAN),
    "emphasis: text": lambda c: emphasised(c, emphasis="N/P"),
    "emphasis: epochs": lambda c: emphasised(c, epochs=0),
    "emphasis: initial std": lambda c: emphasised(c, initial_std=-1.0),
    "emphasis: structure": lambda c: emphasised(c, structure="blocks"),
    "emphasis: prior mean": lambda c: emphasised(c, prior_mean=torch.zeros(7)),
    "emphasis: prior mean NaN": lambda c: emphasised(c, prior_mean=NAN),
    "emphasis: optimizer": lambda c: emphasised(c, optimizer="sgd"),
    "emphasis: weight decay": lambda c: emphasised(c, optimizer_options={"lr": 0.1, "weight_decay": 0.1}),
    "emphasis: norm": lambda c: emphasised(c, max_gradient_norm=-1.0),
    "emphasis: schedule": lambda c: emphasised(c, schedule_by="step"),
    "emphasis: likelihood": lambda c: emphasised(c, likelihood="classes"),
    "emphasis: no data": lambda c: emphasised(c, data=[]),
    "emphasis: labels": lambda c: emphasised(c, data=[(c.x, c.y + 1)]),
    "emphasis: resume from nothing": lambda c: emphasised(c, resume=True),
    "emphasis: no network": lambda c: lp.train_data_emphasized(3, [(c.x, c.y)], epochs=1),
    "DataEmphasized: as a tuner": lambda c: gaussian(c).fit_prior_precision(lp.DataEmphasized(), structure="blocks"),
    "Tangent: place of the curvature": lambda c: lp.Tangent(curvature_at="map"),
    "Validation: no loss": lambda c: gaussian(c).fit_prior_precision(lp.Validation([(c.x, c.y)], loss=3)),
    "Validation: samples": lambda c: gaussian(c).fit_prior_precision(lp.Validation([(c.x, c.y)], n_samples=0)),
    "Tangent: steps": lambda c: lp.Tangent(max_steps=0),
    "Tangent: curvature elsewhere, unknown data": lambda c: loaded(c).fit_prior_precision(
        lp.Tangent(curvature_at="optimum")
    ),
    "at_last_token: of a classifier": lambda c: gaussian(c).at_last_token().predictive(c.x),
    "at_last_token: classes": lambda c: gaussian(c).at_last_token([99]).predictive(c.x),
    "at_last_token: no classes": lambda c: gaussian(c).at_last_token([]).predictive(c.x),
    "at_last_token: text": lambda c: gaussian(c).at_last_token("yes").predictive(c.x),
    "through: no function": lambda c: gaussian(c).through(3),
    "through: another network": lambda c: gaussian(c).through(network()),
    "through: a number": lambda c: gaussian(c).through(lambda x: 3.0).functional_posterior(c.x),
    "through: predictions without likelihood": lambda c: gaussian(c).through(lambda x: c.net(x)).predictive(c.x),
    "conformal: no posterior": lambda c: lp.conformalize(c.net, [(c.x, c.y)]),
    "conformal: not fitted": lambda c: lp.conformalize(lp.KFAC(c.net, "classification"), [(c.x, c.y)]),
    "conformal: no data": lambda c: lp.conformalize(gaussian(c), []),
    "conformal: level": lambda c: conformal(c, level=1.5),
    "conformal: level 90": lambda c: conformal(c, level=90),
    "conformal: score": lambda c: conformal(c, score="margin"),
    "conformal: groups": lambda c: conformal(c, by="colour"),
    "conformal: labels": lambda c: conformal(c, (c.x, c.y + 1)),
    "conformal: intervals of classes": lambda c: conformal(c).interval(c.x),
    "conformal: sets of numbers": lambda c: lp.conformalize(regression(c), [(c.x, c.t)]).predict_set(c.x),
    "conformal: inputs NaN": lambda c: conformal(c).predict_set(with_entry(c.x, NAN)),
    "conformal: generator": lambda c: conformal(c).predict_set(c.x, generator=3),
    "predict: a batch": lambda c: gaussian(c).predict(c.x),
    "predict: nothing": lambda c: gaussian(c).predict([]),
    "predict: joint": lambda c: gaussian(c).predict([c.x], joint=True),
    "predict: None": lambda c: gaussian(c).predict(None),
    "predict: NaN": lambda c: gaussian(c).predict([with_entry(c.x, NAN)]),
    "predict: generator": lambda c: gaussian(c).predict([c.x], generator=3),
    "log_prob: of too few weights": lambda c: gaussian(c).log_prob(torch.zeros(7)),
    "log_prob: of weights NaN": lambda c: nan(gaussian(c).log_prob(torch.full((53,), NAN))),
    "log_prob: of no weights": lambda c: gaussian(c).log_prob("theta"),
    "load_state_dict: nothing": lambda c: gaussian(c).load_state_dict({}),
    "load_state_dict: None": lambda c: gaussian(c).load_state_dict(None),
    "load_state_dict: of another class": lambda c: gaussian(c).load_state_dict(c.fitted("Full").state_dict()),
    "to: device": lambda c: gaussian(c).to("meta"),
    "to: type": lambda c: gaussian(c).to(torch.float16),
    "to: text": lambda c: gaussian(c).to("gpu7"),
    "squared_wasserstein: variances": lambda c: c.fitted("Subnetwork").squared_wasserstein(torch.ones(3)),
    "solve: other data": lambda c: c.fitted("SampledLaplace").solve([(c.x + 1, c.y)]),
    "effective_dimension: estimator": lambda c: c.fitted("SampledLaplace").effective_dimension("exact"),
    "relative_log_evidence: prior": lambda c: c.fitted("NullSpace").relative_log_evidence(-1.0),
    "elbo: other data": lambda c: c.fitted("VIKING").elbo([(c.x + 1, c.y)]),
    "fit_extent: grid": lambda c: c.fitted("MetricBNN").fit_extent([(c.x, c.y)], grid=[-1.0]),
    "fit_extent: no data": lambda c: c.fitted("MetricBNN").fit_extent([]),
    "encode: too few weights": lambda c: c.fitted("MetricBNN").encode(torch.zeros(7)),
    "fit_scale: grid": lambda c: c.fitted("ABNN").fit_scale([(c.x, c.y)], grid=[-1.0]),
    "mask: threshold": lambda c: c.fitted("SpatialField").mask(-1.0),
    "render_uncertainty: weights": lambda c: c.fitted("SpatialField").render_uncertainty(
        torch.ones(5), c.x[:, None, :3].double()
    ),
    "render_uncertainty: compositing": lambda c: c.fitted("SpatialField").render_uncertainty(
        torch.ones(12, 1), c.x[:, None, :3], compositing="sum"
    ),
    "predictive: NumPy generator": lambda c: gaussian(c).predictive(c.x, generator=np.random.default_rng(0)),
}

KINDS_OF_USES: Kinds = {**OF_SWAG, **CONTINUED, **CHOICES, **CONSTRAINED, **IMAGES, **OTHERS}
