"""Finds the servers of vLLM and SGLang that a text starts, and their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from jaxserve.cli.translation.containers import Container, from_dockerfile, from_run, from_yaml
from jaxserve.cli.translation.shell import Command, commands, filled

Engine = Literal["vllm", "sglang"]

_NAMES: Mapping[str, Engine] = {"vllm": "vllm", "sglang": "sglang"}
_MODULES: Mapping[str, Engine] = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang",
    "sglang_router.launch_server": "sglang",
}
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
    return found or [launch for command in commands(text) for launch in _launches(command)]


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
