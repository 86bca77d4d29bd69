from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.results.compare import Comparison, compare
from jaxserve.bench.results.run_file import as_run, read_runs
from jaxserve.errors import ConfigError
from tests.bench.result_files import serve_result, written


def of(a: Any, b: Any, **options: Any) -> Comparison:
    sides = [[as_run(f"{name}{i}.json", one) for i, one in enumerate(side)] for name, side in (("a", a), ("b", b))]
    return compare(*sides, **options)


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {row.metric: row.verdict for row in comparison.rows}


@pytest.mark.grid
def test_equal_runs_show_no_difference() -> None:
    for seed in range(20):
        found = verdicts(of([serve_result(2 * seed)], [serve_result(2 * seed + 1)]))
        assert set(found.values()) <= {"no difference beyond noise", "can't tell"}, (seed, found)


def test_only_real_changes_are_found() -> None:
    found = verdicts(of([serve_result(0)], [serve_result(1, itl=0.023)]))
    assert found["median_itl_ms"] == found["mean_tpot_ms"] == found["output_throughput"] == "slower"
    assert found["median_ttft_ms"] == "no difference beyond noise"
    assert verdicts(of([serve_result(0)], [serve_result(1, itl=0.017)]))["output_throughput"] == "faster"


def test_values_come_from_the_files() -> None:
    a, b = serve_result(0), serve_result(1, ttft=0.2)
    for row in of([a], [b]).rows:
        if row.interval is not None:
            assert 0.9 < row.interval.low / (row.b / row.a) < 1.0 < row.interval.high / (row.b / row.a) < 1.1
    row = next(row for row in of([a], [b]).rows if row.metric == "mean_ttft_ms")
    assert (row.a, row.b) == pytest.approx((a["mean_ttft_ms"], b["mean_ttft_ms"]))
    assert row.worse_by == pytest.approx(100 * (b["mean_ttft_ms"] / a["mean_ttft_ms"] - 1))


def test_several_runs_use_the_spread_between_runs() -> None:
    """Each run is exact to a percent, but the runs differ by ten: the second comparison must take this into account."""
    calm = [serve_result(i, itl=0.02) for i in range(3)]
    wild = [serve_result(i + 3, itl=itl) for i, itl in enumerate((0.020, 0.024, 0.027))]
    assert verdicts(of(calm[:1], wild[1:2]))["mean_tpot_ms"] == "slower"
    assert verdicts(of(calm, wild))["mean_tpot_ms"] == "no difference beyond noise"
    slower = [serve_result(i + 6, itl=0.022) for i in range(3)]
    assert verdicts(of(calm, slower))["mean_tpot_ms"] == "slower"


def test_a_quantile_needs_values_beyond_it() -> None:
    rows = {row.metric: row for row in of([serve_result(0)], [serve_result(1, ttft=0.2)]).rows}
    assert rows["p99_ttft_ms"].verdict == "can't tell"
    assert "200 values" in rows["p99_ttft_ms"].why
    assert rows["p99_itl_ms"].verdict == "no difference beyond noise"


def test_without_raw_requests_there_is_no_verdict() -> None:
    bare = [{k: v for k, v in serve_result(i, itl=0.02 + i / 50).items() if not isinstance(v, list)} for i in range(2)]
    comparison = of(bare[:1], bare[1:])
    assert set(verdicts(comparison).values()) == {"can't tell"}
    assert "--save-detailed" in comparison.rows[0].why


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"request_rate": 4.0}, "request_rate is inf"),
        ({"max_concurrency": 4}, "max_concurrency is 8"),
        ({"ramp_up_strategy": "linear"}, "ramp_up_strategy is None"),
        ({"num_prompts": 100}, "num_prompts is 200"),
        ({"total_input_tokens": 200 * 32}, "mean input tokens of a request: 16.0"),
    ],
)
def test_different_loads_are_refused_with_their_differences(change: dict[str, Any], says: str) -> None:
    other = serve_result(1) | change
    with pytest.raises(ConfigError, match=says):
        of([serve_result(0)], [other])
    forced = of([serve_result(0)], [other], force=True)
    assert says in forced.differences[0]


def test_an_interrupted_run_is_noted() -> None:
    comparison = of([serve_result(0)], [serve_result(1) | {"interrupted": True}])
    assert any("b0.json was interrupted" in note for note in comparison.notes)


def test_burstiness_is_ignored_without_a_rate() -> None:
    of([serve_result(0)], [serve_result(1) | {"burstiness": 0.5}])
    rates = [serve_result(i) | {"request_rate": 2.0, "burstiness": 1.0 - i / 2} for i in range(2)]
    with pytest.raises(ConfigError, match="burstiness"):
        of(rates[:1], rates[1:])


def test_failed_requests_are_noted_and_not_averaged() -> None:
    comparison = of([serve_result(0)], [serve_result(0, requests=180, failed=20) | {"num_prompts": 200}])
    assert comparison.failed_share == (0.0, 0.1)
    assert any("20 requests of B failed (10.0%)" in note for note in comparison.notes)
    assert "10.0% of B's requests failed" in comparison.regressions(50)[0]
    [run] = [as_run("b", serve_result(0, requests=180, failed=20))]
    assert run.requests is not None
    assert len(run.requests) == 180


def test_regressions_are_those_beyond_noise_and_the_limit() -> None:
    comparison = of([serve_result(0)], [serve_result(1, itl=0.0236)])
    assert any(text.startswith("output_throughput") for text in comparison.regressions(5))
    assert comparison.regressions(50) == []


def test_latency_and_throughput_results_are_read_too() -> None:
    def latency(seconds: float) -> dict[str, Any]:
        values = [seconds * (1 + i % 5 / 100) for i in range(30)]
        return {"avg_latency": sum(values) / 30, "latencies": values, "percentiles": {"50": seconds * 1.02}}

    assert verdicts(of([latency(1.0)], [latency(1.2)]))["avg_latency"] == "slower"

    def throughput(rate: float) -> dict[str, Any]:
        return {
            "elapsed_time": 100 / rate, "num_requests": 100, "total_num_tokens": 12800,
            "requests_per_second": rate, "tokens_per_second": 128 * rate,
        }  # fmt: skip

    runs = [[throughput(rate) for rate in rates] for rates in ((5.0, 5.05, 4.95), (6.0, 6.05, 5.95))]
    assert verdicts(of(*runs)) == {"requests_per_second": "faster", "tokens_per_second": "faster"}
    with pytest.raises(ConfigError, match="bench latency and bench throughput measure different things"):
        of([latency(1.0)], [throughput(5.0)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "no JSON object"),
        ('{"foo": 1}', "not a result that can be compared"),
        ('{"request_throughput": 1, "completed": "x", "duration": 1}', "broken result"),
    ],
)
def test_files_without_results_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}.*{says}"):
        read_runs(path)


def test_a_file_may_hold_one_run_per_line(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{i}.json", serve_result(i)) for i in range(2)]
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join(Path(path).read_text() for path in paths))
    assert [run.figures for run in read_runs(both)] == [read_runs(Path(path))[0].figures for path in paths]
