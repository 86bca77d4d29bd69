from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from jaxserve.bench.engine.one_batch import BatchTimes, run_batch
from jaxserve.errors import BenchRunError
from tests.server.fake_engine import FakeEngine


async def test_phases_add_up() -> None:
    engine = FakeEngine(300)
    times = await run_batch(engine, [[1, 2], [3]], name="x", output_len=5)
    assert [request.request_id for request in engine.submitted] == ["x-0", "x-1"]
    assert all(request.sampling.ignore_eos and request.sampling.max_tokens == 5 for request in engine.submitted)
    assert 0 < times.first <= times.prefill < times.latency
    assert times.latency == times.prefill + times.decode


async def test_prefill_lasts_until_the_last_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts its readings: at the start, at two first tokens and at two ends."""
    readings = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(readings)))
    times = await run_batch(FakeEngine(300), [[1], [2]], name="x", output_len=4)
    assert times == BatchTimes(prefill=2, decode=2, first=1)


async def test_a_failed_request_is_an_error() -> None:
    engine = FakeEngine(300, refuse=lambda request: "queue full" if request.prompt_ids == [9] else None)
    with pytest.raises(BenchRunError, match="failed in the engine: queue full"):
        await run_batch(engine, [[1], [9]], name="x", output_len=3)


async def test_an_aborted_answer_is_an_error() -> None:
    engine = FakeEngine(300)
    engine.hold()
    running = asyncio.ensure_future(run_batch(engine, [[1]], name="x", output_len=3))
    await engine.wait_for(lambda: bool(engine.submitted))
    engine.abort(["x-0"])
    with pytest.raises(BenchRunError, match="0 tokens instead of 3"):
        await running
