"""Batches cut into micro-batches by the memory budget: the same numbers in any cut, and errors where nothing fits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus._memory import budget, memory_budget, parse_bytes
from laplace_plus.curvature.operators import GGNOperator, JacobianOperator
from laplace_plus.errors import ConfigurationError, UnsupportedError
from laplace_plus.network.batches import Batch, can_be_cut, cut
from laplace_plus.network.gradients import micro_batches
from laplace_plus.network.network import Network


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 3)).double().eval()


def data(n: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 8, 8, dtype=torch.float64, generator=generator)
    return [(x, torch.randint(3, (n,), generator=generator))]


CASES = {
    "KFAC": (lp.KFAC, {}),
    "EKFAC": (lp.KFAC, {"eigenvalue_corrected": True}),
    "diagonal": (lp.Diagonal, {}),
    "full head": (lp.Full, {"parameters": "last_layer"}),
    "empirical": (lp.KFAC, {"backend": lp.Native("empirical_fisher")}),
}
SLOW = {"EKFAC", "empirical"}


@pytest.mark.parametrize(
    ("case", "allowed"),
    [
        pytest.param("KFAC", "200 KiB", marks=pytest.mark.slow),
        *(pytest.param(case, "24 KiB", marks=pytest.mark.slow if case in SLOW else []) for case in CASES),
    ],
)
def test_the_budget_does_not_change_the_result(case: str, allowed: str) -> None:
    cls, options = CASES[case]
    model, batches = convolutional(), data()
    whole = cls(model, "classification", **options).fit(batches)
    micro = cls(model, "classification", memory_budget=allowed, **options).fit(batches)
    scale = whole.precision_matrix().abs().max()
    torch.testing.assert_close(micro.precision_matrix(), whole.precision_matrix(), rtol=0, atol=1e-12 * float(scale))
    assert micro.n_data == whole.n_data == 20
    for outputs in (None, "diagonal", [0, 2]):
        ours = micro.functional_posterior(batches[0][0], outputs=outputs)
        theirs = whole.functional_posterior(batches[0][0], outputs=outputs)
        torch.testing.assert_close(ours.covariance, theirs.covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(micro.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-10, atol=1e-10)


def test_smaller_budgets_make_more_micro_batches() -> None:
    model, (batch,) = convolutional(), data()

    def sizes(allowed: int) -> list[int]:
        network = Network(model, "all", lambda outputs: outputs)
        with memory_budget(allowed):
            return [part.target.shape[0] for part, _ in micro_batches(network, Batch(*batch))]

    assert sizes(2**30) == [20]
    assert sum(sizes(2**16)) == 20
    assert len(sizes(2**14)) > len(sizes(2**16)) > 1
    assert max(sizes(2**14)) < max(sizes(2**16))


def test_products_with_the_curvature_are_cut_by_the_budget() -> None:
    model, batches = convolutional(), data(6)
    sizes: list[int] = []
    model.register_forward_hook(lambda module, args, outputs: sizes.append(len(args[0])))
    whole = GGNOperator(model, "classification", batches)
    jacobian = JacobianOperator(model, batches)
    vectors, rows = torch.eye(whole.shape[0])[:5].double(), torch.eye(18).double()[3:8]
    expected = whole(vectors), jacobian(vectors), jacobian.T(rows)
    with memory_budget(32 * (whole.network.bytes_per_example or 0)):
        sizes.clear()
        found = whole(vectors), jacobian(vectors), jacobian.T(rows)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert sizes.count(2) > sizes.count(6) == 3  # all outputs at once, without a graph


def test_larger_budgets_make_fewer_micro_batches() -> None:
    """However large the examples."""
    network, (batch,) = Network(convolutional(), "all", lambda outputs: outputs), data()
    network.bytes_per_example = 40 * 2**20  # claimed
    counts = []
    for allowed in (2**27, 2**28, 2**31, 2**32, 2**33, 2**34):
        with memory_budget(allowed):
            counts.append(len(list(micro_batches(network, Batch(*batch)))))
    assert counts == [20, 7, 7, 4, 2, 1]


def test_a_budget_too_small_for_one_example_is_named() -> None:
    """By what the two examples take that the first batch is looked at with."""
    with pytest.raises(ConfigurationError, match=r"one output for two examples.*memory_budget") as failure:
        lp.KFAC(convolutional(), "classification", memory_budget="2 KiB").fit(data())
    posterior = lp.KFAC(convolutional(), "classification")
    posterior.fit(data())
    least = 2 * (posterior.network.bytes_per_example or 0)
    named = str(failure.value).partition("memory_budget of at least ")[2].partition(". Got")[0]
    assert least <= parse_bytes(named) <= 1.002 * least  # rounded up
    network = Network(convolutional(), "all", lambda outputs: outputs)
    for _ in range(2):  # what the first look has learnt makes no second one pass
        with memory_budget(least - 8), pytest.raises(ConfigurationError, match=r"two examples.*memory_budget"):
            JacobianOperator(network, data())


def test_a_budget_too_small_for_a_prediction_is_named() -> None:
    posterior = lp.KFAC(convolutional(), "classification").fit(data())
    posterior.memory_budget = 512
    with pytest.raises(ConfigurationError, match="memory_budget"):
        posterior.predictive(data()[0][0])


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "much", "3 parsecs", ""])
def test_no_budget(value: object) -> None:
    with pytest.raises(ConfigurationError, match="memory budget"):
        lp.KFAC(convolutional(), "classification", memory_budget=value)


def test_budgets_are_nested_and_put_back() -> None:
    with memory_budget(1000):
        with memory_budget(parse_bytes("2 kB")):
            assert budget() == 2048
        assert budget() == 1000
    assert budget() > 2**20  # a quarter of what is free


class Centred(nn.Module):
    """Subtracts the batch's mean: an example's output depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x - x.mean(0))


class Fixed(nn.Module):
    """Takes batches of six only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(6, 4))


class Weighted(nn.Module):
    """Takes numbers that are not its examples', though there are as many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * weights.sum()


@pytest.mark.parametrize("strength", [1.0, 1e-2])
@pytest.mark.parametrize("twins", [False, True])
def test_examples_that_depend_on_each_other(strength: float, twins: bool) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            return self.second(h - strength * h.mean(0)) * 1e-3

    torch.manual_seed(0)
    model = Mixing().double()
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(3, (40,))
    if twins:
        x[1] = x[0]
    whole = lp.KFAC(model, "classification", memory_budget="1GB").fit([(x, y)])
    micro = lp.KFAC(model, "classification", memory_budget="4KB").fit([(x, y)])
    torch.testing.assert_close(micro.precision_matrix(), whole.precision_matrix(), rtol=1e-10, atol=1e-12)
    mean, covariance = whole.functional_posterior(x)
    whole.memory_budget = "16 KB"
    again = whole.functional_posterior(x)
    torch.testing.assert_close(again.mean, model(x).detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(again.covariance, covariance, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(mean, again.mean)


def test_numbers_that_are_as_many_as_the_examples_by_chance() -> None:
    torch.manual_seed(0)
    model = Weighted().double()
    inputs = (torch.randn(8, 4, dtype=torch.float64), torch.rand(8, dtype=torch.float64))
    whole = lp.Diagonal(model, "classification", memory_budget="1GB").fit([(inputs, torch.arange(8) % 3)])
    micro = lp.Diagonal(model, "classification", memory_budget="1KB").fit([(inputs, torch.arange(8) % 3)])
    torch.testing.assert_close(micro.variance(), whole.variance(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(micro.functional_posterior(inputs).mean, model(*inputs).detach())


class WritesInPlace(nn.Module):
    """Changes a layer's input after the layer has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        h = self.first(x)
        return self.second(torch.tanh(h) + x.mul_(3.0))


def test_an_input_written_into_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"input of 'first.weight'.*in place"):
        lp.KFAC(WritesInPlace(), "classification").fit([(torch.randn(6, 3), torch.arange(6) % 3)])


def test_a_budget_may_be_changed_later() -> None:
    posterior = lp.Diagonal(nn.Linear(3, 2), "classification")
    assert posterior.memory_budget is None
    posterior.memory_budget = "1 KiB"  # type: ignore[assignment]
    assert posterior.memory_budget == 1024


def test_seeded_samples_do_not_depend_on_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 100)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    posterior = lp.KFAC(model, "classification").fit([(x, torch.arange(6))])
    means = []
    for allowed in ("1 GiB", "400 KiB"):
        posterior.memory_budget = allowed  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(3)
        means.append(posterior.predictive(x, link="mc", generator=generator).mean)
    torch.testing.assert_close(*means, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", [Centred, Fixed])
def test_batches_that_belong_together_stay_together(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Tanh(), nn.Linear(3, 2)).double()
    network = Network(model, "all", lambda outputs: outputs)
    batch = Batch(torch.randn(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.long))
    with memory_budget(400):
        assert [part.target.shape[0] for part, _ in micro_batches(network, batch)] == [6]


def test_what_can_be_cut() -> None:
    tokens, mask = torch.zeros(4, 7), torch.ones(4, 7)
    assert can_be_cut({"tokens": tokens, "mask": mask}, 4)
    assert can_be_cut({"tokens": tokens, "scale": torch.tensor(2.0), "flag": True}, 4)
    assert not can_be_cut({"scale": torch.tensor(2.0)}, 4)
    assert not can_be_cut({"tokens": tokens, "table": object()}, 4)
    assert not can_be_cut({"tokens": tokens.T, "mask": mask}, 4)
    part = cut({"tokens": tokens, "mask": mask, "scale": torch.tensor(2.0)}, slice(1, 3))
    assert part["mask"].shape == (2, 7) and part["scale"] == 2


@pytest.mark.parametrize("cls", [lp.KFAC, lp.Diagonal, lp.Full])
def test_a_linear_last_layer_takes_one_forward_pass_of_each_batch(cls: type[lp.GaussianPosterior]) -> None:
    """Nothing before it is differentiated: no two examples tell what one takes, but two look for randomness."""
    model, sizes = convolutional(), []
    model.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    (x, y) = data()[0]
    cls(model, "classification", parameters="last_layer").fit([(x[:12], y[:12]), (x[12:], y[12:])])
    assert sizes == [12, 2, 2, 8]
