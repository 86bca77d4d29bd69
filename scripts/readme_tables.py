#!/usr/bin/env python3
"""Writes the README's tables of commands and flags from the code. `tests/test_readme.py` fails when they differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from starlette.testclient import TestClient

from jaxserve.cli.bench import SUBCOMMANDS
from jaxserve.cli.common.flags import description
from jaxserve.cli.main import COMMANDS
from jaxserve.config import aliases
from jaxserve.config.schema import EngineConfig, ServerConfig
from jaxserve.config.settings import Config, as_flag, settings
from jaxserve.server.app import make_app
from jaxserve.server.server_state import Serving

README = Path(__file__).parents[1] / "README.md"


def written(readme: str) -> str:
    """The README with every table between its markers written anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        readme, count = re.subn(pattern, lambda match, table=table: match[1] + table() + match[2], readme, flags=re.S)
        assert count == 1, f"README.md has {count} places for the table {name!r}"
    return readme


def commands() -> str:
    """Every subcommand."""
    return _table(("command", "does"), ((f"`jaxserve {name}`", what) for name, what in COMMANDS.items()))


def bench_commands() -> str:
    """Every command of `jaxserve bench`."""
    return _table(("command", "does"), ((f"`jaxserve bench {name}`", what) for name, what in SUBCOMMANDS.items()))


def routes() -> str:
    """Every route, as the server's own description has it."""
    app = make_app(Serving(ServerConfig(), EngineConfig()))
    paths = TestClient(app).get("/openapi.json").json()["paths"]
    rows = (
        (f"`{method.upper()} {path}`", what["summary"]) for path, by in paths.items() for method, what in by.items()
    )
    return _table(("route", "does"), rows)


def flags(owner: type[Config]) -> str:
    """Every setting of one struct, under its flag."""
    rows = []
    for setting in settings().values():
        if setting.owner is owner:
            others = ", ".join(f"`{as_flag(name)}`" for name in aliases.renames(setting.name))
            choices = f"; one of {', '.join(setting.choices)}" if setting.choices else ""
            rows.append((f"`{setting.flag}`", description(setting) + choices, others))
    return _table(("flag", "meaning", "also written"), rows)


def accepted() -> str:
    """Other engines' flags whose promise holds."""
    rows = []
    for name, alias, outcome in _outcomes():
        if isinstance(outcome, aliases.InForce):
            rows.append((_as_written(name, alias), outcome.why))
        elif isinstance(outcome, aliases.Sets):
            rows.append((_as_written(name, alias), f"sets `{outcome.key}: {str(outcome.value).lower()}`"))
    return _table(("flag", "because"), rows)


def refused() -> str:
    """Other engines' flags that are refused."""
    rows = [
        (_as_written(name, alias), outcome.why)
        for name, alias, outcome in _outcomes()
        if isinstance(outcome, aliases.Refused)
    ]
    return _table(("flag", "because"), rows)


TABLES = {
    "commands": commands,
    "bench commands": bench_commands,
    "routes": routes,
    "engine flags": lambda: flags(EngineConfig),
    "server flags": lambda: flags(ServerConfig),
    "accepted": accepted,
    "refused": refused,
}


def _outcomes() -> Iterable[tuple[str, str | None, aliases.Outcome]]:
    """Flag, value and outcome of every foreign flag; of switches only what is written as `--flag`."""
    for name, alias in aliases.ALIASES.items():
        if isinstance(alias, aliases.Switch):
            yield name, None, alias.on
        elif isinstance(alias, aliases.Choice):
            yield from ((name, value, outcome) for value, outcome in alias.known.items())
            yield name, "…", alias.other


def _as_written(name: str, value: str | None) -> str:
    return f"`{as_flag(name)}`" if value is None else f"`{as_flag(name)} {value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', r'\|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
