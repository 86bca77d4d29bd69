"""Whether runs of forced tokens are computed together."""

from __future__ import annotations

from jaxserve.engine.scheduling.forced_runs import ForcedRuns
from jaxserve.engine.scheduling.step_times import StepTimes
from jaxserve.step_plan import Chunk, StepPlan
from tests.engine.conftest import make_capacity

CAPACITY = make_capacity(num_slots=8, decode_buckets=(1, 4, 8), token_buckets=(16, 64))


def _chunk(slot: int, length: int) -> Chunk:
    return Chunk(
        request_id=f"r{slot}",
        slot=slot,
        rank=0,
        start=4,
        length=length,
        tokens=None if length == 1 else [0] * length,
        new_pages=((),),
        logits=1,
        sample=True,
    )


def _runs(*steps: tuple[list[int], float]) -> ForcedRuns:
    """Return what was measured in steps of chunks of these lengths."""
    times = StepTimes(CAPACITY)
    for lengths, seconds in steps:
        chunks = [_chunk(slot, length) for slot, length in enumerate(lengths)]
        decodes = sum(length == 1 for length in lengths)
        for _ in range(5):
            plan = StepPlan(opens=[], chunks=chunks, num_decodes=decodes, greedy=True)
            times.count_step(plan, seconds)
    return ForcedRuns(times)


def test_a_run_alone_is_computed_together_if_that_is_faster_than_its_decodes() -> None:
    runs = _runs(([1], 1.0), ([9], 5.0))
    assert [runs.together([0], [[length]]) for length in (2, 5, 6, 16)] == [False, False, True, True]


def test_beside_decodes_a_token_is_worth_a_row() -> None:
    runs = _runs(([1] * 4, 2.0), ([1, 1, 1, 9], 4.0))
    assert not runs.together([3], [[5]])
    assert runs.together([3], [[6]])
    assert runs.together([2], [[4, 4]])
    assert not runs.together([2], [[3, 3]])


def test_the_fullest_rank_decides_which_programs_run() -> None:
    runs = _runs(([1], 1.0), ([1] * 4, 2.0), ([9], 3.0), ([40], 30.0))
    assert runs.together([0, 0], [[6], [6]])
    assert not runs.together([0, 0], [[20], []])  # 19 steps of one row, or 29 more
    assert runs.together([0, 0], [[32], []])


def test_nothing_is_together_before_a_decode_was_measured_and_guesses_are_tried() -> None:
    assert not _runs().together([0], [[10]])
    assert _runs(([1], 1.0)).together([0], [[10]])


def test_one_slow_measurement_is_forgotten() -> None:
    runs = _runs(([1], 1.0), ([9], 50.0))
    assert not runs.together([0], [[10]])
    plan = StepPlan(opens=[], chunks=[_chunk(0, 1)], num_decodes=1, greedy=True)
    for _ in range(2000):
        runs._times.count_step(plan, 1.0)
    assert runs.together([0], [[10]])
