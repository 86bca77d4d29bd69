"""Creates the flags of all settings from the schema and the alias table, and `--config`.

It only defines how flags are written; `config/` defines what they mean and checks their values.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from jaxserve.cli.common.parser import Parser
from jaxserve.cli.common.plain_form import in_plain_form
from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.load import GivenSetting, LoadedConfig, load_config
from jaxserve.config.other_engines import foreign_flags, renames
from jaxserve.config.schema import EngineConfig
from jaxserve.config.server_schema import SHARED_SERVER_SETTINGS
from jaxserve.config.settings import Setting, as_flag, as_key, settings
from jaxserve.errors import ConfigError
from jaxserve.observability import log

logger = logging.getLogger(__name__)


def add_settings(parser: Parser, *, hidden: Collection[str] = (), only: Collection[str] | None = None) -> None:
    """Add a flag for every setting, or for those in `only`, under all its names except those in `hidden`."""
    parser.set_defaults(given=())
    parser.rewrite = in_plain_form
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file of settings (keys are the flags' names); flags override it",
    )
    engine = parser.add_argument_group("engine")
    server = parser.add_argument_group("server")
    for setting in settings().values():
        if only is not None and setting.name not in only:
            continue
        group = engine if setting.owner is EngineConfig else server
        names = [name for name in (setting.name, *renames(setting.name)) if name not in hidden]
        _add(group, setting, names)
    for name, flag in foreign_flags().items() if only is None else ():
        if flag.meaning.sets in settings() or name in settings() or "." in name or name in hidden or name == "config":
            continue
        if flag.kind == "switch":
            _add_switch(parser, [name], argparse.SUPPRESS)
        else:
            number = "+" if flag.kind == "list" else None
            parser.add_argument(*_options(name), action=_RecordGiven, nargs=number, help=argparse.SUPPRESS)


def add_model(parser: Parser) -> None:
    """Add the model as a positional argument, as in vLLM's `serve`."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")


def config_from_arguments(arguments: argparse.Namespace) -> LoadedConfig:
    """Resolve the configuration of parsed arguments. Raises `ConfigError`."""
    given: tuple[GivenSetting, ...] = arguments.given
    model = getattr(arguments, "model_argument", None)
    if model is not None:
        if any(value.key == "model" for value in given):
            raise ConfigError(f"the model is given twice, by --model and as {model!r}; keep one")
        given = (*given, GivenSetting("model", model, "flag", "MODEL"))
    return load_config(given, arguments.config)


def llm_arguments(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the settings that were given as arguments of `LLM`, without the server's own, and set up logging, which
    `LLM` leaves to its caller.

    Only warnings are logged unless a log level was given, so that the terminal shows the answer.
    """
    given = {value.setting.name: value for value in loaded.values if value.source != "default"}
    level = loaded.engine.log_level if "log_level" in given else "warning"
    log.setup(level, config_file=loaded.engine.log_config_file)
    given.pop("log_config_file", None)
    for note in loaded.notes:
        logger.warning(note)
    return {
        name: value.value
        for name, value in given.items()
        if value.setting.owner is EngineConfig or name in SHARED_SERVER_SETTINGS
    }


def description(setting: Setting) -> str:
    """Return the help text of a flag with its default."""
    if setting.default is None or setting.default == () or setting.is_switch:
        return setting.description
    shown = " ".join(map(str, setting.default)) if isinstance(setting.default, tuple) else setting.default
    return f"{setting.description} (default {shown})"


def _add(group: argparse._ArgumentGroup, setting: Setting, names: list[str]) -> None:
    text = description(setting).replace("%", "%%")
    if setting.is_switch:
        _add_switch(group, names, text)
        return
    options = [option for name in names for option in _options(name)]
    group.add_argument(
        *options, action=_RecordGiven, nargs="+" if setting.is_list else None, metavar=_metavar(setting), help=text
    )


def _add_switch(group: argparse._ActionsContainer, names: list[str], text: str) -> None:
    options = [option for name in names for option in _options(name)]
    group.add_argument(*options, action=_RecordGiven, nargs=0, const=True, help=text)
    group.add_argument(*[f"--no-{name.replace('_', '-')}" for name in names], action=_RecordGiven, nargs=0, const=False,
                       help=argparse.SUPPRESS)  # fmt: skip


def _options(name: str) -> list[str]:
    return [as_flag(name), f"-{name}"] if len(name) in (2, 3) else [as_flag(name)]


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    if setting.is_mapping:
        return "JSON"
    return {int: "N", float: "X", tuple[int, ...]: "N", KvEventsConfig: "JSON"}.get(setting.kind, "TEXT")


class _RecordGiven(argparse.Action):
    """Appends the value to `given`, under the name that the user wrote."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        name, value = (option_string, values) if self.const is None else (option_string, self.const)
        key = as_key(name) if self.const is not False else as_key(name).removeprefix("no_")
        namespace.given = (*namespace.given, GivenSetting(key, value, "flag", option_string))
