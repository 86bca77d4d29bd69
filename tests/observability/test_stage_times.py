from __future__ import annotations

from jaxserve.api_types import StageTimes
from jaxserve.observability.stage_times import add_times, busy_text, times_since

NOW = (StageTimes(9.0, 3.0), StageTimes(5.0, 7.0))


def test_times_since_a_reading() -> None:
    assert times_since(NOW, (StageTimes(1.0, 1.0), StageTimes(4.0, 2.0))) == (
        StageTimes(8.0, 2.0),
        StageTimes(1.0, 5.0),
    )
    assert times_since(NOW, ()) == NOW, "all of them, if there was no reading"
    assert times_since((), ()) == ()


def test_replicas_add_their_times_by_stage() -> None:
    assert add_times([NOW, (), NOW]) == (StageTimes(18.0, 6.0), StageTimes(10.0, 14.0))
    assert add_times([(), ()]) == ()


def test_how_busy_stages_were() -> None:
    assert busy_text([*NOW, StageTimes(), StageTimes(0.0, 2.0), StageTimes(2.0, 0.0)]) == "75%/42%/0%/0%/100%"
