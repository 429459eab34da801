"""The evidence lower bound of the kernel/image family (Roy et al., 2025, VIKING).

``q = N(m, σ_ker² P + σ_im² (I − P))`` for a projector P, with prior ``N(μ, α⁻¹ I)`` over D parameters. With
``g(t) = t − 1 − log t`` and the image's dimension ``r = D − tr P`` the divergence is::

    KL(q ‖ p) = ½ (α ‖m − μ‖² + (D − r) g(α σ_ker²) + r g(α σ_im²))

of which the term in the middle vanishes for the tied ``σ_ker = α^-½``. Written in this way it holds no difference of
large numbers, however much larger than r the number of parameters is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from laplace_plus.errors import NonFiniteError


def kernel_image_kl(
    squared_distance: Tensor,
    rank: float | Tensor,
    prior_precision: float | Tensor,
    image_std: float | Tensor,
    *,
    kernel_std: float | Tensor | None = None,
    dimension: int | None = None,
) -> Tensor:
    """``KL(q ‖ p)`` in nats, differentiable in everything.

    Args:
        squared_distance: ``‖m − μ‖²``.
        rank: r, the dimension of the image.
        prior_precision: α.
        image_std: σ_im.
        kernel_std: σ_ker; ``α^-½`` by default.
        dimension: D; needed with ``kernel_std`` only.

    Returns:
        0-d float64.

    Example:
        >>> float(kernel_image_kl(torch.tensor(3.0), 5, 4.0, 0.5))
        6.0
    """
    alpha, image = (torch.as_tensor(x, dtype=torch.float64) for x in (prior_precision, image_std))
    total = alpha * squared_distance.double() + rank * _excess(alpha * image.square())
    if kernel_std is not None:
        if dimension is None:
            raise ValueError("dimension= is needed with kernel_std=")
        total = total + (dimension - rank) * _excess(alpha * torch.as_tensor(kernel_std, dtype=torch.float64).square())
    return total / 2


def _excess(t: Tensor) -> Tensor:
    return t - 1 - t.log()


def divergence_optimum(squared_distance: float | Tensor, rank: float | Tensor, image_std: float | Tensor) -> Tensor:
    """The α at which the divergence is least for a given σ_im: ``r / (‖m − μ‖² + r σ_im²)``."""
    distance, size, std = (torch.as_tensor(x, dtype=torch.float64) for x in (squared_distance, rank, image_std))
    return size / (distance + size * std.square())


@dataclass(frozen=True)
class ELBOTerms:
    """What an evidence lower bound consists of.

    Attributes:
        expected_nll: ``E_q[−log p(D | θ)] / T``, of the whole data, or estimated from a minibatch as
            ``N/B`` times its sum.
        kl: ``KL(q ‖ p)``.
        prior_precision: α.
        image_std: σ_im.
        rank: The dimension of the image that the divergence was computed with.
        kl_weight: The weight of the divergence beside the whole data's likelihood; with 1 it is a bound.
    """

    expected_nll: float
    kl: float
    prior_precision: float
    image_std: float
    rank: float
    kl_weight: float

    @property
    def elbo(self) -> float:
        """``−(expected_nll + kl_weight · kl)``, at most the log evidence if the weight is 1."""
        return -(self.expected_nll + self.kl_weight * self.kl)

    def require_finite(self) -> ELBOTerms:
        """Itself.

        Raises:
            NonFiniteError: A term is NaN or infinite.
        """
        if not bool(torch.isfinite(torch.tensor(astuple(self))).all()):
            raise NonFiniteError(
                "The evidence lower bound is not finite.",
                expected="finite terms",
                got=str(self),
                fix="Start from a smaller image_std and a larger prior_precision, or lower the learning rate.",
            )
        return self


def terms_to_tensor(history: Iterable[ELBOTerms]) -> Tensor:
    """``[steps, 6]`` float64."""
    return torch.tensor([astuple(terms) for terms in history], dtype=torch.float64).reshape(-1, 6)


def terms_from_tensor(tensor: Tensor) -> list[ELBOTerms]:
    """What :func:`terms_to_tensor` wrote."""
    return [ELBOTerms(*row) for row in tensor.tolist()]
