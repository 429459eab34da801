"""Variances of a linear output layer's outputs from its data rows, against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from problems import relative_error

from laplace_plus.structured import softmax_output
from laplace_plus.structured.one_hot import OutputLayerGradients
from laplace_plus.structured.softmax_output import SoftmaxOutputFactor, SoftmaxOutputRows

TIGHT = 1e-10
D, C, B = 6, 5, 9


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(
    n: int, *, width: int = D, coupled: bool = True, common: float = 0.0, peaked: float = 1.0, size: int = C
) -> SoftmaxOutputRows:
    scales = (peaked * draw(n, size, seed=1)).softmax(-1)
    return SoftmaxOutputRows(draw(n, width, seed=2) + common, scales if coupled else scales * (1 - scales), coupled)


def factor_of(rows: SoftmaxOutputRows, *, precision: float | torch.Tensor = 0.5):
    return SoftmaxOutputFactor(
        rows, torch.tensor(1.3, dtype=torch.float64), torch.as_tensor(precision, dtype=torch.float64)
    )


def oracle(rows: SoftmaxOutputRows, features: torch.Tensor, precision: float | torch.Tensor = 0.5) -> torch.Tensor:
    """``[B, C]`` from the dense matrix."""
    size, width = rows.scales.shape[1], features.shape[1]
    diagonal = torch.as_tensor(precision, dtype=torch.float64).expand(size, width).flatten()
    inverse = torch.linalg.inv(1.3 * rows.dense() + torch.diag(diagonal)).view(size, width, size, width)
    return torch.einsum("bi,cicj,bj->bc", features, inverse, features)


def variances(factor: SoftmaxOutputFactor, features: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
    chosen = torch.arange(factor.n_outputs) if outputs is None else outputs
    gradients = OutputLayerGradients(features, chosen, factor.n_outputs)
    return factor.quadratic_form(gradients, "diagonal").double()


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("n", [3, 40, 75])
@pytest.mark.parametrize(("common", "peaked"), [(0.0, 1.0), (3.0, 1.0), (3.0, 8.0)])
def test_variances_equal_those_of_the_dense_matrix(n, coupled, common, peaked):
    rows = rows_of(n, coupled=coupled, common=common, peaked=peaked)
    features = draw(max(B, n), D, seed=3) + common
    factor, want = factor_of(rows), oracle(rows, features)
    assert relative_error(variances(factor, features), want) < TIGHT


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
        assert relative_error(variances(factor, features), oracle(rows, features, precision)) < TIGHT
        dense = 1.3 * rows.dense() + torch.diag(torch.as_tensor(precision).double().expand(C, D).flatten())
        assert factor.log_determinant().item() == pytest.approx(torch.logdet(dense).item(), rel=1e-11)


def test_some_outputs_other_priors_and_inverses_that_are_not_kept(monkeypatch):
    rows, features = rows_of(40), draw(40, D, seed=3)
    want = oracle(rows, features)
    some = torch.tensor([3, 0])
    assert relative_error(variances(factor_of(rows), features, some), want[:, some]) < TIGHT
    precision = 0.5 + draw(C, D, seed=5).square()
    per_weight = factor_of(rows, precision=precision[None])
    assert relative_error(variances(per_weight, features), oracle(rows, features, precision)) < TIGHT
    monkeypatch.setattr(softmax_output, "_KEPT", 0)
    assert relative_error(variances(factor_of(rows), features), want) < TIGHT
