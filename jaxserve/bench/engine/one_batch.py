"""One batch of equal requests against an engine, timed as its client sees it: until all have their first token, and on.

It knows an engine only by what it is asked here, so that it needs no device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from jaxserve.api_types import EngineRequest, SamplingParams, TokenEvent
from jaxserve.errors import BenchRunError


class Engine(Protocol):
    """What takes requests and gives their events."""

    def submit_all(self, requests: Sequence[EngineRequest]) -> Sequence[AsyncIterator[TokenEvent]]:
        """Hand requests over, all at once."""
        ...


@dataclasses.dataclass(frozen=True)
class BatchTimes:
    """Seconds: `prefill` until every sequence had its first token, `decode` from there to the last token of all.

    `first` is when the first sequence had its first token.
    """

    prefill: float
    decode: float
    first: float

    @property
    def latency(self) -> float:
        """From the first request to the last token."""
        return self.prefill + self.decode


async def run_batch(
    engine: Engine, prompts: Sequence[list[int]], *, name: str, output_len: int, temperature: float = 0.0
) -> BatchTimes:
    """Submit the prompts at once and run them to `output_len` tokens each. Raises `BenchRunError` when one fails."""
    sampling = SamplingParams(max_tokens=output_len, temperature=temperature, ignore_eos=True, seed=0)
    requests = [
        EngineRequest(request_id=f"{name}-{i}", prompt_ids=prompt, sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]
    start = time.perf_counter()
    streams = engine.submit_all(requests)
    times = await asyncio.gather(*(_times(stream, output_len) for stream in streams))
    firsts, ends = zip(*times)
    return BatchTimes(max(firsts) - start, max(ends) - max(firsts), min(firsts) - start)


async def _times(stream: AsyncIterator[TokenEvent], output_len: int) -> tuple[float, float]:
    """When the first token came, and the last."""
    first, tokens = 0.0, 0
    async for event in stream:
        if event.error is not None:
            raise BenchRunError(f"the engine gave a request up: {event.error}")
        if event.token_ids and not tokens:
            first = time.perf_counter()
        tokens += len(event.token_ids)
    if tokens != output_len:
        raise BenchRunError(f"a request ended with {tokens} tokens instead of {output_len}")
    return first, time.perf_counter()
