"""Merges the descriptions and readings of several replicas into those of one engine.

Counts are added; values that are equal on all replicas, and limits that apply to each replica, stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from jaxserve.api_types import EngineInfo, EngineStats
from jaxserve.observability.stage_times import add_times


def replica_name(number: int) -> str:
    """Return the name of a replica in log lines and errors."""
    return f"DP{number}"


def merge_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Merge the descriptions of the replicas. `free_bytes` is the smallest one."""
    phases = dict.fromkeys(phase for info in infos for phase in info.startup_seconds)
    return msgspec.structs.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_pages=sum(info.num_pages for info in infos),
        kv_groups=tuple(
            msgspec.structs.replace(same[0], num_pages=sum(one.num_pages for one in same))
            for same in zip(*(info.kv_groups for info in infos))
        ),
        max_running_requests=sum(info.max_running_requests for info in infos),
        startup_seconds={phase: max(info.startup_seconds.get(phase, 0.0) for info in infos) for phase in phases},
        num_compiled_programs=sum(info.num_compiled_programs for info in infos),
        free_bytes=min(info.free_bytes for info in infos),
        working_bytes=max(info.working_bytes for info in infos),
        memory_bound=any(info.memory_bound for info in infos),
    )


def merge_stats(readings: Sequence[EngineStats]) -> EngineStats:
    """Merge the readings of the replicas. `token_usage` is computed anew from the added pages."""
    sums = {
        name: sum(getattr(reading, name) for reading in readings)
        for name in EngineStats.__struct_fields__
        if isinstance(getattr(readings[0], name), int)
    }
    merged = EngineStats(
        **sums,
        num_window_pages=_added(reading.num_window_pages for reading in readings),
        num_free_window_pages=_added(reading.num_free_window_pages for reading in readings),
        new_token_ratio=sum(reading.new_token_ratio for reading in readings) / len(readings),
        accepted_by_position=_added(reading.accepted_by_position for reading in readings),
        steps_by_tokens=_added(reading.steps_by_tokens for reading in readings),
        integrity_errors=_with_replica_names(reading.integrity_errors for reading in readings),
        expert_tokens=tuple(_added(layers) for layers in zip(*(reading.expert_tokens for reading in readings))),
        stages=add_times(reading.stages for reading in readings),
        decode_steps_by_rows=dict(sum((Counter(reading.decode_steps_by_rows) for reading in readings), Counter())),
    )
    return msgspec.structs.replace(merged, token_usage=max(merged.full_token_usage, merged.swa_token_usage))


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*counts)))


def _with_replica_names(problems: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"{replica_name(number)}: {problem}" for number, found in enumerate(problems) for problem in found)
