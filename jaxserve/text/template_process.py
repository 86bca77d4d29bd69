"""Renders chat templates in a child process with limits on time and memory.

A template is a program that comes with a model: it can loop forever or produce a text of any size, and Python can't
stop a thread. The child limits itself: a kernel timer ends it when a prompt takes too long, even inside one C call, and
beyond its memory limit it gets a `MemoryError`. `TemplateProcess` starts a new child when the old one has ended.

Both the parent's and the child's side of their messages are in this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve import host
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.framing import FrameFormat
from jaxserve.text.answers.formats import DEFAULT_CALLS
from jaxserve.text.chat_template import ChatTemplate, ContentFormat
from jaxserve.text.prompt_forms import Message

CPU_SECONDS = 5.0
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 25

# Seconds of wall time, for a child that gets no processor time or is stopped.
_ANSWER_TIMEOUT = 60.0
# A conversation of more bytes gets a child of its own, one at a time: others don't wait for it, and ending the child
# frees its memory.
_LARGE_BYTES = 1 << 18
# Kind 0 is a request or a prompt, kind 1 an error.
_FRAMES = FrameFormat(num_kinds=2)
_MESSAGE_CHARACTERS = 2000
# Parsed templates of requests that the child keeps
_KEPT_TEMPLATES = 8


class TemplateProcess:
    """The chat template of one served model. Belongs to one event loop and must be closed in it."""

    def __init__(
        self,
        source_text: str | None,
        special_tokens: Mapping[str, str],
        calls: str = DEFAULT_CALLS.name,
        *,
        content_format: ContentFormat = "auto",
        cpu_seconds: float = CPU_SECONDS,
    ) -> None:
        self._template = json.dumps([source_text, dict(special_tokens), calls, content_format, cpu_seconds]).encode()
        self._cpu_seconds = cpu_seconds
        self._child: Process | None = None
        self._child_lock, self._large_lock = asyncio.Lock(), asyncio.Lock()
        self._make_other = functools.partial(
            TemplateProcess, None, special_tokens, calls, content_format=content_format, cpu_seconds=cpu_seconds
        )
        self._of_requests: TemplateProcess | None = None

    async def start(self) -> None:
        """Start the child, so that the first `render` need not wait for it."""
        async with self._child_lock:
            self._child = await self._spawn()

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Render as `ChatTemplate.render` does. Raises `InvalidRequestError` also when a limit is exceeded."""
        return await self.render_with(None, messages, arguments)

    async def render_with(self, source: str | None, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """Render with the template `source`, or with this one. Raises `InvalidRequestError` if that isn't valid."""
        try:
            request = json.dumps([source, messages, arguments]).encode()
        except (RecursionError, ValueError) as error:
            raise InvalidRequestError(
                f"chat_template_kwargs or documents can't be passed to the chat template: {error}",
                param="chat_template_kwargs",
            ) from error
        asking = self._ask_new_child(request) if len(request) > _LARGE_BYTES else self._ask_child(request)
        # When the client disconnects, the answer is still read: the next request must find the pipe empty.
        failed, answer = await asyncio.shield(asyncio.ensure_future(asking))
        if not failed:
            return answer.decode(errors="surrogatepass")
        message, param = json.loads(answer)
        raise InvalidRequestError(message, param=param)

    async def turn_end(self, source: str | None = None) -> str:
        """Return what `ChatTemplate.turn_end` does; "" if a limit is exceeded or `source` isn't valid."""
        failed, answer = await asyncio.shield(
            asyncio.ensure_future(self._ask_child(json.dumps([source, None, {}]).encode()))
        )
        return "" if failed else answer.decode(errors="surrogatepass")

    def with_source(self, source: str) -> RequestTemplate:
        """Return a renderer of another template. All such share a second child, so that no rendering of this template
        waits for them."""
        if self._of_requests is None:
            self._of_requests = self._make_other()
        return RequestTemplate(self._of_requests, source)

    async def close(self) -> None:
        """End the child."""
        if self._of_requests is not None:
            await self._of_requests.close()
        async with self._child_lock:
            if self._child is not None:
                await _end(self._child)
                self._child = None

    async def _ask_child(self, request: bytes) -> tuple[bool, bytes]:
        async with self._child_lock:
            if self._child is None or self._child.returncode is not None:
                self._child = await self._spawn()
            answer = await _ask(self._child, request)
            if answer is not None:
                return answer
            process, self._child = self._child, None
            return await self._exit_failure(process)

    async def _ask_new_child(self, request: bytes) -> tuple[bool, bytes]:
        async with self._large_lock:
            process = await self._spawn()
            answer = await _ask(process, request)
            if answer is None:
                return await self._exit_failure(process)
            await _end(process)
            return answer

    async def _exit_failure(self, process: Process) -> tuple[bool, bytes]:
        code = await _end(process)
        reason = f"its process ended with code {code}"
        if code == -signal.SIGPROF:
            reason = f"it took more than {self._cpu_seconds:g} s: it may loop too often"
        return True, _failure(f"the chat template failed on these messages: {reason}", "messages")

    async def _spawn(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "jaxserve.text.template_process",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # the server handles Ctrl-C in a terminal
        )
        assert process.stdin is not None
        process.stdin.write(_FRAMES.encode(self._template))
        return process


class RequestTemplate:
    """The template `source`, which renders in a process of others."""

    def __init__(self, process: TemplateProcess, source: str) -> None:
        self._process, self._source = process, source

    async def render(self, messages: Sequence[Message], **arguments: Any) -> str:
        """Render as `TemplateProcess.render` does."""
        return await self._process.render_with(self._source, messages, arguments)

    async def turn_end(self) -> str:
        """Return what `TemplateProcess.turn_end` does."""
        return await self._process.turn_end(self._source)

    def with_source(self, source: str) -> RequestTemplate:
        """Return a renderer of another template in the same process."""
        return RequestTemplate(self._process, source)

    async def close(self) -> None:
        """Free nothing: the process has other templates."""


async def _ask(process: Process, request: bytes) -> tuple[bool, bytes] | None:
    """Return the child's answer, or None if it ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_FRAMES.encode(request))
        await process.stdin.drain()
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            failed, answer = await _FRAMES.read_from(process.stdout)
            return bool(failed), answer
    except TimeoutError:
        process.kill()
        return None
    except (OSError, EOFError):
        return None


async def _end(process: Process) -> int:
    assert process.stdin is not None
    process.stdin.close()
    return await process.wait()


def _failure(message: str, param: str | None) -> bytes:
    return json.dumps([message[:_MESSAGE_CHARACTERS], param]).encode()


def _render(own: ChatTemplate, parse: Callable[[str], ChatTemplate], request: bytes) -> tuple[bool, bytes]:
    try:
        source, messages, arguments = json.loads(request)
        template = own if source is None else parse(source)
        text = template.turn_end() if messages is None else template.render(messages, **arguments)
        if len(text) <= MAX_CHARACTERS:
            return False, text.encode(errors="surrogatepass")
        problem = f"it wrote {len(text)} characters, at most {MAX_CHARACTERS} are allowed"
    except InvalidRequestError as error:
        return True, _failure(str(error), error.param)
    except ConfigError as error:
        return True, _failure(str(error), "chat_template")
    except RecursionError:
        problem = "they are nested too deep"
    except MemoryError:
        problem = f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
    return True, _failure(f"the chat template failed on these messages: {problem}", "messages")


def _main() -> None:
    """Run the child: read a template, then render conversations until the input ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # service managers signal every process; the server still drains
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    host.limit_memory(MEMORY_BYTES)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with contextlib.suppress(EOFError):
        _, first = _FRAMES.read(requests.read)
        source_text, special_tokens, calls, content_format, cpu_seconds = json.loads(first)
        template = ChatTemplate(source_text, special_tokens, calls, content_format)
        parse = functools.lru_cache(_KEPT_TEMPLATES)(
            lambda source: ChatTemplate(source, special_tokens, calls, content_format)
        )
        while True:
            _, request = _FRAMES.read(requests.read)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            failed, answer = _render(template, parse, request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(_FRAMES.encode(answer, failed))
            answers.flush()


if __name__ == "__main__":
    _main()
