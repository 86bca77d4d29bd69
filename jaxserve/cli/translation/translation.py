"""Translates the start of another engine's server into a command line of ours, with a reason for what is left out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import msgspec
import yaml

from jaxserve.cli.common.plain_form import in_plain_form
from jaxserve.cli.translation.launch import Engine, Launch
from jaxserve.config.foreign_readers import READERS
from jaxserve.config.load import (
    GivenSetting,
    LoadedConfig,
    SettingValue,
    check_same,
    load_config,
    set_implied_method,
    settings_of,
)
from jaxserve.config.nearest import nearest
from jaxserve.config.other_engines import ForeignVariable, environment_variables, foreign_flags
from jaxserve.config.settings import Setting, as_flag, as_key, settings
from jaxserve.errors import ConfigError

Answer = Literal["note", "refused"]

_NAMES: Mapping[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_DEFAULT_PORTS: Mapping[Engine, int] = {"vllm": 8000, "sglang": 30000}
_SHORT_NUMBER = re.compile(r"[\d.]+[KMGT]")
_OFF = ("", "0", "false", "off", "no")
_READ = "read "
_VARIABLE = re.compile(r"\$[\w{(]")
_DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
_CORS = {"allow_credentials", "allowed_methods", "allowed_headers"}
_PATHS = (
    "model", "tokenizer_path", "speculative_model", "chat_template", "download_dir", "generation_config",
    "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "uds",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ChangedPart:
    """A part of the command that is changed, added or left out, and why."""

    written: str
    reason: str
    answer: Answer


@dataclasses.dataclass(frozen=True)
class Translation:
    """The same server in jaxserve: environment variables, arguments of `jaxserve serve`, and what was changed."""

    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    parts: tuple[ChangedPart, ...]

    @property
    def refused(self) -> list[ChangedPart]:
        """The parts without a counterpart."""
        return [part for part in self.parts if part.answer == "refused"]


def translate(launch: Launch) -> Translation:
    """Return what starts the same server here. Parts without a counterpart are left out, with the reason."""
    parts: list[ChangedPart] = []
    found: dict[str, SettingValue] = {}
    same: dict[str, SettingValue] = {}
    environment = _environment(launch, found, parts)
    config: list[str] = []
    for given in _given(launch, config, parts):
        notes: list[str] = []
        written = _written(given)
        if (setting := _left_open(given)) is not None:
            found[setting.name] = SettingValue(setting, given.value, "flag", given.place)
            continue
        try:
            for name, value in settings_of(given, notes):
                (same if name.startswith("same ") else found)[name] = value
        except ConfigError as error:
            parts.append(ChangedPart(written, str(error).removeprefix(f"{written} is refused: "), "refused"))
        parts += [ChangedPart(written, note.removeprefix(f"{written}: "), "note") for note in notes]
    implied: list[str] = []
    set_implied_method(found, implied)
    for note in implied:
        written, _, reason = note.partition(": ")
        parts.append(ChangedPart(written, reason, "note"))
    _add_defaults(launch, found, parts)
    for name, value in same.items():
        try:
            check_same({**found, name: value})
        except ConfigError as error:
            parts.append(ChangedPart(f"{value.place} {value.value}", str(error), "refused"))
    if launch.container is not None:
        _leave_container(launch, found, environment, parts)
    if launch.before:
        parts.append(
            ChangedPart(" ".join(launch.before), "stands before the command; put it there again if needed", "note")
        )
    arguments = (*_arguments(found), *config)
    try:
        check(found)
    except ConfigError as error:
        parts.append(ChangedPart("all together", str(error), "refused"))
    return Translation(environment, arguments, tuple(dict.fromkeys(parts)))


def check(found: Mapping[str, SettingValue]) -> LoadedConfig:
    """Return the configuration of these settings. Raises `ConfigError` if they don't go together.

    Without the values that are variables, nothing can be said.
    """
    if any(_VARIABLE.search(str(value.value)) for value in found.values()):
        return load_config()
    return load_config(
        GivenSetting(name, msgspec.to_builtins(value.value), "argument", value.place)
        for name, value in found.items()
        if value.value is not None
    )


def _left_open(given: GivenSetting) -> Setting | None:
    """Return the setting whose value is a variable that the text left open, if it is one."""
    if not isinstance(given.value, str) or not _VARIABLE.search(given.value):
        return None
    name = given.key
    while name in foreign_flags() and name not in settings():
        name = foreign_flags()[name].meaning.sets or "?"
    return settings().get(name)


def _given(launch: Launch, config: list[str], parts: list[ChangedPart]) -> Iterator[GivenSetting]:
    """Yield the settings of the arguments as they are written; add those of `--config` to `config`."""
    words, has_model = [word for word in in_plain_form(launch.arguments) if word], False
    while words:
        word = words.pop(0)
        if not word.startswith("-") or _is_number(word):
            if has_model:
                parts.append(ChangedPart(word, "it belongs to no flag", "refused"))
            else:
                has_model = True
                yield GivenSetting("model", word, "flag", "MODEL")
            continue
        name, equals, value = word.partition("=")
        key = _completed(as_key(name), launch.engine)
        has_model |= key in ("model", "model_path")
        if key == "config" and (equals or words):
            path = value if equals else words.pop(0)
            config += ["--config", path]
            parts.append(ChangedPart(f"--config {path}", "its keys may be the other engine's names", "note"))
            continue
        kind = _kind(key)
        if kind is None and _kind(key.removeprefix("no_")) == "switch":
            yield GivenSetting(key.removeprefix("no_"), False, "flag", name)
        elif kind == "switch":
            yield GivenSetting(key, True, "flag", name)
        elif equals:
            yield GivenSetting(key, [value] if kind == "list" else _decimal(value, launch.engine), "flag", name)
        else:
            count = _num_values(words)
            taken = [words.pop(0) for _ in range(count if kind == "list" else min(count, 1))]
            if kind is None:
                parts.append(
                    ChangedPart(" ".join([name, *taken]), f"it is not known{nearest(name, _names())}", "refused")
                )
            elif not taken:
                parts.append(ChangedPart(name, "it needs a value", "refused"))
            else:
                value = _decimal(taken[0], launch.engine)
                yield GivenSetting(key, taken if kind == "list" else value, "flag", name)


def _completed(key: str, engine: Engine) -> str:
    """Return the key that an abbreviated one stands for, as both engines take them, or the key itself."""
    if _kind(key) is not None:
        return key
    longer = {
        flag.key: name
        for name, flag in foreign_flags().items()
        if name.startswith(key) and "." not in name and flag.engine in (engine, "both")
    }
    return next(iter(longer.values())) if len(longer) == 1 else key


def _decimal(text: str, engine: Engine) -> str:
    """Return a number of SGLang's with a suffix, all of which are powers of 1000, as vLLM and jaxserve write it."""
    return text.lower() if engine == "sglang" and _SHORT_NUMBER.fullmatch(text) else text


def _num_values(words: Sequence[str]) -> int:
    """Return how many of the first words are no flags."""
    return next((i for i, word in enumerate(words) if word.startswith("-") and not _is_number(word)), len(words))


def _kind(key: str) -> str | None:
    setting, flag = settings().get(key), foreign_flags().get(key)
    if flag is not None:
        return flag.kind
    if setting is None:
        return None
    return "switch" if setting.is_switch else "list" if setting.is_list else "one"


def _names() -> set[str]:
    return {as_flag(key) for key in (*settings(), *foreign_flags()) if "." not in key}


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _written(given: GivenSetting) -> str:
    if given.key == "model" and given.place == "MODEL":
        return str(given.value)
    if isinstance(given.value, bool):
        return given.place
    return f"{given.place} {' '.join(given.value) if isinstance(given.value, list) else given.value}"


def _environment(launch: Launch, found: dict[str, SettingValue], parts: list[ChangedPart]) -> dict[str, str]:
    """Return the variables that mean the same here; add what others set to `found`, and the reasons to `parts`."""
    kept = {}
    for name, value in launch.environment.items():
        row = next((row for row in environment_variables() if fnmatchcase(name, row.name)), None)
        written = f"{name}={value}"
        if row is None:
            continue  # a variable of the text's own, which its words have already
        if row.sets == "keep":
            kept[name] = value
        elif row.answer == "taken":
            parts.append(_from_variable(row, value, written, found))
        else:
            is_refused = row.answer in ("refused", "left out") and value.lower() not in _OFF
            parts.append(ChangedPart(written, row.reason, "refused" if is_refused else "note"))
    return kept


def _from_variable(row: ForeignVariable, value: str, written: str, found: dict[str, SettingValue]) -> ChangedPart:
    """Add the settings that a variable sets to `found`, and return what it means."""
    name, equals, fixed = row.sets.partition("=")
    if equals and value.lower() in _OFF:
        return ChangedPart(written, "asks for nothing", "note")
    given = GivenSetting(name, yaml.safe_load(fixed) if equals else value, "flag", row.name)
    try:
        if name.startswith(_READ):
            for key, it in READERS[name.removeprefix(_READ)](value, row.name).items():
                _set(found, key, it)
        else:
            notes: list[str] = []
            found.update(settings_of(given, notes))
            if notes:
                return ChangedPart(written, notes[0].partition(": ")[2], "note")
    except ConfigError as error:
        return ChangedPart(written, str(error), "refused")
    return ChangedPart(written, row.reason or f"is {as_flag(name)}", "note")


def _add_defaults(launch: Launch, found: dict[str, SettingValue], parts: list[ChangedPart]) -> None:
    """Write the defaults of the other engine that are others than ours."""
    name = _NAMES[launch.engine]
    if "model" not in found:
        if launch.engine == "vllm":
            _set(found, "model", _DEFAULT_MODEL)
            parts.append(ChangedPart(f"--model {_DEFAULT_MODEL}", f"is {name}'s default", "note"))
        else:
            parts.append(ChangedPart("--model-path", "no model is named", "refused"))
    port = _DEFAULT_PORTS[launch.engine]
    if "port" not in found and "uds" not in found and port != settings()["port"].default:
        _set(found, "port", port)
        parts.append(ChangedPart(f"--port {port}", f"is {name}'s default", "note"))
    given = {name: value.value for name, value in found.items()}
    requests, ranks = given.get("max_running_requests"), given.get("dp_size")
    if (
        launch.engine == "sglang"
        and given.get("enable_dp_attention")
        and isinstance(requests, int)
        and isinstance(ranks, int)
    ):
        _set(found, "max_running_requests", max(requests // ranks, 1))
        parts.append(ChangedPart(f"--max-running-requests {requests}", f"is divided among {ranks} ranks", "note"))
    if launch.engine == "vllm" and "allowed_origins" not in found and found.keys() & _CORS:
        _set(found, "allowed_origins", ("*",))
        parts.append(ChangedPart("--allowed-origins *", f"is {name}'s default", "note"))
    if launch.engine == "vllm" and "host" not in found and "uds" not in found:
        _set(found, "host", "0.0.0.0")
        parts.append(ChangedPart("--host 0.0.0.0", f"is {name}'s default: it listens on all addresses", "note"))


def _leave_container(
    launch: Launch, found: dict[str, SettingValue], environment: dict[str, str], parts: list[ChangedPart]
) -> None:
    """Replace ports and paths inside the container by those outside."""
    container = launch.container
    assert container is not None
    port = found["port"].value if "port" in found else settings()["port"].default
    published = container.ports.get(port) if isinstance(port, int) else None
    if published is not None:
        host, outside_port = published
        _set(found, "host", host)
        if outside_port != port:
            _set(found, "port", outside_port)
            parts.append(
                ChangedPart(f"--port {outside_port}", f"is where port {port} of the container was published", "note")
            )
    for name in _PATHS:
        path = found[name].value if name in found else None
        for inside, outside in container.volumes.items():
            if isinstance(path, str) and (path == inside or path.startswith(f"{inside}/")):
                _set(found, name, outside + path.removeprefix(inside))
                parts.append(
                    ChangedPart(path, f"is {outside + path.removeprefix(inside)} outside the container", "note")
                )
    for inside, outside in container.volumes.items():
        environment.update(
            {
                name: outside + value.removeprefix(inside)
                for name, value in environment.items()
                if value == inside or value.startswith(f"{inside}/")
            }
        )
    visible = environment.pop("NVIDIA_VISIBLE_DEVICES", "all")
    if visible not in ("all", "none", "void", ""):
        environment.setdefault("CUDA_VISIBLE_DEVICES", visible)
        parts.append(ChangedPart(f"NVIDIA_VISIBLE_DEVICES={visible}", "is CUDA_VISIBLE_DEVICES", "note"))
    if container.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = container.devices
        parts.append(ChangedPart(f"--gpus device={container.devices}", "is CUDA_VISIBLE_DEVICES", "note"))
    others = [container.image, *container.others, *(f"-v {out}:{path}" for path, out in container.volumes.items())]
    parts.append(ChangedPart(", ".join(filter(None, others)), "are parts of the container", "note"))


def _set(found: dict[str, SettingValue], name: str, value: object) -> None:
    found[name] = SettingValue(settings()[name], value, "argument", as_flag(name))


def _arguments(found: Mapping[str, SettingValue]) -> Iterator[str]:
    """Yield the words of `jaxserve serve` for settings, the model first."""
    if "model" in found:
        yield str(found["model"].value)
    for name, given in found.items():
        value = given.value
        if name == "model" or value is None:
            continue
        if isinstance(value, bool):
            yield given.setting.flag if value else f"--no-{given.setting.flag[2:]}"
            continue
        yield given.setting.flag
        if isinstance(value, tuple):
            yield from map(str, value)
        else:
            plain = msgspec.to_builtins(value)
            form = json.dumps if isinstance(plain, dict) else "{:g}".format if isinstance(plain, float) else str
            yield form(plain)
