"""Linearised predictions, samples and evidence as plain torch would compute them, layer by layer, without Jacobians."""

from __future__ import annotations

import torch
from limits_factors import Factors, backward, gradient_rows, input_rows, kronecker_factors, recorded, roots
from models import Problem
from torch import Tensor

Decomposed = list[tuple[Tensor, Tensor, Tensor]]

_ALL_AT_ONCE = 2**26
"""So many entries of all examples' matrices are written out together."""

_IN_CACHE = 2**18
"""Entries of matrices that are written out, scaled and multiplied before the next ones."""


def decomposed(problem: Problem, precision: float = 1.0) -> Decomposed:
    """For each layer eigenvectors of both exact Kronecker factors and the posterior variances in their basis."""
    result = []
    for own in kronecker_factors(problem, monte_carlo=False):
        left, u, right, v = Factors(own.left.double(), own.right.double(), own.count).eigen()
        variances = 1 / (left[:, None] * right + precision)
        result.append((u.to(own.left), v.to(own.left), variances.to(own.left)))
    return result


def diagonal_curvature(problem: Problem) -> list[Tensor]:
    """The exact diagonal of every layer's curvature, ``[o, i]``."""
    sums: list[Tensor] = []
    for inputs, _ in problem.batches:
        with recorded(problem.model) as calls:
            outputs = problem.model(inputs)
        gradients = backward(problem, outputs, [output for *_, output in calls], roots(problem, outputs))
        for number, ((module, given, _), gradient) in enumerate(zip(calls, gradients, strict=True)):
            squares = _squares(input_rows(module, given), gradient_rows(module, gradient))
            if number == len(sums):
                sums.append(squares)
            else:
                sums[number] += squares
    return sums


def _squares(a: Tensor, g: Tensor) -> Tensor:
    """``Σ_vb (Σ_s g aᵀ)²``: a product of squares where there is one position."""
    if a.shape[1] == 1:
        return g[:, :, 0].square().sum(0).T @ a[:, 0].square()
    total = g.new_zeros(g.shape[-1], a.shape[-1])
    for direction in g:  # [B, S, o]
        total += torch.bmm(direction.mT, a).square().sum(0)
    return total


def kronecker_predictive(problem: Problem, posterior: Decomposed, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and their exact covariance ``[B, C, C]``."""
    with recorded(problem.model) as calls:
        outputs = problem.model(x)
    identity = torch.eye(problem.n_outputs, dtype=x.dtype)[:, None].expand(-1, *outputs.shape)
    gradients = backward(problem, outputs, [output for *_, output in calls], identity)
    total = outputs.new_zeros(*outputs.shape, problem.n_outputs)
    with torch.no_grad():
        for (module, given, _), gradient, (u, v, variances) in zip(calls, gradients, posterior, strict=True):
            _add_covariance(total, input_rows(module, given) @ v, gradient_rows(module, gradient) @ u, variances)
    return outputs.detach(), total


def diagonal_predictive(problem: Problem, variances: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and their exact covariance ``[B, C, C]`` where weights are independent."""
    with recorded(problem.model) as calls:
        outputs = problem.model(x)
    identity = torch.eye(problem.n_outputs, dtype=x.dtype)[:, None].expand(-1, *outputs.shape)
    gradients = backward(problem, outputs, [output for *_, output in calls], identity)
    total = outputs.new_zeros(*outputs.shape, problem.n_outputs)
    with torch.no_grad():
        for (module, given, _), gradient, own in zip(calls, gradients, variances, strict=True):
            _add_covariance(total, input_rows(module, given), gradient_rows(module, gradient), own)
    return outputs.detach(), total


def _add_covariance(total: Tensor, a: Tensor, g: Tensor, variances: Tensor) -> None:
    """Add ``Σ_oi P_c P_d D`` with ``P_c = Σ_s g_cs a_sᵀ``, for ``a [B, S, i]`` and ``g [C, B, S, o]``."""
    if a.shape[1] == 1:
        scale = a[:, 0].square() @ variances.T  # [B, o]
        by_example = g[:, :, 0].movedim(0, 1)  # [B, C, o]
        total.baddbmm_(by_example * scale[:, None], by_example.mT)
        return
    if g.shape[0] * len(a) * variances.numel() > _ALL_AT_ONCE:
        _add_covariance_by_rows(total, a, g, variances)
        return
    products = g.permute(1, 0, 3, 2).flatten(1, 2) @ a  # [B, C·o, i]
    by_output = products.view(len(a), g.shape[0], -1)  # [B, C, o·i]
    total.baddbmm_(by_output * variances.flatten(), by_output.mT)


def _add_covariance_by_rows(total: Tensor, a: Tensor, g: Tensor, variances: Tensor) -> None:
    """The same, one example and as many rows of the matrices at a time as stay in a core's cache."""
    rows = max(1, _IN_CACHE // (g.shape[0] * a.shape[-1]))
    memory = a.new_empty(g.shape[0] * rows * a.shape[-1])
    roots = variances.sqrt()
    for inputs, outputs, covariance in zip(a, g.movedim(1, 0), total, strict=True):
        by_row = outputs.permute(2, 0, 1)  # [o, C, S]
        for start in range(0, len(by_row), rows):
            some = by_row[start : start + rows].transpose(0, 1)  # [C, r, S]
            products = memory[: some.shape[0] * some.shape[1] * a.shape[-1]].view(*some.shape[:2], -1)
            torch.matmul(some, inputs, out=products)
            flat = products.mul_(roots[start : start + rows]).flatten(1)
            covariance.addmm_(flat, flat.mT)


def kronecker_operations(problem: Problem, x: Tensor) -> None:
    """The floating-point operations of :func:`kronecker_predictive` alone, on numbers that lie where they are best.

    One forward and C backward passes; then for each layer the rotation of both sides' rows, the matrices written out a
    cache at a time, scaled and multiplied with each other. Nothing is copied, and the numbers mean nothing.
    """
    with recorded(problem.model) as calls:
        outputs = problem.model(x)
    c = problem.n_outputs
    identity = torch.eye(c, dtype=x.dtype)[:, None].expand(-1, *outputs.shape)
    gradients = backward(problem, outputs, [output for *_, output in calls], identity)
    total = outputs.new_zeros(c, c)
    with torch.no_grad():
        for (module, given, _), gradient in zip(calls, gradients, strict=True):
            a, (o, positions) = input_rows(module, given), gradient.shape[-1:] + gradient.shape[-2:-1]
            rows, turned = gradient.reshape(-1, o), gradient.new_empty(gradient.numel() // o, o)
            torch.mm(rows, rows.new_zeros(o, o), out=turned)
            _ = a.flatten(0, -2) @ a.new_zeros(a.shape[-1], a.shape[-1])
            step = max(1, _IN_CACHE // (c * a.shape[-1]))
            left, inputs = rows.new_zeros(c * step, positions), rows.new_zeros(positions, a.shape[-1])
            products, scale = rows.new_empty(c * step, a.shape[-1]), rows.new_zeros(step * a.shape[-1])
            for _example in range(len(a)):
                for start in range(0, o, step):
                    n = min(step, o - start)
                    torch.mm(left[: c * n], inputs, out=products[: c * n])
                    flat = products[: c * n].view(c, -1).mul_(scale[: n * a.shape[-1]])
                    total.addmm_(flat, flat.mT)


def head_predictive(problem: Problem, x: Tensor, precision: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Variances ``[B, C]`` of a softmax head's outputs under its full posterior, from the data on.

    One inverse and two products with matrices of N × N for each class (Rasmussen and Williams, 2006, section 3.5).
    """
    features, probabilities = (part.to(dtype or part.dtype) for part in _head(problem, problem.inputs))
    known, n = features / precision, len(features)
    gram = known @ features.T
    tested = _head(problem, x)[0].to(features)
    keys = tested @ known.T
    inverses, total = [], torch.zeros(n, n, dtype=torch.float64)
    for own in probabilities.T.split(16):  # which stay in the caches
        roots = own.sqrt()
        scaled = gram * roots[:, :, None] * roots[:, None]
        scaled.diagonal(dim1=-2, dim2=-1).add_(1)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(scaled)).mul_(roots[:, :, None]).mul_(roots[:, None])
        total += inverse.sum(0)
        inverses.append(inverse)
    lower = torch.linalg.cholesky(total)
    white = torch.linalg.solve_triangular(lower, torch.eye(n, dtype=lower.dtype), upper=False).mT.to(keys)
    prior, result = tested.square().sum(1) / precision, []
    for inverse in inverses:
        pulled = (keys @ inverse.flatten(0, 1).T).unflatten(1, inverse.shape[:2])  # [B, c, N]
        own = prior[:, None] - (pulled @ keys[:, :, None])[..., 0]
        result.append(own + (pulled.flatten(0, 1) @ white).square().sum(-1).view_as(own))
    return torch.cat(result, 1)


def head_operations(problem: Problem, x: Tensor) -> None:
    """What :func:`head_predictive` cannot do without: forward passes, inverses, and products as one large one is quick.

    One Cholesky decomposition and inverse of N × N for each class, and products of ``C·N`` rows with a square and with
    a triangle of N, which is counted as half a square. Nothing is scaled, copied or summed.
    """
    features, probabilities = _head(problem, problem.inputs)
    _head(problem, x)
    n, classes = len(features), probabilities.shape[1]
    some = torch.eye(n, dtype=features.dtype).expand(16, n, n).contiguous()
    for _ in range(classes // len(some)):
        torch.cholesky_inverse(torch.linalg.cholesky(some))
    memory, out = features.new_zeros(2**10, n), features.new_empty(2**10, n)
    for _ in range(int(1.5 * classes * len(x)) // len(memory)):
        torch.mm(memory, some[0], out=out)


def _head(problem: Problem, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer's inputs with a column of ones, and probabilities."""
    features, probabilities = [], []
    with torch.no_grad():
        for part in inputs.split(problem.batch_size):
            with recorded(problem.model) as calls:
                probabilities.append(problem.model(part).softmax(-1))
            given = calls[-1][1]
            features.append(torch.cat([given, given.new_ones(len(given), 1)], 1))
    return torch.cat(features), torch.cat(probabilities)


def kronecker_samples(problem: Problem, posterior: Decomposed, n: int) -> Tensor:
    """N parameter vectors ``[n, P]``: scaled white noise and two products for each sample and layer."""
    mean = torch.cat([parameter.detach().flatten() for parameter in problem.model.parameters()])
    result = torch.empty(n, len(mean))
    for sample in result:
        start = 0
        for u, v, variances in posterior:
            drawn = u @ torch.randn_like(variances).mul_(variances.sqrt()) @ v.T  # [o, i], the bias in the last column
            rows, columns = drawn.shape
            weights = rows * (columns - 1)
            sample[start : start + weights].view(rows, columns - 1).copy_(drawn[:, :-1])
            sample[start + weights : start + weights + rows] = drawn[:, -1]
            start += weights + rows
        sample += mean
    return result


class Evidence:
    """The log evidence and its closed-form derivative in the log prior precision, from the eigenvalues alone.

    Args:
        values: Eigenvalues of the curvature, in any number of tensors.
        squared_norm: Of the weights.
        log_likelihood: Of the data.
    """

    def __init__(self, values: list[Tensor], squared_norm: float, log_likelihood: float):
        self.values, self.squared_norm, self.log_likelihood = values, squared_norm, log_likelihood
        self.n_parameters = sum(value.numel() for value in values)

    def value_and_gradient(self, log_precision: float) -> tuple[float, float]:
        """Both, with sums in float64."""
        level = torch.tensor(log_precision, dtype=torch.float64).exp().item()
        log_determinant, inverse = 0.0, 0.0
        for values in self.values:
            shifted = values + level
            inverse += shifted.reciprocal().sum(dtype=torch.float64).item()
            log_determinant += shifted.log_().sum(dtype=torch.float64).item()
        value = (
            self.log_likelihood - (level * self.squared_norm + log_determinant - self.n_parameters * log_precision) / 2
        )
        return value, -(level * (self.squared_norm + inverse) - self.n_parameters) / 2
