"""Translates the start of another engine's server into a command line of ours, with a reason for what is left out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import msgspec
import yaml

from jaxserve.cli.translation.arguments import ChangedPart, given_settings, written
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
from jaxserve.config.other_engines import ForeignVariable, environment_variables, foreign_flags
from jaxserve.config.settings import Setting, as_flag, settings
from jaxserve.errors import ConfigError

_NAMES: Mapping[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_DEFAULT_PORTS: Mapping[Engine, int] = {"vllm": 8000, "sglang": 30000}
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
    for given in given_settings(launch, config, parts):
        notes: list[str] = []
        said = written(given)
        if (setting := _left_open(given)) is not None:
            found[setting.name] = SettingValue(setting, given.value, "flag", given.place)
            continue
        try:
            for name, value in settings_of(given, notes):
                (same if name.startswith("same ") else found)[name] = value
        except ConfigError as error:
            parts.append(ChangedPart(said, str(error).removeprefix(f"{said} is refused: "), "refused"))
        parts += [ChangedPart(said, note.removeprefix(f"{said}: "), "note") for note in notes]
    implied: list[str] = []
    set_implied_method(found, implied)
    for note in implied:
        said, _, reason = note.partition(": ")
        parts.append(ChangedPart(said, reason, "note"))
    _count_otherwise(launch, found, parts)
    _add_defaults(launch, found, parts, config)
    for name, value in same.items():
        try:
            check_same({**found, name: value})
        except ConfigError as error:
            parts.append(ChangedPart(f"{value.place} {value.value}", str(error), "refused"))
    if launch.container is not None:
        _leave_container(launch, found, environment, config, parts)
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


def _environment(launch: Launch, found: dict[str, SettingValue], parts: list[ChangedPart]) -> dict[str, str]:
    """Return the variables that mean the same here; add what others set to `found`, and the reasons to `parts`."""
    kept = {}
    for name, value in launch.environment.items():
        row = next((row for row in environment_variables() if fnmatchcase(name, row.name)), None)
        said = f"{name}={value}"
        if row is None:
            continue  # a variable of the text's own, which its words have already
        if row.sets == "keep":
            kept[name] = value
        elif row.answer == "taken":
            parts.append(_from_variable(row, value, said, found))
        else:
            is_refused = row.answer in ("refused", "left out") and value.lower() not in _OFF
            parts.append(ChangedPart(said, row.reason, "refused" if is_refused else "note"))
    return kept


def _from_variable(row: ForeignVariable, value: str, said: str, found: dict[str, SettingValue]) -> ChangedPart:
    """Add the settings that a variable sets to `found`, and return what it means."""
    name, equals, fixed = row.sets.partition("=")
    if equals and value.lower() in _OFF:
        return ChangedPart(said, "asks for nothing", "note")
    given = GivenSetting(name, yaml.safe_load(fixed) if equals else value, "flag", row.name)
    try:
        if name.startswith(_READ):
            for key, it in READERS[name.removeprefix(_READ)](value, row.name).items():
                _set(found, key, it)
        else:
            notes: list[str] = []
            found.update(settings_of(given, notes))
            if notes:
                return ChangedPart(said, notes[0].partition(": ")[2], "note")
    except ConfigError as error:
        return ChangedPart(said, str(error), "refused")
    return ChangedPart(said, row.reason or f"is {as_flag(name)}", "note")


def _add_defaults(launch: Launch, found: dict[str, SettingValue], parts: list[ChangedPart], config: list[str]) -> None:
    """Add the other engine's defaults where ours differ, unless a file of settings may set them."""
    name = _NAMES[launch.engine]
    if "model" not in found and not config:
        if launch.engine == "vllm":
            _set(found, "model", _DEFAULT_MODEL)
            parts.append(ChangedPart(f"--model {_DEFAULT_MODEL}", f"is {name}'s default", "note"))
        else:
            parts.append(ChangedPart("--model-path", "no model is named", "refused"))
    port = _DEFAULT_PORTS[launch.engine]
    is_open = "uds" not in found and not config
    if "port" not in found and is_open and port != settings()["port"].default:
        _set(found, "port", port)
        parts.append(ChangedPart(f"--port {port}", f"is {name}'s default", "note"))
    if launch.engine == "vllm" and "allowed_origins" not in found and found.keys() & _CORS:
        _set(found, "allowed_origins", ("*",))
        parts.append(ChangedPart("--allowed-origins *", f"is {name}'s default", "note"))
    if launch.engine == "vllm" and "host" not in found and is_open:
        _set(found, "host", "0.0.0.0")
        parts.append(ChangedPart("--host 0.0.0.0", f"is {name}'s default: it listens on all addresses", "note"))


def _count_otherwise(launch: Launch, found: dict[str, SettingValue], parts: list[ChangedPart]) -> None:
    """Change what the other engine counts in another unit, or leaves without effect."""
    given = {name: value.value for name, value in found.items()}
    ranks, shards = given.get("dp_size"), given.get("tp_size")
    requests, host_size = given.get("max_running_requests"), given.get("hicache_size")
    if launch.engine == "vllm" and given.get("kv_cache_memory_bytes") and "mem_fraction_static" in found:
        other = found.pop("mem_fraction_static")
        parts.append(
            ChangedPart(f"{other.place} {other.value}", "has no effect beside the bytes of the KV cache", "note")
        )
    if launch.engine == "vllm":
        return
    if given.get("enable_dp_attention") and isinstance(requests, int) and isinstance(ranks, int):
        _set(found, "max_running_requests", max(requests // ranks, 1))
        parts.append(ChangedPart(f"--max-running-requests {requests}", f"is divided among {ranks} ranks", "note"))
    if isinstance(host_size, float) and isinstance(shards, int) and shards > 1:
        _set(found, "hicache_size", host_size * shards)
        parts.append(ChangedPart(f"--hicache-size {host_size:g}", f"is for each of {shards} devices", "note"))


def _leave_container(
    launch: Launch,
    found: dict[str, SettingValue],
    environment: dict[str, str],
    config: list[str],
    parts: list[ChangedPart],
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
        if isinstance(path, str) and (outside := _outside(path, container.volumes)) != path:
            _set(found, name, outside)
            parts.append(ChangedPart(path, f"is {outside} outside the container", "note"))
    environment.update({name: _outside(value, container.volumes) for name, value in environment.items()})
    config[1:] = [_outside(path, container.volumes) for path in config[1:]]
    visible = environment.pop("NVIDIA_VISIBLE_DEVICES", "all")
    if visible not in ("all", "none", "void", ""):
        environment.setdefault("CUDA_VISIBLE_DEVICES", visible)
        parts.append(ChangedPart(f"NVIDIA_VISIBLE_DEVICES={visible}", "is CUDA_VISIBLE_DEVICES", "note"))
    if container.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = container.devices
        parts.append(ChangedPart(f"--gpus device={container.devices}", "is CUDA_VISIBLE_DEVICES", "note"))
    others = [container.image, *container.others, *(f"-v {out}:{path}" for path, out in container.volumes.items())]
    parts.append(ChangedPart(", ".join(filter(None, others)), "are parts of the container", "note"))


def _outside(path: str, volumes: Mapping[str, str]) -> str:
    """Return where a path of a container is outside it, by its innermost volume, or the path itself."""
    inside = max((each for each in volumes if path == each or path.startswith(f"{each}/")), key=len, default=None)
    return path if inside is None else volumes[inside] + path.removeprefix(inside)


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
