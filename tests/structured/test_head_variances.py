"""Variances of a linear head's outputs from prepared quadratic forms, and the inverses they are made of."""

from __future__ import annotations

import pytest
import torch
from dense_reference import relative_error

from laplace_plus._memory import memory_budget
from laplace_plus.structured.gradients.one_hot import OutputLayerGradients
from laplace_plus.structured.softmax_output import precision as heads
from laplace_plus.structured.softmax_output import variances as head_variances
from laplace_plus.structured.softmax_output.block import SoftmaxOutputRows
from laplace_plus.structured.softmax_output.precision import SoftmaxOutputFactor, inverse_by_blocks
from laplace_plus.structured.softmax_output.variances import SMALLEST_SQUARE, QuadraticForms

TIGHT = 1e-10
D, C, B = 6, 5, 9


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(
    n: int, *, width: int = D, coupled: bool = True, common: float = 0.0, peaked: float = 1.0, size: int = C
) -> SoftmaxOutputRows:
    scales = (peaked * draw(n, size, seed=1)).softmax(-1)
    return SoftmaxOutputRows(draw(n, width, seed=2) + common, scales if coupled else scales * (1 - scales), coupled)


def factor_of(rows: SoftmaxOutputRows, *, dtype: torch.dtype = torch.float64, precision: float | torch.Tensor = 0.5):
    held = SoftmaxOutputRows(rows.features.to(dtype), rows.scales.to(dtype), rows.coupled)
    return SoftmaxOutputFactor(held, torch.tensor(1.3, dtype=dtype), torch.as_tensor(precision).to(dtype), dtype=dtype)


def oracle(rows: SoftmaxOutputRows, features: torch.Tensor, precision: float | torch.Tensor = 0.5) -> torch.Tensor:
    """``[B, C]`` from the dense matrix."""
    size, width = rows.scales.shape[1], features.shape[1]
    diagonal = torch.as_tensor(precision, dtype=torch.float64).expand(size, width).flatten()
    inverse = torch.linalg.inv(1.3 * rows.dense() + torch.diag(diagonal)).view(size, width, size, width)
    return torch.einsum("bi,cicj,bj->bc", features, inverse, features)


def weigh(factor: SoftmaxOutputFactor, features: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
    chosen = torch.arange(factor.n_outputs) if outputs is None else outputs
    return factor.quadratic_form(
        OutputLayerGradients(features.to(factor.dtype), chosen, factor.n_outputs), "diagonal"
    ).double()


@pytest.mark.parametrize("n", [1, 5, SMALLEST_SQUARE, SMALLEST_SQUARE + 1, 4 * SMALLEST_SQUARE + 3])
@pytest.mark.parametrize("leading", [0, 2])
@pytest.mark.parametrize("rooted", [False, True])
def test_quadratic_forms_equal_those_of_the_whole_matrices(n, leading, rooted):
    size = n + leading
    whole = draw(3, size, size)
    whole = whole + whole.mT
    roots = draw(3, n, n, seed=1) if rooted else None
    forms = QuadraticForms(3, n, leading, whole)
    kept = forms.leading.numel() + sum(blocks.numel() for blocks in forms.blocks)
    assert kept == 3 * QuadraticForms.width(n, leading) <= 3 * size**2
    if n > 4 * SMALLEST_SQUARE:
        assert QuadraticForms.width(n, 0) < 0.6 * n**2
    for which in (slice(0, 2), slice(2, 3)):
        own = whole[which]
        taken = None if roots is None else roots[which]
        forms.put_leading(which, own[:, :leading, :leading], own[:, leading:, :leading])
        forms.put(which, own[:, leading:, leading:], taken)
    if roots is not None:
        whole[:, leading:, leading:] -= roots @ roots.mT
    vectors = draw(4, size, seed=2)
    want = torch.einsum("bi,cij,bj->bc", vectors, whole, vectors)
    assert relative_error(forms(vectors[:, :leading], vectors[:, leading:]), want) < 1e-13


@pytest.mark.parametrize("n", [1, 32, 33, 70, 131])
def test_inverses_by_blocks(n):
    rows = draw(3, n, n + 2)
    matrices = rows @ rows.mT + torch.eye(n, dtype=torch.float64)
    inverse, log_determinant, failed = inverse_by_blocks(matrices)
    assert not failed
    assert relative_error(inverse, torch.linalg.inv(matrices)) < TIGHT
    assert log_determinant.item() == pytest.approx(torch.logdet(matrices).sum().item(), rel=1e-12)
    matrices[1, n // 2, n // 2] = -1
    assert inverse_by_blocks(matrices)[2]


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("n", [3, 40, 75])
@pytest.mark.parametrize(("common", "peaked"), [(0.0, 1.0), (3.0, 1.0), (3.0, 8.0)])
def test_variances_equal_those_of_the_dense_matrix(n, coupled, common, peaked):
    rows = rows_of(n, coupled=coupled, common=common, peaked=peaked)
    features = draw(max(B, n), D, seed=3) + common
    factor = factor_of(rows)
    got = weigh(factor, features)
    assert factor._variances is not None
    assert (len(factor._variances.values) > 0) == (common > 0 or n > 3)
    assert relative_error(got, oracle(rows, features)) < TIGHT


def test_most_strong_directions_are_few(monkeypatch):
    rows, features = rows_of(40, common=3.0), draw(40, D, seed=3) + 3
    monkeypatch.setattr(head_variances, "MOST_STRONG", 1)
    factor = factor_of(rows)
    assert relative_error(weigh(factor, features), oracle(rows, features)) < TIGHT
    assert len(factor._variances.values) == 1


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("together", [1, 2, 10**9])
def test_classes_are_prepared_in_groups_of_any_size(together, coupled, monkeypatch):
    rows, features = rows_of(40, common=3.0, size=70, coupled=coupled), draw(40, D, seed=3) + 3
    item = 8 * 40**2
    monkeypatch.setattr(heads, "CACHE_BYTES", 3 * item)
    monkeypatch.setattr(head_variances, "GROUP_BYTES", min(3 * together * item, 2**40))
    factor = factor_of(rows)
    groups = list(head_variances.grouped((part.classes, part.matrices) for part in factor.inverses()))
    assert len(groups) == {1: 24, 2: 12}.get(together, 2)
    assert relative_error(weigh(factor, features), oracle(rows, features)) < TIGHT
    assert factor._variances is not None


@pytest.mark.parametrize("coupled", [False, True])
def test_without_a_cholesky_factor_of_the_middle_matrix(coupled):
    # The whitening of a matrix of deficient rank is not triangular.
    rows, features = rows_of(40, coupled=coupled), draw(40, D, seed=3)
    factor = factor_of(rows)
    if coupled:
        rotation = torch.linalg.qr(draw(40, 40, seed=4)).Q
        factor.__dict__["_exact_whitener"] = factor._exact_whitener @ rotation
    assert relative_error(weigh(factor, features), oracle(rows, features)) < TIGHT


def test_probabilities_of_zero_change_nothing():
    rows = rows_of(40)
    scales = rows.scales.clone()
    scales[3], scales[7, :2], scales[11, 1] = 0, 0, 1e-300
    scales[3, 2] = 1.0
    scales /= scales.sum(1, keepdim=True)
    rows, features = SoftmaxOutputRows(rows.features, scales, True), draw(40, D, seed=3)
    for precision in (0.5, 0.5 + draw(C, D, seed=5).square()):
        diagonal = precision if isinstance(precision, float) else precision[None]
        factor = factor_of(rows, precision=diagonal)
        assert relative_error(weigh(factor, features), oracle(rows, features, precision)) < TIGHT
        dense = 1.3 * rows.dense() + torch.diag(torch.as_tensor(precision).double().expand(C, D).flatten())
        assert factor.log_determinant().item() == pytest.approx(torch.logdet(dense).item(), rel=1e-11)
        single = factor_of(rows, precision=diagonal, dtype=torch.float32)
        assert relative_error(weigh(single, features), oracle(rows, features, precision)) < 1e-5


@pytest.mark.parametrize("coupled", [False, True])
def test_common_features_do_not_cancel_in_float32(coupled):
    """The difference that a direct computation takes loses the digits that prior and posterior have in common."""
    rows = rows_of(64, width=80, coupled=coupled, common=3.0, size=100)
    rows = SoftmaxOutputRows(rows.features.clamp(min=0).float().double(), rows.scales.float().double(), coupled)
    features = (draw(64, 80, seed=3) + 3).clamp(min=0).float().double()
    want = weigh(factor_of(rows, precision=1.0), features)
    prepared, direct = (factor_of(rows, precision=1.0, dtype=torch.float32) for _ in range(2))
    direct._n_asked = -(10**9)
    error, direct_error = ((weigh(f, features) / want - 1).abs().max().item() for f in (prepared, direct))
    assert direct._variances is None
    condition = 1 + 1.3 * (rows.features.square().sum(1) @ rows.scales).max().item()
    assert error < condition * torch.finfo(torch.float32).eps / 4
    assert error < direct_error / 4, (error, direct_error)


def test_forms_are_prepared_once_enough_is_asked_for():
    rows, features = rows_of(40), draw(40, D, seed=3)
    want = oracle(rows, features)
    factor = factor_of(rows)
    for start in (0, 3, 6):
        assert relative_error(weigh(factor, features[start : start + 3]), want[start : start + 3]) < TIGHT
        assert factor._variances is None
    assert relative_error(weigh(factor, features[9:10]), want[9:10]) < TIGHT
    prepared = factor._variances
    assert prepared is not None
    assert relative_error(weigh(factor, features), want) < TIGHT
    assert factor._variances is prepared


def test_other_questions_are_answered_directly():
    rows, features = rows_of(40), draw(40, D, seed=3)
    want = oracle(rows, features)
    some = torch.tensor([3, 0])
    factor = factor_of(rows)
    assert relative_error(weigh(factor, features, some), want[:, some]) < TIGHT
    assert factor._variances is None
    precision = 0.5 + draw(C, D, seed=5).square()
    per_weight = factor_of(rows, precision=precision[None])
    assert relative_error(weigh(per_weight, features), oracle(rows, features, precision)) < TIGHT
    assert per_weight._variances is None
    small = factor_of(rows)
    with memory_budget(2 * 8 * C * 40**2 // 3):
        assert relative_error(weigh(small, features), want) < TIGHT
    assert small._variances is None
