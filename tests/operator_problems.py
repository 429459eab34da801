"""Small networks, data for every likelihood, and their curvature written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import laplace_plus as lp
from laplace_plus.curvature.operators import FisherOperator, GGNOperator, HessianOperator, JacobianOperator
from laplace_plus.likelihoods import Likelihood

Data = list[tuple[Tensor, Tensor]]
N = 12


def hessian(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """In reverse mode only; torch's own takes forward mode, whose first use warns of torch's own imports."""
    return jacrev(jacrev(function))


@contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def whole(data: Data) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])


def jacobian_of(model: nn.Module, x: Tensor) -> Tensor:
    """``[N, C, P]``."""
    return jacrev(function_of(model, x))(vector_of(model))


def noisy_hessian(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Tensor:
    """Λ at the current noise, ``[N, C, C]``."""
    if isinstance(likelihood, lp.HeteroscedasticGaussian):
        return likelihood.output_hessian(outputs, y)
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
