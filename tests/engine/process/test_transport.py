from __future__ import annotations

import os
import select
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from jaxserve.api_types import EngineStats, FinishReason, TokenEvent
from jaxserve.engine.core.loop import EngineLoop
from jaxserve.engine.kv_cache.cache_events import CacheCleared, CacheEvent, PagesStored
from jaxserve.engine.process.main import _CommandServer
from jaxserve.engine.process.transport import (
    Abort,
    Add,
    ClientTransport,
    Command,
    EngineTransport,
    FlushCache,
    Idle,
    Message,
    ReadStats,
    Shutdown,
    StatsReading,
    StepEvents,
)
from jaxserve.engine.scheduling.scheduler import Scheduler
from tests.engine.conftest import make_capacity, make_request
from tests.engine.fake_executor import FakeExecutor, run_alone


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        yield Path(directory)


def _receive(client: ClientTransport, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        select.select([client], [], [], 60)
        messages += client.receive()
    return messages


def _commands(engine: EngineTransport, count: int) -> list[Command]:
    commands: list[Command] = []
    while len(commands) < count:
        commands += engine.receive(wait=True) or []
    return commands


def test_each_client_gets_its_own_events_in_one_message_per_step(sockets: Path) -> None:
    commands = f"ipc://{sockets}/commands"
    addresses = [f"ipc://{sockets}/client-{i}" for i in range(2)]
    parent_pipe, parent = os.pipe()
    scheduler = Scheduler(make_capacity(), chunked_prefill_size=32, max_prefill_tokens=32, max_num_batched_tokens=64)
    loop = EngineLoop(scheduler, FakeExecutor(make_capacity()), overlap=False)
    with (
        ClientTransport(commands, addresses[0]) as first,
        EngineTransport(commands, addresses, parent_pipe) as engine,
        ClientTransport(commands, addresses[1]) as second,
    ):
        mine = [make_request(name, max_tokens=3, client=0) for name in ("a", "b")]
        other = make_request("c", max_tokens=3, client=1)
        first.send(Add(mine))
        first.send(ReadStats(0, 7))
        server = _CommandServer(loop, engine)
        for command in _commands(engine, 2):
            server._execute(command)
        second.send(Add([other, make_request("a", client=1)]))
        second.send(Abort(["nobody"]))
        for command in _commands(engine, 2):
            server._execute(command)
        while loop.has_work:
            server._route(loop.step())
            server._send_step()
        [reading, *steps] = _receive(first, 4)
        assert isinstance(reading, StatsReading)
        assert reading.number == 7
        assert [{event.request_id for event in step.events} for step in steps if isinstance(step, StepEvents)] == [
            {"a", "b"}
        ] * 3
        others = [step for step in _receive(second, 3) if isinstance(step, StepEvents)]
        assert [event.request_id for event in others[0].events] == ["a", "c"], "the rejection goes to the second client"
        assert others[0].events[0].finish_reason is FinishReason.ERROR
        tokens = [token for step in others for event in step.events for token in event.token_ids]
        assert tokens == run_alone(other, 64).token_ids
    os.close(parent)
    os.close(parent_pipe)


class _Published:
    """A publisher that keeps what it is told to publish."""

    def __init__(self) -> None:
        self.batches: list[list[CacheEvent]] = []

    def publish(self, events: list[CacheEvent]) -> None:
        self.batches.append(events)


def test_each_rank_has_its_events_published_once_a_turn_and_only_if_there_are_any() -> None:
    capacity = make_capacity(num_ranks=2, num_slots=1)
    scheduler = Scheduler(
        capacity, chunked_prefill_size=4, max_prefill_tokens=4, max_num_batched_tokens=8, record_cache_events=True
    )
    loop = EngineLoop(scheduler, FakeExecutor(capacity), overlap=False)
    requests = [make_request("a", 12, max_tokens=2), make_request("b", 4, max_tokens=9)]
    publishers = [_Published(), _Published()]
    transport = _Scripted([Add(requests)], [FlushCache(0, 1)], [], None)
    _CommandServer(loop, transport, publishers=publishers).run()  # type: ignore[arg-type]
    kinds = [[[type(event) for event in batch] for batch in one.batches] for one in publishers]
    assert kinds == [[[PagesStored]] * 3 + [[CacheCleared]], [[PagesStored]] * 2 + [[CacheCleared]]]


def test_the_end_of_the_parent_wakes_the_engine(sockets: Path) -> None:
    parent_pipe, parent = os.pipe()
    with EngineTransport(f"ipc://{sockets}/commands", [], parent_pipe) as engine:
        assert engine.receive(wait=False) == []
        os.close(parent)
        assert engine.receive(wait=True) is None
    os.close(parent_pipe)


def test_messages_wait_for_a_client_that_has_not_connected_yet(sockets: Path) -> None:
    parent_pipe, parent = os.pipe()
    commands, address = f"ipc://{sockets}/commands", f"ipc://{sockets}/client-0"
    message = StepEvents([TokenEvent("a", [1, 2])], EngineStats(num_steps=3))
    with EngineTransport(commands, [address], parent_pipe) as engine:
        engine.send(0, message)
        with ClientTransport(commands, address) as client:
            assert _receive(client, 1) == [message]
    os.close(parent)
    os.close(parent_pipe)


class _Scripted:
    """A transport that returns commands given in advance."""

    num_clients = 1

    def __init__(self, *turns: list[Command] | None) -> None:
        self.turns = list(turns)
        self.waits: list[bool] = []
        self.sent: list[Message] = []

    def receive(self, *, wait: bool, timeout: float | None = None) -> list[Command] | None:
        assert timeout == 1.0, "only the next heartbeat may wake it up"
        self.waits.append(wait)
        assert len(self.waits) < 20, "the loop doesn't end"
        # No command arrives while there is work.
        return self.turns.pop(0) if wait else []

    def send(self, client: int, message: Message) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("end", [None, [Shutdown()]])
def test_the_engine_sleeps_when_idle_and_only_then(end: list[Command] | None) -> None:
    scheduler = Scheduler(make_capacity(), chunked_prefill_size=32, max_prefill_tokens=32, max_num_batched_tokens=64)
    loop = EngineLoop(scheduler, FakeExecutor(make_capacity()), overlap=False)
    transport = _Scripted([Add([make_request("a", max_tokens=3)])], [Abort(["nobody"])], [], end)
    _CommandServer(loop, cast(EngineTransport, transport)).run()
    assert transport.waits == [True, False, False, True, True, True]
    assert [type(message) for message in transport.sent] == [StepEvents] * 3 + [Idle], "one message per step"
