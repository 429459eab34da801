"""Dense float64 references that share no code with the package: Jacobians by autodiff, curvature, evidence."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def jacobian(net: nn.Module, x, names: list[str] | None = None, output_axis: int = -1) -> Tensor:
    """Jacobian of every example on its own, ``[B, M·C, P]`` with outputs flattened from ``[*, C]``."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    names = list(parameters) if names is None else names
    inputs = x if isinstance(x, tuple) else (x,)
    rows = []
    for n in range(len(inputs[0])):
        example = tuple(part[n : n + 1] for part in inputs)

        def outputs(chosen, example=example):
            out = functional_call(net, {**parameters, **chosen}, example)
            return out.movedim(output_axis, -1).reshape(-1)

        parts = jacrev(outputs)({name: parameters[name] for name in names})
        rows.append(torch.cat([parts[name].flatten(1) for name in names], 1))
    return torch.stack(rows)


def categorical_hessian(outputs: Tensor) -> Tensor:
    """``diag(p) − p pᵀ`` for logits ``[N, C]``."""
    p = outputs.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None]


def ggn(jacobians: Tensor, hessian: Tensor) -> Tensor:
    """``Σ Jᵀ Λ J`` for ``[N, C, P]`` and ``[N, C, C]``."""
    return torch.einsum("ncp,ncd,ndq->pq", jacobians, hessian, jacobians)


def gaussian_evidence(
    curvature: Tensor, deviation: Tensor, sse: float, count: int, precision: Tensor, noise_std: float = 1.0
) -> float:
    """Laplace evidence of a Gaussian likelihood, from the curvature at unit noise ``[P, P]`` and precisions ``[P]``."""
    fit = -0.5 * sse / noise_std**2 - count * (math.log(noise_std) + 0.5 * math.log(2 * math.pi))
    return fit + occam(curvature / noise_std**2, deviation, precision)


def occam(curvature: Tensor, deviation: Tensor, precision: Tensor) -> float:
    """``−½ dᵀP₀d − ½ log det(H + P₀) + ½ log det P₀``."""
    log_determinant = torch.linalg.slogdet(curvature + torch.diag(precision)).logabsdet
    return (-0.5 * ((precision * deviation.square()).sum() + log_determinant - precision.log().sum())).item()


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest entry of what is wanted."""
    return ((got - want).abs().max() / want.abs().max()).item()
