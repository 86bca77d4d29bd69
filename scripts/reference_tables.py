#!/usr/bin/env python3
"""Writes the tables in docs/reference/ from the code; `tests/test_docs.py` fails where a table is out of date."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric
from starlette.testclient import TestClient

from jaxserve.api_types import EngineStats
from jaxserve.cli.bench import SUBCOMMANDS
from jaxserve.cli.common.flags import description
from jaxserve.cli.main import COMMANDS
from jaxserve.config.other_engines import ForeignFlag, Meaning, foreign_flags, renames
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import ServerConfig
from jaxserve.config.settings import Config, as_flag, settings
from jaxserve.observability import counterparts
from jaxserve.observability.engine_metrics import NO_ENGINE
from jaxserve.observability.metrics import Metrics
from jaxserve.server.app import make_app
from jaxserve.server.server_state import ServerState

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


def with_tables(page: str) -> str:
    """Return the text of a page with each table between its markers replaced by the current one."""
    tables = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", flags=re.S)
    return tables.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], page)


def commands() -> str:
    """Return the table of all commands."""
    return _table(("command", "does"), ((f"`jaxserve {name}`", what) for name, what in COMMANDS.items()))


def bench_commands() -> str:
    """Return the table of the commands of `jaxserve bench`."""
    return _table(("command", "does"), ((f"`jaxserve bench {name}`", what) for name, what in SUBCOMMANDS.items()))


def routes() -> str:
    """Return the table of all routes, as the server's own /openapi.json describes them."""
    app = make_app(ServerState(ServerConfig(api_key="key", enable_tokenizer_info_endpoint=True), EngineConfig()))
    paths = TestClient(app).get("/openapi.json", headers={"Authorization": "Bearer key"}).json()["paths"]
    rows = []
    for path, operations in paths.items():
        for method, operation in operations.items():
            streams = "yes" if "text/event-stream" in operation["responses"]["200"]["content"] else ""
            key = "yes" if "security" in operation else ""
            rows.append((f"`{method.upper()} {path}`", operation["summary"], streams, key))
    return _table(("route", "does", "can stream", "needs the key"), rows)


def flags(owner: type[Config]) -> str:
    """Return the table of the settings of one struct, by flag."""
    rows = []
    for setting in settings().values():
        if setting.owner is owner:
            others = ", ".join(f"`{as_flag(name)}`" for name in renames(setting.name))
            choices = f"; one of {', '.join(setting.choices)}" if setting.choices else ""
            rows.append((f"`{setting.flag}`", description(setting) + choices, others))
    return _table(("flag", "meaning", "also written"), rows)


def foreign(*engines: str) -> str:
    """Return the table of the flags of other engines, but for those that are left out."""
    rows = []
    for flag in _foreign_flags(*engines):
        names = ", ".join(f"`{as_flag(name)}`" for name in flag.names)
        if flag.meaning.answer != "left out":
            rows.append((names, flag.meaning.answer, _effect(flag.meaning)))
        meanings: dict[Meaning, list[str]] = {}
        for value, meaning in flag.known.items():
            meanings.setdefault(meaning, []).append(f"`{value}`")
        for meaning, values in meanings.items():
            rows.append((f"`{as_flag(flag.key)}` {', '.join(values)}", meaning.answer, _effect(meaning)))
    return _table(("flag", "answer", "here"), rows)


def left_out(*engines: str) -> str:
    """Return the table of the flags of other engines that nothing here could use, by reason."""
    by_reason: dict[str, list[str]] = {}
    for flag in _foreign_flags(*engines):
        if flag.meaning.answer == "left out":
            by_reason.setdefault(flag.meaning.reason, []).append(f"`{as_flag(flag.key)}`")
    return _table(("because", "flags"), ((reason, ", ".join(flags)) for reason, flags in sorted(by_reason.items())))


def series() -> str:
    """Return the table of all our families of /metrics."""
    rows = ((_series_name(family), family.type, family.documentation) for family in _families().values())
    return _table(("series", "kind", "is"), rows)


def counterpart_series(engine: str) -> str:
    """Return the table of the families that another engine has, and which of ours they show."""
    families = _families(engine)
    shown = {row.theirs: row for row in counterparts.counterparts(engine)}
    rows = [
        (_series_name(families[name]), _series_name(families[row.ours]), row.differs) for name, row in shown.items()
    ]
    made_here = families.keys() - _families().keys() - shown.keys()
    rows += [(_series_name(families[name]), "", families[name].documentation) for name in sorted(made_here)]
    return _table(("series", "shows", "differs"), rows)


def left_out_series(engine: str) -> str:
    """Return the table of the families of another engine that have no counterpart."""
    return _table(("series", "because"), ((f"`{name}`", why) for name, why in counterparts.left_out(engine).items()))


TABLES = {
    "commands": commands,
    "bench commands": bench_commands,
    "routes": routes,
    "engine flags": lambda: flags(EngineConfig),
    "server flags": lambda: flags(ServerConfig),
    "vllm flags": lambda: foreign("vllm", "both"),
    "vllm left out": lambda: left_out("vllm", "both"),
    "sglang flags": lambda: foreign("sglang", "both"),
    "sglang left out": lambda: left_out("sglang", "both"),
    "older flags": lambda: foreign("older"),
    "series": series,
    "vllm series": lambda: counterpart_series("vllm"),
    "sglang series": lambda: counterpart_series("sglang"),
    "vllm series left out": lambda: left_out_series("vllm"),
    "sglang series left out": lambda: left_out_series("sglang"),
}


def _families(*engines: str) -> dict[str, Metric]:
    """Return the families of /metrics by name."""
    metrics = Metrics("", lambda: (NO_ENGINE, EngineStats()), other_engines=engines)
    return {family.name: family for family in metrics.registry.collect()}


def _series_name(family: Metric) -> str:
    return f"`{family.name}{'_total' if family.type == 'counter' else ''}`"


def _foreign_flags(*engines: str) -> list[ForeignFlag]:
    flags = {flag.key: flag for flag in foreign_flags().values() if flag.engine in engines}
    return sorted(flags.values(), key=lambda flag: flag.key)


def _effect(meaning: Meaning) -> str:
    if meaning.values:
        text = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in meaning.values.items())
        return f"sets {text}" + (f": {meaning.reason}" if meaning.reason else "")
    kind, _, name = meaning.sets.rpartition(" ")
    if kind == "same":
        return f"must be that of `{as_flag(name)}`: {meaning.reason}"
    if meaning.answer == "taken" and not kind and name:
        return f"`{as_flag(name)}`" + (f": {meaning.reason}" if meaning.reason else "")
    return meaning.reason or "a mapping, by its keys"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', r'\|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    for page in FOLDER.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
