"""Checks our series under other engines' names against ours, of which `tests/server/admin/test_metrics.py` knows the
values."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.api_types import EngineRequest, EngineStats, FinishReason, ReplicaStats, SamplingParams
from jaxserve.config.metric_settings import HISTOGRAMS, SERIES_LABELS
from jaxserve.observability.counterparts import Counterpart, counterparts, left_out
from jaxserve.observability.metrics import Metrics
from tests.server.admin.test_metrics import INFO, STATS

ROWS = counterparts("vllm") + counterparts("sglang")
type Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def make(stats: EngineStats | None = STATS, **settings: Any) -> Metrics:
    cache = {"cache_dtype": "auto", "enable_prefix_caching": "True", "gpu_memory_utilization": "0.9"}
    reading = None if stats is None else (INFO, stats)
    metrics = Metrics("m", lambda: reading, cache, **{"other_engines": ("vllm", "sglang")} | settings)
    for index, reason in enumerate((FinishReason.STOP, FinishReason.STOP, FinishReason.ABORT)):
        request = EngineRequest(request_id=str(index), prompt_ids=[1] * 7, sampling=SamplingParams(max_tokens=6))
        clock = metrics.clock(0.0, request)
        clock.record_tokens(2, 0.5)
        clock.record_end(reason)
    for handler, status in (("/generate", 200), ("/generate", 500), ("/v1/messages", 200)):
        metrics.record_http(handler, "POST", status, 0.25)
    return metrics


def read(metrics: Metrics) -> tuple[dict[str, str], Values]:
    """The types of all families, and the values of all samples."""
    families = list(text_string_to_metric_families(metrics.render().decode()))
    values = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    types = {family.name: family.type for family in families}
    assert len(types) == len(families), "no family is there twice"
    return types, values


def value(values: Values, name: str, **labels: str) -> float:
    return values[name, frozenset(({"model_name": "m"} | labels).items())]


@pytest.fixture(scope="module")
def scrape() -> tuple[dict[str, str], Values]:
    return read(make())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs)
def test_each_has_the_type_and_the_numbers_of_ours(row: Counterpart, scrape: tuple[dict[str, str], Values]) -> None:
    types, values = scrape
    assert types[row.theirs] == types[row.ours]
    totals: dict[str, Counter[str]] = {row.theirs: Counter(), row.ours: Counter()}
    for family, only in ((row.theirs, set()), (row.ours, set(row.only))):
        for (name, labels), number in values.items():
            suffix = name.removeprefix(family)
            if name.startswith(family) and suffix in ("", "_total", "_bucket", "_sum", "_count") and only <= labels:
                totals[family][suffix] += number
    assert totals[row.theirs] == totals[row.ours]


def test_labels_are_those_of_the_other_engine(scrape: tuple[dict[str, str], Values]) -> None:
    _, values = scrape
    sglang = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    assert value(values, "vllm:num_requests_running", engine="0") == 3
    assert value(values, "vllm:num_requests_waiting_by_reason", engine="0", reason="deferred") == 2
    assert value(values, "vllm:prompt_tokens_cached_by_source_total", engine="0", source="device") == 600
    assert value(values, "vllm:request_success_total", engine="0", finished_reason="stop") == 2
    assert value(values, "vllm:e2e_request_latency_seconds_bucket", engine="0", le="+Inf") == 3
    assert value(values, "vllm:engine_sleep_state", engine="0", sleep_state="awake") == 1
    assert value(values, "vllm:engine_sleep_state", engine="0", sleep_state="discard_all") == 0
    http = {"handler": "/generate", "method": "POST", "status": "5xx"}
    assert values["http_requests_total", frozenset(http.items())] == 1
    assert value(values, "sglang:num_queue_reqs", **sglang) == 9
    assert value(values, "sglang:queue_time_seconds_sum", **sglang) == 1.5
    assert value(values, "sglang:prompt_tokens_total", engine_type="unified") == 1000
    assert value(values, "sglang:cached_tokens_total", engine_type="unified", cache_source="total") == 600
    assert value(values, "sglang:num_requests_total", engine_type="unified") == 3
    assert value(values, "sglang:num_aborted_requests_total", engine_type="unified") == 1
    assert value(values, "sglang:cache_config_info", **sglang, page_size="16", num_pages="40") == 1
    answers = {"endpoint": "/generate", "method": "POST", "status_code": "500"}
    assert values["sglang:http_responses_total", frozenset(answers.items())] == 1
    assert values["sglang:http_requests_total", frozenset({"endpoint": "/generate", "method": "POST"}.items())] == 2


def test_each_replica_is_an_engine() -> None:
    """Their sums are ours; sizes are those of one."""
    parts = [replace(STATS, num_running=1, num_pages=30), replace(STATS, num_running=2, num_pages=10, prompt_tokens=70)]
    _, values = read(make(replicas=lambda: [ReplicaStats(number, stats) for number, stats in enumerate(parts)]))
    sglang = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
    assert [value(values, "vllm:num_requests_running", engine=str(number)) for number in (0, 1)] == [1, 2]
    assert [value(values, "sglang:num_running_reqs", **sglang, dp_rank=str(number)) for number in (0, 1)] == [1, 2]
    assert [value(values, "sglang:num_pages", **sglang, dp_rank=str(number)) for number in (0, 1)] == [30, 10]
    assert value(values, "vllm:prompt_tokens_total", engine="1") == 70
    assert value(values, "sglang:prompt_tokens_total", engine_type="unified") == 1070
    assert value(values, "vllm:engine_sleep_state", engine="1", sleep_state="awake") == 1
    assert value(values, "vllm:e2e_request_latency_seconds_count", engine="0") == 3
    blocks = {dict(labels)["num_gpu_blocks"] for name, labels in values if name == "vllm:cache_config_info"}
    assert blocks == {"30", "10"}


def test_without_an_engine_only_requests_have_series() -> None:
    _, values = read(make(None))
    names = {name for name, _ in values}
    assert "vllm:e2e_request_latency_seconds_count" in names
    of_engine = {name for name in names if re.match("(vllm|sglang):(num_|token|cache_config|engine_sleep)", name)}
    assert {name.rpartition("_")[0] for name in of_engine} == {"sglang:num_requests", "sglang:num_aborted_requests"}


def test_names_of_others_are_served_only_if_asked_for() -> None:
    for others in ((), ("vllm",), ("sglang",), ("sglang", "sglang")):
        types, _ = read(make(other_engines=others))
        prefixes = {name.partition(":")[0] for name in types if ":" in name}
        assert prefixes == {"jaxserve", *others}
        assert ("process_cpu_seconds" in types) == ("http_requests" in types) == ("vllm" in others)


def test_the_tables_agree_with_each_other() -> None:
    assert len({row.theirs for row in ROWS}) == len(ROWS)
    out = left_out("vllm") | left_out("sglang")
    assert all(out.values())
    assert not {row.theirs for row in ROWS} & out.keys()


def test_all_labels_of_series_are_known() -> None:
    """So that an extra label never hides one."""
    stats = replace(STATS, verify_tokens=1, verify_bucket_tokens=2)
    _, values = read(make(stats, replicas=lambda: [ReplicaStats(0, stats), ReplicaStats(1, stats)]))
    assert {label for _, labels in values for label, _ in labels} == SERIES_LABELS


def test_extra_labels_are_on_all_series() -> None:
    _, values = read(make(labels={"pod": 'a "b"'}))
    assert all(("pod", 'a "b"') in labels for _, labels in values)


def test_each_histogram_of_requests_can_have_other_bounds() -> None:
    types, values = read(make(bounds=dict.fromkeys(HISTOGRAMS, (0.5, 2.0, 1000.0))))
    fixed = {"jaxserve:iteration_tokens_total", "jaxserve:spec_decode_accepted_tokens_per_draft"}
    second = {"jaxserve:time_per_output_token_seconds", "jaxserve:queue_time_seconds"}
    ours = {name for name, kind in types.items() if kind == "histogram" and name.startswith("jaxserve:")}
    assert ours - fixed - second == {f"jaxserve:{name}" for name in HISTOGRAMS}
    for row in ROWS:
        if types[row.theirs] == "histogram" and row.ours not in fixed:
            bounds = {dict(labels)["le"] for name, labels in values if name == f"{row.theirs}_bucket"}
            assert bounds == {"0.5", "2.0", "1000.0", "+Inf"}
