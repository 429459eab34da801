"""The algebra of operators, against matrices that are written out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from problems import normal
from torch import Tensor
from torch.autograd import gradcheck

from laplace_plus.errors import OperatorError
from laplace_plus.linalg import Dense, Diagonal, Identity, as_operator
from laplace_plus.linalg.linear_maps import LinearMap, leaves
from laplace_plus.linalg.operators import Operator, Product, Sum

F64 = torch.float64


A, B, C = normal(4, 3, seed=1), normal(4, 3, seed=2), normal(3, 5, seed=3)
S = (lambda x: x @ x.mT)(normal(3, 3, seed=4))
ADDED = 1 + normal(6, seed=6).square()
FACTOR = torch.tensor(1.7, dtype=F64)

# Each makes an operator from tensors, and the same matrix from them.
Case = tuple[str, Callable[..., Operator], Callable[..., Tensor], tuple[Tensor, ...]]
CASES: list[Case] = [
    ("dense", Dense, lambda a: a, (A,)),
    ("transpose", lambda a: Dense(a).T, lambda a: a.mT, (A,)),
    ("diagonal", Diagonal, torch.diag, (ADDED,)),
    ("identity", lambda c: c * Identity(4, dtype=F64), lambda c: c * torch.eye(4, dtype=F64), (FACTOR,)),
    ("function", lambda a: as_operator(lambda v: v @ a.mT, (4, 3), dtype=F64), lambda a: a, (A,)),
    ("function transposed", lambda a: as_operator(lambda v: v @ a.mT, (4, 3), dtype=F64).T, lambda a: a.mT, (A,)),
    (
        "function with transpose",
        lambda a: as_operator(lambda v: v @ a.mT, (4, 3), rmatvec=lambda u: u @ a, dtype=F64).T,
        lambda a: a.mT,
        (A,),
    ),
    ("sum", lambda a, b: Dense(a) + Dense(b), lambda a, b: a + b, (A, B)),
    ("difference", lambda a, b: Dense(a) - Dense(b), lambda a, b: a - b, (A, B)),
    ("multiple", lambda a, c: c * Dense(a) / 2.0, lambda a, c: c * a / 2, (A, FACTOR)),
    ("quotient", lambda a, c: -(Dense(a) * 3 / c), lambda a, c: -a * 3 / c, (A, FACTOR)),
    ("product", lambda a, c: Dense(a) @ Dense(c), lambda a, c: a @ c, (A, C)),
    (
        "sandwich",
        lambda a, d, c: Dense(a) @ (2 * Diagonal(d) + c * Identity(3, dtype=F64)) @ Dense(a).T,
        lambda a, d, c: a @ (2 * d.diag() + c * torch.eye(3, dtype=F64)) @ a.mT,
        (A, ADDED[:3], FACTOR),
    ),
    ("product transposed", lambda a, c: (Dense(a) @ Dense(c)).T, lambda a, c: (a @ c).mT, (A, C)),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])


def build(case: Case) -> tuple[Operator, Tensor, tuple[Tensor, ...]]:
    _, operator, matrix, tensors = case
    tensors = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    return operator(*tensors), matrix(*tensors), tensors


def close(actual: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


# -- every operator ----------------------------------------------------------------------------------------------------


@each
def test_products_are_those_of_the_matrix(case):
    operator, matrix, _ = build(case)
    m, n = operator.shape
    assert (m, n) == matrix.shape and operator.T.shape == (n, m)
    assert operator.dtype is F64 and operator.device.type == "cpu"
    for shape in ((), (1,), (n,), (m,), (2, 3), (0,)):
        v, u = normal(*shape, n, seed=7), normal(*shape, m, seed=8)
        close(operator(v), v @ matrix.mT)
        close(operator.T(u), u @ matrix)
    close(operator.T.T(normal(n)), operator(normal(n)))


@each
def test_is_written_out(case):
    operator, matrix, _ = build(case)
    close(operator.dense(), matrix)
    close(operator.T.dense(), matrix.mT)
    close(Operator.dense(operator), matrix)


@each
def test_symmetric_only_if_it_is(case):
    operator, matrix, _ = build(case)
    if operator.symmetric:
        close(matrix, matrix.mT)
        assert operator.T is operator
    close(operator.T.T.dense(), matrix)


@each
def test_derivatives(case):
    _, make, _, tensors = case
    n = make(*tensors).shape[1]
    inputs = tuple(tensor.clone().requires_grad_() for tensor in (*tensors, normal(2, n)))
    assert gradcheck(lambda *x: make(*x[:-1])(x[-1]), inputs)
    assert gradcheck(lambda *x: make(*x).dense(), inputs[:-1])


@each
def test_tensors_are_found(case):
    operator, _, tensors = build(case)
    found = {id(leaf) for tensor in operator.tensors() for leaf in leaves(tensor * 1) if tensor.requires_grad}
    assert found == {id(tensor) for tensor in tensors}


@each
def test_pullback_through_linear_map(case):
    operator, matrix, tensors = build(case)
    m, n = operator.shape
    linear = LinearMap(operator, n, m=m, symmetric=operator.symmetric)
    v, u = normal(3, n, seed=9), normal(3, m, seed=10)
    close(linear(v), v @ matrix.detach().mT)
    close(linear.transposed(u), u @ matrix.detach())
    wanted = torch.autograd.grad((u * (v @ matrix.mT)).sum(), tensors)
    actual = torch.autograd.grad(linear.tensors, tensors, linear.parameter_pullback(v, u))
    for one, other in zip(actual, wanted, strict=True):
        close(one, other)


# -- the algebra -------------------------------------------------------------------------------------------------------


def test_symmetry_propagates():
    a, s, c = Dense(A), Dense(S, symmetric=True), Dense(C)
    assert s.symmetric and (s + s).symmetric and (2 * s).symmetric and (s - 3 * s).symmetric
    assert (a.T @ a).symmetric and (a @ a.T).symmetric and (a @ s @ a.T).symmetric
    assert ((c.T @ a.T) @ (a @ c)).symmetric and ((a @ c).T @ (a @ c)).symmetric
    double = 2.0 * a
    assert (double.T @ double).symmetric and (2 * (a.T @ a)).symmetric
    square = Dense(A[:3])
    for other in (square, square + s, square @ s, s @ Diagonal(ADDED[:3]), square - square.T, square @ square):
        assert not other.symmetric


def test_transposes_are_recognised_although_they_are_not_kept():
    a, square = Dense(A), Dense(A[:3])
    gram, total = a.T @ a, square + 2 * square @ square
    assert gram.symmetric and gram.T is gram and a.T.T is a
    assert (total.T @ total).symmetric


def test_sums_and_products_are_flat():
    a, c = Dense(A), Dense(C)
    total, product = (a + a) - a, (a @ c) @ (c.T @ c)
    assert isinstance(total, Sum) and len(total.operands) == 3
    assert isinstance(product, Product) and len(product.operands) == 4


def test_scalars_of_every_kind():
    a = Dense(A.float())
    for two in (2, 2.0, np.float64(2), np.float32(2), torch.tensor(2.0, dtype=F64), torch.tensor(2)):
        for operator in (a * two, two * a):
            product = operator(torch.ones(3))
            assert product.dtype is torch.float32
            close(product, 2 * A.float().sum(1), 1e-6)
    half = a / torch.tensor(2.0)
    close(half(torch.ones(3)), A.float().sum(1) / 2, 1e-6)


def test_copies():
    a = Dense(A)
    transposed = a.T
    for twin in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        close(twin.T(normal(4)), transposed(normal(4)))
    gram = a.T @ a
    close(pickle.loads(pickle.dumps(gram))(normal(3)), gram(normal(3)))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vectors",
    [normal(4), normal(3, 4), normal(3).float(), torch.ones(3, dtype=torch.long), torch.tensor(1.0, dtype=F64)],
)
def test_vectors_that_do_not_fit(vectors):
    for operator in (Dense(A), as_operator(lambda v: v, (4, 3), dtype=F64)):
        with pytest.raises(OperatorError):
            operator(vectors)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dense(A) + Dense(C),
        lambda: Dense(A) - Dense(A.float()),
        lambda: Dense(A, symmetric=True),
        lambda: Dense(A[:3], symmetric=True),
    ],
)
def test_what_makes_no_operator(make):
    with pytest.raises(OperatorError, match="Expected"):
        make()


def test_no_arithmetic_with_other_things():
    for call in (lambda: Dense(A) + 1, lambda: Dense(A) - A, lambda: Dense(A) * "2", lambda: Dense(A) @ 2):
        with pytest.raises((TypeError, OperatorError)):
            call()


def test_functions_are_checked():
    square = normal(3, 3)
    wrong = {
        "columns": as_operator(lambda v: square @ v, 3, dtype=F64),
        "shape": as_operator(lambda v: v[..., :2], 3, dtype=F64),
        "type": as_operator(lambda v: v.float(), 3, dtype=F64),
        "nothing": as_operator(lambda v: None, 3, dtype=F64),  # type: ignore[arg-type,return-value]
    }
    for operator in wrong.values():
        with pytest.raises(OperatorError, match="Expected"):
            operator(normal(3, 3))
    cut = as_operator(lambda v: v.detach() * 2, 3, dtype=F64)
    with pytest.raises(OperatorError, match="rmatvec"):
        cut.T(normal(3))
    constant = as_operator(lambda v: torch.zeros_like(v.detach()), 3, dtype=F64, rmatvec=lambda u: 0 * u)
    close(constant.T.dense(), torch.zeros(3, 3, dtype=F64))
