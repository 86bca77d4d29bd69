"""The Pareto front of throughput against latency."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(latency: Sequence[float], throughput: Sequence[float]) -> list[int]:
    """Return the indices, by rising latency, of the points that no other point dominates.

    A point dominates if its latency is not higher and its throughput not lower, and at least one of them is better.
    """
    order = sorted(range(len(latency)), key=lambda i: (latency[i], -throughput[i]))
    front: list[int] = []
    for i in order:
        best = front[-1] if front else None
        if best is None or throughput[i] > throughput[best] or (
            throughput[i] == throughput[best] and latency[i] == latency[best]
        ):  # fmt: skip
            front.append(i)
    return front
