"""Sends one request and fills in its record while the stream arrives."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from jaxserve.bench.datasets.prompts import DatasetPrompt
from jaxserve.bench.load.backends import RequestWriter
from jaxserve.bench.load.http_client import BrokenResponseError, ConnectionPool
from jaxserve.bench.load.records import RequestRecord
from jaxserve.bench.load.sse import EventSplitter
from jaxserve.bench.load.stream_events import DONE, decode_stream_chunk

_MAX_ERROR_BYTES = 4096


class StreamRecorder:
    """Writes an OpenAI stream into a record."""

    __slots__ = ("_answer", "_events", "_failure", "_other", "_record", "_texts", "ended", "usage_seen")

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._events = EventSplitter()
        self._texts: list[str] = []
        self._failure: str | None = None
        self._other = bytearray()
        self.ended = False
        self.usage_seen = False

    def begin(self, status: int) -> None:
        """Record the status; the head has arrived."""
        self._record.http_status = status

    def received(self, body: bytes, when: float) -> None:
        """Read a piece of the body."""
        if len(self._other) < _MAX_ERROR_BYTES and (self._record.http_status != 200 or not self._record.token_times):
            self._other += body[:_MAX_ERROR_BYTES]
        if self._record.http_status == 200:
            for event in self._events.feed(body):
                self._read(event, when)

    def finish(self) -> None:
        """Decide how the request ended; the body is complete."""
        record = self._record
        if record.http_status == 200:
            for event in self._events.finish():
                self._read(event, record.end)
        record.text = "".join(self._texts)
        if record.http_status != 200:
            self._failure = f"HTTP {record.http_status}: {error_message(bytes(self._other))}"
        elif self._failure is None and not self.ended:
            if record.token_times:
                self._failure = "the stream ended without a finish_reason or [DONE]"
            else:
                self._failure = (
                    f"the response is not a stream of tokens: {error_message(bytes(self._other)) or 'it is empty'}"
                )
        elif self._failure is None and not record.token_times:
            # A single token without text, such as the end of sequence, arrives together with the finish reason.
            if record.end and record.output_tokens:
                record.token_times.append(record.end)
            else:
                self._failure = "no token arrived"
        record.status, record.error = ("ok", "") if self._failure is None else ("failed", self._failure)

    def _read(self, event: bytes, when: float) -> None:
        if event == DONE:
            self.ended = True
            return
        try:
            chunk = decode_stream_chunk(event)
        except msgspec.DecodeError as error:
            self._failure = self._failure or f"an event of the stream can't be read: {error}: {error_message(event)}"
            return
        fault = chunk.error_text()
        if fault is not None:
            self._failure = self._failure or f"error in the stream: {fault}"
            return
        record = self._record
        is_token = False
        for choice in chunk.choices:
            is_token |= choice.is_token()
            if choice.finish_reason is not None:
                record.finish_reason, self.ended = choice.finish_reason, True
            record.end = when
            if text := choice.new_text():
                self._texts.append(text)
        if is_token:
            record.token_times.append(when)
        if chunk.usage is not None:
            if chunk.usage.completion_tokens is not None:
                record.output_tokens, self.usage_seen = chunk.usage.completion_tokens, True
            if chunk.usage.prompt_tokens is not None:
                record.prompt_tokens = chunk.usage.prompt_tokens


class LoadClient:
    """Sends prompts to one server. A request may take `timeout` seconds in total and be silent for `stall` seconds."""

    def __init__(self, pool: ConnectionPool, writer: RequestWriter, *, timeout: float, stall: float) -> None:
        self._pool, self._writer = pool, writer
        self._timeout, self._stall = timeout, stall

    async def send(
        self, record: RequestRecord, prompt: DatasetPrompt, history: list[dict[str, Any]], seed: int | None
    ) -> None:
        """Send the prompt and fill in the record; a cancelled request is left "unfinished"."""
        message = self._writer.write(prompt.content, history, prompt.output_tokens, record.id, seed)
        reader = StreamRecorder(record)
        record.start = time.perf_counter()
        try:
            await self._pool.exchange(message, reader, deadline=record.start + self._timeout, stall=self._stall)
            reader.finish()
        except BrokenResponseError as error:
            reader.finish()
            record.status, record.error = "failed", str(error)
        except asyncio.CancelledError:
            reader.finish()
            record.status, record.error = "unfinished", "the run was ended"
            raise
        finally:
            record.end = record.end or time.perf_counter()
            if not reader.usage_seen:
                record.counted_by, record.output_tokens = "chunks", len(record.token_times)


def error_message(body: bytes) -> str:
    """Return the message inside an error body, on one line."""
    try:
        value = msgspec.json.decode(body)
        error = value.get("error", value)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (msgspec.DecodeError, AttributeError):
        message = body.decode(errors="replace")
    return " ".join(str(message).split())[:300]
