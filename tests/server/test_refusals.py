from __future__ import annotations

import heapq
import logging
import random

import pytest
from prometheus_client import CollectorRegistry, Counter

from jaxserve.api_types import EngineInfo, EngineRequest, EngineStats
from jaxserve.errors import QUEUE_LIMITS, QueueFullError
from jaxserve.server.refusals import MOST_SECONDS, Refusals, ReturnTimes
from tests.engine.conftest import make_request
from tests.server.admin.test_metrics import INFO


class Server:
    """A refusing server at a time that only tests set."""

    def __init__(self, *, slots: int = 4, most_open: int | None = None) -> None:
        self.now = 0.0
        self.stats = EngineStats()
        self.info = EngineInfo(
            **{name: getattr(INFO, name) for name in INFO.__struct_fields__} | {"max_running_requests": slots}
        )
        counter = Counter("refused", "", ["reason"], registry=CollectorRegistry())
        self.counters = {setting: counter.labels(setting) for setting in QUEUE_LIMITS}
        self.refusals = Refusals(lambda: (self.info, self.stats), most_open, self.counters, lambda: self.now)

    def refuse(self, setting: str, found: int, limit: int, requests: list[EngineRequest] | None = None) -> int:
        error = QueueFullError(setting, found, limit)
        self.refusals.count(error, requests or [make_request("r")])
        return error.retry_after


def test_refused_clients_return_as_fast_as_there_is_room() -> None:
    times = ReturnTimes()
    waits = [times.add(0.0, lacking=0, size=1, rate=20.0) for _ in range(1000)]
    assert [waits.count(second) for second in range(1, 51)] == [20] * 50
    assert times.add(30.0, lacking=0, size=1, rate=20.0) == 21
    assert times.add(1000.0, lacking=0, size=1, rate=20.0) == 1


def test_who_returned_in_vain_gets_room_that_is_not_promised() -> None:
    times = ReturnTimes()
    for _ in range(80):
        times.add(0.0, lacking=0, size=1, rate=8.0)
    again = [times.add(second, lacking=0, size=1, rate=4.0) + second for second in range(1, 10) for _ in range(4)]
    assert again == [second for second in range(11, 20) for _ in range(4)]


def test_a_higher_rate_makes_room_in_seconds_that_were_full() -> None:
    times = ReturnTimes()
    assert [times.add(0.0, lacking=0, size=1, rate=2.0) for _ in range(4)] == [1, 1, 2, 2]
    assert [times.add(0.0, lacking=0, size=1, rate=3.0) for _ in range(4)] == [1, 2, 3, 3]


def test_a_large_request_returns_when_all_of_it_has_room() -> None:
    times = ReturnTimes()
    assert times.add(0.0, lacking=0, size=8, rate=2.0) == 4
    assert times.add(0.0, lacking=0, size=1, rate=2.0) == 5
    assert ReturnTimes().add(0.0, lacking=-6, size=8, rate=2.0) == 1, "there is room for 6 of 8"


def test_a_prompt_returns_when_there_is_any_room_and_takes_all_that_follows() -> None:
    times = ReturnTimes()
    assert times.add(0.0, lacking=2500, size=3000, rate=1000.0, begins=True) == 3
    assert times.add(0.0, lacking=2500, size=10, rate=1000.0, begins=True) == 6


def test_no_client_waits_longer_than_the_most() -> None:
    times = ReturnTimes()
    waits = [times.add(0.0, lacking=0, size=1, rate=1.0) for _ in range(10_000)]
    assert max(waits) == MOST_SECONDS
    assert times.add(MOST_SECONDS, lacking=0, size=1, rate=1.0) == 1, "what is too far away is not promised"


def test_sequences_and_prompt_tokens_have_times_of_their_own() -> None:
    server = Server(slots=4)
    server.refusals.tick()
    assert [server.refuse("max_num_queued_reqs", 9, 9) for _ in range(8)] == [1] * 4 + [2] * 4
    # A queue of 1000 tokens is 500 above the limit; nothing is measured, so that the limit is computed in a second.
    prompts = [make_request("a", 400), make_request("b", 100)]
    assert [server.refuse("max_num_queued_tokens", 999, 500, prompts) for _ in range(3)] == [1, 2, 3]
    assert server.refuse("max_queued_requests", 5, 5) == 1


def test_what_is_measured_decides() -> None:
    server = Server(slots=4)
    for second in range(21):
        server.now = second
        server.stats = EngineStats(num_running=4, num_waiting=2, num_finished=second // 2)
        server.refusals.tick()
    assert [server.refuse("max_queued_requests", 2, 2) for _ in range(4)] == [2, 4, 6, 8]
    limited = Server(slots=400, most_open=2)
    for second in range(21):
        limited.now = second
        limited.stats = EngineStats(num_running=2, num_finished=second)
        limited.refusals.tick()
    assert [limited.refuse("max_num_queued_reqs", 2, 2) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("setting", "limit", "size"),
    [("max_num_queued_reqs", 3, 4), ("max_queued_requests", 3, 4), ("max_num_queued_tokens", 0, 1)],
)
def test_what_never_fits_is_told_the_most(setting: str, limit: int, size: int) -> None:
    requests = [make_request(f"r{i}") for i in range(size)]
    assert Server().refuse(setting, 0, limit, requests) == MOST_SECONDS


def test_refusals_are_counted_and_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    with caplog.at_level(logging.WARNING, "jaxserve.server"):
        for step in range(1000):
            server.now = step / 100
            server.refuse("max_num_queued_reqs", 9, 9)
    assert server.counters["max_num_queued_reqs"]._value.get() == 1000
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(": ")[2].partition(".")[0] for message in messages] == ["1", "500"]
    assert "9 requests are open and --max-num-queued-reqs is 9" in messages[0]


def simulate(arrivals: list[float], seed: int) -> tuple[list[list[bool]], float]:
    """Simulate a server with 8 slots, where 20 requests may be open and each takes 1 to 3 seconds.

    Returns of each client whether it was accepted, by visit, and when the last one was.
    """
    rng = random.Random(seed)
    limit, slots, next_tick, waiting, finished = 20, 8, 0.0, 0, 0
    server = Server(slots=slots, most_open=limit)
    ends: list[float] = []
    coming = [(at, client) for client, at in enumerate(arrivals)]
    heapq.heapify(coming)
    visits: list[list[bool]] = [[] for _ in arrivals]

    def run_until(at: float) -> None:
        nonlocal next_tick, waiting, finished
        while min([next_tick, *ends[:1]]) <= at:
            if ends and ends[0] <= next_tick:
                server.now = heapq.heappop(ends)
                finished += 1
                if waiting:
                    waiting -= 1
                    heapq.heappush(ends, server.now + rng.uniform(1.0, 3.0))
            else:
                server.now, next_tick = next_tick, next_tick + 1.0
                server.stats = EngineStats(num_running=len(ends), num_waiting=waiting, num_finished=finished)
                server.refusals.tick()
        server.now = at

    while coming:
        at, client = heapq.heappop(coming)
        run_until(at)
        num_open = len(ends) + waiting
        visits[client].append(num_open < limit)
        if num_open >= limit:
            heapq.heappush(coming, (at + server.refuse("max_num_queued_reqs", num_open, limit), client))
        elif len(ends) < slots:
            heapq.heappush(ends, at + rng.uniform(1.0, 3.0))
        else:
            waiting += 1
    return visits, server.now


def share(accepted: list[bool]) -> float:
    return sum(accepted) / len(accepted)


@pytest.mark.parametrize("seed", range(5))
def test_clients_of_a_crowd_that_wait_as_told_find_room(seed: int) -> None:
    rng = random.Random(seed)
    before = [rng.uniform(0.0, 40.0) for _ in range(100)]
    crowd = [rng.uniform(40.0, 41.0) for _ in range(400)]
    visits, ended = simulate(before + crowd, seed)
    returned = [visit[1] for visit in visits[100:] if not visit[0]]
    assert len(returned) > 350
    assert share(returned) > 0.9
    assert ended < 41 + 400 / 4 * 1.15, "four a second end at most"


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_before_anything_is_measured_finds_room_at_its_second_return(seed: int) -> None:
    rng = random.Random(seed)
    visits, ended = simulate([rng.random() for _ in range(400)], seed)
    again = [visit[2] for visit in visits if len(visit) > 2]
    assert share(again) > 0.9
    assert ended < 400 / 4 * 1.15
