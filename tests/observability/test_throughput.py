from __future__ import annotations

import pytest

from jaxserve.api_types import EngineStats
from jaxserve.observability.throughput import WINDOW, Throughput


def reading(generated: int, prompt: int = 0) -> EngineStats:
    return EngineStats(generation_tokens=generated, prompt_tokens=prompt)


def test_one_reading_gives_no_rate() -> None:
    throughput = Throughput()
    assert throughput.generation() == 0.0
    throughput.record(5.0, reading(100))
    assert throughput.generation() == 0.0


def test_a_rate_is_a_difference_over_time() -> None:
    throughput = Throughput()
    throughput.record(5.0, reading(100, 1000))
    throughput.record(7.0, reading(150, 1300))
    assert throughput.generation() == 25.0
    assert throughput.prompt() == 150.0


def test_two_readings_of_one_moment() -> None:
    throughput = Throughput()
    throughput.record(5.0, reading(100))
    throughput.record(5.0, reading(150))
    assert throughput.generation() == 0.0


def test_readings_older_than_the_window_do_not_count() -> None:
    throughput = Throughput()
    for second in range(60):
        throughput.record(float(second), reading(100 * min(second, 30)))
        # 100 per second while tokens come, then less with every second, and nothing in the end
        busy = min(second, 30) - max(second - WINDOW, 0)
        assert throughput.generation() == pytest.approx(max(busy, 0) * 100 / min(max(second, 1), WINDOW))
