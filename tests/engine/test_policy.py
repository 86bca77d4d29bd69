from __future__ import annotations

from jaxserve.engine.policy import WaitingQueue, choose_victim
from jaxserve.engine.request import Request
from tests.engine.conftest import make_request


def _request(arrival: int, *, prompt: int = 4, outputs: int = 0) -> Request:
    source = make_request(f"r{arrival}", prompt)
    request = Request(source, sampling=source.sampling, arrival=arrival, max_new_tokens=10)
    request.output_ids = [0] * outputs
    return request


def test_those_put_back_go_first_in_the_order_they_came() -> None:
    queue = WaitingQueue()
    requests = [_request(i) for i in range(6)]
    for request in requests:
        queue.add(request)
    assert [queue.pop().arrival for _ in range(4)] == [0, 1, 2, 3]
    queue.put_back(requests[1])
    queue.put_back(requests[3])
    queue.put_back(requests[0])
    assert [request.arrival for request in queue] == [0, 1, 3, 4, 5]
    queue.remove(requests[1])
    queue.remove(requests[4])
    assert [request.arrival for request in queue] == [0, 3, 5]
    assert len(queue) == 3
    assert queue.peek() is requests[0]
    assert [queue.pop().arrival for _ in range(3)] == [0, 3, 5]
    assert queue.peek() is None


def test_the_victim_has_fewest_outputs_then_the_longest_prompt_then_came_last() -> None:
    assert choose_victim([_request(1, outputs=2), _request(2, outputs=1)]).arrival == 2
    assert choose_victim([_request(1, prompt=9), _request(2, prompt=5)]).arrival == 1
    assert choose_victim([_request(1), _request(2)]).arrival == 2
