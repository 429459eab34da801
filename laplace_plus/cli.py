"""The command line: `laplace-plus evaluate MODULE:FUNCTION`, and `run`, `wrap` and `predict` with a configuration.

The configuration is a YAML file; any of its keys can also be given as an option, which then wins, such as
`laplace-plus run configs/digits.yaml --seeds 1 --training.epochs 5`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser

from laplace_plus._version import __version__
from laplace_plus.errors import ConfigurationError, LaplacePlusError
from laplace_plus.experiments.predict import predict
from laplace_plus.experiments.run import run, wrap
from laplace_plus.experiments.settings import PredictSettings, RunSettings, WrapSettings

COMMANDS: dict[str, tuple[type[Any], Callable[..., None], str]] = {
    "run": (RunSettings, run, "train, wrap, tune, evaluate and report: the digits demonstration"),
    "evaluate": (WrapSettings, wrap, "fit, tune, evaluate and report for a network and data of your own"),
    "wrap": (WrapSettings, wrap, "the same as evaluate"),
    "predict": (PredictSettings, predict, "predict with a saved posterior: of a .npz or CSV file, or of images"),
}
"""The commands: the class of their settings, what runs, and a line of help."""


def build_parser() -> ArgumentParser:
    """The parser of all commands; the configuration file is its option `--config`."""
    parser = ArgumentParser(
        prog="laplace-plus",
        description="Post-hoc Laplace uncertainty for trained networks.",
        version=__version__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    commands = parser.add_subcommands(dest="command", required=True)
    for name, (settings, _, description) in COMMANDS.items():
        command = ArgumentParser(
            exit_on_error=False,
            allow_abbrev=False,
            description=f"{description[0].upper()}{description[1:]}. The configuration file may come first without "
            "--config, or the function of `evaluate` without --function; any key can be an option, which then wins.",
        )
        command.add_argument("--config", action=ActionConfigFile, help="The configuration, a YAML file.")
        command.add_argument("--progress", action="store_true", help="Show progress bars.")
        command.add_class_arguments(settings)
        commands.add_subcommand(name, command, help=description)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process; 0, or 2 after an error, with a message on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given[0] if given and given[0] in COMMANDS else ""
    if command and len(given) > 1 and not given[1].startswith("-"):
        is_function = command in ("evaluate", "wrap") and not Path(given[1]).is_file()
        given.insert(1, "--function" if is_function else "--config")
    path = [*sys.path]
    try:
        parser = build_parser()
        try:
            parsed = parser.parse_args(given)
            chosen = parser.instantiate(parsed)[parsed.command]
        except (ArgumentError, TypeError) as error:
            what, name = " ".join(str(error).split()).rstrip("."), f"laplace-plus {command}".strip()
            raise ConfigurationError(f"{what}.", fix=f"See `{name} --help`") from error
        settings_class, function, _ = COMMANDS[parsed.command]
        # Instances are kept as they are: only the top level of the namespace is taken apart.
        settings = settings_class(**{name: chosen[name] for name in settings_class.__dataclass_fields__})
        folder = Path(settings.output)
        (folder.parent if folder.suffix in (".csv", ".npz") else folder).mkdir(parents=True, exist_ok=True)
        # Modules that the configuration names are part of it: found beside the file, or where the command is given.
        folders = [*(Path(str(file)).parent for file in chosen.config or []), Path.cwd()]
        sys.path[:0] = [str(one.resolve()) for one in folders]
        function(settings, progress=chosen.progress, say=partial(print, flush=True))
    except LaplacePlusError as error:
        print(f"laplace-plus: {error}", file=sys.stderr)
        return 2
    finally:
        sys.path[:] = path
    return 0


if __name__ == "__main__":
    sys.exit(main())
