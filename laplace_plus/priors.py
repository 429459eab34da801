"""Gaussian priors over the parameter vector."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import ConfigurationError

PriorStructure = Literal["scalar", "layerwise", "diagonal"]
STRUCTURES: tuple[PriorStructure, ...] = ("scalar", "layerwise", "diagonal")
LAYERWISE: PriorStructure = "layerwise"


def as_hyperparameter(value: float | Sequence[float] | Tensor, *, copy: bool = False) -> Tensor:
    """A floating tensor, or a copy that keeps its gradient; numbers in float64, whose digits a network may need.

    ConfigurationError for what is not made of real numbers.

    Example:
        >>> as_hyperparameter(0.1).dtype
        torch.float64
    """
    with torch.inference_mode(False):  # tensors made in that mode could not be differentiated later
        try:
            found = value if isinstance(value, Tensor) and value.is_floating_point() else _numbers(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = torch.empty(0, 0)
        if found.ndim <= 1:
            return found.clone() if found is value and (copy or found.is_inference()) else found
    what = "A prior precision, prior mean, temperature or noise level is made of real numbers."
    expected = "a number, a flat sequence of numbers, or a real tensor with at most one axis"
    raise ConfigurationError(what, expected=expected, got=reprlib.repr(value))


def _numbers(value: object) -> Tensor:
    """Integers and real numbers in float64; an empty matrix for anything else that torch takes."""
    given = torch.as_tensor(value)
    real = not given.is_complex() and given.dtype != torch.bool
    return torch.as_tensor(value, dtype=torch.float64) if real else torch.empty(0, 0)


@dataclass(frozen=True, eq=False)
class Groups:
    """Which entries of the parameter vector share a prior precision.

    Attributes:
        name: What the groups are: ``"layerwise"``, ``"normalized_groups"``, or a name of your own.
        names: One for each of the G groups, in the order of a prior precision ``[G]``.
        index: ``[P]`` integers: the group (0 … G−1) of each entry. No group is empty.

    Raises:
        ConfigurationError: An index that is not of that form.

    Example:
        >>> Groups("halves", ("first", "second"), torch.tensor([0, 0, 1])).sizes()
        tensor([2, 1])
    """

    name: str
    names: tuple[str, ...]
    index: Tensor

    def __post_init__(self) -> None:
        index, n = self.index, len(self.names)
        integers = isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.long and len(index) > 0
        ends = [int(end) for end in index.aminmax()] if integers else []
        if ends != [0, n - 1] or not bool(self.sizes().all()):
            expected = f"the numbers 0 … {n - 1} of {n} groups, each at least once, [P]"
            got = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else repr(index)
            raise ConfigurationError("The groups of a prior do not cover the parameters.", expected=expected, got=got)

    def check_size(self, n_parameters: int) -> None:
        """Raise :class:`ConfigurationError` unless these are groups of so many entries."""
        checks.shape("The index of the prior's groups", self.index, [n_parameters])

    def sizes(self) -> Tensor:
        """How many entries each group has, ``[G]``."""
        return torch.bincount(self.index, minlength=len(self.names))

    def geometric_means(self, values: Tensor) -> Tensor:
        """The geometric mean of positive ``values [P]`` over each group, ``[G]`` float64 on the CPU."""
        logarithms, index = values.detach().double().cpu().log(), self.index.cpu()
        sums = torch.zeros(len(self.names), dtype=torch.float64).index_add(0, index, logarithms)
        return (sums / self.sizes().cpu()).exp()


@dataclass(frozen=True)
class GaussianPrior:
    """``N(mean, diag(precision)⁻¹)`` with one precision for all, one for each group of entries, or one for each entry.

    The groups are the layers unless somebody chose others; see :class:`Groups`.

    Attributes:
        precision: 0-d, ``[L]`` or ``[P]``; positive, in inverse squared units of the parameters.
        mean: 0-d or ``[P]``.
        layer_index: ``[P]`` integers: the layer, or other group (0 … L−1), of each entry.
        n_layers: L.
    """

    precision: Tensor
    mean: Tensor
    layer_index: Tensor
    n_layers: int

    @classmethod
    def create(
        cls, precision: float | Tensor, mean: float | Tensor, layer_index: Tensor, *, flat: bool = False
    ) -> GaussianPrior:
        """Check and shape a precision and a mean, of the shapes that the class has.

        The precision may be zero if ``flat``, for what takes the prior's quadratic form alone. ConfigurationError if it
        is not positive and finite, or for another shape.
        """
        n, layers = len(layer_index), int(layer_index.max()) + 1
        precision, mean = _checked_precision(precision, n, layers, flat=flat), _checked_shape("mean", mean, (n,))
        return cls(precision, checks.numbers("The prior mean", mean), layer_index, layers)

    def with_precision(self, precision: float | Tensor) -> GaussianPrior:
        """The same prior at another precision, without looking at all entries again; errors as :meth:`create`."""
        checked = _checked_precision(precision, len(self.layer_index), self.n_layers)
        return GaussianPrior(checked, self.mean, self.layer_index, self.n_layers)

    @property
    def structure(self) -> PriorStructure:
        """Which of the three structures the precision has."""
        if self.precision.ndim == 0:
            return "scalar"
        return "diagonal" if len(self.precision) == len(self.layer_index) else "layerwise"

    def vector(self) -> Tensor:
        """The precision of each entry, ``[P]``."""
        if self.structure == "layerwise":
            return self.precision[self.layer_index.to(self.precision.device)]
        return self.precision.expand(len(self.layer_index))

    def deviation(self, vector: Tensor) -> Tensor:
        """``θ − μ``."""
        return vector - self.mean.to(vector)


def _checked_precision(precision: float | Tensor, n: int, layers: int, *, flat: bool = False) -> Tensor:
    checked = _checked_shape("precision", precision, (layers, n))
    return checks.numbers("The prior precision", checked, **({"least": 0.0} if flat else {"above": 0.0}))


def _checked_shape(name: str, value: float | Tensor, lengths: tuple[int, ...]) -> Tensor:
    tensor = as_hyperparameter(value)
    tensor = tensor.squeeze() if tensor.ndim and tensor.numel() == 1 else tensor
    if tensor.shape not in ((), *((length,) for length in lengths)):
        what = f"The prior {name} has a wrong shape."
        expected = f"a scalar, or {' or '.join(map(str, lengths))} values: for layers or groups, or for parameters"
        raise ConfigurationError(what, expected=expected, got=f"shape {tuple(tensor.shape)}")
    return tensor
