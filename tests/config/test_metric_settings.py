"""Checks which settings of /metrics are accepted, and what the refused ones are told."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.metric_settings import HISTOGRAMS, histogram_bounds
from jaxserve.config.server_schema import ServerConfig
from jaxserve.errors import ConfigError


def test_a_group_gives_bounds_to_its_histograms_and_a_name_counts_more() -> None:
    bounds = histogram_bounds({"request_latency": [1, 3], "queue_time_seconds": [0.5]})
    assert bounds == {
        "e2e_request_latency_seconds": (1.0, 3.0),
        "request_prefill_time_seconds": (1.0, 3.0),
        "request_decode_time_seconds": (1.0, 3.0),
        "request_inference_time_seconds": (1.0, 3.0),
        "request_queue_time_seconds": (0.5,),
    }


def test_all_names_of_histograms_are_accepted() -> None:
    assert histogram_bounds({name: [1] for name in HISTOGRAMS}).keys() == HISTOGRAMS
    theirs = ("time_to_first_token", "inter_token_latency", "request_tokens", "request_params_n")
    assert len(histogram_bounds({name: [1, 2] for name in theirs})) == 1 + 2 + 5 + 1
    assert histogram_bounds(None) == {}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"metrics_prefix": ("vllm", "tgi")}, "metrics_prefix must be one of vllm, sglang, got 'tgi'"),
        ({"extra_metric_labels": {"1a": "x"}}, "'1a' is no label; write one like pod_name"),
        ({"extra_metric_labels": {"__a": "x"}}, "'__a' is no label"),
        ({"extra_metric_labels": {"a-b": "x"}}, "'a-b' is no label"),
        ({"extra_metric_labels": {"le": "x"}}, "series have the label le already"),
        ({"extra_metric_labels": {"pod": 1}}, "pod must be a string, got 1"),
        (
            {"custom_histogram_buckets": {"iteration_tokens": [1]}},
            "no bounds can be set for 'iteration_tokens'",
        ),
        ({"custom_histogram_buckets": {"request_params_n": []}}, "must be a list of 1 to 200 numbers, got \\[\\]"),
        ({"custom_histogram_buckets": {"request_params_n": 3}}, "must be a list of 1 to 200 numbers, got 3"),
        ({"custom_histogram_buckets": {"request_params_n": [True]}}, "must have finite numbers, got True"),
        ({"custom_histogram_buckets": {"request_params_n": [1, float("inf")]}}, "must have finite numbers, got inf"),
        ({"custom_histogram_buckets": {"request_params_n": [1, "2"]}}, "must have finite numbers, got '2'"),
        ({"custom_histogram_buckets": {"request_params_n": [2, 1]}}, "request_params_n must ascend, but 1 follows 2"),
        ({"custom_histogram_buckets": {"request_params_n": [1, 1]}}, "request_params_n must ascend, but 1 follows 1"),
    ],
    ids=str,
)
def test_what_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServerConfig(**settings)
