"""Noise levels of regression from the training data, where the evidence's own cannot be relied on.

At the evidence's optimum ``σ² = RSS / (R − T γ)``, with R numbers in the targets, of which γ count as spent on fitting
weights. Blocks of the curvature (KFAC, Diagonal) count more of them than there are, and σ runs away. A network that
interpolates leaves neither residuals nor R − γ.

Leave-one-out residuals need no γ. The network's tangent ``f + J (θ − θ̃)`` is a linear model of ``y' = y − f + J θ̃``.
Its weights are penalised by ``λ θᵀ D θ``, where D is for each layer the mean square norm of its gradients: so the scale
of weights does not matter that later ones undo. By the plain norm errors were further off, up to 42 % too low. Weights
are taken from the span of the gradients ``D⁻¹ J_Sᵀ`` of m numbers S among the outputs, drawn at random. With
``L Lᵀ = J_S D⁻¹ J_Sᵀ`` the features are ``Φ = J D⁻¹ J_Sᵀ L⁻ᵀ`` (Williams and Seeger, 2001). With
``M = I − Φ (Φᵀ Φ + λ)⁻¹ Φᵀ`` residuals are ``q = M y'``. Refits without the outputs b of one row have exactly
``M_bb⁻¹ q_b`` (Allen, 1974). These have a limit where a model interpolates. The ridge λ is the one that makes them
smallest. What they measure is the error on new data, ``σ²`` and what the data leave open together.

Up to R = 2000 S is all numbers, which is the whole tangent. Of more, 1000 are drawn: errors came out up to 5 % larger,
and more where noise was learned by heart. Ridges are compared on 500 numbers, each left out alone, and the best one
grows with the root of the numbers: at it, errors were within 3 % of the least. The features are those of the network,
which it learned from the rows that are left out, too. So far as it has memorised their noise, new errors are larger.

On rows that it was not trained on, a network that learnt from many more errs less than that. Its residuals are honest,
and independent but for what it has missed. Training leaves marks: along the leading eigenvectors u of ``Φ Φᵀ`` it has
taken noise away, or its last steps have left some. Of independent residuals ``(uᵀ r)²`` is ``Σ_n u_n² r_n²`` in
expectation, whatever the noise of each; sums of the differences, over the leading u, show either mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laplace_plus.errors import UnsupportedError
from laplace_plus.likelihoods import Gaussian
from laplace_plus.network.batches import iterate
from laplace_plus.network.network import Network, exact_arithmetic
from laplace_plus.network.selection import trained
from laplace_plus.structured.gradients import slices
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.laplace import FittedData
from laplace_plus.tuning.tangent_kernel import OutputGradients, output_gradients

INTERPOLATED, _NEARLY = 0.01, 0.2
"""Ratios of training residuals to the targets' deviation, and to left-out errors, below which they say nothing of the
noise."""

_SMALL, _MARKS = 1 / 2, (-0.07, 0.2)
"""Residuals below half of left-out errors are honest if the sums of differences, relative to the whole, keep within
these bounds: those of training rows did not, see benchmarks/results/real.md."""

_WHOLE, _PART, _GRADIENTS = 2000, 500, 1000
"""Most numbers in the targets whose whole kernel is taken; of its part; and, of more, whose gradients span weights."""

_NUMBERS = 30_000
"""Most numbers in the targets that are left out; of more, as many are drawn. As at most m of them count as spent on
weights, that makes the error larger by ``m/60 000`` at most."""

_LEVELS, _SMALLEST, _JITTER = 33, 1e-11, 1e-12
"""Ridges that are tried; the smallest one, relative to the largest eigenvalue; and what is added to ``J_S J_Sᵀ``,
relative to its trace, as gradients may depend on each other."""

_CHUNK = 64 * 2**20
"""Bytes of products of features for the blocks ``M_bb`` at a time."""


@dataclass(frozen=True)
class NoiseEstimate:
    """A noise level for regression, and what it was taken from; tensors are 0-d, or ``[C]`` for one level per output.

    Attributes:
        noise_std: Between the deviation of the training residuals and that of the targets.
        residual_std: Root mean square of the training residuals.
        target_std: Standard deviation of the training targets.
        problem: What is wrong, in a sentence; empty if nothing is. Where a network interpolates, or nearly so, errors
            on new data were up to three times ``noise_std``.
        marks: The least and the largest sum of what training leaves in residuals, relative to their squares; None where
            residuals are not small beside left-out errors, if there are many.
        is_honest: Whether residuals are below half of left-out errors without such marks: then the network was not
            trained on the rows, and their residuals are the errors on new data.
    """

    noise_std: Tensor
    residual_std: Tensor
    target_std: Tensor
    problem: str
    marks: tuple[float, float] | None
    is_honest: bool


def noise_from_residuals(posterior: Tunable, data: Iterable[Any] | None = None) -> NoiseEstimate:
    """A noise level from training data alone that cannot run away; see :mod:`laplace_plus.tuning.noise`.

    It depends on the network and the data, not on the posterior's curvature or prior. Three passes over the data, with
    gradients in all trainable weights. Positions of an example count as rows of their own. Draws have a fixed seed.

    Args:
        posterior: A fitted posterior of a regression, which is not changed.
        data: The training data; by default the loaders of the fit. Only a Gaussian posterior knows them again.

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
        >>> bool(estimate.residual_std < estimate.noise_std < estimate.target_std), estimate.problem
        (True, '')
    """
    network, likelihood = posterior.network, posterior.likelihood
    if not likelihood.is_gaussian:
        raise UnsupportedError("There is no noise to estimate.", expected="lp.Gaussian", got=repr(likelihood))
    given, data = data, posterior.training_data.again(data, "Noise from residuals passes over the training data.")
    model = posterior.laplace_model() if hasattr(posterior, "laplace_model") else None
    fitted = None if model is None else FittedData(model, network, posterior.n_data)
    sums, parts = torch.zeros(()), []
    with exact_arithmetic(network):
        for batch in iterate(data, device=network.device, progress=False):
            outputs = network.forward(batch.inputs)
            likelihood.validate(outputs, batch.target)
            sums = sums + likelihood.statistics(outputs, batch.target).cpu()
            if fitted is not None:
                fitted.add(outputs, batch.target)
            _, target, weight = likelihood.rows(outputs.double(), batch.target)
            parts.append((target.nan_to_num(), weight[:, None] * likelihood.observed(target)))
    if fitted is not None:
        fitted.check(strict=given is not None)
    errors, counts = sums.double().chunk(2)
    targets, share = (torch.cat(column) for column in zip(*parts, strict=True))  # y and weights, [n, C]
    groups = likelihood.output_groups(targets.shape[1]).to(targets.device)

    def by_group(values: Tensor) -> Tensor:
        """Sums over rows, and over the outputs that share a level, ``[K]``."""
        zeros = torch.zeros(likelihood.n_noise, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, groups, values.double().sum(0)).cpu()

    residual = (errors / counts).sqrt()
    away = targets - (share * targets).sum(0) / share.sum(0)
    spread = (by_group(share * away.square()) / by_group((share.sum(0) - 1)[None]).clamp_min(1)).sqrt()
    # Outputs on a common scale, so that one ridge suits all of them.
    scale = torch.maximum(residual, INTERPOLATED * spread).clamp_min(torch.finfo(network.dtype).tiny)
    left_out, share, marks = _left_out(network, likelihood, data, scale.to(targets)[groups], share)
    error, problem = (by_group(share * left_out.square()) / by_group(share)).sqrt(), ""
    error = torch.maximum(error, residual)
    interpolates = bool((residual < INTERPOLATED * spread).any())
    exact = bool((residual < torch.finfo(network.dtype).eps ** 0.5 * spread).any())  # residuals are rounding errors
    unmarked = marks is not None and _MARKS[0] < marks[0] and marks[1] < _MARKS[1]
    if interpolates:
        ratio = float((residual / spread).min())
        problem = f"The network interpolates: its training residuals are {ratio:.2g} of the targets' deviation."
    elif bool((residual < _NEARLY * error).any()):
        ratio = float((residual / error).min())
        problem = f"The network nearly interpolates: its training residuals are {ratio:.2g} of left-out errors."
    elif bool((error > spread).any()):
        problem = "The network predicts left-out targets no better than their mean does."
    tensors = torch.minimum(error, torch.maximum(spread, residual)), residual, spread
    noise, residual, spread = (value.reshape(likelihood.noise_std.shape) for value in tensors)
    is_honest = unmarked and not exact and bool((residual < _SMALL * noise).any())
    return NoiseEstimate(noise, residual, spread, problem, marks, is_honest)


def _left_out(
    network: Network, likelihood: Gaussian, data: Iterable[Any], scale: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, tuple[float, float] | None]:
    """Leave-one-out residuals of the tangent at targets of such weights ``[n, C]``, or at some, and their weights.

    At the ridge of least squares of the residuals by ``scale [C]``. Then the marks of training in the network's own;
    None where there are many, not small beside the left-out ones of a part.
    """
    n, size = weights.shape
    source, network, whole = torch.Generator().manual_seed(0), network.selecting(trained), n * size <= _WHOLE
    kept = (torch.rand(n, generator=source, dtype=torch.float64) * n * size < _NUMBERS).nonzero()
    numbers, counted = (kept * size + torch.arange(size)).flatten(), weights.cpu().flatten().nonzero().squeeze(-1)
    drawn = numbers if whole else counted[torch.randperm(len(counted), generator=source)[:_GRADIENTS]].sort().values
    with exact_arithmetic(network):
        gradients, columns = zip(*_numbers(network, likelihood, data, scale, drawn), strict=True)
        span, table = OutputGradients.join(gradients), torch.cat(columns, 1)
        weighted = span.by_block(scale[drawn.to(scale.device) % size].square())  # of gradients that are not by scale
        kernel = span.kernel(weighted)
        ridge, features = _ridge_of_part(kernel, table, len(numbers), source), None
        if not whole:
            kernel.diagonal().add_(_JITTER * kernel.trace() + torch.finfo(kernel.dtype).tiny)
            found = _numbers(network, likelihood, data, scale, numbers)
            rows, columns = zip(*((own.kernel(weighted), column) for own, column in found), strict=True)
            triangle, table = torch.linalg.cholesky(kernel), torch.cat(columns, 1)
            features = torch.linalg.solve_triangular(triangle, torch.cat(rows).T, upper=False).T
            kernel = features.T @ features
    targets, residual, share = table.view(3, -1, size)
    if ridge is not None:
        return scale * left_out_at(ridge, kernel, features, targets, share), share, None
    basis, values = eigenvectors(kernel, features)
    left, _ = left_out_at_best(basis, values, targets, share, several=likelihood.n_noise > 1)
    return scale * left, share, _marks(basis, share.sqrt() * residual)


def _numbers(
    network: Network, likelihood: Gaussian, data: Iterable[Any], scale: Tensor, chosen: Tensor
) -> Iterator[tuple[OutputGradients, Tensor]]:
    """Batch by batch of those outputs whose places among all are ``chosen [p]``, in order.

    Their gradients by scale and ``w^½``, and ``[3, p]``: ``y'`` and residuals by scale, and weights w.
    """
    seen = 0
    for batch in iterate(data, device=network.device, progress=False):
        flat, target, weight = likelihood.rows(network.forward(batch.inputs).double(), batch.target)
        drawn = chosen[(chosen >= seen) & (chosen < seen + flat.numel())] - seen
        seen += flat.numel()
        if len(drawn):
            own, line = output_gradients(network, batch.inputs, drawn)
            drawn = drawn.to(flat.device)
            each, residual = scale[drawn % len(scale)], -likelihood.gradient(flat, target).flatten()[drawn]
            share = (weight[:, None] * likelihood.observed(target)).flatten()[drawn]
            yield own.times(share.sqrt() / each), torch.stack([(line + residual) / each, residual / each, share])


def _ridge_of_part(kernel: Tensor, table: Tensor, count: int, source: torch.Generator) -> float | None:
    """The ridge of so many numbers by that of a part, each left out alone; None if few, or if residuals are small.

    It spares the eigenvectors of all. They are needed for marks, and where a part interpolates, which tells no ridge.
    """
    part = torch.randperm(len(kernel), generator=source)[:_PART].to(kernel.device)
    basis, values = eigenvectors(kernel[part][:, part])
    targets, residual, share = table[:, part, None]
    left, ridge = left_out_at_best(basis, values, targets, share, several=False)
    small = bool((share * residual.square()).sum() < _SMALL**2 * (share * left.square()).sum())
    return None if small or len(part) == len(kernel) else ridge * (count / len(part)) ** 0.5


def eigenvectors(matrix: Tensor, features: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Those of a kernel, or of ``Φ Φᵀ`` by ``Φᵀ Φ``, ``[n·C, k]``, and eigenvalues ``[k]`` that count, ascending."""
    values, basis = torch.linalg.eigh(matrix)
    values = values.clamp_min(1e-24)
    kept = values > _SMALLEST * values[-1]
    values, basis = values[kept], basis[:, kept]
    return basis if features is None else features @ (basis / values.sqrt()), values


def _marks(basis: Tensor, residuals: Tensor) -> tuple[float, float]:
    """The least and largest sum of ``(uᵀ r)² - Σ_n (u_nᵀ r_n)²`` over leading u, by all their ``Σ_n (u_nᵀ r_n)²``."""
    parts = (basis.view(*residuals.shape, -1) * residuals[..., None]).sum(1)  # [n, k]
    own = parts.square().sum(0)
    sums = (parts.sum(0).square() - own).flip(0).cumsum(0) / own.sum().clamp_min(torch.finfo(own.dtype).tiny)
    return float(sums.min()), float(sums.max())


def left_out_at_best(
    basis: Tensor, values: Tensor, targets: Tensor, share: Tensor, *, several: bool
) -> tuple[Tensor, float]:
    """Leave-one-out residuals ``[n, C]`` of ridge regression of targets ``[n, C]`` by :func:`eigenvectors`.

    And the ridge: of least squared residuals; with ``several`` noise levels, of the least sum of their logarithms.
    """
    n, size = targets.shape
    flat = (targets * share.sqrt()).flatten()
    lowest, top = float((_SMALLEST * values[-1]).log10()), float((10 * values.sum()).log10())
    levels = torch.logspace(lowest, top, _LEVELS, dtype=torch.float64).to(values)
    shrunk = levels / (values[:, None] + levels)  # [k, L]
    along = basis.T @ flat
    residual = basis @ (shrunk * along[:, None]) + (flat - basis @ along)[:, None]  # and what no weights can fit
    residual = residual.view(n, size, -1).movedim(-1, 0)  # [L, n, C]
    left = torch.empty_like(residual)
    for some in slices(n, 8 * size * (len(values) + size * _LEVELS), _CHUNK):
        own = basis.view(n, size, -1)[some]  # [b, C, k]
        products = [(own[:, c, None] * own).flatten(0, 1) @ (1 - shrunk) for c in range(size)]
        leverage = torch.stack(products).view(size, -1, size, _LEVELS).permute(3, 1, 0, 2)  # I − M_bb, [L, b, C, C]
        left[:, some] = _without_each(residual[:, some], leverage, share[some])
    squares = (share * left.square()).mean(1)
    best = int((squares.log().sum(-1) if several else squares.sum(-1)).argmin())
    return left[best], float(levels[best])


def left_out_at(ridge: float, matrix: Tensor, features: Tensor | None, targets: Tensor, share: Tensor) -> Tensor:
    """The same at one ridge, by a kernel ``[n·C, n·C]``, or features ``[n·C, m]`` and ``Φᵀ Φ``, which it changes."""
    n, size = targets.shape
    flat = (targets * share.sqrt()).flatten()
    matrix.diagonal().add_(ridge)
    triangle = torch.linalg.cholesky(matrix)
    if features is None:
        inverse = torch.cholesky_inverse(triangle)
        residual = ridge * (inverse @ flat)
        blocks = ridge * inverse.view(n, size, n, size).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        leverage = torch.eye(size).to(blocks) - blocks
    else:
        half = torch.linalg.solve_triangular(triangle, features.T, upper=False)  # [m, n·C]
        residual = flat - (half @ flat) @ half
        leverage = torch.einsum("mnc,mnd->ncd", half.view(-1, n, size), half.view(-1, n, size))
    return _without_each(residual.view(n, size), leverage, share)


def _without_each(residual: Tensor, leverage: Tensor, share: Tensor) -> Tensor:
    """``M_bb⁻¹ q_b [*, n, C]`` by ``q [*, n, C]`` and ``I − M_bb [*, n, C, C]`` of numbers by ``w^½``, without it.

    A row counts ``share [n, C]`` times, of which one is left out, or all if less; 0 is an entry that was not observed.
    """
    # The rest of a row's weight stays: (I − M_bb) / w are the leverages of one of its copies.
    block = torch.eye(leverage.shape[-1]).to(leverage) - leverage / share.amax(1).clamp_min(1.0)[:, None, None]
    return torch.linalg.solve(block, residual[..., None])[..., 0] / torch.where(share > 0, share.sqrt(), 1.0)
