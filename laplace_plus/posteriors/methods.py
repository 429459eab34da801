"""What public methods of posteriors share: the arithmetic that they run in, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from laplace_plus import io
from laplace_plus.errors import CheckpointError, ConfigurationError, ModelChangedError
from laplace_plus.modes import turn
from laplace_plus.network import Network, exact_arithmetic
from laplace_plus.priors import as_hyperparameter

if TYPE_CHECKING:
    from laplace_plus.posteriors.base import Posterior


class _HasNetwork(Protocol):
    network: Network
    memory_budget: int | None


P = TypeVar("P", bound=_HasNetwork)
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def exactly(method: Callable[Concatenate[P, Rest], Result]) -> Callable[Concatenate[P, Rest], Result]:
    """Run a posterior's method outside of autocast and inference mode, within its memory budget, one at a time.

    See :func:`network.exact_arithmetic`.
    """

    @wraps(method)
    def wrapped(self: P, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        with exact_arithmetic(self.network, self.memory_budget):
            return method(self, *args, **kwargs)

    return wrapped


def require_unchanged(posterior: Posterior) -> None:
    """Look at the network's weights once in each public method.

    Raises:
        ModelChangedError: They are not those of the fit.
    """
    network = posterior.network
    with turn(network.model):
        if not network.has_changed():
            return
        try:
            io.compare_fingerprint(posterior._fingerprint, network.model)
        except CheckpointError as error:
            raise ModelChangedError(
                "The network is no longer the one that the posterior was fitted on.",
                expected="the weights and buffers at the time of fit()",
                got=str(error),
                fix="Call fit() again after training, or give the posterior a copy of the model.",
            ) from error
        network.remember()


def check_count(value: Any, name: str) -> None:
    """Raise :class:`ConfigurationError` unless a value is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError("There is no such number.", expected=f"{name}: an integer >= 1", got=repr(value))


def check_name(value: Any, known: Iterable[str], name: str) -> None:
    """Raise :class:`ConfigurationError` unless a value is one of the known names."""
    if value not in tuple(known):
        raise ConfigurationError(f"Unknown {name}.", expected=", ".join(known), got=repr(value))


def positive(value: float | Tensor, name: str) -> Tensor:
    """A positive number as a tensor.

    Raises:
        ConfigurationError: Anything else.
    """
    tensor = as_hyperparameter(value)
    if tensor.numel() != 1 or not bool(torch.isfinite(tensor.detach()).all() and (tensor.detach() > 0).all()):
        raise ConfigurationError(f"The {name} is a positive number.", expected=f"{name} > 0", got=str(value))
    return tensor
