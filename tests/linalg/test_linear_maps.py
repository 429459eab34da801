"""What is asked of a caller's operator, under every function alike."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from laplace_plus import linalg
from laplace_plus.errors import UnsupportedError
from laplace_plus.linalg.linear_maps import LinearMap

N = 6


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def definite() -> Tensor:
    root = draw(N, N)
    return root @ root.T + torch.eye(N, dtype=torch.float64)


B = draw(N, seed=1)
USES = {
    "lanczos": lambda f: linalg.lanczos(f, B, 3).diagonal,
    "arnoldi": lambda f: linalg.arnoldi(f, B, 3).hessenberg,
    "bidiagonalize": lambda f: linalg.bidiagonalize(f, B, 3, rmatvec=f).diagonal,
    "matrix_function": lambda f: linalg.matrix_function(f, torch.exp, B).value,
    "bilinear": lambda f: linalg.bilinear(f, torch.exp, B).value,
    "trace": lambda f: linalg.trace(f, N, dtype=torch.float64).value,
    "diagonal": lambda f: linalg.diagonal(f, N, symmetric=True, dtype=torch.float64).value,
    "slq_logdet": lambda f: linalg.slq_logdet(f, N, dtype=torch.float64).value,
    "nystrom": lambda f: linalg.nystrom(f, N, rank=2, dtype=torch.float64).values,
    "eigsh": lambda f: linalg.eigsh(f, N, 1, subspace=N - 1, dtype=torch.float64).values,
    "cg": lambda f: linalg.cg(f, B).value,
    "lsmr": lambda f: linalg.lsmr(f, f, B).value,
    "project_null_space": lambda f: linalg.project_null_space(f, f, B).value,
}
# torch's own forward mode compiles its formulas by what it calls deprecated.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
EVERY = pytest.mark.parametrize("use", USES.values(), ids=USES)


@FORWARD_MODE
@EVERY
def test_forward_mode_is_refused(use):
    a = definite()
    with pytest.raises(UnsupportedError, match="reverse"):
        torch.func.jvp(lambda s: use(lambda v: v @ (s * a)), (torch.ones_like(a),), (torch.ones_like(a),))


def test_a_constant_product_may_be_the_same_tensor():
    zero = torch.zeros(N, dtype=torch.float64)
    solution = linalg.lsmr(lambda v: zero, lambda v: zero, B)
    assert solution.converged and torch.equal(solution.value, zero)


@EVERY
def test_autocast_changes_nothing(use):
    entries = torch.linspace(1, 3, N).double()
    torch.manual_seed(0)
    expected = use(lambda v: v * entries)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(use(lambda v: v * entries), expected)
        assert torch.is_autocast_enabled("cpu")


def test_gradients_under_autocast():
    entries = torch.linspace(1, 3, N).double().requires_grad_()
    plain = torch.autograd.grad(linalg.lanczos(lambda v: v * entries, B, 4).off_diagonal.sum(), entries)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(linalg.lanczos(lambda v: v * entries, B, 4).off_diagonal.sum(), entries)[0]
    assert torch.equal(found, plain)


def test_types_are_found_in_what_holds_a_network():
    """A method of an object that has a network."""

    class Curvature:
        def __init__(self):
            self.network = torch.nn.Linear(N, N, bias=False).double()

        def multiply(self, v: Tensor) -> Tensor:
            return v @ self.network.weight.T

    curvature = Curvature()
    for operator in (curvature.multiply, lambda v: curvature.multiply(v)):
        assert linalg.trace(operator, N).value.dtype == torch.float64


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_transpose_is_found_without_gradients(mode):
    a, b = draw(N, 3), B
    expected = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
    with mode():
        torch.testing.assert_close(linalg.lsmr(lambda v: v @ a.T, None, b, n=3).value, expected)


@pytest.mark.slow
def test_gradients_of_many_vectors_keep_one_graph_at_a_time():
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    alive: list[weakref.ref] = []
    most = 0

    def multiply(v: Tensor) -> Tensor:
        nonlocal most
        product = scale * v
        alive.append(weakref.ref(product))
        gc.collect()
        most = max(most, sum(x() is not None for x in alive))
        return product

    operator = LinearMap(multiply, N)
    vectors, cotangents = draw(100, N), draw(100, N, seed=1)
    operator(vectors[:1])
    (gradient,) = operator.parameter_pullback(vectors, cotangents)
    torch.testing.assert_close(gradient, (vectors * cotangents).sum())
    assert len(alive) == 5 and operator.matvecs == 101, "parts of 32 vectors"
    assert most <= 2, "an earlier part's graph lives on"
    wide = LinearMap(multiply, N)
    wide(vectors)
    alive.clear()
    wide.parameter_pullback(vectors, cotangents)
    assert len(alive) == 1, "what was multiplied together is differentiated together"
