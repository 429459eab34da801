"""The displacement of a field against closed forms, finite differences and dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import laplace_plus as lp
from laplace_plus.applications.fields.displaced import Grid
from laplace_plus.testing import GaussianConformance

BOX3 = [[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]]
DOUBLE = {"dtype": torch.float64}


def rand(*shape, seed=0, low=-1.0, high=1.0):
    return low + (high - low) * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def scene(d=3, channels=2, seed=0):
    """A smooth field of densities and colours, and a renderer of rays ``[R, S, d]`` of sample points."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(d, 12), nn.Tanh(), nn.Linear(12, channels + 1)).double()

    def render(rays, displace):
        found = model(displace(rays))
        alpha = 1 - torch.exp(-0.5 * nn.functional.softplus(found[..., 0]))
        passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return ((alpha * passed)[..., None] * found[..., 1:].sigmoid()).sum(1)

    return model, render


def by_hand(render, rays, grid, d):
    """∂C/∂θ ``[R, C, V, d]`` by differentiating the rendering with trilinear weights written out."""
    theta = torch.zeros(grid.n_vertices + 1, d, **DOUBLE)
    index, weights = grid.corners(rays)

    def shown(theta):
        return render(rays, lambda x: x + (weights[..., None] * theta[index]).sum(-2))

    return torch.func.jacrev(shown)(theta)[:, :, :-1]


def fitted(structure="diagonal", d=3, n=20, resolution=3, seed=0, **options):
    model, render = scene(d)
    rays, box = rand(n, 5, d, seed=seed), [[-1.0] * d, [1.0] * d]
    posterior = lp.SpatialField(
        model, lp.Gaussian(0.5), box=box, resolution=resolution, render=render, structure=structure, **options
    )
    return posterior.fit([(rays, torch.zeros(n, 2, **DOUBLE))]), render, rays


def curvature_of(posterior):
    """H at unit noise, of each vertex its trace ``[G + 1, ...]`` or its block ``[G + 1, ..., d, d]``."""
    block, grid = posterior.state.curvature.blocks[0][1], posterior.grid
    each = block.matrix if posterior.structure.name == "block" else block.values[..., 0, 0]
    return each.sum(0)[:-1].unflatten(0, (grid.resolution + 1,) * grid.d)


# -- the curvature -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "block"])
def test_an_untouched_vertex_keeps_the_prior(structure):
    model, render = scene()
    rays = rand(10, 4, 3, low=-1.0, high=-0.4)  # in the first of 3³ cells
    posterior = lp.SpatialField(
        model, "regression", box=BOX3, resolution=3, render=render, structure=structure, prior_precision=0.25
    ).fit([(rays, torch.zeros(10, 2, **DOUBLE))])
    assert float(posterior.std(torch.tensor([[1.0, 1.0, 1.0]], **DOUBLE))) == 2.0
    assert torch.equal(posterior.variance().view(-1, 3)[-10:], torch.full((10, 3), 4.0, **DOUBLE))
    assert posterior.std(rays).max() < 2.0


@pytest.mark.parametrize("d", [1, 2, 3])
def test_an_affine_field_has_the_closed_form(d):
    slope = rand(d, seed=1)
    linear = nn.Linear(d, 4, bias=False).double()
    linear.weight.data = slope.expand(4, d).clone()
    x = rand(30, d, seed=2)
    posterior = lp.SpatialField(linear, "regression", box=[[-1.0] * d, [1.0] * d], resolution=3)
    posterior.fit([(x, torch.zeros(30, 4, **DOUBLE))])
    near = 1 - 1.5 * (x[:, None] - torch.cartesian_prod(*[torch.linspace(-1, 1, 4, **DOUBLE)] * d).view(-1, d)).abs()
    weights = near.clamp_min(0).prod(-1)  # [N, V]: products of hat functions
    expected = 4 * slope.square().sum() * weights.square().sum(0)
    torch.testing.assert_close(curvature_of(posterior).flatten(), expected, rtol=1e-12, atol=1e-12)


def test_a_constant_field_has_none_and_a_scaled_one_its_square():
    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.inner, self.factor = scene(2)[0], factor

        def forward(self, x):
            return self.factor * self.inner(x) + 1.0

    x = rand(20, 2)
    found = []
    for k in (0.0, 1.0, 3.0):
        posterior = lp.SpatialField(Scaled(k), "regression", box=[[-1.0] * 2, [1.0] * 2], resolution=2)
        found.append(curvature_of(posterior.fit([(x, torch.zeros(20, 3, **DOUBLE))])))
    assert not found[0].any() and (found[1] > 0).all()
    torch.testing.assert_close(found[2], 9 * found[1], rtol=1e-12, atol=0)


def test_one_vertex_against_finite_differences():
    posterior, render, rays = fitted()
    grid, step, total = posterior.grid, 1e-5, 0.0
    index, weights = grid.corners(rays)
    exact = by_hand(render, rays, grid, 3)
    number = 21  # a vertex inside
    for axis in range(3):
        shown = []
        for sign in (1, -1):
            theta = torch.zeros(grid.n_vertices + 1, 3, **DOUBLE)
            theta[number, axis] = sign * step
            shown.append(render(rays, lambda x, t=theta: x + (weights[..., None] * t[index]).sum(-2)))
        slope = (shown[0] - shown[1]) / (2 * step)
        torch.testing.assert_close(slope, exact[:, :, number, axis], rtol=0, atol=1e-6)
        total += float(slope.detach().square().sum())
    assert total > 1e-4
    assert float(curvature_of(posterior).flatten()[number]) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("structure", ["diagonal", "block"])
def test_the_dense_matrix_has_these_blocks(structure):
    posterior, render, rays = fitted(structure, d=2, resolution=2)
    jacobian = by_hand(render, rays, posterior.grid, 2).flatten(2).flatten(0, 1)  # [R·C, V·d]
    dense = (jacobian.T @ jacobian).view(9, 2, 9, 2)
    blocks = torch.stack([dense[v, :, v] for v in range(9)])
    expected = blocks if structure == "block" else blocks.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(curvature_of(posterior).flatten(0, 1), expected, rtol=1e-10, atol=1e-12)


def test_the_likelihoods_curvature_and_noise_enter():
    model = scene(2)[0]
    x, labels = rand(15, 2), torch.arange(15) % 3
    options = {"box": [[-1.0] * 2, [1.0] * 2], "resolution": 2, "structure": "block"}
    posterior = lp.SpatialField(model, "classification", **options).fit([(x, labels)])
    index, weights = posterior.grid.corners(x)
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)  # [N, C, d]
    p = model(x).softmax(-1)
    each = jacobian.mT @ (torch.diag_embed(p) - p[:, :, None] * p[:, None]) @ jacobian
    expected = torch.zeros(9, 2, 2, **DOUBLE)
    expected.index_add_(0, index.flatten(), (weights.square()[..., None, None] * each[:, None]).flatten(0, 1))
    torch.testing.assert_close(curvature_of(posterior).flatten(0, 1), expected.detach(), rtol=1e-10, atol=1e-12)
    noise = torch.tensor([0.1, 1.0, 2.0], **DOUBLE)
    posterior = lp.SpatialField(model, lp.Gaussian(noise), **options).fit([(x, torch.zeros(15, 3, **DOUBLE))])
    each = jacobian.mT @ (jacobian / noise.square()[:, None])
    expected = torch.eye(2, **DOUBLE).repeat(9, 1, 1)  # the prior: a cell's edge is 1
    expected.index_add_(0, index.flatten(), (weights.square()[..., None, None] * each[:, None]).flatten(0, 1))
    found = posterior.precision_matrix()[:18, :18].view(9, 2, 9, 2)
    torch.testing.assert_close(torch.stack([found[v, :, v] for v in range(9)]), expected.detach(), rtol=1e-9, atol=1e-9)


def test_cameras_add_up_and_rays_never_hurt():
    posterior, render, rays = fitted(n=20)
    model, targets = posterior.model, torch.zeros(20, 2, **DOUBLE)
    make = lambda: lp.SpatialField(model, lp.Gaussian(0.5), box=BOX3, resolution=3, render=render)  # noqa: E731
    first, second = (make().fit([(part, targets[:10])]) for part in (rays[:10], rays[10:]))
    torch.testing.assert_close(curvature_of(posterior), curvature_of(first) + curvature_of(second))
    assert (posterior.variance() <= first.variance()).all()
    again = make().fit(iter([(rays[:10], targets[:10])])).update([(rays[10:], targets[:10])])
    torch.testing.assert_close(curvature_of(again), curvature_of(posterior))
    assert again.n_data == 20


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", pytest.param("block", marks=pytest.mark.slow)])
def test_predictions_are_those_of_the_displaced_field(structure):
    model = scene(2)[0]
    x = rand(40, 2)
    posterior = lp.SpatialField(
        model, lp.Gaussian(0.01), box=[[-1.0] * 2, [1.0] * 2], resolution=4, structure=structure
    )
    posterior.fit([(x, torch.zeros(40, 3, **DOUBLE))])
    new = torch.cat([rand(6, 2, seed=3), torch.tensor([[1.5, 0.0]], **DOUBLE)])
    jacobian = torch.func.vmap(torch.func.jacrev(model))(new).detach()
    expected = jacobian @ posterior.covariance(new) @ jacobian.mT
    found = posterior.predictive(new)
    torch.testing.assert_close(found.mean, model(new).detach())
    torch.testing.assert_close(found.epistemic, expected.diagonal(dim1=1, dim2=2))
    assert posterior.covariance(new)[-1].diag().tolist() == [0.25, 0.25]  # the prior outside of the box
    posterior.prior_precision = 1e6  # displacements so small that the field is linear
    expected = posterior.predictive(new).epistemic
    n = 200
    sampled = posterior.predictive(new, method="sampled", n_samples=n, generator=torch.Generator().manual_seed(0))
    error = expected * math.sqrt(2 / n)
    assert ((sampled.epistemic - expected).abs() < 4.5 * error).all()


def test_pixels_and_their_joint_covariance():
    posterior, render, rays = fitted(n=12)
    index, weights = posterior.grid.spread(rays)

    def shown(theta):
        return render(rays, lambda x: x + (weights[..., None] * theta.view(-1, 3)[index]).sum(-2))

    jacobian = torch.func.jacrev(shown)(torch.zeros(posterior.n_parameters, **DOUBLE))
    expected = torch.einsum("ncp,pq,mdq->ncmd", jacobian, posterior.covariance_matrix(), jacobian)
    torch.testing.assert_close(posterior.functional_posterior(rays, joint=True).covariance, expected)
    found = posterior.predictive(rays, joint=True).log_prob(torch.zeros(12, 2, **DOUBLE))
    total = expected.reshape(24, 24) + 0.25 * torch.eye(24, **DOUBLE)
    gaussian = torch.distributions.MultivariateNormal(render(rays, lambda x: x).flatten(), total)
    torch.testing.assert_close(found, gaussian.log_prob(torch.zeros(24, **DOUBLE)).detach())
    assert posterior.functional_posterior(rays, outputs="independent").covariance.shape == (12, 2)


def test_another_output_of_the_displaced_field():
    """Such as depths: `through` takes a function that displaces its points by the posterior's own field."""
    posterior, _, rays = fitted(n=12, structure="block")
    t = torch.linspace(0.0, 1.0, 5, **DOUBLE)

    model, displace = posterior.model, posterior.field.displace

    def depth(rays, displace):
        return (torch.softmax(model(displace(rays))[..., 0], 1) @ t)[:, None]

    view = lp.through(posterior, lambda rays: depth(rays, displace))
    found = view.functional_posterior(rays)
    index, weights = posterior.grid.spread(rays)

    def shown(theta):
        return depth(rays, lambda x: x + (weights[..., None] * theta.view(-1, 3)[index]).sum(-2))

    jacobian = torch.func.jacrev(shown)(torch.zeros(posterior.n_parameters, **DOUBLE))[:, 0]
    expected = torch.einsum("np,pq,nq->n", jacobian, posterior.covariance_matrix(), jacobian)
    torch.testing.assert_close(found.covariance[:, 0, 0], expected)
    torch.testing.assert_close(found.mean, depth(rays, lambda x: x).detach())
    with pytest.raises(lp.errors.SelectionError):
        lp.through(posterior, lambda rays: model(rays)[:, 0]).functional_posterior(rays)


def test_validation_finds_the_size_of_a_displacement():
    """A field that was moved by noise of a known size, seen where it is nearly linear."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    grid, generator = Grid.of([[0.0] * 2, [1.0] * 2], 12), torch.Generator().manual_seed(1)
    theta = 0.2 * torch.randn(grid.n_vertices + 1, 2, generator=generator, **DOUBLE)
    x = rand(800, 2, low=0.0)
    index, weights = grid.spread(x)
    y = model(x + (weights[..., None] * theta[index]).sum(-2)).detach()
    posterior = lp.SpatialField(model, lp.Gaussian(0.02), box=[[0.0] * 2, [1.0] * 2], resolution=12)
    posterior.fit([(x[:1], y[:1])])  # so that nearly all is the prior
    options = {"grid": torch.logspace(-1, 4, 21), "tune_noise": False}
    posterior.fit_prior_precision("validation", data=[(x, y)], **options)
    assert 0.15 < float(posterior.prior_precision) ** -0.5 < 0.27


# -- queries -----------------------------------------------------------------------------------------------------------


def test_uncertainty_between_vertices():
    posterior, _, _ = fitted(d=2, resolution=2)
    variances = posterior.variance().view(-1, 2)[:, 0]
    middle = torch.tensor([[-0.5, -0.5]], **DOUBLE)  # of the first cell: equal weights
    torch.testing.assert_close(posterior.std(middle)[0], variances[[0, 1, 3, 4]].mean().sqrt())
    x = torch.tensor([[[-1.0, 1.0], [0.0, -1.0]]], **DOUBLE)
    torch.testing.assert_close(posterior.std(x), variances[None, [2, 3]].sqrt())
    far = torch.tensor([[1.0 + 1e-9, 0.0], [-7.0, 0.0]], **DOUBLE)
    assert posterior.std(far).tolist() == [1.0, 1.0]


def test_a_block_knows_the_normal_of_a_surface():
    linear = nn.Linear(2, 1).double()
    linear.weight.data = torch.tensor([[3.0, 0.0]], **DOUBLE)
    x = rand(50, 2)
    box = [[-1.0] * 2, [1.0] * 2]
    posterior = lp.SpatialField(linear, lp.Gaussian(0.1), box=box, resolution=1, structure="block")
    posterior.fit([(x, torch.zeros(50, 1, **DOUBLE))])
    covariance = posterior.covariance(x[:4])
    torch.testing.assert_close(covariance[:, 0, 0].sqrt(), posterior.std(x[:4]))
    assert (covariance[:, 0, 0] < 0.01).all() and torch.allclose(covariance[:, 1, 1], torch.tensor(4.0, **DOUBLE))


def test_compositing():
    posterior, _, rays = fitted()
    u, weights = posterior.std(rays), rand(20, 5, low=0.0, high=0.2)
    rest, least = 1 - weights.sum(1), posterior.variance().min().sqrt()
    logs = (weights * u.log10()).sum(1) + rest * least.log10()
    torch.testing.assert_close(posterior.render_uncertainty(weights, rays), 10**logs)
    for bad in (weights[:, :4], -weights, 10 * weights, weights * torch.nan):
        with pytest.raises(lp.errors.ConfigurationError, match="weights"):
            posterior.render_uncertainty(bad, rays)


def test_the_mask_keeps_what_is_known():
    posterior, _, rays = fitted()
    threshold = float(posterior.std(rays).median())
    assert posterior.mask(threshold, rays).double().mean() == pytest.approx(0.5, abs=0.01)
    places = torch.cartesian_prod(*[torch.linspace(-1, 1, 4, **DOUBLE)] * 3)
    assert torch.equal(posterior.mask(threshold).flatten(), posterior.mask(threshold, places))


# -- storage and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["diagonal", "block"])
def test_saved_with_a_renderer(structure, tmp_path):
    posterior, render, rays = fitted(structure)
    posterior.save(tmp_path / "field")
    loaded = lp.load(tmp_path / "field", posterior.model)
    assert torch.equal(loaded.std(rays), posterior.std(rays)) and loaded.options == posterior.options
    with pytest.raises(lp.errors.ConfigurationError, match="renderer"):
        loaded.predictive(rays)
    loaded.field.render = render
    torch.testing.assert_close(loaded.predictive(rays).variance, posterior.predictive(rays).variance)
    with torch.no_grad():
        posterior.model[0].weight += 1
    with pytest.raises(lp.errors.CheckpointError):
        lp.load(tmp_path / "field", posterior.model)
    with pytest.raises(lp.errors.ModelChangedError):
        posterior.std(rays)


@pytest.mark.parametrize(
    "options",
    [
        {"box": [0.0, 1.0]},
        {"box": [[0.0], [0.0]]},
        {"box": [[0.0] * 4, [1.0] * 4]},
        {"box": [[0.0], [math.inf]]},
        {"resolution": 0},
        {"structure": "full"},
        {"parameters": "last_layer"},
        {"prior_mean": 1.0},
        {"backend": lp.Native("hessian")},
    ],
)
def test_bad_arguments(options):
    with pytest.raises(lp.errors.ConfigurationError):
        lp.SpatialField(nn.Linear(1, 1), "regression", **{"box": [[0.0], [1.0]], "resolution": 2, **options})


def test_bad_data():
    posterior, render, rays = fitted()
    targets, before = torch.zeros(20, 2, **DOUBLE), curvature_of(posterior)
    with pytest.raises(lp.errors.DataError, match="box"):
        posterior.fit([(rays + 10, targets)])
    with pytest.raises(lp.errors.DataError, match="no points"):
        posterior.fit([(rays[..., :2], targets)])
    posterior.field.render = lambda rays, displace: render(rays, lambda x: x)
    with pytest.raises(lp.errors.DataError, match="displaces no points"):
        posterior.fit([(rays, targets)])
    posterior.field.render = lambda rays, displace: render(rays, displace)[:, None].expand(-1, 3, -1)
    with pytest.raises(lp.errors.ConfigurationError, match="one row"):
        posterior.fit([(rays, torch.zeros(20, 3, 2, **DOUBLE))])
    posterior.field.render = lambda rays, displace: render(rays, lambda x: displace(x).abs().sqrt() + (x - x).sqrt())
    with pytest.raises(lp.errors.NonFiniteError):
        posterior.fit([(0 * rays, targets)])
    posterior.field.render = render
    assert torch.equal(curvature_of(posterior), before)
    for query in (lambda: posterior.std(rays[..., :2]), lambda: posterior.std([0.0])):
        with pytest.raises(lp.errors.DataError):
            query()
    with pytest.raises(lp.errors.NonFiniteError):
        posterior.std(rays * torch.nan)
    with pytest.raises(lp.errors.ConfigurationError):
        posterior.mask(0.0)
    with pytest.raises(lp.errors.UnsupportedError):
        lp.leave_one_out(posterior)
    with pytest.raises(lp.errors.NotFittedError):
        lp.SpatialField(posterior.model, "regression", box=BOX3).std(rays)


# -- the suite that every posterior passes ---------------------------------------------------------------------------


class TestSpatialField(GaussianConformance):
    """All tests but two: displacements are not among the model's parameters, and may be more than these.

    A ray's outputs are those of its own points.
    """

    structure = "diagonal"
    test_examples_may_share_rows = None

    def make(self, model, likelihood, **options):
        box = [[-4.0] * 3, [4.0] * 3]
        return lp.SpatialField(model, likelihood, box=box, resolution=2, structure=self.structure, **options)

    def test_samples_have_the_parameters_shape(self):
        posterior, _, _ = self.fitted()
        samples = posterior.sample(4, generator=torch.Generator().manual_seed(0))
        assert samples.shape == (4, posterior.n_parameters) == (4, (27 + 1) * 3)
        assert posterior.parameter_names == ("displacement",) and torch.isfinite(samples).all()

    def test_tuning_raises_the_evidence(self):
        """It has no optimum in the prior precision, as the mean is the prior's, which therefore stays."""
        posterior, _, data = self.fitted()
        values = torch.stack([posterior.log_marginal_likelihood(prior_precision=10.0**n) for n in range(-4, 9)])
        assert (values.diff() > 0).all()
        for tuner in ("auto", "marginal_likelihood"):  # a standard deviation of a cell's edge, 4
            with pytest.warns(lp.errors.NoGainWarning, match="tells no prior precision|as by default"):
                posterior.fit_prior_precision(tuner)
        assert posterior.tuning.value == float(posterior.log_marginal_likelihood(prior_precision=1 / 4**2))
        grid = [1e-4, 1e-2, 1.0]
        with pytest.warns(lp.errors.ConvergenceWarning):  # targets are random here
            posterior.fit_prior_precision("validation", data=data, grid=grid)
        value, losses = posterior.tuning.value, []
        for posterior.prior_precision in grid:
            losses.append(-sum(posterior.predictive(x).log_prob(y).sum() for x, y in data) / self.rows)
        assert value == pytest.approx(-float(min(losses)), rel=1e-9)


@pytest.mark.slow
class TestBlocks(TestSpatialField):
    structure = "block"


def test_training_rays_tune_the_noise_of_most_evidence():
    model, render = scene()
    rays = rand(30, 5, 3)
    y = render(rays, lambda x: x).detach() + 0.2 * torch.randn(
        30, 2, **DOUBLE, generator=torch.Generator().manual_seed(1)
    )
    options = {"box": BOX3, "resolution": 2, "render": render}
    posterior = lp.SpatialField(model, lp.Gaussian(torch.ones(2, **DOUBLE)), **options).fit([(rays, y)])
    with pytest.warns(lp.errors.NoGainWarning, match="tells no prior precision"):
        posterior.fit_prior_precision()
    noise = posterior.noise_std.clone().requires_grad_()
    (slope,) = torch.autograd.grad(posterior.log_marginal_likelihood(noise_std=noise), noise)
    assert posterior.tuning.converged and noise.shape == (2,) and (slope * noise).abs().max() < 1e-4
    assert ((noise - 0.2).abs() < 4.5 * 0.2 / 60**0.5).all() and float(posterior.prior_precision) == 1.0  # 2/2 cells
