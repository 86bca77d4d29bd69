"""The Prometheus metrics. Owns the registry of the API process and how a request's times are counted.

Gauges and token counters are read from the engine's own statistics when somebody scrapes; latencies are measured here,
where a client's wait is. Nothing global: two servers in one process have two registries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from jaxserve.api_types import EngineStats, FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's buckets, in seconds, so that its dashboards fit.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_GAUGES = (
    ("num_requests_running", "Requests that hold a slot of the engine", "num_running"),
    ("num_requests_waiting", "Requests that wait for a slot", "num_waiting"),
    ("token_usage", "Share of the KV cache that is in use, 0 to 1", "token_usage"),
)
_COUNTERS = (
    ("prompt_tokens", "Prompt tokens computed", "prompt_tokens"),
    ("generation_tokens", "Tokens generated", "generation_tokens"),
    ("num_preemptions", "Running requests sent back to the queue for want of KV cache", "num_preemptions"),
    (
        "compiles_after_ready",
        "Programs compiled since the server was ready; anything but 0 is a bug",
        "compiles_after_ready",
    ),
)


class Metrics:
    """The metrics of one server. `stats` gives the engine's latest reading, or None while there is no engine."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, stats))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"jaxserve:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model_name)

        self._ttft = histogram("time_to_first_token_seconds", "From request to first token", TTFT_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a request", ITL_BUCKETS)
        self._e2e = histogram("e2e_request_latency_seconds", "From request to last token", E2E_BUCKETS)
        finished = Counter(
            "jaxserve:request_success",
            "Sequences that ended, by the reason why",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(model_name, reason.value) for reason in FinishReason}

    def clock(self, arrival: float) -> SequenceClock:
        """The times of one sequence whose request came at `arrival` (`time.perf_counter()`)."""
        return SequenceClock(self, arrival)

    def render(self) -> bytes:
        """Prometheus' text format."""
        text: bytes = generate_latest(self.registry)
        return text

    def _observe_first(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def _observe_next(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def _observe_end(self, seconds: float, reason: FinishReason) -> None:
        self._e2e.observe(seconds)
        self._finished[reason].inc()


class SequenceClock:
    """Measures one sequence. Every sequence ends in exactly one `end`; later ones change nothing."""

    __slots__ = ("_arrival", "_ended", "_last", "_metrics")

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last: float | None = None
        self._ended = False

    def tokens(self, count: int) -> None:
        """`count` tokens have come at once."""
        if count < 1:
            return
        now = time.perf_counter()
        if self._last is None:
            self._metrics._observe_first(now - self._arrival)
            self._last = now
            count -= 1
        if count:
            gap = (now - self._last) / count
            for _ in range(count):
                self._metrics._observe_next(gap)
            self._last = now

    def end(self, reason: FinishReason) -> None:
        """The sequence has ended."""
        if not self._ended:
            self._ended = True
            self._metrics._observe_end(time.perf_counter() - self._arrival, reason)


class _EngineCollector:
    """Reads the engine's statistics at the moment of a scrape."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats() or EngineStats()
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], float(getattr(stats, field)))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"jaxserve:{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], float(getattr(stats, field)))
            yield counter
