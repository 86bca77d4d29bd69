"""A server that streams at known times and records when it sent each token; it can also fail on request.

It uses raw sockets, so that its recorded times are exact. The body of each request says how to answer it (`Behaviour`).
`GET /seen` returns the requests; `GET /sent` returns the times by request id, of the clock `time.perf_counter()`, which
all processes share.

    python -m tests.bench.known_server      # prints its port
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

ROOT = Path(__file__).parents[2]
TEXTS = (" one", " two", " three", " four", " five")


class Behaviour(msgspec.Struct):
    """How to answer a request: `itl` and `ttft` are in seconds; a fault comes after `good` tokens."""

    ttft: float = 0.0
    itl: float = 0.0
    tokens_a_chunk: int = 1
    fault: str = ""
    good: int = 2
    usage: bool = True
    prompt_tokens: int = 7
    framing: str = "chunked"
    newline: str = "\n"
    pieces: int = 0


class RequestBody(msgspec.Struct):
    max_tokens: int
    known: Behaviour = msgspec.field(default_factory=Behaviour)


class KnownServer:
    """The server, with its received requests and its sending times by request id."""

    def __init__(self) -> None:
        self.sent: dict[str, dict[str, Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.routes: list[str] = []
        self.open = self.most_open = self.connections = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen and return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request and return whether the connection stays open."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        head = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        body = await reader.readexactly(int(head.get("content-length", 0)))
        arrived = time.perf_counter()
        route = first.split(" ")[1]
        self.routes.append(route)
        if route.endswith("_profile"):
            return self._json(writer, {})
        if route == "/seen":
            return self._json(writer, {"routes": self.routes, "heads": self.heads, "bodies": self.bodies})
        if route == "/v1/models":
            short = {"id": "short", "max_model_len": 20}
            return self._json(writer, {"data": [{"id": "known", "max_model_len": 4000}, short, {"id": "silent"}]})
        if route == "/sent":
            return self._json(writer, self.sent)
        if route == "/metrics":
            return self._text(writer, self._metrics(len(self.bodies)))
        if not route.endswith("completions"):
            return self._json(writer, {"error": {"message": f"no route {route}"}}, 404)
        self.heads.append(head)
        self.bodies.append(json.loads(body))
        asked = msgspec.json.decode(body, type=RequestBody)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            times: list[float] = []
            self.sent[head["x-request-id"]] = {"arrived": arrived, "tokens": times}
            return await self._stream(reader, writer, asked, route, times)
        finally:
            self.open -= 1

    async def _stream(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asked: RequestBody,
        route: str,
        times: list[float],
    ) -> bool:
        how = asked.known
        if how.fault == "http":
            return self._json(writer, {"error": {"message": "too much", "type": "overloaded"}}, 503)
        if how.fault == "plain":
            return self._json(writer, {"choices": [{"text": "all at once"}]})
        if how.fault == "not-http":
            writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            return False
        self._head(writer, how)
        await self._until(time.perf_counter() + how.ttft)
        due, left, chat = time.perf_counter(), asked.max_tokens, "chat" in route
        if chat:
            self._event(writer, how, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        while left > 0:
            if how.fault and asked.max_tokens - left >= how.good:
                return await self._fail(reader, writer, how)
            count = min(how.tokens_a_chunk, left)
            text = "".join(TEXTS[(asked.max_tokens - left + i) % len(TEXTS)] for i in range(count))
            left -= count
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = None if left else "length"
            times.append(time.perf_counter())
            self._event(writer, how, {"choices": [choice]})
            await writer.drain()
            due += how.itl * count
            if left:
                await self._until(due)
        if how.usage:
            self._event(
                writer, how,
                {"choices": [], "usage": {"prompt_tokens": how.prompt_tokens, "completion_tokens": asked.max_tokens}},
            )  # fmt: skip
        if how.fault != "no-done":
            self._event(writer, how, None)
        if how.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return how.framing == "chunked" and how.fault != "hang-up"

    async def _fail(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: Behaviour) -> bool:
        match how.fault:
            case "error":
                self._event(writer, how, {"error": {"message": "out of memory", "code": 500}})
                self._event(writer, how, None)
                writer.write(b"0\r\n\r\n")
                return True
            case "garbage":
                self._write(writer, how, b"data: {no json\n\n")
                writer.write(b"0\r\n\r\n")
                return True
            case "ends":
                writer.write(b"0\r\n\r\n")
                return True
            case "stall":
                await reader.read()
        return False

    async def _until(self, due: float) -> None:
        wait = due - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)

    def _head(self, writer: asyncio.StreamWriter, how: Behaviour) -> None:
        framing = "Transfer-Encoding: chunked" if how.framing == "chunked" else "Connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode())

    def _event(self, writer: asyncio.StreamWriter, how: Behaviour, value: dict[str, Any] | None) -> None:
        data = "[DONE]" if value is None else json.dumps(value)
        self._write(writer, how, f"data: {data}{how.newline}{how.newline}".encode())

    def _write(self, writer: asyncio.StreamWriter, how: Behaviour, data: bytes) -> None:
        size = how.pieces or len(data)
        for piece in (data[i : i + size] for i in range(0, len(data), size)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if how.framing == "chunked" else piece)

    def _json(self, writer: asyncio.StreamWriter, value: dict[str, Any], status: int = 200) -> bool:
        return self._text(writer, json.dumps(value), status)

    def _text(self, writer: asyncio.StreamWriter, text: str, status: int = 200) -> bool:
        body = text.encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return True

    def _metrics(self, drafts: int) -> str:
        """Return vLLM's metrics after one draft per request, of 3 tokens, of which 1 was accepted."""
        counts = {"drafts": drafts, "draft_tokens": 3 * drafts, "accepted_tokens": drafts}
        lines = [f"vllm:spec_decode_num_{name}_total {count}.0" for name, count in counts.items()]
        positions = enumerate((drafts, 0, 0))
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return "\n".join([*lines, *(f'{name}{{position="{i}"}} {count}.0' for i, count in positions), ""])


@contextlib.contextmanager
def in_a_process() -> Iterator[int]:
    """Run a server in another process; yield its port."""
    command = [sys.executable, "-m", "tests.bench.known_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


async def main() -> None:
    """Serve until killed."""
    print(await KnownServer().start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
