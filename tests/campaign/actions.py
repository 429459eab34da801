"""Public calls on a posterior of each class, and on what has none, which interrupts hit at random points."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from campaign.cases import (
    ADAPTED,
    CLASSES,
    DATA,
    FITS,
    GAUSSIAN,
    X,
    answer,
    fitted,
    model_of,
    seeded,
)
from torch import Tensor, nn

import laplace_plus as lp
from laplace_plus.applications import uses
from laplace_plus.applications.constraints import (
    NullSpaceOptimizer,
    Sparse,
    asymmetry,
    conservative,
    equivariant,
    null_space_gradient,
    periodic,
    project,
    value,
)
from laplace_plus.applications.reconstruction import ImagePosterior, differences, expected_absolute
from laplace_plus.testing import assert_untouched, snapshot

Action = Callable[[Any, Path], Any]


def vector_of(found: Any) -> Tensor:
    """What an action found, as one vector."""
    if isinstance(found, lp.Prediction):
        return torch.cat([found.mean.flatten(), found.variance.flatten()]).detach()
    if isinstance(found, dict):
        return vector_of([*found.values()])
    if isinstance(found, (tuple, list)):
        return torch.cat([vector_of(part) for part in found])
    if isinstance(found, Tensor):
        return found.detach().flatten().double()
    if isinstance(found, (int, float)):
        return torch.tensor([float(found)], dtype=torch.float64)
    return answer(found).flatten()


def save(posterior: Any, path: Path) -> Any:
    posterior.save(path / "saved")
    return lp.load(path / "saved", model_of(posterior))


# -- what has no posterior ---------------------------------------------------------------------------------------------


def state(net: nn.Module) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in net.state_dict().values()])


def hooks(net: nn.Module) -> list[bool]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [bool(vars(module)[kind]) for module in net.modules() for kind in kinds]


@contextmanager
def whole(mine: nn.Module, net: nn.Module, good: list[nn.Module]) -> Any:
    """Checks that a copy that is trained has some whole step's weights, and the network's own modes and no hooks."""
    try:
        yield
    finally:
        assert any(torch.equal(state(mine), state(one)) for one in good), "weights in the middle of a step"
        assert [m.training for m in mine.modules()] == [m.training for m in net.modules()], "modes"
        pairs = zip(mine.parameters(), net.parameters(), strict=True)
        assert all(x.requires_grad == y.requires_grad for x, y in pairs), "flags"
        assert not any(hooks(mine)), "hooks"


def training(train: Callable[..., Any], net: nn.Module, data: Any, **options: Any) -> Action:
    """Trains a copy of a network, which ends with what it had after some whole epoch."""
    net = copy.deepcopy(net)
    net[4] = nn.Identity()  # in place of the dropout, which draws from torch's global generator
    good = [copy.deepcopy(net) for _ in range(3)]
    for epochs, one in enumerate(good):
        if epochs:
            train(one, data, epochs=epochs, generator=seeded(), **options)

    def act(_: Any, path: Path) -> Tensor:
        mine, folder = copy.deepcopy(net), path / "training"
        with whole(mine, net, good):
            train(mine, data, epochs=2, checkpoint=folder, resume=True, generator=seeded(), **options)
        assert all(x.grad is None for x in mine.parameters()), "gradients"
        return state(mine)

    return act


def constrained(net: nn.Module, constraint: Callable[[], Any]) -> Action:
    """A step of SGD, which is taken or not, along a constraint."""

    def started() -> tuple[nn.Module, NullSpaceOptimizer]:
        mine = copy.deepcopy(net)
        for number, parameter in enumerate(p for p in mine.parameters() if p.requires_grad):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
        inner = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=0.1)
        return mine, NullSpaceOptimizer(inner, constraint(), mine, X[:4])

    good, optimizer = started()
    optimizer.step()

    def act(_: Any, path: Path) -> Tensor:
        mine, optimizer = started()
        with whole(mine, net, [net, good]):
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.count == 1 and optimizer.trained().keys()
        return torch.cat([state(mine), optimizer.values().detach().flatten()])

    return act


class Rotated(nn.Module):
    """A vector field of the network's."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).roll(1, -1)


def of_constraints(net: nn.Module) -> dict[str, Action]:
    field = Rotated(net)
    return {
        "step, periodic": constrained(net, lambda: periodic(1.0)),
        "step, conservative": constrained(net, lambda: conservative(1, seeded())),
        "step, sparse": constrained(net, lambda: Sparse(0.5)),
        "project": lambda p, _: project(net, value(X[:2], torch.zeros(2, 3).double()), steps=3).state,
        "project, equivariant": lambda p, _: project(net, equivariant(lambda x: x.flip(1)), X[:3], steps=2).state,
        "null-space gradient": lambda p, _: null_space_gradient(lambda v: v[:3].square(), X.flatten(), X.flatten()),
        "asymmetry": lambda p, _: asymmetry(field.eval(), X[:3], generator=seeded()).value,
    }


def of_images() -> dict[str, Action]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout(), nn.Sigmoid(), nn.Conv2d(2, 1, 1)).double()
    operator, code, seen = (
        torch.randn(*shape, generator=seeded(), dtype=torch.float64) for shape in ((5, 16), (1, 1, 4, 4), (5,))
    )
    posterior, before = ImagePosterior(net, operator, noise_std=0.1).fit(code, seen), snapshot(net)

    def guarded(act: Callable[[Any], Any]) -> Action:
        """On a copy of the posterior, whose network stays as it is."""

        def acting(_: Any, path: Path) -> Any:
            mine = copy.copy(posterior)
            try:
                return act(mine)
            finally:
                assert_untouched(net, before)

        return acting

    found = {
        "image, fit": lambda p: p.fit(code, seen).variance(),
        "image, construct": lambda p: ImagePosterior(net, operator).fit(code, seen).covariance(),
        "image, tune": lambda p: p.fit_prior(max_steps=2).log_marginal_likelihood(),
        "image, tune by total variation": lambda p: p.fit_prior(total_variation=1.0, max_steps=2).complexity(),
        "image, hyperprior": lambda p: p.log_hyperprior(1.0),
        "image, sample": lambda p: p.sample(2, generator=seeded()),
        "image, density": lambda p: p.log_prob(p.image + 0.1, patch=2),
        "image, noise": lambda p: p.image_noise(3),
        "total variation": lambda p: expected_absolute(differences(p.image), torch.ones(24).double()),
    }
    return {title: guarded(act) for title, act in found.items()}


# -- posteriors --------------------------------------------------------------------------------------------------------


def of_gaussians(name: str, posterior: Any, data: Any) -> dict[str, Action]:
    net = posterior.network.model
    found: dict[str, Action] = {
        "evidence": lambda p, _: p.log_marginal_likelihood(torch.tensor(2.0)),
        "variance": lambda p, _: p.variance(),
        "density": lambda p, _: p.log_prob(p.mean + 0.1),
        "matrices": lambda p, _: (p.covariance_matrix(), p.precision_matrix()),
        "effective dimension": lambda p, _: p.effective_dimension(),
        "calibrate": lambda p, path: lp.calibrate(
            p, data, weight_decay=0.05, leverages="full", generator=seeded(), checkpoint=path / "calibration"
        ),
        "leave-one-out": lambda p, _: lp.leave_one_out(p, data, leverages="first_order").predictive().mean,
        "penalty": lambda p, _: p.penalty(net),
        "continue": lambda p, _: p.continue_on(net).fit(data, generator=seeded()),
        "select": lambda p, _: uses.select(p, X, 3, n_features=5, generator=seeded()).scores,
        "influence": lambda p, _: uses.influence(p, DATA[:1], data=data).mean,
        "self-influence": lambda p, _: uses.self_influence(p, data),
        "saliency": lambda p, _: uses.saliency(p),
        "prune": lambda p, _: uses.prune(p, sparsity=0.3, data=data).state_dict,
        "tune with a checkpoint": lambda p, path: p.fit_prior_precision(
            lp.LeaveOneOut(1.0, data=data), generator=seeded(), checkpoint=path / "tuning"
        ),
        "tune at the tangent's optimum": lambda p, path: p.fit_prior_precision(
            lp.Tangent(curvature_at="optimum", max_iterations=2, data=data),
            generator=seeded(),
            checkpoint=path / "tuning",
        ),
    }
    if name not in ("LowRank",):
        found["update"] = lambda p, path: p.update(data, generator=seeded(), checkpoint=path / "update")
    if name == "Diagonal":
        found["from variances"] = lambda p, _: lp.Diagonal.from_variance(net, p.variance(), "classification")
        found |= of_constraints(net) | of_images()
        found["ridge"] = lambda p, _: uses.ridge_left_out(X, X[:, 0] ** 2, 0.1).residual
    if name == "LowRank":
        found["remainder"] = lambda p, _: p.remainder().value
    if name == "Subnetwork":
        found["Wasserstein"] = lambda p, _: p.squared_wasserstein(torch.ones(100))
    if name == "KFAC":
        options = {"posterior": lp.KFAC, "frequency": 1, "hyper_steps": 2, "early_stopping": False}
        found["training"] = training(lp.train_marginal_likelihood, net, data, **options)
        found["data-emphasised training"] = training(lp.train_data_emphasized, net, data)
    if name in ("KFAC", "last layer"):
        other = fitted("Diagonal", net)
        found["mixture"] = lambda p, _: lp.Mixture([p, other]).predictive(X[:3], generator=seeded())
        found["mixture's weights"] = lambda p, _: lp.Mixture([p, other]).fit_weights(data).weights
        found["ensemble"] = lambda p, _: lp.Ensemble([net] * 2, "classification").predictive(X[:3])
        reals = [(x, x.sin()) for x, _ in DATA]
        found["ensemble's noise"] = lambda p, _: lp.Ensemble([net] * 2, "regression").fit(reals).predictive(X[:3])
    if name == "last layer":
        found["freeze"] = lambda p, _: p.freeze(X[:3])(X[:3])[0]
    return found


OF_ONE_CLASS: dict[str, Callable[[Any], dict[str, Action]]] = {
    "NullSpace": lambda data: {"evidence of α": lambda p, _: p.relative_log_evidence(2.0)},
    "VIKING": lambda data: {"ELBO": lambda p, _: (p.elbo(data).expected_nll, p.elbo(data).kl)},
    "VariationalLastLayer": lambda data: {"ELBO": lambda p, _: p.elbo(data)},
    "Riemannian": lambda data: {
        "draw": lambda p, path: p.draw(generator=seeded(), checkpoint=path / "draw"),
        "evidence": lambda p, _: p.log_marginal_likelihood(),
    },
    "MetricBNN": lambda data: {
        "latents": lambda p, _: p.decode(p.encode(p.mean + 0.1 * torch.ones(2, 1).double())),
        "extent": lambda p, _: p.fit_extent(data, grid=(0.5, 1.0), n_samples=3, generator=seeded()),
    },
    "SampledLaplace": lambda data: {
        "solve": lambda p, _: p.solve(data).samples,
        "effective dimension": lambda p, _: p.effective_dimension().value,
        "tune with a checkpoint": lambda p, path: p.fit_prior_precision(max_steps=2, checkpoint=path / "tuning"),
    },
    "ABNN": lambda data: {"scale": lambda p, _: p.fit_scale(data, grid=(0.5, 1.0), generator=seeded())},
    "SWAG": lambda data: {
        "collect": lambda p, _: p.collect().collect().collect().fit(data, generator=seeded()),
        "variance": lambda p, _: (p.variance(), p.covariance_matrix()),
    },
    "SpatialField": lambda data: {
        "displacements": lambda p, _: (p.std(X), p.covariance(X), p.mask(0.1, X).double()),
        "leave-one-out": lambda p, _: lp.leave_one_out(p, data),
        "render": lambda p, _: p.render_uncertainty(torch.full((12, 1), 0.5).double(), X[:, None]),
    },
}


def actions(name: str, posterior: Any, saved: Path, data: Any) -> dict[str, Action]:
    """By title; those that are refused are not of this class."""
    drawn = ("MetricBNN", "Riemannian", "ABNN", "VariationalLastLayer", "SWAG", ADAPTED)
    options = {"generator": seeded} if name in drawn else {}  # others have their samples

    def functional(p: Any, **own: Any) -> Any:
        return p.functional_posterior(X[:3], **own, **{key: make() for key, make in options.items()})

    found: dict[str, Action] = {
        "construct": lambda p, _: CLASSES[name](model_of(p), "classification").n_parameters,
        "construct and fit": lambda p, _: fitted(name, model_of(p), data=data),
        "fit": lambda p, _: p.fit(data, generator=seeded()),
        "sample": lambda p, _: p.sample(3, generator=seeded()),
        "functional": lambda p, _: functional(p),
        "functional, joint": lambda p, _: functional(p, joint=True),
        "functional, diagonal": lambda p, _: functional(p, outputs="diagonal"),
        "sampled": lambda p, _: p.predictive(X[:3], method="sampled", n_samples=3, generator=seeded()),
        "mutual information": lambda p, _: p.predictive(X[:3], generator=seeded()).mutual_information(),
        "predict": lambda p, _: p.predict(data, generator=seeded()),
        "probabilities": lambda p, _: p.predict_proba(X[:3], generator=seeded()),
        "summary": lambda p, _: len(str(p.summary())),
        "save and load": save,
        "copy": lambda p, _: copy.copy(p),
        "deep copy": lambda p, _: copy.deepcopy(p),
        "pickle": lambda p, _: pickle.loads(pickle.dumps(p)),
        "load": lambda p, _: lp.load(saved, model_of(p)),
        "state": lambda p, _: p.load_state_dict(p.state_dict()),
        "to": lambda p, _: p.to("cpu"),
        "through": lambda p, _: p.through(lambda x: model_of(p)(x)[:, :2]).functional_posterior(
            X[:3], **{key: make() for key, make in options.items()}
        ),
        "select by distance": lambda p, _: uses.select(p, X, 3, method="kmeans++", generator=seeded()).scores,
        "conformal": lambda p, _: lp.conformalize(p, data, generator=seeded()).predict_set(X[:3], generator=seeded()),
    }
    posterior.save(saved)
    for method in ("temperature", "vector", "matrix"):
        found[f"scaling, {method}"] = lambda p, _, method=method: lp.calibrate(
            p, data, method, generator=seeded()
        ).predictive(X[:3], generator=seeded())
    for link in posterior.likelihood.links:
        found[f"link {link}"] = lambda p, _, link=link: p.predictive(X[:3], link=link, generator=seeded())
    own = {"validation": {"data": data}, "leave_one_out": {"weight_decay": 0.05, "leverages": "full"}}
    for tuner in posterior.tuners:
        found[f"tune {tuner}"] = lambda p, _, tuner=tuner: p.fit_prior_precision(
            tuner, generator=seeded(), **own.get(tuner, {})
        )
    if name in FITS:
        found["fit with a checkpoint"] = lambda p, path: p.fit(data, generator=seeded(), checkpoint=path / "fit")
    if name in GAUSSIAN:
        found |= of_gaussians(name, posterior, data) if name != "SpatialField" else {}
    return found | (OF_ONE_CLASS[name](data) if name in OF_ONE_CLASS else {})
