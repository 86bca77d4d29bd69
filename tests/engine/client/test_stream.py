from __future__ import annotations

import asyncio
from typing import Any

from jaxserve.api_types import FinishReason, TokenEvent, TokenLogprobs, Usage
from jaxserve.engine.client.stream import RequestStream
from tests.engine.conftest import make_request


def event_of(token: int, **facts: Any) -> TokenEvent:
    return TokenEvent("r", [token], logprobs=[TokenLogprobs(token, -0.5, [token], [-0.5])], **facts)


async def test_a_slow_reader_gets_merged_events() -> None:
    usage = Usage(3, 4, 2)
    stream = RequestStream(make_request("r"), abort=lambda _: None)
    stream.push(event_of(1, prompt_logprobs=[None], queue_seconds=0.5))
    assert await anext(stream) == event_of(1, prompt_logprobs=[None], queue_seconds=0.5)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    for event in (event_of(2), event_of(3), event_of(7, finish_reason=FinishReason.STOP, stop_id=7, usage=usage)):
        stream.push(event)
    joined = await reader
    assert joined.token_ids == [2, 3, 7]
    assert [entry.token_id for entry in joined.logprobs or ()] == [2, 3, 7]
    assert (joined.finish_reason, joined.stop_id, joined.usage) == (FinishReason.STOP, 7, usage)
    assert [event async for event in stream] == []


async def test_tokens_before_an_error_are_delivered_first() -> None:
    stream = RequestStream(make_request("r"), abort=lambda _: None)
    stream.push(event_of(1, queue_seconds=0.5))
    stream.push(event_of(2))
    stream.fail("the engine is gone")
    tokens, error = [event async for event in stream]
    assert (tokens.token_ids, tokens.finish_reason, tokens.queue_seconds) == ([1, 2], None, 0.5)
    assert (error.token_ids, error.finish_reason, error.error) == ([], FinishReason.ERROR, "the engine is gone")
