"""Several engine processes as one engine, over the fake device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxserve.api_types import FinishReason, TokenEvent
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import Engine, EngineClient, launch_engine
from jaxserve.engine.client.replicas import Replicas
from jaxserve.engine.client.stream import RequestStream
from jaxserve.errors import ConfigError, EngineDeadError, EngineUnresponsiveError, InvalidRequestError
from tests.engine.conftest import make_request
from tests.engine.fake_executor import run_alone

pytestmark = pytest.mark.process

MODULE = "tests.engine.fake_worker"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The parent of the engines' directories, empty again afterwards. (pytest's tmp_path is too long for a socket.)"""
    monkeypatch.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)
        assert list(Path(directory).iterdir()) == []


def configured(model: str = "fine", **settings: Any) -> EngineConfig:
    return EngineConfig(**{"model": model, "log_level": "error", "device": "cpu", "dp_size": 2, **settings})


@contextlib.asynccontextmanager
async def running(model: str = "fine", **settings: Any) -> AsyncIterator[Engine]:
    engine = await launch_engine(configured(model, **settings), module=MODULE)
    try:
        yield engine
    finally:
        await engine.shutdown()


async def all_of(stream: RequestStream) -> list[TokenEvent]:
    return [event async for event in stream]


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def settled(engine: Engine) -> None:
    """Wait until no step is in flight: one may still be when the last stream ends, but not after a reading."""
    await engine.refresh_stats()


@pytest.mark.slow  # a shorter limit makes a busy machine's replicas look frozen as they start
async def test_a_frozen_replica_is_unhealthy_and_requests_it_rejects_are_not_counted() -> None:
    async with running(watchdog_timeout=3) as engine:
        assert isinstance(engine, Replicas)
        pid = engine.replicas[1].pid
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while engine.health is None:
                await asyncio.sleep(0.01)
        assert engine.health == "DP1: the engine sent nothing for 3 s"
        with pytest.raises(EngineUnresponsiveError):
            await engine.flush_cache(timeout=60.0)
        with pytest.raises(EngineUnresponsiveError):
            engine.submit_all([make_request("a"), make_request("b")])
        os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while engine.health is not None or engine._router.num_open:
                await asyncio.sleep(0.01)
        for stream in engine.submit_all([make_request("a"), make_request("b")]):
            await all_of(stream)


async def test_one_engine_needs_no_replicas() -> None:
    async with running(dp_size=1) as engine:
        assert isinstance(engine, EngineClient)
        assert len(engine.replicas) == 1


async def test_streams_have_the_tokens_of_each_request_and_all_replicas_are_used() -> None:
    async with running(max_total_tokens=128) as engine:
        assert isinstance(engine, Replicas)
        assert (engine.info.max_running_requests, engine.info.max_total_num_tokens) == (16, 256)
        requests = [make_request(f"r{i}", i + 1, max_tokens=20 + i, stop_ids=(7,)) for i in range(24)]
        streams = [engine.submit(request) for request in requests[:12]] + engine.submit_all(requests[12:])
        for request, events in zip(requests, await asyncio.gather(*map(all_of, streams))):
            expected = run_alone(request, 64)
            assert tokens_of(events) == expected.token_ids
            assert events[-1].finish_reason is expected.finish_reason
        await settled(engine)
        stats = await engine.refresh_stats()
        assert stats.integrity_errors == ()
        assert stats.prompt_tokens == sum(len(request.prompt_ids) for request in requests)
        assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages == 16
        assert engine.stats == stats
        assert min(replica.stats.prompt_tokens for replica in engine.replicas) > 0
        assert engine.health is None
        assert not engine.on_death.done()


async def test_requests_follow_their_prefix() -> None:
    async with running(context_length=200) as engine:
        prompts = [[start] * 64 for start in range(4)]
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                request = make_request(f"r{number}-{turn}", prompt, max_tokens=2)
                usage = (await all_of(engine.submit(request)))[-1].usage
                assert usage is not None
                assert usage.cached_tokens == (0 if turn == 0 else 48), "one token of the last page must be computed"
        assert [replica.stats.prompt_tokens for replica in engine.replicas] == [2 * 3 * 64] * 2
        assert await engine.flush_cache() > 0
        usage = (await all_of(engine.submit(make_request("after", prompts[0], max_tokens=2))))[-1].usage
        assert usage is not None
        assert usage.cached_tokens == 0


async def test_abort_and_ids() -> None:
    async with running(context_length=20_000, max_running_requests=1) as engine:
        streams = [engine.submit(make_request(f"r{i}", max_tokens=10_000)) for i in range(4)]
        await anext(streams[0])
        for submit in (engine.submit, lambda request: engine.submit_all([make_request("new"), request])):
            with pytest.raises(InvalidRequestError, match="'r3' is open already"):
                submit(make_request("r3"))
        streams[0].abort()
        engine.abort(["r1", "r2", "r3", "nobody"])
        for stream in streams:
            events = await all_of(stream)
            assert events[-1].finish_reason is FinishReason.ABORT
        await settled(engine)
        stats = await engine.refresh_stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        request = make_request("r3", max_tokens=5)
        assert tokens_of(await all_of(engine.submit(request))) == run_alone(request, 20_000).token_ids


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_queued_requests": 2}, "2 requests wait beyond the free slots and --max-queued-requests is 2"),
        ({"max_num_queued_reqs": 4}, "4 requests are open and --max-num-queued-reqs is 4"),
        ({"max_num_queued_tokens": 16}, "16 prompt tokens wait to be computed and --max-num-queued-tokens is 16"),
    ],
)
async def test_the_limits_of_the_queue_hold_for_all_replicas_together(limit: dict[str, int], reason: str) -> None:
    async with running(max_running_requests=1, context_length=20_000, **limit) as engine:
        requests = [make_request(f"r{i}", max_tokens=10_000) for i in range(5)]
        *streams, refused = engine.submit_all(requests)
        [event] = await all_of(refused)
        assert event.finish_reason is FinishReason.ERROR
        assert event.error == f"queue full: {reason}"
        for stream in streams:
            stream.abort()
            assert (await all_of(stream))[-1].finish_reason is FinishReason.ABORT
        assert tokens_of(await all_of(engine.submit(make_request("later", max_tokens=3))))


async def test_requests_without_a_seed_get_different_seeds() -> None:
    async with running() as engine:
        asked = [make_request(f"r{i}", [1, 2, 3], max_tokens=12, temperature=1.0) for i in range(6)]
        answers = await asyncio.gather(*(all_of(engine.submit(request)) for request in asked))
        assert min(replica.stats.prompt_tokens for replica in engine.replicas) > 0
        assert len({tuple(tokens_of(events)) for events in answers}) == 6


@pytest.mark.parametrize("victim", [0, 1])
async def test_killing_one_replica_ends_every_stream_once_and_names_it(victim: int) -> None:
    async with running(context_length=20_000, max_running_requests=1) as engine:
        pids = [replica.pid for replica in engine.replicas]
        streams = [engine.submit(make_request(f"r{i}", max_tokens=10_000)) for i in range(5)]
        for stream in streams[:2]:
            await anext(stream)
        os.kill(pids[victim], signal.SIGKILL)
        reason = await engine.on_death
        assert reason == f"DP{victim}: engine process ended with code -9 (SIGKILL)"
        assert engine.health == reason
        for stream in streams:
            events = await all_of(stream)
            assert events[-1].finish_reason is FinishReason.ERROR
            assert "SIGKILL" in (events[-1].error or "")
            assert sum(event.finish_reason is not None for event in events) == 1
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.submit(make_request("late"))
        for ask in (engine.refresh_stats, engine.flush_cache):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await ask()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("unfit", ConfigError, "page_size is 3; make it a power of two"),
        ("gone", EngineDeadError, r"DP\d: engine process ended with code 7 before it was ready"),
    ],
)
async def test_if_one_replica_fails_to_start_all_end(model: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        await launch_engine(configured(model, dp_size=3), module=MODULE)
    assert not [child for child in psutil.Process().children() if "fake_worker" in " ".join(child.cmdline())]


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    starting = asyncio.ensure_future(launch_engine(configured(), module=MODULE))
    while len(psutil.Process().children()) < 2:
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.Process().children()


async def test_a_profile_covers_all_replicas(sockets: Path) -> None:
    profiles = sockets / "profiles"
    async with running(profile_dir=str(profiles)) as engine:
        with pytest.raises(InvalidRequestError, match="not within the directory"):
            await engine.start_profile("../../elsewhere")
        with pytest.raises(InvalidRequestError, match="no profile is running"):
            await engine.stop_profile()
        started = await engine.start_profile("here")
        assert Path(started.directory) == profiles / "here"
        with pytest.raises(InvalidRequestError, match="running already"):
            await engine.start_profile()
        await asyncio.gather(*(all_of(engine.submit(make_request(f"r{i}", max_tokens=9))) for i in range(2)))
        stopped = await engine.stop_profile()
        assert (stopped.directory, stopped.num_steps) == (started.directory, 18)
        assert sorted(path.name for path in (profiles / "here").iterdir()) == ["DP0", "DP1"]
        await engine.start_profile(num_steps=3)
        await all_of(engine.submit(make_request("a", max_tokens=9)))
        assert (await engine.stop_profile()).num_steps in (0, 3), "of the idle one, and of the other if still written"
    shutil.rmtree(profiles)
