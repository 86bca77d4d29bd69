"""How many draft tokens are verified."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.engine.speculation.speculation import Speculation
from tests.engine.conftest import make_capacity

CAPACITY = make_capacity(num_slots=8, decode_buckets=(1, 8), verify_buckets=(8, 16, 32), max_drafts=7)


@dataclasses.dataclass
class _Request:
    acceptance: float | None = None


def _measured(speculation: Speculation, *steps: tuple[int, int, float]) -> Speculation:
    for rows, tokens, seconds in steps:
        for _ in range(5):
            speculation.count_step(rows, tokens, seconds)
    return speculation


def _lengths(speculation: Speculation, *ranks: list[_Request]) -> list[list[int]]:
    lengths = speculation.choose(ranks)
    return [[0 if lengths is None else lengths[speculation.level(one)] for one in requests] for requests in ranks]


def test_accepted_drafts_are_verified_whole_and_rejected_ones_not_at_all() -> None:
    speculation = _measured(Speculation(CAPACITY), (1, 1, 1.0), (1, 8, 1.3))
    assert _lengths(speculation, [_Request(0.95)]) == [[7]]
    assert _lengths(speculation, [_Request(0.05)]) == [[0]]


def test_nothing_is_verified_if_it_costs_more_than_it_yields() -> None:
    speculation = _measured(Speculation(CAPACITY), (1, 1, 1.0), (1, 8, 9.0))
    assert _lengths(speculation, [_Request(0.95)]) == [[0]]


def test_one_slow_step_does_not_turn_drafts_off_for_good() -> None:
    speculation, request = _measured(Speculation(CAPACITY), (1, 1, 1.0)), _Request(0.95)
    speculation.count_step(1, 8, 30.0)
    assert _lengths(speculation, [request]) == [[0]]
    for _ in range(5000):
        verifies = _lengths(speculation, [request]) != [[0]]
        speculation.count_step(1, 8 if verifies else 1, 1.3 if verifies else 1.0)
    assert speculation._costs.of((8, 7)) == 1.3
    speculation.count_step(1, 1, 1.0)
    assert _lengths(speculation, [request]) == [[7]]


def test_drafts_that_cost_too_much_are_seldom_measured_again() -> None:
    speculation, request = _measured(Speculation(CAPACITY), (1, 1, 1.0), (1, 8, 16.0)), _Request(0.95)
    measured = 0
    for _ in range(5000):
        verifies = _lengths(speculation, [request]) != [[0]]
        speculation.count_step(1, 8 if verifies else 1, 16.0 if verifies else 1.0)
        measured += verifies
    assert 0 < measured <= 10


def test_a_step_that_drafts_do_not_fill_is_not_chosen_for_its_old_cost() -> None:
    speculation = _measured(Speculation(CAPACITY), (8, 32, 2.0), (8, 16, 1.5), (8, 8, 1.0))
    for _ in range(3000):
        speculation.count_step(8, 8, 1.0)
    speculation.count_step(8, 16, 1.5)
    speculation.count_step(8, 8, 1.0)
    # The drafts of one request fit 16 tokens, which is what would run.
    assert _lengths(speculation, [_Request(0.5), *(_Request(0.0) for _ in range(7))]) == [[0] * 8]


def test_an_old_cost_is_measured_again_at_most_now_and_then() -> None:
    speculation = _measured(Speculation(CAPACITY), (8, 32, 3.0), (8, 16, 2.0), (8, 8, 1.0))
    requests = [_Request(0.2) for _ in range(8)]
    verified = 0
    for _ in range(5000):
        longer = sum(map(sum, _lengths(speculation, requests)))
        speculation.count_step(8, 8 + longer, 1.0 if not longer else 2.0 if longer <= 8 else 3.0)
        verified += longer > 0
    assert verified <= 20


def test_only_the_likely_drafts_take_the_room_of_a_step() -> None:
    speculation = _measured(Speculation(CAPACITY), (8, 8, 1.0), (8, 16, 1.1), (8, 32, 9.0))
    requests = [_Request(0.95), *(_Request(0.05) for _ in range(7))]
    assert _lengths(speculation, requests) == [[7, *[0] * 7]]


def test_each_rank_has_room_of_its_own() -> None:
    speculation = _measured(Speculation(CAPACITY), (4, 4, 1.0), (4, 8, 1.1), (4, 16, 9.0), (4, 32, 9.0))
    few, many = [_Request(0.95)], [_Request(0.95) for _ in range(4)]
    assert _lengths(speculation, few, many) == [[1], [1] * 4]


def test_a_decode_step_is_measured_first_and_again_after_a_while() -> None:
    speculation = Speculation(CAPACITY)
    assert _lengths(speculation, [_Request(0.95)]) == [[0]]
    _measured(speculation, (1, 1, 1.0))
    assert _lengths(speculation, [_Request(0.95)]) == [[7]]
    for _ in range(300):
        speculation.count_step(1, 8, 1.0)
    assert _lengths(speculation, [_Request(0.95)]) == [[0]]


def test_more_requests_than_the_limit_verify_nothing() -> None:
    speculation = _measured(Speculation(CAPACITY, max_requests=1), (1, 1, 1.0), (2, 2, 1.0))
    assert _lengths(speculation, [_Request(0.95)]) == [[7]]
    assert _lengths(speculation, [_Request(0.95)] * 2) == [[0, 0]]


@pytest.mark.parametrize("verified", [False, True])
def test_acceptance_follows_what_drafts_show(verified: bool) -> None:
    speculation, request = Speculation(CAPACITY), _Request(0.5)
    for _ in range(20):
        speculation.count(request, 1, 1, verified=verified)
    assert request.acceptance is not None
    assert request.acceptance > 0.9
    for _ in range(20):
        speculation.count(request, 0, 0, verified=verified)
    assert request.acceptance < 0.1
    counts = speculation.counts()
    assert counts["num_drafts"] == counts["draft_tokens"] == counts["accepted_tokens"] == (20 if verified else 0)
    assert counts["accepted_by_position"] == (20 if verified else 0, *[0] * 6)


def test_new_requests_start_as_others_fared() -> None:
    speculation = Speculation(CAPACITY)
    for _ in range(2000):
        speculation.count(_Request(0.5), 1, 1, verified=True)
    new = _Request()
    speculation.level(new)
    assert new.acceptance is not None
    assert new.acceptance > 0.9
