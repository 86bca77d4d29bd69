"""Adds, subtracts and writes the times of pipeline stages. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.api_types import StageTimes


def times_since(now: Sequence[StageTimes], before: Sequence[StageTimes]) -> tuple[StageTimes, ...]:
    """Return the times of each stage minus those of `before`, which is () if there were none yet."""
    return tuple(
        StageTimes(new.compute_seconds - old.compute_seconds, new.wait_seconds - old.wait_seconds)
        for new, old in zip(now, before or (StageTimes(),) * len(now), strict=True)
    )


def add_times(replicas: Iterable[Sequence[StageTimes]]) -> tuple[StageTimes, ...]:
    """Return the times of each stage, added up over replicas. Replicas without times yet don't count."""
    return tuple(
        StageTimes(sum(one.compute_seconds for one in same), sum(one.wait_seconds for one in same))
        for same in zip(*filter(None, replicas), strict=True)
    )


def busy_text(times: Iterable[StageTimes]) -> str:
    """Return the share of the time that each stage computed, in percent."""
    return "/".join(f"{stage.busy:.0%}" for stage in times)
