from __future__ import annotations

from typing import Any

import pytest

from jaxserve.api_types import EngineStats, StageTimes
from jaxserve.errors import JaxserveError
from jaxserve.observability.metrics import Metrics
from jaxserve.observability.sample import Sample, Settings, read_sample, read_settings
from tests.server.admin.test_metrics import INFO, STATS


def rendered(stats: EngineStats = STATS, **settings: Any) -> str:
    return Metrics('a "model"\\', lambda: (INFO, stats), **settings).render().decode()


@pytest.mark.parametrize("settings", [{}, {"other_engines": ("vllm", "sglang"), "labels": {"pod": "a", "zone": "b"}}])
def test_read_sample_parses_served_metrics(settings: dict[str, Any]) -> None:
    assert read_sample(rendered(**settings), 2.5, "gone") == Sample(
        seconds=2.5,
        running=3,
        waiting=9,
        deferred=2,
        max_running=32,
        token_usage=0.75,
        full_token_usage=1 - 28 / 40,
        swa_token_usage=0.75,
        new_token_ratio=0.65,
        generation_tokens=200,
        retractions=3,
        queried_tokens=800,
        hit_tokens=600,
        decode_steps=50,
        coarse_decode_steps=4,
        decode_used=120,
        decode_padding=40,
        num_drafts=10,
        draft_tokens=28,
        accepted_tokens=14,
        compiles_after_ready=1,
        stages=(StageTimes(9.5, 0.5), StageTimes(7.25, 2.75)),
        problem="gone",
    )


def test_a_server_of_one_stage_has_no_times_of_stages() -> None:
    assert read_sample(rendered(EngineStats()), 0.0).stages == ()


def test_settings_come_from_both_places() -> None:
    config = {"schedule_conservativeness": 0.3, "speculative_method": "ngram", "pp_layer_partition": "layers"}
    memory = {"free_bytes": 3000, "working_bytes": 1000, "memory_bound": True}
    assert read_settings(rendered(), {"engine_config": config}) == Settings(
        "lpm", 0.3, **memory, speculative_method="ngram", layer_partition="layers"
    )
    assert read_settings(rendered(labels={"pod": "a"}), None) == Settings("lpm", None, **memory)
    assert read_settings("", {"engine_config": {}}) == Settings(None, None)


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 3.0\n"])
def test_metrics_of_something_else(text: str) -> None:
    with pytest.raises(JaxserveError, match="this is not a jaxserve"):
        read_sample(text, 0.0)
