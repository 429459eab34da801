"""All errors of the package in one hierarchy.

Each error says what was expected, what was given and how to fix it. It also inherits the built-in type that callers
likely catch already (``ValueError``, ``RuntimeError``, ``NotImplementedError``).
"""

from __future__ import annotations

import warnings
from inspect import currentframe
from traceback import walk_stack

WORDS = {
    "subset_of_weights": 'parameters="all" or "last_layer", or lp.Subnetwork',
    "hessian_structure": "the class: lp.Full, lp.KFAC, lp.Diagonal or lp.LowRank",
    "sigma_noise": "likelihood=lp.Gaussian(noise_std)",
    "pred_type": 'predictive(x, method="linearized") for "glm", "sampled" for "nn"',
    "link_approx": 'predictive(x, link="probit"), "mc" or "bridge"',
    "diagonal_output": 'functional_posterior(x, outputs="diagonal")',
    "marglik": 'fit_prior_precision("marginal_likelihood")',
    "gridsearch": 'fit_prior_precision("validation", data=held_out)',
    "CV": 'fit_prior_precision("validation", data=held_out)',
    "val_loader": "data=held_out",
    "prior_structure": "structure=",
    "progress_bar": "progress=True",
    "Laplace": 'lp.KFAC(model, "classification"), lp.Full, lp.Diagonal or lp.LowRank',
}
"""What words of laplace-torch are called here; see ``docs/from-laplace-torch.md``."""


class LaplacePlusError(Exception):
    """Base class of all errors of this package.

    Args:
        what: One sentence that says what went wrong.
        expected: The expected value.
        got: The given value.
        fix: How the caller can correct it.

    Example:
        >>> str(LaplacePlusError("Bad label.", expected="0 … 9", got="12", fix="Check the targets."))
        'Bad label. Expected: 0 … 9. Got: 12. Fix: Check the targets.'
    """

    def __init__(self, what: str, *, expected: str | None = None, got: str | None = None, fix: str | None = None):
        parts = [what]
        for title, text in (("Expected", expected), ("Got", got), ("Fix", fix)):
            if text:
                parts.append(f"{title}: {text if text.endswith(('.', '?')) else text + '.'}")
        super().__init__(" ".join(parts))


class ConfigurationError(LaplacePlusError, ValueError):
    """An argument that no method accepts: an unknown name, a wrong shape, a negative precision."""


class SelectionError(ConfigurationError):
    """A parameter selection that selects nothing, or something that the network does not have."""


class NotFittedError(LaplacePlusError, RuntimeError):
    """A posterior was used before fit()."""


class ModelChangedError(LaplacePlusError, RuntimeError):
    """The network's weights are no longer those that the posterior was fitted on."""


class DataError(LaplacePlusError, ValueError):
    """A batch or the loader has a form that cannot be used."""


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
    """A matrix that must be positive definite is not, e.g. an indefinite Hessian."""


class UnsupportedError(LaplacePlusError, NotImplementedError):
    """A combination that this backend, structure or likelihood does not support; the message names one that does."""


class CheckpointError(LaplacePlusError, ValueError):
    """A saved posterior that is damaged, of another format version, or of another network."""


class OperatorError(LaplacePlusError, ValueError):
    """A linear operator of the wrong shape or type, or without a property that it declares (symmetric, linear)."""


class DistributedError(LaplacePlusError, RuntimeError):
    """Another rank of ``torch.distributed`` failed, disagrees, or does not answer; the message says which and why."""


class SamplingError(LaplacePlusError, RuntimeError):
    """No sample of a posterior could be drawn; the message says why."""


NETWORK_ERRORS = (LaplacePlusError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""What a network may raise on inputs that it cannot take; no MemoryError, nothing that a signal raises."""


class ConvergenceWarning(UserWarning):
    """An iteration ended before it reached its tolerance; the message gives the error."""


class NoGainWarning(UserWarning):
    """A tuning could not show that the posterior predicts better than the network; the message says why."""


class UnseenRowsWarning(UserWarning):
    """A network does not seem to have been trained on the rows of a fit; the message says why, and how it was tuned."""


class SmoothnessWarning(UserWarning):
    """A method that requires a twice differentiable loss was given one with kinks."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that called the package, through whatever decorators: ``stacklevel`` without counting."""
    roots = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_stack(currentframe())]
    level = len(roots) - roots[::-1].index("laplace_plus")
    while roots[level : level + 1] in (["contextlib"], ["torch"]):
        level += 1
    warnings.warn(message, category, stacklevel=level + 1)
