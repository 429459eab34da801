"""Every structure on small twins of real networks, against per-example Jacobians that are written out."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from problems import batch_jacobian
from torch import nn
from zoo.architectures import Architecture, each, each_typical, named, take

import laplace_plus as lp
from laplace_plus.network.batches import call, output_tensor
from laplace_plus.structured import DenseBlock, DiagonalBlock

N, FIRST, PRIOR = 5, 3, 0.5


pytestmark = pytest.mark.usefixtures("double")


def plain(architecture: Architecture) -> nn.Module:
    """The network without anything compiled."""
    model = architecture.model()
    model = getattr(model, "_orig_mod", model)
    for module in model.modules():
        module._compiled_call_impl = None
        for name, child in module.named_children():
            setattr(module, name, getattr(child, "_orig_mod", child))
    return model


def arranged(architecture: Architecture, raw: torch.Tensor) -> torch.Tensor:
    """One example's outputs, ``[M, C]``."""
    axis = architecture.likelihood.output_axis if isinstance(architecture.likelihood, lp.Likelihood) else -1
    return raw.movedim(axis, -1).reshape(-1, architecture.n_outputs)


def output_hessian(architecture: Architecture, outputs: torch.Tensor) -> torch.Tensor:
    """``-∂² log p / ∂f²``, ``[M, C, C]``."""
    if isinstance(architecture.likelihood, lp.Gaussian):
        noise = float(architecture.likelihood.noise_std)
        return (torch.eye(architecture.n_outputs) / noise**2).expand(len(outputs), -1, -1)
    p = outputs.detach().softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def untied(model: torch.nn.Module) -> torch.nn.Module:
    """The same function with a parameter of its own for each use of a tied one."""
    first = {name for name, _ in model.named_parameters()}
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if name not in first:
            prefix, _, own = name.rpartition(".")
            setattr(model.get_submodule(prefix), own, torch.nn.Parameter(parameter.detach().clone()))
    return model


@cache
def oracle(architecture: Architecture, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, slice]]:
    """Jacobians ``[B, M·C, P]`` example by example through plain autograd, the dense GGN, and where parameters lie."""
    model = untied(plain(architecture)) if apart else plain(architecture)
    chosen = [name for name, p in model.named_parameters() if p.requires_grad]
    inputs, _ = architecture.data(N)
    jacobians = []
    curvature = torch.zeros(())
    for n in range(N):
        outputs = arranged(architecture, output_tensor(call(model, take(inputs, slice(n, n + 1)))))
        jacobian = batch_jacobian(model, outputs, chosen)
        hessian = output_hessian(architecture, outputs)
        curvature = curvature + torch.einsum("mcp,mcd,mdq->pq", jacobian, hessian, jacobian)
        jacobians.append(jacobian.flatten(0, 1))
    places, start = {}, 0
    own = architecture.model()
    for name, parameter in (model if apart else getattr(own, "_orig_mod", own)).named_parameters():
        if parameter.requires_grad:
            places[name] = slice(start, start + parameter.numel())
            start += parameter.numel()
    return torch.stack(jacobians), curvature, places


def selected(architecture: Architecture, names: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    jacobian, curvature, places = oracle(architecture)
    if not places.keys() >= set(names):
        jacobian, curvature, places = oracle(architecture, apart=True)
    index = torch.cat([torch.arange(places[name].start, places[name].stop) for name in names])
    return jacobian[..., index], curvature[index[:, None], index]


@cache
def fitted(cls, architecture: Architecture, **options) -> lp.Posterior:
    posterior = cls(architecture.model(), architecture.likelihood, prior_precision=PRIOR, **options)
    return posterior.fit(architecture.loader(N, FIRST))


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert actual.shape == wanted.shape
    scale = wanted.abs().max().clamp(min=1e-6)
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
    assert_near(functional.reshape(N, -1, c, c), wanted, architecture.tolerance)
    variance = posterior.functional_posterior(inputs, outputs="diagonal").covariance
    assert_near(variance.reshape(N, -1, c), wanted.diagonal(dim1=-2, dim2=-1), architecture.tolerance)
    joint = posterior.functional_posterior(inputs, joint=True).covariance
    flat = jacobian.flatten(0, 1)
    assert_near(joint.reshape(len(flat), len(flat)), flat @ covariance @ flat.T, architecture.tolerance)


@pytest.mark.quick(
    "unet",
    "lstm",
    "cells",
    "transformer_encoder",
    "bilinear",
    "siamese",
    "graph",
    "embedding_bag",
    "mixture_of_experts",
    "weight_normed",
    "tied_language_model",
    "functional",
    "held_twice",
    "frozen_backbone",
)
@pytest.mark.filterwarnings("ignore:Which rows belong")
@each
def test_diagonal(architecture):
    posterior = fitted(lp.Diagonal, architecture)
    _, curvature = selected(architecture, posterior.parameter_names)
    assert posterior.n_parameters == len(curvature)
    assert posterior.n_data == N
    assert_near(posterior.precision_matrix().diagonal() - PRIOR, curvature.diagonal(), architecture.tolerance)
    assert_functional(posterior, architecture)


@pytest.mark.quick(
    "resnet",
    "unet",
    "siamese",
    "transformer_encoder",
    "lstm",
    "cells",
    "tied_language_model",
    "bilinear",
    "graph",
    "embedding_bag",
    "mixture_of_experts",
    "weight_normed",
    "dropouts",
    "frozen_backbone",
    "unused",
    "functional",
    "held_twice",
    "two_names",
    "declared_out_of_order",
    "generator",
    "volumes",
    "attention",
    "compiled_part",
)
@pytest.mark.filterwarnings("ignore:Which rows belong")
@each
def test_kronecker(architecture):
    posterior = fitted(lp.KFAC, architecture)
    _, curvature = selected(architecture, posterior.parameter_names)
    precision = posterior.precision_matrix() - PRIOR * torch.eye(len(curvature))
    expected = kronecker_oracle(architecture)
    for layout, block in posterior.laplace_model().curvature:
        for place in layout.index.flatten(1):
            wanted = curvature[place[:, None], place]
            mine = precision[place[:, None], place]
            if isinstance(block, DenseBlock):
                assert_near(mine, wanted, architecture.tolerance)
            elif isinstance(block, DiagonalBlock):
                assert_near(mine, wanted.diagonal().diag(), architecture.tolerance)
            elif layout.names in expected:
                assert_near(mine, expected[layout.names], architecture.tolerance)
    assert_functional(posterior, architecture)


@cache
def kronecker_oracle(architecture: Architecture) -> dict[tuple[str, ...], torch.Tensor]:
    """``Σ g gᵀ ⊗ Σ a aᵀ / rows`` of linear modules and ungrouped convolutions, with hooks, example by example."""
    model = plain(architecture)
    sums: dict[str, list[torch.Tensor | float]] = {}
    inputs, _ = architecture.data(N)
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    for n in range(N):
        seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

        def remember(name, module, arguments, output, seen=seen):
            if not output.requires_grad:
                return output
            rows = arguments[0].detach()
            if isinstance(module, nn.Conv2d):
                rows = F.unfold(rows, module.kernel_size, module.dilation, module.padding, module.stride).mT
            rows = rows.flatten(0, -2)
            seen.append(
                (name, torch.cat([rows, torch.ones(len(rows), 1)], 1) if module.bias is not None else rows, output)
            )
            return output.clone()  # what follows may write in place

        hooks = [
            module.register_forward_hook(partial(remember, name))
            for name, module in model.named_modules()
            if type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1)
        ]
        outputs = arranged(architecture, output_tensor(call(model, take(inputs, slice(n, n + 1)))))
        hessian = output_hessian(architecture, outputs)
        nodes = [output for *_, output in seen]
        rows = [
            torch.autograd.grad(value, nodes, retain_graph=True, allow_unused=True, materialize_grads=True)
            for value in outputs.flatten()
        ]
        for number, (name, a, output) in enumerate(seen):
            g = torch.stack([row[number] for row in rows]).unflatten(0, outputs.shape)  # [M, C, *output]
            channels = 3 if output.ndim == 4 and isinstance(model.get_submodule(name), nn.Conv2d) else -1
            g = g.movedim(channels, -1).flatten(2, -2)  # [M, C, S, o]
            left = torch.einsum("mcso,mcd,mdsp->op", g, hessian, g)
            if mask is not None and len(a) == mask.shape[1] and not g[:, :, mask[n] == 0].any():
                a = a[mask[n] == 1]  # padding has no part in the factor
            total = sums.setdefault(name, [0.0, 0.0, 0])
            sums[name] = [total[0] + left, total[1] + a.mT @ a, total[2] + len(a)]
        for hook in hooks:
            hook.remove()
    result = {}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, (left, right, count) in sums.items():
        names = tuple(f"{name}.{kind}" for kind in ("weight", "bias") if f"{name}.{kind}" in trainable)
        result[names] = torch.kron(left.contiguous(), right.contiguous() / count)
    return result


@pytest.mark.parametrize(
    "name",
    [
        *("resnet", "vit", "unet", "siamese", "transformer_encoder"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v3", "timm_swin", "bert")),
    ],
)
def test_the_oracle_of_kronecker_factors_has_work_to_do(name):
    assert kronecker_oracle(named(name))


@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.quick(
    "unet", "lstm", "cells", "transformer_encoder", "tied_language_model", "embedding_bag", "mixture_of_experts"
)
@each_typical
def test_eigenvalue_corrected_trace(architecture):
    posterior = fitted(lp.KFAC, architecture, eigenvalue_corrected=True)
    _, curvature = selected(architecture, posterior.parameter_names)
    trace = posterior.precision_matrix().trace() - PRIOR * len(curvature)
    assert float(trace) == pytest.approx(float(curvature.trace()), rel=max(1e-8, architecture.tolerance))


@pytest.mark.quick(
    "lstm", "transformer_encoder", "tied_language_model", "bilinear", "siamese", "graph", "embedding_bag"
)
@pytest.mark.filterwarnings("ignore:Which rows belong")
@each_typical
def test_full(architecture):
    if oracle(architecture)[0].shape[-1] > 1500:
        pytest.skip("too large to write out")
    posterior = fitted(lp.Full, architecture)
    _, curvature = selected(architecture, posterior.parameter_names)
    assert_near(posterior.precision_matrix() - PRIOR * torch.eye(len(curvature)), curvature, architecture.tolerance)


@pytest.mark.quick(
    "Full-tied_language_model",
    "Full-dropouts",
    "Full-functional",
    "Full-mixture_of_experts",
    "Full-siamese",
    "Full-unet",
    "Full-transformer_encoder",
    "Full-frozen_backbone",
    "Full-held_twice",
    "Full-two_names",
    "Full-declared_out_of_order",
)
@each
@pytest.mark.parametrize("cls", [lp.Full, *(pytest.param(c, marks=pytest.mark.slow) for c in (lp.KFAC, lp.Diagonal))])
def test_last_layer(architecture, cls):
    posterior = fitted(cls, architecture, parameters="last_layer")
    assert posterior.parameter_names == architecture.last_layer
    _, curvature = selected(architecture, posterior.parameter_names)
    if cls is lp.Full:
        assert_near(posterior.precision_matrix() - PRIOR * torch.eye(len(curvature)), curvature, architecture.tolerance)
    elif cls is lp.Diagonal:
        assert_near(posterior.precision_matrix().diagonal() - PRIOR, curvature.diagonal(), architecture.tolerance)
    assert_functional(posterior, architecture)


@pytest.mark.filterwarnings("ignore:Which rows belong")
@pytest.mark.quick(
    "unet",
    "lstm",
    "transformer_encoder",
    "tied_language_model",
    "cells",
    "weight_normed",
    "embedding_bag",
    "bilinear",
    "mixture_of_experts",
)
@each_typical
def test_only_known_parameters_take_the_general_path(architecture):
    posterior = fitted(lp.KFAC, architecture)
    rows = posterior.summary().rows
    assert tuple(name for name, *_ in rows) == posterior.parameter_names
    general = {name for name, _, _, treatment in rows if "general" in treatment}
    unexpected = {name for name in general if not any(fnmatchcase(name, glob) for glob in architecture.general)}
    assert not unexpected
    unneeded = [glob for glob in architecture.general if not any(fnmatchcase(name, glob) for name in general)]
    assert not unneeded
