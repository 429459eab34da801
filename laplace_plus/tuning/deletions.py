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
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.curvature import FullStructure, Layout, Native
from laplace_plus.errors import NotPositiveDefiniteError
from laplace_plus.likelihoods import Likelihood
from laplace_plus.likelihoods.sampling import draw_seed
from laplace_plus.network.batches import iterate
from laplace_plus.predictive.linearized import functional_posteriors
from laplace_plus.structured import Factor
from laplace_plus.tuning.base import Tunable
from laplace_plus.tuning.laplace import FittedData

Leverages = Literal["own", "full"]

INTERPOLATION = 0.01
"""Mean training loss in nats below which a classifier counts as interpolating: gradients at its data vanish.

An interpolating network had a leave-one-out loss of 0.000 where its test loss was 0.97.
"""


def leave_out(covariance: Tensor, root: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Remove each example's own term: its leverages ``[B, r]``, ``f₋ₙ − f`` ``[B, b]`` and ``V₋ₙ [B, b, b]``.

    Given are V ``[B, b, b]``, a root S of ``Λ = S Sᵀ`` and the gradient g. The symmetric ``SᵀVS = Q diag(l) Qᵀ`` has
    the eigenvalues of ``V Λ``. Then ``V₋ₙ = V + V S Q diag(1/(1−l)) Qᵀ Sᵀ V`` and ``f₋ₙ − f = V₋ₙ g``.
    """
    covariance, root, gradient = covariance.double(), root.double(), gradient.double()
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
    """One batch's leave-one-out quantities, float64.

    Attributes:
        outputs: f, ``[B, *, C]``.
        targets: As the loader gave them.
        mean: ``f₋ₙ``, shaped like ``outputs``.
        leverages: The largest of each example at the displacement's prior, ``[B]``.
        covariances: ``V₋ₙ [B, *, C, C]`` of each position at each of k requested precisions; V itself where leverages
            are not the posterior's own.
        own_leverages: The largest of each example at these precisions, ``[B]`` each; none where V is not left out.
    """

    outputs: Tensor
    targets: Any
    mean: Tensor
    leverages: Tensor
    covariances: list[Tensor]
    own_leverages: list[Tensor]


def own_terms(
    likelihood: Likelihood, temperature: Tensor, outputs: Tensor, targets: Any, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """A root of Λ ``[n, C, r]`` and the gradient ``[n, C]`` of each row's tempered log-likelihood, if it counts once.

    Of a row that counts several times, one is left out.
    """
    once = weight.clamp_max(1.0)
    root = likelihood.output_root(outputs, targets) * once.sqrt()[:, None, None]
    gradient = likelihood.gradient(outputs, targets) * once[:, None]
    weights = (likelihood.curvature_weights() / temperature.double()).to(gradient)
    groups = [likelihood.output_groups(size).to(weights.device) for size in (root.shape[-1], gradient.shape[-1])]
    return root * weights.sqrt()[groups[0]], gradient * weights[groups[1]]


class Deletions:
    """Passes over the data of the fit that leave out each example.

    Displacements have a prior precision and a curvature of their own.

    Attributes:
        limit: Leverages from here on count as one: they are within some roundings of it in the network's type.
        n_rows: After a pass, the number of targets that count.
    """

    n_rows: float

    def __init__(self, posterior: Tunable, data: Iterable[Any], precision: Tensor, leverages: Leverages):
        checks.choice("leverages", leverages, get_args(Leverages))
        self.model, self.network, self.n_data = posterior.laplace_model(), posterior.network, posterior.n_data
        self.temperature, self.data, self.leverages = posterior.temperature.detach(), data, leverages
        self.precision = precision
        self.limit = 1 - 16 * torch.finfo(self.network.dtype).eps
        self.displacing: Mapping[str, Factor] | None = None  # of the exact matrix, with leverages below one
        if leverages == "full":
            backend, curvature = Native(), None
            for batch in iterate(data, device=self.network.device, description="curvature for leave-one-out"):
                curvature, _ = backend.accumulate(
                    curvature, self.network, self.model.likelihood, batch, FullStructure()
                )
            assert curvature is not None
            exact = replace(self.model, curvature=curvature, backend=backend)
            self.displacing = exact.factors(exact.prior(precision).precision, self.temperature)

    def batches(self, precisions: Sequence[Tensor], *, progress: bool = False) -> Iterator[DeletionBatch]:
        """Pass over the data once, with the posterior's covariance at prior precisions.

        After the last batch, DataError for other data than were fitted to.
        """
        model, likelihood = self.model, self.model.likelihood
        fitted = FittedData(model, self.network, self.n_data)
        wanted = [*precisions] if self.displacing is not None else [self.precision, *precisions]
        sets = model.factor_sets([(precision, None) for precision in wanted], self.temperature)
        loader = iterate(self.data, device=self.network.device, progress=progress, description="leave-one-out")
        for batch in loader:
            raw = self.network.forward(batch.inputs)
            likelihood.validate(raw, batch.target)
            fitted.add(raw, batch.target)
            outputs = raw.double()
            root, gradient = own_terms(likelihood, self.temperature, *likelihood.rows(outputs, batch.target))
            # Block-diagonal roots [B, M·C, M·r] of examples, from those [B·M, C, r] of positions.
            count = len(root) // len(outputs)
            eye = torch.eye(count, dtype=root.dtype, device=root.device)
            root = torch.einsum("bmcr,mn->bmcnr", root.unflatten(0, (-1, count)), eye).flatten(3).flatten(1, 2)
            gradient = gradient.reshape(len(outputs), -1)
            covariances = self._covariances(sets, model.curvature.layouts, batch.inputs, raw)
            if self.displacing is not None:
                covariances = [*self._covariances([self.displacing], None, batch.inputs, raw), *covariances]
            leverages, shift, _ = leave_out(covariances[0], root, gradient)
            found, own = list[Tensor](), list[Tensor]()
            for covariance in covariances[1:]:
                if self.leverages == "own":
                    each, _, covariance = leave_out(covariance, root, gradient)
                    own.append(each.amax(-1))
                size = outputs.shape[-1]
                blocks = covariance.double().view(-1, count, size, count, size).diagonal(dim1=1, dim2=3)  # [B, C, C, M]
                found.append(blocks.movedim(-1, 1).reshape(*outputs.shape, size))
            mean = outputs + shift.view(outputs.shape)
            yield DeletionBatch(outputs, batch.target, mean, leverages.amax(-1), found, own)
        fitted.check()
        self.n_rows = fitted.n_rows

    def _covariances(
        self, sets: Sequence[Mapping[str, Factor]], layouts: Sequence[Layout] | None, inputs: Any, outputs: Tensor
    ) -> list[Tensor]:
        """``V = J Σ Jᵀ [B, b, b]`` for each set of factors, at inputs with outputs ``[B, *, C]``."""
        size = outputs[0].numel()
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
                fix = 'leverages="full" displaces by the exact Gauss-Newton matrix [P, P], and keeps this covariance. '
                fix += "Held-out data, such as lp.learn_noise(posterior, data), have no leverages."
            raise NotPositiveDefiniteError(
                f"{above} of {len(values)} data have a leverage of one or more: without such a datum, the posterior "
                "precision is not positive definite.",
                expected="leverages below 1, as of the exact Gauss-Newton matrix of these data",
                got=f"a largest leverage of {float(values.max()):.3g}",
                fix=fix,
            )


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
