"""The Prometheus metrics of a server. Owns the registry of the API process, and measures the latencies of requests.

The engine's own numbers are read at each scrape (`all_series`). Latencies are measured here, in the process that
answers the client. Nothing is global: two servers in one process have two registries. Several API processes of one
server count in files that each of them adds up when it is asked, so that all answer the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from jaxserve.api_types import EngineRequest, FinishReason, ReplicaStats, Usage
from jaxserve.errors import QUEUE_LIMITS
from jaxserve.observability.all_series import AllSeries, PartReadings
from jaxserve.observability.engine_metrics import PREFIX, EngineFamilies, Reading
from jaxserve.observability.exposition import exposition
from jaxserve.observability.throughput import Throughput

# vLLM's buckets, in seconds, so that its dashboards can be used.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
E2E_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
HTTP_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

# Any other method counts as "other": its name would be a label that clients choose.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

FILES_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder of the files in which several API processes count; `prometheus_client` reads it when imported."""


class Metrics:
    """The metrics of one server.

    `reading` returns the engine's latest statistics, or None while there is no engine, and `replicas` those of each of
    its processes; `cache_config` holds settings of the KV cache for `cache_config_info`. `files` is the folder that
    $PROMETHEUS_MULTIPROC_DIR names, if this is one of several API processes. There are series under the names of
    `other_engines` too. All series get `labels`. `bounds` are those of histograms, by name without prefix.
    """

    def __init__(
        self,
        model_name: str,
        reading: Callable[[], Reading | None],
        cache_config: Mapping[str, str] | None = None,
        replicas: Callable[[], Sequence[ReplicaStats]] = tuple,
        files: str | None = None,
        *,
        other_engines: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        bounds: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        own = CollectorRegistry()
        self._reading = reading
        self._throughput = Throughput()
        self._replicas = replicas
        self._replica_throughputs: defaultdict[int, Throughput] = defaultdict(Throughput)
        self.registry = CollectorRegistry()
        self.registry.register(
            AllSeries(
                model_name,
                EngineFamilies(model_name, cache_config or {}),
                own if files is None else MultiProcessCollector(None, files),
                lambda: (self._reading(), self._throughput),
                self._parts,
                other_engines,
                labels,
            )
        )
        self._samples: WeakValueDictionary[str, _Samples] = WeakValueDictionary()
        bounds = bounds or {}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(PREFIX + name, text, ["model_name"], buckets=bounds.get(name, buckets), registry=own)
            return made.labels(model_name)

        self.ttft = histogram("time_to_first_token_seconds", "From request to first token", TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Between two tokens of a request", ITL_BUCKETS)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "A request's mean time between two tokens", ITL_BUCKETS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From request to last token", E2E_BUCKETS)
        self.queue = histogram(
            "request_queue_time_seconds", "Waiting in the engine, before the first run", TTFT_BUCKETS
        )
        self.prefill = histogram("request_prefill_time_seconds", "From the first run to the first token", TTFT_BUCKETS)
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last", E2E_BUCKETS)
        self.inference = histogram(
            "request_inference_time_seconds", "From the first run to the last token", E2E_BUCKETS
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", TOKEN_BUCKETS)
        self.computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that weren't cached", TOKEN_BUCKETS
        )
        self.longest_sample = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sample of a prompt", TOKEN_BUCKETS
        )
        self.generation_tokens = histogram("request_generation_tokens", "Tokens generated for a request", TOKEN_BUCKETS)
        self.max_tokens = histogram("request_params_max_tokens", "max_tokens of a sequence", TOKEN_BUCKETS)
        self.n = histogram("request_params_n", "Samples requested for a prompt", N_BUCKETS)
        finished = Counter(
            f"{PREFIX}request_success",
            "Sequences that ended, by finish reason",
            ["model_name", "finished_reason"],
            registry=own,
        )
        self.finished = {reason: finished.labels(model_name, reason.value) for reason in FinishReason}
        rejections = Counter(
            f"{PREFIX}admission_rejections",
            "Requests that were refused, by the setting that limits the queue",
            ["model_name", "reason"],
            registry=own,
        )
        self.rejections = {setting: rejections.labels(model_name, setting) for setting in QUEUE_LIMITS}

        def gauge(name: str, text: str) -> Gauge:
            made = Gauge(PREFIX + name, text, ["model_name"], registry=own, multiprocess_mode="livesum")
            return made.labels(model_name)

        self._stored = gauge("num_stored_responses", "Responses that are kept, to be continued or read by id")
        self._stored_bytes = gauge("stored_response_bytes", "Size of all responses that are kept")
        self._evicted = Counter(
            f"{PREFIX}stored_responses_evicted",
            "Responses that made room for others, or were not used for too long",
            ["model_name"],
            registry=own,
        ).labels(model_name)
        names = ["model_name", "handler", "method"]
        self._http_requests = Counter(
            f"{PREFIX}http_requests",
            "Answered HTTP requests by route and status, which is none if the client had gone",
            [*names, "status"],
            registry=own,
        )
        self._http_responses = Counter(
            f"{PREFIX}http_responses",
            "Answers by route and status code",
            [*names, "status_code"],
            registry=own,
        )
        self._http_seconds = Histogram(
            f"{PREFIX}http_request_duration_seconds",
            "From a request's head to the end of its answer, by route",
            names,
            buckets=bounds.get("http_request_duration_seconds", HTTP_BUCKETS),
            registry=own,
        )
        self._model_name = model_name

    def clock(self, arrival: float, request: EngineRequest) -> SequenceClock:
        """Return the clock of a sequence that is submitted now; its request arrived at `arrival` (`perf_counter()`)."""
        samples = None
        if request.sampling.n > 1 and not request.pooled:
            samples = self._samples.setdefault(request.group_id, _Samples(request.sampling.n))
        return SequenceClock(self, arrival, request, samples)

    def record_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Record an HTTP request to the route `handler`; `status` is 0 if no answer was begun."""
        method = method if method in _METHODS else "other"
        group = f"{status // 100}xx" if status else "none"
        self._http_requests.labels(self._model_name, handler, method, group).inc()
        if status:
            self._http_responses.labels(self._model_name, handler, method, str(status)).inc()
        self._http_seconds.labels(self._model_name, handler, method).observe(seconds)

    def record_stored_responses(self, num: int, num_bytes: int, num_evicted: int) -> None:
        """Record how many responses this process keeps now, and how many more were evicted."""
        self._stored.set(num)
        self._stored_bytes.set(num_bytes)
        self._evicted.inc(num_evicted)

    @property
    def generation_throughput(self) -> float:
        """The tokens generated per second, over the last seconds."""
        return self._throughput.generation()

    def replica_throughput(self, number: int) -> float:
        """Return the tokens that a replica generated per second, over the last seconds."""
        return self._replica_throughputs[number].generation()

    def _parts(self) -> PartReadings:
        reading, replicas = self._reading(), self._replicas()
        if reading is None:
            return []
        if len(replicas) < 2:
            return [(reading, self._throughput)]
        slots = reading[0].max_running_requests // len(replicas)
        return [
            (
                (replace(reading[0], num_pages=one.stats.num_pages, max_running_requests=slots), one.stats),
                self._replica_throughputs[number],
            )
            for number, one in enumerate(replicas)
        ]

    def tick(self) -> None:
        """Record a reading for the throughputs. Call it about once a second."""
        reading, now = self._reading(), time.perf_counter()
        if reading is not None:
            self._throughput.record(now, reading[1])
        for number, replica in enumerate(self._replicas()):
            self._replica_throughputs[number].record(now, replica.stats)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self.tick()
        return exposition(self.registry.collect()).encode()


class _Samples:
    """How many samples of a prompt haven't ended, and the tokens of the longest that has. Their clocks own it."""

    def __init__(self, num: int) -> None:
        self.num_open = num
        self.most_tokens = 0


class SequenceClock:
    """Measures the latencies of one sequence. Only the first `record_end` counts. A pooled one has no tokens."""

    __slots__ = (
        "_arrival", "_cached_tokens", "_ended", "_first", "_last", "_metrics", "_num_tokens",
        "_request", "_samples", "_started", "_submitted",
    )  # fmt: skip

    def __init__(self, metrics: Metrics, arrival: float, request: EngineRequest, samples: _Samples | None) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._submitted = time.perf_counter()
        self._request = request
        self._samples = samples
        self._cached_tokens: int | None = None
        self._num_tokens = 0
        self._started: float | None = None
        self._first: float | None = None
        self._last = 0.0
        self._ended = False

    def record_tokens(self, count: int, queue_seconds: float | None = None, usage: Usage | None = None) -> None:
        """Record `count` tokens that arrived at once.

        The first call gives the seconds that the request waited in the engine's queue, and its token counts.
        """
        if usage is not None:
            self._cached_tokens = usage.cached_tokens
        if queue_seconds is not None:
            self._metrics.queue.observe(queue_seconds)
            self._started = self._submitted + queue_seconds
        if count < 1:
            return
        now = time.perf_counter()
        self._num_tokens += count
        if self._first is None:
            self._first = self._last = now
            self._metrics.ttft.observe(now - self._arrival)
            if self._started is not None:
                self._metrics.prefill.observe(max(now - self._started, 0.0))
            count -= 1
        if count:
            gap = (now - self._last) / count
            for _ in range(count):
                self._metrics.itl.observe(gap)
            self._last = now

    def record_end(self, reason: FinishReason) -> None:
        """Record the end of the sequence."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.finished[reason].inc()
        metrics.e2e.observe(time.perf_counter() - self._arrival)
        request = self._request
        metrics.prompt_tokens.observe(len(request.prompt_ids))
        if self._cached_tokens is not None:
            metrics.computed_tokens.observe(len(request.prompt_ids) - self._cached_tokens)
        if request.pooled:
            return
        metrics.max_tokens.observe(request.sampling.max_tokens)
        if request.sample == 0:
            metrics.n.observe(request.sampling.n)
        metrics.generation_tokens.observe(self._num_tokens)
        self._record_longest_sample()
        if self._first is None:
            return
        decoding = self._last - self._first
        metrics.decode.observe(decoding)
        if self._num_tokens > 1:
            metrics.tpot.observe(decoding / (self._num_tokens - 1))
        if self._started is not None:
            metrics.inference.observe(max(self._last - self._started, 0.0))

    def _record_longest_sample(self) -> None:
        samples = self._samples
        if samples is None:
            self._metrics.longest_sample.observe(self._num_tokens)
            return
        samples.num_open -= 1
        samples.most_tokens = max(samples.most_tokens, self._num_tokens)
        if not samples.num_open:
            self._metrics.longest_sample.observe(samples.most_tokens)
