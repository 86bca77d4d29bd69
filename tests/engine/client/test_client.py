from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from jaxserve.api_types import FinishReason, TokenEvent
from jaxserve.config.kv_events import KvEventsConfig
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import EngineClient, EngineProcesses, InProcessEngine
from jaxserve.engine.client.stream import RequestStream
from jaxserve.engine.process.cache_publisher import END_OF_REPLAY, EventBatch
from jaxserve.engine.process.transport import Abort, Add, FlushCache, ReadStats, StartProfile, StopProfile
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    EngineUnresponsiveError,
    InvalidRequestError,
    JaxserveError,
    ModelNotFoundError,
    RequestFailedError,
)
from tests.engine.cache_subscriber import CacheSubscriber
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


@contextlib.asynccontextmanager
async def running(model: str = "fine", clock: Any = None, **settings: Any) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model=model, log_level="error", **settings)
    client = await EngineClient.launch(config, module=MODULE, **({"clock": clock} if clock else {}))
    try:
        yield client
    finally:
        await client.shutdown()


async def all_of(stream: RequestStream) -> list[TokenEvent]:
    return [event async for event in stream]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize("overlap", [True, False])
async def test_streams_have_the_tokens_of_each_request(overlap: bool) -> None:
    async with running(disable_overlap_schedule=not overlap, max_total_tokens=128) as client:
        assert client.info.max_model_len == 64
        requests = [make_request(f"r{i}", i + 1, max_tokens=20 + i, stop_ids=(7,)) for i in range(20)]
        streams = [client.submit(request) for request in requests]
        for request, events in zip(requests, await asyncio.gather(*map(all_of, streams))):
            expected = run_alone(request, 64)
            assert tokens_of(events) == expected.token_ids
            assert events[-1].finish_reason is expected.finish_reason
        await client.refresh_stats()  # a step may still be in flight when the last stream ends, but not after a reading
        stats = await client.refresh_stats()
        assert stats.integrity_errors == ()
        assert sum(stats.decode_steps_by_rows.values()) == stats.decode_steps > 0
        assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
        assert client.stats == stats
        assert client.health is None
        assert not client.on_death.done()


async def test_the_events_of_the_prefix_cache_are_published_while_requests_run_and_while_none_does(
    sockets: Path,
) -> None:
    paths = [sockets / "events", sockets / "replay"]
    endpoint, replay = (f"ipc://{path}" for path in paths)
    context = zmq.Context()
    received, replies = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    received.rcvtimeo = replies.rcvtimeo = 60_000
    received.subscribe("")
    config = KvEventsConfig(endpoint=endpoint, replay_endpoint=replay)
    async with running(kv_events_config=config, max_total_tokens=128) as client:
        received.connect(endpoint)
        async with asyncio.timeout(60):
            while not received.poll(20):  # until the engine knows the subscriber
                await client.flush_cache()
        for i in range(20):
            await all_of(client.submit(make_request(f"r{i}", 30, max_tokens=10)))
        num_cached = (await client.refresh_stats()).num_evictable_pages
        await client.flush_cache()
        subscriber, counts, batches = CacheSubscriber(), [0], []
        while max(counts) == 0 or counts[-1] > 0:  # to the flush, while nothing ran
            batches.append(received.recv_multipart())
            subscriber.receive(msgspec.msgpack.decode(batches[-1][2], type=EventBatch).events)
            counts.append(len(subscriber.hashes["GPU"]))
        assert counts[-2] == num_cached > 0
        replies.connect(replay)
        replies.send_multipart([b"", batches[1][1]])
        for batch in batches[1:]:
            assert replies.recv_multipart() == [b"", *batch]
        assert replies.recv_multipart() == [b"", b"", END_OF_REPLAY, b""]
    context.destroy(linger=0)
    for path in paths:
        path.unlink()  # ZeroMQ leaves the files of its sockets


async def test_a_port_in_use_for_events_fails_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"kv_events_config: endpoint {endpoint} can't be opened: Address already"
        ):
            async with running(kv_events_config=KvEventsConfig(endpoint=endpoint, bind=True)):
                pass


async def test_events_arrive_while_the_request_runs() -> None:
    async with running(context_length=20_000) as client:
        stream = client.submit(make_request("r", max_tokens=10_000))
        first = await anext(stream)
        assert 0 < len(first.token_ids) < 5_000, "the first event has only the tokens of the first steps"
        assert first.finish_reason is None
        assert client.stats.num_running == 1


async def test_abort_ends_the_stream_with_one_last_event_and_frees_all() -> None:
    async with running(context_length=20_000, max_running_requests=1) as client:
        started = client.submit(make_request("started", max_tokens=10_000))
        queued = client.submit(make_request("queued", max_tokens=10_000))
        await anext(started)
        queued.abort()
        started.abort()
        client.abort(["nobody"])
        for stream in (started, queued):
            events = await all_of(stream)
            assert events[-1].finish_reason is FinishReason.ABORT
            assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        stats = await client.refresh_stats()
        assert stats.integrity_errors == ()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages


async def test_an_id_is_open_until_its_last_event() -> None:
    async with running(context_length=20_000) as client:
        stream = client.submit(make_request("r", max_tokens=10_000))
        with pytest.raises(InvalidRequestError, match="'r' is open"):
            client.submit(make_request("r"))
        stream.abort()
        with pytest.raises(InvalidRequestError, match="'r' is open"):
            client.submit(make_request("r"))
        await all_of(stream)
        again = make_request("r", max_tokens=5)
        assert tokens_of(await all_of(client.submit(again))) == run_alone(again, 20_000).token_ids


async def test_a_rejection_is_the_only_event() -> None:
    async with running(max_running_requests=1, max_queued_requests=0, context_length=20_000) as client:
        [too_long] = await all_of(client.submit(make_request("long", 20_000)))
        assert too_long.finish_reason is FinishReason.ERROR
        assert "context length of 20000" in (too_long.error or "")
        stream = client.submit(make_request("first", max_tokens=10_000))
        await anext(stream)
        [refused] = await all_of(client.submit(make_request("second")))
        assert refused.finish_reason is FinishReason.ERROR
        assert (refused.error or "").startswith("queue full")


async def test_a_flush_is_safe_while_requests_run() -> None:
    prompt = list(range(40))
    async with running(context_length=600) as client:

        async def cached_tokens(name: str) -> int:
            usage = (await all_of(client.submit(make_request(name, prompt, max_tokens=2))))[-1].usage
            assert usage is not None
            return usage.cached_tokens

        assert await cached_tokens("first") == 0
        assert await cached_tokens("second") == 32, "two whole pages"
        long = make_request("long", prompt, max_tokens=500)
        stream = client.submit(long)
        begun = await anext(stream)
        await client.flush_cache()
        assert await cached_tokens("third") == 0, "running requests keep their pages, but no lookup finds them"
        assert tokens_of([begun, *await all_of(stream)]) == run_alone(long, 600).token_ids
        assert await cached_tokens("fourth") == 32
        assert await client.flush_cache() > 0
        stats = await client.refresh_stats()
        assert stats.integrity_errors == ()
        assert (stats.num_free_pages, stats.num_evictable_pages) == (stats.num_pages, 0)


async def test_kill_ends_every_stream_once_with_the_reason() -> None:
    async with running(context_length=20_000, max_running_requests=1) as client:
        streams = [client.submit(make_request(f"r{i}", max_tokens=10_000)) for i in range(3)]
        await anext(streams[0])
        os.kill(client.pid, signal.SIGKILL)
        reason = await client.on_death
        assert reason == "engine process ended with code -9 (SIGKILL)"
        assert client.health == reason
        for stream in streams:
            events = await all_of(stream)
            assert events[-1].finish_reason is FinishReason.ERROR
            assert events[-1].error == reason
            assert sum(event.finish_reason is not None for event in events) == 1
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.submit(make_request("late"))
        for ask in (client.refresh_stats, client.flush_cache):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await ask()


async def test_a_failing_step_ends_the_engine_with_its_reason() -> None:
    async with running("broken") as client:
        events = await all_of(client.submit(make_request("r", max_tokens=10)))
        assert events[-1].finish_reason is FinishReason.ERROR
        assert "code 1: a step failed: RuntimeError: the device is on fire" in (events[-1].error or "")
        assert "on fire" in await client.on_death


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("unfit", ConfigError, r"^page_size is 3; make it a power of two$"),
        ("cramped", ConfigError, r"^no memory is left$"),
        ("nowhere", ModelNotFoundError, r"^there is no model called nowhere$"),
        ("buggy", EngineDeadError, r"failed to start: RuntimeError: that was not foreseen"),
        ("gone", EngineDeadError, r"ended with code 7 before it was ready"),
    ],
)
async def test_errors_at_start_up_are_raised_by_launch(model: str, kind: type[JaxserveError], message: str) -> None:
    with pytest.raises(kind, match=message):
        await EngineClient.launch(EngineConfig(model=model, log_level="error"), module=MODULE)
    assert psutil.Process().children() == []


async def test_shutdown_leaves_nothing_behind(sockets: Path) -> None:
    async with running(context_length=20_000) as client:
        stream = client.submit(make_request("r", max_tokens=10_000))
        await anext(stream)
        assert len(list(sockets.iterdir())) == 1
        process = psutil.Process(client.pid)
        await client.shutdown()
        assert not process.is_running()
        assert list(sockets.iterdir()) == []
        last = (await all_of(stream))[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.usage is not None
        assert last.usage.prompt_tokens == 4
        assert not client.on_death.done()
        with pytest.raises(EngineDeadError, match="shut down"):
            client.submit(make_request("late"))


async def test_shutdown_ends_a_stuck_engine_by_force(capfd: pytest.CaptureFixture[str]) -> None:
    async with running("stuck") as client:
        client.submit(make_request("r"))
        while "stuck" not in capfd.readouterr().err:
            await asyncio.sleep(0)
        process = psutil.Process(client.pid)
        await client.shutdown(timeout=0.0)
        assert not process.is_running()


async def test_the_watchdog_reports_only_a_lack_of_progress(capfd: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    stacks: list[str] = []

    def has_stacks() -> bool:
        stacks.append(capfd.readouterr().err)
        return "Event().wait()" in "".join(stacks)

    async with running("stuck", clock=lambda: now, watchdog_timeout=0.4, soft_watchdog_timeout=0.2) as client:
        now = 1000.0
        await until(lambda: client.health is None)  # it is idle and sends signs of life
        client.submit(make_request("r"))
        now = 1000.3
        assert client.health is None
        now = 1000.5
        assert client.health == "no step finished for 0.4 s while 1 requests are open"
        with pytest.raises(EngineUnresponsiveError, match="no step finished"):
            client.submit(make_request("another"))
        with pytest.raises(EngineUnresponsiveError, match="no step finished"):
            await client.flush_cache(timeout=60.0)
        await until(has_stacks)  # of the engine process
        await client.shutdown(timeout=0.0)
    async with running(clock=lambda: now, watchdog_timeout=300.0, context_length=20_000) as client:
        stream = client.submit(make_request("r", max_tokens=10_000))
        now += 299.0
        await anext(stream)
        now += 299.0
        assert client.health is None, "a step resets it"


async def test_a_frozen_idle_engine_is_unhealthy() -> None:
    now = 0.0
    async with running(clock=lambda: now, watchdog_timeout=300.0) as client:
        await until(lambda: client._is_idle)
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: psutil.Process(client.pid).status() == psutil.STATUS_STOPPED)
        client._receive()
        now = 11.0
        assert client.health is None
        for ask in (client.flush_cache, client.refresh_stats, client.start_profile, client.stop_profile):
            with pytest.raises(EngineUnresponsiveError, match="the idle engine sent no sign of life for 10 s"):
                await ask(timeout=60.0)
        now = 31.0
        assert client.health == "the idle engine sent no sign of life for 30 s"
        now = 301.0
        assert client.health == "the engine sent nothing for 300 s"
        with pytest.raises(EngineUnresponsiveError, match="sent nothing for 300 s"):
            client.submit(make_request("r"))
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: client.health is None)
        assert await client.flush_cache() == 0
        request = make_request("r", max_tokens=5)
        assert tokens_of(await all_of(client.submit(request))) == run_alone(request, 64).token_ids


async def test_a_call_fails_if_the_engine_freezes_meanwhile() -> None:
    now = 0.0
    async with running(clock=lambda: now) as client:
        await until(lambda: client._is_idle)
        os.kill(client.pid, signal.SIGSTOP)
        asking = asyncio.ensure_future(client.flush_cache(timeout=60.0))
        await until(lambda: client._answers)
        now = 11.0
        with pytest.raises(EngineUnresponsiveError, match="sent no sign of life for 10 s"):
            await asking
        await client.shutdown(timeout=0.0)


JUNK: list[Any] = [None, True, -1, 0, 2**31, 2**64 - 1, 1e308, float("nan"), "", "a\0b", "r" * 5000, b"\xff", {}]


async def test_no_command_ends_the_engine(sockets: Path) -> None:
    """Send each command with invalid values in each field, and frames that are no commands."""
    async with running(profile_dir=str(sockets / "profiles"), context_length=600) as client:
        stream = client.submit(make_request("long", max_tokens=500))
        good = make_request("r", max_tokens=1)
        commands = [
            Add([good]),
            Abort(["nobody"]),
            ReadStats(0, 10**6),
            FlushCache(0, 10**6),
            StartProfile(0, 10**6, "mine", 1, False),
            StopProfile(0, 10**6),
        ]
        frames = [b"", b"\xc1", msgspec.msgpack.encode(["Add", [{"request_id": 5}]])]
        for command in commands:
            fields = msgspec.to_builtins(command, builtin_types=(bytes,))
            for place in range(1, len(fields)):
                for junk in JUNK:
                    # Answers to another API process would be lost; no command of this client names one.
                    if not (place == 1 and len(fields) > 2 and type(junk) is int):
                        frames.append(msgspec.msgpack.encode([*fields[:place], junk, *fields[place + 1 :]]))
        for name in (field.name for field in msgspec.structs.fields(type(good)) if field.name != "client"):
            builtin = msgspec.to_builtins(good)
            frames += [msgspec.msgpack.encode(["Add", [{**builtin, name: junk}]]) for junk in JUNK]
        for frame in frames:
            client._transport._commands.send(frame)
        assert (await client.refresh_stats(timeout=60.0)).integrity_errors == ()
        assert tokens_of(await all_of(stream)) == run_alone(make_request("long", max_tokens=500), 600).token_ids
        assert not client.on_death.done()
    shutil.rmtree(sockets / "profiles")


async def test_the_sender_of_an_unreadable_command_gets_an_error() -> None:
    async with running() as client:
        bad = msgspec.structs.replace(make_request("bad", max_tokens=5), priority="high")  # type: ignore[arg-type]
        [event] = await all_of(client.submit(bad))
        assert event.finish_reason is FinishReason.ERROR
        assert "Expected `int | null`, got `str`" in (event.error or "")
        with pytest.raises(RequestFailedError, match="Expected `bool`, got `str`"):
            await client.start_profile(with_stack="yes")  # type: ignore[arg-type]


async def test_a_request_that_cannot_be_encoded_is_rejected() -> None:
    async with running() as client:
        for wrong in ({"priority": 2**64}, {"namespace": "\ud800"}, {"prompt_ids": [-(2**63) - 1]}):
            with pytest.raises(InvalidRequestError, match="can't be sent"):
                client.submit(msgspec.structs.replace(make_request("r"), **wrong))
        with pytest.raises(InvalidRequestError, match="can't be sent"):
            await client.start_profile(num_steps=10**23)
        assert client._streams == {}
        assert client._answers == {}


async def test_interrupts_are_left_to_the_parent() -> None:
    async with running() as client:
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        request = make_request("r", max_tokens=5)
        assert tokens_of(await all_of(client.submit(request))) == run_alone(request, 64).token_ids


@pytest.mark.parametrize("model", ["fine", "stuck"])
def test_the_engine_dies_with_its_parent(model: str) -> None:
    code = f"""
import asyncio
from jaxserve.config.schema import EngineConfig
from jaxserve.engine.client import EngineClient
from tests.engine.conftest import make_request
async def main():
    client = await EngineClient.launch(EngineConfig(model={model!r}, log_level='error'), module={MODULE!r})
    if {model!r} == "stuck":
        client.submit(make_request("r"))
    print(client.pid, flush=True)
    await client.on_death
asyncio.run(main())
"""
    # A killed parent can't clean up, so its directory is ours.
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        environment = {**os.environ, "TMPDIR": directory}
        command = [sys.executable, "-c", code]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment) as parent:
            assert parent.stdout is not None
            assert parent.stderr is not None
            engine = psutil.Process(int(parent.stdout.readline()))
            said = parent.stderr.readline() if model == "stuck" else None
            parent.kill()
            assert said in (None, "stuck\n")
            engine.wait(timeout=60)


def test_the_module_run_by_hand_explains_itself() -> None:
    done = subprocess.run([sys.executable, "-m", MODULE], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1
    assert "jaxserve serve" in done.stderr
    assert "Traceback" not in done.stderr


def test_in_process_engine() -> None:
    engine = InProcessEngine.start(EngineConfig(model="fine", max_queued_requests=50), module=MODULE)
    requests = {f"r{i}": make_request(f"r{i}", i + 1, max_tokens=10) for i in range(12)}
    for request in requests.values():
        engine.submit(request)
    engine.submit(make_request("long", 64))
    with pytest.raises(InvalidRequestError, match="'r1' is open"):
        engine.submit(requests["r1"])
    engine.abort(["r3", "nobody"])
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    for request_id, request in requests.items():
        own = [event for event in events if event.request_id == request_id]
        assert sum(event.finish_reason is not None for event in own) == 1
        if request_id == "r3":
            assert own[-1].finish_reason is FinishReason.ABORT
        else:
            assert tokens_of(own) == run_alone(request, 64).token_ids
    assert [event.finish_reason for event in events if event.request_id == "long"] == [FinishReason.ERROR]
    stats = engine.stats()
    assert stats.integrity_errors == ()
    assert stats.num_free_pages + stats.num_evictable_pages == stats.num_pages
    assert engine.flush_cache() == stats.num_evictable_pages > 0
    assert engine.stats().num_free_pages == stats.num_pages
    engine.submit(requests["r1"])
    engine.step()
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit(requests["r2"])


def test_in_process_engine_raises_after_a_failed_step() -> None:
    engine = InProcessEngine.start(EngineConfig(model="broken"), module=MODULE)
    engine.submit(make_request("r", max_tokens=10))
    engine.step()
    engine.step()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="on fire"):
            engine.step()
    engine.close()


async def test_a_profile_ends_while_idle_and_under_load(sockets: Path) -> None:
    profiles = sockets / "profiles"
    async with running(profile_dir=str(profiles)) as client:
        started = await client.start_profile("idle")
        assert await client.stop_profile() == started
        assert Path(started.directory).is_dir()
        with pytest.raises(InvalidRequestError, match="not within the directory") as refused:
            await client.start_profile("../elsewhere")
        assert refused.value.param == "output_dir"
        await client.start_profile(num_steps=3)
        events = await all_of(client.submit(make_request("a", max_tokens=9)))
        assert len(tokens_of(events)) == 9
        with contextlib.suppress(InvalidRequestError):  # it may have been written by now
            assert (await client.stop_profile()).num_steps == 3
        await client.start_profile("last")
    [last] = (profiles / "last" / "plugins" / "profile").iterdir()
    assert last.is_dir(), "a profile that runs at shutdown is written"
    shutil.rmtree(profiles)


async def test_profiling_without_a_directory_is_an_error() -> None:
    async with running() as client:
        with pytest.raises(InvalidRequestError, match="--profile-dir"):
            await client.start_profile()


async def test_several_requests_can_start_in_one_step() -> None:
    async with running() as client:
        streams = client.submit_all([make_request("a", max_tokens=4), make_request("b", max_tokens=4)])
        assert [len(tokens_of(await all_of(stream))) for stream in streams] == [4, 4]
        assert (await client.refresh_stats()).num_steps == 4
        client.submit_all([make_request("c", max_tokens=1)])
        with pytest.raises(InvalidRequestError, match="'d' is open already"):
            client.submit_all([make_request("d"), make_request("d")])


async def test_several_clients_of_one_engine() -> None:
    config = EngineConfig(model="fine", log_level="error", max_running_requests=4, context_length=20_000)
    processes = await EngineProcesses.launch(config, module=MODULE, num_clients=2)
    clients = [EngineClient(processes.endpoints[0], config, client=number) for number in range(2)]
    try:
        requests = [make_request(f"a{number}", number + 1, max_tokens=20) for number in range(2)]
        streams = [client.submit(request) for client, request in zip(clients, requests)]
        events = await asyncio.gather(*map(all_of, streams))
        alone = [run_alone(request, 20_000).token_ids for request in requests]
        assert [tokens_of(found) for found in events] == alone
        long = [client.submit(make_request(f"b{number}", max_tokens=10**6)) for number, client in enumerate(clients)]
        await asyncio.gather(*(anext(stream) for stream in long))
        processes.forget_client(1)
        assert (await all_of(long[1]))[-1].finish_reason is FinishReason.ABORT
        assert (await clients[0].refresh_stats()).num_running == 1, "the request of the other client still runs"
        clients[0].abort(["b0"])
        assert (await all_of(long[0]))[-1].finish_reason is FinishReason.ABORT
        assert (await clients[1].refresh_stats()).integrity_errors == ()
    finally:
        for client in clients:
            await client.shutdown()
        await processes.shutdown()
