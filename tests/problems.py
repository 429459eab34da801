"""Small random problems, networks and dense references that many tests share; float64 unless said otherwise.

The references share no code with the package: Jacobians by autodiff, curvature and evidence written out.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laplace_plus as lp
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, HessianOperator, JacobianOperator
from laplace_plus.likelihoods import Likelihood
from laplace_plus.structured import Block, DenseBlock, KroneckerBlock
from laplace_plus.testing import PosteriorConformance

Data = list[tuple[Tensor, Tensor]]
N = 12

# -- random numbers and matrices --------------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers times ``scale``."""
    return scale * torch.randn(shape, generator=generator(seed), dtype=dtype)


def basis(n: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix ``[n, n]``."""
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues; its eigenvectors are the columns of ``basis(n, seed)``."""
    vectors = basis(len(eigenvalues), seed)
    matrix = (vectors * eigenvalues) @ vectors.mT
    return (matrix + matrix.mT) / 2


def with_singular_values(m: int, n: int, values: Tensor, seed: int = 0) -> Tensor:
    """A random matrix ``[m, n]`` with these singular values, at most ``min(m, n)``."""
    left, _, right = torch.linalg.svd(normal(m, n, seed=seed), full_matrices=False)
    rank = len(values)
    return (left[:, :rank] * values) @ right[:rank]


class LargestTensor(TorchDispatchMode):
    """Notes the size in bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return result


# -- small networks with data, and products with their curvature -------------------------------------------------------


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """In reverse mode only; torch's own takes forward mode, whose first use warns of torch's own imports."""
    return jacrev(jacrev(function))


def ekfac(*args: Any, **options: Any) -> lp.KFAC:
    return lp.KFAC(*args, eigenvalue_corrected=True, **options)


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def targets(likelihood: Likelihood, outputs: int, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if isinstance(likelihood, lp.Categorical):
        return torch.randint(0, outputs, (N,), generator=g)
    if isinstance(likelihood, lp.Bernoulli):
        return torch.randint(0, 2, (N, outputs), generator=g).double()
    if isinstance(likelihood, lp.Poisson):
        return torch.randint(0, 5, (N, outputs), generator=g).double()
    return normal(N, outputs // 2 if isinstance(likelihood, lp.HeteroscedasticGaussian) else outputs, seed=seed)


def split(x: Tensor, y: Tensor, *sizes: int) -> Data:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def problem(likelihood: Likelihood, outputs: int) -> tuple[nn.Module, Data]:
    return network(outputs), split(normal(N, 3), targets(likelihood, outputs), 5, 4, 3)


def vector_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def function_of(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def outputs(vector: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        return functional_call(model, {n: p.view(s) for (n, s), p in zip(shapes.items(), pieces, strict=True)}, x)

    return outputs


def gaussian(*lead: int, size: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A mean ``[*lead, size]`` and a covariance of about ``scale``."""
    factor = normal(*lead, size, size, seed=seed + 1, scale=(scale / size) ** 0.5)
    return normal(*lead, size, seed=seed), factor @ factor.mT + 1e-3 * torch.eye(size, dtype=torch.float64)


def whole(data: Data) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])


def jacobian_of(model: nn.Module, x: Tensor) -> Tensor:
    """``[N, C, P]``."""
    return jacrev(function_of(model, x))(vector_of(model))


def noisy_hessian(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Λ at the current noise, ``[N, C, C]``."""
    if isinstance(likelihood, lp.HeteroscedasticGaussian):
        return likelihood.output_root(outputs, y).square()  # diagonal
    return torch.stack(
        [
            hessian(lambda f, t=t: -likelihood.log_density(f[None], t[None])[0])(f)
            for f, t in zip(outputs, y, strict=True)
        ]
    )


def dense_ggn(model: nn.Module, likelihood: Likelihood, data: Data) -> Tensor:
    x, y = whole(data)
    jacobian = jacobian_of(model, x)
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, noisy_hessian(likelihood, model(x).detach(), y), jacobian)


def close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-11) -> None:
    assert actual.shape == wanted.shape
    assert float((actual - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


def assert_adjoint(operator: Any, v: Tensor, u: Tensor, tolerance: float = 1e-10) -> None:
    forward = u * operator(v)
    assert abs(float(forward.sum() - v @ operator.T(u))) <= tolerance * float(forward.abs().sum())


def assert_symmetric(operator: Any, u: Tensor, v: Tensor, tolerance: float = 1e-10) -> None:
    left = u * operator(v)
    assert abs(float(left.sum() - v @ operator(u))) <= tolerance * float(left.abs().sum())


def operators(model: nn.Module, data: Iterable[Any], **options: Any) -> list[Any]:
    ggn = GGNOperator(model, "classification", data, **options)
    return [
        ggn,
        ggn.root(),
        FisherOperator(model, "classification", data, n_samples=3, seed=4, **options),
        FisherOperator(model, "classification", data, kind="empirical", **options),
        HessianOperator(model, "classification", data, **options),
        JacobianOperator(model, data, **options),
        JacobianOperator(model, data, **options).T,
    ]


# -- dense references --------------------------------------------------------------------------------------------------


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


def batch_jacobian(model: nn.Module, outputs: Tensor, names: Iterable[str] | None = None) -> Tensor:
    """Each output ``[*]`` of a whole batch, differentiated by itself, ``[*, P]``, by plain backward passes."""
    named = dict(model.named_parameters())
    chosen = [*named.values()] if names is None else [named[name] for name in names]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    rows = [torch.autograd.grad(value, chosen, **options) for value in outputs.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, outputs.shape)


def kronecker_factors(
    model: nn.Module, examples: list[dict[str, Any]], layers: list[str], sharing: str = "expand"
) -> dict[str, tuple[Tensor, Tensor, int]]:
    """``Σ g gᵀ``, ``Σ a aᵀ`` and the number of rows of a classifier's linear layers, by hooks, example by example."""
    found: dict[str, list[Any]] = {name: [0, 0, 0] for name in layers}
    for one in examples:
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}
        handles = [
            model.get_submodule(name).register_forward_hook(lambda m, x, y, uses=uses: uses.append((x[0], y)))
            for name, uses in seen.items()
        ]
        logits = model(**one)
        for handle in handles:
            handle.remove()
        p = logits.flatten(0, -2).softmax(-1).detach()
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]  # [T or 1, C, C]
        for name, uses in seen.items():
            a = torch.cat([x.detach().reshape(-1, x.shape[-1]) for x, _ in uses])
            if model.get_submodule(name).bias is not None:
                a = torch.cat([a, a.new_ones(len(a), 1)], 1)
            a = a if sharing == "expand" else a.mean(0, keepdim=True)
            found[name][1] += a.T @ a
            found[name][2] += len(a)
            for row, column in itertools.product(range(len(root)), range(root.shape[-1])):
                cotangent = torch.zeros_like(logits).flatten(0, -2)
                cotangent[row] = root[row, :, column]
                grads = torch.autograd.grad(logits, [y for _, y in uses], cotangent.view_as(logits), retain_graph=True)
                g = torch.cat([grad.reshape(-1, grad.shape[-1]) for grad in grads])
                g = g if sharing == "expand" else g.sum(0, keepdim=True)
                found[name][0] += g.T @ g
    return {name: (left, right, count) for name, (left, right, count) in found.items()}


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
    return fit + occam(curvature / noise_std**2, deviation, precision).item()


def occam(curvature: Tensor, deviation: Tensor, precision: Tensor) -> Tensor:
    """``−½ dᵀP₀d − ½ log det(H + P₀) + ½ log det P₀``."""
    log_determinant = torch.linalg.slogdet(curvature + torch.diag(precision)).logabsdet
    return -0.5 * ((precision * deviation.square()).sum() + log_determinant - precision.log().sum())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest entry of what is wanted."""
    return ((got - want).abs().max() / want.abs().max()).item()


# -- blocks ------------------------------------------------------------------------------------------------------------


def whole_tensors(block: Block) -> dict[str, Tensor]:
    """What makes up a block, with matrices for sums that are still kept as rows."""
    if isinstance(block, KroneckerBlock):
        own = {"left": block.left, "right": block.right, "count": block.count}
        return own if block.corrected is None else own | {"corrected": block.corrected}
    return {"matrix": block.matrix} if isinstance(block, DenseBlock) else block.tensors()


# -- conformance -------------------------------------------------------------------------------------------------------


@cache
def fit_of(suite: type[PosteriorConformance]) -> tuple[lp.Posterior, nn.Module, Data]:
    posterior, *rest = PosteriorConformance.fitted(suite())
    posterior.sample(1, generator=generator())  # some are at work only now, and a copy would not know the data
    return posterior, *rest


class FittedOnce(PosteriorConformance):
    """For what is long to fit: the tests that need only a fitted posterior take a copy of one; moved rows are slow."""

    @pytest.mark.slow
    def test_rows_may_move_by_their_data(self) -> None:
        super().test_rows_may_move_by_their_data()

    def fitted(self) -> tuple[lp.Posterior, nn.Module, Data]:
        return copy.deepcopy(fit_of(type(self)))
