"""What wraps constructors of posteriors, and what posteriors tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, cast

from torch import Tensor

from laplace_plus import checks
from laplace_plus.errors import SelectionError, UnsupportedError
from laplace_plus.priors import as_hyperparameter

M = TypeVar("M", bound=Callable[..., Any])


def recording(constructor: M, common: Callable[..., Any]) -> M:
    """A constructor that records the arguments of its class in ``options``, and explains unknown keywords.

    Those of ``common``, the base class's constructor, are no options.
    """
    taken, shared = signature(constructor).parameters, signature(common).parameters
    variable = Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL
    own = [name for name, one in taken.items() if name not in shared and one.kind not in variable]

    @wraps(constructor)
    def wrapped(self: Any, *args: Any, **keywords: Any) -> None:
        checks.options(type(self).__name__, keywords.keys() - taken.keys(), [*own, *[*shared][3:]])
        if "options" not in vars(self):  # of the class itself
            bound = signature(constructor).bind(self, *args, **keywords)
            bound.apply_defaults()
            self.options = {name: bound.arguments[name] for name in own}
        constructor(self, *args, **keywords)

    if any(one.kind is Parameter.VAR_KEYWORD for one in taken.values()):  # the common ones, for help and introspection
        rest = [one for name, one in shared.items() if name not in taken and one.kind is Parameter.KEYWORD_ONLY]
        named = [one for one in taken.values() if one.kind is not Parameter.VAR_KEYWORD]
        wrapped.__signature__ = Signature([*named, *rest])  # type: ignore[attr-defined]
    return cast(M, wrapped)


def positive(value: float | Tensor, name: str) -> Tensor:
    """A positive number as a tensor; :class:`ConfigurationError` for anything else."""
    tensor = as_hyperparameter(value, copy=True)
    checks.positive(name, value if tensor.ndim else float(tensor.detach()))
    return tensor


@dataclass(frozen=True)
class Summary:
    """Which parameter is treated how; prints as a table.

    Attributes:
        title: One line about the posterior.
        rows: For each parameter its name, number of selected entries, layer and treatment.
        prior: A line about the prior's groups; empty where they are the layers.
    """

    title: str
    rows: tuple[tuple[str, int, str, str], ...]
    prior: str = ""

    def __str__(self) -> str:
        table = [("parameter", "entries", "layer", "treatment")]
        table += [(name, f"{size:,}", layer or "(root)", treatment) for name, size, layer, treatment in self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in table]
        return "\n".join([self.title, *([self.prior] if self.prior else []), *lines])


def describe_groups(posterior: Any) -> str:
    """A line on the groups of a posterior's prior, for a summary; empty where they are the layers."""
    groups, precision = posterior._prior_groups, posterior.prior_precision
    if groups is None:
        return ""
    names = [name or "(root)" for name in groups.names]
    if precision.ndim == 0 or len(precision) != len(names):
        return f"prior groups {groups.name}: {', '.join(names)}"
    each = [f"{name} {value:.3g}" for name, value in zip(names, precision.tolist(), strict=True)]
    return f"prior precisions of {groups.name}: {', '.join(each)}"


def require_influence(posterior: Any, found: Any) -> None:
    """Raise :class:`SelectionError` unless the data say something about a posterior's parameters."""
    if found:
        return
    names = posterior.parameter_names
    what = f"The curvature of all selected parameters is zero: {', '.join(names[:4])}{' …' * (len(names) > 4)}."
    expected = "parameters that the outputs depend on, and some target that is not ignored"
    got = f"{len(names)} parameters without influence on the likelihood of the data"
    fix = "Select parameters on the path to the outputs. If these are, look for ignored targets, units that are "
    fix += "never active, detached or rounded outputs, and logits so large that each probability is exactly 0 or 1."
    raise SelectionError(what, expected=expected, got=got, fix=fix)


def require_one_noise(posterior: Any) -> None:
    """Raise :class:`UnsupportedError` for several noise levels, where what a fit finds would hold for these alone."""
    if posterior.likelihood.n_noise > 1:
        what = f"{type(posterior).__name__} would hold for these noise levels only."
        fix = "Use lp.Gaussian() with a single noise_std, or lp.Full or lp.KFAC."
        raise UnsupportedError(what, expected="one noise level", got=f"{posterior.likelihood.n_noise}", fix=fix)
