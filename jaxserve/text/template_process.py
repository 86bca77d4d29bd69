"""Renders chat templates in a process of their own, which is bounded in time and memory.

A template is a program that comes with a model: it can loop for ever or make a text of any size, and no thread can be
stopped. The child bounds itself: a timer of the kernel ends it where a prompt takes too long, even inside one call of
C, and past the limit of its memory it gets a `MemoryError`. `TemplateProcess` starts one again when it is needed.

Both ends are here: what the child is told and answers is seen nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jaxserve import host
from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat_template import ChatTemplate, Message

CPU_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 25

# Of the clock, for a child that gets no processor or is stopped.
_PATIENCE = 60.0
# A conversation of more bytes gets a process of its own, one at a time: others don't wait for it, and its memory goes
# with the process.
_LARGE = 1 << 18
_HEAD = struct.Struct("<Q?")
_MESSAGE_CHARACTERS = 2000


class TemplateProcess:
    """The chat template of one served model. Belongs to one event loop; to be closed there."""

    def __init__(
        self, source_text: str | None, special_tokens: Mapping[str, str], *, cpu_seconds: float = CPU_SECONDS
    ) -> None:
        self._template = json.dumps([source_text, dict(special_tokens), cpu_seconds]).encode()
        self._cpu_seconds = cpu_seconds
        self._standing: Process | None = None
        self._small, self._large = asyncio.Lock(), asyncio.Lock()

    async def start(self) -> None:
        """Starts the child, which the first `render` would otherwise wait for."""
        async with self._small:
            self._standing = await self._spawn()

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """As `ChatTemplate.render`, whose arguments it takes; past a limit it raises `InvalidRequestError` too."""
        try:
            request = json.dumps([messages, arguments]).encode()
        except (RecursionError, ValueError) as error:
            raise InvalidRequestError(
                f"chat_template_kwargs or documents can't be given to the chat template: {error}",
                param="chat_template_kwargs",
            ) from error
        asking = self._ask_new(request) if len(request) > _LARGE else self._ask_standing(request)
        # Where the client hangs up the answer is read all the same: the next one must find the pipe empty.
        failed, answer = await asyncio.shield(asyncio.ensure_future(asking))
        if not failed:
            return answer.decode(errors="surrogatepass")
        words, param = json.loads(answer)
        raise InvalidRequestError(words, param=param)

    async def close(self) -> None:
        """Ends the child."""
        async with self._small:
            if self._standing is not None:
                await _end(self._standing)
                self._standing = None

    async def _ask_standing(self, request: bytes) -> tuple[bool, bytes]:
        async with self._small:
            if self._standing is None or self._standing.returncode is not None:
                self._standing = await self._spawn()
            answer = await _ask(self._standing, request)
            if answer is not None:
                return answer
            process, self._standing = self._standing, None
            return await self._last_words(process)

    async def _ask_new(self, request: bytes) -> tuple[bool, bytes]:
        async with self._large:
            process = await self._spawn()
            answer = await _ask(process, request)
            if answer is None:
                return await self._last_words(process)
            await _end(process)
            return answer

    async def _last_words(self, process: Process) -> tuple[bool, bytes]:
        code = await _end(process)
        why = f"its process ended with code {code}"
        if code == -signal.SIGPROF:
            why = f"it took more than {self._cpu_seconds:g} s: it may loop too often"
        return True, _failure(f"the chat template failed on these messages: {why}", "messages")

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "jaxserve.text.template_process"),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is the server's to handle
        )
        assert process.stdin is not None
        _write(process.stdin, False, self._template)
        return process


async def _ask(process: Process, request: bytes) -> tuple[bool, bytes] | None:
    """The child's answer; None if it ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        _write(process.stdin, False, request)
        await process.stdin.drain()
        async with asyncio.timeout(_PATIENCE):
            size, failed = _HEAD.unpack(await process.stdout.readexactly(_HEAD.size))
            return failed, await process.stdout.readexactly(size)
    except TimeoutError:
        process.kill()
        return None
    except (OSError, asyncio.IncompleteReadError):
        return None


async def _end(process: Process) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return await process.wait()


def _failure(words: str, param: str | None) -> bytes:
    return json.dumps([words[:_MESSAGE_CHARACTERS], param]).encode()


def _write(pipe: asyncio.StreamWriter | IO[bytes], failed: bool, content: bytes) -> None:
    pipe.write(_HEAD.pack(len(content), failed))
    pipe.write(content)


def _read(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(_HEAD.size)
    return pipe.read(_HEAD.unpack(head)[0]) if len(head) == _HEAD.size else None


def _render(template: ChatTemplate, request: bytes) -> tuple[bool, bytes]:
    try:
        messages, arguments = json.loads(request)
        text = template.render(messages, **arguments)
        if len(text) <= MAX_CHARACTERS:
            return False, text.encode(errors="surrogatepass")
        words = f"it wrote {len(text)} characters, at most {MAX_CHARACTERS} are allowed"
    except InvalidRequestError as error:
        return True, _failure(str(error), error.param)
    except RecursionError:
        words = "they are nested too deep"
    except MemoryError:
        words = f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
    return True, _failure(f"the chat template failed on these messages: {words}", "messages")


def _main() -> None:
    """The child: reads a template, then conversations, until nothing more comes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager's word to all: the server still drains
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    host.limit_memory(MEMORY_BYTES)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    first = _read(requests)
    if first is None:
        return
    source_text, special_tokens, cpu_seconds = json.loads(first)
    template = ChatTemplate(source_text, special_tokens)
    while (request := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        failed, answer = _render(template, request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, failed, answer)
        answers.flush()


if __name__ == "__main__":
    _main()
