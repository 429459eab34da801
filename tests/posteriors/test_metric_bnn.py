"""MetricBNN: trajectories and latent samples against closed forms, loops and dense matrices."""

import pytest
import torch
from problems import FittedOnce, generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConfigurationError, ConvergenceWarning, DataError
from laplace_plus.geometry import LossLandscape
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.posteriors.metric_bnn import latents as coordinates
from laplace_plus.posteriors.metric_bnn.latents import (
    attraction_loss,
    choose_coordinates,
    draw_partners,
    reconstruction_loss,
    repulsion_loss,
)
from laplace_plus.posteriors.metric_bnn.metric_bnn import Walk, draw_directions, explore

SMALL = {"n_particles": 4, "n_steps": 6, "n_refinements": 3}
LATENT = {"dimension": 4, "hidden": (16,), "epochs": 60, "learning_rate": 1e-2, "tolerance": 1.0, "plateau": 0.0}
QUICK = {"n_particles": 3, "n_steps": 4, "n_refinements": 2}


class TestMetricBNN(FittedOnce):
    one_pass = False
    rows = 12

    def make(self, model, likelihood, **options):
        latent = lp.LatentModel(dimension=3, hidden=(8,), epochs=5, tolerance=10.0)
        return lp.MetricBNN(model, likelihood, latent=latent, **QUICK, **options)


@pytest.mark.slow
class TestExploration(TestMetricBNN):
    def make(self, model, likelihood, **options):
        return lp.MetricBNN(model, likelihood, sampling="exploration", minibatch=5, **QUICK, **options)


@pytest.fixture
def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(12, 2, dtype=torch.float64)
    y = torch.arange(12) % 3
    return net, [(x[:5], y[:5]), (x[5:], y[5:])]


def fit(problem, **options):
    net, data = problem
    options = {"latent": LATENT, **SMALL, **options}
    return lp.MetricBNN(net, "classification", **options).fit(data, generator=generator())


# -- exploration -------------------------------------------------------------------------------------------------------


@pytest.mark.quick("options0")
@pytest.mark.parametrize("options", [{"n_refinements": 0}, {"learning_rate": 0.0}])
def test_particles_without_refinement_go_straight(problem, options):
    posterior = fit(problem, sampling="exploration", step_size=0.3, **options)
    deviations = posterior.trajectories - posterior.mean
    directions = deviations[:, 1] / 0.3
    torch.testing.assert_close(directions.norm(dim=1), torch.ones(4, dtype=torch.float64))
    times = 0.3 * torch.arange(7, dtype=torch.float64)
    torch.testing.assert_close(deviations, times[:, None] * directions[:, None], rtol=0, atol=1e-14)


def test_a_quadratic_loss_in_closed_form():
    """``α d ρ (1 − ρᵀ) / (1 − ρ)`` with ``ρ = (1 − ηλ)^M`` along each eigenvector, and ``αT d`` where λ = 0."""
    source, n, steps, count = generator(1), 7, 5, 4
    x = torch.randn(n, 10, generator=source, dtype=torch.float64)
    net = nn.Linear(10, 1, bias=False).double()
    y = net(x).detach()  # so that the data's loss, whose kernel has three dimensions, is stationary
    walk = Walk(3, steps, 0.2, count, 0.4 * n / 20, None)
    landscape = LossLandscape(net, "regression", [(x[:4], y[:4]), (x[4:], y[4:])], prior_precision=0.0)
    directions = draw_directions(3, landscape.vector, 0)
    found = explore(landscape, directions, walk)[0][:, -1]
    values, vectors = torch.linalg.eigh(x.mT @ x / n)
    rho = (1 - walk.learning_rate * values) ** count
    factor = rho * (1 - rho**steps) / (1 - rho)
    factor = torch.where(values > 1e-9, factor, float(steps))
    torch.testing.assert_close(found @ vectors, 0.2 * directions @ vectors * factor, rtol=1e-10, atol=1e-12)
    assert (values < 1e-9).sum() == 3
    assert (factor < 0.95 * steps).sum() >= 6


def loop(net, data, directions, walk, weight_decay):
    """One particle after the other, with autograd on a copy."""
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    start = nn.utils.parameters_to_vector(net.parameters()).detach()
    ends = []
    for direction in directions:
        position = start.clone()
        for _ in range(walk.n_steps):
            position = position + walk.step_size * direction
            for _ in range(walk.n_refinements):
                point = position.clone().requires_grad_()
                sizes, own, first = [p.shape for p in net.parameters()], {}, 0
                for (name, _), size in zip(net.named_parameters(), sizes, strict=True):
                    own[name] = point[first : first + size.numel()].view(size)
                    first += size.numel()
                outputs = torch.func.functional_call(net, own, (x,))
                loss = nn.functional.cross_entropy(outputs, y) + weight_decay / 2 * point.square().sum()
                position = position - walk.learning_rate * torch.autograd.grad(loss, point)[0]
        ends.append(position - start)
    return torch.stack(ends)


@pytest.mark.slow
def test_particles_together_go_where_each_goes_alone():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 2
    data = [(x[:12], y[:12]), (x[12:], y[12:])]
    walk = Walk(5, 8, 0.1, 13, 0.05)
    directions = draw_directions(5, nn.utils.parameters_to_vector(net.parameters()).detach(), 0)
    alone = loop(net, data, directions, walk, weight_decay=0.02)
    for chunk_size in (2, 16):
        landscape = LossLandscape(net, "classification", data, prior_precision=0.02 * 20, chunk_size=chunk_size)
        deviations, _ = explore(landscape, directions, walk)
        assert landscape.first_order.way == "recorded"
        torch.testing.assert_close(deviations[:, -1], alone, rtol=0, atol=1e-10)


def test_minibatches_stay_near_the_whole(problem):
    posterior = fit(problem, sampling="exploration", minibatch=4, learning_rate=0.01)
    assert posterior.report.growth is None
    again = fit(problem, sampling="exploration", minibatch=4, learning_rate=0.01)
    assert torch.equal(posterior.trajectories, again.trajectories)
    whole = fit(problem, sampling="exploration", minibatch=None, learning_rate=0.01).trajectories
    straight = fit(problem, sampling="exploration", n_refinements=0).trajectories
    assert (posterior.trajectories - whole).norm() < (straight - whole).norm()
    assert not torch.equal(posterior.trajectories, whole)


def test_weight_decay_makes_the_trained_weights_stationary(problem):
    net, data = problem
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    options = {"max_iter": 150, "tolerance_grad": 1e-8, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(net.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        square = sum(p.square().sum() for p in net.parameters())
        loss = nn.functional.cross_entropy(net(x), y) + 0.02 / 2 * square
        loss.backward()
        return loss

    optimizer.step(closure)
    posterior = fit(problem, sampling="exploration", weight_decay=0.02)
    assert float(posterior.prior_precision) == pytest.approx(0.02 * 12)
    assert posterior.report.gradient_norm < 1e-5


def test_the_largest_curvature_is_that_of_the_dense_matrix(problem):
    net, data = problem
    posterior = fit(problem, sampling="exploration", prior_precision=0.5)
    precision = lp.Full(net, "classification", prior_precision=0.5).fit(data).precision_matrix()
    assert posterior.report.curvature == pytest.approx(float(torch.linalg.eigvalsh(precision)[-1]) / 12, rel=1e-3)
    assert posterior.report.stability == pytest.approx(1e-3 * posterior.report.curvature)


def test_diverging_refinements_are_named(problem):
    curvature = fit(problem, sampling="exploration").report.curvature
    with pytest.raises(ConfigurationError, match=r"largest curvature.* is 2\.01.*learning_rate < 2/λ_max"):
        fit(problem, sampling="exploration", learning_rate=2.01 / curvature)
    fit(problem, sampling="exploration", n_refinements=0, learning_rate=2.01 / curvature)
    for precision in (1.0, 1e6):
        auto = fit(problem, sampling="exploration", learning_rate="auto", prior_precision=precision)
        assert auto.report.stability == pytest.approx(1.0)
        assert auto.report.slowest <= auto.report.learning_rate


def test_curvature_that_grows_on_the_way_is_named():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
    x = torch.randn(12, 2, dtype=torch.float64)
    options = {"sampling": "exploration", "n_particles": 4, "n_steps": 3, "n_refinements": 3, "step_size": 1.0}
    rate = 1 / lp.MetricBNN(net, "regression", **options).fit([(x, x[:, :1])]).report.curvature
    posterior = lp.MetricBNN(net, "regression", learning_rate=rate, **options)
    with pytest.warns(ConvergenceWarning, match=r"raised the gradient.* λ_max is 1, "):
        posterior.fit([(x, x.sum(1, keepdim=True))], generator=generator())


@pytest.mark.slow
def test_the_automatic_rate_gives_way_where_the_loss_is_steeper():
    """At an interpolating minimum of a classifier all curvature is gone, and it comes back on the way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    x = torch.randn(20, 2, generator=generator(), dtype=torch.float64)
    y = (x.sum(1) > 0).long()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    options = {"sampling": "exploration", "n_particles": 3, "n_steps": 30, "step_size": 0.5, "learning_rate": "auto"}
    posterior = lp.MetricBNN(net, "classification", prior_precision=1e-6, **options)
    posterior.fit([(x, y)], generator=generator())
    report = posterior.report
    assert report.slowest < report.learning_rate / 4
    assert report.growth < 1.2
    drift = lp.MetricBNN(net, "classification", prior_precision=1e-6, **{**options, "n_refinements": 0})
    drift.fit([(x, y)], generator=generator())

    def losses(points):
        network = posterior.network
        outputs = [network(x, network.substitute(point)) for point in points]
        return torch.stack([nn.functional.cross_entropy(output, y) for output in outputs])

    ends = [p.trajectories[:, -1] for p in (posterior, drift)]
    assert losses(ends[0]).max() < 0.05 < losses(ends[1]).max()


# -- the latent model --------------------------------------------------------------------------------------------------


def test_losses_of_an_orthonormal_encoder_on_a_line_vanish():
    steps = 8
    direction = torch.randn(10, generator=generator(), dtype=torch.float64)
    direction /= direction.norm()
    points = torch.arange(steps + 1)[:, None] / steps * direction
    basis = torch.linalg.qr(torch.cat([direction[:, None], torch.randn(10, 3, generator=generator(1)).double()], 1))[0]
    latents = points @ basis
    assert attraction_loss(latents[:-1], latents[1:], 1 / steps) < 1e-20
    assert reconstruction_loss(points, latents @ basis.mT) < 1e-20
    assert repulsion_loss(latents[:-1], latents[1:]) == pytest.approx(float(torch.tensor(steps).log()), rel=1e-6)


def test_losses_are_finite_with_duplicated_rows():
    rows = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
    losses = [attraction_loss(rows, rows, 0.1), repulsion_loss(rows, rows), reconstruction_loss(rows, rows)]
    (gradient,) = torch.autograd.grad(sum(losses), rows)
    assert torch.isfinite(torch.stack(losses)).all()
    assert torch.isfinite(gradient).all()


def test_partners_are_others():
    for n in (2, 3, 50):
        partners = draw_partners(n, generator(n))
        assert (partners != torch.arange(n)).all()
        assert partners.sort().values.equal(torch.arange(n))


def test_principal_coordinates_hold_all_points(monkeypatch):
    source = generator()
    points = torch.randn(12, 3, generator=source, dtype=torch.float64) @ torch.randn(3, 400, generator=source).double()
    monkeypatch.setattr(coordinates, "KEPT", 1.0)
    found, own = choose_coordinates(points)
    assert own.shape == (12, 3)
    assert float(own.square().mean()) == pytest.approx(1.0)
    torch.testing.assert_close(found.back(own, points), points, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.of(points, points), own, rtol=0, atol=1e-9)
    rows = found.weights @ points
    torch.testing.assert_close(rows @ rows.mT, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-9)
    monkeypatch.setattr(coordinates, "MOST_DIRECTIONS", 2)
    part, fewer = choose_coordinates(points)
    missed = (points - part.back(fewer, points)).square().sum() / points.square().sum()
    assert 1 - part.kept == pytest.approx(float(missed))
    whole, entries = choose_coordinates(points[:, :256])
    torch.testing.assert_close(whole.back(entries, points), points[:, :256])
    assert whole.weights is None and float(entries.square().mean()) == pytest.approx(1.0)


def drawn_latents(posterior, n, monkeypatch):
    """The latents of n samples, and the samples."""
    seen, decode = [], lp.MetricBNN.decode
    with monkeypatch.context() as patch:
        patch.setattr(lp.MetricBNN, "decode", lambda self, z: (seen.append(z), decode(self, z))[1])
        samples = posterior.sample(n, generator=generator())
    return seen[0], samples


def on_segments(latents, start, ends):
    """The segment from the start that each latent is nearest to, and where on it, in parts of its length."""
    along = ends - start
    place = ((latents - start) @ along.mT) / along.square().sum(1)
    distance = (latents[:, None] - start - place[..., None] * along).norm(dim=-1)
    least, which = distance.min(1)
    assert least.max() < 1e-9
    return which, place.gather(1, which[:, None])[:, 0]


@pytest.mark.quick("1")
@pytest.mark.parametrize("most", [256, 1])
def test_samples_lie_between_the_latents(problem, most, monkeypatch):
    """In coordinates of all entries, and of principal directions."""
    monkeypatch.setattr(coordinates, "MANY_ENTRIES", most)
    posterior = fit(problem)
    start, ends = posterior.encode(posterior.mean), posterior.encode(posterior.trajectories[:, -1])
    for extent in (1.0, 0.5):
        posterior.extent = extent
        latents, samples = drawn_latents(posterior, 500, monkeypatch)
        which, place = on_segments(latents, start, ends)
        assert set(which.tolist()) == set(range(4))
        assert place.min() >= 0 and place.max() <= extent
        assert abs(place.mean() - extent / 2) < 4 * extent / (12 * 500) ** 0.5
        torch.testing.assert_close(samples, posterior.decode(latents))


def test_the_autoencoder_reproduces_the_points(problem):
    posterior = fit(problem, latent={"epochs": 150, "hidden": (32,), "learning_rate": 1e-2, "plateau": 0.0})
    points = posterior.trajectories[:, 1:].flatten(0, 1)
    missed = (posterior.decode(posterior.encode(points)) - points).square().sum()
    total = (points - posterior.mean).square().sum()
    report = posterior.latent_report
    assert report.unexplained == pytest.approx(float(missed / total), rel=1e-6)
    assert report.unexplained < 0.05
    assert report.history.shape == (150, 3)


def test_training_ends_where_the_loss_no_longer_falls(problem):
    options = {**LATENT, "epochs": 100_000, "plateau": 0.05}
    posterior = fit(problem, latent=options)
    losses = posterior.latent_report.history.sum(1)
    assert 100 <= len(losses) < 1000
    assert losses[-100:-50].mean() - losses[-50:].mean() < 0.05 * (losses[0] - losses[-50:].mean())
    shorter = losses[:-1]
    if len(shorter) >= 100:
        assert shorter[-100:-50].mean() - shorter[-50:].mean() >= 0.05 * (losses[0] - shorter[-50:].mean())


def test_unfinished_autoencoders_are_named(problem):
    with pytest.warns(ConvergenceWarning, match="not converged: it leaves"):
        fit(problem, latent={"epochs": 1})


# -- posteriors --------------------------------------------------------------------------------------------------------


def test_explored_points_and_their_gaussian(problem):
    posterior = fit(problem)
    points = posterior.trajectories[:, 1:].flatten(0, 1)
    drawn = posterior.exploration.sample(50, generator=generator())
    assert (torch.cdist(drawn, points).min(1).values < 1e-6).all()
    samples = posterior.gaussian.sample(20_000, generator=generator())
    error = samples.var(0).sqrt() / 20_000**0.5
    assert ((samples.mean(0) - points.mean(0)).abs() < 5 * error + 1e-12).all()
    torch.testing.assert_close(
        samples.T.cov(), points.T.cov(correction=0), rtol=0, atol=0.05 * float(points.var(0).max())
    )
    x = problem[1][0][0]
    for view in (posterior, posterior.exploration, posterior.gaussian):
        assert view.predictive(x, n_samples=5, generator=generator()).mean.shape == (5, 3)
        assert view.functional_posterior(x).covariance.shape == (5, 3, 3)


def test_the_extent_bounds_how_far_samples_go(problem):
    posterior = fit(problem)
    posterior.extent = 0.5
    points = posterior.trajectories
    drawn = posterior.exploration.sample(50, generator=generator())
    assert (torch.cdist(drawn, points[:, 1:4].flatten(0, 1)).min(1).values < 1e-6).all()
    with pytest.raises(ConfigurationError):
        posterior.extent = 1.5


def test_held_out_data_choose_the_extent(problem):
    net, data = problem
    posterior = fit(problem, sampling="exploration", step_size=1.0)
    posterior.fit_prior_precision(data=data, grid=(1.0, 0.5, 1 / 6), n_samples=20, generator=generator())
    assert posterior.extent < 1
    source = generator()
    seeds = [draw_seed(source) for _ in data]

    def score(extent):
        posterior.extent = extent
        sources = [generator(seed) for seed in seeds]
        pairs = zip(data, sources, strict=True)
        log_probs = [posterior.predictive(x, n_samples=20, generator=g).log_prob(y) for (x, y), g in pairs]
        return float(torch.cat(log_probs).mean())

    chosen = posterior.extent
    best = score(chosen)
    assert best == pytest.approx(posterior.tuning.value)
    assert all(score(value) <= best for value in (1.0, 0.5, 1 / 6))


def test_held_out_data_choose_the_noise():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    y = net(x).detach() + 0.5 * torch.randn(200, 1, dtype=torch.float64)
    posterior = lp.MetricBNN(net, "regression", sampling="exploration", step_size=1e-3, **SMALL)
    posterior.fit([(x, y)]).fit_prior_precision(data=[(x, y)], n_samples=5, grid=[1.0])
    assert float(posterior.noise_std) == pytest.approx(0.5, rel=0.2)
    assert posterior.tuning.n_evaluations == 9


def test_loaded_posteriors_encode_alike(problem, tmp_path, monkeypatch):
    net, _ = problem
    monkeypatch.setattr(coordinates, "MANY_ENTRIES", 1)
    posterior = fit(problem)
    posterior.extent = 0.7
    posterior.save(tmp_path / "p")
    loaded = lp.load(tmp_path / "p", net)
    assert loaded.options == posterior.options
    assert loaded.report == posterior.report
    assert loaded.extent == posterior.extent
    assert torch.equal(
        loaded.encode(posterior.sample(3, generator=generator())),
        posterior.encode(posterior.sample(3, generator=generator())),
    )
    posterior.exploration.save(tmp_path / "e")
    assert torch.equal(lp.load(tmp_path / "e", net).trajectories, posterior.trajectories)


@pytest.mark.slow
def test_a_loaded_posterior_is_fitted_again_to_the_same_prior(problem, tmp_path):
    net, data = problem
    posterior = fit(problem, sampling="exploration", weight_decay=0.02, n_steps=2)
    posterior.save(tmp_path / "p")
    loaded = lp.load(tmp_path / "p", net)
    assert loaded.weight_decay == 0.02
    assert float(loaded.fit(data * 2).prior_precision) == pytest.approx(0.02 * 24)


@pytest.mark.parametrize(
    "options",
    [
        {"n_particles": 0},
        {"step_size": 0.0},
        {"learning_rate": -1.0},
        {"n_refinements": -1},
        {"sampling": "all"},
        {"weight_decay": 0.0},
        {"latent": {"plateau": -1.0}},
        {"latent": {"hidden": (0,)}},
    ],
)
def test_bad_options_are_named(problem, options):
    with pytest.raises(ConfigurationError):
        lp.MetricBNN(problem[0], "classification", **options)


def test_bad_requests_are_named(problem):
    net, data = problem
    posterior = lp.MetricBNN(net, "classification", sampling="exploration", **SMALL)
    with pytest.raises(DataError, match="used once"):
        posterior.fit(iter(data))
    posterior.fit(data)
    assert posterior.latents is None
    with pytest.raises(ConfigurationError, match="no noise to tune"):
        posterior.fit_prior_precision(data=data, tune_noise=True)
