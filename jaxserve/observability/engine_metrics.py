"""The engine's statistics as Prometheus metric families, read at each scrape.

Owns their names: vLLM's and SGLang's if they have one (both if they differ), with our prefix. Owns no numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from jaxserve.api_types import STEP_TOKEN_BUCKETS, EngineInfo, EngineStats, StageTimes
from jaxserve.observability.engine_numbers import COUNTERS, GAUGES, share
from jaxserve.observability.throughput import Throughput

PREFIX = "jaxserve:"

type Reading = tuple[EngineInfo, EngineStats]
type ValuesByLabels = dict[tuple[str, ...], float]
type Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

NO_ENGINE = EngineInfo(
    max_model_len=0,
    vocab_size=0,
    page_size=0,
    num_pages=0,
    max_running_requests=0,
    chunked_prefill_size=0,
    device="",
    dtype="",
    attention_backend="",
    num_programs=0,
    startup_seconds={},
    schedule_policy="",
)


class EngineFamilies:
    """Makes the metric families of an engine, or of one of several engine processes.

    `cache_config` holds settings of the KV cache that are reported together with its sizes.
    """

    def __init__(self, model_name: str, cache_config: Mapping[str, str]) -> None:
        self._cache_config = cache_config
        self._model_name = model_name

    def of(self, reading: Reading | None, throughput: Throughput) -> Iterator[Family]:
        """Yield the families of a reading; without one, all are 0."""
        info, stats = reading or (NO_ENGINE, EngineStats())
        for names, text, value in GAUGES:
            for name in names:
                yield self._family(GaugeMetricFamily, name, text, {(): value(info, stats)})
        for names, text, count in COUNTERS:
            for name in names:
                yield self._family(CounterMetricFamily, name, text, {(): count(info, stats)})
        text = "Tokens generated per second, over the last 10 s"
        for name in ("gen_throughput", "avg_generation_throughput_toks_per_s"):
            yield self._family(GaugeMetricFamily, name, text, {(): throughput.generation()})
        text = "Prompt tokens processed per second, over the last 10 s"
        yield self._family(GaugeMetricFamily, "avg_prompt_throughput_toks_per_s", text, {(): throughput.prompt()})
        yield from self._labelled_families(stats)
        yield self._info("engine_info", "The engine's settings, always 1", _engine_labels(info))
        text = "Sizes and settings of the KV cache, always 1"
        yield self._info("cache_config_info", text, _cache_labels(info, stats) | dict(self._cache_config))
        yield self._step_tokens(stats)
        yield from self._draft_families(stats)
        yield from self._state_families(info, stats)
        yield from self._expert_families(stats.expert_tokens)
        yield from self._stage_families(stats.stages)

    def _labelled_families(self, s: EngineStats) -> Iterator[Family]:
        waiting: ValuesByLabels = {("capacity",): s.num_waiting - s.num_deferred, ("deferred",): s.num_deferred}
        text = "Waiting requests: for room, or for a prefix that another request is computing"
        yield self._family(GaugeMetricFamily, "num_requests_waiting_by_reason", text, waiting, "reason")
        found: ValuesByLabels = {
            ("local_compute",): s.cache_query_tokens - s.cache_hit_tokens,
            ("local_cache_hit",): s.cache_hit_tokens,
        }
        text = "Prompt tokens of requests that started, to be computed or found in the prefix cache"
        yield self._family(CounterMetricFamily, "prompt_tokens_by_source", text, found, "source")
        tokens: ValuesByLabels = {
            ("prefill_compute",): s.prefill_tokens,
            ("prefill_cache",): s.cache_hit_tokens,
            ("decode",): s.generation_tokens,
        }
        text = "Tokens of prompts that were computed, or found in the prefix cache, and tokens generated"
        yield self._family(CounterMetricFamily, "realtime_tokens", text, tokens, "mode")
        steps: ValuesByLabels = {("True",): s.decode_steps - s.coarse_decode_steps, ("False",): s.coarse_decode_steps}
        text = "Decode steps within the finely spaced programs of --cuda-graph-max-bs (True) or beyond them (False)"
        yield self._family(CounterMetricFamily, "decode_steps", text, steps, "cuda_graph")
        used: ValuesByLabels = {("decode",): s.decode_rows, ("mixed",): s.mixed_tokens}
        sizes: ValuesByLabels = {("decode",): s.decode_bucket_rows, ("mixed",): s.mixed_bucket_tokens}
        if s.accepted_by_position:  # with speculation
            used["verify",], sizes["verify",] = s.verify_tokens, s.verify_bucket_tokens
        text = "Rows of decode programs, and tokens of mixed and verifying ones, that were used"
        yield self._family(CounterMetricFamily, "bucket_used", text, used, "kind")
        padding: ValuesByLabels = {kind: sizes[kind] - used[kind] for kind in used}
        text = "Rows of decode programs, and tokens of mixed and verifying ones, that were padding"
        yield self._family(CounterMetricFamily, "bucket_padding", text, padding, "kind")
        shares: ValuesByLabels = {kind: share(used[kind], sizes[kind]) for kind in used}
        text = "Share of the rows of decode programs, and of tokens of mixed and verifying ones, that were used, 0 to 1"
        yield self._family(GaugeMetricFamily, "bucket_occupancy", text, shares, "kind")

    def _state_families(self, i: EngineInfo, s: EngineStats) -> Iterator[Family]:
        """Yield the families of models that keep a state for each sequence; other models have no values."""
        gauges = (
            ("mamba_usage", "Share of the rows of states that running requests have, 0 to 1", s.state_usage),
            ("state_bytes", "Bytes that a row of states takes on each of its devices", i.state_bytes),
            ("num_states", "Rows of states, one for each running request and each snapshot of a prefix", s.num_states),
            ("num_states_used", "Rows of states that running requests have", s.num_states_used),
            ("num_state_snapshots", "Rows of states that are snapshots of prefixes", s.num_state_snapshots),
        )
        counters = (
            ("state_snapshots_taken", "Snapshots of states taken for the prefix cache", s.state_snapshots_taken),
            ("state_snapshots_found", "Requests that began with a snapshot of a state", s.state_snapshots_found),
            ("state_snapshots_evicted", "Snapshots of states lost for want of rows", s.state_snapshots_evicted),
            (
                "state_recomputed_tokens",
                "Prompt tokens with cached pages that were computed again, as no snapshot had their state",
                s.state_recomputed_tokens,
            ),
        )
        kinds: tuple[type[GaugeMetricFamily | CounterMetricFamily], ...] = GaugeMetricFamily, CounterMetricFamily
        for kind, families in zip(kinds, (gauges, counters)):
            for name, text, value in families:
                yield self._family(kind, name, text, {(): value} if s.num_states else {})

    def _expert_families(self, tokens: Sequence[Sequence[int]]) -> Iterator[Family]:
        of_experts: ValuesByLabels = {
            (str(expert),): sum(layers) for expert, layers in enumerate(zip(*filter(None, tokens)))
        }
        text = "Tokens computed by the experts of this number, added up over all layers"
        yield self._family(CounterMetricFamily, "expert_tokens", text, of_experts, "expert")
        balance: ValuesByLabels = {
            (str(layer),): share(sum(counts), len(counts) * max(counts))
            for layer, counts in enumerate(tokens)
            if counts
        }
        text = "Tokens of a layer's average expert so far, as a share of its busiest expert's, 0 to 1"
        yield self._family(GaugeMetricFamily, "expert_balance", text, balance, "layer")

    def _stage_families(self, stages: Sequence[StageTimes]) -> Iterator[Family]:
        computed: ValuesByLabels = {(str(stage),): times.compute_seconds for stage, times in enumerate(stages)}
        text = "Seconds that a pipeline stage computed"
        yield self._family(CounterMetricFamily, "stage_compute_seconds", text, computed, "stage")
        waited: ValuesByLabels = {(str(stage),): times.wait_seconds for stage, times in enumerate(stages)}
        text = "Seconds that a pipeline stage waited for the input of steps that were planned"
        yield self._family(CounterMetricFamily, "stage_wait_seconds", text, waited, "stage")

    def _step_tokens(self, s: EngineStats) -> Family:
        text = "Tokens that a step of the engine computed, of prompts and outputs"
        family = HistogramMetricFamily(f"{PREFIX}iteration_tokens_total", text, labels=["model_name"])
        bounds = [*(f"{bound}.0" for bound in STEP_TOKEN_BUCKETS), "+Inf"]
        counts = itertools.accumulate(s.steps_by_tokens)
        family.add_metric([self._model_name], list(zip(bounds, counts, strict=True)), s.step_tokens)
        return family

    def _draft_families(self, s: EngineStats) -> Iterator[Family]:
        by_position: ValuesByLabels = {(str(i),): count for i, count in enumerate(s.accepted_by_position)}
        text = "Drafts whose token of this position was accepted"
        yield self._family(
            CounterMetricFamily, "spec_decode_num_accepted_tokens_per_pos", text, by_position, "position"
        )
        text = "Tokens of a verified draft that were accepted"
        family = HistogramMetricFamily(f"{PREFIX}spec_decode_accepted_tokens_per_draft", text, labels=["model_name"])
        # A draft with token i accepted has more than i tokens accepted.
        up_to = [s.num_drafts - more for more in (*s.accepted_by_position, 0)]
        buckets = [(f"{tokens}.0", count) for tokens, count in enumerate(up_to)]
        family.add_metric([self._model_name], [*buckets, ("+Inf", s.num_drafts)], s.accepted_tokens)
        yield family

    def _info(self, name: str, text: str, labels: Mapping[str, str]) -> Family:
        return self._family(GaugeMetricFamily, name, text, {tuple(labels.values()): 1.0}, *labels)

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: ValuesByLabels,
        *labels: str,
    ) -> Family:
        """Return a family with the value for each tuple of label values, which are in the order of `labels`."""
        family = kind(PREFIX + name, text, labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self._model_name, *key], value)
        return family


def _engine_labels(info: EngineInfo) -> dict[str, str]:
    return {
        "schedule_policy": info.schedule_policy,
        "page_size": str(info.page_size),
        "chunked_prefill_size": str(info.chunked_prefill_size),
        "max_model_len": str(info.max_model_len),
        "device": info.device,
        "dtype": info.dtype,
        "attention_backend": info.attention_backend,
    }


def _cache_labels(info: EngineInfo, stats: EngineStats) -> dict[str, str]:
    """Return the labels under vLLM's names, from which autoscalers and routers read the capacity."""
    return {
        "block_size": str(info.page_size),
        "num_gpu_blocks": str(info.num_pages),
        "num_cpu_blocks": str(stats.num_host_pages),
        "kv_cache_size_tokens": str(info.max_total_num_tokens),
        "kv_cache_max_concurrency": f"{share(info.max_total_num_tokens, info.max_model_len):g}",
    }
