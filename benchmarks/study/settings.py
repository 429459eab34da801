"""The study's configuration: what each set, its networks and each row of its tables are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from laplace_plus.errors import ConfigurationError

_SECTIONS = {"members", "seconds", "default", "sets", "methods", "quick"}


@dataclass(frozen=True)
class Section:
    """What is to be done with one set.

    Attributes:
        name: Of the set.
        source: Where its data come from, for :func:`benchmarks.study.sets.load`.
        network: Its network.
        training: Its schedule.
        methods: Options of each row of the table, by its label.
        members: Number of networks for each split.
    """

    name: str
    source: dict[str, Any]
    network: dict[str, Any]
    training: dict[str, Any]
    methods: dict[str, dict[str, Any]]
    members: int

    @property
    def stamp(self) -> str:
        """Tells networks of different settings apart."""
        return _stamp(self.source, self.network, self.training, self.members)

    def stamp_of(self, label: str) -> str:
        """Tells cells of different settings apart."""
        return _stamp(self.stamp, self.methods[label])


def _stamp(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Settings:
    """A configuration file.

    Attributes:
        content: As it was read, with the quick form's changes if asked for.
    """

    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, *, quick: bool = False) -> Settings:
        """From a YAML file.

        Raises:
            ConfigurationError: No such file, or sections that are unknown or missing.
        """
        if not path.is_file():
            raise ConfigurationError("There is no configuration.", expected="a YAML file", got=str(path))
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, dict) or content.keys() - _SECTIONS or not {"default", "methods"} <= content.keys():
            raise ConfigurationError(
                f"{path.name} is no configuration of the study.",
                expected="default and methods, and possibly " + ", ".join(sorted(_SECTIONS)),
                got=", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__,
            )
        if quick:
            content = _merged(content, content.get("quick") or {})
        return cls(content)

    @property
    def seconds(self) -> float:
        """After so long a cell counts as failed."""
        return float(self.content.get("seconds", 1800))

    def section(self, name: str, only: list[str] | None = None) -> Section:
        """What is to be done with a set.

        Args:
            name: Of the set; one that the configuration does not name has the default network and schedule.
            only: Labels of rows; by default all.

        Raises:
            ConfigurationError: Unknown labels.
        """
        default = self.content["default"]
        own = (self.content.get("sets") or {}).get(plain(name)) or {}
        if unknown := own.keys() - {"source", "network", "training", "methods"}:
            raise ConfigurationError(
                f"{name}: unknown settings.",
                expected="source, network, training, methods",
                got=", ".join(sorted(unknown)),
            )
        rows = _merged(self.content["methods"], own.get("methods") or {})
        methods = {label: options for label, options in rows.items() if options is not None}
        if only is not None:
            if unknown := set(only) - rows.keys():
                raise ConfigurationError(
                    "There are no such rows.", expected="; ".join(methods), got="; ".join(sorted(unknown))
                )
            methods = {label: options for label, options in methods.items() if label in only}
        source = own.get("source") or {}
        return Section(
            plain(name),
            {"data": name, **source},
            dict(own["network"]) if "network" in own else dict(default["network"]),
            {**default["training"], **(own.get("training") or {})},
            methods,
            int(self.content.get("members", 5)),
        )


def plain(name: str) -> str:
    """A set's name, of which files are named."""
    path = Path(name)
    if path.suffix in (".npz", ".csv"):
        return path.parent.name if path.stem == "data" and path.parent.name else path.stem
    return path.name


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merged, entry by entry and inside of entries."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result
