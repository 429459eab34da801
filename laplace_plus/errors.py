"""Every error that the package raises, in one small hierarchy.

Each error says what was expected, what was got and how to fix it, and also inherits the built-in type that a caller is
likely to catch already (``ValueError``, ``RuntimeError``, ``NotImplementedError``).
"""

from __future__ import annotations


class LaplacePlusError(Exception):
    """Base class of all errors of this package.

    Args:
        what: One sentence that says what went wrong.
        expected: What would have been right.
        got: What was there instead.
        fix: What the caller can do about it.

    Example:
        >>> str(LaplacePlusError("Bad label.", expected="0 … 9", got="12", fix="Check the targets."))
        'Bad label. Expected: 0 … 9. Got: 12. Fix: Check the targets.'
    """

    def __init__(self, what: str, *, expected: str | None = None, got: str | None = None, fix: str | None = None):
        parts = [what]
        for title, text in (("Expected", expected), ("Got", got), ("Fix", fix)):
            if text:
                parts.append(f"{title}: {text if text.endswith('.') else text + '.'}")
        super().__init__(" ".join(parts))


class ConfigurationError(LaplacePlusError, ValueError):
    """An argument that no method accepts: an unknown name, a wrong shape, a negative precision."""


class SelectionError(ConfigurationError):
    """A parameter selection that selects nothing, or something that the network does not have."""


class NotFittedError(LaplacePlusError, RuntimeError):
    """A posterior was asked for something that only data can tell it."""


class ModelChangedError(LaplacePlusError, RuntimeError):
    """The network's weights are no longer those that the posterior was fitted on."""


class DataError(LaplacePlusError, ValueError):
    """A batch, or the loader itself, is not of a form that can be used."""


class InputError(DataError, RuntimeError):
    """Inputs on which the network itself fails."""


class EmptyDataError(DataError):
    """The loader yielded no data."""


class LabelError(DataError):
    """Targets of the wrong kind, shape or range."""


class OutputError(LaplacePlusError, ValueError):
    """The network's output does not fit the likelihood."""


class NonFiniteError(LaplacePlusError, ArithmeticError):
    """A parameter, an output or a curvature is NaN or infinite."""


class NotPositiveDefiniteError(LaplacePlusError, ArithmeticError):
    """A matrix with an eigenvalue that is not positive where all must be, e.g. from an indefinite Hessian."""


class UnsupportedError(LaplacePlusError, NotImplementedError):
    """A combination that this backend, structure or likelihood cannot do; the message names one that can."""


class CheckpointError(LaplacePlusError, ValueError):
    """A saved posterior that is damaged, of another format version, or of another network."""


class OperatorError(LaplacePlusError, ValueError):
    """A linear operator of the wrong shape or type, or one that is not what it is said to be (symmetric, linear)."""


class DistributedError(LaplacePlusError, RuntimeError):
    """Another rank of ``torch.distributed`` failed, disagrees, or does not answer; the message says which and why."""


class SamplingError(LaplacePlusError, RuntimeError):
    """Not one sample of a posterior could be drawn; the message says why."""


class ConvergenceWarning(UserWarning):
    """An iteration ended before it met its tolerance; the message says how far it got."""


class SmoothnessWarning(UserWarning):
    """A method whose theory needs a loss that is twice differentiable was given one with kinks."""
