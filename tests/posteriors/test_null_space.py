"""The posterior on the null space of the training Jacobian, against dense projectors and closed forms."""

import pytest
import torch
from posteriors.dense_rows import classifier_and_batches, dense_rows, projector_of
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import (
    ConfigurationError,
    ConvergenceWarning,
    DataError,
    NonFiniteError,
    UnsupportedError,
)
from laplace_plus.linalg.null_space import (
    LSMRProjection,
    SVDProjection,
)
from laplace_plus.network.linearization import jvp
from laplace_plus.posteriors.projection import NullSpaceRows, project_noise, range_dimension
from laplace_plus.testing import PosteriorConformance


class TestNullSpace(PosteriorConformance):
    one_pass = False
    rows = 12

    def network(self, outputs):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.5), nn.Linear(9, outputs)]
        return nn.Sequential(*layers).double().train()

    def make(self, model, likelihood, **options):
        return lp.NullSpace(model, likelihood, projector="svd", n_samples=3, **options)


@pytest.fixture
def problem():
    return classifier_and_batches()


def rows_of(posterior, data, kind):
    return dense_rows(posterior.network, data, kind, posterior.network.vector())


@pytest.mark.diagonal
@pytest.mark.parametrize("kind", ["logit", "ggn", "loss"])
@pytest.mark.parametrize("projector", ["svd", "lsmr"])
def test_samples_are_projected_noise(problem, kind, projector):
    net, data = problem
    posterior = lp.NullSpace(
        net, "classification", rows=kind, projector=projector, n_samples=6, prior_precision=4.0
    ).fit(data, generator=generator())
    rows = rows_of(posterior, data, kind)
    P = projector_of(rows)
    deviations = (posterior.samples - posterior.mean) * 2.0
    torch.testing.assert_close(deviations @ P, deviations, rtol=0, atol=1e-6)
    other = lp.NullSpace(net, "classification", rows=kind, projector="svd", n_samples=6, prior_precision=4.0)
    torch.testing.assert_close(other.fit(data, generator=generator()).samples, posterior.samples, rtol=0, atol=1e-6)
    assert posterior.report.converged.all()
    assert (posterior.report.residual < 1e-6).all()


def test_training_predictions_are_the_networks(problem):
    net, data = problem
    net = net.float()
    data = [(x.float(), y) for x, y in data]
    posterior = lp.NullSpace(net, "classification", n_samples=4).fit(data)
    x = torch.cat([x for x, _ in data])
    deviations = posterior.samples - posterior.mean
    moved = torch.stack([jvp(posterior.network, x, deviation) for deviation in deviations])
    assert moved.abs().max() < 1e-5
    assert posterior.functional_posterior(x).covariance.abs().max() < 1e-9
    away = posterior.functional_posterior(x + 3).covariance.diagonal(dim1=-2, dim2=-1)
    assert (away > 1e-3).all()
    torch.testing.assert_close(posterior.predictive(x).mean, net(x).softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", [lp.NullSpace, lp.VIKING])
def test_few_rows_or_weights_are_decomposed(cls):
    """A curve's rows span nine decades, over which LSMR took hundreds of iterations for a wrong rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.linspace(-2, 2, 200, dtype=torch.float64)[:, None]
    data = [(x[:100], x[:100].sin()), (x[100:], x[100:].sin())]
    posterior = cls(net, "regression", n_samples=4).fit(data, generator=generator())
    rows = rows_of(lp.Full(net, "regression").fit(data), data, "logit")
    values, directions = torch.linalg.svd(rows, full_matrices=False)[1:]
    inside = directions[values > 1e-12 * values[0]]
    samples = posterior.noise.null_space
    assert float(posterior.report.rank.value) == len(inside) < 200
    assert (samples @ inside.mT).abs().max() < 1e-9
    assert bool((posterior.report.iterations == 1).all())


def test_rank_is_exact_by_svd_and_unbiased_otherwise(problem):
    net, data = problem
    exact = lp.NullSpace(net, "classification", projector="svd", n_samples=4).fit(data).report
    assert float(exact.rank.value) == torch.linalg.matrix_rank(
        rows_of(lp.Full(net, "classification").fit(data), data, "logit")
    )
    assert exact.rank.sem == 0
    posterior = lp.NullSpace(net, "classification", projector="lsmr", n_samples=4).fit(data, generator=generator())
    estimated = posterior.report
    assert estimated.rank.sem > 0
    assert abs(estimated.rank.value - exact.rank.value) < 4 * estimated.rank.sem
    assert posterior.null_space_dimension.value == sum(p.numel() for p in net.parameters()) - estimated.rank.value


def test_linear_regression_in_closed_form():
    """``E‖δ‖² = R/α``, and the variance is what x has outside of the span of the data, over α."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    net = nn.Linear(12, 1, bias=False).double()
    posterior = lp.NullSpace(net, "regression", n_samples=4000, prior_precision=2.0, projector="svd")
    posterior.fit([(X, X.sum(-1, keepdim=True))], generator=generator)
    squares = (posterior.samples - posterior.mean).square().sum(-1)
    assert abs(squares.mean() - 7 / 2) < 4 * squares.std() / 4000**0.5
    x = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    expected = (x @ projector_of(X) * x).sum(-1) / 2
    found = posterior.functional_posterior(x).covariance[:, 0, 0]
    assert ((found - expected).abs() < 4 * (2 / 4000) ** 0.5 * expected).all()


def test_the_optimal_precision_maximises_the_evidence(problem):
    net, data = problem
    posterior = lp.NullSpace(net, "classification", projector="svd", n_samples=3).fit(data).fit_prior_precision()
    rank, distance = posterior.report.rank.value, posterior.mean.square().sum()
    evidence = lambda alpha: float(rank * alpha.log() - alpha * distance) / 2  # noqa: E731
    best, alpha = posterior.tuning.value, posterior.prior_precision.double()
    assert best == pytest.approx(evidence(alpha))
    assert max(evidence(0.99 * alpha), evidence(1.01 * alpha)) < best


def test_networks_change_to_second_order_only(problem):
    """A smooth network's outputs move as s² along the null space, and as s along others."""
    net, data = problem
    posterior = lp.NullSpace(net, "classification", projector="svd", n_samples=4).fit(data, generator=generator())
    network, x = posterior.network, torch.cat([x for x, _ in data])
    base = network.forward(x)

    def slope(direction):
        sizes = torch.tensor([1e-3, 1e-2], dtype=torch.float64)
        moved = [(network(x, network.substitute(posterior.mean + s * direction)) - base).abs().max() for s in sizes]
        return torch.log10(moved[1] / moved[0])

    for direction in posterior.samples - posterior.mean:
        assert abs(slope(direction) - 2) < 0.1
    for direction in torch.randn(4, posterior.n_parameters, generator=generator(), dtype=torch.float64):
        assert abs(slope(direction) - 1) < 0.1


def test_what_only_the_losses_keep(problem):
    """In the losses' null space but not in the logits': logits move as s, losses as s²."""
    net, data = problem
    posterior = lp.NullSpace(net, "classification", rows="loss", projector="svd", n_samples=4)
    posterior.fit(data, generator=generator())
    network, x, y = posterior.network, torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    logits = rows_of(posterior, data, "logit")
    base, loss = network.forward(x), nn.functional.cross_entropy(network.forward(x), y, reduction="none")
    for direction in posterior.samples - posterior.mean:
        direction = direction - direction @ projector_of(logits)
        changes = []
        for s in (1e-4, 1e-3):
            now = network(x, network.substitute(posterior.mean + s * direction))
            change = nn.functional.cross_entropy(now, y, reduction="none") - loss
            changes.append(((now - base).abs().max(), change.abs().max()))
        assert abs(torch.log10(changes[1][0] / changes[0][0]) - 1) < 0.1
        assert abs(torch.log10(changes[1][1] / changes[0][1]) - 2) < 0.1


def test_rows_of_examples_that_are_fitted_exactly_are_counted():
    torch.manual_seed(0)
    net = nn.Linear(4, 1, bias=False).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    y = net(x).detach() + torch.tensor([[0.0], [1.0], [-1.0]], dtype=torch.float64)
    posterior = lp.NullSpace(net, "regression", rows="loss", n_samples=5, projector="svd").fit([(x, y)])
    assert posterior.report.ignored_rows == 1
    moved = (posterior.samples - posterior.mean) @ x.mT
    assert moved[:, 1:].abs().max() < 1e-10
    assert moved[:, 0].abs().min() > 1e-6


def test_line_search_keeps_the_training_loss(problem):
    net, data = problem
    posterior = lp.NullSpace(net, "classification", projector="svd", n_samples=5).fit(data, generator=generator())
    posterior.fit_prior_precision("line_search", allowance=0.05, n_samples=5)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])

    def loss(vectors):
        outputs = [posterior.network(x, posterior.network.substitute(v)) for v in vectors]
        return torch.stack([nn.functional.cross_entropy(o, y) for o in outputs]).mean()

    excess = loss(posterior.samples) - loss(posterior.mean[None])
    assert excess <= 0.05
    posterior.prior_precision = posterior.prior_precision / 10**0.06
    assert posterior.tuning.converged
    assert loss(posterior.samples) - loss(posterior.mean[None]) > 0.05
    with pytest.warns(ConvergenceWarning, match="another allowance"):
        posterior.fit_prior_precision("line_search", allowance=1e12, n_samples=2)
    assert not posterior.tuning.converged


def test_validation_finds_the_best_precision_of_its_grid(problem):
    net, data = problem
    with torch.no_grad():
        net[2].weight *= 6  # too sure of itself, a third of the labels being at random
    x = 2 * torch.randn(60, 2, generator=generator(), dtype=torch.float64)
    y = net(x).argmax(-1)
    y[::3] = torch.arange(20) % 3
    held_out = [(x, y)]
    posterior = lp.NullSpace(net, "classification", projector="svd", n_samples=5).fit(data, generator=generator())
    posterior.fit_prior_precision("validation", data=held_out)

    def score():
        return posterior.predictive(held_out[0][0]).log_prob(held_out[0][1]).mean()

    best = score()
    assert float(best) == pytest.approx(posterior.tuning.value)
    for factor in (10**0.5, 10**-0.5):
        posterior.prior_precision = posterior.tuning.prior_precision * factor
        assert score() <= best


def test_ignored_targets_do_not_count(problem):
    net, data = problem
    batches = [(x, y.where(torch.arange(len(y)) < 1, torch.tensor(-100))) for x, y in data]
    kept = [(x[:1], y[:1]) for x, y in data]
    found = []
    for part in (batches, kept):
        posterior = lp.NullSpace(net, "classification", projector="svd", n_samples=3, rows="loss")
        posterior.fit(part, generator=generator()).fit_prior_precision("line_search", allowance=0.1, n_samples=3)
        found.append((float(posterior.prior_precision), posterior.tuning.value))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_projectors_are_loaded_with_their_options(problem, tmp_path):
    net, data = problem
    posterior = lp.NullSpace(net, "classification", rows="ggn", projector=LSMRProjection(tolerance=1e-9), n_samples=2)
    posterior.fit(data).save(tmp_path / "p")
    loaded = lp.load(tmp_path / "p", net)
    assert loaded.projector == posterior.projector
    assert loaded.rows == "ggn"
    assert loaded.report.rank == posterior.report.rank
    with pytest.raises(DataError, match="data=train_loader"):
        loaded.fit_prior_precision("line_search")


class Root(nn.Module):
    """``|w·x|^½``, whose slope at ``w·x = 0`` is infinite while its value is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 1, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.weight).abs().sqrt()


@pytest.mark.parametrize(("kind", "projector"), [("logit", "svd"), ("ggn", "lsmr"), ("loss", "alternating")])
def test_gradients_that_are_not_finite_are_named(kind, projector):
    x = torch.randn(3, 6, dtype=torch.float64, generator=generator())
    x[2] = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.0, 0.0])
    posterior = lp.NullSpace(Root(), "regression", rows=kind, projector=projector, n_samples=2)
    with pytest.raises(NonFiniteError):
        posterior.fit([(x, torch.zeros(3, 1, dtype=torch.float64))])


def test_range_components_take_no_memory_where_they_are_not_wanted(problem):
    net, data = problem
    posterior = lp.NullSpace(net, "classification", n_samples=3)
    rows = NullSpaceRows(posterior.network, posterior.likelihood, data, "loss")
    both, without = (project_noise(rows, LSMRProjection(), 3, 0, keep_range=keep) for keep in (True, False))
    assert without.range.numel() == 0
    assert both.range.shape == both.null_space.shape
    torch.testing.assert_close(both.null_space, without.null_space, rtol=0, atol=1e-8)
    torch.testing.assert_close(both.report.rank.value, without.report.rank.value)
    torch.testing.assert_close(both.report.rank.value, both.range.square().sum(-1).mean())


def test_kernel_diffusions_of_linear_models_are_its_samples():
    x = torch.randn(4, 9, dtype=torch.float64, generator=generator())
    net = nn.Linear(9, 1, bias=False).double()
    data = [(x, x.sum(-1, keepdim=True))]
    posterior = lp.NullSpace(net, "regression", projector="svd", n_samples=5, prior_precision=3.0).fit(data)
    landscape = lp.geometry.LossLandscape(net, "regression", data, prior_precision=3.0)
    field = lp.geometry.NoiseField(landscape, lp.Diffusion(kind="kernel"))
    root = field.displacement(landscape.vector, torch.eye(9, dtype=torch.float64))
    torch.testing.assert_close(root.T @ root, projector_of(x) / 3, rtol=0, atol=1e-10)
    noise = (posterior.samples - posterior.mean) * 3**0.5
    steps = noise[:, None].expand(-1, 4, -1) / 2  # four steps of a quarter each
    ends = lp.geometry.diffuse(field, landscape.vector, steps).endpoint
    torch.testing.assert_close(ends, posterior.samples, rtol=0, atol=1e-10)


def test_bad_requests_are_named(problem):
    net, data = problem
    make = lambda **options: lp.NullSpace(net, "classification", n_samples=2, **options)  # noqa: E731
    for options in ({"rows": "all"}, {"projector": "qr"}, {"prior_precision": torch.ones(2)}):
        with pytest.raises(ConfigurationError):
            make(**options)
    with pytest.warns(ConvergenceWarning, match="did not meet"):
        make(projector=LSMRProjection(max_iterations=2)).fit(data)
    fitted = make(projector=SVDProjection()).fit(data)
    with pytest.raises(UnsupportedError, match="cannot be updated"):
        fitted.update(data)
    before, precision = fitted.samples, fitted.prior_precision
    for several in (torch.ones(2), torch.linspace(1, 2, fitted.n_parameters, dtype=torch.float64)):
        with pytest.raises(ConfigurationError, match="a single prior precision"):
            fitted.prior_precision = several
    assert torch.equal(fitted.samples, before)
    fitted.prior_precision = 4 * precision
    torch.testing.assert_close(fitted.samples - fitted.mean, (before - fitted.mean) / 2)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_null_space_that_is_not_there_is_not_found(dtype):
    """By LSMR, whose projections are as short as its tolerance and the rows' condition allow, but not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x, y = torch.randn(60, 3).to(dtype), torch.randn(60, 2).to(dtype)
    with pytest.raises(UnsupportedError, match="no direction free"):
        lp.NullSpace(model, "regression", projector="lsmr", n_samples=2).fit([(x, y)])


def test_what_a_projector_leaves_in_the_range_is_no_null_space():
    """Lengths of the squares that a null space of one dimension has with a probability below 1 % are none."""
    left = 0.3 * torch.nn.functional.normalize(torch.randn(10, 27, generator=torch.Generator().manual_seed(0)))
    squares = torch.full((10,), 27.0)
    with pytest.raises(UnsupportedError, match="no direction free"):
        range_dimension(left, squares)
    assert range_dimension(left, squares, rank=26).value == 26  # as a decomposition knows
    lines = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0))
    refused = 0
    for line in lines:
        try:
            range_dimension(line[:, None] * torch.eye(27)[0], squares)
        except UnsupportedError:
            refused += 1
    assert abs(refused / 2000 - 0.01) < 4 * (0.01 * 0.99 / 2000) ** 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::laplace_plus.errors.ConvergenceWarning")
def test_sweeps_in_single_precision_find_no_null_space_that_is_not_there():
    """Gram matrices of batches leave singular values below a thousandth of the largest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    x, y = torch.randn(60, 2), torch.randn(60, 2)
    posterior = lp.NullSpace(model, lp.Gaussian(0.1), projector="alternating", n_samples=8)
    with pytest.raises(UnsupportedError, match="no direction free"):
        posterior.fit([(x[:30], y[:30]), (x[30:], y[30:])], generator=torch.Generator().manual_seed(0))


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("projector", ["svd", "lsmr", "alternating", "auto"])
def test_a_null_space_of_one_dimension_is_found(projector, dtype):
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).to(dtype)
    x = torch.eye(4, dtype=dtype)[:3] + 0.1 * torch.randn(3, 4, dtype=dtype)
    data = [(x[:2], torch.zeros(2, 1, dtype=dtype)), (x[2:], torch.zeros(1, 1, dtype=dtype))]
    posterior = lp.NullSpace(model, "regression", projector=projector, n_samples=30)
    posterior.fit(data, generator=torch.Generator().manual_seed(0))
    (free,) = torch.linalg.svd(x)[2][3:]
    along = posterior.noise.null_space @ free
    torch.testing.assert_close(posterior.noise.null_space, along[:, None] * free, rtol=0, atol=1e-4)
    assert 0.3 < float(along.square().mean()) < 2.2  # of 30 squares of normal numbers
