from __future__ import annotations

import pytest

from jaxserve.api_types import StageTimes
from jaxserve.observability.sample import Sample, Settings
from tests.observability.test_tuning_rules import only, rules, seen

EVEN = [(28.0, 2.0), (29.0, 1.0), (28.0, 2.0)]
UNEVEN = [(20.0, 10.0), (30.0, 0.0), (19.0, 11.0)]
IDLE = [(10.0, 20.0), (10.5, 19.5), (10.0, 20.0)]


def watched(times: list[tuple[float, float]], running: int = 100) -> list[Sample]:
    """Return samples over 30 s in which stages compute and wait for these seconds, after others before."""
    before = [(500.0 * (1 + stage), 5.0) for stage in range(len(times))]
    after = [(was[0] + now[0], was[1] + now[1]) for was, now in zip(before, times, strict=True)]
    readings = [tuple(StageTimes(*one) for one in reading) for reading in (before, before, after)]
    return seen(*({"stages": stages, "running": running} for stages in readings))


def test_stages_that_are_even_and_busy_get_no_advice() -> None:
    assert rules(watched(EVEN)) == []
    assert rules(seen({}, {})) == [], "of one stage"


def test_a_stage_that_computes_longer_should_have_fewer_layers() -> None:
    advice = only(watched(UNEVEN), Settings("lpm", 1.0, layer_partition="memory"))
    assert advice.rule == "uneven stages"
    assert advice.figure == (
        "of stages 0 to 2, stage 1 computed 1.30 times as long as the average; they were busy 67%/100%/63% of the time"
    )
    assert advice.what_to_do.startswith(
        "Set --pp-layer-partition (it is memory) to the number of layers of each stage: about 77% of its present ones "
        "for stage 1"
    )
    assert "(it is" not in only(watched(UNEVEN)).what_to_do, "a server that doesn't say"
    assert rules(watched([(25.0, 5.0), (30.0, 0.0), (25.0, 5.0)])) == [], "a little more is no harm"
    assert rules(watched([(0.1, 0.0), (0.9, 0.0), (0.1, 0.0)])) == [], "too short to judge by"


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_requests_leave_all_stages_waiting(ranks: int) -> None:
    settings = Settings("lpm", 1.0, num_ranks=ranks)
    advice = only(watched(IDLE, running=3 * ranks - 1), settings)
    assert advice.rule == "too few requests for the stages"
    assert advice.figure.startswith(
        f"the stages were busy 33%/35%/33% of the time, with {3 * ranks - 1} running requests (median)"
    )
    assert f"at least {3 * ranks} to keep all stages busy" in advice.figure
    assert "--tp-size in place of --pp-size" in advice.what_to_do
    assert rules(watched(IDLE, running=3 * ranks), settings) == [], "there are enough"
    assert rules(watched(EVEN, running=2), settings) == [], "they wait little"
