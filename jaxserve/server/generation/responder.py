"""Answers a request that generates, whole or as server-sent events, from the same parts.

A route brings a `ResponseShape`. What an answer consists of, its end and its token counts come from here, as does what
happens when a client disconnects, aborts its request, or the engine fails: a stream has exactly one end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxserve.api_types import EngineRequest, Usage
from jaxserve.server.generation.answers import AnswerPart, AnswerPlan, AnswerReader
from jaxserve.server.generation.generation import Generation
from jaxserve.server.http.exchange import HttpExchange
from jaxserve.server.http.sse import EventStream
from jaxserve.server.server_state import LoadedModel, ServerState
from jaxserve.text.output import OutputDelta

# JSON has no infinity; OpenAI writes this instead.
LOGPROB_FLOOR = -9999.0


class ChoiceOutput(NamedTuple):
    """What an event adds to a choice, or all that came of it. Without a plan of the answer, it has no `parts`."""

    delta: OutputDelta
    parts: Sequence[AnswerPart]


class TotalUsage(NamedTuple):
    """The token counts of a request: all its choices together, but each prompt only once, whatever its `n`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None


class ResponseChoice:
    """One choice of a response, which is one sequence.

    `started`: an event of its stream has been made. `num_tokens` are those of its output so far, and `seconds` is when
    it ended, by `time.perf_counter()`.
    """

    def __init__(self, index: int, prompt_ids: list[int], plan: AnswerPlan | None) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.num_tokens = 0
        self.started = False
        self.seconds = 0.0
        self.reader = None if plan is None else AnswerReader(plan)
        self._texts: list[str] = []
        self._kept = OutputDelta()
        self._parts: list[AnswerPart] = []

    def push(self, delta: OutputDelta, *, keep: bool) -> ChoiceOutput:
        """Return what a new output adds; `output` has it only if it is kept."""
        self.num_tokens += len(delta.token_ids)
        if delta.usage is not None:
            self.num_tokens = delta.usage.completion_tokens
            self.seconds = time.perf_counter()
        new = ChoiceOutput(delta, () if self.reader is None else self.reader.push(delta))
        if keep:
            self._keep(new)
        return new

    @property
    def output(self) -> ChoiceOutput:
        """All that was kept, as if it had come at once."""
        self._texts = ["".join(self._texts)]
        self._kept.text = self._texts[0]
        groups = itertools.groupby(self._parts, lambda part: (part.kind, part.call, part.call_id))
        parts = [
            AnswerPart(kind, "".join(part.text for part in group), call, call_id)
            for (kind, call, call_id), group in groups
        ]
        return ChoiceOutput(self._kept, parts)

    def _keep(self, new: ChoiceOutput) -> None:
        delta, kept = new.delta, self._kept
        self._texts.append(delta.text)
        self._parts += new.parts
        kept.token_ids += delta.token_ids
        kept.logprobs += delta.logprobs
        kept.text_offsets += delta.text_offsets
        if delta.prompt_logprobs is not None:
            kept.prompt_logprobs = delta.prompt_logprobs
        kept.finish_reason, kept.usage = delta.finish_reason, delta.usage
        kept.stop_reason, kept.matched_stop = delta.stop_reason, delta.matched_stop


class ResponseShape(Protocol):
    """How a route writes its responses. Events are encoded and complete."""

    shows_all: bool
    """Whether each event of a stream has all of the output so far: then choices keep it."""

    def opening(self, choice: ResponseChoice) -> bytes:
        """Return the events that come before a choice's first output, or nothing."""
        ...

    def event(self, choice: ResponseChoice, new: ChoiceOutput) -> bytes:
        """Return the events for what is new in a choice, or nothing."""
        ...

    def last_events(self, usage: TotalUsage) -> bytes:
        """Return the events that end a stream."""
        ...

    def body(self, choices: Sequence[ResponseChoice], usage: TotalUsage) -> Any:
        """Return the JSON response of choices that have ended and have all of their output."""
        ...


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
) -> None:
    """Run `requests` and send one response, whose choices are theirs.

    `/abort_request` finds it by `ids` and the id of the HTTP request, and some of its choices by the ids in `parts`.
    """
    choices = [ResponseChoice(index, request.prompt_ids, plan) for index, request in enumerate(requests)]
    generation = Generation(state, loaded, requests, exchange.arrival)
    with state.abortable((*ids, exchange.request_id), generation, parts):
        if stream:
            await _stream(generation, exchange, choices, shape, requests[0].sampling.n)
            return

        async def keep(index: int, delta: OutputDelta) -> None:
            choices[index].push(delta, keep=True)

        usages = await generation.run(keep)
        await exchange.respond(shape.body(choices, _total(usages, choices, requests[0].sampling.n)))


async def _stream(
    generation: Generation, exchange: HttpExchange, choices: list[ResponseChoice], shape: ResponseShape, n: int
) -> None:
    out = EventStream(exchange.send)

    async def send(index: int, delta: OutputDelta) -> None:
        choice = choices[index]
        opening = b"" if choice.started else shape.opening(choice)
        events = opening + shape.event(choice, choice.push(delta, keep=shape.shows_all))
        choice.started = True
        if events:
            await out.write(events)

    async with out:
        usages = await generation.run(send)
        await out.finish(shape.last_events(_total(usages, choices, n)))


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
