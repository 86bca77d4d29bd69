"""The two sides of `jaxserve bench accuracy`: a server that runs already, or one that is started for the command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxserve.bench.load.target_server import TargetServer, parse_base_url
from jaxserve.bench.processes.server_process import serving
from jaxserve.bench.sweep.grid import check_engine
from jaxserve.cli.common import flags
from jaxserve.cli.common.parser import Parser
from jaxserve.config.load import LoadedConfig
from jaxserve.config.model_files import fetch_files
from jaxserve.config.schema import DEFAULT_MODEL, EngineConfig
from jaxserve.config.settings import settings
from jaxserve.errors import ConfigError

# The command sets the address of a server that it starts, and needs no key for it.
_OF_RUNNING_SERVERS = ("host", "port", "api_key")


@dataclasses.dataclass(frozen=True)
class Side:
    """One side: `server` if it runs already, else the `settings` to start it with. `text` is the argument as given."""

    name: str
    text: str
    server: TargetServer | None
    settings: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model of a server that is started."""
        return str(self.settings.get("model", DEFAULT_MODEL))

    def describe(self) -> str:
        """Return the side in a line."""
        return self.text if self.server is not None else f"{self.model}, jaxserve serve {self.text or 'as given'}"

    def as_json(self) -> dict[str, Any]:
        """Return the URL, or the settings of the server that was started."""
        return {"settings": dict(self.settings)} if self.server is None else {"url": self.server.url}

    @contextlib.contextmanager
    def running(self, folder: Path, *, start_timeout: float) -> Iterator[TargetServer]:
        """Yield the server, which is started with files in `folder` if need be. Raises `BenchRunError`."""
        if self.server is not None:
            yield self.server
            return
        engine = {name: value for name, value in self.settings.items() if settings()[name].owner is EngineConfig}
        fetch_files(EngineConfig(**engine))  # a download is no part of the start
        file = folder / f"{self.name}.yaml"
        file.write_text(json.dumps(dict(self.settings)))
        with serving(["--config", str(file)], folder / f"{self.name}.log", timeout=start_timeout) as process:
            yield parse_base_url(process.url)


def read_sides(arguments: argparse.Namespace) -> tuple[Side, Side]:
    """Return base and other. Raises `ConfigError` for flags that `jaxserve serve` refuses or no side uses."""
    common = _given(flags.config_from_arguments(arguments))
    base, other = (_read_side(name, getattr(arguments, name), common) for name in ("base", "other"))
    if base.server is not None and other.server is not None and common:
        raise ConfigError(
            f"{', '.join(common)} would have no effect: both sides run already. Leave settings out; --tokenizer names "
            "the tokenizer"
        )
    return base, other


def _read_side(name: str, text: str, common: Mapping[str, Any]) -> Side:
    if text.strip() and not text.lstrip().startswith("-"):
        return Side(name, text, parse_base_url(text, f"--{name}"), {})
    parser = Parser(prog=f"--{name}", add_help=False)
    flags.add_settings(parser)
    try:
        own = _given(flags.config_from_arguments(parser.parse(shlex.split(text))))
        given = {**common, **own}
        check_engine(given, f"--{name}")
    except ValueError as error:
        raise ConfigError(f"--{name} {text!r}: {error}") from None
    return Side(name, text, None, given)


def _given(loaded: LoadedConfig) -> dict[str, Any]:
    return {
        value.setting.name: value.value
        for value in loaded.values
        if value.source != "default" and value.setting.name not in _OF_RUNNING_SERVERS
    }
