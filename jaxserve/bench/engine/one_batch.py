"""Times one batch of equal requests on an engine: until every request has its first token, and from there to the end.

The engine is a protocol, so that tests need no device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from jaxserve.api_types import EngineRequest, SamplingParams, TokenEvent
from jaxserve.errors import BenchRunError


class BatchEngine(Protocol):
    """An engine that takes requests and returns streams of their events."""

    def submit_all(self, requests: Sequence[EngineRequest]) -> Sequence[AsyncIterator[TokenEvent]]:
        """Submit all requests at once."""
        ...


@dataclasses.dataclass(frozen=True)
class BatchTimes:
    """Seconds: `prefill` until every sequence has its first token, `decode` from there to the last token of the batch.

    `first` is the time until the first sequence has its first token.
    """

    prefill: float
    decode: float
    first: float

    @property
    def latency(self) -> float:
        """Seconds from the first request to the last token."""
        return self.prefill + self.decode


async def run_batch(
    engine: BatchEngine, prompts: Sequence[list[int]], *, name: str, output_len: int, temperature: float = 0.0
) -> BatchTimes:
    """Submit the prompts at once and run them to `output_len` tokens each. Raises `BenchRunError` when one fails."""
    sampling = SamplingParams(max_tokens=output_len, temperature=temperature, ignore_eos=True, seed=0)
    requests = [
        EngineRequest(request_id=f"{name}-{i}", prompt_ids=prompt, sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    streams = engine.submit_all(requests)
    times = await asyncio.gather(*(_stream_times(stream, output_len) for stream in streams))
    firsts, ends = zip(*times)
    return BatchTimes(max(firsts) - start, max(ends) - max(firsts), min(firsts) - start)


async def _stream_times(stream: AsyncIterator[TokenEvent], output_len: int) -> tuple[float, float]:
    """Return the times of the first and the last token."""
    first, tokens = 0.0, 0
    async for event in stream:
        if event.error is not None:
            raise BenchRunError(f"a request failed in the engine: {event.error}")
        if event.token_ids and not tokens:
            first = time.perf_counter()
        tokens += len(event.token_ids)
    if tokens != output_len:
        raise BenchRunError(f"a request ended with {tokens} tokens instead of {output_len}")
    return first, time.perf_counter()
