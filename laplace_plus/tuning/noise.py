"""Noise levels of regression from the training data, where the evidence's own cannot be relied on.

At the evidence's optimum ``σ² = RSS / (R − T γ)``, with R numbers in the targets, of which γ count as spent on fitting
weights. Blocks of the curvature (KFAC, Diagonal) count more of them than there are, and σ runs away. A network that
interpolates leaves neither residuals nor R − γ.

Leave-one-out residuals need no γ. The network's tangent ``f + J (θ − θ̃)`` is a linear model of ``y' = y − f + J θ̃``.
With the ridge λ and ``M = λ (J Jᵀ + λ)⁻¹`` its residuals are ``q = M y'``. Refits without the outputs b of one row have
exactly ``M_bb⁻¹ q_b`` (Allen, 1974). These have a limit where a model interpolates. The ridge is the one that makes
them smallest. What they measure is the error on new data, ``σ²`` and what the data leave open together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import UnsupportedError
from laplace_plus.network.batches import iterate
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.network.selection import trained
from laplace_plus.tuning.base import Tunable, trained_size
from laplace_plus.tuning.laplace import FittedData
from laplace_plus.tuning.tangent_model import batch_jacobian

INTERPOLATED = 0.01
"""Ratio of training residuals to the targets' deviation below which they say nothing of the noise."""

_PLENTY = 40
"""Numbers for each weight from which ``R − P`` does, without the tangent: it is at most 1.3 % above σ."""

_OPERATIONS, _THIN = 5e10, 200
"""Most multiplications ``R P min(R, P)``, at worst some twenty seconds on one core, and so at most 2.5·10⁸ numbers in
the Jacobian ``[R, P]``. Beyond, every weight counts as spent, up to half of the numbers."""

_LEVELS = 33
"""Ridges that are tried, over 16 decades at most: two for each."""


@dataclass(frozen=True)
class NoiseEstimate:
    """A noise level for regression, and what it was taken from; tensors are 0-d, or ``[C]`` for one level per output.

    Attributes:
        noise_std: Between the deviation of the training residuals and that of the targets.
        residual_std: Root mean square of the training residuals.
        target_std: Standard deviation of the training targets.
        route: ``"tangent"``, leave-one-out of the network's tangent; or ``"parameters"``, where there are 40 numbers or
            more for each weight or the tangent would take too long: all weights count as spent, up to half the numbers.
        problem: What is wrong, in a sentence; empty if nothing is.
    """

    noise_std: Tensor
    residual_std: Tensor
    target_std: Tensor
    route: str
    problem: str


def noise_from_residuals(posterior: Tunable, data: Iterable[Any] | None = None) -> NoiseEstimate:
    """A noise level from training data alone that cannot run away; see :mod:`laplace_plus.tuning.noise`.

    It depends on the network and the data, not on the posterior's curvature or prior. One pass over the data, with the
    Jacobian by all trainable weights unless that is too large. Positions of an example count as rows of their own.

    Args:
        posterior: A fitted Gaussian posterior of a regression, which is not changed.
        data: The training data; by default the loaders of the fit.

    Raises:
        UnsupportedError: A likelihood without Gaussian noise.
        DataError: Other data than were fitted to, or none.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> net = torch.nn.Linear(1, 1)
        >>> posterior = lp.KFAC(net, "regression").fit([(x, net(x).detach() + 0.01 * torch.sin(20 * x))])
        >>> estimate = noise_from_residuals(posterior)
        >>> posterior.noise_std = estimate.noise_std
        >>> estimate.route, estimate.problem
        ('tangent', '')
    """
    model, network = posterior.laplace_model(), posterior.network
    likelihood = model.likelihood
    if not likelihood.is_gaussian:
        raise UnsupportedError("There is no noise to estimate.", expected="lp.Gaussian", got=repr(likelihood))
    data = posterior.training_data.again(data, "Noise from residuals passes over the training data.")
    errors, counts = model.statistics.double().chunk(2)
    n_rows, size = float(counts.sum()), trained_size(network)
    affordable = n_rows * size * max(_THIN, min(n_rows, size)) <= _OPERATIONS
    route = "tangent" if affordable and n_rows < _PLENTY * size else "parameters"
    fitted, parts, jacobians = FittedData(model, network, posterior.n_data), [], []
    with exact_arithmetic(network):
        whole = network.selecting(trained)
        for batch in iterate(data, device=network.device, progress=False):
            if route == "parameters":
                linear = outputs = network.forward(batch.inputs)
            else:
                outputs, jacobian = batch_jacobian(whole, batch.inputs)
                linear = (jacobian.double() @ whole.vector().double()).view_as(outputs)
                jacobians.append(jacobian)
            likelihood.validate(outputs, batch.target)
            fitted.add(outputs, batch.target)
            flat, target, weight = likelihood.rows(outputs.double(), batch.target)
            share = weight[:, None] * likelihood.observed(target)
            parts.append(
                (target.nan_to_num(), linear.double().view_as(flat) - likelihood.gradient(flat, target), share)
            )
    fitted.check()
    targets, linear, share = (torch.cat(column) for column in zip(*parts, strict=True))  # y, y' and weights, [n, C]
    groups = likelihood.output_groups(targets.shape[1]).to(targets.device)

    def by_group(values: Tensor) -> Tensor:
        """Sums over rows, and over the outputs that share a level, ``[K]``."""
        zeros = torch.zeros(likelihood.n_noise, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, groups, values.double().sum(0)).cpu()

    residual = (errors / counts).sqrt()
    away = targets - (share * targets).sum(0) / share.sum(0)
    spread = (by_group(share * away.square()) / by_group((share.sum(0) - 1)[None]).clamp_min(1)).sqrt()
    if route == "parameters":
        error = residual / math.sqrt(1 - min(size / n_rows, 0.5))
    else:
        # Outputs on a common scale, so that one ridge suits all of them.
        scale = torch.maximum(residual, INTERPOLATED * spread).clamp_min(torch.finfo(network.dtype).tiny)
        each = scale.to(targets)[groups]
        jacobian = torch.cat(jacobians) / each.repeat(len(targets))[:, None].to(jacobians[0])
        left_out = _left_out(jacobian, linear / each, share, likelihood.n_noise > 1)
        error = (by_group(share * (left_out * each).square()) / counts).sqrt()
    error, problem = torch.maximum(error, residual), ""
    if bool((residual < INTERPOLATED * spread).any()):
        ratio = float((residual / spread).min())
        problem = f"The network interpolates: its training residuals are {ratio:.2g} of the targets' deviation."
    elif bool((error > spread).any()):
        problem = "The network predicts left-out targets no better than their mean does."
    tensors = torch.minimum(error, torch.maximum(spread, residual)), residual, spread
    noise, residual, spread = (value.reshape(likelihood.noise_std.shape) for value in tensors)
    return NoiseEstimate(noise, residual, spread, route, problem)


def _left_out(jacobian: Tensor, targets: Tensor, share: Tensor, several: bool) -> Tensor:
    """Leave-one-out residuals ``[n, C]`` of ridge regression of targets ``[n, C]`` on ``J [n·C, P]``.

    At the ridge of least squared residuals; with ``several`` noise levels, of the least sum of their logarithms. A row
    counts ``share [n, C]`` times, of which one is left out, or all if less; 0 is an entry that was not observed.
    """
    n, size = targets.shape
    root = share.sqrt()
    jacobian, targets = jacobian * root.flatten()[:, None].to(jacobian), targets * root
    wide, flat = len(jacobian) <= jacobian.shape[1], targets.flatten()
    thin = jacobian if wide else jacobian.T
    values, basis = torch.linalg.eigh(thin.double() @ thin.double().T)
    values = values.clamp_min(0.0)
    rounding = max(1e-12, 100 * torch.finfo(jacobian.dtype).eps) * values[-1].clamp_min(1e-24)
    if not wide:
        kept = values > rounding
        values, basis = values[kept], jacobian.double() @ (basis[:, kept] / values[kept].sqrt())
    rows = basis.view(n, size, -1)  # [n, C, k]
    top = (10 * values.sum()).clamp_min(1e-23).log10()
    levels = torch.logspace(float(rounding.log10()), float(top), _LEVELS, dtype=torch.float64).to(values)
    shrunk = levels / (values[:, None] + levels)  # [k, L]
    products = [(rows[:, c, None] * rows).flatten(0, 1) @ shrunk for c in range(size)]
    block = torch.stack(products).view(size, n, size, -1).permute(3, 1, 0, 2)  # M_bb [L, n, C, C]
    residual = basis @ (shrunk * (basis.T @ flat)[:, None])
    if not wide:  # what no weights can fit
        block = block + (torch.eye(size, dtype=rows.dtype, device=rows.device) - rows @ rows.mT)
        residual += (flat - basis @ (basis.T @ flat))[:, None]
    residual = residual.view(n, size, -1).movedim(-1, 0)  # [L, n, C]
    # The rest of a row's weight stays: (I − M_bb) / w are the leverages of one of its copies.
    kept = (1 - 1 / share.amax(1).clamp_min(1.0))[:, None, None]
    block = block + kept * (torch.eye(size).to(block) - block)
    left = torch.linalg.solve(block, residual[..., None])[..., 0] / torch.where(root > 0, root, 1.0)
    squares = (share * left.square()).mean(1)
    return left[int((squares.log().sum(-1) if several else squares.sum(-1)).argmin())]
