"""What a sampled posterior notices by itself: changed groups, other data, and tuning that is not at a fixed point."""

from __future__ import annotations

import pytest
import torch
from problems import generator
from torch import nn

import laplace_plus as lp
from laplace_plus.errors import ConvergenceWarning, DataError
from laplace_plus.priors import Groups
from laplace_plus.tuning.groups import with_floor


def problem():
    """A classifier, and 30 examples in four batches."""
    torch.manual_seed(0)
    x = torch.randn(30, 3, generator=generator(), dtype=torch.float64)
    y = torch.randint(3, (30,), generator=generator(1))
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), x, y


def batches(x, y):
    return list(zip(x.split(8), y.split(8), strict=True))


def fitted(n_samples=4, **options):
    model, x, y = problem()
    options.setdefault("solver", lp.CGSolver(tolerance=1e-10))
    posterior = lp.SampledLaplace(model, "classification", n_samples=n_samples, chunk_size=n_samples, **options)
    return posterior.fit(batches(x, y), generator=generator())


# -- convergence of tuning ------------------------------------------------------------------------------------------


def tuned(method, **options):
    """A linear regression of which the data determine few of the parameters."""
    scales = torch.arange(1, 31, dtype=torch.float64) ** -2.0
    x = torch.randn(60, 30, generator=generator(), dtype=torch.float64) * scales
    y = x @ torch.randn(30, 1, generator=generator(2), dtype=torch.float64)
    y = y + 0.3 * torch.randn(60, 1, generator=generator(3), dtype=torch.float64)
    posterior = lp.SampledLaplace(
        nn.Linear(30, 1, bias=False).double(),
        lp.Gaussian(0.3),
        n_samples=8,
        chunk_size=8,
        prior_precision=0.05,
        solver=lp.CGSolver(tolerance=1e-6),
    ).fit([(x, y)], generator=generator())
    return posterior.fit_prior_precision(method, tune_noise=False, optimum_tolerance=1e-6, **options)


@pytest.mark.slow
def test_both_methods_agree_where_they_have_converged():
    mackay, em = (tuned(method, max_steps=300, tolerance=1e-2) for method in ("mackay", "em"))
    assert abs(float((em.prior_precision / mackay.prior_precision).log())) < 0.03
    assert len(em.tuning.steps) > 2 * len(mackay.tuning.steps)
    for posterior in (mackay, em):
        last, before = posterior.tuning.steps[-1], posterior.tuning.steps[-2].prior_precision
        residual = (last.effective_dimension / (before * last.squared_norm)).log().abs().max()
        assert posterior.tuning.converged and posterior.tuning.residual == pytest.approx(float(residual))


@pytest.mark.slow
def test_short_steps_far_from_the_fixed_point_are_not_convergence():
    with pytest.warns(ConvergenceWarning, match="residual"):
        posterior = tuned("em", max_steps=5, tolerance=0.3)
    steps = posterior.tuning.steps
    moved = (steps[-1].prior_precision / steps[-2].prior_precision).log().abs().max()
    assert moved < 0.3 < posterior.tuning.residual
    assert not posterior.tuning.converged


# -- what the samples hold for --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_groups_have_other_samples():
    precision = torch.tensor([0.1, 10.0], dtype=torch.float64)
    posterior = fitted(prior_precision=precision)
    before = posterior.samples
    own = posterior.prior_groups
    posterior.prior_groups = Groups("swapped", ("a", "b"), 1 - own.index)
    swapped = fitted(prior_precision=precision.flip(0)).samples
    assert not torch.allclose(before, swapped, atol=1e-2)
    torch.testing.assert_close(posterior.samples, swapped, rtol=1e-6, atol=1e-7)
    posterior.prior_groups = own
    torch.testing.assert_close(posterior.samples, before, rtol=1e-6, atol=1e-7)


def test_groups_of_one_precision_change_nothing(monkeypatch):
    posterior = fitted(prior_precision=2.0)
    before = posterior.samples
    posterior.prior_groups = Groups("swapped", ("a", "b"), 1 - posterior.prior_groups.index)
    monkeypatch.setattr(posterior, "solve", None)
    assert torch.equal(posterior.samples, before)


# -- the data -------------------------------------------------------------------------------------------------------


def test_other_data_of_the_same_number_are_refused(tmp_path):
    model, x, y = problem()
    posterior = fitted()
    before = posterior.samples
    posterior.save(tmp_path / "saved")
    for other in ((10 * x, y), (x, y.roll(1)), (x.roll(1), y)):
        for each in (posterior, lp.load(tmp_path / "saved", model)):
            with pytest.raises(DataError, match="not the data of the fit"):
                each.solve(batches(*other))
            with pytest.raises(DataError, match="not the data of the fit"):
                each.fit_prior_precision(data=batches(*other))
            assert torch.equal(each.samples, before)


def test_the_same_data_in_another_order_are_accepted(tmp_path):
    model, x, y = problem()
    posterior = fitted()
    posterior.save(tmp_path / "saved")
    order = torch.randperm(30, generator=generator(5))
    for each in (posterior, lp.load(tmp_path / "saved", model)):
        torch.testing.assert_close(each.solve([(x[order], y[order])]).samples, fitted().samples, rtol=1e-6, atol=1e-7)


def test_a_g_priors_floor_is_a_millionth_of_its_groups_mean():
    diagonal = torch.tensor([0.0, 4.0, 0.0, 0.0, 8.0, 1.0], dtype=torch.float64)
    index = torch.tensor([0, 0, 1, 1, 2, 2])
    expected = torch.tensor([2e-6, 4.0, 1e-6, 1e-6, 8.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(with_floor(diagonal, index), expected)
