from __future__ import annotations

import msgspec
import pytest

from jaxserve.api_types import EngineInfo, EngineStats, StageTimes
from jaxserve.engine.client.aggregate import merge_info, merge_stats

INFO = EngineInfo(
    max_model_len=64,
    vocab_size=100,
    page_size=16,
    num_pages=10,
    max_running_requests=8,
    chunked_prefill_size=32,
    device="fake",
    dtype="float32",
    attention_backend="reference",
    num_programs=5,
    startup_seconds={"weights": 1.0, "programs": 2.0},
    num_compiled_programs=5,
    free_bytes=100,
    working_bytes=7,
)


def test_infos_are_merged() -> None:
    other = msgspec.structs.replace(
        INFO, startup_seconds={"weights": 3.0, "programs": 0.5}, num_compiled_programs=0, free_bytes=60, working_bytes=9
    )
    together = merge_info([INFO, other])
    assert (together.num_pages, together.max_running_requests, together.max_total_num_tokens) == (20, 16, 320)
    assert (together.max_model_len, together.page_size, together.num_programs) == (64, 16, 5)
    assert together.startup_seconds == {"weights": 3.0, "programs": 2.0}
    assert (together.num_compiled_programs, together.free_bytes, together.working_bytes) == (5, 60, 9)


def test_counts_are_added() -> None:
    counts = [name for name, value in msgspec.structs.asdict(EngineStats()).items() if type(value) is int]
    assert len(counts) > 20
    readings = [EngineStats(**{name: scale * at for at, name in enumerate(counts)}) for scale in (1, 10)]
    together = merge_stats(readings)
    assert [getattr(together, name) for name in counts] == [11 * at for at in range(len(counts))]


def test_steps_are_added_by_their_size() -> None:
    zeros = (0,) * 11
    together = merge_stats(
        [EngineStats(steps_by_tokens=(1, 2, 3, *zeros)), EngineStats(steps_by_tokens=(4, 0, 1, *zeros))]
    )
    assert together.steps_by_tokens == (5, 2, 4, *zeros)


def test_accepted_drafts_are_added_by_position() -> None:
    readings = [EngineStats(accepted_by_position=(5, 2)), EngineStats(accepted_by_position=(1, 1))]
    assert merge_stats(readings).accepted_by_position == (6, 3)


def test_times_are_added_by_stage() -> None:
    readings = [
        EngineStats(stages=(StageTimes(1.0, 0.5), StageTimes(2.0, 0.25))),
        EngineStats(stages=(StageTimes(4.0, 1.0), StageTimes(8.0, 2.0))),
    ]
    assert merge_stats(readings).stages == (StageTimes(5.0, 1.5), StageTimes(10.0, 2.25))
    assert merge_stats([EngineStats(), *readings]).stages == merge_stats(readings).stages, "one has sent nothing yet"
    assert merge_stats([EngineStats(), EngineStats()]).stages == ()


def test_shares_are_of_all_pages() -> None:
    full = EngineStats(num_pages=10, num_free_pages=0, num_evictable_pages=0, token_usage=1.0, new_token_ratio=0.2)
    empty = EngineStats(num_pages=10, num_free_pages=6, num_evictable_pages=4, new_token_ratio=0.6)
    together = merge_stats([full, empty])
    assert together.token_usage == 0.5
    assert together.new_token_ratio == pytest.approx(0.4)
    assert merge_stats([EngineStats(), EngineStats()]).token_usage == 0.0


def test_integrity_errors_name_the_replica() -> None:
    readings = [
        EngineStats(decode_steps_by_rows={1: 2, 4: 1}, expert_tokens=((1, 2), (3, 4))),
        EngineStats(
            decode_steps_by_rows={4: 5},
            integrity_errors=("page 3 is owned twice",),
            expert_tokens=((10, 20), (30, 40)),
        ),
    ]
    together = merge_stats(readings)
    assert together.integrity_errors == ("DP1: page 3 is owned twice",)
    assert together.decode_steps_by_rows == {1: 2, 4: 6}
    assert together.expert_tokens == ((11, 22), (33, 44))
