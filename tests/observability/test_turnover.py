from __future__ import annotations

import pytest

from jaxserve.api_types import EngineStats
from jaxserve.observability.turnover import Turnover


def test_nothing_measured_means_that_all_that_is_inside_turns_over_in_a_second() -> None:
    turnover = Turnover()
    assert turnover.requests(8) == 8.0
    assert turnover.prompt_tokens(4000) == 4000.0


def test_until_as_many_have_ended_as_run_they_are_expected_to_end_now() -> None:
    turnover = Turnover()
    for second in range(5):
        turnover.record(second, EngineStats(num_running=8, num_waiting=4, num_finished=second), 8)
    assert turnover.requests(8) == 8 / 4


def test_a_full_server_has_the_rate_that_is_seen() -> None:
    turnover = Turnover()
    for second in range(31):
        stats = EngineStats(
            num_running=5,  # pages limit it, not slots
            num_waiting=4,
            num_finished=3 * second,
            prefill_tokens=600 * second,
            cache_hit_tokens=400 * second,
            num_queued_tokens=77,
        )
        turnover.record(second, stats, 8)
    assert turnover.requests(8) == 3.0
    assert turnover.prompt_tokens(4000) == 1000.0


def test_a_server_that_is_not_full_could_do_more() -> None:
    turnover = Turnover()
    for second in range(41):
        prefills = second % 4 == 0
        stats = EngineStats(
            num_running=2,
            num_finished=2 * second,
            prefill_tokens=100 * second,
            num_queued_tokens=30 * prefills,
        )
        turnover.record(second, stats, 8)
    assert turnover.requests(8) == pytest.approx(8.0), "two slots end two a second"
    assert turnover.prompt_tokens(1000) == pytest.approx(400.0), "prompts waited in a quarter of the time"


def test_an_idle_time_and_what_is_long_ago_do_not_count() -> None:
    turnover = Turnover()
    for second in range(1000):
        busy = second > 970
        ended = 100 * second if second < 800 else 80_000 + 5 * max(0, second - 970)
        turnover.record(second, EngineStats(num_running=8 * busy, num_waiting=busy, num_finished=ended), 8)
    assert turnover.requests(8) == pytest.approx(5.0)
