"""Data left out of ridge problems, and hyperparameters by what that predicts, against dense linear algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from laplace_plus.applications.uses import ridge_left_out
from laplace_plus.errors import ConfigurationError
from laplace_plus.linalg import Dense, lsmr

EXACT = {"atol": 1e-14, "btol": 1e-14, "conlim": 0.0}
N, M = 60, 40


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, WAVES = draw(N, 2), draw(N, seed=1), draw(2, M // 2, seed=2)


def kernel_features(log_lengthscale, log_scale, x=X):
    """Random Fourier features of a squared-exponential kernel, ``[N, M]``."""
    angles = x @ WAVES / log_lengthscale.exp()
    return log_scale.exp() * torch.cat([angles.cos(), angles.sin()], 1) / (M // 2) ** 0.5


def logarithms():
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.3, -0.2, -1.0)]


def test_slopes_of_a_held_out_loss_are_those_of_a_dense_solve():
    """By LSMR and through torch.linalg.solve: in the lengthscale, the scale of outputs and the noise."""
    (x, y), (x_out, y_out) = (X[:45], Y[:45]), (X[45:], Y[45:])
    log_lengthscale, log_scale, log_noise = hyperparameters = logarithms()

    def slopes(solve):
        phi, phi_out = (kernel_features(log_lengthscale, log_scale, points) for points in (x, x_out))
        variance = (2 * log_noise).exp()
        loss = ((y_out - phi_out @ solve(phi)).square() / variance + variance.log()).mean()
        return torch.stack([loss, *torch.autograd.grad(loss, hyperparameters)]).detach()

    def dense(phi):
        return torch.linalg.solve(phi.T @ phi + (2 * log_noise).exp() * torch.eye(M, dtype=torch.float64), phi.T @ y)

    def ours(phi):
        return lsmr(Dense(phi), Dense(phi).T, y, damp=log_noise.exp(), parameters=[phi], **EXACT).value

    torch.testing.assert_close(slopes(ours), slopes(dense), rtol=1e-8, atol=1e-8)


def test_implicit_formula_of_the_damping():
    """``b̄ = argmin ‖Aᵀp − x̄‖² + λ²‖p‖²`` and ``λ̄ = −2λ ⟨ξ, x⟩`` with ``(AᵀA + λ²) ξ = x̄``, for tall A."""
    A, b, cotangent = draw(N, 9), Y.clone().requires_grad_(), draw(9, seed=3)
    damp = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    x = lsmr(lambda v: v @ A.T, lambda u: u @ A, b, damp=damp, **EXACT).value
    to_b, to_damp = torch.autograd.grad(x, (b, damp), cotangent)
    xi = torch.linalg.solve(A.T @ A + 0.49 * torch.eye(9, dtype=torch.float64), cotangent)
    torch.testing.assert_close(to_damp, -1.4 * xi @ x.detach(), rtol=1e-10, atol=1e-12)
    transposed = lsmr(lambda u: u @ A, lambda v: v @ A.T, cotangent, damp=0.7, **EXACT).value
    torch.testing.assert_close(to_b, transposed, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(to_b, A @ xi, rtol=1e-9, atol=1e-11)


def test_data_are_left_out_as_by_solving_again():
    phi, noise = kernel_features(*logarithms()[:2]).detach(), 0.3
    found = ridge_left_out(phi, Y, noise, **EXACT)
    nll = 0.0
    for i in (0, 7, 59):
        kept = torch.arange(N) != i
        gram = phi[kept].T @ phi[kept] + noise**2 * torch.eye(M, dtype=torch.float64)
        mean = phi[i] @ torch.linalg.solve(gram, phi[kept].T @ Y[kept])
        variance = noise**2 * (1 + phi[i] @ torch.linalg.solve(gram, phi[i]))
        torch.testing.assert_close(found.residual[i], Y[i] - mean, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(noise**2 / (1 - found.leverage[i]), variance, rtol=1e-9, atol=1e-10)
        nll -= torch.distributions.Normal(mean, variance.sqrt()).log_prob(Y[i]) / 3
    some = ridge_left_out(phi, Y, noise, rows=torch.tensor([0, 7, 59]), **EXACT)
    torch.testing.assert_close(some.nll(noise), nll, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(some.residual, found.residual[[0, 7, 59]])
    full = torch.linalg.solve(phi.T @ phi + noise**2 * torch.eye(M, dtype=torch.float64), phi.T @ Y)
    torch.testing.assert_close(found.weights, full, rtol=1e-8, atol=1e-10)
    assert found.solution.converged


def test_their_loss_has_derivatives():
    """Of the kernel's hyperparameters by autograd through the dense process, and of all entries by differences."""
    log_lengthscale, log_scale, log_noise = hyperparameters = logarithms()
    phi, noise = kernel_features(log_lengthscale, log_scale), log_noise.exp()
    ours = ridge_left_out(phi, Y, noise, **EXACT).nll(noise)
    inverse = torch.linalg.inv(phi @ phi.T + noise**2 * torch.eye(N, dtype=torch.float64))
    variance = 1 / inverse.diagonal()  # Rasmussen and Williams (2006), equations 5.10 to 5.12
    dense = ((2 * math.pi * variance).log() + (inverse @ Y).square() * variance).mean() / 2
    torch.testing.assert_close(ours, dense, rtol=1e-10, atol=1e-10)
    slopes, expected = (torch.stack(torch.autograd.grad(f, hyperparameters, retain_graph=True)) for f in (ours, dense))
    torch.testing.assert_close(slopes, expected, rtol=1e-8, atol=1e-8)

    def loss(features, targets, damp):
        found = ridge_left_out(features, targets, damp, rows=torch.tensor([1, 3]), **EXACT)
        return found.nll(damp), found.residual, found.weights

    given = draw(5, 3), draw(5, seed=1), torch.tensor(0.8, dtype=torch.float64)
    assert gradcheck(loss, [value.requires_grad_() for value in given], atol=1e-7)


def test_an_operator_serves_as_features():
    phi = draw(12, 30)
    dense, free = (ridge_left_out(features, Y[:12], 0.5, **EXACT) for features in (phi, 2 * Dense(phi / 2)))
    torch.testing.assert_close(dense.residual, free.residual)
    single = ridge_left_out(phi.float(), Y[:12].float(), 0.5)
    assert single.leverage.dtype == torch.float32
    torch.testing.assert_close(single.leverage.double(), dense.leverage, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    for targets, damp in ((Y[1:], 1.0), (Y, 0.0), (Y, -1.0)):
        with pytest.raises(ConfigurationError):
            ridge_left_out(draw(N, 3), targets, damp)
