from __future__ import annotations

import random

import pytest

from jaxserve.engine.scheduling.policy import LPM_MAX_WAITING, MAX_OVERTAKEN, Policy, WaitingQueue, choose_victim
from jaxserve.engine.scheduling.request import Request
from tests.engine.conftest import make_request


def _request(arrival: int, *, prompt: int = 4, outputs: int = 0, priority: int = 0) -> Request:
    source = make_request(f"r{arrival}", prompt)
    options = {"arrival": arrival, "arrived_at": 0.0, "max_new_tokens": 10, "priority": priority}
    request = Request(source, sampling=source.sampling, **options)  # type: ignore[arg-type]
    request.output_ids = [0] * outputs
    return request


def _order(queue: WaitingQueue) -> list[int]:
    return [request.arrival for request in queue.in_order()]


def test_requeued_requests_go_first_by_arrival() -> None:
    queue = WaitingQueue()
    requests = [_request(i) for i in range(6)]
    for request in requests:
        queue.add(request)
    for request in requests[:4]:
        assert next(queue.in_order()) is request
        queue.remove(request)
    for i in (1, 3, 0):
        queue.requeue(requests[i])
    assert _order(queue) == [0, 1, 3, 4, 5] == [request.arrival for request in queue]
    queue.remove(requests[1])
    queue.remove(requests[4])
    assert _order(queue) == [0, 3, 5]
    assert len(queue) == 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_tokens_of_waiting_requests_are_counted(policy: Policy) -> None:
    queue = WaitingQueue(policy)
    requests = [_request(i, prompt=10 + i) for i in range(3)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    assert queue.num_tokens == 22
    requests[1].num_fill_tokens = 19  # a retracted request computes its output again
    queue.requeue(requests[1])
    assert queue.num_tokens == 41
    for request in requests:
        queue.remove(request)
    assert queue.num_tokens == 0


def test_lpm_takes_the_longest_cached_prefix_first_and_ties_by_arrival() -> None:
    cached = {0: 0, 1: 32, 2: 16, 3: 32}
    queue = WaitingQueue("lpm", lambda request: cached[request.arrival])
    for i in cached:
        queue.add(_request(i))
    assert _order(queue) == [1, 3, 2, 0]


@pytest.mark.parametrize(("waiting", "first"), [(LPM_MAX_WAITING, LPM_MAX_WAITING - 1), (LPM_MAX_WAITING + 1, 0)])
def test_lpm_is_fcfs_while_more_than_128_wait(waiting: int, first: int) -> None:
    queue = WaitingQueue("lpm", lambda request: request.arrival)
    for i in range(waiting):
        queue.add(_request(i))
    assert next(queue.in_order()).arrival == first


def test_the_shortest_prefill_first() -> None:
    queue = WaitingQueue("shortest-prefill-first")
    for i, prompt in enumerate([9, 3, 5, 3]):
        queue.add(_request(i, prompt=prompt))
    assert _order(queue) == [1, 3, 2, 0]
    assert _order(queue) == [1, 3, 2, 0], "iterating changes nothing"


def test_a_higher_priority_goes_first_also_among_requeued_requests() -> None:
    queue = WaitingQueue("priority")
    requests = [_request(i, priority=priority) for i, priority in enumerate([0, 7, -1, 7])]
    for request in requests:
        queue.add(request)
    assert _order(queue) == [1, 3, 0, 2]
    queue.remove(requests[0])
    queue.requeue(requests[0])
    assert _order(queue) == [1, 3, 0, 2]


def test_random_order_depends_on_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        queue = WaitingQueue("random", seed=seed)
        for i in range(20):
            queue.add(_request(i))
        orders.append(_order(queue))
    assert sorted(orders[0]) == list(range(20)) != orders[0]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "shortest-prefill-first", "random"])
def test_no_request_is_overtaken_by_more_than_the_bound(policy: Policy) -> None:
    """The first request has the longest prompt and nothing cached, while others keep arriving."""
    rng = random.Random(0)
    queue = WaitingQueue(policy, lambda request: request.arrival)
    arrived: dict[int, Request] = {}
    overtaken = dict.fromkeys(range(2000), 0)
    for arrival in range(600):
        for i in (2 * arrival, 2 * arrival + 1):
            arrived[i] = _request(i, prompt=50 if i == 0 else rng.randint(1, 9))
            queue.add(arrived[i])
        # Half as many start as arrive, but the queue stays below the limit of lpm.
        for _ in range(1 if len(queue) < LPM_MAX_WAITING - 2 else 2):
            started = next(queue.in_order())
            queue.remove(started)
            for request in queue:
                overtaken[request.arrival] += request.arrival < started.arrival
    assert max(overtaken.values()) <= MAX_OVERTAKEN
    assert policy == "fcfs" or max(overtaken.values()) > MAX_OVERTAKEN / 2


def test_the_victim_has_fewest_outputs_then_the_longest_prompt_then_came_last() -> None:
    assert choose_victim([_request(1, outputs=2), _request(2, outputs=1)]).arrival == 2
    assert choose_victim([_request(1, prompt=9), _request(2, prompt=5)]).arrival == 1
    assert choose_victim([_request(1), _request(2)]).arrival == 2
    assert choose_victim([_request(1, priority=3), _request(2, outputs=5)], by_priority=True).arrival == 2
