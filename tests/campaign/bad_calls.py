"""Kinds of bad input to single classes and functions; see :mod:`bad_input`."""

from __future__ import annotations

from typing import Any

import torch
from campaign.bad_input import NAN, Case, Documented, Kinds, network, with_entry

import laplace_plus as lp
from laplace_plus import linalg, metrics
from laplace_plus.applications.training import train_marginal_likelihood
from laplace_plus.curvature import register_backend
from laplace_plus.geometry import (
    LossLandscape,
    PathStatus,
    diffuse,
    estimate_scalar_curvature,
    exponential_map,
    geodesic,
    noise_field,
)
from laplace_plus.linalg import Status

A = torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64))
V = torch.ones(3, dtype=torch.float64)


def times(v: torch.Tensor) -> torch.Tensor:
    return v @ A


def gaussian(c: Case) -> Any:
    return c.fitted("KFAC")


def regression(c: Case, **options: Any) -> Any:
    return lp.Full(c.net, "regression", **options).fit([(c.x, c.t)])


def landscape(c: Case, **options: Any) -> LossLandscape:
    return LossLandscape(c.net, "classification", [(c.x, c.y)], **options)


def trained(c: Case, **options: Any) -> Any:
    return train_marginal_likelihood(network(), [(c.x, c.y)], **{"epochs": 1, **options})


def field(c: Case, box: Any = ((0.0,) * 3, (1.0,) * 3), **options: Any) -> Any:
    return lp.SpatialField(c.net, "classification", box=box, **options)


NEWER: Kinds = {
    "ABNN: members": lambda c: lp.ABNN(c.net, "classification", n_members=0),
    "ABNN: epochs": lambda c: lp.ABNN(c.net, "classification", epochs=-1),
    "ABNN: scale": lambda c: lp.ABNN(c.net, "classification", scale=-0.1),
    "ABNN: scale NaN": lambda c: lp.ABNN(c.net, "classification", scale=NAN),
    "ABNN: noise": lambda c: lp.ABNN(c.net, "classification", noise="weight"),
    "ABNN: no normalisation": lambda c: lp.ABNN(torch.nn.Linear(4, 3), "classification"),
    "ABNN: other layers": lambda c: lp.ABNN(c.net, "classification", parameters=["0.weight"]),
    "ABNN: class weights of regression": lambda c: lp.ABNN(c.net, "regression", prior_weight=2.0),
    "ABNN: scales without data": lambda c: c.fitted("ABNN").fit_scale([]),
    "ABNN: a trillion samples": lambda c: c.fitted("ABNN").fit_scale([(c.x, c.y)], n_samples=10**12),
    "ABNN: update": lambda c: c.fitted("ABNN").update([(c.x, c.y)]),
    "VariationalLastLayer: bound": lambda c: lp.VariationalLastLayer(c.net, "classification", bound="tight"),
    "VariationalLastLayer: odd samples": lambda c: lp.VariationalLastLayer(c.net, "classification", n_samples=3),
    "VariationalLastLayer: mean": lambda c: lp.VariationalLastLayer(c.net, "classification", mean="best"),
    "VariationalLastLayer: covariance": lambda c: lp.VariationalLastLayer(c.net, "classification", covariance="low"),
    "VariationalLastLayer: noise of classes": lambda c: lp.VariationalLastLayer(
        c.net, "classification", noise="student_t"
    ).fit([(c.x, c.y)]),
    "VariationalLastLayer: noise shape": lambda c: lp.VariationalLastLayer(c.net, "regression", noise_shape=0.0),
    "VariationalLastLayer: iterations": lambda c: lp.VariationalLastLayer(c.net, "classification", max_iterations=0),
    "VariationalLastLayer: other layers": lambda c: lp.VariationalLastLayer(
        c.net, "classification", parameters=["0.weight"]
    ).fit([(c.x, c.y)]),
    "VariationalLastLayer: update": lambda c: c.fitted("VariationalLastLayer").update([(c.x, c.y)]),
    "TrainingFreeLoRA: no adapters": lambda c: lp.TrainingFreeLoRA(c.net, "classification"),
    "SpatialField: empty box": lambda c: field(c, [[0.0] * 3, [0.0] * 3]),
    "SpatialField: box of four axes": lambda c: field(c, [[0.0] * 4, [1.0] * 4]),
    "SpatialField: text box": lambda c: field(c, "unit"),
    "SpatialField: resolution": lambda c: field(c, resolution=0),
    "SpatialField: a trillion cells": lambda c: field(c, resolution=10**12),
    "SpatialField: structure": lambda c: field(c, structure="full"),
    "SpatialField: renderer": lambda c: field(c, render=3),
    "SpatialField: other points": lambda c: c.fitted("SpatialField").std(c.x[:, :2]),
    "SpatialField: points NaN": lambda c: c.fitted("SpatialField").std(with_entry(c.x[:, :3], NAN)),
    "Mixture: none": lambda c: lp.Mixture([]),
    "Mixture: numbers": lambda c: lp.Mixture([1, 2]),
    "Mixture: a posterior": lambda c: lp.Mixture(gaussian(c)),
    "Mixture: other targets": lambda c: lp.Mixture([gaussian(c), regression(c)]),
    "Mixture: weights": lambda c: lp.Mixture([gaussian(c)] * 2, weights=[1.0, -1.0]),
    "Mixture: too many weights": lambda c: lp.Mixture([gaussian(c)] * 2, weights=[1.0] * 3),
    "Mixture: weights NaN": lambda c: lp.Mixture([gaussian(c)] * 2, weights=[1.0, NAN]),
    "Mixture: text of weights": lambda c: lp.Mixture([gaussian(c)] * 2, weights=["a", "b"]),
    "Mixture: name of weights": lambda c: lp.Mixture([gaussian(c)] * 2, weights="best"),
    "Mixture: evidence of none": lambda c: lp.Mixture([c.fitted("MetricBNN")] * 2, weights="evidence"),
    "Mixture: not fitted": lambda c: lp.Mixture([lp.Full(c.net, "classification")]).predictive(c.x),
    "Mixture: inputs NaN": lambda c: lp.Mixture([gaussian(c)] * 2).predictive(with_entry(c.x, NAN)),
    "Mixture: link": lambda c: lp.Mixture([gaussian(c)] * 2).predictive(c.x, link="logit"),
    "Mixture: no data": lambda c: lp.Mixture([gaussian(c)] * 2).fit_weights([]),
    "Mixture: data None": lambda c: lp.Mixture([gaussian(c)] * 2).fit_weights(None),
    "Mixture: labels": lambda c: lp.Mixture([gaussian(c)] * 2).fit_weights([(c.x, c.y + 1)]),
    "Mixture: ignored data": lambda c: lp.Mixture([gaussian(c)] * 2).fit_weights([(c.x, torch.full_like(c.y, -100))]),
    "Mixture: generator": lambda c: lp.Mixture([gaussian(c)] * 2).predictive(c.x, generator=3),
    "Ensemble: none": lambda c: lp.Ensemble([], "classification"),
    "Ensemble: a network": lambda c: lp.Ensemble(torch.nn.Linear(4, 3), "classification"),
    "Ensemble: numbers": lambda c: lp.Ensemble([1, 2], "classification"),
    "Ensemble: likelihood": lambda c: lp.Ensemble([c.net], "classificaton"),
    "Ensemble: other outputs": lambda c: lp.Ensemble([c.net, network(2)], "classification").predictive(c.x),
    "Ensemble: other features": lambda c: lp.Ensemble([c.net], "classification").predictive(c.x[:, :3]),
    "Ensemble: inputs NaN": lambda c: lp.Ensemble([c.net], "classification").predictive(with_entry(c.x, NAN)),
    "Ensemble: empty": lambda c: lp.Ensemble([c.net], "classification").predictive(c.x[:0]),
    "Ensemble: None": lambda c: lp.Ensemble([c.net], "classification").predictive(None),
    "Ensemble: text": lambda c: lp.Ensemble([c.net], "classification").predictive("x"),
    "Ensemble: generator": lambda c: lp.Ensemble([c.net], "classification").predictive(c.x, generator=3),
    "Ensemble: noise of classes": lambda c: lp.Ensemble([c.net], "classification").fit([(c.x, c.y)]),
    "Ensemble: no data": lambda c: lp.Ensemble([c.net], "regression").fit([]),
    "Ensemble: targets NaN": lambda c: lp.Ensemble([c.net], "regression").fit([(c.x, with_entry(c.t, NAN))]),
}

OPTIONS: Kinds = {
    "KFAC: weight sharing": lambda c: lp.KFAC(c.net, "classification", weight_sharing="sum"),
    "KFAC: output factor": lambda c: lp.KFAC(c.net, "classification", output_factor="sparse"),
    "KFAC: diagonal and corrected": lambda c: lp.KFAC(
        c.net, "classification", output_factor="diagonal", eigenvalue_corrected=True
    ),
    "KFAC: prior of each weight": lambda c: lp.KFAC(c.net, "classification", prior_precision=torch.ones(53)),
    "KFAC: dense limit": lambda c: lp.KFAC(c.net, "classification", dense_limit=-1),
    "KFAC: Hessian": lambda c: lp.KFAC(c.net, "classification", backend=lp.Native("hessian")).fit([(c.x, c.y)]),
    "KFAC: factor rank": lambda c: lp.KFAC(c.net, "classification", factor_rank=0),
    "KFAC: factor rank 1.5": lambda c: lp.KFAC(c.net, "classification", factor_rank=1.5),
    "LowRank: rank 0": lambda c: lp.LowRank(c.net, "classification", rank=0),
    "LowRank: rank 1.5": lambda c: lp.LowRank(c.net, "classification", rank=1.5),
    "LowRank: tolerance": lambda c: lp.LowRank(c.net, "classification", tolerance=2.0),
    "LowRank: text tolerance": lambda c: lp.LowRank(c.net, "classification", tolerance="tight"),
    "LowRank: probes": lambda c: lp.LowRank(c.net, "classification", remainder_probes=-1),
    "LowRank: an iterator": lambda c: lp.LowRank(c.net, "classification").fit(iter([(c.x, c.y)])),
    "EKFAC: an iterator": lambda c: lp.KFAC(c.net, "classification", eigenvalue_corrected=True).fit(iter([(c.x, c.y)])),
    "SampledLaplace: samples": lambda c: lp.SampledLaplace(c.net, "classification", n_samples=0),
    "SampledLaplace: solver": lambda c: lp.SampledLaplace(c.net, "classification", solver="lu"),
    "SampledLaplace: solver option": lambda c: lp.SampledLaplace(
        c.net, "classification", solver={"name": "cg", "speed": 2}
    ),
    "SampledLaplace: chunk size": lambda c: lp.SampledLaplace(c.net, "classification", chunk_size=0),
    "SampledLaplace: backend": lambda c: lp.SampledLaplace(c.net, "classification", backend=lp.Native("hessian")),
    "SampledLaplace: update": lambda c: c.fitted("SampledLaplace").update([(c.x, c.y)]),
    "CGSolver: tolerance": lambda c: lp.CGSolver(tolerance=-1.0),
    "CGSolver: iterations": lambda c: lp.CGSolver(max_iterations=0),
    "CGSolver: preconditioner": lambda c: lp.CGSolver(preconditioner="ilu"),
    "SGDSolver: learning rate": lambda c: lp.SGDSolver(learning_rate=-1.0),
    "SGDSolver: momentum": lambda c: lp.SGDSolver(momentum=1.5),
    "NullSpace: rows": lambda c: lp.NullSpace(c.net, "classification", rows="columns"),
    "NullSpace: projector": lambda c: lp.NullSpace(c.net, "classification", projector="qr"),
    "NullSpace: samples": lambda c: lp.NullSpace(c.net, "classification", n_samples=-2),
    "NullSpace: no null space": lambda c: lp.NullSpace(torch.nn.Linear(4, 3).double(), "classification").fit(
        [(c.x, c.y)]
    ),
    "VIKING: mode": lambda c: lp.VIKING(c.net, "classification", mode="ante_hoc"),
    "VIKING: expectation": lambda c: lp.VIKING(c.net, "classification", expectation="mean"),
    "VIKING: rank": lambda c: lp.VIKING(c.net, "classification", rank="low"),
    "VIKING: kl weight": lambda c: lp.VIKING(c.net, "classification", kl_weight=-1.0),
    "VIKING: image std": lambda c: lp.VIKING(c.net, "classification", image_std=0.0),
    "VIKING: scale fit": lambda c: lp.VIKING(c.net, "classification", scale_fit="newton"),
    "ELBOTraining: epochs": lambda c: lp.ELBOTraining(epochs=0),
    "ELBOTraining: learning rate": lambda c: lp.ELBOTraining(learning_rate=NAN),
    "ELBOTraining: gamma": lambda c: lp.ELBOTraining(gamma=2.0),
    "ScaleFit: optimizer": lambda c: lp.ScaleFit("sgdd"),
    "Riemannian: tangent": lambda c: lp.Riemannian(c.net, "classification", tangent="MetricBNN"),
    "Riemannian: itself": lambda c: lp.Riemannian(c.net, "classification", tangent=lp.Riemannian),
    "Riemannian: tangent of another network": lambda c: lp.Riemannian(network(), "classification", tangent=gaussian(c)),
    "Riemannian: tangent that is no class": lambda c: lp.Riemannian(c.net, "classification", tangent=3),
    "Riemannian: tangent option": lambda c: lp.Riemannian(c.net, "classification", tangent_options={"rank": 3}),
    "Riemannian: method": lambda c: lp.Riemannian(c.net, "classification", method="straight"),
    "Riemannian: samples": lambda c: lp.Riemannian(c.net, "classification", n_samples=0),
    "Riemannian: an iterator": lambda c: lp.Riemannian(c.net, "classification").fit(iter([(c.x, c.y)])),
    "Riemannian: draw none": lambda c: c.fitted("Riemannian").draw(0),
    "Riemannian: other data": lambda c: c.fitted("Riemannian").draw(1, data=[(c.x + 1, c.y)]),
    "ExponentialMap: rtol": lambda c: lp.ExponentialMap(rtol=-1.0),
    "ExponentialMap: evaluations": lambda c: lp.ExponentialMap(max_evaluations=0),
    "ExponentialMap: minibatch": lambda c: lp.ExponentialMap(minibatch=0),
    "Diffusion: kind": lambda c: lp.Diffusion("kernels"),
    "Diffusion: steps": lambda c: lp.Diffusion(n_steps=0),
    "Diffusion: rank": lambda c: lp.Diffusion(rank=-1),
    "MetricBNN: particles": lambda c: lp.MetricBNN(c.net, "classification", n_particles=0),
    "MetricBNN: steps": lambda c: lp.MetricBNN(c.net, "classification", n_steps=0),
    "MetricBNN: step size": lambda c: lp.MetricBNN(c.net, "classification", step_size=-0.1),
    "MetricBNN: learning rate": lambda c: lp.MetricBNN(c.net, "classification", learning_rate="fast"),
    "MetricBNN: reduction": lambda c: lp.MetricBNN(c.net, "classification", reduction="max"),
    "MetricBNN: objective": lambda c: lp.MetricBNN(c.net, "classification", objective="risk"),
    "MetricBNN: latent option": lambda c: lp.MetricBNN(c.net, "classification", latent={"width": 3}),
    "MetricBNN: a trillion particles": lambda c: lp.MetricBNN(c.net, "classification", n_particles=10**12).fit(
        [(c.x, c.y)]
    ),
    "LatentModel: dimension": lambda c: lp.posteriors.metric_bnn.LatentModel(dimension=0),
    "Subnetwork: no selector": lambda c: lp.Subnetwork(c.net, "classification"),
    "Subnetwork: all and more": lambda c: lp.Subnetwork(c.net, "classification", lp.LargestMagnitude(1000)).fit(
        [(c.x, c.y)]
    ),
    "Subnetwork: posterior": lambda c: lp.Subnetwork(
        c.net, "classification", lp.LargestMagnitude(5), posterior="MetricBNN"
    ).fit([(c.x, c.y)]),
    "LargestMagnitude: none": lambda c: lp.LargestMagnitude(0),
    "LargestMagnitude: a share above one": lambda c: lp.LargestMagnitude(1.5),
    "LargestVariance: variances": lambda c: lp.LargestVariance(5, "swagg"),
    "Random: negative": lambda c: lp.Random(-1),
    "DiagonalSWAG: snapshots": lambda c: lp.DiagonalSWAG(n_snapshots=0),
    "DiagonalSWAG: learning rate": lambda c: lp.DiagonalSWAG(learning_rate=0.0),
    "Gaussian: text": lambda c: lp.Gaussian("1.2"),
    "Gaussian: zero": lambda c: lp.Gaussian(0.0),
    "Gaussian: None": lambda c: lp.Gaussian(None),
    "Gaussian: table": lambda c: lp.Gaussian([[1.0]]),
    "LogDensity: no function": lambda c: lp.LogDensity(3),
    "LogDensity: a sum": lambda c: lp.Full(c.net, lambda out, y: (out - y).square().sum()).fit([(c.x, c.t)]),
    "Native: kind": lambda c: lp.Native("fisher"),
    "Native: samples": lambda c: lp.Native("ggn_mc", n_samples=-1),
    "Groups: gaps": lambda c: lp.Groups("mine", ("a", "b"), torch.tensor([0, 0])),
    "Groups: floating": lambda c: lp.Groups("mine", ("a",), torch.zeros(3)),
    "Groups: of another network": lambda c: setattr(
        gaussian(c), "prior_groups", lp.Groups("mine", ("a",), torch.zeros(3, dtype=torch.long))
    ),
    "set: noise negative": lambda c: setattr(regression(c), "noise_std", -1.0),
    "set: noise text": lambda c: setattr(regression(c), "noise_std", "loud"),
    "set: noise of more outputs": lambda c: setattr(regression(c), "noise_std", torch.ones(9)),
    "set: link": lambda c: gaussian(c).predictive(c.x, link=3),
    "set: predictive mean": lambda c: setattr(gaussian(c), "predictive_mean", "median"),
    "set: tangent mean without one": lambda c: setattr(gaussian(c), "predictive_mean", "tangent"),
}

TUNERS: Kinds = {
    "MarginalLikelihood: structure": lambda c: lp.MarginalLikelihood("blockwise"),
    "MarginalLikelihood: iterations": lambda c: lp.MarginalLikelihood(max_iterations=0),
    "MarginalLikelihood: tolerance": lambda c: lp.MarginalLikelihood(tolerance=-1.0),
    "MarginalLikelihood: diagonal of KFAC": lambda c: gaussian(c).fit_prior_precision(
        lp.MarginalLikelihood("diagonal")
    ),
    "MacKay: tolerance": lambda c: lp.MacKay(tolerance=NAN),
    "EM: iterations": lambda c: lp.ExpectationMaximisation(max_iterations=1.5),
    "Tangent: predictive mean": lambda c: lp.Tangent(predictive_mean="mode"),
    "Tangent: method": lambda c: lp.Tangent(method="gradient"),
    "Tangent: other data": lambda c: gaussian(c).fit_prior_precision(lp.Tangent(data=[(c.x + 1, c.y)])),
    "Validation: no data": lambda c: gaussian(c).fit_prior_precision("validation"),
    "Validation: empty data": lambda c: gaussian(c).fit_prior_precision("validation", data=[]),
    "Validation: ignored data": lambda c: gaussian(c).fit_prior_precision(
        "validation", data=[(c.x, torch.full_like(c.y, -100))]
    ),
    "Validation: grid": lambda c: gaussian(c).fit_prior_precision("validation", data=[(c.x, c.y)], grid=[-1.0, 1.0]),
    "Validation: empty grid": lambda c: gaussian(c).fit_prior_precision("validation", data=[(c.x, c.y)], grid=[]),
    "Validation: text grid": lambda c: gaussian(c).fit_prior_precision("validation", data=[(c.x, c.y)], grid="log"),
    "Validation: link": lambda c: gaussian(c).fit_prior_precision("validation", data=[(c.x, c.y)], link="logit"),
    "Validation: loss": lambda c: gaussian(c).fit_prior_precision("validation", data=[(c.x, c.y)], loss="accuracy"),
    "Validation: loss is NaN": lambda c: gaussian(c).fit_prior_precision(
        "validation", data=[(c.x, c.y)], loss=lambda prediction, y: torch.tensor(NAN)
    ),
    "LeaveOneOut: kappa": lambda c: lp.LeaveOneOut(kappa=-1.0),
    "LeaveOneOut: leverages": lambda c: lp.LeaveOneOut(leverages="mine"),
    "LeaveOneOut: unit": lambda c: lp.LeaveOneOut(unit="batch"),
    "LeaveOneOut: other data": lambda c: gaussian(c).fit_prior_precision(
        lp.LeaveOneOut(data=[(c.x[:5], c.y[:5])], weight_decay=0.1)
    ),
    "LeaveOneOut: without the weight decay": lambda c: gaussian(c).fit_prior_precision("leave_one_out"),
    "Auto: weight decay": lambda c: gaussian(c).fit_prior_precision(lp.Auto(weight_decay=-1.0)),
    "Auto: samples": lambda c: gaussian(c).fit_prior_precision(lp.Auto(n_samples=0)),
    "Auto: link": lambda c: gaussian(c).fit_prior_precision(lp.Auto(link="logit")),
    "LineSearch: allowance": lambda c: lp.LineSearch(allowance=-1.0),
    "LineSearch: of a Gaussian": lambda c: gaussian(c).fit_prior_precision(lp.LineSearch()),
    "VariationalBound: of a Gaussian": lambda c: gaussian(c).fit_prior_precision(lp.VariationalBound()),
    "SampledEvidence: method": lambda c: lp.SampledEvidence("newton"),
    "SampledEvidence: steps": lambda c: lp.SampledEvidence(max_steps=0),
    "tuner and structure": lambda c: gaussian(c).fit_prior_precision(lp.MacKay(), "layerwise"),
    "tuner class": lambda c: gaussian(c).fit_prior_precision(lp.MacKay),
    "evidence: of a negative prior": lambda c: gaussian(c).log_marginal_likelihood(-1.0),
    "evidence: of two temperatures": lambda c: gaussian(c).log_marginal_likelihood(temperature=torch.ones(2)),
    "evidence: of the noise of classes": lambda c: gaussian(c).log_marginal_likelihood(noise_std=1.0),
    "leave_one_out: leverages": lambda c: lp.leave_one_out(gaussian(c), leverages="some"),
    "leave_one_out: other data": lambda c: lp.leave_one_out(gaussian(c), [(c.x + 1, c.y)]),
    "leave_one_out: kappa": lambda c: lp.leave_one_out(gaussian(c), kappa=NAN),
    "calibrate: no posterior": lambda c: lp.calibrate(3),
    "calibrate: not fitted": lambda c: lp.calibrate(lp.KFAC(c.net, "classification")),
    "calibrate: MetricBNN": lambda c: lp.calibrate(c.fitted("MetricBNN")),
    "calibrate: other data": lambda c: lp.calibrate(gaussian(c), [(c.x + 1, c.y)]),
    "calibrate: kappa": lambda c: lp.calibrate(gaussian(c), weight_decay=0.1, kappa=-1.0),
    "calibrate: interpolation": lambda c: lp.calibrate(gaussian(c), weight_decay=0.1, interpolation=-1.0),
    "calibrate: fallback": lambda c: lp.calibrate(gaussian(c), fallback="map"),
    "calibrate: link": lambda c: lp.calibrate(gaussian(c), link="logit"),
    "calibrate: regression": lambda c: lp.calibrate(regression(c)),
    "freeze: without data": lambda c: (
        lp.KFAC(c.net, "classification", parameters="last_layer").fit(iter([(c.x, c.y)])).freeze()
    ),
    "freeze: Monte Carlo": lambda c: (
        setattr(p := lp.KFAC(c.net, "classification", parameters="last_layer").fit([(c.x, c.y)]), "link", "mc")
        or p.freeze(c.x)
    ),
}

PREDICTIONS: Kinds = {
    "log_prob: other rows": lambda c: gaussian(c).predictive(c.x).log_prob(c.y[:3]),
    "log_prob: labels too large": lambda c: gaussian(c).predictive(c.x).log_prob(c.y + 1),
    "log_prob: floating labels": lambda c: gaussian(c).predictive(c.x).log_prob(c.t),
    "log_prob: text": lambda c: gaussian(c).predictive(c.x).log_prob("cat"),
    "log_prob: NaN": lambda c: regression(c).predictive(c.x).log_prob(with_entry(c.t, NAN)),
    "quantile: of classes": lambda c: gaussian(c).predictive(c.x).quantile(0.5),
    "quantile: 1.5": lambda c: regression(c).predictive(c.x).quantile(1.5),
    "quantile: NaN": lambda c: regression(c).predictive(c.x).quantile(NAN),
    "interval: 0": lambda c: regression(c).predictive(c.x).interval(0.0),
    "interval: 95": lambda c: regression(c).predictive(c.x).interval(95),
    "interval: of classes": lambda c: gaussian(c).predictive(c.x).interval(0.9),
    "load: no folder": lambda c: lp.load(c.folder / "nothing", c.net),
    "load: None": lambda c: lp.load(None, c.net),
    "load: no network": lambda c: lp.load(c.folder, {}),
    "register: no class": lambda c: lp.register("Mine", 3),
    "register: no name": lambda c: lp.register("", lp.Full),
    "register_backend: taken": lambda c: register_backend("native", lp.BackPack),
    "register_backend: no class": lambda c: register_backend("mine", 3),
    "get_posterior: unknown": lambda c: lp.get_posterior("Laplace"),
    "training: epochs": lambda c: trained(c, epochs=0),
    "training: posterior": lambda c: trained(c, posterior="MetricBNN"),
    "training: structure": lambda c: trained(c, structure="blocks"),
    "training: likelihood": lambda c: trained(c, likelihood="classes"),
    "training: prior": lambda c: trained(c, prior_precision=-1.0),
    "training: temperature": lambda c: trained(c, temperature=0.0),
    "training: no data": lambda c: train_marginal_likelihood(network(), [], epochs=1),
    "training: labels": lambda c: train_marginal_likelihood(network(), [(c.x, c.y + 1)], epochs=1),
    "training: no network": lambda c: train_marginal_likelihood(3, [(c.x, c.y)], epochs=1),
    "training: optimizer": lambda c: trained(c, optimizer="adamm"),
    "landscape: no data": lambda c: LossLandscape(c.net, "classification", []),
    "landscape: chunk size": lambda c: landscape(c, chunk_size=0),
    "landscape: prior": lambda c: landscape(c, prior_precision=-1.0),
    "geodesic: other size": lambda c: exponential_map(landscape(c), torch.zeros(3), torch.zeros(1, 3)),
    "geodesic: NaN": lambda c: has_status(
        exponential_map(landscape(c), start(c), torch.full((1, 53), NAN, dtype=torch.float64)), PathStatus.ARRIVED
    ),
    "geodesic: rtol": lambda c: exponential_map(landscape(c), start(c), start(c)[None], rtol=-1.0),
    "geodesic: times": lambda c: geodesic(landscape(c), start(c), start(c)[None], torch.tensor([1.0, 0.5])),
    "geodesic: evaluations": lambda c: exponential_map(landscape(c), start(c), start(c)[None], max_evaluations=0),
    "curvature: probes": lambda c: estimate_scalar_curvature(landscape(c), start(c), probes=0),
    "curvature: deflate": lambda c: estimate_scalar_curvature(landscape(c), start(c), deflate=99),
    "diffuse: scheme": lambda c: diffuse(
        noise_field(landscape(c), lp.Diffusion(n_steps=2)), start(c), start(c)[None, None], scheme="leapfrog"
    ),
    "accuracy: shapes": lambda c: metrics.accuracy(torch.rand(3, 2), torch.zeros(4, dtype=torch.long)),
    "accuracy: labels": lambda c: metrics.accuracy(torch.eye(2), torch.tensor([0, 2])),
    "accuracy: empty": lambda c: metrics.accuracy(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)),
    "nll: NaN": lambda c: metrics.negative_log_likelihood(torch.full((1, 2), NAN), torch.tensor([0])),
    "ece: bins": lambda c: metrics.expected_calibration_error(torch.eye(2), torch.tensor([0, 1]), n_bins=0),
    "ece: no probabilities": lambda c: metrics.expected_calibration_error(3 * torch.eye(2), torch.tensor([0, 1])),
    "gaussian_nll: variance": lambda c: metrics.gaussian_nll(V, -V, V),
    "crps: shapes": lambda c: metrics.crps_gaussian(V, V, V[:2]),
    "auroc: empty": lambda c: metrics.ood_auroc(V[:0], V),
    "auroc: NaN": lambda c: metrics.ood_auroc(V * NAN, V),
}


def start(c: Case) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in c.net.parameters()])


LINALG: Kinds = {
    "eigsh: no function": lambda c: linalg.eigsh(A, 3, 1),
    "eigsh: k above n": lambda c: linalg.eigsh(times, 3, 4),
    "eigsh: k zero": lambda c: linalg.eigsh(times, 3, 0),
    "eigsh: n zero": lambda c: linalg.eigsh(times, 0, 1),
    "eigsh: n wrong": lambda c: linalg.eigsh(times, 5, 1),
    "eigsh: which": lambda c: linalg.eigsh(times, 3, 1, which="LM"),
    "eigsh: tolerance": lambda c: linalg.eigsh(times, 3, 1, tolerance=-1.0),
    "eigsh: start": lambda c: linalg.eigsh(times, 3, 1, v0=torch.zeros(3, dtype=torch.float64)),
    "eigsh: not symmetric": lambda c: linalg.eigsh(lambda v: v @ A.roll(1, 0), 3, 1, dtype=torch.float64),
    "eigsh: NaN": lambda c: linalg.eigsh(lambda v: v * NAN, 3, 1),
    "svds: number of rows": lambda c: linalg.svds(lambda v: v @ A[:2].T, 3, 1, dtype=torch.float64),
    "svds: transpose": lambda c: linalg.svds(times, 3, 1, rmatvec=lambda v: 2 * v @ A, dtype=torch.float64),
    "lanczos: depth": lambda c: linalg.lanczos(times, V, 0),
    "lanczos: depth above n": lambda c: linalg.lanczos(times, V, 9),
    "lanczos: zero": lambda c: linalg.lanczos(times, 0 * V, 2),
    "lanczos: integers": lambda c: linalg.lanczos(times, V.long(), 2),
    "lanczos: NaN": lambda c: linalg.lanczos(times, V * NAN, 2),
    "arnoldi: depth above n": lambda c: linalg.arnoldi(times, V, 9),
    "arnoldi: column vectors": lambda c: linalg.arnoldi(lambda v: A[:2] @ v, V, 2),
    "block_lanczos: one vector": lambda c: linalg.block_lanczos(times, V, 2),
    "bidiagonalize: zero": lambda c: linalg.bidiagonalize(times, 0 * V, 2),
    "cg: shape": lambda c: linalg.cg(times, V[:2]),
    "cg: rtol": lambda c: linalg.cg(times, V, rtol=-1.0),
    "cg: indefinite": lambda c: has_status(linalg.cg(lambda v: -times(v), V), Status.CONVERGED),
    "cg: iterations": lambda c: linalg.cg(times, V, max_iterations=0),
    "cg: NaN": lambda c: has_status(linalg.cg(times, V * NAN), Status.CONVERGED),
    "cg: text": lambda c: linalg.cg(times, "b"),
    "minres: shifts": lambda c: linalg.minres(times, V, shifts=torch.ones(2, 2)),
    "minres: NaN": lambda c: has_status(linalg.minres(lambda v: v * NAN, V), Status.CONVERGED),
    "lsmr: no transpose that fits": lambda c: linalg.lsmr(times, lambda v: v[:2], V),
    "lsmr: damping": lambda c: has_status(linalg.lsmr(times, times, V, damp=NAN), Status.CONVERGED),
    "matrix_function: depth": lambda c: linalg.matrix_function(times, torch.exp, V, depth=0),
    "matrix_function: gradient": lambda c: linalg.matrix_function(times, torch.exp, V, gradient="none"),
    "matrix_function: log of negatives": lambda c: linalg.matrix_function(lambda v: -times(v), torch.log, V),
    "matrix_function: not elementwise": lambda c: linalg.matrix_function(times, torch.sum, V),
    "slq_trace: probes": lambda c: linalg.slq_trace(times, torch.exp, 3, probes=0),
    "slq_trace: distribution": lambda c: linalg.slq_trace(times, torch.exp, 3, distribution="uniform"),
    "slq_logdet: indefinite": lambda c: linalg.slq_logdet(lambda v: -times(v), 3, dtype=torch.float64),
    "trace: method": lambda c: linalg.trace(times, 3, method="exactly"),
    "trace: matvecs": lambda c: linalg.trace(times, 3, matvecs=0),
    "diagonal: method": lambda c: linalg.diagonal(times, 3, method="hutch"),
    "nystrom: rank": lambda c: linalg.nystrom(times, 3, 0),
    "nystrom: rank 1.5": lambda c: linalg.nystrom(times, 3, 1.5, dtype=torch.float64),
    "project_null_space: shape": lambda c: linalg.project_null_space(times, times, V[:2]),
    "Dense: vector": lambda c: linalg.Dense(V),
    "Dense: integers": lambda c: linalg.Dense(A.long()),
    "Dense: not symmetric": lambda c: linalg.Dense(A.roll(1, 0), symmetric=True),
    "Diagonal: matrix": lambda c: linalg.Diagonal(A),
    "Kronecker: empty": lambda c: linalg.Kronecker([]),
    "BlockDiagonal: empty": lambda c: linalg.BlockDiagonal([]),
    "Identity: negative": lambda c: linalg.Identity(-1),
    "as_operator: shape": lambda c: linalg.as_operator(times, (3, 3, 3)),
    "from_scipy: list": lambda c: linalg.from_scipy([1, 2]),
    "draw_probes: kind": lambda c: linalg.draw_probes("cauchy", 2, 3),
    "draw_probes: count": lambda c: linalg.draw_probes("gaussian", -1, 3),
    "draw_probes: generator": lambda c: linalg.draw_probes("gaussian", 1, 3, generator=3),
    "operators: sum of other sizes": lambda c: linalg.Dense(A) + linalg.Identity(4),
    "operators: product of other sizes": lambda c: linalg.Dense(A) @ linalg.Identity(4),
}


def has_status(found: Any, good: int) -> None:
    """Iterations and paths say in ``statuses`` how each of a stack ended."""
    if bool((found.statuses != good).all()):
        raise Documented


KINDS: Kinds = {**NEWER, **OPTIONS, **TUNERS, **PREDICTIONS, **LINALG}
