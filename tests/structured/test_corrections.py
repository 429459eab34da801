"""Squares in Kronecker eigenbases: put off and multiplied together they are what each matrix by itself gives."""

from __future__ import annotations

import pytest
import torch

from laplace_plus.structured import KroneckerBlock
from laplace_plus.structured.gram_sum import FactorSum
from laplace_plus.structured.stacks import OuterStack

ROWS, COLUMNS = 7, 9


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sum_of(rows: torch.Tensor) -> FactorSum:
    """Of ``[n, G, d]`` rows."""
    total = FactorSum(rows.shape[1], rows.shape[2], dtype=rows.dtype, device=rows.device)
    total.add_rows(rows.transpose(0, 1))
    return total


def expected_squares(block: KroneckerBlock, batches, components, n_components: int) -> torch.Tensor:
    basis = block.kronecker_basis()
    left_basis, right_basis = basis.left, basis.right
    result = torch.zeros(n_components, *block.shape, dtype=torch.float64)
    for left, right in batches:  # [V, B, S, G, o], [B, S, G or 1, i]
        matrices = torch.einsum("vbsgo,bsgi->vbgoi", left, right.expand(-1, -1, block.shape[0], -1))
        rotated = left_basis.mT @ matrices @ right_basis
        for direction, component in enumerate(components.tolist()):
            result[component] += rotated[direction].square().sum(0)
    return result


@pytest.mark.parametrize("n_examples", [1, 4, 30])
@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize(("groups", "right_groups"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize(("n_components", "n_directions"), [(1, 1), (1, 3), (2, 4), (2, 1)])
@pytest.mark.parametrize("is_thin", [True, False])
def test_squares_of_several_batches(n_examples, positions, groups, right_groups, n_components, n_directions, is_thin):
    count = 4 if is_thin else 20
    left = [sum_of(draw(count, groups, ROWS, seed=k)) for k in range(n_components)]
    right = sum_of(draw(count, right_groups, COLUMNS, seed=5))
    weights = torch.linspace(1.0, 2.0, n_components, dtype=torch.float64)
    block = KroneckerBlock(left, right, torch.tensor(4.0, dtype=torch.float64)).with_correction(weights)
    components = torch.arange(n_directions) % n_components
    batches = [
        (
            draw(n_directions, n_examples, positions, groups, ROWS, seed=10 + k),
            draw(n_examples, positions, right_groups, COLUMNS, seed=20 + k),
        )
        for k in range(5)
    ]
    for number, (g, a) in enumerate(batches):
        block.correct_(OuterStack(a, g), components)
        if number == 2:
            block.clone()  # takes what waits
    found = block.corrected.clone()
    torch.testing.assert_close(found, expected_squares(block, batches, components, n_components))
    torch.testing.assert_close(block.corrected, found)


@pytest.mark.parametrize("n_components", [1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_rows_that_were_decomposed(shuffled, n_components):
    """Inputs that come once more in the same order are not multiplied again, and any others are."""
    a, g = draw(5, 1, COLUMNS, seed=0), draw(5, 1, ROWS, seed=1)
    left = [sum_of(g), *[sum_of(g[:0]) for _ in range(n_components - 1)]]
    weights = torch.full((n_components,), 3.0, dtype=torch.float64)
    block = KroneckerBlock(left, sum_of(a), torch.tensor(5.0, dtype=torch.float64)).with_correction(weights)
    order = torch.tensor([3, 1, 4, 0, 2]) if shuffled else torch.arange(5)
    batches = [(g[part][None, :, None], a[part][:, None]) for part in order.split(2)]
    for own_g, own_a in batches:
        block.correct_(OuterStack(own_a, own_g), torch.zeros(1, dtype=torch.long))
    found = block.corrected.clone()
    torch.testing.assert_close(found, expected_squares(block, batches, torch.zeros(1, dtype=torch.long), n_components))


def test_inputs_may_be_overwritten_meanwhile():
    block = KroneckerBlock(
        [sum_of(draw(20, 1, ROWS, seed=0))], sum_of(draw(20, 1, COLUMNS, seed=1)), torch.tensor(20.0).double()
    ).with_correction(torch.ones(1, dtype=torch.float64))
    g, a = draw(1, 2, 1, 1, ROWS, seed=2), draw(2, 1, 1, COLUMNS, seed=3)
    expected = expected_squares(block, [(g.clone(), a.clone())], torch.zeros(1, dtype=torch.long), 1)
    block.correct_(OuterStack(a, g), torch.zeros(1, dtype=torch.long))
    g.zero_(), a.zero_()
    torch.testing.assert_close(block.corrected, expected)
