"""Which points no other one beats in both directions: the front of throughput against latency."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(latency: Sequence[float], throughput: Sequence[float]) -> list[int]:
    """Indices of the points that no other has both a lower (or equal) latency and a higher (or equal) throughput than,
    one of them better; by rising latency."""
    order = sorted(range(len(latency)), key=lambda i: (latency[i], -throughput[i]))
    front: list[int] = []
    for i in order:
        best = front[-1] if front else None
        if best is None or throughput[i] > throughput[best] or (
            throughput[i] == throughput[best] and latency[i] == latency[best]
        ):  # fmt: skip
            front.append(i)
    return front
