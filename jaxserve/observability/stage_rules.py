"""The tuning rules about pipeline stages: whether they compute equally long, and whether requests keep them busy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from jaxserve.api_types import StageTimes
from jaxserve.observability.sample import Sample, Settings
from jaxserve.observability.stage_times import busy_text, times_since
from jaxserve.observability.tuning_advice import TuningAdvice

UNEVEN = 1.25
"""A stage that computes this many times as long as the average one holds up the others."""
IDLE = 0.6
"""Stages that compute a smaller share of the time mostly wait."""
ENOUGH_SECONDS = 1.0
"""Stages are judged if the one that computes longest has computed for this long."""


def uneven_stages(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if one stage computes much longer than the others, which wait for it."""
    times = _times(samples)
    seconds = [stage.compute_seconds for stage in times]
    if not times or max(seconds) < UNEVEN * statistics.mean(seconds):
        return None
    longest = seconds.index(max(seconds))
    share = statistics.mean(seconds) / max(seconds)
    now = f" (it is {settings.layer_partition})" if settings.layer_partition else ""
    return TuningAdvice(
        "uneven stages",
        f"of stages 0 to {len(times) - 1}, stage {longest} computed {1 / share:.2f} times as long as the average; they "
        f"were busy {busy_text(times)} of the time",
        f"Set --pp-layer-partition{now} to the number of layers of each stage: about {share:.0%} of its present ones "
        f"for stage {longest}, and the rest for the others if their memory allows it.",
    )


def stages_without_requests(samples: Sequence[Sample], settings: Settings) -> TuningAdvice | None:
    """Advise if all stages mostly wait, because fewer requests run than there are stages."""
    times = _times(samples)
    running = statistics.median([sample.running for sample in samples if sample.running] or [0])
    wanted = len(times) * settings.num_ranks
    if not times or max(stage.busy for stage in times) >= IDLE or running >= wanted:
        return None
    return TuningAdvice(
        "too few requests for the stages",
        f"the stages were busy {busy_text(times)} of the time, with {running:.0f} running requests (median): a request "
        f"is in one stage at a time, so that it takes at least {wanted} to keep all stages busy",
        "Send more requests at once. If there are always few, divide the model with --tp-size in place of --pp-size: "
        "all devices then compute each request together.",
    )


def _times(samples: Sequence[Sample]) -> tuple[StageTimes, ...]:
    """Return the times of the stages while the server was watched, () if there are none to judge by."""
    times = times_since(samples[-1].stages, samples[0].stages)
    return times if max((stage.compute_seconds for stage in times), default=0.0) >= ENOUGH_SECONDS else ()
