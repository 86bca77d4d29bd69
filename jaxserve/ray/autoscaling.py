"""How many replicas the queues of the engines ask for. Serve calls this in its controller."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

# Of what replicas can run at once, the share that is planned for.
_TARGET = 0.8


def scale_on_queue(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas with which nothing would wait, and what to remember.

    A replica with a queue is full, so what it runs is what it can run: its slots, or fewer if the KV cache is full
    first. That number is remembered while nothing waits, and grows if a replica runs more.
    """
    seen = context.aggregated_metrics or {}
    running, waiting, slots = (seen.get(name, {}) for name in ("running", "waiting", "slots"))
    known = [replica for replica, number in slots.items() if number > 0]
    if not known:
        return context.target_num_replicas, {}
    most = max(slots[replica] for replica in known)
    full = [running.get(replica, 0.0) for replica in known if waiting.get(replica, 0.0) >= 1.0]
    capacity: float = context.policy_state.get("capacity", most)
    at_once = full or [capacity, *(running.get(replica, 0.0) for replica in known)]
    capacity = min(max(1.0, *at_once), most)
    wanted = sum(running.values()) + sum(waiting.values()) + context.total_queued_requests
    return max(1, math.ceil(wanted / (_TARGET * capacity))), {"capacity": capacity}
