"""The shape of a response: one JSON object, or OpenAI's events. Owns their order and their numbers.

Constant parts are encoded once, so a token of text costs one small encode and a join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.api_types import FinishReason, TokenLogprobs
from jaxserve.server.errors import HttpError, UnavailableError
from jaxserve.server.generation.answers import AnswerPart
from jaxserve.server.generation.responder import ResponseChoice, ResponseShape, TotalUsage
from jaxserve.server.generation.token_logprobs import token_logprobs
from jaxserve.server.responses_api.bodies import (
    IncompleteDetails,
    ItemStatus,
    OutputItem,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    response_usage,
)
from jaxserve.server.responses_api.output_items import (
    CustomCallWriter,
    Event,
    FunctionCallWriter,
    ItemWriter,
    MessageWriter,
    ReasoningWriter,
    SummaryWriter,
)
from jaxserve.text.output import OutputDelta
from jaxserve.text.tokenizers.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class OutputOptions:
    """What a request asks of the items: reasoning as a summary, reasoning in the form for sending it back, log
    probabilities, with tokens written as ids if `names_ids`. `names` has the namespace and the name of tools that are
    shown under another name."""

    summarizes: bool
    packs_reasoning: bool
    logprobs: bool
    names_ids: bool
    names: Mapping[str, tuple[str, str]]


class ResponsesShape(ResponseShape):
    """Writes the one answer of a request into the response `begun`. `on_end` gets the response when it has ended.

    One that is aborted was cancelled, unless the server `is_draining`: then it has failed.
    """

    follows = True

    def __init__(
        self,
        begun: ResponseObject,
        options: OutputOptions,
        tokenizer: Tokenizer,
        on_end: Callable[[ResponseObject], None],
        *,
        streams: bool,
        is_draining: Callable[[], bool],
    ) -> None:
        self._response = begun
        self._options = options
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._streams = streams
        self._is_draining = is_draining
        self._number = 0
        self._items: list[OutputItem] = []
        self._writer: ItemWriter | None = None
        self._writes = ("", 0)
        self._text_begins = b""
        self._num_seen = 0
        self._logprobs: list[TokenLogprobs] = []
        self._end: FinishReason | None = None

    def opening(self, choice: ResponseChoice) -> bytes:
        """Return the events that begin a stream."""
        return self._whole("created", self._response) + self._whole("in_progress", self._response)

    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        """Return the events of what is new: beginnings, pieces and ends of items."""
        is_text = self._writes == ("content", 0) and len(parts) == 1 and parts[0].kind == "content"
        if is_text and not delta.finish_reason and not delta.logprobs:  # nearly always
            text = parts[0].text
            assert self._writer is not None
            self._writer.pieces.append(text)
            if not self._streams:
                return b""
            self._number += 1
            end = b',"logprobs":[],"sequence_number":%d}\n\n' % (self._number - 1)
            return self._text_begins + _encode(text) + end
        if self._options.logprobs:
            self._add_logprobs(choice, delta)
        found = []
        for part in parts:
            kind = "call" if part.kind in ("arguments", "input") else part.kind
            if self._writer is None or self._writes != (kind, part.call):
                found += [self._end_item("completed"), self._begin_item(kind, part)]
            if part.kind != "call":
                found.append(self._add(part.text))
        if delta.finish_reason is not None:
            self._end = delta.finish_reason
            if not self._items and self._writer is None:
                found.append(self._begin_item("content", AnswerPart("content", "")))
            found.append(self._end_item("completed" if self._end is FinishReason.STOP else "incomplete"))
        return b"".join(found)

    def last_events(self, usage: TotalUsage) -> bytes:
        """Return the event with the whole response."""
        response = self._ended(usage)
        return self._whole("completed" if response.status == "completed" else "incomplete", response)

    def error_event(self, error: HttpError) -> bytes:
        """Return the event that ends a stream after an error."""
        failure = ResponseFailure("server_error", error.message)  # clients know OpenAI's codes, and try this one again
        response = msgspec.structs.replace(self.so_far("failed"), error=failure)
        self._on_end(response)
        return self._whole("failed", response)

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> ResponseObject:
        """Return the whole response."""
        return self._ended(usage)

    def so_far(self, status: ResponseStatus) -> ResponseObject:
        """Return the response with what has been written so far."""
        unfinished: ItemStatus = "in_progress" if status == "in_progress" else "incomplete"
        writing = [] if self._writer is None else [self._writer.item(unfinished)]
        return msgspec.structs.replace(self._response, status=status, output=[*self._items, *writing])

    def _ended(self, usage: TotalUsage) -> ResponseObject:
        assert self._end is not None
        if self._end is FinishReason.ABORT and self._is_draining():
            raise UnavailableError("The server has shut down before the response was complete")
        is_cut = self._end is FinishReason.LENGTH
        status: ResponseStatus = "completed"
        if self._end is not FinishReason.STOP:
            status = "incomplete" if is_cut else "cancelled"
        response = msgspec.structs.replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=response_usage(usage),
        )
        self._on_end(response)
        return response

    def _add_logprobs(self, choice: ResponseChoice, delta: OutputDelta) -> None:
        """Add the log probabilities of the new tokens after the reasoning to those of the next text."""
        # The token that ends an output has no text
        entries = delta.logprobs[:-1] if isinstance(delta.matched_stop, int) else delta.logprobs
        self._logprobs += entries
        self._num_seen += len(entries)
        num_reasoning = 0 if choice.reader is None else choice.reader.num_reasoning_tokens or 0
        del self._logprobs[: max(0, num_reasoning - self._num_seen + len(self._logprobs))]

    def _begin_item(self, kind: str, part: AnswerPart) -> bytes:
        self._writes = kind, part.call
        self._writer = writer = self._new_writer(kind, part)
        found = self._event("output_item.added", item=writer.item("in_progress"))
        begins = {"type": "response.output_text.delta", "item_id": writer.id, "output_index": len(self._items)}
        begins |= {"content_index": 0, "delta": ""}
        self._text_begins = b"event: response.output_text.delta\ndata: " + _encode(begins)[: -len('""}')]
        return found + self._item_events(writer.begin())

    def _new_writer(self, kind: str, part: AnswerPart) -> ItemWriter:
        if kind == "content":
            return MessageWriter()
        if kind == "reasoning":
            make = SummaryWriter if self._options.summarizes else ReasoningWriter
            return make(packs=self._options.packs_reasoning)
        namespace, name = self._options.names.get(part.text, ("", part.text))
        return (CustomCallWriter if part.is_custom else FunctionCallWriter)(part, name, namespace)

    def _add(self, text: str) -> bytes:
        writer = self._writer
        assert writer is not None
        writer.pieces.append(text)
        if isinstance(writer, MessageWriter):
            named = token_logprobs(self._tokenizer, self._logprobs, as_ids=self._options.names_ids)
            writer.logprobs += named
            writer.new_logprobs += named
        if self._writes[0] != "reasoning":  # one output may have its end and the text
            self._logprobs.clear()
        return self._item_events([writer.delta(text)])

    def _end_item(self, status: ItemStatus) -> bytes:
        writer = self._writer
        if writer is None:
            return b""
        found = self._item_events(writer.end())
        item = writer.item(status)
        found += self._event("output_item.done", item=item)
        self._items.append(item)
        self._writer = None
        return found

    def _item_events(self, events: Sequence[Event]) -> bytes:
        assert self._writer is not None
        return b"".join([self._event(name, item_id=self._writer.id, **fields) for name, fields in events])

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return self._encoded(name, output_index=len(self._items), **fields)

    def _whole(self, name: str, response: ResponseObject) -> bytes:
        return self._encoded(name, response=response)

    def _encoded(self, name: str, /, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        event = {"type": f"response.{name}", **fields, "sequence_number": self._number}
        self._number += 1
        return f"event: response.{name}\ndata: ".encode() + _encode(event) + b"\n\n"
