"""The scheduler's counters, and the `EngineStats` made of them.

It owns the totals since the start, and reads current sizes from the request table. It decides nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxserve.api_types import STEP_TOKEN_BUCKETS, EngineStats
from jaxserve.engine.scheduling.bucket_stats import BucketStats
from jaxserve.engine.scheduling.request import Request
from jaxserve.engine.scheduling.request_table import RequestTable
from jaxserve.engine.speculation.speculation import Speculation
from jaxserve.step_plan import Capacity, StepPlan


class SchedulerStats:
    """Totals that only grow; `EngineStats` describes each."""

    def __init__(self, capacity: Capacity) -> None:
        self.buckets = BucketStats(capacity)
        self.num_steps = 0
        self.num_retractions = 0
        self.num_priority_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.forced_tokens = 0
        self.cache_query_tokens = 0
        self.cache_hit_tokens = 0
        self.prefill_tokens = 0
        self.step_tokens = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKEN_BUCKETS) + 1)

    @property
    def num_preemptions(self) -> int:
        """The number of times a running request was sent back to the queue, for any reason."""
        return self.num_retractions + self.num_priority_preemptions

    def count_step(self, plan: StepPlan) -> None:
        """Count a planned step."""
        self.buckets.count(plan)
        decodes = plan.num_decodes
        prefill_tokens = sum(chunk.length for chunk in plan.chunks[decodes:])
        num_tokens = decodes + prefill_tokens
        self.prefill_tokens += prefill_tokens
        self.step_tokens += num_tokens
        self._steps_by_tokens[bisect.bisect_left(STEP_TOKEN_BUCKETS, num_tokens)] += 1

    def count_starts(self, requests: Iterable[Request], now: float) -> None:
        """Count queue time and cache hits of the starting requests that start for the first time."""
        for request in requests:
            if request.num_starts == 1:
                request.queue_seconds = now - request.arrived_at
                self.cache_query_tokens += request.num_prompt_tokens
                self.cache_hit_tokens += request.num_cached_tokens or 0

    def of_prompts(self) -> dict[str, Any]:
        """Return the counters of steps and of prompts, by the names of `EngineStats`."""
        return {
            "num_steps": self.num_steps,
            "prompt_tokens": self.prompt_tokens,
            "prefill_tokens": self.prefill_tokens,
            "mixed_tokens": self.buckets.used["mixed"],
            "mixed_bucket_tokens": self.buckets.sizes["mixed"],
            "step_tokens": self.step_tokens,
            "steps_by_tokens": tuple(self._steps_by_tokens),
        }

    def engine_stats(
        self, table: RequestTable, speculation: Speculation | None, *, new_token_ratio: float, num_deferred: int
    ) -> EngineStats:
        """Return all counters and sizes. The last plan deferred `num_deferred` waiting requests."""
        buckets, ranks = self.buckets, table.ranks
        tiers = [rank.cache.tier for rank in ranks]
        states = [rank.cache.states for rank in ranks if rank.cache.states is not None]
        num_waiting = table.num_waiting
        stats = EngineStats(
            num_running=table.num_running,
            num_waiting=num_waiting,
            num_deferred=min(num_deferred, num_waiting),
            num_queued_tokens=table.num_queued_tokens,
            num_finished=table.num_finished,
            num_free_pages=sum(rank.pool.num_free for rank in ranks),
            num_evictable_pages=sum(rank.cache.num_evictable for rank in ranks),
            num_pages=sum(rank.pool.num_pages for rank in ranks),
            num_window_pages=_by_group([window.num_pages for window in rank.windows] for rank in ranks),
            num_free_window_pages=_by_group([window.num_available for window in rank.windows] for rank in ranks),
            new_token_ratio=new_token_ratio,
            num_preemptions=self.num_preemptions,
            num_retractions=self.num_retractions,
            generation_tokens=self.generation_tokens,
            forced_tokens=self.forced_tokens,
            cache_query_tokens=self.cache_query_tokens,
            cache_hit_tokens=self.cache_hit_tokens,
            num_host_pages=sum(tier.num_pages for tier in tiers),
            num_host_pages_used=sum(tier.num_used for tier in tiers),
            host_save_pages=sum(tier.num_saved for tier in tiers),
            host_load_pages=sum(tier.num_loaded for tier in tiers),
            num_states=sum(one.pool.num_states for one in states),
            num_states_used=sum(one.pool.num_used for one in states),
            num_state_snapshots=sum(one.pool.num_snapshots for one in states),
            state_snapshots_taken=sum(one.num_taken for one in states),
            state_snapshots_found=sum(one.num_found for one in states),
            state_snapshots_evicted=sum(one.pool.num_evicted for one in states),
            state_recomputed_tokens=sum(one.num_recomputed_tokens for one in states),
            decode_steps=buckets.decode_steps_by_rows.total(),
            coarse_decode_steps=buckets.coarse_decode_steps,
            decode_rows=buckets.used["decode"],
            decode_bucket_rows=buckets.sizes["decode"],
            verify_tokens=buckets.used["verify"],
            verify_bucket_tokens=buckets.sizes["verify"],
            **self.of_prompts(),
        )
        counts = {} if speculation is None else speculation.counts()
        usage = max(stats.full_token_usage, stats.swa_token_usage)
        return msgspec.structs.replace(stats, token_usage=usage, **counts)


def _by_group(ranks: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Return the sum over all ranks of each KV group with a window."""
    return tuple(map(sum, zip(*ranks)))
