"""argparse for all commands: no abbreviations, errors as `ConfigError`, suggestions for misspelled flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks in descriptions and epilogs, and uses wide columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose `parse` raises `ConfigError` for every user error.

    `rewrite` changes the form of the arguments before they are parsed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **options)
        self.rewrite: Callable[[Sequence[str]], Sequence[str]] = list

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments. Raises `ConfigError`, also for unknown ones."""
        arguments, extra = self.parse_known_args(self.rewrite(argv))
        if not extra:
            return arguments
        name = next((item for item in extra if item.startswith("-")), extra[0]).split("=")[0]
        if not name.startswith("-"):
            self.error(f"unexpected argument {name!r}")
        visible = [
            option
            for option, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS and not option.startswith("--no-")
        ]
        raise ConfigError(f"{name} is not a known flag{nearest(name, visible) or f' (see `{self.prog} --help`)'}")
