"""Finds the servers of vLLM and SGLang that a text starts, and their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from jaxserve.cli.translation.containers import Container, from_dockerfile, from_run, from_yaml
from jaxserve.cli.translation.shell import Command, commands, filled
from jaxserve.errors import ConfigError

Engine = Literal["vllm", "sglang"]

_NAMES: Mapping[str, Engine] = {"vllm": "vllm", "sglang": "sglang"}
_MODULES: Mapping[str, Engine] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang",
    "sglang_router.launch_server": "sglang",
}
# Of quotations in quotations, such as that of `bash -c` in that of `ssh`.
_MAX_DEPTH = 3
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*[\"']?(\w+)[\"']?[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
_FILES: Mapping[str, Engine] = {"launch_server.py": "sglang", "api_server.py": "vllm"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A server that is started: by which engine, with which arguments, and in which container, if in one.

    `before` are the words in front, such as `numactl` and its options.
    """

    engine: Engine
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    before: tuple[str, ...] = ()
    container: Container | None = None


def launches(text: str) -> list[Launch]:
    """Return the servers that a shell text, a Dockerfile, a compose file or a manifest starts. Raises `ConfigError`."""
    file = from_dockerfile(text)
    containers = from_yaml(text) if file is None else [file]
    found = [launch for container in containers for launch in _in_container(container)]
    found = found or [launch for command in commands(text) for launch in _launches(command)]
    return found or _quoted(text, {}, _MAX_DEPTH)


def _quoted(text: str, environment: Mapping[str, str], depth: int) -> list[Launch]:
    """Return the servers that words in quotes start, such as the command of `ssh`, or a manifest in a here-document."""
    inner: list[tuple[str, Mapping[str, str]]] = [(match[2], {}) for match in _HERE_DOCUMENT.finditer(text)]
    inner += [
        (word, command.environment)
        for command in commands(text, environment)
        if command.words[0] not in ("echo", "printf")
        for word in command.words
        if " " in word
    ]
    found: list[Launch] = []
    for each, variables in inner:
        with contextlib.suppress(ConfigError):  # a sentence, not a command
            some = [launch for container in from_yaml(each) for launch in _in_container(container)]
            some = some or [launch for command in commands(each, variables) for launch in _launches(command)]
            some = some or (_quoted(each, variables, depth - 1) if depth else [])
            found += [launch for launch in some if launch not in found]
    return found


def _launches(command: Command) -> Iterator[Launch]:
    container = from_run(command.words, command.environment)
    if container is not None:
        yield from _in_container(container)
        return
    found = _find(command.words)
    if found is not None:
        engine, first, end = found
        yield Launch(engine, command.words[end:], command.environment, command.words[:first])


def _find(words: Sequence[str]) -> tuple[Engine, int, int] | None:
    """Return the engine that words start, the index of its first word and that of its first argument."""
    for index, word in enumerate(words):
        name, following = PurePosixPath(word).name, list(words[index + 1 : index + 2])
        if following == ["serve"] and name in _NAMES:
            return _NAMES[name], index, index + 2
        if word == "-m" and following and following[0] in _MODULES:
            end = index + 3 if following[0] == "vllm.entrypoints.cli.main" else index + 2
            return _MODULES[following[0]], max(index - 1, 0), end
        if name in _FILES and index and PurePosixPath(words[index - 1]).name.startswith("python"):
            return _FILES[name], index - 1, index + 1
    return None


def _in_container(container: Container) -> Iterator[Launch]:
    words = tuple(filled(word, container.environment) for word in (*(container.entrypoint or ()), *container.words))
    shell = words[:1] and PurePosixPath(words[0]).name in ("bash", "sh") and len(words) > 2
    inner = list(commands(words[-1], container.environment)) if shell else [Command(words, container.environment)]
    for command in inner:
        found = _find(command.words)
        if found is not None:
            engine, first, end = found
            yield Launch(engine, command.words[end:], command.environment, command.words[:first], container)
        elif container.entrypoint is None and "vllm" in container.image and not shell:
            # Its image runs `vllm serve` with the words as arguments.
            yield Launch("vllm", command.words, command.environment, (), container)
