"""Leaving out each datum of a Gaussian posterior in a pass over the data, without refitting.

A datum has the output covariance ``V = J Σ Jᵀ`` under the posterior. Its negative log-likelihood has the Hessian ``Λ``
and the gradient ``g`` by its outputs ``f``. Without the datum's own term in the posterior precision,

    f₋ₙ = f + (I − V Λ)⁻¹ V g,        V₋ₙ = (I − V Λ)⁻¹ V.

For linear-Gaussian models both are exact (Allen, 1974, "The relationship between variable selection and data
augmentation and a method for prediction"). Otherwise ``f₋ₙ`` is one Newton step from the optimum of all the data
(Pregibon, 1981, "Logistic regression diagnostics"; Rad and Maleki, 2020, "A scalable estimate of the out-of-sample
prediction error via approximate leave-one-out cross-validation"). The eigenvalues of ``V Λ`` are the datum's leverages.
They lie below one where the posterior's curvature is the exact Gauss-Newton matrix of these data. With Kronecker
factors or diagonals they may exceed one, and the formula is then meaningless.

Two priors enter, and must be kept apart. The displacement ``f₋ₙ − f`` undoes the effect of training, so it belongs to
the prior of *training* (its weight decay). The covariance ``V₋ₙ`` belongs to the posterior that is to be used. If one
precision served both with the weights held fixed, a large precision would remove the displacement. The left-out loss
would then equal the training loss, and would always look best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature import FullStructure, Layout, Native
from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.likelihoods import Gaussian, Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import cut, iterate
from laplace_plus.predictive import from_functional
from laplace_plus.predictive.linearized import functional_posteriors
from laplace_plus.structured import Factor
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.laplace import FittedData
from laplace_plus.tuning.validation import weighted_sum

Leverages = Literal["own", "full", "first_order"]
Unit = Literal["example", "position"]

INTERPOLATION = 0.01
"""Mean training loss in nats below which a classifier counts as interpolating: gradients at its data vanish.

An interpolating network had a leave-one-out loss of 0.000 where its test loss was 0.97.
"""


def leave_out(
    covariance: Tensor, root: Tensor, gradient: Tensor, *, first_order: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Remove each deletion unit's own term: its leverages ``[U, r]``, ``f₋ₙ − f`` ``[U, b]`` and ``V₋ₙ [U, b, b]``.

    Given are V ``[U, b, b]``, a root S of ``Λ = S Sᵀ`` and the gradient g. The symmetric ``SᵀVS = Q diag(l) Qᵀ`` has
    the eigenvalues of ``V Λ``. Then ``V₋ₙ = V + V S Q diag(1/(1−l)) Qᵀ Sᵀ V`` and ``f₋ₙ − f = V₋ₙ g``. In first order
    these are 0, ``V g`` and V.
    """
    covariance, root, gradient = covariance.double(), root.double(), gradient.double()
    if first_order:
        return root.new_zeros(root.shape[0], root.shape[-1]), (covariance @ gradient[..., None])[..., 0], covariance
    product = covariance @ root
    inner = root.mT @ product
    leverages, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    product = product @ vectors
    # The caller refuses leverages of one and more. Here they must only not divide by zero.
    rest = (1 - leverages).masked_fill(leverages == 1, torch.finfo(leverages.dtype).tiny)
    left = covariance + (product / rest[:, None]) @ product.mT
    return leverages, (left @ gradient[..., None])[..., 0], left


@dataclass(frozen=True)
class DeletionBatch:
    """One batch's leave-one-out quantities.

    Attributes:
        outputs: f, ``[U', *, C]`` float64, of the deletion units that are not ignored.
        targets: Their targets.
        kept: Index of these units in the batch.
        root: S with ``Λ = S Sᵀ`` at the likelihood's noise, ``[U, b, r]``.
        gradient: g at the likelihood's noise, ``[U, b]``.
        leverages: Of the U' units at the displacement's prior, ``[U', r]``.
        mean: ``f₋ₙ``, shaped like ``outputs``.
        covariances: V under the posterior at each requested point, ``[U, b, b]``.
    """

    outputs: Tensor
    targets: Tensor
    kept: Tensor | slice
    root: Tensor
    gradient: Tensor
    leverages: Tensor
    mean: Tensor
    covariances: tuple[Tensor, ...]

    def by_position(self, covariance: Tensor) -> Tensor:
        """The covariance ``[U', *, C, C]`` of each position's outputs, from the units' ``[U, b, b]``."""
        covariance, size = covariance.double()[self.kept], self.outputs.shape[-1]
        n, count = len(self.outputs), covariance.shape[-1] // size
        blocks = covariance.view(n, count, size, count, size).diagonal(dim1=1, dim2=3)  # [U', C, C, M]
        return blocks.movedim(-1, 1).reshape(*self.outputs.shape, size)


class Deletions:
    """Passes over the data of the fit that leave out each deletion unit.

    Displacements have a prior precision, a noise (None for the likelihood's) and a curvature of their own.

    Attributes:
        limit: Leverages from here on count as one: they are within some roundings of it in the network's type.
    """

    def __init__(
        self,
        posterior: Tunable,
        data: Iterable[Any],
        precision: Tensor,
        noise_std: Any,
        leverages: Leverages,
        unit: Unit,
    ):
        checks.choice("leverages", leverages, get_args(Leverages))
        checks.choice("unit", unit, get_args(Unit))
        self.model, self.network, self.n_data = posterior.laplace_model(), posterior.network, posterior.n_data
        self.temperature = posterior.temperature.detach()
        self.data, self.precision, self.noise_std, self.unit = data, precision, noise_std, unit
        self.leverages = leverages
        self.limit = 1 - 16 * torch.finfo(self.network.dtype).eps
        if noise_std is not None:
            self.model.likelihood.curvature_weights(noise_std)  # raises for an unusable noise
        self.displacing: Mapping[str, Factor] | None = (
            None  # of the exact Gauss-Newton matrix, with leverages below one
        )
        if leverages == "full":
            backend, curvature = Native(), None
            for batch in iterate(data, device=self.network.device, description="curvature for leave-one-out"):
                curvature, _ = backend.accumulate(
                    curvature, self.network, self.model.likelihood, batch, FullStructure()
                )
            assert curvature is not None
            exact = replace(self.model, curvature=curvature, backend=backend)
            self.displacing = exact.factors(exact.prior(precision).precision, self.temperature, noise_std)

    def batches(self, points: Sequence[tuple[Any, Any]], *, progress: bool = False) -> Iterator[DeletionBatch]:
        """Pass over the data once, with the posterior's covariance at pairs of a prior precision and a noise level.

        After the last batch, DataError for other data than were fitted to.
        """
        model, likelihood = self.model, self.model.likelihood
        fitted = FittedData(model, self.network, self.n_data)
        wanted = [(self.precision, self.noise_std), *points] if self.displacing is None else list(points)
        sets = model.factor_sets(wanted, self.temperature)
        loader = iterate(self.data, device=self.network.device, progress=progress, description="leave-one-out")
        for batch in loader:
            raw = self.network.forward(batch.inputs)
            likelihood.validate(raw, batch.target)
            fitted.add(raw, batch.target)
            outputs = raw.double()
            flat, targets, weight = likelihood.rows(outputs, batch.target)
            left = weight.clamp_max(1.0)  # of a row that counts several times, one is left out
            root = likelihood.output_root(flat, targets) * left.sqrt()[:, None, None]
            gradient = likelihood.gradient(flat, targets) * left[:, None]
            groups = [likelihood.output_groups(size).to(root.device) for size in (root.shape[-1], flat.shape[-1])]
            kept: Tensor | slice = slice(None)
            if self.unit == "position":
                kept = weight.nonzero()[:, 0]
                outputs, targets = flat[kept], cut(targets, kept)
                targets = (targets, weight[kept]) if likelihood.weighted else targets
            else:
                targets, count = batch.target, len(flat) // len(outputs)
                # Block-diagonal roots [B, M·C, M·r] of examples, from those [B·M, C, r] of positions.
                eye = torch.eye(count, dtype=root.dtype, device=root.device)
                root = torch.einsum("bmcr,mn->bmcnr", root.unflatten(0, (-1, count)), eye).flatten(3).flatten(1, 2)
                gradient = gradient.reshape(len(outputs), -1)
                groups = [group.repeat(count) for group in groups]
            covariances = self._covariances(sets, model.curvature.layouts, batch.inputs, raw)
            if self.displacing is not None:
                covariances = [*self._covariances([self.displacing], None, batch.inputs, raw), *covariances]

            at = self._at(root, gradient, groups, self.noise_std)
            leverages, shift, _ = leave_out(covariances[0], *at, first_order=self.leverages == "first_order")
            mean = outputs + shift[kept].reshape(outputs.shape)
            own_terms, rest = self._at(root, gradient, groups), tuple(covariances[1:])
            yield DeletionBatch(outputs, targets, kept, *own_terms, leverages[kept], mean, rest)
        fitted.check()

    def _at(self, root: Tensor, gradient: Tensor, groups: list[Tensor], noise_std: Any = None) -> tuple[Tensor, Tensor]:
        """Root and gradient of the tempered log-likelihood at a noise level, from those at unit noise."""
        weights = self.model.likelihood.curvature_weights(noise_std) / self.temperature.double()
        weights = weights.to(gradient)
        return root * weights.sqrt()[groups[0]], gradient * weights[groups[1]]

    def _covariances(
        self, sets: Sequence[Mapping[str, Factor]], layouts: Sequence[Layout] | None, inputs: Any, outputs: Tensor
    ) -> list[Tensor]:
        """``V = J Σ Jᵀ [U, b, b]`` for each set of factors, at inputs with outputs ``[B, *, C]``."""
        size = outputs.shape[-1] if self.unit == "position" else outputs[0].numel()
        joint = size > outputs.shape[-1]  # all outputs of a batch together; an example's own are a block of them
        options: dict[str, Any] = {"expected_outputs": self.model.n_outputs, "layouts": layouts, "joint": joint}
        found = [one.covariance for one in functional_posteriors(self.network, sets, inputs, **options)]
        if not joint:
            return [covariance.reshape(-1, size, size) for covariance in found]
        blocks = [covariance.reshape(len(outputs), size, len(outputs), size) for covariance in found]
        return [own.diagonal(dim1=0, dim2=2).movedim(-1, 0) for own in blocks]

    def check(self, largest: Sequence[Tensor]) -> None:
        """Raise :class:`NotPositiveDefiniteError` if largest leverages of some data are one or more."""
        values = torch.cat(list(largest))
        above = int((values >= self.limit).sum())
        if above:
            fix = "Use the prior precision that training had (a larger one), or float64."
            if self.leverages == "own":
                fix = "Take displacements from the exact Gauss-Newton matrix, and keep this posterior's covariance: "
                fix += 'leverages="full", or where P × P numbers are too many, leverages="first_order".'
            raise NotPositiveDefiniteError(
                f"{above} of {len(values)} data have a leverage of one or more: without such a datum, the posterior "
                "precision is not positive definite.",
                expected="leverages below 1, as of the exact Gauss-Newton matrix of these data",
                got=f"a largest leverage of {float(values.max()):.3g}",
                fix=fix,
            )


class Losses(NamedTuple):
    """Of each precision the mean loss, and the noise factor, which is 1 where noise is not tuned, ``[G]``."""

    losses: Tensor
    factors: Tensor
    n_observations: float


def left_out_losses(
    deletions: Deletions,
    base: Tensor,
    levels: Tensor,
    *,
    noisy: bool,
    progress: bool = False,
    seed: int | None = None,
    **options: Any,
) -> Losses:
    """The losses at precisions ``level · base``, in one pass.

    Where they are ``noisy``, the noise and V are scaled together to their optimum; else options are those of the link,
    with the ``seed`` of its random numbers.
    """
    likelihood, own = deletions.model.likelihood, deletions.leverages == "own"
    totals = torch.zeros(len(levels), 2, dtype=torch.float64, device="cpu")
    valid = torch.ones(len(levels), dtype=torch.bool, device="cpu")
    n_entries, n_observations, largest = 0.0, 0.0, []
    for batch in deletions.batches([(base * level, None) for level in levels], progress=progress):
        mean, targets, weight = likelihood.rows(batch.mean, batch.targets)
        n_observations += float(weight.sum())
        if noisy:
            assert isinstance(likelihood, Gaussian)
            n_entries += float((weight[:, None] * likelihood.observed(targets)).sum())
        largest.append(batch.leverages.amax(-1))
        if bool((largest[-1] >= deletions.limit).any()):
            continue  # they are refused, once all are counted
        for number, covariance in enumerate(batch.covariances):
            if own:
                leverages, _, covariance = leave_out(covariance, batch.root, batch.gradient)
                valid[number] &= bool((leverages < deletions.limit).all())
            if valid[number]:
                covariance = batch.by_position(covariance)
                if noisy:
                    totals[number] += noise_terms(likelihood, targets - mean, weight, covariance.flatten(0, -3))
                else:
                    totals[number, 0] += _loss(likelihood, batch, covariance, seed, options)
    deletions.check(largest)
    losses, factors = at_best_noise(totals, n_entries) if noisy else (totals[:, 0], torch.ones_like(totals[:, 0]))
    losses = torch.where(valid & losses.isfinite(), losses / n_observations, torch.inf)
    return Losses(losses, factors, n_observations)


def _loss(likelihood: Likelihood, batch: DeletionBatch, covariance: Tensor, seed: int | None, options: Any) -> Tensor:
    """A batch's loss."""
    generator = None if seed is None else torch.Generator(device=covariance.device).manual_seed(seed)
    found = from_functional(likelihood, batch.mean, covariance, generator=generator, **options)
    targets, weight = likelihood.separate(batch.targets)
    return -weighted_sum(found.log_prob(targets), weight)


def noise_terms(likelihood: Likelihood, residuals: Tensor, weight: Tensor, covariance: Tensor) -> Tensor:
    """Half the log-determinants of ``V + σ²``, and squared Mahalanobis distances, summed over rows: ``[2]``.

    Of residuals ``[n, C]``, NaN where a target is missing, weights ``[n]`` and V ``[n, C, C]``.
    """
    assert likelihood.noise_std is not None
    seen = ~residuals.isnan()  # what is missing becomes independent, at its mean
    noise = likelihood.noise_std.to(residuals).square().expand(residuals.shape[-1]).where(seen, 1.0)
    together = covariance.masked_fill(~(seen[:, None] & seen[..., None]), 0.0)
    lower = torch.linalg.cholesky(together + torch.diag_embed(noise))
    distance = torch.linalg.solve_triangular(lower, residuals.where(seen, 0.0)[..., None], upper=False)
    determinants = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.stack([weight @ determinants, weight @ distance.square().sum((1, 2))]).double().cpu()


def at_best_noise(terms: Tensor, n_entries: float) -> tuple[Tensor, Tensor]:
    """Losses of :func:`noise_terms` ``[G, 2]``, where the noise and V are scaled by the best factor m, and m: ``[G]``.

    ``½ Σ (Q/m² + log det + C log 2πm²)`` has its minimum at ``m² = Q / n_entries``.
    """
    factors = (terms[:, 1] / n_entries).sqrt()
    return terms[:, 0] + n_entries * (1 + factors.square().log() + math.log(2 * math.pi)) / 2, factors


def link_options(tuner: Any, likelihood: Likelihood, generator: torch.Generator | None) -> dict[str, Any]:
    """A tuner's options of the link, with a seed where that draws samples."""
    seed = draw_seed(generator) if (tuner.link or likelihood.links[0]) == "mc" else None
    return {"link": tuner.link, "n_samples": tuner.n_samples, "seed": seed}
