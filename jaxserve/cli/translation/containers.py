"""Reads how servers are started in containers: `docker run`, compose files, Kubernetes manifests."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from jaxserve.errors import ConfigError

# The options of `docker run` that have no value; all others have one.
_SWITCHES = frozenset(
    {
        "--rm", "-it", "-ti", "-i", "-t", "-d", "-itd", "-dit", "-td", "-dt", "--interactive", "--tty", "--detach",
        "--privileged", "--init", "--read-only", "--oom-kill-disable", "--no-healthcheck", "--publish-all", "-P",
    }
)  # fmt: skip
_DEFAULT = re.compile(r"\$\{\w+:?-([^{}]*)\}")
_VARIABLE = re.compile(r"\$\(([A-Z_][A-Z0-9_]*)\)")
_COLON = re.compile(r":(?![^{]*\})")
_STARTS = re.compile(r"^[ \t]*(ENTRYPOINT|CMD)[ \t]+(\[.*\])[ \t]*$", re.MULTILINE)
_PROGRAMS = frozenset({"docker", "podman", "nerdctl"})


@dataclasses.dataclass(frozen=True)
class Container:
    """A container as it is started. `ports` maps each published port to the address and port outside, and `volumes`
    each mounted path to the one outside.

    `entrypoint` is None if the image's own is used; `others` are the options that only containers have.
    """

    image: str
    entrypoint: tuple[str, ...] | None
    words: tuple[str, ...]
    environment: Mapping[str, str]
    ports: Mapping[int, tuple[str, int]] = dataclasses.field(default_factory=dict)
    volumes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: str | None = None
    others: tuple[str, ...] = ()


def from_run(words: Sequence[str], environment: Mapping[str, str]) -> Container | None:
    """Return the container of a `docker run` command, or None if it is none."""
    programs = [index for index, word in enumerate(words) if PurePosixPath(word).name in _PROGRAMS]
    if not programs or "run" not in words[programs[0] + 1 :]:
        return None
    rest = list(words[words.index("run", programs[0]) + 1 :])
    options: dict[str, list[str]] = {}
    others: list[str] = []
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not equals and name not in _SWITCHES and rest:
            value = rest.pop(0)
        name = {"-e": "--env", "-v": "--volume", "-p": "--publish"}.get(name, name)
        options.setdefault(name, []).append(value)
        if name not in ("--env", "--volume", "--publish", "--gpus", "--entrypoint"):
            others.append(f"{word} {value}" if value and not equals else word)
    if not rest:
        return None
    gpus = options.get("--gpus", [""])[-1].strip("\"'")
    return Container(
        image=rest[0],
        entrypoint=tuple(options["--entrypoint"][-1].split()) if "--entrypoint" in options else None,
        words=tuple(rest[1:]),
        environment={**environment, **_environment(options.get("--env", []))},
        ports=_ports(options.get("--publish", [])),
        volumes=_volumes(options.get("--volume", [])),
        devices=gpus.removeprefix("device=") if gpus.startswith("device=") else None,
        others=tuple(others),
    )


def from_yaml(text: str) -> list[Container]:
    """Return the containers of compose files and manifests; none if the text is no YAML of such a form.

    A variable with a default has it.
    """
    try:
        documents = list(yaml.safe_load_all(_DEFAULT.sub(r"\1", text)))
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    seen: set[int] = set()
    return [container for document in documents for container in _containers(document, seen)]


def from_dockerfile(text: str) -> Container | None:
    """Return the container that a Dockerfile starts with a list of words, or None if it is none."""
    try:
        found = {name: tuple(map(str, json.loads(words))) for name, words in _STARTS.findall(text)}
    except ValueError:
        return None
    if not found:
        return None
    return Container("", found.get("ENTRYPOINT", ()), found.get("CMD", ()), {})


def _containers(node: Any, seen: set[int]) -> Iterator[Container]:
    """Yield the containers in a node, once; aliases of YAML make it stand in many places."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, list):
        for each in node:
            yield from _containers(each, seen)
    elif isinstance(node, dict):
        if "image" in node or "command" in node:
            yield _container(node)
        else:
            for each in node.values():
                yield from _containers(each, seen)


def _container(node: Mapping[str, Any]) -> Container:
    # Kubernetes' command is an entrypoint, compose's are its arguments.
    command, arguments = _words(node.get("command")), _words(node.get("args"))
    entrypoint = _words(node.get("entrypoint")) if "entrypoint" in node else None
    if arguments and entrypoint is None and command:
        entrypoint, command = command, ()
    entrypoint = None if entrypoint is None else tuple(map(_as_in_shell, entrypoint))
    given = node.get("environment", node.get("env")) or ()
    pairs = [f"{name}={value}" for name, value in given.items()] if isinstance(given, dict) else list(given)
    known = {"image", "command", "args", "entrypoint", "environment", "env", "ports", "volumes"}
    return Container(
        image=str(node.get("image", "")),
        entrypoint=entrypoint,
        words=tuple(map(_as_in_shell, (*command, *arguments))),
        environment=_environment(pairs),
        ports=_ports(node.get("ports") or ()),
        volumes=_volumes(node.get("volumes") or ()),
        others=tuple(str(key) for key in node if key not in known),
    )


def _words(value: Any) -> tuple[str, ...]:
    """Return a command as words. Raises `ConfigError` if a quotation in it doesn't end."""
    if not isinstance(value, str):
        return tuple(map(str, value or ()))
    try:
        return tuple(shlex.split(value.replace("\\\n", " "), comments=True))
    except ValueError as error:
        raise ConfigError(f"the command {value!r} can't be read: {str(error).lower()}") from None


def _as_in_shell(word: str) -> str:
    """Return a word with variables as a shell writes them, to which Kubernetes' `$(NAME)` would be a command."""
    return _VARIABLE.sub(r"${\1}", word)


def _environment(pairs: Sequence[Any]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        if isinstance(pair, dict):
            name, value = str(pair.get("name")), str(pair.get("value", f"${pair.get('name')}"))
        else:
            name, equals, value = str(pair).partition("=")
            value = value if equals else f"${name}"
        found[name] = value
    return found


def _ports(published: Sequence[Any]) -> dict[int, tuple[str, int]]:
    found = {}
    for text in published:
        parts = str(text).removesuffix("/tcp").split(":")
        if len(parts) > 1 and parts[-1].isdigit() and parts[-2].isdigit():
            found[int(parts[-1])] = (parts[-3] if len(parts) > 2 else "0.0.0.0", int(parts[-2]))
    return found


def _volumes(mounted: Sequence[Any]) -> dict[str, str]:
    parts = [_COLON.split(text) for text in mounted if isinstance(text, str)]
    return {part[1].rstrip("/"): part[0].rstrip("/") for part in parts if len(part) > 1}
