"""Every structure on small twins of real networks, against per-example Jacobians that are written out."""

from __future__ import annotations

import copy
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from zoo.architectures import ARCHITECTURES, Architecture, take

import laplace_plus as lp
from laplace_plus.batches import call, output_tensor
from laplace_plus.linalg import DenseBlock, DiagonalBlock

N, FIRST = 5, 3

each = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)


@cache
def oracle(architecture: Architecture) -> tuple[torch.Tensor, torch.Tensor, dict[str, slice]]:
    """Jacobians ``[B, M·C, P]`` example by example through plain autograd, the dense GGN, and where parameters lie."""
    model = architecture.model()
    model = copy.deepcopy(getattr(model, "_orig_mod", model)).eval()
    for module in model.modules():
        module._compiled_call_impl = None
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs, _ = architecture.data(N)
    likelihood = lp.Categorical() if architecture.likelihood == "classification" else architecture.likelihood
    jacobians, curvature = [], 0
    for n in range(N):
        raw = output_tensor(call(model, take(inputs, slice(n, n + 1))))
        outputs = raw.movedim(likelihood.output_axis, -1).reshape(-1, architecture.n_outputs)
        rows = [
            torch.autograd.grad(value, list(chosen.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
            for value in outputs.flatten()
        ]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, outputs.shape)
        if isinstance(likelihood, lp.Gaussian):
            hessian = torch.eye(architecture.n_outputs, dtype=torch.float64) / likelihood.noise_std.double() ** 2
            hessian = hessian.expand(len(outputs), -1, -1)
        else:
            p = outputs.detach().softmax(-1)
            hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        curvature = curvature + torch.einsum("mcp,mcd,mdq->pq", jacobian, hessian, jacobian)
        jacobians.append(jacobian.flatten(0, 1))
    places, start = {}, 0
    for name, parameter in chosen.items():
        places[name] = slice(start, start + parameter.numel())
        start += parameter.numel()
    return torch.stack(jacobians), curvature, places


def selected(architecture: Architecture, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    jacobian, curvature, places = oracle(architecture)
    index = torch.cat([torch.arange(places[name].start, places[name].stop) for name in names])
    return jacobian[..., index], curvature[index[:, None], index]


def fitted(cls, architecture: Architecture, **options) -> lp.Posterior:
    posterior = cls(architecture.model(), architecture.likelihood, prior_precision=0.7, **options)
    return posterior.fit(architecture.loader(N, FIRST))


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-8) -> None:
    assert actual.shape == wanted.shape
    scale = wanted.abs().max().clamp(min=1e-12)
    assert float((actual - wanted).abs().max() / scale) < tolerance


def assert_functional(posterior: lp.Posterior, architecture: Architecture) -> None:
    """``J Σ Jᵀ`` in all its forms, from the written-out Jacobian."""
    jacobian, _ = selected(architecture, posterior.parameter_names)  # [B, MC, P]
    inputs, _ = architecture.data(N)
    covariance = posterior.covariance_matrix()
    mean, functional = posterior.functional_posterior(inputs)
    c = architecture.n_outputs
    blocks = jacobian.unflatten(1, (-1, c))
    wanted = torch.einsum("bmcp,pq,bmdq->bmcd", blocks, covariance, blocks)
    assert mean.shape == (N, *architecture.positions, c)
    assert_near(functional.reshape(N, -1, c, c), wanted, 1e-9)
    variance = posterior.functional_posterior(inputs, outputs="diagonal").covariance
    assert_near(variance.reshape(N, -1, c), wanted.diagonal(dim1=-2, dim2=-1), 1e-9)
    joint = posterior.functional_posterior(inputs, joint=True).covariance
    flat = jacobian.flatten(0, 1)
    assert_near(joint.reshape(len(flat), len(flat)), flat @ covariance @ flat.T, 1e-9)


@each
def test_diagonal(architecture):
    posterior = fitted(lp.Diagonal, architecture)
    _, curvature = selected(architecture, posterior.parameter_names)
    assert posterior.n_parameters == len(curvature)
    assert posterior.n_data == N
    assert_near(posterior.precision_matrix().diagonal() - 0.7, curvature.diagonal())
    assert_functional(posterior, architecture)


@each
def test_kronecker(architecture):
    posterior = fitted(lp.KFAC, architecture)
    _, curvature = selected(architecture, posterior.parameter_names)
    precision = posterior.precision_matrix() - 0.7 * torch.eye(len(curvature), dtype=torch.float64)
    for layout, block in posterior.laplace_model().curvature:
        for place in layout.index.flatten(1):
            wanted = curvature[place[:, None], place]
            mine = precision[place[:, None], place]
            if isinstance(block, DenseBlock):
                assert_near(mine, wanted)
            elif isinstance(block, DiagonalBlock):
                assert_near(mine, wanted.diagonal().diag())
            else:  # without coupling between uses, both factors' scale is that of the exact block
                assert mine.diagonal().min() >= -1e-12
                assert (mine.diagonal() > 1e-12).equal(wanted.diagonal() > 1e-12) or "dead" in architecture.tags
    assert_functional(posterior, architecture)


@each
def test_eigenvalue_corrected_trace(architecture):
    posterior = fitted(lp.KFAC, architecture, eigenvalue_corrected=True)
    _, curvature = selected(architecture, posterior.parameter_names)
    trace = posterior.precision_matrix().trace() - 0.7 * len(curvature)
    assert float(trace) == pytest.approx(float(curvature.trace()), rel=1e-8)


@each
def test_full(architecture):
    if oracle(architecture)[0].shape[-1] > 1500:
        pytest.skip("too large to write out")
    posterior = fitted(lp.Full, architecture)
    _, curvature = selected(architecture, posterior.parameter_names)
    assert_near(posterior.precision_matrix() - 0.7 * torch.eye(len(curvature), dtype=torch.float64), curvature)


@each
@pytest.mark.parametrize("cls", [lp.Full, lp.KFAC, lp.Diagonal])
def test_last_layer(architecture, cls):
    posterior = fitted(cls, architecture, parameters="last_layer")
    assert posterior.parameter_names == architecture.last_layer
    _, curvature = selected(architecture, posterior.parameter_names)
    if cls is lp.Full:
        assert_near(posterior.precision_matrix() - 0.7 * torch.eye(len(curvature), dtype=torch.float64), curvature)
    elif cls is lp.Diagonal:
        assert_near(posterior.precision_matrix().diagonal() - 0.7, curvature.diagonal())
    assert_functional(posterior, architecture)


@each
def test_only_known_parameters_take_the_general_path(architecture):
    posterior = fitted(lp.KFAC, architecture)
    rows = posterior.summary().rows
    assert tuple(name for name, *_ in rows) == posterior.parameter_names
    general = {name for name, _, _, treatment in rows if "general" in treatment}
    unexpected = {name for name in general if not any(fnmatchcase(name, glob) for glob in architecture.general)}
    assert not unexpected
    unneeded = [glob for glob in architecture.general if not any(fnmatchcase(name, glob) for name in general)]
    assert not unneeded
