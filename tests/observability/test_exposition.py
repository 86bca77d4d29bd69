"""Checks the text of /metrics against that of prometheus_client."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from jaxserve.observability.exposition import exposition
from jaxserve.observability.metrics import Metrics
from tests.observability.test_counterparts import make


def test_it_is_what_prometheus_client_writes() -> None:
    registry = CollectorRegistry()
    odd = 'a "b"\\n\n'
    counter = Counter("c", odd, ["z", "a"], registry=registry)
    counter.labels(odd, "é").inc(2.5)
    counter.labels("", "}").inc(1e7)
    Counter("untouched", "text", ["a"], registry=registry)
    Gauge("g", "text", registry=registry).set(math.nan)
    Gauge("h", "text", ["a"], registry=registry).labels("b").set(-math.inf)
    Histogram("i_total", "text", registry=registry, buckets=(1, 2e6)).observe(3e6)
    assert exposition(registry.collect()) == generate_latest(registry).decode()


def test_all_series() -> None:
    for metrics in (make(), make(None), Metrics("m", lambda: None)):
        again = [*metrics.registry.collect()]
        registry = CollectorRegistry()
        registry.collect = lambda again=again: again  # type: ignore[method-assign, misc]
        assert exposition(again) == generate_latest(registry).decode()
