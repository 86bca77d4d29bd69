"""argparse as the subcommands use it: no abbreviations, errors raised as ours, an unknown flag names the nearest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxserve.config.nearest import nearest
from jaxserve.errors import ConfigError


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps our line breaks in epilogs and gives flags room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=120)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose `parse` raises `ConfigError` for whatever a person got wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments; an unknown one is an error."""
        arguments, extra = self.parse_known_args(argv)
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
