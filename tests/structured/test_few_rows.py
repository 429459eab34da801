"""A large dense block of few rows is inverted through its rows, with the same results."""

import pytest
import torch

from laplace_plus.structured import inverse_roots
from laplace_plus.structured.blocks import DenseBlock
from laplace_plus.structured.gradients import DenseGradients
from laplace_plus.structured.gram_sum import GramSum
from laplace_plus.structured.low_rank_factor import LowRankFactor


@pytest.mark.parametrize("varying", [False, True], ids=["scalar", "diagonal"])
def test_equal_to_the_dense_inverse(monkeypatch, varying):
    monkeypatch.setattr(inverse_roots, "LARGE", 30)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 6, 40, generator=generator, dtype=torch.float64)
    block = DenseBlock([GramSum.of_rows(rows)], (1, 1, 40))
    weights = torch.tensor([1.7], dtype=torch.float64)
    diagonal = torch.tensor(0.8, dtype=torch.float64)
    if varying:
        diagonal = torch.rand(1, 1, 40, generator=generator, dtype=torch.float64) + 0.5
    dense = 1.7 * rows[0].mT @ rows[0] + torch.diag(diagonal.flatten().expand(40))
    factor = block.factor(weights, diagonal)
    assert isinstance(factor, LowRankFactor)
    inverse = dense.inverse()
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(factor.covariance()[0], inverse, **close)
    torch.testing.assert_close(factor.variances().flatten(), inverse.diagonal(), **close)
    torch.testing.assert_close(factor.log_determinant(), dense.logdet(), **close)
    values = torch.randn(2, 3, 1, 1, 40, generator=generator, dtype=torch.float64)
    expected = torch.einsum("vbi,ij,wbj->bvw", values[:, :, 0, 0], inverse, values[:, :, 0, 0])
    torch.testing.assert_close(factor.quadratic(DenseGradients(values), "full"), expected, **close)
    point = diagonal.clone().requires_grad_()
    value = block.log_determinant(weights, point)
    torch.testing.assert_close(value.detach(), dense.logdet(), **close)
    (gradient,) = torch.autograd.grad(value, point)
    own = inverse.diagonal().view(1, 1, 40)
    torch.testing.assert_close(gradient, own if varying else own.sum(), **close)


def test_many_rows_stay_dense(monkeypatch):
    monkeypatch.setattr(inverse_roots, "LARGE", 30)
    rows = torch.randn(1, 39, 40, dtype=torch.float64)
    block = DenseBlock([GramSum.of_rows(rows)], (1, 1, 40))
    factor = block.factor(torch.ones(1, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    assert not isinstance(factor, LowRankFactor)
