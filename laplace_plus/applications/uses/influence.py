"""Attribution: how predictions would change if a training datum had been left out.

With the posterior covariance Σ, the gradient ``∇ℓᵢ`` of a datum's negative log-likelihood and that of a scalar φ of the
network's outputs, leaving out datum i changes φ by ``∇φᵀ Σ ∇ℓᵢ`` to first order. With the datum's covariance of outputs
``V = J Σ Jᵀ`` and curvature Λ, ``∇φᵀ Σ Jᵀ (I − Λ V)⁻¹ g`` is exact for linear φ and Gaussian noise.

Scores follow from the precision of *training*: let the prior be its weight decay times the number of data, and the
network be at the optimum. Sources: Koh and Liang (2017), "Understanding black-box predictions via influence functions";
Nguyen et al. (2023), "A Bayesian approach to analysing training data attribution".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import scipy
import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.applications.uses.continual import require_gaussian
from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.network.batches import Batch
from laplace_plus.network.linearization import Linearization
from laplace_plus.network.network import exact_arithmetic
from laplace_plus.posteriors import GaussianPosterior
from laplace_plus.tuning.deletions import leave_out

Scalar = Literal["loss", "logit"] | Callable[[Tensor, Tensor], Tensor]


class Attribution(NamedTuple):
    """Changes of Q scalars when each of N data is left out, positive where the scalar would grow; float64, on the CPU.

    T scores stand behind each: one for each posterior.

    Attributes:
        mean: ``[Q, N]``, of the T scores; ``[Q, k]`` with ``top=k``, the largest absolute values first.
        std: Their standard deviation; NaN for one score.
        p_value: Of a mean of zero, by the t-test with T − 1 degrees of freedom; NaN for one score. Those above 0.05
            cannot be told from noise.
        indices: The data of each column, ``[Q, N]`` or ``[Q, k]``, in the loader's order.
    """

    mean: Tensor
    std: Tensor
    p_value: Tensor
    indices: Tensor


def influence(
    posterior: GaussianPosterior | Sequence[GaussianPosterior],
    query: Iterable[Any],
    *,
    data: Iterable[Any] | None = None,
    method: Literal["linear", "leverage"] = "linear",
    of: Scalar = "loss",
    top: int | None = None,
    progress: bool = False,
) -> Attribution:
    """The change of scalars of the network's outputs when single training data are left out.

    Args:
        posterior: A fitted Gaussian posterior, or those of several networks trained on the same data.
        query: Batches ``(x, y)`` of Q examples.
        data: Batches of the training data; by default those of the (first posterior's) fit. Their order must not vary.
        method: ``"linear"`` or ``"leverage"``, see :mod:`laplace_plus.applications.uses.influence`.
        of: φ: ``"loss"`` in nats, ``"logit"`` of the target's class, or a function of outputs ``[B, C]`` and targets
            that gives ``[B]``.
        top: Keep only so many data for each query.
        progress: Whether to show a progress bar.

    Raises:
        NotFittedError: Before the fit.
        ConfigurationError: Unknown choices, or scalars of another shape than ``[B]``.
        UnsupportedError: Anything but a Gaussian posterior with outputs ``[B, C]``.
        NotPositiveDefiniteError: Leverages of one and above, as curvatures other than the exact one may have.
        DataError: Data that the posterior no longer knows.
        LabelError, NonFiniteError: Targets that are none; scalars or inputs that are not finite.

    Example:
        >>> import laplace_plus as lp
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> posterior = lp.Full(torch.nn.Linear(1, 1), "regression").fit([(x, 2 * x)])
        >>> influence(posterior, [(x[:3], 2 * x[:3])]).mean.shape
        torch.Size([3, 20])
    """
    checks.choice("method", method, ("linear", "leverage"))
    checks.count("top", 1 if top is None else top, 1)
    members = _members(posterior)
    data = members[0].training_data.again(data, "Attribution passes over the training data.")
    means, stds = [], []
    with exact_arithmetic(members[0].network), torch.no_grad():
        asked = list(members[0].batches(query))
        scorers = [_products(member, asked, of, corrected=method == "leverage") for member in members]
        for batch in members[0].batches(data, progress=progress, description="Influence: data"):
            scores = checks.finite("A change of a scalar", torch.stack([score(batch).cpu() for score in scorers]))
            means.append(scores.mean(0))
            stds.append(scores.std(0) if len(members) > 1 else torch.full_like(means[-1], torch.nan))
    mean, std = torch.cat(means, 1), torch.cat(stds, 1)
    indices = torch.arange(mean.shape[1]).expand_as(mean)
    if top is not None:
        indices = mean.abs().topk(min(top, mean.shape[1])).indices
        mean, std = mean.gather(1, indices), std.gather(1, indices)
    statistic = -(mean / std * len(members) ** 0.5).abs()
    p_value = torch.as_tensor(2 * scipy.special.stdtr(len(members) - 1, statistic.numpy())).view_as(mean)
    return Attribution(mean, std, p_value, indices)


def self_influence(
    posterior: GaussianPosterior | Sequence[GaussianPosterior], data: Iterable[Any] | None = None
) -> Tensor:
    """``∇ℓᵢᵀ Σ ∇ℓᵢ`` of each training datum, ``[N]`` float64: large for mislabelled ones and others without support.

    Arguments and errors as for :func:`influence`; the mean of several posteriors.
    """
    members = _members(posterior)
    data, found = members[0].training_data.again(data, "Self-influence passes over the training data."), []
    with exact_arithmetic(members[0].network), torch.no_grad():
        for batch in members[0].batches(data):
            each = []
            for member in members:
                gradient = _loss_gradient(member, member.network.forward(batch.inputs), batch.target).double()
                covariance = member.functional_posterior(batch.inputs).covariance.double()
                each.append(torch.einsum("bc,bcd,bd->b", gradient, covariance, gradient).cpu())
            found.append(torch.stack(each).mean(0))
    return torch.cat(found)


def _members(posterior: GaussianPosterior | Sequence[GaussianPosterior]) -> list[GaussianPosterior]:
    members = list(posterior) if isinstance(posterior, Sequence) else [posterior]
    for member in members:
        require_gaussian(member)
        member.require_fit()
    return members


def _noise(posterior: GaussianPosterior, like: Tensor) -> Tensor:
    """``[C]``: what gradients and curvatures at unit noise are divided by, tempered."""
    noise, temperature = posterior.likelihood.noise_std, posterior.temperature.detach().to(like)
    scale = like.new_ones(like.shape[-1]) if noise is None else noise.detach().to(like).square().expand(like.shape[-1])
    return scale * temperature


def _loss_gradient(posterior: GaussianPosterior, outputs: Tensor, targets: Tensor) -> Tensor:
    checks.shape("The network's output", outputs, [None, None])
    posterior.likelihood.require_own_rows("Rows that depend on each other have no influence each.")
    posterior.likelihood.validate(outputs, targets)
    rows, targets, weight = posterior.likelihood.rows(outputs, targets)
    return posterior.likelihood.gradient(rows, targets) / _noise(posterior, outputs) * weight[:, None]


def _scalars(posterior: GaussianPosterior, outputs: Tensor, targets: Any, of: Scalar) -> Tensor:
    posterior.likelihood.validate(outputs, targets)
    targets = posterior.likelihood.separate(targets)[0]
    if callable(of):
        values = of(outputs, targets)
    elif checks.choice("of", of, ("loss", "logit")) == "loss":
        noise = posterior.likelihood.noise_std
        plain = posterior.likelihood if noise is None else posterior.likelihood.with_noise(noise.detach())
        values = -plain.of_new_targets.log_densities(outputs, targets)
    else:
        values = outputs.gather(1, targets.long().view(-1, 1))[:, 0]
    return checks.shape("The scalars", values, outputs.shape[:1])


def _products(
    posterior: GaussianPosterior, asked: Sequence[Batch], of: Scalar, *, corrected: bool
) -> Callable[[Batch], Tensor]:
    """Scores ``[Q, B]`` of a batch, by the tangents ``Σ ∇φ``, so that no gradients of single data are held."""
    network, model, factors, tangents = posterior.network, posterior.laplace_model(), posterior.factors(), []
    for batch in asked:
        with torch.enable_grad():
            point = network.vector().requires_grad_()
            outputs = network(network.receive(batch.inputs), network.substitute(point))
            for value in _scalars(posterior, outputs, batch.target, of):
                (gradient,) = torch.autograd.grad(value, point, retain_graph=True)
                tangents.append(model.solve(factors, gradient))

    def scores(batch: Batch) -> Tensor:
        inputs = network.receive(batch.inputs)
        outputs = network.forward(inputs)
        cotangent = _loss_gradient(posterior, outputs, batch.target).double()
        if corrected:
            covariance = posterior.functional_posterior(inputs).covariance.double()
            noise = _noise(posterior, outputs).double()
            rows, targets, weight = posterior.likelihood.rows(outputs, batch.target)
            root = posterior.likelihood.output_root(rows, targets).double() / noise.sqrt()[:, None]
            root = root * weight.sqrt()[:, None, None]
            leverages, shift, _ = leave_out(covariance, root, cotangent)
            if not bool(leverages.max() < 1):
                what, fix = "Leverages reach one, and the formula fails.", 'Take lp.Full, or method="linear".'
                raise NotPositiveDefiniteError(what, fix=fix)
            cotangent = cotangent + (root @ root.mT @ shift[..., None])[..., 0]  # (I − Λ V)⁻¹ g = g + Λ V₋ₙ g
        moved = Linearization(network, network.vector(), inputs).push(torch.stack(tangents)).double()
        return torch.einsum("qbc,bc->qb", moved, cotangent)

    return scores
