"""Figures of handwritten records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.bench.load.client_load import ClientLoad
from jaxserve.bench.load.records import RequestRecord
from jaxserve.bench.load.run_load import LoadResult
from jaxserve.bench.results.metrics import compute_figures

IDLE = ClientLoad(0.1, 0.1, 1.0, 2.0)


def record(start: float, times: list[float], tokens: int, **changes: object) -> RequestRecord:
    made = RequestRecord(
        "r", tokens, 10, start=start, token_times=times, end=times[-1], output_tokens=tokens, status="ok"
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def figures(*records: RequestRecord, **options: object) -> dict[str, object]:
    return compute_figures(LoadResult(list(records), 100.0, 2.0, False, IDLE), **options)  # type: ignore[arg-type]


def test_latencies_of_one_request() -> None:
    seen = figures(record(100.0, [100.2, 100.3, 100.5], 3), percentiles=(50, 99.9))
    assert seen["mean_ttft_ms"] == pytest.approx(200)
    assert seen["mean_tpot_ms"] == pytest.approx(150)
    assert (seen["p50_itl_ms"], seen["std_itl_ms"]) == pytest.approx((150, 50))
    assert seen["p99.9_e2el_ms"] == pytest.approx(500)


def test_throughput_counts_only_successful_requests() -> None:
    bad = record(100.0, [109.0], 1, status="failed", error="x")
    cut = record(100.0, [108.0], 50, status="unfinished")
    seen = figures(record(100.0, [100.5, 101.0], 2), record(100.5, [101.0, 101.5], 2), bad, cut)
    assert (seen["completed"], seen["failed"], seen["unfinished"]) == (2, 1, 1)
    assert (seen["total_input_tokens"], seen["total_output_tokens"]) == (20, 4)
    assert (seen["request_throughput"], seen["output_throughput"], seen["total_token_throughput"]) == (1, 2, 12)
    assert seen["mean_ttft_ms"] == pytest.approx(500)


def test_a_chunk_counts_as_its_share_of_tokens() -> None:
    seen = figures(record(100.0, [100.1, 100.2, 101.5, 101.6], 16))
    assert seen["max_output_tokens_per_s"] == 8
    assert seen["mean_tpot_ms"] == pytest.approx(100)


def test_requests_open_at_once_are_those_that_overlap() -> None:
    seen = figures(record(100.0, [101.0], 1), record(100.5, [101.5], 1), record(101.0, [102.0], 1))
    assert seen["max_concurrent_requests"] == 2


def test_goodput_counts_requests_within_every_limit() -> None:
    fast, slow = record(100.0, [100.1, 100.2], 2), record(100.0, [100.1, 100.9], 2)
    single = record(100.0, [100.1], 1)
    assert figures(fast, slow, single, goodput={"ttft": 101, "tpot": 200})["request_goodput"] == 1.0
    assert figures(fast, slow, single, goodput={"ttft": 99})["request_goodput"] == 0.0
    assert "request_goodput" not in figures(fast)


def test_metrics_without_values_are_left_out() -> None:
    seen = figures(record(100.0, [100.1], 1, status="failed"))
    assert not [key for key in seen if key.endswith("_ms")]
    single = figures(record(100.0, [100.1], 1))
    assert "mean_ttft_ms" in single
    assert "mean_tpot_ms" not in single
    assert "mean_itl_ms" not in single
    assert "mean_tpot_ms" not in figures(record(100.0, [100.1, 100.2], 2), metrics=("ttft",))


@pytest.mark.parametrize(
    ("client", "bottleneck"),
    [(IDLE, False), (replace(IDLE, late_ms_p99=30.0), True), (replace(IDLE, cpu_fraction=0.95), True)],
)
def test_a_busy_client_is_a_bottleneck(client: ClientLoad, bottleneck: bool) -> None:
    assert client.bottleneck == bottleneck
