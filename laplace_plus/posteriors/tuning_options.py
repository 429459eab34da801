"""Options that are handed on to whatever tunes the prior."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from laplace_plus.errors import ConfigurationError


def check_options(options: Iterable[str], tuning: Callable[..., Any], *, supplied: Collection[str]) -> None:
    """Refuse options that a tuning does not have.

    Args:
        options: The names that the caller gave.
        tuning: The function that they are for; its keyword-only parameters are its options.
        supplied: Those of these that are no options, as it gets them in any case.

    Raises:
        ConfigurationError: Some are unknown.
    """
    known = [
        name
        for name, parameter in inspect.signature(tuning).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in supplied
    ]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigurationError("This tuning has no such option.", expected=", ".join(known), got=", ".join(unknown))
