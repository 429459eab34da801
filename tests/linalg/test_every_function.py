"""What is asked of a caller's operator, and what each function refuses, and how: one table."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from problems import generator, normal, with_spectrum
from torch import Tensor

from laplace_plus import linalg
from laplace_plus.errors import (
    ConfigurationError,
    NonFiniteError,
    NotPositiveDefiniteError,
    OperatorError,
    UnsupportedError,
)
from laplace_plus.linalg.linear_maps import LinearMap
from laplace_plus.linalg.null_space import AlternatingProjection, LSMRProjection, SVDProjection

N = 8
ROOT = normal(N, N)
A, V = ROOT @ ROOT.T + torch.eye(N, dtype=torch.float64), normal(N, seed=1)
SKEW = A + torch.triu(torch.ones(N, N, dtype=torch.float64))


def times(v):
    return v @ A


USES = {
    "lanczos": lambda f: linalg.lanczos(f, V, 3),
    "arnoldi": lambda f: linalg.arnoldi(f, V, 3),
    "matrix_function": lambda f: linalg.matrix_function(f, torch.exp, V),
    "arnoldi_function": lambda f: linalg.arnoldi_function(f, torch.matrix_exp, V),
    "trace": lambda f: linalg.trace(f, N, dtype=torch.float64),
    "trace, nystrom": lambda f: linalg.trace(f, N, matvecs=4, method="xnystrace", dtype=torch.float64),
    "diagonal": lambda f: linalg.diagonal(f, N, dtype=torch.float64),
    "slq_logdet": lambda f: linalg.slq_logdet(f, N, dtype=torch.float64),
    "nystrom": lambda f: linalg.nystrom(f, N, 3, dtype=torch.float64),
    "eigsh": lambda f: linalg.eigsh(f, N, 1, dtype=torch.float64),
    "eigsh, restarted": lambda f: linalg.eigsh(f, N, 1, subspace=4, dtype=torch.float64),
    "cg": lambda f: linalg.cg(f, V),
    "lsmr": lambda f: linalg.lsmr(f, f, V, n=N),
    "project_null_space": lambda f: linalg.project_null_space(f, None, V, m=N),
}
SYMMETRIC = ["lanczos", "matrix_function", "slq_logdet", "nystrom", "eigsh", "cg"]
every = pytest.mark.parametrize("use", USES.values(), ids=USES)


def first_tensor(result):
    """The first tensor among a result's fields."""
    return next(x for x in vars(result).values() if isinstance(x, Tensor))


@every
@pytest.mark.parametrize(
    "operator",
    [A, lambda v: v[..., :-1], lambda v: v.float() @ A.float(), lambda v: (v @ A)[None], lambda v: None],
    ids=["a tensor", "another length", "another type", "another axis", "nothing"],
)
def test_operators_of_no_use(use, operator):
    with pytest.raises(OperatorError, match="Expected"):
        use(operator)


@pytest.mark.parametrize("name", [name for name in USES if name not in ("cg", "lsmr", "project_null_space")])
def test_products_that_are_not_finite(name):
    with pytest.raises(NonFiniteError):
        USES[name](lambda v: v * torch.nan)


@pytest.mark.parametrize("name", [name for name in USES if name.partition(",")[0] in SYMMETRIC])
def test_operators_that_are_not_symmetric(name):
    with pytest.raises(OperatorError, match="not symmetric"):
        USES[name](lambda v: v @ SKEW.T)


REFUSED = {
    OperatorError: {
        "lanczos, zero": lambda: linalg.lanczos(times, torch.stack([V, 0 * V]), 2),
        "arnoldi, zero": lambda: linalg.arnoldi(times, 0 * V, 2),
        "lsmr, transpose": lambda: linalg.lsmr(times, lambda u: 2 * u @ A, V),
        "cg, preconditioner": lambda: linalg.cg(times, V, preconditioner=lambda r: r[:2]),
    },
    NotPositiveDefiniteError: {
        "nystrom": lambda: linalg.nystrom(lambda v: -times(v), N, 3, dtype=torch.float64),
        "trace": lambda: linalg.trace(lambda v: -v, 300, method="xnystrace", generator=generator()),
        "slq_logdet": lambda: linalg.slq_logdet(lambda v: -times(v), N, dtype=torch.float64),
    },
    NonFiniteError: {
        "lanczos": lambda: linalg.lanczos(times, V * torch.nan, 2),
        "SVDProjection": lambda: SVDProjection().prepare(linalg.Dense(A * torch.nan), list),
    },
    ConfigurationError: {
        "lanczos, depth": lambda: linalg.lanczos(times, V, 0),
        "lanczos, integers": lambda: linalg.lanczos(times, V.long(), 2),
        "arnoldi, a number": lambda: linalg.arnoldi(times, V.sum(), 2),
        "arnoldi_function, depth": lambda: linalg.arnoldi_function(times, torch.matrix_exp, V, depth=0),
        "phi": lambda: linalg.phi(-1),
        "slq, probes": lambda: linalg.slq_logdet(times, N, probes=0),
        "slq, shift": lambda: linalg.slq_logdet(times, N, shift=-1.0),
        "trace, method": lambda: linalg.trace(times, N, method="exact"),
        "trace, matvecs": lambda: linalg.trace(lambda v: v, 300, matvecs=3),
        "trace, integers": lambda: linalg.trace(lambda v: v, N, dtype=torch.int64),
        "diagonal, method": lambda: linalg.diagonal(times, N, method="x"),
        "nystrom, rank": lambda: linalg.nystrom(times, N, 1.5),
        "eigsh, k": lambda: linalg.eigsh(times, N, 0),
        "eigsh, more than n": lambda: linalg.eigsh(times, N, N + 1),
        "eigsh, which": lambda: linalg.eigsh(times, N, 1, which="LM"),
        "eigsh, subspace": lambda: linalg.eigsh(times, N, 3, subspace=3),
        "cg, tolerance": lambda: linalg.cg(times, V, rtol=-1.0),
        "cg, cap": lambda: linalg.cg(times, V, max_iterations=0),
        "cg, text": lambda: linalg.cg(times, "b"),
        "cg, integers": lambda: linalg.cg(times, V.long()),
        "cg, first guess": lambda: linalg.cg(times, V, x0=V[:3]),
        "cg, type of the first guess": lambda: linalg.cg(times, V, x0=V.float()),
        "lsmr, condition": lambda: linalg.lsmr(times, times, V, conlim=-1.0),
        "lsmr, columns": lambda: linalg.lsmr(times, None, V),
        "project_null_space, tolerance": lambda: linalg.project_null_space(times, times, V, atol=-1.0),
        "SVDProjection": lambda: SVDProjection(rtol=-1.0),
        "LSMRProjection": lambda: LSMRProjection(tolerance=2.0),
        "AlternatingProjection": lambda: AlternatingProjection(max_sweeps=0),
    },
}


@pytest.mark.parametrize(
    ("error", "call"),
    [pytest.param(error, call, id=name) for error, calls in REFUSED.items() for name, call in calls.items()],
)
def test_bad_arguments(error, call):
    with pytest.raises(error, match="Expected"):
        call()


# -- callers' operators ------------------------------------------------------------------------------------------------

# torch's own forward mode compiles its formulas by what it calls deprecated.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")


@FORWARD_MODE
@every
def test_forward_mode_is_refused(use):
    ones = torch.ones_like(A)
    with pytest.raises(UnsupportedError, match="reverse"):
        torch.func.jvp(lambda s: first_tensor(use(lambda v: v @ (s * A))), (ones,), (ones,))


def test_a_constant_product_may_be_the_same_tensor():
    zero = torch.zeros(N, dtype=torch.float64)
    solution = linalg.lsmr(lambda v: zero, lambda v: zero, V)
    assert solution.converged and torch.equal(solution.value, zero)


@every
def test_autocast_changes_nothing(use):
    entries = torch.linspace(1, 3, N).double()
    torch.manual_seed(0)
    expected = first_tensor(use(lambda v: v * entries))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(first_tensor(use(lambda v: v * entries)), expected)
        assert torch.is_autocast_enabled("cpu")


def test_gradients_under_autocast():
    entries = torch.linspace(1, 3, N).double().requires_grad_()
    plain = torch.autograd.grad(linalg.lanczos(lambda v: v * entries, V, 4).off_diagonal.sum(), entries)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(linalg.lanczos(lambda v: v * entries, V, 4).off_diagonal.sum(), entries)[0]
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
    a, b = normal(N, 3), V
    expected = torch.linalg.lstsq(a, b[:, None]).solution[:, 0]
    with mode():
        torch.testing.assert_close(linalg.lsmr(lambda v: v @ a.T, None, b, n=3).value, expected)


WIDE = with_spectrum(torch.linspace(0, 1, 300, dtype=torch.float64))
RANDOM = {
    "xtrace": lambda g: linalg.trace(lambda v: v @ WIDE, 300, generator=g),
    "xnystrace": lambda g: linalg.trace(lambda v: v @ WIDE, 300, method="xnystrace", generator=g),
    "hutchinson": lambda g: linalg.trace(lambda v: v @ WIDE, 300, method="hutchinson", generator=g),
    "xdiag": lambda g: linalg.diagonal(lambda v: v @ WIDE, 300, generator=g),
    "hutchinson's diagonal": lambda g: linalg.diagonal(lambda v: v @ WIDE, 300, method="hutchinson", generator=g),
    "slq_logdet": lambda g: linalg.slq_logdet(lambda v: v @ WIDE, 300, shift=0.1, probes=6, generator=g),
    "nystrom": lambda g: linalg.nystrom(lambda v: v @ WIDE, 300, 5, generator=g),
    "eigsh": lambda g: linalg.eigsh(lambda v: v @ WIDE, 300, 2, generator=g),
}


@pytest.mark.parametrize("use", RANDOM.values(), ids=RANDOM)
def test_a_seed_determines_the_result(use):
    first, second, other = (first_tensor(use(generator(seed))) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


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
    vectors, cotangents = normal(100, N), normal(100, N, seed=1)
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
