"""Answers a request that generates, whole or as server-sent events, from the same parts.

A route brings a `ResponseShape`. The parts of an answer, its end and its token counts come from here. A stream has
exactly one end, also when a client disconnects, aborts its request, or the engine fails.
"""

from __future__ import annotations

import abc
import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxserve.api_types import EngineRequest, Usage
from jaxserve.server.errors import HttpError
from jaxserve.server.generation.answers import AnswerPart, AnswerPlan, AnswerReader
from jaxserve.server.generation.generation import Generation
from jaxserve.server.generation.logged import logged_request
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.sse import DONE, EventStream, error_event, open_stream
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.output import OutputDelta, OutputSoFar

# JSON has no infinity; OpenAI writes this instead.
LOGPROB_FLOOR = -9999.0
_KIND_AND_CALL = operator.attrgetter("kind", "call", "call_id", "is_custom")


class TotalUsage(NamedTuple):
    """The token counts of a request: all its choices together, but each prompt only once, whatever its `n`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None


class ResponseChoice:
    """One choice of a response, which is one sequence.

    `started` says that an event of its stream has been made. `num_tokens` counts the tokens of its output so far,
    `num_cached_tokens` those of its prompt that were found in the prefix cache, and `ended_at` is when it ended, by
    `time.perf_counter()`.
    """

    def __init__(self, index: int, prompt_ids: list[int], plan: AnswerPlan | None) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.started = False
        self.ended_at = 0.0
        self.reader = None if plan is None else AnswerReader(plan)
        self._kept = OutputSoFar()
        self._parts: list[AnswerPart] = []

    def push(self, delta: OutputDelta) -> Sequence[AnswerPart]:
        """Return the parts of the answer that a new output adds; none without a plan of it."""
        self.num_tokens += len(delta.token_ids)
        if delta.cached_tokens is not None:
            self.num_cached_tokens = delta.cached_tokens
        if delta.usage is not None:
            self.num_tokens = delta.usage.completion_tokens
            self.ended_at = time.perf_counter()
        return () if self.reader is None else self.reader.push(delta)

    def keep(self, delta: OutputDelta, parts: Sequence[AnswerPart]) -> None:
        """Keep an output for `output` and `parts`."""
        self._kept.add(delta)
        self._parts += parts

    @property
    def output(self) -> OutputDelta:
        """The output that was kept, as if it had come at once."""
        return self._kept.delta

    @property
    def parts(self) -> list[AnswerPart]:
        """The parts of the answer that were kept, neighbours of one kind joined."""
        groups = itertools.groupby(self._parts, _KIND_AND_CALL)
        return [AnswerPart(kind, "".join([part.text for part in group]), *call) for (kind, *call), group in groups]


class ResponseShape(abc.ABC):
    """How a route writes its responses. Events are encoded and complete.

    `shows_all`: each event of a stream has all of the output so far, so choices keep it. `follows`: `event` is called
    for each output of a response that is sent whole, too, and the choices keep nothing.
    """

    shows_all = False
    follows = False

    def opening(self, choice: ResponseChoice) -> bytes:
        """Return the events that come before a choice's first output."""
        return b""

    @abc.abstractmethod
    def event(self, choice: ResponseChoice, delta: OutputDelta, parts: Sequence[AnswerPart]) -> bytes:
        """Return the events for what is new in a choice, or nothing."""

    def last_events(self, usage: TotalUsage) -> bytes:
        """Return the events that end a stream."""
        return DONE

    def error_event(self, error: HttpError) -> bytes:
        """Return the event that ends a stream after an error."""
        return error_event(error)

    @abc.abstractmethod
    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> Any:
        """Return the JSON response of choices that have ended and kept their output."""


async def respond(
    state: ServerState,
    loaded: LoadedModel,
    exchange: HttpExchange,
    requests: list[EngineRequest],
    shape: ResponseShape,
    *,
    stream: bool,
    ids: tuple[str, ...],
    parts: Mapping[str, tuple[int, ...]] | None = None,
    plan: AnswerPlan | None = None,
    intervals: Sequence[int] | None = None,
) -> None:
    """Run `requests` and send one response, with a choice for each.

    With a `plan`, answers are taken apart by it. `/abort_request` finds the response by `ids` and the id of the HTTP
    request, and some of its choices by the ids in `parts`. In a stream, a chunk of a choice has at least as many tokens
    as its one of `intervals` says, but for the first and the last; the default is the server's setting.
    """
    if plan is not None and plan.reads_special_tokens:
        requests = [_with_special_tokens(request) for request in requests]
    choices = [ResponseChoice(index, request.prompt_ids, plan) for index, request in enumerate(requests)]
    if not stream:
        intervals = [1] * len(requests)
    elif intervals is None:
        intervals = [state.config.stream_interval] * len(requests)
    logged = logged_request(state, loaded, exchange, requests, ids, stream=stream)
    generation = Generation(state, loaded, requests, exchange.arrival, intervals, logged)
    with state.abortable((*ids, exchange.request_id), generation, parts):
        if stream:

            def encode_error(error: Exception) -> bytes:
                return shape.error_event(state.http_error(error, exchange.request_id))

            out = open_stream(exchange.send, encode_error, state.config.sse_keep_alive_interval)
            await _stream(generation, out, choices, shape, requests[0].sampling.n)
            return

        async def keep(index: int, delta: OutputDelta) -> None:
            choice = choices[index]
            parts = choice.push(delta)
            if shape.follows:
                shape.event(choice, delta, parts)
            else:
                choice.keep(delta, parts)

        usages = await generation.run(keep)
        await exchange.respond(shape.body(choices, _total(usages, choices, requests[0].sampling.n)))


async def _stream(
    generation: Generation, out: EventStream, choices: list[ResponseChoice], shape: ResponseShape, n: int
) -> None:
    shows_all = shape.shows_all

    async def send(index: int, delta: OutputDelta) -> None:
        choice = choices[index]
        opening = b"" if choice.started else shape.opening(choice)
        parts = choice.push(delta)
        if shows_all:
            choice.keep(delta, parts)
        events = shape.event(choice, delta, parts)
        if opening:
            events = opening + events
        choice.started = True
        if events:
            await out.write(events)

    async with out:
        usages = await generation.run(send)
        await out.finish(shape.last_events(_total(usages, choices, n)))


def _with_special_tokens(request: EngineRequest) -> EngineRequest:
    """Return a request whose text has its special tokens."""
    sampling = msgspec.structs.replace(request.sampling, skip_special_tokens=False)
    return msgspec.structs.replace(request, sampling=sampling)


def _total(usages: list[Usage], choices: list[ResponseChoice], n: int) -> TotalUsage:
    """Return the counts of a request from those of its sequences, in the order of the choices, `n` per prompt."""
    reasoning = [choice.reader.num_reasoning_tokens for choice in choices if choice.reader is not None]
    counted = [count for count in reasoning if count is not None]
    return TotalUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages[::n]),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages[::n]),
        reasoning_tokens=sum(counted) if counted else None,
    )
