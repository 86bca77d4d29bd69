"""Several engines' descriptions and readings as those of one: what a server with replicas tells of its engine.

Counts add up; what is the same on all, or a limit that each has for itself, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from jaxserve.api_types import EngineInfo, EngineStats


def replica_name(number: int) -> str:
    """What a replica is called in log lines and errors."""
    return f"DP{number}"


def merged_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What the replicas are together. Memory is that of the device that has least left."""
    phases = dict.fromkeys(phase for info in infos for phase in info.startup_seconds)
    return msgspec.structs.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_pages=sum(info.num_pages for info in infos),
        max_running_requests=sum(info.max_running_requests for info in infos),
        startup_seconds={phase: max(info.startup_seconds.get(phase, 0.0) for info in infos) for phase in phases},
        num_compiled_programs=sum(info.num_compiled_programs for info in infos),
        free_bytes=min(info.free_bytes for info in infos),
        working_bytes=max(info.working_bytes for info in infos),
        memory_bound=any(info.memory_bound for info in infos),
    )


def merged_stats(readings: Sequence[EngineStats]) -> EngineStats:
    """What the replicas have done and hold together. The share of the cache in use is that of all pages."""
    sums = {
        name: sum(getattr(reading, name) for reading in readings)
        for name in EngineStats.__struct_fields__
        if isinstance(getattr(readings[0], name), int)
    }
    num_pages = sums["num_pages"]
    available = sums["num_free_pages"] + sums["num_evictable_pages"]
    return EngineStats(
        **sums,
        token_usage=1.0 - available / num_pages if num_pages else 0.0,
        new_token_ratio=sum(reading.new_token_ratio for reading in readings) / len(readings),
        steps_by_tokens=tuple(map(sum, zip(*(reading.steps_by_tokens for reading in readings), strict=True))),
        integrity_errors=_named(reading.integrity_errors for reading in readings),
        decode_steps_by_rows=dict(sum((Counter(reading.decode_steps_by_rows) for reading in readings), Counter())),
    )


def _named(problems: Iterable[Sequence[str]]) -> tuple[str, ...]:
    return tuple(f"{replica_name(number)}: {problem}" for number, found in enumerate(problems) for problem in found)
